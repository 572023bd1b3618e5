"""PyTorch's fused kernel: equal to the definition where it is taken, and shown to differ where it is refused."""

import importlib
import math

import numpy as np
import pytest

import attention_core as ac
from attention_core import explain_attention
from attention_core.masks import And, Given
from attention_core.scores import alibi

attention = ac.scaled_dot_product_attention

# array-api-compat remembers the namespace of a type in a cache, which PyTorch traces through, and says so once.
pytestmark = pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`-wrapped function")

B, H, G, M, N, D = 3, 4, 2, 7, 11, 8


@pytest.fixture
def torch():
    return importlib.import_module("torch")


@pytest.fixture
def arrays(rng, put):
    return put([rng.standard_normal(shape) for shape in ((B, H, M, D), (B, G, N, D), (B, G, N, D))])


def refusal(arrays, **options):
    return next(each for each in explain_attention(*arrays, **options).candidates if each.name == "fused").refusal


def kernel(torch, arrays, **options):
    """What the kernel makes of it."""
    query, key, value = arrays
    return torch.nn.functional.scaled_dot_product_attention(query, key, value, enable_gqa=True, **options)


@pytest.mark.parametrize("scale", [-0.5, 0.0])
@pytest.mark.parametrize("mask", [None, ac.Causal(), ac.KeyLengths(5), ac.Causal() & ac.KeyLengths(5)], ids=str)
def test_a_scale_that_is_not_positive(mask, scale, torch, rng):
    """The kernel multiplies scores that it has masked with -inf already."""
    arrays = [torch.asarray(rng.standard_normal((2, 2, 96, 16))) for _ in range(3)]
    options = {"mask": mask, "scale": scale}
    close(results(torch, arrays, "auto", options), results(torch, arrays, "dense", options), 1e-12)
    torch._dynamo.reset()  # a number that differs from that of the last test would be traced
    compiled = torch.compile(lambda *arrays: attention(*arrays, **options), backend="aot_eager", fullgraph=True)
    close([compiled(*arrays)], [attention(*arrays, **options, implementation="dense")], 1e-12)


def close(actual, desired, tolerance=1e-13):
    for found, expected in zip(actual, desired, strict=True):
        np.testing.assert_allclose(found.detach(), expected.detach(), rtol=0, atol=tolerance)


def results(torch, arrays, implementation, options):
    """Output and gradients."""
    leaves = [x.detach().requires_grad_() for x in arrays]
    output = attention(*leaves, **options, implementation=implementation)
    factor = torch.linspace(-1, 1, output.numel(), dtype=torch.float64).reshape(output.shape)
    return output, *torch.autograd.grad((output.to(torch.float64) * factor).sum(), leaves)


SHAPES = [(), (N,), (1,), (M, 1), (M, N), (1, 1, N), (H, 1, 1), (H, M, 1), (B, 1, 1, 1), (B, 1, M, N), (B, H, M, N)]
TAKEN = {
    "plain": lambda put, rng: {},
    "causal": lambda put, rng: {"is_causal": True},
    "scale": lambda put, rng: {"scale": 0.3},
    "scale of an array": lambda put, rng: {"scale": put(np.array(0.3))},
    "array and rule of it": lambda put, rng: {"mask": Given(put(rng.random((M, N)) < 0.5))},
    "no dropout": lambda put, rng: {"dropout": ac.Dropout(0.0, 3)},
    "causal bias": lambda put, rng: {"is_causal": True, "bias": put(rng.standard_normal((H, 1, N)))},
    "bias of minus infinity": lambda put, rng: {
        "bias": put(np.where(np.arange(M)[:, None] == 2, -math.inf, np.ones(N)))
    },
    "empty rows": lambda put, rng: {"mask": put((np.arange(M) != 3)[:, None] & (np.arange(N) > 4))},
    "mask and bias": lambda put, rng: {
        "mask": put(rng.random((B, 1, M, N)) < 0.6),
        "bias": put(rng.standard_normal((M, 1))),
    },
    "lengths": lambda put, rng: {"mask": ac.KeyLengths(put(np.asarray([0, 2, N + 3])))},
    "lengths of a causal mask": lambda put, rng: {
        "mask": ac.KeyLengths(put(np.asarray([N, 0, 3]))),
        "is_causal": True,
    },
    "length of all": lambda put, rng: {"mask": ac.Causal() & ac.KeyLengths(4)},
    "numbers of a mask": lambda put, rng: {"bias": put(np.where(rng.random(N) < 0.5, -1e30, 0.0))},
}


@pytest.mark.parametrize("name", TAKEN)
def test_the_kernel_equals_the_definition(name, torch, arrays, put, rng):
    """In output and gradients."""
    options = TAKEN[name](put, rng)
    assert refusal(arrays, **options) is None
    assert explain_attention(*arrays, **options).chosen == "fused"
    found, expected = (results(torch, arrays, implementation, options) for implementation in ("fused", "dense"))
    close(found, expected)
    if name in ("empty rows", "bias of minus infinity"):
        row = 3 if name == "empty rows" else 2
        assert not found[0][:, :, row].any()
        assert not found[1][:, :, row].any()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", ["mask", "bias"])
def test_the_kernel_takes_masks_and_biases_of_every_shape(kind, shape, torch, arrays, put, rng):
    bias_or_mask = rng.random(shape) < 0.6 if kind == "mask" else rng.standard_normal(shape)
    options = {kind: put(np.asarray(bias_or_mask))}
    assert refusal(arrays, **options) is None
    close(*(results(torch, arrays, implementation, options) for implementation in ("fused", "dense")))


@pytest.mark.parametrize("leading", [(), (2, 3), (1, 2, 2)])
@pytest.mark.parametrize("kind", ["plain", "causal", "mask", "bias"])
def test_the_kernel_takes_any_number_of_leading_axes(kind, leading, torch, put, rng):
    arrays = put([rng.standard_normal((*leading, *shape)) for shape in ((H, M, D), (G, N, D), (G, N, D))])
    options = {
        "plain": {},
        "causal": {"is_causal": True},
        "mask": {"mask": put(rng.random((*leading[1:], 1, M, N)) < 0.6)},
        "bias": {"bias": put(rng.standard_normal((*leading, H, 1, N)))},
    }[kind]
    assert refusal(arrays, **options) is None
    close(*(results(torch, arrays, implementation, options) for implementation in ("fused", "dense")))


@pytest.mark.parametrize(("rows", "columns", "groups"), [(1, 1, 1), (1, N, 4), (M, 1, 2), (64, 65, 1)])
def test_the_kernel_takes_any_lengths_and_groups(rows, columns, groups, torch, put, rng):
    arrays = put(
        [rng.standard_normal(shape) for shape in ((2, H, rows, D), (2, groups, columns, D), (2, groups, columns, D))]
    )
    close(*(results(torch, arrays, name, {"is_causal": True}) for name in ("fused", "dense")))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_the_kernel_in_16_bits_rounds_weights_too(dtype, torch, arrays, backend, get):
    """So it is taken by name alone where blocks are as fast."""
    arrays = [backend.from_numpy(get(x), dtype=dtype) for x in arrays]
    step = 2.0 ** (-8 if dtype == "bfloat16" else -11)
    found, expected = (
        results(torch, arrays, implementation, {"is_causal": True}) for implementation in ("fused", "dense")
    )
    close([x.double() for x in found], [x.double() for x in expected], 16 * step)
    assert explain_attention(*arrays, is_causal=True).chosen != "fused"


@pytest.mark.parametrize("dtype", ["float32"])
def test_the_kernel_in_float32(dtype, torch, arrays, backend, get):
    arrays = [backend.from_numpy(get(x), dtype=dtype) for x in arrays]
    close(*(results(torch, arrays, name, {"is_causal": True}) for name in ("fused", "dense")), 3e-6)


def test_the_scale_comes_before_the_product(torch, put):
    """A score that fits does not overflow on the way, as the kernel's own scale makes it."""
    query, key = put(np.full((1, 1, 2, 4), 1e25), dtype="float32"), put(np.full((1, 1, 3, 4), 1e14), dtype="float32")
    value = put(np.arange(12.0).reshape(1, 1, 3, 4), dtype="float32")
    found = attention(query, key, value, scale=1e-38, implementation="fused")
    close([found], [attention(query, key, value, scale=1e-38, implementation="dense")], 1e-5)
    assert torch.isnan(kernel(torch, (query, key, value), scale=1e-38)).any()


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("implementation", ["fused", "blockwise"])
def test_a_jacobian_is_that_of_the_definition(implementation, torch, put, rng):
    arrays = put([rng.standard_normal((1, 1, 20, 4)) for _ in range(3)])

    def jacobian(name):
        def attend(*arrays):
            return attention(*arrays, is_causal=True, implementation=name).sum(dim=-1)

        return torch.func.jacrev(attend, argnums=(0, 1, 2))(*arrays)

    close(jacobian(implementation), jacobian("dense"))


# What is refused


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("mode", ["eager", "compiled", "vectorized"])
@pytest.mark.parametrize("columns", [1, 7, 15, 16, 40])
def test_not_preferred_as_a_query_that_is_nan_is_lost_among_few_keys(columns, mode, torch, put, rng):
    query, key = put(rng.standard_normal((1, 1, 40, 8))), put(rng.standard_normal((1, 1, columns, 8)))
    assert explain_attention(query, key, key).chosen == "fused"
    query[:, :, 5] = math.nan
    attend = {"eager": attention, "compiled": compiled(torch, attention), "vectorized": torch.vmap(attention)}[mode]
    found = attend(query, key, key)
    close([found], [attention(query, key, key, implementation="dense")])
    assert torch.isnan(found[:, :, 5]).all()
    assert torch.isfinite(found).sum() == found.numel() - 8
    assert (explain_attention(query, key, key).chosen == "fused") == (columns >= 16)
    if columns < 8:
        assert not kernel(torch, (query, key, key))[:, :, 5].any()


@pytest.mark.parametrize("nonfinite", [math.nan, math.inf])
def test_refused_as_what_is_masked_leaks(nonfinite, torch, arrays, put):
    allowed = put(np.arange(N) < N - 1)
    for argument in (1, 2):
        spoilt = [x.clone() for x in arrays]
        spoilt[argument][:, :, -1] = nonfinite
        assert "not seen to be finite" in refusal(spoilt, mask=allowed)
        assert torch.isnan(kernel(torch, spoilt, attn_mask=allowed[None, :])).any()
        found = attention(*spoilt, mask=allowed)
        close([found], [attention(*arrays, mask=allowed)])
        with pytest.raises(ValueError, match="not seen to be finite"):
            attention(*spoilt, mask=allowed, implementation="fused")


def test_refused_as_what_overflows_behind_a_mask_leaks(torch, put):
    """Finite numbers, whose product is not."""
    query, key, value = put(
        [np.full((1, 1, 2, 4), 1e25), np.ones((1, 1, 3, 4)), np.ones((1, 1, 3, 4))], dtype="float32"
    )
    key[..., 2, :] = 1e25
    allowed = put(np.arange(3) < 2)
    assert torch.isnan(kernel(torch, (query, key, value), attn_mask=allowed[None, :])).any()
    assert refusal((query, key, value), mask=allowed) is not None
    np.testing.assert_array_equal(attention(query, key, value, mask=allowed), np.ones((1, 1, 2, 4)))


def test_refused_as_the_scale_makes_what_is_masked_overflow(put):
    key = np.full((1, 1, 3, 2), 1e-30)
    key[0, 0, 2] = 1e10
    query, key, value = put([np.ones((1, 1, 2, 2)), key, np.ones((1, 1, 3, 2))], dtype="float32")
    allowed = put(np.arange(3) < 2)
    assert refusal((query, key, value), mask=allowed, scale=1e30) is not None


def test_numbers_whose_squares_overflow_are_not_refused(put):
    query, key, value = put([np.full((1, 1, 2, 2), 1e-20), np.full((1, 1, 3, 2), 1e25), np.full((1, 1, 3, 2), 1e10)])
    query, key, value = (x.to(dtype=importlib.import_module("torch").float32) for x in (query, key, value))
    allowed = put(np.arange(3) < 2)
    assert refusal((query, key, value), mask=allowed) is None
    np.testing.assert_allclose(attention(query, key, value, mask=allowed, implementation="fused"), value[:, :, :2])
    assert "leak" in refusal((query, key, value * 1e20), mask=allowed)  # gradients would make of it inf, times 0


def test_refused_as_dropout_is_another(torch, arrays):
    dropout = ac.Dropout(0.5, 3)
    assert "generator of its own" in refusal(arrays, dropout=dropout)
    expected = attention(*arrays, dropout=dropout, implementation="dense")
    assert not torch.allclose(kernel(torch, arrays, dropout_p=0.5), expected)
    close([attention(*arrays, dropout=dropout)], [expected])


@pytest.mark.parametrize("options", [{"softcap": 2.0}, {"score_mod": alibi(H)}])
def test_refused_as_the_kernel_has_no_such_thing(options, arrays):
    (name,) = options
    assert refusal(arrays, **options) == f"has no {name}"
    assert name not in ["query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa"]
    expected = attention(*arrays, **options, implementation="dense")
    assert (expected - attention(*arrays, implementation="dense")).abs().max() > 0.1


@pytest.mark.parametrize(
    "mask", [ac.Causal(1), ac.SlidingWindow(left=2), And(ac.Causal(1), ac.KeyLengths(4)), ~ac.KeyLengths(4)]
)
def test_refused_as_a_rule_would_become_an_array_of_all_scores(mask, arrays):
    assert "as an array of all M x N" in refusal(arrays, mask=mask)
    with pytest.raises(ValueError, match="as an array of all M x N"):
        attention(*arrays, mask=mask, implementation="fused")


def test_padding_is_cut_off_and_never_looked_at(torch, arrays, put):
    """The kernel is called for each of the batch apart, with the keys it has."""
    query, key, value = arrays
    lengths = put(np.asarray([0, 2, N - 1]))
    padding = torch.arange(N) >= lengths[:, None]
    spoilt = [torch.where(padding[:, None, :, None], math.nan, array) for array in (key, value)]
    assert explain_attention(query, *spoilt, mask=ac.KeyLengths(lengths)).chosen == "fused"
    found = results(torch, [query, *spoilt], "fused", {"mask": ac.KeyLengths(lengths)})
    close(found, results(torch, arrays, "dense", {"mask": ac.KeyLengths(lengths)}))
    assert not found[0][0].any()


def test_refused_as_a_bias_to_be_differentiated_takes_all_scores(torch, arrays, put, rng):
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
    with pytest.raises(ValueError, match="no bias of another dtype"):
        attention(*arrays, bias=bias, implementation="fused")


def test_refused_as_pieces_count_from_elsewhere(torch, arrays):
    query, key, value = arrays
    part = ac.partial_attention(query, key[:, :, 4:], value[:, :, 4:], key_start=4, is_causal=True)
    top_left = kernel(torch, (query, key[:, :, 4:], value[:, :, 4:]), is_causal=True)
    assert not torch.allclose(part.output, top_left)


def test_refused_while_values_cannot_be_seen(torch, arrays):
    """A nan behind a mask does not leak in compiled functions either."""
    allowed = torch.arange(N) < N - 1
    seen = []

    def attend(*arrays):
        seen.append(refusal(arrays, mask=allowed))
        return attention(*arrays, mask=allowed)

    spoilt = [x.clone() for x in arrays]
    spoilt[2][:, :, -1] = math.nan
    close([torch.vmap(attend)(*spoilt)], [attention(*arrays, mask=allowed)])
    assert "not seen to be finite" in seen[0]
    torch._dynamo.reset()
    compiled = torch.compile(lambda *arrays: attention(*arrays, mask=allowed), fullgraph=True, backend="eager")
    close([compiled(*spoilt)], [attention(*arrays, mask=allowed)])


# In a compiled program, which looks at the values when it runs


def compiled(torch, function, backend="aot_eager"):
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, dynamic=False, backend=backend)


def program(torch, function, *arrays):
    """The text of what the compiler is given."""
    graphs = []

    def record(graph, _):
        graphs.append(graph.code)
        return graph

    compiled(torch, function, record)(*arrays)
    return "".join(graphs)


BIASED = [name for name in TAKEN if "bias" in name or name == "numbers of a mask"]
LATER = [name for name in TAKEN if name != "lengths of a causal mask" and name not in BIASED]
NAMED = "scaled_dot_product_attention("
OPERATORS = {"lengths": "torch.padded"} | dict.fromkeys(("causal", "length of all"), "torch.causal")


@pytest.mark.parametrize("name", LATER)
def test_compiled_the_kernel_equals_the_definition(name, torch, arrays, put, rng):
    options = TAKEN[name](put, rng)
    if name == "scale of an array":
        options["scale"] = 0.7
    text = program(torch, lambda *arrays: attention(*arrays, **options, implementation="fused"), *arrays)
    assert OPERATORS.get(name, NAMED) in text
    attend = compiled(torch, lambda *arrays: attention(*arrays, **options, implementation="fused"))
    expected = results(torch, arrays, "dense", options)
    close([attend(*arrays)], expected[:1])
    close(gradients_of(torch, "fused", options)(*arrays), expected)


def test_refused_compiled_with_a_bias_whose_gradient_would_be_lost(torch, arrays, put, rng):
    bias = put(rng.standard_normal((M, N)))

    def loss(attend, bias):
        return attend(bias).square().sum()

    def of(implementation):
        return lambda bias: attention(*arrays, bias=bias, implementation=implementation)

    assert NAMED not in program(torch, of("auto"), bias)
    expected = torch.func.grad(lambda bias: loss(of("dense"), bias))(bias)
    found = compiled(torch, torch.func.grad(lambda bias: loss(of("auto"), bias)), "aot_eager")(bias)
    torch.testing.assert_close(found, expected)


def gradients_of(torch, implementation, options, backend="aot_eager"):
    """The same as `results`, of a compiled function."""
    attend = compiled(torch, lambda *arrays: attention(*arrays, **options, implementation=implementation), backend)

    def results(*arrays):
        leaves = [x.detach().requires_grad_() for x in arrays]
        output = attend(*leaves)
        factor = torch.linspace(-1, 1, output.numel(), dtype=torch.float64).reshape(output.shape)
        return output, *torch.autograd.grad((output.to(torch.float64) * factor).sum(), leaves)

    return results


@pytest.mark.parametrize(
    ("name", "backend_of_torch"),
    [
        *((name, "aot_eager") for name in ("causal", "scale", "lengths", "empty rows")),
        *((name, "inductor") for name in ("causal", "lengths")),
    ],
)
def test_compiled_nonfinite_arrays_are_left_to_blocks(name, backend_of_torch, torch, arrays, put, rng):
    """One program answers for all values, masked or attended, as blocks do, in output and gradients.

    With lengths, the kernel is given only the keys that are attended to, compiled or not.
    """
    options = TAKEN[name](put, rng)
    if "mask" not in options:
        options["is_causal"] = True
    attend = gradients_of(torch, "fused", options, backend_of_torch)
    for nonfinite in (math.nan, math.inf, None):
        for argument in range(3):
            inputs = [x.clone() for x in arrays]
            if nonfinite is not None:
                inputs[argument][:, :, 2] = nonfinite
            otherwise = "fused" if name == "lengths" else "blockwise"
            close(attend(*inputs), results(torch, inputs, "dense" if nonfinite is None else otherwise, options))


def test_compiled_finite_numbers_whose_product_overflows_behind_the_mask_do_not_leak(torch, arrays):
    query, key, value = arrays
    key[:, :, -1] = 1e308  # which comes after all queries
    expected = results(torch, [query * 100, key, value], "dense", {"is_causal": True})
    assert expected[0].isfinite().all()
    close(gradients_of(torch, "fused", {"is_causal": True})(query * 100, key, value), expected, 1e-11)


@pytest.mark.parametrize("name", ["causal", "empty rows"])
def test_compiled_blocks_are_computed_only_if_needed(name, torch, arrays, monkeypatch, put, rng):
    """Going forward keeps nothing, so that they are computed once more to go backward."""
    run = []
    module = importlib.import_module("attention_torch.compiled")
    blockwise = module.blockwise
    monkeypatch.setattr(module, "blockwise", lambda call: (run.append("blockwise"), blockwise(call))[1])
    attend = gradients_of(torch, "fused", TAKEN[name](put, rng))
    attend(*arrays)
    assert run == []
    spoilt = [x.clone() for x in arrays]
    spoilt[2][:, :, -1] = math.nan
    attend(*spoilt)
    assert run == ["blockwise", "blockwise"]


def test_compiled_auto_takes_the_kernel_unless_the_call_is_small(torch, put, rng):
    for rows, taken in ((256, True), (32, False)):
        arrays = put([rng.standard_normal((1, H, rows, D)) for _ in range(3)])
        text = program(torch, lambda *arrays: attention(*arrays, is_causal=True), *arrays)
        assert (OPERATORS["causal"] in text) == taken


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("heads_first", [True, False])
def test_compiled_sizes_may_change(heads_first, dynamic, torch, put, rng):
    """The compiler makes symbols of them."""

    def attend(*arrays, implementation="fused"):
        arrays = arrays if heads_first else [array.transpose(1, 2) for array in arrays]
        return attention(*arrays, is_causal=True, implementation=implementation)

    torch._dynamo.reset()
    function = torch.compile(attend, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for rows, width in ((128, D), (200, D), (300, D + 4)):
        shape = (1, H, rows, width) if heads_first else (1, rows, H, width)
        arrays = put([rng.standard_normal(shape) for _ in range(3)])
        found, expected = function(*arrays), attend(*arrays, implementation="dense")
        close([found], [expected])
        assert heads_first or found.transpose(1, 2).is_contiguous()


@pytest.mark.parametrize("leading", [(), (2, 3)])
def test_compiled_one_array_may_be_query_key_and_value(leading, torch, put, rng):
    array = put(rng.standard_normal((*leading, 2, M, D))).requires_grad_()

    def attend(x, implementation="fused"):
        return attention(x, x, x, is_causal=True, implementation=implementation)

    found, expected = (
        (output, *torch.autograd.grad(output.square().sum(), array))
        for output in (compiled(torch, attend)(array), attend(array, "dense"))
    )
    close(found, expected)


def test_compiled_with_its_gradient(torch, backend, arrays):
    def measure(implementation, *arrays):
        return attention(*arrays, is_causal=True, implementation=implementation).square().sum()

    fused, dense = (
        backend.value_and_grad(lambda *arrays, name=name: measure(name, *arrays)) for name in ("fused", "dense")
    )
    found, expected = compiled(torch, fused)(*arrays), dense(*arrays)
    close([found[0], *found[1]], [expected[0], *expected[1]], 1e-12)


def test_compiled_in_16_bits(torch, arrays, backend, get):
    """What overflows in 16 bits is scaled in 32, as blocks do."""
    arrays = [backend.from_numpy(get(x), dtype="float16") for x in arrays]
    options = {"is_causal": True, "scale": 1e-3}
    attend = gradients_of(torch, "fused", options)
    close([x.double() for x in attend(*arrays)], [x.double() for x in results(torch, arrays, "dense", options)], 2e-2)
    arrays[0], arrays[1] = arrays[0] * 1000, arrays[1] * 1000
    found, expected = attend(*arrays), results(torch, arrays, "blockwise", options)
    close(found[:1], expected[:1], 0)
    for one, other in zip(found[1:], expected[1:], strict=True):
        torch.testing.assert_close(one, other, rtol=2**-9, atol=1e-6)  # rounded for each head, then added up


def test_compiled_and_vectorized_is_dense(torch, put, rng):
    arrays = put([rng.standard_normal((2, 1, H, 128, D)) for _ in range(3)])
    attend = torch.vmap(lambda *arrays: attention(*arrays, is_causal=True))
    close([compiled(torch, attend)(*arrays)], [attention(*arrays, is_causal=True)])


def test_exported_programs_hold_no_kernel_that_leaks(torch, put, rng):
    arrays = put([rng.standard_normal((1, H, 128, D)) for _ in range(3)])

    class Module(torch.nn.Module):
        def forward(self, *arrays):
            return attention(*arrays, is_causal=True)

    assert NAMED not in torch.export.export(Module(), tuple(arrays)).graph_module.code


def test_not_preferred_where_it_has_the_dense_form_only(torch, arrays):
    query, key, value = arrays
    narrow = value[..., :5]
    explanation = explain_attention(query, key, narrow)
    assert explanation.chosen != "fused"
    assert refusal((query, key, narrow)) is None
    close([attention(query, key, narrow, implementation="fused")], [attention(query, key, narrow)])


# With the logsumexp, which sinks need


@pytest.fixture
def runs(monkeypatch, torch, backend):
    """Which implementations run, in order."""
    module = importlib.import_module("attention_core._attention.choice")
    names = []

    def counted(home, name, label):
        kept = getattr(home, name)
        monkeypatch.setattr(home, name, lambda *a, **k: (names.append(label), kept(*a, **k))[1])

    counted(module, "dense", "dense")
    counted(module, "blockwise", "blockwise")
    counted(importlib.import_module("attention_torch.sdpa"), "attend", "kernel")
    counted(importlib.import_module("attention_torch.flash_cpu"), "attend", "kernel with logsumexp")
    return names


@pytest.fixture
def sinks(torch, put, rng):
    sinks = put(rng.standard_normal(H))
    sinks[1] = -math.inf
    return sinks


ONE_KERNEL = ["plain", "causal", "scale", "scale of an array", "no dropout"]


@pytest.mark.parametrize("name", TAKEN)
def test_sinks_take_one_attention(name, runs, sinks, torch, arrays, put, rng):
    """By the kernel where it has the logsumexp, or by blocks or the dense form: in output and gradients."""
    options = {**TAKEN[name](put, rng), "sinks": sinks}
    arrays = [torch.cat([x, x, x], dim=-2) for x in arrays]  # more keys than a vector of the processor holds
    if name in ("array and rule of it", "empty rows", "mask and bias", "causal bias", "bias of minus infinity"):
        arrays = [x[:, :, : (M, N, N)[number]] for number, x in enumerate(arrays)]
    if name == "numbers of a mask":
        options["bias"] = torch.cat([options["bias"]] * 3)
    found = results(torch, arrays, "auto", options)
    assert runs == (["kernel with logsumexp"] if name in ONE_KERNEL else ["dense"])
    close(found, results(torch, arrays, "dense", options), 1e-12)


@pytest.mark.parametrize("leading", [(), (2, 3)])
@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"is_causal": True, "scale": -0.4}], ids=str)
def test_the_logsumexp_of_the_kernel_is_that_of_the_definition(options, leading, runs, torch, put, rng):
    """With its gradient; and asking for it changes no bit of the output."""
    arrays = put([rng.standard_normal((*leading, *shape)) for shape in ((H, 40, D), (G, 33, D), (G, 33, D))])

    def measured(implementation):
        leaves = [x.detach().requires_grad_() for x in arrays]
        output, _, logsumexp = attention(
            *leaves, **options, implementation=implementation, return_weights=False, return_logsumexp=True
        )
        factors = (torch.linspace(-1, 1, x.numel(), dtype=torch.float64).reshape(x.shape) for x in (output, logsumexp))
        loss = sum((x * factor).sum() for x, factor in zip((output, logsumexp), factors, strict=True))
        return output, logsumexp, *torch.autograd.grad(loss, leaves)

    found = measured("auto")
    assert runs == ["kernel with logsumexp"]
    close(found, measured("dense"), 1e-12)
    assert torch.equal(found[0], attention(*arrays, **options))


def test_sinks_of_a_call_whose_scores_are_not_finite_are_those_of_the_definition(runs, sinks, torch, put, rng):
    arrays = put([rng.standard_normal((1, count, 40, D)) for count in (H, G, G)])
    for number in (math.inf, -math.inf, math.nan):
        for argument in range(3):
            spoilt = [x.clone() for x in arrays]
            spoilt[argument][:, :, 5] = number
            runs.clear()
            found = attention(*spoilt, sinks=sinks)
            assert runs == ["dense"]
            close([found], [attention(*spoilt, sinks=sinks, implementation="dense")])


def test_sinks_of_a_long_call_whose_mask_the_kernel_has_no_logsumexp_for_take_blocks(runs, sinks, torch, put, rng):
    arrays = put([rng.standard_normal((1, count, 300, D)) for count in (H, G, G)])
    options = {"mask": ac.KeyLengths(200), "sinks": sinks}
    found = results(torch, arrays, "auto", options)
    assert runs == ["blockwise"]
    close(found, results(torch, arrays, "dense", options), 1e-12)


def test_a_logsumexp_that_the_kernel_has_not_changes_no_bit_of_the_output(runs, torch, arrays, put):
    """So that it is computed apart."""
    allowed = put(np.arange(N) != 3)
    output, _, logsumexp = attention(*arrays, mask=allowed, return_weights=False, return_logsumexp=True)
    assert runs == ["kernel", "dense"]
    assert torch.equal(output, attention(*arrays, mask=allowed))
    close([logsumexp], [attention(*arrays, mask=allowed, implementation="dense", return_logsumexp=True).logsumexp])
