"""The layers of `attention_core.layers` as pytrees: parameters with the definition of what is computed with them.

A layer is a value. Nothing changes it, and every transformation of JAX takes it as an argument::

    layer = MultiHeadAttention.init(jax.random.key(0), channels=64, num_heads=8, dropout=0.1)

    @jax.jit
    def step(layer, x, key):
        gradients = jax.grad(lambda layer: jax.numpy.sum(layer(x, key=key)))(layer)
        return jax.tree.map(lambda p, g: p - 0.1 * g, layer.refreshed(), gradients)
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from os import PathLike
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
import numpy as np

from attention_core import layers
from attention_core.backend import names_keywords, names_of, shape_text, words_of
from attention_core.layers.adapters import Adapted, settings_signature
from attention_core.random import check_seed
from attention_jax.backend import WIDE, _devices, backend
from attention_jax.exporting import register_layer
from attention_numpy.trees import known_device

__all__ = [
    "DecoderLayer",
    "Embeddings",
    "EncoderLayer",
    "FeedForward",
    "GatedFeedForward",
    "Layer",
    "MultiHeadAttention",
    "RMSNorm",
    "SaganAttention",
    "load",
    "save",
]

_SEEDS = words_of("seed") | {"seed", "training", "train", "deterministic", "inference"}  # a key says all that
_RATES = (words_of("dropout") - _SEEDS) | {"dropout"}


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Layer(Adapted):
    """What the layers have in common: a pytree whose leaves are the parameters and the state.

    Attributes
    ----------
    definition : attention_core.layers.Layer
        The settings: static, so that a function is compiled once for all layers that agree in them.
    parameters : tree of Array
    state : tree of Array
        What training carries along. Its gradient is zero, so that one rule updates all leaves of a layer.
    """

    definition: Any
    parameters: Any
    state: Any = ()
    _classes: ClassVar[dict[type[layers.Layer], type[Layer]]] = {}

    def __new__(cls, *fields: Any, **named: Any) -> Any:
        """Refuse settings, which are those of `init`."""
        settings = fields and not isinstance(fields[0], layers.Layer)
        if settings or named.keys() - {"definition", "parameters", "state"}:
            raise TypeError(f"expected {cls.__name__}.init(key, ...) with the settings; got {cls.__name__}(...)")
        return super().__new__(cls)

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        jax.tree_util.register_dataclass(cls, data_fields=["parameters", "state"], meta_fields=["definition"])
        register_layer(cls)

    @classmethod
    def _complete(cls) -> None:
        init = Layer.init.__func__  # type: ignore[attr-defined]
        cls.init = classmethod(_named_init(init, cls.kind))  # type: ignore[assignment]

    @classmethod
    def init(cls, key: Any, /, *settings: Any, dtype: Any = "float32", device: Any = None, **named: Any) -> Self:
        """Make a layer with the values it starts from.

        Parameters
        ----------
        key : key of jax.random, int, or Array of two int32
            For the same integer the values are the same, bit for bit, on every framework.
        *settings, **named
            Those of the class of the same name in `attention_core.layers`, by position or by name.
        dtype : {"float32", "bfloat16", "float16", "float64"} or dtype
        device : str, jax.Device or jax.sharding.Sharding, optional

        Raises
        ------
        TypeError, ValueError
            When a setting, the key, the dtype or the device is not one.
        """
        definition, name = cls.kind(*settings, **named), floating_name(dtype)
        options = {"xp": backend.namespace, "dtype": name, "device": _placed(device)}
        seed = as_seed(key)
        return cls(definition, definition.init(seed, **options), definition.init_state(seed, **options))

    @classmethod
    def from_numpy(
        cls, definition: layers.Layer, parameters: Any, state: Any = (), *, device: Any = None, dtype: Any = None
    ) -> Self:
        kind = cls._class_of(definition, parameters, state)
        arrays = backend.from_numpy((parameters, state), dtype=None if dtype is None else floating_name(dtype))
        if device is not None:
            arrays = jax.device_put(arrays, _placed(device))
        return kind(definition, *arrays)

    def to_numpy(self) -> tuple[Any, Any]:
        return backend.to_numpy((self.parameters, self.state))  # type: ignore[no-any-return]

    def read(self) -> Any:
        return self.parameters

    def astype(self, dtype: Any, /) -> Self:
        """The layer with parameters and state of another floating-point type, through which gradients flow.

        Raises
        ------
        ValueError
            When JAX, as configured, does not compute with that type.
        """
        name = floating_name(dtype)
        return jax.tree.map(lambda leaf: leaf.astype(name), self)  # type: ignore[no-any-return]

    def with_settings(self, **changes: Any) -> Self:
        return dataclasses.replace(self, definition=self.definition.with_settings(**changes))

    def refreshed(self) -> Self:
        """The layer with its state after a call in training, without a gradient; most layers have none to change."""
        state = self.definition.updated_state(self.parameters, self.state, xp=backend.namespace)
        return dataclasses.replace(self, state=jax.lax.stop_gradient(state))

    def __call__(self, *inputs: Any, key: Any = None, **options: Any) -> Any:
        """Apply, as the call of the definition does.

        Parameters
        ----------
        *inputs : Array
            Of JAX or of NumPy; of the dtype of the parameters.
        key : key of jax.random, int, or Array of two int32, optional
            Of the dropout: in training. The same integer drops the same on every framework; without one nothing is
            dropped, and layers that never drop take no notice of it.
        **options
            Those of the definition.

        Raises
        ------
        TypeError, ValueError
            When arguments do not fit; before any computation.
        """
        check_call(self.kind, inputs, options, training="key=... in training, and none to evaluate")
        seed = None if key is None else as_seed(key)
        if seed is not None:
            check_seed(seed)
        layer_options = {"seed": seed, "state": jax.lax.stop_gradient(self.state)}
        taken = _taken(self.kind)
        inputs, options = jax.tree.map(_input, inputs), jax.tree.map(_option, options)
        options |= {name: value for name, value in layer_options.items() if name in taken}
        parameters = jax.tree.map(_option, self.parameters)  # which may have been fetched from a device
        return self.definition(parameters, *inputs, **options, xp=backend.namespace)

    def __repr__(self) -> str:
        return f"attention_jax.{self.definition!r}"


def check_call(kind: type[layers.Layer], inputs: tuple[Any, ...], options: dict[str, Any], *, training: str) -> None:
    """Refuse the words of other libraries for what an adapter calls otherwise, and more arrays than a layer takes."""
    name = kind.__name__
    for option in options:
        if option in _SEEDS:
            raise TypeError(f"expected {training}, in {name}; got the keyword {option}")
        if option in _RATES:
            raise TypeError(f"expected dropout as a setting, and {training}, in {name}; got the keyword {option}")
        if option == "state":
            raise TypeError(f"expected the state in {name} itself; got the keyword state")
    arrays = [each.name for each in _taken(kind).values() if each.kind is each.POSITIONAL_ONLY][2:]
    if len(inputs) > len(arrays):
        names = ", ".join(arrays)
        got = f"{len(inputs)} by position"
        raise TypeError(f"expected {names} of {name} by position, and options by keyword; got {got}")


def _named_init(init: Callable[..., Any], kind: type[layers.Layer]) -> Callable[..., Any]:
    """An ``init`` that says what it lacks, with the key first: two sizes alone are a key and one size."""
    settings: Any = names_of(kind.__init__)
    names = settings._replace(
        positional=("self", "key"),
        keywords=(*settings.keywords[1:], "dtype", "device"),
        places=settings.places + 1,
        required=("key", *settings.required),
    )
    complete = names_keywords(init, f"{kind.__name__}.init", names)
    complete.__signature__ = settings_signature(init, kind)  # type: ignore[attr-defined]
    return complete


@functools.cache
def _taken(kind: type[layers.Layer]) -> Mapping[str, inspect.Parameter]:
    """What the call of a definition takes, by name."""
    return inspect.signature(kind.__call__).parameters


def as_seed(key: Any, /) -> Any:
    """A seed of the core: two words drawn from a key of `jax.random`, typed or raw; anything else as it is."""
    if not isinstance(key, jax.Array | np.ndarray):
        return key
    check_key("key", key, hint=": the keys to attend to are the second argument, by position")
    if _is_key(key):
        return jax.random.bits(key, (2,), "uint32")
    return key


def check_key(name: str, key: jax.Array | np.ndarray[Any, Any], /, *, hint: str = "") -> None:
    """Raise unless an array can be one key, or the words of a seed."""
    if jnp.issubdtype(key.dtype, jnp.floating):
        got = f"{key.dtype}{list(key.shape)}"
        raise TypeError(f"expected {name} as a key of jax.random, an integer or two of them; got {got}{hint}")
    axes = key.ndim - (key.dtype == jnp.uint32)
    if _is_key(key) and axes:
        raise ValueError(f"expected {name} as one key of jax.random; got keys {shape_text(key)}: jax.vmap takes them")


def _is_key(array: jax.Array | np.ndarray[Any, Any]) -> bool:
    """Whether an array holds keys, typed or raw."""
    raw = array.dtype == jnp.uint32 and array.ndim > 0
    return bool(raw or jnp.issubdtype(array.dtype, jax.dtypes.prng_key))


def _input(leaf: Any) -> jax.Array:
    if not isinstance(leaf, jax.Array | np.ndarray):
        raise TypeError(f"expected inputs as arrays of JAX or NumPy; got {type(leaf).__name__}")
    return jnp.asarray(leaf)


def _option(leaf: Any) -> Any:
    return jnp.asarray(leaf) if isinstance(leaf, np.ndarray) else leaf


def floating_name(dtype: Any) -> str:
    """The name of a type that JAX, as configured, computes with."""
    name = str(dtype) if dtype is None or isinstance(dtype, str) else str(np.dtype(dtype).name)
    if name not in backend.dtypes:
        raise ValueError(f"expected a floating-point type out of {', '.join(backend.dtypes)}; got {name}: {WIDE}")
    return name


def _placed(device: Any) -> Any:
    return _devices()[known_device(device, backend.devices())] if isinstance(device, str) else device


class MultiHeadAttention(Layer):
    """Multi-head attention with its projections: `attention_core.layers.MultiHeadAttention`.

    Examples
    --------
    >>> layer = MultiHeadAttention.init(jax.random.key(0), channels=8, num_heads=2)
    >>> jax.jit(layer)(jnp.ones((3, 5, 8))).shape
    (3, 5, 8)
    """


class FeedForward(Layer):
    """Linear, activation, linear, dropout, at every position: `attention_core.layers.FeedForward`.

    Examples
    --------
    >>> FeedForward.init(0, 4, 16).astype("bfloat16")(jnp.ones((3, 4), "bfloat16")).dtype
    dtype(bfloat16)
    """


class EncoderLayer(Layer):
    """Encoder layer of a transformer: `attention_core.layers.EncoderLayer`.

    Examples
    --------
    Four layers as one, with a new first axis in all arrays, run through one after the other:

    >>> stack = jax.vmap(lambda key: EncoderLayer.init(key, 8, 2, 32))(jax.random.split(jax.random.key(0), 4))
    >>> jax.lax.scan(lambda x, layer: (layer(x), None), jnp.ones((3, 5, 8)), stack)[0].shape
    (3, 5, 8)
    """


class RMSNorm(Layer):
    """Division of the channels by the root of their mean square: `attention_core.layers.RMSNorm`."""


class GatedFeedForward(Layer):
    """Gated feed-forward block, at every position: `attention_core.layers.GatedFeedForward`."""


class DecoderLayer(Layer):
    """Decoder layer of a language model: `attention_core.layers.DecoderLayer`."""


class Embeddings(Layer):
    """Vectors of tokens at absolute positions, in segments: `attention_core.layers.Embeddings`.

    Examples
    --------
    >>> Embeddings.init(0, num_tokens=11, num_positions=7, channels=4)(jnp.asarray([[3, 0, 10]])).shape
    (1, 3, 4)
    """


class SaganAttention(Layer):
    """Self-attention over feature maps, as in SAGAN: `attention_core.layers.SaganAttention`.

    Its state, where kernels are normalized, are estimates of singular vectors; `refreshed` improves them.

    Examples
    --------
    >>> layer = SaganAttention.init(0, channels=16)
    >>> x = jnp.ones((1, 4, 4, 16))
    >>> bool((jax.jit(layer)(x) == x).all())  # sigma starts at 0
    True
    >>> layer.refreshed().state.theta.shape
    (2,)
    """


def save(layer: Layer, path: str | PathLike[str], /) -> None:
    """Write a layer to a file, which `load` of every framework reads: see `attention_files.safetensors`.

    Raises
    ------
    TypeError
        When this is no layer of this package.
    """
    from attention_files import adapted  # noqa: PLC0415 (safetensors is needed for files alone)

    adapted.save(path, getattr(layer, "layer", layer), Layer)  # or of a module of attention_jax.nnx


def load(path: str | PathLike[str], /, *, device: Any = None, dtype: Any = None, **settings: Any) -> Layer:
    """Read a layer that `save` of any framework has written: see `attention_files.safetensors`.

    ``device`` and ``dtype`` are those of `Layer.from_numpy`. Settings such as ``arithmetic`` replace those in the file.
    """
    from attention_files import adapted  # noqa: PLC0415 (safetensors is needed for files alone)

    return adapted.load(path, Layer.from_numpy, settings, device=device, dtype=dtype)
