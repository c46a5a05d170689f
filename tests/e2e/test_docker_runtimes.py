"""The docker backend on a runtime with a kernel of its own: gVisor, and one that the engine has not."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from agent_rl.errors import SandboxError
from agent_rl.sandboxes.base import Guarantee, Limits, Sandbox
from agent_rl.sandboxes.docker import DockerSandboxes, Engine, build_image
from agent_rl.testing import CONTRACT
from tests.debian import has_program
from tests.e2e.dockerd import docker_engine, whats_missing
from tests.e2e.skips import missing, not_run

pytestmark = pytest.mark.e2e
LIMITS = Limits(memory=192 * 2**20)
PATIENCE = 120.0


@pytest.fixture(scope="module")
def host() -> Iterator[str]:
    """The address of an engine that knows gVisor as `runsc`."""
    if lacking := whats_missing():
        missing(lacking)
    if not has_program("runsc", package="runsc"):
        not_run("gVisor is missing: apt-get install runsc")
    with tempfile.TemporaryDirectory(prefix="gv", ignore_cleanup_errors=True) as folder:
        wrapper = Path(folder, "runsc")  # ptrace: it needs no KVM
        wrapper.write_text(
            f'#!/bin/sh\nexec {shutil.which("runsc")} --platform=ptrace --network=none --oci-seccomp "$@"\n'
        )
        wrapper.chmod(0o755)
        with docker_engine(Path(folder), f"--add-runtime=runsc={wrapper}") as running:
            engine = Engine(running.host)
            build_image(engine)
            engine.close()
            asyncio.run(skip_unless_it_starts(running.host))
            yield running.host


async def skip_unless_it_starts(host: str) -> None:
    sandboxes = DockerSandboxes(host=host, runtime="runsc", limits=LIMITS)
    try:
        await sandboxes.open()
    except SandboxError as error:
        not_run(f"gVisor does not start here: {error}")
    finally:
        await sandboxes.close()


def on_gvisor(host: str, check: Callable[[Sandbox], Awaitable[None]]) -> None:
    async def main() -> None:
        sandboxes = DockerSandboxes(host=host, runtime="runsc", limits=LIMITS)
        try:
            await check(await sandboxes.open())
        finally:
            await sandboxes.close()

    asyncio.run(asyncio.wait_for(main(), PATIENCE))


@pytest.mark.parametrize("check", CONTRACT.values(), ids=CONTRACT)
def test_gvisor_keeps_the_contract(host: str, check: Callable[[Sandbox], Awaitable[None]]) -> None:
    on_gvisor(host, check)


def test_gvisor_has_another_kernel_than_the_host(host: str) -> None:
    async def check(sandbox: Sandbox) -> None:
        theirs = (await sandbox.exec(["uname", "-r"])).stdout.strip()
        assert theirs and theirs != Path("/proc/sys/kernel/osrelease").read_text().strip()

    on_gvisor(host, check)


def test_gvisor_capabilities_name_what_was_found(host: str) -> None:
    async def main() -> None:
        sandboxes = DockerSandboxes(host=host, runtime="runsc", limits=LIMITS)
        found = await sandboxes.capabilities()
        await sandboxes.close()
        assert set(found) == set(Guarantee)
        assert all(found[kept] for kept in (Guarantee.FILES, Guarantee.SIGNALS, Guarantee.KILL_ALL))

    asyncio.run(asyncio.wait_for(main(), PATIENCE))


def test_unknown_runtime_names_those_that_are_there(host: str) -> None:
    async def main() -> None:
        sandboxes = DockerSandboxes(host=host, runtime="kata", limits=LIMITS)
        with pytest.raises(SandboxError, match=r"no runtime 'kata'; it has .*runc, runsc"):
            await sandboxes.open()
        await sandboxes.close()

    asyncio.run(asyncio.wait_for(main(), PATIENCE))
