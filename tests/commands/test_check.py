"""The command ``check``: what is said of a kernel in a file, and of one that crashes or hangs."""

import json
import re
import shlex
import subprocess
import sys

import numpy as np
import pytest
from command_helpers import ENVIRONMENT, invoke

from attention_conformance.cases.case import Draw
from attention_conformance.cases.large import LARGE, selecting
from attention_conformance.oracle.dense import answer, dense_of
from attention_core.backend import get_backend

KERNEL = """
import os, time
import numpy as np
from attention_core.backend import get_backend

def broken(*arguments, **options):
    raise RuntimeError("CUDA error: misaligned address")

def attention(query, key, value, mask=None, is_causal=False, scale=None):
    rows = query.shape[-2]
    if "abort" in os.environ.get("HABIT", "") and rows == 13:
        if os.fork() == 0:
            time.sleep(60)
        os.abort()
    if os.environ.get("HABIT") == f"break {rows} {value.shape[-1]}":
        get_backend("numpy").from_numpy = broken
    get_backend("numpy").from_numpy(query)
    if "hang" in os.environ.get("HABIT", "") and rows == 31:
        time.sleep(600)
    query, key, value = (np.asarray(each, np.float32) for each in (query, key, value))
    scores = query @ np.swapaxes(key, -1, -2) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        at = np.arange(rows)[:, None]
        scores = np.where(np.arange(key.shape[-2]) <= at + (at >= 64), scores, -1e9)
    if mask is not None:
        scores = np.where(mask, scores, -1e9)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True) @ value
"""


@pytest.fixture
def target(tmp_path):
    (tmp_path / "kernel.py").write_text(KERNEL)
    return f"{tmp_path / 'kernel.py'}:attention"


def in_this_process(*arguments):
    return invoke("check", *arguments, "--jobs", 0)


def command(*arguments, **environment):
    words = [sys.executable, "-m", "attention_cli", "check", *map(str, arguments)]
    return {"args": words, "env": ENVIRONMENT | environment}


def test_the_fault_is_told_in_words_and_conventions_are_accepted_by_name(target):
    case = ("--case", "shape-128x128-d64-causal", "--case", "empty-row-mask", "--dtype", "float32")
    found = in_this_process(target, *case, "--layout", "BHSD", "--seed", 3)
    assert found.exit_code == 1
    assert found.stderr == ""
    told = " ".join(found.stdout.split())
    assert "WRONG queries from 64 on see one key of the future (future-key-from-64)" in told
    assert "a fully masked row gives the average of all values (mean-of-masked-row) contract, line 4" in told
    assert found.stdout.splitlines()[-1] == "1 wrong, 1 differs by convention"
    again = next(line for line in found.stdout.splitlines() if "runs it again: " in line)
    words = ["attention-core", "check", target, "--layout", "BHSD", "--case", "shape-128x128-d64-causal"]
    assert shlex.split(again.partition("again: ")[2]) == [*words, "--dtype", "float32", "--seed", "3"]
    accepted = ("--accept", "mean-of-masked-row", "--accept", "future-key-from-64")
    assert in_this_process(target, *case, *accepted).exit_code == 0


def test_expected_results_pass_and_one_that_is_right_is_an_error(target, tmp_path):
    case = ("--case", "scale", "--case", "empty-row-mask", "--dtype", "float32")
    file = tmp_path / "expected.toml"
    assert in_this_process(target, *case, "--write-expected", file).exit_code == 1
    found = in_this_process(target, *case, "--expected", file)
    assert (found.exit_code, found.stdout.splitlines()[-1]) == (0, "0 wrong, 1 accepted, 1 right")
    again = tmp_path / "again.toml"
    in_this_process(target, *case, "--expected", file, "--write-expected", again)
    assert again.read_text() == file.read_text()
    text = file.read_text()
    for changed, status in {
        text.replace("differs by convention", "silently wrong"): 1,  # wrong in another way than it says
        text + 'versions = { numpy = "<1" }\n': 1,  # about another version
        text + 'device = "cuda*"\n': 1,
        text + '\n[[expected]]\ncase = "sca*"\nreason = "was wrong"\n': 1,  # is right
        text + '\n[[expected]]\ncase = "scale"\n': 2,
        text + 'verdict = "odd"\n': 2,
        text + 'versions = { numpy = "new" }\n': 2,
        text + 'dtpye = "float32"\n': 2,
        text.replace('"empty-row-mask"', '"empty-rwo-mask"'): 2,
    }.items():
        file.write_text(changed)
        assert in_this_process(target, *case, "--expected", file).exit_code == status, changed
    file.write_text(text + '\n[[expected]]\ncase = "scale"\nreason = "was wrong"\n')
    assert (
        "expected a wrong answer (was wrong); got the right one"
        in in_this_process(target, *case, "--expected", file).stdout
    )


LOW = """
import os
import numpy as np

def attention(query, key, value, mask=None):
    scores = query @ np.swapaxes(key, -1, -2) * query.dtype.type(query.shape[-1] ** -0.5)
    if mask is not None:
        scores = np.where(mask, scores, scores.dtype.type(os.environ["LOW"]))
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True) @ value

def more(query, key, value, mask=None):
    return attention(query, key, value, mask) * query.dtype.type(os.environ["MORE"])
"""


def test_a_baseline_keeps_cause_and_error_and_another_is_no_baseline(tmp_path, monkeypatch):
    (tmp_path / "low.py").write_text(LOW)
    file = tmp_path / "expected.toml"
    monkeypatch.setenv("LOW", "-inf")
    for name, case, variable, first, others in (
        ("attention", "empty-row-mask", "LOW", "-inf", {"-inf": 0, "-1e4": 1}),
        ("more", "shape-65x65-plain", "MORE", "nan", {"nan": 0, "inf": 1}),
        ("more", "shape-65x65-plain", "MORE", "1.5", {"1.6": 0, "9": 1}),
    ):
        target, cases = f"{tmp_path / 'low.py'}:{name}", ("--case", case, "--dtype", "float32")
        monkeypatch.setenv(variable, first)
        in_this_process(target, *cases, "--write-expected", file)
        for number, status in others.items():
            monkeypatch.setenv(variable, number)
            found = in_this_process(target, *cases, "--expected", file)
            assert found.exit_code == status, (number, file.read_text())
    monkeypatch.setenv("MORE", "1")  # what is right is told, though its entry names a cause or an error
    assert "got the right one" in in_this_process(target, *cases, "--expected", file).stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nothing.sdpa"], "expected module:callable, file.py:callable or one of attention-core, torch.sdpa,"),
        (["none.py:attention"], "expected a file of Python; got 'none.py': no such file"),
        (["torch.sdpa", "--seed", "-1"], "expected a seed from 0; got -1"),
        (["no_such_module:attention"], "expected a module to import; got 'no_such_module'"),
        (["numpy:no_such_name"], "expected a callable of numpy; got 'no_such_name', which it does not have"),
        (["equinox"], "expected equinox for equinox; got none: pip install equinox"),
        (["numpy:abs", "--backend", "cupy"], "expected a backend out of numpy, torch, jax, tensorflow; got 'cupy'"),
        (["numpy:abs", "--layout", "SDHB"], "expected a layout out of BHSD, BSHD"),
        (["numpy:abs", "--profile", "loose"], "expected a profile out of exact, kernel, tf32; got 'loose'"),
        (["numpy:abs", "--case", "casual-*"], "expected a case; got 'casual-*', which none matches: perhaps causal-"),
        (["numpy:abs", "--accept", "mean-of-maskedrow"], "got 'mean-of-maskedrow': perhaps mean-of-masked-row"),
        (["numpy:abs", "--keyword", "masc=x"], "expected --keyword of WHAT=NAME with one of mask, bias, causal,"),
        (["numpy:abs", "--backend", "jax"], "ImportError: no jax"),
        (["numpy:dot", "--device", "cuda:0"], "expected a device of numpy out of cpu; got 'cuda:0'"),
    ],
)  # fmt: skip
def test_a_wrong_argument_is_one_line_and_status_2(arguments, words, monkeypatch):
    monkeypatch.setitem(sys.modules, "equinox.nn._attention", None)  # as if it were not installed
    monkeypatch.setitem(sys.modules, "equinox", None)

    def without_jax(name):
        if name == "jax":
            raise ImportError("no jax")
        return get_backend(name)

    monkeypatch.setattr("attention_conformance.run.kernels.get_backend", without_jax)
    found = in_this_process(*arguments)
    assert found.exit_code == 2
    assert words in found.stderr
    assert len(found.stderr.splitlines()) == 1


FEW = (
    *("--case", "shape-13x13-causal", "--case", "shape-31x31-d80-plain", "--case", "shape-33x33-d96-causal"),
    *("--case", "scale", "--dtype", "float32"),
)


def test_after_a_crash_and_a_hang_the_run_goes_on(target, tmp_path):
    written = tmp_path / "found.json"
    run = command(target, *FEW, "--timeout", 15, "--json", written, HABIT="abort hang")
    found = subprocess.run(**run, capture_output=True, text=True, check=False)
    rows = {row["case"]: row for row in json.loads(written.read_text())["findings"]}
    verdicts = {name: row["verdict"] for name, row in rows.items()}
    assert verdicts.pop("shape-13x13-causal") == "crashed"  # and the process that it started has ended
    assert verdicts.pop("shape-31x31-d80-plain") == "timed out"
    assert set(verdicts.values()) == {"right"}
    assert rows["shape-13x13-causal"]["detail"].startswith("its process died: SIGABRT, in line ")
    told = " ".join(found.stdout.split())
    assert "CRASHED its process died: SIGABRT, in line " in told
    assert "shape-13x13-causal [float32] TIMED OUT no answer within 15 s, in line " in told
    assert found.returncode == 3
    assert found.stdout.splitlines()[-1] == f"0 wrong, 1 crashed, 1 timed out, {len(verdicts)} right"


@pytest.mark.parametrize(
    ("sizes", "name", "detail"),
    [
        ("13 32", "shape-13x13-causal", "RuntimeError: CUDA error: misaligned address"),
        ("64 32", "probe: widths", "no call of cpu answers any more"),
    ],
)
def test_an_error_that_breaks_the_device_is_a_crash_of_its_case_or_question(target, sizes, name, detail, tmp_path):
    """As an illegal access does to CUDA: every later call in the process fails."""
    cases = (
        *FEW,
        *("--device", "cpu"),
    )
    written = tmp_path / "found.json"
    run = command(target, *cases, "--json", written, HABIT=f"break {sizes}")
    assert subprocess.run(**run, capture_output=True, text=True, check=False).returncode == 3
    rows = {row["case"]: row for row in json.loads(written.read_text())["findings"]}
    row = rows.pop(name)
    assert (row["verdict"], row["detail"]) == ("crashed", detail)
    assert {row["verdict"] for row in rows.values()} == {"right"}


REFUSING = """
def block(query, key, value, is_causal=False):
    if query.shape[-2] > 64 or key.shape[-2] > 64:
        raise ValueError("one block of 64")
    return attention(query, key, value, is_causal=is_causal)

def nothing(query, key, value, is_causal=False):
    raise RuntimeError("no device\\nat all")
"""


def test_a_kernel_that_refuses_a_kind_of_call_throughout_or_every_call_does_not_pass(tmp_path):
    (tmp_path / "refusing.py").write_text(KERNEL + REFUSING)
    block, nothing = (f"{tmp_path / 'refusing.py'}:{name}" for name in ("block", "nothing"))
    accepted = ("--dtype", "float32", "--accept", "nan-through-mask", "--accept", "other-dtype")
    found = in_this_process(block, *accepted)
    told = " ".join(found.stdout.split())
    assert found.exit_code == 1
    assert re.search(
        r"ALWAYS UNSUPPORTED all \d+ cases with more than 256 keys raise, so nothing is known of them", told
    )
    (count,) = re.findall(r"(\d+) × ValueError: one block of 64", told)
    assert f", 1 always unsupported, {int(count) + 2} raised (unsupported), " in found.stdout.splitlines()[-1]
    assert in_this_process(block, *accepted, "--accept", "refused-many-keys").exit_code == 0
    alone = in_this_process(block, "--case", "shape-65x65-plain")
    assert alone.exit_code == 1
    assert "2 × ValueError: one block of 64" in alone.stdout
    assert alone.stdout.splitlines()[-1].endswith("little was checked: 0 of 2 cases were computed")
    stopped = in_this_process(nothing)
    assert stopped.exit_code == 2
    assert "found by a call" not in stopped.stdout
    assert "  layout: BHSD (every such call raised)" in stopped.stdout
    (last,) = stopped.stderr.splitlines()
    assert last.startswith(f"attention-core: expected a call of {nothing} to return; got an exception of each of ")
    assert "the first RuntimeError: no device at all; --backend, --device, --layout, --mask-kind" in last


STALE = (
    KERNEL
    + """
KEPT = {}

def stale(query, key, value):
    last = KEPT.setdefault(key.shape, key.copy())  # whose last rows are never written again
    last[..., :-3, :] = key[..., :-3, :]
    return attention(query, last, value)
"""
)


def test_what_is_right_in_a_process_of_its_own_is_told_as_of_state(tmp_path):
    (tmp_path / "stale.py").write_text(STALE)
    cases = ("--case", "shape-31x31-plain", "--case", "shape-31x31-plain-high", "--dtype", "float32")
    found = in_this_process(f"{tmp_path / 'stale.py'}:stale", *cases, "--layout", "BHSD")
    assert "leave something behind, their order matters, or threads race (state)" in " ".join(found.stdout.split())


def test_large_cases_count_heads_beyond_16_bits_and_ask_for_memory_first(tmp_path, monkeypatch):
    honest = KERNEL.replace("at + (at >= 64)", "at")
    wrong = "    if query.shape[0] * query.shape[1] > 65535:\n        return np.zeros_like(query)\n"
    (tmp_path / "honest.py").write_text(honest)
    (tmp_path / "wrong.py").write_text(honest.replace("    rows = query", wrong + "    rows = query"))
    words = ("--case", "large-heads", "--dtype", "float32")
    monkeypatch.setattr("attention_conformance.verdict.memory.available", lambda: 2**40)
    found = [in_this_process(f"{tmp_path / name}:attention", *words) for name in ("honest.py", "wrong.py")]
    assert found[0].stdout.splitlines()[-1] == "0 wrong, 1 right"
    assert found[1].stdout.splitlines()[-1] == "1 wrong"
    monkeypatch.setattr("attention_conformance.verdict.memory.available", lambda: 2**30)
    left_out = in_this_process(f"{tmp_path / 'honest.py'}:attention", *words)
    assert left_out.exit_code == 1
    assert "large-heads takes 2 GiB of memory of which 1.0 GiB are free" in " ".join(left_out.stdout.split())


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_the_closed_form_of_large_cases_is_the_definition_at_a_size_that_can_be_computed(dtype):
    shared = [{"batch": 70, "heads": 4, "shared": name} for name in ("key", "value")]
    for sizes in ({"heads": 131}, {"batch": 129, "heads": 2}, {"size": 16.0}, *shared):
        problem = selecting(Draw(dtype, 0, "small"), 5, 50, 32, **sizes)
        output = answer(dense_of(problem)).arrays["output"]
        assert np.max(np.abs(output - LARGE[0].closed(problem))) < 1e-12


PAIR = """
import os
import numpy as np
from attention_conformance import Subject

FACTS = dict(backend="numpy", layout="BHSD", mask="none", mask_name="", bias_name="", causal="none", causal_name="",
             scale_name="", softcap_name="", sinks_name="", grouped_name="", dropout_name="", window_name="",
             alibi_name="", full_mask=False, mask_with_causal=False, default_scale="sqrt", grouped=True,
             same_width=False, dtypes=("float32",), keeps_dtype=True, keeps_library=True, returns=("output",), asks={},
             differentiates=False, unknown=())

def attention(query, key, value):
    group = query.shape[1] // key.shape[1]
    key, value = (np.repeat(each, group, axis=1) for each in (key, value))
    scores = query @ np.swapaxes(key, -1, -2) * np.float32(query.shape[-1] ** -0.5)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return weights @ value / weights.sum(axis=-1, keepdims=True)

def powers(query, key, value):
    return attention(query, key, value) if len(query) > 1 else attention(query, key, value) * np.float32(1 + 2**-23)

def dies(query, key, value):
    if len(query) == 1:
        os.abort()
    return attention(query, key, value)

def refuses(query, key, value):
    raise RuntimeError("no device")

def writes(query, key, value):
    output = attention(query, key, value)
    query[:] = 0
    return output

def exits(query, key, value):
    raise SystemExit(0)

for name in ("attention", "powers", "dies", "writes", "exits"):
    globals()[f"{name}_"] = Subject(globals()[name], **FACTS)
"""


@pytest.fixture
def pair(tmp_path):
    (tmp_path / "pair.py").write_text(PAIR)
    return f"{tmp_path / 'pair.py'}:"


def test_each_question_about_bits_is_a_line_with_its_answer(pair, tmp_path):
    rows = ("--case", "bits-whole", "--case", "bits-batch", "--json", tmp_path / "found.json")
    found = in_this_process(f"{pair}attention_", "--same-bits-as", f"{pair}powers_", *rows)
    assert found.exit_code == 1
    lines = [each for each in found.stdout.splitlines() if "equal: bits-" in each or " again: " in each]
    assert lines[0] == "bitwise equal: bits-whole float32: 1 comparisons"
    assert lines[1].startswith("not bitwise equal: bits-batch float32: ")
    assert "samples 0 alone: " in lines[1]
    assert "; first at (0, 0, 0, 0): " in lines[1]
    assert found.stdout.splitlines()[-1] == "0 wrong, 1 not bitwise equal, 1 right"
    again = next(line for line in lines if "runs it again: " in line)
    words = ["attention-core", "check", f"{pair}attention_", "--case", "bits-batch", "--dtype", "float32"]
    assert shlex.split(again.partition("again: ")[2]) == [*words, "--same-bits-as", f"{pair}powers_"]
    assert f"same_bits_as=load_target('{pair}powers_')" in found.stdout
    same = in_this_process(f"{pair}attention_", "--same-bits-as", f"{pair}attention_", *rows)
    assert (same.exit_code, same.stdout.splitlines()[-1]) == (0, "0 wrong, 1 right")
    accepted = (*rows[:4], "--accept", "bits-batch")
    assert in_this_process(f"{pair}attention_", "--same-bits-as", f"{pair}powers_", *accepted).exit_code == 0


def test_another_target_that_dies_or_refuses_is_told_in_a_sentence(pair):
    rows = ("--case", "bits-batch", "--case", "bits-heads")
    asked = command(f"{pair}attention_", "--same-bits-as", f"{pair}dies_", *rows)
    found = subprocess.run(**asked, capture_output=True, text=True, timeout=120)
    assert found.returncode == 3
    assert "crashed: bits-batch float32: its process died: SIGABRT" in found.stdout
    assert "bitwise equal: bits-heads float32: " in found.stdout
    for other, told in ((f"{pair}refuses", "got an exception of each of "), ("no.such", "expected module:callable"),
                        (f"{pair}none", "which it does not have")):  # fmt: skip
        found = in_this_process(f"{pair}attention_", "--same-bits-as", other)
        assert (found.exit_code, told in " ".join(found.stderr.split())) == (2, True)
    for words, told in (((), "those of bits need --same-bits-as"),
                        (("--same-bits-as", f"{pair}attention_"), "got bits-whole, of a single call")):  # fmt: skip
        found = in_this_process(f"{pair}attention_", "--case", "bits-whole", *words)
        assert (found.exit_code, told in found.stderr.splitlines()[-1]) == (2, True)
    found = in_this_process(f"{pair}attention_", "--same-bits-as", f"{pair}writes_", *rows[2:])
    assert found.exit_code == 1
    assert "wrong: bits-heads float32: the call writes into its arguments" in found.stdout
    assert in_this_process(f"{pair}attention_", "--same-bits-as", f"{pair}exits_", *rows).exit_code == 3
    found = in_this_process(f"{pair}attention_", "--same-bits-as", f"{pair}powers_", "--untrusted")
    assert (found.exit_code, "expected --untrusted without --same-bits-as" in found.stderr) == (2, True)
