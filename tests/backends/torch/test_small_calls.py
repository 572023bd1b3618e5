"""Small calls of PyTorch, computed by a plan of their signature, whatever mode PyTorch is in."""

import numpy as np
import pytest
import torch
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import BaseTorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

import attention_core as ac
from attention_torch import programs
from attention_torch.kernels import guards

attention = ac.scaled_dot_product_attention
CAUSAL = [{}, {"is_causal": True}]


def drawn(*dims, dtype=torch.float32):
    return torch.from_numpy(np.random.default_rng(5).standard_normal((3, *dims), dtype=np.float32)).to(dtype)


@pytest.fixture
def small():
    """Query, key and value, after a call that makes the plans of their signature."""
    arrays = drawn(2, 3, 6, 8).unbind()
    for options in CAUSAL:
        attention(*arrays, **options)
    return arrays


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore:.torch.jit.trace:DeprecationWarning")
@pytest.mark.parametrize("options", CAUSAL)
def test_transforms_and_traces_are_none_of_a_memo(options, small, remembered):
    want = attention(*small, **options)
    remembered.clear()
    stacked = [torch.stack([array, 2 * array]) for array in small]
    batched = torch.vmap(lambda *arrays: attention(*arrays, **options))(*stacked)
    torch.testing.assert_close(batched[0], want)
    function, bad = lambda *arrays: attention(*arrays, **options), [array.clone() for array in small]
    bad[2][..., -1, :] = torch.nan
    for traced in (make_fx(function)(*small), torch.jit.trace(function, tuple(small), check_trace=False)):
        torch.testing.assert_close(traced(*small), want)
        torch.testing.assert_close(traced(*bad)[..., :-1, :], attention(*bad, **options)[..., :-1, :], equal_nan=True)
    primal, tangent = torch.func.jvp(lambda array: attention(array, *small[1:], **options), (small[0],), (small[0],))
    torch.testing.assert_close(primal, want)
    assert tangent.isfinite().all()
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(small[0], small[0])
        torch.testing.assert_close(forward_ad.unpack_dual(function(dual, *small[1:])).tangent, tangent)
    remembered.clear()
    attention(*small, **options)
    assert remembered == [True]


def in_vmap(function, arrays):
    return torch.vmap(function)(*(array[None] for array in arrays))[0]


def in_gradient(function, arrays):
    torch.func.grad(lambda query: function(query, *arrays[1:]).sum())(arrays[0])
    return function(*arrays)


def within(context):
    def mode(function, arrays):
        with context():
            return function(*arrays)

    return mode


def in_trace(function, arrays):
    return make_fx(function)(*arrays)(*arrays)


CONTEXTS = {
    "in_dual_level": forward_ad.dual_level,
    "in_dispatch_mode": lambda: FlopCounterMode(display=False),
    "in_function_mode": BaseTorchFunctionMode,
    "in_inference": torch.inference_mode,
}
MODES = {each.__name__: each for each in (in_vmap, in_gradient, in_trace)}
MODES |= {name: within(context) for name, context in CONTEXTS.items()}
MASKS = [{}, {"is_causal": True}, {"mask": ac.SlidingWindow(left=2)}, {"mask": ac.KeyLengths(torch.tensor([4, 6]))}]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("options", MASKS, ids=["full", "causal", "window", "lengths"])
def test_a_signature_first_met_in_a_mode_is_remembered_outside(options, mode, remembered):
    """The scale makes a signature of its own."""
    options = options | {"scale": 0.5 + list(MODES).index(mode) / 8}
    arrays = drawn(2, 3, 6, 8).unbind()
    function = lambda *arrays: attention(*arrays, **options)  # noqa: E731
    first = MODES[mode](function, arrays)
    remembered.clear()
    found = [function(*arrays) for _ in range(2)]
    assert remembered == [True, True]
    for each in (first, *found):
        torch.testing.assert_close(each, attention(*arrays, implementation="blockwise", **options))


def test_a_plan_without_gradients_in_16_bits_is_none_with_them(remembered):
    """A few scores are differentiated faster in the dense form."""
    arrays = drawn(2, 3, 6, 8, dtype=torch.bfloat16).unbind()
    for _ in range(2):
        attention(*arrays)
    variables = [array.clone().requires_grad_() for array in arrays]
    output = attention(*variables)
    assert remembered[1:] == [True, False]
    assert torch.equal(output, attention(*arrays, implementation="dense"))


def test_norms_of_16_bits_are_taken_in_float32():
    large = torch.full((1, 2, 512, 100), 300.0).half()
    assert large.norm().isinf()
    assert guards.norms_are_small((large, large, large), 1.0)
    assert not guards.norms_are_small((large, large.clone().fill_(torch.nan), large), 1.0)
    assert not guards.norms_are_small((large, large, torch.full_like(large, torch.inf)), 1.0)


@pytest.mark.skipif(not programs.GUARD_OPTIONS, reason="this version of PyTorch takes no filter of guards")
def test_programs_are_guarded_by_what_may_change():
    """A record, contexts and arguments are asked about; our own functions are not."""
    names = []

    def keep(guards):
        keeps = programs.guards_to_keep(guards)
        names.extend(guard.name for guard, kept in zip(guards, keeps, strict=True) if kept)
        return keeps

    arrays = drawn(1, 1, 5, 8).unbind()
    compiled = torch.compile(lambda *x: attention(*x), backend="eager", options={"guard_filter_fn": keep})
    torch.testing.assert_close(compiled(*arrays), attention(*arrays))
    for context in ("recorders", "settings"):
        assert any("CONTEXTS" in name and context in name for name in names)
    assert not any("__import_attention_core_dot__checks" in name for name in names)
    assert not any(".modules" in name for name in names)  # which Dynamo takes longer to read than a call
    with (
        ac.weights.record_attention(),
        pytest.raises(ValueError),
    ):
        compiled(*arrays)
