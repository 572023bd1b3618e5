"""For kernels that nobody has read: a watch on attentions and clocks that are there, and grading in another process."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import pkgutil
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

from attention_conformance.launch.watch import Touched

ATTENTIONS = {
    "jax.nn": ("dot_product_attention",),
    "keras.ops": ("dot_product_attention",),
    "flax.nnx": ("dot_product_attention",),
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
    replaced = []
    for root, names in TRUSTED.items():
        for name in names if root in sys.modules else ():
            function = pkgutil.resolve_name(f"{root}:{name}")
            if str(getattr(function, "__module__", "")).partition(".")[0] != root:
                replaced.append(f"{root}.{name}")
    return replaced


@contextlib.contextmanager
def _functions(names: list[str]) -> Iterator[None]:
    """Note the functions whose code runs, by whatever name a module holds them, in threads that a call starts, too."""
    known = {
        inspect.unwrap(function).__code__: f"{module}.{name}"
        for module, functions in ATTENTIONS.items()
        for name in functions
        if (function := getattr(sys.modules.get(module), name, None)) is not None
    }

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code in known:
            names.append(known[frame.f_code])

    before = sys.getprofile(), threading.getprofile()
    sys.setprofile(note)
    threading.setprofile(note)
    try:
        yield
        names += ["sys.setprofile, which hides what it calls"] * (sys.getprofile() is not note)
    finally:
        sys.setprofile(before[0])
        threading.setprofile(before[1])


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
