"""What is left out of the fuzzer because it is known: it must still be there."""

from __future__ import annotations

import pytest
from fuzz_known import KNOWN


@pytest.mark.parametrize("name", KNOWN)
def test_known_misbehaviour_is_still_there(name):
    assert KNOWN[name](), f"{name} is mended: remove it from tests/fuzz/fuzz_known.py, and the exclusions that name it"
