"""Weights as small integers on a logarithmic scale, and the largest or the mean of blocks at several resolutions."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

DECADES = {8: 6, 16: 12}
"""By bits of a code, how many powers of ten lie below 1: steps of 5.6 %, and of 0.04 %."""
SMALLEST_LEVEL = 64


class Level(NamedTuple):
    """A map at one resolution: codes (rows, columns), and how many queries and keys are behind each."""

    codes: Any
    block: tuple[int, int]


def encode(values: Any, bits: int, /) -> Any:
    """The codes of numbers in [0, 1]: 0 stands for 0 alone, the last for NaN, and the last but one for 1."""
    last, decades = 2**bits - 1, DECADES[bits]
    values = np.asarray(values)
    steps = (last - 2) / decades
    with np.errstate(divide="ignore", invalid="ignore"):
        codes = 1 + np.rint((np.log10(values) + decades) * steps)
    codes = np.where(values == 0, 0, np.clip(codes, 1, last - 1))
    return np.where(np.isfinite(values), codes, last).astype(f"<u{bits // 8}")


def decode(codes: Any, bits: int, /) -> Any:
    """The numbers that codes stand for."""
    last, decades = 2**bits - 1, DECADES[bits]
    values = 10.0 ** ((codes.astype(np.float64) - 1) * (decades / (last - 2)) - decades)
    return np.where(codes == last, np.nan, np.where(codes == 0, 0.0, values))


def share_codes(shares: Any, /) -> Any:
    """Shares of pairs in [0, 1] as bytes, where 0 and 255 stand for none and all alone."""
    inner = np.clip(np.rint(np.asarray(shares) * 255), 1, 254)
    return np.where(shares == 0, 0, np.where(shares == 1, 255, inner)).astype(np.uint8)


def levels_of(codes: Any, block: tuple[int, int], combine: Any = np.maximum, /) -> list[Level]:
    """A map at its finest resolution, and at coarser ones of a quarter of the cells; 64 rows or columns stay apart."""
    levels = [Level(codes, block)]
    while max(codes.shape) > SMALLEST_LEVEL:
        steps = _steps(codes.shape)
        codes = _joined(_joined(codes, steps[0], combine).T, steps[1], combine).T
        block = (steps[0] * block[0], steps[1] * block[1])
        levels.append(Level(np.ascontiguousarray(codes), block))
    return levels


def cell_sizes(lengths: tuple[int, int], block: tuple[int, int], /) -> Any:
    """How many pairs each block has (rows, columns); those at the end may have fewer."""
    rows, columns = (np.minimum(b, n - np.arange(0, n, b)).astype(float) for n, b in zip(lengths, block, strict=True))
    return rows[:, None] * columns


def _steps(shape: tuple[int, ...]) -> tuple[int, int]:
    """How many cells along each axis the next level joins."""
    step = 2 if min(shape) > SMALLEST_LEVEL else 4
    rows, columns = (step if size > SMALLEST_LEVEL else 1 for size in shape)
    return rows, columns


def _joined(codes: Any, step: int, combine: Any) -> Any:
    """Each 1, 2 or 4 rows as one."""
    if step == 1:
        return codes
    if len(codes) % 2:
        codes = np.concatenate([codes, codes[-1:]])
    return _joined(combine(codes[::2], codes[1::2]), step // 2, combine)
