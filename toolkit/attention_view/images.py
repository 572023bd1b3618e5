"""Pictures as data within a page."""

from __future__ import annotations

import base64
import os
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from attention_view.sources import as_numpy

SIGNATURE = b"\x89PNG\r\n\x1a\n"
EXIF = 0xE1  # the marker of a segment that may say how a browser turns a JPEG
MOST_PIXELS = 2048
"""So many pixels a side of an array keeps at most."""


def image_data(image: Any) -> tuple[str, tuple[int, int]]:
    """The address of a picture as data, and its height and width."""
    source, size = _read(image) if isinstance(image, str | os.PathLike) else _encoded(as_numpy(image))
    if 0 in size:
        raise ValueError(f"expected image of at least one pixel; got {size[0]} × {size[1]}")
    return source, size


def _encoded(pixels: Any) -> tuple[str, tuple[int, int]]:
    """Pixels as PNG in a data address."""
    if pixels.ndim not in (2, 3) or (pixels.ndim == 3 and pixels.shape[2] not in (1, 3, 4)):
        hint = ": move the first axis to the end" if pixels.ndim == 3 and pixels.shape[0] in (1, 3, 4) else ""
        raise ValueError(f"expected image (height, width) or (height, width, 3 or 4); got {pixels.shape}{hint}")
    if pixels.dtype.kind == "f":
        pixels = np.rint(np.clip(np.nan_to_num(pixels), 0, 1) * 255).astype(np.uint8)
    if pixels.dtype != np.uint8:
        raise TypeError(f"expected image of uint8, or of floats in [0, 1]; got {pixels.dtype}")
    pixels, size = pixels[..., None] if pixels.ndim == 2 else pixels, pixels.shape[:2]
    every = -(-max(1, *size) // MOST_PIXELS)
    if every > 1:  # each pixel of a large picture is the mean of several
        height, width = (max(1, length // every) for length in size)
        pixels = pixels[: height * every, : width * every]
        blocks = pixels.reshape(height, -1, width, pixels.shape[1] // width, pixels.shape[2])
        pixels = np.rint(blocks.mean((1, 3), dtype=np.float32)).astype(np.uint8)
    height, width, channels = pixels.shape
    kind = {1: 0, 3: 2, 4: 6}[channels]
    lines = np.concatenate([np.zeros((height, 1), np.uint8), pixels.reshape(height, width * channels)], axis=1)
    parts = [
        (b"IHDR", struct.pack(">IIBBBBB", width, height, 8, kind, 0, 0, 0)),
        (b"IDAT", zlib.compress(lines.tobytes(), 9)),
        (b"IEND", b""),
    ]
    chunks = (
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data)) for name, data in parts
    )
    return _address("png", SIGNATURE + b"".join(chunks)), size


def _read(path: str | os.PathLike[str]) -> tuple[str, tuple[int, int]]:
    """A file of PNG or JPEG. Its pixels stay as they are stored, as a model reads them: a note to turn them is cut."""
    data = Path(path).read_bytes()
    if data.startswith(SIGNATURE) and len(data) >= 24:
        width, height = struct.unpack(">II", data[16:24])
        return _address("png", data), (height, width)
    at, kept = 2, [data[:2]]
    while data.startswith(b"\xff\xd8") and at + 9 < len(data):
        marker, length = data[at + 1], int.from_bytes(data[at + 2 : at + 4], "big")
        if 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):
            height, width = struct.unpack(">HH", data[at + 5 : at + 9])
            return _address("jpeg", b"".join((*kept, data[at:]))), (height, width)
        kept += [data[at : at + 2 + length]] * (marker != EXIF)
        at += 2 + length
    raise ValueError(f"expected an image of PNG or JPEG; got {Path(path).name}")


def _address(kind: str, data: bytes) -> str:
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"
