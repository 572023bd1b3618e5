"""Cases of ``--large``: counts of heads, samples, elements and scores that do not fit in 16, 31 or 32 bits.

Their answers are known in closed form. Every query has a large score with one key alone, so its output is the value of
that key, and no reference of that size is computed.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from attention_conformance.cases.case import Case, Draw, case
from attention_conformance.cases.kernels import attention
from attention_conformance.problem import NARROW, NumpyArray, Problem

KEYS = 2100
"""Keys whose rows lie so far apart that the last begin beyond 2**31 elements."""

PERIOD = 127
"""Heads after which values repeat; it divides no power of two, at which an index may wrap."""


def selecting(
    draw: Draw, queries: int, keys: int, width: int, *, heads: int = 1, batch: int = 1, size: float = 8.0,
    shared: str = "",
) -> Problem:  # fmt: skip
    r"""Make queries that each select one key, by the bits of its position as signs.

    Two keys differ in at least ``width // bits`` coordinates, and a difference in `n` lowers a score by
    :math:`2 n\, \mathtt{size}^2 / \sqrt{\mathtt{width}}`. At 40, other weights
    round to 0. All samples share the keys, or the values, that ``shared`` names: a stride of 0 takes no memory.
    """
    bits = max(1, (keys - 1).bit_length())
    signs = 2.0 * (np.arange(keys)[:, None] >> (np.arange(width) % bits)[None, :] & 1) - 1
    entries = np.arange(batch * heads)
    of_key, of_value = (entries[:heads] if name == shared else entries for name in ("key", "value"))
    code = draw.array(np.stack([-size * signs, size * signs]))
    values = draw.array(_numbers(np.arange(min(PERIOD, of_value.size))[:, None, None], np.arange(keys)[:, None], width))
    chosen = _selected(entries[:, None], np.arange(queries), keys)
    arrays = {
        "query": code[np.resize(_sign(of_key), entries.size)[:, None], chosen],
        "key": np.take(code, _sign(of_key), axis=0),
        "value": np.take(values, of_value % PERIOD, axis=0),
    }
    arrays = {name: each.reshape(-1, heads, *each.shape[1:]) for name, each in arrays.items()}
    if shared:
        arrays[shared] = np.broadcast_to(arrays[shared], (batch, *arrays[shared].shape[1:]))
    return Problem(arrays, memory={shared: "expanded"} if shared else {})


def _numbers(entries: NumpyArray, keys: NumpyArray, width: int) -> NumpyArray:
    """The values of keys: odd, so never 0, and exact in 16 bits."""
    table = (entries % PERIOD + 3 * keys + 5 * np.arange(width)) % PERIOD
    return np.asarray((2 * table - PERIOD) / 64)


def _sign(entries: NumpyArray) -> NumpyArray:
    """The sign of the keys of each sample and head, another one for those 2**16 apart."""
    return np.asarray(entries % PERIOD // 4 % 2)


def _selected(entries: NumpyArray, rows: NumpyArray, keys: int) -> NumpyArray:
    """The key that each row of each sample and head selects; the last one is among them."""
    return np.asarray((keys - 1 - (7 * entries + 5 * rows)) % keys)


def _of_selected(problem: Problem) -> NumpyArray:
    """The output of `selecting`: the values of the selected keys, without a product."""
    batch, heads, queries, width = problem.arrays["query"].shape
    keys = problem.arrays["key"].shape[-2]
    entries = np.arange(batch * heads)[:, None]
    chosen = _selected(entries, np.arange(queries), keys)[..., None]
    entries = entries % heads if problem.memory.get("value") == "expanded" else entries
    return _numbers(entries[..., None], chosen, width).reshape(batch, heads, queries, width)


def _far(draw: Draw, name: str) -> Problem:
    return attention(draw, 3, KEYS, 64, heads=1, batch=1).changed(memory={name: "far"})


_case = partial(case, compiled=())


LARGE: tuple[Case, ...] = (
    _case("large-heads", memory=2.0, closed=_of_selected, inputs=lambda d: selecting(d, 3, 8, 16, heads=65540)),
    _case("large-samples", memory=2.0, closed=_of_selected, inputs=lambda d: selecting(d, 3, 8, 16, batch=65540)),
    _case("large-offset-key", memory=10.0, dtypes=NARROW, inputs=lambda d: _far(d, "key")),
    _case("large-offset-value", memory=10.0, dtypes=NARROW, inputs=lambda d: _far(d, "value")),
    _case("large-scores", memory=28.0, closed=_of_selected, inputs=lambda d: selecting(d, 46400, 46400, 16, size=16.0)),
    _case("large-elements-key", memory=12.0, dtypes=NARROW, closed=_of_selected,
          inputs=lambda d: selecting(d, 1, 256, 128, heads=32, batch=2050, shared="value")),
    _case("large-elements-value", memory=12.0, dtypes=NARROW, closed=_of_selected,
          inputs=lambda d: selecting(d, 1, 256, 128, heads=32, batch=2050, shared="key")),
)  # fmt: skip
"""Large cases, for kernels; they run when they are asked for."""
