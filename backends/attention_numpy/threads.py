"""Bodies of a loop on several threads, while each product of NumPy has one.

NumPy's functions have one thread each, but for products: OpenBLAS divides one among all threads, and waits for the last
of them. Where other processes take a core, many small products so take a multiple of their time.

After a product, a thread of OpenBLAS waits for the next one: it keeps a core busy for a tenth of a second, unless the
variable OPENBLAS_THREAD_TIMEOUT says otherwise. So threads of our own are for long loops, and one more than products
have, as one of them would share its core.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import os
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

try:
    from threadpoolctl import ThreadpoolController
except ModuleNotFoundError:
    ThreadpoolController = None

__all__ = ["for_each_at_once", "num_workers", "threads_of_products"]

FEWEST_BODIES = 4
LEAST_WORK = 2**26  # scores, about a tenth of a second of two cores


class _Turn:
    """The turn of the one loop that has threads: how many a product has is global."""

    lock = threading.Lock()
    limits: Any = None  # while a loop has the turn


def for_each_at_once(count: int, body: Callable[[int, Any], Any], state: Any, work: int) -> bool:
    """Call ``body(index, state)`` for each index below count, several at once.

    Return whether that was done. It is not for little work, nor where more than half of the threads would have nothing
    to do. One loop at a time has threads, if the number of threads of products can be set.

    Raises
    ------
    BaseException
        The first that a body raises. Bodies that have not started by then never do.
    """
    lock, is_held = _Turn.lock, False
    try:
        is_held = count >= FEWEST_BODIES and work >= LEAST_WORK and lock.acquire(blocking=False)
        workers = num_workers(work) if is_held else 1
        if not 1 < workers <= 2 * count:
            return False
        with _products().limit(limits=1) as _Turn.limits:
            _share(deque(range(count)), min(workers, count), lambda index: body(index, state))
    finally:
        if is_held:
            _Turn.limits = None
            lock.release()
    return True


def _share(indices: deque[int], workers: int, call: Callable[[int], None]) -> None:
    """Call a function of each index, by this thread and others."""
    errors: list[BaseException] = []

    def take_indices() -> None:
        while not errors:
            try:
                index = indices.popleft()
            except IndexError:
                return
            try:
                call(index)
            except BaseException as error:  # handed to the thread that waits
                errors.append(error)

    # A context has NumPy's handling of floating-point errors, which threads do not inherit.
    threads = [
        threading.Thread(target=contextvars.copy_context().run, args=(take_indices,)) for _ in range(workers - 1)
    ]
    try:
        with contextlib.suppress(RuntimeError):  # the system has no thread left, or Python is about to end
            for thread in threads:
                thread.start()
        take_indices()
    except BaseException as error:
        errors.append(error)
    for thread in threads:
        if thread.ident is not None:
            thread.join()
    if errors:
        raise errors[0]


def _after_fork() -> None:
    """In the child of a process, nobody has the turn, and products have as many threads as before it."""
    _Turn.lock = threading.Lock()
    if _Turn.limits is not None:
        _Turn.limits.restore_original_limits()
        _Turn.limits = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def num_workers(work: int) -> int:
    """How many threads a loop of so much work may have, one of which would share its core; 1 for none of its own."""
    threads = threads_of_products() if work >= LEAST_WORK else 1
    return threads + 1 if threads > 1 else 1


def threads_of_products() -> int:
    """How many threads a product has now; 1 where that number cannot be set."""
    products = _products()
    return 1 if products is None else min(library.num_threads for library in products.lib_controllers)


@functools.cache
def _products() -> Any:
    """What sets the number of threads of products, if threadpoolctl is installed and knows NumPy's library of them."""
    if ThreadpoolController is None:
        return None
    products = ThreadpoolController().select(user_api="blas")
    return products if products.lib_controllers else None
