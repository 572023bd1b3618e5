"""Cases that cover all pairs of values, instead of all combinations."""

import pytest
from allpairspy import AllPairs


def covering(*values):
    """Rows of values, one of each sequence, in which any two values of two sequences meet: a covering array."""
    return [tuple(row) for row in AllPairs([list(each) for each in values])]


def pairwise(**values):
    """Parametrize a test by the rows that cover the values of its parameters."""
    return pytest.mark.parametrize(tuple(values), covering(*values.values()))
