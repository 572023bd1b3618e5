"""How a dataclass becomes a subcommand of ``attention-core``, and the types of its options."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pkgutil import resolve_name
from typing import Annotated, Any, TypeVar, get_args, get_origin

import typer
from typer.models import OptionInfo

from attention_conformance.kernel.options import helps_of, word_of

app = typer.Typer(
    name="attention-core",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

Many = list[str] | None
Positive = Annotated[int, typer.Option(min=1)]
Natural = Annotated[int, typer.Option(min=0)]
Count = Annotated[int | None, typer.Option(min=1)]
Counts = Annotated[list[int] | None, typer.Option(min=1)]
Seconds = Annotated[float, typer.Option(min=0.1)]
Size = Annotated[float, typer.Option(min=0)]
Options = TypeVar("Options")

ALSO = {"candidate": "--implementation", "output": "-o", "verbose": "-v"}
"""Further names of options."""


class Shared:
    """Options that mean the same in every command that has them.

    Parameters
    ----------
    causal
        Set is_causal=True in the call.
    jobs
        The number of processes at a time; 0 runs all in this process, which a crash then ends.
    json
        Write the environment and all results to this file.
    model
        The model: a folder of transformers, or a GGUF file.
    threads
        The number of threads of each library.
    """


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"attention-core {version('attention-core')}")
        raise typer.Exit


@app.callback()
def main(
    _: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")] = False,
) -> None:
    """Attention with the same numbers on every framework, and the proof of it."""


def command(short_help: str, work: str) -> Callable[[type[Options]], type[Options]]:
    """Make a dataclass a command: its fields are the options, and its documentation is their help.

    Parameters
    ----------
    short_help : str
        The line about it in the list of commands.
    work : str
        The function that takes an instance, as ``module:name``. Its module is imported when the command runs.
    """

    def decorate(kind: type[Options]) -> type[Options]:
        def run(**options: Any) -> None:
            with resolve_name("attention_cli.terminal:refusing")():
                resolve_name(work)(kind(**options))

        helps: dict[str, str] = {}
        for each in (*reversed(kind.__mro__), Shared):
            helps |= helps_of(each)
        run.__doc__ = inspect.cleandoc(kind.__doc__ or "").partition("\n\nParameters\n")[0]
        declared = inspect.signature(kind, eval_str=True).parameters.values()
        parameters = [each.replace(annotation=_annotation(each, helps)) for each in declared]
        run.__annotations__ = {each.name: each.annotation for each in parameters}
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        app.command(kind.__name__.lower(), short_help=short_help)(run)
        return kind

    return decorate


def _annotation(option: inspect.Parameter, helps: Mapping[str, str]) -> Any:
    """The type of an argument or option with its names and its help, as typer takes them."""
    is_plain = get_origin(option.annotation) is not Annotated
    kind, info = (option.annotation, typer.Option()) if is_plain else get_args(option.annotation)
    info, name = copy.copy(info), word_of(option.name)
    info.help = helps.get(option.name)
    if isinstance(info, OptionInfo):
        is_switch = kind in (bool, bool | None) and option.default is not False
        words = f"--{name}/--no-{name}" if is_switch else f"--{name}"
        info.param_decls = (words, ALSO[option.name]) if option.name in ALSO else (words,)
    return Annotated[kind, info]
