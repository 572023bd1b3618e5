"""The command ``convert``: weights from one layout to another, between files of safetensors, or from GGUF."""

from __future__ import annotations

import inspect
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import typer

from attention_cli.terminal import check_file, refusal, telling_warnings
from attention_files.safetensors import FileError, load_arrays, load_layers, save_arrays, save_layer, save_layers
from attention_models.checkpoints import load_causal_lm, save_causal_lm
from attention_models.gguf import load_gguf
from attention_models.layouts import LAYOUTS

if TYPE_CHECKING:
    from attention_cli.app import Convert

OWN = "attention-core"
FOLDERS = "causal-lm"  # the layout of a folder with its own settings
GGUF = "gguf"  # of files that are read, and not written
WHOLE = (OWN, FOLDERS, GGUF)  # with all their settings


def convert(options: Convert, /) -> None:
    """Convert a file from one layout to another."""
    source, target, from_, to = options.source, options.target, options.from_, options.to
    prefix, drop = options.prefix, options.drop or []
    taken = {name for each in LAYOUTS.values() for name in inspect.signature(each.read).parameters}
    named = {name: each for name, each in vars(options).items() if name in taken}
    asked = {name: each for name, each in named.items() if each is not None and each is not False}
    for name, layout, known in (("--from", from_, (OWN, *LAYOUTS, GGUF)), ("--to", to, (OWN, *LAYOUTS))):
        if layout not in known:
            raise refusal(f"expected {name} out of {', '.join(known)}; got {layout!r}")
    reading = _options(from_, asked, prefix, drop)
    if not (source.is_dir() if from_ == FOLDERS else source.is_file()):
        kinds = {FOLDERS: "a folder with config.json and safetensors", GGUF: "a GGUF file"}
        raise refusal(f"expected {kinds.get(from_, 'a file of safetensors')}; got {source}: no such path")
    if to != FOLDERS:
        check_file(target)
    if target.exists() and not options.force:
        raise refusal(f"expected a target that is not there, or --force; got {target}")
    try:
        with telling_warnings():
            definitions, parameters, states = _read(source, from_, reading, prefix, drop=drop)
        _write(target, to, definitions, parameters, states=states)
    except (ModuleNotFoundError, TypeError, ValueError) as error:
        typer.echo(f"attention-core: {error}", err=True)
        raise typer.Exit(1) from error
    count = sum(math.prod(leaf.shape) for leaf in _leaves(parameters))
    typer.echo(f"{target}: {count} values")
    for line in _descriptions(to, definitions):
        typer.echo(line)


def _options(layout: str, options: dict[str, Any], prefix: str, drop: list[str]) -> dict[str, Any]:
    """The options of reading, if the layout takes them and has those that it needs."""
    names = inspect.signature(LAYOUTS[layout].read).parameters if layout not in WHOLE else {}
    for name in options:
        if name not in names:
            raise refusal(f"expected no {_flag(name)} from {layout}; got {options[name]}")
    needed = [name for name, each in names.items() if each.kind is each.KEYWORD_ONLY and each.default is each.empty]
    for name in needed:
        if name not in options:
            raise refusal(f"expected {_flag(name)} from {layout}, whose arrays do not tell it; got none")
    if layout in WHOLE and (prefix or drop):
        raise refusal(f"expected no --prefix and --drop from {layout}, whose files are whole; got {prefix or drop}")
    return options


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _read(
    path: Path, layout: str, options: dict[str, Any], prefix: str, drop: list[str]
) -> tuple[tuple[Any, ...], tuple[Any, ...], tuple[Any, ...]]:
    """Definitions, parameters and states."""
    if layout == OWN:
        return load_layers(path)
    if layout in (FOLDERS, GGUF):
        model, weights = load_causal_lm(path) if layout == FOLDERS else load_gguf(path)[:2]
        return (model,), (weights,), ((),)
    arrays, _ = load_arrays(path)
    chosen = {name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)}
    if arrays and not chosen:
        raise FileError(f"expected names in {path} that begin with {prefix}; got {', '.join(sorted(arrays)[:3])}")
    for start in drop:
        if not any(name.startswith(start) for name in chosen):
            raise FileError(f"expected arrays in {path} whose names begin with {start}; got none to be left out")
    chosen = {name: array for name, array in chosen.items() if not name.startswith(tuple(drop))}
    definition, parameters = LAYOUTS[layout].read(chosen, **options, xp=np)
    several = isinstance(definition, tuple)
    definitions, parameters = (definition, parameters) if several else ((definition,), (parameters,))
    return definitions, parameters, ((),) * len(definitions)


def _write(
    path: Path,
    layout: str,
    definitions: tuple[Any, ...],
    parameters: tuple[Any, ...],
    states: tuple[Any, ...],
) -> None:
    if layout == FOLDERS:
        _whole(layout, definitions)
        save_causal_lm(path, definitions[0], parameters[0])
    elif layout != OWN:
        whole = _whole(layout, definitions)
        chosen = (definitions, parameters) if whole else (definitions[0], parameters[0])
        save_arrays(path, LAYOUTS[layout].write(*chosen, xp=np))
    elif len(definitions) > 1:
        save_layers(path, definitions, parameters, states)
    else:
        save_layer(path, definitions[0], parameters[0], states[0])


def _whole(layout: str, definitions: tuple[Any, ...]) -> bool:
    """Whether a layout is of several layers; if it is of one, there must be one."""
    if layout != "bert" and len(definitions) > 1:
        raise FileError(f"expected one layer for {LAYOUTS[layout].module}; got {len(definitions)}")
    return layout == "bert"


def _descriptions(layout: str, definitions: tuple[Any, ...]) -> list[str]:
    """What the weights are of, in the words of the layout."""
    if layout == OWN:
        return [str(definition) for definition in definitions]
    arguments = LAYOUTS[layout].arguments(definitions if layout == "bert" else definitions[0])
    return [f"{LAYOUTS[layout].module}({', '.join(f'{name}={value!r}' for name, value in arguments.items())})"]


def _leaves(tree: Any) -> list[Any]:
    if isinstance(tree, tuple):
        return [leaf for branch in tree for leaf in _leaves(branch)]
    return [] if tree is None else [tree]
