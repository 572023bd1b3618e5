"""The command ``backends``, and the backends that an option chooses."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.table import Table

from attention_cli.terminal import Many, check_known, console, refusal
from attention_conformance.launch.libraries import dtypes_of, quiet_start
from attention_core.backend import announced_backends, available_backends, get_backend

if TYPE_CHECKING:
    from attention_cli.app import Backends


def backends(_: Backends, /) -> None:
    """List backends: versions, devices, floating-point types and modes."""
    table = Table("backend", "versions", "devices", "dtypes", "modes", header_style="bold")
    chosen_backends([])  # which raises, and says why, where there are none
    for name in announced_backends():
        if name not in available_backends():
            table.add_row(name, f"not installed: {_install(name)}", "", "", "", style="dim")
            continue
        with quiet_start():
            backend = get_backend(name)
        versions = "\n".join(f"{library} {number}" for library, number in backend.versions().items())
        columns = ("\n".join(lines) for lines in (backend.devices(), dtypes_of(backend), backend.modes))
        table.add_row(name, versions, *columns)
    console().print(table)


def chosen_backends(names: Many) -> list[str]:
    """The names of those that are asked for, or of all that are installed."""
    check_known("backend", names, announced_backends() or [get_backend("numpy").name])
    if missing := [name for name in names or () if name not in available_backends()]:
        raise refusal(f"backend {missing[0]} is not installed: {_install(missing[0])}")
    return [name for name in available_backends() if not names or name in names]


def _install(name: str) -> str:
    return f"install attention-core[{name.replace('_', '-')}]"
