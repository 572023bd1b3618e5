"""Measures of properties: several calls of one kernel, put together to what the oracle answers."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np

from attention_conformance.call import unsupported
from attention_conformance.cases.batch import in_calls, other_bits
from attention_conformance.cases.properties import LENGTHS
from attention_conformance.launch.call import outputs, place, to_numpy, torch_pass
from attention_conformance.launch.fit import fit, meant
from attention_conformance.launch.subject import NotOffered, Subject
from attention_conformance.launch.watch import Touched
from attention_conformance.measure.measures import compiled, result_of
from attention_conformance.measure.question import Question
from attention_conformance.oracle.dense import answer, dense_of, products
from attention_conformance.oracle.positions import passes
from attention_conformance.oracle.ulps import difference
from attention_conformance.problem import NumpyArray, Problem, Rule, rounded

Arrays: TypeAlias = dict[str, NumpyArray]
RATE, KEYS = 0.25, 64
"""Of dropout: the rate, and as many keys, queries and channels, so that values can be the identity."""


def _part(problem: Problem, **slices: tuple[Any, ...]) -> Problem:
    """Parts of some arrays; contiguous, as calls of their own have them."""
    return problem.holding(**{name: np.ascontiguousarray(problem.arrays[name][at]) for name, at in slices.items()})


def refuse_gradients(problem: Problem, kernel: Subject) -> None:
    """Raise where a problem has a cotangent, and the kernel no gradient."""
    if problem.cotangent is not None and not (kernel.differentiates or kernel.backward):
        raise NotOffered("gradients")


def decoded(question: Question, problem: Problem) -> Arrays:
    """Every query alone, with the keys that it may attend to, and no mask."""
    problem, rows = problem.without("mask"), []
    for row, length in enumerate(LENGTHS):
        keys = (..., slice(0, length), slice(None))
        step = _part(problem, query=(..., slice(row, row + 1), slice(None)), key=keys, value=keys)
        rows.append(result_of(question, fit(step, question.kernel))["output"])
    return {"output": np.concatenate(rows, axis=-2)}


def in_batches(question: Question, problem: Problem) -> Arrays:
    """The samples of a batch in the calls that the problem says."""
    outputs = [result_of(question, fit(part, question.kernel))["output"] for part in in_calls(problem)]
    return {"output": np.concatenate(outputs)}


def in_equal_bits(question: Question, problem: Problem) -> Arrays:
    """The same for a kernel that promises the same bits in any batch."""
    kernel = question.kernel
    has_arithmetic = kernel.native and "arithmetic" not in unsupported(kernel.function, problem)
    if not (has_arithmetic or kernel.batch_invariant):
        raise NotOffered("batch invariance")
    if not has_arithmetic:
        options = {name: each for name, each in problem.options.items() if name != "arithmetic"}
        problem = replace(problem, options=options)
    results = in_batches(question, problem)
    if unlike := other_bits(problem, results):
        raise Touched(unlike, "other-bits-in-batch")
    return results


def positioned(problem: Problem, kernel: Subject) -> Problem:
    """The problem whose mask is one array, or one rule of positions, so that its parts mean what the whole does."""
    problem = meant(problem, kernel)
    rules = [problem.mask] * (problem.mask is not None) + [Rule("Causal")] * bool(problem.options.get("is_causal"))
    options = {name: each for name, each in problem.options.items() if name != "is_causal"}
    if len(rules) == 1 and rules[0] and rules[0].kind in ("Causal", "array"):
        return problem.changed(options=options, mask=rules[0])
    if not rules:
        return problem
    through = functools.reduce(np.logical_and, (passes(rule, problem) for rule in rules if rule))
    return problem.changed(options=options).holding(mask=through)


def taken(problem: Problem, axis: int, at: NumpyArray) -> Problem:
    """The same with some of the samples, heads, queries or keys: the axes -4 to -1 of the scores."""
    shared, arrays = problem.sizes[1] // problem.arrays["key"].shape[-3], dict(problem.arrays)
    for name, array in arrays.items():
        of_keys, where, chosen = name in ("key", "value"), axis, at
        if axis == -3 and of_keys:
            chosen = at[::shared] // shared
        if axis > -3 and name in ("query", "key", "value"):
            if (axis == -1) != of_keys:
                continue
            where = -2
        if array.shape[where] > 1:
            arrays[name] = np.take(array, chosen, axis=where)
    return problem.changed(arrays=arrays)


def shuffled(question: Question, problem: Problem) -> Arrays:
    """Samples, heads, and keys where no position counts, from last to first; the output in the first order."""
    (batch,), heads, _, columns = problem.sizes
    whole = positioned(problem, question.kernel)
    axes = {-4: batch, -3: heads, -1: columns}
    if whole.mask is not None and (whole.mask.kind == "Causal" or problem.options.get("is_causal")):
        axes.pop(-1)
        whole = problem
    for axis, size in axes.items():
        whole = taken(whole, axis, np.arange(size)[::-1])
    return {"output": result_of(question, fit(whole, question.kernel))["output"][::-1, ::-1]}


def hidden(question: Question, problem: Problem) -> Arrays:
    """Large finite keys and values behind the others, which no query may attend to."""
    _, _, rows, columns = problem.sizes
    more, longer = 1 + columns // 4, positioned(problem, question.kernel)
    rule, arrays = longer.mask, dict(longer.arrays)
    for name in ("key", "value"):
        behind = arrays[name][..., np.arange(more) % columns, :] * arrays[name].dtype.type(32)
        arrays[name] = np.concatenate([arrays[name], behind], axis=-2)
    if rule is None or rule.kind == "array" or rule.arguments.get("offset", 0) + rows > columns:
        arrays["mask"] = np.ones((1, 1, 1, columns), dtype=bool) if rule is None else passes(rule, longer)
    for name in {"mask", "bias"} & set(arrays):
        arrays[name] = np.pad(arrays[name], [(0, 0)] * (arrays[name].ndim - 1) + [(0, more)])
    return result_of(question, fit(longer.changed(arrays={}).holding(**arrays), question.kernel))


def in_parts(question: Question, problem: Problem) -> Arrays:
    """Each sample alone; of one sample, each group of heads, or some of the queries."""
    (batch,), heads, rows, _ = problem.sizes
    groups = problem.arrays["key"].shape[-3]
    axis = -4 if batch > 1 else -3 if groups > 1 else -2
    size, count = {-4: (batch, batch), -3: (heads, groups), -2: (rows, min(rows, 2))}[axis]
    whole, outputs = positioned(problem, question.kernel), []
    for at in np.array_split(np.arange(size), count):
        part = taken(whole if axis == -2 else problem, axis, at)
        if axis == -2 and part.mask is not None and part.mask.kind == "Causal":
            part = part.changed(mask=Rule("Causal", {"offset": part.mask.arguments.get("offset", 0) + int(at[0])}))
        outputs.append(result_of(question, fit(part, question.kernel))["output"])
    return {"output": np.concatenate(outputs, axis=axis)}


def again(question: Question, problem: Problem) -> Arrays:
    """A call between others of the same shapes: they change neither its result, nor the bits of an equal call."""
    kernel, backend = question.kernel, question.backend
    fitted, other = fit(problem, kernel), fit(problem.turned(), kernel)
    result_of(question, other)
    function = compiled(question, lambda placed: outputs(fitted, kernel, placed, backend.namespace))
    result = function(place(fitted, kernel, backend, question.device))
    first = to_numpy(result, backend)
    first = {name: each.copy() for name, each in first.items()}
    result_of(question, other)
    later, second = to_numpy(result, backend), result_of(question, fitted)
    for name, array in first.items():
        if unlike := difference(array, later[name]):
            raise Touched(f"{name} after a later call: {unlike.text(name)}", "overwritten-result")
        if unlike := difference(array, second[name]):
            raise Touched(f"{name} of an equal call after another: {unlike.text(name)}", "other-bits")
    return first


def merged(question: Question, problem: Problem) -> Arrays:
    """Pieces of the keys, merged by their logsumexp, in an order of its own."""
    kernel = question.kernel
    if not kernel.gives("logsumexp"):
        raise NotOffered("logsumexp")
    outputs, sums = [], []
    for start, stop in ((64, 130), (0, 1), (1, 64)):
        keys = (..., slice(start, stop), slice(None))
        result = result_of(question, fit(_part(problem, key=keys, value=keys), kernel))
        if "logsumexp" not in result:
            raise NotOffered("logsumexp")
        outputs.append(result["output"].astype(np.float64))
        sums.append(result["logsumexp"].astype(np.float64)[..., None])
    unit = _unit(sums[1], problem)
    weights = np.stack(sums) * unit
    weights = np.exp(weights - weights.max(axis=0))
    output = (weights * np.stack(outputs)).sum(axis=0) / weights.sum(axis=0)
    return {"output": rounded(output, question.dtype)}


def _unit(logsumexp: NumpyArray, problem: Problem) -> float:
    """Of a logsumexp: that of base 2 is a convention, which another case tells."""
    keys = (..., slice(0, 1), slice(None))
    truth = answer(dense_of(_part(problem, key=keys, value=keys))).arrays["logsumexp"]
    distances = {unit: float(abs(logsumexp[..., 0] * unit - truth).max()) for unit in (1.0, math.log(2.0))}
    return min(distances, key=lambda unit: distances[unit])


def dropped(question: Question, problem: Problem) -> Arrays:
    """Read the mask of a dropout: queries of 0 and values of the identity make it the output."""
    kernel = question.kernel
    if kernel.native or not kernel.dropout_name:
        raise NotOffered("dropout of its own")
    fitted = fit(problem.put("query", ..., 0).put("value", ..., np.eye(KEYS)), kernel)
    fitted = replace(fitted, options={**fitted.options, "dropout_rate": RATE})
    first, second = (result_of(question, fitted)["output"].astype(np.float64) for _ in range(2))
    _check_share(first)
    if not _takes_seeds(kernel) and (first == second).all():
        raise Touched("two calls of dropout leave out the same weights")
    if question.backend.name == "torch" and kernel.differentiates and kernel.backward is None:
        _check_backward(question, fitted)
    return result_of(question, fit(problem, kernel))


def _check_backward(question: Question, problem: Problem) -> None:
    """Compare the gradients with those for the weights that the output of the same pass shows."""
    backend, kernel = question.backend, question.kernel
    cotangent = np.sign(problem.arrays["key"].astype(np.float64)).astype(problem.arrays["query"].dtype)
    problem = replace(problem, cotangent=cotangent)
    arrays = place(problem, kernel, backend, question.device)
    output, grads = torch_pass(problem, kernel, arrays, ("query", "key", "value"))
    got = {
        name: each.astype(np.float64) for name, each in to_numpy({"output": output.detach(), **grads}, backend).items()
    }
    d_weights = cotangent.astype(np.float64) * (got["output"] != 0) / (1 - RATE)
    d_scores = (d_weights - d_weights.mean(axis=-1, keepdims=True)) / KEYS
    for name, gradient in products(dense_of(problem), got["output"], d_scores).items():
        error = float(np.linalg.norm(got[name] - gradient)) / max(1.0, float(np.linalg.norm(gradient)))
        if error > 2**-5:
            raise Touched(
                f"the gradient in {name} is not that of the dropped weights that the output shows: off by {error:.2g}"
            )


def _check_share(output: NumpyArray) -> None:
    kept, factor = output != 0, 1 / (KEYS * (1 - RATE))
    if abs(output[kept] / factor - 1).max(initial=0.0) > 2**-6:
        worst = output[kept][np.argmax(abs(output[kept] / factor - 1))]
        raise Touched(f"dropout of {RATE} makes a weight of 1/{KEYS} {worst:.6g}; expected 0 or {factor:.6g}")
    share, deviation = kept.mean(), math.sqrt(RATE * (1 - RATE) / kept.size)
    if abs(share - (1 - RATE)) > 5 * deviation:
        raise Touched(f"dropout of {RATE} keeps {share:.4f} of the weights; expected {1 - RATE} ± {5 * deviation:.4f}")
    for axis, name in enumerate(("samples", "heads", "queries", "keys")):
        if (kept == np.take(kept, [0], axis=axis)).all():
            raise Touched(f"dropout leaves out the same weights for all {name}")


def _takes_seeds(kernel: Subject) -> bool:
    """Whether the caller says which weights are left out."""
    try:
        names = inspect.signature(kernel.function).parameters
    except (TypeError, ValueError):
        return False
    return any(word in name for name in names for word in ("seed", "rng", "generator", "philox"))


def windowed(question: Question, problem: Problem) -> Arrays:
    """A mask of a window, given by the kernel's own keyword."""
    kernel = question.kernel
    if kernel.native or not kernel.window_name:
        raise NotOffered("windows of its own")
    mask = problem.arrays["mask"][0, 0]
    at = len(mask) // 2
    (seen,) = np.nonzero(mask[at])
    is_causal = kernel.causal != "none" and seen[-1] == at
    options = {**problem.options, "is_causal": True} if is_causal else problem.options
    fitted = fit(problem.without("mask").changed(options=options), kernel)
    truth = answer(dense_of(problem)).arrays["output"]
    results = []
    for corner in dict.fromkeys((0, mask.shape[1] - len(mask))):  # of more keys, positions count from either corner
        window = (int(at - seen[0]) + corner, int(seen[-1] - at) - corner)
        results.append(result_of(question, replace(fitted, options={**fitted.options, "window": window})))
    return min(results, key=lambda each: float(abs(each["output"].astype(np.float64) - truth).max()))


def apart(question: Question, problem: Problem) -> Arrays:
    """The gradient of each array in a call that asks for no other."""
    gradients: Arrays = {}
    if question.kernel.backward is not None:
        raise NotOffered("gradients of one array alone")
    for name in ("query", "key", "value"):
        gradients |= result_of(replace(question, variables=(name,)), problem)
    return gradients


def between(question: Question, problem: Problem) -> Arrays:
    """Gradients after another forward pass of the same shapes came between."""
    if question.kernel.backward is None and question.backend.name != "torch":
        raise NotOffered("a backward pass of its own")
    return result_of(replace(question, between=problem.turned()), problem)


def repeated(question: Question, problem: Problem) -> Arrays:
    """The gradients of a second backward pass through one graph."""
    backend, kernel = question.backend, question.kernel
    if backend.name != "torch" or kernel.backward is not None:
        raise NotOffered("a second backward pass")
    arrays = place(problem, kernel, backend, question.device)
    return to_numpy(torch_pass(problem, kernel, arrays, ("query", "key", "value"), passes=2)[1], backend)


PROPERTY_MEASURES: Mapping[str, Any] = {
    "decoded": decoded,
    "batch": in_batches,
    "batch bits": in_equal_bits,
    "shuffled": shuffled,
    "hidden": hidden,
    "parts": in_parts,
    "again": again,
    "merged": merged,
    "dropped": dropped,
    "windowed": windowed,
    "apart": apart,
    "between": between,
    "repeated": repeated,
}
"""Measures by name. Those of outputs get problems that are not fitted yet, as they fit the parts."""
