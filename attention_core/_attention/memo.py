"""The one memo of attention: what a signature decides, for this call and the next ones of the same.

A signature is types, shapes, dtypes, devices and options. A small call takes less time to compute than to be checked,
and to be judged. Queries, keys and values are looked at in every call, and never kept. Lengths in a mask are read in
every call, and what they decide is kept for the next one.

A call that is answered here does not pass `run_call`: it goes from `output_of` to what `Way.lasting` gave, a `run`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from .._arrays import Array, Namespace, cast_to
from .._backend import Backend, can_be_read, is_compiling, is_of_eager_type, numbers_of, registered_name
from ..masks import Mask, flatten
from ..masks._mask import bounds_of
from ..masks._rules import rule_of
from .call import Call
from .kernels import Kernel, Way
from .parts import keys_within_reach, with_cut
from .ways import BLOCKS, DENSE, REPRODUCIBLE, taken_way, with_sinks

OutputOf = Callable[[Call], "Array | None"]
# What an output that is kept depends on, or takes from each call, besides numbers. With others, a call is judged.
_NAMED: dict[Any, Way | None] = {"auto": None, "dense": DENSE, "blockwise": BLOCKS}
_PLANNED = {"mask", "is_causal", "sinks", "assume_finite", "implementation", "arithmetic", "xp"}


class Planned:
    """What computes the output of calls of one signature, planned at the first one that is in no mode of its library.

    It is planned again where tuning or kernels of the backend were replaced. A context that assumes values to be finite
    is one of single calls.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        assumed = options.get("assume_finite")
        self.implementation, self.assume_finite = options["implementation"], None if assumed is None else bool(assumed)
        self.is_of_numbers = options.get("mask") is None and options.get("sinks") is None
        self.fields: tuple[Any, ...] | None = None  # of a call that is of numbers, but its arrays and the last one
        self.made: tuple[Any, Any, OutputOf | None] = (None, None, None)  # for this tuning, and these kernels


class Known(NamedTuple):
    """What is known of a signature. It holds no array of the user."""

    xp: Namespace
    backend: Backend
    has_constants: bool  # whether arrays of NumPy are among the options, next to those of another library
    planned: Planned | None = None


def with_plan(known: Known, arrays: tuple[Array, Array, Array], options: Mapping[str, Any]) -> Known:
    """What is known, with a plan for calls of this signature, if no option but mask and sinks is an array."""
    if is_compiling(arrays[0]) or known.has_constants or not all(map(is_of_eager_type, arrays)):
        return known
    if options.get("implementation") not in _NAMED:
        return known
    others = (value for name, value in options.items() if name not in _PLANNED)
    if any(not (value is None or value is False or type(value) in (int, float)) for value in others):
        return known
    if not isinstance(options.get("mask"), Mask | None):
        return known
    return known._replace(planned=Planned(options))


def output_of(known: Known, call: Call) -> Array | None:
    """The output of a call of a known signature; ``None`` where it is to be judged."""
    planned, tuning, kernels = known.planned, known.backend.tuning, known.backend.kernels
    if planned is None or (kernels and planned.implementation == "auto" and not kernels[0].lasts(call)):
        return None
    made_for_tuning, made_for_kernels, output = planned.made
    if tuning is not made_for_tuning or kernels is not made_for_kernels:
        output = _output_of(call._replace(assume_finite=planned.assume_finite), planned.implementation)
        planned.made = tuning, kernels, output
    return None if output is None else output(call)


def _output_of(call: Call, implementation: str) -> OutputOf | None:
    """The output as a function of calls such as this one, at whose values nothing looks here."""
    if not (call.mask is None or _is_of_bands(call.mask, call.query.shape[:-3])):
        return None
    if bounds_of(call.mask).is_relative:
        return _by_way(REPRODUCIBLE if call.arithmetic == "reproducible" else _NAMED[implementation], call)
    reads_lengths = implementation == "auto" and not call.backend.loops.traced
    return _once_per_lengths(call) if reads_lengths else None


def _is_of_bands(mask: Any, leading: tuple[int, ...]) -> bool:
    """Whether a rule is one of numbers, which other calls are compared with, or of lengths that can be read."""
    is_rule = isinstance(mask, Mask) and bool(registered_name(type(mask)))
    return is_rule and all(band.is_exact for band in mask.bounds().numbers(leading))


def _by_way(way: Way | None, call: Call) -> OutputOf | None:
    """The output by a way, or by the one that is taken: a kernel, where the library has any.

    Of the keys within reach, numbers are kept. Arrays of a mask come with each call.
    """
    keys, has_arrays = keys_within_reach(call), not bounds_of(call.mask).is_relative
    part = with_cut(call, keys)
    needs_kernel = way is None and bool(call.backend.kernels)
    way = taken_way(part) if way is None else way
    run = None if needs_kernel and not isinstance(way, Kernel) else way.lasting(part)
    if run is None:
        return None
    keys = keys and keys._replace(mask=None if has_arrays else keys.mask)

    def output(call: Call) -> Array:
        part = call if keys is None else with_cut(call, keys)
        if has_arrays:
            part = part._replace(mask=call.mask)
        result = run(part, logsumexp=call.sinks is not None)
        result = result if call.sinks is None else with_sinks(result, part)
        return cast_to(result.output, call.query.dtype, xp=call.xp)

    return output


def _once_per_lengths(call: Call) -> OutputOf | None:
    """The output of calls of this signature, whose masks have lengths and offsets that are read in each call.

    It is planned again where these are not those of the last call; in all layers of a model they are. Lengths that all
    samples share are numbers. Plans hold no array. There is none where reading would wait for a device.
    """
    leading = call.query.shape[:-3]
    if 0 in leading or not can_be_read(*flatten(call.mask)[1]):
        return None
    last: tuple[Any, bool, Any, OutputOf | None] = (None, False, None, None)

    def output(call: Call) -> Array | None:
        nonlocal last
        numbers = list(map(numbers_of, flatten(call.mask)[1]))
        known, is_shared, rule, planned = last
        if numbers != known:
            bands = bounds_of(call.mask).numbers(leading)
            is_shared = len(set(bands)) == 1
            rule = rule_of(bands[0]) if is_shared else None
            planned = _by_way(None, call._replace(mask=rule) if is_shared else call)
            last = numbers, is_shared, rule, planned
        if planned is None:
            return None
        return planned(call._replace(mask=rule) if is_shared else call)

    return output
