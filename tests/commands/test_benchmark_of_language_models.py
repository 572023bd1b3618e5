"""The table of language models: its rows, and what is timed for them."""

import re

import numpy as np
import pytest

from attention_benchmark import language_model
from attention_core.layers import Decoder


@pytest.mark.parametrize(
    ("name", "turns"),
    [
        pytest.param("torch, eager, fast", 2, marks=pytest.mark.needs("torch")),
        pytest.param("transformers, attention_core, fast", 2, marks=pytest.mark.needs("torch")),
        ("numpy, eager, reproducible", 1),
    ],
)
def test_a_row_of_the_table_of_language_models_is_of_the_same_logits(name, turns):
    if not name.startswith("numpy"):
        pytest.importorskip("transformers")
    definition = Decoder(50, 8, 2, 16, 1, num_key_value_heads=1)
    model = language_model.Model(definition, definition.init(0, xp=np), prompt_length=5, steps=2)
    found = language_model.row(name, model, turns=turns)
    assert re.fullmatch(rf"\| {name} \| [a-z, ]+( \| [0-9.]+ ms \| [0-9.]+ \([0-9.]+ to [0-9.]+\)){{2}} \|", found)
    assert language_model.memory(model) > 1


def test_every_library_times_the_same_tokens_of_a_language_model(backend):
    definition = Decoder(50, 8, 2, 16, 1, num_key_value_heads=1)
    model = language_model.Model(definition, definition.init(0, xp=np), prompt_length=5, steps=3)
    modes = [mode for (library, mode, _), _ in language_model.ROWS.values() if library == backend.name]
    ours = language_model._ours(model, backend.name, modes[0] if modes else "eager")
    other = language_model._ours(model, "numpy", "eager")
    np.testing.assert_allclose(ours.prefill(), other.prefill(), rtol=0, atol=1e-5)
    assert ours.decode().tolist() == other.decode().tolist()
    assert len(ours.decode()) == 3  # over the same cache again
