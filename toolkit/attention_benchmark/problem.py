"""Problems: shapes, a mask and a direction, with arrays drawn from a seed."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import ml_dtypes
import numpy as np

import attention_core

NumpyArray: TypeAlias = np.ndarray[Any, np.dtype[Any]]

WINDOW = 256  # keys that a query attends to, including its own
DOCUMENT = 512  # length of the documents packed into one sequence
SOFTCAP = 2.0  # so low that a result without it is wrong
SHAPES = ((1, 1, 8, 16), (32, 12, 128, 64), (4, 12, 512, 64), (1, 8, 2048, 64), (1, 4, 8192, 64))
PADDED = (4, 8, 2048, 64)
DIRECTIONS = ("forward", "fwd+bwd")


class MaskKind(NamedTuple):
    """A mask: its arrays, the core's mask of a problem and these, and a rule of NumPy.

    The rule does not use the core, so that it can check the core and its peers alike. It takes the problem last, and
    positions of queries, to which the offset has been added.

    A change of the scores is one, too. Its options are those of the core. Its function of NumPy takes scores, positions
    of queries and keys, arrays and problem, and returns new scores and their derivative.
    """

    arrays: Callable[[Problem], tuple[NumpyArray, ...]] = lambda problem: ()
    mask: Callable[..., attention_core.Mask | None] = lambda problem, *arrays: None
    rule: Callable[..., NumpyArray] | None = None
    options: Callable[..., dict[str, Any]] = lambda problem, *arrays: {}
    scores: Callable[..., tuple[NumpyArray, Any]] | None = None


def _documents(problem: Problem) -> tuple[NumpyArray, ...]:
    ids = np.arange(problem.shape[2], dtype=np.int32) // problem.document
    return ids[problem.ahead : problem.ahead + problem.num_queries], ids


def _bias(problem: Problem) -> tuple[NumpyArray, ...]:
    """A bias of all heads, in the type of the problem."""
    dims = problem.num_queries, problem.shape[2]
    bias = np.random.default_rng(20240301).standard_normal(dims, dtype=np.float32)
    return (bias.astype(ml_dtypes.bfloat16 if problem.dtype == "bfloat16" else problem.dtype),)


def _capped(scores: NumpyArray, query: NumpyArray, key: NumpyArray, *rest: Any) -> tuple[NumpyArray, NumpyArray]:
    capped = np.tanh(scores / SOFTCAP)
    return capped * SOFTCAP, 1 - capped**2


def alibi_rates(num_heads: int) -> NumpyArray:
    """The rates of ALiBi: of the next lower power of 2, and every other one of its double."""
    power = 2 ** (num_heads.bit_length() - 1)
    lower, higher = (2.0 ** (-8 * np.arange(1, count + 1) / count) for count in (power, 2 * power))
    return np.concatenate([lower, higher[::2][: num_heads - power]])


def _sinks(problem: Problem) -> tuple[NumpyArray, ...]:
    """Scores of the sinks of all heads, so high that they take about half of the weights."""
    drawn = np.random.default_rng(20240302).standard_normal(problem.shape[1]) + np.log(problem.shape[2])
    return (_rounded(drawn, problem.dtype),)


def _lengths(problem: Problem) -> tuple[NumpyArray, ...]:
    """The lengths asked for, or some that are spread evenly, so that half of all keys are padding."""
    batch, _, length, _ = problem.shape
    if problem.key_lengths:
        return (np.resize(np.asarray(problem.key_lengths, dtype=np.int32), batch),)
    return (np.ceil((np.arange(batch) + 0.5) / batch * length).astype(np.int32),)


MASKS = {
    "full": MaskKind(),
    "causal": MaskKind(
        mask=lambda problem: attention_core.Causal(offset=problem.ahead),
        rule=lambda i, j, problem: j <= i,
    ),
    "window": MaskKind(
        mask=lambda problem: attention_core.SlidingWindow(left=problem.window - 1, right=0, offset=problem.ahead),
        rule=lambda i, j, problem: (j <= i) & (j > i - problem.window),
    ),
    "packed": MaskKind(
        _documents,
        lambda problem, query_ids, key_ids: attention_core.Segments(query_ids, key_ids),
        lambda i, j, query_ids, key_ids, problem: key_ids[i] == key_ids[j],
    ),
    "padded": MaskKind(
        _lengths,
        lambda problem, lengths: attention_core.KeyLengths(lengths),
        lambda i, j, lengths, problem: j < lengths[:, None, None, None],
    ),
    "padded-causal": MaskKind(
        _lengths,
        lambda problem, lengths: attention_core.KeyLengths(lengths) & attention_core.Causal(offset=problem.ahead),
        lambda i, j, lengths, problem: (j <= i) & (j < lengths[:, None, None, None]),
    ),
    "softcap": MaskKind(options=lambda problem: {"softcap": SOFTCAP}, scores=_capped),
    "alibi": MaskKind(
        options=lambda problem: {"score_mod": attention_core.scores.alibi(problem.shape[1], offset=problem.ahead)},
        scores=lambda s, i, j, problem: (s - alibi_rates(problem.shape[1])[:, None, None] * np.abs(i - j), 1.0),
    ),
    "bias": MaskKind(
        _bias,
        options=lambda problem, bias: {"bias": bias},
        scores=lambda s, i, j, bias, problem: (s + bias.astype(np.float64)[i[:, 0] - problem.ahead], 1.0),
    ),
    "sinks": MaskKind(
        _sinks,
        options=lambda problem, sinks: {"sinks": sinks},
        scores=lambda s, i, j, sinks, problem: (s, 1.0),  # which change the sum of the weights
    ),
}


@dataclass(frozen=True)
class Problem:
    """A computation to time.

    Attributes
    ----------
    shape : tuple of int
        Batch, heads, length of the keys, head dimension.
    mask : str
        A name in `MASKS`.
    direction : str
        ``"forward"``, or ``"fwd+bwd"``: the output, and the gradients of ``sum(output * cotangent)``.
    dtype, device : str
        ``"cpu"``, or what the name of a framework's device starts with, such as ``"cuda"``.
    kv_heads, queries : int, optional
        The numbers of key/value heads and of queries; by default those of heads and of keys.
    key_lengths : tuple of int
        Of the masks ``"padded"`` and ``"padded-causal"``, repeated for the batch.
    window : int
        The keys that a query attends to under the mask ``"window"``.
    document : int
        The length of the documents of the mask ``"packed"``.
    """

    shape: tuple[int, int, int, int]
    mask: str = "full"
    direction: str = "forward"
    dtype: str = "float32"
    device: str = "cpu"
    kv_heads: int | None = None
    queries: int | None = None
    key_lengths: tuple[int, ...] = ()
    window: int = WINDOW
    document: int = DOCUMENT

    @property
    def group(self) -> int:
        """How many query heads share a key/value head."""
        return self.shape[1] // (self.kv_heads or self.shape[1])

    @property
    def num_queries(self) -> int:
        """The number of queries."""
        return self.queries or self.shape[2]

    @property
    def ahead(self) -> int:
        """The position of the first query."""
        return self.shape[2] - self.num_queries

    @property
    def is_causal(self) -> bool:
        """Whether the mask is causal from the first query and key on, for which all frameworks have a flag."""
        return self.mask == "causal" and self.ahead == 0

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays in float64, in which they are drawn."""
        batch, heads, length, width = self.shape
        return 8 * 4 * batch * heads * length * width

    @property
    def mask_arrays(self) -> tuple[NumpyArray, ...]:
        """The arrays of the mask of the core."""
        return MASKS[self.mask].arrays(self)

    def allowed(self, rows: NumpyArray | None = None) -> NumpyArray | None:
        """Which query may attend to which key, with four axes; ``None`` without a mask."""
        rule, keys = MASKS[self.mask].rule, np.arange(self.shape[2])
        if rule is None:
            return None
        positions = (np.arange(self.num_queries) if rows is None else rows) + self.ahead
        allowed = rule(positions[:, None], keys, *self.mask_arrays, self)
        return allowed.reshape((1,) * (4 - allowed.ndim) + allowed.shape)

    def core_options(self, *arrays: Any) -> dict[str, Any]:
        """The mask of the core, or its flag, and options that change scores, with the arrays of a framework."""
        kind = MASKS[self.mask]
        rule = {"is_causal": True} if self.is_causal else {"mask": kind.mask(self, *arrays)}
        return {**rule, **kind.options(self, *arrays)}

    def changed(self, scores: NumpyArray, rows: NumpyArray) -> tuple[NumpyArray, Any]:
        """Scores of some queries (B, H, rows, N) as the problem changes them, and their derivative."""
        change = MASKS[self.mask].scores
        if change is None:
            return scores, 1.0
        return change(scores, (rows + self.ahead)[:, None], np.arange(self.shape[2]), *self.mask_arrays, self)

    def cut(self) -> tuple[slice, NumpyArray | None]:
        """The keys that any query may attend to, and the mask among these; ``None`` where there is nothing to mask.

        So a peer has its own best form: a flag, fewer keys, or an array.
        """
        allowed = None if self.is_causal else self.allowed()
        if allowed is None or self.num_queries == self.shape[2]:
            return slice(None), allowed
        (some,) = np.nonzero(allowed.any(axis=(0, 1, 2)))
        keys = slice(int(some[0]), int(some[-1]) + 1)
        rest = np.ascontiguousarray(allowed[..., keys])
        return keys, None if rest.all() else rest

    @property
    def sinks(self) -> NumpyArray | None:
        """The scores of the sinks of all heads."""
        return self.mask_arrays[0] if self.mask == "sinks" else None

    def for_peer(self) -> tuple[tuple[NumpyArray, ...], slice, tuple[NumpyArray, ...]]:
        """The arrays of a peer, the keys that it takes of these, and its mask or bias, if any.

        A sink is one more key of zeros, whose score is a bias: in a cache, that row is written once.
        """
        if self.sinks is None:
            keys, allowed = self.cut()
            return self.arrays, keys, self.mask_arrays if self.mask == "bias" else () if allowed is None else (allowed,)
        if self.direction == "fwd+bwd":
            raise ValueError("expected the direction forward, as the sink of a peer is one more key; got both")
        query, *shared = self.arrays
        bias = np.zeros((1, self.shape[1], 1, self.shape[2] + 1), np.float32)
        bias[0, :, 0, 0] = self.sinks
        padding = ((0, 0), (0, 0), (1, 0), (0, 0))
        return (query, *(np.pad(each, padding) for each in shared)), slice(None), (bias,)

    @property
    def arrays(self) -> tuple[NumpyArray, ...]:
        """The arrays to differentiate by: query, key and value."""
        return drawn_arrays(self._dims, self.dtype)[:-1]

    @property
    def cotangent(self) -> NumpyArray:
        """The cotangent of the output."""
        return drawn_arrays(self._dims, self.dtype)[-1]

    @property
    def _dims(self) -> tuple[int, ...]:
        return (*self.shape, self.kv_heads or self.shape[1], self.num_queries)


@functools.lru_cache(maxsize=2)
def drawn_arrays(dims: tuple[int, ...], dtype: str) -> tuple[NumpyArray, ...]:
    """Draw the arrays of a problem, and its cotangent, from the seed of all problems."""
    rng = np.random.default_rng(20240229)
    batch, heads, length, width, kv_heads, queries = dims
    query, key = (batch, heads, queries, width), (batch, kv_heads, length, width)
    return tuple(_rounded(rng.standard_normal(shape), dtype) for shape in (query, key, key, query))


def _rounded(array: NumpyArray, dtype: str) -> NumpyArray:
    """Round to the dtype, and return the values in float32 or wider."""
    rounded = array.astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    return rounded if dtype == "float64" else rounded.astype(np.float32)


def laid_out(array: NumpyArray, layout: str) -> NumpyArray:
    """Swap heads and length, (batch, heads, length, head dimension), for the layout ``"BLHD"``."""
    return np.ascontiguousarray(np.swapaxes(array, 1, 2)) if layout == "BLHD" else array


def _decode(batch: int, heads: tuple[int, int], length: int, width: int, queries: int, mask: str) -> dict[str, Any]:
    """A few queries at the end of a cache."""
    shape = (batch, heads[0], length, width)
    return {"shape": shape, "mask": mask, "kv_heads": heads[1], "queries": queries, "window": 1024}


_LONG = (1, (32, 8), 4096, 128)
PRESETS: dict[str, tuple[dict[str, Any], ...]] = {
    "training": tuple(
        {"shape": shape, "mask": mask, "direction": direction, "kv_heads": kv_heads}
        for shape, kv_heads in (
            ((32, 12, 128, 64), 12),
            ((4, 12, 512, 64), 12),
            ((1, 16, 2048, 64), 16),
            ((1, 16, 2048, 64), 4),
        )
        for mask in ("full", "causal")
        for direction in DIRECTIONS
    ),
    "prefill": (
        {"shape": (1, 32, 512, 128), "mask": "causal", "kv_heads": 8},
        *(_decode(*_LONG, queries, mask) for queries in (64, 512) for mask in ("causal", "window")),
    ),
    "decode": (
        _decode(*_LONG, 1, "full"),
        {**_decode(*_LONG, 1, "padded"), "key_lengths": (3000,)},
        _decode(*_LONG, 1, "window"),
        _decode(*_LONG, 4, "causal"),
        _decode(*_LONG, 16, "causal"),
        _decode(1, (32, 4), 4096, 128, 1, "full"),
        _decode(4, (32, 8), 2048, 128, 1, "padded"),
        _decode(4, (16, 16), 2048, 64, 1, "padded"),
        _decode(16, (32, 8), 1024, 128, 1, "padded"),
    ),
    "accelerator": (
        *(
            {"shape": shape, "mask": mask, "direction": direction, "dtype": "bfloat16", **fields}
            for shape, masks in (
                ((32, 12, 128, 64), {"full": {}, "causal": {}}),
                ((4, 16, 2048, 128), {"full": {}, "causal": {}}),
                ((2, 16, 8192, 128), {"causal": {}, "softcap": {}, "alibi": {}, "bias": {}}),
                (
                    (1, 16, 32768, 128),
                    {"causal": {}, "window": {"window": 4096}, "packed": {"document": 2048}, "padded": {}},
                ),
            )
            for mask, fields in masks.items()
            for direction in DIRECTIONS
        ),
        *(
            {"shape": (1, 16, 8192, 128), "mask": "causal", "direction": direction, "dtype": "float32"}
            for direction in DIRECTIONS
        ),
    ),
}
"""Fields of problems by what they are like; those of accelerators have types of their own."""


def default_problems(dtype: str = "float32", device: str = "cpu") -> list[Problem]:
    """The default problems."""
    masked = [(shape, mask) for shape in SHAPES for mask in ("full", "causal")]
    masked += [(SHAPES[-1], "window"), (SHAPES[-1], "packed"), (PADDED, "padded")]
    return [
        Problem(shape, mask, direction, dtype=dtype, device=device)
        for shape, mask in masked
        for direction in DIRECTIONS
    ]
