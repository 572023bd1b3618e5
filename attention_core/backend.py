"""All that an adapter for a framework, or a kernel, needs of the core.

Whoever adds a framework reads this module first. A backend is an object with the members of `Backend`, announced under
the entry-point group ``attention_core.backends`` by the name under which its library is imported::

    [project.entry-points."attention_core.backends"]
    torch = "attention_torch:backend"

Nothing in the core is edited: arrays of the library then find their namespace, and the tests and the conformance
command find the backend.
"""

from attention_core._arrays import (
    FLOATING,
    Array,
    DType,
    Namespace,
    cast_to,
    compute_dtype_name,
    dtype_name,
    explain_class,
    index_dtype,
    is_floating,
    on_device_of,
    one_line,
    positions,
    shape,
    shape_text,
    sizes,
    take_rows,
    upcast,
)
from attention_core._attention.blocks.forward import blockwise
from attention_core._attention.call import (
    Attention,
    Call,
    assumes_finite,
    default_scale,
    fold_group,
    group_size,
    repeat_kv,
    score_positions,
    unfold_group,
)
from attention_core._attention.choice import attend_automatically, with_sinks
from attention_core._attention.key_range import (
    cut_keys,
    find_cut,
    has_few_queries,
    key_ranges,
    masked_columns,
    with_cut,
)
from attention_core._attention.magnitudes import (
    known_finite_products,
    known_finite_scores,
    norms_are_below,
    products_are_finite,
)
from attention_core._attention.plans import once_per_lengths
from attention_core._attention.samples import sample_cuts, sample_ranges
from attention_core._backend import (
    DIFFERENTIATED_ONCE,
    Autocast,
    Backend,
    BlockOperations,
    DefaultBackend,
    FusedSilu,
    GradientFlags,
    KeptNumbers,
    Kernel,
    KernelWithLogsumexp,
    KernelWithPlan,
    Loops,
    Operation,
    PythonLoops,
    RowUpdates,
    TracedLoops,
    TracedPlacement,
    Tuning,
    Verdict,
    Workspace,
    array_namespace,
    available_backends,
    get_backend,
    is_concrete,
    register,
    registered,
    registered_name,
)
from attention_core._backend import entries as announced_backends
from attention_core._checks import check_flags, remember
from attention_core._keywords import keyword_error, names_keywords, names_of, unconverted, words_of
from attention_core.masks import is_top_left_causal

__all__ = [
    "DIFFERENTIATED_ONCE",
    "FLOATING",
    "Array",
    "Attention",
    "Autocast",
    "Backend",
    "BlockOperations",
    "Call",
    "DType",
    "DefaultBackend",
    "FusedSilu",
    "GradientFlags",
    "KeptNumbers",
    "Kernel",
    "KernelWithLogsumexp",
    "KernelWithPlan",
    "Loops",
    "Namespace",
    "Operation",
    "PythonLoops",
    "RowUpdates",
    "TracedLoops",
    "TracedPlacement",
    "Tuning",
    "Verdict",
    "Workspace",
    "announced_backends",
    "array_namespace",
    "assumes_finite",
    "attend_automatically",
    "available_backends",
    "blockwise",
    "cast_to",
    "check_flags",
    "compute_dtype_name",
    "cut_keys",
    "default_scale",
    "dtype_name",
    "explain_class",
    "find_cut",
    "fold_group",
    "get_backend",
    "group_size",
    "has_few_queries",
    "index_dtype",
    "is_concrete",
    "is_floating",
    "is_top_left_causal",
    "key_ranges",
    "keyword_error",
    "known_finite_products",
    "known_finite_scores",
    "masked_columns",
    "names_keywords",
    "names_of",
    "norms_are_below",
    "on_device_of",
    "once_per_lengths",
    "one_line",
    "positions",
    "products_are_finite",
    "register",
    "registered",
    "registered_name",
    "remember",
    "repeat_kv",
    "sample_cuts",
    "sample_ranges",
    "score_positions",
    "shape",
    "shape_text",
    "sizes",
    "take_rows",
    "unconverted",
    "unfold_group",
    "upcast",
    "with_cut",
    "with_sinks",
    "words_of",
]


_PROTOCOLS = (
    "Autocast",
    "Backend",
    "Call",
    "FusedSilu",
    "GradientFlags",
    "KeptNumbers",
    "Kernel",
    "KernelWithLogsumexp",
    "KernelWithPlan",
    "Loops",
    "Operation",
    "RowUpdates",
    "TracedPlacement",
)
for _name in (*_PROTOCOLS, "Tuning", "Verdict", "available_backends", "get_backend"):
    vars()[_name].__module__ = __name__  # by which documentation knows it
