"""Two models on the same input: where they part, and which mistake it was."""

import numpy as np
import pytest

from attention_conformance import compare
from attention_core import layers
from attention_files.safetensors import save_layer, save_layers

pytestmark = [
    pytest.mark.needs("torch"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"),
]
ENCODER = (
    layers.Embeddings(31, 12, 24, num_segments=2),
    *[layers.EncoderLayer(24, 4, 40, norm_first=False, epsilon=1e-12)] * 2,
)
DECODER = layers.Decoder(37, 24, 6, 28, 2, num_key_value_heads=2, head_dim=8, attention_bias=True)


def drawn(definition, seed):
    """Parameters of which none is 0 or 1."""
    rng = np.random.default_rng(seed)
    named = layers.named_arrays(definition.init(seed, xp=np))
    arrays = {name: (each + rng.normal(0, 0.2, each.shape)).astype(np.float32) for name, each in named.items()}
    return layers.tree_from_names(definition.parameters, arrays)


TREES = tuple(drawn(each, seed) for seed, each in enumerate(ENCODER))
TREE = drawn(DECODER, 3)


@pytest.fixture
def encoder(tmp_path):
    save_layers(tmp_path / "encoder.safetensors", ENCODER, TREES)
    return tmp_path / "encoder.safetensors"


@pytest.fixture
def decoder(tmp_path):
    save_layer(tmp_path / "decoder.safetensors", DECODER, TREE)
    return tmp_path / "decoder.safetensors"


def names(found):
    return [each.name for each in found.causes]


MISTAKES = (
    "mask-sense",
    "scale",
    "head-order",
    "epsilon",
    "kind-of-gelu",
    "transposed-weight",
    "missing-bias",
    "dtype",
)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_of_porting_an_encoder_is_named(encoder, mistake):
    from ported_models import Encoder

    found = compare(encoder, Encoder(ENCODER, TREES, mistake))
    assert not found.agrees
    assert names(found) == [mistake]


@pytest.mark.parametrize(
    "mistake", ["rotary-pairs", "mask-sense", "scale", "head-order", "epsilon", "transposed-weight"]
)
def test_a_mistake_of_porting_a_decoder_is_named(decoder, mistake):
    from ported_models import Decoder

    found = compare(decoder, Decoder(DECODER, TREE, mistake))
    assert not found.agrees
    assert names(found) == [mistake]


def test_honest_ports_have_nothing(encoder, decoder):
    from ported_models import Decoder, Encoder

    for found in (compare(encoder, Encoder(ENCODER, TREES)), compare(Decoder(DECODER, TREE), decoder)):
        assert found.agrees
        assert found.causes == found.weights == ()
        assert max(each.ulps for each in found.places) < found.bound / 4
