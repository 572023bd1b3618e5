"""Keywords that a function does not take: other libraries' words for its own, and names that are close to one.

A call with the right keywords is not looked at: what Python raises for others is put into words afterwards.
"""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeVar, cast

from attention_core._arrays import explained

Function = TypeVar("Function", bound=Callable[..., Any])
Thing = TypeVar("Thing")

# By our own keywords, what to write, and what others call it. The first is told that the function takes.
_WORDS = {
    "key_mask": (
        ("key_mask=... over tokens, or mask=... over pairs, True = may attend", "attention_mask"),
        ("key_mask=..., True = may attend: ~key_padding_mask", "key_padding_mask src_key_padding_mask"),
        ("key_mask=...", "padding_mask value_mask memory_key_padding_mask"),
    ),
    "mask": (
        ("mask=..., True = may attend, or mask_from_additive(...)", "attn_mask attention_mask src_mask tgt_mask"),
        ("mask=MaskFunction(...)", "block_mask mask_mod"),
        ("mask=SlidingWindow(left, right)", "window_size sliding_window local_window_size window attention_window"),
        (
            "mask=Segments(...)",
            "segment_ids cu_seqlens cu_seqlens_q cu_seqlens_k decoder_segment_ids doc_ids document_ids",
        ),
        ("mask=KeyLengths(...)", "key_lengths kv_lengths seq_lens seqlens valid_length valid_lens sequence_length"),
        ("mask=KeyLengths(...)", "key_value_seq_lengths seqused_k cache_seqlens lengths"),
    ),
    "is_causal": (("is_causal=True", "use_causal_mask causal is_decoder use_causal_masking causal_mask"),),
    "return_weights": (
        ("return_weights=True", "need_weights return_attention_scores output_attentions return_attention_weights"),
        ("return_weights=True, which returns those of each head", "average_attn_weights sow_weights return_attn"),
    ),
    "return_logsumexp": (
        ("return_logsumexp=True", "return_lse return_softmax_lse return_residual return_attn_probs return_aux"),
    ),
    "cache": (("cache=...", "past_key_values past_key_value layer_past past_kv kv_cache use_cache"),),
    "memory": (("memory=...", "encoder_hidden_states encoder_output encoder_outputs context"),),
    "num_heads": (("num_heads=...", "nhead n_heads n_head num_attention_heads num_query_heads nheads heads"),),
    "num_key_value_heads": (
        ("num_key_value_heads=...", "num_kv_heads n_kv_heads kv_heads num_query_groups kv_num_heads enable_gqa"),
    ),
    "channels": (
        (
            "channels=...",
            "embed_dim d_model hidden_size hidden_dim dim input_dim in_features in_channels in_dim model_dim",
        ),
        ("channels=...", "qkv_features query_size features embedding_dim output_dim n_embd embedding_size filters"),
    ),
    "head_channels": (("head_channels=...", "k ratio reduction reduction_ratio"),),
    "spectral_norm": (("spectral_norm=...", "sn use_sn use_spectral_norm"),),
    "key_channels": (("key_channels=...", "kdim key_size key_in_features"),),
    "value_channels": (("value_channels=...", "vdim value_size value_in_features"),),
    "head_dim": (("head_dim=...", "key_dim qk_size head_size dim_head dim_k attention_head_size"),),
    "value_head_dim": (("value_head_dim=...", "value_dim vo_size dim_v"),),
    "output_channels": (("output_channels=...", "out_features output_shape output_size out_channels out_dim"),),
    "inner": (("inner=...", "dim_feedforward intermediate_size intermediate_dim d_ff mlp_dim ffn_dim"),),
    "bias": (
        ("bias=...", "use_bias qkv_bias add_bias attn_bias attention_bias use_query_bias position_bias"),
        ("bias=..., or score_mod=...", "relative_position_bias rel_pos_bias"),
    ),
    "extra_key_value": (("extra_key_value=True", "add_bias_kv"),),
    "zero_attention": (("zero_attention=True", "add_zero_attn"),),
    "scale": (("scale=...", "softmax_scale sm_scale attention_scale scaling qk_scale query_scale use_scale"),),
    "softcap": (("softcap=...", "logits_soft_cap logit_cap soft_cap attn_logits_soft_cap attn_logit_softcapping"),),
    "score_mod": (("score_mod=alibi(num_heads)", "alibi_slopes alibi use_alibi"),),
    "sinks": (("sinks=...", "sink s_aux attention_sinks learnable_sink"),),
    "dropout": (
        (
            "dropout=..., a rate in layers, and Dropout(rate, seed) in functions",
            "dropout_p dropout_rate attention_dropout attn_dropout attn_drop drop_rate hidden_dropout_prob attn_pdrop",
        ),
        ("dropout=Dropout(rate, seed)", "dropout_rng dropout_seed dropout_key generator rng seed"),
    ),
    "rate": (("rate=...", "p dropout_p dropout_rate drop_rate"),),
    "seed": (("seed=... in training", "rngs generator rng dropout_rng dropout_seed dropout_key key prng_key"),),
    "activation": (("activation=...", "activation_fn hidden_act act act_layer activation_function hidden_activation"),),
    "epsilon": (("epsilon=...", "eps layer_norm_eps norm_eps layer_norm_epsilon rms_norm_eps variance_epsilon"),),
    "norm_first": (("norm_first=...", "pre_norm normalize_before normalize_first prenorm"),),
    "implementation": (
        ("implementation=...", "backend impl kernel attn_implementation flash_attention use_flash use_flash_attention"),
    ),
    "arithmetic": (("arithmetic='reproducible' for the same bits", "deterministic precision reproducible"),),
    "num_tokens": (("num_tokens=...", "vocab_size num_embeddings vocabulary_size num_words"),),
    "num_positions": (("num_positions=...", "max_position_embeddings max_length maxlen sequence_length max_len"),),
    "num_segments": (("num_segments=...", "type_vocab_size"),),
    "segment_ids": (("segment_ids=...", "token_type_ids"),),
    "position_ids": (("position_ids=...", "positions input_pos"),),
    "iterations": (("iterations=...", "n_power_iterations power_iterations num_iterations n_steps"),),
    "base": (("base=...", "theta rope_theta rope_base max_wavelength"),),
    "rotary_base": (("rotary_base=...", "theta rope_theta rope_base rotary_emb_base max_wavelength"),),
    "width": (("width=...", "dim rotary_dim rotary_emb_dim head_dim"),),
    "rotary_width": (("rotary_width=...", "rotary_dim rotary_emb_dim rotary_ndims rotary_pct partial_rotary_factor"),),
    "divisors": (("divisors=...", "scale factor scaling_factor scaling rope_scaling"),),
    "rotary_divisors": (("rotary_divisors=...", "rope_scaling rope_parameters scaling_factor"),),
    "num_layers": (("num_layers=...", "n_layers n_layer num_hidden_layers depth"),),
    "query_key_norm": (("query_key_norm=...", "qk_norm qk_layernorm use_qk_norm normalize_qk"),),
    "tied": (("tied=...", "tie_word_embeddings tie_embeddings weight_tying"),),
    "window": (("window=...", "sliding_window window_size attention_window local_window_size"),),
    "pool": (("pool=...", "downsample sub_sample pooling max_pool pool_size"),),
    "offset": (("offset=...", "diagonal k shift"),),
    "left": (("left=..., right=...", "window_size window size sliding_window"),),
    "lengths": (("lengths=...", "seq_lens key_lengths valid_length kv_lengths"),),
    "data_format": (("data_format=...", "channels_first channels_last layout"),),
    "max_new_tokens": (("max_new_tokens=...", "max_length max_tokens max_gen_len max_gen_length"),),
    "prompt_lengths": (("prompt_lengths=...", "attention_mask lengths input_lengths"),),
    "stop_ids": (("stop_ids=...", "eos_token_id eos_id eos_token stop_tokens stop_token_ids"),),
    "temperature": (("temperature=..., by which tokens are drawn", "do_sample sample"),),
    "xp": (("xp=..., the namespace of the library", "np namespace framework array_namespace"),),
    # Parts of layers, which are attributes.
    "attention": (("attention", "self_attn self_attention attn mha multihead_attn"),),
    "attention_norm": (("attention_norm", "norm1 ln1 ln_1 layernorm1 input_layernorm"),),
    "feed_forward": (("feed_forward", "mlp ffn ff linear1 linear2"),),
    "feed_forward_norm": (("feed_forward_norm", "norm2 ln2 ln_2 layernorm2 post_attention_layernorm"),),
    "query": (("query", "q_proj wq to_q query_dense query_proj"),),
    "key": (("key", "k_proj wk to_k key_dense key_proj"),),
    "value": (("value", "v_proj wv to_v value_dense value_proj"),),
    "output": (("output", "out_proj o_proj wo to_out output_dense out"),),
    "gate": (("gate", "gate_proj w1"),),
    "expand": (("expand", "up_proj linear1 fc1 c_fc w3"),),
    "contract": (("contract", "down_proj linear2 fc2 c_proj w2"),),
    "token": (("token", "embed_tokens wte word_embeddings token_embedding embedding"),),
    "position": (("position", "wpe position_embeddings position_embedding"),),
}
# Of what there is no keyword for.
_WITHOUT = {
    "is_causal use_causal_mask causal": "is_causal=True as a setting, when a layer is made, or mask=Causal()",
    "key_padding_mask key_mask padding_mask src_key_padding_mask": "mask=mask_from_padding(...), True = may attend",
    "batch_first": "no batch_first, as the batch is first",
    "enable_gqa num_kv_heads num_key_value_heads": "key and value of fewer heads, which needs no keyword",
    "query_seq_lengths": "no lengths of queries, as no row depends on another",
    "dropout dropout_p dropout_rate p rate": "dropout as a setting, when the layer is made, and seed=... in training",
    "query key value q k v queries keys values": "query, key and value by position",
    "x input inputs inputs_q inputs_k inputs_v hidden_states src tensor input_ids": "arrays by position",
    "output_attentions need_weights return_weights": "no weights here: record_attention sees them",
    "parameters params weights state_dict": "parameters by position, first",
    "training train inference deterministic": "dropout in training alone",
    "dtype precision preferred_element_type": "no dtype, as results are of the dtype of the arrays",
    "approximate": "no approximation, as the GELU is exact",
    "n_power_iterations power_iterations": "no iterations, as each call in training takes one",
    "device": "no device, as results are on the device of the arrays",
    "axis dim": "no axis, as the last one holds the channels",
    "kernel_initializer bias_initializer embeddings_initializer gamma_initializer kernel_init bias_init": (
        "no initializer, as seed=... draws the first values, which may be replaced"
    ),
    "kernel_regularizer bias_regularizer embeddings_regularizer gamma_regularizer": (
        "no regularizer of its own, as each of its weights has a place for one, weight.regularizer"
    ),
    "kernel_constraint bias_constraint embeddings_constraint gamma_constraint": (
        "no constraint of its own, as each of its weights has a place for one, weight.constraint"
    ),
    "attention_axes": "no axes, as positions are at the one before the last",
    "labels targets": "no labels, as a loss is a function of logits",
    "inputs_embeds input_embeddings": "ids, which the table of tokens embeds",
    "num_beams beam_size num_return_sequences": "no beams, as each prompt has one text",
    "num_heads nhead n_heads": "heads as the axis before the length; split_heads makes it",
}
# By our own choice, what others call it, or what is the closest to it.
_CHOICES = {
    "fused": (
        "cudnn flash flash_attention flash_attention_2 flash_attention_3 sdpa mem_efficient efficient flex"
        " flex_attention pallas mosaic splash triton xformers"
    ),
    "dense": "eager math naive xla einsum manual vanilla",
    "blockwise": "chunked block blocks",
    "reproducible": "deterministic exact",
    "silu": "swish",
    "gelu": "gelu_python exact_gelu",
    "gelu_tanh": "gelu_new gelu_pytorch_tanh gelu_python_tanh gelu_fast gelu_approximate",
    "channels_last": "NHWC nhwc last",
    "channels_first": "NCHW nchw first",
    "float16": "fp16 f16 half",
    "bfloat16": "bf16",
    "float32": "fp32 f32 float single",
    "float64": "fp64 f64 double",
}


@functools.cache
def _others() -> dict[str, list[tuple[str, str]]]:
    """By a word of others: pairs of our keyword, and of what to write."""
    found: dict[str, list[tuple[str, str]]] = {}
    for ours, rows in _WORDS.items():
        for text, words in rows:
            for word in words.split():
                found.setdefault(word, []).append((ours, text))
    return found


def words_of(keyword: str, /) -> set[str]:
    """What other libraries call one of our keywords."""
    return {word for _, words in _WORDS[keyword] for word in words.split()}


def _hint(word: str, known: Iterable[str]) -> str | None:
    """What to write instead of another library's word, in a function with these keywords."""
    hints = (text for ours, text in _others().get(word, ()) if ours in known)
    return next(hints, None) or next((text for words, text in _WITHOUT.items() if word in words.split()), None)


def choice_hint(word: str, choices: Iterable[str], /) -> str:
    """What to write instead of another library's word for one of these choices."""
    word = word.lower()
    theirs = {each: ours for ours, words in _CHOICES.items() for each in (ours, *words.lower().split())}
    ours = next((each for each in (theirs.get(word, ""), word) if each in choices), None)
    return "" if ours is None else f": {ours!r} is the closest"


_OWNERS = ("self", "_cls")  # which are not given by who calls


def our_word(word: str, known: Iterable[str], /) -> str:
    """Another library's word as one of these, if it stands for one."""
    return next((ours for ours, _ in _others().get(word, ()) if ours in known), word)


class Names(NamedTuple):
    """The names of arguments: positional only, keywords too, how many have a place, and which have no default."""

    positional: tuple[str, ...]
    keywords: tuple[str, ...]
    places: int
    required: tuple[str, ...] = ()


def names_of(function: Callable[..., Any], options: Sequence[inspect.Parameter] = (), /) -> Names | None:
    """The names of a function's arguments, and of its ``**options``; ``None`` if unknown, or not written in Python."""
    plain: Any = inspect.unwrap(function)
    code = getattr(plain, "__code__", None)
    takes_any = inspect.CO_VARARGS if options else inspect.CO_VARARGS | inspect.CO_VARKEYWORDS
    if code is None or code.co_flags & takes_any:
        return None
    first, count, every = code.co_posonlyargcount, code.co_argcount, code.co_argcount + code.co_kwonlyargcount
    names, optional = code.co_varnames, plain.__kwdefaults__ or {}
    required = (*names[: count - len(plain.__defaults__ or ())], *(e for e in names[count:every] if e not in optional))
    keywords = (*names[first:every], *(each.name for each in options))
    return Names(names[:first], keywords, count, tuple(each for each in required if each not in _OWNERS))


def keyword_error(name: str, names: Names, unknown: str, /) -> TypeError:
    """The error for a keyword that a function of these names does not take."""
    by_position = [unknown, *(ours for ours, _ in _others().get(unknown, ()))]
    found = next((f"{ours} by position" for ours in by_position if ours in names.positional), None)
    hint = found or _hint(unknown, names.keywords)
    if hint is not None:
        return TypeError(f"expected {hint}, in {name}; got the keyword {unknown}")
    taken = [each for each in names.keywords if each not in _OWNERS]
    close = [each for each in difflib.get_close_matches(unknown, taken, cutoff=0.7) if each != unknown]
    answer = f". Did you mean {' or '.join(map(repr, close))}?" if close else f": it takes {', '.join(taken)}"
    return TypeError(f"{name}() got an unexpected keyword argument {unknown!r}{answer}")


def places_error(name: str, names: Names, count: int, /) -> TypeError:
    """The error for more positional arguments than a function of these names takes."""
    arrays = ", ".join(each for each in (*names.positional, *names.keywords)[: names.places] if each not in _OWNERS)
    options = "options" if arrays else ", ".join(f"{each}=..." for each in names.keywords if each not in _OWNERS)
    expected = f"{arrays or 'nothing'} of {name} by position, and {options} by keyword"
    return TypeError(f"expected {expected}; got {count} by position")


def missing_error(name: str, names: Names, count: int, options: Iterable[str], /) -> TypeError | None:
    """The error for arguments that a call lacks, with so many by position; ``None`` if it has all."""
    order = (*names.positional, *names.keywords)
    missing = [each for each in names.required if each not in (*order[:count], *options)]
    if not missing:
        return None
    needed = ", ".join(each if each in order[: names.places] else f"{each}=..." for each in names.required)
    return TypeError(f"expected {name}({needed}); got no {' and no '.join(missing)}")


def call_error(raised: Exception, name: str, names: Names, count: int, options: Iterable[str]) -> TypeError | None:
    """The error that says why a call raised another: what it gives a function of these names, or an array's class."""
    if isinstance(raised, RuntimeError):
        got = explained(str(raised))
        return None if got is None else TypeError(f"expected plain arrays, in {name}; got {got}")
    for option in options:
        if option not in names.keywords:
            return keyword_error(name, names, option)
    if count > names.places:
        return places_error(name, names, count - ((*names.positional, *names.keywords)[0] in _OWNERS))
    return missing_error(name, names, count, options)


def names_keywords(function: Function, name: str, /) -> Function:
    """Let a function raise `call_error` where Python raises for what a call gives.

    The signature stays, to readers, `inspect` and type checkers.
    """
    names = names_of(function)
    if names is None or hasattr(function, "names"):
        return function

    @functools.wraps(function)
    def named(*arguments: Any, **options: Any) -> Any:
        try:
            return function(*arguments, **options)
        except (TypeError, RuntimeError) as raised:
            error = call_error(raised, name, names, len(arguments), options)
            if error is not None:
                raise error from None
            raise

    named.names = names  # type: ignore[attr-defined]
    return cast("Function", named)


def unconverted(thing: Thing, /) -> Thing:
    """Keep TensorFlow's AutoGraph from rewriting a function, or the call of a class, and all that it calls.

    The mark is that of `tf.autograph.experimental.do_not_convert`, and needs no TensorFlow.
    """
    thing.autograph_info__ = {}  # type: ignore[attr-defined]
    return thing


def untraced(function: Function) -> Function:
    """Let torch.compile call a function of plain values, and not trace it."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def publish(namespace: dict[str, Any], names: Iterable[str], /) -> None:
    """Let the functions, dataclasses and calls of a public module name keywords, and keep AutoGraph out of them.

    What is written in a private module gets the address of the public one, by which pickles and documentation know it.
    """
    for name in names:
        thing = namespace[name]
        if isinstance(thing, type):
            for method in ("__init__", "__call__"):
                if inspect.isfunction(vars(thing).get(method)):
                    setattr(thing, method, names_keywords(vars(thing)[method], name))
            for each in (thing, *filter(inspect.isfunction, vars(thing).values())):
                unconverted(each)
        elif inspect.isfunction(thing):
            thing = namespace[name] = unconverted(names_keywords(thing, name))
        if "._" in getattr(thing, "__module__", ""):
            thing.__module__ = namespace["__name__"]
