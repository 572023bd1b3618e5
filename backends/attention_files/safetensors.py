"""One file for parameters of any framework: safetensors, with the structure and the settings in the metadata.

Arrays are kept bit for bit under dotted names. The metadata has one key, ``attention-core``, whose text is JSON::

    {"version": 1, "tree": {"Linear": {"weight": "weight", "bias": null}}, "settings": {...}}

A tree is written as the name of an array, ``null``, a list, ``{"tuple": [...]}``, ``{"dict": {...}}``, or the name of a
class of `attention_core.parameters` with its fields. Nothing is ever unpickled.
"""

from __future__ import annotations

import io
import json
import os
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from attention_core import layers, parameters as trees
from attention_core.backend import announced
from attention_core.layers import check_fit
from attention_files.optional import missing
from attention_files.writing import FileError, write_file

try:
    import ml_dtypes
    import numpy as np
    from numpy.typing import NDArray
    from safetensors import SafetensorError, deserialize
    from safetensors.numpy import save as serialized
except ModuleNotFoundError as error:
    raise missing(error.name, "files", "install attention-core[files]") from error

__all__ = [
    "FileError",
    "load_arrays",
    "load_layer",
    "load_layers",
    "load_tree",
    "save_arrays",
    "save_layer",
    "save_layers",
    "save_tree",
]

KEY = "attention-core"
VERSION = 1
KINDS: dict[str, Any] = {name: getattr(trees, name) for name in trees.__all__} | {
    "SpectralVectors": layers.SpectralVectors
}
DTYPES = {
    "BOOL": "bool",
    "U8": "uint8",
    "U16": "uint16",
    "U32": "uint32",
    "U64": "uint64",
    "I8": "int8",
    "I16": "int16",
    "I32": "int32",
    "I64": "int64",
    "F16": "float16",
    "BF16": ml_dtypes.bfloat16,
    "F32": "float32",
    "F64": "float64",
}
FOREIGN = {
    b"\x80": "a pickle, which can run any code: convert it with safetensors.torch.save_file",
    b"PK": "a zip archive, as torch.save writes it with a pickle inside: convert it with safetensors.torch.save_file",
    b"\x89HDF": "HDF5: keras.Model.load_weights, or keras.models.load_model of a whole model, reads what Keras wrote",
    b"GGUF": "GGUF, which attention_models.gguf reads",
    b"\x93NUMPY": "an array that numpy.load reads",
    b"version https://git-lfs": "a pointer of Git LFS, which has not brought the file yet",
    b"<": "a page of HTML or XML, perhaps of a failed download",
}
IN_ARCHIVES = {  # by what the name of a file in a zip archive ends with
    "model.weights.h5": "a model of Keras, which keras.models.load_model reads",
    ".npy": "arrays that numpy.load reads",
}
OTHER_FORMATS = (
    ".npz", ".npy", ".keras", ".h5", ".hdf5", ".pt", ".pth", ".pt2", ".bin", ".pkl", ".pickle", ".joblib", ".ckpt",
    ".msgpack", ".orbax", ".gguf", ".onnx", ".tflite", ".pb", ".json", ".yaml", ".zip", ".tar",
)  # fmt: skip


# --- any tree ---


def save_tree(path: str | os.PathLike[str], tree: Any, settings: Mapping[str, Any] | None = None) -> None:
    """Write a tree of arrays to a file, which is replaced whole or, on an error, left as it was.

    Parameters
    ----------
    path : path-like
    tree : tree
        A NumPy array, ``None``, or a list, tuple, dict with texts as keys, or named tuple of
        `attention_core.parameters` (or `attention_core.layers.SpectralVectors`) of trees. Arrays are of float16,
        bfloat16, float32, float64, integers or bool.
    settings : mapping, optional
        What JSON can say, to be returned by `load_tree`.

    Raises
    ------
    FileError
        When the tree holds anything else, or the file cannot be written.

    Examples
    --------
    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "weights.safetensors"
    >>> save_tree(path, trees.Linear(np.ones((2, 1))), {"epoch": 3})
    >>> load_tree(path)
    (Linear(weight=array([[1.],
           [1.]]), bias=None), {'epoch': 3})
    """
    path, arrays = _to_write(path), dict[str, NDArray[Any]]()
    structure = _structure(path, tree, "", arrays)
    _save(path, structure, arrays, None if settings is None else dict(settings))


def load_tree(path: str | os.PathLike[str]) -> tuple[Any, dict[str, Any] | None]:
    """Read a tree of arrays and its settings from a file of `save_tree`.

    Parameters
    ----------
    path : path-like

    Returns
    -------
    tree : tree of numpy.ndarray
        Bit for bit what was saved.
    settings : dict or None

    Raises
    ------
    FileError
        When the file is not there, truncated, of another kind or version, or its arrays are not those of its structure.
    """
    path = Path(path)
    arrays, metadata = load_arrays(path)
    if KEY not in metadata:
        raise FileError(
            f"expected a file written by attention-core; got {path}: safetensors without {KEY!r} in its metadata"
        )
    try:
        header = json.loads(metadata[KEY])
    except (ValueError, RecursionError) as error:
        raise FileError(f"expected JSON as {KEY!r} in the metadata of {path}; got {error}") from error
    if not isinstance(header, dict) or type(header.get("version")) is not int or header["version"] != VERSION:
        version = header.get("version") if isinstance(header, dict) else None
        raise FileError(f"expected version {VERSION} of the format in {path}; got {version!r}")
    settings = header.get("settings")
    if "tree" not in header or not isinstance(settings, dict | None):
        raise FileError(f"expected a tree and settings in the metadata of {path}; got {sorted(header)}")
    try:
        tree = _tree(path, header["tree"], arrays)
    except RecursionError as error:
        raise FileError(f"expected a tree in {path}; got one too deep") from error
    if arrays:
        raise FileError(f"expected the arrays of its structure in {path}; got also {_few(arrays)}")
    return tree, settings


# --- layers ---


def save_layer(path: str | os.PathLike[str], definition: layers.Layer, parameters: Any, state: Any = ()) -> None:
    """Write a layer to a file: its settings, its parameters and its state.

    Parameters
    ----------
    path : path-like
    definition : attention_core.layers.Layer
    parameters, state : trees of numpy.ndarray
        As the definition asks for them.

    Raises
    ------
    FileError
        When they do not fit the definition, or the file cannot be written.

    Examples
    --------
    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "layer.safetensors"
    >>> layer = layers.FeedForward(2, 3)
    >>> save_layer(path, layer, layer.init(0, xp=np))
    >>> definition, parameters, state = load_layer(path)
    >>> definition == layer, parameters.expand.weight.shape, state
    (True, (2, 3), ())
    """
    path = _to_write(path)
    _check_fit(path, definition, parameters, state)
    arrays: dict[str, NDArray[Any]] = {}
    structure = _layer_structure(path, parameters, state, "", arrays=arrays)
    _save(path, structure, arrays, definition.settings())


def load_layer(path: str | os.PathLike[str]) -> tuple[layers.Layer, Any, Any]:
    """Read a layer from a file of `save_layer`.

    Parameters
    ----------
    path : path-like

    Returns
    -------
    definition : attention_core.layers.Layer
    parameters, state : trees of numpy.ndarray

    Raises
    ------
    FileError
        As in `load_tree`; and when the file does not hold a layer, or its arrays do not fit it.
    """
    path = Path(path)
    tree, settings = load_tree(path)
    if settings is not None and "layers" in settings:
        raise FileError(f"expected one layer in {path}; got several, which load_layers reads")
    return _layer(path, tree, settings)


def save_layers(path: str | os.PathLike[str], definitions: Any, parameters: Any, states: Any = None) -> None:
    """Write several layers, such as those of a whole encoder, to one file.

    Parameters
    ----------
    path : path-like
    definitions : sequence of attention_core.layers.Layer
    parameters : sequence of trees of numpy.ndarray
    states : sequence of trees of numpy.ndarray, optional
        By default all are empty.

    Raises
    ------
    FileError
        As in `save_layer`.
    """
    path = _to_write(path)
    states = [()] * len(definitions) if states is None else states
    if not len(definitions) == len(parameters) == len(states):
        counts = f"{len(parameters)} and {len(states)}"
        raise FileError(f"expected parameters and states of {len(definitions)} layers for {path}; got {counts}")
    arrays: dict[str, NDArray[Any]] = {}
    structures = []
    for index, (definition, tree, state) in enumerate(zip(definitions, parameters, states, strict=True)):
        _check_fit(path, definition, tree, state)
        structures.append(_layer_structure(path, tree, state, str(index), arrays=arrays))
    settings = {"layers": [definition.settings() for definition in definitions]}
    _save(path, {"tuple": structures}, arrays, settings)


def load_layers(path: str | os.PathLike[str]) -> tuple[tuple[layers.Layer, ...], tuple[Any, ...], tuple[Any, ...]]:
    """Read all layers from a file of `save_layers`, or the one of `save_layer`.

    Parameters
    ----------
    path : path-like

    Returns
    -------
    definitions : tuple of attention_core.layers.Layer
    parameters, states : tuples of trees of numpy.ndarray

    Raises
    ------
    FileError
        As in `load_layer`.
    """
    path = Path(path)
    tree, settings = load_tree(path)
    several = (settings or {}).get("layers")
    if several is None:
        found = [_layer(path, tree, settings)]
    elif not isinstance(several, list) or not isinstance(tree, tuple) or len(several) != len(tree) or not several:
        raise FileError(f"expected settings for every layer in {path}; got others")
    else:
        found = [_layer(path, branch, each) for branch, each in zip(tree, several, strict=True)]
    definitions, parameters, states = zip(*found, strict=True)
    return definitions, parameters, states


def _layer(path: Path, tree: Any, settings: Any) -> tuple[layers.Layer, Any, Any]:
    if not isinstance(settings, dict) or not isinstance(tree, tuple) or len(tree) != 2:
        raise FileError(f"expected a layer, with parameters and state, in {path}; got another tree")
    try:
        definition = layers.layer_from_settings(settings)
    except (TypeError, ValueError) as error:
        raise FileError(f"expected the settings of a layer in {path}; got others: {error}") from error
    _check_fit(path, definition, *tree)
    return definition, *tree


def _layer_structure(path: Path, parameters: Any, state: Any, prefix: str, arrays: dict[str, NDArray[Any]]) -> Any:
    """Parameters are named as in `attention_core.layers.named_arrays`, and so is the state, with a prefix."""
    parameter_structure = _structure(path, parameters, prefix, arrays)
    return {"tuple": [parameter_structure, _structure(path, state, f"{prefix}.state" if prefix else "state", arrays)]}


def _check_fit(path: Path, definition: layers.Layer, parameters: Any, state: Any) -> None:
    if not isinstance(definition, layers.Layer):
        raise FileError(f"expected a definition out of attention_core.layers; got {type(definition).__name__}")
    try:
        check_fit(definition, parameters, state)
    except (TypeError, ValueError) as error:
        name = type(definition).__name__
        raise FileError(f"expected the arrays of {name} in {path}; got others: {error}") from error


# --- arrays by name ---


def save_arrays(
    path: str | os.PathLike[str], arrays: Mapping[str, NDArray[Any]], metadata: Mapping[str, str] | None = None
) -> None:
    """Write arrays by name as safetensors; the file is replaced whole or, on an error, left as it was.

    Parameters
    ----------
    path : path-like
    arrays : mapping of str to numpy.ndarray
    metadata : mapping of str to str, optional

    Raises
    ------
    FileError
        When an array is of a dtype that the format lacks, or the file cannot be written.
    """
    path = _to_write(path)
    if "__metadata__" in arrays:  # of which safetensors makes a file that it cannot read
        raise FileError(f"expected arrays that safetensors can hold for {path}; got one named __metadata__")
    kept = {name: _array(path, name, array) for name, array in arrays.items()}
    try:
        data = serialized(kept, metadata=None if metadata is None else dict(metadata))
    except (SafetensorError, TypeError, UnicodeEncodeError) as error:
        raise FileError(f"expected arrays that safetensors can hold for {path}; got {error}") from error
    write_file(path, data)


def load_arrays(path: str | os.PathLike[str]) -> tuple[dict[str, NDArray[Any]], dict[str, str]]:
    """Read arrays by name, and the metadata, from any file of safetensors.

    Parameters
    ----------
    path : path-like

    Returns
    -------
    arrays : dict of str to numpy.ndarray
        bfloat16 as that of ``ml_dtypes``.
    metadata : dict of str to str

    Raises
    ------
    FileError
        When the file is not there, truncated, of another kind, or has a dtype that NumPy lacks.
    """
    path = Path(path)
    try:
        data = path.read_bytes()
    except (OSError, ValueError) as error:  # the latter of a path with a null byte
        reason = getattr(error, "strerror", None) or error
        shown = path if isinstance(error, OSError) else repr(str(path))
        raise FileError(f"expected a file of safetensors; got {shown}: {reason}") from error
    try:
        found = deserialize(data)  # type: ignore[no-untyped-call]
    except (SafetensorError, ValueError) as error:
        kind = foreign_kind(data) or str(error)
        raise FileError(f"expected a whole file of safetensors; got {path}: {kind}") from error
    for name, each in found:
        if each["dtype"] not in DTYPES:
            raise FileError(f"expected {name} of {path} of a dtype out of {', '.join(DTYPES)}; got {each['dtype']}")
    arrays = {
        name: np.array(np.frombuffer(each["data"], dtype=DTYPES[each["dtype"]])).reshape(each["shape"])
        for name, each in found
    }
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    return arrays, header.get("__metadata__") or {}


def _to_write(path: str | os.PathLike[str]) -> Path:
    """The path of a new file, whose name promises no other format."""
    path = Path(path)
    if path.suffix.lower() in OTHER_FORMATS:
        raise FileError(f"expected a file of safetensors to write, such as {path.stem}.safetensors; got {path.name}")
    return path


def foreign_kind(data: bytes) -> str | None:
    """What a file of another format is, by its first bytes, or by the names in a zip archive."""
    kind = next((name for start, name in FOREIGN.items() if data.startswith(start)), None)
    if zipfile.is_zipfile(io.BytesIO(data)):
        names = zipfile.ZipFile(io.BytesIO(data)).namelist()
        kind = next((each for end, each in IN_ARCHIVES.items() if any(name.endswith(end) for name in names)), kind)
    return kind


def _array(path: Path, name: str, array: Any) -> NDArray[Any]:
    """The array, contiguous and in the byte order of the machine, if the format has its dtype."""
    if not isinstance(array, np.ndarray | np.generic):
        raise FileError(f"expected {name or 'the tree'} for {path} as a NumPy array; got {type(array).__name__}")
    known = [np.dtype(dtype).name for dtype in DTYPES.values()]
    if array.dtype.name not in known:
        raise FileError(
            f"expected {name or 'the array'} for {path} of a dtype out of {', '.join(known)}; got {array.dtype}"
        )
    return np.array(array, dtype=array.dtype.newbyteorder("="), order="C")


# --- structures ---


def _save(path: Path, structure: Any, arrays: Mapping[str, NDArray[Any]], settings: Any) -> None:
    try:
        header = json.dumps({"version": VERSION, "tree": structure, "settings": settings}, allow_nan=False)
        same = json.loads(header)["settings"] == settings
    except (TypeError, ValueError) as error:
        raise FileError(f"expected settings that JSON can say for {path}; got {settings}: {error}") from error
    if not same:
        raise FileError(f"expected settings that JSON gives back as they were for {path}; got {settings}")
    save_arrays(path, arrays, {KEY: header})


def _structure(path: Path, tree: Any, prefix: str, arrays: dict[str, NDArray[Any]]) -> Any:
    """The structure of a tree as JSON has it; the arrays are put under their names."""

    def below(name: Any, branch: Any) -> Any:
        return _structure(path, branch, f"{prefix}.{name}" if prefix else str(name), arrays)

    if tree is None:
        return None
    if isinstance(tree, dict):
        wrong = next((key for key in tree if not isinstance(key, str) or not key), None)
        if wrong is not None or "" in tree:
            raise FileError(f"expected keys of {prefix or 'the tree'} for {path} as texts; got {wrong!r}")
        return {"dict": {key: below(key, branch) for key, branch in tree.items()}}
    if type(tree) is list:
        return [below(index, branch) for index, branch in enumerate(tree)]
    if type(tree) is tuple:
        return {"tuple": [below(index, branch) for index, branch in enumerate(tree)]}
    name = type(tree).__name__
    if (KINDS.get(name) or announced(trees.__name__, name)) is type(tree):
        return {name: {field: below(field, branch) for field, branch in zip(tree._fields, tree, strict=True)}}
    if isinstance(tree, list | tuple):
        raise FileError(f"expected {prefix or 'the tree'} for {path} out of {', '.join(KINDS)}; got {name}")
    prefix = prefix or "array"
    array = _array(path, prefix, tree)
    if prefix in arrays or prefix == "__metadata__":
        raise FileError(f"expected every array for {path} under a name of its own; got two called {prefix}")
    arrays[prefix] = array
    return prefix


def _tree(path: Path, structure: Any, arrays: dict[str, NDArray[Any]]) -> Any:
    """The tree of a structure; the arrays are taken out of those given."""
    if structure is None:
        return None
    if isinstance(structure, str):
        if structure not in arrays:
            raise FileError(f"expected array {structure} in {path}; got {_few(arrays)}")
        return arrays.pop(structure)
    if isinstance(structure, list):
        return [_tree(path, branch, arrays) for branch in structure]
    if isinstance(structure, dict) and len(structure) == 1:
        ((kind, branches),) = structure.items()
        if kind == "tuple" and isinstance(branches, list):
            return tuple(_tree(path, branch, arrays) for branch in branches)
        if isinstance(branches, dict) and kind == "dict":
            return {key: _tree(path, branch, arrays) for key, branch in branches.items()}
        made = KINDS.get(kind) or announced(trees.__name__, kind)
        if isinstance(branches, dict) and made is not None:
            if list(branches) != list(made._fields):
                fields = ", ".join(made._fields)
                raise FileError(f"expected {kind}({fields}) in {path}; got {', '.join(branches) or 'no fields'}")
            return made(*(_tree(path, branch, arrays) for branch in branches.values()))
        hint = ", a language model: install attention-toolkit" if kind == "Decoder" else ""
        raise FileError(f"expected a tree out of list, tuple, dict, {', '.join(KINDS)} in {path}; got {kind}{hint}")
    raise FileError(f"expected a tree in the metadata of {path}; got {str(structure)[:60]}")


def _few(names: Mapping[str, Any]) -> str:
    listed = sorted(names)
    return ", ".join(listed[:3]) + (f" ({len(listed)} in all)" if len(listed) > 3 else "") or "none"
