"""Functions of users: masks, score modifications and preparations, whose results are checked in every form."""

import functools
import importlib
from dataclasses import dataclass

import numpy as np
import pytest
from pairwise import pairwise

import attention_core as ac
from attention_core.masks import Causal, Mask, MaskFunction
from attention_core.parameters import Linear, MultiHeadAttention
from attention_core.scores import ScoreMod

B, H, M, N, D = 2, 3, 4, 5, 6
FORMS = {
    "dense": {"implementation": "dense"},
    "auto": {},
    "blockwise": {"implementation": "blockwise"},
    "reproducible": {"arithmetic": "reproducible"},
}


def constant(array):
    """A function that returns an array, whatever the positions."""
    return lambda b, h, q, k: array


@dataclass(frozen=True, eq=False)
class Forgotten(Mask):
    """A rule of a user without a return."""

    def allowed(self, at, /, *, xp):
        xp.less_equal(at.key, at.query)


MASKS = {
    "nothing of a rule": (lambda put: Forgotten(), TypeError),
    "nothing": (lambda put: lambda b, h, q, k: None, TypeError),
    "a flag": (lambda put: lambda b, h, q, k: True, TypeError),
    "numbers": (lambda put: lambda b, h, q, k: q - k, TypeError),
    "an additive mask": (lambda put: constant(put(np.zeros((M, N), "float32"))), TypeError),
    "other lengths": (lambda put: constant(put(np.ones((M, N + 2), bool))), ValueError),
    "other heads": (lambda put: constant(put(np.ones((H + 1, M, N), bool))), ValueError),
    "more axes": (lambda put: constant(put(np.ones((1, B, H, M, N), bool))), ValueError),
}  # fmt: skip
SCORES = {
    "nothing": (lambda put: lambda s, b, h, q, k: None, TypeError),
    "a number": (lambda put: lambda s, b, h, q, k: 1.0, TypeError),
    "a mask": (lambda put: lambda s, b, h, q, k: s > 0, TypeError),
    "positions": (lambda put: lambda s, b, h, q, k: q - k, TypeError),
    "one axis more": (lambda put: lambda s, b, h, q, k: s[None, ...], ValueError),
    "one key": (lambda put: lambda s, b, h, q, k: s[..., :1], ValueError),
}  # fmt: skip


def arrays(put, rng):
    return put([rng.standard_normal((B, H, length, D)).astype("float32") for length in (M, N, N)])


@pairwise(name=MASKS, form=FORMS, mask=["rule", "causal & rule", "~rule"])
def test_the_result_of_a_mask_function_is_a_boolean_array_for_its_positions(name, form, mask, put, rng):
    make, error = MASKS[name]
    rule = make(put) if name == "nothing of a rule" else MaskFunction(make(put))
    mask = {"rule": rule, "causal & rule": Causal() & rule, "~rule": ~rule}[mask]
    with pytest.raises(error):
        ac.scaled_dot_product_attention(*arrays(put, rng), mask=mask, **FORMS[form])


@pairwise(name=SCORES, form=[form for form in FORMS if form != "reproducible"], is_mod=[True, False])
def test_the_result_of_a_score_mod_is_like_its_scores(name, form, is_mod, put, rng):
    make, error = SCORES[name]
    score_mod = ScoreMod(make(put)) if is_mod else make(put)
    with pytest.raises(error):
        ac.scaled_dot_product_attention(*arrays(put, rng), score_mod=score_mod, **FORMS[form])


@pytest.mark.needs("compilation")
@pytest.mark.parametrize(("name", "form"), [("mask", "blockwise"), ("score_mod", "dense")])
def test_results_of_functions_are_checked_while_a_compiler_traces(name, form, backend, put, rng):
    make, _ = MASKS["other lengths"] if name == "mask" else SCORES["one key"]
    option = {name: MaskFunction(make(put)) if name == "mask" else make(put)}
    call = functools.partial(ac.scaled_dot_product_attention, **option, **FORMS[form])
    with pytest.raises(
        Exception, match="expected the result of "
    ):  # compilers may put text of theirs around the message
        backend.compile(call, mode=backend.modes[-1])(*arrays(put, rng))


def test_prepare_gets_values(put, get, rng):
    same = Linear(put(np.eye(D, dtype="float32")))
    tree, x = MultiHeadAttention(same, same, same), put(rng.standard_normal((B, M, D)).astype("float32"))
    plain, flipped = (
        get(ac.multi_head_attention(tree, x, num_heads=2, prepare=prepare))
        for prepare in (None, lambda query, key, value: (query, key, -value))
    )
    np.testing.assert_array_equal(flipped, -plain)


def test_a_frame_is_no_mask(put, rng):
    frame = pytest.importorskip("pandas").DataFrame(np.ones((M, N), bool))
    with pytest.raises(TypeError):
        ac.scaled_dot_product_attention(*arrays(put, rng), mask=frame)


def test_functions_take_all_their_arguments():
    for function in (
        lambda *at: at[2] >= at[3],
        lambda b, h, q, k, n=0: q >= k,
        functools.partial(lambda n, *at: n, 1),
    ):
        MaskFunction(function)


def branching(b, h, q, k):
    if q >= k:
        return q >= k
    return q < k


@pytest.mark.parametrize("form", FORMS)
def test_functions_do_not_ask_whether_an_array_is_true(form, put, rng):
    for function in (branching, lambda b, h, q, k: q >= k and h == 0, lambda b, h, q, k: not (q < k)):
        with pytest.raises(TypeError):
            ac.scaled_dot_product_attention(*arrays(put, rng), mask=MaskFunction(function), **FORMS[form])
    if form != "reproducible":
        with pytest.raises(TypeError):
            ac.scaled_dot_product_attention(
                *arrays(put, rng), score_mod=lambda s, b, h, q, k: s if s > 0 else -s, **FORMS[form]
            )


def test_errors_of_functions_are_their_own(put, rng):
    def broken(b, h, q, k):
        raise KeyError("of the user")

    with pytest.raises(KeyError):
        ac.scaled_dot_product_attention(*arrays(put, rng), mask=MaskFunction(broken))


@pytest.mark.needs("tensorflow")
@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_blocks_take_no_watched_tensor_that_a_score_mod_closes_over(mode, put, rng):
    tf = importlib.import_module("tensorflow")
    q, k, v = arrays(put, rng)
    weight = put(np.float32(2.0))

    def gradient(weight, watched):
        with tf.GradientTape() as tape:
            tape.watch((weight, q) if watched else q)
            y = ac.scaled_dot_product_attention(q, k, v, score_mod=lambda s, *_: s * weight, implementation="blockwise")
        return tape.gradient(y, q)

    run = gradient if mode == "eager" else tf.function(gradient)
    assert run(weight, False).shape == q.shape
    with pytest.raises(ValueError):
        run(weight, True)


@pytest.mark.needs("torch")
@pytest.mark.parametrize("mode", ["eager", "compiled", "transformed"])
def test_blocks_take_no_variable_that_a_score_mod_closes_over(mode, backend, put, rng):
    """Their gradient would not reach it, where that of `ScoreMod` reaches its arrays."""
    q, k, v = arrays(put, rng)
    message = r"a score_mod whose arrays with a gradient are those of ScoreMod\(function, arrays\); got one that closes"

    def attend(table, score_mod, form):
        modify = (
            ScoreMod(lambda s, b, h, q, k, t: s + t[k], (table,)) if score_mod else lambda s, b, h, q, k: s + table[k]
        )
        return (ac.scaled_dot_product_attention(q, k, v, score_mod=modify, **FORMS[form])[..., 0]).sum()

    table = put(rng.standard_normal(N).astype("float32"))
    attend(table, False, "blockwise")
    _, (want,) = backend.value_and_grad(functools.partial(attend, score_mod=False, form="dense"))(table)
    _, (got,) = backend.value_and_grad(functools.partial(attend, score_mod=True, form="blockwise"))(table)
    np.testing.assert_allclose(backend.to_numpy(got), backend.to_numpy(want), atol=1e-6)
    captured = functools.partial(attend, score_mod=False, form="blockwise")
    import torch

    if mode == "transformed":
        run = torch.func.grad(captured)
    else:
        table.requires_grad_()
        with torch.no_grad():
            captured(table)
        run = captured if mode == "eager" else torch.compile(captured, fullgraph=True, backend="eager")
    with pytest.raises(Exception if mode == "compiled" else ValueError, match=message):
        run(table)
