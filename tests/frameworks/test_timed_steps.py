"""Whole steps that are timed: in which pairs, and that both do the same."""

import re

import numpy as np

from attention_models import Decoder
from timed_steps import __main__ as timed, decoding_loop, language_model


def test_every_library_times_the_same_tokens_of_a_language_model(backend):
    definition = Decoder(50, 8, 2, 16, 1, num_key_value_heads=1)
    model = language_model.Model(definition, definition.init(0, xp=np), prompt_length=5, steps=3)
    modes = [mode for (library, mode, _), _ in language_model.ROWS.values() if library == backend.name]
    ours = language_model._ours(model, backend.name, modes[0] if modes else "eager")
    other = language_model._ours(model, "numpy", "eager")
    np.testing.assert_allclose(ours.prefill(), other.prefill(), rtol=0, atol=1e-5)
    assert ours.decode().tolist() == other.decode().tolist()
    assert len(ours.decode()) == 3  # over the same cache again


def test_steps_take_turns(monkeypatch, capsys):
    sizes = {"LAYERS": 1, "HEADS": 2, "KV_HEADS": 1, "CAPACITY": 16, "WIDTH": 4, "STEPS": 3}
    for name, size in sizes.items():
        monkeypatch.setattr(decoding_loop, name, size)
    timed.main(["decode-loop", "numpy", "--turns", "2"])
    row = r"\| numpy, eager \| \d+\.\d\d ms \| \d+\.\d\d \(\d+\.\d\d to \d+\.\d\d\) \| \d+ MiB \| \d+ MiB \|"
    assert re.fullmatch(row, capsys.readouterr().out.splitlines()[-1])
