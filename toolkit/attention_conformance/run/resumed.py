"""Whether a run can go on from the file of another: the same calls, judged in the same way."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from attention_conformance.run.job import Job
from attention_conformance.subjects.signature import KEYWORDS

OPTIONS = {"default_scale": "--scale", "accepted": "--accept", "dtypes": "--dtype", "grouped": "--[no-]grouped",
           "batch_invariant": "--batch-invariant"}  # fmt: skip
"""Options whose names are not those of their settings."""


def settings(job: Job) -> dict[str, Any]:
    """What the findings of a job depend on, as JSON has it; which cases are asked for does not count."""
    found = {
        "target": job.target,
        "profile": job.how,
        "seed": job.seed,
        **dict.fromkeys(("backend", "device", "layout", "mask", "causal", "default_scale", "grouped")),
        **dict.fromkeys(("backward", "batch_invariant", *KEYWORDS)),
        **job.declared,
        "dtypes": sorted(job.dtypes),
        "accepted": sorted(job.accepted),
        "fuzz": job.fuzz,
        "large": job.is_large,
        "untrusted": not job.is_trusted,
        "catalogue": _catalogue(),
    }
    return json.loads(json.dumps(found, default=str))  # type: ignore[no-any-return]


@functools.cache
def _catalogue() -> str:
    """A hash of the sources of all cases."""
    found = hashlib.sha256()
    for path in sorted((Path(__file__).parents[1] / "cases").glob("*.py")):
        found.update(path.read_bytes())
    return found.hexdigest()[:16]


def differs(job: Job, about: Mapping[str, Any]) -> str:
    """The first setting in which the run that a file tells of was another; empty where there is none."""
    here, there = settings(job), about.get("settings")
    if not isinstance(there, Mapping) or there.get("catalogue") != here["catalogue"]:
        former = about.get("machine", {}).get("attention-core", "another version")
        return f"a run of the same cases; got those of attention-core {former}, not of {version('attention-core')} here"
    for name, mine in here.items():
        if there.get(name) != mine:
            option = "a run of" if name == "target" else f"a run with {OPTIONS.get(name, f'--{name}')}"
            return f"{option} {_told(mine)}; got one {'of' if name == 'target' else 'with'} {_told(there.get(name))}"
    return ""


def _told(setting: Any) -> str:
    if isinstance(setting, list):
        return ", ".join(map(str, setting)) or "none"
    return "none" if setting is None else str(setting)


def assumed_otherwise(assumed: Mapping[str, Any], former: Mapping[str, Any]) -> str:
    """The first assumption about a target in which the run of a file was another; empty where there is none."""
    here, there = (json.loads(json.dumps(dict(each), default=str)) for each in (assumed, former))
    for name in sorted(here.keys() | there.keys()):
        if here.get(name) != there.get(name):
            told = name.replace("_", " ")
            return f"a run that assumed {told} {_told(here.get(name))}; got one with {_told(there.get(name))}"
    return ""
