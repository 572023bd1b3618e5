"""What is told of a call with shards: its strategy, why not the others, and the call that this rank computes."""

from __future__ import annotations

from ..explanation import Explanation, explain
from .strategies import RING, Sharded, taken_strategy, walk_strategies


def explain_shards(sharded: Sharded, name: str, *, logsumexp: bool) -> Explanation:
    """What `taken_strategy` walks, and what `run_call` walks for the local call, in words."""
    taken, notes = taken_strategy(sharded, name), []
    if taken is RING:
        by_kernel = RING.takes_kernel(sharded)
        how = "by the kernel, or in blocks if that refuses its mask" if by_kernel else "in blocks"
        chosen = "fused" if by_kernel else "blockwise"
        local = Explanation(chosen, f"a ring attends to the keys of each hop {how}", ())
    else:
        local = explain(taken.local_call(sharded), weights=False, logsumexp=logsumexp)
    for strategy, (refusal, _, slower) in walk_strategies(sharded, name):
        why = slower or "another one was asked for or comes first"
        ending = "" if strategy is taken else f", not taken: {why}"
        text = f"refused: {refusal}"
        if refusal is None:
            text = f"receives about {strategy.sent(sharded) / 2**20:.3g} MiB{ending}"
        notes.append(f"shards: {strategy.name}: {text}")
    return local._replace(notes=(*local.notes, *notes))
