"""Text of a language model: token by token, with a cache."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from attention_core._arrays import (
    Array,
    DType,
    Namespace,
    cast_to,
    index_dtype,
    named_arrays,
    on_device_of,
    positions,
    shape,
    shape_text,
    sizes,
    tree_from_names,
)
from attention_core._backend import Backend, as_constant, backend_for, common_namespace, is_concrete, without_warnings
from attention_core._checks import (
    check_broadcastable,
    check_choice,
    check_dtype,
    check_flags,
    check_function,
    check_integer,
    check_parameters,
    check_placement,
    check_positive,
    check_rank,
    plain_integer,
    value_range,
)
from attention_core.layers.adapters import FixedSettings
from attention_core.random import seed_words
from attention_models import parameters as trees
from attention_models._decoder import DecoderCache, LayerProgram
from attention_models._definition import Decoder
from attention_models._sampling import check_sampling, check_tokens, sample_tokens


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
    model: Any,
    parameters: Any,
    prompt_ids: Array | None = None,
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
    cache_dtype: DType | str | None = None,
    mode: str = "eager",
    compiled_loop: bool = False,
    on_step: Callable[[Array, Array], Any] | None = None,
    xp: Namespace | None = None,
) -> Generated:
    """Continue prompts by a language model: ``generate(model, parameters, prompt_ids)``, or ``(layer, prompt_ids)``.

    Parameters
    ----------
    model : Decoder
        Or a layer of an adapter, which holds its parameters: nothing is dropped, and no gradient goes through them.
    parameters : attention_models.parameters.Decoder
        Not for a layer.
    prompt_ids : Array of int, shape (B, L)
    max_new_tokens : int
    prompt_lengths : Array of int, shape (B,), optional
        How many ids of each prompt are no padding; by default all.
    padding : {"right", "left"}
        Where shorter prompts are padded.
    stop_ids : sequence of int
        Tokens that end a text.
    temperature, top_k, top_p, seed
        As in `attention_models.sample_tokens`. By default, the most probable token is chosen.
    capacity : int, optional
        Of the cache; by default as many positions as are needed.
    cache_dtype : dtype or str, optional
        Of the cache; by default that of the parameters, which gives the logits of one forward pass. A narrower one
        rounds keys and values to it.
    mode : str
        How a step is run: one of `attention_core.backend.Backend.modes`. A step is compiled once, also for several
        calls with arrays of the same shapes. PyTorch compiles a layer, of which all that are alike share the program.
    compiled_loop : bool
        Whether all steps are one program with a `jax.lax.while_loop` or a `tf.while_loop`: in a ``mode`` of JAX or
        TensorFlow that compiles. The tokens are the same.
    on_step : callable, optional
        ``on_step(tokens, logits)`` is called with (B,) and (B, V) at every step.
    xp : array namespace, optional

    Raises
    ------
    TypeError, ValueError
        When arguments do not fit, or prompt and new tokens are more than the cache holds: before any computation. And
        when logits have no greatest one, as in `attention_models.sample_tokens`.

    Examples
    --------
    >>> import array_api_strict as xp
    >>> model = Decoder(50, 8, 2, 16, num_layers=2)
    >>> found = generate(model, model.init(0, xp=xp), xp.asarray([[3, 14, 15]]), max_new_tokens=4)
    >>> found.token_ids.shape, int(found.num_new[0])
    ((1, 4), 4)
    """
    layer = model if isinstance(model, FixedSettings) else None
    model = model if layer is None else layer.definition
    if not isinstance(model, Decoder):
        raise TypeError(f"expected model as Decoder; got {type(model).__name__}")
    if layer is not None:
        if prompt_ids is not None:
            raise TypeError("expected generate(layer, prompt_ids, ...), as a layer holds its parameters; got both")
        parameters, prompt_ids = _held(layer), parameters
    check_parameters("parameters", parameters, trees.Decoder)
    prompt_ids, prompt_lengths = (as_constant(each, parameters.token) for each in (prompt_ids, prompt_lengths))
    xp = common_namespace(xp, {"prompt_ids": prompt_ids, "parameters": parameters, "prompt_lengths": prompt_lengths})
    max_new_tokens, top_k = plain_integer(max_new_tokens), plain_integer(top_k)
    capacity = check_prompts(model, prompt_ids, prompt_lengths, max_new_tokens=max_new_tokens, capacity=capacity)
    check_choice("padding", padding, ("right", "left"))
    check_sampling(temperature, top_k, top_p)
    cache_dtype = parameters.token.dtype if cache_dtype is None else check_dtype(cache_dtype, xp)
    with without_warnings(parameters.token):
        check_placement(cache_dtype, None, xp)
    if on_step is not None:
        check_function("on_step", on_step)
    stops = _checked_stops(stop_ids)
    backend = backend_for(parameters.token, xp)
    _check_mode(backend, mode, compiled_loop, on_step)
    batch, length = shape(prompt_ids, xp=xp)
    with without_warnings(parameters.token):
        prompt_ids = xp.astype(prompt_ids, xp.int32)
        lengths = xp.full((batch,), length, dtype=xp.int32, **on_device_of(prompt_ids))
        lengths = lengths if prompt_lengths is None else xp.astype(prompt_lengths, xp.int32)
        if padding == "left" and prompt_lengths is not None:
            prompt_ids = _to_the_left(prompt_ids, lengths, xp)
        hook = None if mode == "eager" or backend.loops.traced else _layer_program(model, backend, mode)
        sampling: dict[str, Any] = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
        plan = _Plan(model, hook, max_new_tokens, capacity, cache_dtype, stop_ids=stops, **sampling)
        seed = seed if mode == "eager" else _seed_array(seed, prompt_ids, xp)
        functions = (_all_steps,) if compiled_loop else (_start, _advance)
        first, *further = (_program(function, plan, backend, mode=mode) for function in functions)
        state = first(parameters, prompt_ids, lengths, seed)
    for index in range(1, max_new_tokens + 1 if further else 1):
        if on_step is not None:
            on_step(state.tokens, state.logits)
        if index == max_new_tokens or (stops and is_concrete(state.ended) and bool(xp.all(state.ended))):
            break
        with without_warnings(parameters.token):
            step = xp.full((), index, dtype=xp.int32, **on_device_of(state.tokens))
            state = further[0](parameters, seed, step, state)
    token_ids = state.token_ids
    if is_concrete(token_ids):
        check_tokens(token_ids)
    if stops and batch and is_concrete(state.num_new):
        token_ids = token_ids[:, : int(xp.max(state.num_new))]
    return Generated(token_ids, state.num_new)


def _held(layer: FixedSettings) -> trees.Decoder:
    """The parameters of a layer, through which no gradient goes."""
    tree = layer.read()
    backend = backend_for(tree.token, common_namespace(None, {"parameters": tree}))
    held = {name: backend.stop_gradient(array) for name, array in named_arrays(tree).items()}
    return tree_from_names(tree, held)  # type: ignore[no-any-return]


class _Plan(NamedTuple):
    """What a compiled program is made for."""

    model: Decoder
    hook: LayerProgram | None
    max_new_tokens: int
    capacity: int
    cache_dtype: DType
    stop_ids: tuple[int, ...]
    temperature: float
    top_k: int | None
    top_p: float | None

    def sample(self, logits: Array, seed: Any, step: Any, xp: Namespace) -> Array:
        options: dict[str, Any] = {"temperature": self.temperature, "top_k": self.top_k, "top_p": self.top_p}
        return sample_tokens(logits, seed=seed, step=step, xp=xp, **options)


class _State(NamedTuple):
    """What goes from step to step: arrays whose shapes and dtypes never change."""

    tokens: Array
    logits: Array
    token_ids: Array
    num_new: Array
    ended: Array
    cache: DecoderCache


def _start(
    plan: _Plan, backend: Backend, parameters: trees.Decoder, prompt_ids: Array, lengths: Array, seed: Any
) -> _State:
    """Take in the prompts, and choose the first token of each."""
    xp, (batch, _) = backend.namespace, shape(prompt_ids, xp=backend.namespace)
    on_device = on_device_of(prompt_ids)
    options = {"dtype": plan.cache_dtype, "device": on_device_of(parameters.token).get("device"), "xp": xp}
    cache = plan.model.empty_cache((batch,), plan.capacity, ragged=True, **options)
    new = {"num_new": lengths, "select": xp.expand_dims(xp.subtract(lengths, 1), axis=-1)}
    logits, cache = plan.model(parameters, prompt_ids, cache=cache, donate=True, hook=plan.hook, **new)
    logits = xp.squeeze(logits, axis=-2)
    tokens = plan.sample(logits, seed, 0, xp)
    nothing = xp.zeros((batch, plan.max_new_tokens), dtype=xp.int32, **on_device)
    ended = xp.zeros_like(lengths, dtype=xp.bool)
    return _recorded(plan, _State(tokens, logits, nothing, xp.zeros_like(lengths), ended, cache), 0, xp)


def _advance(plan: _Plan, backend: Backend, parameters: trees.Decoder, seed: Any, step: Any, state: _State) -> _State:
    """Choose another token of each text; those that have ended repeat their last."""
    xp = backend.namespace
    tokens = xp.maximum(xp.expand_dims(state.tokens, axis=-1), 0)  # a missing one is told in the end
    logits, cache = plan.model(parameters, tokens, cache=state.cache, donate=True, hook=plan.hook)
    logits = xp.squeeze(logits, axis=-2)
    tokens = xp.where(state.ended, state.tokens, plan.sample(logits, seed, step, xp))
    return _recorded(plan, state._replace(tokens=tokens, logits=logits, cache=cache), step, xp)


def _recorded(plan: _Plan, state: _State, step: Any, xp: Namespace) -> _State:
    """The state with its tokens in their column, and in all that come later."""
    index = positions(plan.max_new_tokens, state.token_ids, xp=xp)
    is_later = xp.greater_equal(index, xp.astype(step, index.dtype) if hasattr(step, "dtype") else step)
    token_ids = xp.where(is_later, xp.expand_dims(state.tokens, axis=-1), state.token_ids)
    num_new, ended = xp.add(state.num_new, xp.astype(xp.logical_not(state.ended), xp.int32)), state.ended
    for stop in plan.stop_ids:
        ended = xp.logical_or(ended, xp.equal(state.tokens, stop))
    return state._replace(token_ids=token_ids, num_new=num_new, ended=ended)


def _all_steps(
    plan: _Plan, backend: Backend, parameters: trees.Decoder, prompt_ids: Array, lengths: Array, seed: Any
) -> _State:
    """Take in the prompts and choose all tokens, in a loop that a compiler traces once."""
    xp = backend.namespace

    def body(index: Any, state: _State) -> _State:
        return _advance(plan, backend, parameters, seed, index, state)

    def proceed(state: _State) -> Array:
        return xp.logical_not(xp.all(state.ended))

    state = _start(plan, backend, parameters, prompt_ids, lengths, seed)
    options = {"proceed": proceed} if plan.stop_ids else {}
    return backend.loops.loop(1, plan.max_new_tokens, body, state, **options)  # type: ignore[no-any-return]


def _program(function: Callable[..., _State], plan: _Plan, backend: Any, /, *, mode: str) -> Callable[..., _State]:
    runs = mode == "eager" or plan.hook is not None
    return functools.partial(function, plan, backend) if runs else _compiled(function, plan, backend, mode)


@functools.lru_cache(maxsize=16)
def _compiled(function: Callable[..., _State], plan: _Plan, backend: Any, mode: str, /) -> Callable[..., _State]:
    """A compiled function for a plan, kept for the next texts."""
    return backend.compile(functools.partial(function, plan, backend), mode=mode)  # type: ignore[no-any-return]


@functools.lru_cache(maxsize=16)
def _layer_program(model: Decoder, backend: Backend, mode: str, /) -> LayerProgram:
    """What runs the layers of a model, kept for the next texts; a key of the cache is what the program is made for."""
    return LayerProgram(backend, mode)


def _seed_array(seed: Any, like: Array, xp: Namespace) -> Any:
    """A seed as two words, so that a compiled program takes any."""
    low, high = seed_words(seed, xp=xp)
    return seed if hasattr(low, "dtype") else xp.asarray([low, high], dtype=xp.int32, **on_device_of(like))


def _check_mode(backend: Backend, mode: Any, compiled_loop: Any, on_step: Any) -> None:
    check_choice("mode", mode, backend.modes)
    check_flags(compiled_loop=compiled_loop)
    if not compiled_loop:
        return
    if mode == "eager" or not backend.loops.traced:
        expected = "compiled_loop in mode jit of jax, or graph or xla of tensorflow"
        raise ValueError(f"expected {expected}; got mode {mode} of {backend.name}")
    if on_step is not None:
        raise ValueError("expected on_step or compiled_loop, in which no function is called at a step; got both")


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


def check_prompts(
    model: Decoder,
    prompt_ids: Array,
    prompt_lengths: Array | None = None,
    /,
    *,
    max_new_tokens: int,
    capacity: int | None = None,
) -> int:
    """Raise unless a model and a cache take prompts, as `generate` does: before any weight is there.

    Parameters
    ----------
    model : Decoder
    prompt_ids : Array of int, shape (B, L)
    prompt_lengths : Array of int, shape (B,), optional
    max_new_tokens : int
    capacity : int, optional

    Returns
    -------
    int
        The capacity of the cache.

    Raises
    ------
    TypeError, ValueError
        When ids have no row in the table, or prompt and new tokens are more than the cache holds.

    Examples
    --------
    >>> import array_api_strict as xp
    >>> check_prompts(Decoder(50, 8, 2, 16, num_layers=2), xp.asarray([[3, 14, 15]]), max_new_tokens=4)
    6
    """
    check_rank("prompt_ids", prompt_ids, 2, "(B, L)")
    check_integer("prompt_ids", prompt_ids)
    dims = sizes(prompt_ids)
    if len(dims) != 2 or dims[1] is None or not dims[1]:
        raise ValueError(f"expected prompt_ids (B, L) of at least one token; got {shape_text(prompt_ids)}")
    max_new_tokens = check_positive("max_new_tokens", max_new_tokens)
    needed = dims[1] + max_new_tokens - 1
    capacity = needed if capacity is None else check_positive("capacity", capacity)
    if needed > capacity:
        raise ValueError(
            f"expected a capacity of at least {needed} for {dims[1]} tokens and {max_new_tokens} new ones;"
            f" got {capacity}"
        )
    least, most = value_range(prompt_ids)
    if least < 0 or most >= model.num_tokens:
        raise ValueError(f"expected prompt_ids in 0..{model.num_tokens - 1}; got {least if least < 0 else most}")
    if prompt_lengths is not None:
        check_rank("prompt_lengths", prompt_lengths, 1, "(B,)")
        check_integer("prompt_lengths", prompt_lengths)
        check_broadcastable("prompt_lengths", prompt_lengths, dims[:1])
        if is_concrete(prompt_lengths) and 0 not in prompt_lengths.shape:
            least, most = value_range(prompt_lengths)
            if least < 1 or most > dims[1]:
                raise ValueError(f"expected prompt_lengths in 1..{dims[1]}; got {least if least < 1 else most}")
    return capacity


def _checked_stops(stop_ids: Any) -> tuple[int, ...]:
    stops = tuple(map(plain_integer, stop_ids)) if isinstance(stop_ids, list | tuple) else (None,)
    if any(isinstance(i, bool) or not isinstance(i, int) for i in stops):
        raise TypeError(f"expected stop_ids as a sequence of integers; got {stop_ids!r}")
    return stops
