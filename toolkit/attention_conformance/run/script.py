"""A wrong call as a script that needs NumPy and the library concerned: no line of the kit runs in it."""

from __future__ import annotations

import base64
import functools
import inspect
import io
import math
import sys
import types
from typing import Any

import numpy as np

from attention_conformance.oracle.ulps import FORMATS
from attention_conformance.problem import NumpyArray, Problem
from attention_conformance.subjects.call import by_place, keywords
from attention_conformance.subjects.presets import PRESETS
from attention_conformance.subjects.subject import Subject

__all__ = ["script"]

PLACES = {
    "torch": "torch.from_numpy(each.copy() if 0 in each.strides else each)",
    "jax": "jax.numpy.asarray(each)",
    "tensorflow": "tensorflow.convert_to_tensor(each)",
    "numpy": "each",
}
TURNS = {
    "torch": "each.permute({})",
    "jax": "each.transpose({})",
    "tensorflow": "tensorflow.transpose(each, ({}))",
    "numpy": "each.transpose({})",
}


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


def definition(
    query: NumpyArray, key: NumpyArray, value: NumpyArray, *, allowed: NumpyArray, bias: NumpyArray, scale: float,
    softcap: float | None, sinks: NumpyArray | None, d_output: NumpyArray | None,
) -> dict[str, tuple[NumpyArray, NumpyArray]]:  # fmt: skip
    """The output, or the gradients, query by query over the keys that it may attend to, and the scale of errors."""
    batch, heads, rows, _ = query.shape
    groups = key.shape[1]
    output = np.zeros((*query.shape[:-1], value.shape[-1]))
    found = {
        "output": output,
        "query": np.zeros(query.shape),
        "key": np.zeros(key.shape),
        "value": np.zeros(value.shape),
    }
    sizes = {name: np.zeros(each.shape) for name, each in found.items()}
    for at in np.ndindex(batch, heads, rows):
        shared = (at[0], at[1] * groups // heads)
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


def truth(
    arrays: dict[str, NumpyArray], *, scale: float, softcap: float | None, offset: int | None
) -> dict[str, tuple[NumpyArray, NumpyArray]]:
    """The definition on arrays in float64; an offset says that attention is causal."""
    exact = {name: each if each.dtype == bool else each.astype(np.float64) for name, each in arrays.items()}
    query, key, value = (exact[name] for name in ("query", "key", "value"))
    full = (*query.shape[:3], key.shape[2])
    allowed = np.broadcast_to(exact.get("mask", True), full).copy()
    if offset is not None:
        allowed &= np.arange(full[3]) <= np.arange(full[2])[:, None] + offset
    bias = np.broadcast_to(exact.get("bias", 0.0), full)
    options: dict[str, Any] = {
        "scale": scale,
        "softcap": softcap,
        "sinks": exact.get("sinks"),
        "d_output": exact.get("d_output"),
    }
    return definition(query, key, value, allowed=allowed, bias=bias, **options)


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
    arrays = dict(problem.arrays)
    if problem.cotangent is not None:
        arrays["d_output"] = problem.cotangent
    return "\n".join([*_head(subject, target, dtype, says), *_arrays(arrays, problem), *_call(problem, subject),
                      *_comparison(problem, subject, dtype, bound)]) + "\n"  # fmt: skip


def _head(subject: Subject, target: str, dtype: str, says: str) -> list[str]:
    library, where = subject.backend or "numpy", [] if target in PRESETS else ["import importlib.util"]
    imports = ["import base64", "import functools", "import importlib", *where, "import io", "",
               *(["import jax"] if library == "jax" else []), "import ml_dtypes", "import numpy as np",
               *([f"import {library}"] if library in ("torch", "tensorflow") else [])]  # fmt: skip
    numbers = "ml_dtypes.bfloat16" if dtype == "bfloat16" else f"np.{dtype}"
    start = [f'"""{says}"""', "", "from __future__ import annotations", "", *imports, ""]
    if library == "jax" and dtype == "float64":
        start.append('jax.config.update("jax_enable_x64", True)')
    loaded = _preset(target) if target in PRESETS else _loaded(target)
    return [*start, f"dtype = {numbers}", "", "", *loaded, *_sources(laid, definition, truth, compared)]


def _loaded(target: str) -> list[str]:
    source, _, name = target.rpartition(":")
    if not source.endswith(".py"):
        return [f"attention = importlib.import_module({source!r}).{name}", "", ""]
    return [f'specification = importlib.util.spec_from_file_location("kernel", {source!r})',
            "module = importlib.util.module_from_spec(specification)",
            "specification.loader.exec_module(module)", f"attention = module.{name}", "", ""]  # fmt: skip


def _sources(*functions: Any) -> list[str]:
    sources = [inspect.getsource(function).rstrip().replace("  # fmt: skip", "") for function in functions]
    return [line for source in sources for line in (source, "", "")]


def _preset(target: str) -> list[str]:
    """How the preset is called, as the source of the function that makes it."""
    make = PRESETS[target].make
    made = make if isinstance(make, functools.partial) else functools.partial(make)
    function: Any = made.func
    needed: dict[str, Any] = {}
    _gather(function, needed)
    told = ", ".join([*map(repr, made.args), *(f"{name}={each!r}" for name, each in made.keywords.items())])
    lines = ["class Subject:  # stands for the description of how it is called"]
    lines += ["    def __init__(self, function, **_):", "        self.function = function", "", ""]
    for each in reversed(needed.values()):
        lines += _sources(each)
    return [*lines, f"attention = {function.__name__}({told}).function", "", ""]


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
            if getattr(each, "__module__", None) == function.__module__ and name != "Subject":
                _gather(each, into)


def _arrays(arrays: dict[str, NumpyArray], problem: Problem) -> list[str]:
    with io.BytesIO() as file:
        np.savez_compressed(file, **{name: each.astype(_stored(each)) for name, each in arrays.items()})  # type: ignore[arg-type]
        text = base64.b85encode(file.getvalue()).decode()
    lines = ['stored = ("""', *(text[at : at + 110] for at in range(0, len(text), 110)), '""")']
    lines += [
        'stored = dict(np.load(io.BytesIO(base64.b85decode(stored.replace("\\n", "")))))',
        "arrays = {name: each if each.dtype == bool else each.astype(dtype) for name, each in stored.items()}",
    ]
    memory = {name: kind for name, kind in problem.memory.items() if kind != "contiguous"}
    if "cotangent" in memory:
        memory["d_output"] = memory.pop("cotangent")
    if memory:
        lines.append(f"for name, kind in {memory}.items():")
        lines.append("    arrays[name] = laid(arrays[name], kind)")
    return lines


def _stored(each: NumpyArray) -> Any:
    return each.dtype if each.dtype in (np.float64, bool) else np.float32


def _call(problem: Problem, subject: Subject) -> list[str]:
    """The call, in the layout of the subject; heads and entries that it does not know are looped over."""
    library, layout = subject.backend or "numpy", subject.layout or "BHSD"
    device = f".to({subject.device!r})" if library == "torch" and subject.device not in (None, "cpu") else ""
    array = PLACES[library] + device
    lines = ["", "", "def placed(each):"]
    if library == "torch":
        lines += ["    if each.dtype == ml_dtypes.bfloat16:",
                  f"        return torch.from_numpy(each.view(np.int16)).view(torch.bfloat16){device}"]  # fmt: skip
    lines += [f"    return {array}", "", ""]
    back = "each.detach().double().cpu().numpy()" if library == "torch" else "np.asarray(each).astype(np.float64)"
    lines += ["def back(each):", f"    return {back}", "", ""]
    names = list(subject.order or ("query", "key", "value"))
    more, words = _words(problem, subject)
    inner = [letter for letter in "BHSD" if letter in layout]
    axes = [inner.index(letter) for letter in layout]
    turn, again = TURNS[library], [int(each) for each in np.argsort(axes)]
    turned = axes == sorted(axes)
    lines += ["def called(query, key, value, mask=None, bias=None, sinks=None):",
              f"    arguments = [{', '.join(names)}]"]  # fmt: skip
    if not turned:
        lines.append(f"    arguments = [{turn.format(', '.join(map(str, axes)))} for each in arguments]")
    call = (
        f"attention(*arguments{more}"
        if not subject.array_names
        else f"attention(**dict(zip({list(subject.array_names)}, arguments))"
    )
    lines += [f"    each = {call}{words})", "    each = each[0] if isinstance(each, (tuple, list)) else each"]
    if not turned:
        lines.append(f"    each = {turn.format(', '.join(map(str, again)))}")
    return [*lines, "    return each", "", "", *_loop(layout, library), ""]


def _loop(layout: str, library: str) -> list[str]:
    if "B" in layout:
        return ["whole = called"]
    stack = {"torch": "torch.stack", "jax": "jax.numpy.stack", "tensorflow": "tensorflow.stack"}.get(
        library, "np.stack"
    )
    part = ["    def of(each, *at):  # its entry and head, where it has several",
            "        if each is not None:",
            "            return each[tuple(min(a, s - 1) for a, s in zip(at, each.shape))]", ""]  # fmt: skip
    lines = ["def whole(query, key, value, mask=None, bias=None, sinks=None):", *part]
    if "H" in layout:
        call = "called(query[b], key[b], value[b], of(mask, b), of(bias, b)) for b in range(len(query))"
        return [*lines, f"    return {stack}([{call}])"]
    call = "called(query[b, h], key[b, h // g], value[b, h // g], of(mask, b, h), of(bias, b, h))"
    heads = f"{stack}([{call} for h in range(query.shape[1])])"
    lines.append("    g = query.shape[1] // key.shape[1]")
    return [*lines, f"    return {stack}([{heads} for b in range(len(query))])"]


def _words(problem: Problem, subject: Subject) -> tuple[str, str]:
    """What a call has besides its arrays, by place and by keyword; the mask is made as the subject takes it before."""
    xp = types.SimpleNamespace(logical_not=lambda each: each, astype=lambda each, dtype: each, int32=None)
    words = keywords(problem, subject, {name: _Name(name) for name in problem.arrays}, xp)
    more = "".join(f", {each!r}" for each in by_place(subject, words))
    return more, "".join(f", {name}={each!r}" for name, each in words.items())


class _Name(str):
    __slots__ = ()
    __repr__ = str.__str__


def _comparison(problem: Problem, subject: Subject, dtype: str, bound: float) -> list[str]:
    scale, width = problem.options.get("scale"), problem.arrays["query"].shape[-1]
    scale = scale if scale is not None else width**-0.5 if width else 1.0
    told = {name: f'placed(arrays["{name}"])' for name in ("mask", "bias", "sinks") if name in problem.arrays}
    if "mask" in told and subject.mask in ("drop", "integer"):
        told["mask"] = f"placed({'~' if subject.mask == 'drop' else 'np.int32(1) * '}arrays['mask'])"
    arguments = "".join(f", {name}={each}" for name, each in told.items())
    lines = ['arguments = [placed(arrays[name]) for name in ("query", "key", "value")]']
    if problem.cotangent is None:
        lines += [f'results = {{"output": back(whole(*arguments{arguments}))}}']
    else:
        lines += _gradients(subject.backend or "numpy", arguments)
    rows, columns = problem.sizes[2:]
    offset = columns - rows if subject.causal == "bottom-right" else 0
    options = {"scale": float(scale), "softcap": problem.options.get("softcap")}
    is_causal = problem.options.get("is_causal") or subject.causal == "always"
    options["offset"] = offset if is_causal else None
    bound = bound if math.isfinite(bound) and bound > 0 else 1.0
    bits = FORMATS[dtype].fraction_bits
    return [
        *lines,
        f"wanted = truth(arrays, **{options})",
        f"raise SystemExit(compared(results, wanted, bits={bits}, bound={bound:.6g}))",
    ]


def _gradients(library: str, words: str) -> list[str]:
    """The gradients of a call, by the differentiation of the library; the words are those of the call."""
    call, change = f"whole(*arguments{words})", 'placed(arrays["d_output"])'
    if library == "torch":
        lines = ["arguments = [each.detach().requires_grad_() for each in arguments]", f"output = {call}"]
        lines.append(f"found = torch.autograd.grad(output, arguments, {change}.to(output.dtype))")
    elif library == "jax":
        lines = [f"output, transposed = jax.vjp(lambda *arrays_: whole(*arrays_{words}), *arguments)"]
        lines.append(f"found = transposed({change}.astype(output.dtype))")
    else:
        lines = ["with tensorflow.GradientTape() as tape:", "    tape.watch(arguments)", f"    output = {call}"]
        lines.append(f"found = tape.gradient(output, arguments, output_gradients={change})")
    return [*lines, 'results = dict(zip(("query", "key", "value"), (back(each) for each in found)))']
