"""Layers with settings, inputs and options, and the words in which the adapter of a framework makes and calls one."""

import functools
import importlib

import numpy as np
from conversion_helpers import same

import attention_core as ac
import attention_models as models
from attention_core import layers
from attention_core.backend import get_backend
from attention_core.layers import named_arrays, tree_from_names

NUMPY = get_backend("numpy")
RNG = np.random.default_rng(5)
MODULES = {"torch": "attention_torch", "jax": "attention_jax", "tensorflow": "attention_keras"}


def definition_of(name):
    """The class of a definition, of the core or of the models."""
    return getattr(models if name == "Decoder" else layers, name)


def class_of(name, adapter):
    """The class of a layer in an adapter, or on it."""
    home = adapter.replace("attention_", "attention_models.") if name == "Decoder" else adapter
    return getattr(importlib.import_module(home), name)


def x(*dims):
    return RNG.standard_normal(dims)


IDS = RNG.integers(0, 11, (2, 5)).astype("int32")
KEPT = np.arange(5) < np.asarray([[5], [3]])
LANGUAGE = {"num_heads": 4, "inner": 6, "num_key_value_heads": 2, "query_key_norm": True, "post_norm": True}
CASES = {
    "MultiHeadAttention": (
        {"channels": 8, "num_heads": 4, "num_key_value_heads": 2, "key_channels": 5, "dropout": 0.4},
        (x(2, 3, 8), x(2, 6, 5)),
        {"mask": ac.Causal(offset=2)},
    ),
    "FeedForward": ({"channels": 5, "inner": 7, "output_channels": 3, "dropout": 0.4}, (x(2, 3, 5),), {}),
    "EncoderLayer": ({"channels": 6, "num_heads": 2, "inner": 10, "dropout": 0.4}, (x(2, 5, 6),), {"key_mask": KEPT}),
    "RMSNorm": ({"channels": 6, "epsilon": 1e-3}, (x(2, 6),), {}),
    "GatedFeedForward": ({"channels": 4, "inner": 7, "bias": True, "dropout": 0.4}, (x(2, 3, 4),), {}),
    "DecoderLayer": (
        LANGUAGE | {"channels": 8, "dropout": 0.4, "norm": "layer", "norm_first": False},
        (x(2, 5, 8),),
        {"position_ids": IDS},
    ),
    "Decoder": (
        LANGUAGE | {"num_tokens": 11, "channels": 8, "num_layers": 2, "embedding_scale": 10.0, "dropout": 0.05},
        (IDS,),
        {"key_mask": KEPT},
    ),
    "Embeddings": (
        {"num_tokens": 11, "num_positions": 7, "channels": 4, "num_segments": 2, "dropout": 0.4},
        (IDS,),
        {"segment_ids": IDS % 2},
    ),
    "SaganAttention": (
        {"channels": 8, "head_channels": 3, "bias": True, "data_format": "channels_last"},
        (x(2, 4, 6, 8),),
        {},
    ),
}
FEW = ("MultiHeadAttention", "FeedForward", "EncoderLayer", "Embeddings", "SaganAttention")
DROPPING = [name for name, (settings, *_) in CASES.items() if "dropout" in settings]


def perturbed(definition, dtype="float32"):
    """Parameters and state on NumPy in which nothing is zero: sigma and biases start there."""
    rng = np.random.default_rng(7)

    def moved(tree):
        arrays = {
            name: (array + rng.uniform(0.1, 0.4, array.shape)).astype(np.float32)
            for name, array in named_arrays(tree).items()
        }
        return tree_from_names(tree, NUMPY.from_numpy(arrays, dtype=dtype))

    xp = NUMPY.namespace
    return moved(definition.init(3, xp=xp)), moved(definition.init_state(3, xp=xp))


def alike(trees, others):
    """Fail unless trees of NumPy arrays have the same names, types and bits."""
    for tree, other in zip(trees, others, strict=True):
        same(named_arrays(tree), named_arrays(other))


@functools.cache
def compiled_call():
    """A call of a layer of JAX as one program: eager, each of its operations is one."""

    def call(layer, inputs, options, key):
        return layer(*inputs, **options, key=key)

    return importlib.import_module("jax").jit(call, static_argnums=3)


class Layers:
    """The layers of the adapter of a backend."""

    def __init__(self, backend):
        self.backend, self.module = backend, importlib.import_module(MODULES[backend.name])

    def dtype(self, name):
        return getattr(importlib.import_module("torch"), name) if self.backend.name == "torch" else name

    def new(self, name, seed=3, dtype="float32", **settings):
        """A layer with its first weights."""
        kind = class_of(name, self.module.__name__)
        if self.backend.name == "jax":
            return kind.init(seed, **settings, dtype=dtype)
        return kind(**settings, seed=seed, dtype=self.dtype(dtype))

    def made(self, name, dtype="float32"):
        """A layer in which nothing is zero."""
        definition = definition_of(name)(**CASES[name][0])
        return self.module.Layer.from_numpy(definition, *perturbed(definition, dtype), dtype=self.dtype(dtype))

    def inputs(self, name, dtype):
        """The inputs and the options of a layer."""
        _, arrays, options = CASES[name]
        put = self.backend.from_numpy
        placed = {key: put(each) if isinstance(each, np.ndarray) else each for key, each in options.items()}
        return put(arrays, dtype=dtype), placed

    def call(self, layer, *inputs, training=False, seed=None, **options):
        """Call a layer, in training with a seed where it drops."""
        drops = getattr(layer.definition, "dropout", 0) > 0
        if self.backend.name == "jax":
            return compiled_call()(layer, inputs, options, seed if training else None)
        more = {"seed": seed} if drops else {}
        if self.backend.name == "torch":
            return layer.train(training)(*inputs, **options, **more)
        return layer(*inputs, **options, **more, training=training)

    def weights(self, layer):
        """What is trained, and what is not, by the names that the framework gives them."""
        if self.backend.name == "torch":
            return dict(layer.named_parameters()), dict(layer.named_buffers())
        if self.backend.name == "jax":
            return named_arrays(layer.parameters), named_arrays(layer.state, "state")
        groups = layer.trainable_weights, layer.non_trainable_weights
        return tuple({each.name: each.value for each in group} for group in groups)

    def gradients(self, layer, loss):
        """The gradients of a loss of a layer, by the names of the weights that are trained."""
        if self.backend.name == "torch":
            loss(layer).backward()
            return {name: each.grad for name, each in layer.named_parameters()}
        if self.backend.name == "jax":
            jax = importlib.import_module("jax")
            return named_arrays(jax.jit(jax.grad(loss))(layer).parameters)
        tf = importlib.import_module("tensorflow")
        with tf.GradientTape() as tape:
            value = loss(layer)
        held = {each.name: each.value for each in layer.trainable_weights}
        return {name: tf.convert_to_tensor(each) for name, each in tape.gradient(value, held).items()}
