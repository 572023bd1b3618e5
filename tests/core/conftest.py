"""What all tests of the core share."""

import pytest

from attention_numpy.threads import Threads


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    """Blocks one after the other, as many tests record what is called: threads have tests of their own."""
    monkeypatch.setattr(Threads, "num_workers", lambda threads, work: 1)
