"""The kernel on an accelerator: nothing masked leaks, though the host reads no value. On a CPU that plays one, too."""

import importlib
import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
from device_helpers import MASKS, B, D, G, H, M, N, results
from torch_kernel_helpers import accelerator, compiled, unread

import attention_core as ac
from attention_core import explain_attention

attention = ac.scaled_dot_product_attention
SPOILS = {"nan": math.nan, "inf": math.inf, "minus inf": -math.inf, "huge": 1e300}


@pytest.fixture
def torch():
    return importlib.import_module("torch")


@pytest.fixture
def arrays(torch, rng):
    return [torch.asarray(rng.standard_normal(dims)) for dims in ((B, H, M, D), (B, G, N, D), (B, G, N, D))]


def is_fused(arrays, options):
    return explain_attention(*arrays, **options).chosen == "fused"


@pytest.mark.parametrize("name", MASKS)
def test_of_numbers_the_result_is_that_of_the_definition(name, arrays, torch):
    expected = results(torch, arrays, MASKS[name](torch) | {"implementation": "dense"})
    with accelerator(), unread(torch):
        options = MASKS[name](torch)
        assert is_fused(arrays, options)
        found = results(torch, arrays, options)
        with torch.no_grad():
            output = attention(*arrays, **options)
        options["assume_finite"] = True
        assert is_fused(arrays, options)
        assumed = results(torch, arrays, options)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-13)
    assert torch.equal(output, found[0])
    for one, other in zip(assumed, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-13)


def test_rows_behind_all_keys_of_a_causal_mask_are_numbers(torch, rng):
    """There may be more queries than keys: the last ones attend to all keys, and none of these is spoilt."""
    arrays = [torch.asarray(rng.standard_normal((1, 2, length, D))) for length in (7, 4, 4)]
    expected = results(torch, arrays, {"is_causal": True, "implementation": "dense"})
    with accelerator(), unread(torch):
        assert is_fused(arrays, {"is_causal": True})
        found = results(torch, arrays, {"is_causal": True})
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-13)


@pytest.mark.parametrize("spoil", SPOILS)
@pytest.mark.parametrize("name", MASKS)
def test_a_spoilt_vector_shows_where_it_is_attended_to_and_nowhere_else(name, spoil, arrays, torch):
    """The definition says where, of an infinity in place of a value too large, and NaN in queries and keys.

    A score of -inf may have weight 0.
    """
    options = MASKS[name](torch)
    wrong = SPOILS[spoil]
    for side, index in itertools.product(range(3), (1, 6)):
        spoilt = [x.clone() for x in arrays]
        spoilt[side][0, 1, index, 3] = wrong
        defined = [x.clone() for x in spoilt]
        defined[side][0, 1, index, 3] = math.nan if side < 2 else math.inf if wrong > 1e200 else wrong
        expected = results(torch, defined, options | {"implementation": "blockwise"})
        with accelerator(), unread(torch):
            found = results(torch, spoilt, options)
        np.testing.assert_allclose(found[0], expected[0], rtol=0, atol=1e-13)
        for number, (one, other) in enumerate(zip(found[1:], expected[1:], strict=True)):
            same = torch.ones_like(one, dtype=torch.bool)
            if number == side:
                same[0, 1, index] = False  # a replaced element has no gradient in the definition
            assert torch.equal(one[same].isfinite(), other[same].isfinite())
            finite = same & other.isfinite()
            np.testing.assert_allclose(one[finite], other[finite], rtol=0, atol=1e-13)


@pytest.mark.parametrize("name", ["causal", "array", "lengths"])
def test_a_spoilt_gradient_reaches_only_what_its_row_attends_to(name, arrays, torch):
    options = MASKS[name](torch)
    expected = results(torch, arrays, options | {"implementation": "dense"})
    allowed = attention(*arrays, **options, return_weights=True).weights > 0
    for wrong in (math.nan, math.inf, 1e300):
        d_output = torch.linspace(-1, 1, B * H * M * D, dtype=torch.float64).reshape(B, H, M, D).clone()
        d_output[1, 2, 3, 4] = wrong
        with accelerator(), unread(torch):
            _, d_query, d_key, d_value = results(torch, arrays, options, d_output)
        seen = allowed[1, 2, 3]
        assert d_query[1, 2, 3].isnan().all()
        rows = torch.ones(B, H, M, dtype=torch.bool)
        rows[1, 2, 3] = False
        np.testing.assert_allclose(d_query[rows], expected[1][rows], rtol=0, atol=1e-13)
        for one, other in ((d_key, expected[2]), (d_value, expected[3])):
            assert one[1, 1, seen].isnan().all()
            np.testing.assert_allclose(one[1, 1, ~seen], other[1, 1, ~seen], rtol=0, atol=1e-13)
            np.testing.assert_allclose(one[0], other[0], rtol=0, atol=1e-13)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_products_that_overflow_do_not_leak(dtype, torch):
    """Forward, and backward as products of values and of gradients of the output."""
    torch.manual_seed(0)
    dtype = getattr(torch, dtype)
    large = min(1e30, torch.finfo(dtype).max)
    query, key, value = (torch.randn(1, 2, 6, 8).to(dtype) for _ in range(3))
    for array in (query, key, value):
        array[..., 4:, :] = large * torch.sign(array[..., 4:, :])
    d_output = torch.zeros(1, 2, 6, 8).to(dtype)
    d_output[..., :4, :] = torch.linspace(-1, 1, 64).reshape(1, 2, 4, 8).to(dtype)
    clean = results(
        torch,
        [x[..., :4, :] for x in (query, key, value)],
        {"is_causal": True, "implementation": "dense"},
        d_output[..., :4, :],
    )
    with accelerator(), unread(torch):
        found = results(torch, [query, key, value], {"is_causal": True}, d_output)
    tolerance = {"float16": 4e-3, "bfloat16": 3e-2, "float32": 1e-6}[str(dtype).removeprefix("torch.")]
    for one, other in zip(found[:2], clean[:2], strict=True):
        np.testing.assert_allclose(one[..., :4, :].float(), other.float(), rtol=tolerance, atol=tolerance)
    if dtype != torch.float16:  # in which these are numbers as others, and rows that attend to them have gradients
        assert found[0][..., 4:, :].isnan().all()


@pytest.mark.parametrize("scale", [None, 0.3, -0.5, 0.0, 9.0, Fraction(1, 3), "tensor"], ids=str)
@pytest.mark.parametrize("dims", [(), (2, 1), (1,)], ids=str)
def test_scales_and_leading_axes(scale, dims, torch, rng):
    arrays = [torch.asarray(rng.standard_normal((*dims, heads, rows, 4))) for heads, rows in ((4, 5), (2, 6), (2, 6))]
    scale = torch.tensor(0.3) if scale == "tensor" else scale
    for options in ({"is_causal": True}, {"mask": torch.ones(5, 6, dtype=torch.bool).tril(1)}):
        options |= {"scale": scale}
        expected = results(torch, arrays, options | {"implementation": "dense"})
        with accelerator(), unread(torch):
            assert is_fused(arrays, options)
            found = results(torch, arrays, options)
        for one, other in zip(found, expected, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("name", ["offset", "window", "lengths", "causal and lengths", "bias"])
@pytest.mark.parametrize("rows", [1, 3])
def test_a_step_of_decoding(name, rows, torch, rng):
    arrays = [
        torch.asarray(rng.standard_normal((B, heads, length, D))) for heads, length in ((H, rows), (G, 600), (G, 600))
    ]
    options = MASKS[name](torch)
    if name == "bias":
        options = {"bias": torch.where(torch.arange(600) % 3 == 1, -math.inf, 0.5).double()}
    arrays[1][0, 0, 599], arrays[2][0, 0, 598] = math.nan, math.inf
    expected = attention(*arrays, **options, implementation="dense")
    has_few_keys = rows == 1 and name in ("offset", "window")  # once the others are cut off; then no mask is left
    with accelerator(), unread(torch):
        assert is_fused(arrays, options) != has_few_keys
        found = attention(*arrays, **options)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-13)


@pytest.mark.parametrize("least", [-1e4, -1e9, -1e30, -3e38])
def test_a_bias_near_the_least_number_is_no_mask(least, torch, rng):
    arrays = [torch.asarray(rng.standard_normal((1, 2, 5, 8)), dtype=torch.float32) for _ in range(3)]
    bias = torch.zeros(5, 5)
    bias[2, 3], bias[3, 2:] = least, -math.inf
    bias[4] = -math.inf
    expected = results(torch, arrays, {"bias": bias, "implementation": "dense"})
    bias[1] = least  # which changes no weight
    with accelerator(), unread(torch):
        found = results(torch, arrays, {"bias": bias})
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-6)


@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`-wrapped function")
@pytest.mark.parametrize("name", ["causal", "lengths", "window", "documents"])
def test_a_compiled_program_holds_no_operator_that_could_read(name, arrays, torch):
    options, graphs = MASKS[name](torch), []

    def keep(graph, _):
        graphs.append(graph)
        return graph.forward

    arrays[2][0, 0, 6] = math.nan
    expected = results(torch, arrays, options | {"implementation": "blockwise"})
    with accelerator():
        attend = compiled(torch, lambda query, key, value: attention(query, key, value, **options), keep)
        leaves = [x.detach().requires_grad_() for x in arrays]
        output = attend(*leaves)
    d_output = torch.linspace(-1, 1, output.numel(), dtype=output.dtype).reshape(output.shape)
    found = [output.detach(), *torch.autograd.grad(output, leaves, d_output)]
    found[3][0, 0, 6] = expected[3][0, 0, 6]  # a replaced element has no gradient in the definition
    for one, other in zip(found, expected, strict=True):
        finite = other.isfinite()
        assert torch.equal(one.isfinite(), finite)
        np.testing.assert_allclose(one[finite], other[finite], rtol=0, atol=1e-13)
    operators = [str(node.target) for graph in graphs[0].modules() for node in graph.graph.nodes]
    assert not [each for each in operators if "attention_core" in each or "item" in each.rpartition(".")[2].split("_")]


def test_functions_of_derivatives(arrays, torch):
    """They are those of the definition once, and an error twice."""

    def loss(query, key, value):
        return (attention(query, key, value, is_causal=True) ** 2).sum()

    expected = torch.func.grad(loss, argnums=(0, 1, 2))(*arrays)
    with accelerator():
        found = torch.func.grad(loss, argnums=(0, 1, 2))(*arrays)
        leaves = [x.detach().requires_grad_() for x in arrays]
        once = torch.autograd.grad(loss(*leaves), leaves, create_graph=True)
        with pytest.raises(NotImplementedError):
            torch.autograd.grad(once[1].sum(), leaves)
        each = torch.vmap(lambda query: attention(query, arrays[1][0], arrays[2][0], is_causal=True))(arrays[0])
    for one, other, third in zip(found, expected, once, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-12)
        np.testing.assert_allclose(third.detach(), other, rtol=0, atol=1e-12)
    alone = attention(arrays[0][1], arrays[1][0], arrays[2][0], is_causal=True)
    np.testing.assert_allclose(each[1], alone, rtol=0, atol=1e-13)
