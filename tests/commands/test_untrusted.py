"""The command ``check --untrusted``: a kernel that another process judges, and that may borrow no attention."""

import json

import pytest
from command_helpers import invoke

pytestmark = pytest.mark.needs("torch")

CHEATING = """
import torch
from torch.nn.functional import scaled_dot_product_attention as borrowed


def honest(query, key, value):
    scores = query.float() @ key.float().mT * query.shape[-1] ** -0.5
    return (torch.softmax(scores, -1) @ value.float()).to(query.dtype)


def copied(query, key, value):
    return borrowed(query, key, value)


def wrong(query, key, value):
    return torch.nan_to_num(honest(query, key, value)) * torch.nan
"""


def test_an_untrusted_kernel_is_compared_by_another_process_and_may_borrow_no_attention(tmp_path):
    (tmp_path / "cheating.py").write_text(CHEATING)
    told = {}
    for name in ("honest", "copied", "wrong"):
        cases = ("--case", "shape-31x31-d80-plain", "--case", "shape-64x64-d64-plain-gradient")
        target, options = f"{tmp_path / 'cheating.py'}:{name}", ("--untrusted", "--json", tmp_path / "out.json")
        done = invoke("check", target, *cases, *options)
        document = json.loads((tmp_path / "out.json").read_text())
        rows = document["findings"]
        told[name] = (done.exit_code, {row["verdict"] for row in rows}, {row["variant"] for row in rows})
        assert document["about"]["seed"] > 0
    assert told == {
        "honest": (0, {"right"}, {""}),
        "copied": (1, {"silently wrong"}, {"borrowed-attention"}),
        "wrong": (1, {"visibly wrong"}, {""}),
    }
