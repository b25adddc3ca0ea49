#!/usr/bin/env python3
"""Runs tools/kernelgen/kernelgen.py over rows and sources of its own in a temporary tree."""

import os
import pathlib
import re
import subprocess
import sys
import tempfile
import unittest

KERNELGEN = pathlib.Path(__file__).resolve().parents[2] / "tools" / "kernelgen" / "kernelgen.py"

FAMILY = """
[family]
name = "toy"
pairs = ["bf16_bf16", "e4m3_e4m3", "s8_s8"]
outs = ["bf16", "f32"]
accums = ["fast", "exact"]
layouts = ["NT", "NN"]
accum_choice = ["e4m3_e4m3"]
"""

ROW = {
    "arch": '"cpu"', "recipe": '"plain"', "launcher": '"cpu::Plain"', "header": '"toy/plain.h"',
    "sources": '["toy/plain.h", "toy/shared.h"]', "tile": "[4, 8, 1]", "stages": "0", "workspace": '"none"',
    "pairs": '"*"', "outs": '"*"', "accums": '"*"', "layouts": '"*"',
}

VARIANT = re.compile(r'^TESSERA_TOY_VARIANT\(\w+, (\w+), "([^"]+)", "([^"]+)", "([^"]+)", '
                     r'(\d+), (\d+), (\d+), (\d+), (WorkspaceRule::\w+), "([0-9a-f]{16})"\)$')


def row_text(**changes):
    """A [[kernel]] table; a value of None leaves the key out."""
    values = {key: value for key, value in (ROW | changes).items() if value is not None}
    return "[[kernel]]\n" + "".join(f"{key} = {value}\n" for key, value in values.items())


class KernelgenTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = pathlib.Path(folder.name)
        self.out = self.root / "generated"
        self.generated = self.out / "kernels" / "toy"
        (self.root / "toy").mkdir()
        for name in ("plain.h", "shared.h", "other.h"):
            (self.root / "toy" / name).write_text(f"// {name}\n")

    def run_kernelgen(self, *rows, extra=()):
        path = self.root / "toy" / "toy.kernels.toml"
        path.write_text(FAMILY + "\n".join(rows))
        command = [sys.executable, str(KERNELGEN), "--rows", str(path), "--root", str(self.root),
                   "--out", str(self.out), *extra]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    def generate(self, *rows):
        result = self.run_kernelgen(*rows)
        self.assertEqual(result.returncode, 0, result.stderr)
        lines = (self.generated / "toy_variants.inc").read_text().splitlines()[1:]
        matches = [VARIANT.match(line) for line in lines]
        self.assertNotIn(None, matches, lines)
        return [match.groups() for match in matches]

    def assert_refused(self, *rows, naming):
        result = self.run_kernelgen(*rows)
        self.assertNotEqual(result.returncode, 0)
        for text in naming:
            self.assertIn(text, result.stderr)
        self.assertNotIn("Traceback", result.stderr)
        self.assertFalse(self.out.exists(), "a refused row must write nothing")

    def test_star_expands_over_the_family(self):
        variants = self.generate(row_text())
        # e4m3_e4m3 has both accumulations, the other two pairs one: (2 + 1 + 1) x 2 outputs x 2 layouts.
        self.assertEqual(len(variants), 16)
        classes = [variant[2] for variant in variants]
        self.assertEqual(len(set(classes)), 16)
        self.assertEqual(sum(".exact." in name for name in classes), 4)
        self.assertTrue(all("e4m3_e4m3" in name for name in classes if ".exact." in name))

    def test_lists_expand_to_their_product(self):
        variants = self.generate(row_text(pairs='["s8_s8", "e4m3_e4m3"]', outs='["f32"]', accums='["exact"]',
                                          layouts='["NN"]'))
        self.assertEqual([variant[2] for variant in variants], ["toy.cpu.e4m3_e4m3.f32.exact.NN"])

    def test_a_variant_line_holds_the_row(self):
        symbol, identity, name, recipe, *tile, stages, workspace, _ = self.generate(
            row_text(pairs='["s8_s8"]', outs='["f32"]', layouts='["NN"]', tile="[16, 32, 64]", stages="3",
                     workspace='"split_partials"'))[0]
        self.assertEqual(name, "toy.cpu.s8_s8.f32.fast.NN")
        self.assertEqual(identity, name + "/plain")
        self.assertEqual(symbol, "toy__cpu__s8_s8__f32__fast__NN__plain")
        self.assertEqual(recipe, "plain")
        self.assertEqual(tile, ["16", "32", "64"])
        self.assertEqual(stages, "3")
        self.assertEqual(workspace, "WorkspaceRule::kSplitPartials")

    def test_the_architecture_chooses_unit_and_macro(self):
        self.generate(row_text(arch='"sm80"'), row_text(arch='"vendor"', recipe='"library"'))
        cuda = (self.generated / "toy_sm80_plain.cu").read_text()
        self.assertIn("TESSERA_TOY_CUDA_LAUNCHER(", cuda)
        self.assertIn('#include "kernels/toy/cuda/launcher.h"', cuda)
        library = (self.generated / "toy_vendor_library.cc").read_text()
        self.assertIn("TESSERA_TOY_VENDOR_LAUNCHER(", library)
        self.assertIn("TESSERA_TOY_VARIANT(sm80, ", (self.generated / "toy_variants.inc").read_text())

    def test_stages_are_a_count(self):
        self.assert_refused(row_text(stages="-1"), naming=["stages", "plain"])
        self.assert_refused(row_text(stages='"two"'), naming=["stages", "plain"])

    def test_each_row_has_its_own_unit_and_the_list_names_all(self):
        variants = self.generate(row_text(), row_text(recipe='"other"', header='"toy/other.h"', pairs='["s8_s8"]'))
        self.assertEqual(len(variants), 20)
        units = {path.name: path.read_text() for path in self.generated.glob("*.cc")}
        self.assertEqual(sorted(units), ["toy_cpu_other.cc", "toy_cpu_plain.cc"])
        for name, count, header in (("toy_cpu_other.cc", 4, "toy/other.h"), ("toy_cpu_plain.cc", 16, "toy/plain.h")):
            self.assertEqual(units[name].count("TESSERA_TOY_CPU_LAUNCHER("), count)
            self.assertIn(f'#include "{header}"\n', units[name])
        listing = (self.generated / "variants.md").read_text()
        for variant in variants:
            self.assertIn(f"`{variant[1]}`", listing)

    def test_unknown_values_are_refused(self):
        self.assert_refused(row_text(pairs='["bf16_f64"]'), naming=["pairs", "bf16_f64", "plain"])
        self.assert_refused(row_text(outs='["s8"]'), naming=["outs", "'s8'"])
        self.assert_refused(row_text(layouts='["XX"]'), naming=["layouts", "XX"])
        self.assert_refused(row_text(accums='["slow"]'), naming=["accums", "slow"])
        self.assert_refused(row_text(arch='"tpu"'), naming=["arch", "tpu"])
        self.assert_refused(row_text(workspace='"lots"'), naming=["workspace", "lots"])

    def test_duplicates_are_refused(self):
        self.assert_refused(row_text(), row_text(pairs='["s8_s8"]'), naming=["row 2", "s8_s8", "plain", "twice"])
        self.assert_refused(row_text(pairs='["s8_s8", "s8_s8"]'), naming=["twice"])

    def test_every_missing_key_is_refused(self):
        for key in ROW:
            with self.subTest(key=key):
                self.assert_refused(row_text(**{key: None}), naming=["missing", f"'{key}'"])

    def test_an_unknown_key_is_refused(self):
        self.assert_refused(row_text(colour='"red"'), naming=["unknown", "'colour'"])

    def test_bad_tiles_recipes_and_files_are_refused(self):
        for tile in ("[4, 8]", "[4, 8, 0]", "[4, 8, -1]", "[4, 8, 1.5]", '[4, 8, "1"]'):
            with self.subTest(tile=tile):
                self.assert_refused(row_text(tile=tile), naming=["tile"])
        self.assert_refused(row_text(recipe='"../up"'), naming=["recipe"])
        self.assert_refused(row_text(recipe='"Plain"'), naming=["recipe"])
        self.assert_refused(row_text(header='"toy/none.h"'), naming=["toy/none.h"])
        self.assert_refused(row_text(sources='["toy/none.h"]'), naming=["toy/none.h"])

    def stamp(self):
        """Sets every output's time to the distant past; returns a function that lists what was rewritten since."""
        for path in self.generated.iterdir():
            os.utime(path, (1, 1))
        return lambda: sorted(path.name for path in self.generated.iterdir() if path.stat().st_mtime != 1)

    def test_unchanged_files_are_not_rewritten(self):
        rows = [row_text(), row_text(recipe='"other"', header='"toy/other.h"', sources="[]")]
        self.generate(*rows)
        rewritten = self.stamp()
        self.generate(*rows)
        self.assertEqual(rewritten(), [])
        rows[1] = row_text(recipe='"other"', header='"toy/other.h"', sources="[]", tile="[1, 1, 1]")
        self.generate(*rows)
        self.assertEqual(rewritten(), ["toy_cpu_other.cc", "toy_variants.inc", "variants.md"])

    def test_the_hash_follows_the_row_and_its_sources(self):
        rows = [row_text(), row_text(recipe='"other"', header='"toy/other.h"', sources="[]")]

        def hashes():
            return {variant[3]: variant[-1] for variant in self.generate(*rows)}

        first = hashes()
        self.assertNotEqual(first["plain"], first["other"])
        self.assertEqual(hashes(), first)
        (self.root / "toy" / "shared.h").write_text("// changed\n")
        shared_changed = hashes()
        self.assertNotEqual(shared_changed["plain"], first["plain"])
        self.assertEqual(shared_changed["other"], first["other"])
        (self.root / "toy" / "other.h").write_text("// changed\n")  # a header counts without being listed
        header_changed = hashes()
        self.assertEqual(header_changed["plain"], shared_changed["plain"])
        self.assertNotEqual(header_changed["other"], first["other"])
        rows[0] = row_text(tile="[4, 8, 2]")
        self.assertNotEqual(hashes()["plain"], shared_changed["plain"])

    def test_listing_writes_nothing_and_names_all_paths(self):
        result = self.run_kernelgen(row_text(), extra=("--list", "outputs"))
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertFalse(self.out.exists())
        outputs = result.stdout.strip().split(";")
        inputs = self.run_kernelgen(row_text(), extra=("--list", "inputs")).stdout.strip().split(";")
        self.assertEqual(inputs, [str(self.root / "toy" / "plain.h"), str(self.root / "toy" / "shared.h")])
        self.generate(row_text())
        self.assertEqual(sorted(outputs), sorted(str(path) for path in self.generated.iterdir()))


if __name__ == "__main__":
    unittest.main()
