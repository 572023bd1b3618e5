"""Layers of JAX with dropout and state, in files, and with masks of one's own."""

import copy
import dataclasses
import doctest
import importlib
import pickle

import numpy as np
import pytest
from jax_layer_helpers import IDS, RNG, X, attention_jax, close, equal, every, jax, jnp, made

from attention_core import Causal, KeyLengths, Mask, MaskFunction, Segments, SlidingWindow, layers
from attention_core.masks import And, Appended, Given, Not, Or


@pytest.mark.parametrize("implementation", ["threefry2x32", "rbg"])
def test_a_key_of_jax_is_a_seed(implementation):
    layer = attention_jax.FeedForward.init(0, 6, 7, dropout=0.5, dtype="float64")
    with jax.default_prng_impl(implementation):
        typed, raw, other = jax.random.key(3), jax.random.PRNGKey(3), jax.random.key(4)
        found = layer(X, key=typed)
        equal(layer(X, key=raw), found)
        equal(layer(X, key=np.asarray(raw)), found)
        close(jax.jit(lambda key: layer(X, key=key))(typed), found)
        assert ((layer(X, key=other) == 0) != (found == 0)).any()
        words = jax.random.bits(typed, (2,), "uint32").astype("int32")
        equal(layer(X, key=words), found)
        equal(
            attention_jax.FeedForward.init(raw, 6, 7).parameters, attention_jax.FeedForward.init(typed, 6, 7).parameters
        )
    keys = jax.random.split(jax.random.key(1), 2)
    each = jax.vmap(lambda key: layer(X[0], key=key))(keys)
    close(list(each), [layer(X[0], key=key) for key in keys])
    assert ((each[0] == 0) != (each[1] == 0)).any()


def test_a_layer_that_never_drops_takes_no_notice_of_a_key():
    for name in ("SaganAttention", "FeedForward"):
        layer, inputs, _ = made(name)
        if name == "FeedForward":
            layer = attention_jax.FeedForward(layers.FeedForward(6, 7, 3), layer.parameters)
        equal(layer(*inputs, key=jax.random.key(0)), layer(*inputs))


def test_the_state_is_advanced_outside_of_the_call_and_without_a_gradient():
    layer, (x,), _ = made("SaganAttention")
    before = jax.tree.map(jnp.copy, layer.state)
    layer(x)
    equal(layer.state, before)
    new = layer.refreshed()
    parameters, state = layer.to_numpy()
    close(new.state, jax.tree.map(jnp.asarray, layer.definition.updated_state(parameters, state)))
    assert all((new_array != other).any() for new_array, other in zip(new.state, layer.state, strict=True))
    assert new.parameters is layer.parameters
    gradients = jax.grad(lambda layer: sum(jnp.sum(leaf) for leaf in layer.refreshed().state))(layer)
    assert not any(leaf.any() for leaf in jax.tree.leaves(gradients))
    plain = attention_jax.SaganAttention.init(0, 8, spectral_norm=False)
    assert plain.state == plain.refreshed().state == ()


@pytest.mark.parametrize("wrong", [np.ones((2, 5, 8)), jnp.ones(()), "key", 1.5, -1])
def test_what_is_no_key_is_named(wrong):
    """Above all the keys to attend to, which other frameworks take under that name."""
    layer = attention_jax.MultiHeadAttention.init(0, 8, 2)
    with pytest.raises((TypeError, ValueError), match=r"expected (key as a key of jax.random|a seed)"):
        layer(jnp.ones((2, 5, 8), "float32"), key=wrong)


@pytest.mark.parametrize("name", ["seed", "state", "dropout_rng", "training"])
def test_names_of_the_core_and_of_others_are_not_taken(name):
    layer = attention_jax.FeedForward.init(0, 4, 8, dropout=0.5)
    words = "the state in FeedForward itself" if name == "state" else "key=... in training, and none to evaluate, in"
    with pytest.raises(TypeError, match=f"expected {words}.*; got the keyword {name}"):
        layer(jnp.ones((3, 4), "float32"), **{name: 3})
    with pytest.raises(TypeError, match=r"expected x of FeedForward by position, .*; got 2 by position"):
        layer(jnp.ones((3, 4), "float32"), None)


@pytest.mark.parametrize(("arguments", "named"), [((4, 8), {}), ((), {"channels": 4, "inner": 8})])
def test_settings_are_given_to_init(arguments, named):
    with pytest.raises(TypeError, match=r"expected FeedForward.init\(key, ...\) with the settings; got FeedForward\("):
        attention_jax.FeedForward(*arguments, **named)


def test_a_class_of_your_own_is_a_layer():
    class Mine(attention_jax.FeedForward):
        pass

    layer = Mine.init(0, 6, 7)
    assert type(jax.tree.map(jnp.zeros_like, layer)) is Mine
    assert type(Mine.from_numpy(layer.definition, *layer.to_numpy())) is Mine


@every
@pytest.mark.parametrize(
    "again", [copy.deepcopy, lambda layer: pickle.loads(pickle.dumps(layer))], ids=["copy", "pickle"]
)
def test_a_layer_is_copied_and_pickled(name, again):
    layer, inputs, options = made(name)
    other = again(layer)
    assert type(other) is type(layer)
    assert other.definition == layer.definition
    equal(other, layer)
    equal(other(*inputs, **options), layer(*inputs, **options))


LENGTHS = jnp.asarray([5, 2])

SEEN = jnp.asarray(RNG.random((2, 1, 5, 5)) < 0.7)

MASKS = {
    "causal": (Causal(offset=LENGTHS - 3), 1),
    "causal of a number": (Causal(offset=1), 0),
    "lengths": (KeyLengths(LENGTHS), 1),
    "window": (SlidingWindow(2, None, offset=LENGTHS - 4), 1),
    "segments": (Segments(IDS_ := jnp.asarray(IDS % 3), IDS_), 2),
    "function": (MaskFunction(lambda batch, head, query, key, even: even[query % 2, key % 3], (SEEN[0, 0],)), 1),
    "array": (Given(SEEN), 1),
    "appended": (Appended(KeyLengths(LENGTHS), 4), 1),
    "combined": ((Causal() | ~KeyLengths(LENGTHS)) & Given(SEEN) & SlidingWindow(3, 1), 2),
}

masks = pytest.mark.parametrize("name", MASKS)


@masks
def test_masks_are_pytrees_of_their_arrays(name):
    mask, count = MASKS[name]
    leaves, form = jax.tree.flatten(mask)
    assert len(leaves) == count
    assert all(isinstance(leaf, jax.Array) for leaf in leaves)
    assert hash(form) == hash(jax.tree.structure(jax.tree.unflatten(form, leaves)))
    for placeholder in (0, 1.0, object(), "x"):  # whatever JAX puts in the place of an array
        holding = jax.tree.unflatten(form, [placeholder] * count)
        assert jax.tree.flatten(holding) == ([placeholder] * count, form)


@masks
def test_masks_go_through_jit_as_arguments(name):
    mask, _ = MASKS[name]
    layer = attention_jax.MultiHeadAttention.init(0, 6, 2, dtype="float64")
    apply = jax.jit(lambda layer, x, mask: layer(x, mask=mask))
    expected = layer(X, mask=mask)
    assert (expected != layer(X)).any()
    close(apply(layer, X, mask), expected)
    close(apply(layer, X, jax.tree.map(jnp.copy, mask)), expected)
    assert apply._cache_size() == 1
    if name == "lengths":
        close(apply(layer, X, KeyLengths(LENGTHS - 1)), layer(X, mask=KeyLengths(LENGTHS - 1)))
        assert apply._cache_size() == 1
    gradients = jax.jit(jax.grad(lambda layer, mask: jnp.sum(layer(X, mask=mask) ** 2)))(layer, mask)
    close(gradients, jax.grad(lambda layer: jnp.sum(layer(X, mask=mask) ** 2))(layer))


@pytest.mark.parametrize("name", ["causal", "lengths", "array", "combined", "segments"])
def test_masks_go_through_vmap_with_their_leading_axes(name):
    mask, _ = MASKS[name]
    layer = attention_jax.MultiHeadAttention.init(0, 6, 2, dtype="float64")
    close(jax.vmap(lambda x, mask: layer(x, mask=mask))(X, mask), layer(X, mask=mask))
    close(
        jax.vmap(lambda x, mask: layer(x, mask=mask), in_axes=(None, 0))(X[0], mask)[1],
        layer(X[:1], mask=jax.tree.map(lambda leaf: leaf[1:], mask))[0],
    )


def test_masks_of_numpy_are_taken():
    layer = attention_jax.MultiHeadAttention.init(0, 6, 2, dtype="float64")
    found = layer(X, mask=Causal(offset=np.asarray([2, -1])) & np.asarray(SEEN))
    equal(found, layer(X, mask=Causal(offset=jnp.asarray([2, -1])) & SEEN))


def test_every_mask_is_registered_and_one_of_your_own_can_be():
    known = {And, Appended, Causal, Given, KeyLengths, MaskFunction, Not, Or, Segments, SlidingWindow}
    kinds = {
        kind
        for kind in _descendants(Mask)
        if kind.__module__ == "attention_core.masks" and not kind.__name__.startswith("_")
    }
    assert kinds == known
    for kind in known:
        with pytest.raises(ValueError, match="Duplicate"):
            attention_jax.register_mask(kind)

    @attention_jax.register_mask
    @dataclasses.dataclass(frozen=True, eq=False)
    class Beyond(Mask):
        least: object

        def allowed(self, at, /, *, xp):
            return at.key >= self.least

    layer = attention_jax.MultiHeadAttention.init(0, 6, 2, dtype="float64")
    found = jax.jit(lambda mask: layer(X, mask=mask))(Beyond(jnp.asarray(2)) & Causal())
    close(found, layer(X, mask=(jnp.arange(5) >= 2) & jnp.tri(5, dtype=bool)))


def _descendants(kind):
    return [each for subclass in kind.__subclasses__() for each in (subclass, *_descendants(subclass))]


@pytest.mark.parametrize("module", ["layers", "masks"])
def test_examples_of_the_documentation_run(module):
    with jax.enable_x64(False):
        found = doctest.testmod(importlib.import_module(f"attention_jax.{module}"))
    assert found.attempted > 0
    assert found.failed == 0
