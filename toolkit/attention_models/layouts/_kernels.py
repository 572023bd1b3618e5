"""Layouts of Keras and flax, whose kernels have an axis for heads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from attention_core import layers
from attention_core._arrays import Array, Namespace
from attention_core._checks import check_positive
from attention_core.parameters import Linear, MultiHeadAttention
from attention_models.layouts._layout import (
    Arrays,
    Layout,
    LayoutError,
    Sizes,
    attention_of,
    check_attention,
    namespace_of,
    present,
    sizes_of,
)

KERAS = "keras.layers.MultiHeadAttention"
KERAS_GROUPED = "keras.layers.GroupQueryAttention"
FLAX = "flax.nnx.MultiHeadAttention"


GATE = {"gate": "use_gate, a gate on the output, has no counterpart here"}
NORMALIZED = dict.fromkeys(
    ("query_ln", "key_ln"), "normalize_qk, which normalizes heads, has no counterpart in the layer here"
)


class _Names(NamedTuple):
    """How a module names arrays: a separator, the name of the output projection, and hints for `Arrays.close`."""

    module: str
    dot: str
    output: str
    hints: Mapping[str, str]


KERAS_NAMES, KERAS_GROUPED_NAMES = (_Names(name, "/", "attention_output", GATE) for name in (KERAS, KERAS_GROUPED))
FLAX_NAMES = _Names(FLAX, ".", "out", NORMALIZED)


def from_keras(
    arrays: Mapping[str, Array], /, *, num_heads: int | None = None, dropout: float = 0.0, xp: Namespace | None = None
) -> tuple[layers.MultiHeadAttention, MultiHeadAttention]:
    """Read the weights of `keras.layers.MultiHeadAttention`, which is called with query, **value**, key.

    Parameters
    ----------
    arrays : mapping of str to Array
        ``query/kernel`` and ``key/kernel`` (in, H, D), ``value/kernel`` (in, H, E), ``attention_output/kernel``
        (H, E, out). Optionally ``query/bias`` (H, D) and so on, ``attention_output/bias`` (out,). These are the paths
        of the variables without the name of the layer.
    num_heads : int, optional
        H, to check the arrays against.
    dropout : float
    xp : array namespace, optional

    Raises
    ------
    LayoutError
        When an array is missing, of another shape, or unknown, such as that of ``use_gate``.

    Examples
    --------
    >>> import array_api_strict as xp
    >>> arrays = {f"{name}/kernel": xp.ones((8, 2, 4)) for name in ("query", "key", "value")}
    >>> definition, parameters = from_keras({**arrays, "attention_output/kernel": xp.ones((2, 4, 8))})
    >>> definition.num_heads, parameters.output.weight.shape
    (2, (8, 8))
    """
    definition, tree = _from_kernels(KERAS_NAMES, Arrays(KERAS, arrays, xp), num_heads=num_heads, dropout=dropout)
    if definition.groups != definition.num_heads:
        raise LayoutError(f"expected as many key heads as query heads of {KERAS}; got {definition.groups}")
    return definition, tree


def from_keras_grouped(
    arrays: Mapping[str, Array],
    /,
    *,
    num_heads: int | None = None,
    dropout: float = 0.0,
    xp: Namespace | None = None,
) -> tuple[layers.MultiHeadAttention, MultiHeadAttention]:
    """Read the weights of `keras.layers.GroupQueryAttention`, which is called with query, **value**, key.

    Parameters
    ----------
    arrays : mapping of str to Array
        As in `from_keras`, with G heads of keys and values.
    num_heads : int, optional
        H, to check the arrays against.
    dropout : float
    xp : array namespace, optional

    Raises
    ------
    LayoutError
        When an array is missing, of another shape, or unknown.
    """
    reader = Arrays(KERAS_GROUPED, arrays, xp)
    return _from_kernels(KERAS_GROUPED_NAMES, reader, num_heads=num_heads, dropout=dropout)


def from_flax(
    arrays: Mapping[str, Array],
    /,
    *,
    num_heads: int | None = None,
    dropout: float = 0.0,
    xp: Namespace | None = None,
) -> tuple[layers.MultiHeadAttention, MultiHeadAttention]:
    """Read the weights of `flax.nnx.MultiHeadAttention`, or the params of a module of attention of `flax.linen`.

    Parameters
    ----------
    arrays : mapping of str to Array
        ``query.kernel`` (in, H, D), ``key.kernel`` and ``value.kernel`` (in, G, D), ``out.kernel`` (H, D, out).
        Optionally ``query.bias`` (H, D) and so on, ``out.bias`` (out,). Or nested, ``{"query": {"kernel": ...}}``, as
        in linen.
    num_heads, dropout, xp
        As in `from_keras_grouped`.

    Raises
    ------
    LayoutError
        When an array is missing, of another shape, or unknown, such as those of ``normalize_qk``.
    """
    reader = Arrays(FLAX, _flat(arrays), xp)
    return _from_kernels(FLAX_NAMES, reader, num_heads=num_heads, dropout=dropout)


def _flat(arrays: Any) -> Any:
    """Arrays of nested mappings by their paths, with dots."""
    if not isinstance(arrays, Mapping):
        return arrays
    return {
        path: array
        for name, branch in arrays.items()
        for path, array in (
            {f"{name}.{path}": array for path, array in _flat(branch).items()}
            if isinstance(branch, Mapping)
            else {name: branch}
        ).items()
    }


def to_keras(
    definition: layers.MultiHeadAttention, parameters: MultiHeadAttention, /, *, xp: Namespace | None = None
) -> dict[str, Array]:
    """Write the weights for `keras.layers.MultiHeadAttention`: the inverse of `from_keras`.

    Raises
    ------
    LayoutError
        When the layer has a scale, a softcap, grouped heads, no output, ``zero_attention``, or a bias on some
        projections only. So with ``is_causal``, which is an argument of the module's call.
    """
    check_attention(KERAS, definition)
    return _to_kernels(KERAS_NAMES, definition, parameters, xp=xp)


def to_keras_grouped(
    definition: layers.MultiHeadAttention,
    parameters: MultiHeadAttention,
    /,
    *,
    xp: Namespace | None = None,
) -> dict[str, Array]:
    """Write the weights for `keras.layers.GroupQueryAttention`: the inverse of `from_keras_grouped`.

    Raises
    ------
    LayoutError
        As in `to_keras`, except for grouped heads. Also when values or outputs have another width.
    """
    _check_keras_grouped(definition)
    return _to_kernels(KERAS_GROUPED_NAMES, definition, parameters, xp=xp)


def to_flax(
    definition: layers.MultiHeadAttention,
    parameters: MultiHeadAttention,
    /,
    *,
    xp: Namespace | None = None,
) -> dict[str, Array]:
    """Write the weights for `flax.nnx.MultiHeadAttention`: the inverse of `from_flax`.

    Raises
    ------
    LayoutError
        As in `to_keras`, except for grouped heads. Also when values have another width or other channels than keys.
    """
    _check_flax(definition)
    return _to_kernels(FLAX_NAMES, definition, parameters, xp=xp)


def _check_keras_grouped(definition: Any) -> Sizes:
    equal = {"value_head_dim": "head_dim", "output_channels": "channels"}
    return check_attention(KERAS_GROUPED, definition, grouped=True, equal=equal)


def _check_flax(definition: Any) -> Sizes:
    equal = {"value_head_dim": "head_dim", "value_channels": "key_channels"}
    return check_attention(FLAX, definition, grouped=True, equal=equal)


def keras_arguments(definition: layers.MultiHeadAttention) -> dict[str, Any]:
    sizes = check_attention(KERAS, definition)
    return {
        "num_heads": definition.num_heads,
        "key_dim": sizes.head_dim,
        "value_dim": sizes.value_head_dim,
        "dropout": definition.dropout,
        "use_bias": all(sizes.biases),
        "output_shape": sizes.output_channels,
    }


def keras_grouped_arguments(definition: layers.MultiHeadAttention) -> dict[str, Any]:
    sizes = _check_keras_grouped(definition)
    return {
        "head_dim": sizes.head_dim,
        "num_query_heads": definition.num_heads,
        "num_key_value_heads": definition.groups,
        "dropout": definition.dropout,
        "use_bias": all(sizes.biases),
    }


def flax_arguments(definition: layers.MultiHeadAttention) -> dict[str, Any]:
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
    names: _Names, reader: Arrays, /, *, num_heads: int | None, dropout: float
) -> tuple[layers.MultiHeadAttention, MultiHeadAttention]:
    xp = reader.xp
    if num_heads is not None:
        num_heads = check_positive("num_heads", num_heads)

    def projection(name: str, heads: int | None = None, width: int | None = None) -> tuple[Linear, int, int]:
        kernel = reader.take(f"{name}{names.dot}kernel", None, heads, width)
        channels, heads, width = kernel.shape
        bias = reader.find(f"{name}{names.dot}bias", heads, width)
        weight = xp.reshape(kernel, (channels, heads * width))
        return Linear(weight, None if bias is None else xp.reshape(bias, (heads * width,))), heads, width

    query, heads, head_dim = projection("query", num_heads)
    key, num_kv_heads, _ = projection("key", None, head_dim)
    value, _, width = projection("value", num_kv_heads)
    kernel = reader.take(f"{names.output}{names.dot}kernel", heads, width, None)
    channels = kernel.shape[2]
    output = Linear(
        xp.reshape(kernel, (heads * width, channels)), reader.find(f"{names.output}{names.dot}bias", channels)
    )
    reader.close(names.hints)
    tree = MultiHeadAttention(query, key, value, output)
    return attention_of(reader.layout, tree, heads, num_kv_heads, dropout=dropout)


def _to_kernels(names: _Names, definition: Any, tree: Any, /, *, xp: Namespace | None) -> dict[str, Array]:
    layers.check_fit(definition, tree)
    heads, num_kv_heads = definition.num_heads, definition.groups
    xp = namespace_of(tree, xp)
    sizes = sizes_of(definition)
    arrays: dict[str, Array | None] = {}
    for name, count, width in (
        ("query", heads, sizes.head_dim),
        ("key", num_kv_heads, sizes.head_dim),
        ("value", num_kv_heads, sizes.value_head_dim),
    ):
        weight, bias = getattr(tree, name)
        arrays[f"{name}{names.dot}kernel"] = xp.reshape(weight, (-1, count, width))
        arrays[f"{name}{names.dot}bias"] = None if bias is None else xp.reshape(bias, (count, width))
    weight, bias = tree.output
    arrays[f"{names.output}{names.dot}kernel"] = xp.reshape(
        weight, (heads, sizes.value_head_dim, sizes.output_channels)
    )
    arrays[f"{names.output}{names.dot}bias"] = bias
    return present(arrays)


LAYOUTS = {
    "keras": Layout(KERAS, from_keras, to_keras, keras_arguments),
    "keras-grouped": Layout(KERAS_GROUPED, from_keras_grouped, to_keras_grouped, keras_grouped_arguments),
    "flax": Layout(FLAX, from_flax, to_flax, flax_arguments),
}
