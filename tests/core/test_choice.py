"""Which implementation a call takes: what it says, what it does, and what it refuses."""

import importlib

import numpy as np
import pytest
from call_table import NAMES, Sizes, options_of

import attention_core as ac
from attention_core import explain_attention
from attention_core._attention import ways
from attention_core.backend import Kernel, Takes, Tuning, blockwise

attention = ac.scaled_dot_product_attention
SIZES = Sizes((2,), 4, 2, 9, 14, 5, 5)
(B,), H, G, M, N, D, _ = SIZES


@pytest.fixture
def arrays(rng, put):
    return put(SIZES.arrays(rng))


@pytest.fixture
def ran(backend, monkeypatch):
    """The names of the implementations that run, in order."""
    found = []

    def spied(owner, attribute, name):
        function = getattr(owner, attribute)

        def spy(*arguments, **options):
            found.append(name)
            return function(*arguments, **options)

        monkeypatch.setattr(owner, attribute, spy)

    spied(ways.DENSE, "run", "dense")
    spied(ways.Blocks, "run", "blockwise")
    for kernel in backend.kernels:
        spied(type(kernel), "attend", "fused")
    return found


@pytest.fixture
def streaming(backend, monkeypatch):
    """No call is small."""
    monkeypatch.setattr(backend, "tuning", Tuning(queries=1, keys=5, min_queries=4, dense_below=0, structured_below=0))


OPTIONS = ("none", "causal", "array of keys", "cache", "bias of mn", "alibi")


@pytest.mark.needs(lambda name, large, backend: not (large and backend.loops.traced and (name != "cache")))
@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("name", OPTIONS)
def test_what_is_explained_is_what_runs(name, large, ran, arrays, backend, put, get, monkeypatch):
    monkeypatch.setattr(
        backend,
        "tuning",
        Tuning(
            queries=1, keys=5, min_queries=4, dense_below=0 if large else M * N, structured_below=0 if large else M * N
        ),
    )
    options = options_of(name, SIZES, put)
    explanation = explain_attention(*arrays, **options)
    assert ran == []
    result = get(attention(*arrays, **options))
    assert ran == [explanation.chosen]
    refusals = {each.name: each.refusal for each in reversed(explanation.candidates)}  # of kernels, the first
    assert refusals[explanation.chosen] is refusals["dense"] is None
    for each in explanation.candidates:
        is_taken = each.name == explanation.chosen and not str(each.kernel).startswith("torch.nn.attention.")
        assert [each.refusal, each.slower].count(None) == (2 if is_taken else 1), each
    assert explanation.reason in [
        way.reason for way in (Kernel, ways.Dense, ways.Blocks) if way.kind == explanation.chosen
    ]
    if refusals["fused"] is not None:
        assert explanation.chosen == ("blockwise" if large else "dense")
    named = get(attention(*arrays, **options, implementation=explanation.chosen))
    np.testing.assert_array_equal(named, result)
    dense = get(attention(*arrays, **options, implementation="dense"))
    np.testing.assert_allclose(result, dense, rtol=0, atol=1e-13)
    kernel = f" ({backend.kernels[0].name})" if explanation.chosen == "fused" else ""
    assert str(explanation).startswith(f"{explanation.chosen}{kernel}: {explanation.reason}\n")


@pytest.fixture
def chosen(arrays, backend, monkeypatch):
    """What a call takes without kernels, under a tuning; of so many rows and heads."""
    monkeypatch.setattr(backend, "kernels", ())

    def choice(rows=M, heads=H, key=None, options=None, **tuning):
        limits = {"dense_below": M * N, "structured_below": M * N} | tuning
        monkeypatch.setattr(backend, "tuning", Tuning(queries=1, keys=5, min_queries=4, **limits))
        query, *others = arrays if key is None else (arrays[0], key, key)
        return explain_attention(query[:, :heads, :rows, :], *others, **options or {}).chosen

    return choice


def test_a_call_is_dense_up_to_a_bound(chosen, put):
    """Of all scores; under a mask, of those of all heads at once, but not for a few queries."""
    some, many = put(np.ones((M, N), dtype=bool)), put(np.zeros((B, G, 64, D)))
    masked = ({"mask": ac.Causal(offset=N - M)}, {"mask": some}, {"bias": put(np.zeros((M, N)))})
    for less, expected in ((0, "dense"), (1, "blockwise")):
        most, window = B * H * M * N - less, {"mask": ac.SlidingWindow(left=2)}
        assert chosen(options=window, dense_below=M * N - less, structured_below=M * N - less) == expected
        assert chosen(dense_most=most) == expected
        assert [chosen(options=options, costly_most=most) for options in masked] == [expected] * 3
        assert chosen(costly_most=most) == "dense"
        assert chosen(1, key=many, options={"bias": put(np.zeros((1, 64)))}, costly_most=most) == "dense"


@pytest.mark.parametrize("repeats", [True, False])
def test_repeated_keys_are_bounded_where_they_are_many(repeats, chosen, monkeypatch):
    monkeypatch.setattr("attention_core._attention.facts.has_sharding", lambda array: repeats)
    for rows, most, expected in ((3, B * H * 3 * N, "dense"), (3, B * H * 3 * N - 1, "blockwise"), (4, 0, "dense")):
        assert chosen(rows, costly_most=most) == (expected if repeats else "dense")
        assert chosen(rows, G, costly_most=most) == "dense"


def test_a_mask_with_structure_takes_blocks_earlier(chosen, put):
    causal, other = ac.Causal(), ac.MaskFunction(lambda batch, head, query, key: key >= 0)
    for masks, expected in (
        ((None, put(np.ones((M, N), dtype=bool)), other), "dense"),
        ((causal, ~causal, causal & other, other & causal, causal | ac.KeyLengths(3)), "blockwise"),
    ):
        for mask in masks:
            assert chosen(options={"mask": mask}, structured_below=0) == expected


@pytest.mark.parametrize("empty", [0, 1, 2, 3])
def test_what_is_empty_is_dense(empty, backend, put, get, ran):
    entries, rows, columns, width = (0 if axis == empty else size for axis, size in enumerate((B, M, N, D)))
    query, key, value = put(
        [np.ones((entries, H, rows, D)), np.ones((entries, G, columns, D)), np.ones((entries, G, columns, width))]
    )
    for implementation in ("auto", "blockwise", *(["fused"] if backend.name == "torch" and width else [])):
        result = get(attention(query, key, value, implementation=implementation))
        assert result.shape == (entries, H, rows, width)
        assert not np.any(result)
    assert set(ran) == {"dense"}  # and no kernel, which may divide by a size
    assert explain_attention(query, key, value).chosen == "dense"


def test_a_name_is_not_quietly_another(streaming, arrays, backend):
    """Who asks for a kernel by name does not get what it avoids."""
    with pytest.raises(ValueError):
        attention(*arrays, implementation="fused", softcap=2.0)
    if backend.kernels:
        for options in ({"return_logsumexp": True}, {"sinks": arrays[0][0, :, 0, 0]}):
            with pytest.raises(ValueError):
                attention(*arrays, implementation="fused", **options)
    else:
        with pytest.raises(ValueError):
            attention(*arrays, implementation="fused")


class Foreign(Kernel):
    """A kernel of a package, which computes in blocks what it takes, and counts."""

    name = "foreign.attention"

    def __init__(self, takes, slower=None):
        self.takes, self.slower, self.judged, self.attended = takes, slower, 0, 0

    def judge(self, call):
        self.judged += 1
        return super().judge(call)._replace(slower=self.slower)

    def attend(self, call):
        self.attended += 1
        return blockwise(call)[0]


EVERY = Takes(options=("bias", "softcap", "score_mod", "dropout"), masks=("any",), constant_bias=True)
TAKES = {
    "nothing": (Foreign(Takes(dtypes=("float32",))), ["computes in float32 alone (line 8)"]),
    "arrays": (
        Foreign(Takes(options=("bias",), masks=("array",), one_width=True)),
        [
            "drops no weights by seed and position (line 11)",
            "has no score_mod",
            "has no softcap",
            "takes no mask of the kind causal (line 2)",
            "takes no mask of the kind causal or lengths (line 2)",
            "takes no mask of the kind lengths (line 2)",
            "takes no mask of the kind rule (line 2)",
        ],
    ),
    "all": (Foreign(EVERY), []),
    "all, slowly": (Foreign(EVERY, "is slower"), []),
}


@pytest.mark.needs("untraced loops")
@pytest.mark.parametrize("name", TAKES)
def test_a_kernel_answers_what_its_table_takes(name, backend, put, get, rng, monkeypatch):
    """It is judged once, by its name or where it is faster it attends, and other calls are refused or take another way."""
    kernel, expected = TAKES[name]
    monkeypatch.setattr(backend, "kernels", (kernel,))
    arrays, refusals = put(SIZES.arrays(rng)), set()
    for each in NAMES:
        options, kernel.judged, kernel.attended = options_of(each, SIZES, put), 0, 0
        told = explain_attention(*arrays, **options)
        refusal, slower = told.candidates[0][2:]
        assert (kernel.judged, kernel.attended) == (1, 0)
        dense, found = (get(attention(*arrays, **options, implementation=way)) for way in ("dense", "auto"))
        np.testing.assert_allclose(found, dense, rtol=0, atol=1e-13)
        assert (told.chosen == "fused", kernel.attended) == ((refusal, slower) == (None, None), told.chosen == "fused")
        if refusal is None and "sinks" not in options:  # which need a logsumexp
            found = attention(*arrays, **options, implementation=kernel.name)
            np.testing.assert_allclose(get(found), dense, rtol=0, atol=1e-13)
        else:
            refusals.add(refusal)
            with pytest.raises(ValueError):
                attention(*arrays, **options, implementation=kernel.name)
    assert sorted(refusals - {None}) == expected


@pytest.mark.needs("tensorflow")
def test_open_lengths_in_a_graph_take_blocks_only_by_name(backend, ran):
    tf = importlib.import_module("tensorflow")
    spec = tf.TensorSpec([2, None, 4])
    tf.function(lambda x: attention(x, x, x, is_causal=True), input_signature=[spec]).get_concrete_function()
    assert ran == ["dense"]


@pytest.mark.needs("torch")
def test_a_kernel_that_is_right_and_not_taken_is_told_why(backend, put, rng):
    """It rounds in 16 bits; and there is nothing to compute."""
    x = put(rng.standard_normal((1, 2, 20, 8)).astype("float32"))
    for arrays, reason in (
        ((x.half(),) * 3, "rounds weights of 16 bits, and this processor does not multiply them"),
        ((x, x[:, :, :0], x[:, :, :0]), "query, key or value is empty"),
    ):
        fused, *_, blockwise, dense = ac.explain_attention(*arrays).candidates
        assert (fused.refusal, fused.slower) == (None, reason)
        assert (dense.slower, blockwise.slower is None) == (None, False)
        assert f"not taken: {reason}" in str(ac.explain_attention(*arrays))


def test_reproducible_arithmetic_is_explained(put, rng):
    query = put(rng.standard_normal((1, 2, 5, 8)).astype(np.float32))
    told = ac.explain_attention(query, query, query, arithmetic="reproducible")
    assert told.chosen == "blockwise"
    assert told.candidates[-1].name == "blockwise"
    refusals = [each.refusal for each in told.candidates[:-1]]
    assert all("order of its own" in refusal or "has no fused kernel" in refusal for refusal in refusals)
    with pytest.raises(ValueError):
        ac.explain_attention(*[put(rng.standard_normal((1, 2, 5, 8)))] * 3, arithmetic="reproducible")


def test_blocks_on_an_accelerator_are_larger(backend, put, monkeypatch):
    monkeypatch.setattr(backend, "tuning", backend.tuning._replace(queries=8, keys=8, min_queries=1))
    x = put(np.ones((1, 1, 64, 1), "float32"))

    def largest():
        sizes = []
        mask = ac.MaskFunction(lambda b, h, q, k: sizes.append((q.shape[-2], k.shape[-1])) or q + k >= 0)
        attention(x, x, x, mask=mask, implementation="blockwise")
        return max(sizes)

    assert largest() == (8, 8)
    if backend.loops.traced:  # an array may not tell where its program will run
        monkeypatch.setattr(type(backend), "devices", lambda self: ["cuda:0"])
    else:
        monkeypatch.setattr("attention_core._attention.blocks.plan.is_on_host", lambda array: False)
    assert largest() == (32, 32)
