"""Blocks on several threads of NumPy: the results of one thread, and no trace of threads afterwards."""

import contextlib
import os
import subprocess
import sys
import threading
import types

import numpy as np
import pytest
from call_table import Sizes, options_of

import attention_core as ac
from attention_numpy import backend, threads

THREADS = backend.loops.threads
MUCH = THREADS.least_work


class Products:
    """In the place of what sets the number of threads of products, which OMP_NUM_THREADS may have set to one."""

    def __init__(self, number):
        self.library = types.SimpleNamespace(num_threads=number)
        self.lib_controllers = [self.library]
        self.times_limited = 0

    @contextlib.contextmanager
    def limit(self, *, limits):
        before, self.library.num_threads = self.library.num_threads, limits
        self.times_limited += 1
        try:
            yield
        finally:
            self.library.num_threads = before


@pytest.fixture
def products(monkeypatch):
    """Three threads of products."""
    products = Products(3)
    monkeypatch.setattr(threads, "_products", lambda: products)
    return products


@pytest.fixture
def small_blocks(monkeypatch):
    """Blocks so small that a call has many of them."""
    few = {"queries": 16, "keys": 8, "min_queries": 4, "dense_below": 0, "structured_below": 0, "exact_scores": 512}
    monkeypatch.setattr(backend, "tuning", backend.tuning._replace(**few))
    monkeypatch.setattr(THREADS, "least_work", 1)
    monkeypatch.setattr(THREADS, "fewest_bodies", 2)


CASES = ("none", "causal", "window", "lengths", "softcap", "bias of hm", "dropout")


@pytest.mark.parametrize("arithmetic", ["fast", "reproducible"])
@pytest.mark.parametrize(("batch", "num_kv_heads"), [(1, 1), (1, 2), (3, 2)])
@pytest.mark.parametrize("name", CASES)
def test_threads_do_not_show(name, batch, num_kv_heads, arithmetic, products, small_blocks, rng):
    """Queries, keys and values of other samples, heads or rows, or overwritten memory, would change some bits."""
    sizes = Sizes((batch,), 4, num_kv_heads, 40, 37, 8, 8)
    options = {"arithmetic": arithmetic, "implementation": "blockwise", "return_logsumexp": True}
    options |= options_of(name, sizes, lambda x: x.astype(np.float32) if x.dtype == np.float64 else x)
    query, key, value = (x.astype(np.float32) for x in sizes.arrays(rng))
    found = [ac.scaled_dot_product_attention(query, key, value, **options) for _ in range(5)]
    assert products.times_limited == 5
    products.library.num_threads = 1
    expected = ac.scaled_dot_product_attention(query, key, value, **options)
    assert products.times_limited == 5
    for result in found:
        np.testing.assert_array_equal(result.output, expected.output)
        np.testing.assert_array_equal(result.logsumexp, expected.logsumexp)


def test_bodies_run_at_once_and_products_have_one_thread_meanwhile(products):
    together, seen = threading.Barrier(4, timeout=300), []

    def body(index, state):
        together.wait()
        seen.append((index, state, THREADS.count(), threading.get_ident()))

    assert THREADS.for_each(4, body, "state", MUCH)
    assert sorted(index for index, *_ in seen) == [0, 1, 2, 3]
    assert {(state, number) for _, state, number, _ in seen} == {("state", 1)}
    assert len({thread for *_, thread in seen}) == 4
    assert THREADS.count() == 3


def test_threads_see_the_handling_of_floating_point_errors(products):
    handling = []
    with np.errstate(over="raise", invalid="ignore"):
        expected = np.geterr()
        assert THREADS.for_each(4, lambda index, state: handling.append(np.geterr()), None, MUCH)
    assert handling == [expected] * 4


def test_a_loop_within_a_loop_or_next_to_one_has_one_thread(products):
    nested = []

    def body(index, state):
        nested.append(THREADS.for_each(9, pytest.fail, None, MUCH))

    assert THREADS.for_each(4, body, None, MUCH)
    assert nested == [False] * 4


@pytest.mark.parametrize(("number", "count", "work"), [(1, 9, MUCH), (3, 3, MUCH), (11, 5, MUCH), (3, 9, MUCH - 1)])
def test_too_little_to_do(number, count, work, products):
    products.library.num_threads = number
    assert not THREADS.for_each(count, pytest.fail, None, work)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_error_ends_the_loop(error, products):
    """It is raised, what has not started never does, and the next loop has its threads again."""
    caller, together, started = threading.current_thread(), threading.Barrier(4, timeout=300), []

    def body(index, state):
        started.append(threading.current_thread())
        if len(started) <= 4:
            together.wait()
        if started[999 - index] is not caller:
            raise error("of a body")
        for each in set(started) - {caller}:  # which end by their errors
            each.join()

    with pytest.raises(error):
        THREADS.for_each(1000, body, None, MUCH)
    assert len(started) == 4
    assert THREADS.count() == 3
    assert THREADS.for_each(4, lambda *_: None, None, MUCH)


def test_a_system_without_threads_left(products, monkeypatch):
    """As at the end of Python: the thread that asks does all."""

    def refuse(thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    found = []
    assert THREADS.for_each(9, lambda index, state: found.append(index), None, MUCH)
    assert found == list(range(8, -1, -1))


LATE = """
import threading
import numpy as np

def work():
    threading.main_thread().join()
    import attention_core as ac
    from attention_numpy.threads import NumpyThreads
    NumpyThreads.least_work = 1
    query = np.ones((1, 8, 2048, 8), np.float32)
    print(ac.scaled_dot_product_attention(query, query, query, implementation="blockwise").shape)

threading.Thread(target=work).start()
"""


def test_after_the_main_thread_has_ended():
    environment = os.environ | {"OMP_NUM_THREADS": "2"}
    done = subprocess.run([sys.executable, "-c", LATE], capture_output=True, text=True, env=environment, check=False)
    assert done.stdout == "(1, 8, 2048, 8)\n", done.stderr


def test_without_threadpoolctl(monkeypatch):
    monkeypatch.setattr(threads, "ThreadpoolController", None)
    threads._products.cache_clear()
    try:
        assert THREADS.count() == 1
        assert not THREADS.for_each(9, pytest.fail, None, MUCH)
    finally:
        threads._products.cache_clear()


def test_the_number_of_threads_is_that_of_numpy(monkeypatch):
    """By the library itself: what is set there is read, lowered to one, and restored."""
    import threadpoolctl

    controller = threadpoolctl.ThreadpoolController().select(user_api="blas")
    if not controller.lib_controllers:
        pytest.skip("NumPy has a library of products whose threads cannot be set")
    threads._products.cache_clear()
    with controller.limit(limits=2):
        assert THREADS.count() == 2
        seen = []
        assert THREADS.for_each(4, lambda *_: seen.append(THREADS.count()), None, MUCH)
        assert seen == [1] * 4
        assert THREADS.count() == 2
