"""What code does by the doors of long-running processes and streams, and twins that succeed unprotected."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import platform
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from agent_rl.sandboxes.base import Sandbox
from agent_rl.sandboxes.process import MAX_LOG, MAX_PROCESSES, Process, ProcessError
from tests.sandbox.backends import BACKENDS, LIMITS, Backend, unprivileged
from tests.sandbox.test_processes import BEAT, ECHO, beats, echo, read_all
from tests.sandbox.test_sabotage import works

pytestmark = pytest.mark.sandbox
SLIPPING = f"""
import ctypes, os
if ctypes.CDLL(None).syscall(56, 0x8000 | 17, 0, 0, 0, 0) == 0:  # CLONE_PARENT: a child of its parent's
    os.setsid()
    os.execvp("sh", ["sh", "-c", {BEAT.format(name="slipped")!r}])
"""
STORM = "import os, time\nwhile True:\n    try: os.fork()\n    except OSError: time.sleep(0.001)"
DAEMON_STORM = """
import os, time
while True:
    try:
        if os.fork() == 0: os.setsid(); os.fork() and os._exit(0)
    except OSError: time.sleep(0.001)
"""
SPY = """
import os
found = []
for pid in filter(str.isdigit, os.listdir("/proc")):
    if int(pid) not in (os.getpid(), 1):
        try:
            os.listdir(f"/proc/{pid}/fd")
            open(f"/proc/{pid}/mem", "rb").close()
            found.append(open(f"/proc/{pid}/comm").read())
        except OSError: pass
found
"""
TERMINALS = """
import os
held = []
try:
    for _ in range(40): held.append(os.openpty())
except OSError: pass
reached = len(held) == 40
for pair in held: os.close(pair[0]); os.close(pair[1])
reached
"""


async def gaps_while(main: asyncio.Task[None]) -> float:
    """Return the longest time, of this thread's processor, for which the event loop was held up meanwhile."""
    longest = 0.0
    while not main.done():
        start = time.thread_time()
        await asyncio.sleep(0)
        longest = max(longest, time.thread_time() - start)
    await main
    return longest


# Floods


def test_flood_of_output_leaves_the_event_loop_free(box: Sandbox, run):
    async def attack(process: Process) -> None:
        until = time.monotonic() + 0.5
        while time.monotonic() < until:
            assert len((await process.read()).data) <= 64 << 10
        assert (await box.exec(["echo", "on"], timeout=20)).stdout == "on\n"

    async def main() -> float:
        process = await box.start(["yes"])
        return await gaps_while(asyncio.create_task(attack(process)))

    assert run(main()) < 0.05
    assert works(run, box)


def test_unread_flood_costs_the_trainer_nothing(box: Sandbox, run):
    async def main() -> float:
        flooding = [await box.start(["sh", "-c", "yes & yes >&2"]) for _ in range(3)]
        before = time.process_time()
        await asyncio.sleep(0.5)
        spent = time.process_time() - before
        logs = await flooding[0].logs()
        assert len(logs.stdout) == len(logs.stderr) == MAX_LOG and logs.truncated
        return spent

    assert run(main()) < 0.1
    assert works(run, box)


def test_twin_flood_fills_an_unbounded_reader():
    with subprocess.Popen(["yes"], stdout=subprocess.PIPE) as process:
        with pytest.raises(subprocess.TimeoutExpired) as late:
            process.communicate(timeout=1)
        process.kill()
        assert len(late.value.stdout) > 10 * MAX_LOG


def test_process_that_never_reads_holds_up_its_writer_only(box: Sandbox, run):
    async def main() -> None:
        deaf, other = await box.start(["sleep", "60"]), await box.start(["cat"])
        writing = asyncio.create_task(deaf.write(bytes(1 << 20), timeout=0.5))
        await other.write(b"x")
        assert await read_all(other, 1) == b"x"
        assert (await box.exec(["echo", "on"])).stdout == "on\n"
        with pytest.raises(ProcessError, match="did not read"):
            await writing
        assert await deaf.poll() is None
        await deaf.close()

    run(main())
    assert works(run, box)


def test_twin_process_that_never_reads_blocks_its_writer():
    with subprocess.Popen(["sleep", "60"], stdin=subprocess.PIPE) as process:
        os.set_blocking(process.stdin.fileno(), False)
        assert process.stdin.raw.write(bytes(1 << 20)) < 1 << 20
        process.kill()


# Numbers


def test_thousand_starts_are_bounded_and_survived(box: Sandbox, run):
    async def main() -> None:
        started, refused = list[Process](), 0
        for _ in range(1000):
            try:
                started.append(await box.start(["sleep", "60"]))
            except ProcessError as error:
                refused += 1
                assert any(why in str(error) for why in ("are open; close one", "can't be started"))
        assert len(started) <= MAX_PROCESSES and refused >= 1000 - MAX_PROCESSES
        await asyncio.gather(*(process.close() for process in started))

    run(main())
    assert works(run, box)


def test_cancelled_starts_leave_no_process(box: Sandbox, run):
    async def main() -> None:
        for i in range(40):
            starting = asyncio.create_task(box.start(["sleep", "60"]))
            for _ in range(i % 4):
                await asyncio.sleep(0)
            starting.cancel()
            (process,) = await asyncio.gather(starting, return_exceptions=True)
            if isinstance(process, Process):
                await process.close()
        for _ in range(MAX_PROCESSES):  # each still has its place
            await (await box.start(["true"])).wait(timeout=10)

    run(main())


def test_terminals_are_bounded_but_in_containers(box: Sandbox, backend: Backend, run):
    assert run(box.run_python(TERMINALS)).value == str("open many terminals" in backend.its_own)
    assert works(run, box)


def test_twin_opens_many_terminals():
    ran = subprocess.run([sys.executable, "-c", f"{TERMINALS}\nprint(reached)"], capture_output=True, text=True)
    assert ran.stdout == "True\n"


# Ends


def test_stream_ends_in_the_middle(box: Sandbox, backend: Backend, run):
    if not backend.has_sockets:
        pytest.skip(f"{backend.name}: no sockets")
    half = "import os, socket\ns = socket.create_server(('127.0.0.1', 8000))\nc, _ = s.accept()\nc.sendall(b'half')\n"

    async def main() -> None:
        await box.start(["python3", "-c", half + "c.recv(1)\nos._exit(0)"])
        stream = await box.stream(8000, timeout=20)
        assert await read_all(stream, 4) == b"half"
        with contextlib.suppress(ProcessError):
            for _ in range(100):
                await stream.write(bytes(65536), timeout=5)
        while not (output := await stream.read(timeout=10)).ended:
            assert output.data == b""
        async with echo(box, "unix", "door") as other:
            for _ in range(MAX_PROCESSES + 8):  # ended by the host, with a read and a write under way
                stream = await box.stream("door")
                calls = [stream.read(), *(stream.write(bytes(65536)) for _ in range(3))]
                under_way = asyncio.gather(*calls, return_exceptions=True)
                await asyncio.sleep(0)
                await stream.close()
                for found in await under_way:
                    assert found is None or isinstance(found, ProcessError) or found.ended or found.data
            await other.write(b"x")
            assert await read_all(other, 1) == b"x"

    run(main())
    assert works(run, box)


@pytest.mark.parametrize("storm", [STORM, DAEMON_STORM], ids=["children", "daemons"])
def test_kill_ends_a_fork_storm(box: Sandbox, run, storm: str):
    async def main() -> None:
        process = await box.start(["python3", "-c", storm])
        await asyncio.sleep(0.5)
        await process.kill()
        assert await process.wait(timeout=10) == -signal.SIGKILL

    run(main())
    assert works(run, box)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the number of clone is x86_64's")
def test_command_slips_nothing_into_a_process(box: Sandbox, run):
    async def main() -> bool:
        process = await box.start(["sleep", "60"])
        await box.exec(["python3", "-c", SLIPPING])
        slipped = (await box.exec(["test", "-s", "slipped"])).returncode == 0 and await beats(box, "slipped")
        assert await process.poll() is None
        return slipped

    assert not run(main())


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the number of clone is x86_64's")
def test_twin_slips_out_of_its_command(tmp_path: Path):
    hold = [
        sys.executable,
        "-c",
        f"import subprocess, sys, time\nsubprocess.run([sys.executable, '-c', {SLIPPING!r}])\ntime.sleep(60)",
    ]
    with subprocess.Popen(hold, cwd=tmp_path, start_new_session=True) as parent:
        beat = tmp_path / "slipped"
        for _ in range(500):
            time.sleep(0.02)
            if beat.exists() and beat.stat().st_size > 3:
                break
        assert beat.stat().st_size > 3
        children = Path(f"/proc/{parent.pid}/task/{parent.pid}/children").read_text().split()
        for pid in (*map(int, children), parent.pid):
            os.kill(pid, signal.SIGKILL)


# A relay


def test_relay_keeps_its_memory_and_descriptors(box: Sandbox, backend: Backend, run):
    if not backend.has_sockets:
        pytest.skip(f"{backend.name}: no sockets")

    async def main() -> str | None:
        await box.start(["python3", "-c", ECHO, "tcp"])
        await box.stream(8000, timeout=20)
        return (await box.run_python(SPY)).value

    assert run(main()) == "['python3\\n']"  # the server is foreign, and the relay is not to be seen into


def test_relay_that_is_killed_ends_its_stream_only(box: Sandbox, backend: Backend, run):
    if not backend.has_sockets:
        pytest.skip(f"{backend.name}: no sockets")
    kill = (
        "import os, signal\nfor p in filter(str.isdigit, os.listdir('/proc')):\n    try: os.listdir(f'/proc/{p}/fd')\n"
    )
    kill += (
        "    except PermissionError:\n        if p != '1' and int(p) != os.getppid(): os.kill(int(p), signal.SIGKILL)"
    )

    async def main() -> None:
        async with echo(box, "unix", "door") as stream:
            assert (await box.exec(["python3", "-c", kill])).returncode in (0, 1)
            with contextlib.suppress(ProcessError):
                await stream.write(b"x", timeout=5)
            for _ in itertools.repeat(None, 20):
                if (await stream.read(timeout=1)).ended:
                    break
            else:
                raise AssertionError("the stream of a killed relay goes on")

    run(main())
    assert works(run, box)


ALONE = (1 << 29) + 1
"""A user that nobody else is, in other tests beside these either."""
FORK = """
import os, time
made = 0
try:
    while made < 20:
        if os.fork() == 0:
            time.sleep(60)
            os._exit(0)
        made += 1
except OSError: pass
print(made, flush=True)
time.sleep(60)
"""


def test_limit_of_processes_counts_what_runs_in_the_sandbox(run):
    """Where the kernel counts all of a user's: not what other sandboxes run, and all that this one does."""
    backend, limits = BACKENDS["landlock-unprivileged"], replace(LIMITS, processes=8)
    if backend.refused():
        pytest.skip("the kernel has no Landlock, or not enough of it")

    async def main() -> None:
        sandboxes = unprivileged("landlock", ALONE)  # what others of this user end meanwhile would leave room
        first = await sandboxes.open(limits=limits)
        assert (await first.run_python("6 * 7")).value == "42"
        for _ in range(9):
            other = await sandboxes.open(limits=limits)
            assert (await other.run_python("6 * 7")).value == "42"
        assert (await first.exec(["sh", "-c", "echo on | cat | cat"])).stdout == "on\n" and first.loss is None
        made = []
        for _ in range(4):
            job = await first.start(["python3", "-c", FORK])
            made.append(int((await job.read(timeout=20)).data))
        assert 0 < sum(made) <= 8, made
        await sandboxes.close()

    run(main())
