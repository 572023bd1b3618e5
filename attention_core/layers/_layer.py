"""The base class of layers, and what layers share: checks of settings, specs of parameters, masks, dropout."""

from __future__ import annotations

import functools
import operator
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from numbers import Real
from typing import Any, ClassVar, TypeVar

from .. import initializers, parameters as trees
from .._arithmetic import ACTIVATIONS, ARITHMETICS
from .._arrays import Array, Namespace, dtype_name, named_arrays, named_branches, shape_text, sizes, tree_from_names
from .._attention.ways import check_implementation
from .._backend import common_namespace, is_dense, own_namespace
from .._checks import (
    check_boolean,
    check_broadcastable,
    check_choice,
    check_flags,
    check_floating,
    check_number,
    check_positive,
    check_rank,
    plain_integer,
)
from .._functions.embeddings import check_divisors
from .._functions.sagan import check_data_format
from .._keywords import our_word
from ..masks import Mask
from ..masks._mask import as_mask
from ..random import Dropout, check_dropout_rate, fold_in

AnyLayer = TypeVar("AnyLayer", bound="Layer")


@dataclass(frozen=True)
class Initial:
    """The spec of a parameter: its shape, and how its initial values are drawn.

    Attributes
    ----------
    dims : tuple of int
    initializer : str
        ``"zeros"``, ``"ones"``, or the name of one of `attention_core.initializers`.
    """

    dims: tuple[int, ...]
    initializer: str

    def values(self, seed: Any, /, *, dtype: str, xp: Namespace, device: Any = None) -> Array:
        """Draw the initial values from a seed: the same bits on every library."""
        if self.initializer in ("zeros", "ones"):
            placement = {} if device is None else {"device": device}
            return getattr(xp, self.initializer)(self.dims, dtype=getattr(xp, dtype), **placement)
        options = {"stddev": _STDDEV[self.initializer]} if self.initializer in _STDDEV else {}
        return getattr(initializers, self.initializer)(seed, self.dims, dtype=dtype, xp=xp, device=device, **options)


_STDDEV = {"truncated_normal": 0.02, "normal": 1.0}  # of embedding tables, as in BERT; of singular vectors


@dataclass(frozen=True)
class Layer(ABC):
    """The settings of a layer, checked when it is made."""

    takes_ids: ClassVar[bool] = False  # of tokens, and not numbers in channels

    def __post_init__(self) -> None:
        """Raise unless each setting is valid by itself; all integers are sizes, which are positive."""
        for field in fields(self):
            kind, _, optional = str(getattr(field.type, "__name__", field.type)).partition(" | ")
            value = getattr(self, field.name)
            if value is not None or not optional:
                check = _CHECKS.get(field.name, _CHECKS.get(kind))
                if check is not None:  # fields of layers of users may be of any type
                    plain = tuple(map(plain_integer, value)) if type(value) is tuple else plain_integer(value)
                    check(field.name, plain)
                    object.__setattr__(self, field.name, bool(plain) if kind == "bool" else plain)

    @property
    @abstractmethod
    def parameters(self) -> Any:
        """The specs of the parameters: a tree of `attention_core.parameters` with `Initial` leaves."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        raise self.place_of(name, type(self).__name__, settings="layer", parameters="layer.init(seed, xp=...)")

    @property
    def state(self) -> Any:
        """The specs of the state that training carries besides the parameters: a tree with `Initial` leaves."""
        return ()

    def init(self, seed: Any, /, *, xp: Namespace, dtype: str = "float32", device: Any = None) -> Any:
        """Draw initial parameters: the same bits on every library.

        Parameters
        ----------
        seed : int or Array of int
            As in `attention_core.Dropout`.
        xp : array namespace
        dtype : {"float16", "bfloat16", "float32", "float64"}
        device : optional
            Where the library should place the arrays, in its own terms.
        """
        return _draw_all(self.parameters, seed, purpose=0, dtype=dtype, xp=xp, device=device)

    def init_state(self, seed: Any, /, *, xp: Namespace, dtype: str = "float32", device: Any = None) -> Any:
        """Draw the initial state: the same bits on every library."""
        return _draw_all(self.state, seed, purpose=1, dtype=dtype, xp=xp, device=device)

    def updated_state(self, parameters: Any, state: Any, /, *, xp: Namespace | None = None) -> Any:
        """Compute the state after a step of training with these parameters."""
        return state

    def with_settings(self: AnyLayer, **changes: Any) -> AnyLayer:
        """Return the layer with other settings for the same parameters, such as its arithmetic or dropout.

        Raises
        ------
        TypeError, ValueError
            When there is no such setting, it is not valid, or it would change shapes of parameters or state.

        Examples
        --------
        >>> from attention_core.layers import FeedForward
        >>> FeedForward(4, 16).with_settings(arithmetic="reproducible").arithmetic
        'reproducible'
        """
        changed = replace(self, **changes)
        if (changed.parameters, changed.state) != (self.parameters, self.state):
            raise ValueError(f"expected settings for the same parameters and state; got {', '.join(sorted(changes))}")
        return changed

    @classmethod
    def check_assigned(cls, name: str, value: Any, /) -> None:
        """Raise `AttributeError` if a setting is to be set: adapters call it before they set an attribute of a layer.

        A class of a user may hold a layer or an array under the name of a setting.
        """
        is_plain = value is None or isinstance(value, bool | int | float | str)
        if is_plain and any(field.name == name for field in fields(cls)):
            raise AttributeError(
                f"expected {name} by with_settings({name}=...), as settings are fixed; got an assignment"
            )

    def place_of(self, name: str, holder: str, /, *, settings: str, parameters: str) -> AttributeError:
        """The error for an attribute that a layer lacks: it names the place of a setting or a parameter of that name.

        Parameters
        ----------
        name, holder : str
            What was asked for, and the name of the class of the layer.
        settings, parameters : str
            Where the layer has them, to be written before a dot.
        """
        for owner, names in (
            (parameters, getattr(self.parameters, "_fields", ())),
            (settings, [field.name for field in fields(self)]),
        ):
            ours = our_word(name, names)
            if ours in names:
                return AttributeError(f"expected {owner}.{ours}; got {name} of {holder} itself")
        hint = ": a DecoderLayer takes a cache, and attention_core.cache makes others" if name == "empty_cache" else ""
        return AttributeError(f"{holder!r} object has no attribute {name!r}{hint}")

    def _options(self, seed: Any, *names: str) -> dict[str, Any]:
        """Settings of these names as options of a function, and dropout in training, that is with a seed."""
        dropout = None if seed is None or self.dropout == 0 else Dropout(self.dropout, seed)
        return {"dropout": dropout, **{name: getattr(self, name) for name in names}}

    def settings(self) -> dict[str, Any]:
        """Return the settings as numbers, text and lists, from which `layer_from_settings` makes the layer again.

        Examples
        --------
        >>> from attention_core.layers import FeedForward, layer_from_settings
        >>> FeedForward(4, 16).settings()["layer"]
        'FeedForward'
        >>> layer_from_settings(FeedForward(4, 16).settings()) == FeedForward(4, 16)
        True
        """
        return {"layer": type(self).__name__, **{name: _plain(value) for name, value in asdict(self).items()}}


def settings_of(kind: type[Layer], function: Any, /) -> tuple[str, ...]:
    """The settings that are options of a function by the same name; a bias of projections is none of the scores."""
    options = set(function.names.keywords) - {"bias", "dropout"}
    return tuple(field.name for field in fields(kind) if field.name in options)


def _plain(value: Any) -> Any:
    """A setting as JSON gives it back."""
    if isinstance(value, tuple):
        return [_plain(each) for each in value]
    return float(value) if isinstance(value, Real) and not isinstance(value, int) else value


def _check_window(name: str, window: Any) -> None:
    for each in window if isinstance(window, tuple) else (window,):
        if each is not None:
            check_positive(name, each)


_POSITIVE = ("softcap", "rotary_base", "embedding_scale", "logit_softcap", "epsilon")
_CHECKS: dict[str, Callable[[str, Any], Any]] = {  # by the name of a setting, or else by its type
    "int": check_positive,
    "bool": lambda name, flag: check_flags(**{name: flag}),
    "scale": check_number,
    "rotary_divisors": check_divisors,
    "window": _check_window,
    "dropout": lambda _, rate: check_dropout_rate(rate),
    "implementation": lambda _, implementation: check_implementation(implementation),
    "activation": lambda _, activation: check_choice("an activation", activation, ACTIVATIONS),
    "arithmetic": lambda _, arithmetic: check_choice("an arithmetic", arithmetic, ARITHMETICS),
    "data_format": lambda _, data_format: check_data_format(data_format),
    **dict.fromkeys(_POSITIVE, functools.partial(check_number, positive=True)),
}


def linear_spec(rows: int, columns: int, bias: bool) -> trees.Linear:
    """The spec of a linear map with a weight of shape (rows, columns)."""
    return trees.Linear(Initial((rows, columns), "glorot_uniform"), Initial((columns,), "zeros") if bias else None)


def all_masks(mask: Mask | Array | None, xp: Namespace | None, /, **places: tuple[Any, ...]) -> Any:
    """Combine a mask over pairs with masks over queries or keys into one, or ``None``.

    Each of these comes by its name, with the array whose places it is over, and more that `_places_of` takes.
    """
    rules = [] if mask is None else [mask]
    for name, (padding, *where) in places.items():
        if padding is not None:
            check_rank(name, padding, 1, "(..., length)")
            check_boolean(name, padding)
            if (dims := _places_of(*where)) is not None:
                check_broadcastable(name, padding, dims)
            xp = common_namespace(xp, {name: padding})
            axis = -1 if name.startswith("query") else -2
            rules.append(xp.expand_dims(xp.expand_dims(padding, axis=axis), axis=-3))
    if len(rules) < 2:
        return rules[0] if rules else None
    return functools.reduce(operator.and_, map(as_mask, rules))


def _places_of(
    array: Any, shards: Any = None, cache: Any = None, has_channels: bool = True
) -> tuple[int | None, ...] | None:
    """The axes (..., length) of an array, or with a cache those of its keys; a rank does not know the whole length."""
    key = getattr(cache, "key", array)
    key = key[0] if isinstance(key, tuple) and key else key
    arrays = array, key
    if not all(hasattr(each, "shape") and is_dense(each) and len(each.shape) > has_channels for each in arrays):
        return None  # what is no such array is refused in other words
    leading = sizes(array)[: -1 - has_channels]
    length = sizes(key)[-1 if cache is None and not has_channels else -2]
    return (*leading, None if shards is not None else length)


def norm_spec(channels: int, kind: str = "layer") -> Any:
    """The spec of a normalization: a `LayerNorm`, or the scale of one by the root of the mean square."""
    scale = Initial((channels,), "ones")
    return scale if kind == "rms" else trees.LayerNorm(scale, Initial((channels,), "zeros"))


def check_fit(definition: Layer, parameters: Any, state: Any = (), /) -> None:
    """Raise unless parameters and state have the structure and shapes of a layer.

    Parameters
    ----------
    definition : attention_core.layers.Layer
    parameters, state : trees of arrays

    Raises
    ------
    TypeError, ValueError
        When a tree is of another structure, an array of another shape or not of floating point, or parameters are of
        several dtypes, as no call takes them. A state has a dtype of its own.

    Examples
    --------
    >>> import array_api_strict as xp
    >>> from attention_core.layers import FeedForward
    >>> layer = FeedForward(4, 16)
    >>> check_fit(layer, layer.init(0, xp=xp))
    """
    _check_tree("parameters", definition.parameters, parameters)
    _check_tree("state", definition.state, state)
    found = {dtype_name(array.dtype): name for name, array in named_arrays(parameters).items()}
    if len(found) > 1:
        got = ", ".join(f"{name} of {dtype}" for dtype, name in found.items())
        raise TypeError(f"expected parameters of one dtype; got {got}")


def _check_tree(name: str, like: Any, tree: Any) -> None:
    if isinstance(like, tuple):
        if type(tree) is not type(like):
            raise TypeError(f"expected {name} as {type(like).__name__}; got {type(tree).__name__}")
        if len(tree) != len(like):
            raise ValueError(f"expected {name} as a tuple of {len(like)}; got {len(tree)}")
        for (path, branch), other in zip(named_branches(like, name), tree, strict=True):
            _check_tree(path, branch, other)
    elif like is None:
        if tree is not None:
            raise ValueError(f"expected no {name}; got {_described(tree)}")
    elif not hasattr(tree, "shape") or isinstance(tree, trees.PreparedWeight):
        raise TypeError(f"expected {name} as an array of shape {like.dims}; got {type(tree).__name__}")
    elif tuple(tree.shape) != like.dims:
        raise ValueError(f"expected {name} {like.dims}; got {shape_text(tree)}")
    else:
        check_floating(name, tree)


def _described(value: Any) -> str:
    return f"an array of shape {shape_text(value)}" if hasattr(value, "shape") else type(value).__name__


def _draw_all(tree: Any, seed: Any, /, *, purpose: int, dtype: str, xp: Namespace, device: Any) -> Any:
    """Replace the `Initial` leaves of a tree by their values, each drawn from a seed of its own."""
    xp, leaves = own_namespace(xp), named_arrays(tree)
    seed = fold_in(seed, purpose, xp=xp) if leaves else None
    values = {
        name: leaf.values(fold_in(seed, index, xp=xp), dtype=dtype, xp=xp, device=device)
        for index, (name, leaf) in enumerate(leaves.items())
    }
    return tree_from_names(tree, values)
