"""The code that the e2b backend sends into a microVM: in a real Jupyter kernel, and its sweep as root."""

from __future__ import annotations

import inspect
import json
import os
import pwd
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from agent_rl.sandboxes.e2b import kernel

USER = "games"
"""A user without processes."""
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, which a kernel of E2B's is at first")
TALK = """
import json, sys
from jupyter_client.manager import start_new_kernel
manager, client = start_new_kernel()
answers = []
for code in json.load(sys.stdin):
    events = {}
    client.execute_interactive(code, output_hook=lambda m: events.update({m["msg_type"]: m["content"]}), timeout=60)
    answers.append(events)
client.stop_channels()
manager.shutdown_kernel(now=True)
print(json.dumps(answers))
"""


def ask_a_kernel(folder: Path, *codes: str, prepared: bool = True) -> list[dict[str, dict[str, object]]]:
    """Run codes in a fresh kernel; return the last event of each kind for each."""
    pytest.importorskip("ipykernel", reason="needs a Jupyter kernel: pip install ipykernel")
    prepare = f"{inspect.getsource(kernel.prepare)}\nprepare(get_ipython(), {str(folder)!r}, {USER!r})\ndel prepare"
    home = {"HOME": str(folder), "IPYTHONDIR": str(folder / "ipython")}
    ran = subprocess.run(
        [sys.executable, "-c", TALK],
        input=json.dumps([prepare if prepared else "", *codes]),
        env={**os.environ, **home},
        stdout=subprocess.PIPE,
        text=True,
        timeout=120,
        check=True,
    )
    (first, *answers) = json.loads(ran.stdout)
    assert "error" not in first
    return answers


def value_of(answer: dict[str, dict[str, object]]) -> object:
    """Return a value as the code interpreter passes it on, which takes a pair of quotes away."""
    (text,) = [data["text/plain"] for data in [answer["execute_result"]["data"]] if isinstance(data, dict)]
    return text[1:-1] if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"" else text


@pytest.mark.sandbox
def test_prepared_kernel_answers_like_the_agent(tmp_path: Path) -> None:
    values = ["abc", 'it\'s "it"', "", "'", [1] * 40, {"b": 1, "a": 2}, b"x"]
    failing = "def f():\n    raise KeyError('k')\nf()"
    *answers, failed, wrong = ask_a_kernel(tmp_path, *map(repr, values), failing, "x y")
    assert [value_of(answer) for answer in answers] == [repr(value) for value in values]
    text = "".join(map(str, failed["error"]["traceback"]))  # type: ignore[call-overload]
    assert text.startswith("Traceback (most recent call last):\n") and text.endswith("\nKeyError: 'k'\n")
    assert "raise KeyError('k')" in text
    assert "".join(map(str, wrong["error"]["traceback"])).endswith("SyntaxError: invalid syntax\n")  # type: ignore[call-overload]


@pytest.mark.sandbox
def test_unprepared_kernel_answers_differently(tmp_path: Path) -> None:
    quoted, long = ask_a_kernel(tmp_path, repr("abc"), repr([1] * 40), prepared=False)
    assert value_of(quoted) == "abc"
    assert "\n" in str(value_of(long))


@pytest.mark.sandbox
@needs_root
def test_prepared_kernel_drops_privileges(tmp_path: Path) -> None:
    code = "import os\nnnp = [line for line in open('/proc/self/status') if line.startswith('NoNewPrivs')]"
    who = "os.getcwd(), os.getresuid(), os.getgroups(), nnp[0].split()[1], 'prepare' in globals()"
    _, answer = ask_a_kernel(tmp_path, code, who)
    uid = pwd.getpwnam(USER).pw_uid
    assert value_of(answer) == repr((str(tmp_path), (uid,) * 3, [], "1", False))


CROWD = """
import os, pathlib, signal, subprocess, time
ours = subprocess.Popen(["sleep", "60"]).pid
if os.fork() == 0:
    os.setgroups([]), os.setresgid(GID, GID, GID), os.setresuid(UID, UID, UID)
    os.setsid()
    for number in (1, 2, 15): signal.signal(number, signal.SIG_IGN)
    for _ in range(3): os.fork()
    while True:  # each makes the next one, and ends
        try:
            if os.fork(): os._exit(0)
        except OSError: pass
def count():
    status = [text for file in pathlib.Path("/proc").glob("[0-9]*/status") if (text := read(file))]
    return sum(f"\\nUid:\\t{UID}\\t" in text and "zombie" not in text for text in status)
def read(file):
    try: return file.read_text()
    except OSError: return ""  # it ended meanwhile
def last_pid(): return pathlib.Path("/proc/loadavg").read_text().split()[-1]
def storm():  # a scan may miss whom it is looking for, as they change their ids; then ids are being given out
    last = last_pid()
    return any(count() or last_pid() != last for _ in range(20) if not time.sleep(0.01))
deadline = time.monotonic() + 20
while not storm() and time.monotonic() < deadline: pass
before = storm()
SWEEP
print(before, storm(), pathlib.Path(f"/proc/{ours}").exists())
"""
"""Runs in a pid namespace of its own, where "every process of a user" is none of the machine's."""


def after_a_crowd(sweep: str) -> str:
    if shutil.which("unshare") is None:
        pytest.skip("needs unshare, of util-linux")
    entry = pwd.getpwnam(USER)
    code = f"UID, GID = {entry.pw_uid}, {entry.pw_gid}\n{CROWD.replace('SWEEP', sweep)}"
    namespace = ["prlimit", "--nproc=100", "unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]
    shell = ["sh", "-c", '"$@"; exit $?', "sh"]  # reaps
    ran = subprocess.run([*namespace, *shell, sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    return ran.stdout.strip() or ran.stderr


@needs_root
def test_sweep_kills_all_processes_of_one_user() -> None:
    assert after_a_crowd(f"{inspect.getsource(kernel.sweep)}\nsweep({USER!r})") == "True False True"


@needs_root
def test_crowd_survives_without_sweep() -> None:
    assert after_a_crowd("pass") == "True True True"
