"""A side of a comparison: a model or a layer, of a file, of a folder, or made by Python, and what runs it."""

from __future__ import annotations

import importlib
import inspect
import json
import os
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from attention_conformance.call import one_line
from attention_conformance.kernel.target import TargetError, load_object
from attention_conformance.launch.libraries import quiet_start
from attention_conformance.problem import NumpyArray
from attention_core import layers
from attention_core.backend import get_backend
from attention_core.layers.adapters import Adapted
from attention_files.safetensors import FileError, load_arrays, load_layers
from attention_models.checkpoints import load_causal_lm
from attention_models.gguf import load_gguf
from attention_models.layouts import ENCODERS, LAYOUTS, from_encoder

FRAMEWORKS = ("numpy", "torch", "jax", "tensorflow", "keras")
INPUTS = ("token_ids", "x", "query", "key_mask", "mask", "position_ids")


class ComparisonError(ValueError):
    """Models or inputs that cannot be compared, in one sentence."""


@dataclass(frozen=True)
class Side:
    """A model or a layer.

    Attributes
    ----------
    framework : str
        Out of `FRAMEWORKS`, or ``"nnx"``.
    module : object
        Of the framework. Where it is of this project, a tuple of layers, or of functions of arrays.
    definitions, parameters : tuple
        What it is in the words of this project, with NumPy arrays; empty where a layout does not say so.
    """

    name: str
    framework: str
    module: Any
    is_ours: bool
    definitions: tuple[layers.Layer, ...] = ()
    parameters: tuple[Any, ...] = ()

    @property
    def versions(self) -> dict[str, str]:
        """The versions of the libraries that run it."""
        library = {"nnx": "jax"}.get(self.framework, self.framework)
        if library == "keras":
            library = sys.modules["keras"].backend.backend()
        versions = get_backend(library).versions()
        others = {"torch": ("transformers",), "nnx": ("flax",), "keras": ("keras",)}.get(self.framework, ())
        return dict(versions) | {name: sys.modules[name].__version__ for name in others if name in sys.modules}

    def weights(self) -> dict[str, NumpyArray]:
        """The weights by the names of this project; of another model, by its own."""
        if self.definitions:
            several = len(self.definitions) > 1
            trees = [(f"{place_of(i)}." if several else "", tree) for i, tree in enumerate(self.parameters)]
            named = {f"{at}{name}": each for at, tree in trees for name, each in layers.named_arrays(tree).items()}
            return {name: np.asarray(each) for name, each in named.items()}
        if self.framework == "torch":
            return get_backend("torch").to_numpy(dict(self.module.state_dict()))  # type: ignore[no-any-return]
        if self.framework == "keras":
            return {each.path: np.asarray(each) for each in self.module.weights}
        if self.framework == "nnx":
            nnx = importlib.import_module("flax.nnx")
            state = nnx.to_flat_state(nnx.state(self.module, nnx.Param))
            return {".".join(map(str, path)): np.asarray(each[...]) for path, each in state}
        return {}


def place_of(index: int) -> str:
    """The name of one of several layers: embeddings, and layers behind them."""
    return f"layers.{index - 1}" if index else "embeddings"


def side_of(source: Any) -> Side:
    """Load a side; raise ComparisonError when it cannot be loaded.

    It is a file of this project or of GGUF, a folder of transformers or a model of Keras. With a framework in front, as
    ``jax:FOLDER``, the layers of this project run it there. Or it is ``file.py:name`` or an object: a model or what
    makes one.
    """
    try:
        with quiet_start():
            return _loaded(source) if isinstance(source, str | Path) else _of_object(source)
    except (FileError, TargetError, ComparisonError) as error:
        raise ComparisonError(str(error)) from error
    except ModuleNotFoundError as error:
        lacking = (error.name or "a library").partition(".")[0]
        raise ComparisonError(f"expected {lacking} for {source}; got none: pip install {lacking}") from error
    except Exception as error:  # whatever a library says of a file, or a file of Python
        raise ComparisonError(f"expected a model; got {source}: {one_line(error)}") from error


def _loaded(source: str | Path) -> Side:
    text = str(source)
    framework, _, rest = text.partition(":")
    if rest and framework in FRAMEWORKS:
        return ours(text, framework, *read_model(Path(rest)))
    if ":" in text:
        return _of_object(load_object(text), text)
    path = Path(text)
    if path.is_dir():
        return _of_transformers(path)
    if path.suffix == ".keras" and path.is_file():
        return _of_object(importlib.import_module("keras").saving.load_model(path), text)
    return ours(text, "numpy", *read_model(path))


def read_model(path: Path) -> tuple[tuple[layers.Layer, ...], tuple[Any, ...]]:
    """The definitions and parameters of a file of this project, of a GGUF file, or of a folder of transformers.

    Raise FileError or LayoutError when a file is not there, or of another model.
    """
    if path.is_dir():
        config = _config(path)
        if config.get("model_type") not in ENCODERS:
            return tuple((each,) for each in load_causal_lm(path))  # type: ignore[return-value]
        return _bert(load_arrays(path / "model.safetensors")[0], config)
    if path.suffix == ".gguf":
        definition, parameters, _ = load_gguf(path)
        return (definition,), (parameters,)
    definitions, trees, states = load_layers(path)
    if any(states):
        raise ComparisonError(f"expected layers without a state in {path}; got that of spectral normalization")
    return definitions, trees


def _config(folder: Path) -> dict[str, Any]:
    try:
        config = json.loads((folder / "config.json").read_bytes())
    except (OSError, ValueError) as error:
        raise FileError(f"expected a folder of transformers, with config.json; got {folder}: {error}") from error
    return config if isinstance(config, dict) else {}


def _bert(arrays: Mapping[str, Any], config: Mapping[str, Any]) -> tuple[Any, Any]:
    """An encoder; the head of a task is left out."""
    with warnings.catch_warnings(action="ignore"):
        return from_encoder(arrays, config=config, xp=np)


def ours(name: str, framework: str, definitions: Any, parameters: Any) -> Side:
    """Layers of this project in a framework, of NumPy arrays."""

    def made(definition: Any, tree: Any) -> Any:
        if framework in ("torch", "jax", "keras"):
            return importlib.import_module(f"attention_{framework}").Layer.from_numpy(definition, tree)
        arrays = get_backend(framework).from_numpy(tree)
        return lambda *inputs, **options: definition(arrays, *inputs, **options)

    return Side(name, framework, tuple(map(made, definitions, parameters)), True, tuple(definitions), tuple(parameters))


def _of_transformers(folder: Path) -> Side:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    package, config = importlib.import_module("transformers"), _config(folder)
    is_encoder = config.get("model_type") in ENCODERS
    kind = package.AutoModel if is_encoder else package.AutoModelForCausalLM
    module = kind.from_pretrained(folder, attn_implementation="sdpa", dtype="auto", local_files_only=True).eval()
    arrays = get_backend("torch").to_numpy(dict(module.state_dict()))
    if is_encoder:
        return Side(str(folder), "torch", module, False, *_bert(arrays, config))
    definition, parameters = LAYOUTS["causal-lm"].read(arrays, config=config, xp=np)
    return Side(str(folder), "torch", module, False, (definition,), (parameters,))


def _of_object(made: Any, name: str = "") -> Side:
    name = name or type(made).__name__
    parts = tuple(made) if isinstance(made, list | tuple) else (made,)
    if parts and all(isinstance(each, Adapted) for each in parts):
        return _of_ours(parts, name)
    framework = _framework_of(made)
    if framework is None:
        if callable(made):
            return _of_object(made(), name)
        raise ComparisonError(f"expected a layer or a model of torch, Keras or flax.nnx; got {type(made).__name__}")
    if framework == "torch":
        made.eval()
    return Side(name, framework, made, False, *_definition(made, framework))


def _of_ours(parts: tuple[Any, ...], name: str) -> Side:
    home = next(each.__module__ for each in type(parts[0]).__mro__ if each.__module__.startswith("attention_"))
    framework = home.partition(".")[0].removeprefix("attention_")
    plain = [each.layer if home == "attention_jax.nnx" else each for each in parts]
    definitions, parameters = tuple(each.definition for each in parts), tuple(each.to_numpy()[0] for each in plain)
    return Side(name, framework, parts, True, definitions, parameters)


def _framework_of(made: Any) -> str | None:
    """The framework whose module an object is, of those that are imported already."""
    for framework, library, kind in (("keras", "keras", "Layer"), ("torch", "torch.nn", "Module")):
        if library in sys.modules and isinstance(made, getattr(sys.modules[library], kind)):
            return framework
    nnx = sys.modules.get("flax.nnx")
    return "nnx" if nnx is not None and isinstance(made, nnx.Module) else None


def _definition(made: Any, framework: str) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """What a module of another library is here; nothing where no layout knows it."""
    adapter = importlib.import_module(f"attention_models.{'jax' if framework == 'nnx' else framework}.conversion")
    try:
        converted = adapter.from_module(made)
    except (TypeError, ValueError):
        return (), ()
    parts = converted if isinstance(converted, list) else [converted]
    return tuple(each.definition for each in parts), tuple(each.to_numpy()[0] for each in parts)


def read_inputs(path: Path) -> dict[str, NumpyArray]:
    """The inputs of a file of safetensors, npz or npy, by name; a lone array is ``x``, or ``token_ids`` of integers."""
    try:
        if path.suffix in (".npz", ".npy"):
            with path.open("rb") as opened:  # NumPy leaves open what it cannot read
                loaded = np.load(opened, allow_pickle=False)
                arrays = {"": loaded} if isinstance(loaded, np.ndarray) else dict(loaded)
        else:
            arrays = load_arrays(path)[0]
    except Exception as error:  # whatever NumPy says of a file that is cut off
        raise ComparisonError(f"expected inputs as safetensors, npz or npy; got {path}: {one_line(error)}") from error
    if len(arrays) == 1:
        (array,) = arrays.values()
        arrays = {"x" if array.dtype.kind == "f" else "token_ids": array} if set(arrays) - set(INPUTS) else arrays
    if unknown := sorted(set(arrays) - set(INPUTS)):
        raise ComparisonError(f"expected inputs out of {', '.join(INPUTS)}; got {', '.join(unknown)} in {path}")
    if len({"token_ids", "x", "query"} & set(arrays)) != 1:
        raise ComparisonError(
            f"expected one of token_ids, x and query in {path}; got {', '.join(sorted(arrays)) or 'none'}"
        )
    return arrays


def drawn_inputs(sides: Sequence[Side]) -> dict[str, NumpyArray]:
    """Two sequences of 8 and 6 positions, padded to 9, if one of the sides says how wide they are, or of which tokens.

    Raise ComparisonError when neither does.
    """
    definition: Any = next((each.definitions[0] for each in sides if each.definitions), None)
    channels, num_tokens = (getattr(definition, name, None) for name in ("channels", "num_tokens"))
    if channels is None:
        raise ComparisonError("expected --input for models whose sizes no layout knows; got none")
    rng, length = np.random.default_rng(0), min(9, getattr(definition, "num_positions", 9))
    x = rng.standard_normal((2, length, channels)).astype(np.float32)
    if num_tokens is not None:  # the first tokens may stand for padding
        x = rng.integers(min(5, num_tokens - 1), num_tokens, (2, length)).astype(np.int32)
    inputs = {"x" if num_tokens is None else "token_ids": x}
    takes = inspect.signature(type(definition).__call__).parameters
    is_padded = isinstance(definition, layers.Embeddings) or ("key_mask" in takes and num_tokens is None)
    lengths = np.asarray([[length - 1], [length - 3]])  # each has padding, which shows the sense of a mask
    return inputs | ({"key_mask": np.arange(length) < lengths} if is_padded else {})
