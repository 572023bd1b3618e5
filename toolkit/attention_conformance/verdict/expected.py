"""Results that are expected, as a file tells: they pass, and it is an error if they are right."""

from __future__ import annotations

import importlib
import itertools
import json
import math
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from fnmatch import fnmatch
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from attention_conformance.measure.finding import QUIET, VERDICTS, WRONG, Finding
from attention_conformance.mistakes.experiments import is_exact
from attention_workers.machine import machine

SHIPPED = Path(__file__).parents[1] / "kernel" / "expected"
"""Files for the presets that have results."""


AGAIN = 2.0
"""How much larger an error without a name may be than it was, and be the same."""

UNKNOWN = "unknown-cause"
"""The variant of a wrong answer that equals no known convention or fault."""


class ExpectedError(ValueError):
    """A file of expected results that cannot be read."""


@dataclass(frozen=True)
class Origin:
    """The device and the library on which a kernel was run."""

    device: str = "cpu"
    backend: str = ""


@dataclass(frozen=True)
class Expected:
    """A result that is expected.

    Attributes
    ----------
    case, dtype, device, backend, implementation : str
        Patterns; by default all. The device is ``cuda:0`` or its kind, and the backend the library of its arrays.
    instructions : str
        A vector instruction that the processor has, such as ``amx_bf16``; empty for any processor.
    versions : mapping of str to str
        Packages, and the versions of them that it is about, such as ``>=2.6,<2.14``.
    verdict : str
        The verdict that is expected; any that is wrong, if empty.
    variant : str
        A convention or fault by name, such as ``narrow-scores``. The entry is then about the answers that equal it, and
        about no case that is right, unless it names its case and its dtype without ``*`` and ``?``. By default any;
        ``unknown-cause`` for none.
    error : float
        In units in the last place; twice as much is accepted, and by default any.
    got : str
        What came where the error is infinite, such as ``nan``, a shape or a dtype; by default anything.
    reason, link : str
    """

    case: str
    dtype: str = "*"
    device: str = "*"
    backend: str = "*"
    implementation: str = "*"
    instructions: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    verdict: str = ""
    variant: str = ""
    error: float = math.nan
    got: str = ""
    reason: str = ""
    link: str = ""

    def matches(self, result: Finding, origin: Origin) -> bool:
        """Whether it is about this result, here."""
        is_named = result.verdict == "right" and (self.case, self.dtype) == (result.case, result.dtype)
        if not (is_named or self.variant in ("", result.variant or UNKNOWN, *result.equals)):
            return False
        if not fnmatch(result.implementation, self.implementation):
            return False
        return fnmatch(result.case, self.case) and fnmatch(result.dtype, self.dtype) and self.is_here(origin)

    def is_here(self, origin: Origin) -> bool:
        """Whether it is about this device, this library, this processor and the versions that are installed."""
        names = origin.device, origin.device.partition(":")[0].lower()  # the second is its kind
        if not (any(fnmatch(each, self.device) for each in names) and fnmatch(origin.backend, self.backend)):
            return False
        if self.instructions not in ("", *machine()["instructions"]):
            return False
        return all(_has(name, versions) for name, versions in self.versions.items())


def _specifiers() -> Any:
    """What reads versions, which most files do not name."""
    return importlib.import_module("packaging.specifiers")


def _has(name: str, versions: str) -> bool:
    try:
        return bool(_specifiers().SpecifierSet(versions).contains(version(name), prereleases=True))
    except PackageNotFoundError:
        return False


def expected_of(target: str, named: str | None) -> tuple[Expected, ...]:
    """The entries of a file, or of the file that is ``shipped`` for a preset; none where nothing is named."""
    if not named:
        return ()
    path = SHIPPED / f"{target}.toml" if named == "shipped" else Path(named)
    if named == "shipped" and not path.is_file():
        raise ExpectedError(
            f"expected a target whose known failures are shipped; got {target}: --expected takes a file"
        )
    return read_expected(path)


def read_expected(path: Path) -> tuple[Expected, ...]:
    """Read a file of expected results; ExpectedError says what is wrong with it.

    Parameters
    ----------
    path : Path
        TOML, with a table ``[[expected]]`` for each `Expected`, or for a list of cases with one reason.

    Returns
    -------
    tuple of Expected
    """
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ExpectedError(f"expected a file of TOML; got {str(path)!r}: {error}") from error
    rows = document.get("expected", [])
    if set(document) - {"expected"} or not isinstance(rows, list):
        raise ExpectedError(f"expected tables [[expected]] alone in {path}; got {', '.join(document)}")
    return tuple(_entry(each, path) for row in rows for each in _apart(row))


PATTERNS = ("case", "dtype", "backend", "implementation")


def _apart(row: dict[str, Any]) -> list[dict[str, Any]]:
    """A row for each of several cases, dtypes, backends and implementations."""
    several = [name for name in PATTERNS if isinstance(row.get(name), list) and row[name]]
    return [row | dict(zip(several, each, strict=True)) for each in itertools.product(*(row[name] for name in several))]


KINDS: dict[str, Any] = {"error": int | float, "versions": dict}
"""The fields that are no text."""


def _entry(row: dict[str, Any], path: Path) -> Expected:
    known = Expected.__dataclass_fields__
    for name, value in row.items():
        if name not in known or not isinstance(value, KINDS.get(name, str)):
            kinds = f"{', '.join(known)}, error as a number, versions as a table and others as text"
            raise ExpectedError(f"expected keys out of {kinds} in {path}; got {name} = {value!r}")
    if not row.get("case") or not row.get("reason") or row.get("verdict", "") not in ("", *VERDICTS):
        wanted = f"a case, a reason, and no verdict but {', '.join(VERDICTS)} in each table of {path}"
        raise ExpectedError(f"expected {wanted}; got {row}")
    try:
        for versions in row.get("versions", {}).values():
            _specifiers().SpecifierSet(versions)
    except (AttributeError, ValueError) as error:  # InvalidSpecifier is one
        raise ExpectedError(f"expected versions as in torch = '>=2.6' in {path}; got {row['versions']!r}") from error
    return Expected(**row)


def met(result: Finding, entries: Iterable[Expected], origin: Origin) -> Finding:
    """A result as accepted if it is expected; as unexpectedly right if an entry names it, and it is right."""
    for entry in entries:
        if not entry.matches(result, origin):
            continue
        reason = " ".join(filter(None, (entry.reason, entry.link)))
        if result.verdict == "right":
            detail = f"expected {entry.verdict or 'a wrong answer'} ({entry.reason}); got the right one"
            return replace(result, verdict="unexpectedly right", detail=detail, reason=reason)
        is_worse = result.error > AGAIN * entry.error or entry.got not in ("", _got(result))
        is_reported = result.verdict not in QUIET or result.verdict == "not understood"
        if is_reported and entry.verdict in ("", result.verdict) and not is_worse:
            return replace(result, verdict="accepted", reason=reason)
    return result


def _got(result: Finding) -> str:
    """What came in place of a finite number, or of an array of the right shape and dtype; empty for a finite error."""
    return result.detail.rpartition("; got ")[2] if math.isinf(result.error) else ""


def unmatched(results: Sequence[Finding], entries: Iterable[Expected], origin: Origin) -> list[Finding]:
    """A result for each entry that is about this origin, and names no case of a whole run."""
    here = [each for each in entries if each.is_here(origin)]
    idle = [each for each in here if not any(each.matches(result, origin) for result in results)]
    template = "expected {} in the run; got none"
    return [
        Finding(each.case, each.dtype, 0, "Each entry names a case.", "unexpectedly right",
                detail=template.format(each.variant or "a case of this name and dtype"))
        for each in idle
    ]  # fmt: skip


def expected_text(results: Iterable[Finding], entries: Sequence[Expected], *, origin: Origin, package: str = "") -> str:
    """The file that expects what a run found; entries of a former file that were met stay as they are.

    It is about the device, unless that is the CPU, and about the installed and later versions of the package, if any.
    """
    results = list(results)
    kept = [
        each
        for each in entries
        if not each.is_here(origin) or any(each.matches(result, origin) and result.reason for result in results
                                        if result.verdict == "accepted")
    ]  # fmt: skip
    versions = {package: f">={version(package)}"} if package else {}
    device = "*" if origin.device == "cpu" else origin.device
    for each in results:
        if each.verdict not in (*QUIET, "unexpectedly right"):
            is_known = is_exact(each.variant) or not math.isfinite(each.error)
            how: dict[str, Any] = {
                "variant": each.variant or UNKNOWN * (each.verdict in WRONG),
                "error": math.nan if is_known else float(f"{each.error:.6g}"),
                "got": "" if is_exact(each.variant) else _got(each),
            }
            reason = each.says or each.detail or each.verdict
            kept.append(
                Expected(each.case, each.dtype, device, versions=versions, verdict=each.verdict, reason=reason, **how)
            )
    return "\n".join(map(_table, kept))


def _table(entry: Expected) -> str:
    lines = ["[[expected]]"]
    row = {each.name: getattr(entry, each.name) for each in fields(Expected) if each.name != "versions"}
    lines += [
        f"{name} = {json.dumps(each, ensure_ascii=False)}".replace("\x7f", "\\u007f")
        for name, each in row.items()
        if each not in ("", "*") and each == each
    ]
    if entry.versions:
        versions = ", ".join(f"{json.dumps(name)} = {json.dumps(each)}" for name, each in entry.versions.items())
        lines.append(f"versions = {{ {versions} }}")
    return "\n".join(lines) + "\n"
