"""The ways to compute attention, in the order in which they are asked, and which of them a call takes.

`run_call` takes the first way whose verdict is open and that nothing makes slower; `explain` tells what it walks. All
calls go through the `run` of a way, those that the memo answers, too.
A verdict of the ways written here reads no query, key or value.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from .._arithmetic import ARITHMETICS, fan_out
from .._arrays import Array, sizes, upcast
from .._backend import backend_of, is_exporting, library_name
from .._checks import check_choice
from ..masks import Mask
from ..masks._mask import bounds_of
from .blocks.forward import blockwise, forward_grid, query_chunks
from .blocks.grid import Grid, lasting_grid, make_grid
from .blocks.plan import make_plan
from .call import Call, Result, group_size, has_no_pairs, is_listed
from .dense import guarded_dense, guarded_scores
from .facts import folds_groups, lasting_facts
from .kernels import OPEN, Kernel, Verdict, Way
from .parts import KeyCut, cuts_that_save, has_few_queries, keys_within_reach, sample_calls, with_cut
from .reproducible.forward import arrange, reproducible_attention
from .reproducible.matrices import reproducible_scores, reproducible_weights
from .softmax import merge_logsumexps, with_remainder

IMPLEMENTATIONS = ("auto", "dense", "blockwise", "fused")


class Dense(Way):
    """The definition, with all scores at once."""

    kind, reason = "dense", "there are so few scores that cutting them into blocks would take longer"
    run = staticmethod(guarded_dense)

    def judge(self, call: Call) -> Verdict:
        return OPEN if dense_advantage(call) is not None else Verdict(None, "holds all scores at once")

    def lasting(self, call: Call) -> Callable[..., Result] | None:
        facts = lasting_facts(call)
        is_known = facts is not None or bounds_of(call.mask).is_relative
        return functools.partial(self.run, facts=facts) if is_known else None


class Samples(Way):
    """The definition sample by sample, with the keys that lengths leave of each."""

    kind, reason = Dense.kind, Dense.reason

    def __init__(self, cuts: list[KeyCut]) -> None:
        self.cuts = cuts

    def run(self, call: Call, *, logsumexp: bool, weights: bool = False) -> Result:
        calls, xp, leading = sample_calls(call, self.cuts), call.xp, call.query.shape[:-3]
        facts = None if any(cut.mask is not None for cut in self.cuts) else lasting_facts(calls[0])
        results = [DENSE.run(each, facts, logsumexp=logsumexp) for each in calls]

        def join(parts: list[Array]) -> Array:
            return xp.reshape(xp.stack(parts), (*leading, *parts[0].shape))

        found = [join(list(rows)) for rows in zip(*(each[2:] for each in results), strict=True)] if logsumexp else []
        return Result(join([each.output for each in results]), None, *found)

    def lasting(self, call: Call) -> Callable[..., Result] | None:
        return self.run


class Blocks(Way):
    """Blocks of queries and keys."""

    kind, reason = "blockwise", "there are so many scores that they are better never held at once"

    def judge(self, call: Call) -> Verdict:
        return Verdict(None, dense_advantage(call))

    def run(self, call: Call, *, logsumexp: bool, weights: bool = False, grid: Grid | None = None) -> Result:
        if grid is None:
            _check_lengths(call, "implementation='blockwise'")
        output, *found = blockwise(call, grid)
        return Result(output, None, *found)

    def lasting(self, call: Call) -> Callable[..., Result] | None:
        grid = None if has_no_elements(call) else lasting_grid(call, make_plan, forward_grid)
        return None if grid is None else functools.partial(self.run, grid=grid)


class Reproducible(Way):
    """Reproducible arithmetic, in whose bits blocks do not show."""

    kind, reason = "blockwise", "in reproducible arithmetic, there are blocks alone, and their size does not show"

    def run(self, call: Call, *, logsumexp: bool, weights: bool = False, grid: Grid | None = None) -> Result:
        if grid is None:
            if has_no_pairs(call):
                return DENSE.run(call, weights=weights)
            _check_lengths(call, "arithmetic='reproducible'")
        arithmetic = ARITHMETICS["reproducible" if call.backend.differentiates else "fast"]  # for copies alone
        query, key, value = fan_out((call.query, call.key, call.value), arithmetic, call.xp)
        call = of_weights = call._replace(query=query, key=key, value=value)
        if weights:  # two uses, whose gradients a compiler would add before it rounds them to 16 bits
            arrays = {name: getattr(call, name) for name in ("query", "key", "bias") if getattr(call, name) is not None}
            pairs = {name: arithmetic.copies(array, 2, xp=call.xp) for name, array in arrays.items()}
            call, of_weights = (call._replace(**{name: pair[use] for name, pair in pairs.items()}) for use in (0, 1))
        output, found, reference = reproducible_attention(call, grid=grid)
        return Result(output, reproducible_weights(of_weights, reference) if weights else None, found)

    def lasting(self, call: Call) -> Callable[..., Result] | None:
        grid = None if has_no_pairs(call) else lasting_grid(call, arrange, make_grid)
        return None if grid is None else functools.partial(self.run, grid=grid)


DENSE, BLOCKS, REPRODUCIBLE = Dense(), Blocks(), Reproducible()


def walk(call: Call) -> Iterator[tuple[Way, Verdict]]:
    """All ways with their verdicts, in the order in which they are asked."""
    for kernel in call.backend.kernels:
        yield kernel, _judged(kernel, call)
    if call.arithmetic == "reproducible":
        yield REPRODUCIBLE, OPEN
        return
    cuts: Any = cuts_that_save(call)
    takes_samples = cuts is not None and all(map(dense_advantage, sample_calls(call, cuts)))
    for way in (Samples(cuts) if takes_samples else DENSE, BLOCKS):
        yield way, way.judge(call)


def _judged(kernel: Kernel, call: Call) -> Verdict:
    """The verdict of a kernel, which is asked about fast arithmetic and neighbouring positions alone."""
    if call.arithmetic == "reproducible":
        return Verdict("adds up in an order of its own")
    if any(map(is_listed, call.starts)):
        return Verdict("counts neighbouring positions")
    verdict = kernel.judge(call)
    return Verdict(verdict.refusal, "query, key or value is empty") if has_no_elements(call) else verdict


def taken_way(call: Call) -> Way:
    """The way that ``"auto"`` takes."""
    return next(way for way, verdict in walk(call) if is_taken(way, verdict, call))


def is_taken(way: Way, verdict: Verdict, call: Call) -> bool:
    """Whether a call takes this way, if it comes first. The output depends on the logsumexp where there are sinks."""
    return verdict == OPEN and (call.sinks is None or way.has_logsumexp(call))


def logsumexp_way(call: Call) -> Way:
    """The way that computes a logsumexp, which few kernels return, or which does not come with the output."""
    return DENSE if DENSE.judge(call) == OPEN else BLOCKS


def run_call(whole: Call, implementation: str, *, weights: bool = False, logsumexp: bool = False) -> Result:
    """Run a call by the first of its ways, or the one of a name, with the keys within reach of its mask.

    What is returned besides the output does not decide how that is computed. If a way cannot give it, it is computed
    by another, or refused if the way was asked for by name.
    """
    inside, call = logsumexp or whole.sinks is not None, with_cut(whole, keys_within_reach(whole))
    if implementation == "auto":
        way = taken_way(call)
    else:
        way = _named(call, implementation, weights=weights, logsumexp=inside)
    if way is not REPRODUCIBLE and has_no_elements(call):  # by whose sizes kernels divide, and of which are no blocks
        way = DENSE
    result = way.run(call, logsumexp=inside, weights=weights and call.key is whole.key)
    if inside and result.logsumexp is None:
        found = logsumexp_way(call).run(call, logsumexp=True)
        result = result._replace(logsumexp=found.logsumexp, remainder=found.remainder)
    if weights and result.weights is None:
        result = result._replace(weights=DENSE.run(whole, weights=True, logsumexp=False).weights)
    return result if call.sinks is None else with_sinks(result, call)


def _named(call: Call, name: str, *, weights: bool, logsumexp: bool) -> Way:
    """The way of a name, or an error that says why there is none."""
    if weights and name != "dense":
        raise ValueError(
            f"expected no return_weights with implementation={name!r}, as weights have the size that it avoids;"
            " got True: implementation='dense' returns them"
        )
    if call.arithmetic == "reproducible":
        return REPRODUCIBLE
    if name in ("dense", "blockwise"):
        return DENSE if name == "dense" else BLOCKS
    if name == "fused" and logsumexp:
        raise _no_logsumexp(name, "few kernels return it")
    kernels: list[Kernel] = [kernel for kernel in call.backend.kernels if name in ("fused", kernel.name)]
    refusals: list[str] = []
    for kernel in kernels:
        refusal = kernel.judge(call).refusal
        if refusal is None:
            if logsumexp and not kernel.has_logsumexp(call):
                raise _no_logsumexp(name, "this kernel does not return it")
            return kernel
        refusals.append(refusal if name != "fused" else f"{kernel.name} {refusal}")
    if name != "fused":
        raise ValueError(f"expected a call that {name} answers as defined; got one that it does not: it {refusals[0]}")
    reasons = "; ".join(refusals) or f"{library_name(call.xp)} has none that is known here"
    raise ValueError(f"expected a call that a fused kernel answers as defined; got one that none does: {reasons}")


def _no_logsumexp(implementation: str, reason: str) -> ValueError:
    return ValueError(
        f"expected no return_logsumexp and no sinks with implementation={implementation!r}, as {reason};"
        " got True: implementation='blockwise' returns it"
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
    return 0 in [dim for x in call[:3] for dim in x.shape if isinstance(dim, int)]


def dense_advantage(call: Call) -> str | None:
    """Why blocks are slower than the dense form, or less safe; ``None`` where they are faster.

    They are less safe in two places, where they are taken only by name. Lengths unknown while tracing may turn out 0,
    of which XLA makes no blocks. An exported program would need an operator of attention-core.
    """
    if has_no_elements(call):
        return "there is nothing to cut"
    *leading, rows, _ = sizes(call.query)
    columns, tuning = sizes(call.key)[-2], call.backend.tuning
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


class Candidate(NamedTuple):
    """One way to run a call.

    Attributes
    ----------
    name : str
        ``"dense"``, ``"blockwise"`` or ``"fused"``; with shards that of a strategy.
    kernel : str or None
        The fused kernel, by the name its library has for it; ``implementation=`` takes this name, too.
    refusal : str or None
        Why this way is not open to the call, or ``None`` where it is.
    slower : str or None
        Why it is not taken although it is open, or ``None`` where it is taken or refused.
    """

    name: str
    kernel: str | None
    refusal: str | None
    slower: str | None = None


class Explanation(NamedTuple):
    """Which implementation a call takes, and why.

    Attributes
    ----------
    chosen : str
    reason : str
    candidates : tuple of Candidate
    notes : tuple of str
        What is computed besides, and other ways that are decided when a program runs.
    """

    chosen: str
    reason: str
    candidates: tuple[Candidate, ...]
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = [f"{self.chosen}: {self.reason}"]
        for name, kernel, refusal, slower in self.candidates:
            label = name if kernel is None else f"{name} ({kernel})"
            if refusal is None and slower is None:  # it is taken
                lines[0] = f"{label}: {self.reason}"
            else:
                lines.append(f"  {label}: {f'not taken: {slower}' if refusal is None else f'refused: {refusal}'}")
        return "\n".join([*lines, *(f"  {note}" for note in self.notes)])


def explain(call: Call, *, weights: bool, logsumexp: bool) -> Explanation:
    """What `run_call` walks, in words."""
    notes = ["assume_finite: no value is looked at, and a masked NaN may leak"] if call.assume_finite else []
    is_exact, call = call.arithmetic == "reproducible", with_cut(call, keys_within_reach(call))
    rows = list(walk(call))
    taken = next(way for way, verdict in rows if is_taken(way, verdict, call))
    if weights and not is_exact:
        notes.append("return_weights: the dense form computes the weights")
    if isinstance(taken, Samples):
        notes.append(f"dense: {len(taken.cuts)} samples one by one, each with the keys that its lengths leave")
    if logsumexp and not taken.has_logsumexp(call):
        notes.append(f"return_logsumexp: computed separately, {logsumexp_way(call).kind}")
    if chunks := not is_exact and query_chunks(call):
        notes.append(f"blockwise: {len(chunks)} query chunks instead of blocks, if their result is finite")
    rows.sort(key=lambda row: row[0].kind == DENSE.kind)  # which is told last
    candidates = [
        Candidate(
            way.kind,
            way.name if isinstance(way, Kernel) else None,
            verdict.refusal,
            None if verdict.refusal is not None else _slower(way, verdict, taken, call),
        )
        for way, verdict in rows
    ]
    if not call.backend.kernels:
        refusal = f"{library_name(call.xp)} has no fused kernel that is known here"
        candidates.insert(0, Candidate("fused", None, refusal))
    return Explanation(taken.kind, taken.reason, tuple(candidates), tuple(notes))


def _slower(way: Way, verdict: Verdict, taken: Way, call: Call) -> str | None:
    """Why a way is not taken, or ``None`` where it is."""
    if way is taken:
        return None
    if verdict == OPEN and not is_taken(way, verdict, call):
        return "returns no logsumexp here, which sinks need"
    return verdict.slower or f"{getattr(taken, 'name', taken.kind)} comes first"
