"""The decoder of a language model as a module of PyTorch: a layer like those of `attention_torch`."""

import attention_models as models
from attention_torch import Layer

__all__ = ["Decoder"]


class Decoder(Layer):
    """Language model: `attention_models.Decoder`.

    Examples
    --------
    >>> import torch
    >>> model = Decoder(50, 8, 2, 16, num_layers=2)
    >>> model(torch.tensor([[3, 14, 15]])).shape
    torch.Size([1, 3, 50])
    """

    kind = models.Decoder
