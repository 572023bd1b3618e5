"""Loops over blocks in plain Python, for libraries that run what they are told at once; and what all loops compute."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from attention_core._arrays import Array, Namespace
from attention_core._backend._protocol import Workspace


class BlockOperations:
    """What is computed of blocks, with the functions of a namespace.

    See `attention_core.backend.Loops` for what each method does.
    """

    log_base = 1.0
    takes_out = False  # whether functions of the namespace take `out`
    loop: Callable[..., Any]

    def __init__(self, xp: Namespace) -> None:
        self.xp = xp

    @property
    def softmax(self) -> Callable[[Array], Array] | None:
        return None

    def exp_difference(self, x: Array, y: Array) -> Array:
        return self.xp.exp(self.xp.subtract(x, y))

    def exp_scaled(self, x: Array) -> Array:
        return self.xp.exp(x)

    def inplace(self, function: Callable[..., Array], x: Array, *others: Array | float) -> Array:
        return function(x, *others, out=x) if self.takes_out else function(x, *others)

    def matmul(self, x: Array, y: Array, workspace: Workspace, name: str) -> Array:
        if not self.takes_out:
            return self.xp.matmul(x, y)
        memory = workspace.array(name, (*x.shape[:-1], y.shape[-1]), x.dtype, x, self.xp)
        return self.xp.matmul(x, y, out=memory)

    def for_each(self, count: Any, body: Callable[[Any, Any], Any], state: Any, work: int) -> Any:
        return self.loop(0, count, body, state)

    def num_at_once(self, work: int) -> int:
        return 1

    def norm(self, x: Array) -> Array:
        return self.xp.sqrt(self.xp.vecdot(x, x))

    def whole_norms(self, arrays: Sequence[Array]) -> list[float]:
        return [float(self.norm(self.xp.reshape(array, (-1,)))) for array in arrays]


class TracedLoops(BlockOperations):
    """What loops of compilers have in common."""

    traced = True

    def to_list(self, x: Array) -> Any:
        raise TypeError("expected nothing to be read while a function is traced")


class PythonLoops(BlockOperations):
    """Loops whose counters are Python integers: a block may end short, and nothing is traced."""

    traced = False

    def to_list(self, x: Array) -> Any:
        if hasattr(x, "tolist"):
            return x.tolist()
        return [self.to_list(x[index, ...]) for index in range(x.shape[0])] if len(x.shape) else bool(x)

    def loop(
        self,
        start: int,
        stop: int,
        body: Callable[[int, Any], Any],
        state: Any,
        *,
        proceed: Callable[[Any], Array] | None = None,
    ) -> Any:
        for index in range(start, stop):
            if proceed is not None and not bool(proceed(state)):
                break
            state = body(index, state)
        return state

    def cond(self, condition: Array, then: Callable[[], Any], otherwise: Callable[[], Any]) -> Any:
        return then() if bool(condition) else otherwise()

    def block_at(self, x: Any, index: Any) -> Any:
        if isinstance(x, _Split):
            return self.block(x.array, index, x.size, -2)
        return x[index] if isinstance(x, list) else x[index, ...]

    def split(self, x: Array, size: int, function: Callable[[Array], Array] = lambda x: x) -> _Split:
        return _Split(function(x), size)

    def block(self, x: Array, index: Any, size: int, axis: int) -> Array:
        run = index if isinstance(index, range) else range(index, index + 1)
        places = slice(run.start * size, min(run.stop * size, x.shape[axis]))
        return x[..., places, :] if axis == -2 else x[..., places]

    def zero_blocks(self, count: int, zero: Callable[[int], Array], after: Array | None = None) -> _BlockList:
        return _BlockList([None] * count, zero)

    def add_block(self, stack: _BlockList, index: int, block: Array) -> _BlockList:
        before = stack.blocks[index]
        stack.blocks[index] = block if before is None else self.xp.add(before, block)
        return stack

    def concat_blocks(self, stack: _BlockList, count: int, axis: int) -> _BlockList:
        blocks = stack.filled()
        runs = [blocks[start : start + count] for start in range(0, len(blocks), count)]
        return _BlockList([run[0] if count == 1 else self.xp.concat(run, axis=axis) for run in runs])

    def stack_blocks(self, stack: _BlockList) -> Array:
        blocks = stack.filled()
        return self.xp.stack(blocks, axis=0) if len(blocks) > 1 else self.xp.expand_dims(blocks[0], axis=0)


class _Split(NamedTuple):
    """An array of which blocks are taken along axis -2."""

    array: Array
    size: int


class _BlockList:
    """A list of blocks, ``None`` for zeros that are not there yet."""

    def __init__(self, blocks: Sequence[Array | None], zero: Callable[[int], Array] | None = None) -> None:
        self.blocks = list(blocks)
        self.zero = zero

    def filled(self) -> list[Array]:
        return [self.zero(index) if block is None and self.zero else block for index, block in enumerate(self.blocks)]
