"""What a library lends to the core, and how it is found. The public names are those of `attention_core.backend`."""

from attention_core._backend._autocast import Autocast, with_autocast
from attention_core._backend._default import DefaultBackend
from attention_core._backend._find import (
    array_namespace,
    available_backends,
    backend_for,
    backend_of,
    check_namespace,
    common_namespace,
    entries,
    get_backend,
    is_compiling,
    is_concrete,
    is_dense,
    is_exporting,
    is_of_eager_type,
    library_name,
    own_namespace,
)
from attention_core._backend._loops import BlockOperations, PythonLoops, TracedLoops
from attention_core._backend._protocol import (
    DIFFERENTIATED_ONCE,
    Backend,
    Kernel,
    KernelWithLogsumexp,
    Loops,
    Operation,
    Tuning,
    Verdict,
)
from attention_core._backend._registry import register, registered, registered_name

__all__ = [
    "DIFFERENTIATED_ONCE",
    "Autocast",
    "Backend",
    "BlockOperations",
    "DefaultBackend",
    "Kernel",
    "KernelWithLogsumexp",
    "Loops",
    "Operation",
    "PythonLoops",
    "TracedLoops",
    "Tuning",
    "Verdict",
    "array_namespace",
    "available_backends",
    "backend_for",
    "backend_of",
    "check_namespace",
    "common_namespace",
    "entries",
    "get_backend",
    "is_compiling",
    "is_concrete",
    "is_dense",
    "is_exporting",
    "is_of_eager_type",
    "library_name",
    "own_namespace",
    "register",
    "registered",
    "registered_name",
    "with_autocast",
]
