"""The plan of a call: all that types, lengths and options decide, remembered for the next call of the same signature.

A small call takes less time to compute than to be judged. Queries, keys and values are looked at in every call, and
never remembered. Lengths in a mask are read in every call, and what they decide is kept for the next one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from attention_core._arrays import Array, Namespace, cast_to
from attention_core._attention.call import Call
from attention_core._attention.choice import cuts_of_samples, has_no_elements, is_dense_faster
from attention_core._attention.dense import dense, plan_dense
from attention_core._attention.key_range import find_cut, with_cut
from attention_core._attention.samples import attend_per_sample
from attention_core._backend import (
    Backend,
    can_be_read,
    is_compiling,
    is_of_eager_type,
    registered_name,
)
from attention_core.masks import Mask, flatten
from attention_core.masks._rules import is_of_lengths, sample_masks

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
    plan: CallPlan,
    arrays: tuple[Array, Array, Array],
    mask: Any,
    sinks: Array | None = None,
    *,
    assume_finite: bool = False,
) -> Array | None:
    """The output for arguments of the signature of a plan; ``None`` where the call is to be judged."""
    if plan.output is None:
        return None
    tuning, kernels = plan.made_for
    if tuning is not plan.backend.tuning or kernels is not plan.backend.kernels:
        return None
    call = Call(*arrays, plan.xp, plan.backend, mask, *plan.fields)
    call = call if sinks is None else call._replace(sinks=sinks)
    return plan.output(call._replace(assume_finite=True) if assume_finite else call)


def _is_relative(mask: Any) -> bool:
    """Whether a rule is one of numbers, which are compared with those of other calls."""
    return isinstance(mask, Mask) and bool(registered_name(type(mask))) and mask.is_relative()


def _output_of(call: Call, implementation: Any) -> OutputOf | None:
    """The output as a function of calls such as this one, at whose values nothing looks here."""
    if implementation not in ("auto", "dense"):
        return None
    automatic = implementation == "auto"
    if automatic and call.backend.kernels:
        kernel = call.backend.kernels[0]
        return None if has_no_elements(call) else kernel.plan(call)
    if call.sinks is not None:
        return None
    of_numbers = functools.partial(_output_of_numbers, automatic=automatic)
    if call.mask is None or _is_relative(call.mask):
        return of_numbers(call)
    return (
        once_per_lengths(call, of_numbers, _output_of_samples) if automatic and not call.backend.loops.traced else None
    )


def _output_of_numbers(call: Call, *, automatic: bool) -> OutputOf | None:
    """The output of the dense form under a mask of numbers, or none."""
    cut = None if call.mask is None or call.query.shape[-2] == call.key.shape[-2] else find_cut(call)
    call = with_cut(call, cut)
    if automatic and not is_dense_faster(call) and not has_no_elements(call):
        return None
    plan, xp = plan_dense(call), call.xp

    def output(call: Call) -> Array:
        return cast_to(dense(with_cut(call, cut), logsumexp=False, plan=plan).output, call.query.dtype, xp=xp)

    return output


def _output_of_samples(call: Call) -> OutputOf | None:
    """The output of a ragged batch, of whose samples each is taken apart, or that has all of some keys."""
    cuts = cuts_of_samples(call)
    if cuts is None:
        cut = None if call.query.shape[-2] == call.key.shape[-2] else find_cut(call)
        return None if cut is None or cut.mask is not None else _output_of_numbers(call, automatic=True)

    def output(call: Call) -> Array:
        return cast_to(attend_per_sample(call, cuts, logsumexp=False).output, call.query.dtype, xp=call.xp)

    return output


def once_per_lengths(
    call: Call, of_numbers: Callable[[Call], OutputOf | None], of_samples: Callable[[Call], OutputOf | None]
) -> OutputOf | None:
    """The output of calls of this signature, whose masks have lengths and offsets that are read in each call.

    It is planned again where these are not those of the last call; in all layers of a model they are. Lengths that all
    samples share are numbers. Plans hold no array. There is none where reading would wait for a device.
    """
    leading = call.query.shape[:-3]
    if 0 in leading or not all(map(can_be_read, _lengths(call.mask))):
        return None
    last: tuple[Any, Any, OutputOf | None] = (None, None, None)

    def output(call: Call) -> Array | None:
        nonlocal last
        numbers = [
            (array if hasattr(array, "tolist") else call.backend.to_numpy(array)).tolist()
            for array in _lengths(call.mask)
        ]
        known, rule, planned = last
        if numbers != known:
            mask: Any = call.mask
            first, *others = sample_masks(mask, leading)
            rule = first if all(flatten(other, []) == flatten(first, []) for other in others) else None
            planned = of_samples(call) if rule is None else of_numbers(call._replace(mask=rule))
            last = numbers, rule, planned
        if planned is None:
            return None
        return planned(call if rule is None else call._replace(mask=rule))

    return output


def _lengths(mask: Any) -> list[Array]:
    """The arrays of a rule."""
    arrays: list[Array] = []
    flatten(mask, arrays)
    return arrays
