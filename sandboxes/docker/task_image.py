"""Images of others as images for our sandboxes, in which only the working folder can be written.

The folders that their programs write to become links into it; `FILL` copies what was in them there.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from agent_rl.sandboxes.calls import WORK
from agent_rl.sandboxes.docker.engine import Engine
from agent_rl.sandboxes.docker.images import BUILT, IMAGE_GB, digest_of, provide

LINKED = ".task"
"""The folder in the working folder that the links lead to."""
FILL = f"mkdir -p {WORK}/{LINKED} && cp -RP /.start/. {WORK}/{LINKED}/"
"""The command to run in a new sandbox of such an image."""


@dataclass(frozen=True)
class TaskImage:
    """An image for our sandboxes, and what the image that it is made of says."""

    name: str
    workdir: str
    """The working folder, /app where it is the root."""
    variables: dict[str, str]


def task_image(
    source: Path | str, folders: Sequence[str], host: str | None, timeout: float, gigabytes: float = IMAGE_GB
) -> TaskImage:
    """Make an image of a Dockerfile or of another image, unless it is there.

    Args:
        source: a folder with a Dockerfile and what it copies, or an image's name.
        folders: of those that are written to, in addition to the image's working folder.
        host: the engine's address.
        timeout: seconds that a step of the build may say nothing.
        gigabytes: as `images.provide` has it.

    Raises:
        SandboxError: if it can't be pulled or built.
    """
    return _built(source, tuple(folders), host, timeout, gigabytes, digest_of(source))


@functools.lru_cache(maxsize=4096)
def _built(
    source: Path | str, folders: tuple[str, ...], host: str | None, timeout: float, gigabytes: float, digest: str
) -> TaskImage:
    engine = Engine(host)
    try:
        base = provide(engine, source, seconds=timeout, gigabytes=gigabytes)
        about = engine.about_image(base)["Config"]
        workdir = str(about.get("WorkingDir") or "/")
        workdir = "/app" if workdir == "/" else workdir
        moved = [path for path in (*folders, workdir) if not f"{path}/".startswith((f"{WORK}/", "/tmp/"))]
        steps = " && ".join(("mkdir -p /.start", *map(_linked, moved), "chmod -R a+rwX /.start"))  # one layer
        text = "\n".join((f"FROM {base}", "USER root", "WORKDIR /", f"RUN {steps}"))
        name = f"{BUILT}-sandbox:{hashlib.blake2b(f'{digest}{text}'.encode(), digest_size=8).hexdigest()}"
        engine.build_image(text, name, timeout=timeout)
        engine.tag_image(name, name)
    finally:
        engine.close()
    lines = cast("list[str]", about.get("Env") or [])
    return TaskImage(name, workdir, dict(line.split("=", 1) for line in lines))


def _linked(path: str) -> str:
    """Return the commands that make a folder a link, and keep what is in it."""
    return (
        f"mkdir -p {path} /.start{path} && cp -a {path}/. /.start{path}/ && rm -rf {path} "
        f"&& ln -s {WORK}/{LINKED}{path} {path}"
    )
