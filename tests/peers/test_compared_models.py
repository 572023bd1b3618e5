"""Models of transformers, Keras and flax next to ours, place by place, on several frameworks."""

import importlib
import os

import numpy as np
import pytest

from attention_conformance import compare

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
SIZES = {"hidden_size": 24, "num_hidden_layers": 2, "intermediate_size": 40, "max_position_embeddings": 16}
CONFIGS = {
    "bert": {"num_attention_heads": 4, "hidden_act": "gelu_new"},
    "roberta": {"num_attention_heads": 4, "pad_token_id": 1},
    "llama": {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 8, "attention_bias": True},
}


@pytest.fixture(scope="module", params=CONFIGS)
def folder(request, tmp_path_factory):
    """A small random model of transformers, saved."""
    torch, transformers = importlib.import_module("torch"), importlib.import_module("transformers")
    config = transformers.AutoConfig.for_model(request.param, vocab_size=37, **SIZES | CONFIGS[request.param])
    kinds = transformers.AutoModel, transformers.AutoModelForCausalLM
    model = kinds["head_dim" in CONFIGS[request.param]].from_config(config)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, each in model.named_parameters():
            if "position_embeddings" not in name:  # a row of zeros tells where positions begin
                each.add_(0.1 * torch.randn(each.shape, generator=generator))
    path = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(path)
    return path


@pytest.mark.needs("torch", "transformers")
@pytest.mark.parametrize("framework", ["numpy", "torch", "jax", "keras"])
def test_a_model_of_transformers_agrees_with_ours(folder, framework):
    asked = os.environ.get("ATTENTION_CORE_BACKENDS", framework).split(",")
    if framework not in ("keras", *asked) or importlib.util.find_spec(framework) is None:
        pytest.skip(f"no {framework}")
    found = compare(str(folder), f"{framework}:{folder}")
    assert found.agrees
    assert found.weights == found.settings == ()
    assert {f"layers.{at}{part}" for at in (0, 1) for part in ("", ".attention", ".feed_forward")} <= {
        each.name for each in found.places
    }
    assert sum(each.is_heads for each in found.places) == 8
    assert all(each.other == each.name for each in found.places)


def drawn(*shape):
    return np.random.default_rng(len(shape)).normal(size=shape).astype(np.float32)


@pytest.mark.needs("jax", "keras", "flax")
def test_attention_of_keras_and_flax_agrees_with_the_layers_made_of_it():
    keras, nnx = importlib.import_module("keras"), importlib.import_module("flax.nnx")
    theirs = keras.layers.MultiHeadAttention(4, 6)
    theirs.build((None, None, 24), (None, None, 24))
    ours = importlib.import_module("attention_models.keras.conversion").from_module(theirs)
    module = nnx.MultiHeadAttention(4, 24, 24, 24, decode=False, rngs=nnx.Rngs(0))
    layer = importlib.import_module("attention_models.jax.conversion").from_module(module)
    for pair in ((theirs, ours), (layer, module)):
        found = compare(*pair)
        assert found.agrees
        assert found.same_weights == 8
        assert sum(each.is_heads for each in found.places) == 4


@pytest.mark.needs("jax", "keras", "flax")
@pytest.mark.parametrize("epsilon", [1e-5, 1e-2])
def test_a_model_of_keras_and_its_port_to_flax_are_paired_by_their_numbers(epsilon, tmp_path):
    keras, nnx, jax = (importlib.import_module(name) for name in ("keras", "flax.nnx", "jax"))

    class Block(nnx.Module):
        def __init__(self, rngs):
            self.attention = nnx.MultiHeadAttention(4, 24, 24, 24, decode=False, rngs=rngs)
            self.norm = nnx.LayerNorm(24, epsilon=epsilon, rngs=rngs)
            self.up, self.down = nnx.Linear(24, 40, rngs=rngs), nnx.Linear(40, 24, rngs=rngs)

        def __call__(self, x):
            x = self.norm(x + self.attention(x))
            return x + self.down(jax.nn.relu(self.up(x)))

    block = Block(nnx.Rngs(1))
    inputs = keras.Input((9, 24))
    x = keras.layers.Add()([inputs, keras.layers.MultiHeadAttention(4, 6)(inputs, inputs)])
    x = keras.layers.LayerNormalization(epsilon=1e-5)(x)
    model = keras.Model(inputs, keras.layers.Add()([x, keras.layers.Dense(24)(keras.layers.Dense(40, "relu")(x))]))
    attention, norm = block.attention, block.norm
    held = [
        each
        for part in (attention.query, attention.key, attention.value, attention.out)
        for each in (part.kernel, part.bias)
    ]
    held += [norm.scale, norm.bias, block.up.kernel, block.up.bias, block.down.kernel, block.down.bias]
    model.set_weights([np.asarray(each[...]) for each in held])
    model.save(tmp_path / "model.keras")
    found = compare(tmp_path / "model.keras", block, {"x": drawn(2, 9, 24)})
    assert found.weights == ()
    pairs = {each.name: each.other for each in found.places}
    assert pairs["attention 0: output"] == "attention 0: output"
    assert "\u2248 down" in pairs.values()
    assert found.agrees == (epsilon == 1e-5)
    if not found.agrees:
        assert found.first.other == "\u2248 norm"
