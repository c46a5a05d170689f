"""The host's direct line to an interpreter, between untrusted code and the host's event loop."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from agent_rl.errors import ConfigError, SandboxError
from agent_rl.sandboxes.agent.frames import MAX_BODY, FrameError, Frames, pack
from agent_rl.sandboxes.calls import FileAccessError
from agent_rl.sandboxes.client.client import AgentSandbox
from agent_rl.sandboxes.local.backend import LocalSandboxes
from tests.sandbox.backends import LIMITS
from tests.sandbox.test_local import descendants


@pytest.fixture(scope="module")
def jails(runner: asyncio.Runner) -> Iterator[LocalSandboxes]:
    try:
        runner.run((made := LocalSandboxes(LIMITS)).capabilities())
    except SandboxError as error:
        pytest.skip(str(error))
    yield made
    runner.run(made.close())


@asynccontextmanager
async def opened(jails: LocalSandboxes) -> AsyncIterator[AgentSandbox]:
    box = await jails.open(owner="direct", lifetime=120)
    try:
        yield box
    finally:
        await box.close()


def state(pid: int) -> str:
    """A process's state, as ps shows it."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_direct_line_carries_code_of_3_megabytes(jails, run):
    async def main() -> None:
        async with opened(jails) as box:
            assert (await box.run_python(f"x = {'a' * 3_000_000!r}\nlen(x)", timeout=20)).value == "3000000"
            with pytest.raises(ConfigError, match="at most"):
                await box.run_python("#" * (MAX_BODY + 1))
            assert (await box.run_python("len(x)")).value == "3000000"

    run(main())


def test_direct_line_times_out_on_stopped_workers(jails, run):
    async def main() -> None:
        async with opened(jails) as box:
            before = descendants(os.getpid())
            stop = "import os, threading\nthreading.Timer(0.2, os.kill, (os.getpid(), 19)).start()"
            await box.run_python(stop)
            async with asyncio.timeout(60):
                while "T" not in map(state, descendants(os.getpid()) - before):
                    await asyncio.sleep(0.05)
            start = time.monotonic()
            result = await box.run_python("#" * 3_000_000, timeout=0.5)
            assert (result.timed_out, result.state_lost) == (True, True)
            assert time.monotonic() - start < 30
            assert (await box.run_python("6 * 7")).value == "42"

    run(main())


def test_direct_line_ignores_unsolicited_output(jails, run):
    """Between calls, a thread that writes without end costs the host nothing."""
    flood = (
        "import os, threading\n"
        "def flood(fd):\n"
        "    while True: os.write(fd, bytes(65536))\n"
        "for fd in (1, 2, 3): threading.Timer(0.1, flood, (fd,)).start()"
    )

    async def main() -> None:
        async with opened(jails) as box:
            await box.run_python(flood)
            await asyncio.sleep(0.3)
            before, start = time.process_time(), time.monotonic()
            await asyncio.sleep(0.5)
            assert time.process_time() - before < 0.2 * (time.monotonic() - start)
            await box.run_python("1", timeout=1)
            await box.run_python("1", timeout=1)
            assert (await box.run_python("6 * 7", timeout=5)).value == "42"

    run(main())


def test_direct_line_limits_the_rate_of_output(jails, run):
    """A flood takes less than a quarter of the host's event loop, and the calls proceed."""

    async def main() -> None:
        async with opened(jails) as box:
            before, start = time.process_time(), time.monotonic()
            result = await box.run_python("import os\nwhile True: os.write(1, bytes(65536))", timeout=1)
            assert time.process_time() - before < 0.25 * (time.monotonic() - start)
            assert result.timed_out and result.truncated
            printed = int(result.stdout.split("[... ")[1].split()[0])
            assert 3_000_000 < printed < 100_000_000

    run(main())


def test_direct_line_lets_other_tasks_run(jails, run):
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async def main() -> None:
        async with opened(jails) as box:
            await box.run_python("x = 0")
            counting = asyncio.create_task(count())
            before = turns
            for _ in range(200):
                await box.run_python("x += 1")
            assert turns - before >= 200
            counting.cancel()

    run(main())


def test_direct_line_close_fails_the_running_call(jails, run):
    async def main() -> None:
        async with opened(jails) as box:
            await box.run_python("x = 1")
            call = asyncio.create_task(box.run_python("while True: pass", timeout=60))
            await asyncio.sleep(0.1)
            await box.close()
            with pytest.raises(SandboxError):
                await asyncio.wait_for(call, 30)

    run(main())


def test_direct_line_waits_for_how_its_interpreter_ends(jails, run):
    async def main() -> None:
        async with opened(jails) as box:
            result = await box.run_python("import os, time; os.closerange(0, 999); time.sleep(0.05); os._exit(3)")
            assert result.state_lost and "the interpreter ended with status 3" in result.error
            result = await box.run_python("import os, time; os.closerange(0, 999); time.sleep(60)")
            assert "the interpreter broke its connection and was killed" in result.error
            assert result.seconds < 5

    run(main())


def test_direct_line_cancelled_leaves_no_process_or_descriptor(jails, run):
    beat = "import os, time\nos.fork()\nwhile True: open('beat', 'a').write('.'); time.sleep(0.01)"

    async def main() -> None:
        async with opened(jails) as box:
            await box.run_python("x = 1")
            before, beats = descriptors(), b""
            for wait in (0.6, 0.2, 0.2, 4.0, 16.0):
                if beats and wait > 1:  # the long ones are for a busy machine
                    break
                call = asyncio.create_task(box.run_python(beat))
                await asyncio.sleep(wait)
                call.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await call
                with suppress(FileAccessError):  # it had not begun
                    beats = await box.read_file("beat")
                await asyncio.sleep(0.05)
                assert not beats or await box.read_file("beat") == beats
            assert beats, "it never ran"
            assert "NameError" in str((await box.run_python("x")).error)
            assert descriptors() == before

    run(main())


def test_direct_line_leaks_no_descriptor_after_crashes(jails, run):
    async def main() -> None:
        async with opened(jails) as box:
            await box.run_python("1")
            before = descriptors()
            for _ in range(5):
                assert (await box.run_python("import os\nos._exit(3)")).state_lost
            await box.run_python("1")
            assert descriptors() == before

    run(main())


def test_frames_refuse_oversized_frames():
    frames = Frames(max_head=100, max_body=0)
    frames.feed(pack({"id": 1}))
    assert frames.pop() == ({"id": 1}, b"")
    frames.feed(pack({"id": 1}, b"body"))
    with pytest.raises(FrameError, match=r"at most 100 \+ 0"):
        frames.pop()
