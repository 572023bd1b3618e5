"""Two attentions against each other, to the last bit: what differs, and where."""

import functools
import math
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from attention_conformance import Subject, check_subject, load_target, problem_of
from attention_conformance.kernel.options import Options
from attention_conformance.pytest_cases import case_tests
from attention_core import scaled_dot_product_attention

pytestmark = pytest.mark.needs("numpy")


def head_of(query, key, value, seen, scale, *, block=None, parts=1, base=math.e):
    """One head, in float32: an online softmax over blocks of keys, and parts of the keys that are merged."""
    query, power = query * np.float32(scale * math.log(math.e, base)), np.exp2 if base == 2 else np.exp
    done = []
    for keys in np.split(np.arange(len(key)), range(-(-len(key) // parts), len(key), -(-len(key) // parts))):
        m, t, o = np.full(len(query), -np.inf, np.float32), np.float32(0), np.float32(0)
        for start in range(keys[0], keys[-1] + 1, block or len(key)):
            at = slice(start, min(start + (block or len(key)), keys[-1] + 1))
            s = np.where(seen[:, at], query @ key[at].T, np.float32(-np.inf))
            old, m = m, np.maximum(m, s.max(-1))
            p, shrunk = power(s - m[:, None]), power(old - m)
            t, o = t * shrunk + p.sum(-1), o * shrunk[:, None] + p @ value[at]
        done.append((m, t, o))
    m = np.maximum.reduce([each[0] for each in done])
    t, o = (sum(power(each[0] - m).reshape(-1, *(1,) * (at - 1)) * each[at] for each in done) for at in (1, 2))
    return o / t[:, None]


def planted(**habits):
    """An attention of NumPy that loops over samples and heads."""

    def attention(query, key, value, mask=None, is_causal=False, scale=None):
        output = np.empty((*query.shape[:-1], value.shape[-1]), query.dtype)
        rows, columns = query.shape[-2], key.shape[-2]
        group = query.shape[1] // key.shape[1]
        for sample, head in np.ndindex(query.shape[:2]):
            seen = np.ones((rows, columns), bool)
            if is_causal:
                seen = np.tri(rows, columns, dtype=bool)
            if mask is not None:
                seen &= np.broadcast_to(mask, (*query.shape[:2], rows, columns))[sample, head]
            wide = [
                np.ascontiguousarray(each, np.float32)
                for each in (query[sample, head], key[sample, head // group], value[sample, head // group])
            ]
            chosen = scale or query.shape[-1] ** -0.5
            output[sample, head] = head_of(*wide, seen, chosen, **habits)
        return output

    return Subject(attention, backend="numpy", layout="BHSD", mask="keep", causal="top-left", dtypes=("float32",),
                   full_mask=False, mask_with_causal=True, grouped=True, same_width=False, default_scale="sqrt",
                   keeps_dtype=True, keeps_library=True, differentiates=False, returns=("output",))  # fmt: skip


SIDE = {"block": 64, "base": 2}


def rows(first, second, *cases, **options):
    cases = [f"bits-{each}" for each in cases]
    found = check_subject(first, same_bits_as=second, cases=cases, dtypes=["float32"], **options)
    return {each.case.removeprefix("bits-"): each for each in found}


def by_batch(query, key, value, mask=None, is_causal=False, scale=None):
    """Blocks by the number of samples, and splits by that of queries, as kernels that fill a device do."""
    block = 64 if query.shape[0] == 6 else 32
    parts = 4 if query.shape[-2] == 1 else 1
    habits = {"block": block, "parts": parts} if not is_causal else {"parts": parts}
    return planted(**habits).function(query, key, value, mask, is_causal, scale)


@pytest.mark.parametrize("second", [{"block": 64}, SIDE], ids=str)
def test_two_honest_ones_differ_in_nothing(second):
    found = rows(planted(**second), planted(**second), "whole", "causal", "mask", "again", "batch", "strides")
    assert {each.verdict for each in found.values()} == {"right"}
    assert found["batch"].detail == "6 comparisons"


def test_one_callable_is_asked_in_which_calls_its_bits_change():
    kernel = replace(planted(), function=by_batch)
    found = rows(kernel, kernel)
    assert not {"whole", "causal", "mask", "scale"} & set(found)  # calls that would be the same
    told = {name: (each.verdict, each.variant) for name, each in found.items() if each.verdict != "not offered"}
    same = dict.fromkeys(("again", "heads", "grouped-heads"), ("right", ""))
    assert {name: told[name] for name in same} == same
    assert told["batch"] == ("other bits", "")
    assert found["batch"].detail.startswith("samples 0, 1, 2 in a batch of 3: ")
    assert told["decode"] == ("other bits", "")
    assert found["training"].verdict == found["pieces"].verdict == "not offered"


def test_the_first_element_that_differs_is_told_with_both_values_in_bits():
    def last_row(query, key, value, mask=None, is_causal=False, scale=None):
        output = planted().function(query, key, value, mask, is_causal, scale)
        output[2, 3, -1, 5:7] = np.nextafter(output[2, 3, -1, 5:7], np.float32(9))
        return output

    (found,) = rows(planted(), replace(planted(), function=last_row), "whole").values()
    problem = problem_of(found, planted())
    first, second = (each(**problem.arrays)[2, 3, -1, 5] for each in (planted().function, last_row))
    assert f"first at (2, 3, 129, 5): {float(first).hex()} and {float(second).hex()}" in found.detail
    assert found.detail.startswith("the same call: 2.0e-05 of output differ, by at most ")
    assert 0 < found.error <= 1
    assert found.says == ""


def other_mathematics(query, key, value, mask=None, is_causal=False, scale=None, *, fault):
    group = query.shape[1] // key.shape[1]
    if fault == "grouped" and group > 1:
        key, value = (np.concatenate([each] * group, axis=1) for each in (key, value))
    return planted().function(query, key, value, mask, is_causal, 1.0 if fault == "scale" else scale)


@pytest.mark.parametrize(("fault", "row", "variant"), [("grouped", "grouped", "heads-in-turn"),
                                                      ("scale", "whole", "no-scale")])  # fmt: skip
def test_other_mathematics_are_told_first(fault, row, variant):
    other = replace(planted(), function=functools.partial(other_mathematics, fault=fault), name="mine")
    (found,) = rows(planted(), other, row).values()
    assert (found.verdict, found.variant) == ("silently wrong", variant)
    assert found.says.startswith("not the same mathematics: mine is wrong: ")


def test_a_mask_of_the_other_sense_is_told_and_translated():
    def dropping(query, key, value, mask=None, is_causal=False, scale=None):
        return planted().function(query, key, value, None if mask is None else ~mask, is_causal, scale)

    found = rows(planted(), replace(planted(), function=dropping, mask="drop"), "mask")
    assert [each.verdict for each in found.values()] == ["differs by convention", "right"]
    assert found["convention: mask"].says == "mask: a mask is True where a query sees and True where it is hidden"
    accepted = rows(planted(), replace(planted(), function=dropping, mask="drop"), "mask", accepted=["other-mask"])
    assert {each.verdict for each in accepted.values()} == {"accepted", "right"}


def test_a_result_of_another_shape_is_refused_in_a_sentence():
    def shorter(query, key, value, mask=None, is_causal=False, scale=None):
        return planted().function(query, key, value, mask, is_causal, scale)[:, :, :-1]

    (found,) = rows(planted(), replace(planted(), function=shorter), "whole").values()
    assert found.verdict == "visibly wrong"
    assert found.detail == "expected output of float32 (6, 4, 130, 32) in the same call; got float32 (6, 4, 129, 32)"


def test_reproducible_arithmetic_has_the_bits_of_the_whole_in_steps():
    function = functools.partial(scaled_dot_product_attention, arithmetic="reproducible")
    kernel = Subject(function, backend="numpy")
    (decoded,) = rows(kernel, kernel, "decode").values()
    assert decoded.verdict == "right"


FIRST, SECOND = planted(), planted(block=64)


def test_each_row_is_a_test_of_pytest():
    options = Options(case=["bits-whole"], dtype=["float32"], same_bits_as=f"{__file__}:SECOND")
    answer, whole = case_tests(f"{__file__}:FIRST", options)
    assert (answer.name, whole.name) == ("any-answer", "bits-whole-float32")
    answer.check()
    with pytest.raises(pytest.fail.Exception):
        whole.check()
    options = replace(options, case=["bits-again"], same_bits_as=f"{__file__}:FIRST")
    assert case_tests(f"{__file__}:FIRST", options)[1].check().verdict == "right"


@pytest.mark.needs("torch")
def test_gradients_are_compared_as_well_as_outputs():
    import torch

    def attention(query, key, value, is_causal=False):
        return torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=is_causal)

    class Other(torch.autograd.Function):
        @staticmethod
        def forward(context, value):
            return value.clone()

        @staticmethod
        def backward(context, gradient):
            return gradient * (1 + 2**-20)

    def otherwise(query, key, value, is_causal=False):
        return attention(query, key, Other.apply(value), is_causal)

    of_torch = replace(planted(), function=attention, backend="torch", scale_name="", mask="none", differentiates=True)
    found = rows(of_torch, replace(of_torch, function=otherwise), "whole")["whole"]
    assert found.verdict == "other bits"
    assert "% of value differ, by at most " in found.detail
    assert found.detail.endswith("1 of 4 comparisons differ")


@pytest.mark.needs("torch")
def test_the_guide_tells_how_many_calls_of_other_strides_there_are():
    guide = (Path(__file__).parents[2] / "docs" / "guides" / "same-bits.md").read_text()
    kernel = load_target("torch.sdpa")
    (found,) = check_subject(kernel, same_bits_as=kernel, cases=["bits-strides"], dtypes=["float32"])
    assert re.search(r" of \d+ comparisons", found.detail)[0] in guide
