"""The cases that the onnx package ships for ``Attention`` (opset 23 to 25), in public names.

``ATTENTION_CORE_PEERS=1`` makes the onnx package required; without it, its absence skips these tests.
"""

import importlib
import warnings

import ml_dtypes
import numpy as np
import pytest
from backend_helpers import peer

import attention_core as ac

# How far a case may be from the expected output, in units of the last place of the largest expected element. The expected
# outputs are computed by onnx in the dtype of the case: those of float32 are up to 3 units from float64 themselves, and 4
# are left for the library.
ULPS = {"float64": 7, "float32": 7, "float16": 1, "bfloat16": 1}


onnx = peer("onnx")


def load_cases():
    with warnings.catch_warnings():  # onnx computes its expected outputs on import, warnings included
        warnings.simplefilter("ignore")
        node = importlib.import_module("onnx.backend.test.case.node")
        importlib.import_module("onnx.backend.test.case.node.attention")
    # The operator is also written out in simpler ones ("expanded"), with the same inputs and outputs.
    return {
        case.name: case
        for case in node._NodeTestCases
        if [each.op_type for each in case.model.graph.node] == ["Attention"]
    }


CASES = load_cases()


def named(names, arrays):
    """The arrays by name; an optional argument that is left out has the empty name, and no array."""
    return dict(zip([name for name in names if name], arrays, strict=True))


def padded(mask, length):
    """A mask whose last axis is too short lets nothing pass beyond its end."""
    missing = length - mask.shape[-1]
    if missing <= 0:
        return mask
    widths = [(0, 0)] * (mask.ndim - 1) + [(0, missing)]
    return np.pad(mask, widths, constant_values=False if mask.dtype == bool else -np.inf)


def present(xp, past, new):
    return new if past is None else xp.concat([past, new], axis=-2)


def joined(masks):
    """Every mask must allow."""
    result = None
    for mask in masks:
        result = mask if result is None else mask & result
    return result


def structured_masks(attributes, query_length, past_length, lengths):
    """The masks that attributes and lengths stand for; positions count from the end of the cache."""
    offset = past_length if lengths is None else lengths - query_length
    left, right = (
        None if attributes.get(f"{side}_window_size", -1) < 0 else attributes[f"{side}_window_size"]
        for side in ("left", "right")
    )
    masks = [ac.Causal(offset=offset)] if attributes.get("is_causal") else []
    masks += [] if left is None and right is None else [ac.SlidingWindow(left=left, right=right, offset=offset)]
    return masks + ([] if lengths is None else [ac.KeyLengths(lengths)])


def matrix_output(mode, query, key, options, weights):
    """What the operator gives as ``qk_matmul_output``: the scores as far as ``mode`` says."""
    if mode == 3:
        return weights
    arguments = [("scale",), ("scale", "softcap"), ("scale", "softcap", "bias", "mask")][mode]
    return ac.attention_scores(query, key, **{name: options[name] for name in arguments})


def attention_operator(backend, attributes, inputs):
    """The operator ``Attention`` of onnx, in terms of the public names."""
    xp = backend.namespace
    arrays = backend.from_numpy(inputs)
    query, key, value = (arrays[name] for name in "QKV")
    flat = len(query.shape) == 3
    if flat:
        query = ac.split_heads(query, attributes["q_num_heads"])
        key, value = (ac.split_heads(array, attributes["kv_num_heads"]) for array in (key, value))
    past = inputs.get("past_key")
    key = present(xp, arrays.get("past_key"), key)
    value = present(xp, arrays.get("past_value"), value)
    masks = structured_masks(
        attributes, query.shape[-2], 0 if past is None else past.shape[-2], arrays.get("nonpad_kv_seqlen")
    )
    attn_mask = inputs.get("attn_mask")
    attn_mask = None if attn_mask is None else backend.from_numpy(padded(attn_mask, key.shape[-2]))
    boolean = attn_mask is not None and inputs["attn_mask"].dtype == bool
    options = {
        "mask": joined([attn_mask, *masks] if boolean else masks),
        "bias": None if boolean else attn_mask,
        "scale": attributes.get("scale"),
        "softcap": attributes.get("softcap") or None,  # 0 is off
    }
    result = ac.scaled_dot_product_attention(query, key, value, **options, return_weights=True)
    return {
        "Y": ac.merge_heads(result.output) if flat else result.output,
        "present_key": key,
        "present_value": value,
        "qk_matmul_output": matrix_output(
            attributes.get("qk_matmul_output_mode", 0), query, key, options, result.weights
        ),
    }


def assert_close(name, actual, expected):
    assert actual.dtype == expected.dtype, name
    actual, wanted = actual.astype(np.float64), expected.astype(np.float64)
    epsilon = float(ml_dtypes.finfo(expected.dtype).eps)
    finite = np.abs(wanted[np.isfinite(wanted)])
    # One unit of the last place of a number in [2**n, 2**(n + 1)) is epsilon * 2**n.
    unit = epsilon * 2.0 ** np.floor(np.log2(finite.max())) if finite.any() else 0.0
    np.testing.assert_allclose(actual, wanted, rtol=0, atol=ULPS[expected.dtype.name] * unit, err_msg=name)


def test_all_cases_of_the_operator_are_here():
    opsets = [case.model.opset_import[0].version for case in CASES.values()]
    assert len(CASES) == 93
    assert set(opsets) == {23, 24, 25}


@pytest.mark.parametrize("name", CASES)
def test_the_operator_of_onnx_in_public_names(name, backend):
    case = CASES[name]
    (node,) = case.model.graph.node
    attributes = {attribute.name: onnx.helper.get_attribute_value(attribute) for attribute in node.attribute}
    ((inputs, expected),) = case.data_sets
    inputs, outputs = named(node.input, inputs), named(node.output, expected)
    if inputs["Q"].dtype.name not in backend.dtypes:
        pytest.skip(f"{backend.name} has no {inputs['Q'].dtype.name}")
    results = attention_operator(backend, attributes, inputs)
    for output, wanted in outputs.items():
        assert_close(output, backend.to_numpy(results[output]), wanted)
