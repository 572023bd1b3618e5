"""A part of a call is a call: some samples, heads, queries and keys have the scores and outputs that they have there."""

import numpy as np
import pytest
from call_table import NAMES, Sizes, options_of

from attention_core._attention.parts import Run, cut
from attention_core._attention.ways import all_scores, run_call
from attention_core._functions.attention import make_call

SIZES = Sizes((3,), 4, 2, 11, 13)
PARTS = {
    "sample": {"sample": (1,)},
    "group": {"heads": Run(2, 2)},
    "part of a group": {"heads": Run(1, 2)},
    "heads": {"heads": [3, 0, 3]},
    "rows": {"rows": Run(4, 5)},
    "rows in any order": {"rows": [7, 2, 10]},
    "columns": {"columns": Run(3, 6)},
    "columns in any order": {"columns": [12, 0, 5]},
    "all": {"sample": (2,), "heads": [1, 2], "rows": Run(3, 7), "columns": [1, 11, 4]},
    "heads and rows": {"heads": Run(2, 2), "rows": [9, 1, 4, 3]},
}
pytestmark = pytest.mark.needs(lambda backend: not backend.loops.traced)


def indices(places, count):
    if isinstance(places, Run):
        return list(range(places.first, places.first + places.size))
    return list(range(count)) if places is None else places


def placed(part, put):
    listed = {name: put(np.asarray(x, np.int32)) for name, x in part.items() if isinstance(x, list)}
    return part | listed


def taken(x, part, of_columns=True):
    """What a part has of scores (..., H, M, N), or of outputs."""
    heads, rows, columns = (indices(part.get(name), n) for name, n in (("heads", 4), ("rows", 11), ("columns", 13)))
    x = x if "sample" not in part else x[part["sample"]]
    x = x[..., heads, :, :][..., rows, :]
    return x[..., columns] if of_columns else x


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("name", NAMES)
def test_a_part_has_the_scores_of_the_whole(name, part, put, get, rng):
    call = make_call(*map(put, SIZES.arrays(rng)), **options_of(name, SIZES, put))
    expected = taken(np.broadcast_to(get(all_scores(call)), (3, 4, 11, 13)), PARTS[part])
    found = get(all_scores(cut(call, **placed(PARTS[part], put))))
    np.testing.assert_allclose(np.broadcast_to(found, expected.shape), expected, rtol=0, atol=1e-13)


@pytest.mark.parametrize("part", [name for name in PARTS if "columns" not in PARTS[name]])
@pytest.mark.parametrize(
    "name",
    ["dropout", "everything", "everything of a user", "sinks", "function", "of a user", "alibi", "array and rule"],
)
@pytest.mark.parametrize("way", ["dense", "blockwise"])
def test_a_part_has_the_outputs_of_the_whole(way, name, part, put, get, rng):
    call = make_call(*map(put, SIZES.arrays(rng)), **options_of(name, SIZES, put))
    expected = taken(get(run_call(call, "dense").output), PARTS[part], of_columns=False)
    found = call
    for axis, places in placed(PARTS[part], put).items():  # one after the other
        found = cut(found, **{axis: places})
    found = get(run_call(found, way).output)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-13)
