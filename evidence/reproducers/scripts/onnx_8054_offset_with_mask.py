"""A query after a cache of another length for each sample is causal from its own position."""

# /// script
# dependencies = ["onnx", "numpy"]
# ///

import numpy as np
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

names = {"query": 1, "key": 1, "value": 1, "mask": 9, "lengths": 7}
node = helper.make_node("Attention", ["query", "key", "value", "mask", "", "", "lengths"], ["output"], is_causal=1)
graph = helper.make_graph(
    [node],
    "one",
    [helper.make_tensor_value_info(name, kind, None) for name, kind in names.items()],
    [helper.make_tensor_value_info("output", TensorProto.FLOAT, None)],
)
model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 24)], ir_version=11)


value = np.broadcast_to(np.arange(4, dtype=np.float32)[:, None], (2, 1, 4, 4)).copy()
zeros, mask = np.zeros((2, 1, 1, 4), np.float32), np.ones((1, 4), bool)
arrays = {"query": zeros, "key": value, "value": value, "mask": mask, "lengths": np.array([4, 2])}
(got,) = ReferenceEvaluator(model).run(None, arrays)
print("expected [1.5 0.5], the averages of 4 and of 2 keys")
print("got     ", got[:, 0, 0, 0])
raise SystemExit(int(not np.allclose(got[:, 0, 0, 0], [1.5, 0.5])))
