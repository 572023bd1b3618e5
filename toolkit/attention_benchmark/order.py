"""The order that a worker process carries out."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import attention_workers as workers
from attention_benchmark.candidate import CANDIDATES
from attention_benchmark.measurement import Measurement
from attention_benchmark.problem import Problem

OF_MEMORY = {
    "MALLOC_MMAP_THRESHOLD_": "131072",
    "MALLOC_TRIM_THRESHOLD_": "131072",
    "TF_ENABLE_ONEDNN_OPTS": "0",  # oneDNN comes with an allocator of its own
    "ATTENTION_BENCHMARK_MEMORY": "1",
}
"""Environment variables that make allocators return freed memory to the system at once."""


@dataclass(frozen=True)
class Order(workers.Order):
    """The measurements to take in one process.

    Attributes
    ----------
    candidates : tuple of str
        The keys of candidates.
    without : tuple of (str, int)
        Pairs of a candidate's key and the index of a problem that are left out.
    seconds : float
        Time for the samples of a candidate on one problem.
    rounds : (int, int), optional
        The least and the largest number of rounds.
    limit : float
        The longest time of a call in seconds.
    memory : bool
        Whether to measure memory instead of time.
    """

    framework: str
    problems: tuple[Problem, ...]
    candidates: tuple[str, ...]
    without: tuple[tuple[str, int], ...] = ()
    seconds: float = 2.0
    rounds: tuple[int, int] | None = None
    limit: float = 60.0
    memory: bool = False
    threads: int = field(default=2, kw_only=True)

    @property
    def environment(self) -> dict[str, str]:
        """Variables that frameworks and allocators read when they start."""
        device, dtype = self.problems[0].device, self.problems[0].dtype
        settings = {
            "JAX_ENABLE_X64": str(int(dtype == "float64")),
            "KERAS_TORCH_DEVICE": device,
            "TF_CPP_MIN_LOG_LEVEL": "3",
            "TF_FORCE_GPU_ALLOW_GROWTH": "true",
            "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        }
        settings |= {f"{name}_NUM_THREADS": str(self.threads) for name in ("OMP", "OPENBLAS", "MKL")}
        if self.framework in ("torch", "jax", "tensorflow"):
            settings["KERAS_BACKEND"] = self.framework
        return settings | (OF_MEMORY if self.memory else {})

    def noted(self, message: Any, at: Any) -> tuple[Order, Any]:
        """The order as it is, and the candidate and the problem that the process has started."""
        return self, message.get("started", at) if isinstance(message, dict) else at

    def lost(self, at: Any, death: workers.Death) -> tuple[list[Measurement], Order | None]:
        """The candidate that died, on all problems that it is not tried on again, and the order without it.

        Raise RuntimeError for a process that failed by itself, or before it came to a candidate.
        """
        if death.code is not None and death.code >= 0:  # the system did not end it
            said = death.stack.strip().rpartition("\n")[2] or death.reason
            raise RuntimeError(f"expected {self.framework} to be measured; its process said {said}")
        if self.memory:  # which stays unknown
            return [], None
        if at is None:
            raise RuntimeError(f"expected {self.framework} to be measured; got none: {death.reason}")
        key, first = at
        # All problems before this one are measured; of this one, only refusals were reported.
        problems = self.problems[first:]
        kept = [(other, index - first) for other, index in self.without if index >= first]
        too_large = [
            index
            for index, each in enumerate(problems)
            if each.direction == problems[0].direction and each.shape >= problems[0].shape
        ]
        without = (*kept, *((key, index) for index in too_large))
        candidate = next(each for each in CANDIDATES if each.key == key)
        died = sorted(index for other, index in without if other == key)
        found = [Measurement(problems[index], candidate, "died", death.reason) for index in died]
        return found, replace(self, problems=problems, without=without)
