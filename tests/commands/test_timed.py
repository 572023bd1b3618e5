"""The command ``bench --target``: anybody's attention among the peers of its library."""

import json

import pytest
from command_helpers import invoke

pytestmark = pytest.mark.needs("numpy")


FOREIGN = """
import numpy as np

def attention(query, key, value, hidden=None, attn_mask=None):
    query, key, value = (np.swapaxes(each, 1, 2) for each in (query, key, value))
    scores = query @ np.swapaxes(key, -1, -2) / np.float32(query.shape[-1] ** 0.5)
    if attn_mask is not None:
        scores = np.where(attn_mask, -np.inf, scores)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return np.swapaxes(weights / weights.sum(axis=-1, keepdims=True) @ value, 1, 2)

def wrong(query, key, value):
    return attention(query, key, value) * np.float32(1.1)
"""


def measurements(path):
    return json.loads(path.read_text())["measurements"]


def test_a_target_is_one_more_peer_of_its_library(tmp_path):
    (tmp_path / "kernel.py").write_text(FOREIGN)
    target, path = f"{tmp_path / 'kernel.py'}:attention", tmp_path / "found.json"
    options = ("--direction", "forward", "--shape", "1,2,24,16", "--rounds", 2, "--no-memory", "--candidate", "naive")
    masks = [word for mask in ("full", "causal", "padded") for word in ("--mask", mask)]
    result = invoke("bench", "--target", target, *options, *masks, "--json", path)
    assert result.exit_code == 0, result.output
    found = measurements(path)
    assert [(each["candidate"]["name"], each["problem"]["mask"], each["outcome"]) for each in found] == [
        (name, mask, "measured") for mask in ("full", "causal", "padded") for name in ("naive", target)
    ]
    assert all(each["error"] < 1e-5 and len(each["seconds"]) == 2 and each["candidate"]["is_peer"] for each in found)
    told = invoke("bench", "--target", target.replace("attention", "wrong"), *options, "--json", path)
    outcomes = {
        each["problem"]["mask"]: (each["outcome"], each["reason"])
        for each in measurements(path)
        if each["candidate"]["name"] != "naive"
    }
    assert told.exit_code == 1
    assert outcomes["full"][0] == "wrong"
    refused = f"expected a target that takes causality; got {target.replace('attention', 'wrong')}"
    assert outcomes["causal"] == ("refused", refused)
