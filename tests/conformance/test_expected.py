"""Files of expected results: entries about a fault or a library, and the files that are shipped for presets."""

from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path

import pytest
from command_helpers import invoke

from attention_conformance import Finding
from attention_conformance.measure.catalogue import kernel_cases
from attention_conformance.measure.kinds import NAMES as KINDS
from attention_conformance.mistakes.diagnoses import DIAGNOSES
from attention_conformance.mistakes.variants import CONVENTIONS, FAULTS, NARROW_SCORES, SPREAD
from attention_conformance.named import named_cases
from attention_conformance.verdict.expected import SHIPPED, Origin, met, read_expected, unmatched
from attention_workers.machine import machine
from survey.presets import PRESETS

CASES = {case.name: set(case.dtypes) for case in kernel_cases()}
NAMES = {*CASES, *(f"kind: {kind}" for kind in KINDS)}
VARIANTS = {"", *(each.name for each in (*CONVENTIONS, *FAULTS, *DIAGNOSES, NARROW_SCORES, SPREAD))}
LINKS = {"", *(each.url for each in named_cases())}


SURVEYED = Path(__file__).parents[2] / "evidence" / "survey" / "expected"


@pytest.mark.parametrize(
    "path", sorted([*SHIPPED.glob("*.toml"), *SURVEYED.glob("*.toml")]), ids=lambda path: path.stem
)
def test_a_file_of_a_preset_names_its_package_cases_and_threads(path):
    entries = read_expected(path)
    assert entries
    for entry in entries:
        assert PRESETS[path.stem].package in entry.versions
        # By a fault, as a case that is right is no error then, or by names.
        assert entry.variant if entry.case == "*" else any(fnmatch(name, entry.case) for name in NAMES)
        assert any(fnmatch(dtype, entry.dtype) for dtypes in CASES.values() for dtype in dtypes)
        assert (entry.variant in VARIANTS, entry.link in LINKS) == (True, True), entry


def test_an_entry_is_about_the_answers_that_equal_its_fault_on_its_library(tmp_path):
    (tmp_path / "expected.toml").write_text(
        '[[expected]]\ncase = ["scale*", "mask"]\nvariant = "narrow-scores"\nbackend = "tensor*"\ndevice = "cpu"\nreason = "as it is"\n'
    )
    entries = read_expected(tmp_path / "expected.toml")
    assert [each.case for each in entries] == ["scale*", "mask"]
    wrong = {
        name: Finding("scale", "float16", 7, "", "silently wrong", variant=name) for name in ("narrow-scores", "zeros")
    }
    right = Finding("scale-zero", "float16", 7, "", "right")
    here, elsewhere, on_gpu = Origin("CPU:0", "tensorflow"), Origin("cpu", "torch"), Origin("GPU:0", "tensorflow")
    found = [met(each, entries, here).verdict for each in (*wrong.values(), right)]
    assert found == ["accepted", "silently wrong", "right"]
    assert {met(wrong["narrow-scores"], entries, each).verdict for each in (elsewhere, on_gpu)} == {"silently wrong"}
    assert [each.case for each in unmatched([*wrong.values(), right], entries, here)] == ["mask"]
    assert unmatched([right], entries, elsewhere) == []
    instruction = machine()["instructions"][0]
    assert replace(entries[0], instructions=instruction).matches(wrong["narrow-scores"], here)
    assert not replace(entries[0], instructions=f"{instruction}?").matches(wrong["narrow-scores"], here)


@pytest.mark.needs("torch")
def test_what_is_shipped_for_a_preset_is_accepted():
    cases = [word for name in ("masked-nan-value", "negative-scale-causal", "scale") for word in ("--case", name)]
    found = invoke("check", "torch.sdpa", *cases, "--dtype", "float32", "--jobs", 0, "--expected", "shipped")
    assert (found.exit_code, found.stdout.splitlines()[-1]) == (0, "0 wrong, 2 accepted, 1 right")
