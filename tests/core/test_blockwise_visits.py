"""The blocks that are computed, the memory and the programs of attention in blocks."""

import importlib
import itertools
import math

import numpy as np
import pytest
from blockwise_helpers import BLOCKS, LENGTHS, RUNS, TUNING, B, G, H, M, N, attention, qkv, weighted
from call_table import Sizes, options_of

import attention_core as ac
from attention_core._attention.blocks import backward as _backward, forward as _forward
from attention_core.backend import Tuning
from attention_core.masks import Mask
from attention_core.scores import ScoreMod


@pytest.fixture(autouse=True)
def small(backend, monkeypatch):
    """Blocks so small that there are several."""
    monkeypatch.setattr(backend, "tuning", TUNING if backend.loops.traced else RUNS)


FINE = BLOCKS[0], min(BLOCKS)  # where loops are not traced, going forward


def expected_visits(allowed, blocks=BLOCKS):
    """How many blocks something, and how many everything, is allowed in."""
    sizes = [-(-length // -(-length // block)) for length, block in zip(allowed.shape, blocks, strict=True)]
    blocks = [
        allowed[i : i + sizes[0], j : j + sizes[1]]
        for i, j in itertools.product(
            *(range(0, length, size) for length, size in zip(allowed.shape, sizes, strict=True))
        )
    ]
    return sum(block.any() for block in blocks), sum(block.all() for block in blocks)


I, J = np.arange(M)[:, None], np.arange(N)[None, :]  # noqa: E741

SKIPPED = {
    "causal": (ac.Causal(), (J <= I)[None]),
    "window": (ac.SlidingWindow(left=1, right=0, offset=1), ((J <= I + 1) & (J >= I))[None]),
    "lengths": (lambda put: ac.KeyLengths(put(LENGTHS)), (LENGTHS[:, None, None] > J) & (I >= 0)),
    "segments": (
        lambda put: ac.Segments(put(np.arange(M) // 4), put(np.arange(N) // 5)),
        (I // 4 == J // 5)[None],
    ),
    "lengths and function": (
        lambda put: ac.KeyLengths(put(LENGTHS)) & ac.MaskFunction(lambda b, h, q, k: k >= 0),
        (LENGTHS[:, None, None] > J) & (I >= 0),
    ),
}


@pytest.mark.needs(
    lambda name, backend: not backend.loops.traced or (backend.name == "tensorflow" and name == "lengths and function")
)
@pytest.mark.parametrize("name", SKIPPED)
def test_blocks_in_which_nothing_is_allowed_are_not_computed(name, backend, rng, monkeypatch):
    """And blocks in which everything is allowed need no mask."""
    monkeypatch.setattr(backend, "tuning", TUNING)
    rule, allowed = SKIPPED[name]
    rule = rule if isinstance(rule, Mask) else rule(backend.from_numpy)
    found = []
    visits = _forward.make_visits

    def recorded(grid, **options):
        result = visits(grid, **options)
        found.append([np.sum(np.asarray(each)) for each in (result.seen, result.whole)])
        return result

    monkeypatch.setattr(_forward, "make_visits", recorded)
    attention(*backend.from_numpy(qkv(rng)), mask=rule, implementation="blockwise")
    blocks = BLOCKS if backend.loops.traced else FINE
    seen, whole = np.sum([expected_visits(each, blocks) for each in allowed], axis=0)
    assert seen < math.prod(-(-length // block) for length, block in zip((M, N), blocks, strict=True)) * len(allowed)
    for got in found:
        assert got[0] == seen
        if "function" not in name and not backend.loops.traced:  # of which what is padded needs a mask
            assert got[1] == whole


@pytest.mark.needs("untraced loops")
@pytest.mark.parametrize("by_key", [False, pytest.param(True, marks=pytest.mark.needs("gradients"))])
def test_a_block_is_visited_once(by_key, backend, rng, monkeypatch):
    """The scores of as many blocks are computed, forward and backward, as a window lets something through."""
    monkeypatch.setattr(backend, "tuning", TUNING)
    count, score_block = [], _forward.score_block
    for module in (_forward, _backward):
        monkeypatch.setattr(
            module, "score_block", lambda *x, masked, **at: count.append(masked) or score_block(*x, masked=masked, **at)
        )
    rule = ac.SlidingWindow(left=2, right=0)
    arrays = backend.from_numpy(tuple(qkv(rng)))
    xp = backend.namespace

    def measure(*arrays):
        return xp.sum(attention(*arrays, mask=rule, implementation="blockwise"))

    if by_key:
        backend.value_and_grad(measure)(*arrays)
    else:
        measure(*arrays)
    allowed = (J <= I) & (J >= I - 2)
    seen, whole = np.sum([expected_visits(allowed, each) for each in ((FINE, BLOCKS) if by_key else (FINE,))], axis=0)
    assert len(count) == B * seen < B * (12 + 9 * by_key)
    assert count.count(False) == B * whole


@pytest.mark.needs("untraced loops")
def test_a_rule_about_distance_is_asked_once_for_each(backend, rng, monkeypatch):
    """Blocks at the same distance from the diagonal, in all batches and heads, share what was found for one."""
    asked, band = [], ac.Causal.__bases__[0]  # of all rules that are bands
    allowed = band.allowed
    monkeypatch.setattr(band, "allowed", lambda mask, at, *, xp: asked.append(at) or allowed(mask, at, xp=xp))
    attention(*backend.from_numpy(qkv(rng)), mask=ac.Causal(), implementation="blockwise")
    assert [at.query.shape[0] for at in asked] == [4, 4, 3]
    attention(
        *backend.from_numpy(qkv(rng)),
        mask=ac.Causal() & ac.MaskFunction(lambda b, h, q, k: q >= b),
        implementation="blockwise",
    )
    assert len(asked) == 3 + B * 4


@pytest.mark.needs("gradients")
@pytest.mark.needs("untraced loops")
def test_a_function_that_makes_a_number_of_nan_makes_it_backward_too(backend, rng, get):
    xp = backend.namespace
    arrays = qkv(rng)

    def gradients(arrays, score_mod):
        def measure(*arrays):
            options = {"mask": ac.Causal(offset=2), "score_mod": score_mod, "implementation": "blockwise"}
            return xp.sum(xp.square(attention(*arrays, **options)))

        return get(backend.value_and_grad(measure)(*backend.from_numpy(arrays))[1])

    def zero_at_one_key(scores, batch, head, query, key):
        return xp.where((batch == 0) & (head < H // G) & (key == 3), 0.0, scores)

    expected = gradients(arrays, zero_at_one_key)
    arrays[1][0, 0, 3, 1] = math.nan
    for each in zip(
        gradients(arrays, lambda scores, *at: xp.where(xp.isnan(scores), 0.0, scores)), expected, strict=True
    ):
        np.testing.assert_allclose(*each, rtol=0, atol=1e-12)


MASKS = {
    "full": lambda length: {},
    "causal": lambda length: {"is_causal": True},
    "window": lambda length: {"mask": ac.SlidingWindow(left=200, right=0)},
    "documents": lambda length: {"mask": ac.Segments(np.arange(length) // 100, np.arange(length) // 100)},
    "alibi": lambda length: {"score_mod": ac.scores.alibi(2)},
    "everything": lambda length: {"mask": ac.SlidingWindow(left=100) & ac.KeyLengths(77), "softcap": 3.0},
}


@pytest.mark.needs(
    lambda name, backend: backend.name in {"causal": ("torch", "jax"), "everything": COUNTERS}.get(name, ("jax",))
)
@pytest.mark.parametrize("name", MASKS)
def test_the_program_does_not_grow_with_the_length(name, backend, monkeypatch):
    tuning = Tuning(queries=1, keys=128, min_queries=64, dense_below=0, structured_below=0)
    monkeypatch.setattr(backend, "tuning", tuning)
    sizes = []
    for length in (512, 4096):
        masked = MASKS[name](length)

        def measure(query, key, value, weight, masked=masked):
            options = masked | ({"score_mod": ScoreMod(weighted, (weight,))} if name == "everything" else {})
            found = attention(query, key, value, **options, implementation="blockwise")
            return backend.namespace.sum(found)

        shapes = [(1, 2, length, 8), (1, 1, length, 8), (1, 1, length, 4), ()]
        sizes.append(COUNTERS[backend.name](backend.value_and_grad(measure), shapes))
    assert 1000 > sizes[0] == sizes[1] > 0


@pytest.mark.needs("jax")
def test_memory_for_gradients_is_taken_when_the_output_is_there(backend, monkeypatch):
    """Going forward, there are the scaled query, the blocks of the output and the output; backward, three gradients."""
    monkeypatch.setattr(backend, "tuning", RUNS._replace(min_queries=64, keys=64, backward_keys=64))
    jax = importlib.import_module("jax")
    x = jax.ShapeDtypeStruct((1, 2, 4096, 64), np.float32)
    options = {"mask": ac.Causal(), "implementation": "blockwise"}
    gradients = jax.jit(jax.grad(lambda *arrays: attention(*arrays, **options).sum(), (0, 1, 2)))
    memory = gradients.lower(x, x, x).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 5 * math.prod(x.shape) * x.dtype.itemsize


def graph_nodes(function, shapes):
    tf = importlib.import_module("tensorflow")
    graph = tf.function(function).get_concrete_function(*(tf.TensorSpec(shape) for shape in shapes))
    definition = graph.graph.as_graph_def()
    nodes = (*definition.node, *(node for each in definition.library.function for node in each.node_def))
    return sum(node.op not in ("Const", "Fill") for node in nodes)  # large constants are filled


def fx_nodes(function, shapes):
    torch = importlib.import_module("torch")
    make_fx = importlib.import_module("torch.fx.experimental.proxy_tensor").make_fx
    traced = make_fx(function, tracing_mode="fake")(*(torch.zeros(shape) for shape in shapes))
    return len(traced.graph.nodes)


def operations(jaxpr):
    """How many operations a program of JAX has, those of its loops counted once."""
    total = len(jaxpr.eqns)
    for equation in jaxpr.eqns:
        for parameter in equation.params.values():
            for part in parameter if isinstance(parameter, tuple | list) else [parameter]:
                inner = getattr(part, "jaxpr", part)
                total += operations(inner) if hasattr(inner, "eqns") else 0
    return total


def traced_operations(function, shapes):
    jax = importlib.import_module("jax")
    return operations(jax.make_jaxpr(function)(*(jax.ShapeDtypeStruct(shape, np.float32) for shape in shapes)).jaxpr)


COUNTERS = {"tensorflow": graph_nodes, "torch": fx_nodes, "jax": traced_operations}


@pytest.mark.parametrize("name", ["causal later", "window", "or", "and", "and lengths"])
def test_an_accelerator_visits_by_numbers_alone(name, rng, put, get, backend, monkeypatch):
    """No value is made a list of; NaN and infinities show where the definition has them."""

    def refuse(*_):
        raise AssertionError("reads values")

    for module in ("_attention.blocks.visits", "_backend._find"):
        monkeypatch.setattr(importlib.import_module(f"attention_core.{module}"), "is_on_host", lambda array: False)
    monkeypatch.setattr(importlib.import_module("attention_core._attention.blocks.visits"), "numbers_of", refuse)
    query, key, value = qkv(rng)
    for wrong in (0.5, math.nan, math.inf):
        value[..., 4, 1] = wrong
        arrays, options = put([query, key, value]), options_of(name, Sizes(), put)
        found = [get(attention(*arrays, **options, implementation=each)) for each in ("blockwise", "dense")]
        np.testing.assert_allclose(*found, rtol=0, atol=1e-12)
