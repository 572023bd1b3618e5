"""The ways to compute attention, in the order in which they are asked, and which of them a call takes.

`run_call` takes the first way whose verdict is open and that nothing makes slower; `explanation` prints what it walks.
A verdict of the ways written here reads no query, key or value.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

from attention_core._arithmetic import ARITHMETICS, fan_out
from attention_core._arrays import Array, cast_to, dtype_name, sizes, upcast
from attention_core._attention.blocks.forward import blockwise
from attention_core._attention.blocks.grid import EXACT_WORK
from attention_core._attention.blocks.plan import block_tuning
from attention_core._attention.call import Call, Result, group_size, has_no_pairs, is_listed
from attention_core._attention.definition import guarded_dense, guarded_scores
from attention_core._attention.facts import folds_groups, lasting_facts
from attention_core._attention.parts import (
    KeyCut,
    Parts,
    cuts_that_save,
    has_few_queries,
    parts_of,
    sample_calls,
    with_cut,
)
from attention_core._attention.reproducible.forward import reproducible_attention
from attention_core._attention.reproducible.matrices import reproducible_scores, reproducible_weights
from attention_core._attention.softmax import merge_logsumexps, with_remainder
from attention_core._backend import Kernel, Verdict, backend_of, is_exporting, library_name
from attention_core._checks import check_choice
from attention_core.masks import Mask
from attention_core.masks._mask import bounds_of

IMPLEMENTATIONS = ("auto", "dense", "blockwise", "fused")
OPEN = Verdict(None)
OutputOf = Callable[[Call], "Array | None"]


class Way:
    """A way to compute attention: a base class."""

    name: str  # what `implementation=` and explanations call it: "dense", "blockwise" or "fused"
    kernel: Kernel | None = None

    def judge(self, parts: Parts) -> Verdict:
        """Say whether the way gives the answer, which it does by default, and why another one is faster."""
        return OPEN

    def gives_logsumexp(self, parts: Parts) -> bool:
        """Whether the logsumexp comes with the output."""
        return True

    def run(self, parts: Parts, *, logsumexp: bool, weights: bool = False) -> Result:
        """Compute attention, with what is asked for besides the output if it costs less than by itself."""
        raise NotImplementedError

    def memory(self, parts: Parts) -> int | None:
        """About how many bytes it needs at a time besides its arguments; ``None`` where sizes are unknown."""
        return _memory(parts.call, 0)

    def prepare(self, parts: Parts) -> OutputOf | None:
        """The output as a function of calls of this signature, of which no array is kept; or ``None``."""
        return None


class Fused(Way):
    """A kernel of the library."""

    name = "fused"

    def __init__(self, kernel: Kernel) -> None:
        self.kernel: Any = kernel

    def judge(self, parts: Parts) -> Verdict:
        if any(map(is_listed, parts.call.starts)):
            return Verdict("counts neighbouring positions")
        verdict: Verdict = self.kernel.judge(parts.call)
        if has_no_elements(parts.call):
            return Verdict(verdict.refusal, False, "query, key or value is empty")
        if verdict.is_faster:
            return verdict
        return verdict._replace(slower=verdict.slower or "slower than what is written here")

    def gives_logsumexp(self, parts: Parts) -> bool:
        return bool(self.kernel.has_logsumexp(parts.call))

    def run(self, parts: Parts, *, logsumexp: bool, weights: bool = False) -> Result:
        if not (logsumexp and self.gives_logsumexp(parts)):
            return Result(self.kernel.attend(parts.call))
        output, found = self.kernel.attend_with_logsumexp(parts.call)
        return Result(output, None, found)

    def prepare(self, parts: Parts) -> OutputOf | None:
        if not self.kernel.lasts(parts.call):
            return None
        kernel, cut, mask = self.kernel.prepare(parts.call), parts.cut, parts.call.mask
        has_arrays = not bounds_of(mask).is_relative
        if cut is not None and has_arrays:  # of lengths, of which none is kept
            cut = cut._replace(mask=None)

        def output(call: Call) -> Array:
            run = call if cut is None else with_cut(call, cut)
            if has_arrays:
                run = run._replace(mask=call.mask)
            if call.sinks is None:
                return kernel.attend(run)
            result, logsumexp = kernel.attend_with_logsumexp(run)
            return cast_to(with_sinks(Result(result, None, logsumexp), call).output, call.query.dtype, xp=call.xp)

        return output


class Dense(Way):
    """The definition, with all scores at once; or sample by sample, with the keys that lengths leave of each."""

    name = "dense"

    def __init__(self, cuts: list[KeyCut] | None = None) -> None:
        self.cuts = cuts

    def judge(self, parts: Parts) -> Verdict:
        is_open = self.cuts is not None or dense_advantage(parts.call) is not None
        return OPEN if is_open else Verdict(None, False, "holds all scores at once")

    def run(self, parts: Parts, *, logsumexp: bool, weights: bool = False) -> Result:
        if self.cuts is not None:
            return _attend_per_sample(parts.whole, self.cuts, logsumexp=logsumexp)
        return guarded_dense(parts.call, weights=weights and parts.cut is None, logsumexp=logsumexp)

    def memory(self, parts: Parts) -> int | None:
        return _memory(parts.call, math.inf)

    def prepare(self, parts: Parts) -> OutputOf | None:
        cuts, cut, mask = self.cuts, parts.cut, parts.call.mask
        if cuts is not None:
            return lambda call: cast_to(
                _attend_per_sample(call, cuts, logsumexp=False).output, call.query.dtype, xp=call.xp
            )
        facts = lasting_facts(parts.call)
        if facts is None and not bounds_of(mask).is_relative:
            return None
        if cut is not None and facts is not None:
            cut = cut._replace(mask=None)  # which may hold lengths of the user, and is an array of the facts

        def output(call: Call) -> Array:
            result = guarded_dense(call if cut is None else with_cut(call, cut), facts, logsumexp=False)
            return cast_to(result.output, call.query.dtype, xp=call.xp)

        return output


def _attend_per_sample(call: Call, cuts: list[KeyCut], *, logsumexp: bool) -> Result:
    """The results of `sample_calls`, with the axes of the batch."""
    calls, xp, leading = sample_calls(call, cuts), call.xp, call.query.shape[:-3]
    facts = None if any(cut.mask is not None for cut in cuts) else lasting_facts(calls[0])
    results = [guarded_dense(each, facts, logsumexp=logsumexp) for each in calls]

    def join(parts: list[Array]) -> Array:
        return xp.reshape(xp.stack(parts), (*leading, *parts[0].shape))

    found = [join(list(rows)) for rows in zip(*(each[2:] for each in results), strict=True)] if logsumexp else []
    return Result(join([each.output for each in results]), None, *found)


class Blocks(Way):
    """Blocks of queries and keys."""

    name = "blockwise"

    def judge(self, parts: Parts) -> Verdict:
        slower = dense_advantage(parts.call)
        return OPEN if slower is None else Verdict(None, False, slower)

    def run(self, parts: Parts, *, logsumexp: bool, weights: bool = False) -> Result:
        _check_lengths(parts.whole, "implementation='blockwise'")
        output, *found = blockwise(parts.whole)
        return Result(output, None, *found)

    def memory(self, parts: Parts) -> int | None:
        tuning = block_tuning(parts.call)
        return _memory(parts.call, tuning.queries * tuning.keys)


class Reproducible(Way):
    """Reproducible arithmetic, in whose bits blocks do not show."""

    name = "blockwise"

    def run(self, parts: Parts, *, logsumexp: bool, weights: bool = False) -> Result:
        call = parts.whole
        if has_no_pairs(call):
            return guarded_dense(call, weights=weights)
        _check_lengths(call, "arithmetic='reproducible'")
        arithmetic = ARITHMETICS["reproducible" if call.backend.differentiates else "fast"]  # for copies alone
        query, key, value = fan_out((call.query, call.key, call.value), arithmetic, call.xp)
        call = of_weights = call._replace(query=query, key=key, value=value)
        if weights:  # two uses, whose gradients a compiler would add before it rounds them to 16 bits
            arrays = {name: getattr(call, name) for name in ("query", "key", "bias") if getattr(call, name) is not None}
            pairs = {name: arithmetic.copies(array, 2, xp=call.xp) for name, array in arrays.items()}
            call, of_weights = (call._replace(**{name: pair[use] for name, pair in pairs.items()}) for use in (0, 1))
        output, found, reference = reproducible_attention(call)
        return Result(output, reproducible_weights(of_weights, reference) if weights else None, found)

    def memory(self, parts: Parts) -> int | None:
        return _memory(parts.whole, 2 * block_tuning(parts.whole).exact_scores)  # six arrays of a block


DENSE, BLOCKS, REPRODUCIBLE = Dense(), Blocks(), Reproducible()


def walk(parts: Parts) -> Iterator[tuple[Way, Verdict]]:
    """All ways with their verdicts, in the order in which they are asked."""
    for kernel in map(Fused, parts.call.backend.kernels):
        yield kernel, kernel.judge(parts)
    cuts = cuts_that_save(parts.whole)
    takes_samples = cuts is not None and all(map(dense_advantage, sample_calls(parts.whole, cuts)))
    dense = Dense(cuts) if takes_samples else DENSE
    yield dense, dense.judge(parts)
    yield BLOCKS, BLOCKS.judge(parts)


def taken_way(parts: Parts) -> Way:
    """The way that ``"auto"`` takes."""
    return next(way for way, verdict in walk(parts) if is_taken(way, verdict, parts))


def is_taken(way: Way, verdict: Verdict, parts: Parts) -> bool:
    """Whether a call takes this way, if it comes first. The output depends on the logsumexp where there are sinks."""
    is_open = verdict.refusal is None and verdict.is_faster
    return is_open and (parts.call.sinks is None or way.gives_logsumexp(parts))


def logsumexp_way(parts: Parts) -> Way:
    """The way that computes a logsumexp which does not come with the output."""
    return DENSE if DENSE.judge(parts).is_faster else BLOCKS


def run_call(call: Call, implementation: str, *, weights: bool = False, logsumexp: bool = False) -> Result:
    """Run a call by the first of its ways, or the one of a name.

    What is returned besides the output does not decide how that is computed. If a way cannot give it, it is computed
    by another, or refused if the way was asked for by name.
    """
    inside = logsumexp or call.sinks is not None
    if call.arithmetic == "reproducible":
        if weights and implementation == "blockwise":
            raise _no_weights(implementation)
        return REPRODUCIBLE.run(Parts(call, None, call), logsumexp=inside, weights=weights)
    parts = parts_of(call)
    if implementation == "auto":
        way = taken_way(parts)
    else:
        way = _named(parts, implementation, weights=weights, logsumexp=inside)
    if way is not DENSE and has_no_elements(call):  # by whose sizes a kernel may divide, and of which are no blocks
        way = DENSE
    result = way.run(parts, logsumexp=inside, weights=weights)
    if inside and result.logsumexp is None:
        found = logsumexp_way(parts).run(parts, logsumexp=True)
        result = result._replace(logsumexp=found.logsumexp, remainder=found.remainder)
    if weights and result.weights is None:
        result = result._replace(weights=guarded_dense(call, weights=True, logsumexp=False).weights)
    return result if call.sinks is None else with_sinks(result, call)


def _named(parts: Parts, name: str, *, weights: bool, logsumexp: bool) -> Way:
    """The way of a name, or an error that says why there is none."""
    if weights and name != "dense":
        raise _no_weights(name)
    if name in ("dense", "blockwise"):
        return DENSE if name == "dense" else BLOCKS
    if name == "fused" and logsumexp:
        raise _no_logsumexp(name, "few kernels return it")
    kernels = [Fused(kernel) for kernel in parts.call.backend.kernels if name in ("fused", kernel.name)]
    refusals: list[str] = []
    for way in kernels:
        refusal = way.kernel.judge(parts.call).refusal
        if refusal is None:
            if logsumexp and not way.gives_logsumexp(parts):
                raise _no_logsumexp(name, "this kernel does not return it")
            return way
        refusals.append(refusal if name != "fused" else f"{way.kernel.name} {refusal}")
    if name != "fused":
        raise ValueError(f"expected a call that {name} answers as defined; got one that it does not: it {refusals[0]}")
    reasons = "; ".join(refusals) or f"{library_name(parts.call.xp)} has none that is known here"
    raise ValueError(f"expected a call that a fused kernel answers as defined; got one that none does: {reasons}")


def _no_logsumexp(implementation: str, reason: str) -> ValueError:
    return ValueError(
        f"expected no return_logsumexp and no sinks with implementation={implementation!r}, as {reason};"
        " got True: implementation='blockwise' returns it"
    )


def _no_weights(implementation: str) -> ValueError:
    return ValueError(
        f"expected no return_weights with implementation={implementation!r}, as weights have the size that it"
        " avoids; got True: implementation='dense' returns them"
    )


def with_sinks(result: Result, call: Call) -> Result:
    r"""Let every query also attend to a sink, a score without a value: :math:`\ell' = \log(e^\ell + e^s)`."""
    xp = call.xp
    _, _, logsumexp, remainder = with_remainder(result, xp)
    zeros = xp.zeros_like(logsumexp)
    sinks = xp.add(zeros, xp.expand_dims(upcast(call.sinks, xp=xp), axis=-1))
    shares, *found = merge_logsumexps(xp.stack([logsumexp, sinks]), xp.stack([remainder, zeros]), xp=xp)
    is_lost = xp.logical_not(xp.less(logsumexp, math.inf))  # its output is NaN: no share makes masked values so, too
    share = xp.expand_dims(xp.where(is_lost, 1.0, shares[0, ...]), axis=-1)
    weights = None if result.weights is None else xp.multiply(result.weights, share)
    return Result(xp.multiply(result.output, share), weights, *found)


def all_scores(call: Call) -> Array:
    """All scores of a call."""
    if call.arithmetic == "fast" or has_no_pairs(call):
        return guarded_scores(call)
    query, key = fan_out((call.query, call.key), ARITHMETICS[call.arithmetic], call.xp)
    return reproducible_scores(call._replace(query=query, key=key, value=key))


def _check_lengths(call: Call, option: str) -> None:
    """Raise where a library loops over blocks in Python, and lengths are not known."""
    are_known = isinstance(call.query.shape[-2], int) and isinstance(call.key.shape[-2], int)
    if not (are_known or call.backend.loops.traced or is_exporting(call.query)):
        raise ValueError(f"expected known lengths with {option} on this library; got unknown ones")


def check_implementation(implementation: Any, like: Array | None = None) -> None:
    """Raise unless this names an implementation, or a kernel of the library of an array."""
    may_be_kernel = like is not None and isinstance(implementation, str) and implementation not in IMPLEMENTATIONS
    backend = backend_of(like) if may_be_kernel else None
    kernels = [] if backend is None else [kernel.name for kernel in backend.kernels if implementation in kernel.name]
    check_choice("an implementation", implementation, (*IMPLEMENTATIONS, *kernels))


def has_no_elements(call: Call) -> bool:
    """Whether query, key or value is empty."""
    return 0 in (*sizes(call.query), *sizes(call.key), *sizes(call.value))


def dense_advantage(call: Call) -> str | None:
    """Why blocks are slower than the dense form, or less safe; ``None`` where they are faster.

    They are less safe in two places, where they are taken only by name. Lengths unknown while tracing may turn out 0,
    of which XLA makes no blocks. An exported program would need an operator of attention-core.
    """
    query, key, value = map(sizes, call[:3])
    if 0 in (*query, *key, *value):
        return "there is nothing to cut"
    *leading, rows, _ = query
    columns, tuning = key[-2], call.backend.tuning
    if rows is None or columns is None:
        return "lengths are not known before it runs"
    if is_exporting(call.query):
        return "an exported program would need an operator of attention-core"
    num_scores = 0 if None in leading else math.prod(leading) * rows * columns  # type: ignore[arg-type]
    if num_scores > tuning.dense_most:
        return None
    if has_few_queries(rows, columns):
        return "saves nothing for so few queries"
    if num_scores > tuning.costly_most and _is_dense_costly(call, rows, columns):
        return None
    kind: Any = type(call.mask)
    is_structured = issubclass(kind, Mask) and (kind.bounds, kind.blocks) != (Mask.bounds, Mask.blocks)
    most = tuning.structured_below if is_structured else tuning.dense_below
    return "slower for so few scores" if rows * columns <= most else None


def _is_dense_costly(call: Call, rows: int, columns: int) -> bool:
    """Whether the dense form branches on values that are not finite, or repeats keys that are many."""
    if call.mask is not None or call.bias is not None:
        return True
    group = group_size(call.query, call.key, call.xp)
    return 4 * rows <= columns and not (isinstance(group, int) and group == 1) and not folds_groups(call, group)


def _memory(call: Call, scores: float) -> int | None:
    """Three arrays of scores (scores, exponentials, and what is between them) for each thread, and the output."""
    query, columns, width = sizes(call.query), sizes(call.key)[-2], sizes(call.value)[-1]
    if None in (*query, columns, width):
        return None
    *leading, rows, _ = query
    batch = math.prod(leading)  # type: ignore[arg-type]
    is_exact = call.arithmetic == "reproducible"
    num_scores = batch * rows * columns  # type: ignore[operator]
    threads = call.backend.loops.num_at_once(num_scores * (EXACT_WORK if is_exact else 1))
    at_once = min(num_scores, threads * scores)
    size = 8 if dtype_name(call.query.dtype) == "float64" or is_exact else 4
    return size * int(3 * at_once + batch * rows * width)  # type: ignore[operator]
