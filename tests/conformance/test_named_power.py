"""Reproducers have power: each rejects the mistake that it is about, and accepts the definition."""

import runpy
from pathlib import Path

import pytest

from attention_conformance.named import find_case

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.needs("torch")


def defined(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
    """The definition: masked values have no weight and are not read, and no score decides what is masked."""
    import torch

    if enable_gqa:
        key, value = (x.repeat_interleave(query.shape[-3] // x.shape[-3], dim=-3) for x in (key, value))
    scale = (query.shape[-1] or 1) ** -0.5 if scale is None else scale
    scores = (scale * query.float()) @ key.float().mT
    mask = torch.ones_like(scores, dtype=torch.bool)
    if is_causal:  # from the bottom right, as the script of pytorch#103082 expects
        mask = mask.tril(key.shape[-2] - query.shape[-2])
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        mask = mask & attn_mask
    elif attn_mask is not None:
        scores, mask = scores + attn_mask, mask & (attn_mask != -torch.inf)
    seen = torch.where(mask, scores, -torch.inf)
    weights = torch.where(mask, torch.softmax(torch.where(mask.any(-1, keepdim=True), seen, 0.0), -1), 0.0)
    attended = mask.any(-2).reshape(-1, mask.shape[-1]).any(0)
    return (weights @ torch.where(attended[:, None], value.float(), 0.0)).to(query.dtype)


def plain(query, key, value, attn_mask=None, **options):
    """NaN in a row without keys."""
    import torch

    bias = 0.0 if attn_mask is None else attn_mask
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        bias = torch.where(attn_mask, 0.0, -torch.inf)
    lowest = torch.finfo(torch.float32).min
    bias = torch.where(bias == lowest, -torch.inf, bias) if attn_mask is not None else bias
    return torch.softmax((query @ key.mT) * query.shape[-1] ** -0.5 + bias, -1) @ value


def misread(x):
    """The memory of an array, read as if it were contiguous."""
    import torch

    return torch.as_strided(x, x.shape, torch.empty(x.shape).stride())


def with_hook(hook):
    def attention(*arrays, **options):
        output = defined(*arrays, **options)
        output.register_hook(hook)
        return output

    return attention


def without_heads_beyond_65535(query, key, value):
    output = defined(query, key, value)
    output[:, 65535:] = 0
    return output


def nan_where_the_first_block_is_masked(query, key, value, attn_mask):
    import torch

    empty = (attn_mask[..., :128] == -torch.inf).all(-1, keepdim=True)
    return torch.where(empty, torch.nan, defined(query, key, value, attn_mask))


def infinite_where_the_last_block_is_not_full(query, key, value, is_causal):
    return defined(query, key, value, is_causal=is_causal) / (1.0 if key.shape[-2] % 64 == 0 else 0.0)


def heads_in_another_order(query, key, value, **options):
    return defined(query, *(x.repeat(1, query.shape[1] // x.shape[1], 1, 1) for x in (key, value)))


def second_calls_misread(calls):
    """The first call is right, and later ones take its plan."""
    return lambda *arrays: defined(*map(misread, arrays)) if calls.append(1) or len(calls) > 1 else defined(*arrays)


MISTAKES = {
    "pytorch-184330-no-width": lambda query, key, value, scale: 0 * value[..., :3, :],
    "pytorch-103749-padding-mask": plain,
    "pytorch-101967-nan-behind-mask": plain,
    "pytorch-110213-lowest-bias": plain,
    "olmo-323-rounded-to-minus-infinity": plain,
    "pytorch-141128-nan-query": lambda *arrays: plain(*arrays).nan_to_num(),
    "pytorch-133882-scores-minus-infinity": lambda *arrays: plain(*arrays).nan_to_num(),
    "pytorch-127055-band-600": nan_where_the_first_block_is_masked,
    "pytorch-187506-innermost-stride": lambda *arrays: defined(*map(misread, arrays)),
    "pytorch-181133-permuted": lambda *arrays: defined(*map(misread, arrays)),
    "rocm-pytorch-3230-value-alone": lambda query, key, value: defined(query, key, misread(value)),
    "pytorch-133671-cotangent-strides": with_hook(misread),
    "pytorch-148476-bias-alone": lambda query, *arrays, **options: with_hook(
        lambda gradient: gradient if query.requires_grad else 0 * gradient
    )(query, *arrays, **options),
    "pytorch-105202-negative-scale": lambda *arrays, scale: defined(*arrays, scale=abs(scale)),
    "pytorch-103082-one-query": lambda query, key, value, is_causal=False: defined(
        query, *(x[..., :1, :] if is_causal else x for x in (key, value))
    ),
    "pytorch-174861-grouped-decode": heads_in_another_order,
    "pytorch-142228-65536-heads": without_heads_beyond_65535,
    "torch-spyre-3248-lengths-around-blocks": infinite_where_the_last_block_is_not_full,
    "pytorch-108503-blocks-of-a-mask": lambda *arrays, attn_mask: defined(*arrays),
    "vllm-27034-batch-of-two": lambda query, *arrays: defined(query, *arrays) * (1 + 1e-6 * (len(query) - 1)),
    "flashinfer-4270-second-call": second_calls_misread([]),
    "kernelbench-82-inputs-untouched": lambda *arrays: next(x.zero_() for x in arrays).clone(),
}

# NaN is what is expected, or the arguments are looked at and not the result.
WITHOUT_NAN = {"pytorch-133882-scores-minus-infinity", "kernelbench-82-inputs-untouched"}


def status(name, attention, monkeypatch):
    """The exit status of a script whose attention is another one."""
    monkeypatch.setattr("torch.nn.functional.scaled_dot_product_attention", attention)
    with pytest.raises(SystemExit) as stopped:
        runpy.run_path(ROOT / find_case(name).script)
    return stopped.value.code


@pytest.mark.parametrize("name", MISTAKES)
def test_a_reproducer_rejects_its_mistake_and_accepts_the_definition(name, monkeypatch):
    assert status(name, MISTAKES[name], monkeypatch) == 1
    assert status(name, defined, monkeypatch) == 0


@pytest.mark.parametrize("name", sorted(MISTAKES.keys() - WITHOUT_NAN))
def test_nan_is_never_right(name, monkeypatch):
    attention = (
        with_hook(lambda gradient: float("nan") * gradient) if "cotangent" in name or "bias-alone" in name else defined
    )
    assert status(name, lambda *arrays, **options: float("nan") * attention(*arrays, **options), monkeypatch) == 1
