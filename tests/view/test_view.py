"""The viewer: its codes, what it says of masks and weights, its text and its command."""

import base64
import gzip
import json
import re

import numpy as np
import pytest
from command_helpers import invoke, refusal

from attention_core import scaled_dot_product_attention
from attention_core.masks import Causal, KeyLengths, MaskFunction, Segments, SlidingWindow
from attention_core.weights import attention_weights, record_attention
from attention_view import Computed, view, view_mask
from attention_view.codes import decode, encode, levels_of

PIXELS = np.zeros((4, 4))


def opened(page):
    """The header and the codes of a page, as a browser reads them."""
    (text,) = re.findall(r'<script type="text/plain" id="data">([^<]*)</script>', page)
    payload = gzip.decompress(base64.b64decode(text))
    length = int.from_bytes(payload[:4], "little")
    return json.loads(payload[4 : 4 + length]), payload[4 + length :]


def codes_of(page, index, level=0):
    header, codes = opened(page)
    found = header["maps"][index]
    at = found["levels"][level]
    kind = f"<u{header['shows'][found['show']]['bits'] // 8}"
    return np.frombuffer(codes, kind, at["rows"] * at["columns"], at["at"]).reshape(at["rows"], at["columns"])


@pytest.mark.parametrize(("bits", "step"), [(8, 0.06), (16, 5e-4)])
def test_codes_keep_the_order_and_are_0_and_1_and_nan_exactly(bits, step, rng):
    values = np.sort(np.concatenate([[0.0, 1.0], 10 ** rng.uniform(-5.9, 0, size=500)]))
    codes = encode(values, bits)
    assert (np.diff(codes.astype(int)) >= 0).all()
    back = decode(codes, bits)
    assert (back[0], back[-1]) == (0, 1)
    np.testing.assert_allclose(back, values, rtol=step)
    assert np.isnan(decode(encode(np.array([np.nan, np.inf]), bits), bits)).all()
    assert decode(encode(np.array([1e-30]), bits), bits) > 0  # only 0 is 0


def test_levels_halve_to_the_largest_of_each_block(rng):
    codes = rng.integers(0, 255, size=(301, 130), dtype=np.uint8)
    levels = levels_of(codes, (1, 1))
    assert [level.codes.shape for level in levels] == [(301, 130), (151, 65), (76, 33), (19, 33)]
    assert levels[-1].block == (16, 4)  # an axis of at most 64 cells is left as it is
    for level in levels:
        starts = [np.arange(0, size, each) for size, each in zip(codes.shape, level.block, strict=True)]
        expected = np.maximum.reduceat(np.maximum.reduceat(codes, starts[0]), starts[1], axis=1)
        np.testing.assert_array_equal(level.codes, expected)


@pytest.mark.parametrize("at_once", [2, 11])  # queries: less than a block, and more
@pytest.mark.parametrize("other", [False, True])
def test_a_view_of_blocks_keeps_the_largest_of_each(other, at_once, rng, monkeypatch):
    monkeypatch.setattr("attention_view.weights.MOST_ROWS", 20)
    monkeypatch.setattr("attention_view.weights.MOST_CODES", 2000)
    monkeypatch.setattr("attention_view.sources.SCORES_AT_ONCE", 47 * at_once)
    monkeypatch.setattr("attention_view.codes.SMALLEST_LEVEL", 8)
    query, key = rng.normal(size=(2, 1, 47, 4)).astype("float32")
    options = {"mask": Causal() & SlidingWindow(left=9) & MaskFunction(lambda b, h, q, k: q % 6 != 5)}
    options |= {"softcap": 2.0, "bias": rng.normal(size=(47, 47)).astype("float32")}
    weights = attention_weights(query, key, **options)[0].astype(float)
    wrong = weights + np.eye(47)[20] / 8
    compared = {"other": wrong[None]} if other else {}
    made = view(Computed(query, key, **options), **compared)
    expected = abs(wrong - weights) if other else weights
    assert [level.block for level in made.maps[-1].levels] == [(3, 3), (6, 6)]
    for level, size in enumerate((3, 6)):  # the last of which are cut off
        starts = np.arange(0, 47, size)
        largest = np.maximum.reduceat(np.maximum.reduceat(expected, starts), starts, axis=1)
        codes = codes_of(made.html(), -1, level).astype(int)
        assert abs(codes - encode(largest, 8)).max() <= 1  # float32 against float64
        if at_once > 3 or not other:  # one query alone may round in another way than several
            np.testing.assert_array_equal(codes == 0, largest == 0)
    assert "the largest of at most 3 × 3 weights" in made.notes[0]


def test_the_page_holds_the_weights_of_each_layer_and_head_and_no_address(rng):
    query, key = rng.normal(size=(2, 2, 3, 7, 4)).astype("float32")
    mask = np.ones((7, 7), bool)
    mask[5] = False
    with record_attention() as records:
        for scale in (1.0, 3.0):
            scaled_dot_product_attention(query, key, key, mask=mask, scale=scale)
    tokens = ["[CLS]", "the", "</script><b>", "cat", "“it”", "sat", "[PAD]"]
    made = view(records, tokens=tokens, padding=np.arange(7) > 5, sample=1, heads=[0, 2], title="<i>&")
    page = made.html()
    header, _ = opened(page)
    (part,) = header["parts"]
    assert part["tokens"] == [tokens, tokens]
    assert part["dimmed"] == [[0, 6], [0, 6]]
    assert "<b>" not in page
    assert "<title>&lt;i&gt;&amp;</title>" in page
    assert not re.search(r'(?:src|href)="(?!data:)', page)
    assert [(each["layer"], each["head"]) for each in header["maps"]] == [(0, 0), (0, 2), (1, 0), (1, 2)]
    expected = np.asarray(records[1].weights())[1, 2]
    found = decode(codes_of(page, 3), 16)
    np.testing.assert_allclose(found, expected, rtol=5e-4, atol=1e-11)
    assert not found[5].any()
    assert "srcdoc=" in made._repr_html_()


@pytest.mark.parametrize("block", [1, 5])
def test_a_mask_is_drawn_pair_by_pair_with_its_empty_rows_and_blocks(block):
    ids = np.array([0] * 4 + [1] * 9)
    mask = (Causal() & SlidingWindow(left=2) & Segments(ids, ids)) | MaskFunction(
        lambda b, h, q, k: (q == 12) & (k == 0)
    )
    mask = mask & KeyLengths(9)
    allowed = np.broadcast_to(mask.to_array(13, 13, num_heads=1, xp=np), (1, 13, 13))[0]
    made = view_mask(mask, 13, 13, block=(block, block))
    np.testing.assert_array_equal(codes_of(made.html(), 0) == 255, allowed)
    empty = np.flatnonzero(~allowed.any(axis=1))
    assert f"fully masked rows: {len(empty)} ({', '.join(map(str, empty))})" in made.notes[0]
    starts = np.arange(0, 13, block)
    some = np.logical_or.reduceat(np.logical_or.reduceat(allowed, starts), starts, axis=1)
    assert not (some & (made.blocks.codes == 0)).any()
    every = np.logical_and.reduceat(np.logical_and.reduceat(allowed, starts), starts, axis=1)
    assert not (~every & (made.blocks.codes == 2)).any()
    assert "|" not in str(made)


def test_masks_of_long_sequences_say_how_much_of_each_cell_they_allow():
    made = view_mask(Causal(), 5000, 3000)
    codes, block = made.maps[0].levels[0]
    assert block == (5, 5)
    assert codes.shape == (1000, 600)
    assert (codes[2, 1], codes[1, 2]) == (255, 0)
    assert codes[7, 7] == round(255 * 15 / 25)
    assert f"{3000 * 3001 // 2 + 2000 * 3000:,} of 15,000,000 pairs" in made.notes[0]
    assert [level.codes.shape for level in made.maps[0].levels][-1] == (63, 38)
    assert (made.blocks.codes == 0).any()


def test_two_masks_are_compared_pair_by_pair():
    lengths = np.array([2, 3], np.int32)
    made = view_mask(Causal(), 4, 4, other=KeyLengths(lengths), sample=1)
    np.testing.assert_array_equal(
        made.maps[2].levels[0].codes, [[1, 3, 3, 0], [1, 1, 3, 0], [1, 1, 1, 0], [1, 1, 1, 2]]
    )
    assert "The masks differ." in made.notes
    assert "The masks are the same." in view_mask(Causal(), 4, 4, other=np.tri(4, dtype=bool)).notes


def test_the_difference_of_two_attentions_is_largest_where_the_error_sits(rng):
    weights = rng.dirichlet(np.ones(9), size=(2, 8))
    wrong = weights.copy()
    wrong[1, 3, 4] += 1e-3
    wrong[0, 2, 2] = np.nan
    page = view(weights, other=wrong).html()
    np.testing.assert_array_equal(np.argwhere(codes_of(page, 5)), [[3, 4]])
    assert decode(codes_of(page, 5), 16)[3, 4] == pytest.approx(1e-3, rel=1e-3)
    assert np.isnan(decode(codes_of(page, 4), 16)[2, 2])


def test_a_few_queries_of_many_keys_are_kept_one_by_one(rng):
    query, key = (rng.normal(size=(1, length, 4)).astype("float32") for length in (3, 9000))
    made = view(Computed(query, key))
    assert [level.codes.shape for level in made.maps[0].levels[:2]] == [(3, 9000), (3, 2250)]
    np.testing.assert_allclose(decode(made.maps[0].levels[0].codes, 16), attention_weights(query, key)[0], rtol=5e-4)


def test_layers_of_an_encoder_and_a_decoder_are_shown_with_their_own_tokens(rng, tmp_path):
    lengths = [(4, 4), (3, 3), (3, 4), (3, 3), (3, 4)]
    layers = [rng.dirichlet(np.ones(n), size=(2, m)) for m, n in lengths]
    made = view(layers, tokens=["<pad>", "il", "a"], key_tokens=["he", "has", "it", "</s>"])
    header, _ = opened(made.html())
    assert [part["lengths"] for part in header["parts"]] == [[4, 4], [3, 3], [3, 4]]
    assert [header["maps"][2 * layer]["part"] for layer in range(5)] == [0, 1, 2, 1, 2]
    assert [list(map(len, part["tokens"])) for part in header["parts"]] == [[4, 4], [3, 3], [3, 4]]
    assert [part["dimmed"] for part in header["parts"]] == [[[3], [3]], [[0], [0]], [[0], [3]]]
    for index, weights in enumerate(layers):
        np.testing.assert_allclose(decode(codes_of(made.html(), 2 * index), 16), weights[0], rtol=5e-4)
    assert repr(made) == "View('Attention', 10 maps of 4 × 4, 3 × 3, 3 × 4)"


def test_hostile_tokens_are_data_everywhere(tmp_path):
    tokens = ["</script><script>alert(1)</script>", "a\nb\x1b[31m", "\udcff" + "long " * 20000, "<|im_start|>"]
    made = view(np.full((4, 4), 0.25), tokens=tokens, title="<img src=x onerror=alert(1)>\udcff\x1b[2J")
    page = made.html()
    assert "alert(1)</script>" not in page
    assert "<img" not in page
    assert opened(page)[0]["parts"][0]["tokens"][0] == [*tokens[:2], tokens[2].replace("\udcff", "?"), tokens[3]]
    assert made.maps[0].part.dimmed == ([3], [3])
    made.save(tmp_path / "page.html")
    lines = str(made).splitlines()
    assert len(lines) == 6
    assert "\x1b" not in str(made)
    assert [len(line) for line in lines[1:5]] == [17] * 4


def test_text_shows_tokens_and_nan():
    weights = np.array([[1.0, 0.0], [np.nan, 0.5]])
    assert str(view(weights, tokens=["a", "bc"])).splitlines() == [
        "Attention: 2 queries × 2 keys, layer 0, head 0, weights",
        " a █·",
        "bc !▒",
        "░▒▓█ from 0 to 1, · 0, ! NaN",
    ]


def test_the_command_writes_pages_and_prints_text(rng, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    query, key = rng.normal(size=(2, 1, 2, 5, 4)).astype("float32")
    np.savez("call.npz", query=query, key=key)
    np.savez("all.npz", **{f"layer.{i}": np.eye(5)[None] for i in (10, 2)})
    np.savez("query.npz", query=query)
    np.save("one.npy", np.eye(3)[None])
    (tmp_path / "cut.npz").write_bytes((tmp_path / "all.npz").read_bytes()[:200])
    (tmp_path / "empty.npz").write_bytes(b"")
    (tmp_path / "cut.png").write_bytes(b"\x89PNG\r\n\x1a\n\0\0")
    (tmp_path / "words.txt").write_text("a\nb\u2028\nc\nd\ne\n", encoding="utf-8")
    done = invoke("view", "call.npz", "--causal", "--tokens", "words.txt", "--head", 1, "-o", "page.html")
    assert done.exit_code == 0, done.output
    expected = attention_weights(query, key, is_causal=True)[0, 1]
    np.testing.assert_allclose(
        decode(codes_of((tmp_path / "page.html").read_text(encoding="utf-8"), 0), 16), expected, rtol=5e-4
    )
    assert invoke("view", "all.npz").output.splitlines()[1] == "█····"
    assert invoke("view", "one.npy").output.splitlines()[1] == "█··"
    np.save("four.npy", np.eye(4)[None])
    (tmp_path / "four.png").write_bytes(
        base64.b64decode(view(np.eye(1), image=PIXELS).picture.source.partition(",")[2])
    )
    on_picture = invoke("view", "four.npy", "--image", "four.png", "--query", "1,0").output.splitlines()
    assert on_picture[:3] == ["four.npy: query (1, 0), 2 × 2 keys, layer 0, head 0, weights", "··", "█·"]
    for words, message in (
        (("none.npz",), "expected a file of NumPy arrays"),
        (("cut.npz",), "expected a file of NumPy arrays"),
        (("empty.npz",), "expected a file of NumPy arrays"),
        (("query.npz",), "expected both query and key"),
        (("call.npz", "--image", "cut.png"), "expected an image of PNG or JPEG; got cut.png"),
        (("call.npz", "--tokens", "cut.png"), "expected tokens in"),
        (("call.npz", "--query", "1;2"), "expected --query as a number, or as row and column such as 3,5"),
    ):
        assert message in refusal("view", *words)
