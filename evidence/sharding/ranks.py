"""Whether ranks that share a sequence end in the published bits, for each number of ranks, strategy and split.

A line is printed for each case, and the exit status is 1 if a hash is another. Patterns of names choose cases, by
default those of ``shared*``::

    PYTHONPATH=evidence torchrun --nproc-per-node 8 -m sharding.ranks
    XLA_FLAGS=--xla_force_host_platform_device_count=8 python -m sharding.ranks --backend jax
"""

from __future__ import annotations

import argparse
import fnmatch
import functools
import importlib
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from attention_conformance.cases import CASES
from attention_conformance.golden.cases import IDENTICAL
from attention_conformance.golden.identical import Computed, run, verdicts
from attention_conformance.hashes import published
from attention_conformance.own.identical import Identical
from attention_conformance.sharded import whole_of
from attention_core import (
    Shards,
    scaled_dot_product_attention,
    shard,
    shard_positions,
)
from attention_core.backend import Backend, get_backend

SIZES = (1, 2, 3, 4, 8)
WAYS = (("gather", "contiguous"), ("gather", "zigzag"), ("heads", "zigzag"), ("merge", "contiguous"))
"""Strategies and splits."""


def ways_of(case: Identical, size: int) -> Iterator[tuple[str, str]]:
    """The strategies and splits of a case on so many ranks: one of one rank, and no gradient of a merge."""
    for strategy, split in WAYS if size > 1 else WAYS[:1]:
        if not (strategy == "merge" and case.variables):
            yield strategy, split


def over(case: Identical, attention: Callable[..., Any]) -> Callable[[Any], Any]:
    """The function of a case, by another attention."""
    call: Any = case.function
    return functools.partial(call, function=attention)


@functools.wraps(scaled_dot_product_attention)
def attention_of_shards(*arrays: Any, **options: Any) -> Any:
    """Attention, where a strategy does not refuse a call."""
    try:
        return scaled_dot_product_attention(*arrays, **options)
    except ValueError as error:
        if "that strategy=" in str(error):
            raise NotImplementedError(str(error)) from error
        raise


def of_devices(size: int, strategy: str, split: str) -> Callable[..., Any]:
    """Attention by so many devices of JAX, of whole arrays."""
    jax = importlib.import_module("jax")
    jnp = jax.numpy
    mesh = jax.make_mesh((size,), ("ranks",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:size])

    def attention(query: Any, key: Any, value: Any, /, **options: Any) -> Any:
        length = key.shape[-2] if strategy == "merge" or key.shape[-2] == query.shape[-2] else None
        shards = Shards("ranks", split, strategy, length)

        is_merged = strategy == "merge"

        def of_device(*arrays: Any) -> Any:
            query, key, value = (x if is_merged and n == 0 else shard(x, shards) for n, x in enumerate(arrays))
            found = scaled_dot_product_attention(query, key, value, **options, shards=shards)
            at = shard_positions(key if is_merged else query, shards)
            return tuple(x[None] for x in (found.output, found.logsumexp, at))

        everywhere = jax.NamedSharding(mesh, jax.P())
        run = jax.jit(jax.shard_map(of_device, mesh=mesh, in_specs=jax.P(), out_specs=jax.P("ranks")))
        found = run(*(jax.device_put(x, everywhere) for x in (query, key, value)))
        output, logsumexp, positions = (jax.device_put(x, jax.devices()[0]) for x in found)
        if is_merged:  # all ranks have all rows
            return output[0], None, logsumexp[0]
        order = jnp.argsort(positions.reshape(-1))[: query.shape[-2]]
        return jnp.concat(list(output), axis=-2)[..., order, :], None, jnp.concat(list(logsumexp), axis=-1)[..., order]

    return attention


class _Engine:
    """The ranks of a library, as its user has started them."""

    def __init__(self, name: str) -> None:
        self.backend: Backend = get_backend(name)
        self.rank, self.device = 0, self.backend.devices()[0]
        if name == "jax":
            self.most = len(self.backend.devices())
            return
        torch = importlib.import_module("torch")
        if "RANK" not in os.environ:
            sys.exit("expected ranks; got one process: torchrun --nproc-per-node 8 -m sharding.ranks")
        is_on_gpus = torch.cuda.is_available()
        torch.distributed.init_process_group("nccl" if is_on_gpus else "gloo")
        if is_on_gpus:
            self.device = f"cuda:{os.environ['LOCAL_RANK']}"
            torch.cuda.set_device(self.device)
        self.rank, self.most = torch.distributed.get_rank(), torch.distributed.get_world_size()
        self.groups = {size: torch.distributed.new_group(list(range(size))) for size in SIZES if size <= self.most}

    def attention(self, size: int, strategy: str, split: str) -> Callable[..., Any] | None:
        """Attention by so many ranks, of whole arrays; None for a rank that is not among them."""
        if self.backend.name == "jax":
            return of_devices(size, strategy, split)
        if self.rank >= size:
            return None
        return whole_of(attention_of_shards, Shards(self.groups[size], split, strategy))


def results(engine: _Engine, case: Identical) -> Iterator[Computed]:
    """What each number of ranks makes of a case in each strategy."""
    trees = case.trees()
    for size in (each for each in SIZES if each <= engine.most):
        for strategy, split in ways_of(case, size):
            attention = engine.attention(size, strategy, split)
            if attention is None:
                continue
            ours = replace(case, function=over(case, attention))
            found = run(ours, engine.backend, engine.device, "eager", trees=trees)
            yield replace(found, variation=f"{size} ranks, {strategy}, {split}")


def report(engine: _Engine, patterns: list[str]) -> bool:
    """Print a line for each case; return whether all are right."""
    are_right = True
    for case in IDENTICAL:
        if case.name.startswith("shared") and any(fnmatch.fnmatch(case.name, each) for each in patterns):
            for verdict in verdicts([case.name], results(engine, case), published()):
                are_right &= not verdict.complaints
                if engine.rank:
                    continue
                print(
                    f"{case.name}: {len(verdict.results)} ways, SHA-256 {verdict.sha256}", *verdict.complaints, sep="\n"
                )
    return are_right


SHARED_CASES = tuple(case for case in CASES if case.measure not in ("message", "autocast"))
"""Cases of attention: all but those of the words of errors, which tell the shapes of a shard."""


def main() -> None:
    """Run as a command."""
    parser = argparse.ArgumentParser(prog="python -m sharding.ranks", description=__doc__)
    parser.add_argument("--backend", choices=("torch", "jax"), default="torch")
    parser.add_argument("--case", action="append")
    options = parser.parse_args()
    sys.exit(not report(_Engine(options.backend), options.case or ["*"]))


if __name__ == "__main__":
    main()
