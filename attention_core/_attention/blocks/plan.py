"""What is known of a call in blocks before they are visited: constants, and arrays of five axes.

Nothing here knows in which arithmetic a block is summed up.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

from ..._arrays import (
    Array,
    Arrays,
    Namespace,
    at_least_one,
    is_counted,
    length,
    number_like,
    on_device_of,
    positions,
    shape,
    zeros_with,
)
from ..._backend import Backend, Tuning, is_on_host, register
from ..._checks import only_array, result_of
from ...masks import Positions, flatten, unflatten
from ...masks._mask import as_mask, band_of
from ...masks._rules import may_count
from ...random import Dropout
from ..call import Call, Whole, group_size, scale_like
from ..parts import with_arrays

DEVICE_QUERIES, DEVICE_KEYS = 4, 4  # times as many of a block on an accelerator, where each costs launches
REPRODUCIBLE_KEYS = 256  # of a block in reproducible arithmetic; of one with few queries, four times as many
FEW_QUERIES = 8  # that share a key in reproducible arithmetic: then the time of the key itself shows


class Plan(NamedTuple):
    """What is known of a call before its arrays: constants, which compare by value."""

    call: Call  # tree definitions of its fields, by `attention_core.masks.flatten`
    block_sizes: tuple[int, int]  # queries and keys of a block
    per_head: bool  # whether key/value heads are taken one by one
    num_queries: int | None = None  # of all ranks, if others have more of them
    group: str | None = None  # of these ranks, in reproducible arithmetic


for _each in (Plan, Call, Whole, Dropout):
    register(_each.__name__, _each)


def pack(call: Call) -> tuple[Call, Arrays]:
    """A call of five axes as tree definitions of its fields, and its arrays in their order."""
    (_, *fields), arrays = flatten(call._replace(xp=None, backend=None), -1)  # type: ignore[arg-type]  # a plan has none
    return Call(*fields), tuple(arrays)


def unpack(plan: Any, arrays: Arrays, backend: Backend) -> Call:
    """The call of a plan, out of its arrays."""
    call: Call = unflatten((Call, *plan.call), arrays)
    return call._replace(xp=backend.namespace, backend=backend)


def in_five_axes(call: Call) -> tuple[Arrays, tuple[Any, ...], tuple[Any, ...]]:
    """Query (B, G, R, M, D), key (B, G, N, D) and value (B, G, N, E); the axes of B; and B, G, R, M, N.

    The query is scaled; in reproducible arithmetic, not yet.
    """
    xp, is_exact = call.xp, call.arithmetic == "reproducible"
    query = call.query if is_exact else xp.multiply(call.query, scale_like(call.query, call.scale, xp))
    (*leading, _, rows, width), (*_, num_kv_heads, columns, _) = shape(query, xp=xp), shape(call.key, xp=xp)
    batch, group = math.prod(leading), group_size(query, call.key, xp)
    query = xp.reshape(query, (batch, num_kv_heads, group, rows, width))
    key = xp.reshape(call.key, (batch, num_kv_heads, columns, width))
    value = xp.reshape(call.value, (batch, num_kv_heads, columns, length(call.value, -1, xp=xp)))
    return (query, key, value), tuple(leading), (batch, num_kv_heads, group, rows, columns)


def make_plan(call: Call) -> tuple[Plan, Arrays]:
    """A call as constants and arrays: B samples of G key/value heads, each with R query heads.

    Its arrays are those of `in_five_axes`. A bias has the five axes of the scores (B, G, R, M, N), or 1; arrays of a
    mask have one leading axis. Of no samples that a program counts, there is one of zeros, as loops need one. So there
    is a number of a mask for the place of what fills up a block.
    """
    xp, tuning, is_exact = call.xp, block_tuning(call), call.arithmetic == "reproducible"
    (query, key, value), leading, target = in_five_axes(call)
    _, num_kv_heads, group, rows, _ = target
    if call.score_mod is not None:
        _check_score_mod(call)
    softcap = call.softcap
    if softcap is not None:
        softcap = float(softcap) if only_array(softcap) is None else number_like(softcap, call.query, xp)

    def flat(array: Array, axes: int) -> Array:
        return _not_empty(_flatten_batch(array, axes, leading, target, xp), xp, (0, *range(-axes, 0)))

    definitions, arrays = pack(
        call._replace(
            query=_not_empty(query, xp),
            key=_not_empty(key, xp),
            value=_not_empty(value, xp),
            bias=None if call.bias is None else _not_empty(_flatten_batch(call.bias, 3, leading, target, xp), xp),
            scale=call.scale if is_exact else None,
            softcap=softcap,
            sinks=None,
            dropout=call.dropout if call.dropout is not None and call.dropout.rate else None,
            mask=None if call.mask is None else with_arrays(as_mask(call.mask), flat),
        )
    )
    plan = Plan(
        definitions,
        block_sizes=_reproducible_block_sizes(tuning, (group, rows), call.mask)
        if is_exact
        else _block_sizes(tuning, num_kv_heads, group, call.mask),
        per_head=is_exact and not _fits(target[1:], tuning.exact_scores),
    )
    return plan, arrays


def _not_empty(x: Array, xp: Namespace, axes: Iterable[int] = (0,)) -> Array:
    for axis in axes:
        size = length(x, axis, xp=xp)
        x = pad(x, axis, at_least_one(size, xp) - size, xp) if is_counted(size) else x
    return x


def pad(x: Array, axis: int, amount: Any, xp: Namespace, number: float = 0) -> Array:
    """Append a number to an axis, so many times."""
    if isinstance(amount, int) and amount == 0:
        return x
    dims = list(shape(x, xp=xp))
    dims[axis] = amount
    return xp.concat([x, xp.full(tuple(dims), number, dtype=x.dtype, **on_device_of(x))], axis=axis)


def as_called(call: Call, width: Any, *results: Array) -> tuple[Array, ...]:
    """Results of the plan of a call in its axes: one (B, G, R, M, width), and others (B, G, R, M)."""
    *dims, _ = shape(call.query, xp=call.xp)
    batch = math.prod(dims[:-2])
    output, *rows = [x[:batch, ...] for x in results] if is_counted(batch) else results
    return call.xp.reshape(output, (*dims, width)), *[call.xp.reshape(x, tuple(dims)) for x in rows]


def _check_score_mod(call: Call) -> None:
    """Raise where a function of scores closes over an array with a gradient: the gradient of blocks would not reach it.

    A backend that cannot tell either raises by itself, or its library does not know before a program is differentiated.
    """
    if call.backend.has_gradient is None:
        return
    (treedef, arrays), xp, like = flatten(call.score_mod), call.xp, call.backend.stop_gradient(call.query)
    score_mod = unflatten(treedef, list(map(call.backend.stop_gradient, arrays)))
    first = positions(1, like, xp=xp)
    at = Positions(xp.reshape(first, ()), xp.reshape(first, (1, 1, 1, 1)), xp.expand_dims(first, axis=-1), first)
    new: Any = result_of("score_mod", score_mod, zeros_with(like, 1, 1, 1, 1, xp=xp), *at)
    if hasattr(new, "dtype") and call.backend.has_gradient(new):
        raise ValueError(
            "expected a score_mod whose arrays with a gradient are those of ScoreMod(function, arrays); "
            "got one that closes over another"
        )


def _fits(dims: tuple[Any, ...], most: int) -> bool:
    """Whether the heads of a sample are so small that all of them are taken at once; nor are unknown ones cut."""
    return not isinstance(dims[0], int) or ({*map(type, dims)} == {int} and math.prod(dims) <= most)


def block_tuning(call: Call) -> Tuning:
    """The sizes of blocks: larger ones on an accelerator, which one of a processor's would not keep busy.

    A traced array does not tell where its program will run: by default on the first device of its library.
    """
    backend, tuning = call.backend, call.backend.tuning
    programs_run_on = backend.devices()[0] if backend.loops.traced else "cpu"
    if "cpu" in programs_run_on.lower() and is_on_host(call.query):
        return tuning
    return tuning._replace(
        queries=DEVICE_QUERIES * tuning.queries,
        keys=DEVICE_KEYS * tuning.keys,
        backward_keys=DEVICE_KEYS * tuning.backward_keys,
        exact_scores=DEVICE_QUERIES * DEVICE_KEYS * tuning.exact_scores,
    )


def lasts(plan: Plan) -> bool:
    """Whether a plan holds no function or class of users, which may read anything, and scores are not changed.

    Their gradient is found by a library, which may record nothing while it traces a program for others.
    """
    return plan.call.softcap is plan.call.score_mod is None and not may_count(plan.call.mask)


def _block_sizes(tuning: Tuning, num_kv_heads: Any, group: Any, mask: Any) -> tuple[int, int]:
    """How many queries of each head, and how many keys, a block has: of a narrow window, blocks cut half."""
    band = band_of(mask)
    most = math.ceil(min(tuning.keys, max(tuning.min_queries, (band.high - band.low) / 2)))
    if not isinstance(num_kv_heads, int) or not isinstance(group, int):
        return tuning.min_queries, most
    return max(tuning.min_queries, min(most, tuning.queries // (num_kv_heads * group))), most


def _reproducible_block_sizes(tuning: Tuning, sharing: tuple[Any, Any], mask: Any) -> tuple[int, int]:
    """The same in float64, whose sums over a block are off by as many digits as it has keys."""
    band, group = band_of(mask), sharing[0] if isinstance(sharing[0], int) else 1
    most = REPRODUCIBLE_KEYS * (4 if are_few(*sharing) else 1)
    keys = max(64, math.ceil(min(most, (band.high - band.low) / 2)))
    return max(32, tuning.exact_scores // keys // group), keys


def are_few(group: Any, rows: Any) -> bool:
    """Whether so few queries share a key that they take less time than the key itself."""
    return isinstance(group, int) and isinstance(rows, int) and group * rows <= FEW_QUERIES


def _flatten_batch(array: Array, axes: int, leading: tuple[Any, ...], target: tuple[Any, ...], xp: Namespace) -> Array:
    """An array with its leading axes as one, of length B or 1; one of the scores gets its five axes."""
    batch, num_kv_heads, group, rows, columns = target
    dims = shape(array, xp=xp)
    dims = (*(1,) * (axes - len(dims)), *dims)
    lead, trailing = dims[: len(dims) - axes], dims[len(dims) - axes :]
    if axes == 3:  # (..., H, M, N): an axis that may turn out to be 1 is spread
        whole = (num_kv_heads * group, rows, columns)
        trailing = tuple(dim if isinstance(dim, int) else full for dim, full in zip(trailing, whole, strict=True))
    is_one = all(isinstance(dim, int) and dim == 1 for dim in lead)
    if not (is_one and all(isinstance(dim, int) for dim in dims)):
        array = xp.broadcast_to(array, (*(lead if is_one else leading), *trailing))
    lead = (1 if is_one else batch,)
    if axes == 3:
        heads, *ends = trailing
        trailing = (1, 1, *ends) if isinstance(heads, int) and heads == 1 else (num_kv_heads, group, *ends)
    return xp.reshape(array, (*lead, *trailing))
