#!/usr/bin/env python3
"""What the configuration makes of TESSERA_CUDA_ARCHS: images for good tokens, a clear refusal of bad ones, a CPU-only build
that says so where there is nothing to compile for or with."""

import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import unittest

ROOT = pathlib.Path(sys.argv.pop(1)).resolve()
HAVE_NVCC = shutil.which("nvcc") is not None or pathlib.Path("/usr/local/cuda/bin/nvcc").exists()


class CudaArchsTest(unittest.TestCase):
    def configure(self, archs, *options):
        """Exit status and output of a configuration from nothing."""
        environment = {key: value for key, value in os.environ.items() if key != "TESSERA_CUDA_ARCHS"}
        with tempfile.TemporaryDirectory() as build:
            command = ["cmake", "-S", str(ROOT), "-B", build, "-G", "Ninja", "-DTESSERA_BUILD_TESTS=OFF",
                       f"-DTESSERA_CUDA_ARCHS={archs}", "-DTESSERA_NVIDIA_SMI=/bin/false", *options]
            result = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
            commands = pathlib.Path(build, "compile_commands.json")
            self.commands = commands.read_text() if commands.exists() else ""
        return result.returncode, " ".join((result.stdout + result.stderr).split())

    def refused(self, archs, *naming):
        status, output = self.configure(archs)
        self.assertNotEqual(status, 0, output)
        for text in naming:
            self.assertIn(text, output)

    def test_without_tokens_and_gpu_the_build_says_that_it_is_cpu_only(self):
        status, output = self.configure("")
        self.assertEqual(status, 0, output)
        self.assertIn("CUDA: off, this build has the cpu backend only: no GPU here", output)
        self.assertNotIn("nvcc", self.commands)

    def test_without_nvcc_the_build_says_that_it_is_cpu_only(self):
        status, output = self.configure("90a", "-DCMAKE_DISABLE_FIND_PACKAGE_CUDAToolkit=ON")
        self.assertEqual(status, 0, output)
        self.assertIn("CUDA: off, this build has the cpu backend only: no CUDA toolkit", output)

    @unittest.skipUnless(HAVE_NVCC, "no nvcc")
    def test_every_token_has_an_image_and_only_hopper_its_tree(self):
        status, output = self.configure("80;89;90a;120a")
        self.assertEqual(status, 0, output)
        self.assertIn("images for 80 89 90a 120a", output)
        portable = [line for line in self.commands.splitlines() if "gemm_sm80_" in line and '"command"' in line]
        hopper = [line for line in self.commands.splitlines() if "gemm_sm90a_" in line and '"command"' in line]
        self.assertTrue(portable and hopper)
        for token in ("80", "89", "90a", "120a"):
            self.assertIn(f"code=sm_{token}", portable[0])
        self.assertEqual(hopper[0].count("-gencode"), 1)
        self.assertIn("code=sm_90a", hopper[0])

    @unittest.skipUnless(HAVE_NVCC, "no nvcc")
    def test_the_environment_counts_in_a_folder_configured_before(self):
        with tempfile.TemporaryDirectory() as build:
            command = ["cmake", "-S", str(ROOT), "-B", build, "-G", "Ninja", "-DTESSERA_BUILD_TESTS=OFF",
                       "-DTESSERA_NVIDIA_SMI=/bin/false"]
            for archs, said in (("", "CUDA: off"), ("90a", "images for 90a")):
                environment = {**os.environ, "TESSERA_CUDA_ARCHS": archs}
                result = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
                self.assertIn(said, result.stdout)

    @unittest.skipUnless(HAVE_NVCC, "no nvcc")
    def test_tokens_without_an_architectures_own_instructions_are_warned_of(self):
        for token in ("90", "120"):
            status, output = self.configure(token)
            self.assertEqual(status, 0, output)
            self.assertIn(f"plain {token} leaves out", output)
            self.assertNotIn("gemm_sm90a_", self.commands)

    @unittest.skipUnless(HAVE_NVCC, "no nvcc")
    def test_bad_tokens_are_refused(self):
        self.refused("75", "75: kernels need sm_80 or later")
        self.refused("hopper", "'hopper' is no architecture")
        self.refused("89a", "89a: only 90 and later")
        self.refused("999", "cannot compile for 999")


if __name__ == "__main__":
    unittest.main()
