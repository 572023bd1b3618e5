"""Four heads share two in the order 0 1 0 1, and not 0 0 1 1."""

# /// script
# dependencies = ["onnx", "numpy"]
# ///

import numpy as np
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

names = {"query": 1, "key": 1, "value": 1}
node = helper.make_node("Attention", list(names), ["output"])
graph = helper.make_graph(
    [node],
    "one",
    [helper.make_tensor_value_info(name, kind, None) for name, kind in names.items()],
    [helper.make_tensor_value_info("output", TensorProto.FLOAT, None)],
)
model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 24)], ir_version=11)


key = np.zeros((1, 2, 3, 4), np.float32)
value = np.stack([np.full((3, 4), 1, np.float32), np.full((3, 4), 2, np.float32)])[None]
(got,) = ReferenceEvaluator(model).run(None, {"query": np.zeros((1, 4, 1, 4), np.float32), "key": key, "value": value})
print("expected [1. 1. 2. 2.]")
print("got     ", got[0, :, 0, 0])
raise SystemExit(int(got[0, :, 0, 0].tolist() != [1, 1, 2, 2]))
