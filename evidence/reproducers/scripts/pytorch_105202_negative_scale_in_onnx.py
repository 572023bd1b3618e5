"""The reference of ONNX takes the square root of a negative scale."""

# /// script
# dependencies = ["onnx", "numpy"]
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
