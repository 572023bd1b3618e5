"""One query with four keys is causal from the top left on one device, from the bottom right on the other."""

# /// script
# dependencies = ["onnxruntime", "onnx", "numpy"]
# ///

import numpy as np
from onnx import TensorProto, helper
from onnxruntime import InferenceSession

names = {"query": 1, "key": 1, "value": 1}
node = helper.make_node("Attention", list(names), ["output"], is_causal=1)
graph = helper.make_graph(
    [node],
    "one",
    [helper.make_tensor_value_info(name, kind, None) for name, kind in names.items()],
    [helper.make_tensor_value_info("output", TensorProto.FLOAT, None)],
)
model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=11)


value = np.broadcast_to(np.arange(4, dtype=np.float32)[:, None], (1, 1, 4, 4)).copy()
session = InferenceSession(model.SerializeToString())
(got,) = session.run(None, {"query": np.zeros((1, 1, 1, 4), np.float32), "key": value, "value": value})
print("expected 0.0, the first value")
print("got     ", got[0, 0, 0, 0], "where 1.5 is the average of all")
raise SystemExit(int(got[0, 0, 0, 0] != 0))
