"""What a library lends to the core, and how it is found. The public names are those of `attention_core.backend`."""

from attention_core._backend._autocast import with_autocast as with_autocast, without_warnings as without_warnings
from attention_core._backend._base import (
    DIFFERENTIATED_ONCE as DIFFERENTIATED_ONCE,
    Autocast as Autocast,
    Backend as Backend,
    Kernel as Kernel,
    Operation as Operation,
    Tuning as Tuning,
    Verdict as Verdict,
    library_name as library_name,
)
from attention_core._backend._collectives import Collectives as Collectives
from attention_core._backend._find import (
    array_namespace as array_namespace,
    array_of as array_of,
    available_backends as available_backends,
    backend_for as backend_for,
    backend_of as backend_of,
    can_be_read as can_be_read,
    check_namespace as check_namespace,
    common_namespace as common_namespace,
    entries as entries,
    get_backend as get_backend,
    is_compiling as is_compiling,
    is_concrete as is_concrete,
    is_dense as is_dense,
    is_exporting as is_exporting,
    is_of_eager_type as is_of_eager_type,
    is_of_numpy as is_of_numpy,
    numbers_of as numbers_of,
    own_namespace as own_namespace,
    runs_at_once as runs_at_once,
)
from attention_core._backend._loops import (
    Loops as Loops,
    PythonLoops as PythonLoops,
    TracedLoops as TracedLoops,
    Workspace as Workspace,
)
from attention_core._backend._registry import (
    register as register,
    registered as registered,
    registered_name as registered_name,
)
from attention_core._backend._steps import STEPS as STEPS, may_be_step as may_be_step, read_as as read_as
