"""Blocks of a long sequence of which each weight is kept: those of a window, or those with the largest cells."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from attention_view.codes import Details, blocks_of

DETAIL_CODES = 2**21
"""So many weights are kept one by one in all."""


class Kept:
    """Blocks of which each number is kept, for each head: those of a window, or those with the largest cells."""

    def __init__(self, block: tuple[int, int], lengths: tuple[int, int], per_row: int) -> None:
        self._block, self._columns, self._per_row = block, -(-lengths[1] // block[1]), per_row
        self._rows = lengths[0]
        self._found: list[tuple[int, Any, Any]] = []

    def __call__(self, row: int, cells: Any, numbers: Any) -> None:
        """Keep the largest of some rows of cells (H, rows, columns), out of their numbers (H, queries, N)."""
        if not self._per_row:
            return
        for head, of_head in enumerate(cells):
            for i, each in enumerate(of_head):
                order = np.argsort(np.where(np.isnan(each), -np.inf, -each), kind="stable")[: self._per_row]
                queries = slice(i * self._block[0], (i + 1) * self._block[0])
                self._keep(head, row + i, np.sort(order[each[order] != 0]), numbers[head, queries])

    def add_window(self, some: Any, rows: range, columns: range) -> None:
        """Keep all blocks of rows and columns of cells."""
        for row in rows:
            first = row * self._block[0]
            numbers = some(range(first, min(first + self._block[0], self._rows)))
            for head, each in enumerate(numbers):
                self._keep(head, row, np.arange(columns.start, columns.stop), each)

    def details(self, heads: int) -> list[Details]:
        """What was kept of each head."""
        nothing = (np.zeros(0, np.uint32), np.zeros((0, *self._block), "<u2"))
        of_heads = [[nothing, *(each[1:] for each in self._found if each[0] == head)] for head in range(heads)]
        return [Details(*(np.concatenate(each) for each in zip(*found, strict=True))) for found in of_heads]

    def _keep(self, head: int, row: int, columns: Any, numbers: Any) -> None:
        places = (row * self._columns + columns).astype("<u4")
        self._found.append((head, places, blocks_of(numbers, columns, self._block)))


def cells_of_window(exact: Any, lengths: tuple[int, int], block: tuple[int, int], count: int) -> tuple[range, range]:
    """Rows and columns of cells that a window of queries and keys touches."""
    if not isinstance(exact, tuple) or [type(each) for each in exact] != [slice, slice]:
        raise TypeError(f"expected exact as two slices, of queries and keys; got {exact!r}")
    chosen = [range(length)[each] for each, length in zip(exact, lengths, strict=True)]
    if any(each.step != 1 or not each for each in chosen):
        raise ValueError(f"expected exact as slices of at least one query and key, in steps of 1; got {exact}")
    rows, columns = (range(each.start // b, -(-each.stop // b)) for each, b in zip(chosen, block, strict=True))
    if count * len(rows) * len(columns) * math.prod(block) > DETAIL_CODES:
        raise ValueError(f"expected exact of at most {DETAIL_CODES} weights in {count} maps; got {exact}")
    return rows, columns
