"""For kernels that nobody has read: a watch on attentions and clocks that are there, and grading in another process."""

from __future__ import annotations

import contextlib
import importlib
import pkgutil
import sys
from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

from attention_conformance.launch.watch import Touched

ATTENTIONS = {
    "jax.nn": ("dot_product_attention",),
    "keras.ops": ("dot_product_attention",),
    "flax.nnx": ("dot_product_attention",),
    "tensorflow": ("raw_ops.DotProductAttention",),
    "attention_core": ("scaled_dot_product_attention",),
    "attention_conformance.oracle.attention": ("attention",),
    "attention_conformance.oracle.dense": ("answer",),
}
"""Attentions of frameworks, and of the oracle, by the module that has them. PyTorch's are seen by its dispatcher."""

OF_TORCH = ("scaled_dot_product", "multi_head_attention", "native_multi_head", "flex_attention", "flash_attention")


TRUSTED = {
    "time": ("perf_counter", "perf_counter_ns", "monotonic", "monotonic_ns", "time", "time_ns", "process_time"),
    "numpy": ("allclose", "array_equal", "isclose", "testing.assert_allclose"),
    "torch": ("allclose", "equal", "testing.assert_close", "cuda.synchronize", "cuda.Event"),
}
"""Functions that measure and compare, by the module whose own they are."""


@contextlib.contextmanager
def nothing_borrowed(wanted: bool) -> Iterator[None]:
    """Raise after a call if it called an attention that is there already, or replaced what measures and compares."""
    if not wanted:
        yield
        return
    names: list[str] = []
    with contextlib.ExitStack() as stack:
        stack.enter_context(_functions(names))
        if "torch" in sys.modules:
            for mode in _modes(names):
                stack.enter_context(mode)
        yield
    if names:
        raise Touched(f"it called {names[0]}", "borrowed-attention")
    if replaced := _replaced():
        raise Touched(f"it replaced {replaced[0]}", "patched-function")


def _replaced() -> list[str]:
    """The functions that are not those of their module."""
    found = []
    for root, names in TRUSTED.items():
        for name in names if root in sys.modules else ():
            function = pkgutil.resolve_name(f"{root}:{name}")
            if str(getattr(function, "__module__", "")).partition(".")[0] != root:
                found.append(f"{root}.{name}")
    return found


@contextlib.contextmanager
def _functions(names: list[str]) -> Iterator[None]:
    """Replace functions wherever a module holds them, also by another name."""
    noted, replaced = {}, []
    for module, functions in ATTENTIONS.items():
        for name in functions:
            function = getattr(sys.modules.get(module), name, None)
            if function is not None:
                noted[id(function)] = _noting(function, f"{module}.{name}", names)
    for holder in list(sys.modules.values()):
        namespace = getattr(holder, "__dict__", None)
        if type(namespace) is not dict or namespace is globals():
            continue
        if noted.keys().isdisjoint(map(id, list(namespace.values()))):  # soon, as it is asked in every call
            continue
        for name, function in list(namespace.items()):
            if id(function) in noted:
                namespace[name] = noted[id(function)]
                replaced.append((namespace, name, function))
    try:
        yield
    finally:
        for namespace, name, function in replaced:
            namespace[name] = function


def _noting(function: Callable[..., Any], name: str, names: list[str]) -> Callable[..., Any]:
    @wraps(function)
    def noted(*arguments: Any, **options: Any) -> Any:
        names.append(name)
        return function(*arguments, **options)

    return noted


def _modes(names: list[str]) -> list[Any]:
    """PyTorch's two watches: of functions that Python calls, and of operators that the dispatcher runs."""
    overrides: Any = importlib.import_module("torch.overrides")
    dispatch: Any = importlib.import_module("torch.utils._python_dispatch")

    def note(function: Any) -> None:
        name = str(getattr(function, "__name__", function))
        if any(word in name for word in OF_TORCH):
            names.append(f"torch's {name}")

    class Functions(overrides.TorchFunctionMode):  # type: ignore[misc]
        def __torch_function__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
            note(function)
            return function(*arguments, **(options or {}))

    class Operators(dispatch.TorchDispatchMode):  # type: ignore[misc]
        def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
            note(function)
            return function(*arguments, **(options or {}))

    return [Functions(), Operators()]
