"""The sandboxes of agent_rl, as contestants of `benchmarks/sandbox.py`, and an engine for those that are containers."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

from sandbox_measures import CODE, Contestant, NotHereError
from sandbox_soak import python_of
from sandbox_table import Measure

from agent_rl.sandboxes.base import Sandbox, Sandboxes
from agent_rl.sandboxes.docker import DockerSandboxes, Engine, build_image
from agent_rl.sandboxes.local.backend import LocalSandboxes
from agent_rl.sandboxes.pool import WarmPool

ROOT = Path(__file__).resolve().parents[1]
DOCKERS_OWN = Path("/var/run/docker.sock")
WARM = 4


@contextlib.asynccontextmanager
async def local(tier: str) -> AsyncIterator[Contestant[Sandbox]]:
    """Local sandboxes of a tier."""
    sandboxes = LocalSandboxes(tier=tier, python=python_of(tier), require=())
    try:
        yield _contestant(sandboxes)
    finally:
        await sandboxes.close()


@contextlib.asynccontextmanager
async def docker() -> AsyncIterator[Contestant[Sandbox]]:
    sandboxes = DockerSandboxes()
    try:
        with contextlib.closing(Engine()) as client:
            version = f"engine {client.api.version()['Version']}"
        yield replace(_contestant(sandboxes), version=version)
    finally:
        await sandboxes.close()


@contextlib.asynccontextmanager
async def docker_warm() -> AsyncIterator[Contestant[Sandbox]]:
    """Containers from a warm pool; the refill of the pool is not measured."""
    pool = WarmPool(DockerSandboxes(), warm=WARM)

    async def close(box: Sandbox) -> None:
        await box.close()
        await pool.fill()

    try:
        await pool.fill()
        yield replace(_contestant(pool), close=close, measures=frozenset({Measure.OPEN, Measure.FIRST}))
    finally:
        await pool.close()


def _contestant(sandboxes: Sandboxes) -> Contestant[Sandbox]:
    async def python(box: Sandbox) -> str | None:
        return (await box.run_python(CODE)).value

    return Contestant(
        open=sandboxes.open,
        close=lambda box: box.close(),
        python=python,
        command=lambda box: box.exec(["true"]),
        stateful=True,
    )


@contextlib.contextmanager
def engine() -> Iterator[None]:
    """Provide a Docker engine: that of Docker's own variable or socket, or an empty one started here.

    Raises:
        NotHereError: if there is none, and none can be started.
    """
    if os.environ.get("DOCKER_HOST") or DOCKERS_OWN.is_socket():
        yield
        return
    sys.path.insert(1, str(ROOT))
    from tests.e2e.dockerd import docker_engine, whats_missing

    if reason := whats_missing():
        raise NotHereError(f"{reason}; or say where one is: DOCKER_HOST=unix://...")
    folder = Path(tempfile.mkdtemp(prefix="ar-docker-"))
    try:
        with docker_engine(folder) as started:
            os.environ["DOCKER_HOST"] = started.host
            with contextlib.closing(Engine()) as client:
                build_image(client)
            yield
    finally:
        os.environ.pop("DOCKER_HOST", None)
        shutil.rmtree(folder, ignore_errors=True)
