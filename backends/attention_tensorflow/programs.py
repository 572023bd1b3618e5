"""Functions of operations as programs of their own: traced once, and called by all programs with such arguments."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import tensorflow as tf
from tensorflow.python.eager import record  # no public name tells of all tapes, or hides operations from them
from tensorflow.python.ops import control_flow_util  # no public name tells programs for XLA from others

from attention_core.backend import Array, Backend, Operation


def run(
    backend: Backend, operation: Operation, plan: Any, forward: tuple[Array, ...], *backward: tuple[Array, ...]
) -> Any:
    """Run an operation forward, or backward if results and cotangents are given."""
    function = operation.backward if backward else operation.forward
    parts = forward, *backward
    if operation.lasts is None or not operation.lasts(plan) or not _may_call():
        return function(plan, *parts, backend)
    specs = tuple([tuple([tf.TensorSpec(array.shape, array.dtype) for array in part]) for part in parts])
    if not all(spec.shape[1:].is_fully_defined() for part in specs for spec in part):  # nor would results have theirs
        return function(plan, *parts, backend)
    is_whole = bool(backward) or record.should_record_backprop(forward)
    program = _program(function, plan, specs, backend, backend.tuning, is_whole)
    with record.stop_recording():  # a tape would have the gradient of the program traced, which nothing calls
        return program(*parts)


def is_for_xla() -> bool:
    """Whether what is traced is part of a program for XLA."""
    return bool(control_flow_util.GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph()))


def _may_call() -> bool:
    """Whether what is traced may call other programs: XLA compiles them anew for each call, and a session has none."""
    return tf.compat.v1.executing_eagerly_outside_functions() and not (tf.executing_eagerly() or is_for_xla())


@functools.lru_cache(maxsize=256)
def _program(
    function: Callable[..., Any], plan: Any, specs: Any, backend: Backend, _tuning: Any, is_whole: bool
) -> Any:
    """The program of a function of an operation, traced outside of those that call it.

    One that stays whole is optimized once; else each call is replaced by it. The converter of LiteRT needs the latter,
    and takes programs that go forward alone.
    """
    attributes = {"_noinline": True} if is_whole else {}
    traced = tf.function(
        lambda *parts: function(plan, *parts, backend), autograph=False, experimental_attributes=attributes
    )
    with tf.init_scope():
        return traced.get_concrete_function(*specs)
