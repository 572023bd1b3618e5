"""Named cases: mistakes of published attentions, each with its thread, its story and a script that shows it.

A case is one file of ``scripts``: the docstring is the story, the metadata of a script (PEP 723) is the data, and the
rest is the reproducer. It needs only the package concerned, so ``uv run FILE`` runs it where nothing is installed.
"""

from __future__ import annotations

from attention_conformance.named.case import PROPERTIES, RESULTS, NamedCase, Shown, find_case, named_cases
from attention_conformance.named.reproducer import run

__all__ = ["PROPERTIES", "RESULTS", "NamedCase", "Shown", "find_case", "named_cases", "run"]
