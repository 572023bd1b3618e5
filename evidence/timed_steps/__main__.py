"""Times the pairs of an operation in one library: ``OMP_NUM_THREADS=2 python -m timed_steps decode-loop torch``."""

from __future__ import annotations

import argparse
import importlib
from pathlib import Path

from attention_workers.memory import peak_growth
from timed_steps import TURNS, Order, measured

OPERATIONS = {
    "decode-loop": "decoding_loop",
    "language-model": "language_model",
}
"""The module that makes the pairs of an operation."""


def main(words: list[str] | None = None) -> None:
    """Print a row of the table for each pair."""
    parser = argparse.ArgumentParser(prog="timed_steps", description=__doc__)
    parser.add_argument("operation", choices=OPERATIONS)
    parser.add_argument("library", choices=("numpy", "torch", "jax", "tensorflow"))
    parser.add_argument("--pattern", default="*", help="names of pairs")
    parser.add_argument("--model", type=Path, help="a GGUF file, of language-model")
    parser.add_argument("--turns", type=int, default=TURNS)
    asked = parser.parse_args(words)
    print("| step | time | ratio, with its quartiles | memory | of the other |\n|---|---|---|---|---|")
    module = importlib.import_module(f"timed_steps.{OPERATIONS[asked.operation]}")
    for pair in module.pairs(Order(asked.library, asked.pattern, asked.model)):
        memory = [f"{(peak_growth(step) or 0) / 2**20:.0f} MiB" for step in (pair.ours, pair.other)]
        duration, (low, middle, high) = measured(pair.ours, pair.other, asked.turns)
        cells = f"{duration / pair.num_steps:.2f} ms", f"{middle:.2f} ({low:.2f} to {high:.2f})", *memory
        print(f"| {pair.name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
