"""The conformance kit: the core passes, and every planted fault is found on the case that was made for it."""

import math

import numpy as np
import pytest

import attention_core as ac
from attention_conformance import CASES, check
from attention_conformance.cases.case import hard, ordinary, probability
from attention_conformance.measure.implementations import COMPILED, IMPLEMENTATIONS, SLOWEST
from attention_conformance.own.runner import plan, run
from attention_conformance.problem import DTYPES
from attention_conformance.verdict.expected import Expected
from attention_conformance.verdict.judge import known

BY_NAME = {case.name: case for case in CASES}
core = ac.scaled_dot_product_attention


def outcomes(function, *names, dtypes=("float32",), backend="numpy", **options):
    """Whether a function passes these cases: by case and dtype."""
    results = check(function, backend=backend, cases=[BY_NAME[name] for name in names], dtypes=dtypes, **options)
    return {result.case: result.passed for result in results}


def names_of(line):
    return [case.name for case in CASES if case.line == line]


def plain(query, key, value, /, *, mask=None, is_causal=False, scale=None):
    """Attention as it is commonly written: a very negative number is added where masked."""
    query, key, value = (x.astype(np.float64) for x in (query, key, value))
    scores = query @ np.swapaxes(key, -1, -2) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        mask = np.tri(*scores.shape[-2:], dtype=bool)
    if mask is not None:
        scores = scores + np.where(mask, 0.0, -1e30)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True) @ value


def plain_float32(*arrays, **options):
    return plain(*arrays, **options).astype(np.float32)


def altered(change):
    """The core, with its output changed."""

    def function(query, key, value, /, **options):
        result = core(query, key, value, **options)
        return result._replace(output=change(result.output)) if isinstance(result, tuple) else change(result)

    return function


def test_every_line_of_the_contract_has_a_case():
    assert {case.line for case in CASES} == set(range(12))  # tests/core/test_mistakes.toml shows line 12
    assert len({case.name for case in CASES}) == len(CASES)
    assert all(case.shows.endswith(".") for case in CASES)


def test_the_core_passes_on_every_backend(backend):
    chosen = ["mask-and-bias", "masks-combined", "empty-row-mask", "empty-row-bias", "masked-nan-key"]
    chosen += ["attended-nan-value", "softcap", "grouped-heads", "dropout", "dropout-weights"]
    chosen += ["batch-invariance", "batch-invariance-bits"]
    chosen += ["weights-change-nothing", "04-near-ties-1e4", "12-product-overflows"]
    chosen += ["gradient-empty-row-bias", "gradient-masked-nonfinite"] if backend.differentiates else []
    results = check(core, backend=backend, cases=[BY_NAME[name] for name in chosen], dtypes=["float32"])
    assert [result for result in results if result.passed is False] == []
    assert {result.case for result in results if result.passed} == set(chosen)


@pytest.mark.needs("compilation")
@pytest.mark.parametrize("name", ["attended-nan-value", "attended-inf-value"])
def test_programs_show_what_is_not_finite_where_it_is_attended_to(backend, name):
    results = check(
        core, backend=backend, modes=["jit", "graph", "compiled"], cases=[BY_NAME[name]], dtypes=["float32"]
    )
    assert {result.passed for result in results if result.passed is not None} == {True}


@pytest.mark.parametrize("implementation", ["dense", "blockwise"])
def test_the_core_passes_every_case_on_numpy(implementation):
    results = check(core, backend="numpy", implementations=[implementation])
    assert {result.implementation for result in results} == {implementation}
    assert [result for result in results if result.passed is False] == []
    assert {result.detail for result in results if result.passed is None} == {"numpy does not differentiate"}
    assert {result.dtype for result in results if result.passed} == set(DTYPES)


def test_an_output_that_changes_when_weights_are_asked_for_is_found():
    def inclined(query, key, value, /, **options):
        result = core(query, key, value, **options)
        if options.get("return_weights"):
            return result._replace(output=np.nextafter(result.output, np.float32(9)))
        return result

    got = outcomes(inclined, *names_of(6))
    assert got == {"weights": True, "weights-change-nothing": False, "weights-change-nothing-unmasked": False}


def test_forgetting_the_weights_is_found():
    def forgetful(query, key, value, /, **options):
        return core(query, key, value, **{**options, "return_weights": False})

    assert outcomes(forgetful, "weights") == {"weights": False}


def test_an_exception_is_a_failed_result():
    def broken(query, key, value, /, **options):
        raise RuntimeError("out of\nmemory")

    (result,) = check(broken, backend="numpy", cases=[BY_NAME["mask"]], dtypes=["float32"])
    assert result.passed is False
    assert result.error == math.inf
    assert result.detail == "RuntimeError: out of memory"


def test_what_a_function_does_not_take_is_not_supported():
    results = {result.case: result for result in check(plain_float32, backend="numpy", dtypes=["float32"])}
    assert results[
        "causal-more-keys"
    ].passed  # **options passes everything on, and plain() refuses what it does not know

    def bare(query, key, value, /, *, is_causal=False):
        return plain_float32(query, key, value, is_causal=is_causal)

    def undecided(query, key, value, /, **options):
        raise NotImplementedError("dropout")

    (softcap,) = check(bare, backend="numpy", cases=[BY_NAME["softcap"]], dtypes=["float32"])
    (dropout,) = check(undecided, backend="numpy", cases=[BY_NAME["dropout"]], dtypes=["float32"])
    assert (softcap.passed, softcap.detail) == (None, "not supported: softcap")
    assert (dropout.passed, dropout.detail) == (None, "not supported: dropout")


def test_what_is_not_run_says_why():
    strict = check(core, backend="array_api_strict", cases=[BY_NAME["mask"]], devices=["no_float64"])
    assert {result.dtype: (result.passed, result.detail) for result in strict if result.passed is None} == {
        dtype: (None, f"array_api_strict on no_float64 has no {dtype}") for dtype in ("float16", "bfloat16", "float64")
    }


def test_a_known_deviation_neither_passes_nor_fails(monkeypatch):
    flushed = altered(lambda x: np.where(np.abs(x) < np.finfo(np.float32).tiny, np.float32(0), x))
    name = "06-subnormal-values"
    assert outcomes(flushed, name) == {name: False}
    entry = Expected(name, "float32", backend="numpy", reason="it flushes")
    monkeypatch.setattr("attention_conformance.verdict.judge.known", lambda: (entry,))
    (result,) = check(flushed, backend="numpy", cases=[BY_NAME[name]], dtypes=["float32"])
    assert result.passed is None
    assert result.detail.startswith("exempt: it flushes; output at")
    assert outcomes(altered(lambda x: x * np.float32("nan")), name) == {name: False}  # it excuses no more than it says


def test_known_deviations_name_cases_that_exist():
    for entry in known():
        assert entry.case in BY_NAME
        assert entry.reason
        assert entry.dtype in DTYPES


def test_bounds_are_those_that_are_stated():
    for kappa in (0.0, 5.0, 1e4):
        assert [ordinary(dtype, kappa) for dtype in DTYPES] == [0.51, 0.51, 6.0, 1e-15 * 2**52 * (1 + kappa)]
        assert [hard(dtype, kappa) for dtype in DTYPES[:2]] == [0.51, 0.51]
        assert hard("float32", kappa) == max(6.0, 1 + kappa)
        assert probability("float32", kappa) == max(6.0, 4 * (1 + kappa))


def test_an_implementation_is_judged_by_a_bound_of_its_own():
    found = check(core, backend="numpy", cases=[BY_NAME["mask"]], dtypes=["float32"], implementations=IMPLEMENTATIONS)
    assert {each.implementation: each.bound for each in found} == {"dense": 6.0, "blockwise": 8.0}


def test_small_problems_have_several_blocks():
    seen = []

    def observed(query, key, value, /, **options):
        def watched(scores, batch, head, row, column):
            seen.append(scores.shape[-2:])
            return scores

        return core(query, key, value, score_mod=watched, **options)

    (result,) = check(
        observed, backend="numpy", cases=[BY_NAME["mask"]], dtypes=["float32"], implementations=["blockwise"]
    )
    assert result.passed
    assert {(2, 4), (2, 3), (1, 3)} <= set(seen)  # a run of two blocks of keys, and less of queries and of keys


def test_what_an_implementation_refuses_is_no_failure():
    def picky(query, key, value, /, *, mask=None, implementation):
        if mask is not None:
            raise ValueError("expected a call that a fused kernel answers as defined; got one that none does: no masks")
        return core(query, key, value)

    class Fused(type(ac.backend.get_backend("numpy"))):
        kernels = (object(),)

    cases = [BY_NAME[name] for name in ("mask", "five-leading-axes", "wide-values", "weights-change-nothing-unmasked")]
    results = {each.case: each for each in check(picky, backend=Fused(np), cases=cases, dtypes=["float32"],
                                                 implementations=["fused"])}  # fmt: skip
    assert [results[name].verdict for name in ("mask", "wide-values")] == ["refused", "right"]
    assert results["mask"].detail == "no masks"
    unasked = results["weights-change-nothing-unmasked"]
    assert (unasked.verdict, unasked.detail) == ("not offered", "fused kernels return nothing but the output")
    with pytest.raises(ValueError):
        check(core, backend="numpy", cases=cases, implementations=["fused"])  # there is no kernel


def test_other_errors_are_failures_of_an_implementation():
    def broken(query, key, value, /, *, implementation):
        raise ValueError("expected keys; got none")

    (result,) = check(
        broken, backend="numpy", cases=[BY_NAME["wide-values"]], dtypes=["float32"], implementations=["dense"]
    )
    assert (result.verdict, result.detail) == ("visibly wrong", "ValueError: expected keys; got none")


def test_blocks_are_asked_for_no_weights_but_for_the_logsumexp():
    asked = []

    def recorded(query, key, value, /, **options):
        asked.append({name for name, wanted in options.items() if name.startswith("return_") and wanted})
        return core(query, key, value, **options)

    check(recorded, backend="numpy", cases=[BY_NAME["weights"]], dtypes=["float32"], implementations=IMPLEMENTATIONS)
    assert asked == [{"return_weights", "return_logsumexp"}, {"return_logsumexp"}]


def test_what_is_run_where_it_is_compiled_exists():
    assert set(COMPILED) <= set(BY_NAME)
    assert all(set(names) <= set(COMPILED) for names in SLOWEST.values())

    class Compiling(type(ac.backend.get_backend("numpy"))):
        modes = ("eager", "compiled")

    cases = [BY_NAME["mask"], BY_NAME["alibi"]]
    chosen = {"dtypes": ["float32"], "implementations": ["blockwise"]}
    reasons = {(trial.case.name, trial.mode): trial.reason for trial in plan(cases, [Compiling(np)], **chosen)}
    told = "one blockwise case of each kind of program is run where it has to be compiled"
    assert reasons.pop(("mask", "compiled")) == told
    assert set(reasons.values()) == {""}
    assert not any(trial.reason for trial in plan(cases, [Compiling(np)], **chosen, everything=True))


def test_pieces_are_for_the_core_alone():
    pieces = [BY_NAME["pieces"], BY_NAME["pieces-empty"]]
    told = {result.detail for result in check(altered(abs), backend="numpy", cases=pieces, dtypes=["float32"])}
    assert told == {"not supported: attention in pieces"}
    kept = check(core, backend="numpy", cases=pieces)
    assert {result.passed for result in kept} == {True}


def test_compiled_modes_run_a_case_in_its_dtypes_unless_others_are_asked_for():
    class Compiling(type(ac.backend.get_backend("numpy"))):
        modes = ("eager", "compiled")

        def compile(self, function, /, *, mode=None):
            return function

    trials = plan([BY_NAME["mask"], BY_NAME["dtype-is-kept"]], [Compiling(np)], modes=["compiled"])
    ran = {(result.case, result.dtype) for result in run(trials) if result.passed}
    assert ran == {("mask", "float32"), *(("dtype-is-kept", dtype) for dtype in DTYPES)}
    asked = plan([BY_NAME["mask"]], [Compiling(np)], modes=["compiled"], dtypes=["float16"])
    assert [result.passed for result in run(asked)] == [True]


@pytest.mark.parametrize(
    "options", [{"devices": ["no device"]}, {"dtypes": ["int8"]}, {"modes": ["xla!"]}, {"cases": []}]
)
def test_a_check_of_nothing_raises(options):
    """`all` of no results would be true."""
    with pytest.raises(ValueError):
        check(core, backend="numpy", **options)


def test_what_is_no_backend_or_implementation_is_told():
    with pytest.raises(TypeError):
        check(core, backend=np)
    with pytest.raises(ValueError):
        check(core, backend="numpy", implementations=["f"])
