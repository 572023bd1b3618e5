"""Weights that are cut into slices once: the same bits, in four times the memory, without a gradient."""

import numpy as np
import pytest

from attention_core import multi_head_attention
from attention_core._arithmetic import reproducible
from attention_core.functions import linear
from attention_core.layers import EncoderLayer, named_arrays
from attention_core.parameters import Linear
from attention_models import Decoder, generate, prepare_weights

EXACT = {"arithmetic": "reproducible"}
SETTINGS = {"num_layers": 2, "num_key_value_heads": 2, **EXACT}


def numbers(*dims, spread=0):
    rng = np.random.default_rng(dims)
    return (rng.normal(size=dims) * 2.0 ** rng.integers(-spread, spread + 1, size=dims)).astype(np.float32)


def same(backend, ours, theirs):
    ours, theirs = (np.asarray(backend.to_numpy(each)) for each in (ours, theirs))
    assert ours.dtype == theirs.dtype
    np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("sizes", [(7, 5), (1, 3), (4100, 2)])
def test_a_prepared_weight_gives_the_same_bits(backend, sizes):
    weight, bias = numbers(*sizes, spread=60), numbers(sizes[1], spread=9)
    weight[:, 1] = 0.0
    x = backend.from_numpy(numbers(2, 3, sizes[0], spread=30))
    for each in (Linear(weight), Linear(weight, bias)):
        parameters = backend.from_numpy(each)
        same(backend, linear(prepare_weights(parameters), x, **EXACT), linear(parameters, x, **EXACT))


def test_infinities_and_nan_stay_in_their_column(backend):
    weight = numbers(4, 3)
    weight[1, 0], weight[2, 2] = np.inf, np.nan
    parameters, x = backend.from_numpy((Linear(weight), numbers(2, 4)))
    same(backend, linear(prepare_weights(parameters), x, **EXACT), linear(parameters, x, **EXACT))


@pytest.mark.parametrize("tied", [True, False])
def test_prepared_parameters_go_wherever_parameters_go(backend, tied):
    model = Decoder(20, 12, 6, 16, tied=tied, attention_bias=True, **SETTINGS)
    parameters, ids = backend.from_numpy((model.init(0, xp=np), np.asarray([[3, 14, 15], [9, 2, 6]], np.int32)))
    prepared = prepare_weights(parameters)
    same(backend, model(prepared, ids), model(parameters, ids))
    ours, theirs = (generate(model, each, ids, max_new_tokens=2).token_ids for each in (prepared, parameters))
    same(backend, ours, theirs)
    with pytest.raises(TypeError):
        model.with_settings(arithmetic="fast")(prepared, ids)


def test_prepared_parameters_in_lists_and_dicts_and_of_16_bits(backend, xp):
    layer = EncoderLayer(8, 2, 24, **EXACT)
    for dtype in ("float32", *(kind for kind in ("float16",) if kind in backend.dtypes)):
        parameters = backend.from_numpy(layer.init(3, xp=np), dtype=dtype)
        x = xp.astype(backend.from_numpy(numbers(2, 5, 8)), parameters.feed_forward.expand.weight.dtype)
        prepared = prepare_weights({"layers": [parameters]})["layers"][0]
        assert prepared.feed_forward.expand.weight.dtype == parameters.feed_forward.expand.weight.dtype
        same(backend, xp.astype(layer(prepared, x), xp.float32), xp.astype(layer(parameters, x), xp.float32))
        heads = (multi_head_attention(each.attention, x, num_heads=2, **EXACT) for each in (prepared, parameters))
        same(backend, *(xp.astype(each, xp.float32) for each in heads))
        assert prepare_weights(prepared).attention.query.weight.low is prepared.attention.query.weight.low


def test_no_weight_is_cut_again(monkeypatch):
    parameters, x = Linear(numbers(6, 5)), numbers(3, 6)
    prepared, expected = prepare_weights(parameters), linear(parameters, x, **EXACT)
    monkeypatch.setattr(reproducible, "cut_columns", None)
    np.testing.assert_array_equal(linear(prepared, x, **EXACT), expected)
    with pytest.raises(TypeError):
        linear(parameters, x, **EXACT)


def test_prepared_weights_take_four_times_the_memory_of_float32():
    parameters = Decoder(200, 48, 6, 96, tied=False, **SETTINGS).init(0, xp=np)
    bytes_of = [
        sum(array.nbytes for array in named_arrays(each.layers).values())
        for each in (prepare_weights(parameters), parameters)
    ]
    assert 4 <= bytes_of[0] / bytes_of[1] <= 4.2


@pytest.mark.needs("gradients")
def test_nothing_is_differentiated_by_what_is_prepared(backend, xp):
    prepared, x = prepare_weights(backend.from_numpy(Linear(numbers(4, 3)))), backend.from_numpy(numbers(2, 4))
    with pytest.raises(TypeError):
        backend.value_and_grad(lambda x: xp.sum(linear(prepared, x, **EXACT)))(x)
