"""Multi-head attention with its projections."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Unpack

from .. import parameters as trees
from .._arrays import Array, on_device_of, upcast
from .._backend import common_namespace
from .._functions.multi_head import Prepare, multi_head_attention
from .._functions.options import Options, takes
from ._layer import Layer, all_masks, linear_spec, settings_of


@dataclass(frozen=True)
class MultiHeadAttention(Layer):
    """Multi-head attention with its projections.

    Parameters
    ----------
    channels : int
        C, the channels of the query.
    num_heads : int
        H.
    num_key_value_heads : int, optional
        G, a divisor of H; by default H.
    key_channels, value_channels : int, optional
        By default the channels of the query, and of the key.
    head_dim : int, optional
        D, the width of a head's query and key; by default C / H, which must be an integer.
    value_head_dim : int, optional
        E; by default D.
    output : bool
        Whether to project the merged heads; otherwise they are the result.
    output_channels : int, optional
        By default C.
    bias : bool
        Whether projections have a bias, unless the next four say otherwise.
    query_bias, key_bias, value_bias, output_bias : bool, optional
    zero_attention : bool
        Whether to append a key and a value of zeros, as ``add_zero_attn`` in PyTorch: a sink of score 0.
    scale : float, optional
        By default 1 / √D.
    softcap : float, optional
    is_causal : bool
    dropout : float
        The rate of dropout of the weights in training.
    implementation : {"auto", "dense", "blockwise", "fused"}
    arithmetic : {"fast", "reproducible"}

    Examples
    --------
    >>> import array_api_strict as xp
    >>> layer = MultiHeadAttention(8, 2, bias=False, output=False)
    >>> layer(layer.init(0, xp=xp), xp.ones((3, 5, 8), dtype=xp.float32)).shape
    (3, 5, 8)
    """

    channels: int
    num_heads: int
    num_key_value_heads: int | None = None
    key_channels: int | None = None
    value_channels: int | None = None
    head_dim: int | None = None
    value_head_dim: int | None = None
    output: bool = True
    output_channels: int | None = None
    bias: bool = True
    query_bias: bool | None = None
    key_bias: bool | None = None
    value_bias: bool | None = None
    output_bias: bool | None = None
    zero_attention: bool = False
    scale: float | None = None
    softcap: float | None = None
    is_causal: bool = False
    dropout: float = 0.0
    implementation: str = "auto"
    arithmetic: str = "fast"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.output_channels is not None and not self.output:
            raise ValueError(f"expected no output_channels without an output; got {self.output_channels}")
        if self.num_heads % self.groups:
            raise ValueError(f"expected num_key_value_heads that divide num_heads {self.num_heads}; got {self.groups}")
        if self.head_dim is None and self.channels % self.num_heads:
            raise ValueError(
                f"expected channels that {self.num_heads} heads share out evenly; got {self.channels} channels"
            )

    @property
    def groups(self) -> int:
        """G, the number of key/value heads."""
        return self.num_heads if self.num_key_value_heads is None else self.num_key_value_heads

    @property
    def parameters(self) -> trees.MultiHeadAttention:
        """Specs of the projections."""
        key_channels = self.channels if self.key_channels is None else self.key_channels
        value_channels = key_channels if self.value_channels is None else self.value_channels
        head_dim = self.channels // self.num_heads if self.head_dim is None else self.head_dim
        value_head_dim = head_dim if self.value_head_dim is None else self.value_head_dim
        output_channels = self.channels if self.output_channels is None else self.output_channels
        widths = (
            (self.channels, self.num_heads * head_dim),
            (key_channels, self.groups * head_dim),
            (value_channels, self.groups * value_head_dim),
            (self.num_heads * value_head_dim, output_channels),
        )
        settings = (getattr(self, name) for name in _BIASES)
        biases = (self.bias if setting is None else setting for setting in settings)
        query, key, value, output = (linear_spec(*dims, bias) for dims, bias in zip(widths, biases, strict=True))
        return trees.MultiHeadAttention(query, key, value, output if self.output else None)

    @takes("mask", "bias", "score_mod", "return_weights", "return_logsumexp", "shards", "xp")
    def __call__(
        self,
        parameters: trees.MultiHeadAttention,
        query: Any,
        key: Array | None = None,
        value: Array | None = None,
        /,
        *,
        query_mask: Array | None = None,
        key_mask: Array | None = None,
        prepare: Prepare | None = None,
        seed: Any = None,
        **options: Unpack[Options],
    ) -> Any:
        """Compute attention.

        Parameters
        ----------
        parameters : attention_core.parameters.MultiHeadAttention
        query : Array, shape (..., M, C)
        key, value : Arrays, shapes (..., N, C') and (..., N, C''), optional
        mask : Mask or Array of bool, broadcastable to (..., H, M, N), optional
            True = may attend.
        query_mask : Array of bool, shape (..., M), optional
            False masks a query.
        key_mask : Array of bool, shape (..., N), optional
            False masks a key.
        seed : int or Array of int, optional
            Of the dropout; without it nothing is dropped.
        bias, score_mod, prepare, return_weights, return_logsumexp, shards, xp
            As in `attention_core.multi_head_attention`.

        Returns
        -------
        Array, shape (..., M, channels of the output)
            Or `Attention` if a return flag is set.
        """
        xp, shards = options.get("xp"), options.get("shards")
        if self.zero_attention:
            xp = common_namespace(xp, {"query": query})
            options["sinks"] = xp.zeros((self.num_heads,), dtype=upcast(query, xp=xp).dtype, **on_device_of(query))
        of_keys = key_mask, query if key is None else key, shards
        padding = {"query_mask": (query_mask, query, shards), "key_mask": of_keys}
        options["mask"] = all_masks(options.get("mask"), xp, **padding)
        settings = self._options(seed, *_OPTIONS)
        return multi_head_attention(parameters, query, key, value, prepare=prepare, **options, **settings)


_OPTIONS = settings_of(MultiHeadAttention, multi_head_attention)
_BIASES = ("query_bias", "key_bias", "value_bias", "output_bias")
