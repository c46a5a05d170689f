"""Images beside the lines: each once, in the folder `images` of the store, in a file that is named by its hash.

A line has the text of its messages, and under `parts` what those with images consist of:

    "parts": [[0, ["What is this?", {"sha256": "3dcf16ab12de...", "media_type": "image/png"}]], ...]

A line that is sent elsewhere holds the bytes as well, as `base64`.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import os
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, TypeAlias

from pydantic import Field

from agent_rl.core.images import Image
from agent_rl.core.messages import Message
from agent_rl.errors import DamagedEpisodeError
from agent_rl.store.lines import sync

FOLDER = "images"
_SUFFIX: Mapping[str, str] = {"image/png": ".png", "image/jpeg": ".jpg"}


@dataclass(frozen=True, slots=True)
class PackedImage:
    """What a line has of an image."""

    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
    media_type: str
    base64: str | None = None
    """Its bytes, where they are not beside."""


Parts: TypeAlias = tuple[tuple[Annotated[int, Field(ge=0)], tuple[str | PackedImage, ...]], ...]
"""The parts of messages, each behind the message's number in the episode."""
KeepImage: TypeAlias = Callable[[Image], PackedImage]
"""Puts an image somewhere: `pack_image` does into the line."""


class ImageFolder:
    """Writes images beside the lines; any number of writers, and an image that is there is not written again.

    One whose line was never written, as after a kill, takes room and does no harm.
    """

    def __init__(self, store: Path) -> None:
        """Take the folder of the episode files; `images` is made in it with the first image."""
        self._folder = store / FOLDER
        self._lock = threading.Lock()
        self._unsynced: list[Path] = []

    def keep(self, image: Image) -> PackedImage:
        """Write an image, and return what its line says of it.

        Raises:
            OSError: if the disk refuses.
        """
        packed = PackedImage(image.sha256, image.media_type)
        file = _file(self._folder.parent, packed)
        with self._lock:
            if not (file.exists() and file.stat().st_size == len(image.data)):  # a machine's failure may cut it short
                self._folder.mkdir(exist_ok=True)
                partial = file.with_name(f"{file.name}.{os.urandom(4).hex()}.tmp")  # another writer may have the same
                try:
                    partial.write_bytes(image.data)
                    partial.replace(file)
                finally:
                    partial.unlink(missing_ok=True)
                self._unsynced.append(file)
        return packed

    def flush(self) -> None:
        """Wait until everything is on the disk itself."""
        with self._lock:
            for path in (*self._unsynced, *([self._folder] if self._unsynced else [])):
                sync(path)
            self._unsynced.clear()


def pack_image(image: Image) -> PackedImage:
    """Return an image as a line holds it whole."""
    return PackedImage(image.sha256, image.media_type, base64.b64encode(image.data).decode("ascii"))


def pack_parts(messages: Sequence[Message], keep: KeepImage) -> Parts:
    """Return the parts of messages as a line has them."""
    return tuple(
        (at, tuple(keep(part) if isinstance(part, Image) else part for part in message.parts))
        for at, message in enumerate(messages)
        if message.parts
    )


def with_parts(messages: Sequence[Message], parts: Parts, store: Path | None) -> tuple[Message, ...]:
    """Return the messages of a line with their parts; one whose images are not at hand keeps its text alone.

    Args:
        messages: of the line.
        parts: of the line.
        store: the folder of its file, None if it was sent. A file that is missing there is a warning.

    Raises:
        DamagedEpisodeError: if an image is another than its line says, or belongs to no message.
    """
    out = list(messages)
    for at, packed in parts:
        found = [part if isinstance(part, str) else _unpack(part, store) for part in packed]
        if (whole := [part for part in found if part is not None]) != found:
            continue
        try:
            out[at] = replace(out[at], parts=tuple(whole))
        except (IndexError, ValueError) as error:
            raise DamagedEpisodeError(f"the parts of message {at} contradict the others: {error}") from error
    return tuple(out)


def _unpack(packed: PackedImage, store: Path | None) -> Image | None:
    if packed.base64 is not None:
        try:
            data = binascii.a2b_base64(packed.base64, strict_mode=True)
        except binascii.Error as error:
            raise DamagedEpisodeError(f"the image {packed.sha256} is no base64: {error}") from error
    elif store is None:
        return None
    else:
        file = _file(store, packed)
        try:
            data = file.read_bytes()
        except FileNotFoundError:
            warnings.warn(f"{file} is missing, so the message keeps only its text: copy {FOLDER}/, too", stacklevel=2)
            return None
    if (found := hashlib.sha256(data).hexdigest()) != packed.sha256:
        raise DamagedEpisodeError(f"the image {packed.sha256} has the hash {found}")
    try:
        return Image(data)
    except ValueError as error:
        raise DamagedEpisodeError(f"the image {packed.sha256} is none: {error}") from error


def _file(store: Path, packed: PackedImage) -> Path:
    try:
        return store / FOLDER / f"{packed.sha256}{_SUFFIX[packed.media_type]}"
    except KeyError:
        known = ", ".join(_SUFFIX)
        raise DamagedEpisodeError(f"an image has the unknown type {packed.media_type!r}; known: {known}") from None
