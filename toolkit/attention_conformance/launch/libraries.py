"""What a library can do here: devices that hold values, dtypes on them, and the precision it computes in."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from attention_conformance.problem import DTYPES, rounded
from attention_core.backend import Backend


def devices_of(backend: Backend) -> list[str]:
    """The devices of a backend that hold values."""
    return [device for device in backend.devices() if holds(backend, device, "float32")]


def dtypes_of(backend: Backend) -> list[str]:
    """The floating-point types that some device of a backend holds."""
    return [dtype for dtype in DTYPES if any(holds(backend, device, dtype) for device in devices_of(backend))]


def holds(backend: Backend, device: str, dtype: str) -> bool:
    """Whether a device holds numbers of a floating-point type; one that a kernel has broken holds none."""
    with in_precision(backend, dtype):
        if dtype not in backend.dtypes:
            return False
        try:
            backend.to_numpy(backend.from_numpy(rounded(np.zeros(1), dtype), device=device))
        except Exception:  # whatever a library says of it
            return False
        return True


def in_precision(backend: Backend, dtype: str) -> AbstractContextManager[Any]:
    """Compute in float64 where a library does so only when asked, as JAX does."""
    enable: Callable[[bool], AbstractContextManager[Any]] | None
    enable = getattr(importlib.import_module(backend.name), "enable_x64", None) if dtype == "float64" else None
    return contextlib.nullcontext() if enable is None else enable(True)


@contextlib.contextmanager
def quiet_start() -> Iterator[None]:
    """Keep what libraries write to the standard error stream while they start, and pass it on only if that fails."""
    sys.stderr.flush()
    kept, stream = os.dup(2), tempfile.TemporaryFile()  # noqa: SIM115 (closed below)
    os.dup2(stream.fileno(), 2)
    try:
        yield
    except Exception:
        stream.seek(0)
        os.write(kept, stream.read())
        raise
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        stream.close()
