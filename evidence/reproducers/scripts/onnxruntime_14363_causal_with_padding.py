"""A causal query whose only key is padding attends to it."""

# /// script
# dependencies = ["onnxruntime", "onnx", "numpy"]
# ///

import numpy as np
from onnx import TensorProto, helper
from onnxruntime import InferenceSession

floats = {"x": [1, 4, 8], "weight": [8, 24], "bias": [24], "output": [1, 4, 8]}
floats = {name: helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in floats.items()}
mask = helper.make_tensor_value_info("mask", TensorProto.INT32, [1, 4])
options = {"domain": "com.microsoft", "num_heads": 1, "unidirectional": 1}
node = helper.make_node("Attention", ["x", "weight", "bias", "mask"], ["output"], **options)
output = floats.pop("output")
graph = helper.make_graph([node], "one", [*floats.values(), mask], [output])
domains = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
session = InferenceSession(helper.make_model(graph, opset_imports=domains, ir_version=10).SerializeToString())
random = np.random.default_rng(0)
arrays = {"x": random.standard_normal((1, 4, 8), np.float32), "weight": random.standard_normal((8, 24), np.float32)}
arrays |= {"bias": np.zeros(24, np.float32), "mask": np.array([[0, 1, 1, 1]], np.int32)}
(got,) = session.run(None, arrays)
masked = (arrays["x"] @ arrays["weight"])[0, 0, 16:]
print("expected zeros for query 0")
print("got     ", got[0, 0, :3], "where the value of the masked key is", masked[:3])
raise SystemExit(int(got[0, 0].any()))
