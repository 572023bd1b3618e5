"""Make the table of docs/evidence/conformance.md from what ``attention-core conformance --json FILE`` wrote."""

import json
import sys
from pathlib import Path

LIBRARIES = {"numpy": "NumPy", "torch": "PyTorch", "jax": "JAX", "tensorflow": "TensorFlow"}
ROWS = (
    ("128 keys, float16", "01-ordinary", "float16"),
    ("128 keys, bfloat16", "01-ordinary", "bfloat16"),
    ("128 keys, float32", "01-ordinary", "float32"),
    ("128 keys, float64", "01-ordinary", "float64"),
    ("65,536 keys, float32", "09-long-row", "float32"),
    ("q·k overflows float16", "15-half-overflow", "float16"),
    ("q·k overflows, the scaled score does not", "12-product-overflows", "float32"),
    ("NaN behind a mask", "masked-nan-value", "float32"),
    ("other rows of a batch with fully masked rows", "empty-row-lengths", "float32"),
    ("gradients of that batch", "gradient-empty-lengths", "float32"),
    ("dropout", "dropout", "float32"),
    ("keys in three pieces", "pieces", "float32"),
)


def main(path):
    """Print rows of cases, columns of libraries and implementations, cells of the worst error over the rest."""
    results = [result for result in json.loads(Path(path).read_text())["findings"] if result["backend"] in LIBRARIES]
    columns = list(
        dict.fromkeys(
            (name, result["implementation"]) for name in LIBRARIES for result in results if result["backend"] == name
        )
    )
    titles = [f"{LIBRARIES[name]} {implementation}" for name, implementation in columns]
    print(f"| error in ulps | {' | '.join(titles)} |\n|---|{'---|' * len(columns)}")
    for title, case, dtype in ROWS:
        chosen = [result for result in results if (result["case"], result["dtype"]) == (case, dtype)]
        print(f"| {title} | {' | '.join(worst(chosen, column) for column in columns)} |")
    print(f"| **results that keep their bounds** | {' | '.join(kept(results, column) for column in columns)} |")


def of(results, column):
    """The results of one library and implementation that were run."""
    ran = (result for result in results if result["verdict"] not in ("not offered", "refused", "accepted"))
    return [result for result in ran if (result["backend"], result["implementation"]) == column]


def worst(results, column):
    """The worst error, and a mark where it is beyond its bound."""
    ran = of(results, column)
    if not ran:
        return "–"
    text = f"{max(float('inf' if result['error'] is None else result['error']) for result in ran):.2f}"
    return text if all(result["verdict"] == "right" for result in ran) else f"**{text}**"


def kept(results, column):
    """How many results keep their bound, of how many."""
    ran = of(results, column)
    return f"{sum(result['verdict'] == 'right' for result in ran)} of {len(ran)}"


if __name__ == "__main__":
    main(sys.argv[1])
