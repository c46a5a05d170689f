"""Images: the parts of a message that are no text."""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
import os
import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

_PNG = b"\x89PNG\r\n\x1a\n"
_JPEG = b"\xff\xd8\xff"
_LONGEST = 4096  # of a path, in characters
_COLOURS = {1: 0, 2: 4, 3: 2, 4: 6}
"""PNG's colour type by the number of channels: grey, grey and alpha, RGB, RGBA."""
_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
"""JPEG's markers whose segment begins with the size in pixels (ITU T.81, table B.1)."""


@dataclass(frozen=True)
class Image:
    """A PNG or JPEG file, as it is; `Image.of` also takes a path, a data URL, pixels or an image of PIL.

    As text it is one line with its kind, its size and the beginning of its hash: what text-only readers of a message
    get in its place.
    """

    data: bytes = field(repr=False)

    __pydantic_config__: ClassVar[Mapping[str, str]] = {"ser_json_bytes": "base64", "val_json_bytes": "base64"}

    def __post_init__(self) -> None:
        """Look at the file's beginning.

        Raises:
            TypeError: if it is not bytes.
            ValueError: if they are no PNG or JPEG file.
        """
        if not isinstance(self.data, bytes):
            raise TypeError(f"Image(data={type(self.data).__name__}): give bytes; Image.of takes paths and pixels")
        _ = self.size

    def __str__(self) -> str:
        width, height = self.size
        return f"[image: {self.media_type.removeprefix('image/')} {width}x{height}, sha256 {self.sha256[:12]}]"

    def __repr__(self) -> str:
        return f"Image({str(self)[len('[image: ') : -1]})"

    @classmethod
    def of(cls, source: Any) -> Image:
        """Return an image of anything that is one.

        Args:
            source: a file's bytes; a path; a URL that begins with `data:image/`; pixels as an array of uint8 of shape
                [height, width] or [height, width, 1 to 4 channels]; or an image of PIL.

        Raises:
            OSError: if there is no such file.
            TypeError: if it is nothing of the kind.
            ValueError: if the bytes are no PNG or JPEG file, or the array no image.
        """
        if isinstance(source, Image):
            return source
        if isinstance(source, bytes | bytearray | memoryview):
            return cls(bytes(source))
        if isinstance(source, np.ndarray):
            return cls(_as_png(source))
        if isinstance(source, str) and source.startswith("data:"):
            return cls(_read_url(source))
        if isinstance(source, str) and len(source) > _LONGEST:
            raise ValueError(f"Image.of({source[:20]!r}...): {len(source)} characters are no path; decode base64 first")
        if isinstance(source, str | os.PathLike):
            return cls(Path(source).read_bytes())
        if callable(save := getattr(source, "save", None)):
            saved = io.BytesIO()
            save(saved, format="PNG")
            return cls(saved.getvalue())
        raise TypeError(f"Image.of({type(source).__name__}): give bytes, a path, a data URL, an array or a PIL image")

    @property
    def media_type(self) -> str:
        """`image/png` or `image/jpeg`."""
        return "image/png" if self.data.startswith(_PNG) else "image/jpeg"

    @cached_property
    def sha256(self) -> str:
        """The hash of its bytes, as 64 hex digits."""
        return hashlib.sha256(self.data).hexdigest()

    @cached_property
    def size(self) -> tuple[int, int]:
        """Width and height in pixels."""
        try:
            if self.data.startswith(_PNG) and self.data[12:16] == b"IHDR":
                return struct.unpack_from(">II", self.data, 16)
            if self.data.startswith(_JPEG):
                return _jpeg_size(self.data)
        except (struct.error, IndexError):
            pass
        raise ValueError(f"bytes that begin with {self.data[:12]!r} are no whole PNG or JPEG file: convert the image")

    @property
    def url(self) -> str:
        """The whole image as a data URL."""
        return f"data:{self.media_type};base64,{base64.b64encode(self.data).decode('ascii')}"


def _read_url(url: str) -> bytes:
    head, _, body = url.partition(",")
    if not head.startswith("data:image/") or not head.endswith(";base64"):
        raise ValueError(f"the URL {head[:60]!r} holds no image: it has to begin with data:image/...;base64,")
    try:
        return binascii.a2b_base64(body, strict_mode=True)
    except binascii.Error as error:
        raise ValueError(f"the URL {head[:60]!r} holds no base64: {error}") from None


def _jpeg_size(data: bytes) -> tuple[int, int]:
    at = 2
    while data[at] == 0xFF:
        marker = data[at + 1]
        if marker in _FRAMES:
            height, width = struct.unpack_from(">HH", data, at + 5)
            return width, height
        at += 1 if marker == 0xFF else 2 + struct.unpack_from(">H", data, at + 2)[0]
    raise IndexError(at)


def _as_png(pixels: np.ndarray[Any, Any]) -> bytes:
    """Return pixels as a PNG file (W3C PNG, 8 bits a channel), its rows unfiltered."""
    shape = pixels.shape if pixels.ndim == 3 else (*pixels.shape, 1)
    if pixels.dtype != np.uint8 or len(shape) != 3 or shape[2] not in _COLOURS or not pixels.size:
        raise ValueError(f"an array of {pixels.dtype} {pixels.shape} is no image: give uint8 [height, width, channels]")
    height, width, channels = shape
    rows = np.zeros((height, 1 + width * channels), np.uint8)
    rows[:, 1:] = pixels.reshape(height, -1)
    header = struct.pack(">IIBBBBB", width, height, 8, _COLOURS[channels], 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(rows.tobytes())), (b"IEND", b""))
    return _PNG + b"".join(
        struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body)) for name, body in chunks
    )
