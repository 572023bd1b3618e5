"""What all tests of the core share."""

import pytest
from shard_helpers import threads_as_ranks

from attention_numpy.threads import Threads


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    """Blocks one after the other, as many tests record what is called: threads have tests of their own."""
    monkeypatch.setattr(Threads, "for_each", lambda *_: False)


@pytest.fixture
def ranks(backend, monkeypatch):
    """``run(size, function)``: results of ``function(group)`` by ranks."""
    with threads_as_ranks(backend, monkeypatch) as run:
        yield run
