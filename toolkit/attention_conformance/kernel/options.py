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
        The library of the target's arrays: numpy, torch, jax or tensorflow.
    device
        A device of that library, or its kind, such as cuda.
    layout
        The axes of query, key and value: BHSD, BSHD, SBHD, HSD, SHD or SD.
    mask_kind
        The kind of mask: keep (True attends), drop (True hides), integer (1 or 0), additive or none.
    causal_alignment
        The alignment of the causal mask: top-left, bottom-right, none, or always.
    default_scale
        The scale of a call without one: sqrt (1/√D) or one.
    grouped
        The query heads may share KV heads (GQA).
    batch_invariant
        The kernel promises bitwise equal results in any batch.
    backward
        The backward function of a kernel without autograd.
    dtype
        A floating-point type to run; repeatable. By default two that the target takes, and a few cases in a third.
    profile
        The bounds of errors: exact, tf32, or kernel, which allows weights in half precision.
    same_bits_as
        Compare the bits of different calls with this target, or with the same, instead of running the cases.
    case
        A case by name, in which * and ? match any letters; repeatable. By default all but large-*, of up to 28 GiB.
    accept
        The name of a convention, fault or case that passes; repeatable.
    seed
        The seed of inputs and of random shapes. By default 0.
    expected
        A file of known failures; the word shipped takes that of the preset.
    keyword
        The name of a keyword of the target, as mask=NAME or causal=NAME; repeatable.
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


OPTION_OF = {fact: word_of(name) for name, fact in FACTS.items()}
"""The option that declares a fact."""


def helps_of(kind: type) -> dict[str, str]:
    """What the documentation of a dataclass says of its parameters, by name."""
    _, _, rows = inspect.cleandoc(kind.__doc__ or "").partition("\n\nParameters\n----------\n")
    entries = re.findall(r"^(\w+)\n((?:    .+\n?)+)", rows, re.MULTILINE)
    return {name: " ".join(text.split()) for name, text in entries}


def named_keywords(texts: Iterable[str]) -> dict[str, str]:
    """The fields of `Subject` that texts as ``mask=NAME`` declare; a ValueError for another text."""
    keywords = {}
    for text in texts:
        what, _, word = text.partition("=")
        if f"{what}_name" not in KEYWORDS or not word:
            names = ", ".join(name.removesuffix("_name") for name in KEYWORDS)
            raise ValueError(f"expected --keyword of WHAT=NAME with one of {names}; got {text!r}")
        keywords[f"{what}_name"] = word
    return keywords
