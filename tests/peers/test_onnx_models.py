"""A model of ONNX is checked as any kernel is, on a provider of ONNX Runtime."""

import pytest
from backend_helpers import peer

from attention_conformance import check_subject
from attention_conformance.kernel.target import TargetError, load_target
from attention_conformance.measure.finding import exit_status

onnx = peer("onnx")
peer("onnxruntime")
CASES = ("mask", "shape-65x65-plain", "shape-16x16-d64-mask", "shape-33x65-plain-scaled", "empty-row-mask")


def model(folder, nodes, masked):
    helper, kinds = onnx.helper, onnx.TensorProto
    inputs = [helper.make_tensor_value_info(name, kinds.FLOAT, ["B", "H", f"S{name}", f"D{name}"]) for name in "qkv"]
    inputs += [helper.make_tensor_value_info("mask", kinds.BOOL, ["b", "h", "M", "N"])] * masked
    output = helper.make_tensor_value_info("o", kinds.FLOAT, ["B", "H", "M", "E"])
    graph = helper.make_graph(nodes, "attention", inputs, [output])
    path = folder / "attention.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=11), path)
    return str(path)


@pytest.mark.parametrize("masked", [True, False])
def test_a_model_is_a_subject(masked, tmp_path):
    node = onnx.helper.make_node("Attention", ["q", "k", "v", *["mask"] * masked], ["o"])
    path = model(tmp_path, [node], masked)
    for target in (path, f"{path}:CPUExecutionProvider"):
        found = check_subject(load_target(target), cases=CASES, dtypes=["float32"])
        verdicts = {each.case: each.verdict for each in found if each.dtype != "-"}
        assert verdicts["shape-65x65-plain"] == "right", found
        assert verdicts["mask"] == ("right" if masked else "not offered"), found


def test_a_model_without_its_scale_is_told(tmp_path):
    make = onnx.helper.make_node
    nodes = [make("Transpose", ["k"], ["t"], perm=[0, 1, 3, 2]), make("MatMul", ["q", "t"], ["s"])]
    nodes += [make("Softmax", ["s"], ["p"], axis=-1), make("MatMul", ["p", "v"], ["o"])]
    found = check_subject(load_target(model(tmp_path, nodes, False), default_scale="sqrt"), cases=CASES[1:2])
    assert exit_status(found) == 1
    assert {each.verdict for each in found if each.dtype == "float32"} == {"silently wrong"}, found


def test_what_is_no_model_is_told(tmp_path):
    with pytest.raises(TargetError, match=r"expected a file of ONNX; got 'none\.onnx', which is none"):
        load_target("none.onnx")
    node = onnx.helper.make_node("Attention", ["q", "k", "v"], ["o"])
    with pytest.raises(TargetError, match=r"expected a provider out of .*; got 'NoExecutionProvider'"):
        load_target(f"{model(tmp_path, [node], False)}:NoExecutionProvider")
