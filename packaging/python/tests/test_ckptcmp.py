"""The package over the program: `CKPTCMP` names it, or it is the one that was installed."""

import json
import os
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

import ckptcmp
from ckptcmp.testing import assert_checkpoints_equal

LAYOUTS = Path(__file__).resolve().parents[3] / "fixtures" / "layouts"
SMALL = LAYOUTS / "gpt-small" / "tp1"
OTHER_LAYOUT = LAYOUTS / "gpt-small" / "tp2"
OTHER_MODEL = LAYOUTS / "gpt" / "tp1"
JUDGING = Path(__file__).resolve().parents[3] / "fixtures" / "judging"


class Compare(unittest.TestCase):
    def test_layouts_of_the_same_weights_are_identical(self) -> None:
        result = ckptcmp.compare(SMALL, OTHER_LAYOUT)
        self.assertTrue(result.ok)
        self.assertEqual((result.verdict, result.exit_code, len(result.tensors)), ("identical", 0, 15))
        self.assertEqual((result.a.layout, result.b.layout), ("tp1 pp1", "tp2 pp1"))
        self.assertTrue(all(tensor.l2 == 0 and tensor.verdict == "identical" for tensor in result.tensors))
        self.assertIs(result.raise_on_difference(), result)

    def test_differences_are_a_result_and_an_assertion(self) -> None:
        result = ckptcmp.compare(str(SMALL), OTHER_MODEL)
        self.assertFalse(result.ok)
        self.assertEqual((result.verdict, result.exit_code), ("different", 1))
        self.assertEqual(len(result.differing), 15)
        distances = [tensor.rel_l2 for tensor in result.differing if tensor.rel_l2 is not None]
        self.assertEqual(distances, sorted(distances, reverse=True))
        self.assertIn("decoder.layers.2.input_layernorm.weight", result.only_in_b)
        self.assertEqual(result.only_in_a, [])
        with self.assertRaises(ckptcmp.Difference) as raised:
            assert_checkpoints_equal(SMALL, OTHER_MODEL)
        text = str(raised.exception)
        self.assertIsInstance(raised.exception, AssertionError)
        self.assertEqual(raised.exception.comparison.verdict, "different")
        self.assertIn("different: 15 of 15 tensors differ, 60 only in b", text)
        self.assertIn("only in b: decoder.layers.0.mlp.linear_fc1.bias", text)
        self.assertIn("and 50 more", text)
        self.assertLess(len(text.splitlines()), 40)

    def test_a_checkpoint_that_is_not_there_is_trouble(self) -> None:
        result = ckptcmp.compare(SMALL, "nowhere")
        self.assertEqual((result.verdict, result.exit_code, result.ok), ("trouble", 2, False))
        self.assertTrue(any("nowhere" in error for error in result.errors))
        self.assertEqual(result.tensors, [])
        with self.assertRaisesRegex(ckptcmp.Difference, "nowhere"):
            result.raise_on_difference()

    def test_options_are_those_of_the_command_line(self) -> None:
        some = ckptcmp.compare(SMALL, OTHER_LAYOUT, include=["*layernorm*"], exclude=["*.0.*"])
        self.assertEqual(len(some.tensors), 3)
        self.assertFalse(ckptcmp.compare(SMALL, OTHER_MODEL, include=["*.0.input_layernorm*"]).ok)
        within = ckptcmp.compare(SMALL, OTHER_MODEL, include=["*.0.input_layernorm*"], rtol=0.0, atol=10.0, max={"max_abs": 10.0})
        self.assertEqual((within.verdict, within.ok), ("within", True))
        cast = [JUDGING / "wide.safetensors", JUDGING / "narrow.safetensors"]
        self.assertNotEqual(ckptcmp.compare(*cast).verdict, ckptcmp.compare(*cast, allow_cast=True).verdict)
        with tempfile.TemporaryDirectory() as folder:
            rules = Path(folder) / "rules.toml"
            rules.write_text('[[rule]]\nmatch = "*"\natol = 10.0\nallow-missing = "both"\n')
            self.assertTrue(ckptcmp.compare(SMALL, OTHER_MODEL, include=["*layernorm*"], rules=rules).ok)

    def test_wrong_options_are_an_error_that_says_so(self) -> None:
        with self.assertRaisesRegex(ckptcmp.CkptcmpError, "--rtol"):
            ckptcmp.compare(SMALL, SMALL, rtol=-1.0)
        with self.assertRaises(TypeError):
            ckptcmp.compare(SMALL, SMALL, include="*")
        with self.assertRaises(ckptcmp.CkptcmpError):
            ckptcmp.compare(SMALL, SMALL, arguments=["--no-such-flag"])

    def test_a_saved_document_is_read(self) -> None:
        document = ckptcmp.compare(SMALL, OTHER_LAYOUT).document
        again = ckptcmp.Comparison.from_json(json.dumps(document))
        self.assertEqual(again.document, document)
        for wrong in [dict(document, schema="urn:ckptcmp:schema:compare-report:999"), {}, []]:
            with self.assertRaises(ValueError):
                ckptcmp.Comparison.from_json(json.dumps(wrong))

    def test_a_table_of_pandas_has_a_row_for_each_tensor(self) -> None:
        try:
            import pandas  # noqa: F401
        except ImportError:
            self.skipTest("pandas is not here")
        table = ckptcmp.compare(SMALL, OTHER_MODEL).to_pandas()
        self.assertEqual(len(table), 15)
        self.assertTrue((table["rel_l2"].dropna() > 0).all())


class Others(unittest.TestCase):
    def test_check_tells_what_is_wrong(self) -> None:
        sound = ckptcmp.check(SMALL)
        self.assertEqual((sound.verdict, sound.ok, sound.problems), ("sound", True, []))
        unsound = ckptcmp.check(LAYOUTS / "faults" / "diverged-replica-tp2")
        self.assertEqual((unsound.verdict, unsound.ok, unsound.exit_code), ("unsound", False, 1))
        with self.assertRaisesRegex(ckptcmp.CkptcmpError, "nowhere"):
            ckptcmp.check("nowhere")

    def test_inspect_lists_tensors(self) -> None:
        found = ckptcmp.inspect(SMALL)
        self.assertIn("decoder.final_layernorm.weight", found["tensors"])

    def test_the_module_runs_the_program(self) -> None:
        done = subprocess.run([sys.executable, "-m", "ckptcmp", "--version"], capture_output=True, encoding="utf-8")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertTrue(done.stdout.startswith("ckptcmp "))

    def test_a_program_that_is_not_there_is_named(self) -> None:
        code = "import ckptcmp; ckptcmp.binary()"
        environment = dict(os.environ, PATH="", PYTHONPATH=os.pathsep.join(sys.path))
        environment.pop("CKPTCMP", None)
        done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, encoding="utf-8")
        self.assertTrue(done.returncode == 0 or "ckptcmp is neither beside" in done.stderr, done.stderr)


if __name__ == "__main__":
    unittest.main()
