"""Mistakes of newcomers in five roles, as a table of inputs and messages: the same words on every library."""

import fractions
import functools
import importlib.util
import inspect
import json
import pickle
import struct
import tomllib
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from backend_helpers import archive
from gguf_helpers import write_gguf

import attention_core as ac
import attention_models as models
from attention_conformance import check
from attention_core import initializers, layers, masks, parameters, random, scores
from attention_files import safetensors
from attention_models import layouts
from attention_models.gguf import load_gguf
from attention_models.tokenizers import gguf_tokenizer

TABLE = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))


@functools.cache
def words(put, xp):
    """The names that inputs are written with."""
    heads = np.ones((2, 4, 6, 8), "float32")
    x = np.ones((2, 6, 8), "float32")
    mha = layers.MultiHeadAttention(8, 2)
    encoder = layers.EncoderLayer(8, 2, 16)
    cross = layers.DecoderLayer(8, 2, 16, memory_channels=8)
    model = models.Decoder(50, 8, 2, 16, 1)
    made = {"heads": heads, "x": x, "image": np.ones((2, 4, 4, 8), "float32"), "ids": np.asarray([[1, 2, 3]])}
    made["ids_of_two"] = np.asarray([[0, 1, 1], [0, 0, 1]])
    made |= {"pairs": np.ones((6, 6), bool), "is_token": np.ones((2, 6), bool), "scale": np.ones(8, "float32")}
    put_in = put(made)
    sagan = layers.SaganAttention(8)
    return {
        **{each.__name__.rpartition(".")[2]: each for each in (initializers, layers, layouts, masks, random, scores)},
        "models": models,
        "check": check,
        "files": safetensors,
        "ac": ac,
        "np": np,
        "xp": xp,
        "put": put,
        "parameters": parameters,
        "mha": mha,
        "encoder": encoder,
        "cross": cross,
        "attend": ac.scaled_dot_product_attention,
        "explain": ac.explain_attention,
        **put_in,
        "q": put_in["heads"],
        "k": put_in["heads"],
        "v": put_in["heads"],
        "sagan": sagan,
        "fractions": fractions,
        "cache": ac.cache.empty_cache((2,), 4, 10, 8, xp=xp),
        "part": ac.pieces.partial_attention(*[put_in["heads"]] * 3),
        "rows": put(layers.Embeddings(11, 7, 4, num_segments=3).init(0, xp=np)),
        "model": model,
        "of_model": put(model.init(0, xp=np)),
        "tree": put(mha.init(0, xp=np)),
        "encoder_tree": put(encoder.init(0, xp=np)),
        "of_cross": put(cross.init(0, xp=np)),
        "kernels": put(sagan.init(0, xp=np)),
        "vectors": put(sagan.init_state(0, xp=np)),
    }


LAYERS = {"torch": "attention_torch", "jax": "attention_jax", "tensorflow": "attention_keras"}
# Roles with one library, and what else has to be installed.
ALONE = {
    "Viewer": "numpy",
    "Reader of files": "numpy",
    "NumPy alone": "numpy",
    "PyTorch alone": "torch",
    "Transformers alone": "torch",
    "JAX alone": "jax",
    "Flax alone": "jax",
    "Keras alone": "tensorflow",
}
OTHERS = {"Flax alone": "flax", "Transformers alone": "transformers"}


def read(data):
    """Read a file of these bytes."""
    Path("file.safetensors").write_bytes(data)
    return safetensors.load_tree("file.safetensors")


def structured(header):
    """Read a file with this structure in its metadata."""
    metadata = {"attention-core": json.dumps(header)}
    safetensors.save_arrays("file.safetensors", {"weight": np.zeros(3)}, metadata)
    return safetensors.load_tree("file.safetensors")


def language_model(config):
    """Read the weights of a small one of Llama's with another config."""
    sizes = {
        "vocab_size": 5,
        "hidden_size": 4,
        "intermediate_size": 6,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    definition = layouts.decoder_from_config({"model_type": "llama", **sizes})
    arrays = layouts.to_causal_lm(definition, definition.init(0, xp=np))
    return layouts.from_causal_lm(arrays, config={"model_type": "llama", **sizes, **config})


def gguf_model(**spoiled):
    """Read a small GGUF file of Llama's that is spoiled; nothing may look at its weights."""
    write_gguf("a.gguf", **spoiled)
    with mock.patch("gguf.dequantize", None):
        return load_gguf("a.gguf")


def gguf_start(layout, *values):
    """Read a file that begins as one of GGUF, and goes on with these values."""
    Path("a.gguf").write_bytes(b"GGUF" + struct.pack(layout, *values))
    return load_gguf("a.gguf")


def tokenizer(**spoiled):
    """Make the tokenizer of a small GGUF file that is spoiled."""
    values = {"model": "gpt2", "pre": "smollm", "tokens": ["<s>", "a", "<", "<a>"], "merges": []} | spoiled
    return gguf_tokenizer("a.gguf", {f"ggml.{name}": each for name, each in values.items() if each is not None})


def words_of_toolkit():
    """The names for mistakes with files and with the viewer."""
    names = {"read": read, "archive": archive, "structured": structured, "feed_forward": layers.FeedForward(4, 9)}
    long = {
        "rope_type": "longrope",
        "short_factor": [1.5],
        "long_factor": [2.5],
        "original_max_position_embeddings": 16,
    }
    names |= {"language_model": language_model, "long": long}
    names |= {"gguf_model": gguf_model, "gguf_start": gguf_start, "tokenizer": tokenizer}
    names |= {"weights": np.full((2, 2), 0.5), "image": np.zeros((16, 24, 3))}
    viewer = importlib.import_module("attention_view")
    return names | {name: getattr(viewer, name) for name in ("Computed", "view", "view_mask")}


def words_alone(backend):
    """The names for mistakes with one library: it, its adapter, and a layer."""
    if backend.name == "numpy":
        return words_of_toolkit()
    home = LAYERS[backend.name]
    adapter, library = map(importlib.import_module, (home, backend.name))
    kind = adapter.MultiHeadAttention
    layer = kind.init(0, 8, 2) if backend.name == "jax" else kind(8, 2)
    conversion = importlib.import_module(f"{home.replace('attention_', 'attention_models.')}.conversion")
    made = {backend.name: library, "adapter": adapter, "layer": layer, "from_module": conversion.from_module}
    if backend.name == "torch":
        for module in ("flex_attention", "bias"):
            importlib.import_module(f"torch.nn.attention.{module}")
        made |= {"to_module": conversion.to_module, "fx": importlib.import_module("torch.fx")}
    if backend.name == "torch" and importlib.util.find_spec("transformers"):
        made["bert"] = importlib.import_module("transformers.models.bert.modeling_bert")
        made["transformers"] = importlib.import_module("transformers")
        made["sizes"] = {"vocab_size": 9, "hidden_size": 12, "num_hidden_layers": 1, "num_attention_heads": 3}
    if backend.name == "jax":
        made["sparse"] = importlib.import_module("jax.experimental.sparse")
    if backend.name == "jax" and importlib.util.find_spec("flax"):
        modules, nnx = importlib.import_module("attention_jax.nnx"), importlib.import_module("flax.nnx")
        module = modules.FeedForward(8, 7, dropout=0.4, rngs=nnx.Rngs(0))
        made |= {"modules": modules, "nnx": nnx, "module": module}
    if backend.name == "tensorflow":
        made["keras"] = importlib.import_module("keras")
    return made


def said(mistake, names):
    """What a mistake is answered with."""
    try:
        eval(mistake, dict(names))
    except Exception as error:
        return f"{type(error).__name__}: {error}".replace(", ".join(ac.backend.announced_backends()), "BACKENDS")
    return "no error"


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage:UserWarning")
@pytest.mark.needs(
    lambda backend, role: ALONE.get(role, backend.name) == backend.name,
    lambda role: role not in OTHERS or importlib.util.find_spec(OTHERS[role]),
)
@pytest.mark.parametrize("role", TABLE)
def test_a_mistake_is_told_what_to_write(role, backend, put, xp, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = words(put, xp) | (words_alone(backend) if role in ALONE else {})
    got = {mistake: said(mistake, names) for mistake in TABLE[role]}
    array = type(names["q"]).__name__
    assert got == {mistake: message.replace("got ARRAY", f"got {array}") for mistake, message in TABLE[role].items()}


def test_signatures_stay_as_they_are_written():
    """To those who read them, and pickled functions keep their addresses."""
    assert list(inspect.signature(ac.split_heads).parameters) == ["x", "num_heads", "xp"]
    assert list(inspect.signature(ac.SlidingWindow).parameters) == ["left", "right", "offset"]
    assert "is_causal" in inspect.signature(ac.scaled_dot_product_attention).parameters
    assert list(inspect.signature(layers.FeedForward).parameters)[:2] == ["channels", "inner"]
    for function in (ac.split_heads, ac.masks.mask_from_padding, ac.functions.rms_norm):
        assert pickle.loads(pickle.dumps(function)) is function


def test_there_are_enough_mistakes_and_each_message_is_one_line():
    messages = [message for rows in TABLE.values() for message in rows.values()]
    assert len(messages) >= 146
    assert not [message for message in messages if "\n" in message or len(message) > 320]
