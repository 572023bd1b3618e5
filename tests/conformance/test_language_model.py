"""Language models of the kit: texts against float64, and bits that no batch changes."""

from dataclasses import replace

import numpy as np
import pytest
from command_helpers import invoke, refusal
from gguf_helpers import write_gguf

from attention_conformance.golden.identical import APART, computed, digest, work_on
from attention_conformance.hashes import published_model
from attention_conformance.launch.libraries import devices_of
from attention_conformance.own import language_model
from attention_conformance.own.language_model import (
    Known,
    LanguageModel,
    ModelError,
    identical_cases,
    load_language_model,
    outcome,
)
from attention_conformance.own.model import load_any
from attention_conformance.own.runner import plan_model, run as judged
from attention_conformance.processes import Order
from attention_core.backend import get_backend
from attention_models.checkpoints import save_causal_lm


@pytest.fixture
def path(tmp_path):
    write_gguf(tmp_path / "small.gguf")
    return tmp_path / "small.gguf"


def found_on(backend, model, mode="eager"):
    return outcome(model, backend, backend.devices()[0], "float32", mode=mode)


@pytest.mark.needs("untraced loops")  # `nox -s conformance` has a text on every library
def test_texts_agree_with_one_pass_in_float64(backend, path):
    error, bound, detail = found_on(backend, load_language_model(path))
    assert error <= bound, detail


def test_text_and_logits_that_differ_fail(path, monkeypatch):
    model, numpy = load_language_model(path), get_backend("numpy")
    ids, _ = language_model._answer(model, numpy, "cpu", "float32", mode="eager")
    known = Known(model.question, ids, ((1, 2),))
    assert found_on(numpy, replace(model, known=known))[0] <= 64
    wrong = replace(model, known=replace(known, answer=(*ids[:-1], ids[-1] + 1)))
    assert found_on(numpy, wrong)[2] == f"expected tokens {wrong.known.answer}; got {ids}"
    reference = language_model._reference
    monkeypatch.setattr(language_model, "_reference", lambda *each: reference(*each) * (1 + 2.0**-16))
    (failed,) = judged(plan_model(model, [numpy], dtypes=["float32"]))
    assert failed.passed is False
    assert 64 < failed.error < 1000


def test_no_batch_changes_the_bits(backend, path):
    model = load_language_model(path)
    (case,) = identical_cases(model, False)
    expected = digest(computed(case, get_backend("numpy"), "cpu", "eager"))
    ways = [(device, each) for device in devices_of(backend)[:2] for each in ("", APART)]
    found = {digest(computed(case, backend, device, "eager", variation=each)) for device, each in ways}
    assert found == {expected}


def test_a_folder_of_transformers_is_its_file(path, tmp_path):
    """The folder has no prompts that are known."""
    file = load_any(path)
    folder = tmp_path / "folder"
    save_causal_lm(folder, file.definition, file.parameters)
    model = load_any(folder)
    assert isinstance(model, LanguageModel)
    assert model.text((1, 2)) == "1 2"
    (folder / "tokenizer.json").write_text('{"model": {"vocab": {"a": 1, "b": 2}}}')
    assert replace(model, vocabulary=language_model._vocabulary(folder / "tokenizer.json")).text((2, 1)) == "ba"
    error, bound, detail = found_on(get_backend("numpy"), model)
    assert error <= bound, detail
    (folder / "config.json").write_text('{"model_type": "gpt_neox"}')
    with pytest.raises(ModelError, match=r"expected a model_type out of llama, .*; got 'gpt_neox'"):
        load_any(folder)


def last_bit(model):
    token = model.parameters.token.copy()
    token[3, 1] = np.nextafter(token[3, 1], np.float32(9))
    return replace(model, parameters=model.parameters._replace(token=token))


def other_base(model):
    return replace(model, definition=model.definition.with_settings(rotary_base=10001.0))


@pytest.mark.needs("tensorflow")  # other compilers take twice as long
def test_a_model_is_compiled_where_the_mode_is_asked_for(backend, path):
    cases = identical_cases(load_language_model(path), False)
    hashes = {}
    for modes in (None, backend.modes[:2]):
        found = [each for each in work_on(cases, Order(backend.name, (), modes=modes)) if hasattr(each, "arrays")]
        assert [each.detail for each in found if not each.passed] == []
        hashes |= {(each.mode, each.variation): digest(each.arrays) for each in found}
        assert {each.mode for each in found} == set(modes or ("eager",))
    assert len(set(hashes.values())) == 1


@pytest.mark.parametrize("change", [last_bit, other_base])
def test_a_change_of_the_model_changes_the_hash(path, change):
    model, numpy = load_language_model(path), get_backend("numpy")
    hashes = {
        digest(computed(identical_cases(each, False)[0], numpy, "cpu", "eager")) for each in (model, change(model))
    }
    assert len(hashes) == 2


def test_the_command_runs_a_language_model(path):
    places = ("--model", path, "--backend", "numpy", "--jobs", "0")
    told = invoke("conformance", *places, "--case", "model")
    assert (told.exit_code, "1 passed, 0 failed" in told.stdout) == (0, True), told.output
    both = invoke("conformance", *places, "--model", path, "--case", "model").stdout.splitlines()
    assert f"models {path.name}, {path.name} on 1 backend (numpy): 2 of 2 results within their bounds" in both
    told = invoke("conformance", *places, "--identical", "--case", "model*")
    assert told.exit_code == 0, told.output
    assert "1 identical, 0 not, 0 not run" in told.stdout
    assert published_model(path) == {"model": None}


def test_what_is_no_language_model_is_told(path, tmp_path):
    path.write_bytes(path.read_bytes()[:-70])
    for arguments in (("--model", path), ("--model", path, "--identical")):
        told = refusal("conformance", *arguments, "--backend", "numpy", "--jobs", 0)
        assert "expected a whole GGUF file" in told
    assert "expected --model with a language model for --long" in refusal("conformance", "--long")


def test_a_long_run_compiles_and_takes_all_types(path):
    model, numpy = load_any(path), get_backend("numpy")
    assert [each.dtype for each in plan_model(model, [numpy]) if not each.reason] == ["float32"]
    assert [each.dtype for each in plan_model(model, [numpy], long=True) if not each.reason] == ["float32", "float64"]
