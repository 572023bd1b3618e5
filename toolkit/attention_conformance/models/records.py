"""What a model computes on the way: the heads of each attention, the parts of each layer, in any framework."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from attention_conformance.models.sides import ComparisonError, Side
from attention_conformance.problem import NumpyArray
from attention_conformance.result import one_line
from attention_conformance.subjects.libraries import in_precision
from attention_core.backend import get_backend
from attention_core.weights import record_attention

__all__ = ["Place", "record"]

NAMES = (  # of modules of transformers and torch.nn, and of the same places here
    (r"embeddings|model\.embed_tokens", "embeddings"),
    (r"(?:encoder\.layer|model\.layers)\.(\d+)", r"layers.\1"),
    (r"(?:encoder\.layer)\.(\d+)\.attention\.output\.dense|model\.layers\.(\d+)\.self_attn", r"layers.\1\2.attention"),
    (r"encoder\.layer\.(\d+)\.attention\.output", r"layers.\1.attention_norm"),
    (r"encoder\.layer\.(\d+)\.output\.dense|model\.layers\.(\d+)\.mlp", r"layers.\1\2.feed_forward"),
    (r"self_attn", "attention"),
    (r"linear2", "feed_forward"),
)
Inputs = Mapping[str, NumpyArray]


class Place(NamedTuple):
    """A result on the way, in NumPy: (..., L, C), or (..., H, L, D) of heads."""

    name: str
    array: NumpyArray
    is_heads: bool = False


def record(side: Side, inputs: Inputs) -> list[Place]:
    """Run a model on inputs, and return its places in the order in which they were computed; the last is the output.

    Raises
    ------
    ComparisonError
        When the model refuses the inputs.
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
        """Keep query, key, value and output (..., H, L, D) of a call, or with the heads behind the positions."""
        for name, array in arrays.items():
            found = self._numpy(array)
            found = np.swapaxes(found, -2, -3) if swapped else found
            self._places.append(Place(f"attention {self.count}: {name}", found, is_heads=True))
        self.count += "output" in arrays


def _record_ours(side: Side, inputs: Inputs, places: list[Place]) -> None:
    notes, library = _Notes(side, places), _library(side)
    given = {name: library.from_numpy(array) for name, array in inputs.items()}
    x = given.pop(next(name for name in ("token_ids", "x", "query") if name in given))
    positions = {name: given.pop(name) for name in ("position_ids",) if name in given}
    with record_attention() as calls:

        def keep_calls() -> None:
            for call in calls[notes.count :]:
                notes.keep_heads(query=call.query, key=call.key, value=call.value, output=call.output())

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
            options = {name: each for name, each in (given | positions).items() if name in known}
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
    if kind in ("MultiHeadAttention", "GroupQueryAttention"):  # of Keras and flax.nnx, with one mask over pairs
        pairs = None if key_mask is None else np.broadcast_to(key_mask[:, None, :], (*key_mask.shape, first.shape[1]))
        pairs = mask if pairs is None else pairs if mask is None else pairs & mask
        is_keras = side.framework == "keras"
        found = {} if pairs is None else {"attention_mask": pairs} if is_keras else {"mask": pairs[:, None]}
        return [first] * (2 if is_keras else 1), found
    call = side.module.forward if side.framework == "torch" else side.module.__call__
    call = side.module.call if side.framework == "keras" else call
    known = inspect.signature(call).parameters
    senses: dict[str, NumpyArray | None] = {"key_mask": key_mask, "mask": mask}
    if key_mask is not None:
        senses |= {"attention_mask": key_mask.astype(np.int64)}
        senses |= dict.fromkeys(("src_key_padding_mask", "key_padding_mask"), ~key_mask)
    if mask is not None:
        senses |= dict.fromkeys(("src_mask", "attn_mask"), ~mask)
    senses["position_ids"] = inputs.get("position_ids")
    found = {name: each for name, each in senses.items() if each is not None and name in known}
    lost = [name for name in ("key_mask", "mask") if name in inputs and not _has(found, name)]
    if lost:
        raise ComparisonError(f"expected a model that takes {lost[0]}; got {side.name}, called by {', '.join(known)}")
    is_attention = kind == "MultiheadAttention"
    return [first] * (3 if is_attention else 1), found | ({"need_weights": False} if is_attention else {})


def _has(found: Mapping[str, Any], name: str) -> bool:
    words = {
        "key_mask": ("attention_mask", "src_key_padding_mask", "key_padding_mask"),
        "mask": ("src_mask", "attn_mask"),
    }
    return bool({name, *words[name]} & set(found))


def _record_torch(side: Side, inputs: Inputs, places: list[Place]) -> None:
    torch, notes = importlib.import_module("torch"), _Notes(side, places)
    swapped = not getattr(
        side.module, "batch_first", getattr(getattr(side.module, "self_attn", None), "batch_first", True)
    )
    functional, handles = torch.nn.functional, []
    attention, fast = functional.scaled_dot_product_attention, torch.backends.mha.get_fastpath_enabled()

    def recorded(query: Any, key: Any, value: Any, *rest: Any, **options: Any) -> Any:
        output = attention(query, key, value, *rest, **options)
        notes.keep_heads(query=query, key=key, value=value, output=output)
        return output

    def kept(name: str) -> Callable[..., None]:
        return lambda module, arguments, result: notes.keep(name, result, swapped)

    arrays, options = _arguments(side, inputs)
    placed = [torch.from_numpy(np.array(each)) for each in arrays]
    placed = [each.swapaxes(0, 1) if swapped else each for each in placed]
    options = {
        name: torch.from_numpy(np.array(each)) if hasattr(each, "shape") else each for name, each in options.items()
    }
    if hasattr(side.module, "config"):  # of transformers
        options["use_cache"] = False
        if side.module.config.model_type in ("bert", "roberta", "xlm-roberta", "camembert"):
            del options["use_cache"]
    try:
        functional.scaled_dot_product_attention = recorded
        torch.backends.mha.set_fastpath_enabled(False)
        for name, module in side.module.named_modules():
            known = _canonical(name)
            if name and (known or not side.definitions):
                handles.append(module.register_forward_hook(kept(known or name)))
        with torch.no_grad():
            notes.keep("output", side.module(*placed, **options), swapped)
    finally:
        functional.scaled_dot_product_attention = attention
        torch.backends.mha.set_fastpath_enabled(fast)
        for handle in handles:
            handle.remove()


def _canonical(name: str) -> str:
    """The name here of a module of transformers or torch.nn; empty where there is none."""
    bare = re.sub(r"^(bert|roberta)\.", "", name)
    return next((re.sub(pattern, new, bare) for pattern, new in NAMES if re.fullmatch(pattern, bare)), "")


def _record_keras(side: Side, inputs: Inputs, places: list[Place]) -> None:
    keras, notes = importlib.import_module("keras"), _Notes(side, places)
    parts = list(side.module._flatten_layers(include_self=False))
    arrays, options = _arguments(side, inputs)
    with contextlib.ExitStack() as stack:
        for layer in [side.module, *parts]:
            if type(layer).__name__ in ("MultiHeadAttention", "GroupQueryAttention"):
                for name in ("query", "key", "value"):
                    stack.enter_context(_watched(getattr(layer, f"_{name}_dense"), _heads_noted(notes, name)))
                stack.enter_context(_watched(layer._output_dense, _heads_noted(notes, "output")))
        for layer in parts:
            stack.enter_context(_watched(layer, _noted(notes, layer.name)))
        placed = [keras.ops.convert_to_tensor(each) for each in arrays]
        notes.keep("output", side.module(*placed, **options))


def _noted(notes: _Notes, name: str) -> Callable[[Any, Any], None]:
    return lambda x, y: notes.keep(name, y)


def _heads_noted(notes: _Notes, name: str) -> Callable[[Any, Any], None]:
    return lambda x, y: notes.keep_heads(swapped=True, **{name: x if name == "output" else y})


@contextlib.contextmanager
def _watched(layer: Any, note: Callable[[Any, Any], None]) -> Iterator[None]:
    """Have a layer of Keras tell its input and output."""
    before, held = layer.call, layer.__dict__.get("call")

    def call(x: Any, *rest: Any, **options: Any) -> Any:
        y = before(x, *rest, **options)
        note(x, y)
        return y

    call.__signature__ = inspect.signature(before)  # type: ignore[attr-defined]
    layer.__dict__["call"] = call
    try:
        yield
    finally:
        layer.__dict__.pop("call")
        layer.__dict__ |= {} if held is None else {"call": held}


def _record_nnx(side: Side, inputs: Inputs, places: list[Place]) -> None:
    nnx, notes = importlib.import_module("flax.nnx"), _Notes(side, places)
    named = {id(each): ".".join(map(str, path)) for path, each in nnx.iter_modules(side.module)}
    jnp = importlib.import_module("jax.numpy")
    arrays, options = _arguments(side, inputs)
    with contextlib.ExitStack() as stack:
        for _, module in list(nnx.iter_modules(side.module)):
            if isinstance(module, nnx.MultiHeadAttention):
                stack.enter_context(_attended(module, notes))
        kinds = {type(each): None for _, each in nnx.iter_modules(side.module) if "__call__" in vars(type(each))}
        for kind in kinds:
            stack.enter_context(_told(kind, lambda module, y: notes.keep(named.get(id(module), "") or "output", y)))
        side.module(
            *(jnp.asarray(each) for each in arrays), **{name: jnp.asarray(each) for name, each in options.items()}
        )


@contextlib.contextmanager
def _attended(module: Any, notes: _Notes) -> Iterator[None]:
    """Have the attention of a module of flax.nnx tell its heads."""
    before = module.attention_fn

    def attention(query: Any, key: Any, value: Any, *rest: Any, **options: Any) -> Any:
        output = before(query, key, value, *rest, **options)
        notes.keep_heads(swapped=True, query=query, key=key, value=value, output=output)
        return output

    module.attention_fn = attention
    try:
        yield
    finally:
        module.attention_fn = before


@contextlib.contextmanager
def _told(kind: Any, note: Callable[[Any, Any], None]) -> Iterator[None]:
    """Have all modules of a class of flax.nnx tell their outputs."""
    before = kind.__call__

    def call(module: Any, *rest: Any, **options: Any) -> Any:
        y = before(module, *rest, **options)
        note(module, y)
        return y

    call.__signature__ = inspect.signature(before)  # type: ignore[attr-defined]
    kind.__call__ = call
    try:
        yield
    finally:
        kind.__call__ = before


_RECORDERS = {"torch": _record_torch, "keras": _record_keras, "nnx": _record_nnx}
