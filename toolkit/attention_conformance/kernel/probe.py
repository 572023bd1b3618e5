"""What small calls tell about a kernel: its layout, the sense of its mask, where its causality counts from."""

from __future__ import annotations

import contextlib
import functools
import itertools
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from attention_conformance.call import one_line
from attention_conformance.kernel.signature import KEYWORDS, LIBRARIES, read_signature
from attention_conformance.launch.call import gradients, outputs, place, to_numpy
from attention_conformance.launch.fit import fit, meant
from attention_conformance.launch.libraries import devices_of, holds, in_precision
from attention_conformance.launch.subject import LAYOUTS, NotOffered, Subject
from attention_conformance.oracle.dense import Dense, answer, dense_of
from attention_conformance.problem import DTYPES, NumpyArray, Problem, array, rounded
from attention_core.backend import Backend, get_backend

Facts = dict[str, Any]
WIDTH = 64
"""A width of heads, and with 64 positions a size, that all kernels take."""

MATCH = 0.02
"""The relative distance below which a result is taken to be the one that was expected."""

LIKE = 0.5
"""The relative distance from which on a result is like nothing that was expected."""

UNLIKE = 1e6
"""The distance of a result of another shape."""

BLOCK = 8
"""Rows of a head that show a convention."""

PLAIN: Facts = {
    "mask": "none",
    "causal": "none",
    "layout": "BHSD",
    "default_scale": "sqrt",
    "grouped": False,
    "same_width": True,
    "mask_with_causal": False,
    "full_mask": False,
    "keeps_dtype": True,
    "keeps_library": True,
    "differentiates": False,
    "native": False,
    "order": ("query", "key", "value"),
}


def _problem(
    queries: int = 64,
    keys: int = 64,
    *,
    kv_heads: int = 4,
    value_width: int = WIDTH,
    dtype: str = "float32",
    **more: Any,
) -> Problem:
    random, heads = np.random.default_rng(7), (2, kv_heads, keys)
    shapes = {"query": (2, 4, queries, WIDTH), "key": (*heads, WIDTH), "value": (*heads, value_width)}
    arrays = {name: rounded(random.standard_normal(shape), dtype) for name, shape in shapes.items()}
    return Problem({**arrays, **more.pop("arrays", {})}, **more)


class ProbeLog:
    """The calls that questions make: how an answer came about.

    Attributes
    ----------
    calls, answered : int
        Since the start.
    raised : str
        What the first call raised that did not return.
    """

    def __init__(self, kernel: Subject) -> None:
        self.calls, self.answered, self.raised = 0, 0, ""
        self.nearest: float | None = None
        self._before = 0, 0
        self._function = kernel.function
        self.kernel = replace(kernel, function=self._watched())

    def _watched(self) -> Callable[..., Any]:
        @functools.wraps(self._function, updated=())
        def called(*arguments: Any, **options: Any) -> Any:
            self.calls += 1
            try:
                result = self._function(*arguments, **options)
            except Exception as error:
                self.raised = self.raised or one_line(error)
                raise
            self.answered += 1
            return result

        called.probe_log = self  # type: ignore[attr-defined]
        return called

    def source(self) -> str:
        """How the facts are known that were asked for since this was called last."""
        calls, answered = self.calls - self._before[0], self.answered - self._before[1]
        nearest, self.nearest, self._before = self.nearest, None, (self.calls, self.answered)
        if not calls:
            return "follows from the others"
        if not answered:
            return "every such call raised"
        is_unlike = nearest is not None and nearest > MATCH
        return "no such call gave the right numbers" if is_unlike else "found by a call"


def _distance(kernel: Subject, problem: Problem, block: int = 0, **hypothesis: Any) -> float:
    """How far a call is from the definition, if the kernel is as supposed; infinite where it raises.

    With ``block``, the least distance of so many rows of a head counts: a fault elsewhere hides no convention.
    """
    distance = _measured(kernel, problem, block, **hypothesis)
    log: ProbeLog | None = getattr(kernel.function, "probe_log", None)
    if log is not None:
        log.nearest = distance if log.nearest is None else min(distance, log.nearest)
    return distance


def _measured(
    kernel: Subject, problem: Problem, block: int = 0, truth: Callable[[Dense], Dense] = lambda dense: dense,
    **hypothesis: Any,
) -> float:  # fmt: skip
    supposed = replace(kernel, **hypothesis).learned(PLAIN)
    for kind in _kinds(problem):
        try:
            fitted = fit(kind, supposed)
            got = _output(supposed, fitted)
        except NotOffered:
            return np.inf
        except Exception:  # whatever a kernel raises is a refusal: of float32, perhaps
            continue
        break
    else:
        return np.inf
    want = answer(truth(dense_of(meant(fitted, supposed)))).arrays["output"]
    if got.shape != want.shape:
        return UNLIKE
    parts = (*want.shape[:2], -1, block * want.shape[-1]) if block else (1, -1)
    expected, output = (each.astype(np.float64).reshape(parts) for each in (want, got))
    differences = np.linalg.norm(output - expected, axis=-1) / np.linalg.norm(expected, axis=-1)
    return float(np.where(np.isfinite(differences), differences, 1e5).min())


def _kinds(problem: Problem) -> Iterator[Problem]:
    """A problem in float32, and in the types that some kernels take alone."""
    yield problem
    for dtype in ("float16", "bfloat16", "float64"):
        arrays = {n: each if each.dtype == bool else rounded(each, dtype) for n, each in problem.arrays.items()}
        cotangent = None if problem.cotangent is None else rounded(problem.cotangent, dtype)
        yield replace(problem, arrays=arrays, cotangent=cotangent)


def _called(kernel: Subject, problem: Problem, call: Callable[[Problem, Facts, Backend], Any]) -> Any:
    """What a call gives with the arrays of a problem, where its type is computed in."""
    backend = get_backend(kernel.backend or "numpy")
    with np.errstate(all="ignore"), in_precision(backend, problem.arrays["query"].dtype.name):
        arrays = place(problem, kernel, backend, kernel.device or devices_of(backend)[0])
        return call(problem, arrays, backend)


def _output(kernel: Subject, problem: Problem) -> NumpyArray:
    def call(problem: Problem, arrays: Facts, backend: Backend) -> NumpyArray:
        return to_numpy(outputs(problem, kernel, arrays, backend.namespace), backend)["output"]

    output: NumpyArray = _called(kernel, problem, call)
    return output


def _library(kernel: Subject) -> Facts:
    facts = read_signature(kernel)
    loaded = [name for name in LIBRARIES if name in sys.modules]  # a layer of Keras may hide its library
    names = dict.fromkeys([kernel.backend or facts["backend"], "numpy", *loaded])
    for name in names:
        try:
            get_backend(name)
        except Exception:  # not installed: another
            continue
        with_library = replace(kernel, backend=name).learned(facts)
        works = with_library.native or kernel.backend
        if works or any(_distance(with_library, _problem(), layout=layout) < np.inf for layout in LAYOUTS):
            return {**facts, "backend": name}
    return {**facts, "backend": next(iter(names))}


def _layout(kernel: Subject) -> Facts:
    scales = ["sqrt", "one"] if kernel.default_scale is None else [kernel.default_scale]
    layouts = LAYOUTS if kernel.layout is None else (kernel.layout,)
    tried = {}
    for causal, layout, scale in itertools.product(("none", "always"), layouts, scales):
        facts: Facts = {"layout": layout, "default_scale": scale}
        distance = _distance(kernel, _problem(), **facts, causal=causal)
        if distance < MATCH:
            return facts | ({} if causal == "none" or kernel.causal_name else {"causal": causal})
        if causal == "none":
            tried[layout, scale] = distance
    layout, scale = min(tried, key=lambda each: tried[each])
    again = _distance(kernel, _problem(), layout=layout, default_scale=scale)
    if not (tried[layout, scale] < LIKE and abs(again - tried[layout, scale]) < MATCH):  # like nothing, or by chance
        layout, scale = next((each for each in tried if tried[each] < UNLIKE), (layout, scale))
    return {"layout": layout, "default_scale": "sqrt" if kernel.scale_name is None else scale}


def _words(kernel: Subject) -> Facts:
    """Keywords that a callable does not tell: it refuses those that it does not know, or they change its result."""
    backend = get_backend(kernel.backend or "numpy")
    device, random = kernel.device or devices_of(backend)[0], np.random.default_rng(3)
    mask = (random.random((64, 64)) < 0.5) | np.eye(64, dtype=bool)
    rates = np.ones(4, np.float32)
    values: Facts = {"mask_name": mask, "bias_name": np.where(mask, 0, -np.inf).astype(np.float32), "sinks_name": rates}
    values |= {"alibi_name": rates, "causal_name": True, "grouped_name": True}

    def called(word: str, value: Any) -> Any:
        value = backend.from_numpy(value, device=device) if isinstance(value, np.ndarray) else value
        asked = replace(kernel, options={**(kernel.options or {}), **({word: value} if word else {})})
        for problem in _kinds(_problem()):
            try:
                return _output(asked.learned(PLAIN), problem).tobytes()
            except Exception as error:  # of what it is, or of a type of numbers
                raised = re.sub(r"\W*Did you mean.*", "", one_line(error)).replace(word or "-", "").rstrip("'.")
        return raised

    plain, facts = called("", None), Facts()
    swallows = called("no_such_keyword", True) == plain
    for fact, words in KEYWORDS.items():
        if getattr(kernel, fact) is None and fact != "window_name":
            value = values.get(fact, 0.5)
            unlike = plain if swallows else called("no_such_keyword", value)
            taken = (word for word in words if called(word, value) != unlike)
            facts[fact] = next(taken, None if fact == "bias_name" else "")
    for fact in ("mask", "causal"):  # what is declared is asked for, and then judged
        if getattr(kernel, fact) not in (None, "none", "always") and swallows:
            facts[f"{fact}_name"] = facts.get(f"{fact}_name") or KEYWORDS[f"{fact}_name"][0]
    return facts


def _results(kernel: Subject) -> Facts:
    everything = replace(kernel.learned(PLAIN), returns=("output", "weights", "logsumexp"))
    for problem in _kinds(fit(_problem(64, 128), everything)):
        with contextlib.suppress(Exception):  # refused: the cases will tell
            results = _called(everything, problem, lambda p, x, library: outputs(p, everything, x, library.namespace))
            return {"returns": tuple(results)}
    return {"returns": ("output",)}


def _mask(kernel: Subject) -> Facts:
    if not kernel.mask_name:
        return {"mask": "none", "full_mask": False, "bias_name": kernel.bias_name or ""}
    random = np.random.default_rng(3)
    mask = random.random((2, 1, 64, 64)) < 0.5
    index = np.arange(64)
    mask[..., index, index], mask[..., index, (index + 1) % 64] = True, False
    of_keys = index < np.array([40, 64]).reshape(2, 1, 1, 1)  # all that some take
    facts: Facts = {}
    for problem in (_problem(arrays={"mask": each}, mask=array("mask")) for each in (mask, of_keys)):
        if facts.get("mask", "none") == "none":
            facts = _sense(kernel, problem)
    return facts


def _sense(kernel: Subject, problem: Problem) -> Facts:
    """What a mask is to the kernel, by the calls of a problem."""
    senses = ("keep", "drop", "integer", "additive") if kernel.mask is None else (kernel.mask,)
    shapes = (False, True) if kernel.full_mask is None else (kernel.full_mask,)
    tried = {
        (sense, full): _distance(kernel, problem, BLOCK, mask=sense, full_mask=full, bias_name=kernel.bias_name or "")
        for full in shapes
        for sense in senses
    }
    fitting = [each for each in tried if tried[each] < MATCH]
    sense, full = fitting[0] if fitting else min(tried, key=lambda each: tried[each])
    if tried[sense, full] == np.inf:
        return {"mask": "none", "full_mask": False, "bias_name": kernel.bias_name or ""}
    if sense == "additive" and tried.get(("keep", full), np.inf) < np.inf:
        added = _measured(kernel, problem, BLOCK, _booleans_added, mask="keep", full_mask=full, bias_name="")
        sense = "additive" if fitting and added < MATCH else "keep"  # other numbers: the contract's sense
    elif not fitting and tried.get(("keep", full), np.inf) < np.inf:
        sense = "keep"  # by which it will be judged
    shares = not kernel.bias_name and tried.get(("additive", full), np.inf) < MATCH
    return {"mask": sense, "full_mask": full, "bias_name": kernel.mask_name if shares else kernel.bias_name or ""}


def _booleans_added(dense: Dense) -> Dense:
    """What an attention computes that adds any mask to its scores."""
    return dense.changed(mask=None, bias=None if dense.mask is None else dense.mask.astype(np.float64))


def _causal(kernel: Subject) -> Facts:
    if not kernel.causal_name and kernel.causal in (None, "none"):
        return {"causal": "none"}
    if not kernel.causal_name:
        return {}
    for sizes, corner in itertools.product(((64, 128), (128, 124)), ("top-left", "bottom-right")):
        if _distance(kernel, _problem(*sizes, options={"is_causal": True}), BLOCK, causal=corner) < MATCH:
            return {"causal": corner}  # a fault of calls with more keys than queries hides no convention
    return {"causal": "top-left"}


def _both(kernel: Subject) -> Facts:
    if kernel.causal == "none" or not (kernel.mask_name or kernel.bias_name):
        return {"mask_with_causal": False}
    mask = np.ones((2, 1, 64, 64), dtype=bool)
    mask[..., 2] = False
    mask[..., 0] = True
    problem = _problem(arrays={"mask": mask}, mask=array("mask"), options={"is_causal": True})
    return {"mask_with_causal": _distance(kernel, problem, mask_with_causal=True) < np.inf}


def _grouped(kernel: Subject) -> Facts:
    return {"grouped": _distance(kernel, _problem(kv_heads=2), grouped=True) < np.inf}


def _widths(kernel: Subject) -> Facts:
    return {"same_width": not _distance(kernel, _problem(value_width=32), same_width=False) < np.inf}


def _dtypes(kernel: Subject) -> Facts:
    backend = get_backend(kernel.backend or "numpy")
    device = kernel.device or devices_of(backend)[0]
    taken, kept, foreign = [], True, []

    def noted(*arguments: Any, **options: Any) -> Any:
        result = kernel.function(*arguments, **options)
        foreign.append(backend.name != "numpy" and isinstance(result, np.ndarray))
        return result

    noting = replace(kernel.learned(PLAIN), function=noted)
    spared = ("float64", "bfloat16") if backend.name == "numpy" else ("float64",)  # NumPy itself widens bfloat16
    for dtype in kernel.dtypes or DTYPES:
        if not holds(backend, device, dtype):
            continue
        problem = fit(_problem(dtype=dtype), noting)
        with contextlib.suppress(Exception):  # refused
            output = _output(noting, problem)
            taken.append(dtype)
            kept = kept and (dtype in spared or output.dtype == problem.arrays["query"].dtype)
    return {"dtypes": tuple(taken) or ("float32",), "keeps_dtype": kept, "keeps_library": not any(foreign)}


def _gradients(kernel: Subject) -> Facts:
    has_pair, is_tried = kernel.backward is not None, get_backend(kernel.backend or "numpy").differentiates
    problem = _problem(cotangent=np.ones((2, 4, 64, WIDTH), np.float32))
    for kind in _kinds(problem) if is_tried and not has_pair else ():
        with contextlib.suppress(Exception):  # no gradient
            _called(kernel, kind, lambda p, x, library: gradients(p, kernel, x, ("query",), library))
            return {"differentiates": True}
    return {"differentiates": has_pair}


PROBES: dict[str, tuple[Callable[[Subject], Facts], tuple[str, ...]]] = {
    "signature": (_library, ("backend", "native", "order")),
    "layout": (_layout, ("layout", "default_scale")),
    "keywords": (_words, tuple(each for each in KEYWORDS if each not in ("bias_name", "window_name"))),
    "results": (_results, ("returns",)),
    "mask": (_mask, ("mask", "full_mask", "bias_name")),
    "causality": (_causal, ("causal",)),
    "mask and causality": (_both, ("mask_with_causal",)),
    "grouped heads": (_grouped, ("grouped",)),
    "widths": (_widths, ("same_width",)),
    "dtypes": (_dtypes, ("dtypes", "keeps_dtype", "keeps_library")),
    "gradients": (_gradients, ("differentiates",)),
}
"""Questions in their order, and the facts that answer them."""

OTHERWISE: Facts = {"backend": "numpy", "dtypes": ("float32",), "returns": ()}

AFTER_A_CRASH: dict[str, Facts] = {
    name: {fact: PLAIN.get(fact, OTHERWISE.get(fact, "")) for fact in facts} for name, (_, facts) in PROBES.items()
}
"""What is supposed where a question ended the process."""


def probed(kernel: Subject, known: Mapping[str, Facts] | None = None) -> Iterator[tuple[str, Facts | None]]:
    """Ask every question that the declarations leave open: before it with None, and then with the answer.

    Answers of a former process, by question, are taken as they are.
    """
    for name, (question, facts) in PROBES.items():
        if known and name in known:
            answers = known[name]
        elif _needs_no_answer(kernel, name, facts):
            answers = {}
        else:
            yield name, None
            answers = question(kernel)
        kernel = kernel.learned(answers)
        yield name, answers


def _needs_no_answer(kernel: Subject, question: str, facts: tuple[str, ...]) -> bool:
    if kernel.native:
        return question not in ("signature", "dtypes", "gradients")
    return question != "signature" and all(getattr(kernel, fact) is not None for fact in facts)


def settled(kernel: Subject, answers: Iterable[Facts] = ()) -> Subject:
    """A kernel with all questions answered, in this process unless answers are at hand."""
    for facts in answers or (facts for _, facts in probed(kernel) if facts is not None):
        kernel = kernel.learned(facts)
    kernel = replace(kernel, layout=None) if kernel.native else kernel
    return kernel.learned({} if kernel.native else PLAIN)
