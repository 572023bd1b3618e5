"""Anybody's attention as a candidate of the benchmark."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from typing import Any

from attention_benchmark.candidate import Call, Candidate
from attention_benchmark.frameworks import device_of
from attention_benchmark.problem import NumpyArray, Problem, laid_out
from attention_cli.terminal import Many, check_known, refusal
from attention_conformance.call import one_line
from attention_conformance.kernel.options import OPTIONS
from attention_conformance.kernel.probe import settled
from attention_conformance.kernel.signature import read_signature
from attention_conformance.kernel.target import TargetError, load_target
from attention_conformance.launch.call import keywords, outputs
from attention_conformance.launch.fit import fit
from attention_conformance.launch.libraries import quiet_start
from attention_conformance.launch.subject import NotOffered, Subject
from attention_conformance.problem import Problem as Case, array, rounded
from attention_core.backend import get_backend

SAID = {"mask": "mask-sense", "default_scale": "scale"}
"""What the command calls facts, where it is not their name."""

MODES = {"numpy": "eager", "torch": "eager", "jax": "jit", "tensorflow": "graph"}
"""In which a target is run: that of the framework's own attention."""


def foreign_of(target: str | None, backend: Many, facts: Mapping[str, Any]) -> Candidate | None:
    """Load a target, and name it as one more peer of the library of its arrays.

    Facts are other fields of `Subject`; what is None is found.
    """
    declared = {name: each for name, each in facts.items() if each is not None}
    if target is None:
        if declared:
            raise refusal(f"expected --target with --{SAID.get(next(iter(declared)), next(iter(declared)))}; got none")
        return None
    for each in OPTIONS.values():
        if each.values and each.fact in declared:
            check_known(SAID.get(each.fact, each.fact), [declared[each.fact]], each.values)
    if backend:
        check_known("backend", backend, MODES)
        if len(backend) > 1:
            raise refusal(f"expected one --backend with --target; got {len(backend)}")
        declared["backend"] = backend[0]
    try:
        with quiet_start():
            subject = load_target(target, **declared)
    except TargetError as error:
        raise refusal(str(error)) from error
    except Exception as error:  # of the module of the target
        raise refusal(f"expected {target} to load; got {one_line(error)}") from error
    framework = subject.backend or read_signature(subject)["backend"]
    text = json.dumps({"target": target, "declared": dict(declared)})
    return Candidate(target, framework, MODES[framework], f"attention_cli.timed:prepare {text}")


def prepare(problem: Problem, text: str) -> Call:
    """Prepare a call of a target, which JSON tells with what is declared of it; what it does not offer is refused."""
    stated = json.loads(text)
    framework = _loaded(text).backend or read_signature(_loaded(text))["backend"]
    subject = _settled(text, device_of(get_backend(framework), problem.device))
    if problem.direction == "both" and subject.backward is not None:
        raise ValueError(f"expected gradients by autograd of {stated['target']}; got a pair of functions")
    keys, allowed = problem.cut()
    is_flag = problem.is_causal and (subject.causal == "top-left" or problem.num_queries == problem.shape[2])
    if problem.is_causal and not is_flag:
        allowed = problem.allowed()
    names = ("query", "key", "value")
    arrays = dict(zip(names, problem.arrays, strict=True))
    arrays |= {name: arrays[name][:, :, keys] for name in names[1:]} | ({} if allowed is None else {"mask": allowed})
    asked = Case(
        arrays,
        mask=None if allowed is None else array("mask"),
        options={"is_causal": True} if is_flag else {},
        cotangent=problem.cotangent if problem.direction == "both" else None,
    )
    try:
        case = fit(asked, subject)
    except NotOffered as lacking:
        raise ValueError(f"expected a target that takes {lacking}; got {stated['target']}") from lacking
    others = {name: case.arrays[name] for name in ("mask", "bias") if name in case.arrays}
    if subject.native or subject.layout not in ("BHSD", "BSHD"):
        return _translated(problem, subject, case, others, keys=keys)
    return _direct(problem, subject, case, others, keys=keys)


def _direct(problem: Problem, subject: Subject, case: Case, others: Mapping[str, NumpyArray], *, keys: slice) -> Call:
    """A call with nothing around it: arrays lie as the target takes them."""
    layout = "BLHD" if subject.layout == "BSHD" else "BHLD"
    cut = (slice(None), keys) if layout == "BLHD" else (slice(None), slice(None), keys)
    words = keywords(case, subject, {}, None)
    names = {"mask": subject.mask_name or "", "bias": subject.bias_name or subject.mask_name or ""}
    constants = {names[name]: _constant(name, each, subject, problem) for name, each in others.items()}
    scale = problem.shape[3] ** -0.5 if subject.default_scale == "one" and not subject.scale_name else None
    order = subject.order or ("query", "key", "value")

    def function(query: Any, key: Any, value: Any, *arrays: Any) -> Any:
        tensors = {"query": query if scale is None else query * scale, "key": key[cut], "value": value[cut]}
        options = {**words, **dict(zip(constants, arrays, strict=True))}
        if subject.array_names:
            named = {name: tensors[each] for name, each in zip(subject.array_names, order, strict=True)}
            result = subject.function(**named, **options)
        else:
            result = subject.function(*(tensors[each] for each in order), **options)
        return result[0] if isinstance(result, tuple | list) else result

    variables = tuple(laid_out(each, layout) for each in problem.arrays)
    return Call(function, variables, tuple(constants.values()), layout)


def _translated(
    problem: Problem, subject: Subject, case: Case, others: Mapping[str, NumpyArray], *, keys: slice
) -> Call:
    """A call through the kit, which turns and loops over axes."""
    xp = get_backend(subject.backend or "numpy").namespace

    def function(query: Any, key: Any, value: Any, *arrays: Any) -> Any:
        tensors = {"query": query, "key": key[:, :, keys], "value": value[:, :, keys]}
        return outputs(case, subject, {**tensors, **dict(zip(others, arrays, strict=True))}, xp)["output"]

    constants = (_rounded(name, each, problem) for name, each in others.items())
    return Call(function, problem.arrays, tuple(constants))


def _constant(name: str, each: NumpyArray, subject: Subject, problem: Problem) -> NumpyArray:
    return ~each if name == "mask" and subject.mask == "drop" else _rounded(name, each, problem)


def _rounded(name: str, each: NumpyArray, problem: Problem) -> NumpyArray:
    return each if name == "mask" else rounded(each, problem.dtype)


@functools.cache
def _loaded(text: str) -> Subject:
    stated = json.loads(text)
    return load_target(stated["target"], **stated["declared"])


@functools.cache
def _settled(text: str, device: str) -> Subject:
    """The target with all questions about it answered by small calls on a device."""
    stated = json.loads(text)
    return settled(load_target(stated["target"], **{**stated["declared"], "device": device}))
