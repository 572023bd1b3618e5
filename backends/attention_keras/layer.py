"""A layer of `attention_core.layers` as a layer of Keras: variables by name, seeds, masks, and NumPy and back."""

from __future__ import annotations

import contextlib
import functools
import operator
import random
from collections import namedtuple
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any, ClassVar, TypeVar

import keras
import numpy as np

from attention_core import Attention, get_backend
from attention_core import layers as definitions
from attention_core.backend import Array, check_flags, keyword_error, names_of, unconverted
from attention_core.layers import check_fit, named_arrays, tree_from_names
from attention_core.masks import Mask
from attention_core.random import check_seed, plain_seed
from attention_keras.library import attached, backend, plain, variable_name
from attention_numpy.trees import constructor, known_device

__all__ = ["AttentionLayer", "Layer", "named_results", "place_masks"]

AnyLayer = TypeVar("AnyLayer", bound="Layer")
_NUMPY = get_backend("numpy")
_STATE = "state"  # what the names of a state begin with
_CLASSES: dict[type[definitions.Layer], type[Layer]] = {}  # by the class of their definition


@unconverted
class Layer(keras.layers.Layer):  # type: ignore[misc]
    """What the layers share: variables by name, seeds, masks, and the way to NumPy and back.

    Attributes
    ----------
    definition : attention_core.layers.Layer
        The settings, and what is computed.
    """

    kind: ClassVar[type[definitions.Layer]]

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "kind" in vars(cls):
            cls.__init__ = constructor(Layer, cls.kind, keeps_rest=True)  # type: ignore[method-assign]
            _CLASSES.setdefault(cls.kind, cls)

    def __init__(self, *settings: Any, seed: int | None = None, **kwargs: Any) -> None:
        if seed is not None:
            seed = operator.index(seed)
            check_seed(seed)
        options = {field.name: kwargs.pop(field.name) for field in fields(self.kind) if field.name in kwargs}
        try:
            super().__init__(**kwargs)
        except ValueError as error:
            if "keyword" not in str(error):
                raise
            names: Any = names_of(self.kind.__init__)
            raise keyword_error(self.kind.__name__, names, _unknown(kwargs)) from None
        definition = self.kind(*settings, **options)
        self.definition = definition
        self.seed = seed
        # Where a mask would hide nothing, Keras is to warn that it gets lost.
        self.supports_masking = not isinstance(definition, definitions.SaganAttention)
        # Without a seed, the generator that keras.utils.set_random_seed sets gives one, as it does for Keras's layers.
        self._start = random.randint(1, 10**9) if seed is None else seed
        self._first: Callable[[], tuple[Any, Any]] = self._drawn
        self._seeds = None
        if getattr(definition, "dropout", 0) > 0:
            self._seeds = keras.random.SeedGenerator(self._start % 2**31)  # PyTorch has no wider state

    def __call__(self, *inputs: Any, **options: Any) -> Any:
        """Call the layer, in every way in which a layer of Keras is called."""
        try:
            return super().__call__(*inputs, **options)
        except TypeError:
            names: Any = names_of(self.call)
            known = () if names is None else (*names.keywords, "mask")
            for option in options if names else ():
                if option not in known:
                    raise keyword_error(self.kind.__name__, names._replace(keywords=known), option) from None
            raise

    def build(self, input_shape: Any = None) -> None:
        """Make the variables. Their sizes are settings, so that a shape need not be given."""
        parameters, state = self._first()
        first = {True: named_arrays(parameters), False: named_arrays(state, _STATE)}
        # Keras would cast variables to the compute dtype, but the state advances in that of the variables.
        self._own = {
            name: self.add_weight(
                shape=tuple(value.shape),
                initializer=lambda shape, dtype, value=value: backend.from_numpy(value),
                trainable=trainable,
                autocast=False,
                name=variable_name(name),
            )
            for trainable, values in first.items()
            for name, value in values.items()
        }

    def get_config(self) -> dict[str, Any]:
        """The settings, the seed, and what Keras adds."""
        return {**super().get_config(), **_settings(self.definition), "seed": self.seed}

    def compute_output_spec(self, *inputs: Any, **options: Any) -> Any:
        """Shapes and dtypes of what a call returns."""
        self._ensure_built()
        return super(keras.layers.Layer, self).compute_output_spec(*inputs, **options)

    def compute_output_shape(self, input_shape: Any, *others: Any) -> tuple[int | None, ...]:
        """The shape of the output, given those of the inputs."""
        dtype = "int32" if self.kind in (definitions.Embeddings, definitions.Decoder) else self.compute_dtype
        inputs = (
            keras.tree.map_shape_structure(lambda dims: keras.KerasTensor(dims, dtype), shape)
            for shape in (input_shape, *others)
        )
        return tuple(self.compute_output_spec(*inputs).shape)

    def compute_mask(self, inputs: Any, previous_mask: Any) -> Any:
        """The mask of the input, or of the query."""
        return previous_mask.get("query") if isinstance(previous_mask, Mapping) else previous_mask

    def to_numpy(self) -> tuple[Any, Any]:
        """The parameters and the state, as trees of NumPy arrays, bit for bit."""
        self._ensure_built()
        return backend.to_numpy(self._trees(self.variable_dtype))  # type: ignore[no-any-return]

    @classmethod
    def from_numpy(
        cls: type[AnyLayer],
        definition: definitions.Layer,
        parameters: Any,
        state: Any = (),
        *,
        device: str | None = None,
        dtype: str | None = None,
    ) -> AnyLayer:
        """Make a layer of trees of NumPy arrays.

        Parameters
        ----------
        definition : attention_core.layers.Layer
        parameters, state : trees of numpy.ndarray
            As `to_numpy` returns them.
        device : str, optional
            One of ``backend.devices()``.
        dtype : str, optional
            A floating-point type or a dtype policy of Keras; by default the type of the arrays, bit for bit.

        Raises
        ------
        TypeError, ValueError
            When the definition is not one of the class, or the arrays do not fit it.
        """
        made = _CLASSES.get(type(definition)) if cls is Layer else cls
        if made is None or not isinstance(definition, made.kind):
            raise TypeError(f"expected the definition of a {cls.__name__}; got {type(definition).__name__}")
        check_fit(definition, parameters, state)
        dtypes = {array.dtype.name for array in [*named_arrays(parameters).values(), *named_arrays(state).values()]}
        if dtype is None and len(dtypes) > 1:
            raise ValueError(f"expected arrays of one dtype, or a dtype; got {', '.join(sorted(dtypes))}")
        with contextlib.nullcontext() if device is None else keras.device(known_device(device, backend.devices())):
            return made(**_settings(definition), dtype=dtype or next(iter(dtypes), None))._filled(parameters, state)

    def with_settings(self: AnyLayer, **changes: Any) -> AnyLayer:
        """Copy the layer with other settings, such as ``arithmetic``, ``implementation`` or ``dropout``.

        Raises
        ------
        TypeError, ValueError
            As `attention_core.layers.Layer.with_settings`.
        """
        definition = self.definition.with_settings(**changes)
        layer: AnyLayer = type(self).from_config({**self.get_config(), **_settings(definition)})
        return layer._filled(*self.to_numpy())

    def _filled(self: AnyLayer, parameters: Any, state: Any) -> AnyLayer:
        """Build the layer with these values from NumPy."""
        arrays = _NUMPY.from_numpy((parameters, state), dtype=self.variable_dtype)
        self._first = lambda: arrays
        self.build()
        self._first = self._drawn
        return self

    def __setattr__(self, name: str, value: Any) -> None:
        self.kind.check_assigned(name, value)
        super().__setattr__(name, value)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if "definition" not in vars(self):
                raise
            places = {"settings": "layer.definition", "parameters": "layer.to_numpy()[0]"}
            raise vars(self)["definition"].place_of(name, type(self).__name__, **places) from None

    def _drawn(self) -> tuple[Any, Any]:
        """The first values under the seed, on NumPy: no compiler that traces a call of the layer sees them drawn."""
        dtype = self.variable_dtype
        options = {"xp": _NUMPY.namespace, "dtype": "float32" if dtype == "bfloat16" else dtype}
        drawn = self.definition.init(self._start, **options), self.definition.init_state(self._start, **options)
        return _NUMPY.from_numpy(drawn, dtype=dtype)  # type: ignore[no-any-return]  # NumPy draws no bfloat16

    def _ensure_built(self) -> None:
        if not self.built:
            self.build()

    def _trees(self, dtype: str) -> tuple[Any, Any]:
        """The parameters and the state, as tensors."""
        leaves = {name: keras.ops.cast(variable.value, dtype) for name, variable in self._own.items()}
        parameters, state = self.definition.parameters, self.definition.state
        return tree_from_names(parameters, leaves), tree_from_names(state, leaves, _STATE)

    def _apply(self, *inputs: Any, training: bool | None, seed: Any = None, **options: Any) -> Any:
        """Call the definition, and in training advance the state."""
        if training is not None:
            check_flags(training=training)
        if training and self._seeds is not None:
            options["seed"] = self._seeds.next() if seed is None else plain_seed(backend.draw_seed(seed), _is_array)
        inputs, options = keras.tree.map_structure(plain, inputs), {each: plain(options[each]) for each in options}
        parameters, state = self._trees(self.compute_dtype)
        if state:
            # On PyTorch, to go backward, its values are needed even after the next step.
            options["state"] = keras.tree.map_structure(keras.ops.copy, state) if training else state
        result = self.definition(parameters, *inputs, **options, xp=backend.namespace)  # type: ignore[operator]
        if state and training:
            advanced = self.definition.updated_state(*self._trees(self.variable_dtype), xp=backend.namespace)
            for name, value in named_arrays(advanced, _STATE).items():
                self._own[name].assign(value)
        return named_results(result)


def _unknown(options: Mapping[str, Any]) -> str:
    """The first of some options that layers of Keras do not take."""
    return next(name for name in options if name not in ("name", "dtype", "trainable", "autocast"))


def _is_array(seed: Any) -> bool:
    return hasattr(seed, "dtype") and not isinstance(seed, np.generic)


class AttentionLayer(Layer):
    """A layer with a mask over pairs, and Keras's masks over the places of its inputs."""

    def __call__(self, *inputs: Any, mask: Mask | Array | None = None, **options: Any) -> Any:
        """Call the layer, in every way in which a layer of Keras is called."""
        if mask is not None:
            if options.get("attention_mask") is not None:
                raise TypeError("expected mask, or attention_mask, which is the same; got both")
            options["attention_mask"] = mask  # by its own name, Keras would take it for the mask of the places
        return super().__call__(*inputs, **options)


def _settings(definition: definitions.Layer) -> dict[str, Any]:
    return {name: value for name, value in definition.settings().items() if name != "layer"}


@functools.cache
def _result(names: tuple[str, ...]) -> Any:
    return Attention if names == Attention._fields else namedtuple("Attention", names)


def named_results(result: Any) -> Any:
    """A result without what was not asked for: an output of a layer of Keras is a tensor, never ``None``."""
    if not isinstance(result, Attention):
        return result
    found = {name: value for name, value in result._asdict().items() if value is not None}
    return _result(tuple(found))(**found)


def per_sample(mask: Any, query: Any, *, has_channels: bool = True) -> Any:
    """A mask of as many axes as the query, which in Keras is one for each sample, with the axis of heads."""
    query = query.get("query") if isinstance(query, Mapping) else query
    is_array = hasattr(mask, "shape") and not isinstance(mask, Mask)
    axes = len(getattr(query, "shape", ())) + (not has_channels)
    return mask[..., None, :, :] if is_array and len(mask.shape) == axes > 2 else mask


def place_masks(query: Any, key: Any, value: Any, query_mask: Any, key_mask: Any) -> tuple[Any, Any]:
    """The masks over queries and over keys: those given, or else those that Keras attached to the inputs."""
    if isinstance(query, Mapping):
        query, key, value = (query.get(name) for name in ("query", "key", "value"))
    if query_mask is None:
        query_mask = attached(query)
    if key_mask is None:
        key_mask = attached(query if key is None else key)
    masks = [mask for mask in (key_mask, attached(value)) if mask is not None]
    return query_mask, functools.reduce(operator.and_, masks) if masks else None


Layer.__module__ = "attention_keras.layers"  # by which documentation knows it
