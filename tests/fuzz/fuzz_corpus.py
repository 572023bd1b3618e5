"""Problems that failed once, as the fuzzer shrank them: every run tries them first."""

from __future__ import annotations

from fuzz_problems import Drawn

from attention_conformance.problem import Rule

EXACT = {"arithmetic": "reproducible"}
RELATIVE = {"table": "table 4", "bidirectional": False, "max_distance": 8, "offset": 0}

FORWARD = (
    Drawn(queries=1, keys=1, width=7, value_width=0, dtype="float16", values="spiked", options={"implementation": "blockwise"} | EXACT),
    Drawn(queries=7, keys=7, width=1, value_width=6, heads=9, groups=3, dtype="float16", seed=497, values="mixed", options={"is_causal": True, "implementation": "blockwise"} | EXACT),
    Drawn(queries=2, keys=33, width=2, value_width=0, dtype="float16", values="mixed", options={"return_weights": True} | EXACT),
)  # fmt: skip

GRADIENTS = (
    Drawn(queries=1, keys=2, width=1, value_width=0, planted="key", options={"is_causal": True, "softcap": 1.0} | EXACT, gradient=True),
    Drawn(queries=0, keys=0, width=1, value_width=0, score_mod=Rule("relative_bias", RELATIVE), options={"implementation": "blockwise"}, gradient=True),
)  # fmt: skip
