"""FlexAttention as a kernel: run here by its dense form, as it needs a GPU; its blocks are those of the rule."""

import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from call_table import RULES, options_of
from flex_helpers import BLOCKS, as_kernel

import attention_core as ac
from attention_core import MaskFunction, SlidingWindow, explain_attention
from attention_core.backend import Call
from attention_core.masks import Given
from attention_core.scores import relative_bias

attention = ac.scaled_dot_product_attention


@pytest.fixture
def flex(backend, monkeypatch):
    return as_kernel(backend, monkeypatch)


@pytest.fixture
def arrays(rng, put):
    return put(BLOCKS.arrays(rng), dtype="float32")


def called(backend, arrays, **options):
    return Call(*arrays, backend.namespace, backend, **options)


def refusal(arrays, **options):
    (told,) = (each for each in explain_attention(*arrays, **options).candidates if each.name == "fused")
    return told.refusal


@pytest.mark.parametrize("name", [name for name in RULES if name != "of a user" and "beyond" not in name])
def test_blocks_are_empty_or_full_only_if_the_rule_says_so(name, flex, backend, arrays, put):
    """And those of rules are left out: else the kernel would compute them."""
    from attention_torch.kernels.flex import BLOCK, block_mask

    mask, (leading, heads, _, rows, columns, *_) = options_of(name, BLOCKS, put)["mask"], BLOCKS
    blocks = block_mask(called(backend, arrays, mask=mask))
    rule = mask if isinstance(mask, ac.Mask) else Given(mask)
    allowed = rule.to_array(rows, columns, num_heads=heads, leading=leading, xp=backend.namespace)
    allowed = allowed.expand(*leading, heads, rows, columns)
    padded = torch.nn.functional.pad(allowed, (0, -columns % BLOCK, 0, -rows % BLOCK))
    cut = padded.unflatten(-1, (-1, BLOCK)).unflatten(-3, (-1, BLOCK))
    some, every = cut.amax((-3, -1)), cut.to(torch.uint8).amin((-3, -1)).bool()

    def listed(counts, indices):
        flags = torch.zeros((*indices.shape[:-1], indices.shape[-1] + 1), dtype=torch.bool)
        kept = torch.arange(indices.shape[-1]) < counts[..., None]
        return flags.scatter(-1, torch.where(kept, indices, indices.shape[-1]).long(), True)[..., :-1]

    mixed = listed(blocks.kv_num_blocks, blocks.kv_indices)
    full = listed(blocks.full_kv_num_blocks, blocks.full_kv_indices)
    assert not (some & ~(mixed | full)).any()
    assert not (full & ~every).any()
    assert not (mixed & full).any()
    if name in ("causal later", "window", "lengths", "segments"):
        assert torch.equal((mixed | full).expand(some.shape), some)


def test_blocks_are_kept_for_equal_rules_without_arrays(flex, backend, arrays, put):
    from attention_torch.kernels import flex as module

    def blocks(mask):
        return module.block_mask(called(backend, arrays, mask=mask)).kv_indices

    assert blocks(ac.Causal(offset=3)) is blocks(ac.Causal(offset=3))
    assert blocks(ac.Causal(offset=3)) is not blocks(ac.Causal(offset=4))
    numbers = np.asarray([2, 140])
    lengths = torch.from_numpy(numbers)  # whose changes PyTorch does not count
    before = blocks(ac.KeyLengths(lengths))
    numbers[0] = 250
    assert not torch.equal(blocks(ac.KeyLengths(lengths)), before)
    for offset in range(2 * module.KEPT):
        blocks(ac.Causal(offset=offset))
    assert len(module._KEPT) == module.KEPT


def test_functions_count_the_heads_and_positions_of_the_whole(flex, backend, arrays):
    """Of a part of a call, as of ranks that exchange positions for heads."""
    from attention_core._attention.parts import Run, cut

    def modified(scores, batch, head, query, key):
        return scores + 0.1 * (head - batch) * (query - key)

    mask = MaskFunction(lambda batch, head, query, key: (head + query + key) % 3 != 0)
    whole = attention(*arrays, mask=mask, score_mod=modified, implementation="dense")
    part = cut(called(backend, arrays, mask=mask, score_mod=modified), heads=Run(2, 2), rows=Run(32, 64))
    assert flex.judge(part).refusal is None
    torch.testing.assert_close(flex.attend(part), whole[:, 2:4, 32:96, :], rtol=0, atol=2e-6)


def test_a_row_whose_scores_are_all_minus_infinity_has_no_weights(flex, arrays):
    def lost(scores, batch, head, query, key):
        return torch.where((query == 3) | (key > query), -math.inf, scores)

    options = {"score_mod": lost, "mask": SlidingWindow(left=20)}
    found, expected = (attention(*arrays, **options, implementation=each) for each in ("fused", "dense"))
    others = torch.arange(BLOCKS.rows) != 3
    np.testing.assert_allclose(found[:, :, others], expected[:, :, others], rtol=0, atol=5e-6)


@dataclass(frozen=True, eq=False)
class Even(ac.Mask):
    """A rule of somebody else."""

    def allowed(self, at, /, *, xp):
        return xp.equal(xp.remainder(at.key, 2), 0)


def test_each_refusal_says_why(flex, arrays, put):
    """The guard as a table: what the call has, and the beginning of what is said."""
    query, key, value = arrays
    table = put(np.ones((32, BLOCKS.heads)), dtype="float32").requires_grad_()
    for inputs, options, reason in (
        ((query, key, value), {}, None),
        ((query, key, value), {"mask": ac.Causal()}, None),
        ([x.half() for x in arrays], {"softcap": 2.0}, None),
        ([x.double() for x in arrays], {}, "computes in float16 or bfloat16 or float32 alone"),
        ([query[..., :8], key[..., :8], value], {}, "takes heads of a width"),
        ((query, key * math.nan, value), {"mask": ac.Causal()}, "lets masked keys leak"),
        ((query, key, value), {"dropout": ac.Dropout(0.5, 3)}, "drops no weights"),
        ((query, key, value), {"mask": Even()}, "is not known to follow the rule Even"),
        (
            (query, key, value),
            {"mask": MaskFunction(lambda batch, head, query, key: query[:, 0][:, None] >= key)},
            "calls a mask function with single positions",
        ),
        (
            (query, key, value),
            {"score_mod": lambda scores, batch, head, query, key: scores * float(query.max() + 1)},
            "calls a score_mod with single positions",
        ),
        ((query, key, value), {"score_mod": relative_bias(table)}, "is not known to differentiate"),
        ((query, key, value), {"bias": table[:1, :1].reshape(1, 1)}, "has no bias"),
    ):
        found = refusal(inputs, **options)
        assert found == reason if reason is None else found.startswith(reason), (options, found)


def test_without_a_gpu_it_is_refused(arrays):
    told = [each for each in explain_attention(*arrays, softcap=2.0).candidates if each.name == "fused"]
    names = ["scaled_dot_product_attention", "flex_attention"]
    assert [each.kernel.rpartition(".")[2] for each in told] == names
    assert [each.refusal.startswith("needs a GPU") for each in told] == [False, True]


class Weighted:
    """A function of scores that changes, though it stays equal; and one that has no hash."""

    def __init__(self, weight):
        self.weight = weight

    def __call__(self, scores, batch, head, query, key):
        return scores * self.weight


class WithoutHash(Weighted):
    __hash__ = None


def test_an_object_that_modifies_scores_is_read_at_every_call(flex, arrays):
    for kind in (Weighted, WithoutHash):
        score_mod = kind(1.0)
        for weight in (0.5, 3.0, torch.tensor(2.0)):
            score_mod.weight = weight
            for function in (score_mod, ac.scores.ScoreMod(score_mod)):
                assert explain_attention(*arrays, score_mod=function).chosen == "fused"
                found = attention(*arrays, score_mod=function)
                expected = attention(*arrays, score_mod=function, implementation="dense")
                np.testing.assert_allclose(found, expected, rtol=0, atol=5e-6)
