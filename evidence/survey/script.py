"""A wrong call as a script that needs NumPy and the library concerned: no line of the kit runs in it."""

from __future__ import annotations

import base64
import functools
import importlib
import inspect
import io
import math
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
from ml_dtypes import finfo

from attention_conformance.kernel.presets import PRESETS, Preset
from attention_conformance.launch.call import by_place, keywords
from attention_conformance.launch.subject import Subject
from attention_conformance.problem import NumpyArray, Problem

SHARED = (Preset.__module__, "survey.attentions")
"""Modules whose functions presets of other modules call."""

TURNS = {"torch": "each.permute({})", "tensorflow": "tensorflow.transpose(each, ({}))"}
"""How axes are turned, where arrays have no `transpose`."""


def laid(array: NumpyArray, kind: str) -> NumpyArray:
    """The same numbers with other strides; NaN lies between them."""
    rows, width = array.shape[-2:]
    if kind == "permuted":
        return array.swapaxes(1, 2).copy().swapaxes(1, 2)
    if kind == "transposed":
        return array.swapaxes(-1, -2).copy().swapaxes(-1, -2)
    if kind == "every-second":
        view = np.full((*array.shape[:-1], 2 * width), np.nan, array.dtype)[..., ::2]
    elif kind == "part":
        view = np.full((*array.shape[:-2], 2 * rows + 3, width), np.nan, array.dtype)[..., :rows, :]
    elif kind == "offset":
        view = np.full(array.size + 1, np.nan, array.dtype)[1:].reshape(array.shape)
    else:
        return array.copy()
    view[...] = array
    return view


def truth(
    arrays: dict[str, NumpyArray], *, scale: float, softcap: float | None, offset: int | None
) -> dict[str, tuple[NumpyArray, NumpyArray]]:
    """The output, or the gradients, query by query over the keys that it may attend to, and the scale of errors.

    An offset says that attention is causal.
    """
    exact = {name: each if each.dtype == bool else each.astype(np.float64) for name, each in arrays.items()}
    query, key, value = (exact[name] for name in ("query", "key", "value"))
    sinks, d_output = exact.get("sinks"), exact.get("d_output")
    full = (*query.shape[:3], key.shape[2])
    allowed = np.broadcast_to(exact.get("mask", True), full).copy()
    if offset is not None:
        allowed &= np.arange(full[3]) <= np.arange(full[2])[:, None] + offset
    bias = np.broadcast_to(exact.get("bias", 0.0), full)
    output = np.zeros((*full[:3], value.shape[-1]))
    found = {"output": output, **{name: np.zeros(exact[name].shape) for name in ("query", "key", "value")}}
    sizes = {name: np.zeros(each.shape) for name, each in found.items()}
    for at in np.ndindex(full[:3]):
        shared = (at[0], at[1] * key.shape[1] // full[1])
        seen = allowed[at] & (bias[at] > -np.inf)
        keys, values = key[shared][seen], value[shared][seen]
        raw = scale * (keys @ query[at])
        bent = raw if softcap is None else softcap * np.tanh(raw / softcap)
        scores = bent + bias[at][seen]
        if not len(scores):
            continue
        sink = -np.inf if sinks is None else sinks[at[1]]
        top = max(scores.max(), sink)
        weights = np.exp(scores - top)
        weights /= weights.sum() + np.exp(sink - top)
        output[at], sizes["output"][at] = weights @ values, weights @ abs(values)
        if d_output is None:
            continue
        for into, sign, change, columns in (
            (found, -1, d_output[at], values),
            (sizes, 1, abs(d_output[at]), abs(values)),
        ):
            d_weights = columns @ change
            d_scores = scale * weights * (d_weights + sign * (weights @ d_weights))
            if softcap is not None:
                d_scores = d_scores * (1 - np.tanh(raw / softcap) ** 2)
            one, others = (query[at], keys) if sign < 0 else (abs(query[at]), abs(keys))
            into["query"][at] = d_scores @ others
            into["key"][shared][seen] += np.outer(d_scores, one)
            into["value"][shared][seen] += np.outer(weights, change)
    names = ["output"] if d_output is None else ["query", "key", "value"]
    return {name: (found[name], sizes[name]) for name in names}


def compared(
    results: dict[str, NumpyArray], wanted: dict[str, tuple[NumpyArray, NumpyArray]], *, bits: int, bound: float
) -> int:
    """1 where an error is beyond the bound, in units in the last place of its scale; the worst are printed."""
    worst = 0.0
    for name, result in results.items():
        expected, size = wanted[name]
        if result.shape != expected.shape:
            print(f"{name}: expected the shape {expected.shape}; got {result.shape}")
            return 1
        if not result.size:
            continue
        with np.errstate(all="ignore"):
            unit = 2.0 ** (np.floor(np.log2(np.maximum(size, 1e-30))) - bits)
            error = np.where(result == expected, 0.0, abs(result - expected) / unit)
        error = np.where(np.isnan(expected) & np.isnan(result), 0.0, np.where(np.isnan(error), np.inf, error))
        at = tuple(int(each) for each in np.unravel_index(error.argmax(), error.shape))
        print(f"{name} at {at}: expected {expected[at]:.9g}; got {result[at]:.9g}")
        worst = max(worst, error[at])
    return int(worst > bound)


def script(
    problem: Problem, subject: Subject, target: str, *, dtype: str, bound: float, says: str,
) -> str:  # fmt: skip
    """The script of a fitted problem, which prints the worst elements, and exits with 1 where one is wrong."""
    library, layout, memory = subject.backend or "numpy", subject.layout or "BHSD", dict(problem.memory)
    arrays = dict(problem.arrays)
    if problem.cotangent is not None:
        arrays["d_output"] = problem.cotangent
    if "cotangent" in memory:
        memory["d_output"] = memory.pop("cotangent")
    file, _, name = target.rpartition(":")
    inner = [letter for letter in "BHSD" if letter in layout]
    axes = [inner.index(letter) for letter in layout]
    turns = [TURNS.get(library, "each.transpose({})").format(", ".join(map(str, order))) for order in
             (axes, np.argsort(axes))]  # fmt: skip
    places, words = _words(problem, subject)
    is_elsewhere = library == "torch" and subject.device not in (None, "cpu")
    jinja2 = importlib.import_module("jinja2")  # which few have need of
    template = jinja2.Environment(undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True,
                                  keep_trailing_newline=True)  # fmt: skip
    template.filters["repr"] = repr
    text: str = template.from_string(Path(__file__).with_name("script.py.jinja").read_text()).render(
        says=says, library=library, layout=layout, dtype=dtype, file=file, name=name,
        preset=_preset(target), sources=_sources(laid, truth, compared),
        stored=_stored(arrays), memory={name: kind for name, kind in memory.items() if kind != "contiguous"},
        device=f".to({subject.device!r})" if is_elsewhere else "", order=subject.order or ("query", "key", "value"),
        turn="" if axes == sorted(axes) else turns[0], turn_back=turns[1], places=places, words=words,
        adapter=_adapter(subject), array_names=list(subject.array_names or ()), given=_given(problem, subject),
        is_gradient=problem.cotangent is not None, options=_options(problem, subject),
        bits=finfo(dtype).nmant, bound=f"{bound if math.isfinite(bound) and bound > 0 else 1.0:.6g}",
    )  # fmt: skip
    return text


def _sources(*functions: Any) -> list[str]:
    return [inspect.getsource(function).rstrip().replace("  # fmt: skip", "") for function in functions]


def _preset(target: str) -> dict[str, Any] | None:
    """How a preset is called, as the source of the function that makes it; None for a target that is none."""
    module, _, word = target.partition(":")
    preset = getattr(sys.modules.get(module), word, None) if word else PRESETS.get(target)
    if not isinstance(preset, Preset):
        return None
    make = preset.make
    made = make if isinstance(make, functools.partial) else functools.partial(make)
    function: Any = made.func
    needed: dict[str, Any] = {}
    _gather(function, needed)
    arguments = ", ".join([*map(repr, made.args), *(f"{name}={each!r}" for name, each in made.keywords.items())])
    return {"sources": _sources(*reversed(needed.values())), "call": f"{function.__name__}({arguments})"}


def _adapter(subject: Subject) -> dict[str, Any] | None:
    """The source of what stands between the kit and the callable, and how it is called; None where nothing does."""
    adapter, names = getattr(subject.function, "adapter", (None, ()))
    call = "" if adapter is None else f"{adapter.__name__}(attention, {', '.join(map(repr, names))})"
    return {"source": _sources(adapter)[0], "call": call} if adapter else None


def _gather(function: Any, into: dict[str, Any]) -> None:
    """The functions and classes of its module that a function names."""
    if function.__name__ in into:
        return
    into[function.__name__] = function
    module, waiting = sys.modules[function.__module__], [getattr(function, "__code__", None)]
    while waiting:
        code = waiting.pop()
        if code is None:
            continue
        waiting += [each for each in code.co_consts if isinstance(each, types.CodeType)]
        for name in code.co_names:
            each = getattr(module, name, None)
            if getattr(each, "__module__", None) in (function.__module__, *SHARED) and name != "Subject":
                _gather(each, into)


def _stored(arrays: dict[str, NumpyArray]) -> list[str]:
    """Arrays as lines of text: NumPy's files know no bfloat16."""
    wide = {
        name: each if each.dtype in (np.float64, bool) else each.astype(np.float32) for name, each in arrays.items()
    }
    with io.BytesIO() as file:
        np.savez_compressed(file, **wide)  # type: ignore[arg-type]
        text = base64.b85encode(file.getvalue()).decode()
    return [text[at : at + 110] for at in range(0, len(text), 110)]


def _words(problem: Problem, subject: Subject) -> tuple[str, str]:
    """What a call has besides its arrays, by place and by keyword; the mask is made as the subject takes it before."""
    xp = types.SimpleNamespace(logical_not=lambda each: each, astype=lambda each, dtype: each, int32=None)
    words = keywords(problem, subject, {name: _Name(name) for name in problem.arrays}, xp)
    more = "".join(f", {each!r}" for each in by_place(subject, words))
    return more, "".join(f", {name}={each!r}" for name, each in words.items())


class _Name(str):
    __slots__ = ()
    __repr__ = str.__str__


def _given(problem: Problem, subject: Subject) -> str:
    """The other arrays of a call, as the subject takes them."""
    arrays = {name: f'placed(arrays["{name}"])' for name in ("mask", "bias", "sinks") if name in problem.arrays}
    if "mask" in arrays and subject.mask in ("drop", "integer"):
        arrays["mask"] = f"placed({'~' if subject.mask == 'drop' else 'np.int32(1) * '}arrays['mask'])"
    return "".join(f", {name}={each}" for name, each in arrays.items())


def _options(problem: Problem, subject: Subject) -> dict[str, Any]:
    """The options of `truth`."""
    scale, width = problem.options.get("scale"), problem.arrays["query"].shape[-1]
    scale = scale if scale is not None else width**-0.5 if width else 1.0
    rows, columns = problem.sizes[2:]
    offset = columns - rows if subject.causal == "bottom-right" else 0
    is_causal = problem.options.get("is_causal") or subject.causal == "always"
    return {"scale": float(scale), "softcap": problem.options.get("softcap"), "offset": offset if is_causal else None}
