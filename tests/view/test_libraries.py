"""Views of arrays of every library: the same maps as of NumPy's."""

import numpy as np

from attention_core import scaled_dot_product_attention
from attention_core.masks import SlidingWindow
from attention_core.weights import record_attention
from attention_view import Computed, view


def test_weights_of_every_library_are_drawn_as_those_of_numpy(backend):
    query, key = np.random.default_rng(0).normal(size=(2, 2, 2, 9, 4)).astype("float32")
    mask = SlidingWindow(left=3)
    q, k = backend.from_numpy((query, key))
    with record_attention() as records:
        scaled_dot_product_attention(q, k, k, mask=mask)
    expected = view(Computed(query, key, mask=mask))
    for made in (view(records), view(records[0].weights()), view(Computed(q, k, mask=mask))):
        assert [each[:3] for each in made.maps] == [each[:3] for each in expected.maps]
        for pair in zip(made.maps, expected.maps, strict=True):
            first, second = (each.levels[0].codes.astype(int) for each in pair)
            assert abs(first - second).max() <= 1  # each code is 0.04 % more than the one before
            assert ((first == 0) == (second == 0)).all()
