"""What a layer is before any framework: its settings, the parameters it starts from, and its call.

The layers of `attention_torch`, `attention_jax` and `attention_tensorflow` hold parameters and place them; what they
are, and what they compute, is said here once. A layer of this module holds no array, so that it compares by value, is
written to a file as text, and can be called with the parameters of any library::

    layer = MultiHeadAttention(channels=64, num_heads=8)
    parameters = layer.init(0, xp=xp)
    y = layer(parameters, x)
"""

from __future__ import annotations

import functools
import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, NamedTuple

from attention_core import initializers
from attention_core import parameters as trees
from attention_core._attention import scaled_dot_product_attention
from attention_core._call import Attention
from attention_core._checks import check_boolean, check_flag, check_number, check_positive, check_rank
from attention_core._encoder import encoder_layer, multi_head_attention
from attention_core._implementations import check_implementation
from attention_core._layers import embed_tokens, feed_forward
from attention_core._namespace import array_namespace, beside, widen
from attention_core._sagan import check_data_format, sagan_attention, spectral_norm
from attention_core._typing import Array, Namespace
from attention_core.masks import Mask, as_mask
from attention_core.random import Dropout, check_dropout, fold_in

__all__ = [
    "DotProductAttention",
    "Embeddings",
    "EncoderLayer",
    "FeedForward",
    "Initial",
    "Layer",
    "MultiHeadAttention",
    "SaganAttention",
    "SpectralVectors",
    "layer_from_settings",
    "named_arrays",
    "tree_from_names",
]


@dataclass(frozen=True)
class Initial:
    """A parameter to be: its shape, and the law of its first values.

    Attributes
    ----------
    dims : tuple of int
    law : str
        ``"zeros"``, ``"ones"``, or the name of one of `attention_core.initializers`.
    """

    dims: tuple[int, ...]
    law: str

    def values(self, seed: Any, /, *, dtype: str, xp: Namespace, device: Any = None) -> Array:
        """The first values under a seed, the same on every library."""
        if self.law in ("zeros", "ones"):
            place = {} if device is None else {"device": device}
            return getattr(xp, self.law)(self.dims, dtype=getattr(xp, dtype), **place)
        options = {"stddev": _STDDEV[self.law]} if self.law in _STDDEV else {}
        law = getattr(initializers, self.law)
        return law(seed, self.dims, dtype=dtype, xp=xp, device=device, **options)


_STDDEV = {"truncated_normal": 0.02, "normal": 1.0}  # of tables as in BERT, and of the first guess of a singular vector


@dataclass(frozen=True)
class Layer(ABC):
    """The settings of a layer, checked when it is made."""

    @property
    @abstractmethod
    def parameters(self) -> Any:
        """The parameters to be: a tree of `attention_core.parameters` with `Initial` leaves."""

    @property
    def state(self) -> Any:
        """What training carries along beside the parameters: a tree with `Initial` leaves, for most layers empty."""
        return ()

    def init(self, seed: Any, /, *, xp: Namespace, dtype: str = "float32", device: Any = None) -> Any:
        """The parameters to start from: the same bits on every library.

        Parameters
        ----------
        seed : int or Array of int
            As in `attention_core.Dropout`.
        xp : array namespace
        dtype : {"float16", "bfloat16", "float32", "float64"}
        device : optional
            Where the library should place the arrays, in its own terms.
        """
        return _grown(self.parameters, seed, 0, dtype, xp, device)

    def init_state(self, seed: Any, /, *, xp: Namespace, dtype: str = "float32", device: Any = None) -> Any:
        """The state to start from: the same bits on every library."""
        return _grown(self.state, seed, 1, dtype, xp, device)

    def refreshed(self, parameters: Any, state: Any, /, *, xp: Namespace | None = None) -> Any:
        """The state after a step of training with these parameters."""
        return state

    def settings(self) -> dict[str, Any]:
        """The settings as numbers and text, from which `layer_from_settings` makes the layer again.

        Examples
        --------
        >>> FeedForward(4, 16).settings()["layer"]
        'FeedForward'
        >>> layer_from_settings(FeedForward(4, 16).settings()) == FeedForward(4, 16)
        True
        """
        plain = {name: float(value) if isinstance(value, float) else value for name, value in asdict(self).items()}
        return {"layer": type(self).__name__, **plain}


@dataclass(frozen=True)
class DotProductAttention(Layer):
    """Scaled dot-product attention of one head, without parameters.

    Parameters
    ----------
    scale : float, optional
        By default 1 / √D.
    softcap : float, optional
    is_causal : bool
    dropout : float
        The rate at which weights are dropped in training.
    implementation : {"auto", "dense", "blockwise", "fused"}

    Raises
    ------
    TypeError, ValueError
        When a setting is not one.

    Examples
    --------
    >>> import array_api_strict as xp
    >>> keys = xp.reshape(xp.arange(40, dtype=xp.float64), (1, 10, 4))
    >>> DotProductAttention()((), xp.ones((1, 2, 4)), xp.ones((1, 10, 4)), keys)
    Array([[[18., 19., 20., 21.],
            [18., 19., 20., 21.]]], dtype=array_api_strict.float64)
    """

    scale: float | None = None
    softcap: float | None = None
    is_causal: bool = False
    dropout: float = 0.0
    implementation: str = "auto"

    def __post_init__(self) -> None:
        _check_attention(self)

    @property
    def parameters(self) -> Any:
        """None."""
        return ()

    def __call__(
        self,
        parameters: Any,
        query: Any,
        key: Array | None = None,
        value: Array | None = None,
        /,
        *,
        mask: Mask | Array | None = None,
        query_mask: Array | None = None,
        key_mask: Array | None = None,
        bias: Array | None = None,
        seed: Any = None,
        return_weights: bool = False,
        return_logsumexp: bool = False,
        xp: Namespace | None = None,
    ) -> Any:
        """Attend.

        Parameters
        ----------
        parameters : tuple
            Empty.
        query : Array, shape (..., M, D), or a mapping with "query", "key" and "value"
        key : Array, shape (..., N, D), optional
            By default the query.
        value : Array, shape (..., N, E), optional
            By default the key.
        mask : Mask or Array of bool, broadcastable to (..., M, N), optional
            True = may attend.
        query_mask : Array of bool, shape (..., M), optional
            False where a query may attend nothing.
        key_mask : Array of bool, shape (..., N), optional
            False where a key may be attended by nothing.
        bias : Array, broadcastable to (..., M, N), optional
        seed : int or Array of int, optional
            Of the dropout; without one nothing is dropped.
        return_weights, return_logsumexp : bool
        xp : array namespace, optional

        Returns
        -------
        Array, shape (..., M, E)
            Or `Attention` if a return flag is set, with weights (..., M, N) and logsumexp (..., M).
        """
        query, key, value = _query_key_value(query, key, value)
        for name, array in (("query", query), ("key", key), ("value", value)):
            check_rank(name, array, 2, "(..., length, channels)")
        xp = array_namespace(query, key, value) if xp is None else xp
        if mask is not None and not isinstance(mask, Mask):
            check_boolean("mask", mask)
        mask, bias = (_with_heads(array, xp) for array in (mask, bias))
        found = scaled_dot_product_attention(
            *(xp.expand_dims(array, axis=-3) for array in (query, key, value)),
            mask=_masks(mask, query_mask, key_mask, xp),
            bias=bias,
            is_causal=self.is_causal,
            scale=self.scale,
            softcap=self.softcap,
            dropout=_dropout(self.dropout, seed),
            return_weights=return_weights,
            return_logsumexp=return_logsumexp,
            implementation=self.implementation,
            xp=xp,
        )
        if not isinstance(found, Attention):
            return xp.squeeze(found, axis=-3)
        weights = None if found.weights is None else xp.squeeze(found.weights, axis=-3)
        logsumexp = None if found.logsumexp is None else xp.squeeze(found.logsumexp, axis=-2)
        return Attention(xp.squeeze(found.output, axis=-3), weights, logsumexp)


@dataclass(frozen=True)
class MultiHeadAttention(Layer):
    """Multi-head attention with its projections.

    Parameters
    ----------
    channels : int
        C, of the query.
    num_heads : int
        H.
    num_key_value_heads : int, optional
        G, a divisor of H; by default H.
    key_channels, value_channels : int, optional
        By default those of the query, and those of the key.
    head_dim : int, optional
        D, of a head's query and key; by default C / H, which must be whole.
    value_head_dim : int, optional
        E; by default D.
    output : bool
        Whether the merged heads are projected; else they are the result.
    output_channels : int, optional
        By default C.
    bias : bool
        Whether projections have a bias, where the next four do not say otherwise.
    query_bias, key_bias, value_bias, output_bias : bool, optional
    extra_key_value : bool
        Whether there is a key and a value beside those projected, to be learned, as ``add_bias_kv`` of PyTorch has it.
    zero_attention : bool
        Whether there is a key of zeros and a value of zeros, as ``add_zero_attn`` of PyTorch has it: a sink of score 0.
    scale, softcap, is_causal, dropout, implementation
        As in `DotProductAttention`.

    Raises
    ------
    TypeError, ValueError
        When a setting is not one, or heads do not share out the channels evenly.

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
    extra_key_value: bool = False
    zero_attention: bool = False
    scale: float | None = None
    softcap: float | None = None
    is_causal: bool = False
    dropout: float = 0.0
    implementation: str = "auto"

    def __post_init__(self) -> None:
        _check_sizes(self, "channels", "num_heads")
        for name in ("num_key_value_heads", "key_channels", "value_channels", "head_dim", "value_head_dim"):
            if getattr(self, name) is not None:
                check_positive(name, getattr(self, name))
        if self.output_channels is not None:
            check_positive("output_channels", self.output_channels)
            if not self.output:
                raise ValueError(f"expected no output_channels without an output; got {self.output_channels}")
        if self.num_heads % self.groups:
            raise ValueError(f"expected num_key_value_heads that divide num_heads {self.num_heads}; got {self.groups}")
        if self.head_dim is None and self.channels % self.num_heads:
            raise ValueError(
                f"expected channels that {self.num_heads} heads share out evenly; got {self.channels} channels"
            )
        _check_flags(self, "output", "bias", "extra_key_value", "zero_attention")
        _check_flags(self, *(name for name in _BIASES if getattr(self, name) is not None))
        _check_attention(self)

    @property
    def groups(self) -> int:
        """G."""
        return self.num_heads if self.num_key_value_heads is None else self.num_key_value_heads

    @property
    def parameters(self) -> trees.MultiHeadAttention:
        """The projections, and the extra key and value."""
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
        biases = (self.bias if own is None else own for own in (getattr(self, name) for name in _BIASES))
        query, key, value, output = (_linear(*dims, bias) for dims, bias in zip(widths, biases, strict=True))
        extra = (Initial((dims[1],), "truncated_normal") for dims in widths[1:3]) if self.extra_key_value else ()
        return trees.MultiHeadAttention(query, key, value, output if self.output else None, *extra)

    def __call__(
        self,
        parameters: trees.MultiHeadAttention,
        query: Any,
        key: Array | None = None,
        value: Array | None = None,
        /,
        *,
        mask: Mask | Array | None = None,
        query_mask: Array | None = None,
        key_mask: Array | None = None,
        bias: Array | None = None,
        score_mod: Callable[..., Array] | None = None,
        prepare: Callable[[Array, Array], tuple[Array, Array]] | None = None,
        seed: Any = None,
        return_weights: bool = False,
        return_logsumexp: bool = False,
        xp: Namespace | None = None,
    ) -> Any:
        """Attend.

        Parameters
        ----------
        parameters : attention_core.parameters.MultiHeadAttention
        query : Array, shape (..., M, C), or a mapping with "query", "key" and "value"
        key : Array, shape (..., N, C'), optional
            By default the query.
        value : Array, shape (..., N, C''), optional
            By default the key.
        mask : Mask or Array of bool, broadcastable to (..., H, M, N), optional
            True = may attend.
        query_mask : Array of bool, shape (..., M), optional
            False where a query may attend nothing.
        key_mask : Array of bool, shape (..., N), optional
            False where a key may be attended by nothing.
        bias, score_mod, prepare, return_weights, return_logsumexp, xp
            As in `attention_core.multi_head_attention`.
        seed : int or Array of int, optional
            Of the dropout; without one nothing is dropped.

        Returns
        -------
        Array, shape (..., M, channels of the output)
            Or `Attention` if a return flag is set.
        """
        query, key, value = _query_key_value(query, key, value)
        xp = array_namespace(query, key, value) if xp is None else xp
        sinks = None
        if self.zero_attention:
            sinks = xp.zeros((self.num_heads,), dtype=widen(query, xp=xp).dtype, **beside(query))
        return multi_head_attention(
            parameters,
            query,
            key,
            value,
            num_heads=self.num_heads,
            num_key_value_heads=self.num_key_value_heads,
            mask=_masks(mask, query_mask, key_mask, xp),
            bias=bias,
            is_causal=self.is_causal,
            scale=self.scale,
            softcap=self.softcap,
            score_mod=score_mod,
            sinks=sinks,
            prepare=prepare,
            dropout=_dropout(self.dropout, seed),
            return_weights=return_weights,
            return_logsumexp=return_logsumexp,
            implementation=self.implementation,
            xp=xp,
        )


_BIASES = ("query_bias", "key_bias", "value_bias", "output_bias")


@dataclass(frozen=True)
class FeedForward(Layer):
    """Linear, GELU, linear, dropout, at every position.

    Parameters
    ----------
    channels, inner : int
    output_channels : int, optional
        By default ``channels``.
    bias : bool
    dropout : float

    Raises
    ------
    TypeError, ValueError
        When a setting is not one.
    """

    channels: int
    inner: int
    output_channels: int | None = None
    bias: bool = True
    dropout: float = 0.0

    def __post_init__(self) -> None:
        _check_sizes(self, "channels", "inner", *["output_channels"] * (self.output_channels is not None))
        _check_flags(self, "bias")
        check_dropout(Dropout(self.dropout))

    @property
    def parameters(self) -> trees.FeedForward:
        """Two maps."""
        output = self.channels if self.output_channels is None else self.output_channels
        return trees.FeedForward(_linear(self.channels, self.inner, self.bias), _linear(self.inner, output, self.bias))

    def __call__(
        self, parameters: trees.FeedForward, x: Array, /, *, seed: Any = None, xp: Namespace | None = None
    ) -> Array:
        """Apply to every position: (..., channels) -> (..., channels of the output).

        Without a seed nothing is dropped.
        """
        return feed_forward(parameters, x, dropout=_dropout(self.dropout, seed), xp=xp)


@dataclass(frozen=True)
class EncoderLayer(Layer):
    """Encoder layer of a transformer: self-attention and feed-forward, each with its normalization and a residual.

    Parameters
    ----------
    channels, num_heads : int
    inner : int
        Channels inside the feed-forward.
    norm_first : bool
        Whether the input of each branch is normalized, or the sum after it.
    bias : bool
        Of all linear maps.
    epsilon : float
        Of both normalizations.
    dropout : float
        Of the weights of attention, and of both branches.
    implementation : {"auto", "dense", "blockwise", "fused"}

    Raises
    ------
    TypeError, ValueError
        When a setting is not one, or heads do not share out the channels evenly.
    """

    channels: int
    num_heads: int
    inner: int
    norm_first: bool = True
    bias: bool = True
    epsilon: float = 1e-5
    dropout: float = 0.0
    implementation: str = "auto"

    def __post_init__(self) -> None:
        _check_sizes(self, "inner")
        _check_flags(self, "norm_first")
        check_number("epsilon", self.epsilon, positive=True)
        _ = self._attention

    @property
    def _attention(self) -> MultiHeadAttention:
        return MultiHeadAttention(
            self.channels, self.num_heads, bias=self.bias, dropout=self.dropout, implementation=self.implementation
        )

    @property
    def parameters(self) -> trees.EncoderLayer:
        """Those of attention, of the feed-forward, and of their normalizations."""
        norm = trees.LayerNorm(Initial((self.channels,), "ones"), Initial((self.channels,), "zeros"))
        feed = FeedForward(self.channels, self.inner, bias=self.bias)
        return trees.EncoderLayer(self._attention.parameters, norm, feed.parameters, norm)

    def __call__(
        self,
        parameters: trees.EncoderLayer,
        x: Array,
        /,
        *,
        mask: Mask | Array | None = None,
        key_mask: Array | None = None,
        seed: Any = None,
        xp: Namespace | None = None,
    ) -> Array:
        """Apply to sequences: (..., L, C) -> (..., L, C).

        ``mask``, ``key_mask`` and ``seed`` are those of `MultiHeadAttention`.
        """
        xp = array_namespace(x) if xp is None else xp
        return encoder_layer(
            parameters,
            x,
            num_heads=self.num_heads,
            norm_first=self.norm_first,
            mask=_masks(mask, None, key_mask, xp),
            epsilon=self.epsilon,
            dropout=_dropout(self.dropout, seed),
            implementation=self.implementation,
            xp=xp,
        )


@dataclass(frozen=True)
class Embeddings(Layer):
    """Vectors of tokens at absolute positions, in segments, normalized, with dropout.

    Parameters
    ----------
    num_tokens, num_positions, channels : int
    num_segments : int, optional
        By default there is no table of segments.
    norm : bool
    epsilon : float
        Of the normalization.
    dropout : float

    Raises
    ------
    TypeError, ValueError
        When a setting is not one.
    """

    num_tokens: int
    num_positions: int
    channels: int
    num_segments: int | None = None
    norm: bool = True
    epsilon: float = 1e-12
    dropout: float = 0.0

    def __post_init__(self) -> None:
        _check_sizes(
            self, "num_tokens", "num_positions", "channels", *["num_segments"] * (self.num_segments is not None)
        )
        _check_flags(self, "norm")
        check_number("epsilon", self.epsilon, positive=True)
        check_dropout(Dropout(self.dropout))

    @property
    def parameters(self) -> trees.Embeddings:
        """The tables, and the normalization."""
        norm = trees.LayerNorm(Initial((self.channels,), "ones"), Initial((self.channels,), "zeros"))
        token, position, segment = (
            None if entries is None else Initial((entries, self.channels), "truncated_normal")
            for entries in (self.num_tokens, self.num_positions, self.num_segments)
        )
        return trees.Embeddings(token, position, segment, norm if self.norm else None)

    def __call__(
        self,
        parameters: trees.Embeddings,
        token_ids: Array,
        /,
        *,
        position_ids: Array | None = None,
        segment_ids: Array | None = None,
        seed: Any = None,
        xp: Namespace | None = None,
    ) -> Array:
        """Look up: integers (..., L) -> (..., L, C).

        Ids are those of `attention_core.embed_tokens`; without a seed nothing is dropped.
        """
        return embed_tokens(
            parameters,
            token_ids,
            position_ids=position_ids,
            segment_ids=segment_ids,
            epsilon=self.epsilon,
            dropout=_dropout(self.dropout, seed),
            xp=xp,
        )


class SpectralVectors(NamedTuple):
    """Estimates of the first right singular vectors of the kernels of `SaganAttention`, each of shape (out,)."""

    theta: Array
    phi: Array
    g: Array
    output: Array | None = None


@dataclass(frozen=True)
class SaganAttention(Layer):
    """Self-attention over feature maps, as in SAGAN.

    Parameters
    ----------
    channels : int
        C.
    head_channels : int, optional
        Of theta and phi; by default C / 8, rounded down.
    value_channels : int, optional
        Of g; by default C / 2, rounded down (the authors' code), without an output convolution C.
    output : bool
        Whether a convolution leads back to C channels.
    output_channels : int, optional
        C, and nothing else: what is found is added to the input.
    bias : bool
        Of the convolutions.
    pool : bool
        Whether phi and g are pooled 2 × 2.
    spectral_norm : bool
        Whether the kernels are divided by their largest singular values, as `attention_core.spectral_norm` estimates
        them from vectors that are the state of the layer.
    data_format : {"channels_last", "channels_first"}

    Raises
    ------
    TypeError, ValueError
        When a setting is not one, or the result would not have C channels.

    Examples
    --------
    >>> import array_api_strict as xp
    >>> layer = SaganAttention(16)
    >>> start, state = layer.init(0, xp=xp), layer.init_state(0, xp=xp)
    >>> x = xp.ones((1, 4, 4, 16), dtype=xp.float32)
    >>> bool(xp.all(layer(start, x, state=state) == x))  # sigma starts at 0
    True
    """

    channels: int
    head_channels: int | None = None
    value_channels: int | None = None
    output: bool = True
    output_channels: int | None = None
    bias: bool = False
    pool: bool = True
    spectral_norm: bool = True
    data_format: str = "channels_last"

    def __post_init__(self) -> None:
        _check_sizes(self, "channels")
        for name in ("head_channels", "value_channels", "output_channels"):
            if getattr(self, name) is not None:
                check_positive(name, getattr(self, name))
        _check_flags(self, "output", "bias", "pool", "spectral_norm")
        check_data_format(self.data_format)
        head, value = self._widths
        if head < 1 or value < 1:
            raise ValueError(f"expected at least 8 channels without head_channels; got {self.channels}")
        last, width = ("output_channels", self.output_channels) if self.output else ("value_channels", value)
        if width not in (None, self.channels):
            raise ValueError(f"expected {last} {self.channels}, as the result is added to the input; got {width}")
        if not self.output and self.output_channels is not None:
            raise ValueError(f"expected no output_channels without an output; got {self.output_channels}")

    @property
    def _widths(self) -> tuple[int, int]:
        head = self.channels // 8 if self.head_channels is None else self.head_channels
        default = self.channels // 2 if self.output else self.channels
        return head, default if self.value_channels is None else self.value_channels

    @property
    def parameters(self) -> trees.SaganAttention:
        """The convolutions, and sigma, which starts at 0."""
        head, value = self._widths
        theta, phi, g = (_linear(self.channels, width, self.bias) for width in (head, head, value))
        output = _linear(value, self.channels, self.bias) if self.output else None
        return trees.SaganAttention(theta, phi, g, output, Initial((), "zeros"))

    @property
    def state(self) -> SpectralVectors | tuple[()]:
        """A vector for every kernel, where kernels are normalized."""
        if not self.spectral_norm:
            return ()
        kernels = self.parameters[:4]
        return SpectralVectors(*(each and Initial(each.weight.dims[1:], "normal") for each in kernels))

    def __call__(
        self,
        parameters: trees.SaganAttention,
        x: Array,
        /,
        *,
        state: Any = (),
        return_weights: bool = False,
        xp: Namespace | None = None,
    ) -> Any:
        """Let every place attend all places, as `attention_core.sagan_attention` does.

        Parameters
        ----------
        parameters : attention_core.parameters.SaganAttention
        x : Array, shape (..., height, width, C)
            Or (..., C, height, width) with ``channels_first``.
        state : SpectralVectors
            Needed where kernels are normalized.
        return_weights : bool
        xp : array namespace, optional

        Returns
        -------
        Array
            Of the shape of ``x``, or `Attention` with ``return_weights``.
        """
        if self.spectral_norm:
            parameters = self._normalized(parameters, state, xp)[0]
        return sagan_attention(
            parameters, x, pool=self.pool, data_format=self.data_format, return_weights=return_weights, xp=xp
        )

    def refreshed(self, parameters: trees.SaganAttention, state: Any, /, *, xp: Namespace | None = None) -> Any:
        """The vectors after the step of power iteration that a call with these parameters takes."""
        return self._normalized(parameters, state, xp)[1] if self.spectral_norm else state

    def _normalized(self, parameters: trees.SaganAttention, state: Any, xp: Namespace | None) -> Any:
        if not isinstance(state, SpectralVectors):
            raise TypeError(f"expected state as SpectralVectors(theta, phi, g, output); got {type(state).__name__}")
        kernels, vectors = {}, {}
        for name, u in zip(state._fields, state, strict=True):
            kernel = getattr(parameters, name)
            if kernel is not None:
                weight, vectors[name] = spectral_norm(kernel.weight, u, xp=xp)
                kernels[name] = kernel._replace(weight=weight)
        return parameters._replace(**kernels), state._replace(**vectors)


def layer_from_settings(settings: Mapping[str, Any], /) -> Layer:
    """Make a layer of the settings that `Layer.settings` returned.

    Raises
    ------
    TypeError, ValueError
        When the layer or a setting is not known, or does not fit.

    Examples
    --------
    >>> layer_from_settings({"layer": "FeedForward", "channels": 4, "inner": 16})
    FeedForward(channels=4, inner=16, output_channels=None, bias=True, dropout=0.0)
    """
    name = settings.get("layer")
    if name not in _KINDS:
        raise ValueError(f"expected a layer out of {', '.join(_KINDS)}; got {name!r}")
    kind = _KINDS[name]
    given = {key: value for key, value in settings.items() if key != "layer"}
    known = {field.name for field in fields(kind)}
    if unknown := sorted(given.keys() - known):
        raise ValueError(f"expected settings of {name} out of {', '.join(sorted(known))}; got {', '.join(unknown)}")
    try:
        return kind(**given)
    except TypeError as error:
        raise TypeError(f"expected the settings of {name}; got {given}: {error}") from error


_KINDS: dict[Any, type[Layer]] = {
    kind.__name__: kind
    for kind in (DotProductAttention, MultiHeadAttention, FeedForward, EncoderLayer, Embeddings, SaganAttention)
}


def named_arrays(tree: Any, prefix: str = "", /) -> dict[str, Any]:
    """The leaves of a tree of named tuples by name, ``None`` left out, in order.

    Examples
    --------
    >>> list(named_arrays(FeedForward(4, 16).parameters))
    ['expand.weight', 'expand.bias', 'contract.weight', 'contract.bias']
    """
    if not isinstance(tree, tuple):
        return {} if tree is None else {prefix: tree}
    names = getattr(tree, "_fields", ())
    branches = (
        named_arrays(branch, f"{prefix}.{name}" if prefix else name) for name, branch in zip(names, tree, strict=True)
    )
    return {name: leaf for branch in branches for name, leaf in branch.items()}


def tree_from_names(like: Any, arrays: Mapping[str, Any], prefix: str = "", /) -> Any:
    """A tree like another, with the arrays of these names as leaves: the inverse of `named_arrays`.

    Raises
    ------
    KeyError
        When an array is missing.
    """
    if isinstance(like, tuple):
        names = getattr(like, "_fields", ())
        branches = [
            tree_from_names(branch, arrays, f"{prefix}.{name}" if prefix else name)
            for name, branch in zip(names, like, strict=True)
        ]
        return type(like)(*branches)
    return None if like is None else arrays[prefix]


def _grown(tree: Any, seed: Any, purpose: int, dtype: str, xp: Namespace, device: Any) -> Any:
    """A tree of `Initial` with their values, each under a seed of its own."""
    place = {} if device is None else {"device": device}
    leaves = named_arrays(tree)
    own = fold_in(seed, purpose, place, xp=xp) if leaves else None
    values = {
        name: leaf.values(fold_in(own, index, place, xp=xp), dtype=dtype, xp=xp, device=device)
        for index, (name, leaf) in enumerate(leaves.items())
    }
    return tree_from_names(tree, values)


def _linear(rows: int, columns: int, bias: bool) -> trees.Linear:
    return trees.Linear(Initial((rows, columns), "glorot_uniform"), Initial((columns,), "zeros") if bias else None)


def _query_key_value(query: Any, key: Array | None, value: Array | None) -> tuple[Any, Any, Any]:
    """Three inputs, which may also come as one mapping; the key is by default the query, the value the key."""
    if isinstance(query, Mapping):
        if key is not None or value is not None:
            raise TypeError("expected either a mapping of query, key and value, or arrays; got both")
        if unknown := [name for name in query if name not in ("query", "key", "value")]:
            raise ValueError(f"expected a mapping of query, key and value; got {', '.join(map(str, unknown))}")
        if "query" not in query:
            raise ValueError(f"expected a mapping with query; got {', '.join(query) or 'nothing'}")
        query, key, value = query["query"], query.get("key"), query.get("value")
    key = query if key is None else key
    return query, key, key if value is None else value


def _masks(mask: Mask | Array | None, query_mask: Array | None, key_mask: Array | None, xp: Namespace) -> Any:
    """What all masks allow: one over pairs, one over queries, and one over keys."""
    rules = [] if mask is None else [mask]
    for name, places, axis in (("query_mask", query_mask, -1), ("key_mask", key_mask, -2)):
        if places is not None:
            check_rank(name, places, 1, "(..., length)")
            check_boolean(name, places)
            rules.append(xp.expand_dims(xp.expand_dims(places, axis=axis), axis=-3))
    if len(rules) < 2:
        return rules[0] if rules else None
    return functools.reduce(operator.and_, map(as_mask, rules))


def _with_heads(array: Any, xp: Namespace) -> Any:
    """An array over pairs, (..., M, N), with an axis for heads where it has leading ones; a rule as it is."""
    if array is None or isinstance(array, Mask) or len(array.shape) < 3:
        return array
    return xp.expand_dims(array, axis=-3)


def _dropout(rate: float, seed: Any) -> Dropout | None:
    """Dropout in training, which is where there is a seed."""
    return None if seed is None or rate == 0 else Dropout(rate, seed)


def _check_sizes(layer: Layer, *names: str) -> None:
    for name in names:
        check_positive(name, getattr(layer, name))


def _check_flags(layer: Layer, *names: str) -> None:
    for name in names:
        check_flag(name, getattr(layer, name))


def _check_attention(layer: DotProductAttention | MultiHeadAttention) -> None:
    if layer.scale is not None:
        check_number("scale", layer.scale)
    if layer.softcap is not None:
        check_number("softcap", layer.softcap, positive=True)
    check_flag("is_causal", layer.is_causal)
    check_dropout(Dropout(layer.dropout))
    check_implementation(layer.implementation)
