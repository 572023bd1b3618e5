"""Attention in NumPy, checked against the vectors: ``python attention.py [DTYPE]``. It needs NumPy and nothing else."""

import json
import struct
import sys
from pathlib import Path

import numpy as np

FOLDER = Path(__file__).parents[1]
KINDS = {"BOOL": np.bool_, "F32": np.float32, "F64": np.float64}


def read(path):
    """The arrays of a file of safetensors, by name."""
    data = path.read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    header, arrays, start = json.loads(data[8 : 8 + size]), {}, 8 + size
    for name, entry in header.items():
        first, last = entry["data_offsets"]
        arrays[name] = np.frombuffer(data[start + first : start + last], KINDS[entry["dtype"]]).reshape(entry["shape"])
    return arrays


def attention(problem, arrays):
    """Output, logsumexp and gradients; half precision is computed in float32."""
    kind = np.result_type(arrays["query"], np.float32)
    arrays = {name: each if name == "mask" else each.astype(kind) for name, each in arrays.items()}
    query, key, value = arrays["query"], arrays["key"], arrays["value"]
    group_size = query.shape[1] // key.shape[1]
    allowed = arrays.get("mask", np.ones((*query.shape[:-1], key.shape[-2]), bool))
    bias = arrays.get("bias", np.zeros(allowed.shape, query.dtype))
    allowed = allowed & (bias != -np.inf)
    key, value = np.repeat(key, group_size, axis=1), np.repeat(value, group_size, axis=1)
    hidden = ~allowed.any(axis=2)[..., None]  # keys that no query may attend to
    key, value = np.where(hidden, 0, key), np.where(hidden, 0, value)
    scores = problem["scale"] * query @ key.swapaxes(-1, -2)
    steepness = np.ones_like(scores)
    if problem["softcap"]:
        capped = np.tanh(scores / problem["softcap"])
        scores, steepness = problem["softcap"] * capped, 1 - capped**2
    scores = np.where(allowed, scores + bias, -np.inf)
    sinks = arrays.get("sinks", np.full(query.shape[1], -np.inf, query.dtype))[:, None, None]
    largest = np.maximum(scores.max(axis=-1, keepdims=True, initial=-np.inf), sinks)
    largest = np.where(np.isfinite(largest), largest, 0)
    weights, sink = np.exp(scores - largest), np.exp(sinks - largest)
    total = weights.sum(axis=-1, keepdims=True) + sink
    logsumexp = (largest + np.log(total))[..., 0]
    total = np.where(total == 0, 1, total)  # a fully masked row
    weights, sink = weights / total, sink / total
    products = weights[..., None] * value[:, :, None]
    results = {"output": np.where(allowed[..., None], products, 0).sum(axis=-2), "logsumexp": logsumexp}
    if "d_output" in arrays:
        d_output = arrays["d_output"]
        d_weights = d_output @ value.swapaxes(-1, -2)
        delta = (weights * d_weights).sum(axis=-1, keepdims=True)
        d_bias = weights * (d_weights - delta)
        d_scores = problem["scale"] * steepness * d_bias
        results["d_query"] = d_scores @ key
        results["d_key"] = grouped(d_scores.swapaxes(-1, -2) @ query, group_size)
        results["d_value"] = grouped(weights.swapaxes(-1, -2) @ d_output, group_size)
        results["d_bias"] = d_bias
        results["d_sinks"] = -(sink * delta).sum(axis=(0, 2, 3))
    return results


def grouped(gradient, group_size):
    """The gradient of key heads: a sum over their query heads."""
    samples, heads, *rest = gradient.shape
    return gradient.reshape(samples, heads // group_size, group_size, *rest).sum(axis=2)


def is_right(got, expected, unit, bound):
    """Whether each number is near enough; NaN stands for any number that is not finite."""
    near = (got == expected) | (np.abs(got - expected) <= bound * unit)
    return got.shape == expected.shape and np.all(np.where(np.isnan(expected), ~np.isfinite(got), near))


def wrong_problems(group, dtype):
    """The number of problems of a group, and the names of those with a wrong result."""
    content, arrays, wrong, count = json.loads((FOLDER / f"{group}.json").read_text("utf-8")), {}, [], 0
    for name, array in read(FOLDER / content["arrays"]).items():
        problem, _, name = name.partition("/")
        arrays.setdefault(problem, {})[name] = array
    for problem in content["problems"]:
        mine = arrays[problem["name"]]
        if dtype not in problem["bounds"]["output"]:
            continue
        inputs = {name: mine[name] if name == "mask" else mine[name].astype(dtype) for name in problem["inputs"]}
        results = attention(problem, inputs)
        count += 1
        for name, bounds in problem["bounds"].items():
            got = results[name] if name == "logsumexp" else results[name].astype(dtype)  # rounded once
            if not is_right(got.astype(np.float64), mine[name], mine[f"{name}.unit"], bounds[dtype]):
                wrong.append(problem["name"])
                break
    return count, wrong


def main(dtype="float32"):
    """Print a line for each group; the status is 1 if a result is wrong, or if no problem has that dtype."""
    np.seterr(all="ignore")
    groups = sorted(path.stem for path in FOLDER.glob("*.safetensors"))
    found = {group: wrong_problems(group, dtype) for group in groups}
    for group, (count, wrong) in found.items():
        print(f"{group}: {count - len(wrong)} of {count}", *wrong)
    return int(any(wrong for _, wrong in found.values()) or not any(count for count, _ in found.values()))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
