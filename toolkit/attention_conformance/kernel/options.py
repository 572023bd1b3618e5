"""What options say about a subject and its check, for the command and for pytest alike."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from attention_conformance.kernel.signature import KEYWORDS
from attention_conformance.launch.subject import LAYOUTS


@dataclass(frozen=True)
class Option:
    """An option of a check.

    Attributes
    ----------
    says : str
        Its help.
    fact : str
        The field of `Subject` that it declares, or ``backward``; empty where it is about the check.
    values : tuple of str
        The values that it takes; empty where there are many.
    kind : str
        ``text``, ``many`` texts, a ``flag``, a ``flag or not``, or a ``number``.
    """

    says: str
    fact: str = ""
    values: tuple[str, ...] = ()
    kind: str = "text"


OPTIONS = {
    "backend": Option(
        "The library of its arrays: numpy, torch, jax, tensorflow.", "backend", ("numpy", "torch", "jax", "tensorflow")
    ),
    "device": Option("A device of that library, or its kind, as cuda.", "device"),
    "layout": Option("BHSD, BSHD, SBHD, HSD, SHD or SD.", "layout", LAYOUTS),
    "mask-kind": Option(
        "keep, drop (True hides), integer (1 or 0), additive or none.",
        "mask",
        ("keep", "drop", "integer", "additive", "none"),
    ),
    "causal-alignment": Option(
        "Where causality counts from: top-left, bottom-right, none, or always.",
        "causal",
        ("top-left", "bottom-right", "none", "always"),
    ),
    "default-scale": Option("The scale that no call states: sqrt (1/√D) or one.", "default_scale", ("sqrt", "one")),
    "grouped": Option("Whether query heads may share KV heads (GQA).", "grouped", kind="flag or not"),
    "batch-invariant": Option(
        "The kernel promises bitwise equal results in any batch.", "batch_invariant", kind="flag"
    ),
    "backward": Option("The backward function of a kernel without autograd.", "backward"),
    "dtype": Option(
        "A floating-point type; repeatable. By default two of those it takes, and a few cases in a third.", kind="many"
    ),
    "profile": Option("exact or tf32; by default kernel, for weights in half precision."),
    "same-bits-as": Option("Another target, or the same: are different calls bitwise equal? In place of the cases."),
    "case": Option(
        "Cases by name, * and ? allowed; repeatable. By default all but large-*, of up to 28 GiB.", kind="many"
    ),
    "accept": Option("A convention, fault or case that passes, by name; repeatable.", kind="many"),
    "seed": Option("The seed of all inputs, by default 0; each draws other shapes.", kind="number"),
    "expected": Option("A file of known failures, or shipped: that of the preset."),
    "keyword": Option("What a keyword is, as mask=NAME or causal=NAME; repeatable.", kind="many"),
}
"""The options that the command and pytest share, by name."""


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
