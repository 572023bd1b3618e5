"""Language models of the kit: bits that no batch changes."""

from dataclasses import replace

import numpy as np
import pytest
from command_helpers import invoke, refusal
from gguf_helpers import write_gguf

from attention_conformance.golden.identical import APART, computed, digest, work_on
from attention_conformance.hashes import published_model
from attention_conformance.launch.libraries import devices_of
from attention_conformance.own.language_model import KNOWN, LanguageModel, identical_cases
from attention_conformance.own.model import ModelError, load_model
from attention_conformance.processes import Order
from attention_core.backend import get_backend
from attention_models.checkpoints import save_causal_lm


@pytest.fixture
def path(tmp_path):
    write_gguf(tmp_path / "small.gguf")
    return tmp_path / "small.gguf"


def test_no_batch_changes_the_bits(backend, path):
    model = load_model(path)
    (case,) = identical_cases(model, False)
    expected = digest(computed(case, get_backend("numpy"), "cpu", "eager"))
    ways = [(device, each) for device in devices_of(backend)[:2] for each in ("", APART)]
    found = {digest(computed(case, backend, device, "eager", variation=each)) for device, each in ways}
    assert found == {expected}


def test_a_folder_of_transformers_is_its_file(path, tmp_path):
    """The folder has no prompts that are known."""
    file = load_model(path)
    folder = tmp_path / "folder"
    save_causal_lm(folder, file.definition, file.parameters)
    model = load_model(folder)
    assert isinstance(model, LanguageModel)
    cases, numpy = [identical_cases(each, False)[0] for each in (file, model)], get_backend("numpy")
    assert len({digest(computed(each, numpy, "cpu", "eager")) for each in cases}) == 1
    (folder / "config.json").write_text('{"model_type": "gpt_neox"}')
    with pytest.raises(ModelError):
        load_model(folder)


def last_bit(model):
    token = model.parameters.token.copy()
    token[3, 1] = np.nextafter(token[3, 1], np.float32(9))
    return replace(model, parameters=model.parameters._replace(token=token))


def other_base(model):
    return replace(model, definition=model.definition.with_settings(rotary_base=10001.0))


@pytest.mark.needs("tensorflow")  # other compilers take twice as long
def test_a_model_is_compiled_where_the_mode_is_asked_for(backend, path):
    cases = identical_cases(load_model(path), False)
    hashes = {}
    for modes in (None, backend.modes[:2]):
        found = [each for each in work_on(cases, Order(backend.name, (), modes=modes)) if hasattr(each, "arrays")]
        assert [each.detail for each in found if not each.passed] == []
        hashes |= {(each.mode, each.variation): digest(each.arrays) for each in found}
        assert {each.mode for each in found} == set(modes or ("eager",))
    assert len(set(hashes.values())) == 1


@pytest.mark.parametrize("change", [last_bit, other_base])
def test_a_change_of_the_model_changes_the_hash(path, change):
    model, numpy = load_model(path), get_backend("numpy")
    hashes = {
        digest(computed(identical_cases(each, False)[0], numpy, "cpu", "eager")) for each in (model, change(model))
    }
    assert len(hashes) == 2


def test_the_command_runs_a_language_model(path):
    places = ("--model", path, "--backend", "numpy", "--jobs", "0")
    assert "expected --identical with --model, whose numbers attention-core compare" in refusal("conformance", *places)
    told = invoke("conformance", *places, "--identical", "--case", "model*")
    assert told.exit_code == 0, told.output
    assert "1 identical, 0 not, 0 not run" in told.stdout
    assert published_model(path) == {"model": None}


def test_what_is_no_language_model_is_told(path, tmp_path):
    path.write_bytes(path.read_bytes()[:-70])
    told = refusal("conformance", "--model", path, "--identical", "--backend", "numpy", "--jobs", 0)
    assert "expected a whole GGUF file" in told
    assert "expected --model with a language model for --long" in refusal("conformance", "--long")


def test_prompts_that_are_known_have_different_lengths():
    (known,) = KNOWN.values()
    assert len(known) == 8
    assert len({len(each) for each in known}) > 4
