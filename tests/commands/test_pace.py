"""The tool that compares speeds: its cells on NumPy, how sides take turns, and the tables it writes."""

import importlib
import io
from pathlib import Path

import numpy as np
import pytest

ROOT = next(folder for folder in Path(__file__).parents if (folder / "pyproject.toml").exists())


@pytest.fixture
def cells(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    return importlib.import_module("pace_cells")


@pytest.fixture
def pace(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    return importlib.import_module("pace")


class Side:
    """A process that answers with the same time, or that something is wrong."""

    def __init__(self, name, seconds, asked):
        self.name, self.seconds, self.asked = name, seconds, asked

    def ask(self, **order):
        self.asked.append(self.name)
        return {"processor": self.seconds, "wall": self.seconds} if self.seconds else {"error": "no such name"}


def test_ours_and_the_peer_of_a_cell_compute_the_same(cells):
    """At most 32 queries and keys of each, on NumPy; with lengths, sequences still differ in theirs."""
    lib = cells.LIBRARIES["numpy"]()
    for problem, *_ in cells.PROBLEMS.values():
        small = problem._replace(queries=min(problem.queries, 32), keys=min(problem.keys, 32))
        peer = cells.attention(lib, small, True)
        if peer is None:
            assert problem.rule in ("dropout", "sinks")
            continue
        (ours, arguments), (theirs, others) = cells.attention(lib, small, False), peer
        np.testing.assert_allclose(ours(*arguments), theirs(*others), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("work", ["8 causal", "rotary_embedding", "append and one query", "generate 8 tokens"])
def test_a_cell_of_numpy_is_timed(cells, work):
    cell = cells.Cell("numpy", "eager", "forward", work)
    known = {}
    assert all(seconds >= 0 for seconds in cells.time_cell(cell, False, known).values())
    assert [*known] == [(cell, False)]
    assert bool(cells.time_cell(cell, True, known)) is (work in cells.PROBLEMS)
    assert [*known] == [(cell, False), (cell, True)]


def test_cells_have_names_of_their_own_and_the_quick_ones_are_among_them(cells):
    names = [str(cell) for cell in cells.CELLS]
    assert len(set(names)) == len(names)
    assert set(cells.QUICK) <= set(names)
    assert {problem.rule for problem, *_ in cells.PROBLEMS.values()} == set(cells.OPTIONS)


def test_a_name_of_another_tree_is_not_measured(cells, monkeypatch, tmp_path):
    assert cells.find("Dropout").__module__.startswith("attention_core")
    monkeypatch.setenv("PACE_TREE", str(tmp_path))
    with pytest.raises(LookupError):
        cells.find("Dropout")


def test_sides_take_turns_and_who_cannot_is_asked_once(pace):
    asked = []
    sides = {"base": Side("base", 1.0, asked), "new": Side("new", 3.0, asked), "peer": Side("peer", 0, asked)}
    answers = pace.take_turns(pace.CELLS[0], sides, 3)
    assert asked == ["base", "new", "peer", "new", "base", "base", "new"]
    assert pace.ratio(answers, "base") == 3.0
    assert pace.ratio(answers, "peer") is None


def test_the_table_ends_with_what_is_above_the_limit(pace):
    def turns(*seconds):
        return [{"processor": each, "wall": each} for each in seconds]

    found = {
        "slower": {"base": turns(1.0, 1.0, 1.0), "new": turns(1.2, 1.3, 0.1), "peer": turns(2.0, 2.0, 2.0)},
        "absent": {"base": [{"error": "LookupError: no name"}], "new": turns(1.0), "peer": []},
    }
    shown = io.StringIO()
    pace.tell(found, pace.rich.console.Console(file=shown, width=120))
    _, _, ending = shown.getvalue().partition("absent: not in BASE (LookupError: no name)")
    got = ending.split("\n\n")[1:]
    assert got == ["above 1.1 of BASE: 1 of 1\n    1.20  slower", "above 1.1 of the library's own: 0 of 1\n"]


def test_arrays_of_all_pairs_are_counted_where_eager_calls_hold_none(pace):
    def mib(*sizes):
        return [{"memory": size * 2**20} for size in sizes]

    assert pace.holds_pairs_alone(mib(10, 60), mib(10, 30))
    assert not pace.holds_pairs_alone(mib(11, 32), mib(26, 35))  # which grows by more from less
    assert not pace.holds_pairs_alone(mib(30, 60), mib(10, 35))
    assert not pace.holds_pairs_alone(mib(40, 527), mib(33, 405))  # as inputs of that size have gradients
