"""Cases of pairs of settings, and cases of calls: faults that no other case shows."""

import functools
import itertools

import pytest
from planted_kernels import TAKES, found
from planted_settings import FORMULA, SETTINGS, formula, with_fault

from attention_conformance import Subject
from attention_conformance.cases.pairs import TABLE
from attention_conformance.run.subjects import Job, questions


def test_any_two_values_of_the_settings_are_together_in_a_row():
    sizes, *others = zip(*((row[:2], *row[2:4], row[4:6], *row[6:]) for row in TABLE), strict=True)
    for first, second in itertools.combinations([sizes, *others], 2):
        assert set(zip(first, second, strict=True)) == set(itertools.product(set(first), set(second)))


@pytest.mark.parametrize(
    ("make", "fault", "case"),
    [*((with_fault, *each) for each in SETTINGS.items()), *((formula, *each) for each in FORMULA.items())],
)
@pytest.mark.needs("numpy")
def test_a_fault_of_one_setting_or_of_a_corner_is_caught(make, fault, case):
    verdicts = [found(Subject(make(each), **TAKES), case)[case].verdict for each in ("", fault)]
    assert verdicts[0] == "right"
    assert verdicts[1] in ("silently wrong", "visibly wrong")


@pytest.mark.needs("numpy")
def test_a_few_cases_are_run_in_the_other_types_unless_dtypes_are_asked_for():
    def asked(**job):
        dtypes = ("float16", "bfloat16", "float32", "float64")
        subject = Subject(with_fault(), **TAKES | {"dtypes": dtypes})
        return {each.dtype for each in questions(subject, Job("", **job), None)}

    assert asked() == {"float16", "bfloat16", "float32", "float64"}
    assert asked(dtypes=("float32",)) == {"float32"}


@pytest.mark.needs("torch")
def test_a_second_backward_pass_one_array_for_all_and_a_shared_bias_are_checked():
    import torch

    def attention(query, key, value, bias=None, is_causal=False, fault=""):
        scores = query @ key.mT / query.shape[-1] ** 0.5
        if bias is not None:
            bias = bias.expand(*bias.shape[:1], scores.shape[1], *bias.shape[2:])
            rest = bias[:, 1:].detach() if fault == "bias of the first head" else bias[:, 1:]
            scores = scores + torch.cat([bias[:, :1], rest], dim=1)
        if is_causal:
            scores = scores.masked_fill(~torch.ones(scores.shape[-2:], dtype=bool).tril(), -torch.inf)
        output = scores.softmax(-1) @ value
        if fault == "adds up" and value.requires_grad:
            seen = []
            value.register_hook(lambda gradient: seen.append(gradient) or sum(seen))
        if fault == "one array" and query.data_ptr() == key.data_ptr():
            output = scores.detach().softmax(-1) @ value
        return output

    cases = {
        "adds up": "gradient-of-one-graph-twice",
        "one array": "gradient-memory-one-array",
        "bias of the first head": "gradient-bias-of-samples",
    }
    for fault, case in cases.items():
        for each, verdict in (("", "right"), (fault, "silently wrong")):
            subject = Subject(functools.partial(attention, fault=each), backend="torch")
            assert found(subject, case)[case].verdict == verdict
