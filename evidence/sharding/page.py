"""Write docs/evidence/sharding-numbers.md from docs/measurements/sharding.json: ``python evidence/sharding/page.py``.

The measurements are what ``processes.py`` and ``rings.py`` print.
"""

import json
from pathlib import Path

from jinja2 import Template

DOCS = Path(__file__).parents[2] / "docs"


def page() -> str:
    """The page of the measurements."""
    text = Path(__file__).with_name("sharding.md.jinja").read_text(encoding="utf-8")
    measured = json.loads((DOCS / "measurements" / "sharding.json").read_text(encoding="utf-8"))
    return str(Template(text, keep_trailing_newline=True, trim_blocks=True).render(measured))


if __name__ == "__main__":
    (DOCS / "evidence" / "sharding-numbers.md").write_text(page(), encoding="utf-8")
