"""Few queries on a CPU, by a verdict that is remembered, or in a compiled program by one operator."""

import math

import numpy as np
import pytest
import torch
from pairwise import pairwise
from torch.fx.experimental.proxy_tensor import make_fx

import attention_core as ac
from attention_core.backend import Call
from attention_torch.kernels import guarded, sdpa

attention = ac.scaled_dot_product_attention
B, H, G, N, D = 2, 6, 2, 300, 8
FORMULA = torch._C._nn.scaled_dot_product_attention
MASKS = {
    "none": lambda rows: None,
    "one offset": lambda rows: ac.Causal(offset=N - rows),
    "offset of a part": lambda rows: ac.Causal(offset=200),
    "window": lambda rows: ac.SlidingWindow(left=99, right=0, offset=N - rows),
    "lengths": lambda rows: ac.KeyLengths(torch.tensor([150, 40])),
    "offsets": lambda rows: ac.Causal(offset=torch.tensor([200, 40])),
}
needs_groups = pytest.mark.skipif(not sdpa.TAKES_GROUPS, reason="the kernel of this version takes no groups")


def drawn(rows, dtype=torch.float32, seed=5):
    rng = np.random.default_rng(seed)
    dims = (B, H, rows, D), (B, G, N, D), (B, G, N, D)
    return [torch.from_numpy(rng.standard_normal(each, dtype=np.float32)).to(dtype) for each in dims]


def allowed(mask, rows):
    """The mask as an array (B, 1, M, N)."""
    if mask is None:
        return torch.ones((B, 1, rows, N), dtype=torch.bool)
    array = mask.to_array(rows, N, num_heads=1, leading=(B,), xp=ac.backend.get_backend("torch").namespace)
    return array.expand(B, 1, rows, N)


def formula(arrays, mask, **options):
    """Of a kernel that answers a fully masked row by 0."""
    query, key, value = arrays
    key, value = (x.repeat_interleave(H // G, dim=1) for x in (key, value))
    return FORMULA(query, key, value, attn_mask=allowed(mask, query.shape[-2]), **options)


@pytest.mark.parametrize("assume_finite", [False, True])
@pytest.mark.parametrize(
    ("dims", "dtype", "offsets"),
    [
        (((2, 64, 5, 128), (2, 8, 4096, 128)), torch.float64, [298, 53]),  # few queries next to all keys alone
        (((2, 64, 3, 80), (2, 8, 2048, 80)), torch.float32, [2045, 182]),
        (((2, 1, 700, 64), (2, 1, 2048, 64)), torch.float32, [1300, 900]),  # for an array of the batch, too many
        (((2, 1, 500, 64), (2, 1, 2048, 64)), torch.float32, [1300, 900]),
    ],
)
def test_what_is_returned_besides_does_not_decide_how_samples_are_computed(dims, dtype, offsets, assume_finite):
    rng = np.random.default_rng(3)
    query, key, value = (torch.from_numpy(rng.standard_normal(dims[index])).to(dtype) for index in (0, 1, 1))
    options = {"mask": ac.Causal(offset=torch.tensor(offsets)), "assume_finite": assume_finite}
    judged = attention(query, key, value, **options, return_logsumexp=True)
    torch.testing.assert_close(attention(query, key, value, **options), judged.output, rtol=0, atol=0)
    expected = attention(query, key, value, **options, return_logsumexp=True, implementation="dense")
    torch.testing.assert_close(judged[::2], expected[::2])
    is_refused = "would need this mask as an array" in str(ac.explain_attention(query, key, value, **options))
    assert is_refused == (query.shape[-2] == 700)


@needs_groups
def test_the_numbers_of_a_mask_are_those_of_the_call():
    """Of one signature, lengths of arrays differ; masks of other numbers are not confused, and few are kept."""
    arrays = drawn(4)
    for length in (50, 300, 17, 120):
        mask = ac.KeyLengths(torch.tensor([length, length // 2]))
        torch.testing.assert_close(attention(*arrays, mask=mask), formula(arrays, mask))
    for offset in (*range(100, 110), 100):
        window = ac.SlidingWindow(left=20, right=0, offset=offset)
        for mask in (
            ac.Causal(offset=offset),
            window,
            ac.SlidingWindow(left=2, right=offset),  # of the same keys as the first
            ac.Causal(offset=offset) & ~ac.SlidingWindow(left=20, right=0, offset=60),
        ):
            for dtype in (torch.float32, torch.float64):
                typed = [x.to(dtype) for x in arrays]
                torch.testing.assert_close(attention(*typed, mask=mask), formula(typed, mask))


def test_what_is_kept_is_of_all_axes_of_a_batch(rng):
    window = ac.SlidingWindow(left=1, right=1, offset=1)
    for batch in ((2, 2), (3,), (), (2, 3), (2, 2)):
        arrays = [torch.from_numpy(rng.standard_normal((*batch, 1, rows, 4))) for rows in (3, 5, 5)]
        expected = attention(*arrays, mask=window, implementation="dense")
        torch.testing.assert_close(attention(*arrays, mask=window), expected)


@needs_groups
@pytest.mark.parametrize(("rows", "width", "is_kept"), [(8, 4, True), (200, 4, False), (8, 4096, False)])
def test_no_large_mask_is_kept_nor_one_next_to_many_keys(rows, width, is_kept, backend):
    x = torch.zeros((2, 3, rows, width))
    call = Call(x, x, x, backend.namespace, backend, mask=ac.KeyLengths(torch.tensor([3, 8])))
    assert (guarded.facts_of(call).added is not None) == is_kept


@needs_groups
def test_a_mask_made_in_inference_mode_serves_outside():
    arrays, mask = drawn(3), ac.Causal(offset=271)
    with torch.inference_mode():
        expected = attention(*arrays, mask=mask)
    torch.testing.assert_close(attention(*arrays, mask=mask), expected, rtol=0, atol=0)
    variables = [x.clone().requires_grad_() for x in arrays]
    gradients = torch.autograd.grad(attention(*variables, mask=mask).sum(), variables)
    wanted = torch.autograd.grad(formula(variables, mask).sum(), variables)
    torch.testing.assert_close(gradients, wanted)


@needs_groups
@pytest.mark.parametrize("assume_finite", [False, True])
@pytest.mark.parametrize("numbers", [[150, 150], [150, 40]])
def test_a_graph_that_is_recorded_before_autograd_keeps_no_lengths(numbers, assume_finite):
    """Not even where calls outside of it had the same ones, which are kept for the next call."""
    arrays = drawn(1)

    def attend(*arrays):
        *arrays, lengths = arrays
        return attention(*arrays, mask=ac.KeyLengths(lengths), assume_finite=assume_finite)

    attend(*arrays, torch.tensor(numbers))
    for recorded in (numbers, [7, 90]):
        graph = make_fx(attend, pre_dispatch=True)(*arrays, torch.tensor(recorded))
        lengths = torch.tensor([33, 260])
        torch.testing.assert_close(graph(*arrays, lengths), formula(arrays, ac.KeyLengths(lengths)))


@needs_groups
@pytest.mark.parametrize("name", ["none", "window", "lengths", "offsets"])
def test_modes_strides_and_contexts_are_asked_about_in_every_call(name):
    arrays, mask = drawn(4), MASKS[name](4)
    expected = attention(*arrays, mask=mask)
    variables = [x.clone().requires_grad_() for x in arrays]
    assert attention(*variables, mask=mask).requires_grad
    swapped = [-x.transpose(-1, -2).contiguous().transpose(-1, -2) for x in arrays]
    for assume_finite in (None, True):  # without a repair, too; memory that was freed may hold what is expected
        torch.testing.assert_close(attention(*swapped, mask=mask, assume_finite=assume_finite), -expected)
    traced = make_fx(lambda *x: attention(*x, mask=mask))(*arrays)
    torch.testing.assert_close(traced(*arrays), expected)
    primal, tangent = torch.func.jvp(lambda x: attention(x, *arrays[1:], mask=mask), (arrays[0],), (arrays[0],))
    torch.testing.assert_close(primal, expected)
    assert tangent.isfinite().all()
    gradient = torch.func.grad(lambda x: attention(x, *arrays[1:], mask=mask).sum())(arrays[0])
    assert gradient.abs().sum() > 0
    with torch.autocast("cpu", torch.bfloat16):
        assert attention(*arrays, mask=mask).dtype == torch.bfloat16
    with ac.config_context(assume_finite=True):
        torch.testing.assert_close(attention(*arrays, mask=mask), expected)
    with torch.no_grad():
        unrecorded = attention(*variables, mask=mask)
        torch.testing.assert_close(unrecorded, expected, rtol=0, atol=0)
        assert not unrecorded.requires_grad


@pairwise(name=["one offset", "offset of a part", "window", "array"], rows=[4, 32], mode=["eager", "compiled"])
def test_what_is_not_finite_leaks_nowhere_and_is_lost_nowhere(name, rows, mode):
    mask = allowed(MASKS["window"](rows), rows) if name == "array" else MASKS[name](rows)
    where = mask if name == "array" else allowed(mask, rows)
    backend = ac.backend.get_backend("torch")
    attend = backend.compile(lambda *x: attention(*x, mask=mask, scale=0.5), mode=mode)
    arrays = drawn(rows)
    expected = formula(arrays, ac.masks.Given(where), scale=0.5)
    torch.testing.assert_close(attend(*arrays), expected)
    for which, number in ((1, math.nan), (1, -math.inf), (2, math.inf), (0, math.nan), (1, 3e38)):
        spoilt = [x.clone() for x in arrays]
        if which == 0:
            spoilt[0][0, 1, -1, 2] = number
            assert attend(*spoilt)[0, 1, -1].isnan().all()
        else:
            spoilt[which][..., -1, 0] = number  # which the last query alone attends to, if any does
        seen = where[..., -1].expand(B, H, rows)
        found = attend(*spoilt)
        kept = ~seen if which else torch.ones_like(seen).index_fill(2, torch.tensor([rows - 1]), False)
        torch.testing.assert_close(found[kept], expected[kept])
        if (which, number) == (2, math.inf) or (which == 1 and math.isnan(number)):  # a score of -inf has no weight
            assert not found[seen].isfinite().all(dim=-1).any()


@torch.no_grad()
def test_compiled_arrays_may_share_memory_and_lengths_may_change():
    packed = torch.stack(drawn(4)[1:]).transpose(2, 3).contiguous()
    query, mask = drawn(4)[0], ac.Causal(offset=200)
    views = [each.transpose(1, 2) for each in packed]

    def fused(function):
        torch._dynamo.reset()
        return torch.compile(function, fullgraph=True, backend="inductor")

    expected = attention(query, *views, mask=mask)
    attend = fused(lambda query, key, value: attention(query, key, value, mask=mask))
    torch.testing.assert_close(attend(query, *views), expected)
    same = fused(lambda query, key: attention(query, key, key, mask=mask))
    torch.testing.assert_close(same(query, views[0]), attention(query, views[0], views[0], mask=mask))
    inside = fused(lambda query, packed: attention(query, *(x.transpose(1, 2) for x in packed), mask=mask))
    torch.testing.assert_close(inside(query, packed), expected)
    attend = fused(lambda *arrays: tuple(attention(*arrays, mask=mask, return_logsumexp=True))[::2])
    for columns in (300, 299, 280):
        arrays = query, *(x[..., :columns, :].contiguous() for x in views)
        output, logsumexp = attend(*arrays)
        wanted = attention(*arrays, mask=mask, return_logsumexp=True)
        torch.testing.assert_close(output, wanted.output)
        torch.testing.assert_close(logsumexp, wanted.logsumexp)


class Blocks(torch.nn.Module):
    def forward(self, query, key, value):
        return attention(query, key, value, implementation="blockwise")


def test_an_exported_program_raises_where_it_is_differentiated():
    arrays = drawn(4)
    module = torch.export.export(Blocks(), tuple(arrays)).module()
    torch.testing.assert_close(module(*arrays), attention(*arrays, implementation="blockwise"))
    variable = arrays[0].clone().requires_grad_()
    with pytest.raises(NotImplementedError):
        module(variable, *arrays[1:]).sum().backward()
    with pytest.raises(NotImplementedError):
        torch.func.jvp(lambda x: module(x, *arrays[1:]), (arrays[0],), (arrays[0],))
    for transform in (torch.func.grad, torch.func.jacrev):
        with pytest.raises(RuntimeError):
            transform(lambda x: module(x, *arrays[1:]).sum())(arrays[0])
    with torch.inference_mode():
        module(*arrays)
