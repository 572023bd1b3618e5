"""Watches a call: that its arguments stay as they are, its results are memory of their own, and are all written."""

from __future__ import annotations

import contextlib
import hashlib
import importlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from unittest import mock

import numpy as np

from attention_core.backend import Backend

LARGEST = 2**26
"""Elements of a buffer above which the array alone is hashed."""

MUTABLE = ("numpy", "torch")


TOUCHED = {
    "changed-argument": "the call writes into its arguments, or into memory around them",
    "shared-memory": "a result shares memory with an argument",
    "other-bits": "equal calls are not bitwise equal",
    "other-bits-in-batch": "a batch element is not bitwise equal in another batch",
    "kept-by-identity": "a result is kept by the identity of its arrays, also after their numbers changed",
    "other-kind": "a result is no array of the library of its arguments",
    "kept-memory": "memory of former calls is never freed",
    "overwritten-result": "a later call changes the result of an earlier one, as one buffer for all results does",
    "borrowed-attention": "it calls an attention that is there already",
    "patched-function": "it replaces functions that measure or compare",
    "unlike-alone": "a process that has not imported the kit gets another answer",
}
"""What `Touched` tells by name."""


class Touched(Exception):  # noqa: N818 (a result about the kernel, no error of the kit)
    """A call changed or kept what it must not, or gave other bits the second time.

    ``name`` is a key of `TOUCHED`, or empty.
    """

    def __init__(self, detail: str, name: str = "", verdict: str = "silently wrong") -> None:
        super().__init__(detail)
        self.name, self.verdict = name, verdict


@contextlib.contextmanager
def watched(arrays: Mapping[str, Any], backend: Backend) -> Iterator[None]:
    """Compare the bytes of all arguments before and after."""
    if backend.name not in MUTABLE:
        yield
        return
    before = {name: _bytes(each, backend) for name, each in arrays.items()}
    yield
    for name, array in arrays.items():
        numbers, buffer = (now == then for now, then in zip(_bytes(array, backend), before[name], strict=True))
        if not numbers:
            raise Touched(f"the call changed its argument {name}", "changed-argument")
        if not buffer:
            raise Touched(f"the call changed memory around its argument {name}", "changed-argument")


def _bytes(array: Any, backend: Backend) -> tuple[bytes, bytes]:
    """The bytes of an array, and of the whole buffer that it is a view of."""
    whole = array
    while (base := getattr(whole, "base" if backend.name == "numpy" else "_base", None)) is not None:
        if type(base) is not type(whole):
            break
        whole = base
    numbers = _hash(array, backend)
    is_large = np.prod(whole.shape, dtype=np.int64) > LARGEST
    return numbers, numbers if whole is array or is_large else _hash(whole, backend)


def _hash(array: Any, backend: Backend) -> bytes:
    """The bytes of an array; of a large one their hash, part by part, as each part is copied."""
    if np.prod(array.shape, dtype=np.int64) <= LARGEST:
        return np.asarray(backend.to_numpy(array)).tobytes()
    sha256 = hashlib.sha256()
    for part in array:
        sha256.update(np.asarray(backend.to_numpy(part)).tobytes())
    return sha256.digest()


def shared(results: Mapping[str, Any], arrays: Mapping[str, Any], backend: Backend) -> None:
    """Raise if a result shares memory with an argument."""
    for name, result in results.items():
        for argument, array in arrays.items():
            if _overlap(result, array, backend):
                raise Touched(f"{name} shares memory with the argument {argument}", "shared-memory")


def _overlap(first: Any, second: Any, backend: Backend) -> bool:
    if backend.name == "numpy":
        return bool(np.may_share_memory(first, second) and first.size and second.size)
    if backend.name == "torch" and first.numel() and second.numel():
        return bool(first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr())
    return False


def poisoned(backend: Backend, wanted: bool) -> contextlib.AbstractContextManager[Any]:
    """Fill new memory with NaN before a kernel gets it, so that an element that is not written shows."""
    stack = contextlib.ExitStack()
    if wanted and backend.name == "numpy":
        filling: dict[str, Any] = {name: _filling(getattr(np, name)) for name in ("empty", "empty_like")}
        stack.enter_context(mock.patch.multiple(np, **filling))
    if wanted and backend.name == "torch":  # by its switches, which other libraries of the process do not see
        torch = importlib.import_module("torch")
        before, warns = (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        )
        stack.callback(torch.use_deterministic_algorithms, before, warn_only=warns)
        torch.use_deterministic_algorithms(True, warn_only=True)
    return stack


def _filling(function: Callable[..., Any]) -> Callable[..., Any]:
    def filled(*arguments: Any, **options: Any) -> Any:
        array = function(*arguments, **options)
        if isinstance(array, np.ndarray) and array.dtype.kind in "fV":
            with contextlib.suppress(TypeError, ValueError):
                array[...] = np.nan
        return array

    return filled
