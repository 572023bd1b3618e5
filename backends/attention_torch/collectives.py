"""Collectives of PyTorch's process groups, in eager and in compiled programs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from attention_core.backend import Collectives

# By the names of 2.13, and those before.
_ALL_GATHER: Any = getattr(dist, "all_gather_single", None) or getattr(dist, "all_gather_into_tensor", None)
_REDUCE_SCATTER: Any = getattr(dist, "reduce_scatter_single", None) or getattr(dist, "reduce_scatter_tensor", None)


class TorchCollectives(Collectives):
    """The collectives of `torch.distributed`, on groups by the names that it gives them."""

    def name_of(self, group: Any, /) -> str:
        """The name of a process group, or of that of a mesh of one axis."""
        kind = type(group).__name__
        if dist.is_available() and kind == "DeviceMesh":
            if group.ndim != 1:
                raise ValueError(f"expected a DeviceMesh of one axis as the group of shards; got one of {group.ndim}")
            group = group.get_group()
        if not (dist.is_available() and isinstance(group, dist.ProcessGroup)):
            raise TypeError(f"expected the group of shards as a ProcessGroup, or a DeviceMesh of one axis; got {kind}")
        return str(group.group_name)

    def size(self, group: str, /) -> int:
        return int(_group(group).size())

    def rank(self, group: str, /) -> int:
        return int(_group(group).rank())

    def all_gather(self, x: torch.Tensor, group: str, /) -> torch.Tensor:
        ranks = _group(group)
        gathered = x.new_empty(ranks.size() * x.numel())
        _ALL_GATHER(gathered, x.reshape(-1).contiguous(), group=ranks)
        return gathered.reshape(ranks.size(), *x.shape)

    def sum_scatter(self, x: torch.Tensor, group: str, /) -> torch.Tensor:
        scattered = x.new_empty(x[0].numel())
        _REDUCE_SCATTER(scattered, x.reshape(-1).contiguous(), group=_group(group))
        return scattered.reshape(x.shape[1:])

    def exchange(self, x: torch.Tensor, group: str, /) -> torch.Tensor:
        received = x.new_empty(x.shape)
        dist.all_to_all_single(received, x.contiguous(), group=_group(group))
        return received

    def rotate(
        self, arrays: tuple[torch.Tensor, ...], group: str, by: int, /
    ) -> Callable[[], tuple[torch.Tensor, ...]]:
        ranks = _group(group)
        to, source = (dist.get_global_rank(ranks, (ranks.rank() + step) % ranks.size()) for step in (by, -by))
        sent = [x.contiguous() for x in arrays]
        received = tuple(x.new_empty(x.shape) for x in sent)
        operations = [dist.P2POp(dist.isend, x, to, ranks) for x in sent]
        operations += [dist.P2POp(dist.irecv, x, source, ranks) for x in received]
        works = dist.batch_isend_irecv(operations)

        def finish() -> tuple[torch.Tensor, ...]:
            for work in works:
                work.wait()
            operations.clear()  # which have held what was sent
            return received

        return finish

    def largest(self, x: torch.Tensor, group: str, /) -> torch.Tensor:
        return _reduced(x, dist.ReduceOp.MAX, group)

    def total(self, x: torch.Tensor, group: str, /) -> torch.Tensor:
        return _reduced(x, dist.ReduceOp.SUM, group)


def _group(name: str) -> Any:
    return dist.distributed_c10d._resolve_process_group(name)


_each: Any
for _each in (TorchCollectives.size, TorchCollectives.rank):
    _each._dynamo_marked_constant = True  # torch.compile runs it, and keeps the number: a program is one of its process


def _reduced(x: torch.Tensor, operation: Any, group: str) -> torch.Tensor:
    reduced = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(reduced, operation, group=_group(group))
    return reduced
