"""What earlier versions saved is still read: pickles and exported programs, kept as files in ``earlier_versions``."""

import importlib
import inspect
import pickle
from pathlib import Path

import numpy as np
import pytest

import attention_core as ac
from attention_core import layers, layouts, masks

FOLDER = Path(__file__).parent / "earlier_versions"
PROGRAMS = ("alibi", "arrays", "blockwise", "encoder", "given", "masked", "relative", "reproducible")


def read(name):
    return pickle.loads((FOLDER / f"{name}.pickle").read_bytes())


@pytest.fixture(scope="module")
def torch():
    return importlib.import_module("torch")


def equal(found, expected):
    if isinstance(expected, tuple):
        assert type(found) is type(expected)
        for each, other in zip(found, expected, strict=True):
            equal(each, other)
    elif isinstance(expected, np.ndarray):
        np.testing.assert_array_equal(found, expected)
    else:
        assert found == expected


def test_pickled_results_are_those_of_today():
    (query, key, value), kept = (lambda arrays, kept: (arrays.values(), kept))(*read("objects"))
    exact = {"arithmetic": "reproducible"}
    equal(
        ac.scaled_dot_product_attention(query, key, value, return_weights=True, return_logsumexp=True),
        kept["attention"],
    )
    equal(ac.partial_attention(query, key, value), kept["partial"])
    equal(ac.attention_extent(query, key, value), kept["extent"])
    partial, width = ac.partial_attention(query, key, value, extent=kept["extent"], **exact), value.shape[-1]
    products = np.delete(partial.values, range(2 * width, 3 * width), axis=-1)  # earlier ones lack that of low slices
    equal(partial._replace(values=products), kept["exact_partial"])
    equal(ac.append(ac.empty_cache((1,), 2, 16, 4, xp=np), key, value), kept["cache"])
    assert ac.explain_attention(query, key, value).chosen == kept["explanation"].chosen
    assert kept["dropout"] == ac.Dropout(0.25, 3)


def test_pickled_masks_and_layers_work():
    (query, key, value), kept = (lambda arrays, kept: (arrays.values(), kept))(*read("objects"))
    for mask in kept["masks"]:
        assert type(mask).__module__ == "attention_core.masks"
        assert ac.scaled_dot_product_attention(query, key[..., :9, :], value, mask=mask).shape == query.shape
    for score_mod in kept["score_mods"]:
        assert ac.scaled_dot_product_attention(query, key, value, score_mod=score_mod).shape == query.shape
    for layer in kept["layers"]:
        assert layer == layers.layer_from_settings(layer.settings())


@pytest.mark.needs("torch")
def test_pickled_layers_of_torch_compute_the_same(torch):
    x, kept, outputs = read("torch_layers")
    for layer, output in zip(kept, outputs, strict=True):
        np.testing.assert_allclose(layer.eval()(torch.from_numpy(x)).detach().numpy(), output, rtol=1e-6, atol=1e-6)


@pytest.mark.needs("jax")
def test_pickled_layers_of_jax_compute_the_same():
    importlib.import_module("jax")
    x, kept, outputs = read("jax_layers")
    for layer, output in zip(kept, outputs, strict=True):
        np.testing.assert_allclose(layer(x), output, rtol=1e-5, atol=1e-6)


@pytest.mark.needs("torch")
@pytest.mark.parametrize("name", PROGRAMS)
def test_exported_programs_give_the_same_bits(name, torch):
    importlib.import_module("attention_torch")
    arrays, x, outputs = read("programs")
    program = torch.export.load(FOLDER / f"{name}.pt2").module()
    inputs = (x,) if name == "encoder" else arrays.values()
    found = program(*map(torch.from_numpy, inputs)).detach().numpy()
    if name in ("encoder", "reproducible"):
        np.testing.assert_array_equal(found, outputs[name])
    else:
        np.testing.assert_allclose(found, outputs[name], rtol=2e-6, atol=1e-6)


@pytest.mark.needs("torch")
def test_programs_exported_today_hold_no_address_of_a_file(torch, tmp_path):
    class Attend(torch.nn.Module):
        def forward(self, query, key, value):
            mask = (ac.Causal(2) | ac.SlidingWindow(2, 1)) & ~ac.KeyLengths(1)
            return ac.scaled_dot_product_attention(
                query, key, value, mask=mask, score_mod=ac.alibi(2), implementation="blockwise"
            )

    arrays = tuple(map(torch.from_numpy, read("programs")[0].values()))
    program = torch.export.export(Attend(), arrays, strict=False)
    (text,) = {node.args[1] for node in program.graph.nodes if "attend" in str(node.target) and len(node.args) == 2}
    assert "@blockwise" in text
    assert "@SlidingWindow" in text
    assert "attention_" not in text
    torch.export.save(program, tmp_path / "program.pt2")
    again = torch.export.load(tmp_path / "program.pt2").module()
    np.testing.assert_array_equal(again(*arrays), Attend()(*arrays))


@pytest.mark.parametrize("module", [ac, masks, layers, layouts], ids=lambda module: module.__name__)
def test_public_objects_have_public_addresses(module):
    for name in module.__all__:
        thing = getattr(module, name)
        if inspect.isclass(thing) or inspect.isfunction(thing):
            assert "._" not in thing.__module__, name
            assert getattr(importlib.import_module(thing.__module__), name) is thing
