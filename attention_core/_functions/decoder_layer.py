"""The decoder layer of a language model."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, Unpack

from .._arithmetic import ARITHMETICS
from .._arithmetic.exact import round_to_half
from .._arrays import (
    HALF,
    Array,
    Namespace,
    cast_to,
    compute_dtype_name,
    dtype_name,
    flatten,
    leaves,
    one_program,
    positions,
    shape,
    shape_text,
    sizes,
    upcast,
)
from .._backend import common_namespace, may_be_step, runs_at_once, with_autocast
from .._checks import (
    check_broadcastable,
    check_flags,
    check_parameters,
    check_positive,
    check_rank,
    check_shapes,
    once_per_signature,
)
from ..cache import KeyValueCache, check_cache, check_num_new, check_room, extended
from ..masks import And, Causal, KeyLengths, Mask, SlidingWindow
from ..masks._mask import as_mask
from ..masks._rules import check_mask
from ..parameters import DecoderLayer
from ..random import seeded
from .attention import check_options
from .channels import feed_and_contract, normalized
from .embeddings import ROTARY, check_rotation, rotations_of
from .encoder import apply_branches, check_branches, check_of_layer, derived_dropouts
from .multi_head import attend_heads, check_heads, check_pairs, counts_of, projection_shapes
from .options import DECODER_DEFAULTS, NUMBERS, DecoderOptions, arrays_of, options_but, with_constants
from .shards import check_not_shared, place_of, shard_positions, whole_length


@may_be_step
@with_autocast(position=1, lowers=False, options=options_but(kind=DecoderOptions, defaults=DECODER_DEFAULTS))
def decoder_layer(parameters: DecoderLayer, x: Array, /, *, num_heads: int, **options: Unpack[DecoderOptions]) -> Any:
    r"""Apply the decoder layer of a transformer: causal self-attention and feed-forward, each on a residual branch.

    .. math::

        \text{norm first:}\quad & h = x + \operatorname{norm}'_1(\operatorname{attention}(\operatorname{norm}_1(x))), &
        y &= h + \operatorname{norm}'_2(\operatorname{feed\_forward}(\operatorname{norm}_2(h))) \\
        \text{norm last:}\quad & h = \operatorname{norm}_1(x + \operatorname{norm}'_1(\operatorname{attention}(x))), &
        y &= \operatorname{norm}_2(h + \operatorname{norm}'_2(\operatorname{feed\_forward}(h)))

    Norms are `rms_norm`, or `layer_norm` where the parameters of one are a `LayerNorm`. Those with a prime, of Gemma 2,
    are optional. Cross-attention, if there is any, is a third branch between the two.

    Parameters
    ----------
    parameters : DecoderLayer
    x : Array, shape (..., L, C)
        16-bit types are computed in float32 and rounded once. Keys and values of self-attention are rounded to the
        dtype of the parameters, with a cache or without one.
    num_heads : int
        H.
    num_key_value_heads : int, optional
        G, a divisor of H; by default H.
    cache : KeyValueCache, optional
        Keys and values of former positions, (..., G, capacity, D). The keys are stored rotated. A cache of a narrower
        dtype than the parameters rounds keys and values to it.
    num_new : Array of int, shape (...), optional
        How many of the L positions are no padding, which is at the end. With a ragged cache only those are kept, as in
        `append`.
    position_ids : Array of int, broadcastable to (..., L), optional
        By default the length of the cache, or 0, and so on.
    rotary_base : float, optional
        As in `rotary_embedding`; with ``None``, nothing is rotated.
    rotary_width, rotary_divisors, interleaved
        ``width``, ``divisors`` and ``interleaved`` of `rotary_embedding`.
    norm_first : bool
        Whether to normalize the input of each branch, or the sum after it (the first transformer, BART).
    window : int, optional
        How many keys a query attends to at most, the newest ones with its own.
    mask : Mask or Array of bool, broadcastable to (..., H, L, N), optional
        True = may attend. N is L, or the capacity of the cache. It is joined with the causal mask.
    scale, softcap : float, optional
        Of the scores of self-attention, as in `scaled_dot_product_attention`.
    memory : Array, shape (..., M, C'), optional
        The output of an encoder, for cross-attention.
    memory_mask : Mask or Array of bool, broadcastable to (..., H, L, M), optional
        True = may attend. Padding of the memory, (B, M), is a mask (B, 1, 1, M), or ``memory_key_mask`` of a layer.
    activation : {"silu", "gelu", "gelu_tanh", "relu"}
        Of the feed-forward.
    epsilon : float
        Of all normalizations.
    dropout : Dropout, optional
        Applied to the attention weights and to all branches, each with a seed derived from this one.
    donate : bool
        Whether the arrays of the cache may be written over, as in `append`.
    hook : callable, optional
        As in `encoder_layer`, also of ``"cross_attention"``, before norms with a prime. Of norms it is called for each
        `LayerNorm`.
    implementation : {"auto", "dense", "blockwise", "fused"}
    arithmetic : {"fast", "reproducible"}
    shards : Shards, optional
        As in `scaled_dot_product_attention`, without dropout, cache, memory and ``num_new``. L are the positions of
        this rank, which are rotated by their positions in the whole. The mask is over the whole.
    xp : array namespace, optional

    Returns
    -------
    Array, shape (..., L, C)
        Or, with a cache, a pair: the array, and the cache with the new keys and values.

    Raises
    ------
    TypeError, ValueError
        When dtypes, shapes, devices or numbers do not fit, or there is no room in the cache (if lengths can be read).
        All errors are raised before any computation.

    References
    ----------
    A. Vaswani et al., "Attention is all you need", 2017. H. Touvron et al., "Llama", 2023. Gemma Team, "Gemma 2", 2024.

    Examples
    --------
    >>> import array_api_strict as xp
    >>> from attention_core.layers import DecoderLayer
    >>> layer = DecoderLayer(8, 2, 16).init(0, xp=xp)
    >>> x = xp.ones((1, 3, 8), dtype=xp.float32)
    >>> y = decoder_layer(layer, x, num_heads=2)
    >>> from attention_core.cache import empty_cache
    >>> cache = empty_cache((1,), 2, 3, 4, xp=xp)
    >>> z, cache = decoder_layer(layer, x, num_heads=2, cache=cache)
    >>> bool(xp.max(xp.abs(y - z)) < 1e-6), int(cache.length)
    (True, 3)
    """
    settled = all_options(x, num_heads, options)
    xp = _check_call(x=x, layer=parameters, **settled)
    cache, located = taken_positions(x, settled, axis=-2, xp=xp)
    x, dtype = upcast(x, xp=xp), x.dtype
    of_layer = {"memory": upcast(settled["memory"], xp=xp), "dropout": seeded(settled["dropout"], x, xp), "xp": xp}
    rotations = rotations_of((parameters,), x, located.positions, settled, xp)
    y, cache = apply_layer(parameters, x, cache, located=located, rotations=rotations, **settled | of_layer)
    y = cast_to(y, dtype, xp=xp)
    return y if cache is None else (y, cache)


class NewPositions:
    """The new positions among all: their rotary positions, the offset of the first, and how many are no padding."""

    def __init__(self, positions: Array, offset: Array | int, num_new: Array | None, lengths: Array | None) -> None:
        self.positions, self.offset, self.num_new, self.lengths = positions, offset, num_new, lengths

    def mask_options(self, window: int | None, mask: Mask | Array | None) -> dict[str, Any]:
        """The options of attention that say which keys the new positions attend to."""
        is_causal = window is None and isinstance(self.offset, int) and self.offset == 0
        rules: list[Mask] = []
        if window is not None:
            rules.append(SlidingWindow(left=window - 1, right=0, offset=self.offset))
        elif not is_causal:
            rules.append(Causal(offset=self.offset))
        rules += [] if self.lengths is None else [KeyLengths(self.lengths)]
        rules += [] if mask is None else [as_mask(mask)]
        return {"is_causal": is_causal, "mask": functools.reduce(And, rules) if rules else None}


def apply_layer(
    parameters: DecoderLayer,
    x: Array,
    cache: KeyValueCache | None,
    *,
    located: NewPositions,
    rotations: dict[int, Callable[[Array], Array]],
    **settled: Any,
) -> tuple[Array, KeyValueCache | None]:
    """The body of `decoder_layer`, in the type of the computation."""
    ops, xp, memory = ARITHMETICS[settled["arithmetic"]], settled["xp"], settled["memory"]
    dtype = parameters.attention.query.weight.dtype  # as all of them; a walk through the tree takes time
    is_half = dtype_name(dtype) in HALF
    parameters = upcast(parameters, xp=xp) if is_half else parameters
    in_weights, in_attention, in_feed, in_cross, in_memory_weights = derived_dropouts(settled["dropout"], 5, xp)
    options = {name: settled[name] for name in OF_HEADS}
    normal = functools.partial(normalized, epsilon=settled["epsilon"], ops=ops, xp=xp)

    def prepare(query: Array, key: Array, value: Array) -> tuple[Array, Array, Array]:
        nonlocal cache
        query = query if parameters.query_norm is None else normal(query, parameters.query_norm)
        key = key if parameters.key_norm is None else normal(key, parameters.key_norm)
        if rotations:
            rotate = rotations[query.shape[-1]]
            query, key = rotate(query), rotate(key)
        if is_half:  # with a cache or without: so a cache of that dtype changes no number
            key, value = (one_program(round_to_half, xp)(each, dtype=dtype, xp=xp) for each in (key, value))
        if cache is not None:
            key, value = (cast_to(each, cache.key.dtype, xp=xp) for each in (key, value))
            cache = extended(cache, key, value, located.num_new, donate=settled["donate"], xp=xp)
            key, value = upcast((cache.key, cache.value), xp=xp)
        return query, key, value

    def attend(h: Array) -> Array:
        heads: Any = located.mask_options(settled["window"], settled["mask"]) | {"dropout": in_weights, **options}
        heads |= {name: settled[name] for name in NUMBERS}
        output: Array = attend_heads(parameters.attention, (h, h, h), prepare=prepare, **heads).output
        return output

    def attend_to_memory(h: Array) -> Array:
        heads = {"mask": settled["memory_mask"], "dropout": in_memory_weights, **options}
        return attend_heads(parameters.cross_attention, (h, memory, memory), **heads).output  # type: ignore[arg-type]

    feeding = {"activation": settled["activation"], "ops": ops, "xp": xp}
    feed = functools.partial(feed_and_contract, parameters.feed_forward, **feeding)
    crosses = {} if parameters.cross_attention is None else {"cross_attention": (attend_to_memory, in_cross)}
    branches = {"attention": (attend, in_attention), **crosses, "feed_forward": (feed, in_feed)}
    return apply_branches(parameters, x, branches, settled)[0], cache


OF_HEADS = ("num_heads", "num_kv_heads", "implementation", "arithmetic", "shards", "xp")


def all_options(x: Array, num_heads: int, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a decoder or a layer, with defaults, and NumPy arrays as constants of the library of ``x``."""
    settled = {**DECODER_DEFAULTS, **options}
    return with_constants(x, settled | counts_of(num_heads, settled.pop("num_key_value_heads")))


def taken_positions(x: Array, settled: dict[str, Any], *, axis: int, xp: Namespace) -> tuple[Any, NewPositions]:
    """Take from the options, once they are checked, a cache, and where positions stand.

    These are along an axis, behind those of the cache, or among those of all ranks.
    """
    cache, num_new, position_ids, shards = (*map(settled.pop, ("cache", "num_new", "position_ids")), settled["shards"])
    if cache is not None or num_new is not None:
        check_lengths(x, cache, num_new, axis)
    if shards is not None:
        indices = shard_positions(x, shards, axis=axis)
    else:
        indices = positions(shape(x, xp=xp)[axis], x, xp=xp)
    offset: Any = 0 if cache is None else xp.astype(cache.length, xp.int32)
    count = None if num_new is None else xp.astype(num_new, xp.int32)
    if position_ids is None:
        position_ids = indices if cache is None else xp.add(xp.expand_dims(offset, axis=-1), indices)
    elif not len(position_ids.shape):
        position_ids = xp.reshape(position_ids, (1,))
    lengths = None if count is None else count if cache is None else xp.add(offset, count)
    if cache is not None and not len(offset.shape) and runs_at_once(offset):
        offset = int(offset)  # once, and not by the mask of each layer; programs are made for a number
    return cache, NewPositions(xp.astype(position_ids, xp.int32), offset, count, lengths)


def check_lengths(x: Array, cache: Any, num_new: Array | None, axis: int) -> None:
    """Raise if numbers that can be read do not fit: those of new positions, or of those in the cache."""
    count = sizes(x)[axis]
    if cache is not None:
        key = cache.key[0] if isinstance(cache.key, tuple) else cache.key
        check_room(cache.length, count, sizes(key)[-2])
    if num_new is not None:
        check_num_new(num_new, num_new if cache is None else cache.length, count)


@once_per_signature
def _check_call(*, x: Array, layer: DecoderLayer, **settled: Any) -> Namespace:
    """Raise unless the arguments fit together; return their namespace."""
    cache = settled["cache"]
    xp = check_inputs("x", x, -2, {"x": x, "layer": layer}, settled=settled)
    if cache is not None:
        check_parameters("cache", cache, KeyValueCache)
        check_cache(cache)
    check_layer("layer", layer, x, cache, settled=settled)
    return xp


def check_inputs(name: str, x: Array, axis: int, arrays: dict[str, Any], *, settled: dict[str, Any]) -> Namespace:
    """Raise unless arrays are of one library, positions and flags fit, and numbers are valid; return the namespace."""
    arrays |= {"memory": settled["memory"], "cache": settled["cache"], **arrays_of(settled)}
    xp = common_namespace(settled["xp"], arrays)
    check_rank(name, x, -axis, "(..., L)" if axis == -1 else "(..., L, C)")
    if settled["shards"] is not None:
        _check_shards(name, x, axis, settled)
    check_flags(donate=settled["donate"])
    check_of_layer(settled)
    *leading, length = sizes(x)[: len(x.shape) + axis + 1]
    arrays = {"position_ids": settled["position_ids"], "num_new": settled["num_new"], "x": x}
    check_shapes(_POSITIONS, arrays, {"...": leading, "L": length})
    return xp


def _check_shards(name: str, x: Array, axis: int, settled: dict[str, Any]) -> None:
    """Raise unless the positions of a rank and the mask over the whole fit, and nothing else would need the whole."""
    shards, mask = settled["shards"], settled["mask"]
    check_not_shared(shards, **{each: settled[each] for each in ("dropout", "cache", "memory", "num_new")})
    length = whole_length(name, x, axis, shards, place_of(shards, x, axis)[0])
    if mask is not None:
        check_mask(mask, (*sizes(x)[: len(x.shape) + axis], settled["num_heads"], length, length), x)


def check_layer(
    name: str, layer: DecoderLayer, x: Array, cache: KeyValueCache | None, *, settled: dict[str, Any]
) -> None:
    """Raise unless a layer fits inputs like ``x``, its cache and its options."""
    check_parameters(name, layer, DecoderLayer)
    num_heads, window, mask = (settled[name] for name in ("num_heads", "window", "mask"))
    memory, memory_mask = settled["memory"], settled["memory_mask"]
    _check_memory(name, layer, memory, memory_mask)
    known = check_branches(name, layer, x, settled)
    check_options(x, num_heads, **{name: settled[name] for name in (*NUMBERS, "implementation", "arithmetic")})
    if settled["rotary_base"] is not None:
        check_rotation(known["D"], *map(settled.get, ROTARY))
    if window is not None:
        check_positive("window", window)
    if cache is not None:
        of_cache = {letter: known[letter] for letter in ("...", "G", "D", "E")}
        check_shapes(_CACHE, {"cache.key": cache.key, "cache.value": cache.value, "x": x}, of_cache)
        if compute_dtype_name(cache.key.dtype) != (wide := compute_dtype_name(x.dtype)):
            raise TypeError(f"expected cache.key computed in {wide}, as x is; got {dtype_name(cache.key.dtype)}")
    keys = x if cache is None else cache.key
    check_pairs(x, keys, num_heads, mask=mask if settled["shards"] is None else None)
    if memory is not None and layer.cross_attention is not None:
        taken = "x: ... L C", "memory: ... M K", "K"  # by heads that may be of another width
        line = projection_shapes(f"{name}.cross_attention", layer.cross_attention, taken, "C")
        check_heads(line, {"x": x, "memory": memory, name: layer}, num_heads, settled["num_kv_heads"])
        _check_memory_mask(memory_mask, memory, (*sizes(x)[:-2], num_heads, sizes(x)[-2], sizes(memory)[-2]))
        check_pairs(x, memory, num_heads, mask=memory_mask)


_CACHE = "cache.key: ... G C D floating on x, cache.value: ... G C E floating on x"
_POSITIONS = "position_ids: optional to ... L integer on x, num_new: optional to ... integer on x"


def _check_memory(name: str, layer: DecoderLayer, memory: Array | None, mask: Any) -> None:
    """Raise unless cross-attention and what it attends to are both there, or neither is."""
    if layer.cross_attention is not None and memory is None:
        raise ValueError(f"expected memory for {name}.cross_attention, of memory_channels=...; got None")
    if layer.cross_attention is None and (memory is not None or mask is not None):
        raise ValueError(f"expected no memory or mask: {name} has no cross_attention, of memory_channels=...; got some")
    if layer.cross_attention is None and layer.cross_attention_norm is not None:
        raise ValueError(f"expected {name}.cross_attention besides {name}.cross_attention_norm; got None")


def _check_memory_mask(mask: Any, memory: Array, target: tuple[int | None, ...]) -> None:
    """Raise if an array, or one in a rule, begins with the axes of samples where those of heads or queries are."""
    leading, (treedef, arrays) = sizes(memory)[:-2], flatten(mask, 3)
    for array, leaf in zip(arrays, leaves(treedef), strict=True):
        dims = sizes(array)
        is_short = leaf.axes == 3 and len(leading) < len(dims) < len(target)
        if is_short and dims[: len(leading)] == leading != (1,) * len(leading):  # of one sample, both are the same
            got = f"{shape_text(array)}: memory_key_mask=... of a layer takes samples and keys"
            raise ValueError(f"expected memory_mask (..., H, L, M); got {got}")
    if hasattr(mask, "dtype"):
        check_broadcastable("memory_mask", mask, target)
