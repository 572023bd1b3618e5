"""From a fitted problem to a call of the kernel, and to gradients, in the arrays of its library."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from attention_conformance.call import output_function
from attention_conformance.launch.subject import STRIDED, Subject
from attention_conformance.launch.watch import Touched
from attention_conformance.problem import NumpyArray, Problem
from attention_conformance.strides import stored
from attention_core.backend import Backend, get_backend

Arrays = dict[str, Any]
RESULTS = ("output", "weights", "logsumexp")


def axes_of(layout: str) -> tuple[int, ...]:
    """Where the axes of a layout lie in batch, heads, sequence and width; axes that it lacks come first."""
    return tuple("BHSD".index(letter) for letter in [*(each for each in "BH" if each not in layout), *layout])


def place(problem: Problem, kernel: Subject, backend: Backend, device: str) -> Arrays:
    """The arrays of a problem on a device, in the memory that the problem says."""
    xp, placed = backend.namespace, {}
    arrays = dict(problem.arrays)
    if problem.cotangent is not None:
        arrays["cotangent"] = problem.cotangent
    for name, array in arrays.items():
        if backend.name not in STRIDED:
            placed[name] = backend.from_numpy(array, device=device)
            continue
        kind = problem.memory.get(name, "contiguous")
        if kind in placed:  # one array for both
            placed[name] = placed[kind]
            continue
        axes = None
        if kernel.layout and name in ("query", "key", "value", "cotangent"):
            axes = axes_of(kernel.layout)
        storage, view = stored(array, kind, axes)
        placed[name] = view(backend.from_numpy(storage, device=device), xp)
    return placed


def outputs(problem: Problem, kernel: Subject, arrays: Arrays, xp: Any) -> Arrays:
    """What a kernel returns, by name, with the axes of the contract."""
    if kernel.native:
        return output_function(kernel.function, problem)(arrays)
    assert kernel.layout is not None
    return _looped(problem, kernel, arrays, xp)


def _looped(problem: Problem, kernel: Subject, arrays: Arrays, xp: Any) -> Arrays:
    """Loop over the axes that a layout lacks."""
    layout = kernel.layout or "BHSD"
    names = [name for name in ("query", "key", "value", "mask", "bias") if name in arrays]
    batches, heads = arrays["query"].shape[:2]
    shared = heads // max(1, arrays["key"].shape[1])

    def part(name: str, *index: int) -> Any:
        each = arrays[name]
        index = (*index[:1], index[1] // shared) if index[1:] and name in ("key", "value") else index
        return each[tuple(min(at, size - 1) for at, size in zip(index, each.shape, strict=False))]

    def called(*index: int) -> Arrays:
        one = arrays | {name: part(name, *index) for name in names if index}
        return _named(_call(problem, kernel, one, xp), problem, kernel, xp)

    def stacked(results: list[Arrays]) -> Arrays:
        return {name: xp.stack([each[name] for each in results]) for name in results[0]}

    if "B" in layout:
        return called()
    if "H" in layout:
        return stacked([called(batch) for batch in range(batches)])
    return stacked([stacked([called(batch, head) for head in range(heads)]) for batch in range(batches)])


def _call(problem: Problem, kernel: Subject, arrays: Arrays, xp: Any) -> Any:
    order = kernel.order or ("query", "key", "value")
    ordered = [_turned(arrays[name], kernel, xp) for name in order]
    words = keywords(problem, kernel, arrays, xp)
    ordered += by_place(kernel, words)
    if kernel.array_names:
        return kernel.function(**dict(zip(kernel.array_names, ordered, strict=True)), **words)
    return kernel.function(*ordered, **words)


def by_place(kernel: Subject, words: dict[str, Any]) -> list[Any]:
    """Take those of the keywords that have a place and no name, and the defaults before the last of them."""
    options = kernel.positional or {}
    stop = max((count for count, name in enumerate(options, 1) if name in words), default=0)
    return [words.pop(name, default) for name, default in list(options.items())[:stop]]


def keywords(problem: Problem, kernel: Subject, arrays: Arrays, xp: Any) -> dict[str, Any]:
    """The keywords of a call."""
    kwargs, options = dict(kernel.options or {}), problem.options
    if "mask" in arrays and kernel.mask_name:
        mask = xp.logical_not(arrays["mask"]) if kernel.mask == "drop" else arrays["mask"]
        kwargs[kernel.mask_name] = xp.astype(mask, xp.int32) if kernel.mask == "integer" else mask
    if "bias" in arrays and (kernel.bias_name or kernel.mask_name):
        kwargs[kernel.bias_name or kernel.mask_name or ""] = arrays["bias"]
    is_grouped = problem.arrays["query"].shape[-3] != problem.arrays["key"].shape[-3]
    values = {"causal": options.get("is_causal") or None, "scale": options.get("scale"),
            "softcap": options.get("softcap"), "sinks": arrays.get("sinks"), "window": options.get("window") or None,
            "alibi": arrays.get("alibi"), "dropout": options.get("dropout_rate") or None,
            "grouped": is_grouped or None}  # fmt: skip
    for name, value in values.items():
        if (word := getattr(kernel, f"{name}_name")) and value is not None:
            kwargs[word] = value
    for name, asked in (kernel.asks or {}).items():
        if options.get(f"return_{name}"):
            kwargs |= asked
    return kwargs


def _turned(array: Any, kernel: Subject, xp: Any, *, back: bool = False) -> Any:
    """An array of the standard order in that of the layout; or back, unless it has other axes."""
    layout = kernel.layout or "BHSD"
    places = [layout.index(letter) for letter in "BHSD" if letter in layout]
    is_same = places == sorted(places) or (back and len(array.shape) != len(places))
    return array if is_same else xp.permute_dims(array, tuple(places if back else map(int, np.argsort(places))))


def _named(result: Any, problem: Problem, kernel: Subject, xp: Any) -> Arrays:
    """Results by name; weights and logsumexp only as they were asked for, or always come."""
    result = tuple(result.values()) if isinstance(result, Mapping) else result
    results = list(result) if isinstance(result, tuple | list) else [result]
    backend = get_backend(kernel.backend or "numpy")
    if backend.name != "numpy":  # a convention, which the kernel tells by itself
        results = [backend.from_numpy(each) if isinstance(each, np.ndarray) else each for each in results]
    rank, shapes = (
        len(kernel.layout or "BHSD"),
        [tuple(each.shape) if hasattr(each, "shape") else () for each in results],
    )
    wanted = {*(kernel.returns or ()), *(name for name in RESULTS if problem.options.get(f"return_{name}"))}
    rows, columns = problem.sizes[2:]
    if not results or not backend.owns(results[0]):
        kinds = ", ".join(type(each).__name__ for each in results)
        raise Touched(f"expected arrays of {kernel.backend}; got {kinds or 'none'}", "other-kind", "visibly wrong")
    named = {"output": _turned(results[0], kernel, xp, back=True)}
    sums = [each for each, shape in zip(results[1:], shapes[1:], strict=True) if len(shape) == rank - 1]
    if "logsumexp" in wanted and len(sums) == 1:
        is_turned = rank == 4 and sums[0].shape[-1] != rows
        named["logsumexp"] = xp.permute_dims(sums[0], (0, 2, 1)) if is_turned else sums[0]
    weights = [each for each, shape in zip(results[1:], shapes[1:], strict=True) if len(shape) == rank]
    if "weights" in wanted and len(weights) == 1 and tuple(weights[0].shape[-2:]) == (rows, columns):
        named["weights"] = weights[0]
    return named


def gradients(
    problem: Problem, kernel: Subject, arrays: Arrays, names: Sequence[str], backend: Backend,
    between: Callable[[], Any] | None = None, by_backend: bool = False,
) -> Arrays:  # fmt: skip
    """The gradients of ``sum(output * cotangent)`` in the arrays of these names, perhaps as the core has them.

    ``between`` is called after the forward pass, where the backward pass is a call of its own.
    """
    if kernel.backward is not None:
        return _by_pair(problem, kernel, arrays, backend, between)
    if backend.name == "torch" and not by_backend:
        return torch_pass(problem, kernel, arrays, names, between)[1]
    xp = backend.namespace

    def loss(variables: Mapping[str, Any], others: Mapping[str, Any]) -> Any:
        output = outputs(problem, kernel, {**variables, **others}, xp)["output"]
        return xp.sum(xp.multiply(output, others["cotangent"]))

    variables = {name: arrays[name] for name in names}
    others = {name: each for name, each in arrays.items() if name not in names}
    _, (grads, _) = backend.value_and_grad(loss)(variables, others)
    return dict(grads)


def torch_pass(
    problem: Problem, kernel: Subject, arrays: Arrays, names: Sequence[str],
    between: Callable[[], Any] | None = None, passes: int = 1,
) -> tuple[Any, Arrays]:  # fmt: skip
    """The output of PyTorch, and gradients for a cotangent with the strides that it has.

    Of several backward passes through one graph, the gradients are those of the last.
    """
    torch = importlib.import_module("torch")
    leaves = {name: arrays[name].detach().requires_grad_() for name in names}
    namespace = importlib.import_module("array_api_compat.torch")
    output = outputs(problem, kernel, {**arrays, **leaves}, namespace)["output"]
    if between is not None:
        between()
    grads: Sequence[Any] = ()
    cotangent = arrays["cotangent"].to(output.dtype)
    for left in reversed(range(passes)):
        grads = torch.autograd.grad(output, list(leaves.values()), cotangent, retain_graph=left > 0, allow_unused=True)
    return output, {
        name: torch.zeros_like(leaves[name]) if each is None else each for name, each in zip(leaves, grads, strict=True)
    }


ROLES = {
    "d_output": ("d_output", "do", "dout", "d_out", "grad", "grad_output", "cotangent", "g", "dy"),
    "query": ("query", "q"),
    "key": ("key", "k"),
    "value": ("value", "v"),
    "output": ("output", "out", "o"),
    "logsumexp": ("logsumexp", "lse", "softmax_lse", "l"),
}
"""What the parameters of a backward function are called."""


def _by_pair(
    problem: Problem, kernel: Subject, arrays: Arrays, backend: Backend, between: Callable[[], Any] | None
) -> Arrays:
    """Gradients of a raw pair of functions."""
    xp, backward = backend.namespace, kernel.backward
    assert backward is not None
    result = _call(problem, kernel, arrays, xp)
    results = list(result) if isinstance(result, tuple | list) else [result]
    if between is not None:
        between()
    named = dict(zip(("output", "logsumexp"), results, strict=False))
    known = {name: _turned(arrays[name], kernel, xp) for name in ("query", "key", "value")}
    known |= {"d_output": _turned(arrays["cotangent"], kernel, xp)} | named
    parameters = [each for each in inspect.signature(backward).parameters.values() if each.kind is not each.VAR_KEYWORD]
    names, words = list(ROLES), keywords(problem, kernel, arrays, xp)
    positional, chosen = [], {}
    for position, parameter in enumerate(parameters):
        role = next((role for role, words in ROLES.items() if parameter.name.lower() in words), None)
        if parameter.name in words:
            chosen[parameter.name] = words[parameter.name]
        elif parameter.kind is parameter.KEYWORD_ONLY:
            continue
        elif role is None and parameter.default is parameter.empty and position < len(names):
            positional.append(known[names[position]])
        elif role is not None:
            positional.append(known[role])
    gradients = backward(*positional, **chosen)
    return {
        name: _turned(each, kernel, xp, back=True)
        for name, each in zip(("query", "key", "value"), gradients, strict=False)
    }


def to_numpy(arrays: Arrays, backend: Backend) -> dict[str, NumpyArray]:
    """Arrays of a library as NumPy arrays."""
    return {name: np.asarray(backend.to_numpy(each)) for name, each in arrays.items()}
