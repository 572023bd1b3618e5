"""What a report says of a fault: its name, where the errors are, and threads about the property."""

import functools
import re

import ml_dtypes
import numpy as np
import planted_kernels as planted
import pytest
from planted_kernels import TAKES, found, verdict_of

from attention_conformance import Subject
from attention_conformance.kernel.probe import settled
from attention_conformance.measure.catalogue import kernel_cases
from attention_conformance.measure.finding import WRONG, grouped
from attention_conformance.mistakes.causes import agreed
from attention_conformance.mistakes.variants import TABLES
from attention_conformance.named.related import seen_before

PLAIN = {**TAKES, "mask": "none", "mask_name": "", "causal": "none", "grouped": False}


def masked_by_the_first_sample(query, key, value, mask=None):
    """A boolean mask of the first sample for all; other masks are added, as they should be."""
    if mask is not None and mask.dtype == bool and mask.ndim == 4:
        mask = np.broadcast_to(mask[:1], (query.shape[0], *mask.shape[1:]))
    kernel = planted.Kernel()
    if mask is None or mask.dtype == bool:
        return kernel(query, key, value, mask)
    kernel.bias = np.where(mask == -np.inf, 0, mask).astype(np.float32)
    return kernel(query, key, value, mask != -np.inf)


def test_a_mask_that_is_wrong_in_some_sample_is_a_boolean_mask_all_the_same():
    kernel = settled(Subject(masked_by_the_first_sample))
    assert (kernel.mask, kernel.bias_name) == ("keep", "mask")
    assert verdict_of(kernel, "shape-70x130-h3on3-maskb") == ("silently wrong", "mask-of-first-sample")


def test_booleans_that_are_added_show_a_mask_that_is_added():
    def attention(query, key, value, mask=None):
        scores = query @ np.swapaxes(key, -1, -2) / np.float32(query.shape[-1] ** 0.5)
        weights = np.exp(scores - scores.max() if mask is None else scores - scores.max() + mask)
        return ((weights / weights.sum(axis=-1, keepdims=True)) @ value).astype(query.dtype)

    assert settled(Subject(attention)).mask == "additive"


def test_a_cache_by_shape_is_told_by_the_array_that_it_keeps():
    kept = {}

    def attention(query, key, value):
        return planted.attention(query, kept.setdefault(key.shape, key.copy()), value)

    assert verdict_of(Subject(attention, **PLAIN), "shape-33x33-plain-again") == ("silently wrong", "former-key")


def test_arrays_that_are_read_without_their_strides_are_told():
    def attention(query, key, value):
        if not value.flags.c_contiguous:
            value = value.base.reshape(-1)[: value.size].reshape(value.shape)
        return planted.attention(query, key, value)

    got = verdict_of(Subject(attention, **PLAIN), "shape-18x34-h3on3-plain-permutedvalue")
    assert got == ("silently wrong", "strides-ignored")


def test_a_fault_of_the_logsumexp_is_no_fault_of_the_output():
    def attention(query, key, value):
        scores = query @ np.swapaxes(key, -1, -2) / np.float32(query.shape[-1] ** 0.5)
        powers = np.exp(scores - scores.max(axis=-1, keepdims=True))
        total = powers.sum(axis=-1, keepdims=True)
        return (powers / total) @ value, np.log(total)[..., 0]

    wrong = found(
        Subject(attention, **(PLAIN | {"returns": ("output", "logsumexp")})), "shape-1x7-plain", "shape-1x130-plain"
    )
    assert {each.variant for each in wrong.values()} == {"logsumexp-without-maximum"}


def test_errors_that_no_cause_predicts_are_told_by_where_all_of_them_are():
    def attention(query, key, value):
        output = planted.attention(query, key, value)
        output[:, -1] *= np.float32(1.01)
        return output

    wrong = found(Subject(attention, **PLAIN), "shape-1x130-plain", "shape-5x9-b3-h70on70-d16-plain")
    told = {(each.variant, each.says.partition("; ")[2]) for each in wrong.values()}
    assert told == {("other-sum", "all errors are in the last head")}


def test_a_nan_of_one_query_in_the_row_before_it_spreads():
    def attention(query, key, value):
        output = planted.attention(query, key, value)
        output[..., :-1, :] += 0 * output[..., 1:, :]
        return output

    assert verdict_of(Subject(attention, **PLAIN), "nan-query") == ("visibly wrong", "nan-spreads")


SLIPS = [
    "softmax-over-queries", "softmax-over-heads", "masked-after-softmax", "powers-of-2", "powers-of-e",
    "key-and-value-swapped", "width-from-64-lost", "reversed-causality", "causality-by-blocks-of-32",
    "lost-keys", "causality-of-first-query", "mask-transposed", "keys-after-hidden-lost",
    "keys-beyond-queries-lost", "heads-not-transposed", "mask-or-causality", "mask-of-another",
    "scale-of-padded-width", "nan-of-hidden-block", "inexact", "ragged-block-of-8-lost", "keys-twice",
    "wrapped-offset", "skipped-blocks", "answer-of-another", "inexact-weights", "value-rows-by-key-width",
    "keys-of-first-sample", "causality-anew-at-32", "unscaled-parts", "parts-of-another-base", "last-seen-key-lost",
    "keys-of-score-0", "masked-scores-of-0", "factor", "unequal-scores", "operands-of-8-bits", "lost-channels", "shifted-causality", "windowed",
]  # fmt: skip


def test_heads_that_are_shared_by_a_shift_and_one_query_that_sees_all_keys_are_told():
    def attention(query, key, value, is_causal=False):
        shift = (query.shape[1] // key.shape[1]).bit_length() - 1
        of_heads = np.minimum(np.arange(query.shape[1]) >> shift, key.shape[1] - 1)
        rest = is_causal and query.shape[2] > 1
        return planted.attention(query, key[:, of_heads], value[:, of_heads], is_causal=rest)

    told = found(Subject(attention, **PLAIN | {"grouped": True}), case := "shape-63x65-h9on3-d72-plain")[case]
    assert told.variant == "other-kv-heads"
    assert "KV heads 0, 0, 1, 1, 2, 2, 2, 2, 2, in place of 0, 0, 0, 1, 1, 1, 2, 2, 2" in told.says
    kernel = Subject(attention, **PLAIN | {"causal": "top-left", "causal_name": "is_causal"})
    results = found(kernel, "shape-1x33-causal", "shape-1x65-causal", "shape-17x33-causal")
    assert [each.variant for each in agreed(list(results.values()))] == ["mixed-causal", "mixed-causal", ""]


@pytest.mark.parametrize("slip", SLIPS)
def test_a_formula_with_one_slip_is_told_by_the_slip(slip):
    def attention(query, key, value, mask=None, is_causal=False):
        width, scale = query.shape[-1], np.float32(query.shape[-1] ** -0.5)
        rows, columns = np.arange(query.shape[-2])[:, None], np.arange(key.shape[-2])
        key, value = (value, key) if slip == "key-and-value-swapped" else (key, value)
        kind = ml_dtypes.bfloat16 if slip == "operands-of-8-bits" else np.float32
        query, key, value = (each.astype(kind).astype(np.float32) for each in (query, key, value))
        key = key[..., columns % 24, :] if slip == "wrapped-offset" else key
        if slip == "keys-of-first-sample":
            key, value = (np.where((columns < 9)[:, None], each[:1], each) for each in (key, value))
        if slip == "value-rows-by-key-width" and value.shape[-1] > width:
            value = value.reshape(*value.shape[:2], -1)[..., columns[:, None] * width + np.arange(value.shape[-1])]
        width = {"width-from-64-lost": 64, "lost-channels": 21}.get(slip, width)
        scale = scale / np.float32(np.log(2)) if slip == "powers-of-e" else scale
        scale = np.float32((-(-width // 32) * 32) ** -0.5) if slip == "scale-of-padded-width" else scale
        scores = scale * query[..., :width] @ np.swapaxes(key[..., :width], -1, -2)
        seen = {
            "reversed-causality": columns >= rows,
            "causality-by-blocks-of-32": columns // 32 <= rows // 32,
            "causality-of-first-query": columns <= 0 * rows,
            "causality-anew-at-32": columns <= rows % 32,
            "shifted-causality": columns <= rows + 2 * (rows >= 16),
            "windowed": (columns <= rows) & (columns > rows - 9),
        }
        seen = seen.get(slip, columns <= rows) if is_causal else columns >= 0
        if mask is not None:
            mask = np.swapaxes(mask, -1, -2) if slip == "mask-transposed" and mask.shape[-1] == mask.shape[-2] else mask
            mask = np.roll(mask, 1, axis=-2) if slip == "mask-of-another" else mask
            mask = np.logical_and.accumulate(mask, axis=-1) if slip == "keys-after-hidden-lost" else mask
            seen = seen | mask if slip == "mask-or-causality" and is_causal else seen & mask
        seen = seen & (columns < rows.size) if slip == "keys-beyond-queries-lost" else seen
        seen = seen & (columns < columns.size // 8 * 8) if slip == "ragged-block-of-8-lost" else seen
        seen = seen & ((columns < 11) | (columns > 13)) if slip == "lost-keys" else seen
        if slip == "skipped-blocks":
            blocks = np.logical_or.reduceat(seen & (scores == scores), columns[::16], axis=-1)
            seen = seen & blocks[..., np.minimum(rows[:, 0] // 16 * 16 + 15, len(rows) - 1), :][..., columns // 16]
        if slip == "last-seen-key-lost" and mask is not None:
            seen = seen & (columns != columns[-1] - (seen & mask)[..., ::-1].argmax(axis=-1, keepdims=True))
        if slip == "masked-scores-of-0":
            scores, seen = np.where(seen, scores, 0), columns >= 0
        axis = {"softmax-over-queries": -2, "softmax-over-heads": -3}.get(slip, -1)
        powers = (np.exp2 if slip == "powers-of-2" else np.exp)(scores - scores.max(axis=axis, keepdims=True))
        powers = powers.astype(np.float16).astype(np.float32) if slip == "inexact" else powers
        powers = powers * (1 + ((columns >= 8) & (columns < 12))) if slip == "keys-twice" else powers
        powers = powers * (1 + 0.02 * np.sin(90 * scores)) if slip == "inexact-weights" else powers
        powers = powers ** (1 + 0.3 * (columns >= 16)) if slip == "unequal-scores" else powers
        powers = np.where(seen[..., :1], powers, np.nan) if slip == "nan-of-hidden-block" else powers
        powers = powers if slip == "masked-after-softmax" else np.where(seen, powers, 0)
        if slip in ("unscaled-parts", "parts-of-another-base"):
            join, power = (np.maximum, -1) if slip == "unscaled-parts" else (np.add, 1 / np.log(2) - 1)
            shares = join.reduceat(np.where(seen, powers, 0), columns[::64], axis=-1)[..., columns // 64]
            powers = powers * np.where(shares > 0, shares, 1) ** power
        total = powers.sum(axis=axis, keepdims=True)
        more = 1 + -columns.size % 32 if slip == "keys-of-score-0" else 0  # a sink of 0, and padding
        total = total + more * np.exp(-scores.max(axis=axis, keepdims=True))
        output = np.where(seen, powers / np.where(total > 0, total, 1), 0) @ value
        output = output * np.float32(0.9 if slip == "factor" else 1)
        output = (output[..., ::-1, :] if slip == "answer-of-another" else output).astype(query.dtype)
        return output.swapaxes(1, 2).reshape(output.shape) if slip == "heads-not-transposed" else output

    cases = (
        "shape-31x31-d80-plain",
        "shape-33x33-d96-causal",
        "shape-65x65-plain",
        "shape-65x65-d64-causal",
        "shape-96x96-d72-mask",
        "shape-16x16-d64-mask",
        "after-other-mask",
        "mask",
        "causal-and-mask",
        "band-300",
        "shape-17x33-d32e48-plain",
    )
    results = agreed(list(found(Subject(attention, **TAKES | {"grouped": False}), *cases).values()))
    assert grouped(each for each in results if each.verdict in WRONG)[0][0].variant == slip


def test_a_fault_of_some_rows_alone_is_told_by_the_fault_and_its_rows():
    def attention(query, key, value, is_causal=False):
        output = planted.attention(query, key, value, is_causal=is_causal)
        output[:, 1:2] = planted.attention(query, value, key, is_causal=is_causal)[:, 1:2]
        output[..., 40:, :] = planted.Kernel("future key")(query, key, value, is_causal=is_causal)[..., 40:, :]
        return output

    cases = ("shape-33x33-h8on8-d16-causal", "shape-64x64-h1on1-d16-causal", "shape-33x33-h8on8-d16-plain")
    kernel = Subject(attention, **PLAIN | {"causal": "top-left", "causal_name": "is_causal"})
    told = [(each.variant, each.says.partition("; ")[2]) for each in agreed(list(found(kernel, *cases).values()))]
    swapped = ("key-and-value-swapped", "all errors are in head 1")
    assert told == [swapped, ("future-key", "all errors are in queries 40 to 62"), swapped]


def test_what_has_explained_every_answer_is_asked_for_first():
    kernel = Subject(planted.Kernel("last key lost"), **TAKES)
    cases = [f"shape-{rows}x{rows}-d16-mask" for rows in (17, 31, 33, 63, 65)]
    wrong = found(kernel, *cases)
    assert [bool(each.rejected) for each in wrong.values()] == [True] * 4 + [False]
    assert {each.variant for each in agreed(list(wrong.values()))} == {"last-key-lost"}


def test_of_equal_masks_that_of_the_same_query_is_told():
    def attention(query, key, value, mask=None):
        return planted.attention(query, key, value, mask if mask is None else mask[::-1])

    case = "shape-70x130-h3on3-maskb"
    told = found(Subject(attention, **PLAIN | {"mask": "keep", "mask_name": "mask"}), case)[case].says
    row, other = re.match(r"(.*), batch element \d has the mask or bias of (.*), batch element \d", told).groups()
    assert row == other


READ = {
    "length-last-key-more": lambda mask: np.arange(mask.shape[-1]) <= mask.sum(axis=-1, keepdims=True),
    "length-last-key-less": lambda mask: np.arange(mask.shape[-1]) < mask.sum(axis=-1, keepdims=True) - 1,
    "length-rounded-up": lambda mask: np.arange(mask.shape[-1]) < -(-mask.sum(axis=-1, keepdims=True) // 16) * 16,
    "bias-transposed": lambda bias: np.swapaxes(bias, -1, -2) if bias.shape[-1] == bias.shape[-2] else bias,
    "bias-of-next-key": lambda bias: np.roll(bias, 1, axis=-1),
    "bias-of-first-sample": lambda bias: np.broadcast_to(bias[:1], bias.shape),
}


@pytest.mark.parametrize("fault", READ)
def test_lengths_and_biases_that_are_read_wrongly_are_told(fault):
    def attention(query, key, value, mask=None, bias=None):
        kernel = planted.Kernel()
        kernel.bias = bias if bias is None or "bias" not in fault else READ[fault](bias)
        return kernel(query, key, value, mask if mask is None or "bias" in fault else READ[fault](mask))

    takes = PLAIN | {"mask": "keep", "mask_name": "mask", "bias_name": "bias"}
    cases = (
        ("bias-130", "shape-16x16-d16-bias")
        if "bias" in fault
        else ("shape-4x16-b3-d16-lengths", "shape-65x129-b3-lengths")
    )
    results = found(Subject(attention, **takes), *cases)
    assert {each.variant for each in agreed(list(results.values())) if each.verdict in WRONG} == {fault}


def test_every_case_and_every_fault_has_threads_about_its_property():
    assert all(seen_before(case.name) for case in kernel_cases())
    for name in TABLES["answers"] | TABLES["former"]:
        assert seen_before("gradient", name), name
    assert {each.property for each in seen_before("bias-130", "future-key-from-64")} == {"causal"}


def flash(query, key, value, *, window_size=(-1, -1), alibi_slopes=None, before=0, sign=-1):
    """A window and ALiBi by the keywords of FlashAttention."""
    scores = query @ np.swapaxes(key, -1, -2) / np.float32(query.shape[-1] ** 0.5)
    rows, columns = np.arange(query.shape[-2])[:, None], np.arange(key.shape[-2])
    if alibi_slopes is not None:
        scores = scores + sign * alibi_slopes[:, None, None] * abs(rows - columns).astype(np.float32)
    left, right = window_size
    if left >= 0:
        scores = np.where((columns >= rows - left + before) & (columns <= rows + right), scores, np.float32(-np.inf))
    powers = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return (powers / powers.sum(axis=-1, keepdims=True)) @ value


def test_windows_and_alibi_of_a_kernel_s_own_keywords_are_checked():
    def one_key_less(query, key, value, window_size=(-1, -1)):
        return flash(query, key, value, window_size=window_size, before=1)

    def one_number(query, key, value, window_size=None):
        raise NotImplementedError  # one number means several things

    def added(query, key, value, alibi_slopes=None):
        return flash(query, key, value, alibi_slopes=alibi_slopes, sign=1)

    cases = ("window-of-its-own*", "alibi-of-its-own")
    verdicts = {
        each: {(one.verdict, one.variant) for one in found(settled(Subject(each, **PLAIN)), *cases).values()}
        for each in (flash, one_key_less, one_number, added)
    }
    lacks = ("not offered", "")
    assert verdicts[flash] == {("right", "")}
    assert verdicts[one_key_less] == {("silently wrong", "window-first-key-less"), lacks}
    assert verdicts[one_number] == {lacks}
    assert verdicts[added] == {("silently wrong", "other-alibi"), lacks}
    assert verdict_of(settled(Subject(flash, **PLAIN)), "alibi-of-its-own-more-keys")[1] == "alibi-from-first"


def test_a_window_counts_from_either_corner_and_from_no_other():
    def shifted(query, key, value, window_size=(-1, -1), by=0):
        (left, right), more = window_size, key.shape[-2] - query.shape[-2]
        window = (left, right) if left < 0 else (left - more * (by > 0), right + more * (by > 0) + by % 2 * (more > 0))
        return flash(query, key, value, window_size=window)

    case = "window-of-its-own-more-keys"
    for by, verdict in ((0, "right"), (2, "right"), (1, "silently wrong"), (-1, "silently wrong")):
        kernel = settled(Subject(functools.partial(shifted, by=by), **PLAIN))
        assert found(kernel, case)[case].verdict == verdict


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_a_gradient_of_the_first_sample_head_or_query_alone_is_told(axis):
    torch = pytest.importorskip("torch")

    class Attention(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *arrays):
            ctx.save_for_backward(*arrays)
            return torch.nn.functional.scaled_dot_product_attention(*arrays)

        @staticmethod
        def backward(ctx, d_output):
            arrays = [each.detach().requires_grad_() for each in ctx.saved_tensors]
            with torch.enable_grad():
                output = torch.nn.functional.scaled_dot_product_attention(*arrays)
            first = torch.zeros_like(d_output)
            first.movedim(axis, 0)[0] = d_output.movedim(axis, 0)[0]
            is_broadcast = arrays[3].ndim < 4 - axis or arrays[3].shape[axis - 4] == 1
            whole = torch.autograd.grad(output, arrays, d_output, retain_graph=True)
            of_first = torch.autograd.grad(output, arrays[3], first)
            return *whole[:3], of_first[0] if is_broadcast else whole[3]

    def attention(query, key, value, attn_mask=None):
        if attn_mask is None or attn_mask.dtype == torch.bool:
            return torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=attn_mask)
        return Attention.apply(query, key, value, attn_mask)

    kernel, word = settled(Subject(attention, backend="torch")), ("samples", "heads", "queries")[axis]
    results = agreed(list(found(kernel, "gradient-empty-row-bias", "gradient-bias-of-*").values()))
    told = {each.says for each in results if (each.verdict, each.variant) == (WRONG[0], "gradient-of-part")}
    assert any(f"the gradient of bias lacks what {word} 1 " in each for each in told)


@pytest.mark.parametrize("empty", [0.0, 1.0])
def test_a_gradient_of_masked_rows_is_a_convention_where_their_output_is_one(empty):
    torch = pytest.importorskip("torch")

    def attention(query, key, value, attn_mask=None):
        output = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=attn_mask)
        if attn_mask is None:
            return output
        wrong = torch.where(attn_mask.any(dim=-1, keepdim=True), 0, query.sum(dim=-1, keepdim=True))
        return output + wrong - wrong.detach() + empty * (wrong != 0)

    got = verdict_of(settled(Subject(attention, backend="torch")), "gradient-empty-rows-130")
    assert got == (("differs by convention", "gradient-of-masked-row") if empty else ("silently wrong", ""))


def test_a_backward_pass_without_causality_is_told():
    backward = planted.Backward("backward ignores causality")
    kernel = Subject(planted.forward, backward=backward, **TAKES | {"returns": ("output", "logsumexp")})
    assert verdict_of(kernel, "shape-65x65-causal-gradient") == ("silently wrong", "gradient-without-mask")


def test_the_shapes_of_the_first_call_are_asked_for_once_more():
    first = []

    def attention(query, key, value):
        output = planted.attention(query, key, value)
        if first and first[0].shape == output.shape:
            output = output + np.float32(1e-4) * first[0]
        first.append(output)
        return output

    case = "as-the-first-call"
    assert found(Subject(attention), case)[case].verdict == "silently wrong"
