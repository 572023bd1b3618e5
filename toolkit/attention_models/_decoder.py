"""The decoder of a language model: token embedding, decoder layers and logits."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any, NamedTuple, Unpack

from attention_core._arithmetic import ARITHMETICS, check_arithmetic
from attention_core._arrays import (
    Array,
    DType,
    Facts,
    Namespace,
    cast_to,
    index_dtype,
    on_device_of,
    shape,
    sizes,
    upcast,
)
from attention_core._backend import as_constant, can_be_read, may_be_step, with_autocast
from attention_core._checks import (
    check_integer,
    check_number,
    check_parameters,
    check_positive,
    check_rank,
    check_shapes,
    device_of,
    linear_shapes,
    once_per_signature,
    only_array,
    value_range,
)
from attention_core._functions.channels import norm_shapes, normalized
from attention_core._functions.decoder_layer import all_options, apply_layer, check_inputs, check_layer, taken_positions
from attention_core._functions.embeddings import check_rows, rotations_of
from attention_core._functions.encoder import derived_dropouts, hooked
from attention_core._functions.options import DECODER_DEFAULTS, DecoderOptions, options_but
from attention_core.cache import KeyValueCache, check_cache, empty_cache
from attention_core.parameters import DecoderLayer, Linear
from attention_core.random import seeded
from attention_models.parameters import Decoder


class DecoderCache(NamedTuple):
    """Keys and values of the positions so far in all layers of a decoder: a pytree whose shapes never change.

    Attributes
    ----------
    key : tuple of Array, each of shape (..., G, C, D)
    value : tuple of Array, each of shape (..., G, C, E)
    length : Array of int32, shape () or (...)
        The number of filled positions: one for all, or one for each sequence of the batch.
    """

    key: tuple[Array, ...]
    value: tuple[Array, ...]
    length: Array


def empty_decoder_cache(
    num_layers: int,
    leading: tuple[Any, ...],
    num_heads: int,
    capacity: int,
    head_dim: int,
    /,
    *,
    value_dim: int | None = None,
    ragged: bool = False,
    dtype: DType | None = None,
    device: Any = None,
    xp: Namespace,
) -> DecoderCache:
    """Make an empty cache for all layers of a decoder.

    Parameters
    ----------
    num_layers : int
    leading, num_heads, capacity, head_dim, value_dim, ragged, dtype, device, xp
        As in `empty_cache`; the heads are those of keys and values.

    Examples
    --------
    >>> import array_api_strict as xp
    >>> len(empty_decoder_cache(3, (2,), 4, 16, 8, xp=xp).key)
    3
    """
    num_layers = check_positive("num_layers", num_layers)
    options: dict[str, Any] = {"value_dim": value_dim, "ragged": ragged, "dtype": dtype, "device": device, "xp": xp}
    return joined([empty_cache(leading, num_heads, capacity, head_dim, **options) for _ in range(num_layers)])


@may_be_step
@with_autocast(position=1, lowers=False, options=options_but(kind=DecoderOptions, defaults=DECODER_DEFAULTS))
def decoder(
    parameters: Decoder,
    token_ids: Array,
    /,
    *,
    num_heads: int,
    select: Array | None = None,
    embedding_scale: float | None = None,
    logit_softcap: float | None = None,
    **options: Unpack[DecoderOptions],
) -> Any:
    r"""Compute the logits of a language model: for each position, a score for every token that may come next.

    .. math:: x_0 = c\, T_{t}, \qquad x_n = \operatorname{layer}_n(x_{n-1}), \qquad
        y = \operatorname{norm}(x_N)\, W

    Parameters
    ----------
    parameters : Decoder
        Without ``output``, W is the transposed table of tokens.
    token_ids : Array of int, shape (..., L)
    num_heads, num_key_value_heads
        As in `decoder_layer`.
    cache : DecoderCache, optional
        Keys and values of former positions, of `empty_decoder_cache`.
    num_new : Array of int, shape (...), optional
        How many of the L tokens are no padding, which is at the end.
    position_ids : Array of int, broadcastable to (..., L), optional
    select : Array of int, shape (..., K), optional
        Which of the L positions to compute logits for; by default all.
    window : int, or tuple of int or None, optional
        As in `decoder_layer`; a tuple has one for each layer.
    rotary_base, rotary_width, rotary_divisors, interleaved, norm_first, mask, scale, softcap, memory, memory_mask
        As in `decoder_layer`, the same for all layers.
    activation
        As in `decoder_layer`, the same for all layers.
    embedding_scale : float, optional
        c, the square root of C in Gemma.
    logit_softcap : float, optional
        Replaces logits :math:`y` by :math:`c \tanh(y / c)`.
    epsilon : float
        Of all normalizations, which are `rms_norm`, or `layer_norm` where the parameters of one are a `LayerNorm`.
    hook : callable, optional
        As in `decoder_layer`, of whole layers, such as ``"layers.0"``, and their parts, ``"layers.0.attention"``.
    dropout, donate, implementation, arithmetic, shards, xp
        As in `decoder_layer`. Dropout applies to the embedding, too.

    Returns
    -------
    Array, shape (..., L, V) or (..., K, V)
        Of the dtype of the table. Or, with a cache, a pair: the array, and the cache with the new keys and values.

    Raises
    ------
    TypeError, ValueError
        When dtypes, shapes, devices or numbers do not fit. If they can be read, also when an id has no row in the
        table, or there is no room in the cache. All errors are raised before any computation.

    Notes
    -----
    16-bit parameters are computed in float32, through all layers, and the logits are rounded once. Keys and values are
    rounded to the dtype of the parameters, with a cache or without one: so the pieces of a text do not show.

    References
    ----------
    A. Radford et al., "Improving language understanding by generative pre-training", 2018.

    Examples
    --------
    >>> import array_api_strict as xp
    >>> from attention_models import Decoder
    >>> model = Decoder(50, 8, 2, 16, num_layers=3)
    >>> decoder(model.init(0, xp=xp), xp.asarray([[3, 14, 15]]), num_heads=2).shape
    (1, 3, 50)
    """
    check_parameters("decoder", parameters, Decoder)
    token = parameters.token
    settled = all_options(token, num_heads, options)
    token_ids, select = as_constant(token_ids, token), as_constant(select, token)
    more = {"embedding_scale": embedding_scale, "logit_softcap": logit_softcap, "select": select}
    xp = _check_call(token_ids=token_ids, decoder=parameters, **settled, **more)
    _check_values(token_ids, select, parameters)
    cache, located = taken_positions(token_ids, settled, axis=-1, xp=xp)
    window, memory, hook, dropout = (settled.pop(name) for name in ("window", "memory", "hook", "dropout"))
    windows = window if isinstance(window, tuple) else (window,) * len(parameters.layers)
    ops = ARITHMETICS[settled["arithmetic"]]
    *dropouts, in_embedding = derived_dropouts(seeded(dropout, token_ids, xp), len(parameters.layers) + 1, xp)
    tied = parameters.output is None
    table, *last = ops.copies(upcast(token, xp=xp), 2 if tied else 1, xp=xp)
    x = ops.lookup(table, token_ids, shape(token_ids, xp=xp), xp=xp)
    x = x if embedding_scale is None else ops.scale_by(x, float(embedding_scale), xp=xp)
    x = ops.drop(x, in_embedding, xp=xp)
    rotations = rotations_of(parameters.layers, x, located.positions, settled, xp)
    memories = (None,) * len(windows) if memory is None else ops.copies(upcast(memory, xp=xp), len(windows), xp=xp)
    filled = []
    for index, layer in enumerate(parameters.layers):
        apply: Callable[..., Any] = functools.partial(
            apply_layer,
            layer,
            located=located,
            rotations=rotations,
            window=windows[index],
            memory=memories[index],
            dropout=dropouts[index],
            **settled | {"xp": xp},
        )
        if isinstance(hook, LayerProgram):
            apply = functools.partial(hook.run, apply)
        elif hook is not None:
            apply = functools.partial(_hooked_layer, hook, f"layers.{index}", apply)
        x, kept = apply(x, _layer_cache(cache, index))
        filled.append(kept)
    x = x if select is None else _selected(x, select, ops, xp)
    x = normalized(x, upcast(parameters.norm, xp=xp), epsilon=settled["epsilon"], ops=ops, xp=xp)
    weight, bias = (xp.matrix_transpose(last[0]), None) if tied else upcast(parameters.output, xp=xp)
    logits = ops.affine(x, weight, bias, xp=xp)
    logits = logits if logit_softcap is None else ops.cap(logits, float(logit_softcap), xp=xp)
    logits = cast_to(logits, token.dtype, xp=xp)
    return logits if cache is None else (logits, joined(filled))


class LayerProgram:
    """A hook that compiles whole layers, with their caches: those of equal shapes and settings share the program."""

    def __init__(self, backend: Any, mode: str) -> None:
        self.run = backend.compile(lambda apply, x, cache: apply(x, cache), mode=mode)

    def __call__(self, name: str, function: Callable[[Array], Any], x: Array) -> Any:
        """Apply a part as it is."""
        return function(x)


def _hooked_layer(
    hook: Callable[..., Any], name: str, apply: Callable[..., Any], x: Array, cache: KeyValueCache | None
) -> tuple[Array, KeyValueCache | None]:
    """What a hook returns for a layer and its parts, and the cache, which it does not see."""

    def in_layer(part: str, function: Callable[[Array], Any], h: Array) -> Any:
        return hook(f"{name}.{part}", function, h)

    def compute(h: Array) -> Array:
        nonlocal cache
        y: Array
        y, cache = apply(h, cache, hook=in_layer)
        return y

    return hooked(hook, name, compute, x), cache


def _layer_cache(cache: DecoderCache | None, index: int) -> KeyValueCache | None:
    return None if cache is None else KeyValueCache(cache.key[index], cache.value[index], cache.length)


def joined(caches: list[Any]) -> DecoderCache:
    """The caches of all layers as one, whose lengths are those of the first."""
    return DecoderCache(tuple([each.key for each in caches]), tuple([each.value for each in caches]), caches[0].length)


def _selected(x: Array, select: Array, ops: Any, xp: Namespace) -> Array:
    """Rows of (..., L, C) at positions (..., K): (..., K, C)."""
    *leading, length, channels = shape(x, xp=xp)
    dims = (*leading, shape(select, xp=xp)[-1])
    rows = xp.reshape(x, (-1, channels))
    wide = index_dtype(select, xp=xp)
    count = functools.reduce(operator.mul, leading, 1)
    start = xp.multiply(xp.arange(count, dtype=wide, **on_device_of(select)), length)
    select = xp.broadcast_to(xp.astype(select, wide), dims)
    index = xp.add(xp.reshape(select, (-1, dims[-1])), xp.expand_dims(start, axis=-1))
    return ops.lookup(rows, xp.reshape(index, dims), dims, xp=xp)


def _check_values(token_ids: Array, select: Array | None, parameters: Decoder) -> None:
    """Raise if values that can be read do not fit."""
    check_rows("token_ids", token_ids, parameters.token)
    length = sizes(token_ids)[-1]
    if select is not None and length is not None and 0 not in sizes(select) and can_be_read(select):
        least, most = value_range(select)
        if least < 0 or most >= length:
            raise ValueError(f"expected select in 0..{length - 1}; got {least if least < 0 else most}")


@once_per_signature
def _check_call(
    *,
    token_ids: Array,
    decoder: Decoder,
    select: Array | None,
    embedding_scale: Any,
    logit_softcap: Any,
    **settled: Any,
) -> Namespace:
    """Raise unless the arguments fit together; return their namespace."""
    if not isinstance(decoder.layers, tuple) or not decoder.layers:
        raise TypeError(f"expected decoder.layers as a tuple of at least one; got {type(decoder.layers).__name__}")
    for index, layer in enumerate(decoder.layers):
        check_parameters(f"decoder.layers[{index}]", layer, DecoderLayer)
    arrays = {"token_ids": token_ids, "decoder": decoder, "select": select}
    xp = check_inputs("token_ids", token_ids, -1, arrays, settled=settled)
    check_integer("token_ids", token_ids)
    _check_table(decoder, token_ids, settled["arithmetic"])
    for name, number in (("embedding_scale", embedding_scale), ("logit_softcap", logit_softcap)):
        if number is not None:
            check_number(name, number, positive=True)
            if only_array(number) is not None:
                raise TypeError(f"expected {name} as a Python number; got {type(number).__name__}")
    if select is not None:
        check_rank("select", select, 1, "(..., K)")
        known = {"...": sizes(token_ids)[:-1], "K": sizes(select)[-1]}
        check_shapes("select: to ... K integer on token_ids", {"select": select, "token_ids": token_ids}, known)
    window, cache = settled["window"], settled["cache"]
    windows = window if isinstance(window, tuple) else (window,) * len(decoder.layers)
    if len(windows) != len(decoder.layers):
        raise ValueError(f"expected window for {len(decoder.layers)} layers; got {len(windows)}")
    _check_cache(cache, len(decoder.layers))
    like = Facts((*sizes(token_ids), sizes(decoder.token)[1]), decoder.token.dtype, device_of(decoder.token))
    for index, layer in enumerate(decoder.layers):
        of_layer = settled | {"window": windows[index]}
        check_layer(f"decoder.layers[{index}]", layer, like, _layer_cache(cache, index), settled=of_layer)
    return xp


def _check_cache(cache: Any, num_layers: int) -> None:
    """Raise unless a cache has one pair of arrays for each layer."""
    if cache is None:
        return
    check_parameters("cache", cache, DecoderCache)
    for name in ("key", "value"):
        found = getattr(cache, name)
        if not isinstance(found, tuple) or len(found) != num_layers:
            got = len(found) if isinstance(found, tuple) else type(found).__name__
            raise ValueError(f"expected cache.{name} as a tuple of {num_layers} arrays, one for each layer; got {got}")
    for index in range(num_layers):
        check_cache(KeyValueCache(cache.key[index], cache.value[index], cache.length))


def _check_table(decoder: Decoder, token_ids: Array, arithmetic: Any) -> None:
    """Raise unless table, last normalization and output fit together."""
    check_arithmetic(arithmetic, "decoder.token", decoder.token)
    lines = ["decoder.token: V C floating", norm_shapes("decoder.norm", decoder.norm, "C", "decoder.token")]
    if decoder.output is not None:
        check_parameters("decoder.output", decoder.output, Linear)
        lines.append(linear_shapes("decoder.output", "C", "logits", "decoder.token"))
    tables = {"decoder": decoder._replace(layers=()), "token_ids": token_ids}
    check_shapes(", ".join([*lines, "token_ids: ... L integer on decoder.token"]), tables)
