"""Make the pictures of docs/guides/looking.md: `python docs/plot_views.py MINILM_FOLDER SMOLLM2.gguf`, by Chromium."""

import shutil
import sys
import tempfile
from pathlib import Path

import numpy as np
from playwright.sync_api import sync_playwright

from attention_conformance.own.model import load_model, token_vectors
from attention_core.masks import Causal, SlidingWindow
from attention_core.weights import record_attention
from attention_models.tokenizers import open_text_model
from attention_view import view, view_mask

IMAGES = Path(__file__).parent / "images"
SENTENCE = "The animal did not cross the street because it was too tired."


def encoder(folder):
    """The sentence through a real encoder."""
    model = load_model(Path(folder), [SENTENCE])
    with record_attention() as records:
        token_vectors(model.definitions, model.parameters, model.token_ids, model.is_token)
    tokenizer = model.tokenizer
    tokens = [tokenizer.id_to_token(int(each)) for each in model.token_ids[0]]
    return view(records, tokens=tokens, title="all-MiniLM-L6-v2"), tokens


def decoder(file):
    """The sentence through a real language model."""
    tokenizer, definition, read_weights, _ = open_text_model(Path(file))
    ids = tokenizer.encode(SENTENCE).ids
    tokens = [tokenizer.decode([each]).strip() for each in ids]
    with record_attention() as records:
        definition(read_weights(), np.asarray([ids], np.int32))
    return view(records, tokens=tokens, title="SmolLM2-135M-Instruct"), tokens


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


def point_at(made, tokens, query, key):
    """A function that shows the head in which a query gives a key most, and points at the query."""
    row, column = tokens.index(query), tokens.index(key)
    best = max(made.maps, key=lambda each: each.levels[0].codes[row, column])
    print(f"{made.title}: {query!r} looks at {key!r} most in layer {best.layer}, head {best.head}")

    def act(page):
        page.locator("#layer").select_option(str(best.layer))
        page.locator("#head").select_option(str(best.head))
        page.locator(f'#lines g[data-side="0"][data-index="{row}"]').hover()

    return act


def main(folder, file):
    with sync_playwright() as running:
        browser = running.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1100, "height": 1070})
        for (made, tokens), name in ((encoder(folder), "view-text.png"), (decoder(file), "view-decoder.png")):
            shoot(page, made, name, point_at(made, tokens, "it", "animal"))
        page.set_viewport_size({"width": 800, "height": 860})
        mask = Causal() & SlidingWindow(left=20)
        shoot(page, view_mask(mask, 96, 96, other=Causal(), block=(16, 16), title="Causal and window"), "view-mask.png")
        browser.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
