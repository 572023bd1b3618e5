"""Processes that carry out orders: what they find, and what they leave as it is."""

import os
import signal
from collections import deque
from multiprocessing.context import SpawnProcess

import pytest

from attention_workers import THREADS, Order, carried_out


def threads(order):
    yield os.environ.get(THREADS[0])


def test_processes_find_their_variables_and_all_others_stay(monkeypatch):
    """Another thread may set a variable while a process is started."""
    start = SpawnProcess.start

    def start_and_set(process):
        os.environ["SET_MEANWHILE"] = "1"
        start(process)

    monkeypatch.setattr(SpawnProcess, "start", start_and_set)
    monkeypatch.setenv("SET_MEANWHILE", "0")
    monkeypatch.setenv(THREADS[0], "5")
    for name in THREADS[1:]:
        monkeypatch.delenv(name, raising=False)
    before = dict(os.environ)
    orders = deque([Order(threads=3), Order(), Order(threads=2)])
    assert sorted(message for _, message in carried_out(threads, orders, jobs=3)) == ["2", "3", "5"]
    assert dict(os.environ) == before | {"SET_MEANWHILE": "1"}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_wait_until_a_process_has_started(monkeypatch, number):
    """Else it would find no orders, and print that."""
    start, events = SpawnProcess.start, []

    def start_and_signal(process):
        signal.raise_signal(number)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [number])  # as a thread of a library that does not block it
        start(process)
        events.append("started")

    monkeypatch.setattr(SpawnProcess, "start", start_and_signal)
    before = signal.signal(number, lambda *_: events.append("handled"))
    try:
        assert [message for _, message in carried_out(threads, deque([Order(threads=3)]))] == ["3"]
    finally:
        signal.signal(number, before)
    assert events == ["started", "handled"]
