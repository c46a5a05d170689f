"""Code against its agent: to outlive the timeout, or to deceive or disable the agent."""

from __future__ import annotations

import platform
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from agent_rl.sandboxes.base import Limits
from tests.sandbox.victims import victims

BEAT = """
def beat():
    stop = time.monotonic() + 30
    with open("beat", "ab", buffering=0) as file:
        while time.monotonic() < stop:
            file.write(b".")
            time.sleep(0.005)
"""
ESCAPES = {
    "a session of its own": "if os.fork() == 0:\n    os.setsid()\n    os.fork() or beat()\n    os._exit(0)",
    "deaf to signals": (
        "if os.fork() == 0:\n    os.setsid()\n"
        "    for n in (1, 2, 3, 10, 12, 13, 15): signal.signal(n, signal.SIG_IGN)\n"
        "    beat()\n    os._exit(0)"
    ),
    "an orphan of orphans": (
        "me = os.getpid()\nfor _ in range(8):\n    if os.fork(): break\n    os.setsid()\nelse:\n    beat()\n"
        "if os.getpid() != me: os._exit(0)"
    ),
    "a program": (
        "script = 'trap \"\" TERM HUP; for i in $(seq 3000); do echo . >>beat; sleep 0.01; done'\n"
        "open('beat.sh', 'w').write(script)\n"
        "subprocess.Popen(['sh', 'beat.sh'], start_new_session=True)"
    ),
    "a reaper of its own": (  # its orphans come to it, not to the agent
        "import ctypes\nif os.fork() == 0:\n    os.setsid()\n    ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)\n"
        "    if os.fork() == 0: os.fork() or beat(); os._exit(0)\n    time.sleep(9)\n    os._exit(0)"
    ),
    **{  # clone of x86_64: without a signal of its end, and with a parent that waits, deaf to all but SIGKILL
        name: (
            f"import ctypes\nif ctypes.PyDLL(None).syscall(56, {flags}, 0, 0, 0, 0) == 0:\n    os.setsid()\n"
            "    beat()\n    os._exit(0)"
        )
        for name, flags in (("a child that nobody hears of", 0), ("a parent that is held", 0x4000 | 17))
        if platform.machine() == "x86_64"
    },
    "a thread": "import threading\nthreading.Thread(target=beat).start()",
}


def escape(how: str) -> str:
    return f"import os, signal, subprocess, time\n{BEAT}\n{ESCAPES[how]}\nwhile True: time.sleep(1)"


@pytest.mark.parametrize("how", ESCAPES)
def test_timeout_ends_every_escape(box, run, how):
    for timeout in (0.4, 2.0, 16.0):  # on a busy machine, it takes a while until the heart beats
        result = run(box.run_python(escape(how), timeout=timeout))
        assert (result.timed_out, result.state_lost) == (True, True)
        if run(box.exec(["test", "-s", "beat"])).returncode == 0:
            break
    beats = run(box.read_file("beat"))
    assert beats, "it never ran"
    time.sleep(0.1)
    assert run(box.read_file("beat")) == beats
    assert run(box.run_python("1 + 1")).value == "2"


@pytest.mark.sandbox
@pytest.mark.parametrize("how", [how for how in ESCAPES if how != "a thread"])
def test_escapes_outlive_an_unprotected_timeout(tmp_path: Path, how):
    for timeout in (0.8, 4.0, 16.0):
        with pytest.raises(subprocess.TimeoutExpired):
            subprocess.run([sys.executable, "-c", escape(how)], cwd=tmp_path, timeout=timeout)
        if (tmp_path / "beat").exists():
            break
    beats, until = (tmp_path / "beat").read_bytes(), time.monotonic() + 8.0
    while (tmp_path / "beat").read_bytes() == beats and time.monotonic() < until:
        time.sleep(0.2)
    assert (tmp_path / "beat").read_bytes() != beats


STORM = """
import os, time
for _ in range(3):
    os.fork()
stop = time.monotonic() + 30
while time.monotonic() < stop:
    try:
        if os.fork(): os._exit(0)
        open("beat", "a").write(".")
    except OSError: pass
"""


def test_timeout_ends_a_fork_storm(box, run):
    """Each process makes the next one and ends: none lives long enough to be killed by its number."""
    for rest in (1, 4, 16):  # on a busy machine, it takes a while until the first writes
        run(box.run_python(f"import os\nif os.fork() == 0: exec({STORM!r})"))
        time.sleep(rest)
        if run(box.exec(["test", "-s", "beat"], timeout=60)).returncode == 0:
            break
    beats = run(box.read_file("beat"))
    assert beats, "it never ran"
    time.sleep(0.1)
    assert run(box.read_file("beat")) == beats


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL, signal.SIGTERM, signal.SIGCHLD, signal.SIGINT])
def test_kill_all_signals_reach_the_sandbox_only(box, run, backend, number):
    with victims(backend.uid) as aims:
        run(box.run_python(f"import os\nos.kill(-1, {int(number)})", timeout=1))
        run(box.run_python(f"import os\nos.kill(1, {int(number)})\nos.kill(os.getppid(), {int(number)})", timeout=1))
        assert aims.harmed() == []
    assert run(box.exec(["echo", "on"], timeout=20)).stdout == "on\n"
    run(box.run_python(""))
    assert run(box.run_python("1 + 1")).value == "2"


FORGER = """
import json, os, struct, sys
def frame(head):
    text = json.dumps(head).encode()
    return struct.pack('>II', len(text), 0) + text
def write(fd, data):
    try: os.write(fd, data)
    except OSError: pass
"""


@pytest.mark.parametrize(
    "forgery",
    [
        "os.write(3, frame({'id': 99, 'value': 'forged', 'error': None}))",
        "os.write(3, frame({'id': 'x', 'value': 'forged', 'error': None}) * 100)",
        "[write(fd, frame({'id': i, 'code': 0, 'value': 'forged'})) for fd in range(3, 20) for i in range(9)]",
        "os.write(3, b'\\xff' * 100)",
        "os.write(3, struct.pack('>II', 5, 0) + b'[[[[[')",
        "os.write(3, struct.pack('>II', 2, 0) + b'[]')",
        "os.write(3, struct.pack('>II', 1 << 31, 0))",
        "[os.dup2(0, fd) for fd in range(3, 20)]",
        "os.close(3)",
        "os.dup2(os.open('/dev/null', 2), 3)",
        "os.kill(os.getpid(), 19)",
        "__builtins__.__dict__.update(repr=lambda x: 'forged', str=None)",
        "sys.modules.clear()",
        "json.dumps = None; os.write = None; os.read = None",
        "sys.settrace(lambda *a: 1 / 0)",
        "sys.setrecursionlimit(10)",
    ],
)
def test_forged_answers_do_not_deceive_the_host(box, run, forgery):
    """It may cost the interpreter; the call after the next is answered truly, and by its own answer."""
    run(box.run_python(FORGER + forgery, timeout=1))
    assert run(box.exec(["echo", "true"])).stdout == "true\n"
    results = [run(box.run_python("6 * 7", timeout=1)) for _ in range(2)]
    fresh = run(box.exec(["sh", "-c", "exit 5"]))
    assert fresh.returncode == 5
    assert all(result.value in ("42", "forged", None) for result in results)
    run(box.run_python("import os; os._exit(0)", timeout=1))
    run(box.run_python("", timeout=1))
    assert run(box.run_python("6 * 7")).value == "42"


def test_run_python_bounds_flooded_output(box, run):
    result = run(box.run_python("import os\nfor _ in range(400): os.write(1, b'x' * 65536)", max_output=1000))
    assert result.truncated
    assert len(result.stdout) < 1100


def test_run_python_ignores_output_after_the_answer(box, run):
    code = "import os\nif os.fork() == 0:\n    while True: os.write(1, b'x' * 65536)\n'answered'"
    assert run(box.run_python(code, timeout=20)).value == "'answered'"
    assert run(box.run_python("1 + 1", timeout=20)).value == "2"


def test_run_python_cuts_long_values(box, run):
    result = run(box.run_python("'x' * 1_000_000", max_output=1000))
    assert result.value is not None
    assert len(result.value) < 1100
    assert run(box.run_python("raise ValueError('x' * 1_000_000)", max_output=1000)).error.count("x") < 1100


def test_full_sandbox_runs_commands(box, run):
    """With no room left for files, nor for processes while time expires, a command still runs."""
    fill = "for i in range(400):\n    try: open(str(i), 'wb').write(bytes(1 << 16))\n    except OSError: pass"
    run(box.run_python(fill))
    crowd = "import os, time\nfor _ in range(60):\n    try: os.fork() or time.sleep(60)\n    except OSError: pass"
    run(box.run_python(crowd + "\ntime.sleep(60)", timeout=1))
    assert run(box.exec(["echo", "on"])).stdout == "on\n"


def test_sandbox_out_of_processes_runs_commands(sandboxes, run):
    async def crowd() -> str:
        box = await sandboxes.open(limits=Limits(memory=192 << 20, processes=8, disk=2 << 20, files=256), lifetime=60)
        code = "import os, time\nfor _ in range(20):\n    try: os.fork() or (time.sleep(60), os._exit(0))\n"
        code += "    except OSError: pass"
        await box.run_python(code)
        ran = await box.exec(["echo", "on"])
        await box.close()
        return ran.stdout

    assert run(crowd()) == "on\n"
