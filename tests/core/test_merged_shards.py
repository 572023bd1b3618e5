"""Decoding from a cache that ranks share: each attends to its own keys, and one sum over ranks merges them."""

import numpy as np
import pytest
from shard_helpers import inputs, parts_of

import attention_core as ac

pytestmark = pytest.mark.needs(lambda backend: backend.name in ("torch", "numpy"))


@pytest.mark.needs(
    "gradients", lambda arithmetic, argument: arithmetic == "fast" or argument not in ("softcap", "score_mod")
)
@pytest.mark.parametrize("arithmetic", ["fast", "reproducible"])
@pytest.mark.parametrize("argument", ["query", "key", "value", "bias", "softcap", "score_mod"])
def test_a_differentiated_merge_is_refused_before_anything_is_sent(backend, put, ranks, argument, arithmetic):
    query, key, value = map(put, inputs(length=8, dtype="float32")[:3])
    others = {"bias": put(np.zeros((8, 8), np.float32))}
    if arithmetic == "fast":
        others |= {"softcap": put(np.asarray(2.0, np.float32)), "score_mod": put(np.ones(4, np.float32))}

    def step(group):
        shards = ac.Shards(group, strategy="merge")
        arrays = {"query": query, "key": ac.shard(key, shards), "value": ac.shard(value, shards), **others}

        def loss(x):
            options = {**arrays, argument: x}
            if "score_mod" in options:
                options["score_mod"] = ac.scores.ScoreMod(weighted, (options["score_mod"],))
            parts = [options.pop(name) for name in ("query", "key", "value")]
            found = ac.scaled_dot_product_attention(*parts, **options, shards=shards, arithmetic=arithmetic)
            return backend.namespace.sum(found)

        with pytest.raises(NotImplementedError) as caught:
            backend.value_and_grad(loss)(arrays[argument])
        return str(caught.value)

    first, second = ranks(2, step)
    assert first == second
    assert not ranks.lent.calls


def weighted(scores, batch, head, query, key, weights):
    return scores * weights[head]


@pytest.mark.needs("torch")
def test_a_merge_that_no_gradient_is_recorded_of_takes_what_requires_one(put, get, ranks):
    import torch

    query, key, value = map(put, inputs(length=8)[:3])
    query.requires_grad_()

    def step(group):
        shards = ac.Shards(group, strategy="merge")
        with torch.no_grad():
            return get(ac.scaled_dot_product_attention(*parts_of((query, key, value), shards), shards=shards))

    for found in ranks(2, step):
        np.testing.assert_allclose(found, get(ac.scaled_dot_product_attention(query, key, value)), rtol=1e-12)
