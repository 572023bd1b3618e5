"""Measure the page of a long sequence: `python docs/view_frames.py` prints its size, time to open, and frames a second.

It makes a view of 32,768 queries and keys, opens the file in Chromium without network, and pans and zooms by the mouse.
"""

import shutil
import tempfile
import time
from pathlib import Path

import numpy as np
from playwright.sync_api import sync_playwright

from attention_view import Computed, view

LENGTH, MOVES = 32768, 60


def frames(page, act):
    """Drawn frames a second while something is done many times."""
    before, start = page.evaluate("matrix.drawn"), time.perf_counter()
    for step in range(MOVES):
        act(step)
    return (page.evaluate("matrix.drawn") - before) / (time.perf_counter() - start)


def main():
    query, key = np.random.default_rng(0).normal(size=(2, 1, LENGTH, 16)).astype("float32")
    start = time.perf_counter()
    made = view(Computed(query, key, is_causal=True), title=f"{LENGTH:,} tokens")
    print(f"made in {time.perf_counter() - start:.0f} s", flush=True)
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as running:
        path = Path(folder) / "view.html"
        made.save(path)
        print(f"{path.stat().st_size / 1e6:.1f} MB")
        browser = running.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_context(offline=True, viewport={"width": 1300, "height": 900}).new_page()
        start = time.perf_counter()
        page.goto(path.as_uri())
        page.locator("body[data-ready]").wait_for()
        print(f"opened in {time.perf_counter() - start:.2f} s")
        box = page.locator("#map").bounding_box()
        x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
        page.mouse.move(x, y)
        zoomed = frames(page, lambda step: page.mouse.wheel(0, -40 if step < MOVES // 2 else 30))
        page.mouse.down()
        panned = frames(page, lambda step: page.mouse.move(x + 100 * np.sin(step / 5), y + 100 * np.cos(step / 5)))
        page.mouse.up()
        while not page.evaluate("isClose()"):
            page.mouse.wheel(0, -100)
        page.mouse.down()
        closely = frames(page, lambda step: page.mouse.move(x + 100 * np.sin(step / 5), y + 100 * np.cos(step / 5)))
        page.mouse.up()
        print(f"{zoomed:.0f} frames a second zoomed, {panned:.0f} panned, {closely:.0f} panned over single weights")
        browser.close()


if __name__ == "__main__":
    main()
