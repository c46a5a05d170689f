"""What code does to the rest of the machine: to the trainer's event loop, to counts that all share, and to the disk."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import struct
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import pytest

from agent_rl.errors import SandboxError
from agent_rl.sandboxes.agent.frames import (
    MAX_ANSWER_HEAD,
    MAX_STRAYS,
    MAX_TEXT,
    MAX_TEXT_BYTES,
    FrameError,
    Frames,
    pack,
    texts_from_body,
    texts_to_body,
)
from agent_rl.sandboxes.agent.worker import shorten
from agent_rl.sandboxes.base import Sandbox
from agent_rl.sandboxes.client.client import AgentSandbox
from agent_rl.sandboxes.client.reading import FREE_READS, PIECE, ReadBudget, decode
from agent_rl.sandboxes.local import homes
from agent_rl.sandboxes.local.backend import ENVIRONMENT, LocalSandboxes, refuse_descriptors
from tests.sandbox.backends import LIMITS, Backend, readable_python, skip_if_refused
from tests.sandbox.test_sabotage import works
from tests.sandbox.victims import definitions, unprotected

FORGE = "import os, struct\ndef frame(head): return struct.pack('>II', len(head), 0) + head\n"
FLOODS = {
    "wrong answers": "block = frame(b'{\"id\": 0}') * 3000\nwhile True: os.write(3, block)",
    "the least frames": "block = frame(b'{}') * 6000\nwhile True: os.write(3, block)",
}
NO_FRAMES = {
    "a deep head": "os.write(3, frame(b'[' * 100_000))",
    "a wide head": "os.write(3, frame(b'[' + b'[],' * 400_000 + b'[]]'))",
    "texts that are not there": 'for n in range(9): os.write(3, frame(b\'{"id": %d, "value": 9}\' % n))',
}


# The event loop


@pytest.mark.parametrize("flood", FLOODS)
def test_flood_of_forged_answers_costs_the_sandbox(box: Sandbox, backend: Backend, run, flood):
    if backend.name == "e2b-jupyter":
        pytest.skip("e2b-jupyter: code has no channel to write to")
    before = time.process_time()
    result = run(box.run_python(FORGE + FLOODS[flood], timeout=5))
    assert result.sandbox_lost and "nobody had asked for" in (result.error or "")
    assert time.process_time() - before < 0.2  # it took 5 s


@pytest.mark.parametrize("forgery", NO_FRAMES)
def test_malformed_answer_costs_the_interpreter(box: Sandbox, run, forgery):
    before = time.process_time()
    result = run(box.run_python(f"{FORGE}{NO_FRAMES[forgery]}\nwhile True: pass", timeout=5))
    assert result.state_lost and not result.sandbox_lost
    assert time.process_time() - before < 0.2
    assert works(run, box)


def test_binary_output_leaves_the_event_loop_free(run):
    gaps: list[float] = []

    async def beat() -> None:
        while True:
            start = time.thread_time()
            await asyncio.sleep(0)
            gaps.append(time.thread_time() - start)

    async def main() -> None:
        beating = asyncio.create_task(beat())
        data = os.urandom(8 * PIECE) + "é".encode() * PIECE
        texts = await asyncio.gather(*(decode(data) for _ in range(4)))
        assert texts == [data.decode(errors="backslashreplace")] * 4
        beating.cancel()

    run(main())
    assert max(gaps) < 0.01


@pytest.mark.parametrize("data", [b"", b"abc", "é".encode(), b"\xff", b"a\xc3", "é".encode()[:1] + b"(" * PIECE])
def test_decode_escapes_what_is_no_text(run, data: bytes):
    assert run(decode(data)) == data.decode(errors="backslashreplace")


def test_read_budget_pauses_small_reads_only():
    budget = ReadBudget()
    assert not any(budget.is_spent(65536) for _ in range(1000))
    assert [budget.is_spent(1) for _ in range(FREE_READS + 1)] == [False] * (FREE_READS - 1) + [True] * 2
    budget.renew()
    assert not budget.is_spent(1)


def test_answer_byte_by_byte_is_read_in_pauses(box: Sandbox, backend: Backend, run):
    if backend.needs is not None and backend.name != "docker":
        pytest.skip(f"{backend.name}: the agent reads it, in there")
    code = FORGE + "os.write(3, struct.pack('>II', 200, 0))\nwhile True: os.write(3, b' ')"
    before = time.process_time()
    assert run(
        box.run_python(code.replace("while True", "for _ in range(199)") + "\nos._exit(0)", timeout=5)
    ).state_lost
    assert time.process_time() - before < 0.2


@pytest.mark.parametrize("texts", [(None, None), ("", None), ("é\ud800", "x"), (None, "y" * 1000)])
def test_texts_of_an_answer_survive_its_body(texts):
    head, body = texts_to_body({"id": 1, "value": texts[0], "error": texts[1]}, b"output", ("value", "error"))
    assert len(pack(head)) < 100
    back, output = texts_from_body(head, body, ("value", "error"))
    plain = [text if text is None else text.replace("\ud800", "\\ud800") for text in texts]
    assert ([back["value"], back["error"]], output) == (plain, b"output")


@pytest.mark.parametrize("head", [{"value": 9}, {"value": -1}, {"value": "1"}, {"value": 2, "error": 2}])
def test_texts_of_an_answer_have_possible_lengths(head):
    with pytest.raises(FrameError, match="an answer of 3 bytes has"):
        texts_from_body(head, b"abc", ("value", "error"))


@pytest.mark.parametrize("text", ["\ud800", "\U0001f600", "x", "\x00"])
def test_texts_of_an_honest_worker_are_never_too_long(text):
    longest = shorten(text * (2 * MAX_TEXT), MAX_TEXT)
    head, body = texts_to_body({"value": longest, "error": longest}, b"", ("value", "error"))
    back, rest = texts_from_body(head, body, ("value", "error"))
    assert (back["value"], rest) == (longest.replace("\ud800", "\\ud800"), b"")


@pytest.mark.parametrize("body", [b"x" * (MAX_TEXT_BYTES + 1), b"x" * 9 + b"\xff", b"\xed\xa0\x80"])
def test_texts_that_no_worker_sends_are_refused(body: bytes):
    with pytest.raises(FrameError, match="value"):
        texts_from_body({"value": len(body)}, body, ("value",))


@pytest.mark.parametrize(("text", "count"), [(b"\xff", 900_000), ("\U0001f600".encode(), MAX_TEXT_BYTES // 4)])
def test_forged_texts_take_the_event_loop_few_milliseconds(text: bytes, count: int):
    """What is no UTF-8, as much as an answer may have; and characters of four bytes, to the last that a text may."""
    body, costs = text * count, []
    for _ in range(3):
        start = time.thread_time()
        with suppress(FrameError):
            texts_from_body({"value": len(body), "error": len(body)}, body * 2, ("value", "error"))
        costs.append(time.thread_time() - start)
    assert min(costs) < 0.005


@pytest.mark.parametrize(
    ("flood", "reason"),
    [
        (pack({"id": 7}) * (MAX_STRAYS + 2), "frames that answer nothing"),
        (struct.pack(">II", MAX_ANSWER_HEAD + 1, 0), "at most"),
        (struct.pack(">II", 50_000, 0) + b"[" * 50_000, "not JSON"),
    ],
    ids=["strays", "a large head", "a deep head"],
)
def test_agent_that_floods_is_lost(run, flood: bytes, reason: str):
    async def main() -> None:
        ours, theirs = socket.socketpair()
        theirs.setblocking(False)

        async def ended() -> None:
            return None

        box = AgentSandbox(ours, kill=lambda: None, ended=ended)
        with theirs:
            theirs.send(pack({"ready": True}))
            await box.ready(5)
            call = asyncio.create_task(box.read_file("x"))
            await asyncio.get_running_loop().sock_sendall(theirs, flood)
            with pytest.raises(SandboxError, match=reason):
                await call
            await box.close()

    run(main())


def test_refuse_descriptors_leaves_bytes_alone():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        refuse_descriptors(ours)
        if tuple(map(int, os.uname().release.split(".")[:2])) >= (6, 16):
            with pytest.raises(PermissionError):
                socket.send_fds(theirs, [b"x"], [0])
        theirs.send(b"y")
        socket.send_fds(ours, [b"x"], [0])  # the other way
        assert ours.recv(2) == b"y"


def test_frames_of_other_calls_are_dropped_up_to_a_bound():
    frames = Frames(MAX_ANSWER_HEAD)
    frames.feed(pack({"id": 1}, b"x") * 2)
    assert [frames.pop(), frames.pop(), frames.pop()] == [({"id": 1}, b"x")] * 2 + [None]


# What the machine has once


OF_THE_HOST = {
    "watch files": "reached = libc.inotify_init() >= 0",
    "hold more of the user's pages of pipes": (
        "import fcntl\nr, w = os.pipe()\nreached = attempt(fcntl.fcntl, w, 1031, 1 << 20) == 1 << 20"
    ),
    "grow the buffers of sockets": (
        "s = socket.socketpair()[0]\nusual = s.getsockopt(1, 7)\ns.setsockopt(1, 7, 2 * usual)\n"
        "reached = s.getsockopt(1, 7) > usual"
    ),
    "hold megabytes of TCP's memory in a connection": (
        "door = attempt(lambda: socket.create_server(('127.0.0.1', 0)))\nheld = 0\n"
        "if door:\n    line = socket.create_connection(door.getsockname())\n    line.settimeout(0.3)\n    try:\n"
        "        while True: held += line.send(bytes(1 << 16))\n    except OSError: pass\nreached = held > 1 << 20"
    ),
    "lease a file": "import fcntl\nfd = os.open('f', os.O_CREAT)\nreached = attempt(fcntl.fcntl, fd, 1024, 0) == 0",
    **{  # a pipe can't be written out: only the true call says so
        f"flush by {name}": f"ctypes.set_errno(0)\nattempt({name}, os.pipe()[1])\nreached = ctypes.get_errno() == 22"
        for name in ("os.fsync", "os.fdatasync")
    },
    "throw files out of its memory": "reached = call(28, 1, 1, 21) < 0",
    "read its disk past its memory": "reached = attempt(os.open, '/bin/sh', os.O_DIRECT)",
    "read its disk by a flag that is set later": (
        "import fcntl\nfd = os.open('/bin/sh', 0)\nreached = attempt(fcntl.fcntl, fd, 4, os.O_DIRECT) == 0"
    ),
    "open files by a structure that no filter can see": (
        "name, how = ctypes.create_string_buffer(b'/bin/sh'), (ctypes.c_uint64 * 3)(os.O_DIRECT)\n"
        "reached = call(437, -100, ctypes.addressof(name), ctypes.addressof(how), 24) >= 0"
    ),
    **{
        f"have it load a module for {name}": f"ctypes.set_errno(0)\n{code}\nreached = ctypes.get_errno() in (65, 94)"
        for name, code in {
            "a VLAN": "call(16, (s := socket.socketpair()[0]).fileno(), 0x8982, 0)",  # ENOPKG: there is no such module
            "a type of socket": "call(41, 2, 5, 0)",  # ESOCKTNOSUPPORT: nor such a one
            "a pair of sockets": "call(53, 2, 5, 0, ctypes.addressof(ctypes.create_string_buffer(8)))",
        }.items()
    },
    "have it load a module for a raw socket": "call(41, 2, 3, 0)\nreached = ctypes.get_errno() == 93",
    "take its huge pages": (
        "libc.mmap.restype = ctypes.c_void_p\n"
        "reached = libc.mmap(None, ctypes.c_size_t(2 << 20), 3, 0x44022, -1, 0) not in (None, 2**64 - 1)"
    ),
    "take its huge pages by a file": "reached = libc.memfd_create(b'x', 4) >= 0",
    "hold a table for futexes": "reached = call(157, 78, 1, 1 << 10, 0, 0) == 0",
    "hold large sets of semaphores": "made = call(64, 0, 64, 0o1600)\nreached = made >= 0 == call(66, made, 0, 0, 0)",
    "flush by syncfs": "reached = call(306, -1) < 0",
    "flush by sync_file_range": "reached = call(277, -1, 0, 0, 2) < 0",
    "flush by msync": "reached = call(26, 1, 1, 4) < 0",
}
"""What a local sandbox refuses, or pretends to do, as its counts or its disk are those of the machine."""


@pytest.mark.parametrize("what", OF_THE_HOST)
def test_code_leaves_alone_what_the_host_has_once(box: Sandbox, backend: Backend, run, what):
    if backend.needs is not None and backend.name != "docker":
        pytest.skip(f"{backend.name}: its user and its files are its own")
    result = run(box.run_python(definitions({}) + OF_THE_HOST[what] + "\nbool(reached)"))
    assert (result.value, result.error) == (str(what in backend.its_own), None)


@pytest.mark.sandbox
@pytest.mark.parametrize("what", OF_THE_HOST)
def test_twin_uses_what_the_host_has_once(tmp_path: Path, what):
    if "futexes" in what and tuple(map(int, os.uname().release.split(".")[:2])) < (6, 16):
        pytest.skip("needs Linux 6.16")
    assert unprotected(OF_THE_HOST[what], {}, tmp_path).startswith("True")


# Landlock, whose files are among the host's


@pytest.fixture
def landlock(run):
    made = LocalSandboxes(LIMITS, tier="landlock", python=readable_python(), require=())
    with skip_if_refused():
        run(run_once(made))
    yield made
    run(made.close())


async def run_once(sandboxes: LocalSandboxes, code: str = "") -> str | None:
    box = await sandboxes.open(lifetime=60)
    try:
        result = await box.run_python(code, timeout=30)
        assert result.error is None, result.error
        return result.value
    finally:
        await box.close()


@pytest.mark.sandbox
def test_landlock_has_temporary_files_and_git(landlock, run, tmp_path: Path):
    name = run(run_once(landlock, "import tempfile\ntempfile.NamedTemporaryFile().name"))
    assert homes.PREFIX in name and "/tmp/tmp" in name
    git = (
        "import shutil, subprocess\nsubprocess.run(['git', 'init', '-q', 'r']).returncode if shutil.which('git') else 0"
    )
    assert run(run_once(landlock, git)) == "0"
    refused = "os.open('f', os.O_CREAT | os.O_WRONLY | os.O_SYNC)"
    assert (
        run(run_once(landlock, f"import os\ntry: {refused}\nexcept OSError as e: pass\nos.path.exists('f')")) == "False"
    )


def is_removed(folder: Path) -> bool:
    until = time.monotonic() + 30
    while folder.exists() and time.monotonic() < until:
        time.sleep(0.02)
    return not folder.exists()


@pytest.fixture
def patient(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Have `rm` wait until a file is there; return the file."""
    go, rm = tmp_path / "go", tmp_path / "bin" / "rm"
    rm.parent.mkdir()
    rm.write_text(f'#!/bin/sh\nuntil [ -e {go} ]; do sleep 0.05; done\nexec {shutil.which("rm")} "$@"\n')
    rm.chmod(0o755)
    monkeypatch.setitem(ENVIRONMENT, "PATH", f"{rm.parent}:{os.environ['PATH']}")
    return go


@pytest.mark.sandbox
def test_landlock_removes_files_in_the_background(patient: Path, landlock, run):
    async def home_of_a_closed() -> Path:
        box = await landlock.open(lifetime=60)
        home = Path((await box.run_python("import os\nopen('kept', 'w').close()\nos.getcwd()")).value.strip("'"))
        await box.close()
        return home

    home = run(home_of_a_closed())
    run(run_once(landlock))
    assert (home / "kept").exists(), "neither closing nor opening should wait for the removal"
    patient.touch()
    assert is_removed(home.parent)


def test_homes_collects_folders_of_dead_zygotes(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    left, used = (tmp_path / f"{homes.PREFIX}{mark}-1" for mark in ("1.1", homes.MARK))
    for folder in (left, used):
        (folder / homes.WORK).mkdir(parents=True, mode=0o700)
    if os.geteuid() == 0:
        os.chown(left / homes.WORK, 1 << 28, 1 << 28)
    homes.collect()
    assert is_removed(left) and used.exists()


# One sandbox, several calls


LEADERLESS = """
import ctypes, os, threading, time
def beat():
    while True:
        open("beat", "a").write(".")
        time.sleep(0.01)
if os.fork() == 0:
    if os.fork() == 0:
        threading.Thread(target=beat).start()
        ctypes.CDLL(None).syscall(60, 0)  # this thread only, the first
    time.sleep(60)
"""


def test_process_whose_first_thread_ended_ends_with_the_command(box: Sandbox, run):
    for rest in (0.3, 4, 16):  # on a busy machine, it takes a while until it writes
        run(box.run_python(LEADERLESS))
        time.sleep(rest)
        if run(box.exec(["test", "-s", "beat"])).returncode == 0:
            break
    beats = run(box.read_file("beat"))
    time.sleep(0.1)
    assert beats and run(box.read_file("beat")) == beats


INJECT = """
import os, threading
open("f", "w").write("the file" * 1000)
def inject():
    while True:
        for pid in os.listdir("/proc"):
            try:
                if pid.isdigit() and int(pid) not in (1, os.getpid()):
                    os.write(os.open(f"/proc/{pid}/fd/1", 1), b"INJECTED")
            except OSError: pass
threading.Thread(target=inject, daemon=True).start()
"""


def test_read_file_is_out_of_reach_of_code(box: Sandbox, run):
    run(box.run_python(INJECT))
    assert {run(box.read_file("f")) for _ in range(20)} == {b"the file" * 1000}
