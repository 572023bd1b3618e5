"""The plugin of pytest: a test for each case of a kernel in a file."""

import subprocess
import sys

import pytest

import attention_conformance.pytest_cases  # noqa: F401 (once for all runs of pytest in this process)

pytest_plugins = ["pytester"]

KERNEL = """
import numpy as np

def attention(query, key, value, mask=None, scale=None):
    if query.shape[-2] == 13:
        raise ValueError("13 queries are refused")
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    scores = query @ np.swapaxes(key, -1, -2) * np.asarray(scale, query.dtype)
    if mask is not None:
        scores = np.where(mask, scores, -1e9).astype(query.dtype)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True) @ value

def refusing(query, key, value):
    raise RuntimeError("no device")
"""
CASES = ("empty-row-mask", "shape-13x13-causal", "scale", "sinks")
LAYOUT = ("--attention-layout", "BHSD", "--attention-dtype", "float32")


@pytest.fixture
def run(pytester):
    """Run pytest on arguments, with the plugin that an entry point has loaded."""
    pytester.makeini("[pytest]")  # or the folder of temporary files may lie in a project with settings of its own
    pytester.makepyfile(kernel=KERNEL)
    return lambda *arguments: pytester.runpytest_inprocess("-p", "no:cacheprovider", *arguments)


def chosen(*cases):
    return [word for case in cases for word in ("--attention-case", case)]


def test_each_case_is_a_test_that_tells_what_is_wrong(run):
    found = run("--attention-kernel", "kernel.py:attention", *LAYOUT, *chosen(*CASES), "-v", "-rs")
    found.assert_outcomes(passed=2, failed=1, skipped=1)  # and none that is not offered
    found.stdout.fnmatch_lines(
        [
            "kernel.py:attention::any-answer PASSED*",
            "kernel.py:attention::empty-row-mask-float32 FAILED*",
            "kernel.py:attention::scale-float32 PASSED*",
            "kernel.py:attention::shape-13x13-causal-float32 SKIPPED*",
            "differs by convention: empty-row-mask, float32",
            "  a fully masked row gives the average of all values (mean-of-masked-row)",
            "  Contract, line 4: A fully masked row gives exactly 0",
            "  output at (*): expected 0; got *",
            "  Seen before: antimora/burn-flex#16, *; https://github.com/antimora/burn-flex/issues/16",
            "To see it again: attention-core check kernel.py:attention --layout BHSD --case empty-row-mask --dtype *",
            "    subject = load_target('kernel.py:attention', layout='BHSD')",
            "SKIPPED [[]1[]] kernel.py:attention: raised (unsupported): ValueError: 13 queries are refused",
        ],
        consecutive=False,
    )
    found.stdout.no_fnmatch_line("*plugin.py*")
    found.stdout.no_fnmatch_line("*pytest_cases.py*")


def test_what_a_file_expects_is_xfailed_and_what_it_expects_in_vain_fails(run, pytester):
    entry = '[[expected]]\ncase = "{}"\nreason = "as its authors say"\n'
    pytester.path.joinpath("expected.toml").write_text(entry.format("empty-row-mask") + entry.format("scale"))
    words = ("--attention-kernel", "kernel.py:attention", *LAYOUT, *chosen("empty-row-mask", "scale"))
    found = run(*words, "--attention-expected", "expected.toml", "-rx")
    found.assert_outcomes(xfailed=1, failed=1, passed=1)
    found.stdout.fnmatch_lines(
        [
            "*expected a wrong answer (as its authors say); got the right one",
            "XFAIL kernel.py:attention::empty-row-mask-float32 - *as its authors say",
        ]
    )
    run(*words, "--attention-accept", "mean-of-masked-row").assert_outcomes(passed=3)


def test_the_cases_run_in_several_processes_and_one_that_dies_fails_its_case_alone(run, pytester):
    pytester.path.joinpath("kernel.py").write_text(KERNEL.replace("raise ValueError(", "__import__('os').abort(), ("))
    words = ("--attention-kernel", "kernel.py:attention", *LAYOUT, *chosen("scale", "shape-13x13-causal"))
    found = run(*words, "-n", "2")
    found.assert_outcomes(passed=2, failed=1)
    found.stdout.fnmatch_lines(["worker * crashed while running 'kernel.py:attention::shape-13x13-causal-float32'"])


@pytest.mark.parametrize(
    ("words", "outcomes", "line"),
    [
        (["kernel.py:refusing", *LAYOUT, *chosen("scale")], {"failed": 1, "skipped": 1},
         "*expected an answer to some case; got none, the last time for RuntimeError: no device"),
        (["none.py:attention"], {"errors": 1}, "expected a file of Python; got 'none.py': no such file"),
        (["kernel.py:attention", *chosen("none-such")], {"errors": 1}, "expected a case; got 'none-such', which none *"),
    ],
)  # fmt: skip
def test_what_shows_nothing_is_no_success(run, words, outcomes, line):
    found = run("--attention-kernel", *words)
    found.assert_outcomes(**outcomes)
    found.stdout.fnmatch_lines([line])


def test_loading_the_plugin_imports_no_array_library():
    words = "import sys, attention_conformance.plugin; print('numpy' in sys.modules, 'rich' in sys.modules)"
    environment = {"PYTHONPATH": ":".join(sys.path)}
    found = subprocess.run([sys.executable, "-c", words], capture_output=True, text=True, check=True, env=environment)
    assert found.stdout == "False False\n"
