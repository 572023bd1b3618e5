"""The vectors: the files as written, their numbers from other hands, consumers, and what each wrong consumer fails."""

import hashlib
import importlib.util
import json
import math
import re
import shutil
import subprocess
import sys
import textwrap
import tomllib
from pathlib import Path

import mpmath
import numpy as np
import pytest

ROOT = next(folder for folder in Path(__file__).parents if (folder / "pyproject.toml").exists())
FOLDER, CONSUMERS = ROOT / "vectors", ROOT / "vectors" / "consumers"
PAGE = ROOT / "docs" / "reference" / "vectors.md"
specification = importlib.util.spec_from_file_location("consumer", CONSUMERS / "attention.py")
consumer = importlib.util.module_from_spec(specification)
specification.loader.exec_module(consumer)

GROUPS = {
    path.stem: json.loads(path.with_suffix(".json").read_text("utf-8")) for path in sorted(FOLDER.glob("*.safetensors"))
}
FORWARD = [group for group in GROUPS if group != "gradients"]
WRONG = tomllib.loads(Path(__file__).with_name("wrong_consumers.toml").read_text("utf-8"))


def problems(group):
    """The problems of a group, each with its arrays."""
    arrays = consumer.read(FOLDER / GROUPS[group]["arrays"])
    for problem in GROUPS[group]["problems"]:
        start = problem["name"] + "/"
        yield problem, {name.removeprefix(start): each for name, each in arrays.items() if name.startswith(start)}


ALL = [pair for group in GROUPS for pair in problems(group)]


def test_they_are_made_anew_with_the_same_bytes(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    import vectors

    monkeypatch.setattr(vectors, "FOLDER", tmp_path)
    shutil.copy(FOLDER / "schema.json", tmp_path)
    vectors.main([])
    files = {path.name: path.read_bytes() for path in FOLDER.iterdir() if path.suffix != ".md" and path.is_file()}
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == files
    lines = files.pop("SHA256SUMS").decode().splitlines()
    assert lines == [f"{hashlib.sha256(files[name]).hexdigest()}  {name}" for name in sorted(files)]
    assert sum(map(len, files.values())) < 2_000_000
    assert max(sum(each.nbytes for each in arrays.values()) for _, arrays in ALL) <= 64 * 1024


@pytest.mark.parametrize("group", GROUPS)
def test_each_file_keeps_to_the_schema(group):
    schema, content = json.loads((FOLDER / "schema.json").read_text("utf-8")), GROUPS[group]
    keys, problem = schema["properties"], schema["$defs"]["problem"]
    required, known = problem["required"], problem["properties"]
    assert list(content) == list(keys) == schema["required"]
    assert content["version"] == keys["version"]["const"]
    assert {flag for problem in content["problems"] for flag in problem["flags"]} == {*content["flags"]}
    for problem, arrays in problems(group):
        assert {*required} <= {*problem} <= {*known}
        assert list(problem["sizes"]) == known["sizes"]["required"]
        assert {*problem["inputs"]} <= {*known["inputs"]["items"]["enum"]}
        results = {name + end for name in problem["bounds"] for end in ("", ".unit")}
        assert {name for name in arrays if not name.endswith(".bits")} == {*problem["inputs"], *results}


def through(rule, sizes):
    """The boolean array of a mask in words."""
    key = np.arange(sizes["N"])
    query = np.arange(sizes["M"])[:, None] + np.reshape(rule.get("offset", 0), (-1, 1, 1, 1))
    before, after = rule.get("left"), 0 if rule["kind"] == "causal" else rule.get("right")
    parts = [through(rule[name], sizes) for name in ("first", "second") if name in rule]
    match rule["kind"]:
        case "causal" | "window":
            return (before is None or key >= query - before) & (after is None or key <= query + after)
        case "lengths":
            return key < np.reshape(rule["lengths"], (-1, 1, 1, 1))
        case "segments":
            return np.equal(np.array(rule["query_ids"])[:, None, :, None], np.array(rule["key_ids"])[:, None, None])
        case kind:
            return {"and": np.logical_and, "or": np.logical_or, "not": np.logical_not}[kind](*parts)


def test_masks_in_words_are_the_boolean_arrays():
    rules = [(problem, arrays["mask"]) for problem, arrays in ALL if problem["mask"]]
    rules = [(problem, mask) for problem, mask in rules if '"array"' not in json.dumps(problem["mask"])]
    assert len(rules) > 30
    assert all((through(problem["mask"], problem["sizes"]) == mask).all() for problem, mask in rules)


def in_mpmath(problem, arrays):
    """Output, the scale of each of its numbers, and logsumexp, row by row."""
    samples, heads, groups, rows, columns, width, channels = problem["sizes"].values()
    exact = {name: np.vectorize(mpmath.mpf, otypes=[object])(arrays[name].astype(float)) for name in problem["inputs"]}
    scale = 1 / mpmath.sqrt(width) if problem["scale"] == 1 / math.sqrt(width) else problem["scale"]
    cap, mask = problem["softcap"], arrays.get("mask", np.ones((samples, heads, rows, columns), bool))
    bias = exact.get("bias", np.zeros(mask.shape))
    for b, h, i in np.ndindex(samples, heads, rows):
        keys = np.flatnonzero(mask[b, h, i] & (bias[b, h, i] != -mpmath.inf))
        key, value = (exact[name][b, h * groups // heads] for name in ("key", "value"))
        scores = [scale * mpmath.fdot(exact["query"][b, h, i], key[j]) for j in keys]
        scores = [cap * mpmath.tanh(score / cap) if cap else score for score in scores]
        powers = [mpmath.exp(score + bias[b, h, i, j]) for score, j in zip(scores, keys, strict=True)]
        total = mpmath.fsum(powers) + (mpmath.exp(exact["sinks"][h]) if "sinks" in exact else 0)
        sums = ([mpmath.fdot(powers, map(f, value[keys, e])) for e in range(channels)] for f in (mpmath.mpf, abs))
        yield *([each / (total or 1) for each in numbers] for numbers in sums), mpmath.log(total or "0")


@pytest.mark.parametrize("index", np.random.default_rng(0).choice(len(ALL), 20, replace=False))
@np.errstate(invalid="ignore")  # of NaN behind a mask
def test_expected_numbers_and_units_are_those_of_mpmath(index):
    problem, arrays = ALL[index]
    with mpmath.workdps(60):
        output, sizes, logsumexp = (np.ravel(each) for each in zip(*in_mpmath(problem, arrays), strict=True))
        for name, exact in (("output", output), ("logsumexp", logsumexp)):
            pairs = zip(arrays[name].ravel(), exact, strict=True)
            assert all(got == float(number) or (np.isnan(got) and not mpmath.isfinite(number)) for got, number in pairs)
        for got, unit, size in zip(arrays["output"].ravel(), arrays["output.unit"].ravel(), sizes, strict=True):
            assert unit == (2.0 ** (mpmath.frexp(size)[1] - 24) if size and np.isfinite(got) else 0)


def test_bits_have_the_published_hash_and_are_rounded_correctly_but_for_one():
    unlike = 0
    for problem, arrays in problems("reproducible-bits"):
        found = hashlib.sha256()
        for name in ("output", "logsumexp"):
            bits = arrays[f"{name}.bits"]
            found.update(f"float32 {bits.shape}\n".encode() + bits.tobytes())
            unlike += np.sum(bits != arrays[name].astype("float32"))
        assert found.hexdigest() == problem["sha256"], problem["name"]
    assert unlike <= 1


@pytest.mark.parametrize("program", ["python", "node", "g++"])
def test_consumers_without_this_package_pass(program, tmp_path):
    if program != "python" and shutil.which(program) is None:
        pytest.skip(f"{program} is not installed")
    command = [sys.executable, "-I", CONSUMERS / "attention.py"]
    if program == "node":
        command = ["node", CONSUMERS / "attention.js"]
    if program == "g++":
        command = [tmp_path / "attention", FOLDER]
        subprocess.run(["g++", "-std=c++17", CONSUMERS / "attention.cpp", "-o", command[0]], check=True)
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    counts = {group: len(GROUPS[group]["problems"]) for group in (FORWARD if program == "g++" else GROUPS)}
    assert printed == [f"{group}: {count} of {count}" for group, count in counts.items()]


def test_the_problem_of_the_page_is_that_of_the_file():
    block = re.search(r"```json\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)[1]
    assert textwrap.indent(block, "  ").rstrip() in (FOLDER / "causal.json").read_text("utf-8")


@pytest.mark.parametrize("fault", WRONG)
def test_a_wrong_consumer_fails_the_groups_that_the_page_names(fault):
    text = (CONSUMERS / "attention.py").read_text("utf-8")
    for old, new in WRONG[fault]["changes"]:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    names = {"__name__": "wrong", "__file__": consumer.__file__}
    exec(compile(text, fault, "exec"), names)
    with np.errstate(all="ignore"):
        failed = [group for group in GROUPS if names["wrong_problems"](group, "float32")[1]]
    assert failed == WRONG[fault]["fails"]
    told = "all" if failed == list(GROUPS) else ", ".join(f"`{group}`" for group in failed)
    assert f"| {fault} | {told} |\n" in (FOLDER / "README.md").read_text("utf-8")
