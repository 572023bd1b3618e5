"""The same bits in every way of running, those that are published, and the command that shows it."""

import hashlib
import json
import shlex
from dataclasses import replace

import numpy as np
import pytest
from command_helpers import invoke, refusal

from attention_conformance.golden.cases import IDENTICAL
from attention_conformance.golden.identical import Computed, compare, computed, digest, verdicts, work, work_on
from attention_conformance.hashes import published
from attention_conformance.launch.libraries import holds
from attention_conformance.processes import Order
from attention_core.backend import get_backend

BY_NAME = {case.name: case for case in IDENTICAL}
COMPILED = (  # compilers take seconds for each
    "causal-offset",
    "bias-of-minus-infinity",
    "dropout-causal",
    "bfloat16-bias",
    "gelu",
    "linear-gradient",
    "grouped-heads-gradient",
    "encoder",
)
GRADIENTS = (  # those that are run where traced loops make every gradient take seconds
    "grouped-heads-gradient",
    "bias-gradient",
    "dropout-causal-gradient",
    "extreme-keys-masked-gradient",
    "bfloat16-extreme-gradient",
    "linear-gradient",
    "encoder-gradient",
    "spectral-norm-gradient",
)
ARITHMETIC = (  # eager cases that XLA optimizes, one of each arithmetic: masks are integers
    "bias",
    "many",
    "softcap-window",
    "dropout",
    "weights-masked",
    "near-ties",
    "wide-range",
    "subnormals",
    "extreme-values",
    "shared-spread",
    "float16-plain",
    "bfloat16-extreme",
    "scores",
    "linear-wide-range",
    "layer-norm",
    "rms-norm-wide-range",
    "rotary-wide-range",
    "gelu-extremes",
    "silu-extremes",
    "gated-feed-forward",
    "spectral-norm",
    "bias-gradient",
    "bfloat16-extreme-gradient",
    "spectral-norm-gradient",
)


def optimized(name):
    """Return the name of a case as a parameter; XLA optimizes those of `ARITHMETIC`."""
    return pytest.param(name, marks=[pytest.mark.optimized] * (name in ARITHMETIC))


def identical(*arguments):
    """A short run in this process."""
    return invoke("conformance", "--identical", "--backend", "numpy", "--jobs", 0, *arguments)


@pytest.fixture
def corrupted(monkeypatch):
    """The published hash of one case is wrong, and that of another is missing."""
    hashes = published() | {"bias": "0" * 64}
    del hashes["plain"]
    monkeypatch.setattr("attention_cli.conformance.published", lambda: hashes)


def is_computed_by(backend, name):
    """Whether a backend has the type of a case, and gradients where it asks for them."""
    case = BY_NAME[name]
    return holds(backend, backend.devices()[0], case.dtype) and (backend.differentiates or not case.variables)


def is_quick(backend, name):
    """Whether a case takes less than seconds: traced loops make gradients slow, and the command runs them all."""
    return not backend.loops.traced or not BY_NAME[name].variables or name in GRADIENTS


def gives_the_published_hash(case, backend, mode):
    device = backend.devices()[0]
    with np.errstate(all="ignore"):
        return digest(computed(case, backend, device, mode)) == published()[case.name]


@pytest.mark.needs(is_computed_by, is_quick)
@pytest.mark.parametrize("name", [optimized(name) for name in BY_NAME])
def test_every_case_gives_the_published_bits(backend, name):
    assert gives_the_published_hash(BY_NAME[name], backend, "eager")


@pytest.mark.optimized
@pytest.mark.needs("compilation", is_computed_by)
@pytest.mark.parametrize("name", COMPILED)
def test_compiled_cases_give_the_published_bits(backend, name):
    for mode in backend.modes[1:]:
        assert gives_the_published_hash(BY_NAME[name], backend, mode), mode


def test_every_case_and_no_other_is_published():
    assert list(published()) == list(BY_NAME)
    assert len(BY_NAME) == len(IDENTICAL)


def test_no_two_cases_have_the_same_bits_unless_they_are_empty_or_zero():
    hashes = {sha256 for name, sha256 in published().items() if not name.startswith(("zeros", "negative-zeros", "no-"))}
    assert len(hashes) > 0.9 * len(IDENTICAL)


def test_the_hash_is_that_of_dtype_shape_and_little_endian_bytes():
    number = np.asarray([[1.0, -2.0]], np.float32)
    told = b"float32 (1, 2)\n\x00\x00\x80?\x00\x00\x00\xc0"
    assert digest((("output", number),)) == hashlib.sha256(told).hexdigest()
    assert digest((("output", number.T.copy().T),)) == digest((("output", number),))
    assert digest((("output", -0.0 * abs(number)),)) != digest((("output", 0.0 * abs(number)),))


def test_the_first_difference_is_told_with_both_numbers_as_hex_floats():
    ours, theirs = np.zeros((2, 3), np.float32), np.zeros((2, 3), np.float32)
    ours[1, 1:] = -0.0, 3.0
    told = compare((("a", theirs), ("b", ours)), (("a", theirs), ("b", theirs)))
    assert told == "b[1, 1] is -0x0.0p+0, but 0x0.0p+0"
    assert compare((("a", ours),), (("a", ours.T),)) == "a is float32 (2, 3), but float32 (3, 2)"


@pytest.mark.parametrize(
    ("dtype", "one", "other"), [("f4", 0x7FC00000, 0xFFFFFFFF), ("f8", 0x7FF8 << 48, 0xFFF8 << 48)]
)
def test_all_nan_have_one_hash(dtype, one, other):
    ours, theirs = (np.asarray([0, bits], f"u{dtype[1]}").view(dtype) for bits in (one, other))
    assert digest((("a", ours),)) == digest((("a", theirs),)) != digest((("a", np.zeros_like(ours)),))


def test_a_way_that_differs_is_named():
    results = [result for result in work(Order("numpy", ("plain",))) if hasattr(result, "arrays")]
    changed = results[0].arrays[0][1].copy()
    changed[0, 0, 0, 3] = np.nextafter(changed[0, 0, 0, 3], np.float32(9))
    other = type(results[0])(
        **{**vars(results[0]), "mode": "compiled", "arrays": (("output", changed), *results[0].arrays[1:])}
    )
    (verdict,) = verdicts(["plain"], [other, *results], published())
    assert verdict.sha256 == published()["plain"]
    (complaint,) = verdict.complaints
    first, second = (float(array[0, 0, 0, 3]).hex() for array in (changed, results[0].arrays[0][1]))
    assert complaint == (
        f"plain on numpy (cpu, compiled): output[0, 0, 0, 3] is {first}, but {second} on numpy (cpu, eager)"
    )


def test_a_run_of_identical_bits_ends_with_hashes_ticks_and_status_0():
    result = identical("--case", "plain", "--case", "gelu")
    assert result.exit_code == 0
    for name in ("plain", "gelu"):
        (line,) = (line for line in result.stdout.splitlines() if f" {name} " in line)
        assert published()[name][:16] in line
        assert "✓" in line
    assert result.stdout.splitlines()[-3:] == [
        "2 of 2 cases are bitwise equal, in 4 configurations on 1 backend (numpy), 2 of them as published",
        "more: --json FILE for each hash, --list for what cases show",
        "2 identical, 0 not, 0 not run",
    ]


def test_a_quick_run_is_one_eager_call_of_each_case(backend):
    messages = list(work(Order(backend.name, ("plain", "many"), quick=True)))
    ways = [(each.case, each.device, each.mode, each.variation) for each in messages if isinstance(each, Computed)]
    assert ways == [(name, backend.devices()[0], "eager", "") for name in ("plain", "many")]


def test_a_quick_run_says_how_to_repeat_it(tmp_path):
    result = identical("--case", "many", "--quick", "--json", tmp_path / "hashes.json")
    assert result.exit_code == 0
    written = json.loads((tmp_path / "hashes.json").read_text())
    assert "--quick" in shlex.split(written["environment"]["command"])


def test_a_hash_other_than_the_published_one_or_without_one_is_told_with_status_1(corrupted):
    result = identical("--case", "bias", "--case", "plain")
    assert result.exit_code == 1
    told = f"bias on numpy (cpu, eager): expected SHA-256 {'0' * 64}, as published; got {published()['bias']}"
    assert told in result.stdout.splitlines()
    assert "✗" in next(line for line in result.stdout.splitlines() if " bias " in line)
    assert f"plain on numpy (cpu, eager): expected a published SHA-256; got {published()['plain']}" in result.stdout
    assert result.stdout.splitlines()[-1] == "0 identical, 2 not, 0 not run"


@pytest.mark.parametrize(
    ("variation", "number"),
    [
        ("small blocks", lambda trees: get_backend("numpy").tuning.exact_scores),
        ("batch apart", lambda trees: len(trees["query"])),
    ],
)
def test_a_result_that_depends_on_blocks_or_batch_is_told(variation, number):
    case = replace(BY_NAME["plain"], inputs=lambda source: source.attention(rows=40))
    right = [each for each in work_on([case], Order("numpy", ())) if hasattr(each, "arrays")]
    assert [each.variation for each in right] == ["", "small blocks", "batch apart"]
    assert verdicts(["plain"], right, {"plain": None})[0].complaints == ()
    wrong = replace(case, function=lambda trees: np.full_like(trees["query"], number(trees)))
    (verdict,) = verdicts(["plain"], [*work_on([wrong], Order("numpy", ()))][2::2], {"plain": None})
    assert [line.partition(":")[0] for line in verdict.complaints] == [f"plain on numpy (cpu, eager, {variation})"]


def test_a_result_that_depends_on_the_place_in_a_larger_batch_is_told():
    case = BY_NAME["lengths"]
    assert case.larger
    right = [each for each in work_on([case], Order("numpy", ())) if hasattr(each, "arrays")]
    assert [each.variation for each in right] == ["", "batch apart", "among others in a larger batch"]
    assert verdicts(["lengths"], right, published())[0].complaints == ()

    def turned(trees):
        return case.function({**trees, "lengths": trees["lengths"][::-1]} if len(trees["lengths"]) > 2 else trees)

    found = [each for each in work_on([replace(case, function=turned)], Order("numpy", ())) if hasattr(each, "arrays")]
    (complaint,) = verdicts(["lengths"], found, {"lengths": None})[0].complaints
    assert complaint.startswith("lengths on numpy (cpu, eager, among others in a larger batch): output[")


def test_a_run_of_nothing_has_status_1_and_says_why():
    found = identical("--case", "plain-gradient")
    assert found.exit_code == 1
    assert "left out: numpy on cpu: it does not differentiate" in found.stderr.splitlines()


def test_hashes_are_written_as_json(tmp_path):
    path = tmp_path / "hashes.json"
    assert identical("--case", "plain", "--json", path).exit_code == 0
    written = json.loads(path.read_text())
    assert written["environment"]["backends"]["numpy"]["numpy"]
    assert written["environment"]["threads"] >= 1
    words = shlex.split(written["environment"]["command"])
    assert words == ["attention-core", "conformance", "--identical", "--backend=numpy", "--case=plain", "--jobs=0"]
    again = invoke(*words[1:], "--json", tmp_path / "again.json")
    assert again.exit_code == 0
    assert json.loads((tmp_path / "again.json").read_text())["cases"] == written["cases"]
    assert {"processor", "architecture", "instructions"} < written["environment"].keys()
    assert written["cases"] == {
        "plain": {
            "sha256": published()["plain"],
            "ways": dict.fromkeys(("numpy (cpu, eager)", "numpy (cpu, eager, batch apart)"), published()["plain"]),
            "complaints": [],
            "compared with": ["each other", "the published hash"],
            "left out": [],
        }
    }


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--backend", "fortran"], "expected a backend out of "),
        (["--case", "nothing-*"], "expected a case of --list; got 'nothing-*', which none matches"),
        (["--mode", "slow"], "expected a mode out of eager; got 'slow'"),
        (["--dtype", "float32"], "expected no --dtype with --identical; got one"),
        (["--model", "/no/such/model"], "expected a model, a folder or a GGUF file; got /no/such/model: [Errno 2]"),
        (["--case", "model"], "expected a case of --list; got 'model', which none matches"),
    ],
)
def test_what_cannot_be_run_as_given_has_status_2(arguments, told):
    assert told in refusal("conformance", "--identical", "--backend", "numpy", "--jobs", 0, *arguments)


def test_the_cases_are_listed():
    result = identical("--list")
    assert result.exit_code == 0
    assert "maxima of 2 × 2 places" in result.stdout
    assert sum(name in result.stdout for name in BY_NAME) == len(BY_NAME)
