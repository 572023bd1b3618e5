"""PyTorch's fused kernel: equal to the definition where it is taken, and shown to differ where it is refused."""

import contextlib
import functools
import math

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from torch_kernel_helpers import B, D, G, H, M, N, attention, close, compiled, refusal, results

import attention_core as ac
from attention_core import explain_attention
from attention_core.backend import Call
from attention_core.masks import And
from attention_torch.kernels import guards

# array-api-compat remembers the namespace of a type in a cache, which PyTorch traces through, and says so once.
pytestmark = pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`-wrapped function")


@pytest.fixture
def arrays(rng, put):
    return put([rng.standard_normal(shape) for shape in ((B, H, M, D), (B, G, N, D), (B, G, N, D))])


def kernel(torch, arrays, **options):
    """What the kernel makes of it."""
    query, key, value = arrays
    return torch.nn.functional.scaled_dot_product_attention(query, key, value, enable_gqa=True, **options)


@pytest.mark.parametrize(("rows", "is_causal"), [(1, False), (40, False), (80, True)])
@pytest.mark.parametrize("scale", [0.1, -0.3, 4.0])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_the_scale_rounds_no_query_of_16_bits(dtype, scale, rows, is_causal):
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, 4, length, 16).to(getattr(torch, dtype)) for length in (rows, 80, 80))
    found = attention(query, key, value, scale=scale, is_causal=is_causal, implementation="fused")
    signed = math.copysign(1.0, scale) * query, key, value
    assert torch.equal(found, kernel(torch, signed, scale=abs(scale), is_causal=is_causal))


def test_a_scale_above_1_makes_no_query_of_float16_overflow():
    query, key = torch.full((1, 1, 40, 16), 30000.0).half(), torch.full((1, 1, 40, 16), 1e-3).half()
    for context in (contextlib.nullcontext(), FlopCounterMode(display=False)):  # the second is one that sees operators
        with context:
            assert torch.equal(attention(query, key, key, scale=4.0, implementation="fused"), key)


@pytest.mark.parametrize(
    ("rows", "columns", "recorded", "chosen"),
    [
        (1, 4096, False, "dense"), (40, 40, False, "fused"), (40, 40, True, "dense"),
        (300, 300, False, "fused"), (300, 300, True, "fused"),
    ],
)  # fmt: skip
def test_16_bits_take_the_kernel_where_a_processor_multiplies_them(rows, columns, recorded, chosen, monkeypatch):
    """And it is faster: not for a few queries, nor where few scores are differentiated."""
    arrays = [torch.randn(1, 2, length, 16).bfloat16() for length in (rows, columns, columns)]
    arrays[0].requires_grad_(recorded)
    for types, expected in (
        (set(), "dense" if chosen == "dense" or rows < 300 else "blockwise"),
        ({torch.bfloat16}, chosen),
    ):
        monkeypatch.setattr(guards, "MULTIPLIED", types)
        assert explain_attention(*arrays).chosen == expected
    assert explain_attention(*(x.half() for x in arrays)).chosen != "fused"


@pytest.mark.parametrize("columns", [64, 512, 1024])
def test_in_16_bits_the_kernel_costs_at_most_one_unit_for_weights_and_a_half_for_the_output(columns, rng):
    """Of the sum of p |v|, at which no rounded weight is off by more than one part in 2**8."""
    for scale in (0.05, 0.3, 1.0, 3.0):
        query, key, value = (
            torch.asarray(scale * rng.standard_normal((1, 2, length, 64))).bfloat16()
            for length in (48, columns, columns)
        )
        value = value * (2.0 ** torch.asarray(rng.integers(-10, 10, 64))).bfloat16()
        found, value = attention(query, key, value, implementation="fused").double(), value.double()
        weights = (query.double() @ key.double().mT / 8).softmax(dim=-1)
        unit = 2.0 ** ((weights @ value.abs()).log2().floor() - 7)
        assert ((found - weights @ value).abs() / unit).max() <= 1.51


def test_the_scale_comes_before_the_product(put):
    """A score that fits does not overflow on the way, as the kernel's own scale makes it."""
    query, key = put(np.full((1, 1, 2, 4), 1e25), dtype="float32"), put(np.full((1, 1, 3, 4), 1e14), dtype="float32")
    value = put(np.arange(12.0).reshape(1, 1, 3, 4), dtype="float32")
    expected = [attention(query, key, value, scale=1e-38, implementation="dense")]
    for context in (contextlib.nullcontext(), FlopCounterMode(display=False)):  # the second is one that sees operators
        for options in ({}, {"assume_finite": True}):
            with context:
                found = attention(query, key, value, scale=1e-38, implementation="fused", **options)
            close([found], expected, 1e-5)
    assert torch.isnan(kernel(torch, (query, key, value), scale=1e-38)).any()


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("implementation", ["fused", "blockwise"])
def test_a_jacobian_is_that_of_the_definition(implementation, put, rng):
    arrays = put([rng.standard_normal((1, 1, 20, 4)) for _ in range(3)])

    def jacobian(name):
        def attend(*arrays):
            return attention(*arrays, is_causal=True, implementation=name).sum(dim=-1)

        return torch.func.jacrev(attend, argnums=(0, 1, 2))(*arrays)

    close(jacobian(implementation), jacobian("dense"))


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("mode", ["eager", "recorded", "compiled", "vectorized", "counted"])
@pytest.mark.parametrize("columns", [1, 7, 15, 16, 40])
def test_a_query_that_is_nan_is_not_lost_among_few_keys(columns, mode, put, rng):
    query, key = put(rng.standard_normal((1, 1, 40, 8))), put(rng.standard_normal((1, 1, columns, 8)))
    assert explain_attention(query, key, key).chosen == "fused"
    query[:, :, 5] = math.nan
    attend = {"compiled": compiled(torch, attention), "vectorized": torch.vmap(attention)}.get(mode, attention)
    with FlopCounterMode(display=False) if mode == "counted" else contextlib.nullcontext():
        found = attend(query.clone().requires_grad_(mode == "recorded"), key, key).detach()
    close([found], [attention(query, key, key, implementation="dense")])
    assert torch.isnan(found[:, :, 5]).all()
    assert torch.isfinite(found).sum() == found.numel() - 8
    lanes = 8 if torch.backends.cpu.get_cpu_capability() == "AVX512" else 4  # numbers of float64 in a vector
    if columns < lanes:
        assert not kernel(torch, (query, key, key))[:, :, 5].any()


@pytest.mark.parametrize("lengths", [5, [40, 3]])
def test_a_query_that_is_nan_is_not_lost_among_the_few_keys_of_a_length(lengths, put, rng):
    arrays = put([rng.standard_normal((2, 1, 40, 8)) for _ in range(3)])
    mask = ac.KeyLengths(lengths if isinstance(lengths, int) else put(np.asarray(lengths)))
    assert explain_attention(*arrays, mask=mask).chosen == "fused"
    arrays[0][:, :, 5] = math.nan
    for options in ({"mask": mask}, {"mask": mask, "is_causal": True}):
        found = attention(*arrays, **options)
        assert torch.isnan(found[:, :, 5]).all()
        close([found], [attention(*arrays, **options, implementation="dense")])


@pytest.mark.parametrize("rows", [5, 2])
def test_a_gradient_that_overflows_behind_a_mask_is_none(rows, put, rng):
    """Of a masked value that is finite, as is the output. Queries are few next to keys, or not."""
    arrays = put([rng.standard_normal((1, 2, count, 4)) for count in (rows, 9, 9)], dtype="float32")
    arrays[2][:, :, 6:] = 1e30
    allowed, leaves = put(np.arange(9) < 6), [x.clone().requires_grad_() for x in arrays]
    output = attention(*leaves, mask=allowed, implementation="fused")
    for gradient in torch.autograd.grad(output, leaves, torch.full_like(output, 1e10)):
        assert gradient.isfinite().all()


@pytest.mark.parametrize(
    "mask",
    [ac.Causal(offset=1), ac.SlidingWindow(left=2), And(ac.Causal(offset=1), ac.KeyLengths(4)), ~ac.KeyLengths(4)],
)
def test_refused_as_a_rule_would_become_an_array_of_all_scores(mask, arrays, backend, monkeypatch):
    """Where scores are few, it becomes one: the kernel is faster than blocks there."""
    assert refusal(arrays, mask=mask) is None
    monkeypatch.setattr(backend, "tuning", backend.tuning._replace(structured_below=0))
    assert "as an array of all M x N" in refusal(arrays, mask=mask)
    with pytest.raises(ValueError):
        attention(*arrays, mask=mask, implementation="fused")


@pytest.mark.parametrize(("batch", "chosen"), [(16, "fused"), (1, "blockwise")])
def test_a_chunk_of_a_prompt_takes_the_kernel_if_its_mask_is_small(batch, chosen, backend, rng, put, monkeypatch):
    """Of few key/value heads, too. An array of M x N that is much larger than the arguments would take the memory."""
    monkeypatch.setattr(backend, "tuning", backend.tuning._replace(structured_below=0))
    dims = (batch, 8, 64, 8), (batch, 1, 512, 8), (batch, 1, 512, 8)
    arrays, options = (
        put([rng.standard_normal(shape) for shape in dims]),
        {"mask": ac.SlidingWindow(left=500, right=0, offset=448)},
    )
    assert explain_attention(*arrays, **options).chosen == chosen
    close(results(torch, arrays, "auto", options), results(torch, arrays, "dense", options))


def test_lengths_on_an_accelerator_are_not_read(backend, arrays):
    """No run of keys is known of each sample then; the tensors of meta have no values to read either."""

    query, key, value = (array.to("meta") for array in arrays)
    mask = ac.KeyLengths(torch.zeros(B, dtype=torch.int32, device="meta"))
    call = Call(query, key, value, backend.namespace, backend, mask=mask)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(guards, "is_concrete", lambda array: True)  # as on a GPU
        assert guards.may_leak(call)
        assert "as an array of all M x N" in guards.refusal(call)


def test_refused_as_a_bias_to_be_differentiated_takes_all_scores(arrays, put, rng):
    bias = put(rng.standard_normal((M, N)))
    assert refusal(arrays, bias=bias) is None
    assert "nor one that is to be differentiated" in refusal(arrays, bias=bias.requires_grad_())
    found, expected = (
        torch.autograd.grad(attention(*arrays, bias=bias, implementation=name).square().sum(), bias)
        for name in ("auto", "dense")
    )
    close(found, expected)


def test_refused_as_a_bias_of_another_dtype_is_not_documented(arrays, put, backend, get, rng):
    arrays = [backend.from_numpy(get(x), dtype="float16") for x in arrays]
    bias = put(rng.standard_normal((M, N)), dtype="float32")
    assert "no bias of another dtype" in refusal(arrays, bias=bias)
    with pytest.raises(ValueError):
        attention(*arrays, bias=bias, implementation="fused")


@pytest.mark.parametrize("word", ["mask", "bias"])
def test_refused_while_values_cannot_be_seen(word, arrays):
    """A nan behind a mask does not leak in compiled functions either, whether keys are few or not."""
    arrays = [torch.cat([x, x], dim=-2) for x in arrays]
    allowed = torch.arange(2 * N) < 2 * N - 1
    options = {word: allowed if word == "mask" else torch.where(allowed, 0.5, -math.inf).to(arrays[0].dtype)}
    seen = []

    def attend(*arrays):
        seen.append(refusal(arrays, **options))
        return attention(*arrays, **options)

    spoilt = [x.clone() for x in arrays]
    spoilt[2][:, :, -1] = math.nan
    close([torch.vmap(attend)(*spoilt)], [attention(*arrays, **options)])
    assert "not seen to be finite" in seen[0]
    torch._dynamo.reset()
    compiled = torch.compile(lambda *arrays: attention(*arrays, **options), fullgraph=True, backend="eager")
    close([compiled(*spoilt)], [attention(*arrays, **options)])


def test_the_function_of_pytorch_may_be_replaced_by_one_that_calls_this(monkeypatch):
    def replacement(query, key, value, **options):
        return ac.scaled_dot_product_attention(query, key, value, implementation="fused")

    x = torch.ones(1, 2, 20, 4)
    expected = ac.scaled_dot_product_attention(x, x, x, implementation="fused")
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", replacement)
    found = torch.nn.functional.scaled_dot_product_attention(x, x, x)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("records", [False, True])
@pytest.mark.parametrize("mask", [None, ac.Causal(), ac.KeyLengths(20), ac.SlidingWindow(left=30, right=0)])
@pytest.mark.parametrize("scale", [0.5, 1e-20])
@pytest.mark.parametrize("size", [1.0, 2.0**-60], ids=["large queries", "large keys"])
def test_a_score_that_fits_does_not_overflow_on_the_way(size, scale, mask, records):
    """Some products of its channels are beyond float32 before they are scaled."""
    query = (size * torch.tensor([2.5e19, 1.5e19, 1.5e19, 0.0])).expand(1, 1, 20, 4).clone().requires_grad_(records)
    key, value = torch.zeros(1, 1, 20, 4), torch.arange(80.0).reshape(1, 1, 20, 4)
    key[..., 0, :] = torch.tensor([-2e19, 2e19, 2e19, 0.0]) / size
    close(
        *([attention(query, key, value, mask=mask, scale=scale, **way)] for way in ({}, {"implementation": "dense"})),
        1e-5,
    )


def test_a_program_for_many_sizes_shares_key_heads():
    """Whether heads are shared is a symbol to a compiler, and the kernel takes none; so is where a window cuts keys."""
    torch._dynamo.reset()
    program = torch.compile(attention, dynamic=True, backend="aot_eager", fullgraph=True)
    key = torch.linspace(-1, 1, 640).reshape(2, 2, 20, 8)
    for rows, rule in ((5, {}), (4, {}), (5, {"mask": ac.SlidingWindow(left=3, right=2)})):
        query = torch.linspace(-1, 2, 64 * rows).reshape(2, 4, rows, 8)
        close([program(query, key, key, **rule)], [attention(query, key, key, implementation="dense", **rule)], 1e-5)


@pytest.mark.parametrize("places", [[0], [1], [2], [0, 2], [1, 2]])
@pytest.mark.parametrize("mask", [None, ac.Causal()])
def test_gradients_of_some_arguments_have_gradients(places, mask, put, rng):
    arrays = put([rng.standard_normal((1, 2, 20, 4)) for _ in range(4)])

    def second(implementation):
        leaves = [x.clone().requires_grad_(index in places) for index, x in enumerate(arrays[:3])]
        watched, d_output = [leaves[index] for index in places], arrays[3].clone().requires_grad_()
        output = attention(*leaves, mask=mask, implementation=implementation)
        gradients = torch.autograd.grad(output, watched, d_output, create_graph=True)
        return torch.autograd.grad(sum((x**2).sum() for x in gradients), [*watched, d_output], materialize_grads=True)

    close(second("fused"), second("dense"), 1e-11)


def test_autocast_rounds_no_gradient_that_is_recorded():
    """It may be on where one goes backward alone."""
    x = torch.linspace(-1, 1, 1280).reshape(1, 2, 40, 16).requires_grad_()
    total = attention(x, x, x, implementation="fused").sin().sum()
    expected = torch.autograd.grad(total, x, retain_graph=True)
    with torch.autocast("cpu", torch.bfloat16):
        close(torch.autograd.grad(total, x, create_graph=True), expected, 1e-5)


@pytest.mark.parametrize("mask", [None, ac.Causal()])
def test_a_checkpoint_tells_arguments_once(mask):
    x = torch.linspace(-1, 1, 160).reshape(1, 2, 20, 4).requires_grad_()
    attend = functools.partial(attention, mask=mask, implementation="fused")
    output = torch.utils.checkpoint.checkpoint(attend, x, x, x, use_reentrant=False)
    (gradient,) = torch.autograd.grad(output.sum(), x, create_graph=True)
    close([gradient.detach()], torch.autograd.grad(attend(x, x, x).sum(), x), 1e-5)
    with pytest.raises(NotImplementedError):
        gradient.sum().backward()


@pytest.mark.parametrize(("implementation", "length"), [("auto", 600), ("blockwise", 20)])
def test_where_scores_are_many_an_error_names_the_dense_form(implementation, length):
    x = torch.linspace(-1, 1, 8 * length).reshape(1, 2, length, 4).requires_grad_()
    output = ac.scaled_dot_product_attention(x, x, x, implementation=implementation)
    (gradient,) = torch.autograd.grad(output.square().sum(), x, create_graph=True)
    with pytest.raises(NotImplementedError):
        gradient.sum().backward()


def test_forward_derivatives_are_those_of_the_dense_form():
    torch.manual_seed(0)
    query, key, tangent = (torch.randn(1, 2, 80, 16, dtype=torch.float64) for _ in range(3))

    def along(implementation):
        attend = functools.partial(attention, is_causal=True, implementation=implementation)
        return torch.func.jvp(lambda query: attend(query, key, key), (query,), (tangent,))[1]

    def second(implementation):
        def measure(query):
            return attention(query, key[..., :4, :], key[..., :4, :], implementation=implementation).square().sum()

        return torch.func.hessian(measure)(query[..., :3, :])

    for derivative in (along, second):
        np.testing.assert_allclose(derivative("auto"), derivative("dense"), rtol=0, atol=1e-12)
    with pytest.raises(NotImplementedError):
        along("blockwise")
