"""From the text of a target to a kernel.

``package.module:callable``, ``path/file.py:callable``, or a preset.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from attention_conformance.kernel.presets import PRESETS, Preset
from attention_conformance.launch.subject import Subject


class TargetError(ValueError):
    """A target that cannot be loaded."""


def load_target(target: str, backward: str | None = None, **declared: Any) -> Subject:
    """Load a kernel, with declarations that come before what is found.

    Parameters
    ----------
    target : str
    backward : str, optional
        The second of a pair of functions, as a target, or as a name in the same file.
    **declared
        Fields of `Subject`.

    Returns
    -------
    Subject
    """
    if ":" not in target and target not in PRESETS:
        raise TargetError(f"expected module:callable, file.py:callable or one of {', '.join(PRESETS)}; got {target!r}")
    loaded = _callable(target) if ":" in target else PRESETS[target]
    if isinstance(loaded, Preset):
        loaded, declared = _made(target, loaded), {"name": target, **declared}
    if isinstance(loaded, Subject):
        return Subject(loaded.function, **{**loaded.declared, "backward": loaded.backward, **declared})
    pair = None
    if backward is not None:
        pair = _callable(backward if ":" in backward else f"{target.rpartition(':')[0]}:{backward}")
    return Subject(loaded, **{"name": target, "backward": pair, **declared})


def _made(name: str, preset: Preset) -> Subject:
    try:
        return preset.make()
    except ModuleNotFoundError as error:
        lacking = _lacking(preset.package, error)
        raise TargetError(f"expected {lacking} for {name}; got none: pip install {lacking}") from error


def _lacking(package: str, error: ModuleNotFoundError) -> str:
    """The package that a preset lacks: its own, or one that it needs and does not install."""
    try:
        version(package.partition("[")[0])
    except PackageNotFoundError:
        return package
    return (error.name or package).partition(".")[0]


def load_object(target: str) -> Any:
    """Import what ``package.module:name`` or ``path/file.py:name`` says.

    Raise TargetError when there is no such module, or it has no such name.
    """
    source, _, path = target.rpartition(":")
    loaded = _module(source)
    for name in path.split("."):
        if not hasattr(loaded, name):
            raise TargetError(f"expected a callable of {source}; got {path!r}, which it does not have")
        loaded = getattr(loaded, name)
    return loaded


def _callable(target: str) -> Callable[..., Any] | Subject | Preset:
    loaded = load_object(target)
    if not callable(loaded) and not isinstance(loaded, Subject | Preset):
        raise TargetError(f"expected {target} to be callable; got {type(loaded).__name__}")
    return loaded  # type: ignore[no-any-return]


def _module(source: str) -> Any:
    if not source.endswith(".py"):
        sys.path.insert(0, "")
        try:
            return importlib.import_module(source)
        except ModuleNotFoundError as error:
            raise TargetError(f"expected a module to import; got {source!r}: {error}") from error
        finally:
            sys.path.remove("")
    path = Path(source).resolve()
    if not path.is_file():
        raise TargetError(f"expected a file of Python; got {source!r}: no such file")
    specification = importlib.util.spec_from_file_location(path.stem, path)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    sys.modules.setdefault(path.stem, module)  # as dataclasses and pickles look for it
    sys.path.insert(0, str(path.parent))
    try:
        specification.loader.exec_module(module)
    finally:
        sys.path.remove(str(path.parent))
    return module
