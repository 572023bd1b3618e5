"""Texts by templates: pages, and scripts that stand alone."""

from __future__ import annotations

from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup


def rendered(template: str, **values: Any) -> str:
    """The text of a template of the folder ``written``; one of HTML may write its style and its script."""
    loader = PackageLoader("attention_conformance", "written")
    environment = Environment(
        loader=loader, autoescape=template.endswith(".html"), undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True, keep_trailing_newline=template.endswith(".jinja"),
    )  # fmt: skip
    environment.filters["repr"] = repr
    files = {name: Markup(loader.get_source(environment, f"page.{name}")[0]) for name in ("css", "js")}  # our own
    return environment.get_template(template).render(**values, **files)
