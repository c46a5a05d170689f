"""Grading of model-written code: hidden inputs go into a fresh sandbox, answers come out and are compared here.

What is expected never enters a sandbox, so there is nothing to read there and no verdict to forge: code that patches
`unittest`, leaves early or returns an object that equals everything only answers for itself. A name that is copied out
is a regular file of limited size. The place that the model worked in, with whatever it left running there, takes no
part.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import re
import reprlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast
from weakref import WeakKeyDictionary

from agent_rl.core.messages import JSON
from agent_rl.core.meter import time_left, wait_uncounted
from agent_rl.core.sandbox_loss import Cause, SandboxLoss
from agent_rl.errors import ConfigError, SandboxError
from agent_rl.sandboxes.agent import call_function
from agent_rl.sandboxes.base import Limits, Sandbox, Sandboxes
from agent_rl.sandboxes.calls import FileAccessError

MAX_ANSWER = 1024 * 1024
"""Bytes of one answer."""
MAX_VALUES = 50_000
"""Values in one answer: reading JSON holds up the event loop, for 15 ms of so many, for 45 of as many as 1 MiB has."""
NO_PROGRAM = 127
"""The exit status where there is no such program."""
MAX_SOURCE = 1024 * 1024
"""Bytes of one file that is graded."""

RESERVE = 2.0
"""Seconds of the budget that are left where a grading ends by it: to close the last sandbox, and to sum up."""

_CALL = Path(call_function.__file__).read_text(encoding="utf-8")
_LINE_END = re.compile("\r\n|[\n\r\v\f\x1c-\x1e\x85\u2028\u2029]")
"""As `str.splitlines` has it."""
_turns: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()
"""Of each event loop: as many programs run at a time as there are processors, so that none is late as others run."""


@dataclass(frozen=True, slots=True)
class Call:
    """A hidden test: a function of a graded file is called, and its value compared as JSON."""

    function: str
    """With its module: "solution:add" for `add` in solution.py."""
    args: Sequence[JSON]
    expected: JSON
    tolerance: float = 0.0
    """How far a number may be off, relative and absolute; 0: not at all."""

    def __post_init__(self) -> None:
        module, colon, name = self.function.partition(":")
        if not (module and colon and name):
            raise ConfigError(f"Call({self.function!r}): name the module, too, such as 'solution:add'")


@dataclass(frozen=True, slots=True)
class Program:
    """A hidden test: a program runs on an input, and what it prints is compared, but for white space at line ends."""

    argv: Sequence[str]
    expected: str
    input: str = ""


class CallError(Exception):
    """A function of sandboxed code did not return a value; the text says why."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of each test."""

    passed: tuple[bool, ...]
    reasons: tuple[str, ...] = field(repr=False)
    """Why one was not passed, or "": for people; the model must not see the inputs in it."""

    @property
    def share(self) -> float:
        """How many of the tests were passed, from 0 to 1."""
        return sum(self.passed) / len(self.passed)


@dataclass(slots=True)
class _Runs:
    """The programs that one grading runs, and where."""

    sandboxes: Sandboxes
    timeout: float
    limits: Limits | None
    at_first: float | None = None
    """Seconds that the episode's rewards, or its step, had left at first; None if there is no limit."""
    spent: float = 0.0
    """Seconds that programs have run."""

    def seconds_left(self) -> float:
        """Return how long the next program may run.

        Raises:
            CallError: if those before have left no time for it.
        """
        left = time_left() if self.at_first is not None else None
        if self.at_first is None or left is None or left >= self.timeout + RESERVE:
            return self.timeout
        if self.at_first - left - self.spent > max(self.spent, RESERVE):
            return self.timeout  # the host is what is slow: then the time runs out, and that is no failed test
        if left <= RESERVE:
            raise CallError(f"the programs before took {self.spent:.3g} s, which left no time for it")
        return left - RESERVE


async def grade(
    sandbox: Sandbox,
    files: Sequence[str],
    tests: Sequence[Call | Program],
    sandboxes: Sandboxes,
    *,
    timeout: float = 10.0,
    limits: Limits | None = None,
) -> Verdict:
    """Judge files of a sandbox by hidden tests in fresh ones.

    Args:
        sandbox: where the model worked.
        files: what is graded, relative to the working folder; nothing else is carried over. One that is missing, too
            large or no regular file fails every test.
        tests: each runs in a sandbox of its own, so that none can leave a word for the next.
        sandboxes: where the fresh ones come from.
        timeout: seconds of each test, once it runs: it waits while as many others run as there are processors, which
            no budget counts. Tests that find no time left of `Budget.score_seconds`, as those before them took it, are
            failed.
        limits: of the fresh sandboxes.

    Raises:
        ConfigError: if there are no tests.
        SandboxError: if a sandbox can't be had, or what it runs on has failed: nothing is known then.
    """
    if not tests:
        raise ConfigError("there are no tests to grade by: give at least one Call or Program")
    try:
        copies = {name: await sandbox.read_file(name, max_bytes=MAX_SOURCE) for name in files}
    except FileAccessError as error:
        return Verdict((False,) * len(tests), (str(error),) * len(tests))
    runs = _Runs(sandboxes, timeout, limits, at_first=time_left())
    reasons = [await _judge(copies, test, runs) for test in tests]
    return Verdict(tuple(not reason for reason in reasons), tuple(reasons))


async def call(
    files: Mapping[str, bytes],
    function: str,
    args: Sequence[JSON],
    sandboxes: Sandboxes,
    *,
    timeout: float = 10.0,
    limits: Limits | None = None,
) -> JSON:
    """Return what a function of one of the files returns, called in a fresh sandbox.

    Args:
        files: what the sandbox holds, by name.
        function: with its module: "solution:add" for `add` in solution.py.
        args: what it is called with.
        sandboxes: where the sandbox comes from.
        timeout: seconds, once it runs: it waits while as many others run as there are processors.
        limits: of the sandbox.

    Raises:
        CallError: if it returns no value that JSON can hold.
        SandboxError: if a sandbox can't be had, or what it runs on has failed.
    """
    return await _call(files, function, args, _Runs(sandboxes, timeout, limits))


async def _call(files: Mapping[str, bytes], function: str, args: Sequence[JSON], runs: _Runs) -> JSON:
    module, _, name = function.partition(":")
    request = json.dumps({"module": module, "function": name, "args": args})
    printed = await _output(files, ["python3", "-c", _CALL], request, runs)
    if not printed.startswith('"') and sum(map(printed.count, ",[{")) > MAX_VALUES:
        raise CallError(f"the answer has more than {MAX_VALUES} values")
    try:
        return cast(JSON, json.loads(printed))
    except (ValueError, RecursionError):
        raise CallError(f"the answer is not JSON: {printed[:1000]!r}") from None


async def _judge(files: Mapping[str, bytes], test: Call | Program, runs: _Runs) -> str:
    """Return why a test is not passed; "" if it is."""
    try:
        if isinstance(test, Program):
            printed = await _output(files, test.argv, test.input, runs)
            same = _same_lines(printed, test.expected)
            return "" if same else f"printed {printed[:1000]!r}, not {test.expected[:1000]!r}"
        answer = await _call(files, test.function, test.args, runs)
    except CallError as error:
        return str(error)
    same = _equal(answer, test.expected, test.tolerance)
    return "" if same else f"returned {reprlib.repr(answer)}, not {reprlib.repr(test.expected)}"


async def _output(files: Mapping[str, bytes], argv: Sequence[str], text: str, runs: _Runs) -> str:
    """Return what a program prints in a fresh sandbox."""
    turns = _turns.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(os.cpu_count() or 1))
    await (wait_uncounted(turns.acquire()) if turns.locked() else turns.acquire())
    try:
        runs.seconds_left()
        fresh = await runs.sandboxes.open(owner="grading", limits=runs.limits)
        try:
            for name, data in files.items():
                await fresh.write_file(name, data)
            seconds, started = runs.seconds_left(), time.monotonic()
            ran = await fresh.exec(argv, input=text.encode(), timeout=seconds, max_output=MAX_ANSWER)
            runs.spent += time.monotonic() - started
        finally:
            await fresh.close()
        if ran.returncode == NO_PROGRAM and "/" not in argv[0]:
            await _require(argv[0], runs)
    finally:
        turns.release()
    if ran.timed_out:
        raise CallError(f"it took more than {seconds:g} s")
    if ran.returncode:
        raise CallError(f"exit status {ran.returncode}: {ran.stderr[-1000:].strip()}")
    if ran.truncated:
        raise CallError(f"the answer is larger than {MAX_ANSWER} bytes")
    return ran.stdout


async def _require(program: str, runs: _Runs) -> None:
    """Look for a program in a sandbox without the graded files, whose code may lie about its absence.

    Raises:
        SandboxError: if it isn't there.
    """
    empty = await runs.sandboxes.open(owner="grading", limits=runs.limits)
    try:
        found = await empty.exec([program, "--version"], timeout=runs.timeout)
    finally:
        await empty.close()
    if found.returncode == NO_PROGRAM:
        reason = f"a fresh sandbox has no program '{program}', which a hidden test runs"
        raise SandboxError(reason, SandboxLoss(Cause.NO_PROGRAM, reason))


def _same_lines(printed: str, expected: str) -> bool:
    """Compare texts but for white space at line ends, in a time that the number of expected lines bounds."""
    wanted = [line.rstrip() for line in expected.rstrip().splitlines()]
    if not wanted:
        return not printed.strip()
    return [line.rstrip() for line in _LINE_END.split(printed.rstrip(), len(wanted))] == wanted


def _equal(answer: JSON, expected: JSON, tolerance: float) -> bool:
    """Compare two values as JSON has them: a list is not its elements' text, and True is not 1."""
    if isinstance(expected, bool) or expected is None or isinstance(expected, str):
        return type(answer) is type(expected) and answer == expected
    if isinstance(expected, int | float):
        if isinstance(answer, bool) or not isinstance(answer, int | float):
            return False
        return answer == expected or (tolerance > 0 and _close(answer, expected, tolerance))
    if isinstance(expected, Mapping):
        if not isinstance(answer, Mapping) or answer.keys() != expected.keys():
            return False
        return all(_equal(answer[key], value, tolerance) for key, value in expected.items())
    if not isinstance(answer, Sequence) or isinstance(answer, str) or len(answer) != len(expected):
        return False
    return all(_equal(a, e, tolerance) for a, e in zip(answer, expected, strict=True))


def _close(answer: float, expected: float, tolerance: float) -> bool:
    try:
        return math.isclose(answer, expected, rel_tol=tolerance, abs_tol=tolerance)
    except OverflowError:  # a whole number beyond all floats
        return False
