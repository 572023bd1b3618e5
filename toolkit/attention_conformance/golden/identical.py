"""Whether the bits are the same: every case of `identical_cases` in every way of running, against published hashes.

A way is a device and a mode of a library. Eager calls are computed again with other blocks, and with the samples of a
batch apart and in other places of a larger batch. A process of its own computes them with one thread.

SHA-256 is taken of each result (or gradient) in order. Its dtype and shape come first, as the line ``float32 (2, 3)``
with a newline, and then its elements in C order, little-endian. Every NaN counts as one, such as 0x7fc00000 of float32:
processors make different ones, and libraries convert them differently.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table
from rich.text import Text

from attention_conformance.call import one_line
from attention_conformance.golden.cases import IDENTICAL
from attention_conformance.launch.libraries import devices_of, holds, quiet_start
from attention_conformance.measure.finding import Finding, Started
from attention_conformance.measure.implementations import tuned
from attention_conformance.measure.messages import Described, Message
from attention_conformance.own.identical import Identical
from attention_conformance.own.model import model_cases
from attention_conformance.own.source import Trees
from attention_conformance.problem import NumpyArray
from attention_conformance.processes import Order
from attention_core.backend import Backend, get_backend
from attention_core.layers import named_arrays
from attention_files.writing import write_file
from attention_numpy.trees import map_arrays

Named = tuple[tuple[str, NumpyArray], ...]

APART, AMONG_OTHERS, SMALL_BLOCKS = "batch apart", "among others in a larger batch", "small blocks"
NAN = {2: 0x7FFF, 4: 0x7FC00000, 8: 0x7FF8000000000000}  # by the number of bytes
SMALL_ROWS = 32
"""Up to how many queries reproducible arithmetic takes in one block, however small blocks are to be."""


@dataclass(frozen=True, eq=False)
class Computed(Finding):
    """A `Finding` that holds what was computed, ``arrays`` by name, in order, and in which ``variation``."""

    arrays: Named = ()
    variation: str = ""


@dataclass(frozen=True)
class Verdict:
    """What all ways of running made of a case.

    Attributes
    ----------
    case : str
    sha256 : str
        The hash that was published or given, if some way gave it; else that of the first; empty if none gave any.
    results : tuple of Finding
        One for every way.
    complaints : tuple of str
        A line for everything that is not as it should be.
    compared : str
        The hash that ways were compared with, besides each other; empty where there was none.
    left_out : tuple of str
        Ways that cannot be run, each with its reason.
    """

    case: str
    sha256: str
    results: tuple[Finding, ...]
    complaints: tuple[str, ...]
    compared: str = ""
    left_out: tuple[str, ...] = ()


def digest(arrays: Named) -> str:
    """Hash dtypes, shapes and elements with SHA-256.

    Parameters
    ----------
    arrays : tuple of (str, numpy.ndarray)
        The names do not count.

    Returns
    -------
    str
        64 hex digits.

    Examples
    --------
    >>> digest((("output", np.ones(2, np.float32)),))[:16]
    '8da7e96bc9969fa0'
    """
    sha256 = hashlib.sha256()
    for _, array in arrays:
        sha256.update(f"{array.dtype.name} {array.shape}\n".encode())
        sha256.update(_words(array).tobytes())
    return sha256.hexdigest()


def catalogue(model: Path | None, *, long: bool = False) -> tuple[Identical, ...]:
    """All cases, with those of a model where one is given: a directory with an encoder, or a GGUF file.

    Raise ModelError when a file of the directory is missing, broken, or does not fit the others.
    """
    return IDENTICAL if model is None else (*IDENTICAL, *model_cases(model, long=long))


def work(order: Order) -> Iterator[Message]:
    """Carry out an order in this process: every case on every device in every mode, and eager in every variation.

    A quick order is one eager call of each case, on the first device unless others are named.
    """
    yield from work_on([case for case in catalogue(order.model, long=order.long) if case.name in order.cases], order)


def work_on(cases: Sequence[Identical], order: Order) -> Iterator[Message]:
    """Carry out an order with the cases that are given."""
    with quiet_start():
        backend = get_backend(order.target)
    devices = [each for each in devices_of(backend) if order.devices is None or each in order.devices]
    devices = devices[:1] if order.quick and order.devices is None else devices
    asked = order.modes or (("eager",) if order.quick else None)
    modes = [each for each in backend.modes if asked is None or each in asked]
    if order.modes is not None:  # modes that are asked for are run, although it takes minutes
        cases = [replace(case, modes=None) for case in cases]
    lacking = {(case.name, device): _lacking(case, backend, device) for case in cases for device in devices}
    trials = [
        (case, device, mode, variation)
        for case in cases
        for device in devices
        if not lacking[case.name, device]
        for mode in modes
        if case.modes is None or mode in case.modes
        for variation in (variations(case) if mode == "eager" and not order.quick and order.threads is None else ("",))
    ]
    left_out = [(case, f"{backend.name} on {device}", reason) for (case, device), reason in lacking.items() if reason]
    yield Described({}, {}, backend.versions(), len(trials) * (not order.skip), backend.name, tuple(left_out))
    threads = "" if order.threads is None else f"{order.threads} thread{'s' * (order.threads != 1)}"
    for case, device, mode, variation in trials[order.skip :]:
        yield Started(blank(case, backend, device, mode))
        result = run(case, backend, device, mode, variation=variation)
        yield replace(result, variation=", ".join(filter(None, (threads, variation))))


def _lacking(case: Identical, backend: Backend, device: str) -> str:
    """Why a case cannot be run on a device; empty where it can."""
    absent = [each for each in dict.fromkeys((case.dtype, "float64")) if not holds(backend, device, each)]
    if absent:
        return f"it has no {' and no '.join(absent)}"
    return "it does not differentiate" if case.variables and not backend.differentiates else ""


def variations(case: Identical) -> tuple[str, ...]:
    """In which variations a case is another computation: in small blocks if it has several, in samples of a batch."""
    trees = case.trees()
    apart = [APART, *([AMONG_OTHERS] if case.larger else [])] if len(_entries(case, trees)) > 1 else []
    return ("", *([SMALL_BLOCKS] if _longest(trees) > SMALL_ROWS else []), *apart)


def _longest(trees: Trees) -> int:
    inputs = {name: tree for name, tree in trees.items() if name != "parameters"}
    return max((size for leaf in arrays_of(inputs) for size in leaf.shape), default=0)


def _entries(case: Identical, trees: Trees) -> list[Trees]:
    """The inputs of every sample of a batch; all in one where there are none that can be computed alone."""
    names, count = _batched(case, trees)
    if count < 2:
        return [trees]
    return [trees | {name: _entry(trees[name], index) for name in names} for index in range(count)]


def _batched(case: Identical, trees: Trees) -> tuple[list[str], int]:
    """The inputs that have samples which can be computed alone, and how many samples these are."""
    names = [name for name in case.batched if name in trees]
    counts = {trees[name].shape[0] for name in names}
    if len(counts) != 1 or not set(case.variables) <= set(names):
        return [], 0
    return [*names, *(["cotangents"] if case.variables else [])], counts.pop()


def _among_others(case: Identical, trees: Trees) -> Trees:
    """The samples from last to first, and as many others: queries of one with keys and lengths of the next ones."""
    names, _ = _batched(case, trees)

    def larger(by: int, array: NumpyArray) -> NumpyArray:
        return np.concatenate([array[::-1], np.roll(array, by, axis=0)])

    larger_trees = {name: map_arrays(functools.partial(larger, by), trees[name]) for by, name in enumerate(names)}
    return trees | larger_trees


def _entry(tree: Any, index: int) -> Any:
    """One sample of the batch, which keeps its axis."""
    return map_arrays(lambda array: array[index : index + 1], tree)


def blank(case: Identical, backend: Backend, device: str, mode: str) -> Computed:
    """The result of a case in one way, before it is computed."""
    result = Computed(case.name, case.dtype, 0, case.shows, "right", 0.0, 0.0, measure="identical")
    return replace(result, backend=backend.name, device=device, mode=mode)


def run(
    case: Identical, backend: Backend, device: str, mode: str, *, variation: str = "", trees: Trees | None = None
) -> Computed:
    """Compute a case in one way, perhaps of given inputs; an exception is a failed case."""
    started, result = time.perf_counter(), blank(case, backend, device, mode)
    try:
        with np.errstate(all="ignore"):
            result = replace(result, arrays=computed(case, backend, device, mode, variation=variation, trees=trees))
    except Exception as unexpected:
        result = replace(result, verdict="visibly wrong", detail=one_line(unexpected))
    return replace(result, seconds=time.perf_counter() - started)


def computed(
    case: Identical, backend: Backend, device: str, mode: str, *, variation: str = "", trees: Trees | None = None
) -> Named:
    """The results of a case, or its gradients, as NumPy arrays."""
    trees = case.trees() if trees is None else trees
    if variation == AMONG_OTHERS:
        _, count = _batched(case, trees)
        arrays = computed_of(case, backend, device, mode, trees=_among_others(case, trees))
        return tuple((name, array[:count][::-1]) for name, array in arrays)
    if variation != APART:
        with tuned(backend, exact_scores=1) if variation == SMALL_BLOCKS else contextlib.nullcontext():
            return computed_of(case, backend, device, mode, trees=trees)
    parts = [computed_of(case, backend, device, mode, trees=entry) for entry in _entries(case, trees)]
    return tuple((each[0][0], np.concatenate([array for _, array in each])) for each in zip(*parts, strict=True))


def computed_of(case: Identical, backend: Backend, device: str, mode: str, trees: Trees) -> Named:
    """The same of given inputs."""
    trees = backend.from_numpy(trees, device=device) | (case.held(backend, device) if case.held else {})
    if not case.variables:
        return _named("", backend.to_numpy(backend.compile(case.function, mode=mode)(trees)))
    variables = {name: trees.pop(name) for name in case.variables}
    called = backend.compile(_gradients(case, backend), mode=mode)
    gradients = backend.to_numpy(called(tuple(variables.values()), trees))
    return tuple(
        each for name, tree in zip(case.variables, gradients, strict=True) for each in _named(f"gradient.{name}", tree)
    )


def _gradients(case: Identical, backend: Backend) -> Callable[[tuple[Any, ...], Trees], Any]:
    xp = backend.namespace

    def gradients(variables: tuple[Any, ...], others: Trees) -> Any:
        def loss(*arrays: Any) -> Any:
            results = case.function({**others, **dict(zip(case.variables, arrays, strict=True))})
            results = results if isinstance(results, tuple) else (results,)
            total = None
            for result, cotangent in zip(results, others["cotangents"], strict=True):
                if result is not None:
                    part = xp.astype(xp.sum(xp.multiply(result, cotangent)), xp.float32)
                    total = part if total is None else xp.add(total, part)
            return total

        _, grads = backend.value_and_grad(loss)(*variables)
        return tuple(grads)

    return gradients


def arrays_of(trees: Mapping[str, Any]) -> Iterator[NumpyArray]:
    """The arrays of trees by name, in order."""
    return (array for tree in trees.values() for array in named_arrays(tree).values())


def _named(name: str, tree: Any) -> Named:
    return tuple((each or "result", np.asarray(array)) for each, array in named_arrays(tree, name).items())


def verdicts(
    cases: Sequence[str],
    results: Iterable[Finding],
    published: Mapping[str, str | None],
    *,
    origin: str = "published",
    left_out: Iterable[tuple[str, str, str]] = (),
) -> list[Verdict]:
    """Compare what all ways computed with each other and with known hashes, case by case; `None`: with no hash.

    ``origin`` says how the hashes are known: ``published`` or ``given``.
    """
    lacking = list(left_out)
    by_case: dict[str, list[Finding]] = {case: [] for case in cases}
    for result in results:
        by_case.setdefault(result.case, []).append(result)
    judged = [_verdict(case, tuple(ways), published.get(case, ""), origin) for case, ways in by_case.items() if ways]
    return [replace(each, left_out=reasons_left_out(each.case, lacking)) for each in judged]


def reasons_left_out(case: str, lacking: Iterable[tuple[str, str, str]]) -> tuple[str, ...]:
    """The ways of a case that are left out, each with its reason."""
    reasons = [": ".join(filter(None, (way, reason))) for name, way, reason in lacking if name in (case, "*")]
    return tuple(dict.fromkeys(reasons))


def _verdict(case: str, results: tuple[Finding, ...], published: str | None, origin: str) -> Verdict:
    compared = f"the {origin} hash" if published else ""
    complaints = [f"{case} on {_way(result)}: {result.detail}" for result in results if not result.passed]
    hashes = [(result, digest(result.arrays)) for result in results if isinstance(result, Computed) and result.passed]
    if not hashes:
        return Verdict(case, "", results, tuple(complaints), compared)
    reference, sha256 = next((each for each in hashes if each[1] == published), hashes[0])
    if published is not None and sha256 != published:
        expected = f"SHA-256 {published}, as {origin}" if published else "a published SHA-256"
        complaints.append(f"{case} on {_way(reference)}: expected {expected}; got {sha256}")
    complaints += [
        f"{case} on {_way(result)}: {compare(result.arrays, reference.arrays)} on {_way(reference)}"
        for result, other in hashes
        if other != sha256
    ]
    return Verdict(case, sha256, results, tuple(complaints), compared)


def compare(ours: Named, theirs: Named) -> str:
    """Tell the first difference: where it is, and both numbers as hex floats.

    Examples
    --------
    >>> one, two = (np.asarray([[0.5, number]], np.float32) for number in (1.0, 1.5))
    >>> compare((("output", one),), (("output", two),))
    'output[0, 1] is 0x1.0000000000000p+0, but 0x1.8000000000000p+0'
    """
    for (name, our), (_, their) in zip(ours, theirs, strict=False):
        if (our.dtype.name, our.shape) != (their.dtype.name, their.shape):
            return f"{name} is {our.dtype.name} {our.shape}, but {their.dtype.name} {their.shape}"
        differing = np.argwhere(_words(our) != _words(their))
        if len(differing):
            index = tuple(int(index) for index in differing[0])
            return f"{name}{list(index) if index else ''} is {float(our[index]).hex()}, but {float(their[index]).hex()}"
    return f"there are {len(ours)} arrays, but {len(theirs)}"


def _words(array: NumpyArray) -> NumpyArray:
    """The bits of the elements as little-endian integers, with one NaN for all: processors and libraries differ."""
    words = np.ascontiguousarray(array).reshape(array.shape).view(f"u{array.itemsize}").astype(f"<u{array.itemsize}")
    if array.dtype.kind in "biu" or array.itemsize not in NAN:
        return words
    is_nan = np.isnan(array if array.itemsize > 2 else array.astype(np.float32))
    words[is_nan] = NAN[array.itemsize]  # in place, as np.where returns the byte order of the machine
    return words


def _way(result: Finding) -> str:
    variation = result.variation if isinstance(result, Computed) else ""
    return f"{result.backend} ({', '.join(filter(None, (result.device, result.mode, variation)))})"


def table(judged: Iterable[Verdict]) -> Table:
    """A row for every case: its name, the beginning of its hash, in how many ways it was run, and a tick or a cross."""
    rows = Table(title="Bitwise reproducibility", title_justify="left", header_style="bold")
    rows.add_column("case", no_wrap=True)
    rows.add_column("SHA-256", no_wrap=True)
    rows.add_column("configurations", justify="right")
    rows.add_column("same")
    rows.add_column("compared with")
    for each in judged:
        same = Text("✗", style="bold red") if each.complaints else Text("✓", style="green")
        rows.add_row(each.case, each.sha256[:16], str(len(each.results)), same, each.compared or "each other alone")
    return rows


def proved(judged: Sequence[Verdict], model: Path | None, *, is_quick: bool) -> list[str]:
    """Say of how many cases the bits are the same, in how many ways on which backends, and how to see more."""
    results = [result for each in judged for result in each.results]
    backends = list(dict.fromkeys(result.backend for result in results))
    same = [each for each in judged if not each.complaints]
    known = sum(bool(each.compared) for each in same)
    lines = [
        f"{len(same)} of {len(judged)} cases are bitwise equal, in {len(results)} configurations on {len(backends)}"
        f" backend{'s' * (len(backends) != 1)} ({', '.join(backends)}), {known} of them as published"
    ]
    if model is not None:
        lines += [f"model {model.resolve().name}: SHA-256 {each.sha256}" for each in judged if each.case == "model"]
    all_of_it = ", without --quick all modes and variations" * is_quick
    return [*lines, f"more: --json FILE for each hash, --list for what cases show{all_of_it}"]


def write_json(path: Path, judged: Sequence[Verdict], about: Mapping[str, Any]) -> None:
    """Write the environment, and for every case its hash, the hash of every way, and the complaints."""
    cases = {
        each.case: {
            "sha256": each.sha256,
            "compared with": ["each other", *([each.compared] if each.compared else [])],
            "ways": _hashes(each.results),
            "complaints": each.complaints,
            "left out": each.left_out,
        }
        for each in judged
    }
    write_file(path, (json.dumps({"environment": about, "cases": cases}, indent=1) + "\n").encode())


def _hashes(results: Iterable[Finding]) -> dict[str, str | None]:
    """The hash that every way gave; none where it gave an exception."""
    return {
        _way(result): digest(result.arrays) if isinstance(result, Computed) and result.passed else None
        for result in results
    }
