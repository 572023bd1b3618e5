"""Encoders of BERT's type from a directory: a tiny one, made here, and every way in which its files can be wrong."""

import json
import math
import shutil
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest
from command_helpers import invoke
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

from attention_conformance import hashes
from attention_conformance.golden.identical import computed, digest
from attention_conformance.own.language_model import KNOWN
from attention_conformance.own.model import PAIRS, ModelError, identical_case, load_model, tokens_of
from attention_core.backend import get_backend

CONFIG = {
    "model_type": "bert",
    "vocab_size": 40,
    "type_vocab_size": 2,
    "max_position_embeddings": 12,
    "hidden_size": 6,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 10,
    "layer_norm_eps": 1e-12,
    "hidden_act": "gelu",
}
WORDS = sorted({word.strip(".?").lower() for pair in PAIRS for sentence in pair for word in sentence.split()})


def shapes():
    """The tensors of an encoder as published: by name, with weights as (out, in)."""
    width, inner = CONFIG["hidden_size"], CONFIG["intermediate_size"]
    tables = {"word": CONFIG["vocab_size"], "position": CONFIG["max_position_embeddings"], "token_type": 2}
    found = {f"embeddings.{name}_embeddings.weight": (rows, width) for name, rows in tables.items()}
    found |= {f"embeddings.LayerNorm.{name}": (width,) for name in ("weight", "bias")}
    maps = {f"attention.{name}": (width, width) for name in ("self.query", "self.key", "self.value", "output.dense")}
    maps |= {"intermediate.dense": (inner, width), "output.dense": (width, inner)}
    for layer in range(CONFIG["num_hidden_layers"]):
        for name, shape in maps.items():
            found[f"encoder.layer.{layer}.{name}.weight"] = shape
            found[f"encoder.layer.{layer}.{name}.bias"] = shape[:1]
        for name in ("attention.output.LayerNorm", "output.LayerNorm"):
            found |= {f"encoder.layer.{layer}.{name}.{part}": (width,) for part in ("weight", "bias")}
    return found


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """A directory as published, with random weights and a tokenizer of whole words."""
    directory, random = tmp_path_factory.mktemp("models") / "tiny", np.random.default_rng(7)
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(CONFIG))
    tensors = {name: random.standard_normal(shape).astype(np.float32) for name, shape in shapes().items()}
    tensors["embeddings.position_ids"] = np.arange(CONFIG["max_position_embeddings"])[None]
    tensors["pooler.dense.weight"] = np.zeros((6, 6), dtype=np.float32)
    save_file(tensors, directory / "model.safetensors")
    vocabulary = {word: index for index, word in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    tokenizer.enable_padding(length=64)  # as published ones do; the kit turns it off
    tokenizer.save(str(directory / "tokenizer.json"))
    return directory


@pytest.fixture
def directory(published, tmp_path):
    """A copy of its own, to be spoiled."""
    return shutil.copytree(published, tmp_path / "tiny")


def truth(tensors, rows):
    """Vectors of sentences, written straight from the paper for one sentence at a time in float64."""
    weights = {name: tensor.astype(np.float64) for name, tensor in tensors.items()}

    def norm(name, x):
        centred = x - x.mean(-1, keepdims=True)
        scaled = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-12)
        return scaled * weights[f"{name}.weight"] + weights[f"{name}.bias"]

    def affine(name, x):
        return x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]

    def gelu(x):
        return x * 0.5 * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))

    for ids in rows:
        words = weights["embeddings.word_embeddings.weight"][ids]
        places = weights["embeddings.position_embeddings.weight"][: len(ids)]
        x = norm("embeddings.LayerNorm", words + places + weights["embeddings.token_type_embeddings.weight"][0])
        for layer in ("encoder.layer.0", "encoder.layer.1"):
            heads = []
            for part in (slice(0, 2), slice(2, 4), slice(4, 6)):
                q, k, v = (affine(f"{layer}.attention.self.{name}", x)[:, part] for name in ("query", "key", "value"))
                scores = np.exp(q @ k.T / math.sqrt(2))
                heads.append(scores / scores.sum(-1, keepdims=True) @ v)
            attended = affine(f"{layer}.attention.output.dense", np.concatenate(heads, axis=-1))
            x = norm(f"{layer}.attention.output.LayerNorm", x + attended)
            inner = affine(f"{layer}.output.dense", gelu(affine(f"{layer}.intermediate.dense", x)))
            x = norm(f"{layer}.output.LayerNorm", x + inner)
        mean = x.mean(0)
        yield mean / np.linalg.norm(mean)


def test_sentences_are_padded_to_one_length_and_cut_to_the_positions_there_are(published):
    model = load_model(published)
    lengths = [len(sentence.replace(".", " .").replace("?", " ?").split()) + 2 for pair in PAIRS for sentence in pair]
    assert model.is_token.sum(axis=1).tolist() == [min(length, 12) for length in lengths]
    assert model.token_ids.shape == (6, min(max(lengths), 12))
    assert not model.token_ids[~model.is_token].any()
    assert len(tokens_of(model.tokenizer, model.definitions, "food " * 50)) == 12


@pytest.mark.parametrize(
    ("dtype", "rounding"), [("float16", 1e-3), (ml_dtypes.bfloat16, 8e-3)], ids=["float16", "bfloat16"]
)
def test_names_may_begin_with_bert_and_half_precision_is_widened(published, directory, dtype, rounding):
    tensors = load_file(directory / "model.safetensors")
    halved = {f"bert.{name}": x.astype(dtype) if x.dtype == np.float32 else x for name, x in tensors.items()}
    halved["cls.predictions.bias"] = np.zeros(40, dtype=np.float32)
    save_file(halved, directory / "model.safetensors")
    loaded, original = load_model(directory), load_model(published)
    weight = loaded.parameters[2].feed_forward.expand.weight
    assert weight.dtype == np.float32
    assert weight.shape == (6, 10)
    np.testing.assert_allclose(weight, original.parameters[2].feed_forward.expand.weight, atol=1e-3, rtol=rounding)


def rewritten(**changes):
    """Change the configuration."""

    def spoil(directory):
        (directory / "config.json").write_text(json.dumps({**CONFIG, **changes}))

    return spoil


def retensored(change):
    """Change the tensors."""

    def spoil(directory):
        tensors = load_file(directory / "model.safetensors")
        change(tensors)
        save_file(tensors, directory / "model.safetensors")

    return spoil


def removed(name):
    return lambda directory: (directory / name).unlink()


def pickled(directory):
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")


def truncated(name):
    def spoil(directory):
        content = (directory / name).read_bytes()
        (directory / name).write_bytes(content[: len(content) // 2])

    return spoil


QUERY = "encoder.layer.1.attention.self.query.weight"
OTHERS = ("expected a model, a folder or a GGUF file; got ",)
CONFIG_OF = "in the config of transformers.BertModel"
SPOILT = {
    "no configuration": (removed("config.json"), *OTHERS, "expected a folder of transformers, with config.json; got "),
    "no weights": (removed("model.safetensors"), *OTHERS, "model.safetensors"),
    "no tokenizer": (removed("tokenizer.json"), *OTHERS, "expected a tokenizer in ", "tokenizer.json; got no such file"),
    "weights in a pickle": (pickled, "got pytorch_model.bin, a pickle, which can run any code: convert it"),
    "configuration cut short": (truncated("config.json"), *OTHERS, "expected a folder of transformers, with config.json; got "),
    "tokenizer cut short": (truncated("tokenizer.json"), "expected a tokenizer in"),
    "another model": (rewritten(model_type="gpt2"), *OTHERS, "got 'gpt2'"),
    "another activation": (rewritten(hidden_act="tanh"), *OTHERS, "expected an activation of transformers.BertModel out of ", "got 'tanh'"),
    "relative positions": (rewritten(position_embedding_type="relative_key"), "expected position_embedding_type 'absolute' of transformers.BertModel"),
    "a decoder": (rewritten(is_decoder=True), "expected is_decoder False of transformers.BertModel"),
    "size in words": (rewritten(hidden_size="six"), f"expected hidden_size {CONFIG_OF} as a positive integer"),
    "heads that do not divide": (rewritten(num_attention_heads=4), "expected channels that 4 heads share out evenly; got 6"),
    "epsilon of 1": (rewritten(layer_norm_eps=1), f"expected layer_norm_eps below 1 {CONFIG_OF}; got 1"),
    "fewer words than weights": (rewritten(vocab_size=39), "expected arrays of vocab_size 39, as the config of transformers.BertModel has it; got 40"),
    "more layers than weights": (rewritten(num_hidden_layers=3), "expected arrays of num_hidden_layers 3, as the config of transformers.BertModel has it; got 2"),
    "embeddings alone": (retensored(lambda t: [t.pop(name) for name in shapes() if "layer" in name]), *OTHERS, "expected embeddings and at least one layer for transformers.BertModel; got "),
    "a tensor too few": (retensored(lambda t: t.pop(QUERY)), *OTHERS, f"expected {QUERY} of transformers.BertModel; got no such array"),
}  # fmt: skip


@pytest.mark.parametrize("name", SPOILT)
def test_spoilt_files_are_told(directory, name):
    spoil, *parts = SPOILT[name]
    spoil(directory)
    with pytest.raises(ModelError) as caught:
        load_model(directory)
    assert [part for part in parts if part not in str(caught.value)] == []


def test_tokens_that_the_encoder_does_not_know_are_told(directory):
    def shorten(tensors):
        tensors["embeddings.word_embeddings.weight"] = tensors["embeddings.word_embeddings.weight"][:5].copy()

    rewritten(vocab_size=5)(directory)
    retensored(shorten)(directory)
    with pytest.raises(ModelError):
        load_model(directory)


def identical(directory, *arguments):
    """A run of the case alone, on NumPy, in this process."""
    options = ("--case", "model", "--backend", "numpy", "--jobs", 0, *arguments)
    return invoke("conformance", "--identical", "--model", directory, *options)


def test_in_reproducible_arithmetic_a_model_gives_the_same_bits_compiled_or_not(backend, published):
    case = identical_case(load_model(published))
    expected = digest(computed(case, get_backend("numpy"), "cpu", "eager"))
    for mode in backend.modes[:2]:
        assert digest(computed(case, backend, backend.devices()[0], mode)) == expected, mode


def test_what_is_hashed_is_the_tokens_without_padding_and_their_means(published):
    model = load_model(published)
    (_, tokens), (_, means) = computed(identical_case(model), get_backend("numpy"), "cpu", "eager")
    assert not tokens[~model.is_token].any()
    counts = model.is_token.sum(-1)[:, None]
    np.testing.assert_allclose(means[:, 0], tokens.astype(np.float64).sum(-2) / counts, rtol=1e-6)
    rows = [row[seen] for row, seen in zip(model.token_ids, model.is_token, strict=True)]
    expected = np.array(list(truth(load_file(published / "model.safetensors"), rows)))
    found = means[:, 0] / np.linalg.norm(means[:, 0], axis=-1, keepdims=True)
    np.testing.assert_allclose(found, expected, atol=1e-6)


def test_a_model_that_nobody_published_has_its_hash_shown(published):
    result = identical(published)
    assert result.exit_code == 0
    assert result.stdout.splitlines()[-1] == "1 identical, 0 not, 0 not run"
    assert (
        digest(computed(identical_case(load_model(published)), get_backend("numpy"), "cpu", "eager"))[:16]
        in result.stdout
    )
    assert "each other alone" in result.stdout


def test_a_hash_other_than_that_of_known_weights_is_told(published, monkeypatch):
    monkeypatch.setattr("attention_cli.conformance.published_model", lambda path, long: {"model": "0" * 64})
    result = identical(published)
    assert result.exit_code == 1
    assert f"model on numpy (cpu, eager): expected SHA-256 {'0' * 64}, as published; got " in result.stdout


def test_every_known_model_has_a_hash_and_no_other():
    minilm = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
    assert set(hashes._read("models.json")) == {minilm, *KNOWN, *(f"{each} long" for each in KNOWN)}


def test_the_hash_of_a_model_is_printed_anew(published):
    command = [sys.executable, "-m", "attention_conformance.hashes", str(published)]
    printed = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    model = load_model(published)
    assert printed == {model.sha256: digest(computed(identical_case(model), get_backend("numpy"), "cpu", "eager"))}
    assert hashes.published_model(published) == {"model": None}
    assert hashes.published_model(None) == {}
