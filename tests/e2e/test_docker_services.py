"""Docker sandboxes with services beside them, on a real engine: they are reached by name, confined, and torn down."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import agent_rl as ar
from agent_rl.errors import SandboxError
from agent_rl.sandboxes.base import Limits
from agent_rl.sandboxes.docker import IMAGE, DockerSandboxes, Engine
from agent_rl.sandboxes.docker.container import PROCESS
from tests.e2e.dockerd import is_empty

pytestmark = pytest.mark.e2e

SMALL = Limits(memory=128 * 2**20, processes=16, disk=8 * 2**20, files=256)
SERVER = "exec python3 -m http.server 8000 --bind 0.0.0.0 --directory"
CHECK = """[CMD, python3, -c, "import urllib.request as u; u.urlopen('http://127.0.0.1:8000')"]"""
FILES = {
    "task.toml": "[verifier]\ntimeout_sec = 30.0\n",
    "instruction.md": "Save what http://api:8000/key says as key.",
    "environment/Dockerfile": f"FROM {IMAGE}\nWORKDIR /app\n",
    "environment/api/Dockerfile": f"FROM {IMAGE}\nRUN mkdir /data && echo found >/data/key\n",
    "environment/docker-compose.yaml": f"""
services:
  main: {{image: "${{MAIN_IMAGE}}", depends_on: {{api: {{condition: service_healthy}}}}, environment: {{MODE: fast}}}}
  api:
    build: ./api
    command: [sh, -c, 'echo up >/run/up; kill -0 1; {SERVER} /data']
    environment: {{PASSWORD: hidden}}
    healthcheck: {{test: {CHECK}, interval: 300ms, retries: 50}}
""",
    "solution/solve.sh": """#!/bin/bash
python3 -c "import urllib.request as u; print(u.urlopen('http://api:8000/key').read().decode())" >/app/key
""",
    "tests/test.sh": '#!/bin/bash\n[ "$(cat /app/key)$MODE" = foundfast ] && echo 1 > /logs/verifier/reward.txt\n',
}


@pytest.fixture
def task(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_harbor_task_runs_beside_its_services(engine: Engine, task: Path) -> None:
    ar.register("e2e-test/services-v0")(ar.from_harbor(task))
    options: dict[str, ar.JSON] = {"sandbox_args": {"host": engine.host}}
    (episode,) = ar.run("e2e-test/services-v0", "oracle", env_args=options)
    assert (episode.reward, episode.error) == (1.0, None), [m.content for m in episode.messages]


REACH = """
import os, socket
def reach(host, port):
    try:
        socket.create_connection((host, port), timeout=2).close()
        return "reached"
    except OSError as error:
        return type(error).__name__
seen = [open(f"/proc/{pid}/cmdline").read() for pid in os.listdir("/proc") if pid.isdigit()]
[reach("api", 8000), reach("172.17.0.1", 22), any("http.server" in each for each in seen), "PASSWORD" in os.environ]
"""


def test_docker_services_are_confined_and_apart(engine: Engine, task: Path) -> None:
    async def main() -> None:
        compose = str(task / "environment" / "docker-compose.yaml")
        sandboxes = DockerSandboxes(host=engine.host, limits=SMALL, compose=compose)
        try:
            sandbox = await sandboxes.open()
            result = await sandbox.run_python(REACH)
            assert result.value == "['reached', 'OSError', False, False]", result
            await sandbox.exec(["python3", "-c", "import os; os.kill(-1, 9)"])
            assert (
                await sandbox.exec(["python3", "-c", REACH + "assert reach('api', 8000) == 'reached'"])
            ).returncode == 0
            made = [engine.api.inspect_container(name) for name in engine.labelled(PROCESS)]
            (host,) = [each["HostConfig"] for each in made if each["Name"].startswith("/agent-rl-api")]
            assert host["ReadonlyRootfs"] and not host["Binds"] and not host["PortBindings"] and host["Memory"]
            assert not host["Privileged"] and "NET_RAW" not in host["CapAdd"] and host["CapDrop"] == ["ALL"]
        finally:
            await sandboxes.close()

    asyncio.run(main())


LATE = "healthcheck: {test: 'true', interval: 90s}"
BROKEN = {
    said: f"services: {{main: {{depends_on: {{a: {{condition: service_{kind}}}}}}}, a: {{image: {IMAGE}, {rest}}}}}"
    for said, (kind, rest) in {
        "service 'a' has ended.*so it goes": ("healthy", f"command: [sh, -c, 'echo so it goes; exit 3'], {LATE}"),
        "service 'a' has no healthcheck": ("healthy", "command: [sleep, '60']"),
        "service 'a' is not healthy in time": ("healthy", f"command: [sleep, '60'], {LATE}"),
    }.items()
}


@pytest.mark.parametrize("said", BROKEN)
def test_docker_services_that_fail_are_named(engine: Engine, tmp_path: Path, said: str) -> None:
    (tmp_path / "c.yaml").write_text(BROKEN[said])

    async def main() -> None:
        sandboxes = DockerSandboxes(host=engine.host, compose=str(tmp_path / "c.yaml"), services_seconds=4)
        with pytest.raises(SandboxError, match=said):
            await sandboxes.open()
        await sandboxes.close()

    asyncio.run(main())


def test_docker_services_end_with_a_cancelled_open(engine: Engine, task: Path) -> None:
    async def main() -> None:
        compose = str(task / "environment" / "docker-compose.yaml")
        sandboxes = DockerSandboxes(host=engine.host, limits=SMALL, compose=compose)
        opening = asyncio.create_task(sandboxes.open())
        await asyncio.sleep(1)
        opening.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await (await opening).close()
        await sandboxes.close()

    asyncio.run(main())
    until = time.monotonic() + 30  # the thread that opens can't be stopped; it cleans up at its end
    while engine.labelled(PROCESS) and time.monotonic() < until:
        time.sleep(0.1)


TRAINER = """
import asyncio, sys
from agent_rl.sandboxes.docker import DockerSandboxes
async def main():
    sandboxes = DockerSandboxes(host=sys.argv[1], compose=sys.argv[2])
    sandbox = await sandboxes.open()
    print("open", flush=True)
    await sandbox.exec(["sleep", "60"], timeout=100)
asyncio.run(main())
"""


def test_docker_services_end_with_their_trainer(engine: Engine, task: Path) -> None:
    compose = task / "environment" / "docker-compose.yaml"
    command = [sys.executable, "-c", TRAINER, engine.host, str(compose)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as trainer:
        assert trainer.stdout is not None
        assert trainer.stdout.readline() == b"open\n"
        assert len(engine.labelled(PROCESS)) == 3
        trainer.send_signal(signal.SIGKILL)
    assert is_empty(engine)
