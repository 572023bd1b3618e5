"""Row invariance of reproducible arithmetic, drawn.

The bits of a row of outputs depend on its query and on what it may attend to. The bits of the gradient of a key depend
on the key, its value, and the queries that may attend to it.
"""

from __future__ import annotations

import numpy as np
import pytest
from reproducible_helpers import EXACTLY, same

import attention_core as ac
from attention_core import scaled_dot_product_attention as attention
from attention_core._attention.blocks import forward as blocks
from attention_core._attention.reproducible import backward, bounds, forward

FINITE = [0.0, 1.0, 1e4, 1e10, 1e20, 3e38]
NEVER_FINITE = [np.nan, np.inf, -np.inf]
SIZES = [(1, 1, 1, 5, 7, 4, 3), (2, 2, 1, 17, 65, 16, 5), (1, 1, 2, 33, 40, 8, 8), (1, 2, 1, 3, 300, 64, 4)]
KINDS = ["normal", "channels", "few values", "values of all sizes", "zero queries", "long keys", "saturated"]


def drawn(rng, sizes=None, kind=None):
    """Query, key, value and a mask (B, 1, M, N), of a size and a kind."""
    batch, num_kv_heads, group, rows, columns, width, value_width = sizes or SIZES[rng.integers(len(SIZES))]
    kind = kind or KINDS[rng.integers(len(KINDS))]
    query = rng.standard_normal((batch, num_kv_heads * group, rows, width))
    key = rng.standard_normal((batch, num_kv_heads, columns, width))
    value = rng.standard_normal((batch, num_kv_heads, columns, value_width))
    if kind == "channels":
        value *= np.exp2(rng.uniform(-20, 20, value_width))
    elif kind == "few values":
        value = np.sign(value) * (np.abs(value) > 0.5)
    elif kind == "values of all sizes":
        value *= np.exp2(rng.uniform(-90, 90, value.shape))
    elif kind == "zero queries":
        query *= 0
    elif kind == "long keys":
        key *= rng.standard_t(2, (batch, num_kv_heads, columns, 1))
    elif kind == "saturated":
        query *= 30
    mask = rng.random((batch, 1, rows, columns)) < rng.choice([0.1, 0.5, 0.9])
    return [x.astype(np.float32) for x in (query, key, value)], mask


def options_of(rng, arrays):
    query, key, _ = arrays
    options = {}
    if rng.random() < 0.25:
        options["softcap"] = float(rng.choice([1.0, 20.0]))
    if rng.random() < 0.25:
        options["bias"] = (3 * rng.standard_normal((1, *query.shape[1:3], key.shape[2]))).astype(np.float32)
    return options


def placed(backend, options):
    return {name: backend.from_numpy(x) if isinstance(x, np.ndarray) else x for name, x in options.items()}


def outputs(backend, arrays, mask, options):
    """Output and logsumexp."""
    result = attention(
        *backend.from_numpy(arrays),
        mask=backend.from_numpy(mask),
        **placed(backend, options),
        **EXACTLY,
        return_logsumexp=True,
    )
    return backend.to_numpy((result.output, result.logsumexp))


def gradients(backend, arrays, factor, mask, options):
    xp = backend.namespace
    mask, factor, options = backend.from_numpy(mask), backend.from_numpy(factor), placed(backend, options)

    def loss(*qkv):
        return xp.sum(attention(*qkv, mask=mask, **options, **EXACTLY) * factor)

    return backend.to_numpy(backend.value_and_grad(loss)(*backend.from_numpy(arrays))[1])


def with_junk(arrays, sample, columns, numbers):
    """Other keys and values at these columns of a sample."""
    query, key, value = (x.copy() for x in arrays)
    key[sample][:, columns], value[sample][:, columns] = numbers
    return query, key, value


DRAWS = {"numpy": 60, "torch": 25}


@pytest.mark.needs(lambda seed, backend: not backend.loops.traced or seed < 1)
@pytest.mark.parametrize("seed", range(4))
def test_what_a_row_does_not_see_changes_no_bit_of_it(seed, backend):
    """Hidden numbers, other queries, the other samples, the order of keys, and how many there are."""
    rng = np.random.default_rng([81, seed])
    for _ in range(DRAWS.get(backend.name, 2)):
        arrays, mask = drawn(rng)
        options = options_of(rng, arrays)
        whole = outputs(backend, arrays, mask, options)
        sample, row = rng.integers(mask.shape[0]), rng.integers(mask.shape[2])
        seen = np.flatnonzero(mask[sample, 0, row])
        junk = [*FINITE, *NEVER_FINITE]
        changed = with_junk(arrays, sample, np.flatnonzero(~mask[sample, 0, row]), rng.choice(junk, 2))
        changed[0][sample][:, np.arange(mask.shape[2]) != row] = rng.choice(junk)
        for found, wanted in zip(outputs(backend, changed, mask, options), whole, strict=True):
            same(found[sample, :, row], wanted[sample, :, row])
        seen = rng.permutation(seen)
        if not len(seen):
            continue
        alone = [arrays[0][[sample], :, row : row + 1], *(x[[sample]][:, :, seen] for x in arrays[1:])]
        if "bias" in options:
            options["bias"] = options["bias"][:, :, row : row + 1][..., seen]
        for found, wanted in zip(outputs(backend, alone, np.ones(len(seen), bool), options), whole, strict=True):
            same(found[0, :, 0], wanted[sample, :, row])


@pytest.mark.needs("gradients", lambda seed, backend: not backend.loops.traced or seed < 1)
@pytest.mark.parametrize("seed", range(2))
def test_what_a_row_or_key_does_not_see_changes_no_bit_of_its_gradient(seed, backend):
    rng = np.random.default_rng([82, seed])
    for _ in range(DRAWS.get(backend.name, 2) // 2):
        arrays, mask = drawn(rng)
        options, factor = options_of(rng, arrays), rng.standard_normal((*arrays[0].shape[:3], arrays[2].shape[3]))
        factor = factor.astype(np.float32)
        whole = gradients(backend, arrays, factor, mask, options)
        sample, row, column = (rng.integers(mask.shape[axis]) for axis in (0, 2, 3))
        changed = with_junk(
            arrays, sample, np.flatnonzero(~mask[sample, 0, row]), rng.choice([*FINITE, *NEVER_FINITE], 2)
        )
        same(gradients(backend, changed, factor, mask, options)[0][sample, :, row], whole[0][sample, :, row])
        query, blind = arrays[0].copy(), np.flatnonzero(~mask[sample, 0, :, column])
        query[sample][:, blind], factor[sample][:, blind] = (
            rng.choice([*FINITE[:5], np.nan]),
            rng.choice([*FINITE[:4], np.nan]),
        )
        found = gradients(backend, [query, *arrays[1:]], factor, mask, options)
        for which in (1, 2):
            same(found[which][sample, :, column], whole[which][sample, :, column])


def cancelling(rng, num_rows, length=0.0):
    """Averages of values that cancel to some digits, so that errors of a quarter of the bound decide some of them.

    Long queries and keys have the same scores, as what makes them long cancels.
    """
    half = rng.uniform(1, 2, (1, 64, 128, 64))
    other = -half * (1 + 2.0**-12 * rng.standard_normal(half.shape))
    value = np.stack([half, other], axis=3).reshape(1, 64, 256, 64)
    key = np.repeat(rng.uniform(-0.1, 0.1, (1, 64, 128, 1)), 2, axis=-2)
    long = np.full_like(key, length)
    query = np.ones((1, 64, num_rows, 1)) * [1.0, length, length]
    return [query, np.concatenate([key, long, -long], axis=-1), value] if length else [query[..., :1], key, value]


def unread(monkeypatch):
    """An accelerator, whose values nobody reads: with a mask, it averages indicators next to values."""
    monkeypatch.setattr(blocks, "can_be_read", lambda *_: False)
    return {"mask": np.ones(256, bool)}


@pytest.mark.parametrize("sign", [-1, 0, 1])
@pytest.mark.parametrize(
    "kind", ["normal", "saturated", "one row cancels", "one long row cancels", "rows cancel", "rows cancel, unread"]
)
def test_products_as_far_off_as_is_assumed_change_no_bit(kind, sign, rng, monkeypatch):
    """Of another library: of all elements in one direction, or in a drawn one."""
    options = unread(monkeypatch) if "unread" in kind else {}
    if "cancel" in kind:
        arrays = cancelling(rng, 1 if "one" in kind else 16, 256.0 * ("long" in kind))
    else:
        arrays = drawn(rng, (1, 4, 1, 128, 256, 64, 64), kind)[0]
    arrays = [x.astype(np.float32) for x in arrays]
    whole = attention(*arrays, **options, **EXACTLY)
    multiply = forward.matmul_per_group

    def off(x, y, xp):
        sizes = multiply(np.abs(np.nan_to_num(x)), np.abs(np.nan_to_num(y)), xp) * ((y.shape[-2] + 1) * bounds.ULP)
        return multiply(x, y, xp) + sizes * (sign or rng.choice([-1, 1], sizes.shape))

    monkeypatch.setattr(forward, "matmul_per_group", off)
    same(attention(*arrays, **options, **EXACTLY), whole)


@pytest.mark.parametrize("can_be_read", [True, False])
def test_hidden_numbers_put_hardly_any_number_in_doubt(can_be_read, rng, monkeypatch):
    """Which would take many times as long."""
    arrays, _ = drawn(rng, (1, 2, 1, 64, 300, 16, 16), "normal")
    settle, counts = forward.settle, []

    def counted(grid, side, results, *others):
        counts.append(sum(np.isnan(x).sum() for x in results))
        return settle(grid, side, results, *others)

    monkeypatch.setattr(forward, "settle", counted)
    if not can_be_read:
        unread(monkeypatch)
    bits = rng.integers(0, 2**32, (1, 2, 100, 16), dtype=np.uint32).view(np.float32)
    for junk in [*FINITE, *NEVER_FINITE, bits]:
        changed = with_junk(arrays, 0, range(200, 300), (0.0, junk[0] if junk is bits else junk))
        attention(*changed, mask=ac.KeyLengths(np.asarray([200])), **EXACTLY)
    assert len(counts) == len(FINITE) + len(NEVER_FINITE) + 1
    assert max(counts) <= 12


@pytest.mark.parametrize("kind", KINDS)
def test_the_reference_alone_gives_the_same_bits(kind, rng, monkeypatch):
    arrays, mask = drawn(rng, (1, 2, 2, 20, 70, 8, 5), kind)
    bias = rng.standard_normal((1, 4, 20, 70)).astype(np.float32)
    calls = [{"mask": mask}, {"dropout": ac.Dropout(0.3, 5)}, {"softcap": 2.0, "bias": bias}]

    def found(options):
        return attention(*arrays, **options, **EXACTLY, return_weights=True, return_logsumexp=True)

    wholes = [found(options) for options in calls]
    monkeypatch.setattr(bounds, "decided", lambda found, *_: np.full_like(found, np.nan))
    for options, whole in zip(calls, wholes, strict=True):
        for result, wanted in zip(found(options), whole, strict=True):
            same(result, wanted)


@pytest.mark.parametrize("kind", KINDS)
def test_outputs_are_within_half_an_ulp_of_the_sum_of_sizes(kind, rng):
    (query, key, value), mask = drawn(rng, (2, 2, 1, 40, 300, 16, 6), kind)
    found = attention(query, key, value, mask=mask, **EXACTLY)
    wide = [x.astype(np.longdouble) for x in (query, key, value)]
    scores = np.where(mask, wide[0] @ wide[1].swapaxes(-1, -2) / 4, -np.inf)
    weights = np.exp(scores - np.max(scores, axis=-1, keepdims=True, initial=-1e300))
    weights /= np.maximum(weights.sum(-1, keepdims=True), 1e-300)
    size = (weights @ np.abs(wide[2])).astype(np.float64)
    ulp = np.exp2(np.maximum(np.frexp(size)[1], -125) - 24.0)
    assert np.max(np.abs(found - weights @ wide[2]) / ulp) <= 0.501


@pytest.mark.needs("untraced loops")  # threads wait for each other
@pytest.mark.parametrize("kind", KINDS)
def test_ranks_that_share_the_keys_have_the_bits_of_one(kind, backend, ranks, rng):
    (query, key, value), mask = drawn(rng, (1, 2, 2, 24, 30, 8, 5), kind)
    arrays, mask = backend.from_numpy((query, key, value)), backend.from_numpy(mask)
    whole = backend.to_numpy(tuple(attention(*arrays, mask=mask, **EXACTLY, return_logsumexp=True)[::2]))

    def step(group):
        shards = ac.Shards(group, strategy="merge")
        shared = (ac.shard(x, shards) for x in arrays[1:])
        result = attention(arrays[0], *shared, mask=mask, shards=shards, **EXACTLY, return_logsumexp=True)
        return backend.to_numpy((result.output, result.logsumexp))

    for found in ranks(3, step):
        for result, wanted in zip(found, whole, strict=True):
            same(result, wanted)


@pytest.mark.needs("gradients")
def test_gradients_of_channels_far_apart_are_within_an_ulp_of_the_sum_of_sizes(backend, rng):
    """Half an ulp for the output in the mean that is subtracted, half for the result."""
    (query, key, value), mask = drawn(rng, (1, 2, 1, 20, 50, 8, 16), "normal")
    channels = np.exp2(np.linspace(-20, 20, 16, dtype=np.float32))
    arrays, factor = [query, key, value * channels], (rng.standard_normal((1, 2, 20, 16)) / channels).astype(np.float32)
    found = gradients(backend, arrays, factor, mask, {})
    output, _ = outputs(backend, arrays, mask, {})
    query, key, value, factor, output = (x.astype(np.longdouble) for x in (*arrays, factor, output))
    scale = np.sqrt(np.longdouble(1) / 8)
    weights = np.where(mask, np.exp(query @ key.swapaxes(-1, -2) * scale), 0) * scale
    weights /= np.maximum(weights.sum(-1, keepdims=True), 1e-300) / scale
    terms = [(factor @ value.swapaxes(-1, -2), factor * output)]
    terms.append((np.abs(factor) @ np.abs(value).swapaxes(-1, -2), -np.abs(factor * output)))
    d_scores, sizes = (weights * (first - second.sum(-1, keepdims=True)) for first, second in terms)
    for x, other, transposed in ((found[0], key, False), (found[1], query, True)):
        first, second = (each.swapaxes(-1, -2) if transposed else each for each in (d_scores, sizes))
        ulp = np.exp2(np.frexp((second @ np.abs(other)).astype(np.float64))[1] - 24.0)
        assert np.max(np.abs(x - first @ other) / np.maximum(ulp, 2.0**-126)) <= 1.01


@pytest.mark.needs("gradients")
@pytest.mark.parametrize("sign", [-1, 1])
def test_sums_over_all_heads_of_a_key_as_far_off_as_is_assumed_change_no_bit(backend, sign, rng, monkeypatch):
    """Gradients of values that cancel to some digits, so that errors beyond the bound decide some of them."""
    query, key, value = np.full((1, 64, 64, 4), 0.01), np.ones((1, 1, 3, 4)), rng.standard_normal((1, 1, 3, 16))
    half = rng.uniform(1, 2, (1, 64, 32, 16))
    factor = np.stack([half, -half * (1 + 2.0**-11 * rng.standard_normal(half.shape))], axis=3)
    arrays = [x.astype(np.float32) for x in (query, key, value)]
    call = backend, arrays, factor.reshape(1, 64, 64, 16).astype(np.float32), np.ones((1, 1, 64, 3), bool), {}
    whole, multiply = gradients(*call), backward.matmul_transposed

    def off(x, y, xp):
        sizes = multiply(xp.abs(x), xp.abs(y), xp)
        return xp.add(multiply(x, y, xp), xp.multiply(sizes, sign * (x.shape[1] * x.shape[2] + 1) * bounds.ULP))

    monkeypatch.setattr(backward, "matmul_transposed", off)
    for found, wanted in zip(gradients(*call), whole, strict=True):
        same(found, wanted)
