"""The protocols of a backend: what the core needs of a library beyond its array namespace."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol, runtime_checkable

from attention_core._arrays import Array, Namespace, on_device_of


class Workspace(threading.local):
    """Memory by name, of each thread its own: to write to fresh memory may take as long as what is written."""

    def __init__(self) -> None:
        self._arrays: dict[str, Array] = {}

    def array(self, name: str, dims: tuple[int, ...], dtype: Any, like: Array, xp: Namespace) -> Array:
        """An array in the memory of this name, on the device of another one; what was there before is lost."""
        size = math.prod(dims)
        if name not in self._arrays or self._arrays[name].shape[0] < size:
            self._arrays[name] = xp.empty(size, dtype=dtype, **on_device_of(like))
        return xp.reshape(self._arrays[name][:size], dims)


class Loops(Protocol):
    """Loops over blocks, and the operations of their bodies.

    A state is an array, ``None``, a stack of blocks, or a tuple of states. An index is a Python integer or, where loops
    are traced, a 0-d int32 array.

    Attributes
    ----------
    traced : bool
        Whether a body is traced once for all indices. Then all blocks have the same size, and no value can be read.
    log_base : float
        The logarithm of e to the base of `exp_scaled`: 1 for base e, log2(e) for base 2.
    """

    traced: bool
    log_base: float

    @property
    def softmax(self) -> Callable[[Array], Array] | None:
        """A softmax over the last axis in one pass, or ``None``.

        It is ``None`` where exponentials and their sum cost no more: a compiler fuses them, or they reuse the memory of
        the scores. NaN or inf in a row must turn at least one of its weights into NaN.
        """

    def exp_difference(self, x: Array, y: Array) -> Array:
        """Return ``exp(x - y)``. It may overwrite ``x``, which is not used again."""

    def exp_scaled(self, x: Array) -> Array:
        """Return ``exp(x / log_base)``. It may overwrite ``x``, which is not used again."""

    def inplace(self, function: Callable[..., Array], x: Array, *others: Array | float) -> Array:
        """Return ``function(x, *others)``. It may overwrite ``x``, which is not used again.

        The function is elementwise and of the namespace; the others broadcast to ``x``.
        """

    def matmul(self, x: Array, y: Array, workspace: Workspace, name: str) -> Array:
        """Return the product. It may lie in memory of this name, and so last until the thread's next of that name."""

    def loop(
        self,
        start: Any,
        stop: Any,
        body: Callable[[Any, Any], Any],
        state: Any,
        *,
        proceed: Callable[[Any], Array] | None = None,
    ) -> Any:
        """Run ``state = body(index, state)`` for ``start <= index < stop``, and return the last state.

        With ``proceed``, run only as long as ``proceed(state)`` is true.
        """

    def for_each(self, count: Any, body: Callable[[Any, Any], Any], state: Any, work: int) -> Any:
        """Return ``loop(0, count, body, state)``. The bodies may run in any order, and several at once.

        The state is a tuple of stacks of blocks: each body adds to blocks of its own, and reads none. The work of all
        is about that of so many scores in fast arithmetic; 0 where that is not known.
        """

    def num_at_once(self, work: int) -> int:
        """Return how many bodies of a `for_each` of so much work may run at once."""

    def cond(self, condition: Array, then: Callable[[], Any], otherwise: Callable[[], Any]) -> Any:
        """Return ``then()`` where the condition is true, else ``otherwise()``, of the same shapes and dtypes."""

    def block_at(self, x: Any, index: Any) -> Any:
        """Return the block at an index of `split`, or the element at an index of an array's first axis.

        Where loops are not traced, ``x`` may also be a list, and a range of indices joins neighbouring blocks to one.
        """

    def split(self, x: Array, size: int, function: Callable[[Array], Array] = ...) -> Any:
        """Split an array along axis -2 into blocks for `block_at`, after a function that acts on each row alone."""

    def block(self, x: Array, index: Any, size: int, axis: int) -> Array:
        """Return the block at an index along axis -2 or -1. Where loops are not traced, the last may be smaller."""

    def without_warnings(self) -> AbstractContextManager[Any]:
        """Return a context in which no number that overflows, or is not finite, gives a warning."""

    def norm(self, x: Array) -> Array:
        """Return the Euclidean norm over the last axis, without a warning where it overflows."""

    def whole_norms(self, arrays: Sequence[Array]) -> list[float]:
        """Return the Euclidean norm of each whole array, or a bound of it, as a number; not finite if the array is not.

        It is called only where values can be read.
        """

    def to_list(self, x: Array) -> Any:
        """Return the values as nested lists. It is called only where loops are not traced."""

    def zero_blocks(self, count: Any, zero: Callable[[Any], Array], after: Array | None = None) -> Any:
        """Return a stack of ``count`` blocks of zeros, each made by ``zero(index)``.

        The stack is not needed before the array ``after``; a compiler may have to be told, to save memory.
        """

    def add_block(self, stack: Any, index: Any, block: Array) -> Any:
        """Return the stack with ``block`` added to the one at an index."""

    def concat_blocks(self, stack: Any, count: Any, axis: int) -> Any:
        """Return the stack with each run of ``count`` blocks concatenated along axis -2 or -1."""

    def stack_blocks(self, stack: Any) -> Array:
        """Return the blocks as one array, with a new first axis."""


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
    """

    forward: Callable[..., tuple[Array, ...]]
    backward: Callable[..., tuple[Array | None, ...]]
    abstract: Callable[..., tuple[Array, ...]]
    needs_float64: bool = False


class Verdict(NamedTuple):
    """The judgement of a kernel on one call.

    Attributes
    ----------
    refusal : str or None
        Why the kernel would not give the defined answer, or ``None`` where it does.
    is_faster : bool
        Whether the kernel is faster than the core's own implementations. Otherwise, it is taken only by name.
    slower : str or None
        Why it is not faster, in words that follow its name.
    """

    refusal: str | None
    is_faster: bool = True
    slower: str | None = None


class Kernel(Protocol):
    """A fused kernel of a library, and the calls for which it gives the defined answer.

    Attributes
    ----------
    name : str
        The name by which users know it.
    """

    name: str

    def judge(self, call: Any, /) -> Verdict:
        """Say whether the kernel gives the answer to a `Call`, and whether it is faster.

        This is called once for a call, and may read query, key and value: some kernels let NaN behind a mask through.
        It must not compute attention.
        """

    def attend(self, call: Any, /) -> Array:
        """Return the output of attention, in the query's dtype."""


@runtime_checkable
class KernelWithLogsumexp(Kernel, Protocol):
    """A kernel that returns the logsumexp of its scores, too. Without one, the core computes calls with sinks."""

    def has_logsumexp(self, call: Any, /) -> bool:
        """Whether the kernel returns the logsumexp of a call that it accepts. This may read query, key and value."""

    def attend_with_logsumexp(self, call: Any, /) -> tuple[Array, Array]:
        """Return the output of `attend`, bit for bit, and logsumexp (..., H, M).

        Both are differentiable where the library differentiates.
        """


@runtime_checkable
class KernelWithPlan(Kernel, Protocol):
    """A kernel that is judged once for all calls of a signature, small ones above all: a verdict may take longer.

    The core asks the first kernel of a backend alone, and no call with a function or an array among its options. Only
    sinks, and lengths and offsets of a mask, may be arrays. Keys that the mask hides are not cut yet.
    """

    def plan(self, call: Any, /) -> Callable[[Any], Array | None] | None:
        """Return the output as a function of calls of these types, lengths and options; ``None`` if each is judged.

        The function returns the output of `attend`, bit for bit. It returns ``None`` where a call is to be judged after
        all: by its values, or by a mode of the library. It keeps no array of a call, and remembers no number but those
        of lengths, which it reads in each.
        """


@runtime_checkable
class RowUpdates(Protocol):
    """What a backend lends, besides the members of `Backend`, if its library writes rows without reading the others.

    A `KeyValueCache` of any other library is computed anew by every `append`.
    """

    def update_rows(self, array: Array, rows: Array, start: Array, /, *, donate: bool) -> Array:
        """Return an array (..., C, D) with rows (..., L, D) written over those at start, ..., start + L - 1.

        ``start`` is a 0-d array of integers, or one of shape (...) for arrays (..., G, C, D); no row is beyond C. With
        ``donate`` the memory of the array may be written over: the array is not used again.
        """


@runtime_checkable
class TracedPlacement(Protocol):
    """What a backend lends, besides the members of `Backend`, if traced arrays do not tell where a program will run."""

    def runs_on_host(self) -> bool:
        """Return whether traced programs run on a host, where small blocks stay in a cache."""


@runtime_checkable
class KeptNumbers(Protocol):
    """What a backend lends, besides the members of `Backend`, if copying numbers to a device waits for the device."""

    def array_of(self, numbers: Sequence[float], dtype: Any, like: Array, /) -> Array:
        """Return an array (N,) of numbers, on the device of another array: perhaps one that was returned before."""


@runtime_checkable
class FusedSilu(Protocol):
    """What a backend lends, besides the members of `Backend`, if its library has this activation in one pass.

    The core's formula takes a pass over memory for each operation, unless a compiler fuses them.
    """

    def silu(self, x: Array, /) -> Array:
        """Return the sigmoid linear unit. It may be 0 where the exponential of ``-x`` overflows."""


@runtime_checkable
class GradientFlags(Protocol):
    """What a backend lends, besides the members of `Backend`, if its arrays tell whether a gradient will reach them.

    Blocks then refuse a function of scores that closes over such an array, whose gradient they would not compute.
    """

    def has_gradient(self, array: Array, /) -> bool:
        """Return whether a gradient will be computed of what the array was computed from."""


@runtime_checkable
class Backend(Protocol):
    """The part of a framework that the core, its tests and the conformance command use besides its array namespace.

    A tree is an array, or a (named) tuple, list or dict of trees. ``None`` and Python numbers in a tree stay.

    Attributes
    ----------
    name : str
        The name by which the library is imported, and the backend looked up.
    namespace : module
        The functions of the array API standard. Two more are used where they exist: ``erfc(x)`` and ``shape(x)``. The
        shape holds integers, or 0-d integer arrays for dimensions that are unknown while a function is traced.
    modes : tuple of str
        The ways to run a function, ``"eager"`` first, such as ``("eager", "graph", "xla")``.
    dtypes : tuple of str
        The floating-point types that the library computes in as configured, such as ``("float32", "float64")``.
    differentiates : bool
        Whether `value_and_grad` is available.
    loops : Loops
        Loops over blocks.
    tuning : Tuning
        Sizes of blocks, as measured.
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
        """The floating-point types that the library computes in as configured."""

    def versions(self) -> dict[str, str]:
        """Return versions of the library and of the packages that it computes with, by distribution name."""

    def owns(self, array: Array, /) -> bool:
        """Whether this is an array of the library, traced ones included."""

    def is_concrete(self, array: Array, /) -> bool:
        """Whether the values can be read now: not while a compiler traces, not on a device that holds none."""

    def devices(self) -> list[str]:
        """Return the names of the devices on which arrays can be placed, the default one first."""

    def from_numpy(self, tree: Any, /, *, device: str | None = None, dtype: str | None = None) -> Any:
        """Turn the NumPy arrays of a tree into arrays of the library.

        Arrays of floating point are cast to ``dtype``, and all are placed on ``device``, where these are not ``None``.
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
        """Return the array as a constant of derivatives."""

    def draw_seed(self, source: Any, /) -> Any:
        """Return a seed, two words of 32 bits, from a key or a generator of the library; anything else as it is."""

    def custom_gradient(self, operation: Operation, plan: Any, arrays: tuple[Array, ...], /) -> tuple[Array, ...]:
        """Return the results of an `Operation`, differentiated by its own backward function."""

    def vjp(
        self, function: Callable[..., Array], /, *arrays: Array
    ) -> tuple[Array, Callable[[Array], tuple[Array, ...]]]:
        """Return the value of a function, and a function from its cotangent to those of the arrays.

        Raises
        ------
        TypeError
            When the library does not differentiate.
        """
