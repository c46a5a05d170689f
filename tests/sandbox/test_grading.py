"""Grading: right answers pass, and cheats fail."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from weakref import WeakKeyDictionary

import pytest

from agent_rl.core.messages import JSON
from agent_rl.core.meter import Meter, meter
from agent_rl.core.sandbox_loss import Cause, SandboxLoss
from agent_rl.errors import ConfigError, SandboxError
from agent_rl.sandboxes import grading
from agent_rl.sandboxes.base import Sandboxes
from agent_rl.sandboxes.calls import ExecResult
from agent_rl.sandboxes.grading import Call, Program, Verdict, _same_lines, grade
from agent_rl.sandboxes.local.backend import LocalSandboxes
from agent_rl.testing import FakeSandbox, FakeSandboxes
from tests.sandbox.backends import skip_if_refused

Graded = Callable[..., Verdict]
ADD = (Call("solution:add", [2, 3], 5), Call("solution:add", ["a", "b"], "ab"))
RIGHT = "def add(a, b):\n    print('adding')\n    return a + b\n"


@pytest.fixture(scope="module")
def sandboxes(runner: asyncio.Runner) -> Iterator[Sandboxes]:
    sandboxes = LocalSandboxes(require=())
    with skip_if_refused():
        runner.run(runner.run(sandboxes.open()).close())
    yield sandboxes
    runner.run(sandboxes.close())


@pytest.fixture
def graded(runner: asyncio.Runner, sandboxes: Sandboxes) -> Graded:
    """Grade a solution.py that a model left, after it ran `before`."""

    async def main(solution: str, tests: tuple[Call | Program, ...], before: str, timeout: float) -> Verdict:
        box = await sandboxes.open()
        try:
            await box.write_file("solution.py", solution.encode())
            if before:
                assert (await box.run_python(before)).error is None
            return await grade(box, ["solution.py"], tests, sandboxes, timeout=timeout)
        finally:
            await box.close()

    def judge(solution: str, *tests: Call | Program, before: str = "", timeout: float = 30.0) -> Verdict:
        return runner.run(main(solution, tests, before, timeout))

    return judge


def test_grade_passes_right_answers(graded: Graded) -> None:
    verdict = graded(RIGHT, *ADD)
    assert verdict.passed == (True, True) and verdict.share == 1.0 and verdict.reasons == ("", "")


def test_grade_shares_partial_success(graded: Graded) -> None:
    verdict = graded("def add(a, b): return 5", *ADD)
    assert verdict.passed == (True, False) and verdict.share == 0.5
    assert verdict.reasons[1] == "returned 5, not 'ab'"


CHEATS = {
    "leaves early": "import os\nos._exit(0)\n",
    "exits": "import sys\nsys.exit(0)\n",
    "prints the answer": "print(5)\ndef add(a, b): return None\n",
    "prints and leaves": "import os\nos.write(1, b'5')\nos._exit(0)\n",
    "equals everything": (
        "class Yes:\n    def __eq__(self, other): return True\n    __ne__ = lambda self, other: False\n"
        "def add(a, b): return Yes()\n"
    ),
    "an int that lies": (
        "class Liar(int):\n    def __eq__(self, other): return True\n    __hash__ = None\n"
        "def add(a, b): return Liar(6)\n"
    ),
    "patches json": "import json\njson.load = json.loads = lambda *a, **k: 5\ndef add(a, b): return None\n",
    "patches unittest": (
        "import unittest\nunittest.TestCase.assertEqual = lambda *a: None\ndef add(a, b): return None\n"
    ),
    "looks for the answer": (
        "import gc\ndef add(a, b):\n"
        "    found = [o for o in gc.get_objects() if isinstance(o, dict) and 'expected' in o]\n"
        "    return found[0]['expected'] if found else None\n"
    ),
    "atexit": "import atexit, os\natexit.register(lambda: os.write(1, b'5'))\ndef add(a, b): return None\n",
    "loops": "while True: pass\n",
    "raises": "raise ValueError('no')\n",
    "true is not one": "def add(a, b): return a == 2 and b == 3\n",
    "deep": "def add(a, b):\n    import os\n    os.write(3, b'[' * 100000)\n    os._exit(0)\n",
    "long": "def add(a, b): return 'x' * 3_000_000\n",
    "many values": "def add(a, b): return [[]] * 200_000\n",
    "many digits": "import sys\nsys.set_int_max_str_digits(0)\ndef add(a, b): return [10 ** 9000] * 100\n",
    "surrogates": "def add(a, b): return {'\\ud800': float('nan')}\n",
    "nothing": "",
    "attacks the agent": (
        "import ctypes, os, resource\nfor pid in {os.getppid(), 1}:\n"
        "    try: resource.prlimit(pid, resource.RLIMIT_NOFILE, (0, 0))\n    except OSError: pass\n"
        "if os.fork() == 0:\n    ctypes.CDLL(None).prctl(15, b'\\xff')\n    while True: pass\nos._exit(0)\n"
    ),
}


@pytest.mark.parametrize("cheat", CHEATS)
def test_grade_fails_cheats(graded: Graded, cheat: str) -> None:
    tests = (Call("solution:add", [2, 3], 5), Call("solution:add", [0, 1], 1))
    verdict = graded(CHEATS[cheat], *tests, timeout=1 if cheat == "loops" else 3)
    assert verdict.passed == (False, False), verdict.reasons


@pytest.mark.parametrize("text", ["a\n", "a  \nb", "\r\n a\rb\x0bc\u2028", "", " \n\n", "a\n\nb\n\n"])
def test_same_lines_is_equality_of_split_lines(text: str) -> None:
    def lines(text: str) -> list[str]:
        return [line.rstrip() for line in text.rstrip().splitlines()]

    for other in (text, text + "\n \n", text + "x", "\n" + text, text.replace("\n", "\r\n"), text[1:], ""):
        assert _same_lines(other, text) == (lines(other) == lines(text)), (other, text)


@pytest.mark.parametrize(
    "answer",
    ["[" + "[]," * 349_000 + "0]", "[" + "1e9," * 260_000 + "1]", "x\n" * 500_000],
    ids=["lists", "numbers", "lines"],
)
def test_judging_a_large_answer_leaves_the_event_loop_free(monkeypatch: pytest.MonkeyPatch, answer: str) -> None:
    async def printed(*args: object) -> str:
        return answer

    monkeypatch.setattr(grading, "_output", printed)
    test = Program(["true"], "x\ny") if answer[0] == "x" else Call("solution:f", [], [1, 2])
    judging = grading._judge({}, test, grading._Runs(LocalSandboxes(), 1.0, None))
    before = time.thread_time()
    with pytest.raises(StopIteration) as done:
        judging.send(None)
    assert time.thread_time() - before < 0.02  # they took 50 to 80 ms
    assert done.value.value


def test_grade_runs_each_test_in_own_sandbox(graded: Graded) -> None:
    """A solution that counts its calls would pass if tests shared a sandbox."""
    counting = (
        "import os\ndef add(a, b):\n    seen = os.path.exists('seen')\n    open('seen', 'w').close()\n"
        "    return 'again' if seen else a + b\n"
    )
    assert graded(counting, *ADD, *ADD).share == 1.0


def test_grade_excludes_processes_left_by_the_model(graded: Graded) -> None:
    meddler = (
        "import os, time\nif os.fork() == 0:\n    os.setsid()\n    while True:\n"
        "        open('/work/solution.py', 'w').write('def add(a, b): return 5')\n        time.sleep(0.001)\n"
    )
    assert graded("def add(a, b): return 5", *ADD, before=meddler).share <= 0.5


@pytest.mark.parametrize(
    "before",
    [
        "import os\nos.remove('solution.py')",
        "import os\nos.remove('solution.py'); os.mkfifo('solution.py')",
        "import os\nos.remove('solution.py'); os.mkdir('solution.py')",
        "import os\nos.remove('solution.py'); os.symlink('/dev/zero', 'solution.py')",
        "open('solution.py', 'wb').truncate(1 << 24)",
    ],
)
def test_grade_fails_missing_solution_files(graded: Graded, before: str) -> None:
    verdict = graded(RIGHT, *ADD, before=before)
    assert verdict.passed == (False, False) and "solution.py" in verdict.reasons[0]


def test_grade_compares_output_of_programs(graded: Graded) -> None:
    program = ("python3", "solution.py")
    verdict = graded("print(int(input()) * 2)  ", Program(program, "8", "4"), Program(program, "9\n", "4"))
    assert verdict.passed == (True, False)
    assert graded("import sys\nprint(8)\nsys.exit(1)", Program(program, "8")).passed == (False,)


@pytest.mark.parametrize(
    ("value", "expected", "tolerance", "passes"),
    [
        ("[1, {'a': None}]", [1, {"a": None}], 0.0, True),
        ("(1, 2)", [1, 2], 0.0, True),
        ("'[1, 2]'", [1, 2], 0.0, False),
        ("[1, 2, 3]", [1, 2], 0.0, False),
        ("{'a': 1, 'b': 2}", {"a": 1}, 0.0, False),
        ("0.1 + 0.2", 0.3, 0.0, False),
        ("0.1 + 0.2", 0.3, 1e-9, True),
        ("float('nan')", 1.0, 1e-9, False),
        ("10 ** 400", 1.0, 1e-9, False),
        ("1", True, 0.0, False),
        ("None", None, 0.0, True),
        ("0", None, 0.0, False),
    ],
)
def test_grade_compares_values_as_json(
    graded: Graded, value: str, expected: JSON, tolerance: float, passes: bool
) -> None:
    verdict = graded(f"def f(): return {value}", Call("solution:f", [], expected, tolerance))
    assert verdict.passed == (passes,)


async def graded_by_rewards(solution: str, seconds: float, at_once: int, sandboxes: Sandboxes) -> list[Verdict]:
    """Grade by four tests of a second, some times at once, as rewards that have so many seconds."""

    async def one() -> Verdict:
        box = await sandboxes.open()
        token = meter.set(own := Meter())
        try:
            await box.write_file("solution.py", solution.encode())
            async with asyncio.timeout(seconds) as own.clock:
                return await grade(box, ["solution.py"], (*ADD, *ADD), sandboxes, timeout=1.0)
        finally:
            meter.reset(token)
            await box.close()

    return await asyncio.gather(*(asyncio.create_task(one()) for _ in range(at_once)))


def test_grade_that_hangs_ends_within_the_budget(runner: asyncio.Runner, sandboxes: Sandboxes) -> None:
    (verdict,) = runner.run(graded_by_rewards("while True: pass", grading.RESERVE + 2.5, 1, sandboxes))
    assert verdict.passed == (False,) * 4 and "left no time" in verdict.reasons[3], verdict.reasons


def test_grade_leaves_out_the_wait_for_a_processor(
    runner: asyncio.Runner, sandboxes: Sandboxes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grading.os, "cpu_count", lambda: 1)  # type: ignore[attr-defined]
    monkeypatch.setattr(grading, "_turns", WeakKeyDictionary())
    monkeypatch.setattr(grading, "RESERVE", 0.25)
    slow = f"import time\ntime.sleep(0.1)\n{RIGHT}"
    verdicts = runner.run(graded_by_rewards(slow, 2.0, 6, sandboxes))  # 2.4 s of sleep, one at a time
    assert [verdict.share for verdict in verdicts] == [1.0] * 6


def test_grade_on_a_slow_host_fails_no_tests(runner: asyncio.Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow(FakeSandboxes):
        async def open(self, **_: object) -> FakeSandbox:  # type: ignore[override]
            await asyncio.sleep(0.2)
            return await super().open()

    monkeypatch.setattr(grading, "RESERVE", 0.1)
    with pytest.raises(TimeoutError):
        runner.run(graded_by_rewards("", 0.5, 1, Slow(on_exec=lambda argv: ExecResult(0, "5", ""))))


def test_grade_raises_for_a_lost_sandbox(runner: asyncio.Runner, sandboxes: Sandboxes) -> None:
    box = runner.run(sandboxes.open())
    runner.run(box.close())
    with pytest.raises(SandboxError):
        runner.run(grade(box, ["solution.py"], ADD, sandboxes))


LEFT = """
import ctypes, os, threading, time
def spoil():
    for _ in range(200):
        for name in ("json.py", "sitecustomize.py", "solution.py", "solution/__init__.py", "left"):
            for folder in ("/work", "/tmp", os.path.expanduser("~")):
                try:
                    os.makedirs(os.path.dirname(f"{folder}/{name}"), exist_ok=True)
                    open(f"{folder}/{name}", "w").write("raise SystemExit(0)")
                except OSError: pass
        time.sleep(0.02)
for attempt in range(2):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            if attempt:
                threading.Thread(target=spoil).start()
                ctypes.CDLL(None).syscall(60, 0)  # exit of the first thread alone
            spoil()
        os._exit(0)
"""
"""A daemon, and a thread whose process's first thread has ended, that keep leaving files behind."""
LOOK = """
import os
print(sorted([*os.listdir("/work"), *os.listdir("/tmp")]))
print([int(p) for p in os.listdir("/proc") if p.isdigit() and int(p) not in (1, os.getpid())])
"""


def test_grade_hides_tests_from_what_the_model_left(graded: Graded) -> None:
    program = Program(["python3", "-c", LOOK], "['solution.py']\n[]")
    verdict = graded("def add(a, b):\n    return a + b\n", program, before="import os\nos.getpid()")
    assert verdict.passed == (True,), verdict.reasons
    verdict = graded("", program, before=LEFT)
    assert verdict.passed == (True,), verdict.reasons


def test_grade_without_its_program_is_infrastructure(graded: Graded) -> None:
    with pytest.raises(SandboxError, match="no program 'no-such-program'") as caught:
        graded(RIGHT, Program(["no-such-program"], ""))
    assert isinstance(caught.value.loss, SandboxLoss) and caught.value.loss.cause is Cause.NO_PROGRAM
    forged = "import os, sys\nprint('python3: no such program', file=sys.stderr, flush=True)\nos._exit(127)\n"
    assert graded(forged, ADD[0]).passed == (False,)
    assert graded(RIGHT, Program(["./solution"], "")).passed == (False,)  # what the model should have made


def test_grade_refuses_empty_and_malformed_tests(graded: Graded) -> None:
    with pytest.raises(ConfigError, match="no tests"):
        graded(RIGHT)
    with pytest.raises(ConfigError, match="solution:add"):
        Call("add", [], None)
