"""Calls of the public functions that have a boolean option, for tests of options and arguments."""

import functools

import numpy as np
from fuzz_calls import VALID, built
from layer_helpers import CASES, definition_of, perturbed

import attention_core as ac
import attention_models as models
from attention_core import layers
from attention_models import layouts

C, L = 8, 6


def functions(put):
    """Right calls of functions of arrays, as functions of options."""
    calls = [built(valid, put) for valid in VALID.values() if hasattr(valid.function, "__name__")]  # others: methods
    return {
        each.function.__name__: functools.partial(each.function, *each.positional, **each.options) for each in calls
    }


def of_layers(put):
    """How layers are made, and right calls of them."""
    for name, (settings, inputs, options) in CASES.items():
        kind = definition_of(name)
        layer = kind(**settings)
        tree, state = put(perturbed(layer))
        options = {key: put(each) if isinstance(each, np.ndarray) else each for key, each in options.items()}
        options |= {"state": state} if state else {}
        yield name, functools.partial(kind, **settings)
        yield f"{name}.__call__", functools.partial(layer, tree, *put(inputs, dtype="float32"), **options)


@functools.cache
def calls(put, xp):
    """Every public function with a boolean option, as a function of options."""
    x = put(np.ones((L, C), "float32"))
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
    part = functools.partial
    return {
        **functions(put),
        **dict(of_layers(put)),
        "config_context": ac.config_context,
        "decoder_layer": part(ac.functions.decoder_layer, of_layer, x, num_heads=2),
        "decoder": part(models.decoder, of_decoder, ids, num_heads=2),
        "generate": part(models.generate, decoder, of_decoder, ids, max_new_tokens=1),
        "empty_decoder_cache": part(models.empty_decoder_cache, 1, (2,), 2, 4, 3, xp=xp),
        "empty_cache": part(ac.cache.empty_cache, (2,), 2, 4, 3, xp=xp),
        "from_torch_encoder_layer": part(layouts.from_torch_encoder_layer, encoder, num_heads=2),
        "from_torch_decoder_layer": part(layouts.from_torch_decoder_layer, of_torch, num_heads=2),
        "from_torch": part(layouts.from_torch, weights, num_heads=2),
    }
