"""Grading on every backend: right answers pass, and cheats fail, whatever the model left where it worked."""

from __future__ import annotations

import asyncio

import pytest

from agent_rl.core.sandbox_loss import Cause, SandboxLoss
from agent_rl.errors import SandboxError
from agent_rl.sandboxes.base import Sandboxes
from agent_rl.sandboxes.grading import Call, Program, grade
from tests.sandbox.grading import ADD, RIGHT, Graded, grading_in


@pytest.fixture
def graded(sandboxes: Sandboxes, runner: asyncio.Runner) -> Graded:
    return grading_in(sandboxes, runner)


def test_grade_passes_right_answers(graded: Graded) -> None:
    verdict = graded(RIGHT, *ADD)
    assert verdict.passed == (True, True) and verdict.share == 1.0 and verdict.reasons == ("", "")


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


def test_grade_runs_each_test_in_own_sandbox(graded: Graded) -> None:
    """A solution that counts its calls would pass if tests shared a sandbox."""
    counting = (
        "import os\ndef add(a, b):\n    seen = os.path.exists('seen')\n    open('seen', 'w').close()\n"
        "    return 'again' if seen else a + b\n"
    )
    assert graded(counting, *ADD, *ADD).share == 1.0


def test_grade_excludes_processes_left_by_the_model(graded: Graded) -> None:
    meddler = (
        "import os, time\npath = os.path.abspath('solution.py')\nif os.fork() == 0:\n    os.setsid()\n    while True:\n"
        "        open(path, 'w').write('def add(a, b): return 5')\n        time.sleep(0.001)\n"
    )
    assert graded("def add(a, b): return 5", *ADD, before=meddler).share <= 0.5


@pytest.mark.parametrize(
    "before",
    [
        "import os\nos.remove('solution.py')",
        "import os\nos.remove('solution.py'); os.mkfifo('solution.py')",
        "import os\nos.remove('solution.py'); os.mkdir('solution.py')",
        "import os\nos.remove('solution.py'); os.symlink('/dev/zero', 'solution.py')",
        "open('solution.py', 'wb').truncate((1 << 20) + 1)",
    ],
)
def test_grade_fails_missing_solution_files(graded: Graded, before: str) -> None:
    verdict = graded(RIGHT, *ADD, before=before)
    assert verdict.passed == (False, False) and "solution.py" in verdict.reasons[0]


def test_grade_raises_for_a_lost_sandbox(runner: asyncio.Runner, sandboxes: Sandboxes) -> None:
    box = runner.run(sandboxes.open())
    runner.run(box.close())
    with pytest.raises(SandboxError):
        runner.run(grade(box, ["solution.py"], ADD, sandboxes))


LEFT = """
import ctypes, os, threading, time
here = os.getcwd()
def spoil():
    for _ in range(200):
        for name in ("json.py", "sitecustomize.py", "solution.py", "solution/__init__.py", "left"):
            for folder in (here, os.environ.get("TMPDIR", "/tmp"), os.path.expanduser("~")):
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
print(sorted([*os.listdir(), *os.listdir(os.environ.get("TMPDIR", "/tmp"))]))
try: seen = os.listdir("/proc")
except PermissionError: seen = []  # it is the host's
print([int(p) for p in seen if p.isdigit() and int(p) not in (1, os.getpid())])
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
