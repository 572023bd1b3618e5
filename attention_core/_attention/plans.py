"""The plan of a call: all that types, lengths and options decide, remembered for the next call of the same signature.

A small call takes less time to compute than to be judged. Values are looked at in every call, and never remembered.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from attention_core._arrays import Array, Namespace, cast_to
from attention_core._attention.call import CONTEXTS, Call, assumes_finite
from attention_core._attention.choice import has_no_elements, is_dense_faster, samples_of, without_hidden_keys
from attention_core._attention.dense import dense, plan_dense
from attention_core._attention.key_range import find_cut, with_cut
from attention_core._attention.recording import RECORDERS
from attention_core._attention.samples import attend_per_sample
from attention_core._backend import Backend, KernelWithPlan, is_compiling, is_of_eager_type, registered_name
from attention_core.masks import Mask
from attention_core.masks._rules import is_of_lengths

_NUMBERS = (int, float, type(None))
_OTHERS, _RETURNED = ("bias", "score_mod", "dropout", "starts"), ("return_weights", "return_logsumexp")
OutputOf = Callable[[Call], Array | None]


class CallPlan(NamedTuple):
    """What a signature decides. It holds no array of the user.

    Attributes
    ----------
    xp : array namespace
    backend : Backend
    has_constants : bool
        Whether arrays of NumPy are among the options, next to those of another library.
    output : callable or None
        ``output(call)`` is that of attention, or ``None`` where this call is to be judged after all.
    fields : tuple
        Those of `Call` behind the mask.
    made_for : tuple
        Tuning and kernels of the backend, which may be replaced.
    """

    xp: Namespace
    backend: Backend
    has_constants: bool
    output: OutputOf | None = None
    fields: tuple[Any, ...] = ()
    made_for: tuple[Any, Any] = (None, None)


def plan_call(plan: CallPlan, arrays: tuple[Array, Array, Array], mask: Any, options: Mapping[str, Any]) -> CallPlan:
    """The plan with the output of calls of this signature, if no option but sinks and lengths of a mask is an array."""
    if is_compiling(arrays[0]) or plan.has_constants or not all(map(is_of_eager_type, arrays)):
        return plan
    scale, softcap, arithmetic = options.get("scale"), options.get("softcap"), options.get("arithmetic", "fast")
    if type(scale) not in _NUMBERS or type(softcap) not in _NUMBERS or arithmetic != "fast":
        return plan
    if not (mask is None or _is_relative(mask) or is_of_lengths(mask)):
        return plan
    if any(options.get(name) is not None for name in _OTHERS) or any(options.get(name) for name in _RETURNED):
        return plan
    assume_finite = options.get("assume_finite", False)
    call = Call(*arrays, plan.xp, plan.backend, mask=mask, scale=scale, softcap=softcap, assume_finite=assume_finite)
    output = _output_of(call._replace(sinks=options.get("sinks")), options.get("implementation"))
    return plan._replace(output=output, fields=call[6:], made_for=(plan.backend.tuning, plan.backend.kernels))


def output_by_plan(
    plan: CallPlan, arrays: tuple[Array, Array, Array], mask: Any, sinks: Array | None = None
) -> Array | None:
    """The output for arguments of the signature of a plan; ``None`` where the call is to be judged."""
    if plan.output is None or RECORDERS.all:
        return None
    tuning, kernels = plan.made_for
    if tuning is not plan.backend.tuning or kernels is not plan.backend.kernels:
        return None
    call = Call(*arrays, plan.xp, plan.backend, mask, *plan.fields)
    call = call if sinks is None else call._replace(sinks=sinks)
    return plan.output(call._replace(assume_finite=True) if assumes_finite(*CONTEXTS.settings) else call)


def _is_relative(mask: Any) -> bool:
    """Whether a rule is one of numbers, which are compared with those of other calls."""
    return isinstance(mask, Mask) and bool(registered_name(type(mask))) and mask.is_relative()


def _output_of(call: Call, implementation: Any) -> OutputOf | None:
    """The output as a function of calls such as this one, at whose values nothing looks here."""
    if implementation not in ("auto", "dense") or hasattr(call.backend.loops, "unalarmed"):
        return None
    if implementation == "auto" and call.backend.kernels:
        kernel = call.backend.kernels[0]
        return kernel.plan(call) if isinstance(kernel, KernelWithPlan) and not has_no_elements(call) else None
    if call.sinks is not None:
        return None
    if call.mask is not None and not _is_relative(call.mask):
        return _output_of_lengths(call) if implementation == "auto" else None
    cut = None if call.mask is None or call.query.shape[-2] == call.key.shape[-2] else find_cut(call)
    call = with_cut(call, cut)
    if implementation == "auto" and not is_dense_faster(call) and not has_no_elements(call):
        return None
    plan, xp = plan_dense(call), call.xp

    def output(call: Call) -> Array:
        return cast_to(dense(with_cut(call, cut), logsumexp=False, plan=plan).output, call.query.dtype, xp=xp)

    return output


def _output_of_lengths(call: Call) -> OutputOf:
    """The output under lengths that are read in every call, where nothing but these masks keys."""
    plan, xp = plan_dense(call._replace(mask=None)), call.xp

    def output(call: Call) -> Array | None:
        samples = samples_of(call)
        if samples is not None:
            found = attend_per_sample(samples, call.query.shape[:-3], logsumexp=False)
        else:
            cut = without_hidden_keys(call)
            if cut.mask is not None or not is_dense_faster(cut):
                return None
            found = dense(cut, logsumexp=False, plan=plan)
        return cast_to(found.output, call.query.dtype, xp=xp)

    return output
