"""The SHA-256 of a call, or of a saved layer, on given inputs: in every way of running that `identical` knows."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from attention_conformance.golden.identical import Verdict, arrays_of, verdicts, work_on
from attention_conformance.measure.finding import Finding
from attention_conformance.measure.messages import Described, Message
from attention_conformance.own.identical import Identical
from attention_conformance.own.source import Trees
from attention_conformance.problem import NumpyArray
from attention_conformance.processes import Order
from attention_core import scaled_dot_product_attention
from attention_core.backend import available_backends
from attention_core.layers import SaganAttention
from attention_files.safetensors import KEY, FileError, load_arrays, load_layer
from attention_numpy.trees import is_floating
from attention_workers import carried_out

NAME = "digest"
CALL = {"query": 4, "key": 4, "value": 4, "mask": 4, "bias": 4}
"""The arrays of a call, and how many axes those have whose first one is the batch."""

LAYER = {"mask": 4, "bias": 4, "query_mask": 2, "key_mask": 2, "position_ids": 2, "segment_ids": 2, "token_ids": 2}
CHANNELS = {"query": 3, "key": 3, "value": 3, "x": 3}


@dataclass(frozen=True)
class Recipe:
    """What is to be hashed.

    Attributes
    ----------
    files : tuple of Path
        Files of safetensors: the inputs, and at most one layer.
    scale, softcap : float, optional
        Of a call without a layer.
    """

    files: tuple[Path, ...]
    is_causal: bool = False
    scale: float | None = None
    softcap: float | None = None

    @property
    def options(self) -> dict[str, Any]:
        """The options that are not as they are by default."""
        options = {each.name: getattr(self, each.name) for each in fields(self)[1:]}
        return {name: value for name, value in options.items() if value is not None and value is not False}


def digest(
    *files: str | os.PathLike[str],
    is_causal: bool = False,
    scale: float | None = None,
    softcap: float | None = None,
    backends: Sequence[str] | None = None,
    devices: Sequence[str] | None = None,
    modes: Sequence[str] | None = None,
    threads: Sequence[int] = (),
    sha256: str | None = None,
    jobs: int = 0,
) -> Verdict:
    """Hash a call of attention, or a saved layer, on given inputs, and compare the bits of every way of running.

    A way is a device and a mode of a library, by default eager. Eager calls are computed again in small blocks, and
    with the samples of the batch apart. All is computed in reproducible arithmetic.

    Parameters
    ----------
    *files : path-like
        Files of safetensors. One may be a layer, as `attention_files.safetensors.save_layer` or the ``save`` of a
        framework's layer writes it; the others hold inputs by name. A layer takes its own arguments, such as ``x``, or
        ``query`` with ``key_mask``. Without a layer, they are ``query``, ``key``, ``value``, and, if there are any,
        ``mask`` and ``bias``, of `attention_core.scaled_dot_product_attention`.
    is_causal : bool
    scale, softcap : float, optional
        Of a call without a layer.
    backends, devices, modes : sequence of str, optional
        By default all that are installed, and eager calls.
    threads : sequence of int
        Numbers of threads, each of which gets processes of its own; needs ``jobs``.
    sha256 : str, optional
        The hash that is expected.
    jobs : int
        Processes at a time; with 0, all is computed in this one.

    Returns
    -------
    Verdict

    Raises
    ------
    ValueError
        When a file cannot be read or is not of what is computed, or an argument is not valid.

    Examples
    --------
    >>> import tempfile
    >>> from pathlib import Path
    >>> import numpy as np
    >>> from attention_conformance import digest
    >>> from attention_files.safetensors import save_arrays
    >>> path = Path(tempfile.mkdtemp()) / "call.safetensors"
    >>> save_arrays(path, dict.fromkeys(("query", "key", "value"), np.ones((1, 2, 3, 4), np.float32)))
    >>> verdict = digest(path, backends=["numpy"])
    >>> verdict.sha256[:16], verdict.complaints
    ('b9bad60d951dd5c8', ())
    """
    recipe = Recipe(tuple(map(Path, files)), is_causal, scale, softcap)
    if jobs < 0:
        raise ValueError(f"expected jobs of 0 or more; got {jobs}")
    if threads and not jobs:
        raise ValueError(f"expected jobs with threads, which a running process keeps; got {jobs}")
    read(recipe)
    chosen = orders(recipe, backends or available_backends(), devices=devices, modes=modes, threads=threads)
    messages = list(carried_out(chosen, jobs, work))
    results = [message for message in messages if isinstance(message, Finding)]
    if not results:
        raise ValueError(f"expected a device and a mode that there are; got {devices or 'all'} and {modes or 'all'}")
    return judge(results, sha256, [message for message in messages if isinstance(message, Described)])


def orders(
    recipe: Recipe,
    backends: Sequence[str],
    *,
    devices: Sequence[str] | None = None,
    modes: Sequence[str] | None = None,
    threads: Sequence[int] = (),
) -> list[Order]:
    """One order for every backend with its threads as they are; then for every number of threads that is asked for."""
    device_names, mode_names = (tuple(each) if each else None for each in (devices, modes))
    order = Order("", (NAME,), device_names, modes=mode_names or ("eager",), recipe=recipe)
    counts = (None, *dict.fromkeys(threads))
    return [replace(order, target=name, threads=count) for count in counts for name in backends]


def judge(results: Sequence[Finding], expected: str | None = None, described: Sequence[Described] = ()) -> Verdict:
    """Compare what all ways computed, and with the hash that is expected where one is."""
    left_out = [each for backend in described for each in backend.left_out]
    (verdict,) = verdicts([NAME], results, {NAME: expected}, origin="given", left_out=left_out)
    return verdict


def work(order: Order) -> Iterator[Message]:
    """Carry out an order in this process."""
    yield from work_on([read(order.recipe)], order)


def read(recipe: Recipe) -> Identical:
    """The computation of a recipe, which is tried once by NumPy, so that what does not fit is reported at once.

    Raise ValueError or TypeError when a file cannot be read, or inputs are missing, unknown or do not fit.
    """
    layers, inputs = [], dict[str, NumpyArray]()
    for path in recipe.files:
        arrays, metadata = load_arrays(path)
        if KEY in metadata:
            layers.append(load_layer(path))
            continue
        if twice := sorted(arrays.keys() & inputs.keys()):
            raise FileError(f"expected every input in one file; got {', '.join(twice)} in {path} again")
        inputs |= arrays
    if len(layers) > 1:
        raise FileError(f"expected at most one layer; got {len(layers)}")
    if layers and recipe.options:
        raise ValueError(f"expected the options of a layer in its file; got {', '.join(recipe.options)}")
    case = _layer_case(*layers[0], inputs) if layers else _call_case(inputs, recipe)
    with np.errstate(all="ignore"):
        case.function(case.trees())
    return case


def _call_case(inputs: Trees, recipe: Recipe) -> Identical:
    _check_names(inputs, needed=("query", "key", "value"), known=tuple(CALL))
    function = functools.partial(_call, recipe.options)
    return _case("a call of attention", inputs, function, dtype=inputs["query"].dtype.name, axes=CALL, inputs=inputs)


def _layer_case(definition: Any, parameters: Any, state: Any, inputs: Trees) -> Identical:
    taken = inspect.signature(definition.__call__).parameters
    positional = tuple(name for name, each in taken.items() if each.kind is each.POSITIONAL_ONLY)[1:]
    optional = tuple(name for name in taken if name in LAYER)
    first = positional[0]
    _check_names(inputs, needed=(first,), known=(*positional, *optional))
    exact = {"arithmetic": "reproducible"} | (
        {"implementation": "auto"} if hasattr(definition, "implementation") else {}
    )
    shows, definition = str(definition), definition.with_settings(**exact)
    trees = {**inputs, "parameters": parameters, "state": state}
    axes = LAYER | (dict.fromkeys(CHANNELS, 4) if isinstance(definition, SaganAttention) else CHANNELS)
    floats = (leaf.dtype.name for leaf in arrays_of({"parameters": parameters, **inputs}) if is_floating(leaf.dtype))
    function = functools.partial(_layer, definition, positional, "state" in taken)
    return _case(shows, trees, function, dtype=next(floats, "float32"), axes=axes, inputs=inputs)


def _case(shows: str, trees: Trees, function: Any, *, dtype: str, axes: Mapping[str, int], inputs: Trees) -> Identical:
    """The samples of a batch are independent where the first input has the axis for it; what lacks it, all share."""
    main = next(iter(name for name in ("query", "x", "token_ids") if name in inputs))
    count = inputs[main].shape[0] if inputs[main].ndim == axes[main] else 0
    batched = tuple(name for name, each in inputs.items() if each.ndim == axes[name] and each.shape[0] == count)
    return Identical(NAME, shows, lambda _: dict(trees), function, dtype=dtype, batched=batched if count else ())


def _check_names(inputs: Mapping[str, Any], *, needed: Sequence[str], known: Sequence[str]) -> None:
    if missing := [name for name in needed if name not in inputs]:
        among = f"among {', '.join(sorted(inputs))}" if inputs else "in any file"
        raise FileError(f"expected inputs {', '.join(needed)}; got no {', '.join(missing)} {among}")
    if unknown := sorted(inputs.keys() - set(known)):
        raise FileError(f"expected inputs out of {', '.join(known)}; got {', '.join(unknown)}")


def _call(options: Mapping[str, Any], trees: Trees) -> Any:
    arrays = [trees[name] for name in ("query", "key", "value")]
    others = {name: trees[name] for name in ("mask", "bias") if name in trees}
    return scaled_dot_product_attention(*arrays, **others, **options, return_logsumexp=True, arithmetic="reproducible")


def _layer(definition: Any, positional: Sequence[str], has_state: bool, trees: Trees) -> Any:
    arrays = [trees.get(name) for name in positional]
    others = {name: tree for name, tree in trees.items() if name in LAYER and name not in positional}
    return definition(trees["parameters"], *arrays, **others, **({"state": trees["state"]} if has_state else {}))
