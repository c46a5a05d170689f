"""Mutations drawn at random: `python -m tests.sandbox.fuzz --cases 1000000`; of all that a sandbox or a server reads.

Each target yields what it finds, as text: an exception that its reader does not declare, an answer that takes the event
loop too long, a sandbox that does not work afterwards. The same seed draws the same cases. The target `wire` needs
websockets, which is in .venv-adapters.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import socket
import struct
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable

from agent_rl.errors import AgentRLError, ConfigError
from agent_rl.sandboxes.agent.frames import MAX_ANSWER_HEAD, FrameError, Frames, Head, pack
from agent_rl.sandboxes.agent.plots import answer_from_body, answer_to_body
from agent_rl.sandboxes.base import Sandbox
from agent_rl.sandboxes.calls import FileAccessError
from agent_rl.sandboxes.client.client import AgentSandbox
from agent_rl.sandboxes.local.backend import LocalSandboxes
from agent_rl.sandboxes.process import ProcessError
from agent_rl.sandboxes.snapshot import Snapshot
from agent_rl.serving.frames import require_websockets
from tests.sandbox import archives
from tests.sandbox.backends import LIMITS
from tests.sandbox.mutations import VALUES, mutated, path

SLOW = 0.05
"""Seconds of the loop's processor time that no case may take, the least of three attempts."""
DECLARED = (AgentRLError, FileAccessError, ProcessError)
Finding = AsyncIterator[str]


def answer(draw: random.Random, call: object) -> bytes:
    """Return an answer to whatever was asked, of which some parts are not what they should be."""
    head: Head = {"id": call, "code": 0, "expired": False, "cut": False, "out": 2, "problem": None, "value": "4"}
    head |= {"error": None, "lost": False, "handle": 3, "at": 0, "ended": False, "part": False}
    head, body = answer_to_body(head, b"oute\xffr", [b"\x89PNG\r\n\x1a\n" + bytes(20)])
    for _ in range(draw.randrange(3)):
        head[draw.choice(list(head))] = draw.choice(VALUES)
    if draw.random() < 0.2:
        head.pop(draw.choice(list(head)))
    packed = pack(head, body)
    return packed if draw.random() < 0.4 else mutated(draw, packed)


async def fuzz_frames(draw: random.Random, cases: int) -> Finding:
    """Feed mutated streams in pieces to what cuts them into frames, and the frames to what reads their bodies."""
    for _ in range(cases):
        stream = b"".join(answer(draw, draw.randrange(3)) for _ in range(draw.randrange(1, 4)))
        frames = Frames(MAX_ANSWER_HEAD, 1 << 20)
        try:
            while stream:
                size = draw.choice((1, 7, 64, 4096))
                frames.feed(stream[:size])
                stream = stream[size:]
                while (frame := frames.pop()) is not None:
                    answer_from_body(*frame)
        except FrameError:
            continue
        except Exception as error:
            yield f"{error!r}"


async def fuzz_answers(draw: random.Random, cases: int) -> Finding:
    """Have an agent answer every kind of call with mutated frames."""
    calls: tuple[Callable[[AgentSandbox], Awaitable[object]], ...] = (
        lambda box: box.exec(["true"]),
        lambda box: box.run_python("1"),
        lambda box: box.read_file("x"),
        lambda box: box.write_file("x", b"x"),
        _speak,
    )
    box, theirs = await _with_stub()
    for _ in range(cases):
        call = draw.choice(calls)
        spent = time.thread_time()
        asking = asyncio.ensure_future(call(box))
        for _ in range(9):  # a process is asked for more than once
            await asyncio.sleep(0)
            with contextlib.suppress(BlockingIOError, ConnectionError):
                if not asking.done() and (asked := theirs.recv(1 << 20)):
                    theirs.send(answer(draw, _id(asked)))
            await asyncio.sleep(0)
        if not asking.done():  # an answer that never ends
            theirs.shutdown(socket.SHUT_RDWR)
        try:
            await asyncio.wait_for(asking, 20)
        except DECLARED:
            pass
        except Exception as error:
            yield f"{error!r}"
        if (spent := time.thread_time() - spent) > 4 * SLOW:
            yield f"a case took {spent:.3f} s"
        if box.loss is not None or box.fate.lost is not None:
            await box.close()
            theirs.close()
            box, theirs = await _with_stub()
    await box.close()
    theirs.close()


async def _speak(box: AgentSandbox) -> None:
    process = await box.start(["cat"])
    await process.read(9, timeout=1)
    await process.logs()
    await process.wait(timeout=1)


async def _with_stub() -> tuple[AgentSandbox, socket.socket]:
    async def ended() -> None:
        return None

    ours, theirs = socket.socketpair()
    for sock in (ours, theirs):
        sock.setblocking(False)
    box = AgentSandbox(ours, kill=lambda: None, ended=ended)
    theirs.send(pack({"ready": True}))
    await box.ready(20)
    return box, theirs


def _id(asked: bytes) -> object:
    size = struct.unpack_from(">I", asked)[0]
    return json.loads(asked[8 : 8 + size])["id"]


_BY_PATH: tuple[Callable[[Sandbox, str], Awaitable[object]], ...] = (
    lambda box, text: box.read_file(text, max_bytes=1 << 16),
    lambda box, text: box.write_file(text, b"x"),
    lambda box, text: box.exec(["true"], cwd=text),
    lambda box, text: box.exec(["true", text]),
    lambda box, text: box.exec([text], env={text: text}),
)


async def fuzz_paths(draw: random.Random, cases: int) -> Finding:
    """Read, write and run by paths, arguments and variables that nobody would give."""
    async with _sandbox() as box:
        for case in range(cases):
            text = path(draw)
            try:
                await draw.choice(_BY_PATH)(box, text)
            except DECLARED:
                pass
            except Exception as error:
                yield f"{text!r}: {error!r}"
            if case % 50 == 49:
                if complaint := await _complaint(box):
                    yield f"after {text!r} and those before it, {complaint}"
                    return
                await box.exec(["sh", "-c", "rm -rf /work/* /tmp/*"])


_ANSWER = """
import os, struct
pieces = {pieces!r}
for piece in pieces: os.write(3, piece)
os.write(1, {output!r})
"""


async def fuzz_results(draw: random.Random, cases: int) -> Finding:
    """Have code answer for its interpreter, and print what is no text."""
    async with _sandbox() as box:
        for case in range(cases):
            call = box._count + draw.choice((1, 1, 0, 2))  # most often the call's own number
            pieces = [answer(draw, call) for _ in range(draw.randrange(1, 3))]
            code = _ANSWER.format(pieces=pieces, output=mutated(draw, b"\xc3\xa9 \x1b[2J \r\n" * 9))
            spent = time.thread_time()
            result = await box.run_python(code, timeout=0.1)
            if (spent := time.thread_time() - spent) > 4 * SLOW:
                yield f"{pieces!r} took {spent:.3f} s"
            (result.stdout + result.stderr + (result.value or "") + (result.error or "")).encode()
            if result.sandbox_lost:
                yield f"{pieces!r} ended the sandbox"
                return
            if case % 50 == 49 and (complaint := await _complaint(box)):
                yield f"after {pieces!r} and those before it, {complaint}"
                return


IN_A_SANDBOX = 500
"""For so many archives, one more is unpacked in a sandbox."""
_FILES = ("sh", "-c", "mkdir -p a/b; echo kept > a/f; ln a/f a/b/g; ln -s ../../kept a/s; touch -hd @9 a/* a")
_OUTSIDE = ("sh", "-c", "ls -lA /etc /dev/shm; ls -A /")


async def fuzz_archives(draw: random.Random, cases: int) -> Finding:
    """Unpack hostile archives in a process of its own, and some in a sandbox."""
    async for finding in archives.unpacked(draw, cases):
        yield finding
    async with _sandbox() as box:
        await box.exec(_FILES)
        honest, before = (await box.snapshot()).files, await box.exec(_OUTSIDE)
        for left in reversed(range(cases // IN_A_SANDBOX)):
            files = archives.drawn(draw, honest, "/etc")
            try:
                await box.restore(Snapshot(files))
                await box.snapshot()
            except FileAccessError as error:
                if "took too long" in str(error):
                    yield f"{files!r}: {error}"
            except Exception as error:
                yield f"{files!r}: {error!r}"
            if left % 50 == 0 and (complaint := await _complaint(box)):
                yield f"after {files!r} and those before it, {complaint}"
                return
        if (after := await box.exec(_OUTSIDE)).stdout != before.stdout:
            yield f"outside there is {after}"


_CALLS = """
import ctypes, os, random, resource, signal, time
libc = ctypes.CDLL(None, use_errno=True)
space = ctypes.create_string_buffer(1 << 16)
address, paths = ctypes.addressof(space), [b"/", b"/proc/self/mem", b"/usr", b"f", b"/dev/null", b"/proc/1/fd"]
SPARED, AGENT = {spared}, os.getppid()
def calls(seed, count):
    draw = random.Random(seed)
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
    for place, path in enumerate(paths): ctypes.memmove(address + 64 * place, path, len(path))
    for _ in range(count):
        number = draw.randrange(480)
        if number in SPARED: continue
        given = []
        for _ in range(6):
            kind = draw.randrange(7)
            given.append((lambda: draw.randrange(16), lambda: -1, lambda: 1 << draw.randrange(64), lambda: address,
                          lambda: address + 64 * draw.randrange(8), lambda: draw.choice((os.getpid(), AGENT, 1)),
                          lambda: draw.randrange(1 << 12))[kind]())
        libc.syscall(ctypes.c_long(number), *map(ctypes.c_ulong, given))
for seed in range({first}, {last}):
    try: child = os.fork()
    except OSError: time.sleep(0.01); continue
    if child == 0:
        try: calls(seed, {each})
        finally: os._exit(0)
    until = time.monotonic() + 3
    while os.waitpid(child, os.WNOHANG)[0] == 0:
        if time.monotonic() > until: os.kill(child, 9)
        time.sleep(0.001)
"""
_EACH = 100
"""System calls of one process: most end in a signal or a closed descriptor before long."""
_SPARED = (34, 35, 60, 231, 130, 127, 128, 219, 230)
"""Calls that only wait, or end the process: pause, nanosleep, exit, exit_group, rt_sigsuspend and the like."""


async def fuzz_calls(draw: random.Random, cases: int) -> Finding:
    """Make system calls of random numbers and arguments (x86_64), in processes of a sandbox."""
    async with _sandbox() as box:
        for _ in range(0, cases, 10 * _EACH):
            first = draw.randrange(1 << 40)
            code = _CALLS.format(spared=_SPARED, first=first, last=first + 10, each=_EACH)
            result = await box.run_python(code, timeout=60)
            if result.sandbox_lost:
                yield f"the calls from seed {first} on ended the sandbox: {result.error}"
                return
            was_hit = result.state_lost or "KeyboardInterrupt" in (result.error or "")  # by a signal of its children's
            if result.error and not was_hit:
                yield f"the calls from seed {first} on: {result.error}"
            if complaint := await _complaint(box):
                yield f"after the calls from seed {first} on, {complaint}"
                return


async def fuzz_wire(draw: random.Random, cases: int) -> Finding:
    """Send mutated frames to a server of sandboxes and to its clients."""
    require_websockets()
    from tests.adapters import fuzz_wire as wire

    for fuzz, share in ((wire.fuzz_requests, 0.5), (wire.fuzz_replies, 0.45), (wire.fuzz_handshakes, 0.05)):
        async for finding in fuzz(draw, int(cases * share)):
            yield finding


@contextlib.asynccontextmanager
async def _sandbox() -> AsyncIterator[AgentSandbox]:
    sandboxes = LocalSandboxes(LIMITS, require=())
    try:
        yield await sandboxes.open(owner="fuzz", lifetime=86400)
    finally:
        await sandboxes.close()


async def _complaint(box: Sandbox) -> str | None:
    """Return what is wrong with a sandbox; it may have lost its interpreter."""
    ran = await box.exec(["echo", "on"], timeout=60)
    if ran.stdout != "on\n":
        return f"a command came out as {ran}"
    await box.run_python("", timeout=60)
    result = await box.run_python("6 * 7", timeout=60)
    return None if result.value == "42" else f"6 * 7 came out as {result}"


TARGETS: dict[str, tuple[Callable[[random.Random, int], Finding], float]] = {
    "frames": (fuzz_frames, 0.4),
    "answers": (fuzz_answers, 0.2),
    "calls": (fuzz_calls, 0.19),
    "archives": (fuzz_archives, 0.1),
    "wire": (fuzz_wire, 0.1),
    "paths": (fuzz_paths, 0.005),
    "results": (fuzz_results, 0.005),
}
"""What is fuzzed, and its share of all cases: the last two take milliseconds each."""


async def _main(cases: int, seed: int, only: str) -> int:
    found = 0
    for name, (fuzz, share) in TARGETS.items():
        if only in ("", name):
            count = cases if only else int(cases * share)
            start = time.process_time()
            try:
                async for finding in fuzz(random.Random(f"{name} {seed}"), count):
                    found += 1
                    print(f"{name}: {finding[:2000]}", flush=True)
            except ConfigError as error:  # a package is missing
                if only:
                    raise
                print(f"{name}: NOT RUN: {error}")
                continue
            print(f"{name}: {count} cases, {time.process_time() - start:.0f} CPU-s", flush=True)
    print(f"{found} findings")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", choices=("", *TARGETS))
    args = parser.parse_args()
    os.nice(19)
    return bool(asyncio.run(_main(args.cases, args.seed, args.only)))


if __name__ == "__main__":
    sys.exit(main())
