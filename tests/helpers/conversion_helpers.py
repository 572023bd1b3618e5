"""Modules of other libraries, and comparisons with layers."""

import numpy as np

from attention_core import layers

AGREEMENT = {
    "torch.nn.MultiheadAttention": 1e-14,
    "torch.nn.TransformerEncoderLayer": 1e-14,
    "torch.nn.TransformerDecoderLayer": 1e-14,
    "transformers BertLayer, BertEmbeddings, BertModel": 1e-14,
    "equinox.nn.MultiheadAttention": 1e-14,
    "flax.nnx.MultiHeadAttention(sow_weights=True)": 1e-14,
    "flax.linen": 1e-14,
    "flax.nnx.MultiHeadAttention": 2e-6,  # jax.nn.dot_product_attention takes its softmax in float32
    "keras.layers.*, 1/√key_dim exact in float32": 1e-14,
    "keras.layers.*": 1e-6,  # TensorFlow rounds the Python number 1/√key_dim to float32
}


def agree(found, expected, what):
    found, expected = np.asarray(found), np.asarray(expected)
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape) == (np.float64, expected.shape)
    assert np.abs(found - expected).max() <= AGREEMENT[what] * np.abs(expected).max()


def same(found, expected):
    """Equal bit for bit, name by name."""
    assert list(found) == list(expected)
    for name, array in expected.items():
        got, wanted = np.asarray(found[name]), np.asarray(array)
        assert (name, got.dtype, got.shape) == (name, wanted.dtype, wanted.shape)
        assert got.tobytes() == wanted.tobytes(), name


def same_layer(layer, other):
    assert layer.definition == other.definition
    same(layers.named_arrays(layer.to_numpy()[0]), layers.named_arrays(other.to_numpy()[0]))


def there_and_back(conversion, theirs, arrays):
    """A module as a layer, and as a module again, which has the same bits, as has the layer that is made of that."""
    ours = conversion.from_module(theirs)
    back = conversion.to_module(ours, type(theirs))
    same(arrays(back), arrays(theirs))
    same_layer(conversion.from_module(back), ours)
    return ours, back


def perturbed(torch, module):
    """Every parameter random, biases and normalizations too."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype))
    return module.eval()


def state(module):
    return {name: tensor.numpy() for name, tensor in module.state_dict().items()}


def weights(module):
    found = {variable.path.split("/", 1)[1]: np.asarray(variable) for variable in module.weights}
    return {name: array for name, array in found.items() if name.endswith(("kernel", "bias"))}
