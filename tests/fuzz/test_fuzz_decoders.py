"""Language models in pieces, in batches, and as texts that are generated: the logits of one forward pass."""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import numpy as np
import pytest
from fuzz_problems import dtypes_of
from hypothesis import strategies as st

import attention_models as models
from attention_core import layers

V, C, LENGTH = 23, 12, 9
EPSILON = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-19, "float64": 2.0**-48}
WIDER = {
    "float16": ("float16", "float32"),
    "bfloat16": ("bfloat16", "float32"),
    "float32": ("float32",),
    "float64": ("float64",),
}


class Text(NamedTuple):
    """A model, a text that is taken in piece by piece, and where the text begins that is generated."""

    settings: dict[str, Any]
    dtype: str
    cache_dtype: str
    ends: tuple[int, ...]
    ragged: bool
    prompt: int
    seed: int


@st.composite
def texts(draw: Any, dtypes: tuple[str, ...]) -> Text:
    dtype = draw(st.sampled_from(dtypes))
    arithmetic = draw(st.sampled_from(["fast", "reproducible"] if dtype != "float64" else ["fast"]))
    settings = {
        "num_key_value_heads": draw(st.sampled_from([None, 1])),
        "window": draw(st.sampled_from([None, 3, (2, None)])),
        "softcap": draw(st.sampled_from([None, 2.0])),
        "rotary_base": draw(st.sampled_from([None, 100.0])),
        "arithmetic": arithmetic,
    }
    flags = ("tied", "query_key_norm", "attention_bias", "post_norm", "gated")
    settings |= {name: draw(st.booleans()) for name in flags}
    cuts = draw(st.lists(st.integers(1, LENGTH - 1), max_size=3, unique=True).map(sorted))
    prompt = draw(st.integers(1, LENGTH - 1))
    cache_dtype = draw(st.sampled_from(WIDER[dtype]))
    return Text(settings, dtype, cache_dtype, (*cuts, LENGTH), draw(st.booleans()), prompt, draw(st.integers(0, 99)))


def check(case: Text, backend: Any) -> None:
    rng, xp, get = np.random.default_rng(case.seed), backend.namespace, backend.to_numpy
    model = models.Decoder(V, C, 2, 7, 2, **case.settings)
    start = model.init(case.seed, xp=np)
    named = {name: 3 * each if each.ndim == 2 else each for name, each in layers.named_arrays(start).items()}
    p = backend.from_numpy(layers.tree_from_names(start, named), dtype=case.dtype)
    ids = rng.integers(0, V, (2, LENGTH)).astype(np.int32)
    whole = get(model(p, backend.from_numpy(ids))).astype(np.float64)

    def compare(found: Any, expected: Any) -> None:
        exact = case.settings["arithmetic"] == "reproducible"
        tolerance = 0 if exact else 2 * EPSILON[case.dtype] * np.abs(expected).max()
        np.testing.assert_allclose(np.asarray(found, np.float64), expected, rtol=0, atol=tolerance)

    kind = case.cache_dtype if case.cache_dtype != case.dtype else p.token.dtype  # NumPy has no bfloat16 by its name
    cache = model.empty_cache((2,), LENGTH + 1, ragged=case.ragged, dtype=kind, xp=xp)
    for first, last in itertools.pairwise((0, *case.ends)):
        logits, cache = model(p, backend.from_numpy(ids[:, first:last]), cache=cache)
        compare(get(logits), whole[:, first:last])
    steps: list[Any] = []
    found = models.generate(
        model,
        p,
        backend.from_numpy(ids[:, : case.prompt]),
        max_new_tokens=LENGTH - case.prompt,
        cache_dtype=kind,
        on_step=lambda _, logits: steps.append(get(logits)),
    )
    text = np.concatenate([ids[:, : case.prompt], get(found.token_ids)], axis=1)
    whole = get(model(p, backend.from_numpy(text))).astype(np.float64)
    compare(np.stack(steps, axis=1), whole[:, case.prompt - 1 : -1])


@pytest.mark.cases(12)
def test_a_text_in_pieces_and_one_that_is_generated_have_the_logits_of_one_forward_pass(fuzz, backend):
    fuzz(lambda case: check(case, backend), texts(dtypes_of(backend)))
