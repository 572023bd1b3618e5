"""What a backend is made of: loops over blocks, sizes of blocks, operations with a gradient, kernels."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

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
    takes_out : bool
        Whether functions of the namespace take ``out=``.
    """

    traced: bool
    log_base: float
    takes_out: bool

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

    def norm(self, x: Array) -> Array:
        """Return the Euclidean norm over the last axis."""

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


class Kernel:
    """A fused kernel of a library, and the calls for which it gives the defined answer: a base class.

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
        raise NotImplementedError

    def attend(self, call: Any, /) -> Array:
        """Return the output of attention, in the query's dtype."""
        raise NotImplementedError

    def has_logsumexp(self, call: Any, /) -> bool:
        """Whether the kernel returns the logsumexp of a call that it accepts. This may read query, key and value.

        It does not by default. The core computes other calls with sinks.
        """
        return False

    def attend_with_logsumexp(self, call: Any, /) -> tuple[Array, Array]:
        """Return the output of `attend`, bit for bit, and logsumexp (..., H, M).

        Both are differentiable where the library differentiates.
        """
        raise NotImplementedError

    def plan(self, call: Any, /) -> Callable[[Any], Array | None] | None:
        """Return the output as a function of calls of these types, lengths and options; ``None`` if each is judged.

        The core asks the first kernel of a backend alone, and no call with a function or an array among its options.
        Only sinks, and lengths and offsets of a mask, may be arrays. Keys that the mask hides are not cut yet.

        The function returns the output of `attend`, bit for bit. It returns ``None`` where a call is to be judged after
        all: by its values, or by a mode of the library. It keeps no array of a call, and remembers no number but those
        of lengths, which it reads in each.
        """
        return None
