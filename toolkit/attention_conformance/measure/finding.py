"""What comes of one case on a kernel: a verdict, the measured error, and what the wrong answer equals."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from attention_conformance.measure.where import Worst

VERDICT_TEXTS = {
    "silently wrong": ("bold red", "wrong", "finite numbers that are not the answer"),
    "visibly wrong": ("red", "non-finite or mismatched", "NaN for a number, or a wrong shape or dtype"),
    "crashed": ("bold magenta", "crashed", "the process ended"),
    "timed out": ("bold magenta", "timed out", "no answer in time"),
    "differs by convention": ("yellow", "differs by convention", "another known answer; --accept NAME"),
    "other bits": ("yellow", "not bitwise equal", "with another call, or with --same-bits-as"),
    "unexpectedly right": ("yellow", "unexpectedly right", "named by --expected, and no longer wrong"),
    "never computed": ("yellow", "always unsupported", "a kind of call that raises in every case"),
    "not understood": ("yellow", "unknown parameters", "left at their defaults; --keyword"),
    "refused": ("dim", "raised (unsupported)", "an exception before a result"),
    "not offered": ("dim", "not applicable", "the kernel has no such option"),
    "accepted": ("cyan", "accepted", "named by --accept or --expected"),
    "right": ("green", "right", "within the bound"),
}
"""All verdicts, the worst first: the style and the label of each in reports, and what it means."""

VERDICTS = tuple(VERDICT_TEXTS)

CONVENTION = "differs by convention"

WRONG = ("silently wrong", "visibly wrong")

ENDED = ("crashed", "timed out")
"""Verdicts without an answer."""

EXACT = 4
"""Cases of a vague cause that are worth one whose numbers it predicts; of any other, two are worth one of these."""

VAGUE = ("unlike-", "unscaled-maximum", "unequal-scores", "inexact", "other-weights", "other-sum", "place-of-query")
"""The beginnings of causes that tell which calls are right, or how far weights are off, and not what is computed."""

QUIET = ("right", "not offered", "refused", "not understood", "accepted")
"""Verdicts that call for no action."""


NAMED = (*WRONG, CONVENTION, "other bits", "never computed", "not understood")
"""Verdicts that pass where their cause, or their case, is accepted by name."""


@dataclass(frozen=True)
class Finding:
    """What came of one case in one dtype.

    Attributes
    ----------
    case, dtype : str
    line : int
        The line of the contract that the case shows.
    shows : str
        The sentence of the case.
    verdict : str
        One of `VERDICTS`. *Silently wrong*: finite numbers that are not the answer. *Visibly wrong*: NaN or infinity
        instead of a number, or a wrong shape or dtype. *Refused*: an exception before there was a result.
        *Other bits*: not those of another call or kernel, which owes no more than a bound.
        *Crashed*: no call can follow in the process, or on its device.
    error, bound : float
        In units in the last place of the scale.
    detail : str
        Where the worst error is, or what was raised.
    variant : str
        The name of the convention or fault that the result equals; empty where there is none.
    says : str
        That convention or fault in words; without a name, where all errors are.
    rejected : tuple of str
        The planted faults of the definition that this bound rejects on this problem.
    planted : tuple of str
        The faults that were planted, as they apply to this problem.
    seconds : float
    traceback : str
    seed : int
    shapes : mapping of str to tuple of int
        The arrays of the call. `problem_of` makes them again.
    worst : Worst, optional
        The element with the largest error, where a number is wrong.
    reason : str
        Why it is accepted, by a file of expected results.
    equals : tuple of str
        The names of all conventions and faults that the result equals. ``rejected`` has those that it does not.
    kinds : tuple of str
        What the call asks of the kernel: causality, gradients, and so on.
    backend, device, mode, implementation, measure : str
        In which way it was called, where a kernel is called in several; the implementation is empty where the call
        names none. A `Case` says what its measure is.
    """

    case: str
    dtype: str
    line: int
    shows: str
    verdict: str
    error: float = math.nan
    bound: float = math.nan
    detail: str = ""
    variant: str = ""
    says: str = ""
    rejected: tuple[str, ...] = ()
    planted: tuple[str, ...] = ()
    seconds: float = 0.0
    traceback: str = ""
    seed: int = 0
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    worst: Worst | None = None
    reason: str = ""
    kinds: tuple[str, ...] = ()
    equals: tuple[str, ...] = ()
    backend: str = ""
    device: str = ""
    mode: str = ""
    implementation: str = ""
    measure: str = ""

    @property
    def passed(self) -> bool | None:
        """Whether the case passed; None where it was not run, was refused, or is accepted."""
        return True if self.verdict == "right" else None if self.verdict in QUIET else False

    @property
    def label(self) -> str:
        """What a report calls the verdict."""
        return VERDICT_TEXTS[self.verdict][1]


def accept(result: Finding, accepted: Iterable[str]) -> Finding:
    """A result as accepted where its cause or its case is named."""
    is_named = result.verdict in NAMED and {result.variant, result.case} & {*accepted}
    return replace(result, verdict="accepted") if is_named else result


@dataclass(frozen=True)
class Started:
    """The message before a result: what is being run, as a result of which no more is known."""

    result: Finding


def little(results: Sequence[Finding]) -> str:
    """How little was checked, where parameters are not understood, or most cases were refused or not offered."""
    cases = [each for each in results if each.dtype != "-"]
    computed = sum(each.verdict not in ("refused", "not offered") for each in cases)
    unknown = [each.detail for each in results if each.verdict == "not understood"]
    notes = [f"{computed} of {len(cases)} cases were computed"] if 2 * computed < len(cases) else []
    return "; ".join([*notes, *(f"unknown parameters: {each}" for each in unknown)])


def exit_status(results: Sequence[Finding], strict: bool = False) -> int:
    """Return 3 if a case crashed or timed out, 1 if a result is not quiet or no case is right, else 4 or 0.

    It is 4 if a parameter is not understood. A run is strict if it has status 1, too, where little was checked.
    """
    if {each.verdict for each in results} & {"crashed", "timed out"}:
        return 3
    cases = [each for each in results if not each.case.startswith(("kind: ", "probe: "))]
    is_shown = any(each.verdict in ("right", "accepted") for each in cases)
    is_little = strict and bool(little(results))
    if not is_shown or is_little or any(each.verdict not in QUIET for each in results):
        return 1
    return 4 if any(each.verdict == "not understood" for each in results) else 0


def most_telling(results: Iterable[Finding]) -> Finding | None:
    """The result to look at first: the worst verdict, a cause with a name, the widest type, the smallest arrays."""

    def rank(each: Finding) -> tuple[Any, ...]:
        size = sum(math.prod(shape) for shape in each.shapes.values()) or math.inf
        return VERDICTS.index(each.verdict), not each.variant, each.dtype not in ("float32", "float64"), size

    return min((each for each in results if each.verdict not in QUIET and each.dtype != "-"), key=rank, default=None)


def grouped(results: Iterable[Finding]) -> list[list[Finding]]:
    """Results of one verdict and one cause together: the worst first, then causes with a name.

    What small calls found about all of a kernel comes before its cases. That state or threads matter comes before
    other causes, as these may be guesses at what they do. A cause that fails to predict more than half as many wrong
    numbers as it predicts comes after others. So does what several calls disagree in, and inexact arithmetic, where
    another cause predicts the numbers of an eighth as many calls. Of others, what many cases show comes first, where a
    case counts several times whose numbers the cause predicts.
    """
    results = list(results)
    of_wrong = [each for each in results if each.verdict in WRONG]
    predicted = Counter(name for each in of_wrong for name in each.equals)
    unlike = Counter(name for each in of_wrong for name in each.rejected)
    most = max((count for name, count in predicted.items() if 2 * unlike[name] <= count), default=0)
    groups: dict[tuple[str, str, int], list[Finding]] = {}
    for result in results:
        named = result.variant or result.says or result.case, 0 if result.says else result.line
        cause = (result.detail, 0) if result.verdict in (*ENDED, "refused") else named
        groups.setdefault((result.verdict, *cause), []).append(result)
    return sorted(
        groups.values(),
        key=lambda group: (
            VERDICTS.index(group[0].verdict),
            group[0].variant not in ("state", "threads"),
            not group[0].variant,
            not group[0].says,
            group[0].dtype != "-",
            2 * unlike[group[0].variant] > predicted[group[0].variant],
            group[0].variant.startswith("unlike-") or (group[0].variant == "inexact" and 2 * EXACT * most > len(group)),
            -sum(EXACT if each.equals else 1 if each.variant.startswith(VAGUE) else EXACT // 2 for each in group),
        ),
    )


def since(group: Iterable[Finding], results: Iterable[Finding]) -> str:
    """From how many keys on a cause is seen, where most calls that are right have fewer."""
    least = min((each.shapes["key"][-2] for each in group if each.shapes), default=0)
    right = [each.shapes["key"][-2] < least for each in results if each.verdict == "right" and each.shapes]
    return f"from {least} keys on: {sum(right)} calls of fewer keys are right" if 2 * sum(right) > len(right) else ""


def to_row(result: Finding) -> dict[str, Any]:
    """A result as JSON takes it."""
    row: dict[str, Any] = plain(dataclasses.asdict(result))
    return row


def plain(each: Any) -> Any:
    """Anything as JSON takes it: infinity as text, and NaN as null."""
    if isinstance(each, Mapping):
        return {name: plain(part) for name, part in each.items()}
    if isinstance(each, list | tuple):
        return [plain(part) for part in each]
    if not isinstance(each, float) or math.isfinite(each):
        return each
    return None if math.isnan(each) else str(each)


def counted(results: Iterable[Finding]) -> dict[str, int]:
    """How many results have each verdict, the worst first."""
    counts = dict.fromkeys(VERDICTS, 0)
    for result in results:
        counts[result.verdict] += 1
    return {verdict: count for verdict, count in counts.items() if count}
