"""The command ``view``: weights as one HTML file, or as text."""

from __future__ import annotations

import json
import re
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import typer

from attention_cli.terminal import check_file, refusing
from attention_files.safetensors import load_arrays
from attention_files.writing import FileError
from attention_view import Computed, View as Picture, view as view_weights

if TYPE_CHECKING:
    from attention_cli.app import View


def view(options: View, /) -> None:
    """Make the view, and write or print it."""
    files, output = options.files, options.output
    check_file(output)
    with refusing(TypeError, ValueError, IndexError, OSError, ModuleNotFoundError):
        chosen = {name: getattr(options, name) for name in ("image", "sample")}
        chosen |= {"heads": options.head, "query": _queries(options.query or []), "class_tokens": options.class_tokens}
        made = _of_files(files, _tokens(options.tokens), options.causal, chosen)
        if output is not None:
            made.save(output)
        text = str(made) if output is None else f"{made.title}: {output} ({output.stat().st_size / 1e6:.1f} MB)"
    typer.echo(text)  # as all commands, which end quietly where nobody reads on


def _of_files(files: Sequence[Path], tokens: Any, causal: bool, options: Mapping[str, Any]) -> Picture:
    if len(files) > 2:
        raise ValueError(f"expected a file, and another to compare with; got {len(files)}")
    found = [_attention(file, causal) for file in files]
    chosen = {name: value for name, value in options.items() if value is not None}
    title = " compared with ".join(file.name for file in files).encode(errors="replace").decode()
    return view_weights(found[0], other=found[1] if len(found) == 2 else None, tokens=tokens, title=title, **chosen)


def _attention(file: Path, causal: bool) -> Any:
    """The weights of a file, in order of their names; or query and key with mask and bias."""
    if file.suffix in (".npz", ".npy"):
        try:
            with file.open("rb") as opened:
                found = np.load(opened, allow_pickle=False)
                arrays = {file.stem: found} if isinstance(found, np.ndarray) else dict(found)
        except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
            raise FileError(f"expected a file of NumPy arrays; got {file}: {error}") from error
    else:
        arrays, _ = load_arrays(file)
    if "query" in arrays and "key" in arrays:
        chosen = {name: arrays[name] for name in ("mask", "bias") if name in arrays}
        return Computed(arrays["query"], arrays["key"], is_causal=causal, **chosen)
    if causal or {"query", "key"} & set(arrays):
        raise ValueError(f"expected both query and key in {file}; got {', '.join(arrays) or 'no arrays'}")
    if not arrays:
        raise ValueError(f"expected weights, or query and key; got no arrays in {file}")
    return [arrays[name] for name in sorted(arrays, key=_by_number)]


def _by_number(name: str) -> list[Any]:
    """Names in the order of the numbers within: layer.2 before layer.10."""
    words = re.findall(r"[0-9]+|[^0-9]+", name)
    return [(word.isdecimal(), int(word) if word.isdecimal() else 0, word) for word in words]


def _queries(texts: Sequence[str]) -> Any:
    """The queries, or the only one."""
    queries = [_query(each) for each in texts]
    return queries[0] if len(queries) == 1 else queries or None


def _query(text: str) -> int | tuple[int, int]:
    """A query: its number, or its row and column."""
    found = re.fullmatch(r"(\d+)(?:,(\d+))?", text)
    if not found:
        raise ValueError(f"expected --query as a number, or as row and column such as 3,5; got {text}")
    return int(text) if found[2] is None else (int(found[1]), int(found[2]))


def _tokens(path: Path | None) -> list[str] | None:
    """The tokens of a file: a list in JSON, or one in each line."""
    if path is None:
        return None
    try:
        text = path.read_text(encoding="utf-8")
        found = json.loads(text) if path.suffix == ".json" else text.removesuffix("\n").split("\n")
    except ValueError as error:
        raise ValueError(f"expected tokens in {path}: {error}") from error
    if not isinstance(found, list):
        raise ValueError(f"expected a list of tokens in {path}; got {type(found).__name__}")
    return [str(token) for token in found]
