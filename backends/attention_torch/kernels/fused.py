"""PyTorch's fused attention as a `Kernel`."""

from __future__ import annotations

import torch

from attention_core.backend import Call, Kernel, Takes, Verdict, is_top_left_causal
from attention_core.masks import Mask
from attention_torch import modes
from attention_torch.kernels import guarded, guards, sdpa
from attention_torch.kernels.flex import FlexAttention
from attention_torch.kernels.hidden import with_hidden_cleared

MIN_SCORES = 2**20  # of a head on an accelerator, from which on blocks of a rule save more than their mask takes
TRACED = "has options of lengths, which torch.jit.trace makes tensors: torch.export records it"


class ScaledDotProduct(Kernel):
    """`torch.nn.functional.scaled_dot_product_attention`."""

    name = "torch.nn.functional.scaled_dot_product_attention"
    takes = Takes(options=("bias",), masks=("any",), one_width=True, constant_bias=True)
    attend_to_piece = staticmethod(guarded.attend_to_piece)
    piece_gradients = staticmethod(guarded.piece_gradients)

    def __init__(self, flex: FlexAttention, facts: guarded.Facts | None = None) -> None:
        self.flex, self.facts = flex, facts

    def judge(self, call: Call) -> Verdict:
        """Say why the kernel would not give the answer, and whether it is faster.

        Query, key and value are read on an accelerator alone, with ``assume_finite=False``.
        """
        if torch.jit.is_tracing():
            return Verdict(TRACED)
        if isinstance(call.mask, Mask):
            modes.check_local(call.query)
        call = guards.with_default_finite(call)
        slower = guards.slower(call) or self._slower_than_flex(call)
        return Verdict(self.takes.refusal(call) or guards.refusal(call), slower)

    def lasts(self, call: Call) -> bool:
        """Whether the verdict is that of all calls of this signature, outside of modes of PyTorch."""
        if modes.has_modes():
            return False
        if modes.is_on_host(call.query):
            return not (call.query.dtype in guards.HALVES and guards.records(call))
        is_flag = call.mask is None or is_top_left_causal(call.mask)
        return modes.is_on_accelerator(call.query) and is_flag and call.assume_finite is not False

    def prepare(self, call: Call) -> ScaledDotProduct:
        """Return the kernel for calls of this signature, which knows what they share."""
        return ScaledDotProduct(self.flex, guarded.facts_of(call)) if modes.is_on_host(call.query) else self

    def _slower_than_flex(self, call: Call) -> str | None:
        if modes.is_on_host(call.query) or not guards.is_rule_without_flag(call.mask):
            return None
        is_large = call.query.shape[-2] * call.key.shape[-2] >= MIN_SCORES
        return "computes what the rule masks" if is_large and self.flex.judge(call) == Verdict(None) else None

    def attend(self, call: Call) -> torch.Tensor:
        """Return the output of the kernel, or that of blocks if it turns out that something leaked, or was lost."""
        if self.facts is not None or modes.is_on_host(call.query):
            return guarded.run(call, self.facts or guarded.facts_of(call))[0]
        if guards.with_default_finite(call) is call:
            return sdpa.kernel_output(call)
        scaled = sdpa.scaled(call)  # before it is assumed that no product overflows
        return sdpa.kernel_output(guards.with_default_finite(with_hidden_cleared(scaled)))

    def has_logsumexp(self, call: Call) -> bool:
        """Whether the operator of the kernel gives the same output, and the logsumexp of the definition."""
        is_shifted = call.bias is not None and guards.records(call)
        return modes.is_on_host(call.query) and guards.attends_later(call) and not is_shifted

    def takes_pieces(self, call: Call) -> bool:
        """Whether the operator of the kernel gives what is merged, and its gradients."""
        return sdpa.TAKES_GROUPS and self.has_logsumexp(call)

    def attend_with_logsumexp(self, call: Call) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the same output as `attend`, and logsumexp."""
        output, logsumexp = guarded.run(call, self.facts or guarded.facts_of(call), logsumexp=True)
        assert logsumexp is not None
        return output, logsumexp
