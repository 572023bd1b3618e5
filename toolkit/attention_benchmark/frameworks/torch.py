"""PyTorch and its peers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 (its name everywhere)
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from attention_benchmark.candidate import Call
from attention_benchmark.frameworks import Engine, Step, device_of
from attention_benchmark.problem import SOFTCAP, Problem, alibi_rates
from attention_torch import backend


class TorchEngine(Engine):
    """PyTorch: gradients by autograd, of a function that is compiled or not."""

    def step(self, function: Callable[..., Any], mode: str, backward: bool, /) -> Step:
        """Record for autograd only if gradients are asked for."""
        function = backend.compile(function, mode=mode)

        def forward(variables: Any, constants: Any, cotangent: Any) -> tuple[Any, ...]:
            with torch.no_grad():
                return (function(*variables, *constants),)

        def both(variables: Any, constants: Any, cotangent: Any) -> tuple[Any, ...]:
            variables = [each.requires_grad_() for each in variables]
            output = function(*variables, *constants)
            return output.detach(), *torch.autograd.grad(output, variables, cotangent)

        return both if backward else forward

    def wait(self, result: Any, /) -> None:
        """Wait for the accelerator."""
        if result[0].is_cuda:
            torch.cuda.synchronize()

    def peak_memory(self, step: Step, arguments: tuple[Any, ...], /) -> int | None:
        """Ask the allocator."""
        if not arguments[2].is_cuda:
            return None
        self.wait(step(*arguments))
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        self.wait(step(*arguments))
        return int(torch.cuda.max_memory_allocated() - before)


engine = TorchEngine(backend)


def fused(problem: Problem) -> Call:
    """Prepare PyTorch's choice among its kernels."""
    arrays, keys, constants = problem.for_peer()

    def function(query: Any, key: Any, value: Any, *mask: Any) -> Any:
        return F.scaled_dot_product_attention(
            query,
            key[:, :, keys],
            value[:, :, keys],
            attn_mask=mask[0] if mask else None,
            is_causal=problem.is_causal,
            enable_gqa=problem.group > 1,
        )

    return Call(function, arrays, constants)


def flex(problem: Problem) -> Call:
    """Prepare FlexAttention, with the block mask made in advance."""
    device = device_of(backend, problem.device)
    batch, _, length, _ = problem.shape
    arrays = list(backend.from_numpy(problem.mask_arrays, device=device))
    rates = torch.from_numpy(alibi_rates(problem.shape[1])).to(device, torch.float32)
    ahead, window = problem.ahead, problem.window
    rules: dict[str, Callable[..., Any]] = {
        "causal": lambda b, h, q, k: k <= q + ahead,
        "window": lambda b, h, q, k: (k <= q + ahead) & (k > q + ahead - window),
        "packed": lambda b, h, q, k: arrays[0][q] == arrays[1][k],
        "padded": lambda b, h, q, k: k < arrays[0][b],
        "padded-causal": lambda b, h, q, k: (k <= q + ahead) & (k < arrays[0][b]),
    }
    rule = rules.get(problem.mask)
    changes: dict[str, Callable[..., Any]] = {
        "softcap": lambda s, b, h, q, k: torch.tanh(s / SOFTCAP) * SOFTCAP,
        "alibi": lambda s, b, h, q, k: s - rates[h] * (q + ahead - k).abs(),
        "bias": lambda s, b, h, q, k: s + arrays[0][q, k],
    }
    change = changes.get(problem.mask)
    batches = batch if problem.mask in ("padded", "padded-causal") else None
    blocks = rule and create_block_mask(rule, batches, None, problem.num_queries, length, device=device)

    def function(query: Any, key: Any, value: Any) -> Any:
        return flex_attention(query, key, value, change, block_mask=blocks, enable_gqa=problem.group > 1)

    return Call(function, problem.arrays)
