"""Structured masks as pytrees, so that they go through `jax.jit` and `jax.vmap` as arguments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import jax

from attention_core import masks
from attention_core.backend import Array
from attention_core.masks import Mask, flatten, unflatten

Kind = TypeVar("Kind", bound=type[Mask])


def register_mask(kind: Kind, /) -> Kind:
    """Make a pytree of a class of masks: its arrays are the leaves, and all else is static.

    The masks of `attention_core` are registered when this package is imported; a rule of your own is once it is
    decorated.

    Parameters
    ----------
    kind : subclass of attention_core.Mask

    Returns
    -------
    type
        The same class.

    Raises
    ------
    ValueError
        When the class is registered already.

    Examples
    --------
    >>> from attention_core import Causal, KeyLengths
    >>> jax.tree.leaves(KeyLengths(jax.numpy.asarray([3, 5])) & Causal())
    [Array([3, 5], dtype=int32)]
    """
    jax.tree_util.register_pytree_node(kind, _flatten, _unflatten)
    return kind


def _flatten(mask: Any) -> tuple[Sequence[Array], Any]:
    # JAX puts placeholders where arrays were, which nothing but the form tells from numbers that are static.
    if "_leaves" in vars(mask):
        return vars(mask)["_leaves"], vars(mask)["_form"]
    form, arrays = flatten(mask)
    return arrays, form


def _unflatten(form: Any, leaves: Sequence[Any]) -> Any:
    mask = unflatten(form, leaves)
    vars(mask).update(_leaves=leaves, _form=form)
    return mask


for _name in masks.__all__:
    _kind = getattr(masks, _name)
    if isinstance(_kind, type) and issubclass(_kind, Mask) and _kind is not Mask:
        register_mask(_kind)
