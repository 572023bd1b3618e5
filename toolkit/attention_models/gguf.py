"""Language models in GGUF files of architecture llama, which the package gguf reads: Llama, SmolLM, Mistral.

Names and shapes are checked before any weight is read, and a setting that is not known is refused. Rotary pairs of
queries and keys, neighbours in the file, become halves of a head, as in transformers: the same products, and halves are
read in one piece. Quantized weights become float32.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

import attention_models as models
from attention_core import layers
from attention_files.optional import optional
from attention_files.writing import FileError
from attention_models.layouts import LayoutError, rotary_divisors
from attention_models.parameters import Decoder

gguf = optional("gguf", "GGUF files")

__all__ = ["GgufModel", "load_gguf", "open_gguf"]

ARCHITECTURES = ("llama",)
ROTATED = re.compile(r"\.attn_[qk]\.")
MAPS = {
    "attention.query": "attn_q",
    "attention.key": "attn_k",
    "attention.value": "attn_v",
    "attention.output": "attn_output",
    "attention_norm": "attn_norm.weight",
    "feed_forward.gate": "ffn_gate",
    "feed_forward.expand": "ffn_up",
    "feed_forward.contract": "ffn_down",
    "feed_forward_norm": "ffn_norm.weight",
}
SIZES = ("embedding_length", "attention.head_count", "block_count", "feed_forward_length")
KNOWN = {  # all others may change what a model computes
    *SIZES, "attention.head_count_kv", "attention.key_length", "attention.value_length",
    "attention.layer_norm_rms_epsilon", "rope.dimension_count", "rope.freq_base", "rope.scaling.type",
    "rope.scaling.factor", "rope.scale_linear", "rope.scaling.original_context_length", "rope.scaling.finetuned",
    "vocab_size", "context_length",
}  # fmt: skip
WITHOUT = {  # settings that change nothing
    "attention.causal": (True,), "expert_count": (0,), "expert_used_count": (0,),
    "tensor_data_layout": ("Meta AI original pth",),
}  # fmt: skip
VERSIONS = (2, 3)
NUMBERS = {0: "u1", 1: "i1", 2: "u2", 3: "i2", 4: "u4", 5: "i4", 6: "f4", 7: "?", 10: "u8", 11: "i8", 12: "f8"}
TEXT, ARRAY = 8, 9  # kinds of values, besides those of numbers
MOST_AXES = 4  # of a tensor of ggml
OTHERS = ("adapter", "clip", "diffusion", "xielu")  # of models with more than an architecture
FREQUENCIES = "rope_freqs.weight"
WHOLE = {"token": "token_embd.weight", "norm": "output_norm.weight", "output.weight": "output.weight"}


class GgufModel(NamedTuple):
    """A language model of a GGUF file, with what the file says of its tokenizer."""

    definition: models.Decoder
    parameters: Decoder
    tokenizer: dict[str, Any]


def load_gguf(path: str | os.PathLike[str], /) -> GgufModel:
    """Read a language model from a GGUF file.

    Parameters
    ----------
    path : path-like

    Returns
    -------
    GgufModel
        Parameters are NumPy arrays of float32. The tokenizer is a dict with the values of ``tokenizer.*``, without that
        beginning.

    Raises
    ------
    FileError
        When the file is not there, truncated or of another kind.
    LayoutError
        When the architecture or a setting is unknown, or a tensor is missing, superfluous or of another shape.
    ModuleNotFoundError
        When the package gguf is not installed.
    """
    definition, read, tokenizer = open_gguf(path)
    return GgufModel(definition, read(), tokenizer)


def open_gguf(path: str | os.PathLike[str], /) -> tuple[models.Decoder, Callable[[], Decoder], dict[str, Any]]:
    """Check a file as `load_gguf` does; return the definition, what reads the weights, and values of the tokenizer."""
    path = Path(path)
    values, tensors = _contents(path)
    dims = {name: tensor.dims for name, tensor in tensors.items()}
    try:
        definition = _definition(path, values, tensors, dims=dims)
    except LayoutError:
        raise
    except (TypeError, ValueError) as error:
        raise LayoutError(f"expected settings of a language model in {path}; got others: {error}") from error
    names = _names(definition)
    specs = layers.named_arrays(definition.parameters)
    transposed = {name: len(spec.dims) == 2 and name != "token" for name, spec in specs.items()}
    for name, spec in specs.items():
        wanted = spec.dims[::-1] if transposed[name] else spec.dims
        if names[name] not in dims:
            raise LayoutError(f"expected {names[name]} in {path}; got no such tensor")
        if dims[names[name]] != wanted:
            raise LayoutError(f"expected {names[name]} {wanted} in {path}; got {dims[names[name]]}")
    if left := sorted(set(dims) - set(names.values()) - {FREQUENCIES}):
        more = f" ({len(left)} in all)" if len(left) > 3 else ""
        raise LayoutError(f"expected no other tensors of a llama in {path}; got {', '.join(left[:3])}{more}")

    def read() -> Decoder:
        arrays = {}
        for name, foreign in names.items():
            try:
                array = tensors[foreign].numbers()
            except NotImplementedError as error:
                known = f"{tensors[foreign].kind.name} of {foreign}"
                raise LayoutError(f"expected weights of types that gguf reads in {path}; got {known}") from error
            array = _in_halves(array, definition) if ROTATED.search(foreign) else array
            arrays[name] = np.ascontiguousarray(array.T) if transposed[name] else array
        return layers.tree_from_names(definition.parameters, arrays)  # type: ignore[no-any-return]

    tokenizer = {
        name.removeprefix("tokenizer."): each for name, each in values.items() if name.startswith("tokenizer.")
    }
    return definition, read, tokenizer


def _in_halves(array: NDArray[Any], definition: models.Decoder) -> NDArray[Any]:
    """Rows of heads, the first axis, with pairs (2 i, 2 i + 1) as (i, i + W/2), of the W channels that are rotated."""
    size = definition.head_dim or definition.channels // definition.num_heads
    width = definition.rotary_width or size
    heads = array.reshape(-1, size, *array.shape[1:])
    pairs = heads[:, :width].reshape(len(heads), -1, 2, *array.shape[1:])
    turned = pairs.swapaxes(1, 2).reshape(len(heads), width, *array.shape[1:])
    return np.concatenate([turned, heads[:, width:]], axis=1).reshape(array.shape)


class _Tensor(NamedTuple):
    """Where the numbers of a tensor are in a file."""

    dims: tuple[int, ...]
    kind: Any
    data: NDArray[Any]

    def numbers(self) -> NDArray[Any]:
        """The numbers as float32."""
        found = gguf.dequantize(self.data.reshape(math.prod(self.dims[:-1]), -1), self.kind)
        return np.ascontiguousarray(found, dtype=np.float32).reshape(self.dims)


class _Reader:
    """Takes one value after the other from the bytes of a file, each once it is known to be within them."""

    def __init__(self, path: Path) -> None:
        try:
            with path.open("rb") as file:
                start = file.read(4)
        except OSError as error:
            raise FileError(f"expected a GGUF file; got {path}: {error.strerror}") from error
        if start != b"GGUF":
            raise FileError(f"expected a GGUF file; got {path}, which begins otherwise")
        self.path, self.bytes, self.at = path, np.memmap(path, mode="r"), len(start)
        version = self.number("I")
        if version not in VERSIONS:
            is_swapped = int.from_bytes(version.to_bytes(4, "little"), "big") in VERSIONS
            got = "one of the other order of bytes, big-endian" if is_swapped else f"version {version}"
            raise FileError(f"expected a little-endian GGUF file of version 2 or 3; got {path}, {got}")

    def broken(self) -> FileError:
        got = f"{self.path} of {len(self.bytes)} bytes, which ends too early or is broken"
        return FileError(f"expected a whole GGUF file; got {got}")

    def take(self, count: int) -> NDArray[Any]:
        start, self.at = self.at, self.at + count
        if self.at > len(self.bytes):
            raise self.broken()
        return self.bytes[start : self.at]

    def numbers(self, code: str, count: int) -> list[Any]:
        dtype = np.dtype(f"<{code}")
        found: list[Any] = self.take(count * dtype.itemsize).view(dtype).tolist()
        return found

    def number(self, code: str) -> Any:
        return self.numbers(code, 1)[0]

    def text(self) -> str:
        try:
            return self.take(self.number("Q")).tobytes().decode()
        except UnicodeDecodeError as error:
            raise self.broken() from error

    def value(self) -> Any:
        if (kind := self.number("I")) != ARRAY:
            return self.values(kind, 1)[0]
        return self.values(self.number("I"), self.number("Q"))

    def values(self, kind: int, count: int) -> list[Any]:
        if kind in NUMBERS:
            return self.numbers(NUMBERS[kind], count)
        if kind != TEXT:  # arrays of arrays are in no model
            raise self.broken()
        return [self.text() for _ in range(count)]

    def named(self, count: int, read: Callable[[], Any]) -> dict[str, Any]:
        """Pairs of a name and what is read after it."""
        found: dict[str, Any] = {}
        for _ in range(count):
            name = self.text()
            if name in found:
                raise FileError(f"expected every name once in {self.path}; got {name} again")
            found[name] = read()
        return found

    def fact(self) -> tuple[tuple[int, ...], int, int]:
        """Of a tensor: its dimensions, the last axis first in the file, its type, and where it begins."""
        rank = self.number("I")
        if rank not in range(1, MOST_AXES + 1):
            raise self.broken()
        return tuple(self.numbers("Q", rank)[::-1]), self.number("I"), self.number("Q")

    def tensor(self, name: str, dims: tuple[int, ...], kind: int, start: int) -> _Tensor:
        """A tensor, once it is known to be within the file."""
        try:
            known = gguf.GGMLQuantizationType(kind)
            block, size = gguf.GGML_QUANT_SIZES[known]
        except (KeyError, ValueError) as error:
            raise FileError(f"expected tensors of known types in {self.path}; got type {kind} of {name}") from error
        if 0 in dims or dims[-1] % block:
            raise FileError(f"expected rows of {block} numbers, or of several times as many, of {name}; got {dims}")
        end = start + math.prod(dims) // block * size
        if end > (found := len(self.bytes)):
            raise FileError(f"expected a whole GGUF file, of {end} bytes or more; got {self.path} of {found}")
        return _Tensor(dims, known, self.bytes[start:end])


def _contents(path: Path) -> tuple[dict[str, Any], dict[str, _Tensor]]:
    """All values and tensors of a file; no weight is read yet."""
    _ = gguf.GGMLQuantizationType  # which tells where the package is not installed
    reader = _Reader(path)
    num_tensors, num_values = reader.numbers("Q", 2)
    values = reader.named(num_values, reader.value)
    facts = reader.named(num_tensors, reader.fact)
    unit = values.get("general.alignment", 32)
    if type(unit) is not int or unit < 1 or unit & unit - 1:
        raise FileError(f"expected general.alignment in {path} as a power of two; got {unit!r}")
    first = -(-reader.at // unit) * unit
    return values, {name: reader.tensor(name, dims, kind, first + at) for name, (dims, kind, at) in facts.items()}


def _definition(
    path: Path, values: dict[str, Any], tensors: dict[str, _Tensor], *, dims: dict[str, tuple[int, ...]]
) -> models.Decoder:
    architecture = values.get("general.architecture")
    if architecture not in ARCHITECTURES:
        raise LayoutError(f"expected an architecture out of {', '.join(ARCHITECTURES)} in {path}; got {architecture!r}")

    settings = {
        name.removeprefix(f"{architecture}."): _one(path, name, value)
        for name, value in values.items()
        if name.startswith(f"{architecture}.")
    }
    for name, value in settings.items():
        if name not in KNOWN and value not in WITHOUT.get(name, ()):
            raise LayoutError(f"expected no {architecture}.{name}, which is not known, in {path}; got {value!r}")
    if others := [name for name in values if name.partition(".")[0] in OTHERS]:
        raise LayoutError(f"expected a {architecture} alone in {path}; got {others[0]} {values[others[0]]!r}")
    for name, wanted in (("general.type", "model"), ("split.count", 1)):
        if values.get(name, wanted) not in (wanted, 0):
            raise LayoutError(f"expected {name} {wanted} in {path}; got {values[name]!r}")

    def setting(name: str) -> Any:
        if name not in settings:
            raise LayoutError(f"expected {architecture}.{name} in {path}; got no such value")
        return settings[name]

    def number(name: str, default: Any = None, kind: Any = int | float, what: str = "number") -> Any:
        value = setting(name) if default is None else settings.get(name, default)
        if isinstance(value, bool) or not isinstance(value, kind) or not 0 < value < math.inf:
            raise LayoutError(f"expected {architecture}.{name} in {path} as a positive {what}; got {value!r}")
        return value if kind is int else float(value)

    def size(name: str, default: Any = None) -> int:
        found: int = number(name, default, kind=int, what="integer")
        most = len(dims) if name == "block_count" else max(map(max, dims.values()))
        if found > most:  # of which a tree, or divisors, might fill the memory
            raise LayoutError(
                f"expected {architecture}.{name} in {path} of at most {most}, as its tensors; got {found}"
            )
        return found

    if len(dims.get("token_embd.weight", ())) != 2:
        raise LayoutError(f"expected token_embd.weight (V, C) in {path}; got {dims.get('token_embd.weight')}")
    channels, num_heads, num_layers = map(size, SIZES[:3])
    num_kv_heads = size("attention.head_count_kv", num_heads)
    head_dim = size("attention.key_length", channels // num_heads)
    if size("attention.value_length", head_dim) != head_dim:
        raise LayoutError(
            f"expected values as wide as keys, {head_dim}, in {path}; got {setting('attention.value_length')}"
        )
    width, base = size("rope.dimension_count", head_dim), number("rope.freq_base", 10000.0)
    divisors, amplitude = rotary_divisors(str(path), _scaling(settings), base=base, width=width)
    divisors = _times_frequencies(path, divisors, tensors, width=width)
    return models.Decoder(
        dims["token_embd.weight"][0],
        channels,
        num_heads,
        size("feed_forward_length"),
        num_layers,
        tied="output.weight" not in dims,
        num_key_value_heads=None if num_kv_heads == num_heads else num_kv_heads,
        head_dim=None if head_dim * num_heads == channels else head_dim,
        attention_bias="blk.0.attn_q.bias" in dims,
        output_bias=None if ("blk.0.attn_q.bias" in dims) == ("blk.0.attn_output.bias" in dims) else False,
        epsilon=number("attention.layer_norm_rms_epsilon"),
        rotary_base=base,
        rotary_width=None if width == head_dim else width,
        rotary_divisors=divisors,
        scale=None if amplitude == 1 else amplitude**2 / math.sqrt(head_dim),
    )


def _one(path: Path, name: str, value: Any) -> Any:
    """A setting, which may be a list of one for each layer, if these are the same."""
    if not isinstance(value, list):
        return value
    if not value or any(each != value[0] for each in value):
        raise LayoutError(f"expected one {name} for all layers in {path}; got {value}")
    return value[0]


def _scaling(settings: dict[str, Any]) -> dict[str, Any]:
    """The record of a scaling in the words of transformers; a factor alone is a linear one."""
    factor = settings.get("rope.scaling.factor", settings.get("rope.scale_linear", 0)) or 1.0
    kind = settings.get("rope.scaling.type", "linear")
    original = settings.get("rope.scaling.original_context_length", settings.get("context_length"))
    return {
        "rope_type": "default" if kind == "none" else kind,
        "factor": factor,
        "original_max_position_embeddings": original,
    }


def _times_frequencies(
    path: Path, divisors: tuple[float, ...] | None, tensors: dict[str, _Tensor], *, width: int
) -> tuple[float, ...] | None:
    """Divisors times those that a tensor of the file has, as that of Llama 3.1 does."""
    if FREQUENCIES not in tensors:
        return divisors
    tensor = tensors[FREQUENCIES]
    if tensor.dims != (width // 2,):
        raise LayoutError(f"expected {FREQUENCIES} ({width // 2},) in {path}; got {tensor.dims}")
    found = tensor.numbers().tolist()
    return tuple([a * b for a, b in zip(found, divisors or (1.0,) * len(found), strict=True)])


def _names(definition: models.Decoder) -> dict[str, str]:
    """The names of all tensors in the file, by those of the parameters."""
    found = {}
    for name in layers.named_arrays(definition.parameters):
        if name in WHOLE:
            found[name] = WHOLE[name]
            continue
        _, index, path = name.split(".", 2)
        part, _, field = path.rpartition(".") if path.endswith((".weight", ".bias")) else (path, "", "")
        found[name] = f"blk.{index}.{MAPS[part]}{f'.{field}' if field else ''}"
    return found
