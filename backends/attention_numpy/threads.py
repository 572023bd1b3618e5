"""Bodies of a loop on several threads, while each product of NumPy has one.

NumPy's functions have one thread each, but for products: OpenBLAS divides one among all threads, and waits for the last
of them. Where other processes take a core, many small products so take a multiple of their time.

After a product, a thread of OpenBLAS waits for the next one: it keeps a core busy for a tenth of a second, unless the
variable OPENBLAS_THREAD_TIMEOUT says otherwise. So threads of our own are for long loops, and one more than products
have, as one of them would share its core.
"""

from __future__ import annotations

import contextvars
import functools
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

try:
    from threadpoolctl import ThreadpoolController
except ModuleNotFoundError:
    ThreadpoolController = None

__all__ = ["for_each_at_once", "num_workers", "threads_of_products"]

FEWEST_BODIES = 4
LEAST_WORK = 2**26  # scores, about a tenth of a second of two cores
_LOCK = threading.Lock()  # held by the one loop that has threads: how many a product has is global


def for_each_at_once(count: int, body: Callable[[int, Any], Any], state: Any, work: int) -> bool:
    """Call ``body(index, state)`` for each index below count, several at once.

    Return whether that was done. It is not for little work, nor where more than half of the threads would have nothing
    to do. One loop at a time has threads, if the number of threads of products can be set.

    Raises
    ------
    BaseException
        The first that a body raises. Bodies that have not started by then never do.
    """
    is_held = False
    try:
        is_held = count >= FEWEST_BODIES and _LOCK.acquire(blocking=False)
        workers = num_workers(work) if is_held else 1
        if not 1 < workers <= 2 * count:
            return False
        with _products().limit(limits=1), ThreadPoolExecutor(min(workers, count)) as pool:
            # A context has NumPy's handling of floating-point errors, which threads do not inherit.
            futures = [pool.submit(contextvars.copy_context().run, body, index, state) for index in range(count)]
            try:
                for future in futures:
                    future.result()
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise
    finally:
        if is_held:
            _LOCK.release()
    return True


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
