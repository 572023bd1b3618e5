"""Calls of the public functions that have a boolean option, for tests of options and arguments."""

import functools

import numpy as np
from fuzz_calls import VALID, built

import attention_core as ac
import attention_models as models
from attention_core import layers
from attention_core.parameters import FeedForward, LayerNorm, Linear, MultiHeadAttention
from attention_models import layouts

C, L = 8, 6


def parameters(put):
    """Trees of parameters of C channels: one affine map everywhere."""
    same = Linear(put(np.eye(C, dtype="float32")))
    norm = LayerNorm(*(put(np.ones(C, "float32")) for _ in range(2)))
    return MultiHeadAttention(same, same, same, same), FeedForward(same, same), norm, same


def functions(put):
    """Right calls of functions of arrays, as functions of options."""
    for_library = functools.partial(built, put=put)
    return {
        valid.function.__name__: functools.partial(
            valid.function,
            *map(for_library, valid.positional),
            **dict(zip(valid.options, map(for_library, valid.options.values()), strict=True)),
        )
        for valid in VALID.values()
        if hasattr(valid.function, "__name__")  # others are of methods
    }


@functools.cache
def calls(put, xp):
    """Every public function with a boolean option, as a function of options."""
    attention, feed, norm, same = parameters(put)
    x, image = put(np.ones((L, C), "float32")), put(np.ones((2, 4, C), "float32"))
    layer = ac.parameters.EncoderLayer(attention, norm, feed, norm)
    sagan = ac.parameters.SaganAttention(same, same, same, same, put(np.zeros((), "float32")))
    of_torch = {"norm": "layer", "gated": False, "rotary_base": None, "memory_channels": C}
    of_torch |= {"attention_bias": True, "feed_forward_bias": True}
    weights, encoder, of_torch = (
        layouts.LAYOUTS[f"torch{name}"].write(each, put(each.init(0, xp=np)))
        for name, each in (
            ("", layers.MultiHeadAttention(C, 2)),
            ("-encoder-layer", layers.EncoderLayer(C, 2, C)),
            ("-decoder-layer", layers.DecoderLayer(C, 2, C, **of_torch)),
        )
    )
    decoder_layer, decoder = layers.DecoderLayer(C, 2, C), models.Decoder(5, C, 2, C, 1)
    of_layer, of_decoder, ids = put((decoder_layer.init(0, xp=np), decoder.init(0, xp=np), np.zeros((1, L), "int32")))
    return functions(put) | {
        "config_context": ac.config_context,
        "decoder_layer": lambda **options: ac.functions.decoder_layer(of_layer, x, num_heads=2, **options),
        "decoder": lambda **options: models.decoder(of_decoder, ids, num_heads=2, **options),
        "generate": lambda **options: models.generate(decoder, of_decoder, ids, max_new_tokens=1, **options),
        "empty_decoder_cache": lambda **options: models.empty_decoder_cache(1, (2,), 2, 4, 3, xp=xp, **options),
        "empty_cache": lambda **options: ac.cache.empty_cache((2,), 2, 4, 3, xp=xp, **options),
        "from_torch_encoder_layer": lambda **options: layouts.from_torch_encoder_layer(encoder, num_heads=2, **options),
        "from_torch_decoder_layer": lambda **options: layouts.from_torch_decoder_layer(
            of_torch, num_heads=2, **options
        ),
        "from_torch": lambda **options: layouts.from_torch(weights, num_heads=2, **options),
        "DotProductAttention": lambda **options: layers.DotProductAttention(**options),
        "MultiHeadAttention": lambda **options: layers.MultiHeadAttention(C, 2, **options),
        "EncoderLayer": lambda **options: layers.EncoderLayer(C, 2, 4, **options),
        "DecoderLayer": lambda **options: layers.DecoderLayer(C, 2, C, **options),
        "Decoder": lambda **options: models.Decoder(5, C, 2, C, 1, **options),
        "GatedFeedForward": lambda **options: layers.GatedFeedForward(C, C, **options),
        "FeedForward": lambda **options: layers.FeedForward(C, 4, **options),
        "Embeddings": lambda **options: layers.Embeddings(5, 5, C, **options),
        "SaganAttention": lambda **options: layers.SaganAttention(C, **options),
        "DotProductAttention.__call__": lambda **options: layers.DotProductAttention()((), x, **options),
        "MultiHeadAttention.__call__": lambda **options: layers.MultiHeadAttention(C, 2)(attention, x, **options),
        "EncoderLayer.__call__": lambda **options: layers.EncoderLayer(C, 2, C)(layer, x, **options),
        "DecoderLayer.__call__": lambda **options: decoder_layer(of_layer, x, **options),
        "Decoder.__call__": lambda **options: decoder(of_decoder, ids, **options),
        "SaganAttention.__call__": lambda **options: layers.SaganAttention(
            C, head_channels=C, value_channels=C, spectral_norm=False
        )(sagan, image, **options),
    }
