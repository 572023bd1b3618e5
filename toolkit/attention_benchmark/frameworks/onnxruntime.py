"""ONNX Runtime, and its operator for attention."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx
import onnxruntime

from attention_benchmark.candidate import Call
from attention_benchmark.frameworks import Engine, Step
from attention_benchmark.problem import Problem
from attention_numpy import backend

OPSET = 23  # the first with the operator


class OnnxRuntimeEngine(Engine):
    """Sessions, which take and return arrays of NumPy."""

    def step(self, function: Callable[..., Any], mode: str, backward: bool, /) -> Step:
        return super().step(function, "eager", backward)

    def matmul(self, first: Any, second: Any) -> Any:
        # By the library itself: its threads would compete with those of NumPy.
        return _product(first.dtype, len(first)).run(None, {"first": first, "second": second})[0]


engine = OnnxRuntimeEngine(backend)


@functools.cache
def _product(dtype: Any, size: int) -> Any:
    element = onnx.helper.np_dtype_to_tensor_dtype(dtype)
    matrices = [onnx.helper.make_tensor_value_info(name, element, (size, size)) for name in ("first", "second", "both")]
    node = onnx.helper.make_node("MatMul", ["first", "second"], ["both"])
    return _session(node, matrices[:2], matrices[2])


def attention(problem: Problem) -> Call:
    """Prepare the operator, with the mask as an array."""
    allowed = None if problem.is_causal else problem.allowed()
    arrays = dict(zip(("query", "key", "value"), problem.arrays, strict=True))
    element = onnx.helper.np_dtype_to_tensor_dtype(np.dtype(problem.dtype))
    inputs = [onnx.helper.make_tensor_value_info(name, element, each.shape) for name, each in arrays.items()]
    if allowed is not None:
        allowed = np.ascontiguousarray(
            np.broadcast_to(allowed, (*allowed.shape[:2], problem.num_queries, problem.shape[2]))
        )
        inputs.append(onnx.helper.make_tensor_value_info("mask", onnx.TensorProto.BOOL, allowed.shape))
    node = onnx.helper.make_node(
        "Attention", [each.name for each in inputs], ["output"], is_causal=int(problem.is_causal)
    )
    output = onnx.helper.make_tensor_value_info("output", element, arrays["query"].shape)
    session = _session(node, inputs, output)
    names = [each.name for each in inputs]

    def function(*arrays: Any) -> Any:
        return session.run(None, dict(zip(names, arrays, strict=True)))[0]

    return Call(function, problem.arrays, () if allowed is None else (allowed,))


def _session(node: Any, inputs: Sequence[Any], output: Any) -> Any:
    """A session of a model with one operator."""
    graph = onnx.helper.make_graph([node], node.op_type, inputs, [output])
    model = onnx.helper.make_model_gen_version(graph, opset_imports=[onnx.helper.make_opsetid("", OPSET)])
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = int(os.environ.get("OMP_NUM_THREADS", "0"))
    # An arena would keep memory for the next run, which counts as the memory of this one.
    options.enable_cpu_mem_arena = "ATTENTION_BENCHMARK_MEMORY" not in os.environ
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
