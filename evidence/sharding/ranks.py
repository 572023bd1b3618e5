"""Whether ranks that share a sequence end in the published bits, for each number of ranks, strategy and split.

A line is printed for each case, and the exit status is 1 if a hash is another. Patterns of names choose cases, by
default those of ``shared*``::

    PYTHONPATH=evidence torchrun --nproc-per-node 8 -m sharding.ranks
    XLA_FLAGS=--xla_force_host_platform_device_count=8 python -m sharding.ranks --backend jax

With ``--model FILE.gguf``, a language model writes tokens with a cache over ranks, and the logits are hashed. With
``--cases DTYPE``, ranks answer the cases of the kit, gradients included: by option and strategy, a table has the number
of those cases, and the largest share of a bound.
"""

from __future__ import annotations

import argparse
import fnmatch
import functools
import importlib
import math
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from attention_conformance.cases import CASES
from attention_conformance.golden.cases import IDENTICAL
from attention_conformance.golden.identical import Found, digest, run, verdicts
from attention_conformance.hashes import published
from attention_conformance.measure.catalogue import matching
from attention_conformance.measure.implementations import bound_of
from attention_conformance.own.identical import Identical
from attention_conformance.own.language_model import LanguageModel, load_language_model
from attention_conformance.own.runner import check
from attention_conformance.problem import DTYPES, NumpyArray, Problem, Rule
from attention_conformance.sharded import whole_of
from attention_core import (
    Causal,
    Shards,
    merge_heads,
    scaled_dot_product_attention,
    shard,
    shard_positions,
    split_heads,
)
from attention_core.backend import Backend, array_namespace, get_backend
from attention_core.functions import linear, rotary_embedding
from attention_models import prepare_weights

SIZES = (1, 2, 3, 4, 8)
NEW = 8
"""Tokens after the prompt."""
KINDS = {
    "Causal": "causal",
    "SlidingWindow": "window",
    "KeyLengths": "key lengths",
    "Segments": "segments",
    "array": "array mask",
    "periodic": "function mask",
}
"""Masks in words."""
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


def results(engine: _Engine, case: Identical) -> Iterator[Found]:
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


def told(engine: _Engine, patterns: list[str]) -> bool:
    """Print a line for each case, and whether all are right."""
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


ASKED = (("gather", "zigzag"), ("heads", "zigzag"), ("ring", "zigzag"), ("merge", "contiguous"))
"""Of which the cases of the kit are asked."""

SHARED_CASES = tuple(case for case in CASES if case.measure not in ("message", "autocast"))
"""Cases of attention: all but those of the words of errors, which tell the shapes of a shard."""


def asked_of(problem: Problem) -> set[str]:
    """What a case asks for, in words."""
    found = {"gradients"} if problem.cotangent is not None else set()
    found |= {name for name in ("bias", "sinks") if name in problem.arrays}
    found |= {name for name in ("scale", "softcap", "dropout") if problem.options.get(name) is not None}
    found |= {"score_mod"} if problem.score_mod else set()
    found |= {"grouped heads"} if problem.arrays["key"].shape[-3] != problem.sizes[1] else set()
    rules = [problem.mask] if problem.mask else []
    while rules:
        rule = rules.pop()
        parts = [each for each in rule.arguments.values() if isinstance(each, Rule)]
        rules += parts
        found |= set() if parts else {KINDS[rule.kind]}
    return found | ({"causal"} if problem.options.get("is_causal") else set()) or {"plain"}


def told_of_cases(engine: _Engine, patterns: list[str], dtype: str) -> bool:
    """Print a row for each option: the cases of the kit that ranks answered, and the worst share of a bound."""
    cases = {case.name: case for case in matching(SHARED_CASES, patterns)}
    options: dict[str, dict[str, list[float]]] = {}
    are_right = True
    for size in (each for each in SIZES[1:] if each <= engine.most):
        for strategy, split in ASKED:
            attention = engine.attention(size, strategy, split)
            if attention is None:
                continue
            chosen = [each for each in cases.values() if not (strategy == "merge" and each.measure == "gradient")]
            if strategy in ("ring", "merge"):
                chosen = [replace(each, bound=functools.partial(bound_of, "blockwise", each.bound)) for each in chosen]
            for each in check(attention, backend=engine.backend, cases=chosen, dtypes=[dtype]):
                are_right &= each.passed is not False
                if each.passed is False and not engine.rank:
                    print(f"{size} ranks, {strategy}, {split}: {each.case}: {each.detail}", flush=True)
                if each.passed is not None and each.error < math.inf and each.bound:
                    for name in asked_of(cases[each.case].problem(dtype)):
                        row = options.setdefault(name, {})
                        row.setdefault(strategy, []).append(each.error / each.bound)
    if not engine.rank:
        print("| option |", *(f"{strategy} |" for strategy, _ in ASKED))
        print("|---|", *("---|" for _ in ASKED), sep="")
        for name, row in sorted(options.items()):
            columns = [row.get(strategy, []) for strategy, _ in ASKED]
            print(f"| {name} |", *(f"{len(each)}: {max(each):.2f} |" if each else "– |" for each in columns))
    return are_right


# A language model whose cache is shared: each rank holds the keys and values of some positions, in all layers.

EXACT: dict[str, Any] = {"arithmetic": "reproducible"}


def logits_over(model: LanguageModel, backend: Backend, device: str, shards: Shards | None) -> NumpyArray:
    """The logits of the most probable tokens after the first prompt: without shards, by the cache of the model."""
    definition = model.definition.with_settings(**EXACT)
    parameters = prepare_weights(backend.from_numpy(model.parameters, device=device))
    ids, found, xp = model.prompts(False)[0][:1], [], backend.namespace
    length = ids.shape[-1] + NEW - 1
    spread = None if shards is None else _Spread(definition, parameters, shards, length)
    cache = definition.empty_cache((1,), length, dtype=xp.float32, device=parameters.token.device, xp=xp)
    for _ in range(NEW):
        tokens = backend.from_numpy(ids, device=device)
        if spread is None:
            logits, cache = definition(parameters, tokens, cache=cache)
        else:
            logits = definition(parameters, tokens, hook=spread)
            spread.start += ids.shape[-1]
        found.append(np.asarray(backend.to_numpy(logits))[0, -1])
        ids = np.asarray([[np.argmax(found[-1])]], np.int32)
    return np.stack(found)


class _Spread:
    """The hook of a decoder that attends to what all ranks hold of former positions."""

    def __init__(self, definition: Any, parameters: Any, shards: Shards, length: int) -> None:
        self.definition, self.layers = definition, parameters.layers
        self.shards = shards._replace(strategy="merge", length=length)
        self.length, self.start = length, 0
        self.held: dict[str, tuple[Any, Any]] = {}

    def __call__(self, name: str, function: Any, x: Any) -> Any:
        if not name.endswith(".attention"):
            return function(x)
        told, maps = self.definition, self.layers[int(name.split(".")[1])].attention
        xp, groups = array_namespace(x), told.layer.attention.groups
        counts = (told.num_heads, groups, groups)
        query, key, value = (
            split_heads(linear(each, x, **EXACT), count) for each, count in zip(maps[:3], counts, strict=True)
        )
        positions = self.start + xp.arange(x.shape[-2], dtype=xp.int32, device=x.device)
        if told.rotary_base is not None:
            turned: dict[str, Any] = {"base": told.rotary_base, "width": told.rotary_width}
            turned |= {"divisors": told.rotary_divisors, "interleaved": told.interleaved}
            query, key = (rotary_embedding(each, positions, **turned, **EXACT) for each in (query, key))
        self.held[name] = keys, values = self._written(name, (key, value), xp)
        options: dict[str, Any] = {"mask": Causal(offset=self.start), "scale": told.scale, "softcap": told.softcap}
        output = scaled_dot_product_attention(query, keys, values, shards=self.shards, **options, **EXACT)
        return linear(maps.output, merge_heads(output), **EXACT)

    def _written(self, name: str, new: tuple[Any, Any], xp: Any) -> tuple[Any, Any]:
        """What this rank holds, with those of the new rows that are its own."""
        like, count = new[0], new[0].shape[-2]
        blank = xp.zeros((self.length, 1), dtype=like.dtype, device=like.device)
        at = shard_positions(shard(blank, self.shards), self.shards) - self.start
        inside, rows = (at >= 0) & (at < count), xp.clip(at, 0, count - 1)
        held = self.held.get(name) or tuple(xp.zeros_like(x[..., :1, :]) for x in new)
        key, value = (
            xp.where(inside[:, None], xp.take(x, rows, axis=-2), old) for x, old in zip(new, held, strict=True)
        )
        return key, value


def told_of_model(engine: _Engine, path: Path) -> bool:
    """Print the hash of the logits of a language model for each number of ranks, and whether all are one."""
    if engine.backend.name != "torch":
        sys.exit("expected --backend torch with --model; got another")
    model, hashes = load_language_model(path), set()
    for size in (each for each in (1, 2, 4) if each <= engine.most):
        if engine.rank < size:
            shards = None if size == 1 else Shards(engine.groups[size], "zigzag")
            logits = logits_over(model, engine.backend, engine.device, shards)
            hashes.add(digest((("logits", logits),)))
            if not engine.rank:
                print(f"{size} ranks: SHA-256 {digest((('logits', logits),))}", flush=True)
    return len(hashes) < 2


def main() -> None:
    """Run as a command."""
    parser = argparse.ArgumentParser(prog="python -m sharding.ranks", description=__doc__)
    parser.add_argument("--backend", choices=("torch", "jax"), default="torch")
    parser.add_argument("--case", action="append")
    parser.add_argument("--model", type=Path)
    parser.add_argument("--cases", metavar="DTYPE", choices=DTYPES)
    options = parser.parse_args()
    engine, patterns = _Engine(options.backend), options.case or ["*"]
    if options.model:
        sys.exit(not told_of_model(engine, options.model))
    sys.exit(not (told_of_cases(engine, patterns, options.cases) if options.cases else told(engine, patterns)))


if __name__ == "__main__":
    main()
