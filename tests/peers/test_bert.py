"""A BERT of transformers, random and small, reproduced out of the embeddings and the post-norm encoder layer.

``ATTENTION_CORE_PEERS=1`` makes transformers (and PyTorch, in which it computes) required; without it, their absence skips
these tests.
"""

import importlib

import numpy as np
import pytest

import attention_core as ac
from attention_core.backend import get_backend
from attention_core.parameters import Embeddings, EncoderLayer, FeedForward, LayerNorm, Linear, MultiHeadAttention

HEADS, LAYERS, BATCH, LENGTH = 4, 2, 3, 11
LENGTHS = np.asarray([LENGTH, 7, 4])
EPSILON = 1e-12

# transformers and PyTorch announce what they deprecate in one another; none of it is about these numbers.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


def perturbed(model, torch):
    """Every parameter random, biases and normalizations too, which a new model sets to 0 and 1."""
    generator = torch.Generator().manual_seed(31)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype))
    return model.eval()


def embeddings_of(weights):
    norm = LayerNorm(weights["embeddings.LayerNorm.weight"], weights["embeddings.LayerNorm.bias"])
    tables = (weights[f"embeddings.{name}_embeddings.weight"] for name in ("word", "position", "token_type"))
    return Embeddings(*tables, norm)


def layer_of(weights, prefix):
    """One layer of the encoder: transformers holds weights as (out, in)."""

    def linear(name):
        return Linear(weights[f"{prefix}.{name}.weight"].T, weights[f"{prefix}.{name}.bias"])

    def norm(name):
        return LayerNorm(weights[f"{prefix}.{name}.weight"], weights[f"{prefix}.{name}.bias"])

    projections = (linear(f"attention.self.{name}") for name in ("query", "key", "value"))
    return EncoderLayer(
        MultiHeadAttention(*projections, linear("attention.output.dense")),
        norm("attention.output.LayerNorm"),
        FeedForward(linear("intermediate.dense"), linear("output.dense")),
        norm("output.LayerNorm"),
    )


@pytest.fixture(scope="module")
def bert():
    """Parameters, inputs and hidden states of the model, by dtype, in NumPy."""
    transformers, torch = importlib.import_module("transformers"), importlib.import_module("torch")
    config = transformers.BertConfig(
        vocab_size=97,
        hidden_size=32,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        intermediate_size=48,
        max_position_embeddings=19,
        layer_norm_eps=EPSILON,
        attn_implementation="eager",
    )
    model = perturbed(transformers.BertModel(config, add_pooling_layer=False).double(), torch)
    rng = np.random.default_rng(5)
    tokens, segments = rng.integers(0, 97, (BATCH, LENGTH)), rng.integers(0, 2, (BATCH, LENGTH))
    attended = (np.arange(LENGTH) < LENGTHS[:, None]).astype(np.int64)
    inputs = {"input_ids": tokens, "token_type_ids": segments, "attention_mask": attended}
    with torch.no_grad():
        states = model(**{name: torch.from_numpy(array) for name, array in inputs.items()}).last_hidden_state.numpy()
        defaults = model(input_ids=torch.from_numpy(tokens)).last_hidden_state.numpy()
    weights = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    parameters = embeddings_of(weights), [layer_of(weights, f"encoder.layer.{index}") for index in range(LAYERS)]
    return parameters, inputs, states, defaults


def encode(backend, parameters, tokens, segments, mask, dtype):
    embeddings, layers = backend.from_numpy(parameters, dtype=dtype)
    segments = None if segments is None else backend.from_numpy(segments)
    x = ac.functions.embed_tokens(embeddings, backend.from_numpy(tokens), segment_ids=segments, epsilon=EPSILON)
    for layer in layers:
        x = ac.functions.encoder_layer(layer, x, num_heads=HEADS, norm_first=False, mask=mask, epsilon=EPSILON)
    return backend.to_numpy(x)


def largest_error(actual, expected):
    return np.max(np.abs(actual.astype(np.float64) - expected))


def masks(backend, attended):
    """The padding of a batch, said in two ways."""
    return {
        "lengths": ac.KeyLengths(backend.from_numpy(LENGTHS)),
        "integers": ac.masks.mask_from_padding(ac.masks.mask_from_integers(backend.from_numpy(attended))),
    }


@pytest.mark.needs("torch", "transformers")
@pytest.mark.parametrize("padding", ["lengths", "integers"])
def test_bert_in_float64_to_1e_14(backend, bert, padding):
    parameters, inputs, states, _ = bert
    mask = masks(backend, inputs["attention_mask"])[padding]
    actual = encode(backend, parameters, inputs["input_ids"], inputs["token_type_ids"], mask, "float64")
    assert actual.dtype == np.float64
    assert largest_error(actual, states) < 1e-14  # padded positions included: they attend to the same keys


@pytest.mark.needs("torch", "transformers")
def test_bert_without_mask_and_segments(backend, bert):
    parameters, inputs, _, defaults = bert
    actual = encode(backend, parameters, inputs["input_ids"], None, None, "float64")
    assert largest_error(actual, defaults) < 1e-14


@pytest.mark.needs("torch", "transformers")
def test_bert_in_float32(backend, bert):
    parameters, inputs, states, _ = bert
    mask = masks(backend, inputs["attention_mask"])["lengths"]
    actual = encode(backend, parameters, inputs["input_ids"], inputs["token_type_ids"], mask, "float32")
    assert actual.dtype == np.float32
    assert largest_error(actual, states) < 5e-6


@pytest.mark.needs("torch", "transformers")
def test_bert_of_one_sample_alone_is_that_of_the_batch(backend, bert):
    """Padding changes nothing: a sample cut to its length has the states that it has in the padded batch."""
    parameters, inputs, states, _ = bert
    for sample, length in enumerate(LENGTHS):
        tokens, segments = (inputs[name][sample, :length] for name in ("input_ids", "token_type_ids"))
        actual = encode(backend, parameters, tokens, segments, None, "float64")
        assert largest_error(actual, states[sample, :length]) < 1e-14


@pytest.mark.needs("torch", "transformers")
def test_bert_told_apart_from_its_neighbours(bert):
    """The tolerance sees an epsilon of 1e-6 in place of 1e-12, and heads cut wrongly."""
    parameters, inputs, _, defaults = bert
    backend = get_backend("numpy")
    embeddings, layers = parameters
    x = ac.functions.embed_tokens(embeddings, inputs["input_ids"], epsilon=EPSILON)
    other_epsilon, other_heads = x, x
    for layer in layers:
        other_epsilon = ac.functions.encoder_layer(
            layer, other_epsilon, num_heads=HEADS, norm_first=False, epsilon=1e-6
        )
        other_heads = ac.functions.encoder_layer(
            layer, other_heads, num_heads=2 * HEADS, norm_first=False, epsilon=EPSILON
        )
    for other in (other_epsilon, other_heads):
        assert largest_error(backend.to_numpy(other), defaults) > 1e-7
