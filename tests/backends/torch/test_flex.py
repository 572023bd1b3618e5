"""FlexAttention as a kernel: run here by its dense form, as it needs a GPU; its blocks are those of the rule."""

import importlib
import math
from dataclasses import dataclass

import numpy as np
import pytest

import attention_core as ac
from attention_core import MaskFunction, Segments, SlidingWindow, explain_attention
from attention_core.backend import Call
from attention_core.masks import Given
from attention_core.scores import ScoreMod, alibi, relative_bias

B, H, G, M, N, D, E = 2, 4, 2, 150, 261, 16, 20  # two blocks of queries, and three of keys
IDS = np.arange(N) // 40
attention = ac.scaled_dot_product_attention


@pytest.fixture
def torch():
    return importlib.import_module("torch")


@pytest.fixture
def flex(torch, backend, monkeypatch):
    """The kernel as if this were a GPU; a CPU has no gradient of it."""
    from torch.nn.attention import flex_attention

    from attention_torch.flex import FlexAttention

    monkeypatch.setattr(flex_attention, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    kernel = FlexAttention(("cpu",), flex_attention.flex_attention)
    monkeypatch.setattr(backend, "kernels", (kernel,))
    return kernel


@pytest.fixture
def arrays(rng, put):
    shapes = (B, H, M, D), (B, G, N, D), (B, G, N, E)
    return [put(rng.standard_normal(shape), dtype="float32") for shape in shapes]


def called(backend, arrays, **options):
    return Call(*arrays, backend.namespace, backend, **options)


def refusal(arrays, **options):
    (told,) = (each for each in explain_attention(*arrays, **options).candidates if each.name == "fused")
    return told.refusal


RULES = {
    "causal": lambda put, rng: ac.Causal(),
    "offset": lambda put, rng: ac.Causal(7),
    "offsets": lambda put, rng: ac.Causal(put(np.asarray([3, -9]))),
    "window": lambda put, rng: SlidingWindow(left=33, right=4, offset=5),
    "window without an end": lambda put, rng: SlidingWindow(right=4, offset=put(np.asarray([3, -9]))),
    "lengths": lambda put, rng: ac.KeyLengths(put(np.asarray([0, 130]))),
    "documents": lambda put, rng: Segments(put(IDS[60 : 60 + M]), put(IDS)),
    "documents of samples": lambda put, rng: Segments(put(np.stack([IDS[:M], IDS[M // 2 :][:M]])), put(IDS)),
    "array": lambda put, rng: put(rng.random((H, M, N)) < 0.5),
    "array and rule": lambda put, rng: ac.Causal(9) & put(rng.random((B, 1, 1, N)) < 0.5),
    "either": lambda put, rng: ~ac.KeyLengths(5) & SlidingWindow(left=3) | ac.KeyLengths(2),
    "function": lambda put, rng: MaskFunction(
        lambda batch, head, query, key, step: (key <= query) & ((query - key) % (head + step) == batch),
        (put(np.asarray(2)),),
    ),
}
SCORES = {
    "softcap": lambda put, rng: {"softcap": 2.0, "is_causal": True},
    "alibi": lambda put, rng: {"score_mod": alibi(H, offset=3)},
    "relative bias": lambda put, rng: {
        "score_mod": relative_bias(put(rng.standard_normal((32, H)), dtype="float32")),
        "mask": SlidingWindow(left=9),
    },
    "function": lambda put, rng: {
        "score_mod": ScoreMod(
            lambda scores, batch, head, query, key, rate: scores * rate[head],
            (put(np.linspace(1, 2, H), dtype="float32"),),
        ),
        "mask": ac.KeyLengths(100),
    },
    "bias": lambda put, rng: {"bias": put(np.where(rng.random((M, N)) < 0.5, -math.inf, 1.0), dtype="float32")},
    "bias of heads": lambda put, rng: {
        "bias": put(np.where((np.arange(M) == 2)[:, None], -math.inf, rng.standard_normal((H, M, N))), dtype="float32"),
        "mask": ac.Causal(60),
    },
    "sinks": lambda put, rng: {"sinks": put(rng.standard_normal(H), dtype="float32"), "mask": SlidingWindow(left=5)},
    "scale": lambda put, rng: {"scale": -0.3, "softcap": 3.0},
    "scale of an array": lambda put, rng: {"scale": put(np.asarray(0.3), dtype="float32"), "softcap": 3.0},
}
OPTIONS = {f"mask {name}": lambda put, rng, make=make: {"mask": make(put, rng)} for name, make in RULES.items()}


@pytest.mark.parametrize("name", [*OPTIONS, *SCORES])
def test_the_kernel_equals_the_definition(name, flex, arrays, put, rng):
    """Fully masked rows and their logsumexp, and pieces of keys, included."""
    options = {**OPTIONS, **SCORES}[name](put, rng)
    told = explain_attention(*arrays, **options)
    assert (told.chosen, told.candidates[0].kernel) == ("fused", flex.name)
    found, expected = (
        attention(*arrays, **options, implementation=each, return_logsumexp=True) for each in ("auto", "dense")
    )
    for x, y in zip((found.output, found.logsumexp), (expected.output, expected.logsumexp), strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=5e-6)


@pytest.mark.parametrize("name", RULES)
def test_blocks_are_empty_or_full_only_if_the_rule_says_so(name, torch, flex, backend, arrays, put, rng):
    """And those of rules are left out: else the kernel would compute them."""
    from attention_torch.flex import BLOCK, block_mask

    mask = RULES[name](put, rng)
    blocks = block_mask(called(backend, arrays, mask=mask))
    rule = mask if isinstance(mask, ac.Mask) else Given(mask)
    allowed = rule.to_array(M, N, num_heads=H, leading=(B,), xp=backend.namespace).expand(B, H, M, N)
    padded = torch.nn.functional.pad(allowed, (0, -N % BLOCK, 0, -M % BLOCK))
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
    if name in ("causal", "window", "lengths", "documents"):
        assert torch.equal((mixed | full).expand(some.shape), some)


def test_blocks_are_kept_for_equal_rules(flex, backend, arrays, put):
    from attention_torch import flex as module

    def blocks(mask):
        return module.block_mask(called(backend, arrays, mask=mask)).kv_indices

    assert blocks(ac.Causal(3)) is blocks(ac.Causal(3))
    assert blocks(ac.Causal(3)) is not blocks(ac.Causal(4))
    lengths = put(np.asarray([2, 140]))
    before = blocks(ac.KeyLengths(lengths))
    assert blocks(ac.KeyLengths(lengths)) is before
    assert blocks(ac.KeyLengths(lengths.clone())) is not before
    lengths += 100
    assert blocks(ac.KeyLengths(lengths)) is not before
    for offset in range(2 * module.KEPT):
        blocks(ac.Causal(offset))
    assert len(module._KEPT) == module.KEPT


def test_a_row_whose_scores_are_all_minus_infinity_is_not_fully_masked(torch, flex, arrays):
    """Which FlexAttention takes for one: a mask decides that, never the scores."""

    def lost(scores, batch, head, query, key):
        return torch.where((query == 3) | (key > query), -math.inf, scores)

    options = {"score_mod": lost, "mask": SlidingWindow(left=20)}
    found, expected = (attention(*arrays, **options, implementation=each) for each in ("fused", "dense"))
    assert torch.isnan(found[:, :, 3]).all()
    np.testing.assert_allclose(found, expected, rtol=0, atol=5e-6)


@dataclass(frozen=True, eq=False)
class Even(ac.Mask):
    """A rule of somebody else."""

    def allowed(self, at, /, *, xp):
        return xp.equal(xp.remainder(at.key, 2), 0)


def refused(torch, arrays, put):
    """The guard as a table: what the call has, and the beginning of what is said."""
    query, key, value = arrays
    spoilt = key.clone()
    spoilt[0, 0, 5] = math.nan
    table = put(np.ones((32, H)), dtype="float32").requires_grad_()
    return [
        ((query, key, value), {}, None),
        ((query, key, value), {"mask": ac.Causal()}, None),
        ([x.half() for x in arrays], {"softcap": 2.0}, None),
        ([x.double() for x in arrays], {}, "computes in at most 32 bits"),
        ([query[..., :8], key[..., :8], value], {}, "takes heads of a width"),
        ((query, spoilt, value), {"mask": ac.Causal()}, "lets masked keys leak"),
        ((query, key, spoilt), {"mask": ac.KeyLengths(3)}, None),  # of which only those keys are left
        ((query, key, spoilt), {}, "lets masked keys leak"),
        ((query, key * 1e38, value), {"softcap": 2.0}, "lets masked keys leak"),
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
        ((query, key, value), {"bias": table[:1, :1].reshape(1, 1)}, "takes no bias of another dtype"),
    ]


def test_each_refusal_says_why(torch, flex, arrays, put):
    for inputs, options, reason in refused(torch, arrays, put):
        found = refusal(inputs, **options)
        assert found == reason if reason is None else found.startswith(reason), (options, found)


def test_without_a_gpu_it_is_refused(arrays):
    told = [each for each in explain_attention(*arrays, softcap=2.0).candidates if each.name == "fused"]
    assert [each.kernel.rpartition(".")[2] for each in told] == ["scaled_dot_product_attention", "flex_attention"]
    assert told[1].refusal.startswith("needs a GPU")


class Weighted:
    """A function of scores that changes, though it stays equal; and one that has no hash."""

    def __init__(self, weight):
        self.weight = weight

    def __call__(self, scores, batch, head, query, key):
        return scores * self.weight


class WithoutHash(Weighted):
    __hash__ = None


def test_an_object_that_modifies_scores_is_read_at_every_call(flex, arrays, torch):
    for kind in (Weighted, WithoutHash):
        score_mod = kind(1.0)
        for weight in (0.5, 3.0, torch.tensor(2.0)):
            score_mod.weight = weight
            for given in (score_mod, ScoreMod(score_mod)):
                assert explain_attention(*arrays, score_mod=given).chosen == "fused"
                found = attention(*arrays, score_mod=given)
                expected = attention(*arrays, score_mod=given, implementation="dense")
                np.testing.assert_allclose(found, expected, rtol=0, atol=5e-6)


def test_rules_whose_changes_are_not_counted_are_not_kept(flex, arrays, torch):
    with torch.inference_mode():
        lengths = torch.tensor([100, 200])
    for first in (30, 250):
        with torch.inference_mode():
            lengths[0] = first
        options = {"mask": ac.KeyLengths(lengths), "softcap": 2.0}
        found, expected = (attention(*arrays, **options, implementation=each) for each in ("fused", "dense"))
        np.testing.assert_allclose(found, expected, rtol=0, atol=5e-6)
