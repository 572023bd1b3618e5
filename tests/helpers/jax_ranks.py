"""A program of its own on eight devices of JAX, which share a sequence; or one of two processes, for arguments."""

import dataclasses
import pickle
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec
from shard_helpers import check_close, check_told, differentiated, in_order, inputs, loss_of, options_of, with_arrays

import attention_core as ac
from attention_conformance.golden.cases import IDENTICAL
from attention_conformance.golden.identical import computed_of, digest
from attention_conformance.hashes import published
from attention_jax.collectives import JaxCollectives
from sharding.ranks import of_devices, over

CASES = [
    ("segments of samples", 4, "zigzag", "gather", 13, "fast", "float64"),
    ("everything", 4, "zigzag", "heads", 13, "fast", "float64"),
    ("sinks", 8, "contiguous", "gather", 16, "fast", "float64"),
    ("bias of bhmn", 4, "zigzag", "ring", 13, "fast", "float64"),
    ("window", 8, "contiguous", "ring", 32, "fast", "float64"),
]


def results(name, length, arithmetic, dtype, heads, shards=None, size=1, wrap=lambda loss: loss):
    """Output, logsumexp and gradients by name: of one device, or of so many that share the sequence."""
    arrays = tuple(inputs(heads, length, dtype=dtype))
    options = options_of(name, jnp.asarray, heads, length, dtype=dtype)
    extra = differentiated(options)

    def loss(arrays, extra):
        more = {} if shards is None else {"shards": shards}
        if shards is not None:
            arrays = tuple(ac.shard(x, shards, axis=-1 if x.ndim == 3 else -2) for x in arrays)
            extra = {key: ac.shard(x, shards) if key == "bias" and x.shape[-2] > 1 else x for key, x in extra.items()}
        found = ac.scaled_dot_product_attention(
            *arrays[:3], **with_arrays(options, extra), **more, return_logsumexp=True, arithmetic=arithmetic
        )
        return loss_of(jnp, found, arrays[3:]), (found.output, found.logsumexp)

    def of_device(arrays, extra):
        number, found = wrap(loss)(arrays, extra)
        return jax.lax.psum(number, "ranks"), tuple(x[None] for x in found)

    if shards is not None:
        everywhere, spread = PartitionSpec(), PartitionSpec("ranks")
        mesh = jax.make_mesh((size,), ("ranks",), axis_types=(AxisType.Auto,), devices=jax.devices()[:size])
        over = jax.shard_map(
            of_device, mesh=mesh, in_specs=(everywhere, everywhere), out_specs=(everywhere, (spread, spread))
        )
    gradient = jax.value_and_grad(loss if shards is None else over, argnums=(0, 1), has_aux=True)
    (_, found), (of_arrays, of_extra) = jax.jit(gradient)(arrays, extra)
    if shards is not None:
        found = [own_or_all(x, size, shards.split, length) for x in found]
    named = zip(("output", "logsumexp", "query", "key", "value"), (*found, *of_arrays[:3]), strict=True)
    return {key: np.asarray(x) for key, x in (*named, *of_extra.items())}


def own_or_all(x, size, split, length):
    """Rows of all devices in order; zeros for those of devices that another process has."""
    parts = np.zeros(x.shape, x.dtype)
    for each in x.addressable_shards:
        parts[each.index] = each.data
    return in_order(list(parts), -1 - (x.ndim == 5), size, split, length)


def of_process(port, process, path):
    """What one of two processes, with two devices each, finds of a sequence that all four share."""
    jax.distributed.initialize(f"127.0.0.1:{port}", 2, int(process))
    settings, found = ("causal", 13, "fast", "float64", (4, 2)), {}
    for strategy in ("gather", "ring"):
        found[strategy] = results(*settings, ac.Shards("ranks", "zigzag", strategy, 13), 4)
    with jax.default_device(jax.local_devices()[0]):
        found["whole"] = results(*settings)
    Path(path).write_bytes(pickle.dumps(found))


def decoded(size, shards, last, **options):
    """Attention of the last of some queries to keys that so many devices share, the same on all; and of one device."""
    query, key, value = map(jnp.asarray, inputs((4, 2), 13, dtype="float32")[:3])
    value = value.at[0, :, -1].set(last)
    mesh = jax.make_mesh((size,), ("ranks",), axis_types=(AxisType.Auto,), devices=jax.devices()[:size])

    def step(query, key, value):
        key, value = (ac.shard(x, shards) for x in (key, value))
        return ac.scaled_dot_product_attention(query, key, value, **options, shards=shards)

    everywhere = PartitionSpec()
    over = jax.shard_map(step, mesh=mesh, in_specs=(everywhere,) * 3, out_specs=everywhere)
    arrays = query[..., -2:, :], key, value
    return tuple(map(np.asarray, (jax.jit(over)(*arrays), ac.scaled_dot_product_attention(*arrays, **options))))


def check_differentiated():
    """A differentiated merge is refused in each way to differentiate, before any sum over ranks."""
    mesh, spec = (
        jax.make_mesh((2,), ("ranks",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2]),
        PartitionSpec(),
    )
    shards, x, sums, total = ac.Shards("ranks", strategy="merge"), jnp.ones((1, 2, 4, 3)), [], JaxCollectives.total

    def counted(*arguments):
        jax.debug.callback(lambda: sums.append(1))
        return total(*arguments)

    def loss(query):
        key = ac.shard(x, shards)
        return jnp.sum(ac.scaled_dot_product_attention(query, key, key, shards=shards))

    over = jax.shard_map(loss, mesh=mesh, in_specs=spec, out_specs=spec)
    inside = jax.shard_map(jax.grad(loss), mesh=mesh, in_specs=spec, out_specs=spec)
    JaxCollectives.total, told = counted, []
    for call in (jax.grad(over), jax.grad(jax.jit(over)), lambda x: jax.vjp(jax.jit(over), x), inside):
        try:
            call(x)
        except NotImplementedError as error:
            told.append(str(error))
    JaxCollectives.total = total
    check_told(told, 4)
    assert not sums


def check_published(name, *way):
    """So many devices have the published hash of a case of the kit."""
    (case,) = (case for case in IDENTICAL if case.name == name)
    ours = dataclasses.replace(case, function=over(case, of_devices(*way)))
    jax.config.update("jax_enable_x64", False)
    found = digest(computed_of(ours, ac.backend.get_backend("jax"), "cpu:0", "eager", case.trees()))
    jax.config.update("jax_enable_x64", True)
    assert found == published()[name]


def main():
    """Compare all cases with one device."""
    exact = {"mask": ac.Causal(offset=11), "arithmetic": "reproducible"}
    for last in (1.0, np.nan):  # which one device has, and one of two queries attends to
        np.testing.assert_array_equal(*decoded(8, ac.Shards("ranks", "zigzag", "merge", 13), last, **exact))
    for name, size, split, strategy, length, arithmetic, dtype in CASES:
        shards = ac.Shards("ranks", split, strategy, length)
        settings = name, length, arithmetic, dtype, (4, 4) if strategy == "heads" else (4, 2)
        check_close(results(*settings, shards, size), results(*settings))
    shards = ac.Shards("ranks", "contiguous", "gather", 13)
    settings = "causal", 13, "fast", "float64", (4, 2)
    check_close(results(*settings, shards, 2, wrap=jax.checkpoint), results(*settings))
    check_published("shared-spread-gradient", 3, "gather", "zigzag")
    check_differentiated()
    x = jnp.zeros((1, 2, 4, 3))
    with pytest.raises(ValueError):
        ac.scaled_dot_product_attention(x, x, x, shards=ac.Shards("ranks"))


if __name__ == "__main__":
    of_process(*sys.argv[1:]) if sys.argv[1:] else main()
