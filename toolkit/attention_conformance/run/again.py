"""A result once more: the command, a script, and the arrays of its case."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

from attention_conformance.bits.cases import BITS
from attention_conformance.kernel.options import OPTION_OF
from attention_conformance.kernel.probe import settled
from attention_conformance.launch.subject import Subject
from attention_conformance.measure.catalogue import kernel_cases
from attention_conformance.measure.finding import Finding
from attention_conformance.measure.question import Question
from attention_conformance.problem import Problem
from attention_conformance.verdict.judge import asked

SAME_BITS_AS = "same-bits-as"


def problem_of(finding: Finding, subject: Subject) -> Problem:
    """Make the arrays of a result again, as NumPy has them.

    Parameters
    ----------
    finding : Finding
    subject : Subject
        The one that the result is about.

    Returns
    -------
    Problem
        With all ``arrays`` of the call, and the ``cotangent`` of a case about gradients.
    """
    subject = settled(subject)
    (case,) = (each for each in (*kernel_cases([finding.case]), *BITS) if each.name == finding.case)
    return asked(Question(subject, case, finding.dtype, seed=finding.seed))


def command_of(result: Finding, target: str, declared: Mapping[str, Any], profile: str = "kernel") -> str:
    """The command that checks the case of a result alone."""
    if result.backend:  # of the core
        way = ("case", "backend", "device", "dtype", "mode", "implementation")
        chosen = [f"--{name}={getattr(result, name)}" for name in way if getattr(result, name)]
        return shlex.join(["attention-core", "conformance", *chosen])
    words = ["attention-core", "check", target]
    for fact, value in declared.items():
        if isinstance(value, bool):
            words += [f"--{'no-' * (not value)}{OPTION_OF[fact]}"]
        elif fact in OPTION_OF:
            words += [f"--{OPTION_OF[fact]}", str(value)]
        else:
            words += ["--keyword", f"{fact.removesuffix('_name')}={value}"]
    words += ["--case", result.case, "--dtype", result.dtype]
    words += ["--seed", str(result.seed)] if result.seed else []
    name, _, other = profile.partition(" ")
    how = ["--same-bits-as", other] if name == SAME_BITS_AS else ["--profile", profile]
    return shlex.join(words + (how if profile != "kernel" else []))


def script_of(result: Finding, target: str, declared: Mapping[str, Any], profile: str = "kernel") -> str:
    """A script that checks the case of a result alone, and has the arrays of its call."""
    keywords = "".join(f", {name}={each!r}" for name, each in declared.items())
    name, _, other = profile.partition(" ")
    loaded = "subject" if other == target else f"load_target({other!r})"
    how = f"same_bits_as={loaded}" if name == SAME_BITS_AS else f'profile="{profile}"'
    return f"""from attention_conformance import check_subject, load_target, problem_of

subject = load_target({target!r}{keywords})
options = dict(cases=["{result.case}"], dtypes=["{result.dtype}"], seed={result.seed}, {how})
(result,) = (each for each in check_subject(subject, **options) if each.case == "{result.case}")
print(result.verdict, "by", result.error, "units in the last place:", result.detail)

problem = problem_of(result, subject)  # the arrays of the call
print({{name: (array.dtype.name, array.shape) for name, array in problem.arrays.items()}}, problem.options)
"""
