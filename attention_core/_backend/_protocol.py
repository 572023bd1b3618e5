"""What a library lends to the core beyond its array namespace."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, runtime_checkable

from attention_core._arrays import Array, Namespace


class Loops(Protocol):
    """Loops over blocks, as attention in blocks needs them.

    A state is an array, ``None``, a stack, or a tuple of states. An index is a Python integer or, where loops are
    traced, a 0-d int32 array, which adds and multiplies with Python integers.

    Attributes
    ----------
    traced : bool
        Whether a body is traced once for all indices. Then all blocks have the same size, and no value can be read.
    unit : float
        The logarithm of e to the base whose powers `powers` takes.
    """

    traced: bool
    log_base: float

    @property
    def softmax(self) -> Callable[[Array], Array] | None:
        """A softmax over the last axis in one pass; ``None`` where exponentials and their sum cost no more.

        That is where a compiler fuses them, or they are in the memory of the scores. A nan or inf in a row must make
        nan of at least one of its weights.
        """

    def exp_difference(self, x: Array, y: Array) -> Array:
        """Return ``exp(x - y)``, perhaps in the memory of ``x``, which is not used again."""

    def exp_scaled(self, x: Array) -> Array:
        """Return ``exp(x / unit)``, perhaps in the memory of ``x``, which is not used again."""

    def inplace(self, function: Callable[..., Array], x: Array, *others: Array | float) -> Array:
        """Return ``function(x, *others)``, perhaps in the memory of ``x``, which is not used again.

        The function is one of the namespace, elementwise, and the others broadcast to ``x``.
        """

    def matmul(self, x: Array, y: Array, memory: dict[str, Any], name: str) -> Array:
        """Return the product, perhaps in memory kept under a name, where the next one of this name is written."""

    def loop(self, start: Any, stop: Any, body: Callable[[Any, Any], Any], state: Any) -> Any:
        """Call ``state = body(index, state)`` for every index from start to before stop, and return the last state."""

    def cond(self, condition: Array, then: Callable[[], Any], otherwise: Callable[[], Any]) -> Any:
        """Call one of two functions, which return arrays of the same shape and dtype."""

    def block_at(self, x: Any, index: Any) -> Any:
        """The entry at an index of the first axis of an array, or of a list where loops are not traced.

        Of what `cut` returns, it is a block; where loops are not traced, a range of indices gives neighbours as one.
        """

    def split(self, x: Array, size: int, each: Callable[[Array], Array] = ...) -> Any:
        """The blocks of an array along axis -2, to be taken by `item`, after a function that looks at rows alone."""

    def block(self, x: Array, index: Any, size: int, axis: int) -> Array:
        """The block at an index along axis -2 or -1, of this size, or what is left of it where loops are not traced."""

    def norm(self, x: Array) -> Array:
        """The Euclidean norm over the last axis, without a warning where it overflows."""

    def to_list(self, x: Array) -> Any:
        """The values as nested lists; called only where loops are not traced."""

    def zero_blocks(self, count: Any, zero: Callable[[Any], Array], after: Array | None = None) -> Any:
        """So many blocks that are zero: ``zero(index)`` gives one.

        Memory for them is needed only once an array is there, which a compiler may have to be told.
        """

    def add_block(self, stack: Any, index: Any, block: Array) -> Any:
        """The stack with something added to one block."""

    def concat_blocks(self, stack: Any, count: Any, axis: int) -> Any:
        """The stack in which each run of so many blocks is joined along axis -2 or -1."""

    def stack_blocks(self, stack: Any) -> Array:
        """The blocks as one array, with a new first axis."""


class Tuning(NamedTuple):
    """What was measured to be fast on a backend.

    Attributes
    ----------
    queries : int
        How many queries a block has, counted over the heads that are computed together, but of each head no more than
        ``keys`` and no fewer than ``least``.
    keys : int
        How many keys a block has.
    backward_keys : int
        The same going backward, where more arrays of that size are needed at a time.
    least : int
    dense_below : int
        Up to how many scores, M × N, the dense form is faster than blocks.
    dense_most : float
        How many scores of all heads it may hold at once, where it is faster, but takes more memory than blocks.
    structured_below : int
        The same under a mask that tells of blocks whether they are to be computed.
    query_chunk : int
        How many queries, or more, take a library's softmax over all keys within reach of a mask; 0 for none.
    exact_scores : int
        How many scores a block has in reproducible arithmetic, in float64: such that they stay in a cache.
    """

    queries: int
    keys: int
    least: int
    dense_below: int
    structured_below: int
    backward_keys: int = 512
    exact_scores: int = 2**18
    dense_most: float = math.inf
    query_chunk: int = 0


class Operation(NamedTuple):
    """A function of arrays with a gradient of our own.

    Attributes
    ----------
    forward : callable
        ``forward(plan, arrays, backend)`` returns a tuple of results. The plan is a tuple that compares by value.
    backward : callable
        ``backward(plan, arrays, results, cotangents, backend)`` returns a gradient for each array, ``None`` for those
        that are not of floating point.
    abstract : callable
        ``abstract(plan, arrays, backend)`` returns arrays of the shapes and dtypes of the results.
    needs_float64 : bool
        Whether float64 is computed with inside, which a library may have to be told to do.
    """

    forward: Callable[..., tuple[Array, ...]]
    backward: Callable[..., tuple[Array | None, ...]]
    abstract: Callable[..., tuple[Array, ...]]
    needs_float64: bool = False


class Kernel(Protocol):
    """A fused kernel of a library, and when it means what attention means here.

    Attributes
    ----------
    name : str
        As its users know it.
    """

    name: str

    def preferred(self, call: Any, /) -> bool:
        """Whether the kernel is faster than the core's own implementations, if it gives the answer."""

    def refusal(self, call: Any, /) -> str | None:
        """Why the kernel would not give the answer to a `Call`, or ``None``."""

    def attend(self, call: Any, /) -> Array:
        """The output of attention, in the query's dtype."""


@runtime_checkable
class Backend(Protocol):
    """What the core, its tests and the conformance command need of a framework beyond its array namespace.

    A tree is an array, or a (named) tuple, list or dict of trees; ``None`` and Python numbers are left alone.

    Attributes
    ----------
    name : str
        The name under which the library is imported, and under which the backend is found.
    namespace : module
        The functions of the array API standard. It may carry two that the standard lacks, and the core uses them where
        they are: ``erfc(x)``, and ``shape(x)``, whose entries are integers, or 0-d integer arrays for dimensions that
        are unknown while a function is traced.
    modes : tuple of str
        The ways in which a function can be run, ``"eager"`` first; such as ``("eager", "graph", "xla")``.
    dtypes : tuple of str
        The floating-point types that the library computes with as configured, such as ``("float32", "float64")``.
    differentiates : bool
        Whether `value_and_grad` is to be had.
    loops : Loops
        How blocks are run through.
    tuning : Tuning
        What was measured to be fast.
    kernels : tuple of Kernel
        Fused kernels of the library, the best first.
    """

    name: str
    namespace: Namespace
    modes: tuple[str, ...]
    differentiates: bool
    loops: Loops
    tuning: Tuning
    kernels: tuple[Kernel, ...]

    @property
    def dtypes(self) -> tuple[str, ...]:
        """The floating-point types that the library computes with as configured."""

    def versions(self) -> dict[str, str]:
        """Versions of the library and of what it computes with, by distribution name."""

    def owns(self, array: Array, /) -> bool:
        """Whether this is an array of the library, traced ones included."""

    def is_concrete(self, array: Array, /) -> bool:
        """Whether the values can be read now: not while a compiler traces, not on a device that holds none."""

    def devices(self) -> list[str]:
        """Names of the devices on which arrays can be placed, the default one first."""

    def from_numpy(self, tree: Any, /, *, device: str | None = None, dtype: str | None = None) -> Any:
        """Turn the NumPy arrays of a tree into arrays of the library.

        Arrays of floating point become ``dtype`` where that is given; all are placed on ``device`` where that is given.
        """

    def to_numpy(self, tree: Any, /) -> Any:
        """Turn the arrays of a tree into NumPy arrays of the same dtype (bfloat16 as that of ``ml_dtypes``)."""

    def to_device(self, tree: Any, device: str, /) -> Any:
        """Place the arrays of a tree on one of `devices`."""

    def compile(self, function: Callable[..., Any], /, *, mode: str | None = None) -> Callable[..., Any]:
        """Compile a function of trees of arrays, in one of `modes`, by default the last."""

    def value_and_grad(self, function: Callable[..., Array], /) -> Callable[..., tuple[Array, tuple[Any, ...]]]:
        """Turn a function of trees to a 0-d array into one that also returns the gradient for each positional argument.

        Raises
        ------
        TypeError
            When the library does not differentiate.
        """

    def stop_gradient(self, array: Array, /) -> Array:
        """Return the array as one that nothing is differentiated by."""

    def custom_gradient(self, operation: Operation, plan: Any, arrays: tuple[Array, ...], /) -> tuple[Array, ...]:
        """Return the results of an `Operation`, to be differentiated by its own backward function."""

    def vjp(
        self, function: Callable[..., Array], /, *arrays: Array
    ) -> tuple[Array, Callable[[Array], tuple[Array, ...]]]:
        """Return the value of a function, and what turns its cotangent into one for each array.

        Raises
        ------
        TypeError
            When the library does not differentiate.
        """
