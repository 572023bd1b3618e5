"""Parameters for reproducible arithmetic that are cut into slices once."""

from __future__ import annotations

from typing import Any

from attention_core._arithmetic import check_arithmetic
from attention_core._arithmetic.products import prepare
from attention_core._arrays import Namespace, shape_text
from attention_core._backend import array_namespace, common_namespace, without_warnings
from attention_core._checks import check_floating, check_rank
from attention_core.parameters import Linear, PreparedWeight
from attention_models.parameters import Decoder


def prepare_weights(parameters: Any, /, *, xp: Namespace | None = None) -> Any:
    """Cut the weights of parameters into slices, which reproducible arithmetic then reads instead of cutting them.

    The result is taken wherever the parameters are, and gives the same bits, without a gradient. It is for inference,
    above all for decoding, where cutting a weight takes longer than the product with a few rows.

    Parameters
    ----------
    parameters : tree
        Named tuples of `attention_core.parameters`, in tuples, lists and dicts or alone.
    xp : array namespace, optional

    Returns
    -------
    tree
        The same, with a `PreparedWeight` for the weight of each `Linear`. A `Decoder` whose output is tied to its table
        has an output of its own then. Arrays elsewhere are those of the parameters.

    Raises
    ------
    TypeError, ValueError
        When a weight has no two axes, or is not of float16, bfloat16 or float32.

    Notes
    -----
    A prepared weight takes 4 times the memory of one in float32: two slices of float64 for each element. It is
    refused in fast arithmetic.

    Examples
    --------
    >>> import array_api_strict as xp
    >>> from attention_core.functions import linear
    >>> from attention_core.parameters import Linear
    >>> map_of = Linear(xp.asarray([[1.0], [2.0]], dtype=xp.float32))
    >>> prepared = prepare_weights(map_of)
    >>> linear(prepared, xp.ones((1, 2), dtype=xp.float32), arithmetic="reproducible")
    Array([[3.]], dtype=array_api_strict.float32)
    """
    return _prepared("parameters", parameters, xp)


def _prepared(name: str, tree: Any, xp: Namespace | None) -> Any:
    if isinstance(tree, Linear):
        return tree._replace(weight=_prepared_weight(f"{name}.weight", tree.weight, xp))
    if isinstance(tree, dict):
        return {key: _prepared(f"{name}[{key!r}]", branch, xp) for key, branch in tree.items()}
    if isinstance(tree, PreparedWeight) or not isinstance(tree, tuple | list):
        return tree
    if isinstance(tree, Decoder) and tree.output is None:
        transpose = array_namespace(tree.token).matrix_transpose
        tree = tree._replace(output=Linear(transpose(tree.token)))
    names = getattr(tree, "_fields", range(len(tree)))
    branches = [_prepared(f"{name}.{field}", branch, xp) for field, branch in zip(names, tree, strict=True)]
    return type(tree)(*branches) if hasattr(tree, "_fields") else type(tree)(branches)


def _prepared_weight(name: str, weight: Any, xp: Namespace | None) -> PreparedWeight:
    if isinstance(weight, PreparedWeight):
        return weight
    xp = common_namespace(xp, {name: weight})
    check_rank(name, weight, 2, "(in, out)")
    check_floating(name, weight)
    check_arithmetic("reproducible", name, weight)
    if len(weight.shape) != 2:
        raise ValueError(f"expected {name} (in, out); got {shape_text(weight)}")
    with without_warnings(weight):
        return prepare(weight, xp=xp)
