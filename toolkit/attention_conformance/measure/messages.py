"""What a process tells of its order besides results; of one that nobody trusts, as text, numbers and bytes alone."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from types import UnionType
from typing import Any, TypeAlias, Union, get_args, get_origin, get_type_hints

import ml_dtypes
import numpy as np

from attention_conformance.launch.subject import Subject
from attention_conformance.measure.finding import VERDICTS, Finding, Started
from attention_conformance.problem import NumpyArray


@dataclass(frozen=True)
class Asked:
    """A question about the kernel: before its answer, and with it."""

    question: str
    facts: dict[str, Any] | None = None


@dataclass(frozen=True)
class Described:
    """What is run, before its results.

    Attributes
    ----------
    facts, sources : mapping
        What is supposed of a kernel, and how each fact is known.
    count : int
        How many cases there are to run, in how many ways; 0 where a process goes on for another.
    target : str
        The backend of the core, or the other kernel, where this is about it.
    left_out : tuple of (str, str, str)
        A case, a way and a reason for all that cannot be run.
    """

    facts: Mapping[str, Any]
    sources: Mapping[str, str]
    versions: Mapping[str, str]
    count: int
    target: str = ""
    left_out: tuple[tuple[str, str, str], ...] = ()


@dataclass(frozen=True)
class Refused:
    """Why a target cannot be checked at all."""

    reason: str


@dataclass(frozen=True)
class Returned:
    """What a kernel returned, to be compared by another process."""

    case: str
    dtype: str
    arrays: dict[str, NumpyArray] = field(repr=False)


Message: TypeAlias = Asked | Described | Refused | Started | Finding

# --- between processes that do not trust each other ---

BELIEVED = tuple(each for each in VERDICTS if each not in ("right", "accepted", "unexpectedly right"))
"""Verdicts that a process may give of itself: none of them passes it."""

OF_REFUSAL = ("verdict", "detail", "variant", "says", "traceback", "kinds", "shapes")
"""What a refusal says of itself; the rest is known of the question."""

OF_CASE = ("case", "dtype", "line", "shows")

CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]")

PLAIN = {each.__name__: each for each in (Asked, Described, Refused)}


def packed(message: Any) -> bytes:
    """A message as JSON, a zero byte, and the bytes of its arrays."""
    kind, arrays = type(message).__name__, getattr(message, "arrays", {})
    content: Any = message
    if isinstance(message, Finding):
        content = {name: getattr(message, name) for name in (*OF_CASE, *OF_REFUSAL)}
    elif isinstance(message, Started):
        content = [message.result.case, message.result.dtype]
    elif isinstance(message, Returned):
        content = [message.case, message.dtype, [[name, each.dtype.name, each.shape] for name, each in arrays.items()]]
    elif kind in PLAIN:
        content = asdict(message)
    head = json.dumps([kind, content], default=str).encode()
    return b"\0".join([head, b"".join(each.tobytes() for each in arrays.values())])


def unpacked(data: bytes) -> Any:
    """The message that bytes hold, of which nothing is run; any exception where they hold none."""
    head, _, body = data.partition(b"\0")
    kind, content = json.loads(head)
    if kind == "NoneType":
        return None
    if kind in PLAIN:
        return _checked(PLAIN[kind](**{name: _frozen(each) for name, each in content.items()}))
    if kind == "Started":
        case, dtype = map(_frozen, map(str, content))
        return Started(Finding(case, dtype, 0, "", "crashed"))
    if kind == "Returned":
        case, dtype, rows = content
        return Returned(str(case), str(dtype), _arrays(rows, body))
    if kind != "Finding" or content["verdict"] not in BELIEVED:
        raise ValueError(f"expected a refusal; got {str(content)[:80]}")
    return _checked(Finding(**{name: _frozen(content[name]) for name in (*OF_CASE, *OF_REFUSAL)}))


def _checked(message: Any) -> Any:
    """A message whose fields, and whose facts about a kernel, have the types that they say; ValueError for others."""
    for name, hint in get_type_hints(type(message)).items():
        value = getattr(message, name)
        known = get_type_hints(Subject) if name == "facts" and value is not None else {}
        if not _is_of(value, hint) or not all(_is_of(value[each], known[each]) for each in known if each in value):
            raise ValueError(f"expected {name} as {hint}; got {str(value)[:80]}")
    return message


def _is_of(value: Any, hint: Any) -> bool:
    kind, parts = get_origin(hint) or hint, get_args(hint)
    if kind in (Union, UnionType):
        return any(_is_of(value, each) for each in parts)
    is_kind = hint is Any or isinstance(value, kind)
    if is_kind and isinstance(value, Mapping):
        return all(isinstance(name, str) and _is_of(each, parts[-1]) for name, each in value.items())
    each_kind = parts[:1] * len(value) if is_kind and parts[-1:] == (...,) else parts
    return is_kind and (kind is not tuple or (len(value) == len(each_kind) and all(map(_is_of, value, each_kind))))


def _arrays(rows: Any, body: bytes) -> dict[str, NumpyArray]:
    arrays, at = {}, 0
    for name, kind, shape in rows:
        dtype = np.dtype(getattr(ml_dtypes, kind, kind))
        if dtype.kind not in "biufc" and not hasattr(ml_dtypes, kind):
            raise ValueError(f"expected numbers; got {kind}")
        array = np.frombuffer(body, dtype, int(np.prod(shape, dtype=object)), at).reshape(shape)
        arrays[name], at = array.copy(), at + array.nbytes
    return arrays


def _frozen(each: Any) -> Any:
    """What JSON read, with tuples for lists, and no character that controls a terminal."""
    if isinstance(each, str):
        return CONTROL.sub("?", each)
    if isinstance(each, Mapping):
        return {_frozen(name): _frozen(part) for name, part in each.items()}
    return tuple(map(_frozen, each)) if isinstance(each, list) else each
