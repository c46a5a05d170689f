"""Images of others as images for our sandboxes, in which only the working folder can be written.

The folders that their programs write to become links into it; `FILL` copies what was in them there.
"""

from __future__ import annotations

import functools
import hashlib
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from agent_rl.sandboxes.base import WORK
from agent_rl.sandboxes.docker.engine import Engine

LINKED = ".task"
"""The folder in the working folder that the links lead to."""
FILL = f"mkdir -p {WORK}/{LINKED} && cp -RP /.start/. {WORK}/{LINKED}/"
"""The command to run in a new sandbox of such an image."""
_building = threading.Lock()


@dataclass(frozen=True)
class TaskImage:
    """An image for our sandboxes, and what the image that it is made of says."""

    name: str
    workdir: str
    """The working folder, /app where it is the root."""
    variables: dict[str, str]


def task_image(source: Path | str, folders: Sequence[str], host: str | None, timeout: float) -> TaskImage:
    """Make an image of a Dockerfile or of another image, unless it is there.

    Args:
        source: a folder with a Dockerfile and what it copies, or an image's name.
        folders: of those that are written to, in addition to the image's working folder.
        host: the engine's address.
        timeout: seconds that a step of the build may say nothing.

    Raises:
        SandboxError: if it can't be built.
    """
    digest = hashlib.blake2b(str(source).encode() if isinstance(source, str) else b"", digest_size=8)
    for file in sorted(source.rglob("*")) if isinstance(source, Path) else ():
        if file.is_file():
            digest.update(f"{file.relative_to(source)}\0{file.stat().st_size}\0".encode() + file.read_bytes())
    with _building:
        return _built(source, tuple(folders), host, timeout, digest.hexdigest())


@functools.cache
def _built(source: Path | str, folders: tuple[str, ...], host: str | None, timeout: float, digest: str) -> TaskImage:
    engine = Engine(host)
    try:
        base = source if isinstance(source, str) else f"agent-rl/task:{digest}"
        about = engine.build_image(source if isinstance(source, Path) else f"FROM {source}", base, timeout=timeout)
        workdir = str(about.get("WorkingDir") or "/")
        workdir = "/app" if workdir == "/" else workdir
        moved = [path for path in (*folders, workdir) if not f"{path}/".startswith((f"{WORK}/", "/tmp/"))]
        text = "\n".join((f"FROM {base}", "USER root", "WORKDIR /", *map(_linked, moved)))
        name = f"agent-rl/task-sandbox:{hashlib.blake2b(f'{digest}{text}'.encode(), digest_size=8).hexdigest()}"
        engine.build_image(text, name, timeout=timeout)
    finally:
        engine.close()
    lines = cast("list[str]", about.get("Env") or [])
    return TaskImage(name, workdir, dict(line.split("=", 1) for line in lines))


def _linked(path: str) -> str:
    """Return the step that makes a folder a link, and keeps what is in it."""
    return (
        f"RUN mkdir -p {path} /.start{path} && cp -a {path}/. /.start{path}/ && rm -rf {path} "
        f"&& ln -s {WORK}/{LINKED}{path} {path} && chmod -R a+rwX /.start"
    )
