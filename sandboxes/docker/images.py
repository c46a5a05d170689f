"""Images that are pulled or built for sandboxes: each once, marked as ours, and kept within a bound of disk.

The engine notes when an image was last tagged. So whatever uses one of ours tags it anew, and those that were used
longest ago are removed first, whichever process made them.
"""

from __future__ import annotations

import hashlib
import threading
import time
from datetime import datetime
from pathlib import Path

from agent_rl.errors import SandboxError
from agent_rl.sandboxes.docker.engine import Engine

OURS = "agent-rl/"
"""How the names of images begin that only we make: they are never pulled."""
BUILT, PULLED = f"{OURS}task", f"{OURS}pulled"
"""The names of images that may be removed: those of a Dockerfile, and a second name of pulled ones."""
IMAGE_GB = 100.0
"""10^9 bytes that an engine's images may take by default."""
IN_USE = 3600.0
"""Seconds for which an image is kept after its use: another process may be about to open a sandbox of it."""
_changing = threading.Lock()


def digest_of(source: Path | str) -> str:
    """Return a hash of an image's name, or of a folder's files."""
    digest = hashlib.blake2b(source.encode() if isinstance(source, str) else b"", digest_size=8)
    for file in sorted(source.rglob("*")) if isinstance(source, Path) else ():
        if file.is_file():
            digest.update(f"{file.relative_to(source)}\0{file.stat().st_size}\0".encode() + file.read_bytes())
    return digest.hexdigest()


def provide(engine: Engine, source: Path | str, *, seconds: float, gigabytes: float) -> str:
    """Return the name of an image that the engine has: pulled or built if it had not, and noted as used now.

    Args:
        engine: where.
        source: an image's name, or a folder with a Dockerfile and what it copies.
        seconds: that a step of a build may say nothing.
        gigabytes: that the engine's images may take (10^9 bytes); those of ours that were used longest ago are removed.

    Raises:
        SandboxError: if it can't be pulled or built.
    """
    if isinstance(source, str) and source.startswith(OURS):
        return source
    mark = f"{BUILT if isinstance(source, Path) else PULLED}:{digest_of(source)}"
    name = source if isinstance(source, str) else mark
    with _changing:
        is_new = not engine.has_image(name)
        if isinstance(source, Path):
            engine.build_image(source, mark, timeout=seconds)
        elif is_new:
            engine.pull_image(name)
            engine.tag_image(name, mark)
        if engine.has_image(mark):  # else it is the user's
            engine.tag_image(mark, mark)
        if is_new:
            trim(engine, gigabytes * 1e9)
    return name


def trim(engine: Engine, most: float, kept: float = IN_USE) -> list[str]:
    """Remove images of ours while all images of an engine take more than `most` bytes; return their names.

    Args:
        engine: where.
        most: bytes. Layers that images share count once.
        kept: seconds for which an image that was used is kept.
    """
    removed = list[str]()
    if engine.image_bytes() <= most:
        return removed
    marks = {mark for mark in engine.image_tags(OURS) if mark.startswith((f"{BUILT}:", f"{BUILT}-", f"{PULLED}:"))}
    for used, mark in sorted((_last_use(engine, mark), mark) for mark in marks):
        if used > time.time() - kept:
            break
        try:
            removed += engine.remove_image(mark)
        except SandboxError:  # a container has it
            continue
        if engine.image_bytes() <= most:
            break
    return removed


def _last_use(engine: Engine, tag: str) -> float:
    """Return when an image was last tagged, in seconds since 1970."""
    said = str(engine.about_image(tag)["Metadata"]["LastTagTime"])
    return datetime.fromisoformat(f"{said[:19]}+00:00").timestamp()
