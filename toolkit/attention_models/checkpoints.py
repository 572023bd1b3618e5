"""Language models in the folders of Hugging Face transformers: ``config.json`` and safetensors, in one file or several.

Names, shapes and dtypes are checked from the headers of the files, before any weight is read.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attention_models as models
from attention_files.safetensors import FileError, foreign_kind, load_arrays, save_arrays
from attention_files.writing import write_file
from attention_models.layouts import LAYOUTS, check_causal_lm, decoder_from_config
from attention_models.parameters import Decoder

__all__ = ["end_tokens", "load_causal_lm", "open_causal_lm", "save_causal_lm"]

CONFIG, GENERATION, WEIGHTS = "config.json", "generation_config.json", "model.safetensors"
INDEX = f"{WEIGHTS}.index.json"
FLOATING = ("F16", "BF16", "F32", "F64")


def load_causal_lm(folder: str | os.PathLike[str], /) -> tuple[models.Decoder, Decoder]:
    """Read a language model of Llama, SmolLM, Mistral, Qwen 2 or 3, Gemma 1 or 2, or Phi 3.

    Parameters
    ----------
    folder : path-like
        With ``config.json``, and ``model.safetensors`` or else ``model.safetensors.index.json`` and the files it names.

    Returns
    -------
    definition : attention_models.Decoder
    parameters : attention_models.parameters.Decoder
        Of NumPy arrays, of the dtype of the files, the widest if there are several.

    Raises
    ------
    FileError
        When a file is not there, truncated or of another kind.
    LayoutError
        When the architecture is unknown, or an array is missing, superfluous or of another shape.

    Examples
    --------
    >>> import tempfile
    >>> import numpy as np
    >>> model = models.Decoder(50, 8, 2, 16, num_layers=2)
    >>> folder = tempfile.mkdtemp()
    >>> save_causal_lm(folder, model, model.init(0, xp=np))
    >>> load_causal_lm(folder)[0] == model
    True
    """
    definition, read = open_causal_lm(folder)
    return definition, read()


def open_causal_lm(folder: str | os.PathLike[str], /) -> tuple[models.Decoder, Callable[[], Decoder]]:
    """Check a folder as `load_causal_lm` does; return the definition of the model, and what reads its weights."""
    folder = Path(folder)
    config = _json(folder / CONFIG)
    definition = decoder_from_config(config)
    headers = {path: _header(path) for path in _files(folder)}
    facts = {name: each for header in headers.values() for name, each in header.items()}
    if len(facts) != sum(map(len, headers.values())):
        raise FileError(f"expected every array in one file of {folder}; got some in several")
    check_causal_lm(definition, {name: dims for name, (dims, _) in facts.items()})
    if unknown := sorted({dtype for _, dtype in facts.values()} - set(FLOATING)):
        raise FileError(f"expected arrays of dtypes out of {', '.join(FLOATING)} in {folder}; got {', '.join(unknown)}")

    def read() -> Decoder:
        arrays: dict[str, Any] = {}
        for path in headers:
            arrays |= load_arrays(path)[0]
        _, parameters = LAYOUTS["causal-lm"].read(arrays, config=config)
        return parameters  # type: ignore[no-any-return]

    return definition, read


def save_causal_lm(folder: str | os.PathLike[str], definition: models.Decoder, parameters: Decoder, /) -> None:
    """Write a language model, which transformers then loads: ``config.json`` and ``model.safetensors``.

    Parameters
    ----------
    folder : path-like
        Made if it is not there.
    definition : attention_models.Decoder
    parameters : attention_models.parameters.Decoder
        Of NumPy arrays.

    Raises
    ------
    FileError, LayoutError
        When a file cannot be written, or transformers has no such model.
    """
    folder = Path(folder)
    config = LAYOUTS["causal-lm"].arguments(definition)
    arrays = LAYOUTS["causal-lm"].write(definition, parameters)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FileError(f"expected a folder that can be made; got {folder}: {error.strerror}") from error
    save_arrays(folder / WEIGHTS, arrays, {"format": "pt"})
    write_file(folder / CONFIG, json.dumps(config, indent=2).encode())


def end_tokens(folder: str | os.PathLike[str], /) -> list[int]:
    """Read which tokens end a text: those of ``generation_config.json``, or else of ``config.json``.

    Parameters
    ----------
    folder : path-like

    Returns
    -------
    list of int

    Raises
    ------
    FileError
        When ``config.json`` is not there, or ``eos_token_id`` is neither an integer nor a list of them.
    """
    for path in (Path(folder, GENERATION), Path(folder, CONFIG)):
        found = _json(path).get("eos_token_id") if path.name == CONFIG or path.is_file() else None
        if found is not None:
            ends = found if isinstance(found, list) else [found]
            if any(isinstance(end, bool) or not isinstance(end, int) for end in ends):
                raise FileError(f"expected eos_token_id in {path} as integers; got {found!r}")
            return ends
    return []


def _files(folder: Path) -> list[Path]:
    """The files of the weights: one, or else those that an index names."""
    if (folder / WEIGHTS).is_file() or not (folder / INDEX).is_file():
        if (folder / INDEX).is_file():
            warnings.warn(f"expected {WEIGHTS} or {INDEX} in {folder}; got both: the first is read", stacklevel=4)
        return [folder / WEIGHTS]
    places = _json(folder / INDEX).get("weight_map")
    if not isinstance(places, dict) or not places or not all(isinstance(each, str) for each in places.values()):
        raise FileError(f"expected a weight_map from names to files in {folder / INDEX}; got another")
    names = sorted(set(places.values()))
    for name in names:
        if Path(name).name != name:
            raise FileError(f"expected files next to {folder / INDEX}; got {name}")
    return [folder / name for name in names]


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_bytes())
    except OSError as error:
        raise FileError(f"expected a model with {path}; got {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise FileError(f"expected JSON in {path}; got {error}") from error
    if not isinstance(found, dict):
        raise FileError(f"expected a JSON object in {path}; got {type(found).__name__}")
    return found


def _header(path: Path) -> dict[str, tuple[tuple[int, ...], str]]:
    """The shape and the dtype of each array of a file, of which none is read."""
    from safetensors import SafetensorError, safe_open  # noqa: PLC0415 (attention_files says where it is missing)

    try:
        with path.open("rb") as file:
            start = file.read(100)
        with safe_open(path, "np") as opened:
            slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118 (it is no mapping)
            return {name: (tuple(each.get_shape()), each.get_dtype()) for name, each in slices.items()}
    except OSError as error:
        raise FileError(f"expected a file of safetensors; got {path}: {error.strerror}") from error
    except SafetensorError as error:
        kind = foreign_kind(start) or str(error)
        raise FileError(f"expected a whole file of safetensors; got {path}: {kind}") from error
