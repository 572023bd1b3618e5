"""Loops over blocks, and what is computed of blocks: in plain Python, unless a library traces them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

from .._arrays import Array, Namespace

Body: TypeAlias = Callable[[Any, Any], Any]  # of an index and a state
Proceed: TypeAlias = Callable[[Any], Array]


class Loops:
    """Loops over blocks, and the operations of their bodies: a base class.

    A state is an array, ``None``, a stack of blocks, or a tuple of states. An index is a Python integer or, where loops
    are traced, a 0-d int32 array.

    The loops of this class run in Python. A block may end short. Bodies run at once if there is much work, and the
    library has ``threads`` for them. A library that traces overrides all methods that say nothing of a default.

    Attributes
    ----------
    traced : bool
        Whether a body is traced once for all indices. Then all blocks have the same size, and no value can be read.
    takes_out : bool
        Whether functions of the namespace take ``out=``.
    softmax : callable or None
        A softmax over the last axis in one pass. It is ``None`` where exponentials and their sum cost no more: a
        compiler fuses them, or they reuse the memory of the scores. NaN or inf in a row must turn at least one of its
        weights into NaN.
    """

    traced = False
    takes_out = False
    softmax: Callable[[Array], Array] | None = None
    threads: Any = None

    def __init__(self, xp: Namespace) -> None:
        self.xp = xp

    def exp_difference(self, x: Array, y: Array) -> Array:
        """Return ``exp(x - y)``, by default in two steps. It may overwrite ``x``, which is not used again."""
        return self.xp.exp(self.xp.subtract(x, y))

    def inplace(self, function: Callable[..., Array], x: Array, *others: Array | float) -> Array:
        """Return ``function(x, *others)``. It may overwrite ``x``, which is not used again: by default by ``out=``.

        The function is elementwise and of the namespace; the others broadcast to ``x``.
        """
        return function(x, *others, out=x) if self.takes_out else function(x, *others)

    def loop(self, start: Any, stop: Any, body: Body, state: Any, *, proceed: Proceed | None = None) -> Any:
        """Run ``state = body(index, state)`` for ``start <= index < stop``, and return the last state.

        With ``proceed``, run only as long as ``proceed(state)`` is true.
        """
        for index in range(start, stop):
            if proceed is not None and not bool(proceed(state)):
                break
            state = body(index, state)
        return state

    def for_each(self, count: Any, body: Body, state: Any, work: int) -> Any:
        """Return ``loop(0, count, body, state)``. By default, bodies run at once where there are threads, in any order.

        The state is a tuple of stacks of blocks: each body adds to blocks of its own, and reads none. The work of all
        is about that of so many scores in fast arithmetic; 0 where that is not known.
        """
        threads = self.threads
        if threads is not None and work >= threads.least_work and threads.for_each(count, body, state, work):
            return state
        return self.loop(0, count, body, state)

    def cond(self, condition: Array, then: Callable[[], Any], otherwise: Callable[[], Any]) -> Any:
        """Return ``then()`` where the condition is true, else ``otherwise()``, of the same shapes and dtypes."""
        return then() if bool(condition) else otherwise()

    def block_at(self, x: Any, index: Any) -> Any:
        """Return the element at an index of an array's first axis; of a list, too, where loops are not traced."""
        return x[index] if isinstance(x, list) else x[index, ...]

    def block(self, x: Array, index: Any, size: int, axis: int) -> Array:
        """Return the block at an index along axis -2 or -1.

        Where loops are not traced, the last may be smaller, and a range of indices joins neighbouring blocks to one.
        """
        run = index if isinstance(index, range) else range(index, index + 1)
        places = slice(run.start * size, min(run.stop * size, x.shape[axis]))
        return x[..., places, :] if axis == -2 else x[..., places]

    def norm(self, x: Array) -> Array:
        """Return the Euclidean norm over the last axis: by default the root of a product."""
        return self.xp.sqrt(self.xp.vecdot(x, x))

    def zero_blocks(self, count: Any, zero: Callable[[Any], Array], after: Array | None = None) -> Any:
        """Return a stack of ``count`` blocks of zeros, each made by ``zero(index)``.

        The stack is not needed before the array ``after``; a compiler may have to be told, to save memory.
        """
        return _BlockList([None] * count, zero)

    def add_block(self, stack: Any, index: Any, block: Array) -> Any:
        """Return the stack with ``block`` added to the one at an index."""
        before = stack.blocks[index]
        stack.blocks[index] = block if before is None else self.xp.add(before, block)
        return stack

    def concat_blocks(self, stack: Any, count: Any, axis: int) -> Any:
        """Return the stack with each run of ``count`` blocks concatenated along axis -2 or -1."""
        if count == 1:
            return stack
        blocks = iter(stack.filled())
        return _BlockList([self.xp.concat(run, axis=axis) for run in zip(*(blocks,) * count, strict=True)])

    def stack_blocks(self, stack: Any) -> Array:
        """Return the blocks as one array, with a new first axis."""
        blocks = stack.filled()
        return self.xp.stack(blocks, axis=0) if len(blocks) > 1 else self.xp.expand_dims(blocks[0], axis=0)


class _BlockList(NamedTuple):
    """A list of blocks, ``None`` for zeros that are not there yet."""

    blocks: list[Array | None]
    zero: Callable[[int], Array] | None = None

    def filled(self) -> list[Array]:
        return [self.zero(n) if x is None and self.zero is not None else x for n, x in enumerate(self.blocks)]
