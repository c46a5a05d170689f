"""The contract of every backend: processes that outlive a call, streams to servers, terminals, limits of one call."""

from __future__ import annotations

import asyncio
import re
import signal
import time
from contextlib import asynccontextmanager

import pytest

from agent_rl.errors import ConfigError, SandboxError
from agent_rl.sandboxes.base import Sandbox
from agent_rl.sandboxes.local.backend import LocalSandboxes
from agent_rl.sandboxes.pool import WarmPool
from agent_rl.sandboxes.process import MAX_LOG, CallLimits, Process, ProcessError, Stream
from agent_rl.testing import FakeSandboxes
from tests.sandbox.backends import Backend

ECHO = """
import os, socket, sys
server = socket.create_server(("127.0.0.1", 8000)) if sys.argv[1] == "tcp" else socket.socket(socket.AF_UNIX)
if sys.argv[1] != "tcp":
    server.bind("door"); server.listen()
while True:
    client, _ = server.accept()
    while data := client.recv(65536):
        client.sendall(data)
    client.sendall(b"bye")
    client.close()
"""
BEAT = "while :; do echo . >>{name}; sleep 0.01; done"
UNTIL_LEFT = " & until test -s left; do sleep 0.01; done"
DAEMON = f"""
import os
if os.fork() == 0:
    os.setsid()
    os.fork() and os._exit(0)
    os.execvp("sh", ["sh", "-c", {BEAT.format(name="daemon")!r}])
os.execvp("sh", ["sh", "-c", {BEAT.format(name="leader")!r}])
"""
SIZE = "python3 -c 'import os; print(*os.get_terminal_size(0))'"


async def read_all(stream: Stream, size: int) -> bytes:
    data = b""
    while len(data) < size:
        output = await stream.read(timeout=10)
        assert output.data and not output.dropped
        data += output.data
    return data


async def beats(box: Sandbox, name: str) -> bool:
    """Whether the file of a beating process grows."""
    for _ in range(200):
        if (await box.exec(["test", "-s", name])).returncode == 0:
            break
        await asyncio.sleep(0.01)
    before = len(await box.read_file(name))
    await asyncio.sleep(0.15)
    return len(await box.read_file(name)) > before


# Processes


def test_process_is_spoken_to_across_calls(box, run):
    async def main() -> None:
        script = 'echo "$KEY in $(basename $PWD)"; read line; echo "got $line"; echo err >&2; cat >rest; exit 3'
        await box.write_file("folder/file", b"")
        process: Process = await box.start(["sh", "-c", script], env={"KEY": "välue"}, cwd="folder")
        assert (await process.read(timeout=10)).data.decode() == "välue in folder\n"
        assert (await box.exec(["echo", "on"])).stdout == "on\n"
        assert (await box.run_python("x = 1")).error is None
        assert (await process.poll(), (await process.read(timeout=0)).data) == (None, b"")
        await process.write(b"line\n")
        assert await read_all(process, 9) == b"got line\n"
        await process.write(b"rest")
        await process.write_eof()
        assert await process.wait(timeout=10) == 3
        assert (await process.read()).ended
        logs = await process.logs()
        assert (logs.stdout, logs.stderr, logs.truncated) == ("välue in folder\ngot line\n", "err\n", False)
        assert await box.read_file("folder/rest") == b"rest"
        await process.close()
        with pytest.raises(ProcessError, match="no such process"):
            await process.read()

    run(main())


def test_process_and_its_daemons_outlive_a_command(box, run):
    async def main() -> None:
        process = await box.start(["python3", "-c", DAEMON])
        await box.run_python("while True: pass", timeout=0.3)
        await box.exec(["sh", "-c", BEAT.format(name="left") + UNTIL_LEFT])
        assert [await beats(box, name) for name in ("leader", "daemon", "left")] == [True, True, False]
        await process.kill()
        assert await process.wait(timeout=30) == -signal.SIGKILL
        assert [await beats(box, name) for name in ("leader", "daemon")] == [False, False]

    run(main())


def test_process_that_ends_leaves_nothing_in_its_session(box, run):
    async def main() -> None:
        process = await box.start(["sh", "-c", BEAT.format(name="left") + UNTIL_LEFT])
        assert await process.wait(timeout=10) == 0
        return await box.run_python(
            "import time\na = len(open('left').read())\ntime.sleep(.1)\na == len(open('left').read())"
        )

    assert run(main()).value == "True"


def test_process_takes_signals(box, run):
    async def main() -> None:
        process = await box.start(
            ["sh", "-c", "trap 'echo caught; exit 5' INT; echo ready; while :; do sleep 0.01; done"]
        )
        await read_all(process, 6)
        await process.signal(signal.SIGINT)
        assert (await read_all(process, 7), await process.wait(timeout=10)) == (b"caught\n", 5)
        await process.signal(signal.SIGINT)  # it has ended
        missing = await box.start(["no-such-program"])
        assert await missing.wait(timeout=10) == 127
        assert "no such program" in (await missing.logs()).stderr

    run(main())


def test_process_keeps_the_last_of_its_output(box, run):
    async def main() -> None:
        process = await box.start(["sh", "-c", "echo first; yes | head -c 1000000; echo last"])
        assert await process.wait(timeout=20) == 0
        output = await process.read()
        assert output.dropped + MAX_LOG == 6 + 1_000_000 + 5
        logs = await process.logs(9)
        assert (logs.stdout, logs.truncated) == ("y\ny\nlast\n"[-9:], True)

    run(main())


@pytest.mark.parametrize("pty", [None, (24, 80)])
def test_process_that_ends_keeps_the_end_of_its_output(box, run, pty):
    async def main() -> None:
        for _ in range(5):
            printing = "import sys; sys.stdout.write(''.join('%09d\\n' % i for i in range(40_000)))"
            process = await box.start(["python3", "-c", printing], pty=pty)
            assert await process.wait(timeout=30) == 0
            assert (await process.logs()).stdout.split()[-1] == "000039999"

    run(main())


def test_cancelled_read_loses_nothing(box, run):
    async def main() -> None:
        process, got = await box.start(["cat"]), b""
        for _ in range(20):
            reading = asyncio.create_task(process.read())
            await asyncio.sleep(0)
            await process.write(b"x")
            reading.cancel()
            (output,) = await asyncio.gather(reading, return_exceptions=True)
            got += b"" if isinstance(output, asyncio.CancelledError) else output.data
        assert got + await read_all(process, 20 - len(got)) == b"x" * 20
        assert (await box.exec(["echo", "on"])).stdout == "on\n"

    run(main())


def test_close_of_the_sandbox_ends_processes(sandboxes, backend: Backend, run):
    async def main() -> None:
        box = await sandboxes.open(lifetime=60)
        process = await box.start(["python3", "-c", DAEMON])
        if backend.has_sockets:
            await box.start(["python3", "-c", ECHO, "tcp"])
            await box.stream(8000)
        reading = asyncio.create_task(process.read(timeout=60))
        await asyncio.sleep(0.1)
        await box.close()
        with pytest.raises(SandboxError, match="closed"):
            await asyncio.wait_for(reading, 30)  # not after its own 60 s
        with pytest.raises(SandboxError, match="closed"):
            await process.poll()
        await process.close()

    run(main())


# Streams


@asynccontextmanager
async def echo(box: Sandbox, kind: str, address: int | str):
    async with await box.start(["python3", "-c", ECHO, kind]), await box.stream(address, timeout=20) as stream:
        yield stream


@pytest.mark.parametrize(("kind", "address"), [("tcp", 8000), ("unix", "door")])
def test_stream_speaks_with_a_server_inside(box, backend: Backend, run, kind, address):
    async def main() -> None:
        async with echo(box, kind, address) as stream:
            await stream.write(b"hello")
            assert await read_all(stream, 5) == b"hello"
            assert (await box.exec(["echo", "on"])).stdout == "on\n"
            data = bytes(range(256)) * 2000
            assert (await asyncio.gather(read_all(stream, len(data)), stream.write(data)))[0] == data
            await stream.write_eof()
            assert await read_all(stream, 3) == b"bye"
            assert (await stream.read()).ended
            with pytest.raises(ProcessError, match="closed"):
                await stream.write(b"more")

    if backend.has_sockets:
        run(main())
    else:
        with pytest.raises(ProcessError, match="no sockets"):
            run(main())


def test_stream_refuses_addresses_of_nobody(box, backend: Backend, run):
    for address in (8001, "nothing", "x" * 200):
        start = time.monotonic()
        with pytest.raises(ProcessError, match=r"nothing listens|no sockets"):
            run(box.stream(address, timeout=0.1))
        assert time.monotonic() - start < 20
    assert run(box.exec(["echo", "on"])).stdout == "on\n"


# Terminals


def test_pty_is_a_terminal_of_a_size(box, run):
    async def main() -> None:
        shell = await box.start(["sh"], pty=(24, 80), env={"PS1": "ready>"})

        async def until(*texts: str) -> None:
            """Wait until these are in what the terminal shows, one after the other."""
            while not re.search(".*".join(texts), (await shell.logs()).stdout, re.DOTALL):
                assert (await shell.read(timeout=10)).data

        await shell.write(f"test -t 0 && test -t 1 && test -t 2 && {SIZE}\n".encode())
        await until("80 24")
        await shell.resize(10, 20)
        await shell.write(f"{SIZE}; cat\n".encode())
        await until("20 10")
        await shell.write(b"hey\n")
        await until("hey", "hey")  # typed, and printed by cat
        await shell.write(b"\x03")
        await until("hey", "ready>")
        await shell.write(b"exit 4\n")
        assert await shell.wait(timeout=10) == 4
        pipes = await box.start(["cat"])
        with pytest.raises(ProcessError, match="no pty"):
            await pipes.resize(1, 1)

    run(main())


# Limits of one call


def test_call_limits_only_lower_the_sandboxes(box, run):
    async def main() -> None:
        limits = CallLimits(memory=64 << 20, cpu_seconds=1, file_size=1 << 19, open_files=33)
        show = ["sh", "-c", "ulimit -v; ulimit -t; ulimit -f; ulimit -n"]
        assert (await box.exec(show, limits=limits)).stdout.split() == ["65536", "1", "1024", "33"]
        usual = (await box.exec(show)).stdout
        assert (await box.exec(show, limits=CallLimits(1 << 50, 1 << 30, 1 << 50, 1 << 20))).stdout.split()[
            2:
        ] == usual.split()[2:]
        process = await box.start(show, limits=limits)
        assert await process.wait(timeout=10) == 0
        assert (await process.logs()).stdout.split() == ["65536", "1", "1024", "33"]

    run(main())


@pytest.mark.sandbox
def test_call_limits_end_what_exceeds_them(box, run):
    async def main() -> None:
        ran = await box.exec(["sh", "-c", "while :; do :; done"], limits=CallLimits(cpu_seconds=1))
        assert (ran.returncode, ran.timed_out) == (-signal.SIGXCPU, False)
        ran = await box.exec(["python3", "-c", "bytes(100 << 20)"], limits=CallLimits(memory=64 << 20))
        assert "MemoryError" in ran.stderr
        ran = await box.exec(["sh", "-c", "head -c 9000 /dev/zero >file"], limits=CallLimits(file_size=4096))
        assert ran.returncode != 0 and len(await box.read_file("file")) == 4096

    run(main())


# What is refused


def test_start_and_stream_refuse_misuse(box, run):
    for argv in ([], "ls -l"):
        with pytest.raises(ConfigError, match="give a list"):
            run(box.start(argv))
    for size in ((0, 80), (24,), (24, 10**6)):
        with pytest.raises(ConfigError, match="rows and columns"):
            run(box.start(["sh"], pty=size))
    for address in (0, 65536, "", True, 1.5):
        with pytest.raises(ConfigError, match="give a port"):
            run(box.stream(address))
    for limits in ({"memory": 0}, {"cpu_seconds": 1.5}, {"open_files": True}):
        with pytest.raises(ConfigError, match="whole number"):
            CallLimits(**limits)
    with pytest.raises(ConfigError, match="max_bytes"):
        run(run(box.start(["true"])).read(0))


def test_other_sandboxes_refuse_processes_by_name(run):
    box = run(FakeSandboxes().open())
    with pytest.raises(ConfigError, match="FakeSandbox has no processes"):
        run(box.start(["sh"]))
    with pytest.raises(ConfigError, match="FakeSandbox has no streams"):
        run(box.stream(80))


@pytest.mark.sandbox
def test_unisolated_processes_refuse_to_outlive_a_call(run):
    async def main() -> None:
        sandboxes = LocalSandboxes(tier="unsafe", allow_unsafe=True)
        box = await sandboxes.open()
        with pytest.raises(ProcessError, match="can't tell it from other processes"):
            await box.start(["sleep", "60"])
        assert (await box.exec(["echo", "on"])).stdout == "on\n"
        await sandboxes.close()

    run(main())


def test_pool_passes_processes_and_streams_on(sandboxes, backend: Backend, run):
    async def main() -> None:
        pool = WarmPool(sandboxes, warm=1)
        box = await pool.open()
        process = await box.start(["cat"])
        await process.write(b"x")
        assert await read_all(process, 1) == b"x"
        with pytest.raises(ProcessError):
            await box.stream(8001, timeout=0.05)
        await box.close()

    run(main())
