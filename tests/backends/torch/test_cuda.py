"""PyTorch on a GPU: no call waits for it, each can be captured in a CUDA graph, and nothing masked leaks."""

import contextlib
import importlib
import math

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
         "bias of hidden keys", "causal bias")  # fmt: skip


FLEX = ("causal later", "offsets", "window", "window to the right", "lengths", "segments", "segments of samples", "array",
        "array and rule", "or lengths", "function", "softcap", "alibi", "relative bias", "score_mod with arrays",
        "sinks", "scale", "number")  # fmt: skip


def options_on_gpu(torch, name, sizes, dtype):
    """The options of a name, in the type of the arrays."""

    def put(x):
        return torch.asarray(x, device="cuda", dtype=dtype if x.dtype.kind == "f" else None)

    return options_of(name, sizes, put)


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


def make(torch, name, dtype):
    """Arrays and options on the GPU."""
    torch.manual_seed(0)
    arrays = [torch.randn(dims, device="cuda").to(dtype) for dims in ((2, 4, 9, 8), (2, 2, 11, 8), (2, 2, 11, 8))]
    return arrays, options_on_gpu(torch, name, SMALL, dtype)


def close(torch, found, expected, dtype):
    tolerance = 1e-4 if dtype == torch.float32 else 3e-2
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.float(), other.float(), rtol=tolerance, atol=tolerance, equal_nan=True)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", MASKS)
def test_no_call_waits(name, dtype, torch):
    dtype = getattr(torch, dtype)
    arrays, options = make(torch, name, dtype)
    expected = results(torch, [x.float() for x in arrays], _wide(options) | {"implementation": "dense"})
    results(torch, arrays, options)  # the first call prepares libraries
    with unsynchronized(torch):
        found = results(torch, arrays, options)
    close(torch, found, expected, dtype)


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
@pytest.mark.parametrize("name", ["causal", "lengths", "array", "plain"])
def test_few_queries_that_share_key_heads(name, dtype, torch):
    dtype = getattr(torch, dtype)
    query = torch.randn(2, 8, 1, 64, device="cuda").to(dtype)
    key, value = (torch.randn(2, 2, 300, 64, device="cuda").to(dtype) for _ in range(2))
    options = {
        "plain": {},
        "causal": {"is_causal": True},
        "lengths": {"mask": ac.KeyLengths(torch.tensor([0, 133], device="cuda"))},
        "array": {"mask": torch.arange(300, device="cuda") % 3 > 0},
    }[name]
    with torch.no_grad():
        found = ac.scaled_dot_product_attention(query, key, value, **options)
        wide = [x.float() for x in (query, key, value)]
        close(torch, [found], [ac.scaled_dot_product_attention(*wide, **options, implementation="dense")], dtype)


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


def test_a_mask_of_queries_alone(torch):
    arrays, _ = make(torch, "causal", torch.bfloat16)
    mask = torch.arange(9, device="cuda")[:, None] % 3 > 0
    expected = ac.scaled_dot_product_attention(*(x.float() for x in arrays), mask=mask, implementation="dense")
    close(torch, [ac.scaled_dot_product_attention(*arrays, mask=mask)], [expected], torch.bfloat16)


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


@pytest.mark.parametrize("name", MASKS)
def test_nothing_is_read_that_is_assumed_to_be_finite(name, torch):
    arrays, options = make(torch, name, torch.bfloat16)
    options["assume_finite"] = True
    expected = results(torch, arrays, options)
    with unsynchronized(torch):
        found = results(torch, arrays, options)
    close(torch, found, expected, torch.bfloat16)


@pytest.mark.parametrize("name", FLEX)
def test_rules_and_functions_of_scores_wait_for_nothing(name, torch, rng):
    """By FlexAttention, of which the first call is compiled."""
    options = options_on_gpu(torch, name, BLOCKS, torch.float32)
    arrays = [torch.asarray(x, device="cuda", dtype=torch.float32) for x in BLOCKS.arrays(rng)]
    expected = results(torch, arrays, options | {"implementation": "dense"})
    results(torch, arrays, options)
    with unsynchronized(torch):
        found = results(torch, arrays, options)
    close(torch, found, expected, torch.bfloat16)


def _wide(options):
    return {key: each.float() if key == "bias" else each for key, each in options.items()}
