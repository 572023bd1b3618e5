"""Every kernel of PyTorch gives the numbers of the definition: eager, compiled, unread on an accelerator, and twice differentiated."""

import functools
import math

import numpy as np
import pytest
import torch
from blockwise_helpers import assert_same
from call_table import NAMES, Sizes, hide, options_of
from flex_helpers import BLOCKS, as_kernel
from pairwise import covering
from torch_kernel_helpers import accelerator, refusal, unread

import attention_core as ac
from attention_conformance import check
from attention_conformance.measure.finding import little

attention = ac.scaled_dot_product_attention
pytestmark = pytest.mark.filterwarnings(
    "ignore:Dynamo detected a call to a `functools.lru_cache`-wrapped function",
    "ignore:There is a performance drop",
)
SIZES = {
    "small": Sizes((3,), 4, 2, 7, 11, 8, 8),
    "few queries": Sizes((2,), 6, 2, 4, 300, 8, 8),
    "one sample": Sizes((), 4, 4, 17, 40, 16, 12),
    "many axes": Sizes((2, 3), 4, 2, 9, 20, 4, 4),
    "blocks": BLOCKS,
}
FLEX = "torch.nn.attention.flex_attention"


def test_most_cases_of_the_catalogue_are_computed_by_a_kernel():
    results = check(attention, backend="torch", dtypes=["float32"], implementations=["fused"])
    assert not little(results)
    assert [result for result in results if result.passed is False] == []


def both(*arrays, **options):
    """Output and logsumexp of a call."""
    return attention(*arrays, **options, return_logsumexp=True)[::2]


def measured(attend, arrays):
    """Output, logsumexp where there is one, and the gradients of both."""
    leaves = [x.detach().requires_grad_() for x in arrays]
    found = attend(*leaves)
    found = found if isinstance(found, tuple) else (found,)
    finite = [torch.where(x.isfinite(), x, 0.0) for x in found]
    factors = [torch.linspace(-1, 1, x.numel(), dtype=x.dtype).reshape(x.shape) for x in found]
    return [x.detach() for x in (*found, *torch.autograd.grad(finite, leaves, factors, materialize_grads=True))]


def twice(attend, arrays):
    """Gradients of what gradients add up to."""
    leaves = [x.detach().requires_grad_() for x in arrays]
    gradients = torch.autograd.grad((attend(*leaves) ** 3).sum(), leaves, create_graph=True, materialize_grads=True)
    total = sum((x * x.detach().cos()).sum() for x in (*gradients, *leaves))
    return [x.detach() for x in torch.autograd.grad(total, leaves)]


def given(name, sizes, rng, dtype="float64"):
    """Query, key, value and options of a name, and the definition of that call."""
    backend = ac.backend.get_backend("torch")
    arrays = backend.from_numpy(SIZES[sizes].arrays(rng), dtype=dtype)
    put = functools.partial(backend.from_numpy, dtype=dtype)
    options = options_of(name, SIZES[sizes], lambda x: put(x) if x.dtype.kind == "f" else backend.from_numpy(x))
    return arrays, options, functools.partial(both, **options, implementation="dense")


def compare(found, expected, close):
    assert_same([x.numpy() for x in found], [x.numpy() for x in expected], close)


@pytest.mark.parametrize(("name", "sizes"), covering([name for name in NAMES if name != "no keys"], list(SIZES)[:-1]))
def test_the_fused_kernel(name, sizes, rng):
    """In output and gradients, of first and of second order, unless it refuses the call."""
    arrays, options, defined = given(name, sizes, rng)
    compare(measured(functools.partial(both, **options), arrays), measured(defined, arrays), 1e-12)
    fused, dense = (functools.partial(attention, **options, implementation=each) for each in ("fused", "dense"))
    if refusal(arrays, **options) is not None or "sinks" in options:
        with pytest.raises(ValueError):
            fused(*arrays)
        return
    compare(measured(fused, arrays), measured(dense, arrays), 1e-13)
    compare(twice(fused, arrays), twice(dense, arrays), 1e-11)


@pytest.mark.needs(lambda name, implementation: implementation != "flex" or "beyond" not in name)
@pytest.mark.parametrize("implementation", ["auto", "blockwise", "dense", "flex"])
@pytest.mark.parametrize("name", [name for name in NAMES if name != "score_mod of a root"])  # steep in float32
def test_an_accelerator_reads_no_value(name, implementation, backend, rng, monkeypatch):
    """It waits for no call, and FlexAttention, run by its dense form, has the numbers of the definition."""
    sizes = "blocks" if implementation in ("flex", "blockwise") else "few queries"
    arrays, options, _ = given(name, sizes, rng, "float32")
    expected = measured(given(name, sizes, rng)[2], [x.double() for x in arrays])
    if implementation == "flex":
        as_kernel(backend, monkeypatch)
        is_refused = name == "of a user" or "bias" in options or getattr(options.get("dropout"), "rate", 0) > 0
        assert (ac.explain_attention(*arrays, **options).chosen != "fused") == is_refused
    options |= {} if implementation == "flex" else {"implementation": implementation}
    with accelerator(), unread(torch):
        found = [measured(functools.partial(both, **options, **more), arrays) for more in ({}, {"assume_finite": True})]
    for each in found:
        compare(each, [x.float() for x in expected], 1e-4)


HIDING = ("causal later", "offsets", "window", "lengths", "and lengths", "or lengths", "length", "array of keys",
          "array of samples", "array of hidden keys", "bias of hidden keys", "bias of hidden keys and lengths")  # fmt: skip


@pytest.mark.needs(lambda name, kernel: kernel != FLEX or "bias" not in name)
@pytest.mark.parametrize("kernel", [FLEX, "torch.nn.functional.scaled_dot_product_attention"])
@pytest.mark.parametrize("name", HIDING)
def test_what_is_hidden_from_all_queries_of_a_sample_reaches_nothing(name, kernel, backend, rng, monkeypatch):
    """On an accelerator, without a look."""
    kernels, sizes = backend.kernels, BLOCKS._replace(value_width=16)
    as_kernel(backend, monkeypatch)
    monkeypatch.setattr(backend, "kernels", (kernels[0], *backend.kernels))
    plain, options = sizes.arrays(rng), given(name, "blocks", rng, "float32")[1]
    query, key, value = hide(plain, options_of(name, sizes, np.asarray), sizes)
    assert 0 < np.isnan(key).sum() < key.size
    dense, way = (functools.partial(attention, **options, implementation=each) for each in ("dense", kernel))
    with accelerator(), unread(torch):
        found = measured(way, backend.from_numpy([np.nan_to_num(query), key, value], dtype="float32"))
    compare(found, measured(dense, backend.from_numpy(plain, dtype="float32")), 3e-5)


@pytest.mark.parametrize("name", ["causal", "window", "softcap"])
def test_who_asks_for_a_look_gets_no_leak_under_any_mask(name, backend, rng, monkeypatch):
    as_kernel(backend, monkeypatch)
    arrays, options, _ = given(name, "blocks", rng, "float32")
    arrays[2][0, 1, 138, 3] = math.nan
    expected = attention(*arrays, **options, implementation="blockwise")
    with accelerator():
        told = ac.explain_attention(*arrays, **options, assume_finite=False)
        assert "leak" in told.candidates[0].refusal
        found = attention(*arrays, **options, assume_finite=False)
    compare([found], [expected], 3e-5)
