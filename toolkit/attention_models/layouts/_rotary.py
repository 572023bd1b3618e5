"""Rotary positions of models whose texts became longer: divisors of the frequencies, by the type of their scaling."""

from __future__ import annotations

import decimal
from collections.abc import Callable, Mapping
from decimal import Decimal
from typing import Any

from attention_core._arrays import type_text
from attention_core._checks import check_number
from attention_models.layouts._layout import LayoutError

DIGITS = decimal.Context(prec=40)  # with logarithms and powers that are the same on every machine, unlike those of C
TURN = Decimal("6.283185307179586476925286766559005768394")
Number = Callable[..., Decimal]


def rotary_divisors(
    layout: str, rope: Mapping[str, Any], /, *, base: float, width: int, max_positions: int | None = None
) -> tuple[tuple[float, ...] | None, float]:
    """Compute the divisors of rotary frequencies from the record of a scaling, as transformers has it.

    Parameters
    ----------
    layout : str
        Whose record it is, for messages.
    rope : mapping
        ``rope_type``: default, linear, llama3, yarn or longrope; and ``factor`` and so on, as the type needs them.
    base, width
        As in `attention_core.functions.rotary_embedding`.
    max_positions : int, optional
        Of the model; for records without ``original_max_position_embeddings`` or ``factor``.

    Returns
    -------
    divisors : tuple of float or None
        As in `attention_core.functions.rotary_embedding`.
    amplitude : float
        What multiplies cosines and sines. Scores of whole heads are multiplied by its square.

    Raises
    ------
    LayoutError, TypeError, ValueError
        When the type is another, a number is missing or not valid, or divisors depend on the length of a text.

    Examples
    --------
    >>> rotary_divisors("a model", {"rope_type": "linear", "factor": 4}, base=10000.0, width=4)
    ((4.0, 4.0), 1.0)
    """
    kind = rope.get("rope_type", rope.get("type", "default"))
    if not isinstance(kind, str) or kind not in KINDS:
        raise LayoutError(f"expected rotary positions of {layout} of a type out of {', '.join(KINDS)}; got {kind!r}")

    def number(name: str, default: Any = None) -> Decimal:
        value = rope.get(name)
        value = default if value is None else value
        if value is None:
            raise LayoutError(f"expected {name} of rotary positions of type {kind} of {layout}; got none")
        if not isinstance(value, Decimal):
            check_number(f"{name} of rotary positions of {layout}", value, positive=True)
        return Decimal(value)

    with decimal.localcontext(DIGITS):
        if kind in ("llama3", "yarn", "longrope"):
            length = number("original_max_position_embeddings", max_positions)
            if length <= 1 or base <= 1:
                raise LayoutError(f"expected positions and a base above 1 of {layout}; got {length} and {base}")
            rope = {**rope, "original_max_position_embeddings": length, "rope_theta": Decimal(base)}
            if kind != "llama3" and rope.get("factor") is None and max_positions is not None:
                rope["factor"] = float(max_positions / length)
        divisors, amplitude = KINDS[kind](layout, rope, number, width // 2)
    found = tuple(map(float, divisors))
    return None if set(found) <= {1.0} else found, float(amplitude)


def _default(layout: str, rope: Any, number: Number, pairs: int) -> tuple[list[Decimal], Any]:
    return [], 1


def _linear(layout: str, rope: Any, number: Number, pairs: int) -> tuple[list[Decimal], Any]:
    return [number("factor")] * pairs, 1


def _llama3(layout: str, rope: Any, number: Number, pairs: int) -> tuple[list[Decimal], Any]:
    """Divided are frequencies with few turns in a text of the original length."""
    factor, few, many = map(number, ("factor", "low_freq_factor", "high_freq_factor"))
    length, base = rope["original_max_position_embeddings"], rope["rope_theta"]
    if many <= few:
        raise LayoutError(f"expected high_freq_factor above low_freq_factor of {layout}; got {many} and {few}")
    turns = [length / (TURN * base ** (Decimal(i) / pairs)) for i in range(pairs)]
    return [_between((many - each) / (many - few), factor) for each in turns], 1


def _yarn(layout: str, rope: Any, number: Number, pairs: int) -> tuple[list[Decimal], Any]:
    """The same by the index of a pair, between those with so many turns."""
    factor, length, base = number("factor"), rope["original_max_position_embeddings"], rope["rope_theta"]
    first, last = (
        pairs * (length / (number(name, turns) * TURN)).ln() / base.ln()
        for name, turns in (("beta_fast", 32), ("beta_slow", 1))
    )
    if rope.get("truncate", True):
        first, last = first.to_integral(decimal.ROUND_FLOOR), last.to_integral(decimal.ROUND_CEILING)
    first, last = max(first, Decimal(0)), min(last, Decimal(2 * pairs - 1))
    span = last - first or Decimal("0.001")
    scales = [rope.get("mscale"), rope.get("mscale_all_dim")]
    above, below = (number("mscale"), number("mscale_all_dim")) if all(scales) else (Decimal(1), Decimal(0))
    growth = max(factor, Decimal(1)).ln() / 10
    amplitude = number("attention_factor", (1 + above * growth) / (1 + below * growth))
    return [_between((i - first) / span, factor) for i in range(pairs)], amplitude


def _longrope(layout: str, rope: Any, number: Number, pairs: int) -> tuple[list[Decimal], Any]:
    """A list of divisors, the same for texts of any length."""
    divisors = rope.get("short_factor")
    if not isinstance(divisors, list | tuple) or len(divisors) != pairs:
        got = len(divisors) if isinstance(divisors, list | tuple) else type_text(divisors)
        raise LayoutError(f"expected short_factor of {layout} as a list of {pairs}; got {got}")
    if list(divisors) != list(rope.get("long_factor") or ()):
        raise LayoutError(
            f"expected rotary positions of {layout} that no length of a text changes; got a long_factor other than the"
            " short_factor"
        )
    for divisor in divisors:
        check_number(f"short_factor of {layout}", divisor, positive=True)
    growth = max(number("factor", 1), Decimal(1)).ln() / rope["original_max_position_embeddings"].ln()
    return list(map(Decimal, divisors)), number("attention_factor", (1 + growth).sqrt())


def _between(share: Decimal, factor: Decimal) -> Decimal:
    """The divisor of a frequency of which a share, cut to 0..1, is divided."""
    share = min(max(share, Decimal(0)), Decimal(1))
    return 1 / (share / factor + 1 - share)


KINDS: dict[str, Callable[..., tuple[list[Decimal], Any]]] = {
    "default": _default,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
}
