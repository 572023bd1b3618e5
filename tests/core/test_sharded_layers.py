"""Layers whose sequence ranks share: the numbers of one process, gradients of parameters summed. Threads are ranks."""

import numpy as np
import pytest
from shard_helpers import in_order

import attention_core as ac
import attention_models as models
from attention_core import layers

pytestmark = pytest.mark.needs(lambda backend: backend.name in ("torch", "numpy"))  # numbers, and gradients
DECODER = {"num_key_value_heads": 2, "query_key_norm": True}
LAYERS = {
    "multi head": (layers.MultiHeadAttention(8, 4, num_key_value_heads=2), {"bias": True}),
    "encoder": (layers.EncoderLayer(8, 4, 12, is_causal=True), {}),
    "encoder, key mask": (layers.EncoderLayer(8, 4, 12, norm_first=False), {"key_mask": True}),
    "encoder, bias": (layers.EncoderLayer(8, 4, 12), {"bias": True}),
    "decoder layer": (layers.DecoderLayer(8, 4, 12, **DECODER), {"key_mask": True}),
    "decoder layer, window": (layers.DecoderLayer(8, 4, 12, window=3, **DECODER), {}),
    "decoder": (models.Decoder(11, 8, 4, 12, num_layers=2, window=(3, None), **DECODER), {}),
}
WAYS = (
    (3, "contiguous", "gather", 13),
    (4, "zigzag", "ring", 13),
    (2, "zigzag", "heads", 16),
    (2, "contiguous", "auto", 16),
)


def problem(layer, length, put, asked):
    """Parameters, an input, its options, and a cotangent of the output."""
    rng = np.random.default_rng(3)
    of_tokens = isinstance(layer, models.Decoder)
    x = rng.integers(0, 11, (2, length)) if of_tokens else rng.normal(size=(2, length, 8))
    masked = np.arange(length) < np.asarray([[length], [length - 4]])
    options = {name: put(masked if name == "key_mask" else rng.normal(size=(4, length, length))) for name in asked}
    return (
        put(x.astype(np.int32) if of_tokens else x),
        options,
        put(rng.normal(size=(2, length, 11 if of_tokens else 8))),
    )


def computed(backend, layer, parameters, x, options, cotangent):
    """The output, and where there are gradients, those of the parameters."""

    def loss(parameters):
        return backend.namespace.sum(layer(parameters, x, **options) * cotangent)

    output = backend.to_numpy(layer(parameters, x, **options))
    gradients = backend.value_and_grad(loss)(parameters)[1][0] if backend.differentiates else ()
    return output, [*layers.named_arrays(backend.to_numpy(gradients)).values()]


@pytest.mark.parametrize("name", LAYERS)
def test_ranks_have_the_numbers_and_the_gradients_of_the_whole(name, backend, put, ranks):
    layer, asked = LAYERS[name]
    parameters = layer.init(0, dtype="float64", xp=backend.namespace)
    for size, split, strategy, length in WAYS:
        x, options, cotangent = problem(layer, length, put, asked)
        want, wanted = computed(backend, layer, parameters, x, options, cotangent)

        def of_rank(group, split=split, strategy=strategy, length=length, x=x, options=options, cotangent=cotangent):
            shards = ac.Shards(group, split, strategy, length)
            ours = {key: ac.shard(each, shards) if key == "bias" else each for key, each in options.items()}
            part = ac.shard(x, shards, axis=-1 if x.ndim == 2 else -2)
            return computed(backend, layer, parameters, part, ours | {"shards": shards}, ac.shard(cotangent, shards))

        found = ranks(size, of_rank)
        output = in_order([each for each, _ in found], -2, size, split, length)
        np.testing.assert_allclose(output, want, rtol=0, atol=1e-12, err_msg=strategy)
        for index, expected in enumerate(wanted):
            total = sum(gradients[index] for _, gradients in found)
            np.testing.assert_allclose(total, expected, rtol=0, atol=1e-11, err_msg=f"{strategy} {index}")


def test_layers_in_reproducible_arithmetic_have_the_bits_of_the_whole(backend, put, ranks):
    layer = models.Decoder(11, 8, 4, 12, num_layers=2, arithmetic="reproducible")
    parameters = layer.init(0, xp=backend.namespace)
    x, _, _ = problem(layer, 13, put, {})

    def of_rank(group):
        shards = ac.Shards(group, length=13)
        return backend.to_numpy(layer(parameters, ac.shard(x, shards, axis=-1), shards=shards))

    found = in_order(ranks(3, of_rank), -2, 3, "zigzag", 13)
    assert found.tobytes() == backend.to_numpy(layer(parameters, x)).tobytes()


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("decoder layer", {"cache": "empty"}),
        ("decoder layer", {"num_new": 3}),
        ("decoder layer", {"mask": "short"}),
        ("encoder", {"return_weights": True}),
        ("encoder", {"mask": "short"}),
        ("dropout", {"seed": 0}),
    ],
)
def test_what_needs_the_whole_is_told_on_each_rank(name, options, backend, put, ranks):
    layer = layers.EncoderLayer(8, 4, 12, dropout=0.5) if name == "dropout" else LAYERS[name][0]
    xp = backend.namespace
    parameters = layer.init(0, dtype="float64", xp=xp)
    x, _, _ = problem(layer, 16, put, {})
    made = {
        "cache": lambda _: layer.empty_cache((2,), 16, dtype=xp.float64, xp=xp),
        "mask": lambda _: put(np.ones((8, 8), bool)),
        "num_new": lambda count: put(np.asarray(count)),
    }

    def of_rank(group):
        shards = ac.Shards(group)
        settled = {key: made[key](each) if key in made else each for key, each in options.items()}
        with pytest.raises((TypeError, ValueError)):
            layer(parameters, ac.shard(x, shards), shards=shards, **settled)

    ranks(2, of_rank)
