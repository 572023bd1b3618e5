"""Cases whose results must have the same bits everywhere, in reproducible arithmetic.

Their inputs come from the core's own generator, which hashes a seed and a position: nothing has to be shipped.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import attention_core as ac
import attention_models as models
from attention_conformance.call import output_function
from attention_conformance.golden import inputs as drawn
from attention_conformance.own.identical import Identical
from attention_conformance.own.source import Blank, Source, Trees
from attention_conformance.problem import Problem, Rule, Seed, array
from attention_core import Dropout, functions
from attention_core.backend import array_namespace, on_device_of

CAUSAL = Rule("Causal")
WINDOW = Rule("SlidingWindow", {"left": 2, "right": 1})
LENGTHS = Rule("KeyLengths", {"lengths": "lengths"})
SEGMENTS = Rule("Segments", {"query_ids": "query_ids", "key_ids": "key_ids"})
EVERYTHING: dict[str, Any] = {"return_weights": True, "return_logsumexp": True}
BATCHED = ("query", "key", "value", "mask", "lengths", "query_ids", "key_ids")


def _attend(
    mask: Rule | None, options: Mapping[str, Any], trees: Trees, function: Any = ac.scaled_dot_product_attention
) -> Any:
    problem = Problem(trees, mask, {**options, "arithmetic": "reproducible"})
    return ac.Attention(**output_function(function, problem)(trees))


def _attention(
    name: str,
    shows: str,
    inputs: Callable[[Source], Trees],
    mask: Rule | None = None,
    *,
    dtype: str = "float32",
    **options: Any,
) -> Identical:
    options = {"return_logsumexp": True, **options}
    batched = () if "dropout" in options else BATCHED  # which draws for every sample of the batch
    return Identical(name, shows, inputs, functools.partial(_attend, mask, options), dtype=dtype, batched=batched)


SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("queries that attend to every key", {}),
    "one-key": ("a single key", {"columns": 1}),
    "one-query": ("a single query", {"rows": 1, "columns": 40}),
    "one-channel": ("heads of width 1", {"width": 1}),
    "wide": ("heads of width 128", {"width": 128, "heads": 1, "leading": ()}),
    "many": ("several blocks of queries and keys", {"rows": 150, "columns": 200, "heads": 2, "leading": ()}),
    "long": ("more than 4096 keys", {"rows": 3, "columns": 4500, "heads": 1, "leading": ()}),
    "two-batches": ("several leading axes", {"leading": (2, 3)}),
    "grouped-heads": ("two query heads for each key head", {"groups": 2}),
    "one-key-head": ("one key head for all query heads", {"groups": 1}),
    "value-width": ("values of a width of their own", {"value_width": 5}),
    "no-keys": ("no keys", {"columns": 0}),
    "no-queries": ("no queries", {"rows": 0}),
    "no-batch": ("no entry in the batch", {"leading": (0,)}),
}

ATTENTION = [
    *(_attention(name, shows, drawn.shaped(**sizes)) for name, (shows, sizes) in SHAPES.items()),
    _attention("causal", "no later keys", drawn.ordinary, CAUSAL),
    _attention("causal-offset", "queries that come later", drawn.ordinary, Rule("Causal", {"offset": 3})),
    _attention("causal-empty-rows", "queries before all keys", drawn.ordinary, Rule("Causal", {"offset": -3})),
    _attention("causal-many", "blocks that are masked whole", drawn.shaped(**SHAPES["many"][1]), CAUSAL),
    _attention("window", "keys near the query", drawn.ordinary, WINDOW),
    _attention("lengths", "a length of 0 among them", drawn.with_lengths, LENGTHS),
    _attention("segments", "keys of the same segment", drawn.with_segments, SEGMENTS),
    _attention("mask", "a boolean array", drawn.masked, array("mask")),
    _attention("mask-and-window", "both masks", drawn.masked, WINDOW & array("mask")),
    _attention("mask-or-causal", "one mask or the other", drawn.masked, CAUSAL | array("mask")),
    _attention("not-window", "keys far from the query", drawn.ordinary, ~WINDOW),
    _attention("bias", "a bias", drawn.biased),
    _attention("bias-of-minus-infinity", "a bias that masks", drawn.shut),
    _attention("scale", "a scale", drawn.ordinary, scale=0.3),
    _attention("softcap", "capped scores", drawn.ordinary, softcap=2.5),
    _attention("softcap-window", "capped scores, with a mask", drawn.ordinary, WINDOW, softcap=1.5),
    _attention("dropout", "dropped weights", drawn.ordinary, dropout=Seed(0.3, 7)),
    _attention("dropout-causal", "dropped weights, with a mask", drawn.ordinary, CAUSAL, dropout=Seed(0.5, 2**40 + 7)),
    _attention("weights", "weights as well", drawn.ordinary, return_weights=True),
    _attention("weights-masked", "weights as well, masked and dropped", drawn.masked, array("mask"), **EVERYTHING),
    _attention("output-alone", "the output alone", drawn.ordinary, CAUSAL, return_logsumexp=False),
    _attention("near-ties", "scores near 10⁴ that differ little", drawn.near_ties),
    _attention("wide-range", "exponents from -100 to 100", drawn.spread(-100, 100)),
    _attention("subnormals", "values below the normal numbers", drawn.subnormal),
    _attention("zeros", "zeros alone", drawn.constant(0.0)),
    _attention("negative-zeros", "negative zeros alone", drawn.constant(-0.0)),
    _attention("extreme-values-masked", "infinities and nan, masked for some", drawn.unlike_numbers("value"), CAUSAL),
    _attention("extreme-keys-masked", "infinities and nan, masked for some", drawn.unlike_numbers("key"), CAUSAL),
    _attention("extreme-values", "infinities and nan among values", drawn.unlike_numbers("value")),
    _attention("extreme-keys", "infinities and nan among keys", drawn.unlike_numbers("key")),
    _attention("extreme-queries", "infinities and nan among queries", drawn.unlike_numbers("query"), CAUSAL),
    _attention("shared", "a sequence that ranks can share", drawn.shared(), CAUSAL),
    _attention("shared-spread", "the same, scores that deviate by 8", drawn.shared(8.0), CAUSAL),
    _attention("shared-zero-channels", "the same, with channels of zeros", drawn.zero_channels, CAUSAL),
    _attention("shared-long", "the same, with 5040 keys", drawn.shared(rows=48, columns=5040),
               Rule("Causal", {"offset": 4992})),
    *(
        _attention(f"{dtype}-{name}", f"{dtype}: {shows}", inputs, mask, dtype=dtype, **options)
        for dtype in ("float16", "bfloat16")
        for name, shows, inputs, mask, options in (
            ("plain", "queries that attend to every key", drawn.ordinary, None, {}),
            ("causal-dropout", "no later keys, dropped weights", drawn.ordinary, CAUSAL, {"dropout": Seed(0.2, 3)}),
            ("bias", "a bias that masks, and weights", drawn.biased, WINDOW, {"return_weights": True}),
            ("extreme", "infinities and nan, masked for some", drawn.unlike_numbers("key", "value"), CAUSAL, {}),
        )
    ),
]  # fmt: skip


def _called(function: Callable[..., Any], names: tuple[str, ...], options: Mapping[str, Any], trees: Trees) -> Any:
    return function(*(trees[name] for name in names), arithmetic="reproducible", **options)


def _layer(
    name: str,
    shows: str,
    function: Callable[..., Any],
    inputs: Callable[[Source], Trees],
    names: tuple[str, ...] = ("parameters", "x"),
    *,
    dtype: str = "float32",
    **options: Any,
) -> Identical:
    return Identical(name, shows, inputs, functools.partial(_called, function, names, options), dtype=dtype)


def _embed(parameters: Any, ids: Any, segments: Any, **options: Any) -> Any:
    return functions.embed_tokens(parameters, ids, segment_ids=segments, **options)


def _decode(trees: Trees) -> Any:
    """Logits of prompts of different lengths that are taken in at once, and of three more tokens, one by one."""
    parameters, ids = trees["parameters"], trees["ids"]
    xp, batch = array_namespace(ids), ids.shape[0]
    options: dict[str, Any] = {"arithmetic": "reproducible", **GROUPS}
    cache = models.empty_decoder_cache(2, (batch,), 2, 7, 4, ragged=True, xp=xp, **on_device_of(ids))
    logits, cache = models.decoder(parameters, ids[:, :4], cache=cache, num_new=trees["lengths"], **options)
    outputs = [xp.where((xp.arange(4, **on_device_of(ids)) < trees["lengths"][:, None])[..., None], logits, 0.0)]
    for position in (4, 5, 6):
        logits, cache = models.decoder(parameters, ids[:, position : position + 1], cache=cache, **options)
        outputs.append(logits)
    return xp.concat(outputs, axis=1)


DROPOUT = Dropout(0.1, 11)
HEADS: dict[str, Any] = {"num_heads": 4}
GROUPS: dict[str, Any] = {"num_heads": 4, "num_key_value_heads": 2}

BENT: dict[str, Any] = {"mask": ac.Causal(offset=1), "softcap": 2.0}
SCALED, PLACED = ("scale", "x"), ("x", "positions")

LAYERS = [
    _layer("scores", "the scores alone, capped and masked", ac.attention_scores, drawn.pair, names=("query", "key"),
           **BENT),
    _layer("linear", "an affine map", functions.linear, drawn.affine),
    _layer("linear-wide-range", "exponents from -60 to 60", functions.linear, drawn.affine_spread),
    _layer("layer-norm", "normalized channels", functions.layer_norm, drawn.normalized),
    _layer("rms-norm", "channels over their root mean square", functions.rms_norm, drawn.scaled, names=SCALED),
    _layer("rms-norm-wide-range", "exponents from -140 to 120", functions.rms_norm, drawn.scaled_spread, names=SCALED),
    _layer("rotary", "near and far positions", functions.rotary_embedding, drawn.placed, names=PLACED),
    _layer("rotary-interleaved", "some channels kept", functions.rotary_embedding, drawn.placed, names=PLACED,
           interleaved=True, width=10),
    _layer("rotary-wide-range", "exponents from -140 to 120", functions.rotary_embedding, drawn.placed_spread,
           names=PLACED, base=5e5),
    _layer("gelu", "x from -40 to 40", functions.gelu, drawn.line, names=("x",)),
    _layer("gelu-extremes", "subnormals, infinities and nan", functions.gelu, drawn.line_of_extremes, names=("x",)),
    _layer("silu", "x from -40 to 40", functions.silu, drawn.line, names=("x",)),
    _layer("silu-extremes", "subnormals, infinities and nan", functions.silu, drawn.line_of_extremes, names=("x",)),
    _layer("gated-feed-forward", "two maps, one gated by the other", functions.feed_forward,
           drawn.gated_feed_forward),
    _layer("feed-forward", "two maps", functions.feed_forward, drawn.feed_forward),
    _layer("feed-forward-dropout", "two maps, and dropout", functions.feed_forward, drawn.feed_forward,
           dropout=DROPOUT),
    _layer("multi-head", "projected heads, and weights", ac.multi_head_attention, drawn.multi_head,
           **HEADS, **EVERYTHING),
    _layer("encoder", "norms first, dropout", functions.encoder_layer, drawn.encoder, dropout=DROPOUT,
           mask=ac.Causal(), **HEADS),
    _layer("encoder-norm-last", "norms last, dropout", functions.encoder_layer, drawn.encoder, norm_first=False,
           dropout=DROPOUT, **HEADS),
    replace(
        _layer("decoder", "a language model", models.decoder, drawn.language, names=("parameters", "ids"), **GROUPS),
        modes=("eager", "jit", "graph", "compiled"),  # XLA compiles its exact sums for minutes in TensorFlow
    ),
    Identical("decoder-cache", "its prompts at once, then token by token", drawn.language, _decode,
              batched=("ids", "lengths"), modes=("eager",)),
    _layer("embed-tokens", "three tables, a norm, dropout", _embed, drawn.tokens,
           names=("parameters", "ids", "segments"), dropout=Dropout(0.1, 5)),
    _layer("sagan", "all places of an image", functions.sagan_attention, drawn.image, pool=False, return_weights=True),
    _layer("sagan-pooled", "maxima of 2 × 2 places", functions.sagan_attention, drawn.image),
    _layer("spectral-norm", "three steps of power iteration", functions.spectral_norm, drawn.matrix,
           names=("weight", "u"), iterations=3),
    *(
        _layer(f"{dtype}-{name}", f"{dtype}: {shows}", function, inputs, dtype=dtype, **options)
        for dtype in ("float16", "bfloat16")
        for name, shows, function, inputs, options in (
            ("linear", "an affine map", functions.linear, drawn.affine, {}),
            ("layer-norm", "normalized channels", functions.layer_norm, drawn.normalized, {}),
            ("encoder", "norms first, dropout", functions.encoder_layer, drawn.encoder, {"dropout": DROPOUT, **HEADS}),
        )
    ),
    _layer("bfloat16-rms-norm", "bfloat16: channels over their root", functions.rms_norm, drawn.scaled, names=SCALED,
           dtype="bfloat16"),
    _layer("bfloat16-rotary", "bfloat16: near and far positions", functions.rotary_embedding, drawn.placed,
           names=PLACED, dtype="bfloat16"),
]  # fmt: skip

VARIABLES = ("query", "key", "value", "bias", "parameters", "x", "scale", "weight", "u")
UNDIFFERENTIATED = {  # what others show as well: compilers take seconds for every gradient
    "one-query", "wide", "two-batches", "one-key-head", "no-queries", "no-batch", "causal", "mask-and-window",
    "mask-or-causal", "not-window", "scale", "softcap", "dropout", "weights", "output-alone", "negative-zeros",
    "extreme-values", "extreme-keys", "feed-forward", "decoder", "decoder-cache",
    *(f"{dtype}-{name}" for dtype in ("float16", "bfloat16") for name in ("plain", "layer-norm")),
}  # fmt: skip


def _differentiated(case: Identical) -> Identical:
    trees = case.inputs(Blank(case.name, case.dtype))
    variables = tuple(name for name in VARIABLES if name in trees)
    return replace(case, name=f"{case.name}-gradient", shows=f"gradients: {case.shows}", variables=variables)


LARGER = {"lengths", "grouped-heads", "extreme-values-masked", "decoder-cache"}

IDENTICAL: tuple[Identical, ...] = (
    *(replace(case, larger=case.name in LARGER) for case in (*ATTENTION, *LAYERS)),
    *(_differentiated(case) for case in (*ATTENTION, *LAYERS) if case.name not in UNDIFFERENTIATED),
)
"""The catalogue."""
