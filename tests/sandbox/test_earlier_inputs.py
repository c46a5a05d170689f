"""What an earlier call was given is not in the memory of the interpreter that starts later."""

from __future__ import annotations

import subprocess
import sys

import pytest

from agent_rl.sandboxes.base import Sandbox

SECRET = "the-graders-own-answer-is-8f1d0c"
SEARCH = f"""
import ctypes, os, re
secret = re.compile({"".join(f"[{letter}]" for letter in SECRET).encode()!r})
libc = ctypes.CDLL(None)
libc.sbrk.restype = ctypes.c_void_p
PAGE, AROUND = 4096, 64 << 20
out, into = os.pipe()
found = []
for near in (id(object()), libc.sbrk(0)):  # what Python and what malloc has
    before = b""
    for page in range(near // PAGE * PAGE - AROUND, near // PAGE * PAGE + AROUND, PAGE):
        data = os.read(out, PAGE) if libc.write(into, ctypes.c_void_p(page), PAGE) == PAGE else b""
        found += [hex(page - len(before) + match.start()) for match in secret.finditer(before + data)]
        before = data[-{len(SECRET) - 1}:]
"""
"""Leaves in `found` where this process holds the secret, without holding it itself; a page that there isn't is an error
of `write`, so that it needs no /proc."""


async def in_input(box: Sandbox) -> None:
    assert (await box.exec(["cat"], input=SECRET.encode())).stdout == SECRET


async def in_argument(box: Sandbox) -> None:
    assert (await box.exec(["echo", SECRET])).stdout == f"{SECRET}\n"


async def in_variable(box: Sandbox) -> None:
    assert SECRET in (await box.exec(["env"], env={"ANSWER": SECRET})).stdout


async def in_written_file(box: Sandbox) -> None:
    await box.write_file("answer", SECRET.encode())
    assert (await box.exec(["rm", "answer"])).returncode == 0


async def in_read_file(box: Sandbox) -> None:
    half = len(SECRET) // 2
    await box.exec(["sh", "-c", 'printf %s%s "$0" "$1" > answer', SECRET[:half], SECRET[half:]])
    assert await box.read_file("answer") == SECRET.encode()
    assert (await box.exec(["rm", "answer"])).returncode == 0


async def in_large_file(box: Sandbox) -> None:
    await box.write_file("answer", SECRET.encode() * 20_000)
    assert (await box.exec(["rm", "answer"])).returncode == 0


async def in_earlier_code(box: Sandbox) -> None:
    await box.run_python(f"answer = {SECRET!r}\nimport os, signal; os.kill(os.getpid(), signal.SIGKILL)")


WAYS = {way.__name__: way for way in (in_input, in_argument, in_variable, in_written_file, in_read_file, in_large_file)}


@pytest.mark.parametrize("way", [*WAYS.values(), in_earlier_code], ids=lambda way: way.__name__)
def test_interpreter_does_not_hold_earlier_inputs(box: Sandbox, run, way):
    run(way(box))
    result = run(box.run_python(f"{SEARCH}\nfound"))
    assert (result.value, result.error) == ("[]", None)


def test_search_finds_what_the_interpreter_holds(box: Sandbox, run):
    run(box.run_python(f"kept = {SECRET!r}"))
    result = run(box.run_python(f"{SEARCH}\nlen(found)"))
    assert result.error is None
    assert int(result.value or 0) > 0


def test_twin_fork_holds_earlier_inputs():
    code = f"import os, sys\nanswer = sys.stdin.read()\nif os.fork() == 0:\n    exec({SEARCH!r})\n    print(len(found))"
    ran = subprocess.run([sys.executable, "-c", code], input=SECRET, capture_output=True, text=True, check=True)
    assert int(ran.stdout) > 0


def test_interpreter_that_started_first_is_as_before(box: Sandbox, run):
    """It is forked, before anything was confided to the agent, and goes on through what comes later."""
    run(box.run_python("mine = 6"))
    run(in_input(box))
    result = run(box.run_python(f"{SEARCH}\nfound, mine * 7"))
    assert (result.value, result.error) == ("([], 42)", None)
