"""Line 5 of the contract as a table: what is masked reaches nothing, whatever it holds; what is attended to shows."""

import math

import numpy as np
import pytest
from blockwise_helpers import RUNS, TUNING
from pairwise import pairwise

import attention_core as ac

attention = ac.scaled_dot_product_attention
B, H, G, D = 2, 4, 2, 5
SIZES = [(7, 9), (2, 130)]  # the second has few queries next to many keys
MASKS = {  # of rows and columns; the last key of the first sample is hidden from all its queries
    "array": lambda put, m, n: {"mask": put(pattern(m, n))},
    "lengths": lambda put, m, n: {"mask": ac.KeyLengths(put(np.asarray([n // 2, n])))},
    "no keys": lambda put, m, n: {"mask": ac.KeyLengths(put(np.asarray([0, n - 1])))},
    "causal": lambda put, m, n: {"mask": ac.Causal(offset=n - m - 1)},
    "window": lambda put, m, n: {"mask": ac.SlidingWindow(left=3, right=0, offset=n - m - 1)},
    "offsets": lambda put, m, n: {"mask": ac.Causal(offset=put(np.asarray([-2, n - m])))},
    "rule and array": lambda put, m, n: {"mask": ac.KeyLengths(n - 1) & put(np.arange(n) % 3 > 0)},
    "bias": lambda put, m, n: {"bias": put(np.where(pattern(m, n), 0.5, -math.inf), dtype="float32")},
}
WAYS = {"auto": {}, "dense": {"implementation": "dense"}, "blocks": {"implementation": "blockwise"}}
WAYS |= {"capped": {"softcap": 2.0}, "reproducible": {"arithmetic": "reproducible"}}
SINKS = {f"sinks, {name}": options for name, options in WAYS.items() if name in ("auto", "dense", "blocks")}


def pattern(rows, columns):
    """An array that hides the last key from all, and all keys from the second query."""
    allowed = np.random.default_rng(3).random((rows, columns)) < 0.6
    allowed[1], allowed[:, -1], allowed[-1, -2] = False, False, True
    return allowed


def allowed_pairs(options, backend, rows, columns):
    """Which query may attend to which key: (B, H, M, N)."""
    if "bias" in options or backend.owns(options["mask"]):
        allowed = pattern(rows, columns)
    else:
        sizes = {"num_heads": H, "leading": (B,), "xp": backend.namespace}
        allowed = backend.to_numpy(options["mask"].to_array(rows, columns, **sizes))
    return np.broadcast_to(allowed, (B, H, rows, columns))


def spoil(options, backend, argument, hidden, sizes):
    """The pairs that are allowed, places of an argument that are spoilt, and which queries and keys these reach."""
    rows, columns = sizes
    allowed = allowed_pairs(options, backend, rows, columns)
    attended = allowed.reshape(B, G, H // G, rows, columns).any(axis=2)
    if argument == "query":
        places = np.broadcast_to(~allowed.any(axis=-1) if hidden else np.arange(rows) == rows - 1, (B, H, rows))
        hit = places & allowed.any(axis=-1)
    else:
        places = ~attended.any(axis=-2) if hidden else attended[..., -1, :] & (np.cumsum(attended[..., -1, :], -1) == 1)
        hit = (allowed & np.repeat(places, H // G, axis=1)[:, :, None]).any(axis=-1)
    return allowed, places, hit, (allowed & hit[..., None]).reshape(B, G, -1, columns).any(axis=-2)


@pytest.mark.needs(
    lambda name, sizes, backend: not backend.loops.traced or (name, sizes) in (("array", (7, 9)), ("lengths", (2, 130)))
)
@pairwise(
    number=[math.nan, math.inf, -math.inf, 3e38],
    name=MASKS,
    way=[*WAYS, *SINKS],
    argument=["query", "key", "value"],
    sizes=SIZES,
    hidden=[True, False],
)
def test_what_is_masked_reaches_nothing_and_what_is_attended_shows(
    number, name, way, argument, sizes, hidden, backend, put, get, rng, monkeypatch
):
    """In the output, and in gradients of what no row sees that shows it; of what no query attends to, these are 0."""
    monkeypatch.setattr(backend, "tuning", TUNING if backend.loops.traced else RUNS)
    rows, columns = sizes
    shapes = {"query": (B, H, rows, D), "key": (B, G, columns, D), "value": (B, G, columns, D)}
    arrays = {name: np.abs(rng.standard_normal(dims)).astype(np.float32) for name, dims in shapes.items()}
    options = MASKS[name](put, rows, columns)
    allowed, places, hit, seen = spoil(options, backend, argument, hidden, sizes)
    options |= {**SINKS[way], "sinks": put(np.arange(H) - 1.0, dtype="float32")} if way in SINKS else WAYS[way]
    spoilt = {**arrays, argument: np.where(places[..., None], np.float32(number), arrays[argument])}
    factor = put(rng.standard_normal((B, H, rows, D)), dtype="float32")
    xp = backend.namespace

    def loss(*arrays):
        return xp.sum(xp.multiply(attention(*arrays, **options), factor))

    with np.errstate(all="ignore"):
        found, clean = (get(attention(*put(list(each.values())), **options)) for each in (spoilt, arrays))
    np.testing.assert_allclose(found[~hit], clean[~hit], rtol=0, atol=2e-6)
    assert not found[~allowed.any(axis=-1)].any()
    if hit.any() and (math.isnan(number) or (number == math.inf and argument == "value")):
        assert not np.isfinite(found[hit]).any()
    if backend.differentiates and (hidden or way != "reproducible"):  # whose sums over rows have one unit
        gradients, wanted = (
            get(backend.value_and_grad(loss)(*put(list(each.values())))[1]) for each in (spoilt, arrays)
        )
        for one, other, of_rows in zip(gradients, wanted, (hit, seen, seen), strict=True):
            np.testing.assert_allclose(one[~of_rows], other[~of_rows], rtol=0, atol=1e-5)
        assert not hidden or not gradients[list(shapes).index(argument)][places].any()


@pytest.mark.needs("compilation", "gradients", lambda backend: backend.loops.traced)
@pairwise(
    number=[math.nan, math.inf],
    name=["array", "lengths", "no keys"],
    argument=["query", "key", "value"],
    hidden=[True, False],
    both=[True, False],
)
def test_programs_have_the_gradients_of_finite_numbers_but_of_what_attends_to_others(
    number, name, argument, hidden, both, backend, put, get, rng
):
    """Of the dense form, which looks inside of a program; with weights or without them."""
    rows, columns = SIZES[0]
    arrays = [rng.standard_normal(dims) for dims in ((B, H, rows, D), (B, G, columns, D), (B, G, columns, D))]
    options = MASKS[name](put, rows, columns) | {"implementation": "dense"}
    _, places, hit, seen = spoil(options, backend, argument, hidden, SIZES[0])
    index, spoilt = ("query", "key", "value").index(argument), arrays.copy()
    spoilt[index] = np.where(places[..., None], number, arrays[index])
    xp, factor = backend.namespace, put(rng.standard_normal((B, H, rows, D)), dtype="float32")

    def loss(*arrays):
        found = attention(*arrays, **options, return_weights=both)
        total = xp.sum(xp.multiply(found.output if both else found, factor))
        return xp.add(total, xp.sum(xp.multiply(found.weights, found.weights))) if both else total

    clean = get(backend.value_and_grad(loss)(*put(arrays, dtype="float32"))[1])
    for mode in backend.modes[1:]:
        program = backend.compile(backend.value_and_grad(loss), mode=mode)
        found = get(program(*put(spoilt, dtype="float32"))[1])
        for one, other, of_rows in zip(found, clean, (hit, seen, seen), strict=True):
            np.testing.assert_allclose(one[~of_rows], other[~of_rows], rtol=0, atol=1e-5)
        if hit.any() and (math.isnan(number) or argument == "value"):  # a score of -inf has the weight 0
            assert not np.isfinite(found[0][hit]).all(axis=-1).any()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf, 3e38])
def test_a_bias_behind_a_mask_reaches_nothing(number, way, put, get, rng):
    arrays = put([rng.standard_normal(dims) for dims in ((B, H, 7, D), (B, G, 9, D), (B, G, 9, D))], dtype="float32")
    allowed, bias = pattern(7, 9), rng.standard_normal((7, 9))
    found, clean = (
        get(attention(*arrays, mask=put(allowed), bias=put(each, dtype="float32"), **WAYS[way]))
        for each in (np.where(allowed, bias, number), bias)
    )
    np.testing.assert_allclose(found, clean, rtol=0, atol=2e-6)


@pytest.mark.parametrize("seed", range(3, 6))
def test_dropout_hides_no_row_that_is_not_finite(seed, put, get):
    """All keys that are attended to may be dropped."""
    query, key, value = np.full((1, 1, 1, 2), 1e30), np.full((1, 1, 4, 2), 1e30), np.ones((1, 1, 4, 2))
    key[0, 0, 2], value[0, 0, 3] = 1e-30, math.nan
    options = {"mask": put(np.arange(4) < 3), "dropout": ac.Dropout(0.6, seed), "implementation": "dense"}
    found = attention(*put([query, key, value], dtype="float32"), **options)
    assert np.isnan(get(found)).all()


@pytest.mark.needs(lambda name, backend: not backend.loops.traced or name in ("array", "bias", None))
@pairwise(name=[*MASKS, None], way=WAYS, dropout=[None, ac.Dropout(0.5, 3)])
def test_no_weight_is_so_small_that_it_hides_what_is_not_finite(name, way, dropout, backend, put, get, rng):
    """The sum of what a query may attend to decides; in reproducible arithmetic, which infinity shows, too."""
    (rows, columns), options = SIZES[0], (MASKS[name](put, *SIZES[0]) if name else {}) | WAYS[way]
    allowed = allowed_pairs(options, backend, rows, columns) if name else np.ones((B, H, rows, columns), bool)
    value = rng.choice([0.0, math.nan, math.inf, -math.inf], (B, G, columns, D), p=[0.85, 0.05, 0.05, 0.05])
    gaps, key = rng.uniform(-1000, 0, allowed.shape), np.broadcast_to(np.eye(columns), (B, G, columns, columns))
    gaps[..., 0], value[:, :, 0] = 600.0, 0.0
    wanted = np.where(allowed[..., None], np.repeat(value, H // G, axis=1)[:, :, None], 0.0).sum(axis=-2)
    for mode in backend.modes:
        program = backend.compile(lambda *arrays: attention(*arrays, **options, scale=1.0, dropout=dropout), mode=mode)
        found = get(program(*put([gaps, key, value], dtype="float32")))
        pair = (found, wanted) if way == "reproducible" else map(np.isfinite, (found, wanted))
        np.testing.assert_array_equal(*pair)
