"""What the viewer takes: pictures with their patches, steps of generation, and results of calls."""

import base64

import numpy as np
import pytest

from attention_core import scaled_dot_product_attention
from attention_core.weights import attention_weights
from attention_view import Computed, view
from attention_view.codes import decode


def test_pictures_take_the_grid_of_pooled_keys_and_of_patches_behind_a_class_token(rng):
    image = rng.uniform(size=(16, 24, 3))
    pooled = view(rng.dirichlet(np.ones(24), size=(2, 96)), image=image)
    assert (pooled.picture.grid, pooled.picture.key_grid) == ((8, 12), (4, 6))
    patches = view(rng.dirichlet(np.ones(97), size=(2, 97)), image=(image * 255).astype(np.uint8), class_tokens=1)
    assert (patches.picture.grid, patches.picture.class_tokens) == ((8, 12), 1)


def test_a_large_picture_keeps_queries_in_even_rows_and_columns_with_the_one_asked_for(rng, monkeypatch):
    monkeypatch.setattr("attention_view.weights.MOST_CODES", 2 * 24 * 20)
    query, key = (rng.normal(size=(2, length, 4)).astype("float32") for length in (96, 24))
    weights = attention_weights(query, key)
    for attention in (Computed(query, key), weights):
        made = view(attention, image=rng.uniform(size=(16, 24)), query=(5, 3))
        places = [row * 12 + column for row in (2, 5) for column in range(0, 12, 3)]
        assert (made.picture.places, made.query) == (places, 5)
        np.testing.assert_allclose(decode(made.maps[1].levels[0].codes, 16), weights[1, places], rtol=5e-4)
        assert made.notes == ["8 of 96 queries are kept."]


@pytest.mark.parametrize("alone", [False, True])
def test_chosen_queries_are_placed_on_the_picture(alone, rng):
    image = rng.uniform(size=(16, 24))
    query, key = (rng.normal(size=(2, length, 4)).astype("float32") for length in (96, 24))
    rows = [5 * 12 + 3, 7]
    weights = attention_weights(query, key, queries=rows)
    attention = weights if alone else Computed(query, key)
    made = view(attention, image=image, grid=(8, 12), query=[(5, 3), 7])
    assert (made.picture.places, made.picture.grid, made.picture.key_grid) == (rows, (8, 12), (4, 6))
    np.testing.assert_allclose(decode(made.maps[1].levels[0].codes, 16), weights[1], rtol=5e-4)
    title = "Attention: query (5, 3), 4 × 6 keys, layer 0, head 0, weights"
    assert str(made).splitlines()[0] == title
    assert str(view(weights[:, :1], image=image, grid=(8, 12), query=(5, 3))).splitlines()[0] == title


def test_a_large_array_of_pixels_is_scaled_down():
    pixels = np.kron(np.arange(6).reshape(2, 3), np.ones((1000, 1000))).astype(np.uint8) * 40
    made = view(np.full((6, 6), 1 / 6), image=pixels)
    assert (made.picture.size, made.picture.grid) == ((2000, 3000), (2, 3))
    header = base64.b64decode(made.picture.source.partition(",")[2])[16:24]
    assert (int.from_bytes(header[:4], "big"), int.from_bytes(header[4:], "big")) == (1500, 1000)


def steps_of(rng, lengths, columns, layers=2):
    """Weights of each step and layer, and what they are of all queries: one map for each layer."""
    steps = [
        tuple(rng.dirichlet(np.ones(n), size=(1, 3, m)) for _ in range(layers))
        for m, n in zip(lengths, columns, strict=True)
    ]
    return tuple(steps), [[step[layer][0] for step in steps] for layer in range(layers)]


@pytest.mark.parametrize(
    ("lengths", "columns", "ends", "width"),
    [
        ((4, 1, 1), (4, 5, 6), (4, 5, 6), 6),  # a cache that grows
        ((4, 1, 1), (9, 9, 9), (9, 9, 9), 9),  # a static one, or attention to another sequence
        ((1, 1, 1, 1), (2, 2, 2, 2), (2, 2, 2, 2), 2),
        ((5, 1, 1), (5, 3, 3), (5, 6, 7), 7),  # a window
        ((3, 1, 1), (3, 3, 3), (3, 4, 5), 5),  # as long as the prompt
        ((2, 1), (5, 6), (5, 6), 6),  # the cache held keys before
        ((4,), (4,), (4,), 4),  # one step of two layers
    ],
)
def test_steps_of_generation_are_queries_of_one_map_for_each_layer(lengths, columns, ends, width, rng):
    steps, expected = steps_of(rng, lengths, columns)
    made = view(steps, heads=[0, 2])
    assert [(each.layer, each.head) for each in made.maps] == [(0, 0), (0, 2), (1, 0), (1, 2)]
    for each in made.maps:
        found = decode(each.levels[0].codes, 16)
        assert found.shape == (sum(lengths), width)
        row = 0
        for weights, end in zip(expected[each.layer], ends, strict=True):
            there = np.zeros((weights.shape[1], width))
            there[:, end - weights.shape[2] : end] = weights[each.head]
            np.testing.assert_allclose(found[row : row + len(there)], there, rtol=5e-4)
            row += len(there)


def test_the_result_of_a_call_with_weights_is_taken(rng):
    query, key = rng.normal(size=(2, 1, 2, 3, 4)).astype("float32")
    results = [scaled_dot_product_attention(query, key, key, return_weights=True, scale=scale) for scale in (1.0, 2.0)]
    for attention, expected in ((results[1], results[1:]), (results, results)):
        made = view(attention)
        assert len(made.maps) == 2 * len(expected)
        np.testing.assert_allclose(decode(made.maps[-1].levels[0].codes, 16), expected[-1].weights[0, 1], rtol=5e-4)


def test_a_note_that_turns_a_photograph_is_cut(tmp_path):
    turned = b"\xff\xe1\0\x08Exif\0\0"
    rest = b"\xff\xc0\0\x11\x08\0\x04\0\x08" + bytes(10) + b"\xff\xd9"
    (tmp_path / "photo.jpg").write_bytes(b"\xff\xd8" + turned + rest)
    picture = view(np.full((2, 2), 0.5), image=tmp_path / "photo.jpg").picture
    assert (picture.size, picture.grid) == ((4, 8), (1, 2))
    assert base64.b64decode(picture.source.partition(",")[2]) == b"\xff\xd8" + rest
