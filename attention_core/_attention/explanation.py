"""What is told of a call: which implementation it takes, and why not the others."""

from __future__ import annotations

from typing import NamedTuple

from .._backend import library_name
from .blocks.query_chunks import query_chunks
from .call import Call
from .kernels import OPEN, Kernel, Verdict, Way
from .parts import keys_within_reach, with_cut
from .ways import Dense, is_taken, logsumexp_way, walk


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
            if refusal is not None:
                lines.append(f"  {label}: refused: {refusal}")
            elif slower is not None:
                lines.append(f"  {label}: not taken: {slower}")
        return "\n".join([*lines, *(f"  {note}" for note in self.notes)])


def explain(call: Call, *, weights: bool, logsumexp: bool) -> Explanation:
    """What `run_call` walks, in words."""
    notes = ["assume_finite: no value is looked at, and a masked NaN may leak"] if call.assume_finite else []
    is_exact, call = call.arithmetic == "reproducible", with_cut(call, keys_within_reach(call))
    rows = list(walk(call))
    taken = next(way for way, verdict in rows if is_taken(way, verdict, call))
    if weights and not is_exact:
        notes.append("return_weights: the dense form computes the weights")
    if isinstance(taken, Dense) and taken.cuts is not None:
        notes.append(f"dense: {len(taken.cuts)} samples one by one, each with the keys that its lengths leave")
    if logsumexp and not taken.has_logsumexp(call):
        notes.append(f"return_logsumexp: computed separately, {logsumexp_way(call).kind}")
    if chunks := not is_exact and query_chunks(call):
        notes.append(f"blockwise: {len(chunks)} query chunks instead of blocks, if their result is finite")
    rows.sort(key=lambda row: isinstance(row[0], Dense))  # which is told last
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
    return verdict.slower or f"{taken.kind} comes first"
