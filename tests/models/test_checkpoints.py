"""Folders of transformers with language models: whole, sharded, and spoiled."""

import json

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from typer.testing import CliRunner

import attention_models as models
from attention_cli.app import app
from attention_core import layers
from attention_files.safetensors import FileError, load_layer
from attention_models.checkpoints import load_causal_lm, save_causal_lm
from attention_models.layouts import LayoutError

MODEL = models.Decoder(11, 8, 2, 6, 2, num_key_value_heads=1, attention_bias=True, output_bias=False)


@pytest.fixture
def folder(tmp_path):
    save_causal_lm(tmp_path / "model", MODEL, MODEL.init(3, xp=np))
    return tmp_path / "model"


def same(found, expected):
    found, expected = map(layers.named_arrays, (found, expected))
    assert list(found) == list(expected)
    assert all(found[name].tobytes() == array.tobytes() for name, array in expected.items())


def test_a_folder_in_one_file_or_several_is_the_model_that_was_written(folder, tmp_path):
    definition, tree = load_causal_lm(folder)
    assert definition == MODEL
    same(tree, MODEL.init(3, xp=np))
    arrays = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    places = {name: f"model-{index % 2}.safetensors" for index, name in enumerate(arrays)}
    for file in set(places.values()):
        save_file({name: a for name, a in arrays.items() if places[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    same(load_causal_lm(folder)[1], tree)
    for source, target, way in (
        (folder, tmp_path / "own.safetensors", ("causal-lm", "attention-core")),
        (tmp_path / "own.safetensors", tmp_path / "back", ("attention-core", "causal-lm")),
    ):
        result = CliRunner().invoke(app, ["convert", str(source), str(target), "--from", way[0], "--to", way[1]])
        assert (result.exit_code, result.stderr) == (0, "")
    same(load_layer(tmp_path / "own.safetensors")[1], tree)
    same(load_causal_lm(tmp_path / "back")[1], tree)


def test_a_stale_index_next_to_a_whole_file_is_told_and_not_read(folder):
    arrays = load_file(folder / "model.safetensors")
    save_file({name: array + 1 for name, array in arrays.items()}, folder / "old.safetensors")
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": dict.fromkeys(arrays, "old.safetensors")})
    )
    with pytest.warns(UserWarning, match="expected model.safetensors or model.safetensors.index.json in .* the first"):
        same(load_causal_lm(folder)[1], MODEL.init(3, xp=np))


def test_arrays_of_several_dtypes_become_the_widest_and_frequencies_are_left_out(folder):
    arrays = load_file(folder / "model.safetensors")
    arrays = {name: array if "norm" in name else array.astype(ml_dtypes.bfloat16) for name, array in arrays.items()}
    arrays["model.layers.1.self_attn.rotary_emb.inv_freq"] = np.ones(2, np.float32)
    save_file(arrays, folder / "model.safetensors")
    _, tree = load_causal_lm(folder)
    expected = {
        name: array if "norm" in name else array.astype(ml_dtypes.bfloat16).astype(np.float32)
        for name, array in layers.named_arrays(MODEL.init(3, xp=np)).items()
    }
    same(tree, layers.tree_from_names(tree, expected))
    assert {str(array.dtype) for array in layers.named_arrays(tree).values()} == {"float32"}


def spoil(folder, what):
    weights, config = folder / "model.safetensors", folder / "config.json"
    arrays, settings = load_file(weights), json.loads(config.read_text())
    norm = "model.layers.1.input_layernorm.weight"
    if what == "missing":
        del arrays[norm]
    elif what == "mixed":
        arrays[norm] = arrays[norm].astype(np.int8)
    elif what == "unknown":
        settings["model_type"] = "gpt_neox"
    save_file(arrays, weights)
    config.write_text("{" if what == "broken" else json.dumps(settings))
    if what == "truncated":
        weights.write_bytes(weights.read_bytes()[:-4])
    elif what == "ends":
        start = weights.read_bytes()
        size = int.from_bytes(start[:8], "little")
        header = json.loads(start[8 : 8 + size])
        header["model.norm.weight"]["data_offsets"] = [0, "8"]
        text = json.dumps(header).encode()
        weights.write_bytes(len(text).to_bytes(8, "little") + text + start[8 + size :])
    elif what == "absent":
        weights.unlink()
    elif what in ("twice", "outside"):
        weights = weights.rename(folder / "first.safetensors")
        save_file({norm: arrays[norm]}, folder / "more.safetensors")
        places = {norm: "more.safetensors", "model.norm.weight": weights.name if what == "twice" else "../more"}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    elif what == "nothing":
        config.unlink()


@pytest.mark.parametrize(
    ("what", "kind", "message"),
    [
        ("missing", LayoutError, "expected model.layers.1.input_layernorm.weight of transformers.AutoModelForCausalLM; got no such array"),
        ("mixed", FileError, "expected arrays of dtypes out of F16, BF16, F32, F64 in {}; got I8"),
        ("unknown", LayoutError, "expected a model_type out of llama, mistral, qwen2, qwen3, gemma, gemma2, phi3; got 'gpt_neox'"),
        ("broken", FileError, "expected JSON in {}/config.json; got "),
        ("truncated", FileError, "expected a whole file of safetensors; got {}/model.safetensors: "),
        ("ends", FileError, "expected a whole file of safetensors; got {}/model.safetensors: "),
        ("absent", FileError, "expected a file of safetensors; got {}/model.safetensors: No such file or directory"),
        ("twice", FileError, "expected every array in one file of {}; got some in several"),
        ("outside", FileError, "expected files next to {}/model.safetensors.index.json; got ../more"),
        ("nothing", FileError, "expected a model with {}/config.json; got No such file or directory"),
    ],
)  # fmt: skip
def test_a_spoiled_folder_is_told_before_weights_are_read(folder, monkeypatch, what, kind, message):
    spoil(folder, what)
    monkeypatch.setattr("attention_models.checkpoints.load_arrays", None)
    with pytest.raises(kind) as caught:
        load_causal_lm(folder)
    assert str(caught.value).startswith(message.replace("{}", str(folder)))
