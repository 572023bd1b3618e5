"""From a case to a problem that a kernel can take: of the same truth, in the arguments that it has."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from attention_conformance.launch.subject import NotOffered, Subject
from attention_conformance.oracle.positions import passes
from attention_conformance.problem import NumpyArray, Problem, Rule, array

WIDTH = 16
"""The least width of a head that many kernels take."""


def fit(problem: Problem, kernel: Subject) -> Problem:
    """The problem as the kernel can be asked it; NotOffered where it declares too little.

    Rules become one array, or the causality of the kernel. The scale moves into the query where there is no keyword.
    Narrow heads are padded with zeros.
    """
    if "alibi" in problem.arrays and (kernel.native or not kernel.alibi_name or "B" not in (kernel.layout or "B")):
        raise NotOffered("ALiBi of its own")
    if kernel.native:
        if problem.cotangent is not None and not kernel.differentiates:
            raise NotOffered("gradients")
        return problem
    _refuse(problem, kernel)
    for change in (_ruled, _merged, _widened, _scaled):
        problem = change(problem, kernel)
    kept = {f"return_{name}" for name in kernel.asks or ()} | {"is_causal", "scale", "softcap"}
    return replace(problem, options={name: each for name, each in problem.options.items() if name in kept})


def meant(problem: Problem, kernel: Subject) -> Problem:
    """The problem that a fitted one asks of the kernel: its causality may count from the bottom right."""
    if kernel.causal == "always":
        return replace(problem, options={**problem.options, "is_causal": True})
    if kernel.native or kernel.causal != "bottom-right" or not problem.options.get("is_causal"):
        return problem
    _, _, rows, columns = problem.sizes
    rule = Rule("Causal", {"offset": columns - rows})
    options = {name: each for name, each in problem.options.items() if name != "is_causal"}
    return replace(problem, mask=rule if problem.mask is None else rule & problem.mask, options=options)


def _refuse(problem: Problem, kernel: Subject) -> None:
    arrays, options = problem.arrays, problem.options
    widths = arrays["query"].shape[-1], arrays["value"].shape[-1]
    lacking = {
        "leading axes besides the batch": len(problem.sizes[0]) != 1,
        "score_mod": problem.score_mod is not None,
        "dropout by seed": "dropout" in options,
        "attention in pieces": bool(problem.pieces),
        "softcap": options.get("softcap") is not None and not kernel.softcap_name,
        "sinks": "sinks" in arrays and not kernel.sinks_name,
        "bias": "bias" in arrays and not kernel.bias_name,
        "mask": problem.mask is not None and not _is_flag(problem, kernel) and not _takes_masks(kernel),
        "causality": bool(options.get("is_causal")) and kernel.causal == "none" and not _takes_masks(kernel),
        "grouped heads": arrays["query"].shape[-3] != arrays["key"].shape[-3] and not kernel.grouped,
        "values of another width": kernel.same_width is not False and (widths[1] > widths[0] or not widths[1]),
        "gradients": problem.cotangent is not None and not (kernel.differentiates or kernel.backward),
    }
    names = [name for name, lacks in lacking.items() if lacks]
    if kernel.backward is not None and problem.cotangent is not None and {"bias", "sinks"} & set(arrays):
        names.append("gradients of bias and sinks")
    if names:
        raise NotOffered(", ".join(names))


def _takes_masks(kernel: Subject) -> bool:
    return kernel.mask != "none" or bool(kernel.bias_name)


def _is_flag(problem: Problem, kernel: Subject) -> bool:
    """Whether the rule of a problem is the causality of the kernel."""
    rule, (_, _, rows, columns) = problem.mask, problem.sizes
    if rule is None or rule.kind != "Causal" or kernel.causal == "none" or problem.options.get("is_causal"):
        return False
    return bool(rule.arguments.get("offset", 0) == _offset(kernel, rows, columns))


def _offset(kernel: Subject, rows: int, columns: int) -> int:
    return columns - rows if kernel.causal == "bottom-right" else 0


def _ruled(problem: Problem, kernel: Subject) -> Problem:
    """Rules as one array ``mask`` with four axes, and causality as a flag where the kernel has it."""
    _, _, rows, columns = problem.sizes
    options, arrays = dict(problem.options), dict(problem.arrays)
    causal = bool(options.pop("is_causal", False)) or _is_flag(problem, kernel)
    mask = None if problem.mask is None or _is_flag(problem, kernel) else passes(problem.mask, problem)
    has_other = mask is not None or ("bias" in arrays and bool(kernel.bias_name))
    if causal and (kernel.causal == "none" or (has_other and not kernel.mask_with_causal)):
        seen = np.arange(columns)[None, :] <= np.arange(rows)[:, None] + _offset(kernel, rows, columns)
        mask, causal = seen if mask is None else mask & seen, False
    rest = {name: each for name, each in arrays.items() if name in ("query", "key", "value", "bias", "sinks", "alibi")}
    if mask is not None:
        rest["mask"] = _four_axes(mask, problem, kernel)
    if "bias" in rest:
        rest["bias"] = _four_axes(rest["bias"], problem, kernel)
    rule: Rule | None = array("mask") if mask is not None else None
    if causal:
        options["is_causal"] = True
    return replace(problem, arrays=rest, options=options, mask=rule)


def _four_axes(each: NumpyArray, problem: Problem, kernel: Subject) -> NumpyArray:
    leading, heads, rows, columns = problem.sizes
    each = each.reshape((1,) * (4 - each.ndim) + each.shape)
    if kernel.full_mask:
        return np.ascontiguousarray(np.broadcast_to(each, (*leading, heads, rows, columns)))
    return each


def _merged(problem: Problem, kernel: Subject) -> Problem:
    """A mask as a bias of 0 and -inf where the kernel takes only that, or has one keyword for both."""
    arrays = dict(problem.arrays)
    if "mask" not in arrays:
        return problem
    if not (kernel.mask in ("additive", "none") or (kernel.mask_is_bias and "bias" in arrays)):
        return problem
    mask, dtype = arrays.pop("mask"), arrays["query"].dtype
    bias = arrays.get("bias", np.zeros((), dtype))
    lowest = np.asarray(-np.inf).astype(dtype)
    arrays["bias"] = np.where(mask, bias, lowest).astype(dtype)
    return replace(problem, arrays=arrays, mask=None)


def _scaled(problem: Problem, kernel: Subject) -> Problem:
    """The scale in the query, where there is no keyword for it."""
    scale, width = problem.options.get("scale"), problem.arrays["query"].shape[-1]
    default = width**-0.5 if kernel.default_scale != "one" and width else 1.0
    if kernel.scale_name:
        stated = width**-0.5 if scale is None and kernel.default_scale == "one" else scale
        return problem if stated is scale else replace(problem, options={**problem.options, "scale": stated})
    if scale is None and kernel.default_scale != "one":
        return problem
    if "query" in problem.memory.values():  # which a scaled query is not
        raise NotOffered("one array in two places")
    factor = (width**-0.5 if scale is None else scale) / default
    query = problem.arrays["query"]
    with np.errstate(all="ignore"):
        changed = (query.astype(np.float64) * factor).astype(query.dtype)
    options = {**problem.options, "scale": default}
    return replace(problem, arrays={**problem.arrays, "query": changed}, options=options)


def _widened(problem: Problem, kernel: Subject) -> Problem:
    """Heads padded with zeros, to a width that the kernel takes."""
    width, value_width = problem.arrays["query"].shape[-1], problem.arrays["value"].shape[-1]
    target = max(width, WIDTH)
    wanted = {"query": target, "key": target, "value": value_width if kernel.same_width is False else target}
    if not width or all(problem.arrays[name].shape[-1] == size for name, size in wanted.items()):
        return problem
    arrays = {name: _padded(each, wanted.get(name, 0)) for name, each in problem.arrays.items()}
    cotangent = None if problem.cotangent is None else _padded(problem.cotangent, wanted["value"])
    options: dict[str, Any] = dict(problem.options)
    if options.get("scale") is None and target != width:
        options["scale"] = width**-0.5
    return replace(problem, arrays=arrays, cotangent=cotangent, options=options)


def _padded(each: NumpyArray, width: int) -> NumpyArray:
    if each.shape[-1] >= width or each.ndim < 3:
        return each
    return np.concatenate([each, np.zeros((*each.shape[:-1], width - each.shape[-1]), each.dtype)], axis=-1)
