"""What options say about a kernel and its check, for the command and for pytest alike."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable
from dataclasses import dataclass

from attention_conformance.kernel.signature import KEYWORDS
from attention_conformance.launch.subject import LAYOUTS


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of a check that the command and pytest share.

    Parameters
    ----------
    backend
        The library of its arrays: numpy, torch, jax, tensorflow.
    device
        A device of that library, or its kind, as cuda.
    layout
        BHSD, BSHD, SBHD, HSD, SHD or SD.
    mask_kind
        keep, drop (True hides), integer (1 or 0), additive or none.
    causal_alignment
        Where causality counts from: top-left, bottom-right, none, or always.
    default_scale
        The scale that no call states: sqrt (1/√D) or one.
    grouped
        Whether query heads may share KV heads (GQA).
    batch_invariant
        The kernel promises bitwise equal results in any batch.
    backward
        The backward function of a kernel without autograd.
    dtype
        A floating-point type; repeatable. By default two of those it takes, and a few cases in a third.
    profile
        exact or tf32; by default kernel, for weights in half precision.
    same_bits_as
        Another target, or the same: are different calls bitwise equal? In place of the cases.
    case
        Cases by name, * and ? allowed; repeatable. By default all but large-*, of up to 28 GiB.
    accept
        A convention, fault or case that passes, by name; repeatable.
    seed
        The seed of all inputs, by default 0; each draws other shapes.
    expected
        A file of known failures, or shipped: that of the preset.
    keyword
        What a keyword is, as mask=NAME or causal=NAME; repeatable.
    """

    backend: str | None = None
    device: str | None = None
    layout: str | None = None
    mask_kind: str | None = None
    causal_alignment: str | None = None
    default_scale: str | None = None
    grouped: bool | None = None
    batch_invariant: bool | None = None
    backward: str | None = None
    dtype: list[str] | None = None
    profile: str = "kernel"
    same_bits_as: str = ""
    case: list[str] | None = None
    accept: list[str] | None = None
    seed: int | None = None
    expected: str | None = None
    keyword: list[str] | None = None


FACTS = {"mask_kind": "mask", "causal_alignment": "causal"}
FACTS |= {
    name: name for name in ("backend", "device", "layout", "default_scale", "grouped", "batch_invariant", "backward")
}
"""The options that declare fields of `Subject`, or ``backward``."""

VALUES = {
    "backend": ("numpy", "torch", "jax", "tensorflow"),
    "layout": LAYOUTS,
    "mask_kind": ("keep", "drop", "integer", "additive", "none"),
    "causal_alignment": ("top-left", "bottom-right", "none", "always"),
    "default_scale": ("sqrt", "one"),
}
"""The values of options that take few."""


def word_of(name: str) -> str:
    """An option as it is written, without hyphens in front."""
    return name.strip("_").replace("_", "-")


def helps_of(kind: type) -> dict[str, str]:
    """What the documentation of a dataclass says of its parameters, by name."""
    _, _, rows = inspect.cleandoc(kind.__doc__ or "").partition("\n\nParameters\n----------\n")
    found = re.findall(r"^(\w+)\n((?:    .+\n?)+)", rows, re.MULTILINE)
    return {name: " ".join(text.split()) for name, text in found}


def named_keywords(texts: Iterable[str]) -> dict[str, str]:
    """The fields of `Subject` that texts as ``mask=NAME`` declare; a ValueError for another text."""
    found = {}
    for each in texts:
        what, _, word = each.partition("=")
        if f"{what}_name" not in KEYWORDS or not word:
            names = ", ".join(name.removesuffix("_name") for name in KEYWORDS)
            raise ValueError(f"expected --keyword of WHAT=NAME with one of {names}; got {each!r}")
        found[f"{what}_name"] = word
    return found
