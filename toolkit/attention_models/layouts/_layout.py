"""Helpers of the layouts: reading arrays by name, and finding the settings of a layer from shapes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from attention_core import layers
from attention_core._arrays import Array, Namespace, cast_to, dtype_name, is_floating, one_line, shape_text, type_text
from attention_core._backend import common_namespace
from attention_core._checks import check_positive
from attention_core._functions.options import NUMBERS
from attention_core.parameters import EncoderLayer, LayerNorm, Linear, MultiHeadAttention

PROJECTIONS = ("query", "key", "value", "output")
MAX_LAYERS = 10_000
"""No model has as many: a tree of more would fill the memory before it is compared with the arrays."""
ACTIVATIONS = {  # of several names, the last is written
    "swish": "silu", "silu": "silu", "gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}  # fmt: skip
"""Those of transformers, by our name."""


class LayoutError(ValueError):
    """Weights or settings that a layout lacks, or that have no counterpart in it; said in one line."""

    def __init__(self, message: str) -> None:
        super().__init__(one_line(message))


def checked_arrays(layout: str, arrays: Any) -> dict[str, Array]:
    """Return a copy of arrays by name, once they are known to be that; ``None`` stands for an array that is absent."""
    if not isinstance(arrays, Mapping):
        raise TypeError(f"expected the arrays of {layout} as a mapping from names; got {type_text(arrays)}")
    for name, array in arrays.items():
        if not isinstance(name, str):
            raise TypeError(f"expected the names of the arrays of {layout} as texts; got {type_text(name)}")
        if array is not None and not hasattr(array, "dtype"):
            raise TypeError(f"expected {one_line(name)} as an array; got {type_text(array)}")
    return dict(arrays)


def checked_kind(layout: str, config: Any, kinds: Collection[str]) -> str:
    """The ``model_type`` of a config, which has to be one of these."""
    if not isinstance(config, Mapping):
        raise TypeError(f"expected the config of {layout} as a mapping; got {type_text(config)}")
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in kinds:
        raise LayoutError(f"expected a model_type out of {', '.join(kinds)}; got {kind!r}")
    return kind


def config_size(layout: str, config: Mapping[str, Any], name: str) -> int:
    """A size that the ``config.json`` of a layout has to tell."""
    if name not in config:
        raise LayoutError(f"expected {name} in the config of {layout}; got {', '.join(sorted(config)) or 'nothing'}")
    most = {"most": MAX_LAYERS} if name == "num_hidden_layers" else {}
    return check_positive(f"{name} in the config of {layout}", config[name], **most)


@dataclass(frozen=True)
class Layout:
    """The layout of one kind of module of another library.

    Attributes
    ----------
    module : str
        The qualified name of the module.
    read : callable
        ``read(arrays, *, ...)`` returns a definition and its parameters. Its keywords are settings that arrays
        cannot tell.
    write : callable
        ``write(definition, parameters)`` returns the arrays by name.
    arguments : callable
        ``arguments(definition)`` returns the arguments of the module's constructor.
    """

    module: str
    read: Callable[..., tuple[Any, Any]]
    write: Callable[..., dict[str, Array]]
    arguments: Callable[[Any], dict[str, Any]]


def widened(arrays: Mapping[str, Array], xp: Namespace) -> dict[str, Array]:
    """The arrays, of which those of floating point are of the narrowest dtype that holds the numbers of all."""
    dtypes = {dtype_name(array.dtype): array.dtype for array in arrays.values() if is_floating(array)}
    if len(dtypes) < 2:
        return dict(arrays)
    dtype = xp.float64 if "float64" in dtypes else xp.float32
    return {name: cast_to(each, dtype, xp=xp) if is_floating(each) else each for name, each in arrays.items()}


class Arrays:
    """Reads the arrays of a layout: each once, with its shape checked, and all of the widest dtype."""

    def __init__(self, layout: str, arrays: Mapping[str, Array], xp: Namespace | None) -> None:
        self.layout = layout
        self._left = checked_arrays(layout, arrays)
        if not self._left:
            raise LayoutError(f"expected the arrays of {layout}; got none")
        self.xp = common_namespace(xp, self._left)
        self._left = widened({name: array for name, array in self._left.items() if array is not None}, self.xp)

    def find(self, name: str, *dims: int | None) -> Array | None:
        """Take an array that may be absent."""
        array = self._left.pop(name, None)
        if array is not None:
            shape = tuple(array.shape)
            if len(shape) != len(dims) or any(dim not in (None, size) for dim, size in zip(dims, shape, strict=True)):
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

    def linear(self, name: str) -> Linear:
        """Take a linear map whose weight is (out, in)."""
        weight = self.take(f"{name}.weight", None, None)
        return Linear(self.xp.matrix_transpose(weight), self.find(f"{name}.bias", weight.shape[0]))

    def norm(self, name: str, channels: int | None = None, *, bias: bool = True) -> LayerNorm:
        """Take a normalization, whose scale is called weight, and whose offset is called bias; without one it is 0."""
        scale = self.take(f"{name}.weight", channels)
        return LayerNorm(scale, self.take(f"{name}.bias", *scale.shape) if bias else self.xp.zeros_like(scale))

    def close(self, hints: Mapping[str, str] = {}) -> None:
        """Raise if an array is left; hints explain names by their beginning."""
        if not self._left:
            return
        names = sorted(self._left)
        why = next((f": {hint}" for start, hint in hints.items() if any(n.startswith(start) for n in names)), "")
        more = f" ({len(names)} in all)" if len(names) > 3 else ""
        raise LayoutError(f"expected nothing else of {self.layout}; got {', '.join(names[:3])}{more}{why}")


def linear_arrays(name: str, linear: Any, xp: Namespace) -> dict[str, Array]:
    """Name the arrays of a linear map as in PyTorch: the weight is (out, in)."""
    return present({f"{name}.weight": xp.matrix_transpose(linear.weight), f"{name}.bias": linear.bias})


def norm_arrays(name: str, norm: Any) -> dict[str, Array]:
    return {f"{name}.weight": norm.scale, f"{name}.bias": norm.offset}


def present(arrays: Mapping[str, Array | None]) -> dict[str, Array]:
    return {name: array for name, array in arrays.items() if array is not None}


def namespace_of(tree: Any, xp: Namespace | None) -> Namespace:
    return common_namespace(xp, layers.named_arrays(tree))


@dataclass(frozen=True)
class Sizes:
    """The sizes of an attention layer without defaults, and which projections have a bias."""

    channels: int
    key_channels: int
    value_channels: int
    output_channels: int
    head_dim: int
    value_head_dim: int
    biases: tuple[bool, ...]


def sizes_of(definition: layers.MultiHeadAttention) -> Sizes:
    tree = definition.parameters
    query, key, value = (each.weight.dims for each in tree[:3])
    value_head_dim = value[1] // definition.groups
    output = definition.num_heads * value_head_dim if tree.output is None else tree.output.weight.dims[1]
    biases = tuple(each.bias is not None for each in tree[:4] if each is not None)
    return Sizes(
        channels=query[0],
        key_channels=key[0],
        value_channels=value[0],
        output_channels=output,
        head_dim=query[1] // definition.num_heads,
        value_head_dim=value_head_dim,
        biases=biases,
    )


def attention_of(
    layout: str, tree: MultiHeadAttention, num_heads: Any, num_kv_heads: Any, **settings: Any
) -> tuple[layers.MultiHeadAttention, MultiHeadAttention]:
    """Make the definition of parameters, with ``None`` for settings that equal their defaults."""
    num_heads = check_positive("num_heads", num_heads)
    (channels, width), (key_channels, _), (value_channels, values) = (each.weight.shape for each in tree[:3])
    if width % num_heads:
        raise LayoutError(f"expected {layout} with a query that {num_heads} heads share out evenly; got {width}")
    head_dim, value_head_dim = width // num_heads, values // num_kv_heads
    output_channels = None if tree.output is None else tree.output.weight.shape[1]
    biases = [each.bias is not None for each in tree[:4] if each is not None]
    without: dict[str, Any] = {
        f"{name}_bias": False for name, each in zip(PROJECTIONS, biases, strict=False) if any(biases) and not each
    }
    definition = layers.MultiHeadAttention(
        channels,
        num_heads,
        num_key_value_heads=None if num_kv_heads == num_heads else num_kv_heads,
        key_channels=None if key_channels == channels else key_channels,
        value_channels=None if value_channels == key_channels else value_channels,
        head_dim=None if head_dim * num_heads == channels else head_dim,
        value_head_dim=None if value_head_dim == head_dim else value_head_dim,
        output=tree.output is not None,
        output_channels=None if output_channels == channels else output_channels,
        bias=any(biases),
        **without,
        **settings,
    )
    layers.check_fit(definition, tree)
    return definition, tree


def check_kind(layout: str, definition: Any, kind: type[Any]) -> None:
    if not isinstance(definition, kind):
        got = type(definition).__name__
        raise LayoutError(f"expected {kind.__name__} for {layout}; got {got}")


def check_settings(layout: str, *settings: tuple[str, Any, Any]) -> None:
    """Raise unless each setting, a triple (name, value, expected), is as expected."""
    for name, value, wanted in settings:
        if value != wanted:
            raise LayoutError(f"expected {name} {wanted} for {layout}, which has no place for another; got {value}")


def check_attention(
    layout: str,
    definition: Any,
    *,
    grouped: bool = False,
    biases: str = "all or none",
    zero_attention: bool = False,
    equal: Mapping[str, str] = {},
) -> Sizes:
    """Raise unless a module of the layout can compute the attention of a definition; return its sizes.

    ``equal`` names sizes that the layout does not tell apart from others.
    """
    check_kind(layout, definition, layers.MultiHeadAttention)
    sizes = sizes_of(definition)
    wanted = [*((name, None) for name in NUMBERS), ("is_causal", False), ("output", True)]
    wanted += [] if zero_attention else [("zero_attention", False)]
    check_settings(layout, *((name, getattr(definition, name), value) for name, value in wanted))
    if not grouped:
        check_settings(layout, ("num_key_value_heads", definition.groups, definition.num_heads))
    if biases == "all or none" and len(set(sizes.biases)) > 1:
        lacking = ", ".join(name for name, present in zip(PROJECTIONS, sizes.biases, strict=True) if not present)
        raise LayoutError(f"expected a bias on all projections or on none for {layout}; got none on {lacking}")
    check_settings(layout, *((name, getattr(sizes, name), getattr(sizes, other)) for name, other in equal.items()))
    return sizes


def all_pairs(definition: layers.EncoderLayer) -> tuple[tuple[str, Any, Any], ...]:
    """The settings of attention that other encoders do not have, as `check_settings` takes them."""
    groups = definition.num_key_value_heads or definition.num_heads
    return ("is_causal", definition.is_causal, False), ("num_key_value_heads", groups, definition.num_heads)


def encoder_of(
    layout: str, tree: EncoderLayer, /, *, num_heads: int, **settings: Any
) -> tuple[layers.EncoderLayer, EncoderLayer]:
    channels, inner = tree.feed_forward.expand.weight.shape
    check_maps(layout, tree.attention, *tree.feed_forward, bias=True)
    definition = layers.EncoderLayer(channels, num_heads, inner, **settings)
    layers.check_fit(definition, tree)
    return definition, tree


def check_maps(layout: str, *maps: MultiHeadAttention | Linear, bias: bool) -> None:
    """Raise unless all maps of a layer have a bias, or none has."""
    linears: list[Any] = []
    for each in maps:
        linears += [each] if isinstance(each, Linear) else each
    if any(each is not None and (each.bias is not None) != bias for each in linears):
        got = "maps without" if bias else "some"
        raise LayoutError(f"expected {'a bias on every map' if bias else 'no bias on any map'} of {layout}; got {got}")
