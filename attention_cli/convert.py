"""The command ``convert``: weights from one layout to another, between files of safetensors."""

from __future__ import annotations

import inspect
import math
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from attention_cli.terminal import refusal
from attention_core.layouts import LAYOUTS
from attention_numpy.files import FileError, load_arrays, load_layers, save_arrays, save_layer, save_layers

__all__ = ["convert"]

OWN = "attention-core"
NAMES = ", ".join((OWN, *LAYOUTS))
FLAGS = {
    "num_heads": "--num-heads",
    "head_order": "--head-order",
    "zero_attention": "--zero-attention",
    "norm_first": "--norm-first",
    "epsilon": "--epsilon",
    "dropout": "--dropout",
}


def convert(
    source: Annotated[Path, typer.Argument(help="A file of safetensors.")],
    target: Annotated[Path, typer.Argument(help="The file to be written.")],
    from_: Annotated[str, typer.Option("--from", help=f"The layout of the source, out of {NAMES}.")],
    to: Annotated[str, typer.Option("--to", help=f"The layout of the target, out of {NAMES}.")],
    num_heads: Annotated[int | None, typer.Option(min=1, help="The number of query heads of the source.")] = None,
    head_order: Annotated[
        str | None, typer.Option(help="Where heads share keys: repeat, if neighbours do, or tile, if heads apart do.")
    ] = None,
    zero_attention: Annotated[bool, typer.Option("--zero-attention", help="add_zero_attn of the source.")] = False,
    norm_first: Annotated[bool, typer.Option("--norm-first", help="norm_first of the source.")] = False,
    epsilon: Annotated[float | None, typer.Option(help="The epsilon of normalizations of the source.")] = None,
    dropout: Annotated[float | None, typer.Option(help="The rate of dropout of the source.")] = None,
    prefix: Annotated[str, typer.Option(help="What the names of the arrays of the source begin with.")] = "",
    drop: Annotated[
        list[str] | None, typer.Option(help="Leave out arrays whose names, less the prefix, begin so; repeatable.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the target if it is there.")] = False,
) -> None:
    """Convert weights from the layout of one library to that of another, bit for bit.

    In the layout attention-core the settings are in the file. Of any other layout, the options say what arrays do not
    tell. The exit status is 0 if the target was written, 1 if the weights cannot be converted, and 2 if the command
    cannot be run as given.
    """
    for name, layout in (("--from", from_), ("--to", to)):
        if layout not in (OWN, *LAYOUTS):
            raise refusal(f"expected {name} out of {NAMES}; got {layout!r}")
    options = {
        "num_heads": num_heads,
        "zero_attention": zero_attention or None,
        "norm_first": norm_first or None,
        "epsilon": epsilon,
        "dropout": dropout,
    }
    reading = _options(from_, {name: value for name, value in options.items() if value is not None}, prefix, drop)
    ordered = [name for name in (from_, to) if name != OWN and _takes(LAYOUTS[name].read, "head_order")]
    if head_order is not None and (not ordered or head_order not in ("repeat", "tile")):
        wanted = "repeat or tile" if ordered else f"no --head-order from {from_} to {to}"
        raise refusal(f"expected {wanted}; got {head_order!r}")
    if not source.is_file():
        raise refusal(f"expected a file of safetensors; got {source}, which is none")
    if target.is_dir() or not target.parent.is_dir():
        raise refusal(f"expected a file that can be written; got {target}")
    if target.exists() and not force:
        raise refusal(f"expected a target that is not there, or --force; got {target}")
    try:
        order = {"head_order": head_order}
        definitions, parameters, states = _read(
            source, from_, reading | (order if from_ in ordered else {}), prefix, drop=drop or []
        )
        _write(target, to, definitions, parameters, states=states, options=order if to in ordered else {})
    except (TypeError, ValueError) as error:
        typer.echo(f"attention-core: {error}", err=True)
        raise typer.Exit(1) from error
    count = sum(math.prod(leaf.shape) for leaf in _leaves(parameters))
    typer.echo(f"{target}: {count} values")
    for line in _descriptions(to, definitions):
        typer.echo(line)


def _options(layout: str, options: dict[str, Any], prefix: str, drop: list[str] | None) -> dict[str, Any]:
    """The options of reading, if the layout takes them and has those that it needs."""
    names = inspect.signature(LAYOUTS[layout].read).parameters if layout != OWN else {}
    for name in options:
        if name not in names:
            raise refusal(f"expected no {FLAGS[name]} from {layout}; got {options[name]}")
    needed = [name for name, each in names.items() if each.kind is each.KEYWORD_ONLY and each.default is each.empty]
    for name in needed:
        if name not in options:
            raise refusal(f"expected {FLAGS[name]} from {layout}, whose arrays do not tell it; got none")
    if layout == OWN and (prefix or drop):
        raise refusal(f"expected no --prefix and --drop from {OWN}, whose files are whole; got {prefix or drop}")
    return options


def _takes(function: Any, name: str) -> bool:
    return name in inspect.signature(function).parameters


def _read(
    path: Path, layout: str, options: dict[str, Any], prefix: str, drop: list[str]
) -> tuple[tuple[Any, ...], tuple[Any, ...], tuple[Any, ...]]:
    """Definitions, parameters and states."""
    if layout == OWN:
        return load_layers(path)
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
    options: dict[str, Any],
) -> None:
    if layout != OWN:
        whole = _whole(layout, definitions)
        chosen = (definitions, parameters) if whole else (definitions[0], parameters[0])
        save_arrays(path, LAYOUTS[layout].write(*chosen, **options, xp=np))
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
