"""The alternatives, as contestants of `benchmarks/sandbox.py`. Only the first keeps state between calls."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
import json
import shutil
import subprocess
import sys
import tempfile
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from sandbox_measures import CODE, Contestant, NotHereError
from sandbox_table import MEMORY, Measure

from agent_rl.sandboxes.docker import IMAGE

HOST = str(Path(sys.executable).resolve())
ONCE = ["-I", "-S", "-c", f"print({CODE})"]
"""A Python that ends after one call, started as ours is: without site-packages."""
BOUND = ("/usr", "/bin", "/lib", "/lib64", sys.base_prefix)
WORKER = """\
import json, sys
variables = {}
for line in sys.stdin:
    print(json.dumps(repr(eval(json.loads(line), variables))), flush=True)"""
ONE_SHOT = frozenset({Measure.CALL, Measure.COMMAND, Measure.FIRST, Measure.RATE})
"""A contestant without anything to keep open."""
COMPOSE = f"""\
services:
  default: {{image: "{IMAGE}", command: sleep infinity, network_mode: none, x-local: true, stop_signal: SIGKILL}}
"""


@contextlib.asynccontextmanager
async def worker(beside: str) -> AsyncIterator[Contestant[Process]]:
    """A hand-written Python worker that reads code from a pipe; it isolates nothing."""

    async def start() -> Process:
        return await asyncio.create_subprocess_exec(HOST, "-I", "-S", "-c", WORKER, stdin=PIPE, stdout=PIPE)

    async def end(process: Process) -> None:
        process.kill()
        await process.wait()

    async def python(process: Process) -> str | None:
        stdin, stdout = process.stdin, process.stdout
        assert stdin is not None and stdout is not None
        stdin.write(json.dumps(CODE).encode() + b"\n")
        return str(json.loads(await stdout.readline()))

    measures = frozenset(Measure) - {Measure.COMMAND}
    yield Contestant(start, end, python, measures=measures, beside=beside, stateful=True)


@contextlib.asynccontextmanager
async def processes(beside: str) -> AsyncIterator[Contestant[None]]:
    """A process for each call, with no isolation."""
    yield _one_shot([], beside)


@contextlib.asynccontextmanager
async def bubblewrap(beside: str) -> AsyncIterator[Contestant[None]]:
    """A process for each call, in namespaces of its own; without seccomp or limits."""
    program = _found("bwrap", "apt-get install bubblewrap")
    binds = [part for path in BOUND if Path(path).exists() for part in ("--ro-bind", path, path)]
    rest = ["--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp", "--unshare-all", "--die-with-parent"]
    yield _one_shot([program, *binds, *rest], beside, (await _run(program, "--version")).strip())


@contextlib.asynccontextmanager
async def docker_exec(beside: str) -> AsyncIterator[Contestant[str]]:
    """A plain container, and Docker's own program to run things in it."""
    cli = _found("docker", "apt-get install docker.io")

    async def start() -> str:
        return (await _run(cli, "run", "--detach", "--network=none", IMAGE, "sleep", "infinity")).strip()

    async def python(container: str) -> str:
        return (await _run(cli, "exec", container, "python3", *ONCE)).strip()

    yield Contestant(
        open=start,
        close=lambda container: _run(cli, "rm", "--force", container),
        python=python,
        command=lambda container: _run(cli, "exec", container, "true"),
        beside=beside,
        version=f"client {(await _run(cli, 'version', '--format', '{{.Client.Version}}')).strip()}",
    )


@contextlib.asynccontextmanager
async def inspect_local(beside: str) -> AsyncIterator[Contestant[dict[str, Any]]]:
    """Its sandbox "local": a folder, and processes that are not isolated."""
    async with _inspect("local", HOST, None, beside) as contestant:
        yield contestant


@contextlib.asynccontextmanager
async def inspect_docker(beside: str) -> AsyncIterator[Contestant[dict[str, Any]]]:
    """Its sandbox "docker", run by `docker compose` on our image."""
    cli = _found("docker", "apt-get install docker.io")
    try:
        await _run(cli, "compose", "version")
    except RuntimeError:
        raise NotHereError("docker has no plugin `compose` (2.21 or newer; Debian 13: docker-compose)") from None
    with tempfile.TemporaryDirectory(prefix="ar-compose-") as folder:
        file = Path(folder, "compose.yaml")
        file.write_text(COMPOSE)
        async with _inspect("docker", "python3", str(file), beside) as contestant:
            yield contestant


@contextlib.asynccontextmanager
async def _inspect(
    kind: str, python: str, config: str | None, beside: str
) -> AsyncIterator[Contestant[dict[str, Any]]]:
    """A sandbox as inspect_ai's samples get it."""
    try:
        from inspect_ai.util._sandbox.registry import registry_find_sandboxenv
    except ImportError:
        raise NotHereError("pip install inspect_ai") from None
    kept = registry_find_sandboxenv(kind)

    async def execute(sandboxes: dict[str, Any], *argv: str) -> str:
        result = await sandboxes["default"].exec(list(argv))
        if not result.success:
            raise RuntimeError(f"{argv} failed: {result.stderr}")
        return str(result.stdout)

    async def call(sandboxes: dict[str, Any]) -> str:
        return (await execute(sandboxes, python, *ONCE)).strip()

    yield Contestant(
        open=lambda: kept.sample_init("benchmark", config, {}),
        close=lambda sandboxes: kept.sample_cleanup("benchmark", config, sandboxes, False),
        python=call,
        command=lambda sandboxes: execute(sandboxes, "true"),
        measures=frozenset(Measure) - MEMORY,
        beside=beside,
        version=f"inspect_ai {importlib.metadata.version('inspect_ai')}",
    )


def _one_shot(prefix: list[str], beside: str, version: str = "") -> Contestant[None]:
    async def python(_: None) -> str:
        return (await _run(*prefix, HOST, *ONCE)).strip()

    async def nothing(*_: None) -> None:
        """Open or close nothing."""

    return Contestant(
        open=nothing,
        close=nothing,
        python=python,
        command=lambda _: _run(*prefix, "true"),
        measures=ONE_SHOT,
        beside=beside,
        version=version,
    )


def _found(program: str, how: str) -> str:
    if (path := shutil.which(program)) is None:
        raise NotHereError(f"there is no `{program}`: {how}")
    return path


async def _run(*argv: str) -> str:
    """Run a program in a thread, faster than asyncio's subprocesses; return its output."""
    ran = await asyncio.to_thread(subprocess.run, argv, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if ran.returncode:
        raise RuntimeError(f"{' '.join(argv)} failed: {ran.stderr.strip()}")
    return ran.stdout
