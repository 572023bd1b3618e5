"""The ways to run the one definition, and which of them a call takes."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from attention_core._arithmetic import arithmetic_of, fan_out
from attention_core._arrays import Array, dtype_name, positions, shape, sizes
from attention_core._attention.blocks.streaming import blockwise
from attention_core._attention.call import Attention, Call
from attention_core._attention.dense import dense, dense_scores
from attention_core._attention.reproducible.attention import reproducible_attention
from attention_core._attention.reproducible.scores import reproducible_scores
from attention_core._backend import KernelWithLogsumexp, Verdict, is_exporting, library_name
from attention_core.masks._mask import is_structured

IMPLEMENTATIONS = ("auto", "dense", "blockwise", "fused")
REASONS = {
    "dense": "there are so few scores that cutting them into blocks would take longer",
    "blockwise": "there are so many scores that they are better never held at once",
    "fused": "a kernel of the library gives the answer of the definition",
}


class Candidate(NamedTuple):
    """One way to run a call.

    Attributes
    ----------
    name : str
        ``"dense"``, ``"blockwise"`` or ``"fused"``.
    kernel : str or None
        The fused kernel, by the name its library has for it.
    refusal : str or None
        Why this way is not open to the call, or ``None`` where it is.
    memory : int or None
        About how many bytes it needs at a time beside its arguments; ``None`` where sizes are unknown.
    """

    name: str
    kernel: str | None
    refusal: str | None
    memory: int | None


class Explanation(NamedTuple):
    """Which implementation a call takes, and why.

    Attributes
    ----------
    chosen : str
    reason : str
    candidates : tuple of Candidate
    """

    chosen: str
    reason: str
    candidates: tuple[Candidate, ...]

    def __str__(self) -> str:
        lines = [f"{self.chosen}: {self.reason}"]
        for name, kernel, refusal, memory in self.candidates:
            label = name if kernel is None else f"{name} ({kernel})"
            size = "memory unknown" if memory is None else f"about {memory / 2**20:.3g} MiB"
            lines.append(f"  {label}: {size}" if refusal is None else f"  {label}: refused: {refusal}")
        return "\n".join(lines)


def check_implementation(implementation: Any) -> None:
    """Raise unless this names an implementation."""
    if not isinstance(implementation, str) or implementation not in IMPLEMENTATIONS:
        raise ValueError(f"expected an implementation out of {', '.join(IMPLEMENTATIONS)}; got {implementation!r}")


def attend(call: Call, implementation: str, *, weights: bool, logsumexp: bool, has_sinks: bool = False) -> Attention:
    """Run a call. With sinks, the output depends on the logsumexp, so that one implementation computes both.

    What is returned beside the output does not decide how that is computed: where the implementation cannot give it,
    it is computed apart, or refused if the implementation was asked for by name.
    """
    if call.arithmetic == "reproducible":
        return _reproducible(call, implementation, weights=weights)
    automatic = implementation == "auto"
    kernel = from_kernel = None
    if automatic:
        kernel = _preferred_kernel(call)
        if logsumexp and isinstance(kernel, KernelWithLogsumexp):
            from_kernel = kernel.attend_with_logsumexp(call)
        if has_sinks and from_kernel is None:
            kernel = None
        implementation = _choose(call, kernel)
    if implementation == "dense":
        return dense(call, weights=weights, logsumexp=logsumexp)
    if weights and not automatic:
        raise _no_weights(implementation)
    if from_kernel is not None:
        result = Attention(from_kernel[0], None, from_kernel[1])
    elif implementation == "blockwise":
        result = _blockwise(call)
    else:
        if logsumexp and not automatic:
            raise ValueError(
                "expected no return_logsumexp and no sinks with implementation='fused', as kernels keep it to"
                " themselves; got True: implementation='blockwise' returns it"
            )
        result = Attention((kernel or _first_kernel(call)).attend(call))
    if logsumexp and result.logsumexp is None:
        result = result._replace(logsumexp=(dense(call) if is_dense_faster(call) else _blockwise(call)).logsumexp)
    return result._replace(weights=dense(call, weights=True).weights) if weights else result


def all_scores(call: Call) -> Array:
    """All scores of a call."""
    if call.arithmetic == "fast" or 0 in (*sizes(call.query)[:-1], *sizes(call.key)[:-1]):
        return dense_scores(call)
    query, key = fan_out((call.query, call.key), arithmetic_of(call.arithmetic), call.xp)
    return reproducible_scores(call._replace(query=query, key=key, value=key))


def _no_weights(implementation: str) -> ValueError:
    return ValueError(
        f"expected no return_weights with implementation={implementation!r}, as weights have the size that it"
        " avoids; got True: implementation='dense' returns them"
    )


def _reproducible(call: Call, implementation: str, *, weights: bool) -> Attention:
    """In reproducible arithmetic, in whose bits blocks do not show; weights are what the unit vectors average to."""
    if weights and implementation == "blockwise":
        raise _no_weights(implementation)
    xp = call.xp
    if 0 in (*sizes(call.query)[:-1], *sizes(call.key)[:-1]):
        return dense(call, weights=weights)  # of nothing, nothing is added up
    query, key, value = fan_out((call.query, call.key, call.value), arithmetic_of("reproducible"), xp)
    call = call._replace(query=query, key=key, value=value)
    output, logsumexp = reproducible_attention(call)
    if not weights:
        return Attention(output, None, logsumexp)
    columns = shape(call.key, xp=xp)[-2]
    place = positions(columns, call.value, xp=xp)
    units = xp.astype(xp.equal(xp.expand_dims(place, axis=-1), place), call.value.dtype)
    units = xp.broadcast_to(units, (*shape(call.value, xp=xp)[:-1], columns))
    found, _ = reproducible_attention(call._replace(value=units, dropout=None))
    return Attention(output, found, logsumexp)


def explain(call: Call) -> Explanation:
    """Which implementation `attend` would choose."""
    backend = call.backend
    if call.arithmetic == "reproducible":
        return _explain_reproducible(call, backend)
    verdicts = [kernel.judge(call) for kernel in backend.kernels]
    chosen = _choose(call, None if _is_empty(call) else next(filter(_is_preferred, verdicts), None))
    kernels = [
        Candidate("fused", kernel.name, verdict.refusal, _memory(call, 0))
        for kernel, verdict in zip(backend.kernels, verdicts, strict=True)
    ]
    if not kernels:
        kernels = [Candidate("fused", None, f"{library_name(call.xp)} has no fused kernel that is known here", None)]
    return Explanation(
        chosen,
        REASONS[chosen],
        (
            *kernels,
            Candidate("blockwise", None, None, _memory(call, backend.tuning.queries * backend.tuning.keys)),
            Candidate("dense", None, None, _memory(call, math.inf)),
        ),
    )


def _explain_reproducible(call: Call, backend: Any) -> Explanation:
    """Reproducible arithmetic is computed in blocks, whose size does not show: by either name."""
    kernels = [each.name for each in backend.kernels] or [None]
    memory = _memory(call, 2 * backend.tuning.exact_scores)  # six arrays of a block
    return Explanation(
        "blockwise",
        "in reproducible arithmetic, there are blocks alone, and their size does not show",
        (
            *(Candidate("fused", name, "adds up in an order of its own", None) for name in kernels),
            *(Candidate(name, None, None, memory) for name in ("blockwise", "dense")),
        ),
    )


def _preferred_kernel(call: Call) -> Any:
    """The kernel that is faster than what is written here, and gives the answer; ``None`` if there is none."""
    if _is_empty(call):
        return None
    return next((kernel for kernel in call.backend.kernels if _is_preferred(kernel.judge(call))), None)


def _is_preferred(verdict: Verdict) -> bool:
    return verdict.is_faster and verdict.refusal is None


def _is_empty(call: Call) -> bool:
    return 0 in (*sizes(call.query), *sizes(call.key), *sizes(call.value))


def _choose(call: Call, kernel: Any) -> str:
    if kernel is not None:
        return "fused"
    return "dense" if _is_empty(call) or is_dense_faster(call) else "blockwise"


def is_dense_faster(call: Call) -> bool:
    """Whether the dense form is faster than blocks, or safer.

    Lengths that are open while a function is traced may turn out 0, of which XLA makes no blocks, and an exported
    program would need an operator of ours: there, blocks are to be asked for by name.
    """
    *leading, rows, _ = sizes(call.query)
    columns = sizes(call.key)[-2]
    if is_exporting(call.query) or rows is None or columns is None:
        return True
    tuning = call.backend.tuning
    if None not in leading and math.prod(leading) * rows * columns > tuning.dense_most:  # type: ignore[arg-type]
        return False
    return bool(rows * columns <= (tuning.structured_below if is_structured(call.mask) else tuning.dense_below))


def _blockwise(call: Call) -> Attention:
    if _is_empty(call):
        return dense(call)
    if None in (sizes(call.query)[-2], sizes(call.key)[-2]) and not call.backend.loops.traced:
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
    """Three arrays of scores (scores, exponentials, and what is between them), and the output."""
    query, columns, width = sizes(call.query), sizes(call.key)[-2], sizes(call.value)[-1]
    if None in (*query, columns, width):
        return None
    *leading, rows, _ = query
    entries = math.prod(leading)  # type: ignore[arg-type]
    at_once = min(entries * rows * columns, scores)  # type: ignore[operator]
    size = 8 if dtype_name(call.query.dtype) == "float64" or call.arithmetic == "reproducible" else 4
    return size * int(3 * at_once + entries * rows * width)  # type: ignore[operator]
