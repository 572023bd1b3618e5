"""All that an adapter for a framework, or a kernel, needs of the core.

Whoever adds a framework reads this module first. A backend is a `Backend`, announced under the
entry-point group ``attention_core.backends`` by the name under which its library is imported::

    [project.entry-points."attention_core.backends"]
    torch = "attention_torch:backend"

Nothing in the core is edited: arrays of the library then find their namespace, and the tests and the conformance
command find the backend.
"""

from ._arrays import (
    Array,
    DType,
    Leaf,
    Namespace,
    cast_to,
    dtype_name,
    explain_class,
    leaves,
    map_leaves,
    on_device_of,
    one_line,
    shape,
    shape_text,
    sizes,
    upcast,
)
from ._attention.blocks.forward import blockwise
from ._attention.blocks.plan import pack, unpack
from ._attention.call import (
    CONTEXTS,
    Attention,
    Call,
    assumes_finite,
    default_scale,
    fold_group,
    group_size,
    repeat_kv,
    score_positions,
)
from ._attention.facts import inputs_are_finite
from ._attention.kernels import Kernel, Takes, Verdict
from ._attention.parts import (
    KeyCut,
    find_cut,
    has_few_queries,
    key_ranges,
    sample_cuts,
    with_arrays,
    with_cut,
)
from ._backend import (
    DIFFERENTIATED_ONCE,
    STEPS,
    Autocast,
    Backend,
    Collectives,
    Loops,
    Operation,
    Tuning,
    announced,
    array_namespace,
    available_backends,
    entries as announced_backends,
    get_backend,
    is_concrete,
    is_exporting,
    is_on_host,
    register,
    registered,
    registered_name,
)
from ._checks import check_flags, remember
from ._keywords import keyword_error, names_keywords, names_of, unconverted, words_of
from .masks import is_top_left_causal
from .masks._mask import bounds_of
from .masks._rules import may_count, rule_of

__all__ = [
    "CONTEXTS",
    "DIFFERENTIATED_ONCE",
    "STEPS",
    "Array",
    "Attention",
    "Autocast",
    "Backend",
    "Call",
    "Collectives",
    "DType",
    "Kernel",
    "KeyCut",
    "Leaf",
    "Loops",
    "Namespace",
    "Operation",
    "Takes",
    "Tuning",
    "Verdict",
    "announced",
    "announced_backends",
    "array_namespace",
    "assumes_finite",
    "available_backends",
    "blockwise",
    "bounds_of",
    "cast_to",
    "check_flags",
    "default_scale",
    "dtype_name",
    "explain_class",
    "find_cut",
    "fold_group",
    "get_backend",
    "group_size",
    "has_few_queries",
    "inputs_are_finite",
    "is_concrete",
    "is_exporting",
    "is_on_host",
    "is_top_left_causal",
    "key_ranges",
    "keyword_error",
    "leaves",
    "map_leaves",
    "may_count",
    "names_keywords",
    "names_of",
    "on_device_of",
    "one_line",
    "pack",
    "register",
    "registered",
    "registered_name",
    "remember",
    "repeat_kv",
    "rule_of",
    "sample_cuts",
    "score_positions",
    "shape",
    "shape_text",
    "sizes",
    "unconverted",
    "unpack",
    "upcast",
    "with_arrays",
    "with_cut",
    "words_of",
]


for _name in __all__:
    _thing = vars()[_name]
    if isinstance(_thing, type) and "._" in _thing.__module__:
        _thing.__module__ = __name__  # by which documentation knows it
available_backends.__module__ = get_backend.__module__ = __name__
