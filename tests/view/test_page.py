"""The page of the viewer in a browser: opened from a file, without network, by pointer and by keyboard."""

import shutil

import numpy as np
import pytest

from attention_core.masks import Causal, SlidingWindow
from attention_view import View, view, view_mask
from attention_view.codes import encode, levels_of
from attention_view.model import Map, Part, Show


@pytest.fixture(scope="module")
def opened(tmp_path_factory):
    """A function that saves a view, opens the file, and gives the page; no page may ask the network or fail."""
    playwright = pytest.importorskip("playwright.sync_api")
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("needs chromium")
    folder = tmp_path_factory.mktemp("pages")
    asked, errors = [], []
    with playwright.sync_playwright() as running:
        browser = running.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        context = browser.new_context(offline=True, color_scheme="dark", viewport={"width": 1300, "height": 900})

        def open_(made):
            path = folder / f"{len(list(folder.iterdir()))}.html"
            made.save(path)
            page = context.new_page()
            page.on("request", lambda request: asked.append(request.url))
            page.on("pageerror", lambda error: errors.append(str(error)))
            page.goto(path.as_uri())
            page.locator("body[data-ready]").wait_for()
            drawn(page)
            return page

        yield open_
        assert [each for each in asked if not each.startswith(("file:", "data:", "blob:"))] == []
        assert errors == []
        browser.close()


def readout(page):
    return page.locator("#readout").text_content()


def drawn(page):
    """Wait for the frame after the next one, in which all is drawn that was asked for."""
    page.evaluate("() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")


def test_a_token_shows_where_it_looks_and_who_looks_at_it(opened):
    weights = np.zeros((2, 3, 5, 5))
    for layer in range(2):
        for head in range(3):
            weights[layer, head, np.arange(5), (np.arange(5) + layer + head) % 5] = 0.75
            weights[layer, head, :, 0] += 0.25
    weights[:, :, 3] = 0
    page = opened(view(list(weights), tokens=["[CLS]", "the", "cat", "sat", "it"]))
    assert page.locator("#grid button").count() == 6
    query = page.locator('#lines g[data-side="0"][data-index="2"]')
    query.hover()
    assert "query 2 “cat” → key 2 “cat”: weight 0.750" in readout(page)
    assert page.locator("#lines path").count() == 2
    page.get_by_role("button", name="layer 1, head 2").click()
    assert "layer 1, head 2" in readout(page)
    page.locator('#lines g[data-side="1"][data-index="0"]').hover()
    assert page.locator("#lines path").count() == 4  # all but the row that is masked
    page.locator('#lines g[data-side="0"][data-index="2"]').focus()
    page.keyboard.press("ArrowDown")
    assert "“sat”" in readout(page)
    assert "this row is fully masked" in readout(page)
    assert "empty" in page.locator('#lines g[data-side="0"][data-index="3"]').get_attribute("class")
    assert "dimmed" in page.locator('#lines g[data-side="0"][data-index="0"]').get_attribute("class")
    page.keyboard.press("[")
    page.keyboard.press("{")
    assert readout(page).startswith("layer 0, head 1")
    page.mouse.move(1, 1)  # the pointer chooses, too
    page.locator('#lines g[data-side="0"][data-index="3"]').focus()
    page.locator("#head").select_option("0")
    assert readout(page).startswith("layer 0, head 0")
    page.locator("#map").focus()
    page.keyboard.press("ArrowUp")
    assert "query 2 “cat”" in readout(page)
    page.wait_for_function("""document.querySelector("#map").ariaLabel.includes("query 2 “cat”")""")
    dark = page.evaluate("getComputedStyle(document.body).backgroundColor")
    page.emulate_media(color_scheme="light")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != dark


def test_weights_that_are_no_numbers_are_drawn_and_named(opened):
    page = opened(view(np.array([[np.nan, 0.25, np.inf], [1.0, 0.0, 0.0], [0.0, 0.0, 1.0]]), tokens=list("abc")))
    page.locator('#lines g[data-side="0"][data-index="1"]').hover()
    page.locator('#lines g[data-side="0"][data-index="0"]').hover()
    assert "query 0 “a” → key 0 “a”: weight NaN" in readout(page)
    drawn = page.locator("#lines path").evaluate_all("each => each.map(path => getComputedStyle(path).stroke)")
    assert [stroke == "rgb(255, 0, 255)" for stroke in drawn] == [True, False, True]
    labels = page.locator('#lines g[data-side="1"]').evaluate_all("each => each.map(token => token.ariaLabel)")
    assert labels == ["key 0 “a”, NaN", "key 1 “b”, 0.250", "key 2 “c”, NaN"]


def test_the_query_of_a_picture_is_clicked_and_moved_by_arrow_keys(opened):
    weights = np.zeros((2, 16, 4))
    weights[0, np.arange(16), np.arange(16) % 4] = 1
    weights[1] = 0.25
    page = opened(view(weights, image=np.full((8, 8, 3), 0.5)))
    query = page.locator("#query")
    box = query.bounding_box()
    query.click(position={"x": box["width"] * 0.3, "y": box["height"] * 0.6})
    assert "query at row 2, column 1" in query.get_attribute("aria-label")
    query.focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowUp")
    assert "query at row 1, column 2" in query.get_attribute("aria-label")
    label = page.locator("#pictures figure.head canvas").first.get_attribute("aria-label")
    assert label == ("layer 0, head 0, query at row 1, column 2: largest 1.00 at row 1, column 0 of 2 × 2 keys")
    assert query.get_attribute("aria-label") == label  # the chosen head, in the larger half of the page
    assert page.locator("#picture").bounding_box()["width"] > 1.5 * page.locator("#matrix").bounding_box()["width"]
    pixel = "(canvas, at) => [...canvas.getContext('2d').getImageData(...at, 1, 1).data]"
    shown = page.locator("#pictures figure.head canvas").first
    places = [[x, 450] for x in (60, 250, 262, 450)]  # of the largest key and, from 256 on, of a key of weight 0
    blocks = [sum(shown.evaluate(pixel, at)) for at in places]
    assert blocks[0] == blocks[1] > blocks[2] == blocks[3]
    page.get_by_label("smooth").check()
    smooth = [sum(shown.evaluate(pixel, at)) for at in places]
    assert blocks[0] == smooth[0] > smooth[1] > smooth[2] > smooth[3] == blocks[3]


def test_a_mask_names_pairs_blocks_and_differences(opened):
    page = opened(view_mask(Causal(), 40, 40, other=SlidingWindow(left=3, right=0), block=(8, 8)))
    page.locator("#map").focus()
    for _ in range(6):
        page.keyboard.press("ArrowDown")
    assert "query 6 → key 0: difference only the first allows" in readout(page)
    page.keyboard.press("s")
    assert "first allowed" in readout(page)
    assert "10 are skipped" in page.locator("#notes").text_content()


def test_a_map_of_32768_tokens_is_panned_and_zoomed(opened, rng):
    codes = encode(rng.uniform(size=(2048, 2048)) ** 8, 8)
    levels = levels_of(codes, (16, 16))
    made = View("long", [Show("weights", "weights", 8, 6)], [Map(0, 0, 0, Part((32768, 32768)), levels)])
    assert len(made.html()) < 20e6
    page = opened(made)
    canvas = page.locator("#map")
    whole = canvas.get_attribute("data-level")
    box = canvas.bounding_box()
    page.mouse.move(box["x"] + 200, box["y"] + 200)
    page.mouse.wheel(0, -1200)
    page.mouse.down()
    page.mouse.move(box["x"] + 120, box["y"] + 150, steps=4)
    page.mouse.up()
    assert whole == "512x512"
    page.locator("#map[data-level='2048x2048']").wait_for()
    assert "largest of 16 × 16" in readout(page)
    canvas.press("0")
    page.locator("#map[data-level='512x512']").wait_for()


def test_everything_is_reached_by_keyboard_and_fits_on_a_telephone(opened, rng):
    tokens = ["[CLS]", "W" * 500, "<b>bold</b>\n", "🜂" * 40]
    made = view(rng.dirichlet(np.ones(4), size=(2, 4)), tokens=tokens, image=rng.uniform(size=(6, 6)))
    page = opened(made)
    # Asked for in the same task, before any ResizeObserver is called.
    assert page.evaluate("(document.body.style.width = '400px', document.body.scrollWidth)") == 400
    page.evaluate("document.body.style.width = ''")
    page.set_viewport_size({"width": 400, "height": 800})
    assert page.evaluate("document.documentElement.scrollWidth") == 400
    page.evaluate("document.activeElement.blur()")
    reached = []
    for _ in range(12):
        page.keyboard.press("Tab")
        reached.append(
            page.evaluate("(each => each.id || each.dataset.side || each.ariaLabel)(document.activeElement)")
        )
    expected = ["head", "scale", "reset", "layer 0, head 0", "layer 0, head 1", "query", "0", "1", "map"]
    assert [each for each in reached if each in expected][:9] == expected
    page.locator('#lines g[data-side="0"][data-index="0"]').focus()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowRight")
    assert f"key at row 0, column 1 “{'W' * 59}…”" in readout(page)
    widths = page.locator("#lines g.token text").evaluate_all("each => each.map(text => text.getComputedTextLength())")
    assert max(widths) <= 126


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_has_no_serious_accessibility_error(opened, scheme, rng):
    axe = pytest.importorskip("axe_playwright_python.sync_playwright")
    made = view(rng.dirichlet(np.ones(9), size=(2, 9)), tokens=list("[abcdefg]"), image=rng.uniform(size=(6, 6)))
    page = opened(made)
    page.emulate_media(color_scheme=scheme)
    found = axe.Axe().run(page).response
    assert found["passes"]
    assert [each["id"] for each in found["violations"] if each["impact"] in ("serious", "critical")] == []
