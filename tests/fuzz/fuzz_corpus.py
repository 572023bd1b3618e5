"""Problems that failed once, as the fuzzer shrank them: every run tries them first."""

from __future__ import annotations

from fuzz_problems import Problem

FORWARD = (
    Problem(width=7, value_width=0, dtype="float16", values="spiked", implementation="blockwise", arithmetic="reproducible", logsumexp=True),
    Problem(heads=9, groups=3, rows=7, columns=7, value_width=6, dtype="float16", seed=497, values="mixed", is_causal=True, implementation="blockwise", arithmetic="reproducible"),
    Problem(rows=2, columns=33, width=2, value_width=0, dtype="float16", values="mixed", arithmetic="reproducible", weights=True),
)  # fmt: skip

GRADIENTS = (
    Problem(columns=2, value_width=0, is_causal=True, softcap=1.0, planted="key", arithmetic="reproducible"),
    Problem(rows=0, columns=0, value_width=0, score_mod=("relative", 4, False, 8, 0), implementation="blockwise"),
)
