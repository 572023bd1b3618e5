"""What is known of a call in blocks before they are visited: constants, and arrays of five axes.

Nothing here knows in which arithmetic a block is summed up.
"""

from __future__ import annotations

import itertools
import math
from typing import Any, NamedTuple

from attention_core._arrays import Array, Arrays, Namespace, number_like, positions, shape, zeros_with
from attention_core._attention.call import Call, scale_like
from attention_core._attention.finite import inputs_are_finite
from attention_core._backend import Backend, Tuning, can_be_read, is_on_host, register
from attention_core._checks import only_array, result_of
from attention_core._trees import leaves
from attention_core.masks import Positions, flatten
from attention_core.masks._mask import as_mask, band_of
from attention_core.masks._tree import may_count
from attention_core.scores import ScoreMod

DEVICE_QUERIES, DEVICE_KEYS = 4, 4  # times as many of a block on an accelerator, where each costs launches
REPRODUCIBLE_KEYS = 256  # of a block in reproducible arithmetic
MAX_PLAIN_SCORE = 32.0  # below this, exponentials of scores can be taken as they are
NORM_LIMIT = 1e15  # of norms, and of values


class Plan(NamedTuple):
    """What is known of a call before its arrays: constants, which compare by value.

    Softcap, seed and starts are numbers, or ``None`` where an array takes their place.
    """

    mask: Any  # the tree definition of a mask, by `attention_core.masks.flatten`
    score_mod: Any  # a function without its arrays; the tree definition of one that is a dataclass
    softcap: float | None
    dropout_rate: float
    seed: int | None
    starts: tuple[int | None, ...]
    present: tuple[bool, ...]  # which of the first eight `Operands` there are
    num_arrays: tuple[int, int]  # of mask and score modification
    may_mask: bool  # whether something may be masked, so that a row may be fully masked
    all_finite: bool  # whether query, key and value are finite, or a host looks at what is computed of them
    block_sizes: tuple[int, int]  # queries and keys of a block
    max_backward_keys: int  # of a block in the backward pass
    per_head: bool  # whether key/value heads are taken one by one
    max_keys_per_run: int  # of neighbouring blocks that are taken at once, where loops are not traced
    # Whether scores are known to be so small that no maximum need be subtracted: exponentials, and averages by them,
    # neither overflow nor vanish. None where that could not be read.
    exp_without_max: bool | None = None
    is_reproducible: bool = False
    score_scale: float = 1.0  # in reproducible arithmetic, the scale, by which the query is not multiplied yet
    assume_finite: bool = False  # whether nobody is to look at values, gradients among them
    num_queries: int | None = None  # of all ranks, if others have more of them
    group: str | None = None  # of these ranks, in reproducible arithmetic

    @property
    def num_integers(self) -> int:
        """How many arrays after query, key, value and bias have no gradient in reproducible arithmetic."""
        return sum(self.present[4:]) + sum(self.num_arrays)


register("Plan", Plan)


class Operands(NamedTuple):
    """The arrays of a call: B samples of G key/value heads, each with R query heads."""

    query: Array  # (B, G, R, M, D), scaled
    key: Array  # (B, G, N, D)
    value: Array  # (B, G, N, E)
    bias: Array | None  # of five axes, each as long as that of the scores (B, G, R, M, N), or 1
    softcap: Array | None  # this and the next three where they are no Python numbers
    seed: Array | None
    query_start: Array | None
    key_start: Array | None
    mask: Arrays  # with one leading axis of length B or 1
    score_mod: Arrays

    def arrays(self) -> Arrays:
        """The arrays that there are, in order: the inverse of `unpack_operands`."""
        return tuple([array for array in (*self[:8], *self.mask, *self.score_mod) if array is not None])


def unpack_operands(plan: Plan, arrays: Arrays) -> Operands:
    """The operands of a plan out of the arrays that there are."""
    remaining = iter(arrays)
    named: list[Any] = [next(remaining) if present else None for present in plan.present]
    named += [tuple(itertools.islice(remaining, plan.num_arrays[0])), tuple(remaining)]
    return Operands(*named)


def make_plan(call: Call, *, is_reproducible: bool = False, score_scale: float = 1.0) -> tuple[Plan, Operands]:
    """A call as constants and arrays. In reproducible arithmetic, the query is not scaled yet."""
    xp, tuning, dropout = call.xp, block_tuning(call), call.dropout
    query = call.query if is_reproducible else xp.multiply(call.query, scale_like(call.query, call.scale, xp))
    *leading, num_heads, rows, width = shape(call.query, xp=xp)
    num_kv_heads, columns = shape(call.key, xp=xp)[-3:-1]
    value_width = shape(call.value, xp=xp)[-1]
    batch = math.prod(leading)
    group = 1 if isinstance(num_heads, int) and num_heads == num_kv_heads else num_heads // num_kv_heads
    target = (batch, num_kv_heads, group, rows, columns)
    held: list[Array] = []
    treedef, of_mask = None, ()
    if call.mask is not None:
        treedef = flatten(as_mask(call.mask), held)
        of_mask = tuple(
            array if leaf.axes < 0 else _flatten_batch(array, leaf.axes, leading, target, xp=xp)
            for array, leaf in zip(held, leaves(treedef), strict=True)
        )
    rate, seed = (0.0, 0) if dropout is None or not dropout.rate else dropout
    score_mod: Any = call.score_mod
    score_arrays: Arrays = ()
    if score_mod is not None:
        _check_score_mod(call)
    if isinstance(score_mod, ScoreMod):
        score_mod, score_arrays = flatten(score_mod.function, []), score_mod.arrays
    query_start, key_start = call.starts
    operands = Operands(
        query=xp.reshape(query, (batch, num_kv_heads, group, rows, width)),
        key=xp.reshape(call.key, (batch, num_kv_heads, columns, width)),
        value=xp.reshape(call.value, (batch, num_kv_heads, columns, value_width)),
        bias=None if call.bias is None else _flatten_batch(call.bias, 3, leading, target, xp=xp),
        softcap=None if only_array(call.softcap) is None else number_like(call.softcap, call.query, xp),
        seed=only_array(seed) if rate else None,
        query_start=None if isinstance(query_start, int) else query_start,
        key_start=None if isinstance(key_start, int) else key_start,
        mask=of_mask,
        score_mod=score_arrays,
    )
    is_open = not isinstance(columns, int) and call.backend.loops.traced  # else known when an operator runs
    may_mask = call.mask is not None or call.bias is not None or is_open
    plan = Plan(
        mask=treedef,
        score_mod=score_mod,
        softcap=None if call.softcap is None or operands.softcap is not None else float(call.softcap),
        dropout_rate=rate,
        seed=seed if operands.seed is None else None,
        starts=(
            query_start if operands.query_start is None else None,
            key_start if operands.key_start is None else None,
        ),
        present=tuple([operand is not None for operand in operands[:8]]),
        num_arrays=(len(of_mask), len(score_arrays)),
        may_mask=may_mask,
        all_finite=not may_mask
        or call.assume_finite
        or (is_reproducible and call.bias is None and can_be_read(*call[:3]) and bool(inputs_are_finite(call))),
        block_sizes=_reproducible_block_sizes(tuning, group, call.mask)
        if is_reproducible
        else _block_sizes(tuning, num_kv_heads, group, call.mask),
        max_backward_keys=tuning.backward_keys,
        per_head=is_reproducible and not _fits(target[1:], tuning.exact_scores),
        max_keys_per_run=tuning.keys,
        exp_without_max=False if is_reproducible else None,
        is_reproducible=is_reproducible,
        score_scale=score_scale,
        assume_finite=bool(call.assume_finite),
    )
    return with_value_facts(plan, operands, call.backend), operands


def _check_score_mod(call: Call) -> None:
    """Raise where a function of scores closes over an array with a gradient: the gradient of blocks would not reach it.

    A backend that cannot tell either raises by itself, or its library does not know before a program is differentiated.
    """
    score_mod: Any = call.score_mod
    if call.backend.has_gradient is None:
        return
    xp, like = call.xp, call.backend.stop_gradient(call.query)
    arrays: Arrays = ()
    if isinstance(score_mod, ScoreMod):
        score_mod, arrays = score_mod.function, tuple(map(call.backend.stop_gradient, score_mod.arrays))
    first = positions(1, like, xp=xp)
    at = Positions(xp.reshape(first, ()), xp.reshape(first, (1, 1, 1, 1)), xp.expand_dims(first, axis=-1), first)
    new: Any = result_of("score_mod", score_mod, zeros_with(like, 1, 1, 1, 1, xp=xp), *at, *arrays)
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


def with_value_facts(plan: Plan, operands: Operands, backend: Backend) -> Plan:
    """The plan, with what can be read of the arrays by now: while a program was compiled, they had no values."""
    arrays = operands[:3]
    if plan.assume_finite or plan.exp_without_max is not None or not can_be_read(*arrays):
        return plan
    exp_without_max = (
        is_unmodified_product(plan, operands) and not backend.loops.traced and bool(scores_are_small(*arrays, backend))
    )
    return plan._replace(exp_without_max=exp_without_max, all_finite=plan.all_finite or exp_without_max)


def lasts(plan: Plan) -> bool:
    """Whether a plan holds no function or class of users, which may read anything, and scores are not changed.

    Their gradient is found by a library, which may record nothing while it traces a program for others.
    """
    is_capped = plan.softcap is not None or plan.present[Operands._fields.index("softcap")]
    return not is_capped and plan.score_mod is None and not may_count(plan.mask)


def is_unmodified_product(plan: Plan, operands: Operands) -> bool:
    """Whether scores are products that are masked, and nothing else, and there are any."""
    is_capped = plan.softcap is not None or operands.softcap is not None
    is_changed = is_capped or plan.score_mod is not None or operands.bias is not None
    return not is_changed and 0 not in (*operands.query.shape, *operands.key.shape, *operands.value.shape)


def scores_are_small(query: Array, key: Array, value: Array, backend: Backend) -> Array:
    r"""Whether exponentials of scores can be taken as they are, without a maximum, and averaged by.

    .. math:: |q_i \cdot k_j| \le \max_i \|q_i\| \, \max_j \|k_j\| \le 32

    in each head keeps exponentials between 1e-14 and 1e14, and products with values between 1e-15 and 1e15, or 0, are
    far from both ends of float32.
    """
    xp, loops = backend.namespace, backend.loops
    norms = xp.max(loops.norm(query), axis=(2, 3)), xp.max(loops.norm(key), axis=2)
    bounds = xp.multiply(xp.minimum(norms[0], NORM_LIMIT), xp.minimum(norms[1], NORM_LIMIT))  # inf * 0 would be nan
    magnitudes = xp.abs(value)
    fit = xp.all(xp.less(bounds, MAX_PLAIN_SCORE))
    for each in (*norms, magnitudes):
        fit = xp.logical_and(fit, xp.less(xp.max(each), NORM_LIMIT))
    smallest = xp.min(xp.where(xp.equal(magnitudes, 0.0), 1.0, magnitudes))
    return xp.logical_and(fit, xp.greater(smallest, 1 / NORM_LIMIT))


def _block_sizes(tuning: Tuning, num_kv_heads: Any, group: Any, mask: Any) -> tuple[int, int]:
    """How many queries of each head, and how many keys, a block has: of a narrow window, blocks cut half."""
    band = band_of(mask)
    most = math.ceil(min(tuning.keys, max(tuning.min_queries, (band.high - band.low) / 2)))
    if not isinstance(num_kv_heads, int) or not isinstance(group, int):
        return tuning.min_queries, most
    return max(tuning.min_queries, min(most, tuning.queries // (num_kv_heads * group))), most


def _reproducible_block_sizes(tuning: Tuning, group: Any, mask: Any) -> tuple[int, int]:
    """The same in float64, whose sums over a block are off by as many digits as it has keys."""
    band = band_of(mask)
    keys = max(64, math.ceil(min(REPRODUCIBLE_KEYS, (band.high - band.low) / 2)))
    return max(32, tuning.exact_scores // keys // (group if isinstance(group, int) else 1)), keys


def _flatten_batch(array: Array, axes: int, leading: list[Any], target: tuple[Any, ...], xp: Namespace) -> Array:
    """An array with its leading axes as one, of length B or 1; one of the scores gets the five axes of `Operands`."""
    batch, num_kv_heads, group, rows, columns = target
    dims = shape(array, xp=xp)
    dims = (*(1,) * (axes - len(dims)), *dims)
    lead, trailing = dims[: len(dims) - axes], dims[len(dims) - axes :]
    if axes == 3:  # (..., H, M, N): an axis that may turn out to be 1 is spread
        whole = (num_kv_heads * group, rows, columns)
        trailing = tuple(dim if isinstance(dim, int) else full for dim, full in zip(trailing, whole, strict=True))
    if not all(isinstance(dim, int) and dim == 1 for dim in lead):
        array = xp.broadcast_to(array, (*leading, *trailing))
        lead = (batch,)
    else:
        if axes == 3 and not all(isinstance(dim, int) for dim in dims):
            array = xp.broadcast_to(xp.reshape(array, dims), (*(1 for _ in lead), *trailing))
        lead = (1,)
    if axes == 3:
        heads, *ends = trailing
        trailing = (1, 1, *ends) if isinstance(heads, int) and heads == 1 else (num_kv_heads, group, *ends)
    return xp.reshape(array, (*lead, *trailing))
