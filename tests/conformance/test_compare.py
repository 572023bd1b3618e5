"""Two models on the same input: where they part, and which mistake it was."""

import itertools
import json
import sys
from pathlib import Path

import numpy as np
import pytest
from command_helpers import invoke, refusal

import attention_models as models
from attention_conformance import compare
from attention_conformance.port.records import Place
from attention_core import layers
from attention_files.safetensors import save_arrays, save_layer, save_layers

pytestmark = [
    pytest.mark.needs("torch"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"),
]
ENCODER = (
    layers.Embeddings(31, 12, 24, num_segments=2),
    *[layers.EncoderLayer(24, 4, 40, norm_first=False, epsilon=1e-12)] * 2,
)
DECODER = models.Decoder(37, 24, 6, 28, 2, num_key_value_heads=2, head_dim=8, attention_bias=True)


def drawn(definition, seed):
    """Parameters of which none is 0 or 1."""
    rng = np.random.default_rng(seed)
    named = layers.named_arrays(definition.init(seed, xp=np))
    arrays = {name: (each + rng.normal(0, 0.2, each.shape)).astype(np.float32) for name, each in named.items()}
    return layers.tree_from_names(definition.parameters, arrays)


TREES = tuple(drawn(each, seed) for seed, each in enumerate(ENCODER))
TREE = drawn(DECODER, 3)


@pytest.fixture
def encoder(tmp_path):
    save_layers(tmp_path / "encoder.safetensors", ENCODER, TREES)
    return tmp_path / "encoder.safetensors"


@pytest.fixture
def decoder(tmp_path):
    save_layer(tmp_path / "decoder.safetensors", DECODER, TREE)
    return tmp_path / "decoder.safetensors"


def names(found):
    return [each.name for each in found.causes]


BOTH = ["mask-sense", "scale", "head-order", "epsilon"]
OF_ENCODERS = [*BOTH, "kind-of-gelu", "transposed-weight", "missing-bias", "query-key-swapped", "positions", "dtype"]
OF_HEADS = {"grouped-heads": "head-order", "joined-heads": "head-order"}
OF_DECODERS = [*BOTH, "rotary-pairs", "embedding-scale", *OF_HEADS]
PORTS = [
    *itertools.product(["Encoder"], [False, True], OF_ENCODERS),
    *itertools.product(["Decoder"], [False, True], OF_DECODERS),
]
PORTS.remove(("Encoder", True, "dtype"))  # which no output shows


@pytest.mark.parametrize(("kind", "is_bare", "mistake"), PORTS)
def test_a_mistake_of_porting_is_named(encoder, decoder, kind, is_bare, mistake):
    """Also where only the output of a model is seen."""
    import ported_models

    saved, made = {"Encoder": (encoder, (ENCODER, TREES)), "Decoder": (decoder, (DECODER, TREE))}[kind]
    port = getattr(ported_models, kind)(*made, mistake)
    bare = {"Encoder": ported_models.Bare, "Decoder": ported_models.BareDecoder}[kind]
    found = compare(saved, bare(port) if is_bare else port)
    assert found.first.name.startswith("output" if is_bare else ("embeddings", "attention 0", "layers.0."))
    assert names(found) == [OF_HEADS.get(mistake, mistake)]
    if is_bare and kind == "Encoder":
        assert found.causes[0].says.endswith(": then all numbers are within the bound")


@pytest.mark.parametrize("is_fused", [False, True])
@pytest.mark.parametrize(("mistake", "name"), [("scale", "scale"), ("transposed", "transposed-weight")])
def test_of_two_mistakes_the_first_is_named_and_that_it_is_not_all(encoder, mistake, name, is_fused):
    """The epsilon behind the attention, which changes more of the output, cannot have changed the attention."""
    from ported_models import Encoder, linear

    made = Encoder(ENCODER, TREES)
    block = made.blocks[1]
    block.norm2.eps = 1e-1
    for each in made.blocks:
        each.attention.is_fused = is_fused
    if mistake == "scale":
        block.attention.mistake = "scale"
    else:
        block.attention.q = linear(TREES[2].attention.query, transposed=True)
    found = compare(encoder, made)
    heads = {"scale": "attention 1: output", "transposed": "attention 1: query"}[mistake]
    assert (found.first.name, names(found)) == (heads if is_fused else "layers.1.attention", [name])
    assert found.causes[0].says.endswith("is, and layers.1 is not within the bound")
    assert mistake == "scale" or found.causes[0].says.startswith("layers.1.attention.query.weight transposed: ")


def test_of_two_mistakes_in_all_layers_the_name_is_that_which_the_end_of_a_layer_shows(decoder):
    """A greater epsilon explains the first place, behind a norm, as well as embeddings that are not scaled."""
    from ported_models import Decoder

    port = Decoder(DECODER, TREE, "embedding-scale")
    for block in port.blocks:
        block.attention.mistake = "scale"
    assert names(compare(decoder, port)) == ["embedding-scale"]


def test_layers_in_another_order_are_called_by_no_other_mistake(decoder):
    from ported_models import Decoder

    port = Decoder(DECODER, TREE)
    port.blocks = port.blocks[::-1]
    found = compare(decoder, port)
    assert (found.first.name, names(found)) == ("layers.0.attention", [])


def test_honest_ports_have_nothing(encoder, decoder):
    from ported_models import Decoder, Encoder

    for found in (compare(encoder, Encoder(ENCODER, TREES)), compare(Decoder(DECODER, TREE), decoder)):
        assert found.agrees
        assert found.causes == found.weights == ()
        assert found.same_weights > 20
        assert max(each.ulps / each.bound for each in found.places) < 0.5


@pytest.mark.parametrize(("shape", "is_heads"), [((2, 3, 4), False), ((2, 5, 3, 4), True), ((2, 3, 3, 4), True)])
def test_nothing_is_compared_at_padding_of_heads_as_of_channels(shape, is_heads):
    """Also where there are as many heads as positions."""
    key_mask = np.arange(3) < [[3], [2]]
    kept = Place("attention 0: query", np.ones(shape), is_heads).cleared({"key_mask": key_mask}).array
    assert (kept == (key_mask[:, None, :, None] if is_heads else key_mask[..., None])).all()


def test_heads_are_compared_one_by_one(tmp_path, decoder):
    weight = TREE.layers[1].attention.value.weight.copy()
    weight[:, 8:] *= np.float32(1.001)  # of the second key head, which three query heads share
    attention = TREE.layers[1].attention
    other = attention._replace(value=attention.value._replace(weight=weight))
    layer = TREE.layers[1]._replace(attention=other)
    save_layer(tmp_path / "other.safetensors", DECODER, TREE._replace(layers=(TREE.layers[0], layer)))
    found = compare(decoder, f"torch:{tmp_path / 'other.safetensors'}")
    assert [each.name for each in found.weights] == ["layers.1.attention.value.weight"]
    assert found.first.name == "attention 1: value"
    output = next(each for each in found.places if each.name == "attention 1: output")
    assert max(output.heads[:3]) < output.bound < 1000 < min(output.heads[3:])


CHANGES = {
    "transposed-weight": ("layers.0.attention.output.weight", lambda each: each.T.copy()),
    "missing-bias": ("layers.1.feed_forward.expand.bias", np.zeros_like),
    "dtype": ("layers.1.feed_forward.contract.weight", lambda each: each.astype(np.float16).astype(np.float32)),
    "head-order": ("layers.0.attention.key.weight", lambda each: each.reshape(24, 4, 6).swapaxes(1, 2).reshape(24, 24)),
    "positions": ("embeddings.position", lambda each: np.roll(each, -1, 0)),
}


@pytest.mark.parametrize("cause", CHANGES)
def test_weights_are_compared_first(cause, tmp_path, encoder):
    name, change = CHANGES[cause]
    named = layers.named_arrays(TREES)
    at = name.replace("embeddings", "0").replace("layers.0", "1").replace("layers.1", "2")
    trees = layers.tree_from_names(TREES, named | {at: change(named[at])})
    save_layers(tmp_path / "other.safetensors", ENCODER, trees)
    found = compare(encoder, tmp_path / "other.safetensors")
    assert [each.name for each in found.weights] == [name]
    assert found.causes[0].name == cause
    assert found.causes[0].says.startswith(f"{name}: one ")


def test_queries_that_are_the_other_keys_are_told(tmp_path, encoder):
    attention = TREES[1].attention
    other = TREES[1]._replace(attention=attention._replace(query=attention.key, key=attention.query))
    save_layers(tmp_path / "other.safetensors", ENCODER, (TREES[0], other, TREES[2]))
    found = compare(encoder, tmp_path / "other.safetensors")
    assert {*names(found)} == {"query-key-swapped"}
    assert len(found.weights) == 4


def test_settings_that_differ_are_told(tmp_path):
    layer, tree = layers.EncoderLayer(24, 4, 40), drawn(layers.EncoderLayer(24, 4, 40), 5)
    save_layer(tmp_path / "a.safetensors", layer, tree)
    save_layer(tmp_path / "b.safetensors", layer.with_settings(norm_first=False), tree)
    found = compare(tmp_path / "a.safetensors", tmp_path / "b.safetensors")
    assert found.settings == (("norm_first", True, False),)
    assert names(found) == ["norm-first"]


@pytest.mark.parametrize(("kind", "options"), [(0, {}), (1, {}), (1, {"batch_first": True, "norm_first": True})])
def test_modules_of_torch_agree_with_the_layers_made_of_them(kind, options):
    import torch

    from attention_models.torch.conversion import from_module

    made = (torch.nn.MultiheadAttention, torch.nn.TransformerEncoderLayer)[kind]
    theirs = made(24, 4, dropout=0.0, **({"dim_feedforward": 40} if kind else {}), **options).eval()
    x, mask = (
        np.random.default_rng(3).normal(size=(2, 7, 24)).astype(np.float32),
        np.tri(7, dtype=bool)[None].repeat(2, 0),
    )
    inputs = {"x": x, "key_mask": np.arange(7) < [[6], [4]]} | ({} if kind else {"mask": mask[0]})
    found = compare(from_module(theirs), theirs, inputs)
    assert found.agrees
    assert found.same_weights == (16 if kind else 8)
    assert len([each for each in found.places if each.is_heads and each.other == each.name]) == 4


PORT = """
import sys
sys.path[:0] = {folders}
import test_compare as here
from ported_models import Encoder

def port(): return Encoder(here.ENCODER, here.TREES, "kind-of-gelu")
def refuses(): return Encoder(here.ENCODER, here.TREES).blocks[0]
number = 3
"""


@pytest.fixture
def port(tmp_path):
    folders = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "helpers")]
    (tmp_path / "port.py").write_text(PORT.format(folders=folders))
    return tmp_path / "port.py"


def test_the_command_tells_places_and_cause_and_writes_a_file(encoder, port, tmp_path):
    files = "--json", tmp_path / "found.json", "--jobs", 0
    result = invoke("compare", encoder, f"{port}:port", *files)
    assert result.exit_code == 1, result.output
    assert "weights: 37 bitwise equal, 0 not" in result.stdout
    assert "first to leave the bound: layers.0.feed_forward, by " in result.stdout
    cause = "cause: kind-of-gelu: activation gelu and gelu_tanh: then all numbers are within the bound"
    assert result.stdout.splitlines()[-1] == cause
    found = json.loads((tmp_path / "found.json").read_text())
    assert (found["agrees"], found["first"], found["causes"][0][0]) == (False, "layers.0.feed_forward", "kind-of-gelu")
    result = invoke("compare", encoder, encoder, "--jobs", 0)
    assert (result.exit_code, result.stdout.splitlines()[-1][:43]) == (0, "all 20 activations are within the bound; ne")


@pytest.mark.parametrize(
    ("does", "timeout", "says"),
    [
        ("os._exit(9)", 60, "crashed"),
        ("raise SystemExit(0)", 60, "crashed"),
        ("time.sleep(60)", 2, "took more than 2 seconds"),
    ],
)
def test_a_model_that_dies_or_hangs_is_told(encoder, tmp_path, does, timeout, says):
    (tmp_path / "port.py").write_text(f"import os, time\n\ndef port(): {does}\n")
    port = f"{tmp_path / 'port.py'}:port"
    told = refusal("compare", port, encoder, "--timeout", timeout, status=3)  # the encoder may take its time
    assert told == f"expected the end of loading {port}; got a process that {says}"


@pytest.mark.parametrize(
    ("second", "says"),
    [
        ("nothing.safetensors", "expected a file of safetensors; got "),
        ("cut.safetensors", "expected a whole file of safetensors; got "),
        ("port.py:nothing", "expected a callable of "),
        ("port.py:number", "expected a layer or a model of torch, Keras or flax.nnx; got int"),
        ("port.py:refuses", "expected a model that takes key_mask; got "),
        ("decoder.safetensors", "expected models with outputs of one shape; got (2, 9, 24) and (2, 9, 37)"),
    ],
)
def test_what_cannot_be_compared_is_refused(encoder, decoder, port, tmp_path, second, says):
    (tmp_path / "cut.safetensors").write_bytes(encoder.read_bytes()[:5000])
    assert refusal("compare", encoder, tmp_path / second, "--jobs", 0).startswith(says)


def test_a_library_that_is_not_here_and_an_input_that_is_cut_are_told(encoder, tmp_path, monkeypatch):
    np.savez(tmp_path / "x.npz", x=np.ones((2, 3, 24), np.float32))
    cut = tmp_path / "cut.npz"
    cut.write_bytes((tmp_path / "x.npz").read_bytes()[:-30])
    monkeypatch.setitem(sys.modules, "keras", None)
    for words, says in (
        ((encoder, f"keras:{encoder}"), f"keras for keras:{encoder}; got none: pip install keras"),
        (
            (encoder, encoder, "--input", cut),
            f"inputs as safetensors, npz or npy; got {cut}: BadZipFile: File is not a zip file",
        ),
    ):
        assert refusal("compare", *words, "--jobs", 0) == f"expected {says}"


@pytest.mark.parametrize(
    ("arrays", "says"),
    [
        ({"y": np.ones((2, 3, 4)), "x": np.ones((2, 3, 4))}, "expected inputs out of token_ids, x, "),
        (
            {"key_mask": np.ones((2, 3), bool), "mask": np.ones((3, 3), bool)},
            "expected one of token_ids, x and query in ",
        ),
        ({"x": np.ones((2, 3, 4), np.float32)}, "expected inputs that "),
    ],
)
def test_inputs_that_do_not_fit_are_refused(encoder, tmp_path, arrays, says):
    np.savez(tmp_path / "inputs.npz", **arrays)
    assert refusal("compare", encoder, encoder, "--input", tmp_path / "inputs.npz", "--jobs", 0).startswith(says)


# --- chains ---


def chain(*arguments):
    return invoke("digest", *arguments, "--backend", "numpy")


def test_chains_name_the_layer_and_the_token_where_two_machines_part(decoder, tmp_path):
    save_arrays(tmp_path / "tokens", {"token_ids": np.asarray([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]])})
    here = decoder, tmp_path / "tokens"
    assert chain(*here, "--backend", "torch", "--chain", tmp_path / "chain.json").stdout.splitlines() == [
        f"{name}: 8 places, 80 hashes, in reproducible arithmetic" for name in ("numpy", "torch")
    ] + ["no place differs"]  # fmt: skip
    assert chain(*here, "--against", tmp_path / "chain.json").exit_code == 0
    layer, token = TREE.layers[1], TREE.token.copy()
    bias = layer.attention.value.bias.copy()
    bias[5] += 0.01
    attention = layer.attention._replace(value=layer.attention.value._replace(bias=bias))
    save_layer(decoder, DECODER, TREE._replace(layers=(TREE.layers[0], layer._replace(attention=attention))))
    result = chain(*here, "--against", tmp_path / "chain.json")
    assert result.exit_code == 1
    assert "chain.json at layers.1.attention, sequence 0, token 0: " in result.stdout
    token[6] = np.nextafter(token[6], np.float32(9))
    save_layer(decoder, DECODER, TREE._replace(token=token))
    assert (
        "chain.json at embeddings, sequence 1, token 2: " in chain(*here, "--against", tmp_path / "chain.json").stdout
    )


def test_chains_of_other_tokens_arithmetic_or_weights_are_not_compared_in_silence(decoder, tmp_path):
    file, tokens = tmp_path / "chain.json", tmp_path / "tokens"
    save_arrays(tokens, {"token_ids": np.asarray([[3, 1, 4, 1, 5]])})
    assert chain(decoder, tokens, "--chain", file, "--arithmetic", "fast").exit_code == 0
    assert chain(decoder, tokens, "--against", file, "--arithmetic", "fast").exit_code == 0
    told = refusal("digest", decoder, tokens, "--against", file, "--backend", "numpy")
    assert told == f"expected arithmetic fast, as in {file}; got reproducible"
    told = refusal("digest", decoder, "--against", file, "--arithmetic", "fast", "--backend", "numpy")
    assert told.startswith("expected token_ids ")
    save_layer(decoder, DECODER, TREE._replace(norm=TREE.norm * np.float32(1.01)))
    result = chain(decoder, tokens, "--against", file, "--arithmetic", "fast")
    assert (result.exit_code, f"the model is not that of {file}: " in result.stdout) == (1, True)
    assert "parts from" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("encoder.safetensors", "--chain", "c.json"), "expected a language model; got "),
        (("decoder.safetensors", "--against", "encoder.safetensors"), "expected a file that --chain wrote; got "),
        (("decoder.safetensors", "encoder.safetensors", "--chain", "c.json"), "expected inputs out of token_ids, "),
        (("decoder.safetensors", "--chain", "c.json", "--causal"), "expected a language model, and at most a file of "),
        (("decoder.safetensors", "--chain", "c.json", "--arithmetic", "slow"), "expected an arithmetic out of "),
    ],
)
def test_chains_of_something_else_are_refused(encoder, decoder, tmp_path, arguments, says):
    words = (tmp_path / each if each.endswith(("json", "safetensors")) else each for each in arguments)
    assert refusal("digest", *words, "--backend", "numpy").startswith(says)
