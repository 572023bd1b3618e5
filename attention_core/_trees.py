"""Trees of arrays: one way to walk (named) tuples, lists and dictionaries, and one to take dataclasses apart.

A tree is an array, or a container of trees. Its other leaves are left alone: ``None``, numbers and text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from numbers import Real
from typing import Any, NamedTuple


def map_leaves(function: Callable[[Any], Any], tree: Any, /) -> Any:
    """Apply a function to every leaf, whatever it is, and keep the structure."""
    if isinstance(tree, dict):
        return {key: map_leaves(function, branch) for key, branch in tree.items()}
    if isinstance(tree, list | tuple):
        return container_of(tree, [map_leaves(function, branch) for branch in tree])
    return function(tree)


def container_of(tree: Any, branches: list[Any], /) -> Any:
    """A list or a (named) tuple of other branches."""
    if isinstance(tree, list):
        return branches
    return type(tree)(*branches) if hasattr(tree, "_fields") else tuple(branches)


def named_branches(tree: Any, prefix: str = "", /) -> list[tuple[str, Any]]:
    """The branches of a (named) tuple, each with its name behind those of the containers around it."""
    names = getattr(tree, "_fields", range(len(tree)))
    return [(f"{prefix}.{name}" if prefix else str(name), branch) for name, branch in zip(names, tree, strict=True)]


def named_arrays(tree: Any, prefix: str = "", /) -> dict[str, Any]:
    """Map the leaves of a tree of named tuples by name, in order, without ``None``.

    Examples
    --------
    >>> from attention_core.layers import FeedForward
    >>> list(named_arrays(FeedForward(4, 16).parameters))
    ['expand.weight', 'expand.bias', 'contract.weight', 'contract.bias']
    """
    if not isinstance(tree, tuple):
        return {} if tree is None else {prefix: tree}
    found: dict[str, Any] = {}
    for name, branch in named_branches(tree, prefix):
        found |= named_arrays(branch, name)
    return found


def arrays_within(tree: Any, name: str, /) -> dict[str, Any]:
    """Map the arrays in (named) tuples and dataclasses by name; numbers of NumPy are none."""
    if tree is None or isinstance(tree, int) or type(tree) is float:  # nothing is asked of a symbol, as in `flatten`
        return {}
    if hasattr(tree, "dtype"):
        return {} if isinstance(tree, Real) else {name: tree}
    branches = named_branches(tree, name) if isinstance(tree, tuple) else []
    if is_dataclass(tree) and not isinstance(tree, type):
        branches = [(f"{name}.{field}", getattr(tree, field)) for field in _field_names(type(tree))]
    return {path: array for each, branch in branches for path, array in arrays_within(branch, each).items()}


def tree_from_names(like: Any, arrays: Mapping[str, Any], prefix: str = "", /) -> Any:
    """Build a tree of the structure of another from named arrays: the inverse of `named_arrays`.

    Raises
    ------
    KeyError
        When an array is missing.
    """
    if not isinstance(like, tuple):
        return None if like is None else arrays[prefix]
    return container_of(like, [tree_from_names(branch, arrays, name) for name, branch in named_branches(like, prefix)])


class Leaf(NamedTuple):
    """An array of a tree: its index among the arrays, and how many axes it has after the leading ones.

    An array within a tuple is passed on whole: its ``axes`` are -1.
    """

    place: int
    axes: int


_PLAIN = (type(None), int, float, bool, str)


def flatten(rule: Any, arrays: list[Any], axes: int = 0, /) -> Any:
    """Append the arrays of a rule, or of another dataclass, to a list, and return the tree definition.

    The definition is nested tuples ``(class, *fields)`` with a `Leaf` for each array. It compares by value.
    """
    if rule is None or isinstance(rule, int) or type(rule) is float:  # of a symbol of torch.compile nothing is asked
        return rule
    if hasattr(rule, "dtype"):
        arrays.append(rule)
        return Leaf(len(arrays) - 1, axes)
    if isinstance(rule, tuple):
        kind = type(rule) if hasattr(rule, "_fields") else tuple
        return kind, *[item if type(item) in _PLAIN else flatten(item, arrays, -1) for item in rule]
    if is_dataclass(rule) and not isinstance(rule, type):
        axes_of: dict[str, int] = getattr(rule, "axes", {})
        names = [field.name for field in fields(rule)]
        return type(rule), *[flatten(getattr(rule, name), arrays, axes_of.get(name, 0)) for name in names]
    return rule


def unflatten(treedef: Any, arrays: Any, /) -> Any:
    """Build the rule of a tree definition, with these arrays as its leaves."""
    if isinstance(treedef, Leaf):
        return arrays[treedef.place]
    if not isinstance(treedef, tuple):
        return treedef
    kind, *branches = treedef
    values = [unflatten(branch, arrays) if isinstance(branch, tuple) else branch for branch in branches]
    if issubclass(kind, tuple | list):
        return kind(*values) if hasattr(kind, "_fields") else kind(values)
    rule = object.__new__(kind)  # without ``__post_init__``: traced arrays cannot be checked again
    for name, value in zip(_field_names(kind), values, strict=True):
        object.__setattr__(rule, name, value)
    return rule


def _field_names(kind: type[Any]) -> tuple[str, ...]:
    return tuple([field.name for field in fields(kind)])


_field_names._dynamo_marked_constant = True  # type: ignore[attr-defined] # as `_keywords.untraced` marks functions


def leaves(treedef: Any, /) -> list[Leaf]:
    """The leaves of a tree definition, in order."""
    if isinstance(treedef, Leaf):
        return [treedef]
    return [leaf for branch in treedef[1:] for leaf in leaves(branch)] if isinstance(treedef, tuple) else []


def classes(treedef: Any, /) -> Iterator[type]:
    """The classes of a tree definition, in order."""
    if isinstance(treedef, type) and treedef is not tuple:
        yield treedef
    elif isinstance(treedef, tuple):
        for branch in treedef:
            yield from classes(branch)
