"""What a model computes on the way: the heads of each attention, the parts of each layer, in any framework."""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple
from unittest import mock

import numpy as np

from attention_conformance.call import one_line
from attention_conformance.launch.libraries import in_precision
from attention_conformance.port.sides import ComparisonError, Side
from attention_conformance.problem import NumpyArray
from attention_core.backend import get_backend
from attention_core.weights import record_attention

NAMES = (  # of modules of transformers and torch.nn, and of the same places here
    (r"embeddings|model\.embed_tokens", "embeddings"),
    (r"(?:encoder\.layer|model\.layers)\.(\d+)", r"layers.\1"),
    (r"(?:encoder\.layer)\.(\d+)\.attention\.output\.dense|model\.layers\.(\d+)\.self_attn", r"layers.\1\2.attention"),
    (r"encoder\.layer\.(\d+)\.attention\.output", r"layers.\1.attention_norm"),
    (r"encoder\.layer\.(\d+)\.output\.dense|model\.layers\.(\d+)\.mlp", r"layers.\1\2.feed_forward"),
    (r"self_attn", "attention"),
    (r"linear2", "feed_forward"),
)
WITH_PAIRS = ("MultiHeadAttention", "GroupQueryAttention")  # of Keras and flax.nnx, with one mask over pairs
Inputs = Mapping[str, NumpyArray]
SENSES: dict[str, dict[str, Any]] = {  # by our name, the names elsewhere, and how the array reads there
    "key_mask": {"key_mask": np.array, "attention_mask": np.int64, "src_key_padding_mask": np.logical_not,
                 "key_padding_mask": np.logical_not},
    "mask": {"mask": np.array, "src_mask": np.logical_not, "attn_mask": np.logical_not},
    "position_ids": {"position_ids": np.array},
}  # fmt: skip


class Place(NamedTuple):
    """A result on the way, in NumPy: (..., L, C), or (..., H, L, D) of heads."""

    name: str
    array: NumpyArray
    is_heads: bool = False

    def cleared(self, inputs: Inputs) -> Place:
        """The place with 0 at positions of padding, of which nobody promises anything."""
        array, mask, at = self.array, inputs.get("key_mask"), -2 if self.is_heads else 1
        if mask is None or array.ndim < 3 or (array.shape[0], array.shape[at]) != mask.shape:
            return self
        dims = [1] * array.ndim
        dims[0], dims[at] = mask.shape
        return self._replace(array=np.where(mask.reshape(dims), array, np.zeros((), array.dtype)))


def record(side: Side, inputs: Inputs) -> list[Place]:
    """Run a model on inputs, and return its places in the order in which they were computed; the last is the output.

    Raise ComparisonError when the model refuses the inputs.
    """
    run = _record_ours if side.is_ours else _RECORDERS[side.framework]
    is_wide = any(each.dtype.name == "float64" for each in inputs.values())
    places: list[Place] = []
    try:
        with in_precision(_library(side), "float64" if is_wide else "float32"):
            run(side, inputs, places)
    except ComparisonError:
        raise
    except Exception as error:  # whatever a library says
        raise ComparisonError(f"expected inputs that {side.name} takes; got {one_line(error)}") from error
    if not places or places[-1].name != "output":
        raise ComparisonError(f"expected an output of floating point, (..., L, C), of {side.name}; got another")
    return places


def _library(side: Side) -> Any:
    """The backend of the arrays of a side."""
    if side.framework == "keras":
        return get_backend(importlib.import_module("keras").backend.backend())
    return get_backend("jax" if side.framework == "nnx" else side.framework)


def _is_float(array: Any) -> bool:
    return len(getattr(array, "shape", ())) > 1 and "float" in str(getattr(array, "dtype", ""))


class _Notes:
    """Keeps places, and numbers calls of attention."""

    def __init__(self, side: Side, places: list[Place]) -> None:
        self._library, self._places, self.count = _library(side), places, 0

    def _numpy(self, array: Any) -> NumpyArray:
        return np.asarray(self._library.to_numpy(array))

    def keep(self, name: str, result: Any, swapped: bool = False) -> None:
        """Keep a result, or the first array of several."""
        if isinstance(result, Mapping):
            result = next((result[each] for each in ("logits", "last_hidden_state") if each in result), result)
        result = result[0] if isinstance(result, tuple | list) and result else result
        if _is_float(result):
            array = self._numpy(result)
            self._places.append(Place(name, np.swapaxes(array, 0, 1) if swapped and array.ndim == 3 else array))

    def keep_heads(self, swapped: bool = False, **arrays: Any) -> None:
        """Keep query, key, value or output (..., H, L, D) of a call, or with the heads behind the positions."""
        for name, array in arrays.items():
            numbers = self._numpy(array)
            numbers = np.swapaxes(numbers, -2, -3) if swapped else numbers
            self._places.append(Place(f"attention {self.count}: {name}", numbers, is_heads=True))
        self.count += "output" in arrays

    def keep_call(self, arguments: Any, output: Any, swapped: bool = False) -> None:
        """Keep the heads of a call of attention with query, key and value."""
        self.keep_heads(swapped, **dict(zip(("query", "key", "value"), arguments, strict=False)), output=output)


def _record_ours(side: Side, inputs: Inputs, places: list[Place]) -> None:
    notes, library = _Notes(side, places), _library(side)
    arrays = {name: library.from_numpy(array) for name, array in inputs.items()}
    x = arrays.pop(next(name for name in ("token_ids", "x", "query") if name in arrays))
    with record_attention() as calls:

        def keep_calls() -> None:
            for call in calls[notes.count :]:
                notes.keep_call((call.query, call.key, call.value), call.output())

        def keep(name: str, function: Callable[[Any], Any], h: Any) -> Any:
            if name == "layers.0":
                notes.keep("embeddings", h)
            y = function(h)
            keep_calls()
            notes.keep(name, y)
            return y

        for index, (layer, definition) in enumerate(zip(side.module, side.definitions, strict=True)):
            at = "" if len(side.module) == 1 else f"layers.{index - 1}" if index else "embeddings"
            known = inspect.signature(type(definition).__call__).parameters
            options = {name: each for name, each in arrays.items() if name in known}
            if "hook" in known:
                options["hook"] = lambda name, *rest, at=at: keep(f"{at}.{name}" if at else name, *rest)
            x = layer(x, **options)
            keep_calls()
            if at:
                notes.keep(at, x)
    notes.keep("output", x)


def _arguments(side: Side, inputs: Inputs) -> tuple[list[NumpyArray], dict[str, Any]]:
    """What a module of another library takes: padding and masks by its own names, in its own sense."""
    first = next(inputs[name] for name in ("token_ids", "x", "query") if name in inputs)
    kind, key_mask, mask = type(side.module).__name__, inputs.get("key_mask"), inputs.get("mask")
    if kind in WITH_PAIRS:
        pairs = None if key_mask is None else np.broadcast_to(key_mask[:, None, :], (*key_mask.shape, first.shape[1]))
        pairs = mask if pairs is None else pairs if mask is None else pairs & mask
        if side.framework == "keras":  # called with query and value
            return [first] * 2, {} if pairs is None else {"attention_mask": pairs}
        return [first], {} if pairs is None else {"mask": pairs[:, None]}
    calls = {"torch": "forward", "keras": "call", "nnx": "__call__"}
    known = inspect.signature(getattr(side.module, calls[side.framework])).parameters
    keywords: dict[str, Any] = {"need_weights": False} if kind == "MultiheadAttention" else {}
    for name in ("key_mask", "mask", "position_ids"):
        theirs = next((each for each in SENSES[name] if each in known), None)
        if name in inputs and theirs is None:
            raise ComparisonError(f"expected a model that takes {name}; got {side.name}, called by {', '.join(known)}")
        if name in inputs and theirs is not None:
            keywords[theirs] = SENSES[name][theirs](inputs[name])
    return [first] * (3 if kind == "MultiheadAttention" else 1), keywords


def _record_torch(side: Side, inputs: Inputs, places: list[Place]) -> None:
    torch, notes, module = importlib.import_module("torch"), _Notes(side, places), side.module
    is_first = getattr(module, "batch_first", getattr(getattr(module, "self_attn", None), "batch_first", True))
    arrays, options = _arguments(side, inputs)
    tensors = [torch.from_numpy(np.array(each)) for each in arrays]
    options = {name: torch.from_numpy(each) if hasattr(each, "dtype") else each for name, each in options.items()}
    if "use_cache" in inspect.signature(module.forward).parameters:  # of transformers
        options["use_cache"] = False

    def kept(name: str) -> Callable[..., None]:
        return lambda module, arguments, result: notes.keep(name, result, not is_first)

    with contextlib.ExitStack() as stack:
        stack.enter_context(_watched(torch.nn.functional, "scaled_dot_product_attention", notes.keep_call))
        stack.callback(torch.backends.mha.set_fastpath_enabled, torch.backends.mha.get_fastpath_enabled())
        torch.backends.mha.set_fastpath_enabled(False)  # it calls none of the modules inside
        for name, part in module.named_modules():
            known = _canonical(name) or ("" if side.definitions else name)
            if known:
                stack.callback(part.register_forward_hook(kept(known)).remove)
        stack.enter_context(torch.no_grad())
        output = module(*(each if is_first else each.swapaxes(0, 1) for each in tensors), **options)
        notes.keep("output", output, not is_first)


def _canonical(name: str) -> str:
    """The name here of a module of transformers or torch.nn; empty where there is none."""
    bare = re.sub(r"^(bert|roberta)\.", "", name)
    return next((re.sub(pattern, new, bare) for pattern, new in NAMES if re.fullmatch(pattern, bare)), "")


def _record_keras(side: Side, inputs: Inputs, places: list[Place]) -> None:
    keras, notes = importlib.import_module("keras"), _Notes(side, places)
    parts = list(side.module._flatten_layers(include_self=False))
    arrays, options = _arguments(side, inputs)

    def kept(name: str) -> Callable[..., None]:
        return lambda arguments, result: notes.keep(name, result)

    def kept_heads(name: str) -> Callable[..., None]:
        return lambda arguments, result: notes.keep_heads(True, **{name: arguments[0] if name == "output" else result})

    with contextlib.ExitStack() as stack:
        for layer in [side.module, *parts]:
            for name in ("query", "key", "value", "output") if type(layer).__name__ in WITH_PAIRS else ():
                stack.enter_context(_watched(getattr(layer, f"_{name}_dense"), "call", kept_heads(name)))
        for layer in parts:
            stack.enter_context(_watched(layer, "call", kept(layer.name)))
        notes.keep("output", side.module(*map(keras.ops.convert_to_tensor, arrays), **options))


def _record_nnx(side: Side, inputs: Inputs, places: list[Place]) -> None:
    nnx, notes = importlib.import_module("flax.nnx"), _Notes(side, places)
    parts = list(nnx.iter_modules(side.module))
    named = {id(part): ".".join(map(str, path)) for path, part in parts}
    arrays, options = importlib.import_module("jax").tree.map(_library(side).from_numpy, _arguments(side, inputs))

    def kept(arguments: Any, result: Any) -> None:
        notes.keep(named.get(id(arguments[0]), "") or "output", result)

    with contextlib.ExitStack() as stack:
        for _, part in parts:
            if isinstance(part, nnx.MultiHeadAttention):
                stack.enter_context(_watched(part, "attention_fn", functools.partial(notes.keep_call, swapped=True)))
        for kind in {type(part): None for _, part in parts if "__call__" in vars(type(part))}:
            stack.enter_context(_watched(kind, "__call__", kept))
        side.module(*arrays, **options)


def _watched(owner: Any, name: str, note: Callable[[Any, Any], None]) -> contextlib.AbstractContextManager[Any]:
    """Have a function of an object tell its arguments by position, and its result."""
    before = getattr(owner, name)

    @functools.wraps(before)
    def call(*arguments: Any, **options: Any) -> Any:
        result = before(*arguments, **options)
        note(arguments, result)
        return result

    return mock.patch.object(owner, name, call)


_RECORDERS = {"torch": _record_torch, "keras": _record_keras, "nnx": _record_nnx}
