"""What is odd and not wrong, what is wrong and no convention, and the cause that is told first of a planted fault."""

from dataclasses import replace

import numpy as np
import planted_kernels as planted
import pytest
from planted_kernels import TAKES, found, verdict_of

from attention_conformance import Subject, check_subject
from attention_conformance.kernel.probe import settled
from attention_conformance.measure.finding import CONVENTION, WRONG, Finding, grouped
from attention_conformance.mistakes.causes import agreed
from attention_conformance.mistakes.surprises import surprises
from attention_conformance.run.job import Job
from attention_conformance.run.questions import questions
from attention_core.backend import get_backend

PLAIN = {**TAKES, "mask": "none", "mask_name": "", "causal": "none", "grouped": False, "same_width": True}


def by_comparisons(query, key, value, mask=None, is_causal=False):
    """A softmax in whose comparisons NaN loses, as in C."""
    dtype = query.dtype
    query, key = query.astype(np.float32), np.repeat(key, query.shape[1] // key.shape[1], axis=1).astype(np.float32)
    value = np.repeat(value, query.shape[1] // value.shape[1], axis=1).astype(np.float32)
    scores = query @ np.swapaxes(key, -1, -2) / np.float32(query.shape[-1] ** 0.5)
    seen = scores > -1e30
    if mask is not None:
        seen = seen & mask
    if is_causal:
        seen = seen & (np.arange(scores.shape[-1]) <= np.arange(scores.shape[-2])[:, None])
    top = np.max(np.where(seen, scores, -1e30), axis=-1, keepdims=True)
    powers = np.where(seen, np.exp(scores - top), 0)
    total = powers.sum(axis=-1, keepdims=True)
    return (powers @ np.where(np.isfinite(value), value, 0) / np.where(total > 0, total, 1)).astype(dtype)


class Remembering:
    """The last result once more for the same objects."""

    def __init__(self):
        self.arrays, self.output = (None,) * 3, None

    def __call__(self, query, key, value):
        if not all(one is other for one, other in zip(self.arrays, (query, key, value), strict=True)):
            self.arrays, self.output = (query, key, value), planted.attention(query, key, value)
        return self.output.copy()


def of_single_precision(query, key, value):
    return planted.attention(*(each.astype(np.float32) for each in (query, key, value))).astype(query.dtype)


def always_causal(query, key, value):
    return planted.attention(query, key, value, is_causal=True)


def by_parts_of_16_bits(query, key, value):
    """As GPUs multiply float32: an infinity less its own leading bits is NaN."""
    with np.errstate(invalid="ignore"):
        return planted.attention(query, key, value + (value - value))


ODD = {
    # function: a case, its dtype, and the convention
    by_parts_of_16_bits: ("attended-plus-inf-value", "float32", "attended-nonfinite"),
    by_comparisons: ("attended-nan-key", "float32", "attended-nonfinite"),
    Remembering(): ("shape-20x34-plain-rewritten", "float32", "kept-by-identity"),
    of_single_precision: ("shape-65x65-plain", "float64", "float64-in-float32"),
}


@pytest.mark.parametrize("function", ODD, ids=lambda each: getattr(each, "__name__", type(each).__name__))
def test_an_odd_kernel_differs_by_a_convention_that_can_be_accepted(function):
    case, dtype, name = ODD[function]
    kernel = settled(Subject(function))
    assert verdict_of(kernel, case, dtype=dtype) == (CONVENTION, name)
    assert found(kernel, case, dtype=dtype, accepted=[name])[case].verdict == "accepted"
    cases = ("shape-65x65-plain", "shape-65x65-d64-causal", "masked-nan-*", "attended-*", "nan-*", "twice", "mask")
    others = [each for dtype in ("float32", "float64") for each in found(kernel, *cases, dtype=dtype).values()]
    assert {each.verdict for each in others} & set(WRONG) == set()


def test_a_call_that_writes_into_its_arguments_keeps_no_result():
    (told,) = found(Subject(planted.Kernel("scales the query in place")), "shape-20x34-plain-rewritten").values()
    assert (told.verdict, told.variant) == ("silently wrong", "changed-argument")


def test_a_leak_is_one_beyond_the_bound_of_16_bits_too():
    def attention(query, key, value, mask):
        scores = np.where(mask, query @ np.swapaxes(key, -1, -2) * query.dtype.type(query.shape[-1] ** -0.5), -np.inf)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        return (weights / weights.sum(axis=-1, keepdims=True)) @ value

    case, kernel = "attended-nan-value", Subject(attention, mask_name="mask", dtypes=("float16",))
    assert verdict_of(kernel, case, dtype="float16", seed=27) == (CONVENTION, "nan-through-mask")


def test_calls_before_a_case_take_the_mask_that_stands_for_causality():
    kernel = settled(Subject(lambda query, key, value, mask=None: planted.attention(query, key, value, mask)))
    assert found(kernel, "after-shorter")["after-shorter"].verdict == "right"


def test_the_dtype_of_an_output_is_looked_at_in_the_types_that_are_declared():
    def of_float32(query, key, value):
        return planted.attention(*(each.astype(np.float32) for each in (query, key, value)))

    assert not settled(Subject(of_float32)).keeps_dtype
    assert settled(Subject(of_float32, dtypes=("float32",))).keeps_dtype


def test_what_small_calls_found_about_all_of_a_kernel_is_told_first():
    leak = Finding("mask", "float32", 5, "", CONVENTION, variant="nan-through-mask")
    sense = Finding("probe: mask", "-", 1, "", CONVENTION, variant="inverted-mask")
    assert [each.variant for each, *_ in grouped([leak, leak, sense])] == ["inverted-mask", "nan-through-mask"]


def test_that_state_matters_is_told_before_other_causes():
    wrong = [Finding("mask", "float32", 1, "", "silently wrong", variant=each) for each in ("zeros", "zeros", "state")]
    assert [each.variant for each, *_ in grouped(wrong)] == ["state", "zeros"]


def test_what_predicts_the_wrong_numbers_is_told_before_what_fits_more_of_them():
    wrong = [Finding(case, "float32", 1, "", "silently wrong", variant="other-weights") for case in "abc"]
    exact = Finding("d", "float32", 1, "", "silently wrong", variant="zeros", equals=("zeros",))
    assert grouped([*wrong, exact])[0] == [exact]
    assert grouped([*(replace(each, rejected=("zeros",)) for each in wrong), exact])[1] == [exact]
    likely = [replace(each, variant="mask-of-another") for each in wrong[:2]]
    assert grouped([*wrong, *likely])[0] == likely
    assert grouped([*(replace(each, variant="inexact") for each in wrong * 3), exact, exact])[0] == [exact, exact]


def test_a_kernel_without_a_scale_is_not_asked_about_one_array_for_query_and_key():
    def unscaled(query, key, value, is_causal=False):
        return planted.attention(query, key, value, is_causal=is_causal, scale=1.0)

    told = found(settled(Subject(unscaled)), "memory-one-array", "shape-13x13-causal")
    assert told["shape-13x13-causal"].verdict == "right"
    got = (told["memory-one-array"].verdict, told["memory-one-array"].detail)
    assert got == ("not offered", "one array in two places")


def test_calls_before_a_case_are_those_that_a_kernel_takes():
    def of_one_type(query, key, value, bias=None):
        assert query.dtype == np.float32
        scores = query @ np.swapaxes(key, -1, -2) / np.float32(query.shape[-1] ** 0.5) + (0 if bias is None else bias)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        return weights / weights.sum(axis=-1, keepdims=True) @ value

    told = found(settled(Subject(of_one_type)), "after-rolled-mask", "after-other-dtype")
    assert {name: each.verdict for name, each in told.items()} == dict.fromkeys(told, "right")


def test_a_kernel_that_is_always_causal_is_understood_or_told_by_that_name():
    kernel = settled(Subject(always_causal))
    (told,) = surprises(kernel.declared, ())
    got = (kernel.layout, kernel.causal, told.verdict, told.variant)
    assert got == ("BHSD", "always", CONVENTION, "always-causal")
    cases = ("shape-13x13-causal", "shape-65x65-plain", "shape-65x130-causal", "decoding-equals-prefill")
    assert {each.verdict for each in found(kernel, *cases).values()} == {"right", "not offered"}
    wrong = found(Subject(always_causal, **PLAIN), "shape-65x65-plain", "shape-1x7-plain").values()
    assert {(each.verdict, each.variant) for each in wrong} == {("silently wrong", "always-causal")}


def test_rows_of_few_keys_and_large_scores_are_within_the_bound_of_a_plain_formula():
    def attention(query, key, value):
        scores = query @ np.swapaxes(key, -1, -2) * np.float32(query.shape[-1] ** -0.5)
        scores = np.where(np.tri(*scores.shape[-2:], dtype=bool), scores, -np.inf)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        return weights / weights.sum(axis=-1, keepdims=True) @ value

    (told,) = found(Subject(attention, **PLAIN | {"causal": "always"}), "scores-above-100").values()
    assert told.verdict == "right"
    assert told.error < told.bound / 4


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_sum_in_16_bits_is_wrong_and_scores_in_16_bits_are_a_convention(dtype):
    def attention(query, key, value, narrow_sums=True):
        kind = query.dtype
        scores = query.astype(np.float32) @ np.swapaxes(key, -1, -2).astype(np.float32) / query.shape[-1] ** 0.5
        scores = scores if narrow_sums else scores.astype(kind).astype(np.float32)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights = (weights / weights.sum(axis=-1, keepdims=True)).astype(np.float32)
        if not narrow_sums:
            return (weights @ value.astype(np.float32)).astype(kind)
        output = np.zeros((*query.shape[:-1], value.shape[-1]), kind)
        for at in range(key.shape[-2]):
            output = (output + weights[..., at : at + 1] * value[..., at : at + 1, :].astype(np.float32)).astype(kind)
        return output

    case, takes = "average-32768", PLAIN | {"dtypes": ("float32", dtype)}
    got = verdict_of(Subject(attention, **takes), case, dtype=dtype, accepted=["narrow-scores"])
    assert got == ("silently wrong", "narrow-sums")
    honest = Subject(lambda query, key, value: attention(query, key, value, False), **takes)
    told = found(honest, case, "scores-above-100", "shape-31x31-d80-plain", dtype=dtype).values()
    assert {each.variant for each in told} <= {"", "narrow-scores"}
    assert {each.verdict for each in told} <= {"right", CONVENTION}
    (near,) = found(honest, "shape-65x65-plain", dtype=dtype, seed=8).values()  # as a sink of 0 is, by chance
    assert near.verdict in ("right", CONVENTION)


def test_a_convention_stays_one_in_scores_of_16_bits():
    def attention(query, key, value, mask, before=lambda scores: scores):
        scores = np.einsum("bhmd,bhnd->bhmn", query, key) * query.dtype.type(query.shape[-1] ** -0.5)
        scores = np.where(mask, before(scores), np.finfo(query.dtype).min)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        return np.einsum("bhmn,bhne->bhme", weights / weights.sum(axis=-1, keepdims=True), value)

    def uneven(query, key, value, mask):
        return attention(query, key, value, mask, lambda scores: np.float16(1.1) * scores)

    cases = ("mask-of-queries", "empty-rows-130")
    for kernel, verdict, cause in ((attention, CONVENTION, "mean-of-masked-row"), (uneven, "silently wrong", "")):
        told = found(Subject(kernel, mask_name="mask"), *cases, dtype="float16").values()
        assert {(each.verdict, each.variant) for each in told} == {(verdict, cause)}


def test_products_of_11_bits_are_a_convention_of_accelerators_alone(monkeypatch):
    def rounded(each):
        fraction, exponent = np.frexp(np.asarray(each, np.float32))
        return np.ldexp(np.round(fraction * 2**11), exponent - 11).astype(np.float32)

    def attention(query, key, value, mask=None, scale=None, drops_mask=False):
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        scores = rounded(query) @ np.swapaxes(rounded(key), -1, -2) * np.float32(scale)
        scores = scores if mask is None or drops_mask else np.where(mask, scores, np.float32(-1e30))
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        return rounded(weights / weights.sum(axis=-1, keepdims=True)) @ rounded(value)

    def told(words=None, **options):
        kernel = settled(Subject(attention, options=words))
        results = found(kernel, "mask", "scale", "empty-row-mask", **options)
        return {name: (each.verdict, each.variant) for name, each in results.items()}

    inexact, wrong = ("silently wrong", "inexact"), ("silently wrong", "")
    assert told() == {"mask": inexact, "scale": inexact, "empty-row-mask": wrong}
    monkeypatch.setattr(type(get_backend("numpy")), "devices", lambda self: ["cuda:0"])
    mean = ("differs by convention", "mean-of-masked-row")
    assert told() == {"mask": (CONVENTION, "tf32"), "scale": (CONVENTION, "tf32"), "empty-row-mask": mean}
    accepted = told(accepted=["tf32"])
    assert accepted == {"mask": ("accepted", "tf32"), "scale": ("accepted", "tf32"), "empty-row-mask": mean}
    assert told(profile="tf32") == {"mask": ("right", ""), "scale": ("right", ""), "empty-row-mask": mean}
    assert told({"drops_mask": True})["mask"] == ("silently wrong", "no-mask")


def test_every_float_type_that_a_kernel_takes_is_checked():
    def widening(query, key, value):
        output = planted.attention(query, key, value)
        return output.astype(np.float32) if query.dtype == np.float64 else output

    kernel = settled(Subject(widening))
    asked = {each.dtype for each in questions(kernel, Job(""))}
    assert asked == set(kernel.dtypes) > {"float32", "float64"}
    assert verdict_of(kernel, "scores-above-100", dtype="float64") == ("visibly wrong", "")


@pytest.mark.needs("torch")
def test_arrays_of_numpy_for_tensors_are_a_convention_and_their_numbers_count():
    import torch.nn.functional as F  # noqa: N812

    def attention(query, key, value, factor=1):
        return F.scaled_dot_product_attention(query, key, value).numpy() * factor

    kernel, case = settled(Subject(attention)), "shape-65x65-plain"
    (told,) = (each for each in surprises(kernel.declared, ()) if each.verdict != "not understood")
    assert (kernel.backend, told.verdict, told.variant) == ("torch", CONVENTION, "other-kind")
    assert found(kernel, case)[case].verdict == "right"
    assert verdict_of(replace(kernel, options={"factor": 2}), case) == ("silently wrong", "doubled")
    other = found(replace(kernel, function=lambda query, key, value: "text"), case)[case]
    assert (other.verdict, other.detail) == ("visibly wrong", "expected arrays of torch; got str")


@pytest.mark.parametrize("fault", ["adds to an old buffer", "one call late"])
def test_a_stale_workspace_is_told_as_such_and_its_layout_is_not_guessed(fault):
    last, function = {}, planted.Kernel(fault)

    def late(query, key, value):
        output = function(query, key, value)
        before, last[output.shape] = last.get(output.shape, np.zeros_like(output)), output
        return before.astype(output.dtype)

    attention = late if fault == "one call late" else function
    kernel = settled(Subject(attention))
    assert kernel.layout == "BHSD"
    cases = ("shape-31x31-d80-plain", "shape-65x65-plain", "shape-1x7-plain")
    _, second = (found(kernel, *cases, seed=seed) for seed in range(2))
    told = {each.variant for each in second.values() if each.verdict in WRONG}
    assert told == {"former-memory"}


CAUSES = {
    "inverted mask": "inverted-mask", "mask of the first query": "mask-of-first-query",
    "mask hides causality": "no-causality", "future key from 256": "future-key", "scale ignored": "scale-ignored",
    "sign of the scale lost": "absolute-scale", "ragged block lost": "ragged-block-lost",
    "old maximum": "unscaled-maximum", "not divided": "other-sum",
    "keys of the first sample": "first-sample-of-key", "kept by mask's shape": "former-mask",
    "other bits in one call of eight": "other-bits", "contiguous value taken for granted": "strides-ignored",
    "the value itself": "shared-memory",
}  # fmt: skip
"""Planted faults, and what has to be told of them first."""


@pytest.mark.parametrize(("fault", "cause"), CAUSES.items())
def test_the_cause_that_is_told_first_is_the_fault_that_was_planted(fault, cause):
    kernel = Subject(planted.Kernel(fault), **TAKES)
    cases = ("shape-65x65-plain", "shape-128x128-d64-causal", "shape-1x130-plain", "mask", planted.FORWARD[fault])
    results = check_subject(kernel, cases=cases, dtypes=["float32"], power=False)
    first = grouped(each for each in results if each.verdict in WRONG)[0][0].variant
    assert first in (cause, fault.replace(" ", "-"))  # as rounding differs from processor to processor


def test_a_cause_that_other_wrong_answers_contradict_is_not_told():
    def wrong(case, equals, rejected):
        says = "the output is 0" if equals else ""
        return Finding(case, "float32", 8, "", "silently wrong", variant="".join(equals[:1]), says=says, equals=equals,
                       rejected=rejected)  # fmt: skip

    alone = [wrong("a", ("zeros", "no-mask"), ()), wrong("b", (), ("zeros",))]
    assert [each.variant for each in agreed(alone)] == ["no-mask", ""]
    assert agreed([*alone, *[wrong(name, (), ("zeros", "no-mask")) for name in "cde"]])[0].variant == ""
    right = [replace(wrong(name, (), ("uniform-weights",)), verdict="right") for name in "abcdefghijklmnopqrstuvwx"]
    by_chance = wrong("y", ("uniform-weights",), ())
    assert [agreed([by_chance, *each])[0].variant for each in ([], right)] == ["uniform-weights", ""]


@pytest.mark.needs("torch")
def test_a_fault_that_scores_of_16_bits_explain_as_well_is_a_convention():
    def attention(q, k, v):
        return (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1) @ v

    scores = {"cases": ["scores-*"], "dtypes": ["bfloat16"]}
    found = check_subject(Subject(attention, backend="torch"), **scores)
    assert {(each.verdict, each.variant) for each in found} == {(CONVENTION, "narrow-scores")}
    accepted = check_subject(Subject(attention, backend="torch"), **scores, accepted=["narrow-scores"])
    assert {each.verdict for each in accepted} == {"accepted"}
