"""Print what XLA needs for a causal ring of 32,768 positions, forward and backward, by the number of devices.

Run it with ``XLA_FLAGS=--xla_force_host_platform_device_count=8``. Nothing is computed: the compiler tells.
"""

import jax
import jax.numpy as jnp

from attention_core import Shards, scaled_dot_product_attention

LENGTH, HEADS, WIDTH = 32768, 4, 64


def loss_of(size):
    """The loss of a plain call, or of that of so many devices, each with its shard."""

    def plain(query, key, value):
        return jnp.sum(scaled_dot_product_attention(query, key, value, is_causal=True, implementation="blockwise") ** 2)

    def of_device(query, key, value):
        shards = Shards("ranks", "zigzag", "ring")
        output = scaled_dot_product_attention(query, key, value, is_causal=True, shards=shards)
        return jax.lax.psum(jnp.sum(output**2), "ranks")

    spec = jax.P(None, None, "ranks")
    mesh = jax.make_mesh((size,), ("ranks",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:size])
    shared = jax.shard_map(of_device, mesh=mesh, in_specs=(spec,) * 3, out_specs=jax.P())
    return plain if size == 1 else shared, jax.NamedSharding(mesh, spec)


def main():
    """Print a row for each number of devices."""
    print("| R | arguments and results, MiB | temporary, MiB | sum, R = 1 is 1 | lines of HLO |\n|---|---|---|---|---|")
    first = None
    for size in (1, 2, 8):
        loss, sharding = loss_of(size)
        shape = jax.ShapeDtypeStruct((1, HEADS, LENGTH, WIDTH), jnp.float32, sharding=sharding)
        lowered = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(shape, shape, shape)
        needs = lowered.compile().memory_analysis()
        held = (needs.argument_size_in_bytes + needs.output_size_in_bytes) / 2**20
        temporary = needs.temp_size_in_bytes / 2**20
        first = first or held + temporary
        lines = len(lowered.as_text().splitlines())
        print(f"| {size} | {held:.0f} | {temporary:.0f} | {(held + temporary) / first:.2f} | {lines:,} |", flush=True)


if __name__ == "__main__":
    main()
