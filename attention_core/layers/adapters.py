"""Layers of a framework, made of definitions: their signatures, their documentation, and what they share.

A layer of an adapter holds arrays and a definition, which says what they are and computes. An adapter writes one class
for each definition, of its name, and makes of it what follows.
"""

from __future__ import annotations

import inspect
import itertools
import linecache
import operator
import re
from collections.abc import Callable, Container, Iterable, Mapping
from typing import Any, ClassVar, Self

from .._arrays import named_arrays, on_device_of
from .._backend import announced, common_namespace
from . import KINDS
from ._layer import Layer, check_fit

__all__ = ["Adapted", "FixedSettings", "call_of", "constructor", "described", "settings_signature"]

_REST = ("*settings", "**named")  # of the constructor of an adapter, for settings that a definition says one by one
_INNER = ("self", "parameters", "state", "xp")  # of the call of a definition, which a layer gives


class FixedSettings:
    """A layer whose settings are fixed, and which tells the place of an attribute that is not there.

    Attributes
    ----------
    definition : Layer
        The settings, and what is computed.
    """

    definition: Any
    _places: ClassVar[Mapping[str, str]] = {"settings": "layer.definition", "parameters": "layer.parameters"}

    def __setattr__(self, name: str, value: Any) -> None:
        definition = self.__dict__.get("definition")
        if definition is not None:
            definition.check_assigned(name, value)
        super().__setattr__(name, value)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)  # type: ignore[misc]
        except AttributeError:
            definition = None if name.startswith("_") else self.__dict__.get("definition")
            if definition is None:
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}") from None
            raise definition.place_of(name, type(self).__name__, **self._places) from None

    def with_settings(self, **changes: Any) -> Self:
        """Copy the layer with other settings, such as ``arithmetic``, ``implementation`` or ``dropout``.

        Raises
        ------
        TypeError, ValueError
            As `attention_core.layers.Layer.with_settings`.
        """
        raise NotImplementedError

    def read(self) -> Any:
        """The parameters that are held now, as the definition takes them: a tree of arrays of the library."""
        raise NotImplementedError

    def empty_cache(
        self, leading: tuple[Any, ...], capacity: int, /, *, ragged: bool = False, dtype: Any = None, device: Any = None
    ) -> Any:
        """Make an empty cache for a `Decoder` or a `DecoderLayer`, as `attention_core.cache.empty_cache` does.

        Parameters
        ----------
        leading : tuple of int
            The sizes of the batch axes.
        capacity : int
        ragged : bool
            Whether each sequence of the batch has its own length.
        dtype, device : optional
            By default those of the parameters.

        Raises
        ------
        AttributeError
            When the layer takes no cache.
        """
        make, like = self.definition.empty_cache, next(iter(named_arrays(self.read()).values()))
        dtype, device = dtype or like.dtype, device or on_device_of(like).get("device")
        xp = common_namespace(None, {"parameters": like})
        return make(leading, capacity, ragged=ragged, dtype=dtype, device=device, xp=xp)


class Adapted(FixedSettings):
    """A layer with values that come from NumPy and go there.

    Attributes
    ----------
    kind : type
        The class of its definition: unless it says so, that of its name in `attention_core.layers`.
    """

    kind: ClassVar[type[Layer]]
    _classes: ClassVar[dict[type[Layer], Any]]  # by kind

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if not hasattr(cls, "kind") and cls.__name__ in KINDS:
            cls.kind = KINDS[cls.__name__]
        if "kind" in vars(cls):
            cls._complete()
            cls._classes.setdefault(cls.kind, cls)

    @classmethod
    def _complete(cls) -> None:
        """Give a class of a kind what depends on it, such as the signature of its call."""

    @classmethod
    def from_numpy(
        cls, definition: Layer, parameters: Any, state: Any = (), *, device: Any = None, dtype: Any = None
    ) -> Self:
        """Make a layer of what `to_numpy` returns, on any framework.

        Parameters
        ----------
        definition : attention_core.layers.Layer
            Of the class of the same name; on the base of all layers, of any.
        parameters, state : trees of numpy.ndarray
            With the names and shapes that the definition says.
        device : optional
            In the framework's own words; by default where it makes arrays.
        dtype : optional
            By default those of the arrays, bit for bit.

        Raises
        ------
        TypeError, ValueError
            When the definition is not one of this class, or arrays do not fit it.
        """
        raise NotImplementedError

    def to_numpy(self) -> tuple[Any, Any]:
        """Copy parameters and state to trees of NumPy arrays, bit for bit; bfloat16 is that of ``ml_dtypes``."""
        raise NotImplementedError

    @classmethod
    def _class_of(cls, definition: Layer, parameters: Any, state: Any, /) -> type[Self]:
        """The class that holds these arrays: this one, or on the base of all layers that of the definition."""
        kind = type(definition)
        found: Any = cls if hasattr(cls, "kind") else cls._classes.get(kind) or announced(cls.__module__, kind.__name__)
        if found is None or kind is not found.kind:
            known = [cls.kind] if hasattr(cls, "kind") else cls._classes
            names = " or ".join(each.__name__ for each in known)
            raise TypeError(f"expected a definition of {names}; got {kind.__name__}")
        check_fit(definition, parameters, state)
        return found  # type: ignore[no-any-return]


# --- signatures ---


def settings_signature(
    function: Callable[..., Any], kind: type, /, *, keeps_rest: bool = False, defaults: Mapping[str, Any] | None = None
) -> inspect.Signature:
    """The signature of a function with the settings of a layer in the place of ``*settings``.

    What stands for other keywords is left out, unless it is to be kept. Some settings may have another default.
    """
    parameters = inspect.signature(function).parameters.values()
    positional = [one for one in parameters if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)]
    keywords = [one for one in parameters if one.kind is one.KEYWORD_ONLY]
    rest = [one for one in parameters if keeps_rest and one.kind is one.VAR_KEYWORD]
    defaults = defaults or {}
    settings = [
        one.replace(default=defaults.get(one.name, one.default)) for one in inspect.signature(kind).parameters.values()
    ]
    return inspect.Signature([*positional, *settings, *keywords, *rest])


def constructor(
    base: type, kind: type, /, *, keeps_rest: bool = False, defaults: Mapping[str, Any] | None = None
) -> Callable[..., None]:
    """An ``__init__`` that calls that of a base class, and shows the settings of a layer as its arguments."""

    def __init__(self: Any, *settings: Any, **options: Any) -> None:  # noqa: N807 (it is that)
        base.__init__(self, *settings, **options)  # type: ignore[misc]

    signature = settings_signature(base.__init__, kind, keeps_rest=keeps_rest, defaults=defaults)  # type: ignore[misc]
    __init__.__signature__ = signature.replace(return_annotation=None)  # type: ignore[attr-defined]
    return __init__


def call_of(
    kind: type[Layer],
    name: str,
    /,
    *,
    renamed: Mapping[str, str] | None = None,
    added: Iterable[str] = (),
    words: str | None = "",
) -> Callable[..., Any]:
    """A method with the arguments and the documentation of a definition's call, which hands them to ``self._call``.

    Parameters
    ----------
    kind : type
    name : str
        Of the method, such as ``forward``.
    renamed : mapping, optional
        What the framework calls an option.
    added : iterable of str
        Options of the framework, ``None`` by default.
    words : str or None
        What the framework says of options, as `described` takes it.

    Examples
    --------
    >>> import inspect
    >>> from attention_core.layers import Embeddings
    >>> from attention_core.layers.adapters import call_of
    >>> print(inspect.signature(call_of(Embeddings, "call", added=["training"])))
    (self, token_ids: 'Array', *, position_ids: 'Array | None' = None, segment_ids: 'Array | None' = None, \
seed: 'Any' = None, training: 'Any' = None) -> 'Any'
    """
    call, renamed = kind.__call__, renamed or {}
    taken = [one for one in inspect.signature(call).parameters.values() if one.name not in _INNER]
    arrays = [one for one in taken if one.kind is one.POSITIONAL_ONLY]
    options = [one.replace(name=renamed.get(one.name, one.name)) for one in taken if one.kind is one.KEYWORD_ONLY]
    options += [
        inspect.Parameter(each, inspect.Parameter.KEYWORD_ONLY, default=None, annotation="Any") for each in added
    ]
    shown = [one.name if one.default is one.empty else f"{one.name}={one.default!r}" for one in (*arrays, *options)]
    if options:
        shown.insert(len(arrays), "*")
    passed = [*(one.name for one in arrays), *(f"{one.name}={one.name}" for one in options)]
    source = f"def {name}(self, {', '.join(shown)}):\n    return self._call({', '.join(passed)})\n"
    # Written as text, as dataclasses do it: compilers and exporters read the arguments of the code itself.
    file, made = f"<{name} of {kind.__name__}>", dict[str, Any]()
    linecache.cache[file] = len(source), None, source.splitlines(keepends=True), file
    exec(compile(source, file, "exec"), inspect.unwrap(call).__globals__, made)  # where annotations have their names
    function: Callable[..., Any] = made[name]
    function.__qualname__ = f"{kind.__name__}.{name}"
    function.__annotations__ = {one.name: one.annotation for one in (*arrays, *options)} | {"return": "Any"}
    function.__doc__ = described(call.__doc__, words, renamed=renamed, names=list(function.__annotations__))
    return function


# --- documentation ---


def described(
    doc: str | None,
    words: str | None = "",
    /,
    *,
    renamed: Mapping[str, str] | None = None,
    names: Container[str] | None = None,
    class_doc: str | None = None,
) -> str | None:
    r"""The docstring of a definition in the words of a framework.

    Parameters
    ----------
    doc : str or None
        Of numpydoc; ``None`` where Python has removed it.
    words : str or None
        Of numpydoc, too: its parameters come in the place of those of the same names, or at the end.
    renamed : mapping, optional
        Other names of its parameters.
    names : container of str, optional
        Of the parameters that are there; by default all.
    class_doc : str, optional
        A docstring whose beginning and examples are to stand in the place of those of the other.

    Examples
    --------
    >>> from attention_core.layers.adapters import described
    >>> text = "Apply.\n\nParameters\n----------\nx, y : Array\nxp : namespace"
    >>> described(text, "Of the framework.\n\nParameters\n----------\ny : Tensor\n    Or a number.")
    'Apply.\n\nParameters\n----------\nx : Array\ny : Tensor\n    Or a number.\nxp : namespace'
    """
    if doc is None:
        return class_doc
    sections, renamed = _sections(doc), renamed or {}
    found = {renamed.get(name, name): text for name, text in _entries(sections.get("Parameters", "")).items()}
    entries = found | _entries(_sections(words or "").get("Parameters", ""))
    if found:
        kept = [each for each in entries.items() if names is None or each[0] in names]
        alike = itertools.groupby(kept, operator.itemgetter(1))  # which the docstring said at once
        sections["Parameters"] = "\n".join(", ".join(name for name, _ in each) + text for text, each in alike)
    if class_doc is not None:
        ours = _sections(class_doc)
        theirs = {name: text for name, text in sections.items() if name not in ("", "Examples")}
        sections = {"": ours.pop(""), **theirs, **ours}
    return "\n\n".join(f"{name}\n{'-' * len(name)}\n{text}" if name else text for name, text in sections.items())


def _sections(doc: str) -> dict[str, str]:
    """The sections of a docstring by their titles; what comes before them is that of no title."""
    first, *others = re.split(r"\n\n(?=\w+\n-+\n)", inspect.cleandoc(doc))
    return {"": first} | {title: text for title, _, text in (each.split("\n", 2) for each in others)}


def _entries(section: str) -> dict[str, str]:
    """The parameters of a section: by name, all that comes after it."""
    entries = [
        re.match(r"([^\s:,]+(?:, [^\s:,]+)*)(.*)", each, re.DOTALL) for each in re.split(r"\n(?=\S)", section.strip())
    ]
    return {name: each[2] for each in entries if each for name in each[1].split(", ") if name not in _REST}
