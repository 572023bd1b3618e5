"""Right calls of every public function, and what to put in the place of an argument to make them wrong.

A `Call` names a function and the changes: a path to a leaf of its arguments, and the name of what takes its place. So
the same call is made on every library, and what each says can be compared.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from hypothesis import strategies as st

import attention_core as ac
from attention_core import initializers, parameters

Path = tuple[Any, ...]


class Made(NamedTuple):
    """An object of the core that is made of other arguments, such as a mask with arrays."""

    function: Callable[..., Any]
    arguments: dict[str, Any]


class Valid(NamedTuple):
    """A call that is right."""

    function: Callable[..., Any]
    positional: list[Any]
    options: dict[str, Any]


@dataclass(frozen=True)
class Call:
    """A function by name, and its changes: pairs of a path and a name out of `WRONG`."""

    name: str
    changes: tuple[tuple[Path, str], ...]


_RNG = np.random.default_rng(5)


def _floats(*dims: int) -> np.ndarray:
    return _RNG.standard_normal(dims).astype("float32")


def _integers(*dims: int, high: int = 3) -> np.ndarray:
    return _RNG.integers(0, high, dims).astype("int32")


def _flags(*dims: int) -> np.ndarray:
    return _RNG.random(dims) < 0.7


def _linear(rows: int, columns: int) -> parameters.Linear:
    return parameters.Linear(_floats(rows, columns), _floats(columns))


def _norm(channels: int) -> parameters.LayerNorm:
    return parameters.LayerNorm(_floats(channels), _floats(channels))


Q, K, V = (2, 4, 3, 5), (2, 2, 6, 5), (2, 2, 6, 3)
MASK = Made(ac.Causal, {"offset": _integers(2)})
WINDOW = Made(ac.SlidingWindow, {"left": 2, "right": 1, "offset": 0})
SEGMENTS = Made(ac.Segments, {"query_ids": _integers(2, 3), "key_ids": _integers(2, 6)})
DROPOUT = Made(ac.Dropout, {"rate": 0.5, "seed": 3})
TABLE = Made(
    lambda table, **options: ac.scores.relative_bias(table, **options),
    {"table": _floats(8, 4), "bidirectional": True, "max_distance": 20, "offset": 0},
)
OPTIONS: dict[str, Any] = {"mask": MASK, "bias": _floats(4, 3, 6), "is_causal": False, "scale": 0.5, "softcap": 2.0}
FAST = {"score_mod": TABLE, "sinks": _floats(4), "dropout": DROPOUT, "implementation": "auto", "arithmetic": "fast"}
RETURNS = {"return_weights": False, "return_logsumexp": True}
HEADS = parameters.MultiHeadAttention(_linear(6, 20), _linear(7, 10), _linear(5, 6), _linear(12, 4))
SELF = parameters.MultiHeadAttention(_linear(8, 8), _linear(8, 8), _linear(8, 8), _linear(8, 8))
FORWARD = parameters.FeedForward(_linear(8, 5), _linear(5, 8))
GATED = parameters.GatedFeedForward(_linear(8, 5), _linear(8, 5), _linear(5, 8))
CACHE = Made(ac.cache.KeyValueCache, {"key": _floats(2, 2, 9, 5), "value": _floats(2, 2, 9, 3), "length": _integers(2)})
PARTIAL = Made(ac.pieces.Partial, {"output": _floats(2, 4, 3, 5), "logsumexp": _floats(2, 4, 3)})
TABLES = parameters.Embeddings(_floats(9, 4), _floats(7, 4), _floats(3, 4), _norm(4))
MAPS = parameters.SaganAttention(
    _linear(8, 3), _linear(8, 3), _linear(8, 5), _linear(5, 8), np.asarray(0.5, np.float32)
)
SHAPE = Made(lambda dims: dims, {"dims": (3, 4)})


def _with_xp(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that is told the namespace, which `outcome` knows."""
    function = functools.partial(function)
    function.needs_xp = True
    return function


def _to_array(mask: Any, rows: Any, columns: Any, like: Any, xp: Any) -> Any:
    return mask.to_array(rows, columns, like=like, xp=xp)


VALID: dict[str, Valid] = {
    "attention": Valid(ac.scaled_dot_product_attention, [_floats(*Q), _floats(*K), _floats(*V)], OPTIONS | FAST | RETURNS),
    "exact attention": Valid(
        ac.scaled_dot_product_attention,
        [_floats(*Q), _floats(*K), _floats(*V)],
        OPTIONS | {"mask": WINDOW, "dropout": DROPOUT, "arithmetic": "reproducible"} | RETURNS,
    ),
    "explain": Valid(ac.explain_attention, [_floats(*Q), _floats(*K), _floats(*V)], OPTIONS | RETURNS),
    "scores": Valid(ac.attention_scores, [_floats(*Q), _floats(*K)], {"mask": SEGMENTS, "scale": 0.5, "softcap": 2.0, "arithmetic": "fast"}),
    "weights": Valid(ac.weights.attention_weights, [_floats(*Q), _floats(*K)], {"queries": [0, -1], "heads": [1], "is_causal": True, "scale": 0.5}),
    "partial": Valid(
        ac.pieces.partial_attention,
        [_floats(*Q), _floats(*K), _floats(*V)],
        {"query_start": 2, "key_start": 3, "is_causal": True, "bias": _floats(4, 3, 6), "implementation": "auto", "arithmetic": "fast"},
    ),
    "exact partial": Valid(
        ac.pieces.partial_attention,
        [_floats(*Q), _floats(*K), _floats(*V)],
        {"query_start": 2, "key_start": 3, "is_causal": True, "arithmetic": "reproducible"},
    ),
    "merge": Valid(ac.pieces.merge_partials, [PARTIAL, PARTIAL], {}),
    "multi-head": Valid(
        ac.multi_head_attention,
        [HEADS, _floats(2, 3, 6), _floats(2, 6, 7), _floats(2, 6, 5)],
        OPTIONS | FAST | RETURNS | {"num_heads": 4, "num_key_value_heads": 2},
    ),
    "encoder": Valid(
        ac.functions.encoder_layer,
        [parameters.EncoderLayer(SELF, _norm(8), FORWARD, _norm(8)), _floats(2, 3, 8)],
        {"num_heads": 2, "mask": _flags(3, 3), "epsilon": 1e-5, "dropout": DROPOUT, "implementation": "auto", "arithmetic": "fast"},
    ),
    "feed-forward": Valid(ac.functions.feed_forward, [FORWARD, _floats(2, 3, 8)], {"dropout": DROPOUT, "arithmetic": "fast"}),
    "linear": Valid(ac.functions.linear, [_linear(5, 3), _floats(2, 5)], {"arithmetic": "reproducible"}),
    "gated feed-forward": Valid(
        ac.functions.feed_forward,
        [GATED, _floats(2, 3, 8)],
        {"activation": "gelu", "dropout": DROPOUT, "arithmetic": "fast"},
    ),
    "gelu": Valid(ac.functions.gelu, [_floats(2, 5)], {"arithmetic": "fast"}),
    "silu": Valid(ac.functions.silu, [_floats(2, 5)], {"arithmetic": "fast"}),
    "layer norm": Valid(ac.functions.layer_norm, [_norm(5), _floats(2, 5)], {"epsilon": 1e-5, "arithmetic": "fast"}),
    "rms norm": Valid(ac.functions.rms_norm, [_floats(5), _floats(2, 5)], {"epsilon": 1e-5, "arithmetic": "fast"}),
    "embed": Valid(
        ac.functions.embed_tokens,
        [TABLES, _integers(2, 6)],
        {"position_ids": _integers(6), "segment_ids": _integers(2, 6), "epsilon": 1e-5, "dropout": DROPOUT, "arithmetic": "fast"},
    ),
    "rotary": Valid(
        ac.functions.rotary_embedding,
        [_floats(2, 4, 3, 6), _integers(2, 3)],
        {"base": 10000.0, "interleaved": True, "width": 4, "arithmetic": "fast"},
    ),
    "sagan": Valid(ac.functions.sagan_attention, [MAPS, _floats(2, 4, 6, 8)], {"data_format": "channels_last", "arithmetic": "fast"}),
    "spectral norm": Valid(ac.functions.spectral_norm, [_floats(2, 3, 4), _floats(4)], {"epsilon": 1e-6, "arithmetic": "fast"}),
    "split": Valid(ac.split_heads, [_floats(2, 3, 8), 4], {}),
    "join": Valid(ac.merge_heads, [_floats(2, 4, 3, 5)], {}),
    "append": Valid(ac.cache.append, [CACHE, _floats(2, 2, 3, 5), _floats(2, 2, 3, 3)], {"num_new": _integers(2)}),
    "cache mask": Valid(ac.cache.cache_mask, [CACHE, 2], {}),
    "from ignore": Valid(ac.masks.mask_from_ignore, [_flags(2, 3)], {}),
    "from integers": Valid(ac.masks.mask_from_integers, [_integers(2, 3)], {}),
    "from additive": Valid(ac.masks.mask_from_additive, [_floats(2, 3)], {"threshold": -100.0}),
    "from padding": Valid(ac.masks.mask_from_padding, [_flags(2, 3)], {}),
    "causal": Valid(_with_xp(_to_array), [MASK, 3, 6, _floats(1)], {}),
    "window": Valid(_with_xp(_to_array), [WINDOW, 3, 6, _floats(1)], {}),
    "segments": Valid(_with_xp(_to_array), [SEGMENTS, 3, 6, _floats(1)], {}),
    "lengths": Valid(_with_xp(_to_array), [Made(ac.KeyLengths, {"lengths": _integers(2)}), 3, 6, _floats(1)], {}),
    "alibi": Valid(ac.scores.alibi, [4], {"offset": _integers(2)}),
    "relative": Valid(ac.scores.relative_bias, [_floats(8, 4)], {"bidirectional": True, "max_distance": 20, "offset": _integers(2)}),
    "uniform": Valid(_with_xp(initializers.uniform), [3, SHAPE], {"limit": 1.0, "dtype": "float32"}),
    "normal": Valid(_with_xp(initializers.normal), [_integers(2), SHAPE], {"stddev": 1.0, "dtype": "float32"}),
    "truncated": Valid(_with_xp(initializers.truncated_normal), [3, SHAPE], {"stddev": 1.0, "dtype": "float32"}),
    "glorot": Valid(_with_xp(initializers.glorot_uniform), [3, SHAPE], {"dtype": "float32"}),
}  # fmt: skip


METHOD = dict.fromkeys(("causal", "window", "segments", "lengths"), (0,))
"""The objects whose methods are called: what takes their place has none."""


# What takes the place of an argument


def _cast(dtype: str) -> Callable[[Any], Any]:
    return lambda leaf: np.asarray(leaf).astype(dtype)


def _grown(axis: int) -> Callable[[Any], Any]:
    """One more along an axis."""
    return lambda leaf: np.concatenate([leaf, leaf[(slice(None),) * (axis % leaf.ndim) + (slice(0, 1),)]], axis=axis)


ARRAYS: dict[str, Callable[[np.ndarray], Any]] = {
    **{f"as {name}": _cast(name) for name in ("float16", "float64", "int32", "int64", "uint8", "bool", "complex64")},
    "one axis less": lambda leaf: np.asarray(leaf[0]),
    "one axis more": lambda leaf: leaf[None],
    "one more along -1": _grown(-1),
    "one more along -2": lambda leaf: _grown(-2)(leaf) if leaf.ndim > 1 else leaf[None],
    "one more along 0": _grown(0),
    "first along -1": lambda leaf: leaf[..., :1],
    "first along 0": lambda leaf: leaf[:1],
    "none along -1": lambda leaf: leaf[..., :0],
    "none along 0": lambda leaf: leaf[:0],
    "axes reversed": lambda leaf: leaf.T,
    "no axes": lambda leaf: np.asarray(leaf.reshape(-1)[0]),
    "negative": lambda leaf: leaf if leaf.dtype == bool else (-1 - abs(leaf)).astype(leaf.dtype),
    "beyond": lambda leaf: leaf if leaf.dtype == bool else (leaf * 0 + 100).astype(leaf.dtype),
    "as a list": lambda leaf: leaf.tolist(),
}  # fmt: skip

OTHERS: dict[str, Callable[[Any], Any]] = {
    "None": lambda leaf: None,
    "True": lambda leaf: True,
    "text": lambda leaf: "text",
    "nothing": lambda leaf: "",
    "0": lambda leaf: 0,
    "1": lambda leaf: 1,
    "-1": lambda leaf: -1,
    "3": lambda leaf: 3,
    "0.0": lambda leaf: 0.0,
    "1.5": lambda leaf: 1.5,
    "-0.5": lambda leaf: -0.5,
    "1e-300": lambda leaf: 1e-300,
    "nan": lambda leaf: math.nan,
    "inf": lambda leaf: math.inf,
    "1j": lambda leaf: 1j,
    "2**40": lambda leaf: 2**40,
    "-2**40": lambda leaf: -(2**40),
    "()": lambda leaf: (),
    "(1, 2)": lambda leaf: (1, 2),
    "[]": lambda leaf: [],
    "{}": lambda leaf: {},
    "an object": lambda leaf: _OBJECT,
    "a function": lambda leaf: len,
    "a class": lambda leaf: dict,
    "bytes": lambda leaf: b"text",
    "an array": lambda leaf: np.ones((2, 3), np.float32),
    "a number in an array": lambda leaf: np.ones((), np.float32),
    "an integer in an array": lambda leaf: np.ones((), np.int32),
    "a mask": lambda leaf: Made(ac.Causal, {"offset": 0}),
    "a dropout": lambda leaf: DROPOUT,
    "a map": lambda leaf: _linear(5, 3),
    "dense": lambda leaf: "dense",
    "blockwise": lambda leaf: "blockwise",
    "fused": lambda leaf: "fused",
    "reproducible": lambda leaf: "reproducible",
}  # fmt: skip

_OBJECT = object()
CALLABLE = ("a function", "a class")  # in the place of a function of users, their errors are their own
WRONG = ARRAYS | OTHERS


def mapped(tree: Any, function: Callable[[Any, Any], Any]) -> Any:
    """The tree with what a function makes of the name of each branch and the branch; a leaf as it is."""
    if isinstance(tree, Valid):
        positional = [function(index, each) for index, each in enumerate(tree.positional)]
        return tree._replace(
            positional=positional, options={name: function(name, each) for name, each in tree.options.items()}
        )
    if isinstance(tree, Made):
        return tree._replace(arguments={name: function(name, each) for name, each in tree.arguments.items()})
    if isinstance(tree, tuple):
        branches = [function(index, each) for index, each in enumerate(tree)]
        return type(tree)(*branches) if hasattr(tree, "_fields") else tuple(branches)
    return tree


def leaves(tree: Any, path: Path = ()) -> list[tuple[Path, Any]]:
    """Every node of the arguments with its path, named tuples and made objects included."""
    found = [(path, tree)] if path else []
    mapped(tree, lambda name, branch: found.extend(leaves(branch, (*path, name))))
    return found


def changed(tree: Any, path: Path, wrong: str) -> Any:
    """The tree with the node at a path replaced."""
    if not path:
        return WRONG[wrong](tree)
    return mapped(tree, lambda name, branch: changed(branch, path[1:], wrong) if name == path[0] else branch)


def built(tree: Any, put: Callable[[Any], Any], kind: type = np.ndarray) -> Any:
    """The arguments with arrays of a library, which are put in the place of leaves of a kind."""
    if isinstance(tree, kind):
        return put(tree)
    tree = mapped(tree, lambda _, branch: built(branch, put, kind))
    return tree.function(**tree.arguments) if isinstance(tree, Made) else tree


def fits(node: Any, wrong: str) -> bool:
    """Whether a change says something of a node."""
    if wrong not in ARRAYS:
        return True
    return isinstance(node, np.ndarray) and (node.ndim > 0 or wrong.startswith(("as ", "one axis more", "no axes")))


def call_of(call: Call) -> Valid:
    """The arguments of a call, with its changes."""
    valid: Any = VALID[call.name]
    for path, wrong in call.changes:
        valid = changed(valid, path, wrong)
    return valid


@functools.cache
def places(name: str) -> list[tuple[Path, list[str]]]:
    """Every node of a call with the changes that say something of it."""
    nodes = [(path, node) for path, node in leaves(VALID[name]) if path != METHOD.get(name)]
    return [
        (path, [wrong for wrong in WRONG if fits(node, wrong) and not (path[-1] == "score_mod" and wrong in CALLABLE)])
        for path, node in nodes
    ]


@st.composite
def calls(draw: Any) -> Call:
    """Calls with one change, sometimes with two at different places."""
    name = draw(st.sampled_from(list(VALID)))
    chosen = [
        places(name)[draw(st.integers(0, len(places(name)) - 1))] for _ in range(draw(st.sampled_from([1, 1, 2])))
    ]
    if len(chosen) == 2 and _nested(chosen[0][0], chosen[1][0]):
        del chosen[1]
    return Call(name, tuple((path, wrongs[draw(st.integers(0, len(wrongs) - 1))]) for path, wrongs in chosen))


def _nested(path: Path, other: Path) -> bool:
    return path[: len(other)] == other or other[: len(path)] == path
