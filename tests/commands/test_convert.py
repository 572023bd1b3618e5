"""The command ``convert``: what it writes, what it refuses, and its exit status."""

import itertools
import re
from pathlib import Path

import numpy as np
import pytest
from command_helpers import invoke, refusal
from gguf_helpers import write_gguf
from safetensors.numpy import load_file, save_file

from attention_core import layers
from attention_files.safetensors import load_layer, load_layers, save_layer, save_layers
from attention_models.checkpoints import load_causal_lm
from attention_models.gguf import load_gguf
from attention_models.layouts import LAYOUTS

ATTENTION = layers.MultiHeadAttention(12, 3, dropout=0.5)
BERT = (
    layers.Embeddings(11, 7, 12, num_segments=2),
    *[layers.EncoderLayer(12, 3, 20, norm_first=False, epsilon=1e-12)] * 2,
)


def drawn(layer):
    return layer.init(1, xp=np, dtype="float64")


def command(source, target, first, second, *options):
    """The words of a conversion between layouts, of files by their names or of paths."""
    source, target = (path_of(each) if isinstance(each, str) else each for each in (source, target))
    return "convert", source, target, "--from", first, "--to", second, *options


def converted(*arguments):
    result = invoke(*command(*arguments))
    assert (result.exit_code, result.stderr) == (0, "")
    return result.stdout


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def path_of(name):
    return Path(f"{name}.safetensors")


def same(found, expected):
    assert set(found) == set(expected)
    for name, array in expected.items():
        assert (found[name].dtype, found[name].shape) == (array.dtype, array.shape)
        assert found[name].tobytes() == array.tobytes()


@pytest.mark.parametrize(("first", "second"), list(itertools.permutations(("torch", "keras", "flax", "equinox"), 2)))
def test_from_one_library_to_another_and_back_is_where_it_was(first, second):
    options = {"torch": ["--num-heads", 3], "equinox": ["--num-heads", 3]}
    arrays = LAYOUTS[first].write(ATTENTION, drawn(ATTENTION))
    save_file({name: np.array(array, order="C") for name, array in arrays.items()}, path_of("a"))
    converted("a", "b", first, second, *options.get(first, []))
    converted("b", "c", second, first, *options.get(second, []))
    same(load_file(path_of("c")), arrays)
    same(load_file(path_of("b")), LAYOUTS[second].write(ATTENTION, drawn(ATTENTION)))


@pytest.mark.parametrize("layout", ["torch", "keras", "flax", "equinox"])
def test_arrays_of_several_dtypes_become_the_widest(layout):
    arrays = LAYOUTS[layout].write(ATTENTION, drawn(ATTENTION))
    narrow = {name: np.array(a, "f4" if n % 2 else "f2", order="C") for n, (name, a) in enumerate(arrays.items())}
    save_file(narrow, path_of("a"))
    heads = ["--num-heads", 3] if layout in ("torch", "equinox") else []
    converted("a", "b", layout, "attention-core", *heads)
    definition, parameters, _ = load_layer(path_of("b"))
    same(LAYOUTS[layout].write(definition, parameters), {name: a.astype("f4") for name, a in narrow.items()})
    assert definition(parameters, np.ones((1, 2, 12), np.float32)).dtype == np.float32


def test_our_own_files_need_no_options_and_keep_the_settings():
    save_layer(path_of("a"), ATTENTION, drawn(ATTENTION))
    out = converted("a", "b", "attention-core", "torch")
    assert out.splitlines() == [
        f"{path_of('b')}: 624 values",
        "torch.nn.MultiheadAttention(embed_dim=12, num_heads=3, dropout=0.5, bias=True, add_zero_attn=False, "
        "kdim=12, vdim=12)",
    ]
    converted("b", "c", "torch", "attention-core", "--num-heads", 3, "--dropout", 0.5)
    definition, parameters, state = load_layer(path_of("c"))
    assert (definition, state) == (ATTENTION, ())
    same(layers.named_arrays(parameters), layers.named_arrays(drawn(ATTENTION)))


def test_a_gguf_file_becomes_a_file_or_a_folder_of_the_same_model(tmp_path):
    write_gguf(tmp_path / "a.gguf")
    definition, tree, _ = load_gguf(tmp_path / "a.gguf")
    converted(tmp_path / "a.gguf", "own", "gguf", "attention-core")
    found = load_layer(path_of("own"))
    assert found[0] == definition
    same(layers.named_arrays(found[1]), layers.named_arrays(tree))
    converted(tmp_path / "a.gguf", tmp_path / "folder", "gguf", "causal-lm")
    model, weights = load_causal_lm(tmp_path / "folder")
    assert model == definition
    same(layers.named_arrays(weights), layers.named_arrays(tree))
    (tmp_path / "a.gguf").write_bytes((tmp_path / "a.gguf").read_bytes()[:-70])
    result = invoke(*command(tmp_path / "a.gguf", "b", "gguf", "attention-core"))
    assert (result.exit_code, path_of("b").exists()) == (1, False)
    assert result.stderr.startswith("attention-core: expected a whole GGUF file")


def test_settings_that_arrays_do_not_tell_are_those_given():
    torch = LAYOUTS["torch"].write(ATTENTION, drawn(ATTENTION))
    save_file({name: np.array(array, order="C") for name, array in torch.items()}, path_of("a"))
    converted("a", "b", "torch", "attention-core", "--num-heads", 2, "--zero-attention")
    assert load_layer(path_of("b"))[0] == layers.MultiHeadAttention(12, 2, zero_attention=True)
    layer = layers.EncoderLayer(12, 3, 20, epsilon=1e-3)
    save_layer(path_of("a"), layer, drawn(layer))
    converted("a", "c", "attention-core", "torch-encoder-layer")
    options = ["--num-heads", 3, "--norm-first", "--epsilon", 1e-3, "--force"]
    for activation in (["--activation", "gelu"], []):  # by default, that of PyTorch
        converted("c", "d", "torch-encoder-layer", "attention-core", *options, *activation)
        assert load_layer(path_of("d"))[0] == layer.with_settings(activation=activation[-1] if activation else "relu")


@pytest.mark.parametrize("prefix", ["", "bert."])
def test_a_whole_bert_there_and_back(prefix):
    trees = [drawn(layer) for layer in BERT]
    arrays = {
        f"{prefix}{name}": np.array(array, order="C") for name, array in LAYOUTS["bert"].write(BERT, trees).items()
    }
    save_file({**arrays, f"{prefix}pooler.dense.bias": np.zeros(12)}, path_of("a"))
    result = invoke(*command("a", "b", "bert", "attention-core", "--num-heads", 3))
    left = f"left out of transformers.BertModel: {prefix}pooler.dense.bias, no part of an encoder here"
    assert (result.exit_code, result.stderr) == (0, f"attention-core: {left}\n")
    path_of("b").unlink()
    drop = ["--drop", f"{prefix}pooler."]
    out = converted("a", "b", "bert", "attention-core", "--num-heads", 3, *drop)
    assert out.splitlines()[1:] == list(map(str, BERT))
    assert load_layers(path_of("b"))[0] == BERT
    converted("b", "c", "attention-core", "bert")
    same(load_file(path_of("c")), {name.removeprefix(prefix): array for name, array in arrays.items()})


def test_one_layer_out_of_a_file_by_its_prefix():
    layer = BERT[1]
    arrays = LAYOUTS["bert-layer"].write(layer, drawn(layer))
    whole = {f"encoder.layer.7.{name}": np.array(array, order="C") for name, array in arrays.items()}
    save_file({**whole, "embeddings.LayerNorm.bias": np.zeros(3)}, path_of("a"))  # and more, which is not asked for
    options = ["--num-heads", 3, "--prefix", "encoder.layer.7."]
    converted("a", "b", "bert-layer", "attention-core", *options)
    assert load_layer(path_of("b"))[0] == layer
    result = invoke(*command("a", "c", "bert-layer", "attention-core", *options[:2], "--prefix", "x."))
    assert result.exit_code == 1
    assert "that begin with x.; got embeddings.LayerNorm.bias, encoder.layer.7." in result.stderr


def test_nothing_is_replaced_without_force():
    save_layer(path_of("a"), ATTENTION, drawn(ATTENTION))
    path_of("b").write_text("precious")
    arguments = ("a", "b", "attention-core", "torch")
    told = f"expected a target that is not there, or --force; got {path_of('b')}"
    assert refusal(*command(*arguments)) == told
    assert path_of("b").read_text() == "precious"
    converted(*arguments, "--force")
    assert "in_proj_weight" in load_file(path_of("b"))


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--from", "tensorrt", "--to", "torch"], "expected --from out of attention-core, torch, .*; got 'tensorrt'"),
        (["--from", "torch", "--to", "tensorrt"], "expected --to out of attention-core, torch, .*; got 'tensorrt'"),
        (["--from", "torch", "--to", "keras"], "expected --num-heads from torch, whose arrays do not tell it; got none"),
        (["--from", "attention-core", "--to", "keras", "--num-heads", "3"], "expected no --num-heads from attention-core; got 3"),
        (["--from", "keras", "--to", "torch", "--epsilon", "1"], "expected no --epsilon from keras; got 1.0"),
        (["--from", "attention-core", "--to", "torch", "--prefix", "x"], "expected no --prefix and --drop from attention-core"),
    ],
    ids=lambda each: " ".join(each[:5]) if isinstance(each, list) else "",
)  # fmt: skip
def test_what_cannot_be_run_as_given_is_told_in_one_line(arguments, text):
    save_layer(path_of("a"), ATTENTION, drawn(ATTENTION))
    assert re.match(text, refusal("convert", path_of("a"), path_of("b"), *arguments))
    assert not path_of("b").exists()


def test_a_source_that_is_not_there_and_a_target_that_cannot_be_are_told(tmp_path):
    save_layer(path_of("a"), ATTENTION, drawn(ATTENTION))
    options = ("--from", "attention-core", "--to", "torch", "--force")
    for source, target in (
        (path_of("x"), path_of("b")),
        (tmp_path, path_of("b")),
        (path_of("a"), tmp_path),
        (path_of("a"), tmp_path / "no" / "b"),
    ):
        assert refusal("convert", source, target, *options).startswith("expected a file")


def test_what_cannot_be_converted_is_told_in_one_line_and_leaves_the_target():
    capped = layers.MultiHeadAttention(12, 3, softcap=2.0)
    save_layer(path_of("capped"), capped, drawn(capped))
    save_layers(path_of("several"), BERT, [drawn(layer) for layer in BERT])
    save_layer(path_of("whole"), ATTENTION, drawn(ATTENTION))
    path_of("cut").write_bytes(path_of("whole").read_bytes()[:-1])
    save_file({"a": np.zeros(1)}, path_of("strange"))
    path_of("b").write_text("precious")
    for source, arguments, text in (
        ("capped", ["attention-core", "--to", "torch"], "expected softcap None for torch.nn.MultiheadAttention"),
        ("several", ["attention-core", "--to", "bert-layer"], "expected one layer for transformers.BertLayer; got 3"),
        ("whole", ["attention-core", "--to", "bert"], "expected embeddings and at least one layer"),
        ("whole", ["attention-core", "--to", "bert-layer"], "expected EncoderLayer for transformers.BertLayer"),
        ("cut", ["attention-core", "--to", "torch"], f"expected a whole file of safetensors; got {path_of('cut')}"),
        ("strange", ["attention-core", "--to", "torch"], "expected a file written by attention-core"),
        ("strange", ["torch", "--to", "keras", "--num-heads", 3], "expected out_proj.weight of torch.nn.MultiheadAttention"),
        ("strange", ["keras", "--to", "torch", "--drop", "b"], "expected arrays in"),
        ("strange", ["keras", "--to", "torch", "--drop", "a"], "expected the arrays of keras.layers.MultiHeadAttention"),
    ):  # fmt: skip
        assert refusal("convert", path_of(source), path_of("b"), "--force", "--from", *arguments, status=1).startswith(
            text
        )
        assert path_of("b").read_text() == "precious"
