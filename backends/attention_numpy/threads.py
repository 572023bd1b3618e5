"""Bodies of a loop on several threads, while each function of a library has one.

A library divides a function among all of its threads, and waits for the last of them: OpenBLAS the products of NumPy,
OpenMP nearly all functions of PyTorch. Where other processes take a core, many small functions so take a multiple of
their time.

After a function, a thread of the library waits for the next one. Meanwhile it keeps a core busy, for milliseconds with
OpenMP, and a tenth of a second with OpenBLAS. The variable OPENBLAS_THREAD_TIMEOUT may say otherwise. So threads of our
own are for long loops. A process that is forked during one has none.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

try:
    from threadpoolctl import ThreadpoolController
except ModuleNotFoundError:
    ThreadpoolController = None


class Threads:
    """Threads for the bodies of a library's loops: a base class. One loop at a time has them.

    Attributes
    ----------
    least_work : int
        From so much on, in scores, a loop has threads.
    spare : int
        How many more it has than a function of the library.
    takes_part : bool
        Whether the thread that asks is one of them, or waits for them.
    """

    least_work: int
    spare = 0
    takes_part = True
    fewest_bodies = 4

    def __init__(self) -> None:
        self.lock = threading.Lock()

    def count(self) -> int:
        """How many threads a function has now; 1 where that number cannot be set."""
        raise NotImplementedError

    def limited(self) -> contextlib.AbstractContextManager[Any]:
        """Give functions one thread each, as far as that is decided for all threads."""
        return contextlib.nullcontext()

    def inherited(self, call: Callable[[], None]) -> Callable[[], None]:
        """The call for another thread, as it would run in this one."""
        # A context has NumPy's handling of floating-point errors, which threads do not inherit.
        return functools.partial(contextvars.copy_context().run, call)

    def begin(self, count: int) -> None:
        """So many threads have been started, and run what is `inherited`."""

    def for_each(self, count: int, body: Callable[[int, Any], Any], state: Any, work: int) -> bool:
        """Call ``body(index, state)`` for each index below count, several at once, the last ones first.

        Return whether that was done. It is not for little work, nor where more than half of the threads would have
        nothing to do.

        Raises
        ------
        BaseException
            The first that a body raises. Bodies that have not started by then never do.
        """
        lock, is_held = self.lock, False
        try:
            is_held = count >= self.fewest_bodies and work >= self.least_work and lock.acquire(blocking=False)
            threads = self.count() if is_held else 1
            if threads == 1 or threads + self.spare > 2 * count:
                return False
            with self.limited():
                self._share(count, min(threads + self.spare, count), lambda index: body(index, state))
        finally:
            if is_held:
                lock.release()
        return True

    def _share(self, count: int, workers: int, call: Callable[[int], None]) -> None:
        """Call a function of each index below a count, by this thread and others."""
        errors: list[BaseException] = []
        indices: deque[Any] = deque([*[None] * workers, *range(count)])  # an end for each worker

        def take_indices() -> None:
            try:
                while not errors and (index := indices.pop()) is not None:  # the last queries may have most keys
                    call(index)
            except BaseException as error:  # handed to the thread that waits
                errors.append(error)

        threads = [threading.Thread(target=self.inherited(take_indices)) for _ in range(workers - self.takes_part)]
        try:
            with contextlib.suppress(RuntimeError):  # the system has no thread left, or Python is about to end
                for thread in threads:
                    thread.start()
            self.begin(sum(thread.ident is not None for thread in threads))
            if self.takes_part or threads[0].ident is None:
                take_indices()
        except BaseException as error:
            errors.append(error)
        for thread in threads:
            while thread.is_alive():
                try:
                    thread.join()
                except BaseException as error:  # an interrupt, after which no body starts
                    errors.append(error)
        if errors:
            raise errors[0]


class NumpyThreads(Threads):
    """Of NumPy's functions, only products have threads; one of a loop would share the core of one that waits."""

    least_work = 2**26  # about a tenth of a second of two cores
    spare = 1

    def count(self) -> int:
        """How many threads a product has."""
        products = _products()
        return 1 if products is None else min(library.num_threads for library in products.lib_controllers)

    def limited(self) -> contextlib.AbstractContextManager[Any]:
        """Give products one thread each, which is global."""
        return _products().limit(limits=1)  # type: ignore[no-any-return]


@functools.cache
def _products() -> Any:
    """What sets the number of threads of products, if threadpoolctl is installed and knows NumPy's library of them."""
    if ThreadpoolController is None:
        return None
    products = ThreadpoolController().select(user_api="blas")
    return products if products.lib_controllers else None
