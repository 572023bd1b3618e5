"""Text of a language model: token by token, with a cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from attention_core import parameters as trees
from attention_core._arrays import (
    Array,
    Namespace,
    cast_to,
    index_dtype,
    on_device_of,
    positions,
    shape,
    shape_text,
    sizes,
)
from attention_core._backend import backend_for, common_namespace, is_concrete
from attention_core._checks import (
    check_broadcastable,
    check_choice,
    check_function,
    check_integer,
    check_parameters,
    check_positive,
    check_rank,
    value_range,
)
from attention_core._functions.constants import as_constant
from attention_core._functions.sampling import check_sampling, sample_tokens
from attention_core.layers._decoder import Decoder


class Generated(NamedTuple):
    """New tokens of a language model.

    Attributes
    ----------
    token_ids : Array of int32, shape (B, T)
        After the token that ends a text, that token is repeated.
    num_new : Array of int32, shape (B,)
        How many tokens belong to the text, the one that ends it included.
    """

    token_ids: Array
    num_new: Array


def generate(
    model: Decoder,
    parameters: trees.Decoder,
    prompt_ids: Array,
    /,
    *,
    max_new_tokens: int,
    prompt_lengths: Array | None = None,
    padding: str = "right",
    stop_ids: Sequence[int] = (),
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: Any = 0,
    capacity: int | None = None,
    mode: str = "eager",
    on_step: Callable[[Array, Array], Any] | None = None,
    xp: Namespace | None = None,
) -> Generated:
    """Continue prompts by a language model.

    Parameters
    ----------
    model : Decoder
    parameters : attention_core.parameters.Decoder
    prompt_ids : Array of int, shape (B, L)
    max_new_tokens : int
    prompt_lengths : Array of int, shape (B,), optional
        How many ids of each prompt are no padding; by default all.
    padding : {"right", "left"}
        Where shorter prompts are padded.
    stop_ids : sequence of int
        Tokens that end a text.
    temperature, top_k, top_p, seed
        As in `attention_core.sample_tokens`. By default, the most probable token is chosen.
    capacity : int, optional
        Of the cache; by default as many positions as are needed.
    mode : str
        How a step is run: one of `attention_core.Backend.modes`. A compiled step is compiled once.
    on_step : callable, optional
        ``on_step(tokens, logits)`` is called with (B,) and (B, V) at every step.
    xp : array namespace, optional

    Returns
    -------
    Generated

    Raises
    ------
    TypeError, ValueError
        When arguments do not fit, or prompt and new tokens are more than the cache holds: before any computation.

    Examples
    --------
    >>> import array_api_strict as xp
    >>> model = Decoder(50, 8, 2, 16, num_layers=2)
    >>> found = generate(model, model.init(0, xp=xp), xp.asarray([[3, 14, 15]]), max_new_tokens=4)
    >>> found.token_ids.shape, int(found.num_new[0])
    ((1, 4), 4)
    """
    if not isinstance(model, Decoder):
        raise TypeError(f"expected model as Decoder; got {type(model).__name__}")
    check_parameters("parameters", parameters, trees.Decoder)
    prompt_ids, prompt_lengths = (as_constant(each, parameters.token) for each in (prompt_ids, prompt_lengths))
    xp = common_namespace(xp, {"prompt_ids": prompt_ids, "parameters": parameters, "prompt_lengths": prompt_lengths})
    capacity = _check_call(model, prompt_ids, prompt_lengths, max_new_tokens=max_new_tokens, capacity=capacity)
    check_choice("padding", padding, ("right", "left"))
    check_sampling(temperature, top_k, top_p)
    if on_step is not None:
        check_function("on_step", on_step)
    stops = _checked_stops(stop_ids)
    backend = backend_for(parameters.token, xp)
    batch, length = shape(prompt_ids, xp=xp)
    prompt_ids = xp.astype(prompt_ids, xp.int32)
    lengths = xp.full((batch,), length, dtype=xp.int32, **on_device_of(prompt_ids))
    lengths = lengths if prompt_lengths is None else xp.astype(prompt_lengths, xp.int32)
    if padding == "left" and prompt_lengths is not None:
        prompt_ids = _to_the_left(prompt_ids, lengths, xp)
    on_device = on_device_of(parameters.token)
    cache = model.empty_cache(
        (batch,), capacity, ragged=True, dtype=parameters.token.dtype, device=on_device.get("device"), xp=xp
    )

    def choose(logits: Array, step: Array) -> Array:
        return sample_tokens(logits, temperature=temperature, top_k=top_k, top_p=top_p, seed=seed, step=step, xp=xp)

    def start(parameters: trees.Decoder, prompt_ids: Array, lengths: Array, cache: Any) -> Any:
        last = xp.expand_dims(xp.subtract(lengths, 1), axis=-1)
        logits, cache = model(parameters, prompt_ids, cache=cache, num_new=lengths, select=last)
        logits = xp.squeeze(logits, axis=-2)
        return choose(logits, xp.zeros_like(lengths[0])), logits, cache

    def advance(parameters: trees.Decoder, tokens: Array, step: Array, cache: Any) -> Any:
        logits, cache = model(parameters, xp.expand_dims(tokens, axis=-1), cache=cache)
        logits = xp.squeeze(logits, axis=-2)
        return choose(logits, step), logits, cache

    if mode != "eager":
        start, advance = (backend.compile(function, mode=mode) for function in (start, advance))
    tokens, logits, cache = start(parameters, prompt_ids, lengths, cache)
    chosen, counts, ended = [], xp.zeros_like(lengths), xp.zeros_like(lengths, dtype=xp.bool)
    for index in range(max_new_tokens):
        if index:
            step = xp.full((), index, dtype=xp.int32, **on_device_of(tokens))
            following, logits, cache = advance(parameters, tokens, step, cache)
            tokens = xp.where(ended, tokens, following)
        counts = xp.add(counts, xp.astype(xp.logical_not(ended), xp.int32))
        for stop in stops:
            ended = xp.logical_or(ended, xp.equal(tokens, stop))
        chosen.append(tokens)
        if on_step is not None:
            on_step(tokens, logits)
        if stops and is_concrete(ended) and bool(xp.all(ended)):
            break
    return Generated(xp.stack(chosen, axis=-1), counts)


def _to_the_left(ids: Array, lengths: Array, xp: Namespace) -> Array:
    """Move prompts that are padded on the left to the beginning of their rows."""
    batch, length = shape(ids, xp=xp)
    wide = index_dtype(ids, xp=xp)
    index = positions(length, ids, xp=xp)
    index = xp.add(xp.expand_dims(xp.subtract(length, lengths), axis=-1), index)
    index = xp.where(xp.less(index, length), index, xp.subtract(index, length))
    start = xp.multiply(positions(batch, ids, xp=xp), length)
    flat = xp.reshape(xp.add(index, xp.expand_dims(start, axis=-1)), (-1,))
    return xp.reshape(xp.take(xp.reshape(ids, (-1,)), cast_to(flat, wide, xp=xp), axis=0), (batch, length))


def _check_call(
    model: Decoder, prompt_ids: Array, prompt_lengths: Array | None, *, max_new_tokens: Any, capacity: Any
) -> int:
    """Raise unless prompts fit the model and the cache; return the capacity of the cache."""
    check_rank("prompt_ids", prompt_ids, 2, "(B, L)")
    check_integer("prompt_ids", prompt_ids)
    dims = sizes(prompt_ids)
    if len(dims) != 2 or dims[1] is None or not dims[1]:
        raise ValueError(f"expected prompt_ids (B, L) of at least one token; got {shape_text(prompt_ids)}")
    check_positive("max_new_tokens", max_new_tokens)
    if capacity is not None:
        check_positive("capacity", capacity)
    needed = dims[1] + max_new_tokens - 1
    capacity = needed if capacity is None else capacity
    if needed > capacity:
        raise ValueError(
            f"expected a prompt of at most {max(0, capacity - max_new_tokens + 1)} tokens, so that {max_new_tokens} new"
            f" ones fit a cache of {capacity}; got {dims[1]}"
        )
    least, most = value_range(prompt_ids)
    if least < 0 or most >= model.num_tokens:
        raise ValueError(f"expected prompt_ids in 0..{model.num_tokens - 1}; got {least if least < 0 else most}")
    if prompt_lengths is not None:
        check_rank("prompt_lengths", prompt_lengths, 1, "(B,)")
        check_integer("prompt_lengths", prompt_lengths)
        check_broadcastable("prompt_lengths", prompt_lengths, dims[:1])
        if is_concrete(prompt_lengths):
            least, most = value_range(prompt_lengths)
            if least < 1 or most > dims[1]:
                raise ValueError(f"expected prompt_lengths in 1..{dims[1]}; got {least if least < 1 else most}")
    return int(capacity)


def _checked_stops(stop_ids: Any) -> list[int]:
    if not isinstance(stop_ids, list | tuple) or any(isinstance(i, bool) or not isinstance(i, int) for i in stop_ids):
        raise TypeError(f"expected stop_ids as a sequence of integers; got {stop_ids!r}")
    return list(stop_ids)
