"""ONNX Runtime, and its operator for attention."""

from __future__ import annotations

import itertools
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


engine = OnnxRuntimeEngine(backend)


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
    session = _session(node, inputs, [output])
    names = [each.name for each in inputs]

    def function(*arrays: Any) -> Any:
        return session.run(None, dict(zip(names, arrays, strict=True)))[0]

    return Call(function, problem.arrays, () if allowed is None else (allowed,))


def grouped_query(problem: Problem) -> Call:
    """Prepare ONNX Runtime's own operator for decoding: it writes new keys and values into the cache, and attends."""
    if problem.mask not in ("causal", "window", "ragged") or problem.ahead + problem.num_queries != problem.shape[2]:
        raise ValueError(f"expected queries at the end of a cache, causal, in a window or ragged; got {problem.mask}")
    (batch, heads, length, width), count = problem.shape, problem.num_queries
    if batch > 1 and 1 < count < length:
        raise ValueError(f"expected one query behind the caches of a batch; got {count}")
    lengths = problem.mask_arrays[0] if problem.mask == "ragged" else np.full(batch, length)
    query, *shared = problem.arrays
    dtype = np.dtype(problem.dtype)
    new_at = lengths[:, None] - count + np.arange(count)
    new = [np.stack([x[:, at] for x, at in zip(each, new_at, strict=True)]) for each in shared]
    arrays = [np.ascontiguousarray(np.swapaxes(x, 1, 2)).reshape(batch, count, -1).astype(dtype) for x in (query, *new)]
    cache = [each.astype(dtype) for each in shared]
    for each, (sample, at) in itertools.product(cache, enumerate(new_at)):
        each[sample, :, at] = 0
    element = onnx.helper.np_dtype_to_tensor_dtype(dtype)
    value_of = onnx.helper.make_tensor_value_info
    names = ("query", "key", "value", "past_key", "past_value")
    inputs = [value_of(name, element, each.shape) for name, each in zip(names, (*arrays, *cache), strict=True)]
    inputs += [value_of(name, onnx.TensorProto.INT32, dims) for name, dims in (("last", (batch,)), ("total", ()))]
    outputs = [value_of("output", element, arrays[0].shape)]
    outputs += [value_of(f"present_{name}", element, cache[0].shape) for name in ("key", "value")]
    node = onnx.helper.make_node(
        "GroupQueryAttention",
        [each.name for each in inputs],
        [each.name for each in outputs],
        domain="com.microsoft",
        num_heads=heads,
        kv_num_heads=problem.kv_heads or heads,
        local_window_size=problem.window if problem.mask == "window" else -1,
    )
    session = _session(node, inputs, outputs)
    numbers = [np.asarray(lengths - 1, np.int32), np.asarray(length, np.int32)]

    def function(*arrays: Any) -> Any:
        binding = session.io_binding()
        for each, array in zip(inputs, (*arrays, *numbers), strict=True):
            binding.bind_cpu_input(each.name, array)
        for each, array in zip(outputs[1:], arrays[3:], strict=True):  # in the memory of the cache
            binding.bind_output(each.name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)
        binding.bind_output("output", "cpu")
        session.run_with_iobinding(binding)
        return binding.get_outputs()[-1].numpy().reshape(batch, count, heads, width)

    return Call(function, tuple(arrays), tuple(cache), "BLHD")


def _session(node: Any, inputs: Sequence[Any], outputs: Sequence[Any]) -> Any:
    """A session of a model with one operator."""
    graph = onnx.helper.make_graph([node], node.op_type, inputs, outputs)
    opset = onnx.helper.make_opsetid("", OPSET)
    version = onnx.helper.find_min_ir_version_for([opset])
    opsets = [opset, onnx.helper.make_opsetid("com.microsoft", 1)]
    model = onnx.helper.make_model(graph, opset_imports=opsets, ir_version=version)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = int(os.environ.get("OMP_NUM_THREADS", "0"))
    # An arena would keep memory for the next run, which counts as the memory of this one.
    options.enable_cpu_mem_arena = "ATTENTION_BENCHMARK_MEMORY" not in os.environ
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
