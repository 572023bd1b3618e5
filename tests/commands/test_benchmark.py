"""The benchmark: results are checked, and statistics are right. No test depends on time."""

import dataclasses
import importlib.util
import json
import os
import re

import numpy as np
import pytest
from command_helpers import invoke, refusal

from attention_benchmark import CANDIDATES, Measurement, Problem, processes, report
from attention_benchmark.measurement import fastest_peers, quartiles, ratio
from attention_benchmark.order import Order
from attention_benchmark.problem import MASKS, PRESETS, default_problems
from attention_benchmark.processes import measurements_of, memory_of
from attention_benchmark.reference import TOLERANCE, expected, worst_error
from attention_cli import bench
from attention_workers import Death

ASKED = [name for name in os.environ.get("ATTENTION_CORE_BACKENDS", "").split(",") if name]
SHAPE = (2, 3, 520, 8)  # two documents
FEW = {"shape": (2, 4, 18, 8), "kv_heads": 2}
PROBLEMS = (
    Problem((2, 3, 13, 8), "padded", "fwd+bwd"),
    Problem((2, 3, 13, 8), "packed", document=7),
    Problem((2, 3, 13, 8), "window", window=5),
    Problem((2, 3, 13, 8), "causal", "fwd+bwd"),
    Problem(**FEW, mask="causal", direction="fwd+bwd", queries=3),
    Problem(**FEW, mask="window", queries=1, window=5),
    Problem(**FEW, mask="window", queries=3, window=5),
    Problem(**FEW, mask="padded", queries=3, key_lengths=(7, 12)),
    Problem(**FEW, mask="padded-causal"),
    Problem(**FEW, mask="padded-causal", direction="fwd+bwd", queries=3),
    Problem(**FEW, mask="padded-causal", queries=5, key_lengths=(9, 3)),
    Problem(**FEW, mask="causal"),
    Problem(**FEW, mask="sinks", queries=3),
    Problem((2, 3, 7, 8), "full", "fwd+bwd"),
)
NEEDS = {"keras": "keras", "nnx": "flax"}
DIFFERENTIATING = ("torch", "jax", "tensorflow")

NAIVE = next(each for each in CANDIDATES if each.name == "naive")
DENSE = next(each for each in CANDIDATES if each.key == "numpy:eager:dense")


def quick(framework, problems, candidates, **options):
    keys = tuple(each.key for each in candidates)
    order = Order(framework, tuple(problems), keys, seconds=0.0, rounds=(2, 2), threads=1, **options)
    return [each for each in measurements_of(order) if isinstance(each, Measurement)]


def present(candidate):
    return all(importlib.util.find_spec(module) for name, module in NEEDS.items() if candidate.name.startswith(name))


@pytest.mark.needs(lambda framework: framework in (ASKED or processes.installed()))
@pytest.mark.parametrize("part", [0, 1])
@pytest.mark.parametrize("framework", ["numpy", *DIFFERENTIATING])
def test_every_candidate_computes_the_same(framework, part):
    takes_long = {"compiled", "xla"}
    chosen = [each for each in CANDIDATES if each.framework == framework and each.mode not in takes_long]
    problems = PROBLEMS[part::2]
    attend = [each.key for each in chosen]
    every = {"torch": 3, "jax": 4, "tensorflow": 4}.get(framework, 1)  # problem is for a candidate: compilers take long
    without = tuple((key, n) for at, key in enumerate(attend) for n in range(len(problems)) if (at + n) % every)
    if framework not in DIFFERENTIATING:
        problems = [dataclasses.replace(each, direction="forward") for each in problems]
    found = quick(framework, problems, [each for each in chosen if present(each)], without=without)
    assert {each.outcome for each in found} <= {"measured", "refused"}
    for each in found:
        if each.outcome == "measured":
            again = quick(framework, [each.problem], [each.candidate]) if each.error > 1e-5 else ()
            assert each.error <= 1e-5, (each, *again)  # it failed once, and nobody knows why
            assert len(each.seconds) == 2
        else:
            name = each.candidate.name.removesuffix(" (cudnn)")
            narrow = ("fused", "jax.nn.dot_product_attention")
            assert name in narrow or each.problem.mask == "sinks", each
    able = [each for each in chosen if present(each) and any(map(each.takes, problems))]
    assert {each.candidate.name for each in found if each.seconds} >= {
        each.name for each in able if "fused" not in each.name and "cudnn" not in each.name
    }


def test_an_impossible_call_is_refused_with_its_reason():
    found = quick("numpy", [Problem(SHAPE)], [each for each in CANDIDATES if each.key == "numpy:eager:fused"])
    (refused,) = found
    assert refused.outcome == "refused"
    assert "expected" in refused.reason
    (grid,) = report.overviews(found)
    assert grid.rows == [("numpy", "eager", "attention_core fused", "refused")]
    assert any(refused.reason in note for note in grid.notes)


def test_a_call_that_would_take_too_long_is_skipped():
    problems = [Problem((1, 1, length, 8)) for length in (64, 1024, 2048)]
    found = quick("numpy", problems, [NAIVE], limit=0.0)
    assert [each.outcome for each in found] == ["measured", "measured", "skipped"]  # the first tells nothing of others
    assert "more than 0 s" in found[2].reason


def test_memory_of_a_naive_computation_has_the_scores_in_it():
    problem = Problem((1, 2, 1024, 8))
    order = Order("numpy", (problem,), (NAIVE.key,))
    (measured,) = memory_of(order, [Measurement(problem, NAIVE, "measured", seconds=(1.0,))])
    if measured.memory is None:
        pytest.skip("the system does not tell")
    scores = 2 * 1024 * 1024 * 4
    assert 2 * scores < measured.memory < 5 * scores


def test_a_process_that_dies_costs_its_candidate_what_is_as_large_and_nothing_else():
    problems = (Problem((1, 1, 8, 4)), Problem((1, 1, 16, 4)), Problem((1, 1, 16, 4), direction="fwd+bwd"))
    order, at = Order("numpy", problems, (DENSE.key, NAIVE.key)).noted({"started": [DENSE.key, 1]}, None)
    died, left = order.lost(at, Death("its process died: SIGKILL", code=-9))
    assert [(each.candidate, each.problem, each.outcome) for each in died] == [(DENSE, problems[1], "died")]
    assert (left.problems, left.candidates, left.without) == (problems[1:], order.candidates, ((DENSE.key, 0),))


@pytest.mark.parametrize("mask", [name for name in MASKS if MASKS[name].scores is None])
def test_reference_agrees_with_the_naive_formula(mask):
    problem = Problem(SHAPE, mask)
    call = NAIVE.prepare(problem)
    output = call.function(*call.variables, *call.constants)
    wanted = expected(problem)
    assert worst_error([output], wanted) < 1e-6
    output[..., -1, :] += 0.01  # the last query is always checked
    assert worst_error([output], wanted) > TOLERANCE["float32"]


@pytest.mark.parametrize("mask", [name for name in MASKS if MASKS[name].scores is not None])
def test_reference_agrees_with_the_core_where_scores_change(mask):
    """And not with a result without the change, nor does a peer take it that has none."""
    problem = Problem(SHAPE, mask)
    outputs = [
        call.function(*call.variables, *call.constants)
        for call in (DENSE.prepare(problem), DENSE.prepare(Problem(SHAPE)))
    ]
    right, wrong = (worst_error([output], expected(problem)) for output in outputs)
    assert right < 1e-6 < TOLERANCE["float32"] < wrong
    assert DENSE.takes(problem)
    assert NAIVE.takes(problem) == (mask == "sinks")


def test_peers_get_fewer_keys_where_that_is_all_that_a_mask_does():
    shape = (1, 4, 70, 8)
    for fields, keys, has_mask in (
        ({"mask": "causal", "queries": 1}, slice(0, 70), False),
        ({"mask": "causal", "queries": 3}, slice(0, 70), True),
        ({"mask": "window", "queries": 1, "window": 9}, slice(61, 70), False),
        ({"mask": "padded", "queries": 2, "key_lengths": (30,)}, slice(0, 30), False),
    ):
        found, allowed = Problem(shape, **fields).cut()
        assert (found, allowed is not None) == (keys, has_mask)
    assert Problem(shape, "causal").cut() == (slice(None), None)  # for which there is a flag


@pytest.mark.parametrize("mask", ["causal", "softcap"])
def test_reference_gradients_agree_with_differences(mask):
    problem = Problem((1, 2, 4, 3), mask, "fwd+bwd", "float64")
    wanted, direction = expected(problem), np.random.default_rng(1).standard_normal(problem.arrays[0].shape)

    def loss(step):
        moved = Moved(problem, step * direction)
        return np.sum(expected(moved).output * wanted.cotangent[..., wanted.rows, :])

    difference = (loss(1e-5) - loss(-1e-5)) / 2e-5
    assert difference == pytest.approx(np.sum(wanted.gradients[0] * direction), rel=1e-7)


class Moved:
    """A problem whose first array is another."""

    def __init__(self, problem, step):
        self.problem, self.arrays = problem, (problem.arrays[0] + step, *problem.arrays[1:])

    def __getattr__(self, name):
        return getattr(self.problem, name)


def made_up():
    problem = Problem((1, 1, 8, 16))
    torch = [each for each in CANDIDATES if each.framework == "torch"]
    ours, peer, other = torch[0], *[each for each in torch if each.is_peer][:2]
    return [
        Measurement(problem, ours, "measured", "", 1e-7, 2.0, (3.0, 30.0, 6.0), 2**20),
        Measurement(problem, peer, "measured", "", 1e-7, 2.0, (1.0, 10.0, 3.0)),
        Measurement(problem, other, "measured", "", 1e-7, 2.0, (8.0, 8.0, 8.0)),
        Measurement(problem, NAIVE, "refused", "expected something else; got this"),
    ]


def test_ratios_are_made_in_each_round():
    ours, peer, *_ = found = made_up()
    assert fastest_peers(found) == {(ours.problem, "torch"): peer}
    assert ratio(ours, peer) == 3.0  # of 3, 3 and 2; the ratio of the medians would be 2
    assert quartiles(ours.seconds) == (4.5, 18.0)


def test_tables_say_what_was_measured():
    found = made_up()
    (overview,), (detail,) = report.overviews(found), report.details(found)
    assert overview.rows[0] == ("torch", "eager", "attention_core dense", "6 s (3.00)")
    assert overview.rows[3] == ("numpy", "eager", "naive", "refused")
    assert detail.rows[0][3:7] == ("6 s", "4.5 s – 18 s", "3.00", "2.00")
    assert detail.rows[0][7:] == ("1 MiB", "2 s")
    assert overview.notes[-1] == "numpy eager naive: refused: expected something else; got this"


def test_the_command_measures_and_writes(tmp_path):
    path = tmp_path / "found.json"
    chosen = ("--backend", "numpy", "--candidate", "naive", "--shape", "1,2,8,4", "--direction", "forward")
    result = invoke("bench", *chosen, "--rounds", 2, "--no-memory", "--json", path)
    assert result.exit_code == 0, result.output
    assert "1×2×8×4 causal" in result.stdout
    written = json.loads(path.read_text())
    found = [(each["problem"]["mask"], each["outcome"], len(each["seconds"])) for each in written["measurements"]]
    assert found == [("full", "measured", 2), ("causal", "measured", 2)]
    assert written["environment"]["versions"]["numpy"] == np.__version__


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--backend", "no"), "expected a backend out of numpy, torch, jax, tensorflow; got 'no'"),
        (("--mask", "no"), f"expected a mask out of {', '.join(MASKS)}; got 'no'"),
        (("--shape", "1,2,3"), "expected shape as batch,heads,length,width, or 4,8on2,1x512,64; got '1,2,3'"),
        (("--candidate", "no*"), "expected a candidate; got 'no*', which none matches"),
        (("--shape", f"1,1,{'9' * 5000},64"), f"expected shape as batch,heads,length,width, or 4,8on2,1x512,64; got '1,1,{'9' * 76}'"),
        (("--seconds", "nan"), "expected seconds as a number from 0; got nan"),
        (("--max-seconds", "-1"), "expected max-seconds as a number from 0; got -1.0"),
        (("--preset", "no"), f"expected a preset out of {', '.join(PRESETS)}; got 'no'"),
        (("--shape", "1,4on3,8,2"), "expected KV heads that divide heads, and no more queries than keys; got '1,4on3,8,2'"),
        (("--shape", "1,4,9x8,2"), "expected KV heads that divide heads, and no more queries than keys; got '1,4,9x8,2'"),
        (("--device", "cuda", "--preset", "accelerator"), "expected a device of some framework; got 'cuda', and numpy has cpu"),
    ],
)  # fmt: skip
def test_wrong_arguments_of_the_command_are_named_in_a_line(arguments, message):
    assert refusal("bench", *arguments, *(() if "--backend" in arguments else ("--backend", "numpy"))) == message


@pytest.mark.parametrize(
    "arguments", [("--shape", "1,1,99999999999,64"), ("--shape", "8,16,64,8", "--shape", "1,1,99999999999,64")]
)
def test_arrays_that_do_not_fit_are_refused_before_any_work(arguments, monkeypatch):
    monkeypatch.setattr(bench, "_measured", None)
    told = r"expected a shape whose arrays fit into .*; got .*99999999999,64, whose arrays take \d+ \S+"
    assert re.fullmatch(told, refusal("bench", *arguments))


def test_a_process_that_fails_says_so_in_a_line():
    with pytest.raises(RuntimeError) as error:
        quick("no_framework", [Problem((1, 1, 8, 4))], [NAIVE])
    assert str(error.value) == (
        "expected no_framework to be measured; its process said "
        "ModuleNotFoundError: No module named 'attention_benchmark.frameworks.no_framework'"
    )


def test_a_wrong_result_is_an_error(monkeypatch):
    wrong = [dataclasses.replace(made_up()[0], outcome="wrong", seconds=())]
    monkeypatch.setattr(bench, "_measured", lambda orders, memory, failures, without: [(wrong, {})])
    assert invoke("bench", "--backend", "numpy").exit_code == 1


def test_keys_name_one_candidate_each():
    assert len({each.key for each in CANDIDATES}) == len(CANDIDATES)
    assert all(any(each.takes(problem) for problem in default_problems()) for each in CANDIDATES)
