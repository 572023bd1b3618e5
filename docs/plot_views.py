"""Make the pictures of docs/guides/looking.md: `python docs/plot_views.py FOLDER_OF_MINILM`, with playwright."""

import shutil
import sys
import tempfile
from pathlib import Path

import numpy as np
from playwright.sync_api import sync_playwright

from attention_conformance.run.model import load_model, token_vectors
from attention_core import record_attention
from attention_core.masks import Causal, SlidingWindow
from attention_view import view, view_mask

IMAGES = Path(__file__).parent / "images"
SENTENCE = "The animal did not cross the street because it was too tired."


def text(folder):
    """A sentence through a real encoder."""
    model = load_model(Path(folder), [SENTENCE])
    with record_attention() as records:
        token_vectors(model.bert.config, model.parameters, model.token_ids, model.is_token)
    tokenizer = model.bert.tokenizer
    tokens = [tokenizer.id_to_token(int(each)) for each in model.token_ids[0]]
    return view(records, tokens=tokens, title="all-MiniLM-L6-v2"), tokens


def shoot(page, made, name, act=lambda page: None):
    """Save a view, open it, act, and keep a screenshot."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "view.html"
        made.save(path)
        page.goto(path.as_uri())
        page.locator("body[data-ready]").wait_for()
        act(page)
        page.wait_for_timeout(200)
        page.screenshot(path=IMAGES / name)


def main():
    made, tokens = text(sys.argv[1])
    it = tokens.index("it")
    weights = np.stack([each.levels[0].codes[it].astype(int) for each in made.maps])
    best = made.maps[int(np.argmax(weights[:, tokens.index("animal")]))]
    print(f"'it' looks at 'animal' most in layer {best.layer}, head {best.head}")

    def act(page):
        page.locator("#layer").select_option(str(best.layer))
        page.locator("#head").select_option(str(best.head))
        page.locator(f'#lines g[data-side="0"][data-index="{it}"]').hover()

    with sync_playwright() as running:
        browser = running.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1100, "height": 820})
        shoot(page, made, "view-text.png", act)
        page.set_viewport_size({"width": 800, "height": 860})
        mask = Causal() & SlidingWindow(left=20)
        shoot(page, view_mask(mask, 96, 96, other=Causal(), block=(16, 16), title="Causal and window"), "view-mask.png")
        browser.close()


if __name__ == "__main__":
    main()
