"""PyTorch's fused attention as a `Kernel`."""

from __future__ import annotations

from collections.abc import Callable

import torch

from attention_core.backend import Call, Kernel, Verdict, attend_automatically, is_top_left_causal, sample_cuts
from attention_core.masks import Given, Mask
from attention_torch import compiled, few_queries, flash_cpu, guards, sdpa, small_calls
from attention_torch.flex import FlexAttention
from attention_torch.hidden import with_hidden_cleared

__all__ = ["ScaledDotProduct"]

MIN_SCORES = 2**20  # of a head on an accelerator, from which on blocks of a rule save more than their mask takes
TRACED = "has options of lengths, which torch.jit.trace makes tensors: torch.export records it"


class ScaledDotProduct(Kernel):
    """`torch.nn.functional.scaled_dot_product_attention`."""

    name = "torch.nn.functional.scaled_dot_product_attention"

    def __init__(self, flex: FlexAttention) -> None:
        self.flex = flex

    def judge(self, call: Call) -> Verdict:
        """Say why the kernel would not give the answer, and whether it is faster.

        Query, key and value are read where something is masked, and where there are few keys.
        """
        if torch.jit.is_tracing():
            return Verdict(TRACED, is_faster=False, slower=TRACED)
        if isinstance(call.mask, Mask):
            guards.check_local(call.query)
        call = guards.as_looked_at(call)
        slower = guards.slower(call) or self._slower_than_flex(call)
        return Verdict(guards.refusal(call), slower is None, slower)

    def plan(self, call: Call) -> Callable[[Call], torch.Tensor | None] | None:
        """Return the output of calls of this signature, small ones or of few queries, without a verdict on each."""
        return None if torch.jit.is_tracing() else small_calls.plan(call) or few_queries.plan(call)

    def _slower_than_flex(self, call: Call) -> str | None:
        is_rule = isinstance(call.mask, Mask) and not isinstance(call.mask, Given) and not is_top_left_causal(call.mask)
        if guards.is_on_host(call.query) or not is_rule:
            return None
        is_large = call.query.shape[-2] * call.key.shape[-2] >= MIN_SCORES
        verdict = self.flex.judge(call)
        return "computes what the rule masks" if is_large and verdict.refusal is None and verdict.is_faster else None

    def attend(self, call: Call) -> torch.Tensor:
        """Return the output of the kernel, or that of blocks if it turns out that something could leak."""
        if guards.as_looked_at(call) is not call:
            query, scale = sdpa.scaled_query(call)  # before it is assumed that no product overflows
            call = guards.as_looked_at(with_hidden_cleared(call._replace(query=query, scale=scale)))
        if (call.mask is not None or call.bias is not None) and guards.looks_afterwards(call):
            return self._attend_and_look(call, logsumexp=False)[0]
        if guards.has_key_lengths(call):
            return sdpa.attend_per_sample(call, self._attend_to_sample)
        if guards.decides_at_run_time(call) and guards.may_leak(call):
            return compiled.attend(call)
        return sdpa.attend(call)

    def _attend_to_sample(self, call: Call) -> torch.Tensor:
        if 0 in call.key.shape or guards.loses_nan(call):  # of no keys, the kernel gives NaN to a query of NaN
            return attend_automatically(call)
        return self.attend(call)

    def has_logsumexp(self, call: Call) -> bool:
        """Whether the operator of the kernel gives the same output, and the logsumexp of the definition."""
        return flash_cpu.fits(call)

    def attend_with_logsumexp(self, call: Call) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the same output as `attend`, and logsumexp."""
        if guards.looks_in_program(call):
            return compiled.attend_and_look(call)
        if not guards.looks_afterwards(call):
            return flash_cpu.attend(call)
        return self._attend_and_look(call, logsumexp=True)

    def _attend_and_look(self, call: Call, *, logsumexp: bool) -> tuple[torch.Tensor, torch.Tensor]:
        ranges = guards.ranges_apart(call)
        if ranges is not None:
            return flash_cpu.attend_to_samples(call, sample_cuts(call, ranges))
        return flash_cpu.attend_and_look(call, logsumexp=logsumexp)
