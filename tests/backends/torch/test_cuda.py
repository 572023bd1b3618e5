"""PyTorch on a GPU: no call waits for it, each can be captured in a CUDA graph, and nothing masked leaks."""

import contextlib
import importlib
import math

import numpy as np
import pytest
from call_table import Sizes, options_of
from flex_helpers import BLOCKS

import attention_core as ac

pytestmark = [
    pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),  # Dynamo of PyTorch 2.11
]


SMALL = Sizes((2,), 4, 2, 9, 11, 8, 8)
MASKS = ("causal", "causal later", "offsets", "window", "lengths", "and lengths", "segments", "array of keys", "array",
         "bias of hidden keys", "causal bias", "array of rows")  # fmt: skip


FLEX = ("causal later", "offsets", "window", "window to the right", "lengths", "segments", "segments of samples", "array",
        "array and rule", "or lengths", "function", "softcap", "alibi", "relative bias", "score_mod with arrays",
        "sinks", "scale", "number")  # fmt: skip


def results(torch, arrays, options):
    """Output and gradients."""
    leaves = [x.detach().requires_grad_() for x in arrays]
    output = ac.scaled_dot_product_attention(*leaves, **options)
    d_output = torch.linspace(-1, 1, output.numel(), dtype=output.dtype, device=output.device).reshape(output.shape)
    return [x.detach() for x in (output, *torch.autograd.grad(output, leaves, d_output))]


@pytest.fixture
def torch():
    torch = importlib.import_module("torch")
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU of CUDA")
    return torch


@contextlib.contextmanager
def unsynchronized(torch):
    """A context in which an error is raised where the host waits for the GPU."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def make(torch, name, dtype, sizes=SMALL):
    """Arrays and options on the GPU."""
    arrays = [torch.asarray(x, device="cuda", dtype=dtype) for x in sizes.arrays(np.random.default_rng(0))]
    floating = {"f": dtype}
    return arrays, options_of(name, sizes, lambda x: torch.asarray(x, device="cuda", dtype=floating.get(x.dtype.kind)))


def close(torch, found, expected, dtype):
    tolerance = 1e-4 if dtype == torch.float32 else 3e-2
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.float(), other.float(), rtol=tolerance, atol=tolerance, equal_nan=True)


@pytest.mark.parametrize(
    ("name", "sizes", "dtype", "more"),
    [
        *((name, SMALL, dtype, {}) for name in MASKS for dtype in ("float32", "bfloat16")),
        *((name, SMALL, "bfloat16", {"assume_finite": True}) for name in MASKS),
        *((name, BLOCKS, "float32", {}) for name in FLEX),
    ],
)
def test_no_call_waits(name, sizes, dtype, more, torch):
    """Nor one by FlexAttention, of which the first is compiled."""
    arrays, options = make(torch, name, getattr(torch, dtype), sizes)
    expected = results(torch, [x.float() for x in arrays], _wide(options) | {"implementation": "dense"})
    results(torch, arrays, options | more)  # the first call prepares libraries
    with unsynchronized(torch):
        found = results(torch, arrays, options | more)
    close(torch, found, expected, torch.bfloat16 if sizes is BLOCKS else arrays[0].dtype)


@pytest.mark.parametrize("name", MASKS)
def test_who_asks_for_a_look_gets_no_leak(name, torch):
    arrays, options = make(torch, name, torch.bfloat16)
    for side in range(3):
        for wrong in (math.nan, math.inf, -math.inf):
            spoilt = [x.clone() for x in arrays]
            spoilt[side][0, 1, 6, 3] = wrong
            expected = ac.scaled_dot_product_attention(
                *(x.float() for x in spoilt), **_wide(options), implementation="dense"
            )
            found = ac.scaled_dot_product_attention(*spoilt, **options, assume_finite=False)
            close(torch, [found], [expected], torch.bfloat16)


@pytest.mark.parametrize("queries", [1, 200])
@pytest.mark.parametrize("name", ["lengths", "array", "bias"])
def test_what_is_hidden_from_all_queries_reaches_nothing(name, queries, torch):
    query = torch.randn(2, 4, queries, 64, device="cuda", dtype=torch.bfloat16)
    key, value = (torch.randn(2, 2, 300, 64, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    lengths = torch.tensor([77, 133], device="cuda")
    allowed = (torch.arange(300, device="cuda") < lengths[:, None])[:, None, None]
    options = {
        "lengths": {"mask": ac.KeyLengths(lengths)},
        "array": {"mask": allowed},
        "bias": {"bias": torch.where(allowed, 0.5, -math.inf).to(torch.bfloat16)},
    }[name]
    expected = results(torch, [query, key, value], options)
    for array in (key, value):
        array.masked_fill_(~allowed.mT, math.nan)
    results(torch, [query, key, value], options)
    with unsynchronized(torch):
        found = results(torch, [query, key, value], options)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)
    with torch.no_grad():
        close(torch, [ac.scaled_dot_product_attention(query, key, value, **options)], expected[:1], torch.bfloat16)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["none", "causal", "lengths", "array of keys"])
def test_few_queries_that_share_key_heads(name, dtype, torch):
    arrays, options = make(torch, name, getattr(torch, dtype), Sizes((2,), 8, 2, 1, 300, 64, 64))
    with torch.no_grad():
        found = ac.scaled_dot_product_attention(*arrays, **options)
        expected = ac.scaled_dot_product_attention(*(x.float() for x in arrays), **options, implementation="dense")
    close(torch, [found], [expected], arrays[0].dtype)


@pytest.mark.parametrize("where", ["query", "key", "value", "mask"])
def test_an_array_may_start_within_16_bytes(where, torch):
    arrays, options = make(torch, "array", torch.bfloat16)
    names = {**dict(zip(("query", "key", "value"), arrays, strict=True)), "mask": options["mask"]}

    def attend(query, key, value, mask):
        return ac.scaled_dot_product_attention(query, key, value, mask=mask)

    expected = attend(**names)
    moved = torch.empty(names[where].numel() + 1, dtype=names[where].dtype, device="cuda")[1:]
    names[where] = moved.view(names[where].shape).copy_(names[where])
    assert torch.equal(attend(**names), expected)


@pytest.mark.parametrize("documents", [False, True])
def test_flex_attention_is_a_part_of_a_compiled_program(documents, torch):
    query, key, value = (torch.randn(2, 4, 256, 16, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    ids, graphs = torch.arange(256, device="cuda") // 100, []

    def attend(ids):
        mask = ac.Segments(ids, ids) if documents else ac.SlidingWindow(left=33, right=0)
        return ac.scaled_dot_product_attention(query, key, value, mask=mask)

    def keep(graph, _):
        graphs.append(graph)
        return graph.forward

    torch.compile(attend, backend=keep)(ids)
    assert [sum("flex_attention" in str(node.target) for node in graph.graph.nodes) for graph in graphs] == [1]


def test_the_gradient_of_a_sum_is_that_of_ones(torch):
    """It is expanded, with strides of 0."""
    arrays, _ = make(torch, "causal", torch.bfloat16)
    leaves = [x.requires_grad_() for x in arrays]
    found = torch.autograd.grad(ac.scaled_dot_product_attention(*leaves, is_causal=True).sum(), leaves)
    output = ac.scaled_dot_product_attention(*leaves, is_causal=True)
    close(torch, found, torch.autograd.grad(output, leaves, torch.ones_like(output)), torch.bfloat16)


@pytest.mark.parametrize("name", MASKS)
def test_a_call_is_captured_in_a_graph(name, torch):
    arrays, options = make(torch, name, torch.bfloat16)
    with torch.no_grad():
        expected = ac.scaled_dot_product_attention(*arrays, **options)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            ac.scaled_dot_product_attention(*arrays, **options)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            output = ac.scaled_dot_product_attention(*arrays, **options)
        output.zero_()
        graph.replay()
        torch.cuda.synchronize()
    close(torch, [output], [expected], torch.bfloat16)


def test_a_step_of_decoding_waits_for_nothing(torch):
    query = torch.randn(1, 8, 1, 64, device="cuda", dtype=torch.bfloat16)
    key, value = (torch.randn(1, 2, 512, 64, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    length = torch.tensor(300, device="cuda")

    def step():
        return ac.scaled_dot_product_attention(query, key, value, mask=ac.cache.cache_mask(length, 1))

    expected = step()
    with unsynchronized(torch):
        found = step()
    assert torch.equal(found, expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = step()
    for count in (300, 400):
        length.fill_(count)
        graph.replay()
        short = ac.scaled_dot_product_attention(query, key[..., :count, :], value[..., :count, :])
        close(torch, [output], [short], torch.bfloat16)


def _wide(options):
    return {key: each.float() if key == "bias" else each for key, each in options.items()}
