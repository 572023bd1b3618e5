"""What is known of a call in blocks before they are visited: constants, and arrays of five axes.

Nothing here knows in which arithmetic a block is summed up.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from attention_core._arrays import Array, Namespace, shape
from attention_core._attention.call import Call, group_size, scale_query
from attention_core._attention.magnitudes import known_finite_arrays, known_finite_products, scores_are_small
from attention_core._backend import Backend, Tuning, is_concrete
from attention_core.masks import Mask, flatten
from attention_core.masks._mask import as_mask
from attention_core.masks._tree import leaves
from attention_core.random import Dropout
from attention_core.scores import ScoreMod

REPRODUCIBLE_KEYS = 2048  # up to how many keys a block of exact scores has


class Plan(NamedTuple):
    """What is known of a call before its arrays: constants, which compare by value.

    Attributes
    ----------
    mask : tuple or None
        The `outline` of a mask.
    score_mod : callable or tuple or None
        Without its arrays; the `outline` of one that is a dataclass.
    softcap, rate, seed, starts
        Numbers, or ``None`` where an array takes their place.
    present : tuple of bool
        Which of the `Operands` there are.
    num_arrays : tuple of int
        How many arrays mask and score modification have.
    guarded : bool
        Whether something may be masked, so that a query may attend nothing.
    tame : bool
        Whether query, key and value are known to be finite, and all scores too.
    blocks : tuple of int
        How many queries and keys a block has.
    backward_keys : int
        How many keys it has when going backward.
    apart : bool
        Whether heads are taken one by one.
    run_keys : int
        How many keys of neighbouring blocks are taken at once, where loops are not traced.
    moderate : bool or None
        Whether scores are known to be so small that nothing need be subtracted from them: exponentials, and averages by
        them, neither overflow nor vanish. ``None`` where that could not be read.
    exact : tuple or None
        With reproducible arithmetic, the scale, by which the query is not multiplied yet, and the number of slices.
    scale : float or None
        What the query is still to be multiplied by, where that may turn out not to be needed.
    """

    mask: Any
    score_mod: Any
    softcap: float | None
    rate: float
    seed: int | None
    starts: tuple[int | None, int | None]
    present: tuple[bool, ...]
    num_arrays: tuple[int, int]
    guarded: bool
    tame: bool
    blocks: tuple[int, int]
    backward_keys: int
    apart: bool
    run_keys: int
    moderate: bool | None = None
    exact: tuple[float, int] | None = None
    scale: float | None = None


class Operands(NamedTuple):
    """The arrays of a call: B entries of G key/value heads, each with R query heads.

    Attributes
    ----------
    query : Array, shape (B, G, R, M, D)
        Scaled.
    key, value : Array, shapes (B, G, N, D) and (B, G, N, E)
    bias : Array or None
        Of five axes, each as long as that of the scores (B, G, R, M, N), or 1.
    softcap, seed, query_start, key_start : Array or None
        Where these are no Python numbers.
    mask, score_mod : tuple of Array
        The former with one leading axis of length B or 1.
    """

    query: Array
    key: Array
    value: Array
    bias: Array | None
    softcap: Array | None
    seed: Array | None
    query_start: Array | None
    key_start: Array | None
    mask: tuple[Array, ...]
    score_mod: tuple[Array, ...]


def unpack_operands(plan: Plan, arrays: tuple[Array, ...]) -> Operands:
    remaining = iter(arrays)
    named: list[Any] = [next(remaining) if present else None for present in plan.present]
    named += [tuple(next(remaining) for _ in range(count)) for count in plan.num_arrays]
    return Operands(*named)


def make_plan(call: Call, backend: Backend, exact: tuple[float, int] | None = None) -> tuple[Plan, Operands]:
    """A call as constants and arrays: with ``exact``, the query as it is."""
    xp, tuning = call.xp, backend.tuning
    *leading, _, rows, width = shape(call.query, xp=xp)
    groups, columns = shape(call.key, xp=xp)[-3:-1]
    entries = math.prod(leading)
    times = group_size(call.query, call.key, xp)
    held: list[Array] = []
    form = None if call.mask is None else flatten(as_mask(call.mask), held)
    target = (entries, groups, times, rows, columns)
    mask_arrays = tuple(
        array if slot.axes < 0 else _flatten_batch(array, slot.axes, leading, target, xp)
        for array, slot in zip(held, leaves(form), strict=True)
    )
    score_mod: Any = call.score_mod
    score_arrays: tuple[Array, ...] = ()
    if isinstance(score_mod, ScoreMod):
        score_mod, score_arrays = flatten(score_mod.function, []), score_mod.arrays
    dropout = call.dropout if call.dropout is not None and call.dropout.rate else Dropout(0.0)
    query = call.query if exact else scale_query(call.query, call.scale, xp)
    apart = isinstance(groups, int) and exact is not None
    operands = Operands(
        xp.reshape(query, (entries, groups, times, rows, width)),
        xp.reshape(call.key, (entries, groups, columns, width)),
        xp.reshape(call.value, (entries, groups, columns, shape(call.value, xp=xp)[-1])),
        None if call.bias is None else _flatten_batch(call.bias, 3, leading, target, xp),
        None if _is_number(call.softcap) else call.softcap,
        None if isinstance(dropout.seed, int) else dropout.seed,
        None if isinstance(call.starts[0], int) else call.starts[0],
        None if isinstance(call.starts[1], int) else call.starts[1],
        mask_arrays,
        score_arrays,
    )
    guarded = call.mask is not None or call.bias is not None or not isinstance(columns, int)
    plan = Plan(
        form,
        score_mod,
        None if call.softcap is None or operands.softcap is not None else float(call.softcap),
        dropout.rate,
        dropout.seed if operands.seed is None else None,
        tuple(start if isinstance(start, int) else None for start in call.starts),  # type: ignore[arg-type]
        tuple(operand is not None for operand in operands[:8]),
        (len(mask_arrays), len(score_arrays)),
        guarded,
        not guarded or (exact is not None and call.bias is None and known_finite_products(call)),
        _block_sizes(tuning, groups, times, call.mask)
        if exact is None
        else _reproducible_block_sizes(tuning, times, columns, call.mask),
        tuning.backward_keys,
        apart,
        tuning.keys,
        None if exact is None else False,
        exact,
    )
    return with_value_facts(plan, operands, backend), operands


def with_value_facts(plan: Plan, operands: Operands, backend: Backend) -> Plan:
    """The plan, with what can be read of the arrays by now: while a program was compiled, they had no values."""
    arrays, xp = operands[:3], backend.namespace
    if plan.moderate is not None or not all(map(is_concrete, arrays)):
        return plan
    # Looking makes an accelerator wait, on which loops are traced.
    moderate = (
        is_unmodified_product(plan, operands) and not backend.loops.traced and bool(scores_are_small(*arrays, backend))
    )
    tame = plan.tame or moderate or (operands.bias is None and known_finite_arrays(arrays, None, xp))
    return plan._replace(moderate=moderate, tame=tame)


def is_unmodified_product(plan: Plan, operands: Operands) -> bool:
    """Whether scores are products that are masked, and nothing else, and there are any."""
    changes = plan.score_mod, plan.softcap, operands.softcap, operands.bias
    return all(each is None for each in changes) and not any(0 in array.shape for array in operands[:3])


def _block_sizes(tuning: Tuning, groups: Any, times: Any, mask: Any) -> tuple[int, int]:
    """How many queries of each head, and how many keys, a block has: of a narrow window, blocks cut half."""
    low, high = mask.reach() if isinstance(mask, Mask) else (-math.inf, math.inf)
    most = math.ceil(min(tuning.keys, max(tuning.least, (high - low) / 2)))
    if not isinstance(groups, int) or not isinstance(times, int):
        return tuning.least, most
    return max(tuning.least, min(most, tuning.queries // (groups * times))), most


def _reproducible_block_sizes(tuning: Tuning, times: Any, columns: Any, mask: Any) -> tuple[int, int]:
    """The same for exact sums, whose scores take two passes: in one block if all keys fit into it."""
    low, high = mask.reach() if isinstance(mask, Mask) else (-math.inf, math.inf)
    keys = columns if isinstance(columns, int) and columns <= REPRODUCIBLE_KEYS else REPRODUCIBLE_KEYS // 2
    keys = max(64, math.ceil(min(keys, (high - low) / 2)))
    return max(32, tuning.exact_scores // keys // (times if isinstance(times, int) else 1)), keys


def _flatten_batch(array: Array, axes: int, leading: list[Any], target: tuple[Any, ...], xp: Namespace) -> Array:
    """An array with its leading axes as one, of length B or 1; one of the scores gets the five axes of `Operands`."""
    entries, groups, times, rows, columns = target
    dims = shape(array, xp=xp)
    dims = (*(1,) * (axes - len(dims)), *dims)
    lead, own = dims[: len(dims) - axes], dims[len(dims) - axes :]
    if axes == 3:  # (..., H, M, N): an axis that may turn out to be 1 is spread
        whole = (groups * times, rows, columns)
        own = tuple(dim if isinstance(dim, int) else full for dim, full in zip(own, whole, strict=True))
    if not all(isinstance(dim, int) and dim == 1 for dim in lead):
        array = xp.broadcast_to(array, (*leading, *own))
        lead = (entries,)
    else:
        if axes == 3 and not all(isinstance(dim, int) for dim in dims):
            array = xp.broadcast_to(xp.reshape(array, dims), (*(1 for _ in lead), *own))
        lead = (1,)
    if axes == 3:
        heads, *ends = own
        own = (1, 1, *ends) if isinstance(heads, int) and heads == 1 else (groups, times, *ends)
    return xp.reshape(array, (*lead, *own))


def _is_number(value: Any) -> bool:
    return value is None or not hasattr(value, "dtype")
