"""Writes ``vectors/``: problems with their answers, for those who have no Python (docs/reference/vectors.md).

``python tools/vectors.py`` writes all groups, and gives the same bytes each time; with names of groups, these alone.
Inputs are those of the kit's cases, drawn in bfloat16, so that each type holds them exactly. Expected numbers are those
of its oracle, with 50 digits.
"""

import hashlib
import json
import math
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from ml_dtypes import finfo
from safetensors.numpy import save

from attention_conformance.cases import CASES
from attention_conformance.cases.case import Case, drawn, hard, inputs
from attention_conformance.cases.contract import CAUSAL, MASK, WINDOW, hiding
from attention_conformance.cases.shapes import case_of, shape_of
from attention_conformance.golden.cases import IDENTICAL
from attention_conformance.golden.identical import computed
from attention_conformance.hashes import published
from attention_conformance.measure.profiles import bound_for, of_narrow_weights
from attention_conformance.named import named_cases
from attention_conformance.oracle.attention import Exact, attention
from attention_conformance.oracle.gradients import gradients
from attention_conformance.oracle.positions import allowed
from attention_conformance.oracle.ulps import spacing
from attention_conformance.problem import DTYPES, NumpyArray, Problem, Rule, array, rounded
from attention_core.backend import get_backend

FOLDER = Path(__file__).parents[1] / "vectors"
VERSION = 1
BITS = "reproducible-bits"

GROUPS = {
    "causal": "causal-more-keys causal-more-queries causal-and-mask causal-after-cache causal-negative-offset"
    " causal-offset-per-entry causal-offset-hides-blocks shape-65x65-b1-h1on1-d4-causal shape-20x600-b1-h1on1-d4-chunk"
    " shape-1x1100-b1-h1on1-d4-chunk",
    "window": "window window-offset-per-entry window-grouped window-of-one-key documents-in-a-window",
    "lengths": "key-lengths segments mask mask-over-keys masks-combined shape-1x600-b2-h1on1-d4-lengths"
    " shape-17x65-b2-h2on2-d4-ragged",
    "grouped": "grouped-heads one-key-head shape-3x17-h10on5-d8e3-plain shape-7x65-h6on3-d4-causal"
    " shape-1x600-b1-h4on2-d4-plain shape-1x1100-b1-h4on1-d4-plain",
    "softcap": "softcap softcap-before-bias-and-mask softcap-causal softcap-grouped softcap-of-large-scores",
    "sinks": "sinks sinks-causal sinks-grouped sinks-above-all-scores",
    "scores": "bias mask-and-bias scale scale-zero wide-values lowest-finite-bias 02-scores-1e4 03-ties-1e4"
    " 04-near-ties-1e4 05-all-minus-1e4 07-one-key-dominates 11-cancelling-values 12-product-overflows"
    " 13-bias-minus-1e4 15-half-overflow",
    "empty-rows": "empty-row-mask empty-row-bias empty-row-lengths empty-everywhere empty-row-unknown-query no-keys",
    "nan-behind-masks": "masked-nan-value masked-inf-value masked-nan-key masked-inf-key masked-future masked-padding"
    " masked-large-key attended-nan-value attended-inf-value attended-nan-key",
    "gradients": "gradient gradient-mask-and-bias gradient-structured gradient-causal gradient-empty-row"
    " gradient-empty-row-bias gradient-empty-lengths gradient-masked-nonfinite gradient-softcap gradient-sinks"
    " gradient-grouped gradient-large-scores",
    BITS: "plain one-key one-query one-channel grouped-heads one-key-head value-width causal causal-offset"
    " causal-empty-rows window lengths segments mask mask-and-window mask-or-causal not-window bias"
    " bias-of-minus-infinity scale softcap softcap-window near-ties",
}
"""The names of problems by group: cases of the kit, drawn shapes, and the cases below; cases of hashes for the bits."""

SINKS = drawn(sinks=(3,))
MORE = (
    Case("window-grouped", 3, "A window of grouped heads.", inputs(WINDOW, heads=6, groups=2)),
    Case("window-of-one-key", 3, "A window of the query's own position.",
         inputs(Rule("SlidingWindow", {"left": 0, "right": 0}))),
    Case("softcap-causal", 7, "Softcap comes before a causal mask.", inputs(CAUSAL, softcap=0.75)),
    Case("softcap-grouped", 7, "Softcap of grouped heads.", inputs(heads=6, groups=2, softcap=1.5)),
    Case("softcap-of-large-scores", 7, "Softcap bounds scores far above it.", inputs(scale=4.0, softcap=2.0),
         bound=hard),
    Case("sinks-causal", 7, "A sink takes a share under a causal mask.", inputs(CAUSAL, SINKS)),
    Case("sinks-grouped", 7, "There is one sink for every query head.",
         inputs(None, drawn(sinks=(6,)), heads=6, groups=2)),
    Case("sinks-above-all-scores", 7, "A sink above all scores is the maximum.",
         inputs(None, {"sinks": np.array([6.0, 9.0, -9.0])}), bound=hard),
    Case("masked-large-key", 5, "A masked key whose scores are far above 10,000 never leaks.",
         inputs(MASK, hiding(4), put={"key": ((4, slice(None)), 32768.0)})),
)  # fmt: skip

MASKS: dict[str, tuple[str, dict[str, Any]]] = {
    "Causal": ("causal", {"offset": 0}),
    "SlidingWindow": ("window", {"left": None, "right": None, "offset": 0}),
    "KeyLengths": ("lengths", {}),
    "Segments": ("segments", {}),
}
"""How kinds of masks are called, and their defaults; the others keep their names."""

FACTORS = {name: 2.0 ** (23 - finfo(name).nmant) for name in DTYPES}
"""Units of each type, in those of float32."""


class Made(NamedTuple):
    """A problem: its entry in the file of a group, and its arrays by name."""

    entry: dict[str, Any]
    arrays: dict[str, NumpyArray]


def main(groups: list[str]) -> None:
    """Write the groups, and the hashes of all files."""
    for group in groups or GROUPS:
        problems = [made(group, name) for name in GROUPS[group].split()]
        flags = {flag for problem in problems for flag in problem.entry["flags"]}
        text = {
            "$schema": "schema.json",
            "version": VERSION,
            "group": group,
            "arrays": f"{group}.safetensors",
            "flags": {
                case.name: {"summary": case.summary, "title": case.title, "thread": case.url}
                for case in named_cases()
                if case.name in flags
            },
            "problems": [problem.entry for problem in problems],
        }
        named = {
            f"{entry['name']}/{name}": np.ascontiguousarray(each)
            for entry, arrays in problems
            for name, each in arrays.items()
        }
        (FOLDER / f"{group}.json").write_text(json_of(text), encoding="utf-8", newline="\n")
        (FOLDER / f"{group}.safetensors").write_bytes(save(named))
    files = sorted(file for file in FOLDER.iterdir() if file.suffix in (".json", ".safetensors"))
    sums = (f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}\n" for file in files)
    (FOLDER / "SHA256SUMS").write_text("".join(sums), encoding="utf-8", newline="\n")


def json_of(content: Any) -> str:
    """JSON, in which lists of numbers and words, and objects of numbers, take one line."""
    text = json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False)
    short = re.compile(r"([\[{])\s+((?:[^\[\]{}\"]|\"[\w.-]+\")*?)\s+([\]}])")
    while (joined := short.sub(lambda found: found[1] + " ".join(found[2].split()) + found[3], text)) != text:
        text = joined
    return text + "\n"


def made(group: str, name: str) -> Made:
    """Make a problem, and answer it."""
    case, asked, bits = (hashed if group == BITS else drawn_case)(name)
    problem = in_full(asked)
    truth = attention(problem)
    results = {"output": truth.arrays["output"], "logsumexp": truth.arrays["logsumexp"]}
    if problem.cotangent is not None:
        results |= {f"d_{each}": exact for each, exact in gradients(problem).items()}
    arrays = {name: each if each.dtype == bool else each.astype("float32") for name, each in problem.arrays.items()}
    if problem.cotangent is not None:
        arrays["d_output"] = problem.cotangent.astype("float32")
    types = [each for each in DTYPES if each in case.dtypes and holds(each, arrays, results)]
    entry = {
        "name": name,
        "shows": case.shows,
        "line": case.line,
        "flags": [each.name for each in named_cases() if name in each.like and not bits],
        "sizes": sizes(problem),
        "scale": float(problem.options.get("scale", 1 / math.sqrt(problem.arrays["query"].shape[-1]))),
        "softcap": problem.options.get("softcap"),
        "mask": mask_of(asked),
        "inputs": list(arrays),
        "bounds": {each: bounds(case, each, types, truth.kappa) for each in results},
    }
    for each, exact in results.items():
        arrays[each] = np.where(np.isfinite(exact.high) | (each == "logsumexp"), exact.high, np.nan)
        is_exact = (exact.scale == 0) | ~np.isfinite(exact.high)
        arrays[f"{each}.unit"] = np.where(is_exact, 0, spacing(exact.scale, "float32")).astype("float32")
    if bits:
        entry["sha256"] = published()[name]
        arrays |= {f"{each}.bits": numbers for each, numbers in bits.items()}
    return Made(entry, arrays)


def drawn_case(name: str) -> tuple[Case, Problem, None]:
    """A case of the kit or of this file, drawn in bfloat16."""
    shape = shape_of(name)
    case = case_of(shape) if shape else next(each for each in (*CASES, *MORE) if each.name == name)
    width = 8 if case.measure == "gradient" else 16  # as most kernels take it, in files below 400 KB
    return case, case.problem("bfloat16", width=width, value_width=width), None


def hashed(name: str) -> tuple[Case, Problem, Mapping[str, NumpyArray]]:
    """A case of the published hashes, and the results whose bits are hashed."""
    found = next(each for each in IDENTICAL if each.name == name)
    mask, options = found.function.args
    problem = Problem(found.trees(), mask, options)
    bits = dict(computed(found, get_backend("numpy"), "cpu", "eager"))
    return Case(name, 10, f"{found.shows[0].upper()}{found.shows[1:]}.", lambda _: problem, bound=hard), problem, bits


def in_full(problem: Problem) -> Problem:
    """The problem with one leading axis, a mask of all its rules, and arrays that need no broadcasting."""
    leading, *rest = problem.sizes
    full = (*leading, *rest)

    def folded(each: NumpyArray) -> NumpyArray:
        return each.reshape(math.prod(leading), *each.shape[len(leading) :])

    arrays = {name: folded(problem.arrays[name]) for name in ("query", "key", "value")}
    is_masked = problem.mask is not None or bool(problem.options.get("is_causal"))
    if is_masked:
        arrays["mask"] = folded(np.broadcast_to(allowed(problem), full))
    if "bias" in problem.arrays:
        arrays["bias"] = folded(np.broadcast_to(problem.arrays["bias"], full))
    if "sinks" in problem.arrays:
        arrays["sinks"] = problem.arrays["sinks"]
    options = {name: problem.options[name] for name in ("scale", "softcap") if name in problem.options}
    cotangent = None if problem.cotangent is None else folded(problem.cotangent)
    return Problem(arrays, array("mask") if is_masked else None, options, cotangent)


def sizes(problem: Problem) -> dict[str, int]:
    """The letters of the contract: samples, heads, key heads, queries, keys, and channels of keys and of values."""
    (samples,), heads, rows, columns = problem.sizes
    groups, *_, width = problem.arrays["key"].shape[1:]
    value_width = problem.arrays["value"].shape[-1]
    return {"B": samples, "H": heads, "G": groups, "M": rows, "N": columns, "D": width, "E": value_width}


def mask_of(problem: Problem) -> dict[str, Any] | None:
    """The rule of the mask in words, for kernels that take no array."""
    rules = [Rule("Causal")] * bool(problem.options.get("is_causal")) + [problem.mask] * (problem.mask is not None)
    first, *rest = [told(rule, problem) for rule in rules] or [None]
    return {"kind": "and", "first": first, "second": rest[0]} if rest else first


def told(rule: Rule, problem: Problem) -> dict[str, Any]:
    """A rule in words: numbers, lists with one for each sample, and the parts of a combination."""

    def plain(argument: Any) -> Any:
        if isinstance(argument, Rule):
            return told(argument, problem)
        return problem.arrays[argument].tolist() if isinstance(argument, str) else argument

    kind, defaults = MASKS.get(rule.kind, (rule.kind, {}))
    arguments = {} if kind == "array" else {name: plain(each) for name, each in rule.arguments.items()}
    return {"kind": kind, **defaults, **arguments}


def bounds(case: Case, name: str, types: list[str], kappa: float) -> dict[str, float]:
    """The bound of a result in units of float32, for each type; float64 has half a unit for the expected number."""
    found = {}
    for dtype in types:
        kind = "float32" if name == "logsumexp" and dtype != "float64" else dtype
        bound = bound_for("kernel", case, name, kind, kappa) + 0.5 * (kind == "float64")
        bound += of_narrow_weights("kernel", dtype) if name == "logsumexp" else 0.0
        found[dtype] = float(f"{bound * FACTORS[kind]:.4g}")
    return found


def holds(dtype: str, arrays: Mapping[str, NumpyArray], results: Mapping[str, Exact]) -> bool:
    """Whether a type holds all inputs exactly, and whether no result leaves its normal numbers."""
    numbers = (each for name, each in arrays.items() if name != "mask")
    with np.errstate(over="ignore"):
        if not all(np.array_equal(each, rounded(each, dtype), equal_nan=True) for each in map(np.float64, numbers)):
            return False
    least, most = np.ldexp(1.0, finfo(dtype).minexp), float(finfo(dtype).max)
    scales = [exact.scale[np.isfinite(exact.high)] for name, exact in results.items() if name != "logsumexp"]
    return all(np.all((each == 0) | (least <= each) & (each <= most)) for each in scales)


if __name__ == "__main__":
    main(sys.argv[1:])
