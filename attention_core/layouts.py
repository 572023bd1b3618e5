"""How other libraries lay out the weights of attention, both ways, on the arrays of any library.

A layout is known by the names and shapes of its arrays. What arrays cannot tell, such as the number of heads, is said
by arguments; what one side has and the other has no place for is a `LayoutError`, never left out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from attention_core import layers
from attention_core._checks import check_floating, check_positive, check_rank, shape_text
from attention_core._namespace import array_namespace
from attention_core._typing import Array, Namespace
from attention_core.parameters import Embeddings, EncoderLayer, FeedForward, LayerNorm, Linear, MultiHeadAttention

__all__ = [
    "LAYOUTS",
    "Layout",
    "LayoutError",
    "check_fit",
    "from_bert",
    "from_bert_embeddings",
    "from_bert_layer",
    "from_equinox",
    "from_flax",
    "from_keras",
    "from_keras_grouped",
    "from_torch",
    "from_torch_encoder_layer",
    "join_heads",
    "separate_heads",
    "to_bert",
    "to_bert_embeddings",
    "to_bert_layer",
    "to_equinox",
    "to_flax",
    "to_keras",
    "to_keras_grouped",
    "to_torch",
    "to_torch_encoder_layer",
]


class LayoutError(ValueError):
    """Weights or settings that a layout lacks, or has no place for."""


@dataclass(frozen=True)
class Layout:
    """The weights of one kind of module of another library.

    Attributes
    ----------
    module : str
        The module, as its users know it.
    read : callable
        ``read(arrays, *, ...)`` returns a definition and its parameters; its keywords are what arrays cannot tell.
    write : callable
        ``write(definition, parameters)`` returns the arrays by name.
    arguments : callable
        ``arguments(definition)`` returns the arguments with which the module is made, by name.
    """

    module: str
    read: Callable[..., tuple[Any, Any]]
    write: Callable[..., dict[str, Array]]
    arguments: Callable[[Any], dict[str, Any]]


def check_fit(definition: layers.Layer, parameters: Any, state: Any = (), /) -> None:
    """Raise unless parameters and state are those that a definition asks for.

    Parameters
    ----------
    definition : attention_core.layers.Layer
    parameters, state : trees of arrays

    Raises
    ------
    TypeError, ValueError
        When a tree is of another structure, or an array of another shape or not of floating point.

    Examples
    --------
    >>> import array_api_strict as xp
    >>> layer = layers.FeedForward(4, 16)
    >>> check_fit(layer, layer.init(0, xp=xp))
    """
    _check_tree("parameters", definition.parameters, parameters)
    _check_tree("state", definition.state, state)


def _check_tree(name: str, like: Any, tree: Any) -> None:
    if isinstance(like, tuple):
        if type(tree) is not type(like):
            raise TypeError(f"expected {name} as {type(like).__name__}; got {type(tree).__name__}")
        for field, branch, found in zip(getattr(like, "_fields", ()), like, tree, strict=True):
            _check_tree(f"{name}.{field}", branch, found)
        return
    if like is None:
        if tree is not None:
            raise ValueError(f"expected no {name}; got {_described(tree)}")
        return
    if not hasattr(tree, "shape"):
        raise TypeError(f"expected {name} as an array of shape {like.dims}; got {type(tree).__name__}")
    if tuple(tree.shape) != like.dims:
        raise ValueError(f"expected {name} {like.dims}; got {shape_text(tree)}")
    check_floating(name, tree)


def _described(value: Any) -> str:
    return f"an array of shape {shape_text(value)}" if hasattr(value, "shape") else type(value).__name__


# --- arrays by name ---


class _Arrays:
    """The arrays of a layout, each taken once and checked."""

    def __init__(self, layout: str, arrays: Mapping[str, Array], xp: Namespace | None) -> None:
        self.layout = layout
        self._left = dict(arrays)
        if not self._left:
            raise LayoutError(f"expected the arrays of {layout}; got none")
        self.xp = array_namespace(*self._left.values()) if xp is None else xp

    def find(self, name: str, *dims: int | None) -> Array | None:
        """Take an array that may be absent."""
        array = self._left.pop(name, None)
        if array is not None:
            found = tuple(array.shape)
            if len(found) != len(dims) or any(dim not in (None, size) for dim, size in zip(dims, found, strict=True)):
                wanted = ", ".join("*" if dim is None else str(dim) for dim in dims)
                raise LayoutError(f"expected {name} ({wanted}) of {self.layout}; got {shape_text(array)}")
        return array

    def take(self, name: str, *dims: int | None) -> Array:
        """Take an array that must be there."""
        array = self.find(name, *dims)
        if array is None:
            left = ", ".join(sorted(self._left)[:4]) or "nothing else"
            raise LayoutError(f"expected {name} of {self.layout}; got no such array, but {left}")
        return array

    def names(self) -> list[str]:
        """What is left."""
        return list(self._left)

    def linear(self, name: str) -> Linear:
        """Take a map whose weight is (out, in)."""
        weight = self.take(f"{name}.weight", None, None)
        return Linear(self.xp.matrix_transpose(weight), self.find(f"{name}.bias", weight.shape[0]))

    def norm(self, name: str) -> LayerNorm:
        """Take a normalization, whose scale is called weight, and whose offset is called bias."""
        scale = self.take(f"{name}.weight", None)
        return LayerNorm(scale, self.take(f"{name}.bias", *scale.shape))

    def close(self, hints: Mapping[str, str] = {}) -> None:
        """Raise if an array is left; hints say by the beginning of a name what it belongs to."""
        if not self._left:
            return
        names = sorted(self._left)
        why = next((f": {hint}" for start, hint in hints.items() if any(n.startswith(start) for n in names)), "")
        more = f" ({len(names)} in all)" if len(names) > 3 else ""
        raise LayoutError(f"expected nothing else of {self.layout}; got {', '.join(names[:3])}{more}{why}")


def _linear_arrays(name: str, linear: Any, xp: Namespace) -> dict[str, Array]:
    """A map as in PyTorch: the weight is (out, in)."""
    return _present({f"{name}.weight": xp.matrix_transpose(linear.weight), f"{name}.bias": linear.bias})


def _norm_arrays(name: str, norm: Any) -> dict[str, Array]:
    return {f"{name}.weight": norm.scale, f"{name}.bias": norm.offset}


def _present(arrays: Mapping[str, Array | None]) -> dict[str, Array]:
    return {name: array for name, array in arrays.items() if array is not None}


# --- what a layer is, from the shapes of its parameters, and back ---


@dataclass(frozen=True)
class _Sizes:
    """The sizes of attention, none of them left to a default, and which projections have a bias."""

    channels: int
    key_channels: int
    value_channels: int
    output_channels: int
    head_dim: int
    value_head_dim: int
    biases: tuple[bool, ...]


def _sizes(definition: layers.MultiHeadAttention) -> _Sizes:
    tree = definition.parameters
    query, key, value = (each.weight.dims for each in tree[:3])
    value_head_dim = value[1] // definition.groups
    output = definition.num_heads * value_head_dim if tree.output is None else tree.output.weight.dims[1]
    biases = tuple(each.bias is not None for each in tree[:4] if each is not None)
    head_dim = query[1] // definition.num_heads
    return _Sizes(query[0], key[0], value[0], output, head_dim, value_head_dim, biases)


def _attention(
    layout: str, tree: MultiHeadAttention, num_heads: Any, groups: Any, **settings: Any
) -> tuple[layers.MultiHeadAttention, MultiHeadAttention]:
    """The definition that parameters belong to, in which a setting that is the default is left to it."""
    check_positive("num_heads", num_heads)
    (channels, width), (key_channels, _), (value_channels, values) = (each.weight.shape for each in tree[:3])
    if width % num_heads:
        raise LayoutError(f"expected {layout} with a query that {num_heads} heads share out evenly; got {width}")
    head_dim, value_head_dim = width // num_heads, values // groups
    output_channels = None if tree.output is None else tree.output.weight.shape[1]
    biases = [each.bias is not None for each in tree[:4] if each is not None]
    names = ("query_bias", "key_bias", "value_bias", "output_bias")
    own: dict[str, Any] = {name: False for name, each in zip(names, biases, strict=False) if any(biases) and not each}
    definition = layers.MultiHeadAttention(
        channels,
        num_heads,
        num_key_value_heads=None if groups == num_heads else groups,
        key_channels=None if key_channels == channels else key_channels,
        value_channels=None if value_channels == key_channels else value_channels,
        head_dim=None if head_dim * num_heads == channels else head_dim,
        value_head_dim=None if value_head_dim == head_dim else value_head_dim,
        output=tree.output is not None,
        output_channels=None if output_channels == channels else output_channels,
        bias=any(biases),
        **own,
        extra_key_value=tree.extra_key is not None,
        **settings,
    )
    check_fit(definition, tree)
    return definition, tree


def _check_kind(layout: str, definition: Any, kind: type[Any]) -> None:
    if not isinstance(definition, kind):
        got = type(definition).__name__
        raise LayoutError(f"expected {kind.__name__} for {layout}; got {got}")


def _check_settings(layout: str, *settings: tuple[str, Any, Any]) -> None:
    """Raise unless every setting, with what it is and what it must be, can be carried over."""
    for name, found, wanted in settings:
        if found != wanted:
            raise LayoutError(f"expected {name} {wanted} for {layout}, which has no place for another; got {found}")


def _check_attention(
    layout: str, definition: Any, *, grouped: bool = False, biases: str = "all or none", extra: bool = False
) -> _Sizes:
    """Raise unless a definition is of attention that modules of other libraries compute, and return its sizes."""
    _check_kind(layout, definition, layers.MultiHeadAttention)
    sizes = _sizes(definition)
    wanted = [("scale", None), ("softcap", None), ("is_causal", False), ("output", True)]
    wanted += [] if extra else [("extra_key_value", False), ("zero_attention", False)]
    _check_settings(layout, *((name, getattr(definition, name), value) for name, value in wanted))
    if not grouped:
        _check_settings(layout, ("num_key_value_heads", definition.groups, definition.num_heads))
    if biases == "all or none" and len(set(sizes.biases)) > 1:
        names = ("query", "key", "value", "output")
        lacking = ", ".join(name for name, present in zip(names, sizes.biases, strict=True) if not present)
        raise LayoutError(f"expected a bias on all projections or on none for {layout}; got none on {lacking}")
    return sizes


# --- the order of heads ---

ORDERS = ("repeat", "tile")


def _check_order(layout: str, order: Any, num_heads: int, groups: int) -> None:
    if order not in (None, *ORDERS):
        raise LayoutError(f"expected head_order out of {', '.join(ORDERS)}; got {order!r}")
    if order is None and 1 < groups < num_heads:
        raise LayoutError(
            f"expected head_order for {layout}, as {num_heads} heads share {groups}: repeat, where neighbours share a "
            f"key, or tile, where heads {groups} apart do; got none"
        )


def _in_order(tree: MultiHeadAttention, first: int, second: int, xp: Namespace) -> MultiHeadAttention:
    """Query heads that are counted as (first, second), counted as (second, first)."""

    def swap(array: Array | None, axis: int) -> Array | None:
        if array is None:
            return None
        dims = tuple(array.shape)
        width = dims[axis] // (first * second)
        apart = xp.reshape(array, (*dims[:axis], first, second, width, *dims[axis + 1 :]))
        axes = list(range(len(apart.shape)))
        axes[axis], axes[axis + 1] = axes[axis + 1], axes[axis]
        return xp.reshape(xp.permute_dims(apart, tuple(axes)), dims)

    output = tree.output
    return tree._replace(
        query=Linear(swap(tree.query.weight, 1), swap(tree.query.bias, 0)),
        output=None if output is None else output._replace(weight=swap(output.weight, 0)),
    )


# --- PyTorch ---

TORCH = "torch.nn.MultiheadAttention"


def from_torch(
    arrays: Mapping[str, Array],
    /,
    *,
    num_heads: int,
    zero_attention: bool = False,
    dropout: float = 0.0,
    xp: Namespace | None = None,
) -> tuple[layers.MultiHeadAttention, MultiHeadAttention]:
    """Weights of `torch.nn.MultiheadAttention`.

    ``batch_first`` is about inputs and not about weights: here the batch always comes first.

    Parameters
    ----------
    arrays : mapping of str to Array
        ``in_proj_weight`` (3 C, C), the rows of query, key and value, or with other channels of key or value
        ``q_proj_weight``, ``k_proj_weight``, ``v_proj_weight`` (C, in); ``out_proj.weight`` (C, C). Perhaps
        ``in_proj_bias`` (3 C,), ``out_proj.bias`` (C,), and ``bias_k``, ``bias_v`` (1, 1, C).
    num_heads : int
    zero_attention : bool
        ``add_zero_attn``.
    dropout : float
    xp : array namespace, optional

    Returns
    -------
    definition : attention_core.layers.MultiHeadAttention
    parameters : attention_core.parameters.MultiHeadAttention

    Raises
    ------
    LayoutError
        When an array is missing, of another shape, or unknown.
    TypeError, ValueError
        When a setting is not one.

    Examples
    --------
    >>> import array_api_strict as xp
    >>> arrays = {"in_proj_weight": xp.ones((12, 4)), "out_proj.weight": xp.ones((4, 4))}
    >>> definition, parameters = from_torch(arrays, num_heads=2)
    >>> definition.bias, parameters.key.weight.shape
    (False, (4, 4))
    """
    given = _Arrays(TORCH, arrays, xp)
    tree = _torch_tree(given, "")
    given.close()
    return _attention(TORCH, tree, num_heads, num_heads, zero_attention=zero_attention, dropout=dropout)


def to_torch(
    definition: layers.MultiHeadAttention, parameters: MultiHeadAttention, /, *, xp: Namespace | None = None
) -> dict[str, Array]:
    """Weights for `torch.nn.MultiheadAttention`: the inverse of `from_torch`.

    Raises
    ------
    LayoutError
        When the layer has a setting that the module has not: a scale, a softcap, causality (there an argument of the
        call), grouped heads, heads of another width, no output, or a bias on some projections only.
    TypeError, ValueError
        When the parameters do not fit the definition.
    """
    _check_torch(TORCH, definition)
    check_fit(definition, parameters)
    return _torch_arrays(parameters, "", _namespace(parameters, xp))


def _torch_arguments(definition: layers.MultiHeadAttention) -> dict[str, Any]:
    sizes = _check_torch(TORCH, definition)
    return {
        "embed_dim": sizes.channels,
        "num_heads": definition.num_heads,
        "dropout": definition.dropout,
        "bias": all(sizes.biases),
        "add_bias_kv": definition.extra_key_value,
        "add_zero_attn": definition.zero_attention,
        "kdim": sizes.key_channels,
        "vdim": sizes.value_channels,
    }


def _check_torch(layout: str, definition: Any) -> _Sizes:
    sizes = _check_attention(layout, definition, extra=True)
    width = sizes.channels / definition.num_heads
    _check_settings(
        layout,
        ("head_dim", sizes.head_dim, width),
        ("value_head_dim", sizes.value_head_dim, width),
        ("output_channels", sizes.output_channels, sizes.channels),
    )
    return sizes


def _torch_tree(given: _Arrays, prefix: str) -> MultiHeadAttention:
    xp = given.xp
    weight = given.take(f"{prefix}out_proj.weight", None, None)
    channels = weight.shape[0]
    packed = given.find(f"{prefix}in_proj_weight", 3 * channels, channels)
    if packed is None:
        weights = [given.take(f"{prefix}{name}_proj_weight", channels, None) for name in "qkv"]
    else:
        weights = _thirds(packed, channels)
    bias = given.find(f"{prefix}in_proj_bias", 3 * channels)
    biases = [None] * 3 if bias is None else _thirds(bias, channels)
    query, key, value = (Linear(xp.matrix_transpose(each), own) for each, own in zip(weights, biases, strict=True))
    output = Linear(xp.matrix_transpose(weight), given.find(f"{prefix}out_proj.bias", channels))
    extra = [given.find(f"{prefix}bias_{name}", 1, 1, channels) for name in "kv"]
    if (extra[0] is None) != (extra[1] is None):
        raise LayoutError(f"expected both bias_k and bias_v of {given.layout}, or neither; got one")
    return MultiHeadAttention(
        query, key, value, output, *(each if each is None else xp.reshape(each, (-1,)) for each in extra)
    )


def _torch_arrays(tree: MultiHeadAttention, prefix: str, xp: Namespace) -> dict[str, Array]:
    weights = [xp.matrix_transpose(each.weight) for each in tree[:3]]
    if len({tuple(weight.shape) for weight in weights}) == 1 and weights[0].shape[0] == weights[0].shape[1]:
        arrays = {"in_proj_weight": xp.concat(weights, axis=0)}
    else:
        arrays = {f"{name}_proj_weight": weight for name, weight in zip("qkv", weights, strict=True)}
    if tree.query.bias is not None:
        arrays["in_proj_bias"] = xp.concat([each.bias for each in tree[:3]], axis=0)
    for name, extra in (("k", tree.extra_key), ("v", tree.extra_value)):
        if extra is not None:
            arrays[f"bias_{name}"] = xp.reshape(extra, (1, 1, -1))
    arrays |= _linear_arrays("out_proj", tree.output, xp)
    return {f"{prefix}{name}": array for name, array in arrays.items()}


def _thirds(array: Array, size: int) -> list[Array]:
    return [array[start : start + size, ...] for start in (0, size, 2 * size)]


def _namespace(tree: Any, xp: Namespace | None) -> Namespace:
    return array_namespace(*layers.named_arrays(tree).values()) if xp is None else xp


# --- Keras and flax: kernels with an axis for heads ---

KERAS = "keras.layers.MultiHeadAttention"
KERAS_GROUPED = "keras.layers.GroupQueryAttention"
FLAX = "flax.nnx.MultiHeadAttention"
GATE = {"gate": "use_gate, a gate on what was found, has no place in attention here"}
NORMALIZED = dict.fromkeys(
    ("query_ln", "key_ln"), "normalize_qk, which normalizes heads, has no place in the layer here"
)


def from_keras(
    arrays: Mapping[str, Array], /, *, num_heads: int | None = None, dropout: float = 0.0, xp: Namespace | None = None
) -> tuple[layers.MultiHeadAttention, MultiHeadAttention]:
    """Weights of `keras.layers.MultiHeadAttention`, which is called with query, **value**, key.

    Parameters
    ----------
    arrays : mapping of str to Array
        ``query/kernel`` and ``key/kernel`` (in, H, D), ``value/kernel`` (in, H, E), ``attention_output/kernel``
        (H, E, out), and perhaps ``query/bias`` (H, D) and so on, ``attention_output/bias`` (out,): the paths of the
        variables, less the name of the layer.
    num_heads : int, optional
        H, if it is to be checked.
    dropout : float
    xp : array namespace, optional

    Returns
    -------
    definition : attention_core.layers.MultiHeadAttention
    parameters : attention_core.parameters.MultiHeadAttention

    Raises
    ------
    LayoutError
        When an array is missing, of another shape, or unknown, such as that of ``use_gate``.
    TypeError, ValueError
        When a setting is not one.

    Examples
    --------
    >>> import array_api_strict as xp
    >>> arrays = {f"{name}/kernel": xp.ones((8, 2, 4)) for name in ("query", "key", "value")}
    >>> definition, parameters = from_keras({**arrays, "attention_output/kernel": xp.ones((2, 4, 8))})
    >>> definition.num_heads, parameters.output.weight.shape
    (2, (8, 8))
    """
    given = _Arrays(KERAS, arrays, xp)
    definition, tree = _from_kernels(given, "/", "attention_output", num_heads, None, dropout, GATE)
    if definition.groups != definition.num_heads:
        raise LayoutError(f"expected as many key heads as query heads of {KERAS}; got {definition.groups}")
    return definition, tree


def from_keras_grouped(
    arrays: Mapping[str, Array],
    /,
    *,
    num_heads: int | None = None,
    head_order: str | None = None,
    dropout: float = 0.0,
    xp: Namespace | None = None,
) -> tuple[layers.MultiHeadAttention, MultiHeadAttention]:
    """Weights of `keras.layers.GroupQueryAttention`, which is called with query, **value**, key.

    Parameters
    ----------
    arrays : mapping of str to Array
        As in `from_keras`, where key and value have G heads.
    num_heads : int, optional
        H, if it is to be checked.
    head_order : {"repeat", "tile"}
        Which query heads share a key/value head: neighbours (h attends with h // (H / G), as here and in Keras), or
        those G apart (h attends with h % G). To be said wherever it makes a difference.
    dropout : float
    xp : array namespace, optional

    Returns
    -------
    definition : attention_core.layers.MultiHeadAttention
    parameters : attention_core.parameters.MultiHeadAttention

    Raises
    ------
    LayoutError
        When an array is missing, of another shape, or unknown, or the order is not said.
    TypeError, ValueError
        When a setting is not one.
    """
    given = _Arrays(KERAS_GROUPED, arrays, xp)
    return _from_kernels(given, "/", "attention_output", num_heads, head_order, dropout, GATE)


def from_flax(
    arrays: Mapping[str, Array],
    /,
    *,
    num_heads: int | None = None,
    head_order: str | None = None,
    dropout: float = 0.0,
    xp: Namespace | None = None,
) -> tuple[layers.MultiHeadAttention, MultiHeadAttention]:
    """Weights of `flax.nnx.MultiHeadAttention`.

    Parameters
    ----------
    arrays : mapping of str to Array
        ``query.kernel`` (in, H, D), ``key.kernel`` and ``value.kernel`` (in, G, D), ``out.kernel`` (H, D, out), and
        perhaps ``query.bias`` (H, D) and so on, ``out.bias`` (out,).
    num_heads, head_order, dropout, xp
        As in `from_keras_grouped`; flax repeats.

    Returns
    -------
    definition : attention_core.layers.MultiHeadAttention
    parameters : attention_core.parameters.MultiHeadAttention

    Raises
    ------
    LayoutError
        When an array is missing, of another shape, or unknown, such as those of ``normalize_qk``; or the order is not
        said.
    TypeError, ValueError
        When a setting is not one.
    """
    given = _Arrays(FLAX, arrays, xp)
    return _from_kernels(given, ".", "out", num_heads, head_order, dropout, NORMALIZED)


def to_keras(
    definition: layers.MultiHeadAttention, parameters: MultiHeadAttention, /, *, xp: Namespace | None = None
) -> dict[str, Array]:
    """Weights for `keras.layers.MultiHeadAttention`: the inverse of `from_keras`.

    Raises
    ------
    LayoutError
        When the layer has a setting that the module has not: a scale, a softcap, causality (there an argument of the
        call), grouped heads, no output, keys beside those projected, or a bias on some projections only.
    TypeError, ValueError
        When the parameters do not fit the definition.
    """
    _check_attention(KERAS, definition)
    return _to_kernels(KERAS, definition, parameters, "/", "attention_output", None, xp)


def to_keras_grouped(
    definition: layers.MultiHeadAttention,
    parameters: MultiHeadAttention,
    /,
    *,
    head_order: str | None = None,
    xp: Namespace | None = None,
) -> dict[str, Array]:
    """Weights for `keras.layers.GroupQueryAttention`: the inverse of `from_keras_grouped`.

    Raises
    ------
    LayoutError
        As in `to_keras`, less grouped heads; values and outputs of another width are refused, too, and an order that
        is not said.
    TypeError, ValueError
        When the parameters do not fit the definition.
    """
    _check_keras_grouped(definition)
    return _to_kernels(KERAS_GROUPED, definition, parameters, "/", "attention_output", head_order, xp)


def to_flax(
    definition: layers.MultiHeadAttention,
    parameters: MultiHeadAttention,
    /,
    *,
    head_order: str | None = None,
    xp: Namespace | None = None,
) -> dict[str, Array]:
    """Weights for `flax.nnx.MultiHeadAttention`: the inverse of `from_flax`.

    Raises
    ------
    LayoutError
        As in `to_keras`, less grouped heads; values of another width than keys, or of other channels, are refused, too,
        and an order that is not said.
    TypeError, ValueError
        When the parameters do not fit the definition.
    """
    _check_flax(definition)
    return _to_kernels(FLAX, definition, parameters, ".", "out", head_order, xp)


def _check_keras_grouped(definition: Any) -> _Sizes:
    sizes = _check_attention(KERAS_GROUPED, definition, grouped=True)
    _check_settings(
        KERAS_GROUPED,
        ("value_head_dim", sizes.value_head_dim, sizes.head_dim),
        ("output_channels", sizes.output_channels, sizes.channels),
    )
    return sizes


def _check_flax(definition: Any) -> _Sizes:
    sizes = _check_attention(FLAX, definition, grouped=True)
    _check_settings(
        FLAX,
        ("value_head_dim", sizes.value_head_dim, sizes.head_dim),
        ("value_channels", sizes.value_channels, sizes.key_channels),
    )
    return sizes


def _keras_arguments(definition: layers.MultiHeadAttention) -> dict[str, Any]:
    sizes = _check_attention(KERAS, definition)
    return {
        "num_heads": definition.num_heads,
        "key_dim": sizes.head_dim,
        "value_dim": sizes.value_head_dim,
        "dropout": definition.dropout,
        "use_bias": all(sizes.biases),
        "output_shape": sizes.output_channels,
    }


def _keras_grouped_arguments(definition: layers.MultiHeadAttention) -> dict[str, Any]:
    sizes = _check_keras_grouped(definition)
    return {
        "head_dim": sizes.head_dim,
        "num_query_heads": definition.num_heads,
        "num_key_value_heads": definition.groups,
        "dropout": definition.dropout,
        "use_bias": all(sizes.biases),
    }


def _flax_arguments(definition: layers.MultiHeadAttention) -> dict[str, Any]:
    sizes = _check_flax(definition)
    return {
        "num_heads": definition.num_heads,
        "in_features": sizes.channels,
        "qkv_features": definition.num_heads * sizes.head_dim,
        "out_features": sizes.output_channels,
        "num_kv_heads": definition.groups,
        "in_kv_features": sizes.key_channels,
        "dropout_rate": definition.dropout,
        "use_bias": all(sizes.biases),
    }


def _from_kernels(
    given: _Arrays,
    dot: str,
    last: str,
    num_heads: int | None,
    order: str | None,
    dropout: float,
    hints: Mapping[str, str],
) -> tuple[layers.MultiHeadAttention, MultiHeadAttention]:
    xp = given.xp

    def projection(name: str, heads: int | None = None, width: int | None = None) -> tuple[Linear, int, int]:
        kernel = given.take(f"{name}{dot}kernel", None, heads, width)
        channels, heads, width = kernel.shape
        bias = given.find(f"{name}{dot}bias", heads, width)
        weight = xp.reshape(kernel, (channels, heads * width))
        return Linear(weight, None if bias is None else xp.reshape(bias, (heads * width,))), heads, width

    query, heads, head_dim = projection("query", num_heads)
    key, groups, _ = projection("key", None, head_dim)
    value, _, width = projection("value", groups)
    kernel = given.take(f"{last}{dot}kernel", heads, width, None)
    channels = kernel.shape[2]
    output = Linear(xp.reshape(kernel, (heads * width, channels)), given.find(f"{last}{dot}bias", channels))
    given.close(hints)
    definition, tree = _attention(
        given.layout, MultiHeadAttention(query, key, value, output), heads, groups, dropout=dropout
    )
    _check_order(given.layout, order, heads, groups)
    return definition, _in_order(tree, heads // groups, groups, xp) if order == "tile" else tree


def _to_kernels(
    layout: str,
    definition: layers.MultiHeadAttention,
    tree: Any,
    dot: str,
    last: str,
    order: str | None,
    xp: Namespace | None,
) -> dict[str, Array]:
    check_fit(definition, tree)
    heads, groups = definition.num_heads, definition.groups
    _check_order(layout, order, heads, groups)
    xp = _namespace(tree, xp)
    tree = _in_order(tree, groups, heads // groups, xp) if order == "tile" else tree
    sizes = _sizes(definition)
    arrays: dict[str, Array | None] = {}
    for name, count, width in (
        ("query", heads, sizes.head_dim),
        ("key", groups, sizes.head_dim),
        ("value", groups, sizes.value_head_dim),
    ):
        weight, bias = getattr(tree, name)
        arrays[f"{name}{dot}kernel"] = xp.reshape(weight, (-1, count, width))
        arrays[f"{name}{dot}bias"] = None if bias is None else xp.reshape(bias, (count, width))
    weight, bias = tree.output
    arrays[f"{last}{dot}kernel"] = xp.reshape(weight, (heads, sizes.value_head_dim, sizes.output_channels))
    arrays[f"{last}{dot}bias"] = bias
    return _present(arrays)


# --- equinox ---

EQUINOX = "equinox.nn.MultiheadAttention"
PROJECTIONS = ("query", "key", "value", "output")


def from_equinox(
    arrays: Mapping[str, Array], /, *, num_heads: int, dropout: float = 0.0, xp: Namespace | None = None
) -> tuple[layers.MultiHeadAttention, MultiHeadAttention]:
    """Weights of `equinox.nn.MultiheadAttention`, each of whose projections may have a bias of its own.

    Parameters
    ----------
    arrays : mapping of str to Array
        ``query_proj.weight``, ``key_proj.weight``, ``value_proj.weight``, ``output_proj.weight``, each (out, in), and
        perhaps ``query_proj.bias`` (out,) and so on.
    num_heads : int
    dropout : float
    xp : array namespace, optional

    Returns
    -------
    definition : attention_core.layers.MultiHeadAttention
    parameters : attention_core.parameters.MultiHeadAttention

    Raises
    ------
    LayoutError
        When an array is missing, of another shape, or unknown.
    TypeError, ValueError
        When a setting is not one.
    """
    given = _Arrays(EQUINOX, arrays, xp)
    tree = MultiHeadAttention(*(given.linear(f"{name}_proj") for name in PROJECTIONS))
    given.close()
    return _attention(EQUINOX, tree, num_heads, num_heads, dropout=dropout)


def to_equinox(
    definition: layers.MultiHeadAttention, parameters: MultiHeadAttention, /, *, xp: Namespace | None = None
) -> dict[str, Array]:
    """Weights for `equinox.nn.MultiheadAttention`: the inverse of `from_equinox`.

    Raises
    ------
    LayoutError
        When the layer has a setting that the module has not: a scale, a softcap, causality, grouped heads, no output,
        or keys beside those projected.
    TypeError, ValueError
        When the parameters do not fit the definition.
    """
    _check_attention(EQUINOX, definition, biases="each")
    check_fit(definition, parameters)
    xp = _namespace(parameters, xp)
    arrays: dict[str, Array] = {}
    for name in PROJECTIONS:
        arrays |= _linear_arrays(f"{name}_proj", getattr(parameters, name), xp)
    return arrays


def _equinox_arguments(definition: layers.MultiHeadAttention) -> dict[str, Any]:
    sizes = _check_attention(EQUINOX, definition, biases="each")
    biases = {f"use_{name}_bias": present for name, present in zip(PROJECTIONS, sizes.biases, strict=True)}
    return {
        "num_heads": definition.num_heads,
        "query_size": sizes.channels,
        "key_size": sizes.key_channels,
        "value_size": sizes.value_channels,
        "output_size": sizes.output_channels,
        "qk_size": sizes.head_dim,
        "vo_size": sizes.value_head_dim,
        "dropout_p": definition.dropout,
        **biases,
    }


# --- encoder layers ---

TORCH_ENCODER_LAYER = "torch.nn.TransformerEncoderLayer"
BERT_LAYER = "transformers.BertLayer"
BERT_EMBEDDINGS = "transformers.BertEmbeddings"
BERT = "transformers.BertModel"
BERT_HINTS = {
    "pooler.": "pooling has no place in an encoder here, and must be left out on purpose",
    "cls.": "what a task puts on the encoder has no place here, and must be left out on purpose",
}


def from_torch_encoder_layer(
    arrays: Mapping[str, Array],
    /,
    *,
    num_heads: int,
    norm_first: bool = False,
    epsilon: float = 1e-5,
    xp: Namespace | None = None,
) -> tuple[layers.EncoderLayer, EncoderLayer]:
    """Weights of `torch.nn.TransformerEncoderLayer` with biases and ``activation="gelu"``.

    In training the module also drops what is inside the feed-forward, so that dropout cannot be carried over.

    Parameters
    ----------
    arrays : mapping of str to Array
        ``self_attn.in_proj_weight`` and so on as in `from_torch`, ``linear1.weight`` (inner, C), ``linear1.bias``,
        ``linear2.weight`` (C, inner), ``linear2.bias``, ``norm1.weight``, ``norm1.bias``, ``norm2.weight``,
        ``norm2.bias``.
    num_heads : int
    norm_first : bool
    epsilon : float
        ``layer_norm_eps``.
    xp : array namespace, optional

    Returns
    -------
    definition : attention_core.layers.EncoderLayer
    parameters : attention_core.parameters.EncoderLayer

    Raises
    ------
    LayoutError
        When an array is missing, of another shape, or unknown.
    TypeError, ValueError
        When a setting is not one.
    """
    given = _Arrays(TORCH_ENCODER_LAYER, arrays, xp)
    tree = EncoderLayer(
        _torch_tree(given, "self_attn."),
        given.norm("norm1"),
        FeedForward(given.linear("linear1"), given.linear("linear2")),
        given.norm("norm2"),
    )
    given.close()
    return _encoder(TORCH_ENCODER_LAYER, tree, num_heads, norm_first=norm_first, epsilon=epsilon)


def to_torch_encoder_layer(
    definition: layers.EncoderLayer, parameters: EncoderLayer, /, *, xp: Namespace | None = None
) -> dict[str, Array]:
    """Weights for `torch.nn.TransformerEncoderLayer`: the inverse of `from_torch_encoder_layer`.

    Raises
    ------
    LayoutError
        When the layer has dropout or no biases.
    TypeError, ValueError
        When the parameters do not fit the definition.
    """
    _check_torch_encoder(definition)
    check_fit(definition, parameters)
    xp = _namespace(parameters, xp)
    return {
        **_torch_arrays(parameters.attention, "self_attn.", xp),
        **_linear_arrays("linear1", parameters.feed_forward.expand, xp),
        **_linear_arrays("linear2", parameters.feed_forward.contract, xp),
        **_norm_arrays("norm1", parameters.attention_norm),
        **_norm_arrays("norm2", parameters.feed_forward_norm),
    }


def from_bert_layer(
    arrays: Mapping[str, Array],
    /,
    *,
    num_heads: int,
    epsilon: float = 1e-12,
    dropout: float = 0.0,
    xp: Namespace | None = None,
) -> tuple[layers.EncoderLayer, EncoderLayer]:
    """Weights of one layer of the encoder of BERT, as Hugging Face transformers names them.

    Parameters
    ----------
    arrays : mapping of str to Array
        ``attention.self.query.weight`` (C, C) and ``.bias``, so for ``key`` and ``value``; ``attention.output.dense``,
        ``intermediate.dense`` (inner, C) and ``output.dense`` (C, inner); ``attention.output.LayerNorm`` and
        ``output.LayerNorm``.
    num_heads : int
    epsilon : float
        ``layer_norm_eps``.
    dropout : float
        ``hidden_dropout_prob`` and ``attention_probs_dropout_prob``, which must be one number.
    xp : array namespace, optional

    Returns
    -------
    definition : attention_core.layers.EncoderLayer
    parameters : attention_core.parameters.EncoderLayer

    Raises
    ------
    LayoutError
        When an array is missing, of another shape, or unknown.
    TypeError, ValueError
        When a setting is not one.
    """
    given = _Arrays(BERT_LAYER, arrays, xp)
    found = _bert_layer(given, "", num_heads, epsilon, dropout)
    given.close()
    return found


def to_bert_layer(
    definition: layers.EncoderLayer, parameters: EncoderLayer, /, *, xp: Namespace | None = None
) -> dict[str, Array]:
    """Weights for a layer of the encoder of BERT: the inverse of `from_bert_layer`.

    Raises
    ------
    LayoutError
        When the layer normalizes first, or has no biases.
    TypeError, ValueError
        When the parameters do not fit the definition.
    """
    _check_bert_layer(definition)
    check_fit(definition, parameters)
    xp, attention, feed = _namespace(parameters, xp), parameters.attention, parameters.feed_forward
    return {
        **_linear_arrays("attention.self.query", attention.query, xp),
        **_linear_arrays("attention.self.key", attention.key, xp),
        **_linear_arrays("attention.self.value", attention.value, xp),
        **_linear_arrays("attention.output.dense", attention.output, xp),
        **_norm_arrays("attention.output.LayerNorm", parameters.attention_norm),
        **_linear_arrays("intermediate.dense", feed.expand, xp),
        **_linear_arrays("output.dense", feed.contract, xp),
        **_norm_arrays("output.LayerNorm", parameters.feed_forward_norm),
    }


def from_bert_embeddings(
    arrays: Mapping[str, Array], /, *, epsilon: float = 1e-12, dropout: float = 0.0, xp: Namespace | None = None
) -> tuple[layers.Embeddings, Embeddings]:
    """Weights of the embeddings of BERT, as Hugging Face transformers names them.

    Parameters
    ----------
    arrays : mapping of str to Array
        ``word_embeddings.weight``, ``position_embeddings.weight``, ``token_type_embeddings.weight``, each (entries, C),
        ``LayerNorm.weight``, ``LayerNorm.bias``. ``position_ids``, which are 0, 1, 2, ..., may be there and are not
        needed.
    epsilon : float
        ``layer_norm_eps``.
    dropout : float
        ``hidden_dropout_prob``.
    xp : array namespace, optional

    Returns
    -------
    definition : attention_core.layers.Embeddings
    parameters : attention_core.parameters.Embeddings

    Raises
    ------
    LayoutError
        When an array is missing, of another shape, or unknown.
    TypeError, ValueError
        When a setting is not one.
    """
    given = _Arrays(BERT_EMBEDDINGS, arrays, xp)
    found = _bert_embeddings(given, "", epsilon, dropout)
    given.close()
    return found


def to_bert_embeddings(
    definition: layers.Embeddings, parameters: Embeddings, /, *, xp: Namespace | None = None
) -> dict[str, Array]:
    """Weights for the embeddings of BERT: the inverse of `from_bert_embeddings`.

    Raises
    ------
    LayoutError
        When there are no segments, or no normalization.
    TypeError, ValueError
        When the parameters do not fit the definition.
    """
    _check_bert_embeddings(definition)
    check_fit(definition, parameters)
    return {
        "word_embeddings.weight": parameters.token,
        "position_embeddings.weight": parameters.position,
        "token_type_embeddings.weight": parameters.segment,
        **_norm_arrays("LayerNorm", parameters.norm),
    }


def from_bert(
    arrays: Mapping[str, Array],
    /,
    *,
    num_heads: int,
    epsilon: float = 1e-12,
    dropout: float = 0.0,
    xp: Namespace | None = None,
) -> tuple[tuple[layers.Layer, ...], tuple[Any, ...]]:
    """Weights of the embeddings and all layers of a BERT, as Hugging Face transformers names them.

    Parameters
    ----------
    arrays : mapping of str to Array
        ``embeddings.`` and what `from_bert_embeddings` has, ``encoder.layer.0.`` and what `from_bert_layer` has, and so
        on, all perhaps after ``bert.``. A pooler (``pooler.``) and the head of a task (``cls.``) have no place
        here: take them out first.
    num_heads, epsilon, dropout, xp
        As in `from_bert_layer`.

    Returns
    -------
    definitions : tuple of attention_core.layers.Layer
        The embeddings, and the layers in order.
    parameters : tuple
        Of each.

    Raises
    ------
    LayoutError
        When an array is missing, of another shape, or unknown.
    TypeError, ValueError
        When a setting is not one.
    """
    given = _Arrays(BERT, {name.removeprefix("bert."): array for name, array in arrays.items()}, xp)
    indices = {name.split(".")[2] for name in given.names() if name.startswith("encoder.layer.")}
    found: list[tuple[Any, Any]] = [_bert_embeddings(given, "embeddings.", epsilon, dropout)]
    found += [
        _bert_layer(given, f"encoder.layer.{index}.", num_heads, epsilon, dropout) for index in range(len(indices))
    ]
    given.close(BERT_HINTS)
    definitions, parameters = zip(*found, strict=True)
    return definitions, parameters


def to_bert(
    definitions: Sequence[layers.Layer], parameters: Sequence[Any], /, *, xp: Namespace | None = None
) -> dict[str, Array]:
    """Weights for a BERT: the inverse of `from_bert`.

    Raises
    ------
    LayoutError
        As in `to_bert_embeddings` and `to_bert_layer`, and when the layers differ in their settings.
    TypeError, ValueError
        When the parameters do not fit the definitions.
    """
    _bert_arguments(definitions)
    if len(definitions) != len(parameters):
        raise ValueError(f"expected parameters of {len(definitions)} layers; got those of {len(parameters)}")
    parts = [("embeddings.", to_bert_embeddings(definitions[0], parameters[0], xp=xp))]  # type: ignore[arg-type]
    for index, (definition, tree) in enumerate(zip(definitions[1:], parameters[1:], strict=True)):
        parts.append((f"encoder.layer.{index}.", to_bert_layer(definition, tree, xp=xp)))  # type: ignore[arg-type]
    return {f"{prefix}{name}": array for prefix, arrays in parts for name, array in arrays.items()}


def _encoder(
    layout: str, tree: EncoderLayer, num_heads: int, **settings: Any
) -> tuple[layers.EncoderLayer, EncoderLayer]:
    channels, inner = tree.feed_forward.expand.weight.shape
    biases = [each is None or each.bias is not None for each in (*tree.attention[:4], *tree.feed_forward)]
    if not all(biases):
        raise LayoutError(f"expected a bias on every map of {layout}; got maps without")
    if tree.attention.extra_key is not None:
        raise LayoutError(f"expected no bias_k and bias_v of {layout}; got both")
    definition = layers.EncoderLayer(channels, num_heads, inner, **settings)
    check_fit(definition, tree)
    return definition, tree


def _bert_layer(
    given: _Arrays, prefix: str, num_heads: int, epsilon: float, dropout: float
) -> tuple[layers.EncoderLayer, EncoderLayer]:
    query, key, value = (given.linear(f"{prefix}attention.self.{name}") for name in ("query", "key", "value"))
    tree = EncoderLayer(
        MultiHeadAttention(query, key, value, given.linear(f"{prefix}attention.output.dense")),
        given.norm(f"{prefix}attention.output.LayerNorm"),
        FeedForward(given.linear(f"{prefix}intermediate.dense"), given.linear(f"{prefix}output.dense")),
        given.norm(f"{prefix}output.LayerNorm"),
    )
    return _encoder(given.layout, tree, num_heads, norm_first=False, epsilon=epsilon, dropout=dropout)


def _bert_embeddings(
    given: _Arrays, prefix: str, epsilon: float, dropout: float
) -> tuple[layers.Embeddings, Embeddings]:
    given.find(f"{prefix}position_ids", 1, None)
    token = given.take(f"{prefix}word_embeddings.weight", None, None)
    channels = token.shape[1]
    position, segment = (
        given.take(f"{prefix}{name}_embeddings.weight", None, channels) for name in ("position", "token_type")
    )
    tree = Embeddings(token, position, segment, given.norm(f"{prefix}LayerNorm"))
    tokens, positions, segments = (table.shape[0] for table in (token, position, segment))
    definition = layers.Embeddings(tokens, positions, channels, segments, epsilon=epsilon, dropout=dropout)
    check_fit(definition, tree)
    return definition, tree


def _check_torch_encoder(definition: Any) -> None:
    _check_kind(TORCH_ENCODER_LAYER, definition, layers.EncoderLayer)
    _check_settings(TORCH_ENCODER_LAYER, ("dropout", definition.dropout, 0.0), ("bias", definition.bias, True))


def _check_bert_layer(definition: Any) -> None:
    _check_kind(BERT_LAYER, definition, layers.EncoderLayer)
    _check_settings(BERT_LAYER, ("norm_first", definition.norm_first, False), ("bias", definition.bias, True))


def _check_bert_embeddings(definition: Any) -> None:
    _check_kind(BERT_EMBEDDINGS, definition, layers.Embeddings)
    _check_settings(BERT_EMBEDDINGS, ("norm", definition.norm, True))
    if definition.num_segments is None:
        raise LayoutError(f"expected num_segments for {BERT_EMBEDDINGS}; got None")


def _torch_encoder_arguments(definition: layers.EncoderLayer) -> dict[str, Any]:
    _check_torch_encoder(definition)
    return {
        "d_model": definition.channels,
        "nhead": definition.num_heads,
        "dim_feedforward": definition.inner,
        "dropout": 0.0,
        "activation": "gelu",
        "layer_norm_eps": definition.epsilon,
        "norm_first": definition.norm_first,
    }


def _bert_layer_arguments(definition: layers.EncoderLayer) -> dict[str, Any]:
    _check_bert_layer(definition)
    return {
        "hidden_size": definition.channels,
        "num_attention_heads": definition.num_heads,
        "intermediate_size": definition.inner,
        "hidden_act": "gelu",
        "layer_norm_eps": definition.epsilon,
        "hidden_dropout_prob": definition.dropout,
        "attention_probs_dropout_prob": definition.dropout,
    }


def _bert_embeddings_arguments(definition: layers.Embeddings) -> dict[str, Any]:
    _check_bert_embeddings(definition)
    return {
        "vocab_size": definition.num_tokens,
        "max_position_embeddings": definition.num_positions,
        "type_vocab_size": definition.num_segments,
        "hidden_size": definition.channels,
        "layer_norm_eps": definition.epsilon,
        "hidden_dropout_prob": definition.dropout,
    }


def _bert_arguments(definitions: Sequence[Any]) -> dict[str, Any]:
    if not isinstance(definitions, list | tuple) or len(definitions) < 2:
        raise LayoutError(f"expected embeddings and at least one layer for {BERT}; got {definitions!r}")
    arguments = _bert_embeddings_arguments(definitions[0])
    for definition in definitions[1:]:
        own = _bert_layer_arguments(definition)
        for name, value in own.items():
            if arguments.setdefault(name, value) != value:
                raise LayoutError(f"expected one {name} for {BERT}; got {arguments[name]} and {value}")
    return {**arguments, "num_hidden_layers": len(definitions) - 1}


# --- heads apart ---


def join_heads(
    heads: Sequence[Sequence[Linear]], output: Linear | None = None, /, *, xp: Namespace | None = None
) -> MultiHeadAttention:
    """Join heads that are kept apart, each with maps of its own, into one map of all heads.

    Parameters
    ----------
    heads : sequence of (query, key, value)
        For every head three `Linear`: (C, D), (C', D) and (C'', E).
    output : Linear, optional
        (H * E, out).
    xp : array namespace, optional

    Returns
    -------
    attention_core.parameters.MultiHeadAttention

    Raises
    ------
    LayoutError
        When there is no head, heads differ in shape, or only some have a bias.

    Examples
    --------
    >>> import array_api_strict as xp
    >>> one = Linear(xp.ones((8, 4)), xp.zeros(4))
    >>> join_heads([(one, one, one), (one, one, one)]).query.weight.shape
    (8, 8)
    """
    rows = [tuple(head) for head in heads]
    if not rows or any(len(row) != 3 or not all(isinstance(each, Linear) for each in row) for row in rows):
        raise LayoutError("expected a query, key and value as Linear for each of at least one head; got something else")
    kinds = list(zip(*rows, strict=True))
    for name, maps in zip(PROJECTIONS, kinds, strict=False):
        shapes = {(tuple(each.weight.shape), None if each.bias is None else tuple(each.bias.shape)) for each in maps}
        if len(shapes) > 1:
            raise LayoutError(
                f"expected the {name} of all heads with the same shape and bias; got {sorted(map(str, shapes))}"
            )
    xp = array_namespace(*(each.weight for row in rows for each in row)) if xp is None else xp

    def joined(maps: Sequence[Linear]) -> Linear:
        weight = xp.concat([each.weight for each in maps], axis=1)
        return Linear(weight, None if maps[0].bias is None else xp.concat([each.bias for each in maps], axis=0))

    query, key, value = map(joined, kinds)
    return MultiHeadAttention(query, key, value, output)


def separate_heads(
    parameters: MultiHeadAttention, num_heads: int, /
) -> tuple[list[tuple[Linear, Linear, Linear]], Linear | None]:
    """Give every head maps of its own: the inverse of `join_heads`.

    Parameters
    ----------
    parameters : attention_core.parameters.MultiHeadAttention
    num_heads : int
        H.

    Returns
    -------
    heads : list of (query, key, value)
        For every head three `Linear`.
    output : Linear or None

    Raises
    ------
    LayoutError
        When heads do not share out the channels evenly, share keys, or there are keys beside those projected.

    Examples
    --------
    >>> import array_api_strict as xp
    >>> heads, output = separate_heads(layers.MultiHeadAttention(8, 2).init(0, xp=xp), 2)
    >>> heads[1][0].weight.shape, output.weight.shape
    ((8, 4), (8, 8))
    """
    check_positive("num_heads", num_heads)
    if parameters.extra_key is not None or parameters.extra_value is not None:
        raise LayoutError("expected no extra_key and extra_value, which belong to no head alone; got both")
    widths = [each.weight.shape[1] for each in parameters[:3]]
    if widths[0] != widths[1]:
        raise LayoutError(
            f"expected as many channels of key as of query, {widths[0]}, as no head shares a key; got {widths[1]}"
        )
    for name, width in zip(PROJECTIONS, widths, strict=False):
        if width % num_heads:
            raise LayoutError(f"expected {name} to channels that {num_heads} heads share out evenly; got {width}")

    def part(linear: Linear, head: int) -> Linear:
        check_rank("weight", linear.weight, 2, "(in, out)")
        width = linear.weight.shape[1] // num_heads
        columns = slice(head * width, (head + 1) * width)
        return Linear(linear.weight[:, columns], None if linear.bias is None else linear.bias[columns])

    query, key, value = parameters[:3]
    heads = [(part(query, head), part(key, head), part(value, head)) for head in range(num_heads)]
    return heads, parameters.output


LAYOUTS = {
    "torch": Layout(TORCH, from_torch, to_torch, _torch_arguments),
    "torch-encoder-layer": Layout(
        TORCH_ENCODER_LAYER, from_torch_encoder_layer, to_torch_encoder_layer, _torch_encoder_arguments
    ),
    "keras": Layout(KERAS, from_keras, to_keras, _keras_arguments),
    "keras-grouped": Layout(KERAS_GROUPED, from_keras_grouped, to_keras_grouped, _keras_grouped_arguments),
    "flax": Layout(FLAX, from_flax, to_flax, _flax_arguments),
    "equinox": Layout(EQUINOX, from_equinox, to_equinox, _equinox_arguments),
    "bert": Layout(BERT, from_bert, to_bert, _bert_arguments),
    "bert-layer": Layout(BERT_LAYER, from_bert_layer, to_bert_layer, _bert_layer_arguments),
    "bert-embeddings": Layout(BERT_EMBEDDINGS, from_bert_embeddings, to_bert_embeddings, _bert_embeddings_arguments),
}
"""The layouts by name."""
