"""The decoder of a language model as a module of `flax.nnx`, like those of `attention_jax.nnx`."""

from attention_jax.nnx import _Made
from attention_models import jax as pytrees

__all__ = ["Decoder"]


class Decoder(_Made):
    """Language model: `attention_models.jax.Decoder` as a module.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from flax import nnx
    >>> Decoder(50, 8, 2, 16, num_layers=2, rngs=nnx.Rngs(0))(jnp.asarray([[3, 14, 15]])).shape
    (1, 3, 50)
    """

    kind = pytrees.Decoder
