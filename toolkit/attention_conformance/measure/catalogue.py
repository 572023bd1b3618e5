"""The cases for anybody's attention."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase

from attention_conformance.cases import CASES
from attention_conformance.cases.case import Case
from attention_conformance.cases.kernels import KERNELS
from attention_conformance.cases.large import LARGE
from attention_conformance.cases.properties import CORNERS, PROPERTIES
from attention_conformance.cases.shapes import Shape, case_of, drawn, shape_of
from attention_conformance.launch.subject import STRIDED, Subject
from attention_conformance.measure.profiles import is_asked
from attention_conformance.named.case import named_cases
from attention_conformance.problem import NARROW, WIDE

KERNEL_CASES: tuple[Case, ...] = (*CASES, *KERNELS, *PROPERTIES, *CORNERS)
"""The cases for anybody's attention but the shapes."""

OF_OTHERS = (
    "shape-128x128-d64-causal", "shape-70x200-mask", "shape-1x130-h8on2-d64-plain", "scores-above-100",
    "shape-64x64-d64-plain-gradient",
)  # fmt: skip
"""Cases that are run in all other types that a kernel takes, as it has code for each."""


def matching(cases: Iterable[Case], patterns: Sequence[str]) -> list[Case]:
    """The cases of these names, with ``*`` and ``?``; all where there are none."""
    return [case for case in cases if any(fnmatchcase(case.name, each) for each in patterns or ("*",))]


def kernel_cases(
    patterns: Sequence[str] = (), profile: str = "exact", kernel: Subject | None = None, seed: int = 0
) -> list[Case]:
    """The cases of these names, as far as a profile asks for them; a name of a shape is a case that is made for it."""
    written = [shape for shape in map(shape_of, patterns or OF_OTHERS) if shape is not None]
    globs = [each for each in patterns if shape_of(each) is None]
    listed = matching((*KERNEL_CASES, *shapes(kernel, seed)), globs) if globs or not patterns else []
    listed += large_cases(patterns)
    return [case for case in dict.fromkeys([*listed, *map(case_of, written)]) if is_asked(profile, case)]


def large_cases(patterns: Sequence[str]) -> list[Case]:
    """The large cases, which are run by name alone: patterns of other cases match none of them."""
    named = [each for each in patterns if each.startswith("large")]
    return matching(LARGE, named) if named else []


def shapes(kernel: Subject | None = None, seed: int = 0) -> list[Case]:
    """The cases of drawn shapes, and of those at which published attentions were wrong, as a kernel takes them."""
    published = [Shape.published(each.geometry, each.property) for each in named_cases()]
    rows = [*drawn(seed), *((shape, narrow) for shape in published if shape for narrow in (False, True))]
    asked = dict.fromkeys((offered(shape, kernel), narrow) for shape, narrow in rows)
    return [replace(case_of(shape), dtypes=NARROW if narrow else WIDE) for shape, narrow in asked]


def offered(shape: Shape, kernel: Subject | None) -> Shape:
    """The shape with the settings that a kernel takes, in place of those that it does not."""
    if kernel is None:
        return shape
    rule, relation, masks = shape.rule, shape.relation, kernel.native or kernel.mask != "none" or kernel.bias_name
    if rule == "bias" and not (kernel.native or kernel.bias_name):
        rule = "mask"
    if rule not in ("plain", "causal") and not masks:
        rule = "plain" if kernel.causal == "none" else "causal"
    differentiates = kernel.differentiates or kernel.backward
    if (relation == "gradient" and not differentiates) or (relation == "hidden" and not masks):
        relation = ""
    memory = shape.memory if kernel.backend in STRIDED else ""
    heads = shape.heads if kernel.grouped is not False else shape.groups
    width = shape.value_width if kernel.same_width is False else 0
    return replace(shape, rule=rule, relation=relation, memory=memory, heads=heads, value_width=width)
