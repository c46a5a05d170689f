"""The docker backend against a real engine: its promises, and leftovers after a crash."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest

import agent_rl as ar
from agent_rl.errors import SandboxError
from agent_rl.sandboxes.base import Guarantee, Limits, Sandbox
from agent_rl.sandboxes.docker import IMAGE, DockerSandboxes, Engine, backend
from agent_rl.sandboxes.docker.container import PROCESS, collect, confinement, labels
from agent_rl.sandboxes.docker.etc import PREFIX
from agent_rl.sandboxes.pool import WarmPool
from agent_rl.sandboxes.verification import CANARIES
from tests.e2e.dockerd import Dockerd, is_empty
from tests.e2e.skips import not_run
from tests.sandbox.backends import SUITES

pytestmark = pytest.mark.e2e

ROOT = Path(__file__).resolve().parents[2]
SMALL = Limits(memory=128 * 2**20, processes=16, disk=8 * 2**20, files=256)


@contextlib.asynccontextmanager
async def opened(host: str, limits: Limits = SMALL, **options: object):  # type: ignore[no-untyped-def]
    sandboxes = DockerSandboxes(host=host, **options)  # type: ignore[arg-type]
    try:
        yield await sandboxes.open(owner="test", limits=limits)
    finally:
        await sandboxes.close()


README = (
    "agent-rl sandbox doctor",
    "agent-rl sandbox build-image",
    "agent-rl rollout env=python-v0 policy=oracle",  # with the setting that the README adds
)


def test_readme_commands_use_docker(engine: Engine, tmp_path: Path) -> None:
    said = []
    for line in README:
        words = [*line.split()[1:], *(("env_args.sandbox=docker", "n=2") if "rollout" in line else ())]
        ran = subprocess.run(
            [sys.executable, "-m", "agent_rl", *words],
            cwd=tmp_path,
            env={**os.environ, "DOCKER_HOST": engine.host, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
        )
        assert ran.returncode == 0 or "doctor" in line, ran.stdout + ran.stderr  # not every machine guarantees all
        said.append(ran.stdout)
    assert "jail" in said[0] and IMAGE in said[1] and "success 100.0%" in said[2]


def in_container(engine: Engine, use: Callable[[Sandbox], Awaitable[None]], limits: Limits = SMALL) -> None:
    async def main() -> None:
        async with opened(engine.host, limits) as sandbox:
            await use(sandbox)

    asyncio.run(main())


def test_docker_sandbox_keeps_variables_and_files(engine: Engine) -> None:
    async def use(sandbox: Sandbox) -> None:
        assert (await sandbox.run_python("import math\nx = 20")).error is None
        assert (await sandbox.run_python("x + 1")).value == "21"
        await sandbox.write_file("a/b", b"\x00\xff")
        assert await sandbox.read_file("/work/a/b") == b"\x00\xff"
        ran = await sandbox.exec(["sh", "-c", "id -u; ls a; echo no >&2; exit 3"])
        assert (ran.returncode, ran.stderr) == (3, "no\n") and ran.stdout.endswith("\nb\n") and ran.stdout[:2] != "0\n"

    in_container(engine, use)


SERVED = """
import os, socket
server = socket.create_server(("localhost", 0))
socket.create_connection(("localhost", server.getsockname()[1]), timeout=5)
sorted(os.listdir("/proc/sys/net/ipv4/conf")), open("/etc/resolv.conf").read(), os.access("/etc/hosts", os.W_OK)
"""


def test_docker_sandbox_has_a_named_loopback_and_nothing_else(engine: Engine) -> None:
    """The names of the host's servers are not in there, either: `NetworkMode: none` would have copied them."""

    async def use(sandbox: Sandbox) -> None:
        found = await sandbox.run_python(SERVED)
        assert found.value == "(['all', 'default', 'lo'], '', False)", found

    in_container(engine, use)
    assert not list(Path(tempfile.gettempdir()).glob(f"{PREFIX}*"))


def test_docker_sandbox_opens_with_little_memory(engine: Engine) -> None:
    async def use(sandbox: Sandbox) -> None:
        assert (await sandbox.run_python("6 * 7")).value == "42"

    in_container(engine, use, replace(SMALL, memory=48 * 2**20))


def test_docker_keeps_every_guarantee(engine: Engine) -> None:
    async def main() -> None:
        sandboxes = DockerSandboxes(host=engine.host)
        found = await sandboxes.capabilities()
        await sandboxes.close()
        assert [guarantee for guarantee in Guarantee if found[guarantee] is None] == []

    asyncio.run(main())


def _mounted(config: dict[str, object]) -> None:
    config.update(Binds=["/tmp:/tmp"], Tmpfs={"/work": cast(dict[str, str], config["Tmpfs"])["/work"]})


def _unsized(config: dict[str, object]) -> None:
    sized = cast(dict[str, str], config["Tmpfs"])
    config["Tmpfs"] = {at: re.sub(r",(size|nr_inodes)=\d+", "", options) for at, options in sized.items()}


WEAKER: Mapping[Guarantee, Callable[[dict[str, object]], object]] = {
    Guarantee.FILES: _mounted,
    Guarantee.NETWORK: lambda config: config.update(NetworkMode="host", Sysctls={}),
    Guarantee.SIGNALS: lambda config: config.update(PidMode="host"),
    Guarantee.KERNEL: lambda config: config.update(SecurityOpt=["seccomp=unconfined"]),
    Guarantee.MEMORY: lambda config: config.update(Memory=2**31, MemorySwap=2**31),
    Guarantee.PROCESSES: lambda config: config.update(PidsLimit=200),
    Guarantee.CPU: lambda config: config.update(NanoCpus=0, CpuShares=2**18),
    Guarantee.DISK: _unsized,
}
"""Containers that lack one protection each; without KILL_ALL's there is no agent, as it is what the agent does."""


@pytest.mark.parametrize("guarantee", WEAKER)
def test_docker_canary_detects_missing_protection(
    engine: Engine, guarantee: Guarantee, monkeypatch: pytest.MonkeyPatch
) -> None:
    def weaker(limits: Limits, user: int) -> Mapping[str, object]:
        config = dict(confinement(limits, user))
        WEAKER[guarantee](config)
        return config

    monkeypatch.setattr(backend, "confinement", weaker)
    if guarantee is Guarantee.CPU and os.getloadavg()[0] > 1:
        not_run(f"a container without a limit of processors: load {os.getloadavg()[0]:.1f} leaves it no two")

    async def main() -> None:
        sandboxes = DockerSandboxes(host=engine.host)
        try:
            assert not await CANARIES[guarantee](sandboxes.spawn)
            with pytest.raises(SandboxError, match=guarantee):
                await DockerSandboxes(host=engine.host, require=[guarantee]).open()
        finally:
            await sandboxes.close()

    asyncio.run(main())


def test_seccomp_profile_blocks_vsock_on_old_engines(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    vsock = "import socket\nsocket.socket(40, socket.SOCK_STREAM)"

    async def errors() -> str | None:
        async with opened(engine.host) as sandbox:
            return (await sandbox.run_python(vsock)).error

    assert "PermissionError" in (asyncio.run(errors()) or "")
    ours = confinement
    monkeypatch.setattr(
        backend, "confinement", lambda *given: {**ours(*given), "SecurityOpt": ["no-new-privileges:true"]}
    )
    if "moby" not in str(engine.api.version().get("Platform")):
        assert asyncio.run(errors()) is None  # Debian's 20.10


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # the SDK leaves broken connections open
@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_docker_engine_restart_fails_running_calls_only(engine: Engine, dockerd: Dockerd, how: signal.Signals) -> None:
    async def main() -> None:
        sandboxes = DockerSandboxes(host=engine.host)
        sandbox = await sandboxes.open(limits=SMALL)
        waiting = asyncio.create_task(sandbox.exec(["sleep", "30"]))
        await asyncio.sleep(0.3)
        await asyncio.to_thread(dockerd.restart, how)
        with pytest.raises(SandboxError):
            await waiting
        with pytest.raises(SandboxError):
            await sandbox.run_python("1")
        await sandbox.close()
        again = await sandboxes.open(limits=SMALL)
        assert (await again.run_python("1 + 1")).value == "2"
        await sandboxes.close()

    asyncio.run(main())
    gc.collect()


def refuses(host: str, image: str = IMAGE) -> str:
    """Return the error of an `open` that fails."""

    async def main() -> str:
        sandboxes = DockerSandboxes(host=host, image=image)
        try:
            with pytest.raises(SandboxError) as caught:
                await sandboxes.open()
            return str(caught.value)
        finally:
            await sandboxes.close()

    return asyncio.run(main())


def test_docker_raises_sandbox_error_for_missing_engine() -> None:
    assert "nowhere" in refuses("unix:///tmp/nowhere/docker.sock")
    gc.collect()


def test_docker_raises_sandbox_error_for_unusable_image(engine: Engine) -> None:
    assert "build-image" in refuses(engine.host, "agent-rl/missing:1")
    assert "could not pull 127.0.0.1:1/missing:1" in refuses(engine.host, "127.0.0.1:1/missing:1")
    engine.api.import_image(src=b"\0" * 1024, repository="agent-rl/empty", tag="1")
    assert "python3" in refuses(engine.host, "agent-rl/empty:1")


MORE_SUITES = tuple(f"tests/sandbox/test_{name}.py" for name in ("snapshots", "plots", "sabotage", "host_load"))


@pytest.mark.parametrize("suite", [*SUITES, *MORE_SUITES])
def test_docker_passes_the_suites_of_every_backend(engine: Engine, suite: str) -> None:
    command = [sys.executable, "-m", "pytest", "-m", "sandbox", suite, "-k", "docker", "--tb=short"]
    ran = subprocess.run(
        command, env={**os.environ, "AGENT_RL_DOCKER_HOST": engine.host}, capture_output=True, text=True
    )
    print(ran.stdout)
    assert ran.returncode == 0 and " passed" in ran.stdout and "skipped" not in ran.stdout


HOGS = "import os\n[os.fork() for _ in range(2)]\nx = b'x' * 90_000_000\nimport time; time.sleep(3)"


@pytest.mark.parametrize("oom", [False, True])
def test_docker_loss_has_the_engines_evidence(engine: Engine, oom: bool) -> None:
    async def main() -> None:
        async with opened(engine.host) as sandbox:
            await sandbox.exec(["python3", "-c", HOGS if oom else ""])
            (container,) = engine.labelled(PROCESS)
            engine.api.kill(container)
            assert (await sandbox.exec(["true"])).sandbox_lost
            assert sandbox.loss.is_failure and sandbox.loss.evidence["status"] == -signal.SIGKILL
            assert (sandbox.loss.cause, "oom_kills" in sandbox.loss.evidence) == (
                "memory" if oom else "agent_ended",
                oom,
            )

    asyncio.run(main())


TRAINER = """
import asyncio, sys, time
from agent_rl.sandboxes.docker import DockerSandboxes
async def main():
    sandboxes = DockerSandboxes(host=sys.argv[1])
    sandbox = await sandboxes.open()
    print("open", flush=True)
    await sandbox.exec(["sleep", "60"], timeout=100)
asyncio.run(main())
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_docker_containers_end_with_their_trainer(engine: Engine, how: signal.Signals) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", TRAINER, engine.host], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as trainer:
        assert trainer.stdout is not None
        assert trainer.stdout.readline() == b"open\n"
        assert len(engine.labelled(PROCESS)) == 1
        trainer.send_signal(how)
    assert is_empty(engine)


def test_docker_collect_removes_orphaned_containers(engine: Engine) -> None:
    gone = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    mine, theirs, strange = labels("a", 60), labels("b", 60), labels("c", 60)
    _, pid, started = mine[PROCESS].rsplit("/", 2)
    theirs[PROCESS] = mine[PROCESS].replace(f"/{pid}/{started}", f"/{gone.pid}/1")
    strange[PROCESS] = f"another-boot/{mine[PROCESS].partition('/')[2]}"
    expired = labels("d", -100)
    made = [engine.create(IMAGE, ["true"], {}, labels=about) for about in (mine, theirs, strange, expired)]
    gone.kill()
    gone.wait()
    assert set(collect(engine)) == {made[1], made[3]}
    assert set(engine.labelled(PROCESS)) == {made[0], made[2]}
    for container in (made[0], made[2]):
        engine.remove(container)


def test_docker_open_cancelled_leaves_no_container(engine: Engine) -> None:
    async def main() -> None:
        sandboxes = DockerSandboxes(host=engine.host)
        for delay in (0.01, 0.1, 0.2, 0.4):
            opening = asyncio.create_task(sandboxes.open(limits=SMALL))
            await asyncio.sleep(delay)
            opening.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await (await opening).close()

    asyncio.run(main())
    assert is_empty(engine)


def test_docker_lifetime_ends_unwatched_sandbox(engine: Engine) -> None:
    async def main() -> Sandbox:
        return await DockerSandboxes(host=engine.host).open(limits=SMALL, lifetime=1.5)

    held = asyncio.run(main())  # and its loop is gone
    assert len(engine.labelled(PROCESS)) == 1
    assert is_empty(engine)
    with pytest.raises(SandboxError):
        asyncio.run(held.exec(["true"]))


def test_docker_sandbox_outlives_its_event_loop(engine: Engine) -> None:
    sandboxes = DockerSandboxes(host=engine.host)
    held = [asyncio.run(sandboxes.open(limits=SMALL))]
    assert asyncio.run(held[0].run_python("6 * 7")).value == "42"
    with pytest.warns(ResourceWarning):
        held.clear()
        gc.collect()
    assert is_empty(engine)


def test_warm_pool_serves_docker_containers(engine: Engine) -> None:
    async def main() -> None:
        pool = WarmPool(DockerSandboxes(host=engine.host), warm=2, most=3, limits=SMALL)
        await pool.fill()
        assert pool.ready == 2
        sandbox = await pool.open(owner="me")
        assert (await sandbox.run_python("1 + 1")).value == "2"
        await pool.close()

    asyncio.run(main())


def test_harbor_task_runs_in_its_own_image(engine: Engine, tmp_path: Path) -> None:
    checked = 'test "$(cat /app/out.txt)" = "$(cat /tests/expected)" && test "$PWD$MODE" = /appfast'
    files = {
        "task.toml": "[verifier]\ntimeout_sec = 30.0\n",
        "instruction.md": "Copy in.txt to out.txt.",
        "environment/Dockerfile": f"FROM {IMAGE}\nWORKDIR /app\nENV MODE=fast\nCOPY in.txt .\nRUN chmod 600 in.txt\n",
        "environment/in.txt": "so\n",
        "solution/solve.sh": "#!/bin/bash\ncat /app/in.txt > /app/out.txt\n",
        "tests/expected": "so\n",
        "tests/test.sh": f"#!/bin/bash\n({checked}) && echo 1 > /logs/verifier/reward.txt\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    ar.register("e2e-test/harbor-v0")(ar.from_harbor(tmp_path))
    options: dict[str, ar.JSON] = {"sandbox_args": {"host": engine.host}}
    for policy, earned in {"oracle": 1.0, "nothing": 0.0}.items():
        (episode,) = ar.run("e2e-test/harbor-v0", policy, env_args=options)
        assert (episode.reward, episode.error) == (earned, None), [m.content for m in episode.messages]
