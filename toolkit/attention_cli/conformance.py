"""The command ``conformance``: what to run, and where to write what came of it."""

from __future__ import annotations

import contextlib
import fnmatch
import shlex
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import typer
from rich.table import Table

from attention_cli.backends import chosen_backends
from attention_cli.progress import followed
from attention_cli.terminal import Many, check_file, check_known, console, refusal, refusing
from attention_conformance.cases import CASES
from attention_conformance.cases.case import Case
from attention_conformance.golden import identical as bits
from attention_conformance.hashes import published, published_model
from attention_conformance.launch.libraries import devices_of, quiet_start
from attention_conformance.measure.finding import Finding
from attention_conformance.measure.implementations import IMPLEMENTATIONS
from attention_conformance.measure.messages import Described, Message
from attention_conformance.own.identical import Identical
from attention_conformance.own.model import ModelError
from attention_conformance.own.runner import work
from attention_conformance.problem import DTYPES
from attention_conformance.processes import Order
from attention_conformance.written import report
from attention_conformance.written.summary import summary, write_findings
from attention_core.backend import get_backend
from attention_numpy.trees import devices_of_kind
from attention_workers import carried_out
from attention_workers.machine import available_threads, environment

if TYPE_CHECKING:
    from attention_cli.app import Conformance

_LONGEST = {"jax": 0, "torch": 1, "tensorflow": 2}  # whose compilers take longest


def conformance(options: Conformance, /) -> None:
    """Run the cases, and show what came of them."""
    model, long = options.model, options.long
    for option in ("dtype", "implementation") if options.identical else ():
        if getattr(options, option):
            raise refusal(f"expected no --{option} with --identical; got one")
    if model and not options.identical:
        raise refusal("expected --identical with --model, whose numbers attention-core compare compares; got none")
    if long and not (model and model.is_file()):
        raise refusal("expected --model with a language model for --long; got none")
    catalogue: Sequence[Case | Identical] = CASES
    if options.identical:
        with refusing(ModelError):
            catalogue = bits.catalogue(model, long=long)
    cases = _chosen_cases(options.case, catalogue)
    if options.list_:
        _list(cases)
        return
    check_file(options.json)
    names = chosen_backends(options.backend)
    check_known("dtype", options.dtype, DTYPES)
    check_known("implementation", options.implementation, IMPLEMENTATIONS)
    places = (check_places(names, options.device, options.mode), options.dtype, options.mode, options.implementation)
    chosen = tuple(each.name for each in cases)
    devices, dtypes, modes, implementations = (tuple(each) if each else None for each in places)
    order = Order("", chosen, devices, dtypes, modes, implementations, model, options.quick, long)
    orders = [replace(order, target=name) for name in names]
    (_identical if options.identical else _near)(options, orders)


def _near(options: Conformance, orders: list[Order]) -> None:
    """Compare each result with the oracle, and print a line for each line of the contract."""
    results, described = run_all(orders, options.jobs)
    _show(results)
    if options.json:
        write_findings(options.json, results, environment_of(described))
    typer.echo(summary(results))
    holds = {result.passed for result in results}
    raise typer.Exit(False in holds or True not in holds)


def _identical(options: Conformance, orders: list[Order]) -> None:
    """Run the cases of which all ways must give the same bits, and compare these."""
    jobs, quick, mode, chosen = options.jobs, options.quick, options.mode, orders[0].cases
    devices, model = orders[0].devices, options.model
    if jobs and not quick and len(available_threads()) > 1 and (mode is None or "eager" in mode):
        orders += [replace(each, modes=("eager",), threads=1) for each in orders]
    known = published() | published_model(model, long=options.long)
    results, described = run_all(orders, jobs, bits.work)
    left_out = [each for backend in described for each in backend.left_out]
    judged = bits.verdicts(chosen, results, known, left_out=left_out)
    screen = console()
    screen.print(bits.table(judged))
    complaints = [line for each in judged for line in each.complaints]
    for line in complaints:
        screen.print(line, style="red", highlight=False, soft_wrap=True)
    reasons = {name: bits.reasons_left_out(name, left_out) for name in chosen}
    tell_left_out(reasons.values())
    if options.json:
        places: dict[str, Any] = {"backend": run_on(results), "device": devices, "mode": mode}
        places |= {"case": options.case, "model": [model] if model else ()}
        command = command_of(["conformance", "--identical", *["--quick"] * quick], places, jobs)
        about = {**environment_of(described), "command": command, "left out": reasons}
        bits.write_json(options.json, judged, about)
    for line in bits.proved(judged, model, is_quick=quick):
        typer.echo(line)
    differing = sum(bool(each.complaints) for each in judged)
    typer.echo(f"{len(judged) - differing} identical, {differing} not, {len(chosen) - len(judged)} not run")
    raise typer.Exit(bool(complaints) or not judged)


def run_all(
    orders: Sequence[Order], jobs: int, worker: Callable[[Order], Iterator[Message]] = work
) -> tuple[list[Finding], list[Described]]:
    """Carry out the orders, and tell on the standard error stream what fails; results keep the order of these."""
    results, described = list[Finding](), list[Described]()
    longest_first = sorted(orders, key=lambda order: _LONGEST.get(order.target, len(_LONGEST)))
    with (
        contextlib.closing(carried_out(longest_first, jobs, worker)) as messages,
        warnings.catch_warnings(action="ignore"),  # of libraries, about themselves
    ):
        for message in followed(messages, "loading libraries"):
            if isinstance(message, Described):
                described.append(message)
            elif isinstance(message, Finding):
                results.append(message)
                for line in report.failures([message]):
                    console(stderr=True).print(line, style="red", highlight=False, soft_wrap=True)
    places = [order.target for order in orders]
    results.sort(key=lambda each: places.index(each.backend))
    return results, sorted(described, key=lambda each: places.index(each.target))


def environment_of(described: Iterable[Described]) -> dict[str, Any]:
    """The environment of a run, with the versions of all its libraries."""
    return {**environment(), "backends": {each.target: each.versions for each in described}}


def run_on(results: Iterable[Finding]) -> list[str]:
    """The backends that gave results."""
    return list(dict.fromkeys(result.backend for result in results))


def tell_left_out(cases: Iterable[Sequence[str]]) -> None:
    """Tell on the standard error stream which ways of how many cases were left out, and why."""
    counts = Counter(line for lines in cases for line in lines)
    for line, count in counts.items():
        many = f" ({count} cases)" if count > 1 else ""
        console(stderr=True).print(f"left out: {line}{many}", style="dim", highlight=False, soft_wrap=True)


def command_of(words: Sequence[str], options: Mapping[str, Iterable[Any]], jobs: int) -> str:
    """The text of a command with repeatable options."""
    chosen = [f"--{name}={value}" for name, values in options.items() for value in values or ()]
    return shlex.join(["attention-core", *words, *chosen, *([] if jobs else ["--jobs=0"])])


def _show(results: Sequence[Finding]) -> None:
    screen = console()
    screen.print(report.line_table(results, screen.width))
    screen.print(report.LINE_LEGEND, style="dim")
    for line in report.failures(results):
        screen.print(line, style="red", highlight=False, soft_wrap=True)


def _list(cases: Iterable[Case | Identical]) -> None:
    table = Table("case", "line", "shows", "dtypes", header_style="bold")
    for each in cases:
        line, dtypes = (str(each.line or "-"), each.dtypes) if isinstance(each, Case) else ("-", (each.dtype,))
        table.add_row(each.name, line, each.shows, " ".join(dtypes))
    console().print(table)


def _chosen_cases(patterns: Many, cases: Sequence[Case | Identical]) -> list[Case | Identical]:
    for pattern in patterns or ():
        if not fnmatch.filter([case.name for case in cases], pattern):
            raise refusal(f"expected a case of --list; got {pattern!r}, which none matches")
    return [case for case in cases if not patterns or any(fnmatch.fnmatch(case.name, each) for each in patterns)]


def check_places(names: Iterable[str], devices: Many, modes: Many) -> Many:
    """Refuse devices and modes that no backend has; return the devices, with all of a kind such as cuda."""
    if not (devices or modes):  # only the libraries know which there are
        return devices
    with quiet_start():
        loaded = [get_backend(name) for name in names]
    known = dict.fromkeys(each for backend in loaded for each in devices_of(backend))
    devices = [
        name for each in devices or () for name in ([each] if each in known else devices_of_kind(each, known) or [each])
    ]
    check_known("device", devices, known)
    check_known("mode", modes, dict.fromkeys(each for backend in loaded for each in backend.modes))
    return devices
