"""The public functions of scaled dot-product attention."""

from __future__ import annotations

from numbers import Real
from typing import Any, Unpack, overload

from .._arithmetic import ARITHMETICS, check_arithmetic, check_width, fan_out
from .._arrays import Array, ArrayT, cast_to, sizes, sizes_differ
from .._attention.call import CONTEXTS, Attention, Call, assumes_finite, has_no_pairs, record
from .._attention.memo import Known, output_of, with_plan
from .._attention.shards.strategies import Sharded, explain_shards, taken_strategy
from .._attention.ways import Explanation, all_scores, check_implementation, explain, run_call
from .._backend import backend_for, common_namespace, may_be_step, with_autocast
from .._checks import (
    check_arity,
    check_attention,
    check_flags,
    check_function,
    check_scaling,
    check_shapes,
    once_per_signature,
)
from ..masks import And, Causal, Mask
from ..masks._mask import as_mask
from ..masks._rules import check_covered, check_mask
from ..random import check_dropout, seeded
from ..scores import ScoreMod
from .options import (
    DEFAULTS,
    FLAGS,
    NUMBERS,
    Options,
    WithLogsumexp,
    WithoutFlags,
    WithWeights,
    arrays_of,
    options_but,
    with_constants,
)
from .shards import check_shared, place_of, whole_lengths

NOT_OF_SCORES = (*FLAGS, "sinks", "dropout", "implementation", "assume_finite", "shards")
OF_THE_WHOLE = ("shards", "mask", "bias")
NOT_OF_CALLS = ("is_causal", "return_weights", "return_logsumexp", "implementation", "shards", "xp")
SCALE_LIMIT = 2.0**64  # what is multiplied by numbers beyond may be subnormal even in float64


@overload
def scaled_dot_product_attention(
    query: ArrayT, key: Array, value: Array, /, **options: Unpack[WithoutFlags]
) -> ArrayT: ...
@overload
def scaled_dot_product_attention(
    query: ArrayT, key: Array, value: Array, /, **options: Unpack[WithWeights]
) -> Attention: ...
@overload
def scaled_dot_product_attention(
    query: ArrayT, key: Array, value: Array, /, **options: Unpack[WithLogsumexp]
) -> Attention: ...
@overload
def scaled_dot_product_attention(query: Array, key: Array, value: Array, /, **options: Unpack[Options]) -> Any: ...
@may_be_step
@with_autocast(options=options_but())
def scaled_dot_product_attention(query: Array, key: Array, value: Array, /, **options: Unpack[Options]) -> Any:
    r"""Average the values over the keys, weighted by how well each key matches the query.

    .. math::

        o_i &= \sum_j p_{ij} v_j, \qquad p_{ij} = \exp(s_{ij} - \ell_i), \qquad \ell_i = \log \sum_j \exp s_{ij}, \\
        s_{ij} &= f\!\left(c \tanh\frac{(\sigma q_i) \cdot k_j}{c}\right) + b_{ij},

    where j runs over the keys that query i may attend to. A fully masked row gives exactly 0, with
    :math:`\ell_i = -\infty` and gradients exactly 0. Masked values reach neither result nor gradient, even NaN.

    Parameters
    ----------
    query : Array, shape (..., H, M, D)
        Of dtype float16, bfloat16, float32 or float64. 16-bit types are computed in float32 and rounded once.
    key : Array, shape (..., G, N, D)
        G divides H: query head h uses key head h // (H / G).
    value : Array, shape (..., G, N, E)
    mask : Mask or Array of bool, broadcastable to (..., H, M, N), optional
        True where query i may attend to key j.
    bias : Array, broadcastable to (..., H, M, N), optional
        Added to the scaled scores; -inf masks the key. Of the query's dtype, or float32 with 16-bit types.
    is_causal : bool
        Also apply ``Causal()``: key position <= query position.
    scale : float or 0-d Array, optional
        :math:`\sigma`; by default :math:`D^{-1/2}`. It multiplies the query, so that finite scores do not overflow.
    softcap : float or 0-d Array, optional
        c; by default the scores are not capped.
    score_mod : callable, optional
        f, a function ``score_mod(scores, batch, head, query, key)`` of scores and positions (see `masks.Positions`), as
        in PyTorch's FlexAttention. Pass a `ScoreMod` if it needs arrays: blocks compute no gradient of others. A score
        that it makes -inf is not masked: use a mask.
    sinks : Array, shape (H,), optional
        The score of a sink for each head: a key without a value, to which every query attends. It takes a share of the
        weights. It is the logsumexp of a fully masked row.
    dropout : Dropout, optional
        Rate and seed of dropout, applied to the weights.
    return_weights, return_logsumexp : bool
        Whether to return p (before dropout), and :math:`\ell` (in the compute dtype). The output does not change.
    implementation : {"auto", "dense", "blockwise", "fused"}, or the name of a kernel
        ``"dense"`` computes all scores at once. ``"blockwise"`` computes them block by block, in memory that does not
        grow with M × N, and skips fully masked blocks. ``"fused"`` calls the first kernel of the library that gives the
        same answer, and a name such as ``"torch.nn.attention.flex_attention"`` that kernel. ``"auto"`` takes the
        fastest of all; `explain_attention` tells which, and the names of the kernels. Only ``"dense"`` can be
        differentiated in forward mode, or twice on every library. In 16 bits, a kernel rounds weights, too: errors are
        at most 2 units in the last place of :math:`\sum_j p_{ij} |v_j|`, instead of half a unit.
    arithmetic : {"fast", "reproducible"}
        ``"fast"`` uses the products and functions of the library. ``"reproducible"`` gives the same bits on every
        library and device, compiled or not, for any batch and block size, in the output and all gradients. It takes
        float32 and 16-bit types, no ``score_mod``, no ``sinks``, and Python numbers as scale and softcap.
    assume_finite : bool, optional
        Whether values and their products are assumed to be finite: then nothing is checked, and a masked NaN may leak.
        By default, a host checks arguments or results, and an accelerator sets to 0 what a rule hides from all
        queries. With ``False``, an accelerator checks, too, and the host waits for it. `config_context` sets this for
        all calls in a block of code.
    shards : Shards, optional
        Query, key, value and the rows of the bias are those of one rank of a group, as `shard` gives them, and so is
        the output. Masks, key lengths and segments are those of the whole, and positions count from its start. With
        ``strategy="merge"``, only key and value are those of one rank.
    xp : array namespace, optional
        By default that of the arrays.

    Returns
    -------
    Array, shape (..., H, M, E)
        Of the query's dtype. If a return flag is set: ``Attention(output, weights, logsumexp)`` with weights of shape
        (..., H, M, N) and logsumexp of shape (..., H, M).

    Raises
    ------
    TypeError
        When an argument is not an array of the right dtype, or libraries are mixed.
    ValueError
        When shapes, devices or numbers do not fit, or a kernel that is asked for does not give the same answer. All
        errors are raised before any computation.

    Notes
    -----
    Values are summed before the division by the sum of the exponentials. So N times the largest value has to be finite
    in the compute dtype. A query that attends to what is not finite gets a non-finite row where the formula gives one;
    the library decides which of NaN and the infinities. A mask that leaves the same run of keys to all queries of a
    sample may count as none.

    References
    ----------
    A. Vaswani et al., "Attention is all you need", 2017. J. Ainslie et al., "GQA", 2023.

    Examples
    --------
    >>> import array_api_strict as xp
    >>> query, key, value = xp.zeros((1, 2, 4)), xp.ones((1, 3, 4)), xp.asarray([[[1.0], [2.0], [6.0]]])
    >>> scaled_dot_product_attention(query, key, value, is_causal=True)
    Array([[[1. ],
            [1.5]]], dtype=array_api_strict.float64)
    """
    settled: dict[str, Any] = {"implementation": "auto", **options}
    result = checked_attention(query, key, value, settled)
    return result if settled.get("return_weights") or settled.get("return_logsumexp") else result.output


def checked_attention(query: Array, key: Array, value: Array, options: dict[str, Any]) -> Attention:
    """Check the arguments of attention, once per signature, and compute it by what is known of that."""
    if options.get("shards") is not None:
        return _attend_shards(query, key, value, options)
    known = _check_call(query=query, key=key, value=value, **options)
    call = _known_call(known, query, key, value, options)
    output = None if CONTEXTS.recorders else output_of(known, call)
    if output is not None:
        return Attention(output)
    weights, logsumexp = bool(options.get("return_weights")), bool(options.get("return_logsumexp"))
    return rounded_attention(call, options["implementation"], weights=weights, logsumexp=logsumexp)


def _attend_shards(query: Array, key: Array, value: Array, options: dict[str, Any]) -> Attention:
    """Attention of a sequence of which this rank holds a shard, by a strategy of its group."""
    sharded, wants_logsumexp = _sharded(query, key, value, options), bool(options.get("return_logsumexp"))
    call = sharded.call
    if sharded.here.size == 1 and sharded.lengths[1] == key.shape[-2]:  # the whole, in order
        return checked_attention(query, key, value, {**options, "shards": None, "dropout": call.dropout})
    strategy = taken_strategy(sharded, options["shards"].strategy)
    if has_no_pairs(call):  # nor any bits: exact sums have nothing to cut
        call = call._replace(arithmetic="fast")
    call = Call._make((*fan_out(call[:3], ARITHMETICS[call.arithmetic], call.xp), *call[3:]))
    result = strategy.run(sharded._replace(call=call), logsumexp=wants_logsumexp)
    output = cast_to(result.output, query.dtype, xp=call.xp)
    return Attention(output, None, result.logsumexp if wants_logsumexp else None)


def _sharded(query: Array, key: Array, value: Array, options: dict[str, Any]) -> Sharded:
    """The call of a shard, where it is, and the lengths of the whole, over which mask and bias are."""
    rest = {name: option for name, option in options.items() if name not in OF_THE_WHOLE}
    known = _check_call(query=query, key=key, value=value, **rest)
    if options.get("return_weights"):
        raise ValueError("expected no return_weights with shards, as no rank has the weights of the whole; got True")
    implementation = options.get("implementation", "auto")
    if implementation not in ("auto", "dense", "blockwise"):
        raise ValueError(
            "expected an implementation out of auto, dense, blockwise with shards, as a kernel is judged when keys are"
            f" there; got {implementation!r}"
        )
    if CONTEXTS.recorders:
        raise ValueError("expected calls without shards while attention is recorded; got one with shards")
    here, _ = place_of(options["shards"], query)
    lengths = whole_lengths(options["shards"], here, query, key)
    call = _known_call(known, query, key, value, rest)
    added = with_constants(query, {name: options.get(name) for name in ("mask", "bias")})
    mask, bias = added["mask"], added["bias"]
    common_namespace(call.xp, {"query": query, **arrays_of(added)})
    check_shared(query, mask, bias, lengths)
    if options.get("is_causal"):
        mask = _CAUSAL if mask is None else _with_causal(mask)
    return Sharded(call._replace(mask=mask, bias=bias), here, lengths, implementation)


def rounded_attention(call: Call, implementation: str, *, weights: bool = False, logsumexp: bool = False) -> Attention:
    """Run a call, and round output and weights to the dtype of the query."""
    if CONTEXTS.recorders:
        record(call)
    result, dtype, xp = run_call(call, implementation, weights=weights, logsumexp=logsumexp), call.query.dtype, call.xp
    return Attention(
        cast_to(result.output, dtype, xp=xp),
        cast_to(result.weights, dtype, xp=xp) if weights else None,
        result.logsumexp if logsumexp else None,
    )


@with_autocast(options=options_but("implementation"))
def explain_attention(query: Array, key: Array, value: Array, /, **options: Unpack[Options]) -> Explanation:
    """Explain which implementation ``"auto"`` takes for a call, and why it takes no other.

    Parameters
    ----------
    query, key, value, mask, bias, is_causal, scale, softcap, score_mod, sinks, dropout
        As in `scaled_dot_product_attention`. No attention is computed.
    arithmetic, assume_finite, shards, xp
        As in `scaled_dot_product_attention`. With shards, it is the strategy that is explained.
    return_weights, return_logsumexp : bool, default False
        Whether the call would ask for them: a kernel without a logsumexp may then cost a second computation.

    Returns
    -------
    Explanation
        Printed, it is a few lines of text.

    Examples
    --------
    >>> import array_api_strict as xp
    >>> x = xp.zeros((1, 8, 4096, 64), dtype=xp.float32)
    >>> print(explain_attention(x, x, x))
    blockwise: there are so many scores that they are better never held at once
      fused: refused: array_api_strict has no fused kernel that is known here
      dense: not taken: holds all scores at once
    """
    if (shards := options.get("shards")) is not None:
        sharded = _sharded(query, key, value, dict(options))
        return explain_shards(sharded, shards.strategy)
    call = make_call(query, key, value, **options)
    weights, logsumexp = (bool(options.get(name)) for name in FLAGS[1:])
    return explain(call, weights=weights, logsumexp=logsumexp)


@with_autocast(options=options_but(*NOT_OF_SCORES))
def attention_scores(query: Array, key: Array, /, **options: Unpack[Options]) -> Array:
    r"""Compute the scores of attention: scaled, capped, modified, with bias, and masked with -inf.

    .. math:: s_{ij} = f\!\left(c \tanh\frac{(\sigma q_i) \cdot k_j}{c}\right) + b_{ij}

    Parameters
    ----------
    query : Array, shape (..., H, M, D)
    key : Array, shape (..., G, N, D)
    mask, bias, scale, softcap, score_mod, arithmetic, xp
        As in `scaled_dot_product_attention`.

    Returns
    -------
    Array, shape (..., H, M, N)
        Of the query's dtype.

    Examples
    --------
    >>> import array_api_strict as xp
    >>> attention_scores(xp.ones((1, 1, 4)), xp.ones((1, 2, 4)), mask=xp.asarray([True, False]))
    Array([[[  2., -inf]]], dtype=array_api_strict.float64)
    """
    call = make_call(query, key, key, **options)
    return cast_to(all_scores(call), query.dtype, xp=call.xp)


def check_options(query: Array, num_heads: int | None, **settled: Any) -> None:
    """Raise unless options of attention are valid, and supported by the arithmetic."""
    options = DEFAULTS | settled
    check_flags(**{name: options[name] for name in FLAGS})
    if options["assume_finite"] is not None:
        check_flags(assume_finite=options["assume_finite"])
    check_implementation(options["implementation"], query)
    check_arithmetic(options["arithmetic"], "query", query)
    check_width(options["arithmetic"], "query", query)
    check_scaling(options["scale"], options["softcap"])
    if options["arithmetic"] == "reproducible":
        _check_reproducible(options)
    if options["score_mod"] is not None:
        _check_score_mod(options["score_mod"], num_heads)
    if options["sinks"] is not None:
        check_shapes("sinks: H adds to query", {"sinks": options["sinks"], "query": query}, {"H": num_heads})
    if options["dropout"] is not None:
        check_dropout(options["dropout"])


def _check_reproducible(options: dict[str, Any]) -> None:
    implementation = options["implementation"]
    if implementation not in ("auto", "dense", "blockwise"):
        raise ValueError(
            "expected another implementation with arithmetic='reproducible', as kernels add up in an order of their"
            f" own; got {implementation!r}"
        )
    for name in NUMBERS:
        number = options[name]
        if number is None:
            continue
        if not isinstance(number, Real):
            raise ValueError(f"expected {name} as a number with arithmetic='reproducible'; got {type(number).__name__}")
        if number and not 1 / SCALE_LIMIT <= abs(float(number)) <= SCALE_LIMIT:
            raise ValueError(
                f"expected a {name} of 0, or from 2**-64 to 2**64 in magnitude, with arithmetic='reproducible'; got"
                f" {number}"
            )
    for name in ("score_mod", "sinks"):
        if options[name] is not None:
            raise ValueError(f"expected no {name} with arithmetic='reproducible'; got one")


def make_call(query: Array, key: Array, value: Array, /, **options: Any) -> Call:
    """The arguments of attention, once they are known to be right.

    With ``starts``, queries and keys are a piece of the whole, and a mask is one over all positions.
    """
    return _known_call(_check_call(query=query, key=key, value=value, **options), query, key, value, options)


def _known_call(known: Known, query: Array, key: Array, value: Array, options: dict[str, Any]) -> Call:
    """The arguments of attention, which are known to be right."""
    planned = known.planned
    if planned is not None and planned.fields is not None:
        finite = assumes_finite(*CONTEXTS.settings) if planned.assume_finite is None else planned.assume_finite
        return Call._make((query, key, value, *planned.fields, finite))
    options = with_constants(query, options) if known.has_constants else options
    fields = {name: option for name, option in options.items() if name not in NOT_OF_CALLS}
    fields["dropout"] = seeded(fields.get("dropout"), query, known.xp)
    assumed = fields.get("assume_finite")  # else the context is read, here alone: what is traced keeps it
    fields["assume_finite"] = assumes_finite(*CONTEXTS.settings) if assumed is None else bool(assumed)
    if options.get("is_causal"):
        fields["mask"] = _CAUSAL if fields.get("mask") is None else _with_causal(fields["mask"])
    if "starts" in fields and fields.get("mask") is not None:
        fields["mask"] = as_mask(fields["mask"])  # over positions of the whole
    call = Call(query, key, value, backend=known.backend, **fields | {"xp": known.xp})
    if planned is not None and planned.is_of_numbers:
        planned.fields = call[3:-1]
    return call


_CAUSAL = Causal()


def _with_causal(mask: Mask | Array) -> Mask:
    """The mask and `Causal`. Not by ``&``, which compilers trace as their own."""
    return And(_CAUSAL, as_mask(mask))


@once_per_signature
def _check_call(*, query: Array, key: Array, value: Array, starts: Any = None, **options: Any) -> Known:
    """Raise unless the arguments fit together; return what is known of such calls, and how to run them."""
    check_arithmetic(options.get("arithmetic", "fast"), "query", query)
    raw = options | {"starts": starts}
    turned = with_constants(query, raw)
    arrays, options = {"query": query, "key": key, "value": value, **arrays_of(turned)}, dict(turned)
    mask, bias, starts, xp = (options.pop(name, None) for name in ("mask", "bias", "starts", "xp"))
    mask = None if mask is None else as_mask(mask)  # which tells what is no mask
    xp = common_namespace(xp, arrays)
    check_attention(query, key, value, bias)
    check_options(query, sizes(query)[-3], **options)
    if mask is not None:
        lengths = sizes(query)[-2], sizes(key)[-2]
        check_mask(mask, (*sizes(query)[:-2], *(lengths if starts is None else (None, None))), query)
        if starts is not None:
            check_covered(mask, starts, lengths)
    known = Known(xp, backend_for(query, xp), turned is not raw)
    return with_plan(known, (query, key, value), raw)


def _check_score_mod(score_mod: Any, num_heads: int | None) -> None:
    """Raise unless this is a function, for so many heads if it is for some number."""
    check_function("score_mod", score_mod)
    check_arity("score_mod", score_mod, "scores, batch, head, query and key", 5)
    wanted = score_mod.num_heads if isinstance(score_mod, ScoreMod) else None
    if sizes_differ(wanted, num_heads):
        raise ValueError(f"expected a score_mod for {num_heads} heads, those of query; got one for {wanted}")
