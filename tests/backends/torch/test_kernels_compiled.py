"""PyTorch's fused kernel in compiled programs, and with its logsumexp."""

import importlib
import itertools
import math

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch.profiler import profile
from torch_kernel_helpers import B, D, G, H, M, N, attention, close, compiled, results, taken

import attention_core as ac
from attention_torch.kernels import guards

# array-api-compat remembers the namespace of a type in a cache, which PyTorch traces through, and says so once.
pytestmark = pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`-wrapped function")


@pytest.fixture
def arrays(rng, put):
    return put([rng.standard_normal(shape) for shape in ((B, H, M, D), (B, G, N, D), (B, G, N, D))])


def recorder():
    """A compiler, and the texts of what it is given."""
    texts = []

    def record(graph, _):
        texts.append(graph.code)
        return make_boxed_func(graph)

    return aot_autograd(fw_compiler=record), texts


def program(torch, function, *arrays):
    """The text of what the compiler is given."""
    backend, texts = recorder()
    compiled(torch, function, backend)(*arrays)
    return "".join(texts)


NAMED = "scaled_dot_product_flash_attention_for_cpu"

GUARDED = "torch.guarded"
COMPILED = ("none", "no scale", "no dropout", "causal", "causal bias", "bias of no row", "bias and mask", "lengths",
            "rows without a key", "array in a rule")  # fmt: skip


@pytest.mark.parametrize("name", COMPILED)
def test_compiled_the_kernel_equals_the_definition(name, arrays):
    options = taken(name)
    backend, texts = recorder()
    close(gradients_of(torch, "fused", options, backend)(*arrays), results(torch, arrays, "dense", options))
    assert GUARDED in texts[0]  # also without a mask: among few keys, NaN may be lost
    assert name != "causal" or "aten.mul" not in texts[0]  # the scale is within the step


@pytest.mark.parametrize("kind", ["argument", "of an argument"])
def test_compiled_a_bias_takes_the_kernel_unless_it_is_differentiated(kind, put, rng, monkeypatch):
    monkeypatch.setattr(guards, "MIN_SCORES", 0)
    arrays = put([rng.standard_normal(shape) for shape in ((B, H, M, D), (B, G, N, D), (B, G, N, D))])
    bias = put(rng.standard_normal((M, N)))

    def loss(implementation):
        def squares(bias, *arrays):
            bias = 2 * bias if kind == "of an argument" else bias
            return attention(*arrays, bias=bias, implementation=implementation).square().sum()

        return squares

    assert GUARDED in program(torch, loss("auto"), bias, *arrays)
    for argument in (0, 1):  # the bias, and the query
        expected = torch.func.grad(loss("dense"), argnums=argument)(bias, *arrays)
        found = compiled(torch, torch.func.grad(loss("auto"), argnums=argument))(bias, *arrays)
        torch.testing.assert_close(found, expected)
        inputs = [bias, *arrays]
        inputs[argument] = leaf = inputs[argument].clone().requires_grad_()
        (found,) = torch.autograd.grad(compiled(torch, loss("auto"))(*inputs), leaf)
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
        *((name, "aot_eager") for name in ("causal", "lengths", "rows without a key")),
        ("causal", "inductor"),
    ],
)
def test_compiled_nonfinite_arrays_are_left_to_blocks(name, backend_of_torch, arrays):
    """One program answers for all values, masked or attended, as blocks do, in output and gradients.

    With lengths, the kernel is given only the keys that are attended to, compiled or not.
    """
    options = taken(name)
    attend = gradients_of(torch, "fused", options, backend_of_torch)
    for nonfinite in (math.nan, math.inf, None):
        for argument in range(3):
            inputs = [x.clone() for x in arrays]
            if nonfinite is not None:
                inputs[argument][:, :, 2] = nonfinite
            otherwise = "fused" if name == "lengths" else "blockwise"
            close(attend(*inputs), results(torch, inputs, "dense" if nonfinite is None else otherwise, options))


@pytest.mark.parametrize("name", ["causal", "rows without a key"])
def test_compiled_blocks_are_computed_only_if_needed(name, arrays, monkeypatch):
    """Going forward keeps nothing, so that they are computed once more to go backward."""
    run = []
    module = importlib.import_module("attention_torch.kernels.guarded")
    blockwise = module.blockwise
    monkeypatch.setattr(module, "blockwise", lambda call: (run.append("blockwise"), blockwise(call))[1])
    attend = gradients_of(torch, "fused", taken(name))
    attend(*arrays)
    assert run == []
    spoilt = [x.clone() for x in arrays]
    spoilt[2][:, :, M - 1] = math.nan
    attend(*spoilt)
    assert run == ["blockwise", "blockwise"]


def test_compiled_auto_takes_the_kernel_unless_the_call_is_small(put, rng):
    for rows, is_taken in ((256, True), (32, False)):
        arrays = put([rng.standard_normal((1, H, rows, D)) for _ in range(3)])
        text = program(torch, lambda *arrays: attention(*arrays, is_causal=True), *arrays)
        assert (GUARDED in text) == is_taken
        assert NAMED in program(torch, lambda *arrays: attention(*arrays), *arrays)  # there is nothing to look for


def test_a_prompt_before_an_empty_cache_takes_the_kernel(backend, put, rng, runs, monkeypatch):
    """The offset is an array, which a compiled program reads when it runs."""
    monkeypatch.setattr(backend, "tuning", backend.tuning._replace(structured_below=0))
    shapes = (1, 2, 192, 16), (1, 1, 256, 16), (1, 1, 256, 16)
    arrays = put([rng.standard_normal(shape) for shape in shapes], dtype="float32")

    def attend(offset, *arrays):
        return attention(*arrays, mask=ac.Causal(offset=offset))

    expected, numbers = {}, {offset: torch.tensor(offset, dtype=torch.int32) for offset in (0, 3, -2)}
    for offset, number in numbers.items():
        expected[offset] = attention(*arrays, mask=ac.Causal(offset=offset), implementation="dense")
        cached = ac.Causal(offset=torch.full((1,), offset)) & ac.KeyLengths(torch.full((1,), 192 + max(offset, 0)))
        for mask in (ac.Causal(offset=number), cached):
            runs.clear()
            torch.testing.assert_close(attention(*arrays, mask=mask), expected[offset], rtol=0, atol=1e-6)
            assert ("kernel" in runs) == (offset == 0), runs
    assert GUARDED in program(torch, attend, number, *arrays)
    traced = compiled(torch, attend)
    for offset, number in numbers.items():
        torch.testing.assert_close(traced(number, *arrays), expected[offset], rtol=0, atol=1e-6)


OPEN = {
    "lengths": lambda padding: {"mask": ac.KeyLengths(padding.sum((1, 2, 3))), "is_causal": True},
    "bias": lambda padding: {"bias": torch.where(padding, 0.0, -1e4).to(torch.float64)},
}


@pytest.mark.parametrize("name", OPEN)
def test_compiled_programs_are_as_many_as_those_of_the_kernel(name, put, rng):
    """No choice by a size becomes a guard: batches, lengths of both sides of all thresholds, with gradients and not."""

    def attend(query, key, value, padding, implementation="auto"):
        return attention(query, key, value, **OPEN[name](padding), implementation=implementation)

    def kernel(query, key, value, padding):
        return torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=padding)

    counts = []
    for function in (attend, kernel):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        called = torch.compile(function, fullgraph=True, backend="eager")
        for differentiated, batch, length in itertools.product((False, True), (2, 4), (8, 24, 100, 300)):
            arrays = put([rng.standard_normal((batch, 2, length, 8)) for _ in range(3)])
            padding = torch.arange(length) < torch.linspace(1, length, batch).long()[:, None, None, None]
            leaves = [array.requires_grad_(differentiated) for array in arrays]
            output = called(*leaves, padding)
            if differentiated:
                output.sum().backward()
            if function is attend:
                torch.testing.assert_close(output, attend(*arrays, padding, implementation="dense"))
        counts.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert counts[0] <= counts[1]


@pytest.mark.parametrize(("heads_first", "dynamic"), [(False, None), (True, True)])
def test_compiled_sizes_may_change(heads_first, dynamic, put, rng):
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


RULES = {
    "causal": lambda n: ac.Causal(),
    "offset": lambda n: ac.Causal(offset=-3),
    "window": lambda n: ac.SlidingWindow(left=255, right=0),
    "no window": lambda n: ~ac.SlidingWindow(left=255, right=0),
    "lengths": lambda n: ac.KeyLengths(torch.tensor([n - 100])),
    "causal lengths": lambda n: ac.Causal() & ac.KeyLengths(torch.tensor([n - 100])),
    "documents": lambda n: ac.Segments(torch.arange(n) // 700, torch.arange(n) // 700),
}


@pytest.mark.parametrize(("name", "dynamic"), [*((name, True) for name in RULES), ("offset", False)])
def test_compiled_programs_make_no_larger_arrays_than_eager_calls(name, dynamic):
    """Of no rule all M x N scores, nor its mask, whether sizes are fixed or open."""

    def largest(function, *arguments):
        with profile(profile_memory=True) as profiled:
            function(*arguments)
        return max(event.self_cpu_memory_usage for event in profiled.events())

    torch._dynamo.reset()
    compiled = torch.compile(lambda x, mask: attention(x, x, x, mask=mask), backend="aot_eager", dynamic=dynamic)
    for length in (2048, 2500):
        x, mask = torch.randn(1, 2, length, 16), RULES[name](length)
        expected = attention(x, x, x, mask=mask)
        torch.testing.assert_close(compiled(x, mask), expected)
        most = largest(lambda x, mask: attention(x, x, x, mask=mask), x, mask)
        assert largest(compiled, x, mask) <= 1.25 * most
        assert most < length * length  # bytes, of which a boolean takes one


def test_compiled_in_16_bits(arrays, backend, get):
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


def test_exported_programs_hold_no_kernel_that_leaks(put, rng):
    arrays = put([rng.standard_normal((1, H, 128, D)) for _ in range(3)])

    class Module(torch.nn.Module):
        def forward(self, *arrays):
            return attention(*arrays, is_causal=True)

    assert NAMED not in torch.export.export(Module(), tuple(arrays)).graph_module.code


@pytest.fixture
def runs(monkeypatch, backend):
    """Which implementations run, in order."""
    module = importlib.import_module("attention_core._attention.ways")
    names = []

    def counted(home, name, label):
        kept = getattr(home, name)
        monkeypatch.setattr(home, name, lambda *a, **k: (names.append(label), kept(*a, **k))[1])

    counted(module.DENSE, "run", "dense")
    counted(module, "blockwise", "blockwise")
    kernel = type(next(each for each in backend.kernels if each.name.endswith("scaled_dot_product_attention")))
    counted(kernel, "attend", "kernel")
    counted(kernel, "attend_with_logsumexp", "kernel with logsumexp")
    return names


@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("number", [0.0, math.inf, -math.inf, math.nan])
def test_sinks_and_logsumexp_are_of_the_kernel_whatever_the_numbers(number, has_sinks, runs, put, rng):
    """With its gradient where all are finite; and asking for the logsumexp changes no bit of the output."""
    arrays = put([rng.standard_normal((1, count, 40, D)) for count in (H, G, G)])
    options = {"sinks": torch.tensor([0.5, -math.inf, 1.0, -1.0], dtype=torch.float64)} if has_sinks else {}
    for argument in range(3):
        spoilt = [x.clone() for x in arrays]
        spoilt[argument][:, :, 5] = number
        runs.clear()
        found = attention(*spoilt, **options, return_logsumexp=True)
        assert runs == ["kernel with logsumexp"]
        dense = attention(*spoilt, **options, implementation="dense", return_logsumexp=True)
        close(found[::2], dense[::2], 1e-12)
        assert torch.equal(found.output.nan_to_num(), attention(*spoilt, **options).nan_to_num())


@pytest.mark.parametrize("layout", [lambda x: x.mT.contiguous().mT, lambda x: x.repeat_interleave(2, -1)[..., ::2]])
@pytest.mark.parametrize("options", [{}, {"is_causal": True}])
def test_asking_for_the_logsumexp_changes_no_bit_of_strided_calls(layout, options, rng):
    arrays = [layout(torch.from_numpy(rng.standard_normal((2, 4, 300, 16)))) for _ in range(3)]
    assert all(array.stride(-1) != 1 for array in arrays)
    output = attention(*arrays, **options)
    assert torch.equal(attention(*arrays, **options, return_logsumexp=True).output, output)


def test_gradients_of_16_bits_by_output_and_weights_have_the_same_bits_compiled(rng):
    """The compiler keeps sums of 16-bit gradients in float32, unless both come out of one operation."""

    shapes = ((2, 5, 8), (2, 7, 8), (2, 7, 8), (2, 5, 7), (2, 5, 8), (2, 5, 7))
    *arrays, d_output, d_weights = [torch.from_numpy(rng.standard_normal(shape)).half() for shape in shapes]
    variables = [array.requires_grad_() for array in arrays]

    def loss(query, key, value, bias):
        result = ac.scaled_dot_product_attention(
            query, key, value, bias=bias, return_weights=True, arithmetic="reproducible"
        )
        return (result.output.float() * d_output).sum() + (result.weights.float() * d_weights).sum()

    eager = torch.autograd.grad(loss(*variables), variables)
    found = torch.autograd.grad(compiled(torch, loss, "inductor")(*variables), variables)
    for gradient, wanted in zip(found, eager, strict=True):
        assert gradient.dtype == torch.float16
        assert torch.equal(gradient, wanted)
