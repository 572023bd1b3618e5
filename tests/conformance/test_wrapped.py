"""Attentions behind wrappers of many kinds: what they take is found, and every planted fault is seen through them."""

import functools
from dataclasses import replace

import numpy as np
import planted_kernels as planted
import pytest
from planted_kernels import found

from attention_conformance import Finding, Subject, check_subject
from attention_conformance.kernel.adapters import adapted, masked_by_lengths, unpacked
from attention_conformance.kernel.probe import settled
from attention_conformance.kernel.signature import parameters_of
from attention_conformance.measure.finding import QUIET, WRONG, exit_status, little
from attention_conformance.measure.messages import Refused
from attention_conformance.mistakes.surprises import surprises
from attention_conformance.run.job import Job
from attention_conformance.run.kernels import work

KERNEL = [planted.Kernel()]
"""The kernel that all wrappers call."""

FAULTS = (
    "mask ignored", "mask hides causality", "causality ignored", "no scale", "heads in turn", "other dtype",
    "nan leaks to all channels", "kept by shape", "decoding ignores the mask",
)  # fmt: skip
"""One of each argument, of results, and of what a kernel keeps."""
HONEST = ("mask", "shape-13x13-causal", "shape-65x65-plain", "grouped-heads", "scores-above-100", "masked-nan-value")


def attention(query, key, value, mask=None, is_causal=False):
    return KERNEL[0](query, key, value, mask, is_causal)


def plain(*args, **kwargs):
    return attention(*args, **kwargs)


def some(query, key, value, **kwargs):
    return attention(query, key, value, **kwargs)


@functools.wraps(attention)
def decorated(*args, **kwargs):
    return attention(*args, **kwargs)


def with_block(block, query, key, value, mask=None, is_causal=False):
    return attention(query, key, value, mask, is_causal)


def by_place(query, key, value, mask=None, is_causal=False, /):
    return attention(query, key, value, mask, is_causal)


def by_keyword(*, query, key, value, mask=None, is_causal=False):
    return attention(query, key, value, mask, is_causal)


def contiguous(query, key, value, mask=None, is_causal=False):
    if not all(each.flags.c_contiguous for each in (query, key, value)):
        raise ValueError("expected contiguous arrays")
    return attention(query, key, value, mask, is_causal)


class Object:
    def __call__(self, query, key, value, mask=None, is_causal=False):
        return attention(query, key, value, mask, is_causal)


def of_numpy(kind):
    return {
        "plain": plain, "some": some, "decorated": decorated, "partial": functools.partial(with_block, 64),
        "partial of plain": functools.partial(plain), "by place": by_place, "by keyword": by_keyword,
        "object": Object(), "contiguous": contiguous,
    }[kind]  # fmt: skip


@functools.cache
def of_torch():
    """Wrappers of PyTorch, by kind."""
    import torch

    @torch.compiler.disable
    def called(query, key, value, mask=None, is_causal=False):
        arrays = [each.detach().numpy() for each in (query, key, value)]
        return torch.from_numpy(attention(*arrays, None if mask is None else mask.numpy(), is_causal))

    class Module(torch.nn.Module):
        def forward(self, query, key, value, mask=None, is_causal=False):
            return called(query, key, value, mask, is_causal)

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(context, query, key, value, mask=None, is_causal=False):
            return called(query, key, value, mask, is_causal)

    @torch.library.custom_op("attention_kit::planted", mutates_args=())
    def operator(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None = None,
        is_causal: bool = False,
    ) -> torch.Tensor:  # fmt: skip
        return called(query, key, value, mask, is_causal)

    module = Module()
    return {
        "module": module,
        "wrapped module": lambda *args, **kwargs: module(*args, **kwargs),
        "compiled module": torch.compile(module, backend="eager"),
        "compiled function": torch.compile(called, backend="eager"),
        "custom operator": operator,
        "operator": torch.ops.attention_kit.planted,
        "overload": torch.ops.attention_kit.planted.default,
        "apply": Function.apply,
    }


NUMPY = ("plain", "some", "decorated", "partial", "partial of plain", "by place", "by keyword", "object", "contiguous")
TORCH = (
    "module",
    "wrapped module",
    "compiled module",
    "compiled function",
    "custom operator",
    "operator",
    "overload",
    "apply",
)


def seen_through(wrapper, backend):
    KERNEL[0] = planted.Kernel()
    kernel = settled(Subject(wrapper, backend=backend))
    told = {"layout": "BHSD", "mask": "keep", "mask_name": "mask", "causal": "top-left", "causal_name": "is_causal"}
    assert {name: getattr(kernel, name) for name in told} == told
    kernel = replace(kernel, dtypes=("float32",))
    assert {each.verdict for each in found(kernel, *HONEST).values()} <= {"right", "refused"}
    survived = []
    for fault in FAULTS:
        KERNEL[0] = planted.Kernel(fault)
        case = planted.FORWARD[fault]
        if found(kernel, case)[case].verdict not in WRONG:
            survived.append(fault)
    return survived


@pytest.mark.parametrize("kind", NUMPY)
def test_planted_faults_are_seen_through_a_wrapper(kind):
    assert seen_through(of_numpy(kind), "numpy") == []


@pytest.mark.parametrize("kind", TORCH)
@pytest.mark.needs("torch")
def test_planted_faults_are_seen_through_a_wrapper_of_pytorch(kind):
    assert seen_through(of_torch()[kind], "torch") == []


@pytest.mark.needs("torch")
def test_a_library_that_no_module_tells_is_found_by_calls():
    KERNEL[0] = planted.Kernel()
    assert settled(Subject(of_torch()["wrapped module"])).backend == "torch"


def test_causality_is_told_to_a_call_that_is_causal_or_has_it_by_default():
    """A layer of Keras takes no mask with another keyword where its call has ``**kwargs``."""

    def one_keyword(query, key, value, **kwargs):
        assert len(kwargs) < 2
        return planted.attention(query, key, value, **kwargs)

    def by_default(query, key, value, mask=None, causal=True):
        return planted.attention(query, key, value, mask, causal)

    for function in (one_keyword, by_default):
        kernel = settled(Subject(function, dtypes=("float32",)))
        assert (kernel.mask, kernel.causal) == ("keep", "top-left")
        assert {each.verdict for each in found(kernel, *HONEST).values()} <= {"right", "refused"}


def test_a_parameter_that_is_not_understood_is_told_and_makes_a_strict_run_fail():
    def attention(query, key, value, key_padding_mask=None, *, sliding_window=None):
        return planted.attention(query, key, value)

    kernel = settled(Subject(attention))
    told = surprises(kernel.declared, ())
    assert [(each.verdict, each.detail) for each in told] == [("not understood", "key_padding_mask, sliding_window")]
    results = [*told, *found(kernel, "shape-65x65-plain", "mask", "sinks").values()]
    assert little(results) == "1 of 3 cases were computed; unknown parameters: key_padding_mask, sliding_window"
    assert (exit_status(results), exit_status(results, strict=True)) == (4, 1)
    assert "not understood" in QUIET
    named = settled(Subject(attention, mask_name="key_padding_mask"))
    assert named.unknown == ("sliding_window",)


def formula(query, key, value, mask=None, causal=False):
    scores = query @ np.swapaxes(key, -1, -2) * query.dtype.type(query.shape[-1] ** -0.5)
    if causal:
        mask = np.tri(*scores.shape[-2:], dtype=bool)
    if mask is not None:
        scores = np.where(mask, scores, scores.dtype.type(-np.inf))
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True) @ value


def hidden_keys(q, k, v, key_padding_mask=None, causal_flag=False):
    return formula(q, k, v, None if key_padding_mask is None else ~key_padding_mask[:, None, None], causal_flag)


def first_keys(q, k, v, seqlens_k=None):
    return formula(q, k, v, None if seqlens_k is None else np.arange(k.shape[-2]) < seqlens_k[:, None, None, None])


def packed(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal=False):
    output = np.empty((*q.shape[:2], v.shape[-1]), q.dtype)
    for i in range(len(cu_seqlens_q) - 1):
        rows, keys = (slice(*each[i : i + 2]) for each in (cu_seqlens_q, cu_seqlens_k))
        one = formula(*(np.swapaxes(each, 0, 1) for each in (q[rows], k[keys], v[keys])), None, causal)
        output[rows] = np.swapaxes(one, 0, 1)
    return output


def packed_alike(q, k, v, cu_seqlens):
    return packed(q, k, v, cu_seqlens, cu_seqlens, 0, 0)


@pytest.mark.parametrize(
    ("function", "facts", "cases"),
    [
        (hidden_keys, ("BHSD", "drop", "top-left"), ("key-lengths", "shape-65x65-d64-causal")),
        (first_keys, ("BHSD", "keep", "none"), ("key-lengths", "shape-65x65-plain")),
        (packed, ("BSHD", "none", "top-left"), ("shape-65x65-d64-causal", "shape-65x65-plain")),
        (packed_alike, ("BSHD", "none", "none"), ("shape-65x65-plain", "shape-1x1-d16-plain")),
    ],
)
def test_masks_of_keys_lengths_and_packed_sequences_are_understood(function, facts, cases):
    kernel = settled(adapted(Subject(function)))
    assert (kernel.layout, kernel.mask, kernel.causal, kernel.unknown) == (*facts, ())
    for each in check_subject(Subject(function), cases=cases, dtypes=["float32"], power=False):
        assert each.verdict == "right", each


def test_a_fault_of_calls_with_more_keys_than_queries_hides_no_convention():
    def attention(query, key, value, is_causal=False):
        rows, columns = query.shape[-2], key.shape[-2]
        seen = np.tri(rows, columns, columns - rows + (rows < columns), dtype=bool)
        return planted.attention(query, key, value, seen if is_causal else None)

    assert settled(Subject(attention)).causal == "bottom-right"


def test_what_lengths_and_packed_sequences_do_not_say_is_refused():
    arrays = [np.ones((1, 1, rows, 4), np.float32) for rows in (2, 3, 3)]
    with pytest.raises(NotImplementedError):
        masked_by_lengths(first_keys, "seqlens_k")(*arrays, mask=np.array([[[[True, False, True]]]]))
    with pytest.raises(NotImplementedError):
        unpacked(packed_alike, "cu_seqlens")(*(np.swapaxes(each, 1, 2) for each in arrays))


def test_a_mask_of_other_axes_is_not_understood_unless_there_is_said_to_be_none():
    def of_keys(query, key, value, mask=None):
        assert mask is None or mask.ndim == 2
        return planted.attention(query, key, value)

    told = surprises(settled(Subject(of_keys)).declared, ())
    assert [(each.verdict, each.detail) for each in told] == [("not understood", "mask")]
    assert surprises(settled(Subject(of_keys, mask="none")).declared, ("mask",)) == []


def test_a_wrapper_that_swallows_all_keywords_is_asked_for_what_is_declared_and_judged():
    def attention(query, key, value, **kwargs):
        return planted.attention(query, key, value)

    assert settled(Subject(attention)).mask == "none"
    kernel = settled(Subject(attention, mask="keep", causal="top-left"))
    assert (kernel.mask_name, kernel.causal_name) == ("attn_mask", "is_causal")
    told = found(kernel, "mask", "shape-13x13-causal")
    got = {name: each.variant for name, each in told.items()}
    assert got == {"mask": "no-mask", "shape-13x13-causal": "no-causality"}


def test_a_declared_mask_without_a_keyword_is_refused_before_any_case(tmp_path):
    kernel = tmp_path / "maskless_kernel.py"
    kernel.write_text("def attention(query, key, value, m=None):\n    return value.copy()\n")
    *_, last = work(Job(f"{kernel}:attention", {"mask": "keep"}))
    assert last == Refused(
        "expected a keyword for --mask-kind keep; got none in its signature: --keyword mask=NAME tells it"
    )
    told = list(work(Job(f"{kernel}:attention", {"mask_name": "m"}, cases=("mask",), dtypes=("float32",))))
    assert [(each.case, each.verdict) for each in told if isinstance(each, Finding)] == [("mask", "visibly wrong")]
    one = work(Job(f"{kernel}:attention", cases=("shape-1x1-d16-plain",), dtypes=("float32",)))
    results = [each for each in one if isinstance(each, Finding)]
    assert [each.verdict for each in results] == ["not understood", "right"]
    assert (exit_status(results), exit_status(results, strict=True)) == (4, 1)


def test_layers_with_a_method_call_tell_its_parameters():
    class Layer:
        def __call__(self, *args, **kwargs):
            return self.call(*args, **kwargs)

        def forward(self, *args, **kwargs):  # as layers of Keras have on PyTorch
            return self.call(*args, **kwargs)

        def call(self, query, value, key=None, attention_mask=None, use_causal_mask=False):
            return query

    parameters, is_open = parameters_of(Layer())
    assert list(parameters) == ["query", "value", "key", "attention_mask", "use_causal_mask"]
    assert not is_open


def test_a_crash_is_a_failure_of_its_own():
    result = found(Subject(planted.attention), "shape-1x1-d16-plain")["shape-1x1-d16-plain"]
    assert (exit_status([result]), exit_status([result, replace(result, verdict="crashed")])) == (0, 3)
