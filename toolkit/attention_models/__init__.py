"""Language models on the layers of `attention_core`: the decoder, its texts, and weights of other libraries.

The modules `torch`, `jax`, `jax.nnx` and `keras` have the decoder as a layer of a framework.
"""

from attention_core._keywords import publish
from attention_models._decoder import DecoderCache, decoder, empty_decoder_cache
from attention_models._definition import Decoder
from attention_models._generation import Generated, check_prompts, generate
from attention_models._prepared import prepare_weights
from attention_models._sampling import sample_tokens

__all__ = [
    "Decoder",
    "DecoderCache",
    "Generated",
    "check_prompts",
    "decoder",
    "empty_decoder_cache",
    "generate",
    "prepare_weights",
    "sample_tokens",
]

publish(vars(), __all__)
