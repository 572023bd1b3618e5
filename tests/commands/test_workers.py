"""Processes that carry out orders: what they find, what they leave as it is, and that they end with who started them."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from command_helpers import ENVIRONMENT, is_alive, wait_until

from attention_workers import THREADS, Order, carried_out


def threads(order):
    yield os.environ.get(THREADS[0])


def test_processes_find_their_variables_and_all_others_stay(monkeypatch):
    monkeypatch.setenv(THREADS[0], "5")
    for name in THREADS[1:]:
        monkeypatch.delenv(name, raising=False)
    before = dict(os.environ)
    orders = [Order(threads=3), Order(), Order(threads=2)]
    assert sorted(carried_out(orders, 3, threads)) == ["2", "3", "5"]
    assert dict(os.environ) == before


def sleeping(order):
    """What starts a process, and tells it and itself."""
    yield os.getpid(), subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]).pid
    time.sleep(600)


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads the processes of Linux")
def test_what_processes_started_ends_with_them():
    messages = carried_out([Order()], 1, sleeping)
    found = next(messages)
    assert all(map(is_alive, found))
    messages.close()
    wait_until(lambda: not any(map(is_alive, found)))


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads the processes of Linux")
def test_processes_end_with_the_one_that_started_them_however_that_ends():
    script = (
        "import os\nfrom test_workers import *\n"
        "for numbers in carried_out([Order()], 1, sleeping):\n    print(*numbers, flush=True)\n    os._exit(0)"
    )
    environment = ENVIRONMENT | {"PYTHONPATH": os.pathsep.join([os.path.dirname(__file__), *sys.path])}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    found = [int(each) for each in done.stdout.split()]
    wait_until(lambda: len(found) == 2 and not any(map(is_alive, found)))
