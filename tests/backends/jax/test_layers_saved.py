"""Layers of JAX with dropout and state, in files, and with masks of one's own."""

import dataclasses

import numpy as np
import pytest
from jax_layer_helpers import IDS, RNG, X, attention_jax, close, equal, jax, jnp, made

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


LENGTHS = jnp.asarray([5, 2])

SEEN = jnp.asarray(RNG.random((2, 1, 5, 5)) < 0.7)

MASKS = {
    "causal": (Causal(offset=LENGTHS - 3), 1),
    "causal of a number": (Causal(offset=1), 0),
    "lengths": (KeyLengths(LENGTHS), 1),
    "window": (SlidingWindow(left=2, right=None, offset=LENGTHS - 4), 1),
    "segments": (Segments(IDS_ := jnp.asarray(IDS % 3), IDS_), 2),
    "function": (MaskFunction(lambda batch, head, query, key, even: even[query % 2, key % 3], (SEEN[0, 0],)), 1),
    "array": (Given(SEEN), 1),
    "combined": ((Causal() | ~KeyLengths(LENGTHS)) & Given(SEEN) & SlidingWindow(left=3, right=1), 2),
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


@pytest.mark.parametrize("name", ["lengths", "function", "combined"])
def test_masks_go_through_jit_as_arguments(name):
    mask, _ = MASKS[name]
    layer = attention_jax.MultiHeadAttention.init(0, 6, 2, dtype="float64")
    apply = jax.jit(lambda layer, x, mask: layer(x, mask=mask))
    expected = jax.jit(lambda: layer(X, mask=mask))()
    close(apply(layer, X, mask), expected)
    close(apply(layer, X, jax.tree.map(jnp.copy, mask)), expected)
    assert apply._cache_size() == 1
    if name == "lengths":
        assert (apply(layer, X, KeyLengths(LENGTHS - 1)) != expected).any()
        assert apply._cache_size() == 1

    def measured(layer, mask):
        return jnp.sum(layer(X, mask=mask) ** 2)

    close(jax.jit(jax.grad(measured))(layer, mask), jax.jit(jax.grad(lambda layer: measured(layer, mask)))(layer))


@pytest.mark.parametrize("name", ["causal", "array", "combined"])
def test_masks_go_through_vmap_with_their_leading_axes(name):
    mask, _ = MASKS[name]
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
