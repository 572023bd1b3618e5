"""A call of a subject as a script that needs NumPy and the subject alone."""

from __future__ import annotations

import inspect
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from attention_conformance.oracle.ulps import FORMATS
from attention_conformance.problem import NumpyArray, Problem
from attention_conformance.subjects.subject import Subject

__all__ = ["Sizes", "inputs", "script"]


ARRAYS = ("query", "key", "value")


@dataclass(frozen=True)
class Sizes:
    """What the numbers of a call are drawn from."""

    batch: int = 1
    heads: int = 1
    groups: int = 1
    queries: int = 1
    keys: int = 1
    width: int = 16
    rule: str = "plain"
    deviation: float = 1.0
    shift: float = 0.0
    seed: int = 0


def inputs(
    *, batch: int, heads: int, groups: int, queries: int, keys: int, width: int, rule: str, deviation: float,
    shift: float, seed: int,
) -> tuple[NumpyArray, ...]:  # fmt: skip
    """Query, key, value, the gradient of the output, and what may be attended to."""
    random = np.random.default_rng(seed)
    query = random.standard_normal((batch, heads, queries, width)) * deviation
    key = random.standard_normal((batch, groups, keys, width)) * deviation
    value = random.standard_normal((batch, groups, keys, width))
    key[..., 0] += shift  # scores far from 0
    cotangent = random.standard_normal((batch, heads, queries, width))
    allowed: NumpyArray = np.ones((batch, 1, queries, keys), dtype=bool)
    if rule == "mask":
        allowed &= random.random(allowed.shape) < 0.5
        allowed[..., np.arange(queries), np.arange(queries) % keys] = True
    if rule == "empty rows":
        allowed &= random.random(allowed.shape) < 0.5
        allowed[..., 0, :] = False
    if rule == "lengths":
        allowed &= np.arange(keys) < np.linspace(keys // 2 + 1, keys, batch).astype(int)[:, None, None, None]
    return query, key, value, cotangent, allowed


def definition(
    query: NumpyArray, key: NumpyArray, value: NumpyArray, allowed: NumpyArray, scale: float,
    cotangent: NumpyArray | None,
) -> list[tuple[NumpyArray, NumpyArray]]:  # fmt: skip
    """The output, or the gradients, in float64, each with the scale of its error."""
    group = query.shape[1] // key.shape[1]
    query = query.astype(np.float64)
    key, value = (np.repeat(each.astype(np.float64), group, axis=1) for each in (key, value))
    scores = np.where(allowed, scale * query @ key.swapaxes(-1, -2), -np.inf)
    top = scores.max(axis=-1, keepdims=True)
    weights = np.exp(scores - np.where(top > -np.inf, top, 0))
    weights /= np.maximum(weights.sum(axis=-1, keepdims=True), 1e-300)
    if cotangent is None:
        return [(weights @ value, weights @ abs(value))]
    cotangent, found = cotangent.astype(np.float64), []
    for size, d_output, values, sign in ((False, cotangent, value, -1), (True, abs(cotangent), abs(value), 1)):
        d_weights = d_output @ values.swapaxes(-1, -2)
        d_scores = scale * weights * (d_weights + sign * (weights * d_weights).sum(axis=-1, keepdims=True))
        queries, keys = (abs(query), abs(key)) if size else (query, key)
        grads = [d_scores @ keys, d_scores.swapaxes(-1, -2) @ queries, weights.swapaxes(-1, -2) @ d_output]
        shared = [each.reshape(len(each), -1, group, *each.shape[2:]).sum(axis=2) for each in grads[1:]]
        found.append([grads[0], *shared])
    return [(grad, abs(size)) for grad, size in zip(*found, strict=True)]


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


def script(sizes: Sizes, fitted: Problem, subject: Subject, *, target: str, bound: float, dtype: str, says: str) -> str:
    """A script that shows a wrong result: it prints the worst element, and exits with 1."""
    lines = [f'"""{says}"""', "", *_imports(target, subject, dtype), ""]
    lines += ["NumpyArray = np.ndarray", "", ""]
    lines += [source for function in (inputs, definition, laid) for source in (_source(function), "", "")]
    with_gradients, turned = fitted.cotangent is not None, _order(subject)
    lines += [
        f"query, key, value, cotangent, allowed = inputs(**{asdict(sizes)})",
        "arrays = query, key, value, cotangent",
        f"query, key, value, cotangent = (each.astype({_numpy_dtype(dtype)}) for each in arrays)",
        *_scaling(fitted, subject),
        *_rule(sizes, fitted, subject),
        f"memory = {dict(fitted.memory)}",
        "query, key, value, cotangent = (",
        '    laid(each, memory.get(name, "contiguous"))',
        '    for name, each in {"query": query, "key": key, "value": value, "cotangent": cotangent}.items()',
        ")",
        *_library(subject, dtype),
        f"arrays = [placed(each).requires_grad_() for each in {_names(subject)}]"
        if with_gradients
        else f"arrays = [placed(each) for each in {_names(subject)}]",
        f"arguments = [each{_turn(turned, subject)} for each in arrays]",
        f"found = attention({_arguments(subject)}{_keywords(fitted, subject)})",
        "found = found[0] if isinstance(found, (tuple, list)) else found",
        f"found = found{_turn_back(turned, subject)}",
    ]
    if with_gradients:
        lines.append("results = torch.autograd.grad(found, arrays, placed(cotangent))")
        places = [(subject.order or ARRAYS).index(name) for name in ARRAYS]
        lines.append(f"results = [results[at] for at in {places}]")
    else:
        lines.append("results = [found]")
    scale = fitted.options.get("scale")
    scale = sizes.width**-0.5 if scale is None else scale
    bits = FORMATS[dtype].fraction_bits
    lines += [
        f"wanted = definition(query, key, value, allowed, {scale!r}, {'cotangent' if with_gradients else 'None'})",
        "worst = 0.0",
        "for result, (expected, size) in zip(results, wanted, strict=True):",
        "    result = back(result)",
        f"    unit = 2.0 ** (np.floor(np.log2(np.maximum(size, 1e-30))) - {bits})",
        "    error = abs(result - expected) / unit",
        "    error = np.where(np.isnan(error), np.inf, error)",
        "    at = np.unravel_index(error.argmax(), error.shape)",
        "    where = tuple(int(each) for each in at)",
        '    print(f"at {where}: expected {expected[at]}, got {result[at]}, off by {error[at]:.3g} units")',
        "    worst = max(worst, error[at])",
        f"raise SystemExit(int(worst > {max(bound, 1.0):.6g}))",
    ]
    return "\n".join(lines) + "\n"


def _source(function: Any) -> str:
    return inspect.getsource(function).rstrip().replace("  # fmt: skip", "")


def _imports(target: str, subject: Subject, dtype: str) -> list[str]:
    lines = ["import numpy as np"]
    if subject.backend != "numpy":
        lines.append(f"import {subject.backend}")
    if dtype == "bfloat16":
        lines.append("import ml_dtypes")
    source, _, name = target.rpartition(":")
    if source.endswith(".py"):
        return ["import importlib.util", "", *lines, "",
                f'specification = importlib.util.spec_from_file_location("kernel", {source!r})',
                "module = importlib.util.module_from_spec(specification)",
                "specification.loader.exec_module(module)", f"attention = module.{name}"]  # fmt: skip
    if source:
        return ["import importlib", "", *lines, "", f"attention = importlib.import_module({source!r}).{name}"]
    if target == "torch.sdpa":
        return [*lines, "from torch.nn.functional import scaled_dot_product_attention as attention"]
    load = "from attention_conformance.subjects.target import load_target  # how the preset is called"
    return [*lines, load, "", f"attention = load_target({target!r}).function"]


def _numpy_dtype(dtype: str) -> str:
    return "ml_dtypes.bfloat16" if dtype == "bfloat16" else f"np.{dtype}"


def _scaling(fitted: Problem, subject: Subject) -> list[str]:
    if subject.scale_name or subject.default_scale != "one":
        return []
    return ["query = (query.astype(np.float64) * query.shape[-1] ** -0.5).astype(query.dtype)  # it takes no scale"]


def _rule(sizes: Sizes, fitted: Problem, subject: Subject) -> list[str]:
    """What may be attended to, and what the subject is told of it."""
    lines = []
    causal = "offset = key.shape[-2] - query.shape[-2]" if subject.causal == "bottom-right" else "offset = 0"
    if sizes.rule == "causal":
        lines += [causal, "rows, columns = np.arange(query.shape[-2]), np.arange(key.shape[-2])",
                  "allowed = allowed & (columns[None, :] <= rows[:, None] + offset)"]  # fmt: skip
    full = "np.broadcast_to(allowed, (*query.shape[:-1], key.shape[-2])).copy()" if subject.full_mask else "allowed"
    if "mask" in fitted.arrays:
        lines.append(f"mask = {full}")
    if "bias" in fitted.arrays:
        lines.append(f"bias = np.where({full}, 0.0, -np.inf).astype(query.dtype)")
    return lines


def _library(subject: Subject, dtype: str) -> list[str]:
    """The two functions that take arrays to the library and back."""
    if subject.backend == "torch":
        as_torch = "each.view(np.int16)).view(torch.bfloat16)" if dtype == "bfloat16" else "each)"
        device = f".to({subject.device!r})" if subject.device else ""
        return ["", "",
                "def placed(each):",
                "    if each.dtype == bool:",
                f"        return torch.from_numpy(each){device}",
                f"    return torch.from_numpy({as_torch}{device}",
                "", "",
                "def back(each):",
                "    return each.detach().double().cpu().numpy()",
                "", ""]  # fmt: skip
    make = {"jax": "jax.numpy.asarray(each)", "tensorflow": "tensorflow.convert_to_tensor(each)"}
    return ["", "",
            "def placed(each):", f"    return {make.get(subject.backend or '', 'each')}",
            "", "",
            "def back(each):", "    return np.asarray(each).astype(np.float64)", "", ""]  # fmt: skip


def _names(subject: Subject) -> str:
    return f"({', '.join(subject.order or ARRAYS)})"


def _order(subject: Subject) -> tuple[int, ...]:
    layout = subject.layout or "BHSD"
    return tuple("BHSD".index(letter) for letter in layout)


def _turn(order: tuple[int, ...], subject: Subject) -> str:
    """The axes of the layout; the axes that it lacks have one element."""
    if order == (0, 1, 2, 3):
        return ""
    lacking = [axis for axis in range(4) if axis not in order]
    full = (*lacking, *order)
    turned = "" if full == (0, 1, 2, 3) else _permuted(full, subject)
    return turned + (f"[{', '.join('0' for _ in lacking)}]" if lacking else "")


def _turn_back(order: tuple[int, ...], subject: Subject) -> str:
    if order == (0, 1, 2, 3):
        return ""
    lacking = [axis for axis in range(4) if axis not in order]
    back = tuple(int(each) for each in np.argsort((*lacking, *order)))
    turned = "" if back == (0, 1, 2, 3) else _permuted(back, subject)
    return (f"[{', '.join('None' for _ in lacking)}]" if lacking else "") + turned


def _permuted(axes: tuple[int, ...], subject: Subject) -> str:
    return f".{'permute' if subject.backend == 'torch' else 'transpose'}({', '.join(map(str, axes))})"


def _arguments(subject: Subject) -> str:
    if not subject.array_names:
        return "*arguments"
    return ", ".join(f"{name}=arguments[{at}]" for at, name in enumerate(subject.array_names))


def _keywords(fitted: Problem, subject: Subject) -> str:
    words = {name: repr(each) for name, each in (subject.options or {}).items()}
    if "mask" in fitted.arrays and subject.mask_name:
        words[subject.mask_name] = f"placed({'~mask' if subject.mask == 'drop' else 'mask'})"
    if "bias" in fitted.arrays:
        words[subject.bias_name or subject.mask_name or ""] = "placed(bias)"
    if subject.causal_name:
        words[subject.causal_name] = repr(bool(fitted.options.get("is_causal")))
    if subject.scale_name and fitted.options.get("scale") is not None:
        words[subject.scale_name] = repr(fitted.options["scale"])
    if subject.grouped_name and fitted.arrays["query"].shape[1] != fitted.arrays["key"].shape[1]:
        words[subject.grouped_name] = "True"
    return "".join(f", {name}={each}" for name, each in words.items())
