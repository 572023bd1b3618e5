"""The base class of backends: what the core needs of a library beyond its array namespace, and what it does without."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol, TypeVar

from .._arrays import Array, DType, Namespace, on_device_of
from ._loops import Loops

Thing = TypeVar("Thing")

_things: dict[str, object] = {}
_names: dict[object, str] = {}


def register(name: str, thing: Thing) -> Thing:
    """Give a class, a function or an `Operation` the name by which saved programs know it; return the thing.

    Raises
    ------
    ValueError
        When the name is taken.
    """
    if _things.setdefault(name, thing) is not thing:
        raise ValueError(f"expected a name that is not taken; got {name!r}, which is that of {_things[name]!r}")
    _names[thing] = name
    return thing


def registered(name: str) -> object:
    """The thing of a name; ``None`` if there is none."""
    return _things.get(name)


def registered_name(thing: object) -> str | None:
    """The name of a thing; ``None`` if it has none."""
    return _names.get(thing)


class Collectives(Protocol):
    """The collectives of a library, on its own groups of ranks: all of these members.

    An adapter only translates. All ranks call the same members in the same order. Arrays of R leading entries have one
    for each rank.
    """

    def name_of(self, group: Any, /) -> str:
        """Return the name of a group, which plans hold and compilers keep.

        Raises
        ------
        TypeError, ValueError
            When this is no group, or not one of this library, or it cannot be used here.
        """

    def size(self, group: str, /) -> int:
        """Return R, the number of ranks."""

    def rank(self, group: str, /) -> int | Array:
        """Return the index of this rank: a number, or a 0-d array of int32 where one program runs on all ranks."""

    def all_gather(self, x: Array, group: str, /) -> Array:
        """Return the arrays (...) of all ranks, (R, ...), on each."""

    def sum_scatter(self, x: Array, group: str, /) -> Array:
        """Return the sum over ranks of their entry of arrays (R, ...) for this one, (...)."""

    def exchange(self, x: Array, group: str, /) -> Array:
        """Return what each rank has for this one: entry r goes to rank r, where it is the entry of the sender."""

    def rotate(self, arrays: tuple[Array, ...], group: str, by: int, /) -> Callable[[], tuple[Array, ...]]:
        """Start to send arrays to the rank so many places on; what is returned waits for those of the rank behind."""

    def largest(self, x: Array, group: str, /) -> Array:
        """Return the maxima of the arrays of all ranks, which hold no NaN."""

    def total(self, x: Array, group: str, /) -> Array:
        """Return the sum of the arrays of all ranks."""


class Ranks(NamedTuple):
    """The ranks of a group, over which sums and maxima are taken."""

    collectives: Collectives
    group: str

    def largest(self, x: Array) -> Array:
        """Return the maxima of the arrays of all ranks, which hold no NaN."""
        return self.collectives.largest(x, self.group)

    def total(self, x: Array) -> Array:
        """Return the sum of the arrays of all ranks."""
        return self.collectives.total(x, self.group)


def ranks_of(backend: Any, group: str | None) -> Ranks | None:
    """Return the ranks of a group, if there is one."""
    return None if group is None else Ranks(backend.collectives, group)


class Tuning(NamedTuple):
    """Sizes of blocks, and the bounds between implementations, as measured on a backend.

    Attributes
    ----------
    queries : int
        The queries in a block, counted over the heads that are computed together. One head has at most ``keys`` of
        them, and at least ``min_queries``.
    keys : int
        The keys in a block.
    min_queries : int
        The fewest queries of one head in a block.
    dense_below : int
        The number of scores, M × N, up to which the dense form is faster than blocks.
    structured_below : int
        The same under a mask that leaves out blocks.
    backward_keys : int
        The keys in a block of the backward pass, which needs more arrays of that size at a time.
    exact_scores : int
        The scores in a block of reproducible arithmetic, in float64: few enough to stay in a cache.
    dense_most : float
        The number of scores of all heads that the dense form may hold at once, as it needs more memory than blocks.
    query_chunk : int
        The fewest queries in a chunk of a library's softmax over all keys within reach of a mask; 0 for no chunks.
    costly_most : float
        The number of scores of all heads up to which the dense form is faster although it costs more. It branches on
        values that are not finite under a mask or bias, and repeats keys. A few queries are left out.
    """

    queries: int
    keys: int
    min_queries: int
    dense_below: int
    structured_below: int
    backward_keys: int = 512
    exact_scores: int = 2**18
    dense_most: float = math.inf
    query_chunk: int = 0
    costly_most: float = math.inf


DIFFERENTIATED_ONCE = (
    "attention in blocks, by a kernel with its logsumexp, and in reproducible arithmetic is differentiated backward,"
    " once: arithmetic='fast', with implementation='dense' for attention, can be differentiated again"
)
"""The message of a backend when an `Operation` is differentiated twice."""


class Operation(NamedTuple):
    """A function of arrays with its own backward function.

    Attributes
    ----------
    forward : callable
        ``forward(plan, arrays, backend)`` returns a tuple of results. The plan is a hashable tuple without arrays.
    backward : callable
        ``backward(plan, arrays, results, cotangents, backend)`` returns a gradient for each array, and ``None`` for
        arrays of integers or booleans.
    abstract : callable
        ``abstract(plan, arrays, backend)`` returns arrays of the shapes and dtypes of the results, without computing.
    needs_float64 : bool
        Whether it computes in float64 inside, which a library may have to be told.
    refusal : str or None
        Why it has no gradient, if it has none. A library that knows before forward that it will go backward says so.
    lasts : callable or None
        Whether ``lasts(plan)`` both functions read nothing but their arguments: one program may then serve many calls.
    """

    forward: Callable[..., tuple[Array, ...]]
    backward: Callable[..., tuple[Array | None, ...]]
    abstract: Callable[..., tuple[Array, ...]]
    needs_float64: bool = False
    refusal: str | None = None
    lasts: Callable[[Any], bool] | None = None


class Autocast(Protocol):
    """How a library casts arguments of functions by itself: all of these members."""

    def is_on(self) -> bool:
        """Whether it does now, for arrays of any device. Every call of a public function asks."""

    def dtype(self, array: Array, /) -> DType | None:
        """Return the dtype that arguments are cast to on the device of an array; ``None`` if they are not."""

    def on(self, array: Array, dtype: str, /) -> AbstractContextManager[Any]:
        """Turn it on, with a dtype of this name, on the device of an array."""

    def off(self, array: Array, /) -> AbstractContextManager[Any]:
        """Turn it off on the device of an array."""


class Backend:
    """The part of a framework that the core, its tests and the conformance command use besides its array namespace.

    This is a base class, for a library of which nothing else is known: loops are in Python, and devices, values and
    gradients are left out. An adapter overrides what it knows better.

    A tree is an array, or a (named) tuple, list or dict of trees. ``None`` and Python numbers in a tree stay.

    Parameters
    ----------
    xp : module
        The functions of the array API standard. Three more are used where they exist: ``erfc(x)``, ``shape(x)`` and
        ``one_program(function)``. The shape holds integers, or 0-d integer arrays for dimensions that are unknown while
        a function is traced. ``one_program`` compiles a function of arrays and of keywords that are constants.
    loops : Loops, optional
        Loops over blocks, by default in Python.

    Attributes
    ----------
    name : str
        The name by which the library is imported, and the backend looked up.
    namespace : module
        ``xp``.
    modes : tuple of str
        The ways to run a function, ``"eager"`` first, such as ``("eager", "graph", "xla")``.
    dtypes : tuple of str
        The floating-point types that the library computes in as configured, such as ``("float32", "float64")``.
    differentiates : bool
        Whether `vjp` is overridden, and with it `value_and_grad`.
    holds_values : bool
        Whether all arrays have values that can be read at any time, so that `is_concrete` is not asked.
    loops : Loops
        Loops over blocks.
    tuning : Tuning
        Sizes of blocks, as measured.
    kernels : tuple of Kernel
        Fused kernels of the library, the best first.
    autocast : Autocast or None
        How the library casts arguments of functions by itself, if it ever does.
    without_warnings : callable or None
        Gives a context in which the library warns of no number, and raises for none, whatever the user asks for, if
        it ever does either.
    update_rows : callable or None
        ``update_rows(array, rows, start, donate=...)``, if the library writes rows without reading the others. It
        returns an array (..., C, D) with rows (..., L, D) written over those at start, ..., start + L - 1. ``start`` is
        a 0-d array of integers, or one of shape (...) for arrays (..., G, C, D); no row is beyond C. With ``donate``
        the memory of the array may be written over: it is not used again.
    silu, affine, normalize : callable or None
        The sigmoid linear unit ``silu(x)``, an affine map ``affine(x, weight, bias)`` and a layer normalization
        ``normalize(x, scale, offset, epsilon)`` of channels whose mean is near 0, if the library has them in one pass.
        SiLU may be 0 where the exponential of ``-x`` overflows. The formulas of the core take a pass over memory for
        each operation, unless a compiler fuses them.
    collectives : Collectives or None
        What the library lends to compute over several ranks, if it runs on groups of them.
    as_step : callable or None
        ``as_step(name, function)`` is what PyTorch's compiler reads in the place of a public function of that name.
    has_gradient : callable or None
        Whether an array tells that a gradient will be computed of what it was computed from, if arrays do. Blocks
        refuse a function of scores that closes over such an array, whose gradient they would not compute. Ranks refuse
        to merge from such arrays before anything is sent.
    """

    modes: tuple[str, ...] = ("eager",)
    tuning = Tuning(queries=2048, keys=512, min_queries=64, dense_below=512 * 512, structured_below=256 * 256)
    kernels: tuple[Any, ...] = ()
    holds_values = False
    autocast: Autocast | None = None
    without_warnings: Callable[[], AbstractContextManager[Any]] | None = None
    update_rows: Callable[..., Array] | None = None
    silu: Callable[[Array], Array] | None = None
    affine: Callable[[Array, Array, Array], Array] | None = None
    normalize: Callable[[Array, Array, Array, float], Array] | None = None
    has_gradient: Callable[[Array], bool] | None = None
    as_step: Callable[[str, Any], Callable[..., Any]] | None = None
    collectives: Collectives | None = None

    def __init__(self, xp: Namespace, loops: Loops | None = None) -> None:
        self.name: str = library_name(xp)
        self.namespace = xp
        self.loops: Loops = Loops(xp) if loops is None else loops
        self.differentiates: bool = type(self).vjp is not Backend.vjp

    def __reduce_ex__(self, protocol: Any, /) -> Any:
        """Copies and pickles of an announced backend are this one, by its name."""
        from ._find import entries, get_backend  # noqa: PLC0415 (which imports this file)

        is_announced = self.name in entries() and get_backend(self.name) is self
        return (get_backend, (self.name,)) if is_announced else super().__reduce_ex__(protocol)

    @property
    def dtypes(self) -> tuple[str, ...]:
        """The floating-point types that the library computes in as configured."""
        return ("float32", "float64")

    def versions(self) -> dict[str, str]:
        """Return versions of the library and of the packages that it computes with, by distribution name."""
        return {}

    def owns(self, array: Array, /) -> bool:
        """Whether this is an array of the library, traced ones included."""
        return False

    def is_concrete(self, array: Array, /) -> bool:
        """Whether the values can be read now: not while a compiler traces, not on a device that holds none."""
        return self.holds_values

    def devices(self) -> list[str]:
        """Return the names of the devices on which arrays can be placed, the default one first."""
        return []

    def from_numpy(self, tree: Any, /, *, device: str | None = None, dtype: str | None = None) -> Any:
        """Turn the NumPy arrays of a tree into arrays of the library.

        Arrays of floating point are cast to ``dtype``, and all are placed on ``device``, where these are not ``None``.
        """
        raise self._missing()

    def to_numpy(self, tree: Any, /) -> Any:
        """Turn the arrays of a tree into NumPy arrays of the same dtype (bfloat16 as that of ``ml_dtypes``)."""
        raise self._missing()

    def array_of(self, numbers: Sequence[float], dtype: Any, like: Array, /) -> Array:
        """Return an array of numbers, or of lists, on the device of another: perhaps one that was returned before.

        To copy numbers to a device may wait for it.
        """
        return self.namespace.asarray(numbers, dtype=dtype, **on_device_of(like))

    def compile(self, function: Callable[..., Any], /, *, mode: str | None = None) -> Callable[..., Any]:
        """Compile a function of trees of arrays, in one of `modes`, by default the last."""
        return function

    def value_and_grad(self, function: Callable[..., Array], /) -> Callable[..., tuple[Array, tuple[Any, ...]]]:
        """Turn a function of trees to a 0-d array into one that also returns the gradient for each positional argument.

        Raises
        ------
        TypeError
            When the library does not differentiate.
        """
        raise self._undifferentiated()

    def stop_gradient(self, array: Array, /) -> Array:
        """Return the array as a constant of derivatives."""
        return array

    def with_tangent(self, function: Callable[..., Array], tangent: Callable[..., Array], *arrays: Array) -> Array:
        """Return ``y = function(*arrays)``, whose directional derivative is ``tangent(arrays, y, tangents)``.

        That is linear in the tangents of floating-point arrays; others are constants. Neither function closes over an
        array. By default the tangent is not asked for: the library differentiates the function as it is.
        """
        return function(*arrays)

    def draw_seed(self, source: Any, /) -> Any:
        """Return a seed, two words of 32 bits, from a key or a generator of the library; anything else as it is."""
        return source

    def custom_gradient(self, operation: Operation, plan: Any, arrays: tuple[Array, ...], /) -> tuple[Array, ...]:
        """Return the results of an `Operation`, differentiated by its own backward function.

        By default it is computed forward. A library that differentiates by itself still does.
        """
        return operation.forward(plan, arrays, self)

    def vjp(
        self, function: Callable[..., Array], /, *arrays: Array
    ) -> tuple[Array, Callable[[Array], tuple[Array, ...]]]:
        """Return the value of a function, and a function from its cotangent to those of the arrays.

        Raises
        ------
        TypeError
            When the library does not differentiate.
        """
        raise self._undifferentiated()

    def _missing(self) -> TypeError:
        return TypeError(f"expected a library with a backend; got {self.name}, which announces none")

    def _undifferentiated(self) -> TypeError:
        return TypeError(
            f"expected a backend that differentiates, such as jax, tensorflow, torch; got {self.name}, which does not"
        )


def library_name(xp: Namespace) -> str:
    """The name a user knows a namespace by: ``torch`` for ``array_api_compat.torch``."""
    name: str = xp.__name__.removeprefix("array_api_compat.").removeprefix("attention_")
    return name.partition(".")[0]
