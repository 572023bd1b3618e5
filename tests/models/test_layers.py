"""The decoder of a language model as a layer of each framework, which files and adapters find by its name."""

import doctest
import importlib
import os
import subprocess
import sys

import numpy as np
import pytest
from layer_helpers import MODULES

import attention_models as models
from attention_files import safetensors
from attention_files.writing import FileError

DEFINITION = models.Decoder(11, 8, 2, 6, 2, num_key_value_heads=1, tied=False)


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "decoder.safetensors"
    safetensors.save_layer(path, DEFINITION, DEFINITION.init(0, xp=np))
    return path


@pytest.mark.needs("gradients")
def test_an_adapter_that_knows_no_model_loads_a_decoder(backend, path):
    home = MODULES[backend.name]
    program = f"import {home}; layer = {home}.load({str(path)!r}); print(type(layer).__module__, layer.definition)"
    environment = {**os.environ, "KERAS_BACKEND": "tensorflow"}
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, env=environment)
    assert run.stdout.strip() == f"{home.replace('attention_', 'attention_models.')} {DEFINITION}"


def test_without_models_a_file_of_a_decoder_says_what_reads_it(path, monkeypatch):
    monkeypatch.setattr(safetensors, "announced", lambda group, name: None)
    with pytest.raises(FileError):
        safetensors.load_layer(path)


@pytest.mark.needs("gradients")
def test_examples_of_the_documentation_run(backend):
    found = doctest.testmod(importlib.import_module(MODULES[backend.name].replace("attention_", "attention_models.")))
    assert found.attempted > 0
    assert found.failed == 0
