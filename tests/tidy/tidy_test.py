#!/usr/bin/env python3
"""Checks of the tree that no compiler makes: links, documented folders, forbidden includes, leftovers."""

import pathlib
import re
import subprocess
import sys
import unittest

ROOT = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else ".").resolve()
CODE = {".h", ".cc", ".cu", ".cuh"}

# Folder -> include prefixes that its files may not use: the arrows of ARCHITECTURE.md.
FORBIDDEN = {
    "common": ("server/", "client/", "kernels/", "planner/", "tests/", "tessera/v1/"),
    "kernels": ("server/", "client/", "planner/", "tests/", "tessera/v1/", "grpcpp/", "google/", "absl/"),
    "planner": ("server/", "client/", "kernels/launch/", "kernels/gemm/", "tests/", "tessera/v1/", "cuda"),
    "client": ("server/", "kernels/", "planner/", "tests/"),
    "server": ("client/", "tests/", "kernels/gemm/cpu/"),
    "tests/oracle": ("server/", "client/", "kernels/launch/", "kernels/gemm/cpu/", "kernels/catalog/",
                     "common/float_codec.h"),
}


def tracked_files():
    """Files that git tracks or would track; without git (an exported tree), all but build output."""
    listed = subprocess.run(["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=ROOT,
                            capture_output=True, text=True)
    if listed.returncode == 0:
        return [ROOT / line for line in listed.stdout.splitlines() if (ROOT / line).is_file()]
    return [path for path in ROOT.rglob("*") if path.is_file() and "build" not in path.relative_to(ROOT).parts]


FILES = tracked_files()


def files_under(folder, suffixes):
    return [f for f in FILES if f.suffix in suffixes and f.is_relative_to(ROOT / folder)]


class TidyTest(unittest.TestCase):
    def test_relative_links_resolve(self):
        for page in files_under(".", {".md"}):
            for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
                self.assertTrue((page.parent / target).exists(), f"{page.relative_to(ROOT)}: dead link {target}")

    def test_architecture_names_every_folder(self):
        named = set(re.findall(r"^\| `(\w+)/` \|", (ROOT / "ARCHITECTURE.md").read_text(), re.M))
        present = {f.relative_to(ROOT).parts[0] for f in FILES if len(f.relative_to(ROOT).parts) > 1}
        self.assertEqual(named, {folder for folder in present if not folder.startswith(".")})

    def test_includes_follow_the_arrows(self):
        for folder, prefixes in FORBIDDEN.items():
            for file in files_under(folder, CODE):
                for include in re.findall(r'^#include ["<]([^">]+)[">]', file.read_text(), re.M):
                    self.assertFalse(include.startswith(prefixes), f"{file.relative_to(ROOT)} includes {include}")

    def test_headers_are_guarded(self):
        for header in files_under(".", {".h", ".cuh"}):
            self.assertIn("#pragma once", header.read_text(), header.relative_to(ROOT))

    def test_ptx_stands_in_the_device_vocabulary(self):
        for file in files_under(".", CODE):
            if file.is_relative_to(ROOT / "kernels/device") or file.is_relative_to(ROOT / "tests"):
                continue
            self.assertNotRegex(file.read_text(), r"\basm( volatile)?\(", file.relative_to(ROOT))

    def test_no_leftovers(self):
        leftover = re.compile(r"\b(TODO|FIXME|XXX|HACK)\b|std::cerr <<.*DEBUG")
        for file in files_under(".", CODE | {".sh", ".cmake", ".toml", ".proto"}):
            for number, line in enumerate(file.read_text().splitlines(), 1):
                self.assertIsNone(leftover.search(line), f"{file.relative_to(ROOT)}:{number}: {line.strip()}")

    def test_lines_fit(self):
        for file in files_under(".", CODE | {".py", ".md", ".proto"}):
            for number, line in enumerate(file.read_text().splitlines(), 1):
                if file.suffix == ".md" and line.startswith("|"):
                    continue  # a table row cannot be broken
                self.assertLessEqual(len(line), 130, f"{file.relative_to(ROOT)}:{number}")

    def test_documented_metrics_exist(self):
        table = (ROOT / "server/telemetry/metrics.def").read_text()
        exported = set(re.findall(r'"(tessera_[a-z_]+)"', table))
        for page in files_under(".", {".md"}):
            for name in re.findall(r"\btessera_[a-z_]+_(?:total|seconds|bytes)\b", page.read_text()):
                self.assertIn(name, exported, f"{page.relative_to(ROOT)} names a metric that does not exist")

    def test_every_cmake_test_folder_is_added(self):
        added = set(re.findall(r"add_subdirectory\((\w+)\)", (ROOT / "tests/CMakeLists.txt").read_text()))
        for listing in (ROOT / "tests").glob("*/CMakeLists.txt"):
            self.assertIn(listing.parent.name, added)


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])
