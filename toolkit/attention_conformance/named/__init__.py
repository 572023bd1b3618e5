"""Named cases: mistakes of published attentions, each with its thread, its story and its geometry, in ``cases.toml``.

If a CPU shows it, a script in ``evidence/reproducers`` of the repository does so with the package concerned alone.
"""

from __future__ import annotations

from attention_conformance.named.case import PROPERTIES, RESULTS, NamedCase, Shown, named_cases

__all__ = ["PROPERTIES", "RESULTS", "NamedCase", "Shown", "named_cases"]
