"""FlexAttention as a kernel: run here by its dense form, as it needs a GPU; its blocks are those of the rule."""

import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from call_table import options_of
from flex_helpers import BLOCKS, as_kernel, flags_of
from shard_helpers import threads_as_ranks

import attention_core as ac
from attention_core import MaskFunction, SlidingWindow, explain_attention
from attention_core.scores import relative_bias

attention = ac.scaled_dot_product_attention


@pytest.fixture
def flex(backend, monkeypatch):
    """The block masks that it is given."""
    blocks = []
    as_kernel(backend, monkeypatch, blocks)
    return blocks


@pytest.fixture
def arrays(rng, put):
    return put(BLOCKS.arrays(rng), dtype="float32")


def refusal(arrays, **options):
    (told,) = (each for each in explain_attention(*arrays, **options).candidates if each.name == "fused")
    return told.refusal


@pytest.mark.parametrize("name", ["causal later", "window", "lengths", "segments"])
def test_blocks_that_a_rule_leaves_empty_are_left_out(name, flex, arrays, put):
    """Else the kernel would compute them. That no others are, results say, of all rules, in `test_every_kernel`."""
    mask, (leading, heads, _, rows, columns, *_) = options_of(name, BLOCKS, put)["mask"], BLOCKS
    attention(*arrays, mask=mask)
    some, full = flags_of(flex[0])
    assert not full[..., -1].any()  # which are no whole blocks
    assert not full[..., -1, :].any()
    allowed = mask.to_array(rows, columns, num_heads=heads, leading=leading, xp=torch)
    allowed = allowed.expand(*leading, heads, rows, columns)
    padded = torch.nn.functional.pad(allowed, (0, -columns % 128, 0, -rows % 128))
    left = padded.unflatten(-1, (-1, 128)).unflatten(-3, (-1, 128)).amax((-3, -1))
    assert torch.equal(left[..., : some.shape[-1]], some.expand(*left.shape[:-1], -1))


def test_blocks_are_kept_for_equal_rules_without_arrays(flex, arrays):
    square = [x[..., : BLOCKS.rows, :] for x in arrays]  # of which no keys are cut

    def blocks(mask):
        attention(*square, mask=mask)
        return flex[-1].kv_indices

    first = blocks(ac.Causal(offset=3))
    assert blocks(ac.Causal(offset=3)) is first
    assert blocks(ac.Causal(offset=4)) is not first
    numbers = np.asarray([2, 140])
    lengths = torch.from_numpy(numbers)  # whose changes PyTorch does not count
    before = blocks(ac.KeyLengths(lengths))
    numbers[0] = 149
    assert not torch.equal(blocks(ac.KeyLengths(lengths)), before)
    for offset in range(5, 40):
        blocks(ac.Causal(offset=offset))
    assert blocks(ac.Causal(offset=3)) is not first  # those of few rules are kept


@pytest.mark.parametrize("strategy", ["heads", "gather"])
def test_functions_count_the_heads_and_positions_of_the_whole(strategy, flex, backend, rng, put, monkeypatch):
    """Of a part of a call, as of ranks that exchange positions for heads."""

    def modified(scores, batch, head, query, key):
        return scores + 0.1 * (head - batch) * (query - key)

    mask = MaskFunction(lambda batch, head, query, key: (head + query + key) % 3 != 0)
    arrays, options = (
        put(BLOCKS._replace(rows=256, columns=256).arrays(rng), dtype="float32"),
        {"mask": mask, "score_mod": modified},
    )
    with threads_as_ranks(backend, monkeypatch) as ranks:

        def step(group):
            shards = ac.Shards(group, "contiguous", strategy)
            return attention(*(ac.shard(x, shards) for x in arrays), **options, shards=shards)

        found = torch.cat(ranks(2, step), dim=-2)
    assert len(flex) == 2
    whole = attention(*arrays, **options, implementation="dense")
    torch.testing.assert_close(found, whole, rtol=0, atol=2e-6)


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
