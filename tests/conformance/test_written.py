"""The page about findings, which works without a network."""

import shutil
from dataclasses import replace

import numpy as np
import planted_kernels as planted
import pytest

from attention_conformance import Finding, Subject, check_subject
from attention_conformance.measure.finding import VERDICTS, to_row
from attention_conformance.measure.where import Blocks, Worst
from attention_conformance.written.html import html, write_html

pytestmark = pytest.mark.needs("numpy")

ABOUT = {"target": "kernel.py:attention", "profile": "kernel", "seed": 7, "declared": {"layout": "BHSD"},
         "versions": {"numpy": "2"}, "machine": {"threads": 2}}  # fmt: skip
BAD = "<script>alert(1)</script> & | `x`"


@pytest.fixture(scope="module")
def found():
    subject = Subject(planted.Kernel("future key from 64"))
    options = {"dtypes": ["float32"], "seed": 7, "power": False}
    cases = ["shape-128x128-d64-causal", "scale", "bias"]
    found = check_subject(subject, cases=cases, **options)
    found.append(Finding("masked-nan-value", "float32", 5, BAD, "visibly wrong", detail=BAD))
    return sorted(found, key=lambda each: VERDICTS.index(each.verdict))


def test_the_page_escapes_what_a_subject_says_and_stays_small(found):
    assert "<script>alert" not in html(found, ABOUT)
    errors = tuple(tuple(np.full(32, 1e9)) for _ in range(32))
    heavy = {
        "blocks": Blocks("weights", "query", "key", (8, 8), errors),
        "worst": Worst("weights", (0, 0, 0, 0), 1.0, 0.0),
    }
    many = [replace(found[-1], case=f"masked-nan-value-{i}", **heavy, traceback="line\n" * 12) for i in range(400)]
    assert len(html(many, ABOUT).encode()) < 2e6
    assert to_row(many[0])["blocks"]["errors"][0][0] == 1e9


@pytest.fixture(scope="module")
def page(found, tmp_path_factory):
    """The page opened from a file, with the requests that it makes."""
    playwright = pytest.importorskip("playwright.sync_api")
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("needs chromium")
    path = tmp_path_factory.mktemp("page") / "found.html"
    write_html(path, found, ABOUT)
    with playwright.sync_playwright() as running:
        try:
            browser = running.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        except playwright.Error as error:
            pytest.skip(f"{chromium} does not start: {str(error).splitlines()[0]}")
        opened = browser.new_page(color_scheme="dark")
        opened.requests, opened.errors = [], []
        opened.on("request", lambda request: opened.requests.append(request.url))
        opened.on("pageerror", lambda error: opened.errors.append(str(error)))
        opened.goto(path.as_uri())
        yield opened
        browser.close()


def test_the_page_filters_opens_and_copies_by_keyboard_and_asks_no_network(page):
    def shown():
        return page.locator("tr.row:visible").count()

    assert shown() == 2  # wrong ones, at first
    page.get_by_label("right 1").check()
    assert shown() == 3
    page.keyboard.press("/")
    page.keyboard.type("shape future-key")
    assert (shown(), page.get_by_role("status").text_content()) == (1, "1 of 4 findings")
    page.keyboard.press("Enter")
    page.keyboard.press("Enter")
    button = page.get_by_role("button", name="shape-128x128-d64-causal")
    assert button.get_attribute("aria-expanded") == "true"
    assert page.locator(".worst:visible").count() == 1
    levels = (
        page.locator(".map:visible tbody tr").first.locator("td").evaluate_all("all => all.map(each => each.className)")
    )
    half = len(levels) // 2
    assert set(levels[:half]) == {"l0"}
    assert "l0" not in levels[half:]
    page.get_by_role("button", name="Copy").first.click()
    page.get_by_role("button", name="Copied").wait_for()
    page.keyboard.press("Escape")
    dark = page.evaluate("getComputedStyle(document.body).backgroundColor")
    page.emulate_media(color_scheme="light")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != dark
    assert [each for each in page.requests if not each.startswith(("file:", "data:"))] == []
    assert page.errors == []
