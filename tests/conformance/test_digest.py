"""The SHA-256 of a call and of a saved layer: in every way, as a command and in Python."""

import json
import shlex

import numpy as np
import pytest
from command_helpers import invoke, refusal

import attention_core as ac
from attention_conformance import digest
from attention_conformance.golden.identical import digest as hash_of
from attention_core.layers import Embeddings, FeedForward, MultiHeadAttention, SaganAttention
from attention_files.safetensors import save_arrays, save_layer, save_layers, save_tree

WAYS = ["numpy (cpu, eager)", "numpy (cpu, eager, small blocks)", "numpy (cpu, eager, batch apart)"]


def normal(*shape):
    return np.random.default_rng(len(shape)).standard_normal(shape).astype(np.float32)


@pytest.fixture
def call(tmp_path):
    """A call with a mask for all, and a bias for each sample of the batch."""
    arrays = {"query": normal(3, 4, 40, 6), "key": normal(3, 2, 7, 6), "value": normal(3, 2, 7, 5)}
    others = {"mask": np.arange(280).reshape(1, 40, 7) % 3 > 0, "bias": normal(3, 1, 40, 7)}
    save_arrays(tmp_path / "call.safetensors", arrays | others)
    return tmp_path / "call.safetensors", arrays, others


@pytest.fixture
def layer(tmp_path):
    definition = MultiHeadAttention(6, 2, implementation="fused", arithmetic="fast")
    save_layer(tmp_path / "layer.safetensors", definition, definition.init(3, xp=np))
    save_arrays(tmp_path / "x.safetensors", {"query": normal(3, 40, 6), "key_mask": np.arange(40) < [[40], [3], [9]]})
    return tmp_path / "layer.safetensors", tmp_path / "x.safetensors"


def test_the_hash_is_that_of_the_reproducible_call(call):
    path, arrays, others = call
    verdict = digest(path, scale=0.5, backends=["numpy"])
    options = {"scale": 0.5, "return_logsumexp": True, "arithmetic": "reproducible"}
    computed = ac.scaled_dot_product_attention(*arrays.values(), **others, **options)
    assert verdict.sha256 == hash_of((("output", computed.output), ("logsumexp", computed.logsumexp)))
    assert [way.variation for way in verdict.results] == ["", "small blocks", "batch apart"]
    assert len({digest(path, scale=scale, backends=["numpy"]).sha256 for scale in (None, 0.5, 0.0)}) == 3
    with pytest.raises(ValueError):
        digest(path, softcap=0.0, backends=["numpy"])
    with pytest.raises(ValueError):
        digest(path, backends=["numpy"], jobs=-1)


def test_every_library_and_number_of_threads_gives_the_hash_of_a_saved_layer(backend, layer):
    expected = digest(*layer, backends=["numpy"])
    assert len(expected.results) == 3
    verdict = digest(*layer, backends=[backend.name], modes=["eager"], sha256=expected.sha256)
    assert verdict.complaints == ()
    assert verdict.sha256 == expected.sha256


@pytest.mark.parametrize(
    ("definition", "inputs"),
    [
        (MultiHeadAttention(6, 2), {"query": normal(2, 3, 6), "mask": np.arange(18).reshape(2, 1, 3, 3) % 4 > 0}),
        (FeedForward(6, 8), {"x": normal(2, 3, 6)}),
        (Embeddings(10, 7, 6), {"token_ids": np.arange(6).reshape(2, 3), "position_ids": np.ones((2, 3), np.int32)}),
        (SaganAttention(8), {"x": normal(2, 4, 4, 8)}),
    ],
    ids=lambda each: type(each).__name__,
)
def test_every_kind_of_layer_has_a_hash(definition, inputs, tmp_path):
    state = definition.init_state(1, xp=np)
    save_layer(tmp_path / "layer", definition, definition.init(0, xp=np), state)
    save_arrays(tmp_path / "inputs", inputs)
    verdict = digest(tmp_path / "inputs", tmp_path / "layer", backends=["numpy"])
    exact = definition.with_settings(arithmetic="reproducible")
    options = {name: array for name, array in inputs.items() if name in ("position_ids", "mask")} | (
        {"state": state} if state else {}
    )
    result = exact(definition.init(0, xp=np), next(iter(inputs.values())), **options)
    assert verdict.sha256 == hash_of((("result", result),))
    assert [way.variation for way in verdict.results] == ["", "batch apart"]


def test_the_command_writes_the_command_that_repeats_it(call, tmp_path):
    written = tmp_path / "digest.json"
    words = ("--causal", "--softcap", 2, "--backend", "numpy", "--threads", 1, "--jobs", 1, "--json", written)
    result = invoke("digest", call[0], *words)
    assert result.exit_code == 0, result.output
    document = json.loads(written.read_text())
    sha256 = document["cases"]["digest"]["sha256"]
    got = result.stdout.splitlines()
    shown = "a call of attention, in reproducible arithmetic:"
    assert got == [f"{shown} 4 configurations, compared with each other", sha256]
    assert document["cases"]["digest"]["ways"] == dict.fromkeys([*WAYS, "numpy (cpu, eager, 1 thread)"], sha256)
    words = shlex.split(document["environment"]["command"])
    assert words[:2] == ["attention-core", "digest"]
    assert {f"--sha256={sha256}", "--threads=1", "--causal", "--softcap=2.0"} < set(words)
    alone = [word for word in words[2:] if not word.startswith("--threads")]
    expected = [f"{shown} 3 configurations, compared with each other and the given hash", sha256]
    assert invoke("digest", *alone, "--jobs", 0).stdout.splitlines() == expected
    assert document["cases"]["digest"]["compared with"] == ["each other"]
    assert document["cases"]["digest"]["left out"] == []


def test_a_file_whose_name_is_an_option_is_hashed_by_the_written_command(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_arrays("-x.safetensors", {name: normal(1, 2, 7, 6) for name in ("query", "key", "value")})
    result = invoke("digest", "--backend", "numpy", "--jobs", 0, "--json", "out.json", "--", "-x.safetensors")
    document = json.loads((tmp_path / "out.json").read_text())
    assert (result.stderr, document["cases"]["digest"]["left out"]) == ("", [])
    sha256 = document["cases"]["digest"]["sha256"]
    words = shlex.split(document["environment"]["command"])
    assert words[2:] == ["./-x.safetensors", "--backend=numpy", f"--sha256={sha256}", "--jobs=0"]
    assert invoke(*words[1:]).exit_code == 0


def test_modes_are_eager_unless_they_are_asked_for(backend, call):
    ways = {way.mode for way in digest(call[0], backends=[backend.name]).results}
    assert ways == {"eager"}
    expected = digest(call[0], backends=["numpy"]).sha256
    if backend.name == "jax":
        verdict = digest(call[0], backends=["jax"], modes=["jit"], sha256=expected)
        assert ([way.mode for way in verdict.results], verdict.complaints) == (["jit"], ())


def test_another_hash_than_the_expected_one_has_status_1(call, tmp_path):
    written = tmp_path / "digest.json"
    result = invoke("digest", call[0], "--backend", "numpy", "--jobs", 0, "--sha256", "0" * 64, "--json", written)
    assert result.exit_code == 1
    assert f"--sha256={'0' * 64}" in json.loads(written.read_text())["environment"]["command"]
    assert f"expected SHA-256 {'0' * 64}, as given; got {digest(call[0], backends=['numpy']).sha256}" in result.stdout


def test_what_cannot_be_hashed_is_told_in_one_line(call, layer, tmp_path, monkeypatch):
    names = ("missing", "double", "tree", "layers", "kind", "text")
    missing, double, tree, layers, kind, text = (tmp_path / name for name in names)
    save_arrays(missing, {"query": call[1]["query"], "key": call[1]["key"]})
    save_arrays(double, {name: array.astype(np.float64) for name, array in call[1].items()})
    save_tree(tree, ())
    save_tree(kind, ((), ()), {"layer": "Convolution"})
    save_layers(layers, [FeedForward(2, 2)] * 2, [FeedForward(2, 2).init(0, xp=np)] * 2)
    text.write_text("text")
    expected = {
        (missing,): "expected inputs query, key, value; got no value among key, query",
        (layer[0],): "expected inputs query; got no query in any file",
        (*layer, call[0]): f"expected every input in one file; got query in {call[0]} again",
        (layer[0], call[0]): "expected key (3, 4, N, 6) to match query (3, 4, 40, 6)",
        (layer[0], *layer): "expected at most one layer; got 2",
        (*layer, "--causal"): "expected the options of a layer in its file; got is_causal",
        (tree,): f"expected a layer, with parameters and state, in {tree}; got another tree",
        (layers,): f"expected one layer in {layers}; got several",
        (kind,): f"expected the settings of a layer in {kind}; got others: expected a layer out of ",
        (text,): f"expected a whole file of safetensors; got {text}: ",
        (tmp_path / "none",): f"expected a file of safetensors; got {tmp_path / 'none'}: No such file or directory",
        (double,): "expected ",
        (call[0], "--softcap", -1): "expected softcap",
        (call[0], "--sha256", "12"): "expected --sha256 of 64 hex digits; got '12'",
        (call[0], "--threads", 2): "expected --jobs of 1 or more with --threads",
        (call[0], "--backend", "torch"): "backend torch is not installed: install attention-core[torch]",
        (call[0], "--mode", "slow"): "expected a mode out of eager; got 'slow'",
    }
    monkeypatch.setattr("attention_cli.backends.available_backends", lambda: ["numpy"])
    for arguments, told in expected.items():
        line = refusal("digest", *arguments, *(() if "--backend" in arguments else ("--backend", "numpy")), "--jobs", 0)
        assert line.startswith(told), line
    with pytest.raises(ValueError):
        digest(call[0], threads=[1])
