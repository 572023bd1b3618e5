"""Results that a masked NaN or infinity reaches in formulas that multiply by weights of 0, or add a mask of -inf."""

from __future__ import annotations

import numpy as np

from attention_conformance.oracle.dense import Dense
from attention_conformance.problem import NumpyArray


def reached(dense: Dense) -> dict[str, NumpyArray]:
    r"""Find the elements that may be NaN, by the name of the result.

    Query `i` does not attend to key `j`. A value :math:`v_{je}` that is not finite makes :math:`0 \cdot v_{je}` NaN,
    in channel `e` of row `i`. A key :math:`k_j` that is not finite makes the score :math:`q_i \cdot k_j - \infty` NaN,
    and with it the whole row. In the gradients, such a row reaches all keys of its head.

    Returns
    -------
    dict of str to numpy.ndarray of bool
        Broadcastable to each result: output, weights and logsumexp; where there is a cotangent, the gradients instead.
    """
    masked = (~dense.through).astype(np.float32)
    bad_values = masked @ (~np.isfinite(dense.value)).astype(np.float32) > 0  # (..., H, M, E)
    bad_keys = masked @ (~np.isfinite(dense.key)).any(axis=-1, keepdims=True).astype(np.float32) > 0  # (..., H, M, 1)
    if dense.cotangent is None:
        return {"output": bad_values | bad_keys, "weights": bad_keys, "logsumexp": bad_keys[..., 0]}
    rows = bad_keys | bad_values.any(axis=-1, keepdims=True)
    *batch, heads, _, _ = rows.shape
    of_heads = rows.any(axis=(-2, -1)).reshape(*batch, heads // dense.group_size, dense.group_size)
    groups = np.expand_dims(of_heads.any(axis=-1), (-2, -1))
    found = {"query": rows, "key": groups, "value": groups}
    if dense.bias is not None:
        found["bias"] = _of_any(rows, dense.bias.shape)
    if dense.sinks is not None:
        found["sinks"] = _of_any(rows, (dense.sinks.shape[0], 1, 1))[..., 0, 0]
    return found


def _of_any(rows: NumpyArray, shape: tuple[int, ...]) -> NumpyArray:
    """Rows (..., H, M, 1) in a shape that is broadcast to the scores; any row that an element covers reaches it."""
    added = rows.ndim - len(shape)
    covered = tuple(axis for axis in range(rows.ndim) if axis < added or shape[axis - added] == 1)
    found = rows.any(axis=covered, keepdims=True)
    return np.asarray(found.reshape(found.shape[added:]))
