"""Functions to be traced, with their arrays."""

import dataclasses

import numpy as np
from call_table import Sizes, options_of
from fuzz_calls import VALID, Made, Valid, built, mapped

import attention_core as ac
from attention_core.backend import get_backend
from attention_numpy.trees import map_arrays

# Compilers fuse and reorder: results differ by roundings, relative to the largest element.
CLOSE = {"float64": 1e-13, "float32": 1e-5, "float16": 2.0**-10, "bfloat16": 2.0**-7}

RNG = np.random.default_rng(43)


def normal(*dims):
    return RNG.standard_normal(dims)


SIZES = Sizes((2,), 6, 3, 5, 7, 4, 3)

QKV = tuple(SIZES.arrays(RNG))

LENGTHS, SEED = np.asarray([3, 0]), np.asarray([7, 9], dtype=np.int32)


@dataclasses.dataclass(frozen=True)
class Left:
    """The place of an array that was taken out."""

    index: int


def taken_out(node, arrays):
    """Arguments as what `built` makes them of again, without the arrays, which a tracer may not see in them."""
    if isinstance(node, np.ndarray | np.generic):
        arrays.append(np.asarray(node, "float64" if node.dtype.kind == "f" else None))
        return Left(len(arrays) - 1)
    if dataclasses.is_dataclass(node):
        node = Made(type(node), {each.name: getattr(node, each.name) for each in dataclasses.fields(node)})
    return mapped(node, lambda _, branch: taken_out(branch, arrays))


def traced(valid):
    """A right call as a function of its arrays, in arithmetic for all dtypes, and these arrays."""
    arrays = []
    empty = taken_out(valid, arrays)
    empty.options.pop("arithmetic", None)

    def call(*inputs):
        function, positional, options = built(empty, lambda left: inputs[left.index], Left)
        result = function(*positional, **options)
        return tuple(x for x in result if x is not None) if isinstance(result, tuple) else result

    return call, tuple(arrays)


def options_named(name):
    """Options of attention; everything is returned with all of them."""
    return options_of(name, SIZES, lambda array: array) | (RETURNS if name == "everything" else {})


RETURNS = {"return_weights": True, "return_logsumexp": True}
OPTIONS = ("causal", "window", "softcap", "array", "or lengths", "array and rule", "length", "lengths", "offsets",
           "segments of samples", "bias of hmn", "numbers", "dropout by words", "everything", "alibi",
           "relative bias")  # fmt: skip
FUNCTIONS = ("scores", "weights", "partial", "merge", "multi-head", "encoder", "feed-forward", "linear",
             "gated feed-forward", "gelu", "silu", "layer norm", "rms norm", "embed", "rotary", "sagan",
             "spectral norm", "split", "join", "append")  # fmt: skip
CASES = {name: traced(Valid(ac.scaled_dot_product_attention, list(QKV), options_named(name))) for name in OPTIONS}
CASES |= {name: traced(VALID[name]) for name in FUNCTIONS}

OF_INTEGERS = {"array and rule", "array", "length", "offsets", "segments of samples"}  # arrays
FEW = ("causal", "everything", "encoder", "embed", "sagan", "array and rule")

SIXTEEN = [("everything", "bfloat16"), ("encoder", "float16"), ("embed", "bfloat16")]


def case(name, library, dtype=None):
    """A function with its arrays in the dtype that is asked for, which is float64 by default."""
    function, arrays = CASES[name]
    return function, get_backend(library).from_numpy(arrays, dtype=dtype)


def leaves(tree):
    found = []
    map_arrays(found.append, tree)
    return found


def assert_same(library, actual, expected):
    """Equal in dtype and, but for roundings, in values."""
    to_numpy = get_backend(library).to_numpy
    actual, expected = (leaves(to_numpy(tree)) for tree in (actual, expected))
    assert [result.dtype for result in actual] == [wanted.dtype for wanted in expected]
    assert expected
    exact = [wanted.astype(np.float64) for wanted in expected]
    largest = max(np.max(np.abs(wanted), initial=0.0, where=np.isfinite(wanted)) for wanted in exact)
    for result, wanted in zip(actual, exact, strict=True):
        np.testing.assert_allclose(
            result.astype(np.float64), wanted, rtol=0, atol=CLOSE.get(result.dtype.name, 0) * largest
        )


def sized(batch, length, library):
    """Query, key, value, lengths: a batch of a size that the traced function has not seen."""
    rng = np.random.default_rng(batch * 100 + length)
    shapes = (batch, 6, length, 4), (batch, 3, length + 2, 4), (batch, 3, length + 2, 3)
    lengths = rng.integers(0, length, batch)
    return get_backend(library).from_numpy((*map(rng.standard_normal, shapes), lengths))


def attend_some(query, key, value, lengths):
    """Attention whose shapes and lengths are left open."""
    return ac.scaled_dot_product_attention(query, key, value, mask=ac.KeyLengths(lengths) & ac.Causal(offset=1))


def compiled(torch, function, backend="eager", dynamic=False):
    """The function as one graph; "eager" and "aot_eager" trace as "inductor" does, and generate no code, which is slow."""
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, dynamic=dynamic, backend=backend)


def module_of(torch, function):
    class Module(torch.nn.Module):
        def forward(self, *arrays):
            return function(*arrays)

    return Module()
