#!/usr/bin/env python3
"""tools/sass_digest.py on small kernels: the same code is the same wherever it was compiled, any other is not."""

import pathlib
import shutil
import subprocess
import sys
import tempfile
import unittest

TOOL = pathlib.Path(sys.argv.pop(1)).resolve()
NVCC = shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"

SOURCE = """
namespace {
__global__ void Scale(float* x, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) x[i] = x[i] * FACTOR + 1.0f;
}
}  // namespace
#ifdef SECOND
__global__ void Add(float* x) { x[threadIdx.x] += 1.0f; }
#endif
void Launch(float* x, int n) { Scale<<<n / 256 + 1, 256>>>(x, n); }
"""


def missing():
    """Why nothing can be digested here."""
    if not pathlib.Path(NVCC).exists():
        return "no nvcc"
    with tempfile.NamedTemporaryFile() as nothing:
        result = subprocess.run([sys.executable, str(TOOL), "snapshot", nothing.name, nothing.name], check=False,
                                capture_output=True, text=True)
    return "no cuobjdump; tools/sass_digest.py --install" if "--install" in result.stderr else ""


@unittest.skipIf(missing(), missing())
class SassDigestTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.TemporaryDirectory()
        cls.root = pathlib.Path(cls.folder.name)
        cls.before = cls.snapshot("before", "-DFACTOR=2.0f")

    @classmethod
    def tearDownClass(cls):
        cls.folder.cleanup()

    @classmethod
    def snapshot(cls, name, *options):
        """Compiles the source in a folder of its own and digests the object."""
        folder = cls.root / name
        folder.mkdir()
        source = folder / "kernel.cu"
        source.write_text(SOURCE)
        subprocess.run([NVCC, "-arch=sm_80", "-c", *options, str(source), "-o", str(folder / "kernel.o")], check=True)
        digest = folder / "digest.json"
        subprocess.run([sys.executable, str(TOOL), "snapshot", str(digest), str(folder / "kernel.o")], check=True,
                       capture_output=True)
        return digest

    def compare(self, after):
        result = subprocess.run([sys.executable, str(TOOL), "compare", str(self.before), str(after)], check=False,
                                capture_output=True, text=True)
        return result.returncode, result.stdout + result.stderr

    def test_the_same_source_elsewhere_is_the_same(self):
        status, output = self.compare(self.snapshot("elsewhere", "-DFACTOR=2.0f"))
        self.assertEqual(status, 0, output)

    def test_another_constant_is_another_kernel(self):
        status, output = self.compare(self.snapshot("constant", "-DFACTOR=3.0f"))
        self.assertEqual(status, 1, output)
        self.assertIn("Scale", output)
        self.assertIn("changed", output)

    def test_a_kernel_more_is_told(self):
        status, output = self.compare(self.snapshot("more", "-DFACTOR=2.0f", "-DSECOND"))
        self.assertEqual(status, 1, output)
        self.assertIn("added", output)
        self.assertIn("Add", output)

    def test_what_is_no_snapshot_is_refused(self):
        broken = self.root / "broken.json"
        broken.write_text("{")
        status, output = self.compare(broken)
        self.assertEqual(status, 2, output)
        self.assertIn("broken.json", output)


if __name__ == "__main__":
    unittest.main()
