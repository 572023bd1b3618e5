"""Cases that cover all pairs of values, instead of all combinations."""

import pytest
from allpairspy import AllPairs


def covering(*values, where=None):
    """Rows of values, one of each sequence, in which any two values of two sequences meet: a covering array.

    `where` tells which beginnings of rows are possible.
    """
    return [tuple(row) for row in AllPairs([list(each) for each in values], filter_func=where or (lambda row: True))]


def pairwise(**values):
    """Parametrize a test by the rows that cover the values of its parameters."""
    return pytest.mark.parametrize(tuple(values), covering(*values.values()))
