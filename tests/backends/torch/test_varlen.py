"""PyTorch's kernel for several lengths: its guard, and its results by the definition in its documentation.

The GPU is pretended, and the kernel computes the documented formula, so that these tests show our side of it alone.
"""

import importlib
import itertools
import math

import numpy as np
import pytest

import attention_core as ac
from attention_core import explain_attention

B, H, G, D = 2, 4, 2, 8
NAME = "torch.nn.attention.varlen"
ROWS, COLUMNS = 5, 9
TAKEN = {
    "plain": lambda torch: {},
    "lower right": lambda torch: {"mask": ac.Causal(offset=COLUMNS - ROWS)},
    "further": lambda torch: {"mask": ac.Causal(offset=COLUMNS - ROWS + 2)},
    "window": lambda torch: {"mask": ac.SlidingWindow(2, 0, offset=COLUMNS - ROWS)},
    "window of two sides": lambda torch: {"mask": ac.SlidingWindow(3, 1, offset=3)},
    "window without an end": lambda torch: {"mask": ac.SlidingWindow(right=2, offset=3)},
    "scale": lambda torch: {"mask": ac.Causal(offset=4), "scale": -0.3},
    "scale of an array": lambda torch: {"mask": ac.Causal(offset=4), "scale": torch.tensor(0.3, dtype=torch.float64)},
}
LENGTHS = {
    "lengths": lambda torch: {"mask": ac.KeyLengths(torch.tensor([0, 7]))},
    "lengths beyond": lambda torch: {"mask": ac.KeyLengths(torch.tensor([3, 70]))},
    "one length": lambda torch: {"mask": ac.KeyLengths(torch.tensor(4))},
}


@pytest.fixture
def torch():
    return importlib.import_module("torch")


@pytest.fixture
def gpu(backend, monkeypatch):
    """A GPU with this kernel alone, which takes float64."""
    module = importlib.import_module("attention_torch.varlen")
    monkeypatch.setattr(module, "HALVES", (importlib.import_module("torch").float64,))
    monkeypatch.setattr(backend, "kernels", (module.VariableLengths(function=documented),))
    return importlib.import_module("pretended_device")


def documented(query, key, value, cu_query, cu_key, rows, columns, **options):
    """The formula of `varlen_attn`, whose windows count from the last key of a sequence."""
    torch = importlib.import_module("torch")
    batch = len(cu_query) - 1
    for cut, length in ((cu_query, rows), (cu_key, columns)):
        assert cut.held.tolist() == [length * index for index in range(batch + 1)]
        assert cut.dtype == torch.int32
    query, key, value = (
        x.unflatten(0, (batch, -1)).transpose(1, 2).repeat_interleave(query.shape[1] // x.shape[1], dim=1)
        for x in (query, key, value)
    )
    lengths = options.get("seqused_k")
    lengths = torch.full((batch,), columns, device=query.device) if lengths is None else lengths
    left, right = options["window_size"]
    at = torch.arange(rows, device=query.device)[:, None] + (lengths[:, None, None] - rows)
    keys = torch.arange(columns, device=query.device)
    allowed = keys < lengths[:, None, None]
    allowed = allowed & ((keys >= at - left) if left >= 0 else True) & ((keys <= at + right) if right >= 0 else True)
    scores = torch.where(allowed[:, None], (query @ key.mT) * options["scale"], -math.inf)
    logsumexp = scores.logsumexp(dim=-1)
    weights = torch.where(allowed[:, None], torch.exp(scores - logsumexp[..., None]), 0.0)
    wrong = torch.where(logsumexp.isinf(), math.nan, 0.0)  # of rows without keys, of which nothing is documented
    return ((weights @ value) + wrong[..., None]).transpose(1, 2).flatten(0, 1), logsumexp.transpose(0, 1).flatten(1)


def made(torch, rng, rows=ROWS, dims=(B,)):
    shapes = (H, rows, D), (G, COLUMNS, D), (G, COLUMNS, D)
    return [torch.asarray(rng.standard_normal((*dims, *shape))) for shape in shapes]


def on_both(gpu, torch, arrays, make, gradients):
    """The results of blocks on the host, and of the kernel."""

    def results(move, inputs, implementation):
        mask = {name: _moved(option, move) for name, option in make(torch).items()}
        leaves = [x.requires_grad_(gradients) for x in inputs]
        both = not gradients
        result = ac.scaled_dot_product_attention(*leaves, **mask, implementation=implementation, return_logsumexp=both)
        if both:
            return result.output, result.logsumexp
        factor = move(torch.linspace(-1, 1, result.numel(), dtype=torch.float64).reshape(result.shape))
        return result, *torch.autograd.grad(result, leaves, factor)

    expected = results(lambda x: x, [x.clone() for x in arrays], "blockwise")
    with gpu.pretended(kernels=False):
        found = gpu.to_host(results(gpu.to_device, gpu.to_device(arrays), NAME))
    return zip(found, expected, strict=True)


def _moved(option, move):
    lengths = getattr(option, "lengths", None)
    if lengths is not None:
        return ac.KeyLengths(move(lengths))
    return ac.Causal(offset=move(option.offset)) if hasattr(getattr(option, "offset", 0), "dtype") else move(option)


@pytest.mark.parametrize(
    ("name", "gradients"), [*itertools.product(TAKEN, [False, True]), *((name, False) for name in LENGTHS)]
)
def test_of_numbers_the_result_is_that_of_the_definition(name, gradients, gpu, torch, rng):
    for dims in ((B,), (), (1, B)) if name in TAKEN else ((B,),):
        for one, other in on_both(gpu, torch, made(torch, rng, dims=dims), (TAKEN | LENGTHS)[name], gradients):
            np.testing.assert_allclose(one.detach(), other.detach(), rtol=0, atol=1e-12)


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", [*(name for name in TAKEN if name != "plain"), *LENGTHS])
def test_a_spoilt_vector_shows_where_it_is_attended_to_and_nowhere_else(name, wrong, gpu, torch, rng):
    for side, index in itertools.product(range(3), (1, 4)):
        arrays = made(torch, rng)
        arrays[side][1, 1, index, 3] = wrong
        for gradients in (False, True) if name in TAKEN else (False,):
            pairs = on_both(gpu, torch, arrays, (TAKEN | LENGTHS)[name], gradients)
            for number, (one, other) in enumerate(pairs):
                same = torch.ones(other.shape, dtype=torch.bool)
                if gradients and number - 1 == side:
                    same[1, 1, index] = False  # a replaced element has no gradient in the definition
                assert torch.equal(one.isfinite()[same], other.isfinite()[same]), (side, index, number)
                finite = same & other.isfinite()
                np.testing.assert_allclose(one.detach()[finite], other.detach()[finite], rtol=0, atol=1e-12)


def test_a_step_of_decoding_has_its_length_on_the_device(gpu, torch, rng):
    arrays = made(torch, rng, 1)
    arrays[1][0, 0, 8], arrays[2][1, 1, 7] = math.nan, math.inf  # behind the lengths
    make = lambda torch: {"mask": ac.Causal(offset=torch.tensor([3, 6]))}  # noqa: E731
    for one, other in on_both(gpu, torch, arrays, make, False):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-12)


REFUSED = [
    ({"mask": ac.Causal(offset=-2)}, "takes only windows that reach the key of each query"),
    ({"mask": ac.SlidingWindow(2, 0, offset=20)}, "takes only windows that reach the key of each query"),
    ({"mask": ac.Causal(offset=4) | ac.KeyLengths(2)}, "has no Or (line 2)"),
    ({"softcap": 2.0}, "has no softcap"),
    ({"dropout": ac.Dropout(0.5, 3)}, "drops weights by a generator of its own"),
    ({"mask": ac.KeyLengths(3)}, None),
    ({}, None),
]


@pytest.mark.parametrize(("options", "reason"), REFUSED, ids=lambda each: str(each)[:30])
def test_each_refusal_says_why(options, reason, gpu, torch, rng):
    with gpu.pretended(kernels=False):
        told = explain_attention(*gpu.to_device(made(torch, rng)), **options).candidates[0]
    assert told.kernel == NAME
    assert told.refusal is None if reason is None else told.refusal.startswith(reason)
    assert told.slower is None if reason else told.slower == "is not measured on a GPU yet"


def test_other_refusals_say_why(gpu, torch, rng, monkeypatch):
    def refusal(arrays, **options):
        return explain_attention(*arrays, **options).candidates[0].refusal

    arrays = made(torch, rng)
    assert refusal(arrays) == "needs a GPU"
    with gpu.pretended(kernels=False):
        on_device = gpu.to_device(arrays)
        lengths = ac.KeyLengths(gpu.to_device(torch.tensor([3, 4])))
        assert refusal([x.float() for x in on_device]) == "computes in 16 bits only (line 8)"
        assert refusal([x[..., :5] for x in on_device]).startswith("takes keys and values of one width")
        assert refusal(on_device, mask=lengths) is None
        assert refusal([x.requires_grad_() for x in on_device], mask=lengths) == "has no gradient with key lengths"
        offset = ac.Causal(offset=gpu.to_device(torch.tensor([3, 4])))
        assert refusal(on_device, mask=offset).startswith("takes no offset of an array for more than one query")
        monkeypatch.setattr("attention_torch.varlen.TAKES_LENGTHS", False)
        assert refusal(on_device) == "is not in this version of PyTorch"
