"""A page as one file: style, scripts and compressed data within."""

from __future__ import annotations

import base64
import gzip
import html
from functools import cache
from importlib.resources import files

__all__ = ["frame", "page"]

SCRIPTS = ("data.js", "overview.js", "matrix.js", "tokens.js", "picture.js", "main.js")


def page(title: str, payload: bytes) -> str:
    """The text of a page. All but the title is data, in base64, so that nothing of it is ever markup."""
    data = base64.b64encode(gzip.compress(payload, 6, mtime=0)).decode()
    library = f"/*! d3, ISC License\n{_read('d3.LICENSE').strip()}\n*/\n{_read('d3.min.js')}"
    pieces = {
        "title": _escaped(title),
        "css": _read("page.css"),
        "library": library.replace("</script", "<\\/script"),
        "js": "\n".join(map(_read, SCRIPTS)),
        "data": data,
    }
    first, *rest = _read("page.html").split("{{ ")
    told = [first]
    for piece in rest:
        name, _, text = piece.partition(" }}")
        told += [pieces[name], text]
    return "".join(told)


def frame(title: str, text: str) -> str:
    """A page within a notebook."""
    source = html.escape(text)
    return f'<iframe title="{_escaped(title)}" srcdoc="{source}" style="width:100%;height:720px;border:0"></iframe>'


def _escaped(text: str) -> str:
    """A text as markup; what is no character, such as half of a pair, is a question mark."""
    return html.escape(text.encode(errors="replace").decode())


@cache
def _read(name: str) -> str:
    return files("attention_view").joinpath("page", name).read_text(encoding="utf-8")
