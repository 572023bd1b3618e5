"""The decoder of a language model as a layer of Keras, like those of `attention_keras`."""

import attention_models as models
from attention_keras.layer import AttentionLayer

__all__ = ["Decoder"]


class Decoder(AttentionLayer):
    """Language model, as a layer of Keras: from tokens to logits.

    Examples
    --------
    >>> import keras
    >>> model = Decoder(50, 8, 2, 16, num_layers=2)
    >>> tuple(model(keras.ops.array([[3, 14, 15]])).shape)
    (1, 3, 50)
    """

    kind = models.Decoder
