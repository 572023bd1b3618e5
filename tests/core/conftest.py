"""What all tests of the core share."""

import pytest

from attention_numpy import threads


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    """Blocks of NumPy one after the other, as many tests record what is called: threads have tests of their own."""
    monkeypatch.setattr(threads, "threads_of_products", lambda: 1)
