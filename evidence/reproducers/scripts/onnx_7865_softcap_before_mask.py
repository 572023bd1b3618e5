"""Softcap after the mask makes masked keys visible."""

# /// script
# dependencies = ["onnx", "numpy"]
# ///

import numpy as np
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

names = {"query": 1, "key": 1, "value": 1, "mask": 9}
node = helper.make_node("Attention", list(names), ["output"], softcap=2.0)
graph = helper.make_graph(
    [node],
    "one",
    [helper.make_tensor_value_info(name, kind, None) for name, kind in names.items()],
    [helper.make_tensor_value_info("output", TensorProto.FLOAT, None)],
)
model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 24)], ir_version=11)


query, value = np.zeros((1, 1, 1, 4), np.float32), np.arange(12, dtype=np.float32).reshape(1, 1, 3, 4)
arrays = {"query": query, "key": value, "value": value, "mask": np.array([[True, True, False]])}
(got,) = ReferenceEvaluator(model).run(None, arrays)
expected = value[0, 0, :2].mean(0)
print("expected", expected)
print("got     ", got[0, 0, 0])
raise SystemExit(int(not np.allclose(got, expected)))
