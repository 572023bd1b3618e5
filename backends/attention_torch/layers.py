"""The layers of `attention_core.layers` as modules of PyTorch.

A module holds tensors and places them. What it is and what it computes is its `definition`, which it calls. Tensors
have the names of `attention_core.layers.named_arrays`, those of the state under ``state``; weights are (in, out).

In training, what is dropped depends on the ``seed`` given to the call or, without one, on the default generator, so
that `torch.manual_seed` governs it. In evaluation nothing is dropped, with or without a seed.

Under `torch.autocast`, layers return the dtypes that PyTorch's own modules do. Attention, multi-head attention and
feed-forward cast inputs and parameters to the dtype of autocast, except from float64. Encoder layers, embeddings and
feature maps keep the dtype of their input or tables; their parameters are cast to it.
"""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike
from typing import Any, ClassVar

import torch

from attention_torch.module import (
    Layer,
    Tree as Tree,  # pickles hold it under this address
)

__all__ = [
    "DecoderLayer",
    "Embeddings",
    "EncoderLayer",
    "FeedForward",
    "GatedFeedForward",
    "Layer",
    "MultiHeadAttention",
    "RMSNorm",
    "SaganAttention",
    "load",
    "save",
]


class MultiHeadAttention(Layer):
    """Multi-head attention with its projections: `attention_core.layers.MultiHeadAttention`.

    Examples
    --------
    >>> layer = MultiHeadAttention(8, 2, dropout=0.1, seed=0)
    >>> layer
    MultiHeadAttention(
      channels=8, num_heads=2, dropout=0.1
      (query): Linear(weight=(8, 8), bias=(8,))
      (key): Linear(weight=(8, 8), bias=(8,))
      (value): Linear(weight=(8, 8), bias=(8,))
      (output): Linear(weight=(8, 8), bias=(8,))
    )
    >>> layer(torch.ones(3, 5, 8)).shape
    torch.Size([3, 5, 8])
    """


class FeedForward(Layer):
    """Linear, activation, linear, dropout, at every position: `attention_core.layers.FeedForward`.

    Examples
    --------
    >>> FeedForward(4, 16)(torch.ones(3, 5, 4)).shape
    torch.Size([3, 5, 4])
    """


class EncoderLayer(Layer):
    """Encoder layer of a transformer: `attention_core.layers.EncoderLayer`.

    Examples
    --------
    >>> EncoderLayer(8, 2, 32, norm_first=False)(torch.ones(3, 5, 8)).shape
    torch.Size([3, 5, 8])
    """


class RMSNorm(Layer):
    """Division of the channels by the root of their mean square: `attention_core.layers.RMSNorm`.

    Examples
    --------
    >>> RMSNorm(2)(torch.tensor([[1.0, 7.0]]))
    tensor([[0.2000, 1.4000]], grad_fn=<MulBackward0>)
    """


class GatedFeedForward(Layer):
    """Gated feed-forward block, at every position: `attention_core.layers.GatedFeedForward`.

    Examples
    --------
    >>> GatedFeedForward(4, 16)(torch.ones(3, 5, 4)).shape
    torch.Size([3, 5, 4])
    """


class DecoderLayer(Layer):
    """Decoder layer of a language model: `attention_core.layers.DecoderLayer`.

    Examples
    --------
    >>> DecoderLayer(8, 2, 16)(torch.ones(3, 5, 8)).shape
    torch.Size([3, 5, 8])
    """


class Embeddings(Layer):
    """Vectors of tokens at absolute positions, in segments: `attention_core.layers.Embeddings`.

    Under `torch.autocast` they are of the dtype of the tables, as those of `torch.nn.Embedding`.

    Examples
    --------
    >>> Embeddings(100, 16, 8)(torch.tensor([[3, 1, 4]])).shape
    torch.Size([1, 3, 8])
    """


class SaganAttention(Layer):
    """Self-attention over feature maps, as in SAGAN: `attention_core.layers.SaganAttention`.

    The default of ``data_format`` is ``"channels_first"``, the layout of PyTorch's convolutions.

    With spectral normalization, the vectors of its power iteration are buffers, which a call in training brings forward
    by a step.

    Examples
    --------
    >>> layer, x = SaganAttention(16), torch.ones(1, 16, 4, 4)
    >>> bool((layer(x) == x).all())  # sigma starts at 0
    True
    >>> [name for name, _ in layer.named_buffers()]
    ['state.theta', 'state.phi', 'state.g', 'state.output']
    """

    defaults: ClassVar[Mapping[str, Any]] = {"data_format": "channels_first"}


def save(layer: Layer, path: str | PathLike[str], /) -> None:
    """Write a layer to a file of safetensors, which every framework loads: its settings, parameters and state.

    Parameters
    ----------
    layer : Layer
    path : str or path-like

    Raises
    ------
    TypeError
        When this is not a layer of `attention_torch`.
    """
    from attention_files import adapted  # noqa: PLC0415 (safetensors is needed for files alone)

    adapted.save(path, layer, Layer)


def load(
    path: str | PathLike[str],
    /,
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    **settings: Any,
) -> Layer:
    """Make the layer that a file holds, whichever framework wrote it: bit for bit, where no dtype is given.

    Parameters
    ----------
    path : str or path-like
    device : torch.device or str, optional
        By default that of PyTorch.
    dtype : torch.dtype, optional
        By default those of the file.
    **settings
        In place of those in the file, such as ``arithmetic``, ``implementation`` or ``dropout``.

    Raises
    ------
    TypeError, ValueError
        As in `Layer.from_numpy` and `Layer.with_settings`; what files raise is said in `attention_files.safetensors`.
    """
    from attention_files import adapted  # noqa: PLC0415 (safetensors is needed for files alone)

    return adapted.load(path, Layer.from_numpy, settings, device=device, dtype=dtype)
