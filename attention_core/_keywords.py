"""Keywords that a function does not take: other libraries' words for its own, and names that are close to one.

A call with the right keywords is not looked at: what Python raises for others is put into words afterwards.
"""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from types import FunctionType
from typing import Any, NamedTuple, TypeVar, cast

from ._arrays import explained

Function = TypeVar("Function", bound=Callable[..., Any])
Thing = TypeVar("Thing")


def untraced(function: Function) -> Function:
    """Let torch.compile call a function of plain values, and not trace it."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def kept(function: Function) -> Function:
    """Compute a function of plain values once for each of the last arguments, and let torch.compile call it."""
    found = functools.lru_cache(maxsize=1024)(function)

    @functools.wraps(function)
    def called(*values: Any) -> Any:
        return found(*values)

    return cast("Function", untraced(called))


@kept
def _table(name: str) -> list[tuple[str, Any]]:
    """The rows of one of the tables of words, which are read once something is wrong."""
    import tomllib  # noqa: PLC0415 (calls without mistakes do without both)
    from importlib import resources  # noqa: PLC0415

    text = resources.files(__package__).joinpath("words.toml").read_text(encoding="utf-8")
    return list(tomllib.loads(text)[name].items())


@functools.cache
def _others() -> dict[str, list[tuple[str, str]]]:
    """By a word of others: pairs of our keyword, and of what to write."""
    found: dict[str, list[tuple[str, str]]] = {}
    for ours, rows in _table("words"):
        for text, words in rows:
            for word in words.split():
                found.setdefault(word, []).append((ours, text))
    return found


def words_of(keyword: str, /) -> set[str]:
    """What other libraries call one of our keywords."""
    return {word for _, words in dict(_table("words"))[keyword] for word in words.split()}


def _hint(word: str, known: Iterable[str]) -> str | None:
    """What to write instead of another library's word, in a function with these keywords."""
    hints = (text for ours, text in _others().get(word, ()) if ours in known)
    return next(hints, None) or next((text for words, text in _table("without") if word in words.split()), None)


def choice_hint(word: str, choices: Iterable[str], /) -> str:
    """What to write instead of another library's word for one of these choices."""
    word = word.lower()
    theirs = {each: ours for ours, words in _table("choices") for each in (ours, *words.lower().split())}
    ours = next((each for each in (theirs.get(word, ""), word) if each in choices), None)
    return "" if ours is None else f": {ours!r} is the closest"


_OWNERS = ("self", "_cls")  # which are not given by who calls


def our_word(word: str, known: Iterable[str], /) -> str:
    """Another library's word as one of these, if it stands for one."""
    return next((ours for ours, _ in _others().get(word, ()) if ours in known), word)


class Names(NamedTuple):
    """The names of arguments: positional only, keywords too, how many have a place, and which have no default."""

    positional: tuple[str, ...]
    keywords: tuple[str, ...]
    places: int
    required: tuple[str, ...] = ()


def with_options(options: Sequence[inspect.Parameter], /) -> Callable[[Function], Function]:
    """Let a function show these options, which it takes as ``**options``, in its signature, and take no others."""

    def decorate(function: Function) -> Function:
        signature = inspect.signature(function)
        parameters = [*list(signature.parameters.values())[:-1], *options]
        function.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        function.options = tuple([each.name for each in options])  # type: ignore[attr-defined]
        return function

    return decorate


def names_of(function: Callable[..., Any], /) -> Names | None:
    """The names of a function's arguments, and of its ``**options``; ``None`` if unknown, or not written in Python."""
    plain: Any = inspect.unwrap(function)
    code, options = getattr(plain, "__code__", None), getattr(plain, "options", ())
    takes_any = inspect.CO_VARARGS if options else inspect.CO_VARARGS | inspect.CO_VARKEYWORDS
    if code is None or code.co_flags & takes_any:
        return None
    first, count, every = code.co_posonlyargcount, code.co_argcount, code.co_argcount + code.co_kwonlyargcount
    names, optional = code.co_varnames, plain.__kwdefaults__ or {}
    required = (*names[: count - len(plain.__defaults__ or ())], *(e for e in names[count:every] if e not in optional))
    keywords = (*names[first:every], *options)
    return Names(names[:first], keywords, count, tuple(each for each in required if each not in _OWNERS))


def keyword_error(name: str, names: Names, unknown: str, /) -> TypeError:
    """The error for a keyword that a function of these names does not take."""
    by_position = [unknown, *(ours for ours, _ in _others().get(unknown, ()))]
    found = next((f"{ours} by position" for ours in by_position if ours in names.positional), None)
    hint = found or _hint(unknown, names.keywords)
    if hint is not None:
        return TypeError(f"expected {hint}, in {name}; got the keyword {unknown}")
    taken = [each for each in names.keywords if each not in _OWNERS]
    close = [each for each in difflib.get_close_matches(unknown, taken, cutoff=0.7) if each != unknown]
    answer = f". Did you mean {' or '.join(map(repr, close))}?" if close else f": it takes {', '.join(taken)}"
    return TypeError(f"{name}() got an unexpected keyword argument {unknown!r}{answer}")


def places_error(name: str, names: Names, count: int, /) -> TypeError:
    """The error for more positional arguments than a function of these names takes."""
    arrays = ", ".join(each for each in (*names.positional, *names.keywords)[: names.places] if each not in _OWNERS)
    options = "options" if arrays else ", ".join(f"{each}=..." for each in names.keywords if each not in _OWNERS)
    expected = f"{arrays or 'nothing'} of {name} by position, and {options} by keyword"
    return TypeError(f"expected {expected}; got {count} by position")


def missing_error(name: str, names: Names, count: int, options: Iterable[str], /) -> TypeError | None:
    """The error for arguments that a call lacks, with so many by position; ``None`` if it has all."""
    order = (*names.positional, *names.keywords)
    missing = [each for each in names.required if each not in (*order[:count], *options)]
    if not missing:
        return None
    needed = ", ".join(each if each in order[: names.places] else f"{each}=..." for each in names.required)
    return TypeError(f"expected {name}({needed}); got no {' and no '.join(missing)}")


def call_error(raised: Exception, name: str, names: Names, count: int, options: Iterable[str]) -> TypeError | None:
    """The error that says why a call raised another: what it gives a function of these names, or an array's class."""
    if isinstance(raised, RuntimeError):
        got = explained(str(raised))
        return None if got is None else TypeError(f"expected plain arrays, in {name}; got {got}")
    for option in options:
        if option not in names.keywords:
            return keyword_error(name, names, option)
    if count > names.places:
        return places_error(name, names, count - ((*names.positional, *names.keywords)[0] in _OWNERS))
    return missing_error(name, names, count, options)


def in_place_of(function: Function, called: Any) -> Function:
    """A function called in the place of another, with its globals, by which doctest knows in which module it is."""
    plain: Any = function
    wrapper = FunctionType(called.__code__, plain.__globals__, plain.__name__, None, called.__closure__)
    return cast("Function", functools.update_wrapper(wrapper, plain))


def names_keywords(function: Function, name: str, names: Names | None = None, /) -> Function:
    """Let a function raise `call_error` where Python raises for what a call gives, by names that may be given.

    The signature stays, to readers, `inspect` and type checkers.
    """
    names = names or names_of(function)
    if names is None or hasattr(function, "names"):
        return function

    known = frozenset(names.keywords) if hasattr(function, "options") else None
    error_of = call_error

    def named(*arguments: Any, **options: Any) -> Any:
        try:
            if known is not None and not known.issuperset(options):
                raise TypeError
            return function(*arguments, **options)
        except (TypeError, RuntimeError) as raised:
            error = error_of(raised, name, names, len(arguments), options)
            if error is not None:
                raise error from None
            raise

    wrapper = in_place_of(function, named)
    wrapper.names = names  # type: ignore[attr-defined]
    return wrapper


def unconverted(thing: Thing, /) -> Thing:
    """Keep TensorFlow's AutoGraph from rewriting a function, or the call of a class, and all that it calls.

    The mark is that of `tf.autograph.experimental.do_not_convert`, and needs no TensorFlow.
    """
    thing.autograph_info__ = {}  # type: ignore[attr-defined]
    return thing


def publish(namespace: dict[str, Any], names: Iterable[str], /) -> None:
    """Let the functions, dataclasses and calls of a public module name keywords, and keep AutoGraph out of them.

    What is written in a private module gets the address of the public one, by which pickles and documentation know it.
    """
    for name in names:
        thing = namespace[name]
        if isinstance(thing, type):
            for method in ("__init__", "__call__"):
                if inspect.isfunction(vars(thing).get(method)):
                    setattr(thing, method, names_keywords(vars(thing)[method], name))
            for each in (thing, *filter(inspect.isfunction, vars(thing).values())):
                unconverted(each)
        elif inspect.isfunction(thing):
            thing = namespace[name] = unconverted(names_keywords(thing, name))
        if "._" in getattr(thing, "__module__", ""):
            thing.__module__ = namespace["__name__"]
