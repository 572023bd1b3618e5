"""The rows of the survey, and the properties by which the cases of the kit are put together."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, TypeAlias

from attention_conformance.cases.case import BITWISE, Case
from survey.presets import PRESETS, target_of


@dataclass(frozen=True)
class Row:
    """One kernel: a preset, the environment in which it is installed, and what its process is told.

    Where a compiler takes most of the time, types of 16 bits are asked for in the cases `NARROW` alone.
    """

    preset: str
    group: str
    environment: Mapping[str, str] = field(default_factory=dict)
    is_compiled: bool = False

    @property
    def name(self) -> str:
        """The preset, with the library of Keras that computes."""
        library = self.environment.get("KERAS_BACKEND")
        return f"{self.preset} ({library})" if library else self.preset

    @property
    def target(self) -> str:
        """The preset as the command takes it."""
        return target_of(self.preset)

    @property
    def package(self) -> str:
        """The package of the preset."""
        return PRESETS[self.preset].package


def _rows(group: str, *presets: str, is_compiled: bool = False, **environment: str) -> list[Row]:
    return [Row(preset, group, environment, is_compiled) for preset in presets]


ROWS: tuple[Row, ...] = (
    *_rows("torch", "torch.sdpa", "torch.sdpa-math", "torch.sdpa-flash", "torch.flex", "torch.mha"),
    *_rows("torch", "transformers.eager", "transformers.sdpa", "transformers.gemma2", "transformers.gpt-oss"),
    *_rows("torch", "diffusers", "x-transformers", "x-transformers.flash"),
    *_rows("torch", "keras.ops", "keras.mha", "keras.gqa", KERAS_BACKEND="torch"),
    *_rows("jax", "jax.nn", "jax.pallas-mha", is_compiled=True),
    *_rows("jax", "flax.nnx", "flax.linen", "equinox", "haiku", is_compiled=True),
    *_rows("jax", "tokamax", "tokamax.chunked", "flash-attention-jax", is_compiled=True),
    *_rows("jax", "keras.ops", is_compiled=True, KERAS_BACKEND="jax"),
    *_rows("tensorflow", "keras.ops", "keras.mha", is_compiled=True, KERAS_BACKEND="tensorflow"),
    *_rows("others", "keras.ops", KERAS_BACKEND="numpy"),
    *_rows("others", "onnx.reference", "onnxruntime", "onnxruntime.mha", "openvino", "mlx"),
    *_rows("others", "tinygrad", is_compiled=True, DEV="CPU"),
)
"""All rows, in the order of the table."""

ABSENT = {
    "xformers 0.0.35": "its operators for a CPU are not built: `memory_efficient_attention` refuses every array there",
    "timm, open-clip": "both import torchvision, whose wheels refuse a PyTorch for CPUs alone",
    "torchtune, keras-hub": "hundreds of MB, and their attention is `torch.sdpa` or `keras.ops`",
    "paddlepaddle": "no version can be installed next to the other packages of the survey",
    "flash-attn, TransformerEngine, cuDNN": "they need a GPU",
    "jax flash_attention and splash_attention for a TPU": "in interpret mode they refuse nearly all lengths of the kit",
    "jax decode_attention.gqa": "it takes one query alone, and no case of the kit has one",
}
"""Attentions that could not be had, and why."""

PROPERTIES = {
    "numbers": "ordinary and extreme numbers",
    "mask, bias": "masks are boolean and True means may attend; biases are added",
    "rules": "lengths, segments and combined masks, made into arrays",
    "causal": "causal alignment as declared, also with a mask, a window or a cache",
    "empty rows": "a fully masked row gives 0",
    "masked NaN": "NaN and infinities that are masked reach nothing",
    "weights": "asking for weights or logsumexp changes nothing",
    "scale, softcap": "scale of either sign, softcap, sinks",
    "dtype": "the output has the dtype of the query",
    "heads": "grouped heads repeat in order",
    "sizes": "lengths and widths at the edges of blocks, empty axes, many samples",
    "dropout": "dropout drops the right share",
    "strides": "strides of arguments and cotangents change nothing",
    "calls": "equal calls, earlier calls, samples alone, and decoding as prefill",
    "gradients": "gradients are those of the definition",
    "bits": "bitwise equal in batches, shards of heads, chunks, decoding, strides, threads",
    "16 bits": "all of these in bfloat16 or float16",
}
"""The columns, with what each asks."""

_LINES = ("numbers", "mask, bias", "rules", "causal", "empty rows", "masked NaN", "weights", "scale, softcap", "dtype",
          "heads", "sizes", "dropout")  # fmt: skip
"""The columns of the lines of the contract, from 0."""

PLAIN = ("ulp", "gradient")
"""Measures that compare a single call with the definition."""


def property_of(case: Case, dtype: str) -> str:
    """The column of a case in a dtype: its line of the contract, unless it is about memory, calls or gradients."""
    if case.measure == BITWISE:
        return "bits"
    if dtype in ("float16", "bfloat16"):
        return "16 bits"
    if "memory-" in case.name and case.measure in PLAIN:
        return "strides"
    if case.measure in ("gradient", "apart", "between", "repeated"):
        return "gradients"
    if case.measure == "exact":
        return "weights"
    if case.measure == "dropped":
        return "dropout"
    return "calls" if case.before or case.measure not in PLAIN else _LINES[case.line]


Remark: TypeAlias = Mapping[str, str]


def read_remarks() -> list[Remark]:
    """All remarks of the file, in its order."""
    text = (Path(__file__).parent / "remarks.toml").read_text(encoding="utf-8")
    return [{name: str(each) for name, each in remark.items()} for remark in tomllib.loads(text)["remark"]]


def findings_of(cell: Mapping[str, Any]) -> list[dict[str, str]]:
    """The results of a cell, one for each case and dtype; the detail is that of the first of its cause."""
    return [
        {"case": case, "dtype": dtype, **{name: each for name, each in cause.items() if name != "cases"}}
        for cause in cell.get("findings", ())
        for dtype, cases in cause["cases"].items()
        for case in cases
    ]


def matches(remark: Remark, subject: str, finding: Mapping[str, str]) -> bool:
    """Whether a remark is about a result of a kernel."""
    told = {"subject": subject, **{name: finding.get(name, "") for name in ("case", "dtype", "variant")}}
    return all(fnmatch(told[name], remark[name]) for name in told if name in remark)


def remark_of(subject: str, finding: Mapping[str, str], remarks: Sequence[Remark]) -> Remark | None:
    """The first remark about a result that stands in place of its verdict."""
    return next((each for each in remarks if "mark" in each and matches(each, subject, finding)), None)
