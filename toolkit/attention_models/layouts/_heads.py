"""The order of grouped query heads, and attention with separate maps for each head."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from attention_core._arrays import Array, Namespace, type_text
from attention_core._backend import common_namespace
from attention_core._checks import check_positive, check_rank
from attention_core.parameters import Linear, MultiHeadAttention
from attention_models.layouts._layout import PROJECTIONS, LayoutError

ORDERS = ("repeat", "tile")


def check_order(layout: str, order: Any, num_heads: int, num_kv_heads: int) -> None:
    if order is not None and not (isinstance(order, str) and order in ORDERS):
        got = repr(order) if isinstance(order, str) else type_text(order)
        raise LayoutError(f"expected head_order out of {', '.join(ORDERS)}; got {got}")
    if order is None and 1 < num_kv_heads < num_heads:
        raise LayoutError(
            f"expected head_order for {layout}, as {num_heads} heads share {num_kv_heads}: repeat, where neighbours"
            f" share a key, or tile, where heads {num_kv_heads} apart do; got none"
        )


def in_order(tree: MultiHeadAttention, first: int, second: int, xp: Namespace) -> MultiHeadAttention:
    """Transpose the order of query heads from (first, second) to (second, first)."""

    def swap(array: Array | None, axis: int) -> Array | None:
        if array is None:
            return None
        dims = tuple(array.shape)
        width = dims[axis] // (first * second)
        split = xp.reshape(array, (*dims[:axis], first, second, width, *dims[axis + 1 :]))
        axes = list(range(len(split.shape)))
        axes[axis], axes[axis + 1] = axes[axis + 1], axes[axis]
        return xp.reshape(xp.permute_dims(split, tuple(axes)), dims)

    output = tree.output
    return tree._replace(
        query=Linear(swap(tree.query.weight, 1), swap(tree.query.bias, 0)),
        output=None if output is None else output._replace(weight=swap(output.weight, 0)),
    )


def join_heads(
    heads: Sequence[Sequence[Linear]], output: Linear | None = None, /, *, xp: Namespace | None = None
) -> MultiHeadAttention:
    """Join the maps of single heads into one map of all heads.

    Parameters
    ----------
    heads : sequence of (query, key, value)
        Three `Linear` for each head: (C, D), (C', D) and (C'', E).
    output : Linear, optional
        (H * E, out).
    xp : array namespace, optional

    Raises
    ------
    LayoutError
        When there is no head, heads differ in shape, or only some have a bias.

    Examples
    --------
    >>> import array_api_strict as xp
    >>> from attention_core.parameters import Linear
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
    xp = common_namespace(
        xp, {f"heads[{index}][{at}]": each for index, row in enumerate(rows) for at, each in enumerate(row)}
    )

    def joined(maps: Sequence[Linear]) -> Linear:
        weight = xp.concat([each.weight for each in maps], axis=1)
        return Linear(weight, None if maps[0].bias is None else xp.concat([each.bias for each in maps], axis=0))

    query, key, value = map(joined, kinds)
    return MultiHeadAttention(query, key, value, output)


def separate_heads(
    parameters: MultiHeadAttention, num_heads: int, /
) -> tuple[list[tuple[Linear, Linear, Linear]], Linear | None]:
    """Split the maps of all heads into maps of single heads: the inverse of `join_heads`.

    Parameters
    ----------
    parameters : attention_core.parameters.MultiHeadAttention
    num_heads : int
        H.

    Returns
    -------
    heads : list of (query, key, value)
        Three `Linear` for each head.
    output : Linear or None

    Raises
    ------
    LayoutError
        When the number of heads does not divide the channels, or heads share keys.

    Examples
    --------
    >>> import array_api_strict as xp
    >>> from attention_core.layers import MultiHeadAttention
    >>> heads, output = separate_heads(MultiHeadAttention(8, 2).init(0, xp=xp), 2)
    >>> heads[1][0].weight.shape, output.weight.shape
    ((8, 4), (8, 8))
    """
    num_heads = check_positive("num_heads", num_heads)
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
