"""The reference of ONNX takes the square root of a negative scale.

The definition in ONNX multiplies query and key by the square root of the scale each, which keeps both products small.
A negative scale has no such root, and the reference returns NaN. The thread is about the same step in PyTorch, where
it is mended. No thread about ONNX was found.
"""

# /// script
# dependencies = ["onnx", "numpy"]
#
# [tool.attention-core]
# thread = "pytorch/pytorch#105202"
# title = "fix sdpa math accuracy issue when scale is negative"
# property = "scale"
# line = 7
# versions = "onnx 1.23.2; the thread is PyTorch's"
# geometry = { B = 1, H = 1, M = 1, N = 2, D = 4, E = 4 }
# ///

import numpy as np
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

names = {"query": 1, "key": 1, "value": 1}
node = helper.make_node("Attention", list(names), ["output"], scale=-0.5)
graph = helper.make_graph(
    [node],
    "one",
    [helper.make_tensor_value_info(name, kind, None) for name, kind in names.items()],
    [helper.make_tensor_value_info("output", TensorProto.FLOAT, None)],
)
model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 24)], ir_version=11)


query, key = np.ones((1, 1, 1, 4), np.float32), np.stack([np.zeros(4, np.float32), np.ones(4, np.float32)])[None, None]
with np.errstate(invalid="ignore"):
    (got,) = ReferenceEvaluator(model).run(None, {"query": query, "key": key, "value": key})
expected = 1 / (1 + np.exp(2.0))  # scores of 0 and -2
print("expected", expected)
print("got     ", got[0, 0, 0, 0])
raise SystemExit(int(not np.allclose(got, expected)))
