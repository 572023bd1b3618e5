"""Cases that cover all pairs of values, instead of all combinations."""

import pytest
from allpairspy import AllPairs


def pairwise(**values):
    """Parametrize a test by a covering array: any two values of two parameters meet in a case.

    Parameters
    ----------
    **values : sequence
        The values of each parameter of the test, by its name; of at least two parameters.
    """
    rows = [tuple(row) for row in AllPairs([list(each) for each in values.values()])]
    return pytest.mark.parametrize(tuple(values), rows)
