"""What to keep of a comparison that failed once: reference and result, each computed twice."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from attention_benchmark.problem import NumpyArray

Twice = tuple[Sequence[NumpyArray], Sequence[NumpyArray]]


def keep(folder: Path, name: str, *, inputs: Twice, reference: Twice, result: Twice) -> str:
    """Write arrays to a file, and say which of them changed when they were computed again.

    Parameters
    ----------
    folder : Path
    name : str
        What was compared; the file is called after it.
    inputs, reference, result : pairs of sequences of numpy.ndarray
        The arrays that were compared, and those of a second computation.

    Returns
    -------
    str
        One sentence, with the file.
    """
    pairs = {"inputs": inputs, "reference": reference, "result": result}
    arrays: dict[str, Any] = {
        f"{what}.{time}.{index}": array
        for what, pair in pairs.items()
        for time, several in zip(("first", "again"), pair, strict=True)
        for index, array in enumerate(several)
    }
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{re.sub(r'[^A-Za-z0-9]+', '-', name).strip('-')}.npz"
    np.savez(path, **arrays)
    changed = [what for what, (first, again) in pairs.items() if not _same_bits(first, again)]
    return f"computed again, {' and '.join(changed) or 'nothing'} changed; arrays are in {path}"


def _same_bits(ones: Sequence[NumpyArray], others: Sequence[NumpyArray]) -> bool:
    pairs = zip(ones, others, strict=True)
    return all((one.shape, one.tobytes()) == (other.shape, other.tobytes()) for one, other in pairs)
