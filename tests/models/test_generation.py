"""Drawing tokens, and continuing prompts token by token."""

import functools
import importlib

import numpy as np
import pytest

import attention_models as models

V = 50
MODEL = models.Decoder(V, 8, 2, 16, 2, arithmetic="reproducible")


@pytest.fixture
def logits():
    return np.random.default_rng(0).standard_normal((4, 1000)).astype(np.float32) * 3


def test_a_seed_draws_the_same_tokens_everywhere(logits, put, get):
    found = [get(models.sample_tokens(put(logits), seed=9, step=step, top_p=0.95)).tolist() for step in range(3)]
    assert found == [[232, 648, 208, 333], [219, 934, 163, 22], [779, 764, 777, 14]]
    assert get(models.sample_tokens(put(logits[0]), seed=9, top_p=0.95)).tolist() == 232
    wide = put(logits[:, None, :])
    np.testing.assert_array_equal(get(models.sample_tokens(wide, seed=9, top_p=0.95))[:, 0], found[0])


@pytest.mark.needs("untraced loops")
@pytest.mark.parametrize(
    "options", [{}, {"temperature": 0.7}, {"top_k": 3}, {"top_p": 0.8}, {"top_k": 5, "top_p": 0.7}]
)
def test_tokens_are_drawn_as_often_as_is_likely(options, put, get):
    count = 4000
    row = np.asarray([0.0, 1.5, -2.0, 1.0, 0.5, -0.5, 2.0], np.float32)
    p = np.exp(row.astype(np.float64) / options.get("temperature", 1.0))
    order = np.argsort(-p)
    p[order[options.get("top_k", len(p)) :]] = 0
    p /= p.sum()
    before = np.cumsum(p[order]) - p[order]
    p[order[before >= options.get("top_p", 1.0)]] = 0
    p /= p.sum()
    tokens = get(models.sample_tokens(put(np.tile(row, (count, 1))), seed=3, **options))
    share = np.bincount(tokens, minlength=len(p)) / count
    assert (share[p == 0] == 0).all()
    assert np.abs(share - p).max() < 4 * np.sqrt(0.25 / count)


def test_the_first_of_the_greatest_logits_is_chosen(put, get):
    row = np.asarray([[1.0, 3.0, 3.0, 2.0], [-np.inf, -1e30, -np.inf, -1e30]], np.float32)
    np.testing.assert_array_equal(get(models.sample_tokens(put(row), temperature=0.0)), [1, 1])
    np.testing.assert_array_equal(get(models.sample_tokens(put(row), top_k=1, temperature=1e-3))[1:], [1])


INFINITE, NAN = np.float32(np.inf), np.float32(np.nan)


@pytest.mark.parametrize("options", [{"temperature": 0.0}, {}, {"temperature": 5e-324}, {"top_k": 1}, {"top_p": 0.5}])
def test_infinite_logits_are_the_greatest_at_any_temperature(options, put, get):
    rows = np.asarray([[1.0, INFINITE, 3.0, -INFINITE], [INFINITE, 0.0, INFINITE, INFINITE]] * 60, np.float32)
    tokens = get(models.sample_tokens(put(rows), seed=3, **options))
    assert set(tokens[::2].tolist()) == {1}
    assert set(tokens[1::2].tolist()) == ({0} if options.get("temperature") == 0 else {0, 2, 3})


@pytest.mark.parametrize("row", [[1.0, NAN, INFINITE], [NAN] * 3, [-INFINITE] * 3])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_without_a_greatest_are_told_where_they_can_be_read(row, temperature, backend, put, get):
    rows = put(np.asarray([[0.0, 1.0, -INFINITE], row], np.float32))

    def choose(rows):
        return models.sample_tokens(rows, temperature=temperature)

    with pytest.raises(ValueError):
        choose(rows)
    if len(backend.modes) > 1 and backend.loops.traced:
        assert get(backend.compile(choose, mode=backend.modes[1])(rows)).tolist()[1] == -1


@pytest.mark.parametrize(
    "compiled", [False, pytest.param(True, marks=pytest.mark.needs(lambda backend: backend.loops.traced))]
)
def test_a_model_of_numbers_that_are_none_has_no_text(compiled, backend, put):
    p = MODEL.init(0, xp=np)
    options = {"mode": backend.modes[1], "compiled_loop": True} if compiled else {}
    with pytest.raises(ValueError):
        models.generate(
            MODEL, put(p._replace(norm=p.norm * NAN)), put(np.asarray([[3, 14]])), max_new_tokens=3, **options
        )


@pytest.mark.needs("float16")
def test_a_cache_is_of_the_dtype_that_is_asked_for(put, get):
    p, prompts, found = put(MODEL.init(0, xp=np)), put(np.asarray([[3, 14, 15]])), {}
    for dtype in (None, "float32", "float16"):
        logits = []
        options = {"max_new_tokens": 2, "cache_dtype": dtype, "on_step": lambda _, y, kept=logits: kept.append(get(y))}
        models.generate(MODEL, p, prompts, **options)
        found[dtype] = np.stack(logits)
    np.testing.assert_array_equal(found["float32"], found[None])
    assert (found["float16"] != found[None]).any()
    np.testing.assert_allclose(found["float16"], found[None], rtol=0, atol=1e-2)
    for dtype, kind in (("int8", ValueError), (int, TypeError)):
        with pytest.raises(kind):
            models.generate(MODEL, p, prompts, max_new_tokens=2, cache_dtype=dtype)


def test_generated_tokens_are_those_of_the_whole_text_on_either_side_of_padding(put, get):
    p = put(MODEL.init(0, xp=np))
    right, left = np.asarray([[3, 14, 15, 9], [26, 5, 0, 0]]), np.asarray([[3, 14, 15, 9], [0, 0, 26, 5]])
    lengths = put(np.asarray([4, 2]))
    seen = []
    found = models.generate(
        MODEL, p, put(right), max_new_tokens=3, prompt_lengths=lengths, on_step=lambda *step: seen.append(step)
    )
    np.testing.assert_array_equal(get(found.num_new), [3, 3])
    assert [get(tokens).tolist() for tokens, _ in seen] == get(found.token_ids).T.tolist()
    text = np.concatenate([right[1, :2], get(found.token_ids)[1, :2]])
    expected = get(MODEL(p, put(text)))
    np.testing.assert_array_equal(get(seen[2][1])[1], expected[-1])  # the bits of a text without a batch or a cache
    assert get(found.token_ids)[1, 2] == expected[-1].argmax()
    again = models.generate(MODEL, p, put(left), max_new_tokens=3, prompt_lengths=lengths, padding="left")
    np.testing.assert_array_equal(get(again.token_ids), get(found.token_ids))


def test_no_prompts_have_no_texts(put, get):
    prompts, lengths = put(np.zeros((0, 4), dtype="int32")), put(np.zeros(0, dtype="int32"))
    found = models.generate(MODEL, put(MODEL.init(0, xp=np)), prompts, max_new_tokens=2, prompt_lengths=lengths)
    assert [get(array).shape for array in found] == [(0, 2), (0,)]


def test_a_stop_token_ends_its_text_alone(put, get):
    p, prompts = put(MODEL.init(0, xp=np)), put(np.asarray([[3, 14, 15, 9], [26, 5, 3, 3]]))
    free = get(models.generate(MODEL, p, prompts, max_new_tokens=3).token_ids)
    stop = int(free[0, 1])
    assert stop not in free[1, :2]
    found = models.generate(MODEL, p, prompts, max_new_tokens=3, stop_ids=(stop,))
    np.testing.assert_array_equal(get(found.token_ids)[0], [free[0, 0], stop, stop])
    np.testing.assert_array_equal(get(found.token_ids)[1], free[1])
    assert get(found.num_new).tolist()[0] == 2
    alike = put(np.asarray([[3, 14, 15, 9]] * 2))
    short = models.generate(MODEL, p, alike, max_new_tokens=3, stop_ids=(stop,))
    assert get(short.token_ids).shape == (2, 2)


@pytest.mark.needs("compilation")
def test_compiled_steps_and_loops_choose_the_tokens_of_eager_ones_and_are_traced_once(backend, put, get, monkeypatch):
    model = models.Decoder(V, 8, 2, 16, 1)
    p, prompts = put(model.init(0, xp=np)), put(np.asarray([[3, 14, 15, 9], [26, 5, 0, 0]]))
    options = {"max_new_tokens": 4, "prompt_lengths": put(np.asarray([4, 2]))}
    options |= {"temperature": 0.9} if backend.loops.traced else {}
    compiled = {"mode": backend.modes[1], "compiled_loop": backend.loops.traced}
    free = models.generate(model, p, prompts, seed=7, **options)
    stop = int(get(free.token_ids)[0, 1])
    traces = traced(monkeypatch, backend)
    for seed, stops in ((7, [stop]), (8, [stop]), (2**40, [stop])):
        expected = models.generate(model, p, prompts, seed=seed, stop_ids=stops, **options)
        before = len(traces())
        found = models.generate(model, p, prompts, seed=seed, stop_ids=stops, **options, **compiled)
        assert len(traces()) - before == (2 if seed == 7 else 0)  # for prompts and for one token
        np.testing.assert_array_equal(get(found.token_ids), get(expected.token_ids))
        np.testing.assert_array_equal(get(found.num_new), get(expected.num_new))
    with pytest.raises(ValueError):
        models.generate(model, p, prompts, max_new_tokens=1, **compiled | {"compiled_loop": True}, on_step=print)


def traced(monkeypatch, backend):
    """What returns the programs so far, one item for each."""
    if backend.name == "torch":
        torch = importlib.import_module("torch")
        monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))  # traced, no more
        counters = importlib.import_module("torch._dynamo.utils").counters
        return lambda: range(counters["stats"]["unique_graphs"])
    module, calls = importlib.import_module("attention_models._generation"), []
    choose = module.sample_tokens

    def counted(logits, **options):
        if not backend.is_concrete(logits):
            calls.append(1)
        return choose(logits, **options)

    monkeypatch.setattr(module, "sample_tokens", counted)
    return lambda: calls
