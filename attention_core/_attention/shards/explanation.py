"""What is told of a call with shards: its strategy, why not the others, and the call that this rank computes."""

from __future__ import annotations

from attention_core._attention.explanation import Explanation, explain
from attention_core._attention.shards.strategies import RING, Sharded, taken_strategy, walk_strategies


def explain_shards(sharded: Sharded, name: str, *, logsumexp: bool) -> Explanation:
    """What `taken_strategy` walks, and what `run_call` walks for the local call, in words."""
    taken, notes = taken_strategy(sharded, name), []
    if taken is RING:
        local = Explanation("blockwise", "a ring attends to the keys of each hop in blocks", ())
        if RING.takes_kernel(sharded):
            reason = "a ring attends to the keys of each hop by the kernel, or in blocks if that refuses its mask"
            local = local._replace(chosen="fused", reason=reason)
    else:
        local = explain(taken.local_call(sharded), weights=False, logsumexp=logsumexp)
    for strategy, verdict in walk_strategies(sharded, name):
        if verdict.refusal is not None:
            text = f"refused: {verdict.refusal}"
        else:
            text = f"receives about {strategy.sent(sharded) / 2**20:.3g} MiB"
            text += (
                ""
                if strategy is taken
                else f", not taken: {verdict.slower or 'another one was asked for or comes first'}"
            )
        notes.append(f"shards: {strategy.name}: {text}")
    return local._replace(notes=(*local.notes, *notes))
