"""A page as one file: style, scripts and compressed data within."""

from __future__ import annotations

import base64
import gzip
import html
import json
from collections.abc import Iterator, Sequence
from functools import cache
from importlib.resources import files
from typing import Any

from attention_view.codes import Level
from attention_view.model import ViewData

SCRIPTS = ("data.js", "overview.js", "matrix.js", "tokens.js", "picture.js", "main.js")


def page(view: ViewData) -> str:
    """The text of a page. All but the title is data, in base64, so that nothing of it is ever markup."""
    data = base64.b64encode(gzip.compress(_payload(view), 6, mtime=0)).decode()
    library = f"/*! d3, ISC License\n{_read('d3.LICENSE').strip()}\n*/\n{_read('d3.min.js')}"
    pieces = {
        "title": _escaped(view.title),
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


def _payload(view: ViewData) -> bytes:
    """The length of a header in JSON as four bytes, the header, and the codes of all levels."""
    chunks: list[bytes] = []
    blocks = [*_placed([view.blocks] if view.blocks else [], chunks)]
    parts = {id(each.part): each.part for each in view.maps}
    header = {
        "title": view.title,
        "parts": [part._asdict() | {"least": part.least} for part in parts.values()],
        "shows": [show._asdict() for show in view.shows],
        "maps": [
            {"layer": each.layer, "head": each.head, "show": each.show, "top": view.top(each)}
            | {"part": [*parts].index(id(each.part))}
            | {"levels": [*_placed(each.levels, chunks)]}
            for each in view.maps
        ],
        "query": view.query,
        "picture": view.picture and view.picture._asdict(),
        "blocks": blocks[0] if blocks else None,
        "notes": view.notes,
    }
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode(errors="replace")
    text += b" " * (-len(text) % 4)
    return len(text).to_bytes(4, "little") + text + b"".join(chunks)


def _placed(levels: Sequence[Level], chunks: list[bytes]) -> Iterator[dict[str, Any]]:
    """Append codes to chunks, and say where they stand."""
    for codes, block in levels:
        yield {"rows": codes.shape[0], "columns": codes.shape[1], "block": block, "at": _appended(codes, chunks)}


def _appended(codes: Any, chunks: list[bytes]) -> int:
    """Append an array to chunks of four bytes each or a multiple; where it stands."""
    data = codes.tobytes()
    at = sum(map(len, chunks))
    chunks.append(data + b"\0" * (-len(data) % 4))
    return at


def _escaped(text: str) -> str:
    """A text as markup; what is no character, such as half of a pair, is a question mark."""
    return html.escape(text.encode(errors="replace").decode())


@cache
def _read(name: str) -> str:
    return files("attention_view").joinpath("page", name).read_text(encoding="utf-8")
