"""Layers of JAX with dropout and state, in files, and with masks of one's own."""

import dataclasses

import numpy as np
import pytest
from call_table import RULES, Sizes, options_of
from jax_layer_helpers import X, attention_jax, close, equal, jax, jnp, made

from attention_core import Causal, KeyLengths, Mask, MaskFunction, Segments, SlidingWindow
from attention_core.masks import And, Banded, Given, Not, Or


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


def test_a_refreshed_state_has_no_gradient():
    layer, *_ = made("SaganAttention")
    gradients = jax.grad(lambda layer: sum(jnp.sum(leaf) for leaf in layer.refreshed().state))(layer)
    assert not any(leaf.any() for leaf in jax.tree.leaves(gradients))


def test_a_class_of_your_own_is_a_layer():
    class Mine(attention_jax.FeedForward):
        pass

    layer = Mine.init(0, 6, 7)
    assert type(jax.tree.map(jnp.zeros_like, layer)) is Mine
    assert type(Mine.from_numpy(layer.definition, *layer.to_numpy())) is Mine


SIZES = Sizes((2,), 2, 2, 5, 5, 3, 3)


def mask_of(name):
    return options_of(name, SIZES, jnp.asarray)["mask"]


@pytest.mark.parametrize("name", [name for name in RULES if name != "of a user" and not name.startswith("array of")])
def test_masks_are_pytrees_of_their_arrays(name):
    held = []
    mask = Given(jnp.asarray(True)) & options_of(name, SIZES, lambda x: held.append(jnp.asarray(x)) or held[-1])["mask"]
    leaves, form = jax.tree.flatten(mask)
    assert len(leaves) == 1 + len(held)
    assert all(isinstance(leaf, jax.Array) for leaf in leaves)
    assert hash(form) == hash(jax.tree.structure(jax.tree.unflatten(form, leaves)))
    for placeholder in (0, 1.0, object(), "x"):  # whatever JAX puts in the place of an array
        holding = jax.tree.unflatten(form, [placeholder] * len(leaves))
        assert jax.tree.flatten(holding) == ([placeholder] * len(leaves), form)


@pytest.mark.parametrize("name", ["lengths", "function of an array", "or lengths"])
def test_masks_go_through_jit_as_arguments(name):
    mask = mask_of(name)
    layer = attention_jax.MultiHeadAttention.init(0, 6, 2, dtype="float64")
    apply = jax.jit(lambda layer, x, mask: layer(x, mask=mask))
    expected = jax.jit(lambda: layer(X, mask=mask))()
    close(apply(layer, X, mask), expected)
    close(apply(layer, X, jax.tree.map(jnp.copy, mask)), expected)
    assert apply._cache_size() == 1
    if name == "lengths":
        assert (apply(layer, X, KeyLengths(jnp.asarray([4, 1]))) != expected).any()
        assert apply._cache_size() == 1

    def measured(layer, mask):
        return jnp.sum(layer(X, mask=mask) ** 2)

    close(jax.jit(jax.grad(measured))(layer, mask), jax.jit(jax.grad(lambda layer: measured(layer, mask)))(layer))


@pytest.mark.parametrize("name", ["offsets", "lengths", "array of samples", "array and rule"])
def test_masks_go_through_vmap_with_their_leading_axes(name):
    mask = mask_of(name)
    layer = attention_jax.MultiHeadAttention.init(0, 6, 2, dtype="float64")
    apply = jax.jit(lambda x, mask: layer(x, mask=mask))
    close(jax.vmap(apply)(X, mask), apply(X, mask))
    alone = jax.tree.map(lambda leaf: leaf[1:], mask)
    close(jax.vmap(apply, in_axes=(None, 0))(X[0], mask)[1], apply(X[:1], alone)[0])


def test_every_mask_is_registered_and_one_of_your_own_can_be():
    known = {And, Banded, Causal, Given, KeyLengths, MaskFunction, Not, Or, Segments, SlidingWindow}
    kinds = {
        kind
        for kind in _descendants(Mask)
        if kind.__module__ == "attention_core.masks" and not kind.__name__.startswith("_")
    }
    assert kinds == known
    for kind in known:
        with pytest.raises(ValueError):
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
