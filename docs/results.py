"""Make the table of README.md of a report that ``attention-core conformance --json FILE`` wrote."""

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
    ("q·k beyond float16", "15-half-overflow", "float16"),
    ("q·k beyond float32, scaled is not", "12-product-overflows", "float32"),
    ("NaN behind a mask", "masked-nan-value", "float32"),
    ("beside queries that may attend nothing", "empty-row-lengths", "float32"),
    ("its gradients", "gradient-empty-lengths", "float32"),
    ("dropout", "dropout", "float32"),
    ("keys in three pieces", "pieces", "float32"),
)


def main(path):
    """Print rows of cases, columns of libraries and implementations, cells of the worst error over the rest."""
    found = [each for each in json.loads(Path(path).read_text())["results"] if each["backend"] in LIBRARIES]
    results = [each for each in found if each["case"] != "model"]
    ways = [(name, each["implementation"]) for name in LIBRARIES for each in results if each["backend"] == name]
    columns = list(dict.fromkeys(ways))
    titles = [f"{LIBRARIES[name]} {implementation}" for name, implementation in columns]
    print(f"| error in units in the last place | {' | '.join(titles)} |\n|---|{'---|' * len(columns)}")
    for title, case, dtype in ROWS:
        chosen = [each for each in results if (each["case"], each["dtype"]) == (case, dtype)]
        print(f"| {title} | {' | '.join(worst(chosen, column) for column in columns)} |")
    print(f"| **results that keep their bounds** | {' | '.join(kept(results, column) for column in columns)} |")
    for name, title in LIBRARIES.items():
        model = [each for each in found if (each["case"], each["backend"], each["dtype"]) == ("model", name, "float32")]
        print(f"\nSix sentences through the encoder, {title}: {worst(model, (name, ''))}")


def of(results, column):
    """The results of one library and implementation that were run."""
    ran = (each for each in results if each["passed"] is not None)
    return [each for each in ran if (each["backend"], each["implementation"]) == column]


def worst(results, column):
    """The worst error, and a mark where it is beyond its bound."""
    found = of(results, column)
    if not found:
        return "–"
    text = f"{max(float(each['error']) for each in found):.2f}"
    return text if all(each["passed"] for each in found) else f"**{text}**"


def kept(results, column):
    """How many results keep their bound, of how many."""
    found = of(results, column)
    return f"{sum(each['passed'] for each in found)} of {len(found)}"


if __name__ == "__main__":
    main(sys.argv[1])
