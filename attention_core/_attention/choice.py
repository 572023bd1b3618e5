"""The ways to run the one definition, and which of them a call takes."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

from attention_core._arithmetic import arithmetic_of, fan_out
from attention_core._arrays import Array, cast_to, dtype_name, sizes, upcast
from attention_core._attention.blocks.forward import blockwise
from attention_core._attention.blocks.grid import EXACT_WORK
from attention_core._attention.blocks.plan import block_tuning
from attention_core._attention.blocks.query_chunks import chunks_of_call
from attention_core._attention.call import Attention, Call, group_size
from attention_core._attention.dense import dense, dense_scores, repeats_keys
from attention_core._attention.key_range import KeyCut, cut_keys, has_few_queries
from attention_core._attention.reproducible.forward import reproducible_attention
from attention_core._attention.reproducible.scores import reproducible_scores
from attention_core._attention.reproducible.weights import reproducible_weights
from attention_core._attention.samples import attend_per_sample, cuts_that_save, sample_calls
from attention_core._attention.softmax import logaddexp
from attention_core._backend import Kernel, Verdict, backend_of, is_exporting, library_name
from attention_core._checks import check_choice
from attention_core.masks._mask import is_structured

IMPLEMENTATIONS = ("auto", "dense", "blockwise", "fused")
REASONS = {
    "dense": "there are so few scores that cutting them into blocks would take longer",
    "blockwise": "there are so many scores that they are better never held at once",
    "fused": "a kernel of the library gives the answer of the definition",
}

_SLOWER: dict[str, dict[str, str]] = {  # by what is chosen, why not the others
    "blockwise": {"dense": "holds all scores at once"},
    "fused": {"blockwise": "slower than the kernel", "dense": "slower than the kernel, and holds all scores at once"},
}


class Candidate(NamedTuple):
    """One way to run a call.

    Attributes
    ----------
    name : str
        ``"dense"``, ``"blockwise"`` or ``"fused"``.
    kernel : str or None
        The fused kernel, by the name its library has for it; ``implementation=`` takes this name, too.
    refusal : str or None
        Why this way is not open to the call, or ``None`` where it is.
    memory : int or None
        About how many bytes it needs at a time besides its arguments; ``None`` where sizes are unknown.
    slower : str or None
        Why it is not taken although it is open, or ``None`` where it is taken or refused.
    """

    name: str
    kernel: str | None
    refusal: str | None
    memory: int | None
    slower: str | None = None


class Explanation(NamedTuple):
    """Which implementation a call takes, and why.

    Attributes
    ----------
    chosen : str
    reason : str
    candidates : tuple of Candidate
    notes : tuple of str
        What is computed besides, and other ways that are decided when a program runs.
    """

    chosen: str
    reason: str
    candidates: tuple[Candidate, ...]
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = [f"{self.chosen}: {self.reason}"]
        for name, kernel, refusal, memory, slower in self.candidates:
            label = name if kernel is None else f"{name} ({kernel})"
            size = "memory unknown" if memory is None else f"about {memory / 2**20:.3g} MiB"
            size = size if slower is None else f"{size}, not taken: {slower}"
            lines.append(f"  {label}: {size}" if refusal is None else f"  {label}: refused: {refusal}")
        return "\n".join([*lines, *(f"  {note}" for note in self.notes)])


def check_implementation(implementation: Any, like: Array | None = None) -> None:
    """Raise unless this names an implementation, or a kernel of the library of an array."""
    may_be_kernel = like is not None and isinstance(implementation, str) and implementation not in IMPLEMENTATIONS
    backend = backend_of(like) if may_be_kernel else None
    kernels = [] if backend is None else [kernel.name for kernel in backend.kernels if implementation in kernel.name]
    check_choice("an implementation", implementation, (*IMPLEMENTATIONS, *kernels))


def attend(call: Call, implementation: str, *, weights: bool, logsumexp: bool) -> Attention:
    """Run a call, with its sinks: the output depends on the logsumexp, so that one implementation computes both.

    What is returned besides the output does not decide how that is computed. If the implementation cannot give it, it
    is computed separately, or refused if the implementation was asked for by name.
    """
    if call.sinks is None:
        return _attend(call, implementation, weights=weights, logsumexp=logsumexp)
    return with_sinks(_attend(call, implementation, weights=weights, logsumexp=True), call)


def attend_automatically(call: Call) -> Array:
    """The output of the implementation that ``"auto"`` takes, in the dtype of the query."""
    return cast_to(attend(call, "auto", weights=False, logsumexp=False).output, call.query.dtype, xp=call.xp)


def with_sinks(result: Attention, call: Call) -> Attention:
    r"""Let every query also attend to a sink, a score without a value: :math:`\ell' = \log(e^\ell + e^s)`."""
    xp = call.xp
    logsumexp = logaddexp(result.logsumexp, xp.expand_dims(upcast(call.sinks, xp=xp), axis=-1), xp=xp)
    anchor = xp.where(xp.equal(logsumexp, -math.inf), 0.0, logsumexp)  # -inf - -inf would be NaN
    share = xp.expand_dims(xp.exp(xp.subtract(result.logsumexp, anchor)), axis=-1)
    weights = None if result.weights is None else xp.multiply(result.weights, share)
    return Attention(xp.multiply(result.output, share), weights, logsumexp)


def _attend(call: Call, implementation: str, *, weights: bool, logsumexp: bool) -> Attention:
    if call.arithmetic == "reproducible":
        return _reproducible(call, implementation, weights=weights)
    whole, call = call, without_hidden_keys(call)
    if implementation not in IMPLEMENTATIONS:
        return _attend_by_kernel(call, implementation, weights=weights, logsumexp=logsumexp)
    automatic = implementation == "auto"
    kernel = from_kernel = cuts = None
    if automatic:
        kernel = _preferred_kernel(call)
        if logsumexp and _has_logsumexp(kernel, call):
            from_kernel = kernel.attend_with_logsumexp(call)
        elif call.sinks is not None:
            kernel = None
        cuts = None if kernel is not None else cuts_of_samples(whole)
        implementation = "dense" if cuts is not None else _choose(call, kernel)
    if weights and not automatic and implementation != "dense":
        raise _no_weights(implementation)
    if cuts is not None:
        result = attend_per_sample(whole, cuts, logsumexp=logsumexp)
    elif implementation == "dense":
        result = dense(call, weights=weights and call is whole, logsumexp=logsumexp)
    elif from_kernel is not None:
        result = Attention(from_kernel[0], None, from_kernel[1])
    elif implementation == "blockwise":
        result = _blockwise(whole)
    else:
        if logsumexp and not automatic:
            raise _no_logsumexp("fused", "few kernels return it")
        result = Attention((kernel or _first_kernel(call)).attend(call))
    if logsumexp and result.logsumexp is None:
        result = result._replace(logsumexp=(dense(call) if is_dense_faster(call) else _blockwise(whole)).logsumexp)
    if weights and result.weights is None:
        result = result._replace(weights=dense(whole, weights=True, logsumexp=False).weights)
    return result


def _attend_by_kernel(call: Call, name: str, *, weights: bool, logsumexp: bool) -> Attention:
    """Run a call by the kernel of this name, which says why if it would not give the answer."""
    kernel: Any = next(kernel for kernel in call.backend.kernels if kernel.name == name)
    if weights:
        raise _no_weights(name)
    refusal = kernel.judge(call).refusal
    if refusal is not None:
        raise ValueError(f"expected a call that {name} answers as defined; got one that it does not: it {refusal}")
    if not logsumexp:
        return Attention(kernel.attend(call))
    if not _has_logsumexp(kernel, call):
        raise _no_logsumexp(name, "this kernel does not return it")
    output, found = kernel.attend_with_logsumexp(call)
    return Attention(output, None, found)


def _no_logsumexp(implementation: str, reason: str) -> ValueError:
    return ValueError(
        f"expected no return_logsumexp and no sinks with implementation={implementation!r}, as {reason};"
        " got True: implementation='blockwise' returns it"
    )


def all_scores(call: Call) -> Array:
    """All scores of a call."""
    if call.arithmetic == "fast" or has_no_pairs(call):
        return dense_scores(call)
    query, key = fan_out((call.query, call.key), arithmetic_of(call.arithmetic), call.xp)
    return reproducible_scores(call._replace(query=query, key=key, value=key))


def _no_weights(implementation: str) -> ValueError:
    return ValueError(
        f"expected no return_weights with implementation={implementation!r}, as weights have the size that it"
        " avoids; got True: implementation='dense' returns them"
    )


def _reproducible(call: Call, implementation: str, *, weights: bool) -> Attention:
    """In reproducible arithmetic, in whose bits blocks do not show."""
    if weights and implementation == "blockwise":
        raise _no_weights(implementation)
    xp = call.xp
    if has_no_pairs(call):
        return dense(call, weights=weights)
    query, key, value = fan_out((call.query, call.key, call.value), arithmetic_of("reproducible"), xp)
    call = call._replace(query=query, key=key, value=value)
    of_weights = call
    if weights:
        call, of_weights = _for_two_uses(call)
    output, logsumexp, reference = reproducible_attention(call)
    return Attention(output, reproducible_weights(of_weights, reference) if weights else None, logsumexp)


def _for_two_uses(call: Call) -> tuple[Call, Call]:
    """The call for output and weights, whose gradients a compiler would add before it rounds them to 16 bits."""
    copies = arithmetic_of("reproducible").copies
    arrays = {name: getattr(call, name) for name in ("query", "key", "bias") if getattr(call, name) is not None}
    pairs = {name: copies(array, 2, xp=call.xp) for name, array in arrays.items()}
    first, second = ({name: pair[use] for name, pair in pairs.items()} for use in (0, 1))
    return call._replace(**first), call._replace(**second)


def explain(call: Call, *, weights: bool, logsumexp: bool) -> Explanation:
    """Which implementation `attend` would choose."""
    backend = call.backend
    if call.arithmetic == "reproducible":
        return _explain_reproducible(call)
    whole, call = call, without_hidden_keys(call)
    notes = [*_assumptions(call), *(["return_weights: the dense form computes the weights"] if weights else [])]
    verdicts = [kernel.judge(call) for kernel in backend.kernels]
    preferred = None if has_no_elements(call) else _first_preferred(backend.kernels, verdicts)
    taken = preferred
    computed_again = (logsumexp or call.sinks is not None) and not _has_logsumexp(preferred, call)
    if call.sinks is not None and computed_again:
        preferred = None
    cuts = None if preferred is not None else cuts_of_samples(whole)
    chosen = "dense" if cuts is not None else _choose(call, preferred)
    if cuts is not None:
        notes.append(f"dense: {len(cuts)} samples one by one, each with the keys that its lengths leave")
    if chosen == "fused" and computed_again:
        notes.append(f"return_logsumexp: computed separately, {_choose(call, None)}")
    kernels = [
        Candidate(
            "fused",
            kernel.name,
            verdict.refusal,
            _memory(call, 0),
            None if verdict.refusal or kernel is preferred else _disadvantage(call, kernel, verdict, taken=taken),
        )
        for kernel, verdict in zip(backend.kernels, verdicts, strict=True)
    ]
    if not kernels:
        kernels = [Candidate("fused", None, f"{library_name(call.xp)} has no fused kernel that is known here", None)]
    chunks, tuning = chunks_of_call(call), block_tuning(call)
    if chunks:
        notes.append(f"blockwise: {len(chunks)} query chunks instead of blocks, if norms bound all scores")
    slower = _SLOWER.get(chosen) or {"blockwise": _disadvantage_of_blocks(call, cuts)}
    return Explanation(
        chosen,
        REASONS[chosen],
        (
            *kernels,
            Candidate(
                "blockwise",
                None,
                None,
                _memory(call, tuning.queries * tuning.keys),
                slower.get("blockwise"),
            ),
            Candidate("dense", None, None, _memory(call, math.inf), slower.get("dense")),
        ),
        tuple(notes),
    )


def _disadvantage_of_blocks(call: Call, cuts: list[KeyCut] | None) -> str:
    """Why the dense form is taken, and not blocks, as `is_dense_faster` decides."""
    if cuts is not None:
        return "slower than samples one by one"
    rows, columns = sizes(call.query)[-2], sizes(call.key)[-2]
    if has_no_elements(call):
        return "there is nothing to cut"
    if rows is None or columns is None:
        return "lengths are not known before it runs"
    if is_exporting(call.query):
        return "an exported program would need an operator of attention-core"
    return "saves nothing for so few queries" if has_few_queries(rows, columns) else "slower for so few scores"


def _disadvantage(call: Call, kernel: Kernel, verdict: Verdict, *, taken: Kernel | None) -> str:
    """Why a kernel that gives the answer is not taken."""
    if has_no_elements(call):
        return "query, key or value is empty"
    if not verdict.is_faster:
        return verdict.slower or "slower than what is written here"
    if kernel is taken:
        return "returns no logsumexp here, which sinks need"
    return "another kernel comes first"


def _explain_reproducible(call: Call) -> Explanation:
    """Reproducible arithmetic is computed in blocks, whose size does not show: by either name."""
    backend = call.backend
    kernels: list[str | None] = [kernel.name for kernel in backend.kernels]
    memory = _memory(call, 2 * block_tuning(call).exact_scores)  # six arrays of a block
    return Explanation(
        "blockwise",
        "in reproducible arithmetic, there are blocks alone, and their size does not show",
        (
            *(Candidate("fused", name, "adds up in an order of its own", None) for name in kernels or [None]),
            Candidate("blockwise", None, None, memory),
            Candidate("dense", None, None, memory, "is computed in the same blocks"),
        ),
        _assumptions(call),
    )


def _assumptions(call: Call) -> tuple[str, ...]:
    return ("assume_finite: no value is looked at, and a masked NaN may leak",) if call.assume_finite else ()


def _preferred_kernel(call: Call) -> Any:
    """The kernel that is faster than what is written here, and gives the answer; ``None`` if there is none."""
    kernels = call.backend.kernels
    if not kernels or has_no_elements(call):
        return None
    return _first_preferred(kernels, (kernel.judge(call) for kernel in kernels))


def _first_preferred(kernels: tuple[Kernel, ...], verdicts: Iterable[Verdict]) -> Kernel | None:
    pairs = zip(kernels, verdicts, strict=True)
    return next((kernel for kernel, verdict in pairs if verdict.is_faster and verdict.refusal is None), None)


def without_hidden_keys(call: Call) -> Call:
    """The call with its keys cut, unless they are as many as queries, of which blocks leave out what is masked."""
    return call if call.mask is None or call.query.shape[-2] == call.key.shape[-2] else cut_keys(call)


def cuts_of_samples(call: Call) -> list[KeyCut] | None:
    """The cuts of samples of a ragged batch, if these take less time one by one, by the dense form."""
    cuts = cuts_that_save(call)
    return cuts if cuts is not None and all(map(is_dense_faster, sample_calls(call, cuts))) else None


def _has_logsumexp(kernel: Any, call: Call) -> bool:
    return kernel is not None and kernel.has_logsumexp(call)


def _choose(call: Call, kernel: Any) -> str:
    if kernel is not None:
        return "fused"
    return "dense" if is_dense_faster(call) or has_no_elements(call) else "blockwise"


def has_no_elements(call: Call) -> bool:
    """Whether query, key or value is empty."""
    return any(0 in sizes(array) for array in call[:3])


def has_no_pairs(call: Call) -> bool:
    """Whether there is no query, or no key."""
    return any(0 in sizes(array)[:-1] for array in call[:2])


def is_dense_faster(call: Call) -> bool:
    """Whether the dense form is faster than blocks, or safer.

    It is safer in two places, where blocks are taken only by name. Lengths unknown while tracing may turn out 0, of
    which XLA makes no blocks. An exported program would need an operator of attention-core.
    """
    *leading, rows, _ = sizes(call.query)
    columns, tuning = sizes(call.key)[-2], call.backend.tuning
    if rows is None or columns is None or is_exporting(call.query):
        return True
    num_scores = 0 if None in leading else math.prod(leading) * rows * columns  # type: ignore[arg-type]
    if num_scores > tuning.dense_most:
        return False
    if has_few_queries(rows, columns):
        return True
    if num_scores > tuning.costly_most and _is_dense_costly(call, rows, columns):
        return False
    return bool(rows * columns <= (tuning.structured_below if is_structured(call.mask) else tuning.dense_below))


def _is_dense_costly(call: Call, rows: int, columns: int) -> bool:
    """Whether the dense form branches on values that are not finite, or repeats keys that are many."""
    if call.mask is not None or call.bias is not None:
        return True
    return 4 * rows <= columns and repeats_keys(call, group_size(call.query, call.key, call.xp))


def _blockwise(call: Call) -> Attention:
    if has_no_elements(call):
        return dense(call)
    lengths = sizes(call.query)[-2], sizes(call.key)[-2]
    if None in lengths and not (call.backend.loops.traced or is_exporting(call.query)):
        raise ValueError("expected known lengths with implementation='blockwise' on this library; got unknown ones")
    output, logsumexp = blockwise(call)
    return Attention(output, None, logsumexp)


def _first_kernel(call: Call) -> Any:
    """The first kernel that gives the answer."""
    refusals = []
    for kernel in call.backend.kernels:
        verdict = kernel.judge(call)
        if verdict.refusal is None:
            return kernel
        refusals.append(f"{kernel.name} {verdict.refusal}")
    reasons = "; ".join(refusals) or f"{library_name(call.xp)} has none that is known here"
    raise ValueError(f"expected a call that a fused kernel answers as defined; got one that none does: {reasons}")


def _memory(call: Call, scores: float) -> int | None:
    """Three arrays of scores (scores, exponentials, and what is between them) for each thread, and the output."""
    query, columns, width = sizes(call.query), sizes(call.key)[-2], sizes(call.value)[-1]
    if None in (*query, columns, width):
        return None
    *leading, rows, _ = query
    batch = math.prod(leading)  # type: ignore[arg-type]
    is_exact = call.arithmetic == "reproducible"
    num_scores = batch * rows * columns  # type: ignore[operator]
    threads = call.backend.loops.num_at_once(num_scores * (EXACT_WORK if is_exact else 1))
    at_once = min(num_scores, threads * scores)
    size = 8 if dtype_name(call.query.dtype) == "float64" or is_exact else 4
    return size * int(3 * at_once + batch * rows * width)  # type: ignore[operator]
