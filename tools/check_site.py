"""Open every page of the built documentation in Chromium, and fail on what a reader could not use.

``python tools/check_site.py site/html [SCREENSHOTS]`` looks at 1300 pixels, light, and at 400, dark, for
serious violations of accessibility (axe-core), requests to the network, and pages that scroll sideways.
"""

import shutil
import sys
from pathlib import Path

from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import sync_playwright

SERIOUS = ("serious", "critical")
SHOWN = ("index.html", "explanation/contract.html", "guides/models.html", "guides/troubleshooting.html")
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
            page.close()
        browser.close()
    size = sum(each.stat().st_size for each in folder.rglob("*") if each.is_file())
    print(f"{len(pages)} pages, {size / 2**20:.1f} MiB, {len(bad)} with problems")
    return len(bad)


if __name__ == "__main__":
    sys.exit(bool(main(*sys.argv[1:])))
