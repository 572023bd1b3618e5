"""Compute maps on four libraries: `python docs/same_maps.py MINILM_FOLDER SMOLLM2.gguf` prints digits and hashes.

Maps are rounded to the three digits that a view shows. SHA-256 are of the bytes of the weights in reproducible
arithmetic, as little-endian float32.
"""

import functools
import hashlib
import sys
from pathlib import Path

import numpy as np
from plot_sagan import POINTS, example

from attention_conformance.own.model import load_model, token_vectors
from attention_core.backend import get_backend
from attention_core.weights import record_attention
from attention_files.safetensors import load_tree
from attention_models.tokenizers import open_text_model

LIBRARIES = ("numpy", "torch", "jax", "tensorflow")
SENTENCE = "The animal did not cross the street because it was too tired."


def sagan(backend, arithmetic):
    """Weights of the three queries of the figure."""
    module = example()
    tree, _ = load_tree(Path(__file__).parent / "weights" / "sagan.safetensors")
    inputs = module.scene()
    queries = [row * inputs.shape[2] + column for row, column in POINTS.values()]
    record = module.maps(backend.from_numpy(tree), backend.from_numpy(inputs), arithmetic)
    return [backend.to_numpy(record.weights(queries=queries))]


def encoder(folder, backend, arithmetic):
    """All weights of a sentence through MiniLM."""
    model = load_model(Path(folder), [SENTENCE])
    with record_attention() as records:
        token_vectors(
            [each.with_settings(arithmetic=arithmetic) for each in model.definitions],
            backend.from_numpy(model.parameters),
            *(backend.from_numpy(each) for each in (model.token_ids, model.is_token)),
        )
    return [backend.to_numpy(each.weights()) for each in records]


@functools.lru_cache(maxsize=1)
def language_model(file):
    """SmolLM2 with its parameters, and the tokens of the sentence with their numbers."""
    tokenizer, definition, read_weights, _ = open_text_model(Path(file))
    parameters = read_weights()
    encoded = tokenizer.encode(SENTENCE)
    tokens = [tokenizer.decode([each]).strip() for each in encoded.ids]
    return definition, parameters, tokens, np.asarray([encoded.ids], np.int32)


def decoder(file, backend, arithmetic):
    """All weights of the sentence through SmolLM2."""
    definition, parameters, _, ids = language_model(file)
    definition = definition.with_settings(arithmetic=arithmetic)
    with record_attention() as records:
        definition(backend.from_numpy(parameters), backend.from_numpy(ids))
    return [backend.to_numpy(each.weights()) for each in records]


def digits(weights):
    """Weights as a view shows them, to three digits."""
    return [f"{each:.2e}" for each in weights]


def main(folder, file):
    views = {
        "SAGAN, 3 queries": sagan,
        "encoder, all weights": lambda *how: encoder(folder, *how),
        "decoder, all weights": lambda *how: decoder(file, *how),
    }
    print("| view | library | weights | furthest from numpy | other displayed digits | SHA-256 |")
    print("|---|---|---|---|---|---|")
    for name, compute in views.items():
        first = None
        for library in LIBRARIES:
            backend = get_backend(library)
            fast = np.concatenate([np.asarray(each, np.float64).ravel() for each in compute(backend, "fast")])
            exact = [np.asarray(each, "<f4") for each in compute(backend, "reproducible")]
            digest = hashlib.sha256(b"".join(each.tobytes() for each in exact)).hexdigest()
            first = fast if first is None else first
            other = sum(a != b for a, b in zip(digits(fast), digits(first), strict=True))
            apart = abs(fast - first).max()
            print(f"| {name} | {library} | {fast.size:,} | {apart:.1e} | {other} | `{digest[:16]}` |", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
