"""The decoder of a language model as a pytree: a layer like those of `attention_jax`."""

import attention_models as models
from attention_jax import Layer
from attention_jax.exporting import register_tuples

__all__ = ["Decoder"]


class Decoder(Layer):
    """Language model: `attention_models.Decoder`.

    Examples
    --------
    >>> import jax
    >>> model = Decoder.init(0, 50, 8, 2, 16, num_layers=2)
    >>> jax.jit(model)(jax.numpy.asarray([[3, 14, 15]])).shape
    (1, 3, 50)
    """

    kind = models.Decoder


for _room in (models, models.parameters):
    register_tuples(_room)
