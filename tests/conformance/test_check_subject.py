"""Anybody's attention: every planted fault is caught and named."""

import importlib
import json
import math
from dataclasses import replace

import numpy as np
import planted_kernels as planted
import pytest
from planted_kernels import TAKES, found, verdict_of

from attention_conformance import CASES, Finding, Subject, load_target, problem_of
from attention_conformance.kernel.adapters import masked_by_lengths
from attention_conformance.kernel.probe import settled
from attention_conformance.measure.finding import WRONG, accept, most_telling, to_row
from attention_conformance.mistakes.surprises import surprises
from attention_conformance.oracle.attention import attention
from attention_conformance.oracle.dense import answer, dense_of
from attention_conformance.oracle.gradients import gradients
from attention_conformance.oracle.ulps import worst_error
from attention_core import scaled_dot_product_attention


@pytest.mark.parametrize(("fault", "case"), planted.FORWARD.items())
def test_a_planted_fault_is_caught(fault, case):
    assert found(Subject(planted.Kernel(), **TAKES), case)[case].verdict == "right"
    assert found(Subject(planted.Kernel(fault), **TAKES), case)[case].verdict in WRONG


def test_a_kernel_that_promises_the_same_bits_in_any_batch_is_held_to_it():
    bounds, bits = "batch-invariance", "batch-invariance-bits"
    verdicts = {}
    for fault in ("", "a last bit that counts the samples", "the first mask in a large batch"):
        kernel = Subject(planted.Kernel(fault), **TAKES, batch_invariant=True)
        verdicts[fault] = {name: each.variant or each.verdict for name, each in found(kernel, bounds, bits).items()}
    assert verdicts[""] == {bounds: "right", bits: "right"}
    assert verdicts["a last bit that counts the samples"] == {bounds: "right", bits: "other-bits-in-batch"}
    assert verdicts["the first mask in a large batch"][bounds] not in ("right", "not offered")
    unpromised = found(Subject(planted.Kernel("a last bit that counts the samples"), **TAKES), bounds, bits)
    assert {name: each.verdict for name, each in unpromised.items()} == {bounds: "right", bits: "not offered"}


@pytest.mark.parametrize(("fault", "case"), planted.BACKWARD.items())
def test_a_fault_planted_in_a_raw_backward_function_is_caught(fault, case):
    takes = TAKES | {"returns": ("output", "logsumexp")}
    assert found(Subject(planted.forward, backward=planted.Backward(), **takes), case)[case].verdict == "right"
    assert found(Subject(planted.forward, backward=planted.Backward(fault), **takes), case)[case].verdict in WRONG


class Dropping:
    """A kernel with dropout of its own generator, and one fault by its name."""

    def __init__(self, fault=""):
        self.fault, self.random = fault, np.random.default_rng(1)

    def __call__(self, query, key, value, dropout_p=0.0):
        if not dropout_p:
            return planted.attention(query, key, value)
        shape = (*key.shape[:2], key.shape[-2], key.shape[-2])
        weights = planted.attention(query, key, np.broadcast_to(np.eye(key.shape[-2], dtype=key.dtype), shape))
        fault = self.fault
        random = np.random.default_rng(1) if fault == "same mask each call" else self.random
        shape = weights.shape[2:] if fault == "one mask for all heads" else weights.shape
        kept = random.random(shape) >= (dropout_p**2 if fault == "squared rate" else dropout_p)
        factor = 1.0 if fault == "no factor" else 1 / (1 - dropout_p)
        return (weights * kept * np.asarray(factor, weights.dtype)) @ value


DROPPING = ("same mask each call", "one mask for all heads", "squared rate", "no factor")


def test_dropout_of_a_foreign_generator_is_checked_by_its_share_factor_and_masks():
    case = "dropout-of-its-own"
    verdicts = {}
    for fault in ("", *DROPPING):
        kernel = settled(Subject(Dropping(fault)))
        verdicts[fault] = found(kernel, case)[case].verdict
    assert verdicts.pop("") == "right"
    assert set(verdicts.values()) == {"silently wrong"}


@pytest.mark.needs("torch")
@pytest.mark.parametrize("is_wrong", [False, True])
def test_gradients_of_dropout_are_those_of_what_was_dropped(is_wrong):
    torch, case = importlib.import_module("torch"), "dropout-of-its-own"

    def attention(query, key, value, dropout_p=0.0):
        weights = torch.softmax(query @ key.mT * query.shape[-1] ** -0.5, dim=-1)
        dropped = torch.dropout(weights, dropout_p, train=True)
        return (weights + (dropped - weights).detach() if is_wrong else dropped) @ value

    torch.manual_seed(0)
    verdict = found(settled(Subject(attention, backend="torch")), case)[case].verdict
    assert (verdict in WRONG) == is_wrong


def by_pieces(fault=""):
    """A kernel that returns (output, logsumexp), with a fault of the second."""

    def attention(query, key, value, mask=None, is_causal=False, scale=None):
        output, logsumexp = planted.forward(query, key, value, mask, is_causal, scale)
        if fault == "maximum for the logsumexp":
            return output, np.floor(logsumexp)
        return output, logsumexp / np.log(2).astype(np.float32) if fault == "base 2" else logsumexp

    return attention


def test_pieces_are_merged_by_the_logsumexp_that_a_kernel_returns():
    case, verdicts = "merged-pieces", {}
    for fault in ("", "base 2", "maximum for the logsumexp"):
        kernel = settled(Subject(by_pieces(fault)))
        verdicts[fault] = {name: each.variant or each.verdict for name, each in found(kernel, case, "scale").items()}
    assert verdicts[""] == {case: "right", "scale": "right"}
    assert verdicts["base 2"] == {case: "right", "scale": "logsumexp-of-base-2"}
    assert verdicts["maximum for the logsumexp"] == {case: "silently wrong", "scale": "silently wrong"}


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_logsumexp_of_weights_in_16_bits_is_not_called_wrong_and_one_that_is_off_is(dtype):
    def attention(query, key, value, factor=1.0):
        scores = query.astype(np.float32) @ np.swapaxes(key, -1, -2).astype(np.float32)
        scores = scores / np.float32(query.shape[-1] ** 0.5)
        top = scores.max(axis=-1, keepdims=True)
        weights = np.exp(scores - top).astype(query.dtype).astype(np.float32)
        total = weights.sum(axis=-1, keepdims=True)
        output = (weights @ value.astype(np.float32) / total).astype(query.dtype)
        return output, factor * (top + np.log(total))[..., 0]

    def off(query, key, value):
        return attention(query, key, value, np.float32(1.02))

    takes = {**TAKES, "returns": ("output", "logsumexp"), "dtypes": (dtype,), "mask": "none", "causal": "none"}
    takes |= {"mask_name": "", "mask_with_causal": False, "grouped": False, "same_width": True}
    verdicts = [
        found(Subject(each, **takes), "shape-1x7-plain", "shape-1x130-plain", dtype=dtype) for each in (attention, off)
    ]
    for right, wrong in zip(*(each.values() for each in verdicts), strict=True):
        assert (right.verdict, wrong.verdict) == ("right", "silently wrong"), (right, wrong)


def test_a_row_of_the_lowest_scores_is_no_masked_row():
    def attention(query, key, value, bias=None, lowest=-np.inf):
        scores = query @ np.swapaxes(key, -1, -2) / np.float32(query.shape[-1] ** 0.5)
        scores = scores if bias is None else scores + bias
        top = scores.max(axis=-1, keepdims=True)
        weights = np.where(top > lowest, np.exp(scores - top), 0)
        return weights @ value / np.maximum(weights.sum(axis=-1, keepdims=True), np.float32(1e-30))

    def zeroing(query, key, value, bias=None):
        return attention(query, key, value, bias, -1e30)

    told = [found(settled(Subject(each)), "lowest-finite-bias")["lowest-finite-bias"] for each in (attention, zeroing)]
    assert [each.verdict for each in told] == ["right", "silently wrong"]
    assert told[1].variant == "lowest-bias-hides"


@pytest.mark.parametrize(("habit", "told"), planted.CONVENTIONS.items())
def test_a_difference_of_convention_is_told_by_its_name_and_can_be_accepted(habit, told):
    case, name = told
    kernel = Subject(planted.Kernel(habit), **TAKES)
    assert verdict_of(kernel, case) == ("differs by convention", name)
    assert found(kernel, case, accepted=[name])[case].verdict == "accepted"


def test_nan_where_there_is_no_key_is_that_of_a_masked_row():
    kernel = Subject(planted.Kernel("nan of a masked row"), **TAKES)
    assert verdict_of(kernel, "no-keys") == ("differs by convention", "nan-of-masked-row")


HIDDEN = (
    "masked-*", "attended-inf-value", "attended-nan-key", "empty-row-bias", "decode-nan-cache", "padding-nan",
    "gradient-masked-nonfinite",
)  # fmt: skip


@pytest.mark.parametrize("lowest", [-np.inf, -1e9])
@pytest.mark.parametrize("library", ["torch", "jax"])
@pytest.mark.needs("library")
def test_a_plain_formula_that_adds_its_mask_is_not_called_wrong_where_it_multiplies_0_by_nan(library, lowest):
    xp = importlib.import_module("torch" if library == "torch" else "jax.numpy")

    def attention(query, key, value, mask=None, bias=None, is_causal=False):
        scores = query @ key.swapaxes(-1, -2) / query.shape[-1] ** 0.5
        if bias is not None:
            scores = scores + bias
        if mask is not None:
            scores = scores + xp.where(mask, 0.0, lowest)
        if is_causal:
            scores = scores + xp.where(xp.tril(xp.ones(scores.shape[-2:], dtype=xp.bool)), 0.0, lowest)
        powers = xp.exp(scores - scores.max(-1, keepdims=True)) if library == "jax" else scores.softmax(-1)
        return (powers / powers.sum(-1, keepdims=True)) @ value

    if library == "jax":  # eager, each operation is compiled for each shape
        attention = importlib.import_module("jax").jit(attention, static_argnames="is_causal")
    results = found(settled(Subject(attention, backend=library)), *HIDDEN)
    told = {(each.verdict, each.variant) for each in results.values()} - {("right", "")}
    assert told == {("differs by convention", "nan-through-mask")}, results
    assert results["gradient-masked-nonfinite"].variant == "nan-through-mask"
    assert results["masked-nan-key"].variant == "nan-through-mask"


@pytest.mark.needs("jax")
def test_the_bits_of_equal_calls_are_compared_in_one_way_of_calling():
    import jax

    kernel, case = Subject(jax.nn.dot_product_attention, backend="jax"), "shape-64x513-h4on1-d16-plain-again"
    assert found(settled(kernel), case)[case].verdict == "right"


@pytest.mark.needs("jax")
def test_lengths_of_a_kernel_of_jax_are_read_from_masks():
    import jax

    def attention(query, key, value, key_value_seq_lengths=None):
        first = None if key_value_seq_lengths is None else 0 * key_value_seq_lengths + key_value_seq_lengths[0]
        return jax.nn.dot_product_attention(query, key, value, key_value_seq_lengths=first)

    kernel = masked_by_lengths(attention, "key_value_seq_lengths")
    (told,) = found(settled(Subject(kernel, backend="jax", mask_name="mask")), "key-lengths").values()
    assert (told.verdict, told.variant) == ("silently wrong", "mask-of-first-sample")


@pytest.mark.needs("jax")
def test_a_kind_of_device_is_its_first_device():
    kernel = Subject(scaled_dot_product_attention, backend="jax", device="cpu")
    assert found(kernel, "scale")["scale"].verdict == "right"


@pytest.mark.needs("torch")
def test_scores_of_16_bits_are_a_habit_of_plain_formulas_and_a_fault_of_kernels_of_16_bits_alone():
    def attention(query, key, value):
        return (query @ key.mT * query.shape[-1] ** -0.5).softmax(-1) @ value

    for dtypes, verdict in ((("float32", "bfloat16"), "differs by convention"), (("bfloat16",), "silently wrong")):
        kernel = settled(Subject(attention, backend="torch", dtypes=dtypes))
        results = found(kernel, "shape-33x65-plain-scaled", "shape-31x31-d80-plain", dtype="bfloat16").values()
        assert {(each.verdict, each.variant) for each in results} - {("right", "")} == {(verdict, "narrow-scores")}


@pytest.mark.parametrize("fault", [each for each in planted.LEAKS if planted.LEAKS[each] is not None])
def test_nan_that_spreads_farther_than_0_times_nan_is_visibly_wrong(fault):
    case = planted.FORWARD[fault]
    got = verdict_of(Subject(planted.Kernel(fault), **TAKES), case, accepted=["nan-through-mask"])
    assert got == ("visibly wrong", "nan-spreads")


def test_a_wrong_answer_is_told_by_the_fault_that_it_equals():
    named = {"zeros": "zeros", "mask ignored": "no-mask", "future key from 64": "future-key-from-64", "heads in turn": "heads-in-turn",
             "no scale": "no-scale"}  # fmt: skip
    for fault, name in named.items():
        case = planted.FORWARD[fault]
        assert found(Subject(planted.Kernel(fault), **TAKES), case)[case].variant == name


def test_a_wrong_result_has_its_worst_element_and_its_arrays_again():
    kernel = Subject(planted.Kernel("future key from 64"), **TAKES)
    wrong = found(kernel, "shape-128x128-d64-causal", seed=5)["shape-128x128-d64-causal"]
    assert str(wrong.worst.index) in wrong.detail
    assert f"expected {wrong.worst.expected:.9g}; got {wrong.worst.got:.9g}" in wrong.detail
    arrays = problem_of(wrong, kernel).arrays
    assert {name: each.shape for name, each in arrays.items()} == wrong.shapes
    got = kernel.function(*(arrays[name] for name in ("query", "key", "value")), is_causal=True)
    assert got[wrong.worst.index] == wrong.worst.got
    row = json.loads(json.dumps(to_row(replace(wrong, error=math.inf)), allow_nan=False))
    assert (row["error"], row["worst"]["got"]) == ("inf", wrong.worst.got)


def test_the_most_telling_result_is_silent_wide_and_small():
    def made(case, verdict, dtype, rows):
        return Finding(case, dtype, 1, "", verdict, shapes={"query": (rows, 8)})

    telling = made("this", "silently wrong", "float32", 5)
    others = [made("a", "crashed", "float32", 1), made("b", "silently wrong", "float16", 2)]
    others += [made("c", "silently wrong", "float32", 9), made("d", "right", "float32", 1)]
    assert most_telling([*others, telling]) is telling
    assert most_telling(others[3:]) is None


def test_an_honest_pair_without_autograd_is_right():
    kernel = settled(Subject(planted.forward, backward=planted.Backward()))
    verdicts = {each.verdict for each in found(kernel, "gradient*").values()}
    assert verdicts == {"right", "not offered"}


def test_sums_of_one_term_after_the_other_are_not_called_wrong():
    def attention(query, key, value):
        scores = query @ key.swapaxes(-1, -2) / np.float32(query.shape[-1] ** 0.5)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        total = np.cumsum(weights, axis=-1, dtype=weights.dtype)[..., -1:]
        rows = (weights[:, :, row, :, None] * value for row in range(weights.shape[2]))
        sums = [np.cumsum(each, axis=2, dtype=each.dtype)[:, :, -1] for each in rows]
        return np.stack(sums, axis=2) / total

    results = found(Subject(attention, **TAKES), "average-32768")
    assert {each.verdict for each in results.values()} == {"right"}


@pytest.mark.needs("torch")
def test_gradients_of_one_array_are_those_of_the_array_that_was_passed():
    def attention(query, key, value):  # without a scale, so that the kit puts it into the query
        return (query @ key.transpose(-1, -2)).softmax(-1) @ value

    options = {"backend": "torch", "default_scale": "one", "differentiates": True}
    results = found(Subject(attention, **TAKES | options), "gradient-of-one-array", "gradient-after-other-forward")
    assert [each.verdict for each in results.values()] == ["right", "right"]


@pytest.mark.needs("torch")
def test_the_gradient_of_a_number_has_no_axes():
    results = found(load_target("attention-core", backend="torch"), "gradient-score-mod")
    assert [each.verdict for each in results.values()] == ["right"]


def test_bounds_reject_faults_of_the_definition():
    cases = ("shape-129x129-d64-causal", "grouped-heads", "no-queries")
    results = found(Subject(planted.Kernel(), **TAKES), *cases, power=True)
    assert bool(results["no-queries"].planted) > bool(results["no-queries"].rejected)
    assert "future-key-from-64" in results["shape-129x129-d64-causal"].rejected
    assert "heads-in-turn" in results["grouped-heads"].rejected
    loose = found(Subject(planted.Kernel(), **TAKES), "shape-129x129-d64-causal", power=True, profile="tf32")
    assert loose["shape-129x129-d64-causal"].bound > 100 * results["shape-129x129-d64-causal"].bound


@pytest.mark.needs("numpy")
def test_the_wide_reference_is_that_of_50_digits():
    for name in ("mask-and-bias", "attended-inf-value", "attended-nan-key", "sinks", "softcap-before-bias-and-mask",
                 "empty-row-bias", "gradient-mask-and-bias", "gradient-sinks", "gradient-softcap", "gradient-grouped",
                 "gradient-empty-row-bias", "gradient-structured"):  # fmt: skip
        problem = next(case for case in CASES if case.name == name).problem("float32")
        if name == "attended-inf-value":
            problem.arrays["value"][..., :2, 0] = [math.inf, -math.inf]
        wide = answer(dense_of(problem))
        exact = gradients(problem) if problem.cotangent is not None else attention(problem).arrays
        for result, array in wide.arrays.items():
            error, where = worst_error(array.astype(np.float64), exact[result], "float64")
            assert error < 64, (name, result, where)
            finite = np.isfinite(exact[result].scale)
            np.testing.assert_allclose(wide.scales[result][finite], exact[result].scale[finite], rtol=1e-9)


def test_a_logsumexp_in_float32_of_an_output_in_float64_is_a_convention():
    def attention(query, key, value):
        scores = query @ np.swapaxes(key, -1, -2) / query.dtype.type(query.shape[-1] ** 0.5)
        logsumexp = np.log(np.exp(scores).sum(axis=-1))
        return np.exp(scores - logsumexp[..., None]) @ value, logsumexp.astype(np.float32)

    case = "shape-65x65-plain"
    got = verdict_of(settled(Subject(attention)), case, dtype="float64")
    assert got == ("differs by convention", "float64-in-float32")


def test_conventions_that_a_call_has_found_are_told_unless_they_are_declared_or_accepted():
    kernel = settled(Subject(planted.Kernel("inverted mask")))
    (told,) = surprises(kernel.declared, ())
    assert (told.verdict, told.variant, told.line) == ("differs by convention", "inverted-mask", 1)
    assert told.detail == "declare it with --mask-kind drop"
    assert surprises(kernel.declared, ("mask",)) == []
    assert [accept(each, ["inverted-mask"]).verdict for each in surprises(kernel.declared, ())] == ["accepted"]
    (told,) = surprises(settled(Subject(planted.Kernel("other dtype"))).declared, ())
    assert (told.verdict, told.variant) == ("visibly wrong", "other-dtype")


@pytest.mark.needs("torch")
def test_autograd_of_a_framework_is_checked_and_a_wrong_backward_function_is_caught(backend):
    import torch
    import torch.nn.functional as F  # noqa: N812

    def honest(query, key, value, mask=None):
        scores = (query @ key.transpose(-1, -2)).float() * query.shape[-1] ** -0.5
        scores = scores if mask is None else scores.masked_fill(~mask, -torch.inf)
        weights = torch.softmax(scores, dim=-1)
        weights = weights if mask is None else weights.masked_fill(~mask, 0.0)
        return (weights @ value.float()).to(query.dtype)

    class WithoutMask(torch.autograd.Function):
        """Without its mask going backward, and zeros unless all three gradients are asked for."""

        @staticmethod
        def forward(context, query, key, value, mask):
            context.save_for_backward(query, key, value)
            return honest(query, key, value, mask)

        @staticmethod
        def backward(context, cotangent):
            with torch.enable_grad():
                leaves = [each.detach().requires_grad_() for each in context.saved_tensors]
                found = torch.autograd.grad(honest(*leaves), leaves, cotangent)
            return *(found if all(context.needs_input_grad[:3]) else map(torch.zeros_like, found)), None

    def wrong(query, key, value, mask=None):
        return WithoutMask.apply(query, key, value, mask)

    def together(query, key, value):
        return wrong(query, key, value)

    for function, verdict in ((honest, "right"), (wrong, "silently wrong")):
        kernel = settled(Subject(function, backend="torch"))
        assert kernel.differentiates
        results = found(kernel, "mask", "shape-130x130-d64-mask-gradient", "shape-18x34-h3on3-plain-permuted-gradient")
        assert results["mask"].verdict == results["shape-18x34-h3on3-plain-permuted-gradient"].verdict == "right"
        assert results["shape-130x130-d64-mask-gradient"].verdict == verdict
    verdicts = {}
    for function in (honest, together, F.scaled_dot_product_attention):
        kernel = settled(Subject(function, backend="torch"))
        results = found(kernel, "gradient-of-one-array", "gradient-after-other-forward", "dropout-of-its-own")
        verdicts[function.__name__] = [each.verdict for each in results.values()]
    assert verdicts == {
        "honest": ["not offered", "right", "right"],
        "together": ["not offered", "silently wrong", "right"],
        "scaled_dot_product_attention": ["right", "right", "right"],
    }
