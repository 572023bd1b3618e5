"""Open every page of the built documentation in Chromium, and fail on what a reader could not use.

``python tools/check_site.py site/html [SCREENSHOTS]`` looks at 1300 pixels, light, and at 400, dark, for
serious violations of accessibility (axe-core), requests to the network, and pages that scroll sideways. Some answers
have to be at most three links of texts away from the landing page, each reached by keyboard.
"""

import shutil
import sys
from pathlib import Path

from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import sync_playwright

SERIOUS = ("serious", "critical")
SHOWN = ("index.html", "explanation/contract.html", "guides/models.html", "guides/troubleshooting.html")
ANSWERS = {  # a question, and the words of its answer
    "how to mask padding from a tokenizer": "mask_from_integers(attention_mask)",
    "why the output has NaN in PyTorch and 0 here": "PyTorch gives NaN, and this gives 0",
    "how to check a kernel": "attention-core check kernel.py:attention",
    "what reproducible arithmetic costs": "What it costs",
}
CLICKS = 3
LOOKS = ((1300, "light"), (400, "dark"))


def violations_of(page, axe):
    """Rules of axe-core that a page breaks seriously, with the first place of each."""
    found = axe.run(page).response["violations"]
    return [
        f"{each['id']} ({len(each['nodes'])}): {each['nodes'][0]['html'][:120]}"
        for each in found
        if each["impact"] in SERIOUS
    ]


def problems_of(page, file, axe, requests):
    """What is wrong with one page, in words."""
    requests.clear()
    page.goto(file.as_uri())
    page.wait_for_load_state("load")
    problems = violations_of(page, axe)
    problems += [f"asks the network for {url}" for url in requests if not url.startswith(("file:", "data:", "blob:"))]
    if page.evaluate("document.documentElement.scrollWidth > window.innerWidth + 1"):
        problems.append("scrolls sideways")
    return problems


def links_of(page):
    """The pages that the text of a page links to, as far as its links take the focus of a keyboard."""
    return page.evaluate(
        """[...document.querySelectorAll("[role=main] a[href]")].filter(link => {
            link.focus();
            return document.activeElement === link && link.getClientRects().length;
        }).map(link => link.href.split("#")[0])"""
    )


def unanswered(page, folder):
    """Questions whose answer is more than three links away from the landing page; the others are printed."""
    here, left = {(folder / "index.html").as_uri(): ("index.html",)}, dict(ANSWERS)
    seen = set()
    for clicks in range(CLICKS + 1):
        following = {}
        for url, path in here.items():
            page.goto(url)
            text = page.locator("[role=main]").inner_text()
            for question in [each for each, words in left.items() if words in text]:
                print(f"{question}: {clicks} clicks, {' > '.join(path)}")
                del left[question]
            for link in links_of(page) if clicks < CLICKS and left else ():
                if link.startswith(folder.as_uri()) and link.endswith(".html"):
                    following.setdefault(link, (*path, link.removeprefix(f"{folder.as_uri()}/")))
        seen |= set(here)
        here = {url: path for url, path in following.items() if url not in seen}
    return list(left)


def main(folder, screenshots=None):
    """Print problems by page, and the total size; return how many pages have any."""
    folder = Path(folder).resolve()
    pages = [each for each in sorted(folder.rglob("*.html")) if "_modules" not in each.parts]
    if not pages:
        sys.exit(f"expected HTML pages below {folder}; got none")
    bad, axe, requests = set(), Axe(), []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium") or shutil.which("google-chrome"))
        for width, scheme in LOOKS:
            page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
            page.on("request", lambda request: requests.append(request.url))
            for file in pages:
                name = str(file.relative_to(folder))
                for problem in problems_of(page, file, axe, requests):
                    print(f"{name}, {width} pixels, {scheme}: {problem}")
                    bad.add(name)
                if screenshots and name in SHOWN:
                    picture = Path(screenshots) / f"{name.replace('/', '-')[:-5]}-{width}-{scheme}.png"
                    page.screenshot(path=picture, full_page=True)
            for question in unanswered(page, folder):
                print(f"{question}, {width} pixels: more than {CLICKS} clicks away")
                bad.add("index.html")
            page.close()
        browser.close()
    size = sum(each.stat().st_size for each in folder.rglob("*") if each.is_file())
    print(f"{len(pages)} pages, {size / 2**20:.1f} MiB, {len(bad)} with problems")
    return len(bad)


if __name__ == "__main__":
    sys.exit(bool(main(*sys.argv[1:])))
