"""The contract of every backend: a terminal, whose folder and variables stay, and jobs in its background."""

from __future__ import annotations

import signal
from typing import Any

import numpy as np
import pytest

from agent_rl.core.messages import Message, Task, ToolCall
from agent_rl.errors import ConfigError
from agent_rl.gym.sandboxed import SandboxedEnv
from agent_rl.sandboxes import terminal as terminal_module
from agent_rl.sandboxes.base import Sandbox
from agent_rl.sandboxes.terminal import Terminal
from agent_rl.testing import FakeSandboxes
from agent_rl.tools.terminal import terminal
from tests.sandbox.backends import Backend

BEAT = "while :; do echo . >>beat; sleep 0.01; done"


class Desk(SandboxedEnv):
    """The tools of a terminal on a sandbox that is open."""

    extra_tools = terminal

    def __init__(self, box: Sandbox) -> None:
        super().__init__()
        self._opened = box

    async def reset(self, task: Task, rng: np.random.Generator) -> str:
        return "go"

    async def says(self, name: str, **arguments: Any) -> str:
        calls = (ToolCall("c", name, arguments),)
        return (await self.step(Message("assistant", tool_calls=calls))).observation[0].content


@pytest.fixture
def desk(box: Sandbox) -> Desk:
    desk = Desk(box)
    desk.terminal.seconds = 120.0
    return desk


# What stays


def test_terminal_keeps_folder_and_exported_variables(desk: Desk, run):
    async def main() -> None:
        assert await desk.says("shell", command="mkdir -p 'a b'; cd 'a b'; export KEY=\"it's\n two\"; here=1") == ""
        assert await desk.says("shell", command='basename "$PWD"; echo "$KEY $here."') == "a b\nit's\n two ."
        assert await desk.says("shell", command="cd ..; unset KEY; exit 3") == "exit status 3"
        assert (await desk.says("shell", command='echo "${KEY-none}"; ls')).split("\n") == ["none", "a b"]
        assert "exit status" in await desk.says("shell", command="if then")
        assert await desk.says("shell", command="echo out; echo err >&2; echo out") == "out\nerr\nout"

    run(main())


def test_terminal_survives_a_lost_folder_and_timeouts(desk: Desk, run):
    async def main() -> None:
        await desk.says("shell", command="mkdir gone; cd gone; export KEY=1; rmdir ../gone")
        said = await desk.says("shell", command="ls -d ../*/ | wc -l; echo $KEY")
        assert said.split("\n")[-1] == "1" and "gone" in said
        assert "gone" not in await desk.says("shell", command="echo on")
        desk.terminal.seconds = 0.5
        late = await desk.says("shell", command="export KEY=2; sleep 60")
        desk.terminal.seconds = 120.0
        assert "timeout: the command took too long" in late and "background=true" in late
        assert await desk.says("shell", command="echo $KEY") == "1"

    run(main())


def test_terminal_setup_is_of_its_first_command_only(box: Sandbox, run):
    async def main() -> None:
        made = Terminal(box, setup="mkdir -p app; cd app; export MODE=slow", env={"LEVEL": "3"})
        assert (await made.run("export MODE=fast; basename $PWD; cd ..")).stdout == "app\n"
        assert (await made.run("echo $MODE $LEVEL; ls")).stdout == "fast 3\napp\n"

    run(main())


# Jobs


def test_job_outlives_turns_and_is_stopped(desk: Desk, run):
    async def main() -> None:
        await desk.says("shell", command="mkdir job; cd job; export WORD=tick")
        assert await desk.says("shell", command=f"echo $WORD; echo bad >&2; {BEAT}", background=True) == "job 1 started"
        await desk.says("shell", command="until test -s beat; do sleep 0.01; done; cd ..")
        before = len(await desk.sandbox.read_file("job/beat"))
        await desk.says("shell", command="sleep 0.2")
        assert len(await desk.sandbox.read_file("job/beat")) > before
        assert await desk.says("job_log", job=1) == "tick\nbad\njob 1 runs"
        assert (await desk.says("jobs")).startswith("job 1 runs: echo $WORD")
        assert await desk.says("stop_job", job=1) == f"tick\nbad\njob 1 ended, exit status {-signal.SIGKILL}"
        before = len(await desk.sandbox.read_file("job/beat"))
        await desk.says("shell", command="sleep 0.1")
        assert len(await desk.sandbox.read_file("job/beat")) == before
        assert "ended, exit status -9: echo" in await desk.says("jobs")

    run(main())


def test_job_is_waited_for_and_its_folder_is_its_own(desk: Desk, run):
    async def main() -> None:
        command = "sleep 0.3; cat; export KEY=job; cd /; echo done; exit 4"  # cat: its input is empty
        await desk.says("shell", command=command, background=True)
        assert await desk.says("job_log", job=1, wait=60) == "done\njob 1 ended, exit status 4"
        assert await desk.says("shell", command='echo "${KEY-none}"; test "$PWD" = / && echo moved') == (
            "none\nexit status 1"
        )
        await desk.says("shell", command="head -c 90000 /dev/zero | tr '\\0' x; echo; echo last", background=True)
        log = await desk.says("job_log", job=2, wait=60)
        assert log.startswith("[earlier output left out]\nxxx") and log.endswith("x\nlast\njob 2 ended, exit status 0")
        assert 8000 < len(log) < 9000

    run(main())


@pytest.mark.sandbox
def test_job_serves_later_commands(desk: Desk, backend: Backend, run):
    async def main() -> None:
        server = "python3 -m http.server 8000 --bind 127.0.0.1"
        await desk.says("shell", command=f"echo hello >index.html; exec {server}", background=True)
        ask = "import urllib.request as r; print(r.urlopen('http://127.0.0.1:8000/').read().decode())"
        assert await desk.says("shell", command=f'until python3 -c "{ask}" 2>/dev/null; do sleep 0.1; done') == "hello"
        assert "GET / HTTP" in await desk.says("stop_job", job=1)

    async def refused() -> None:
        await desk.says("shell", command="python3 -m http.server 8000 --bind 127.0.0.1", background=True)
        log = await desk.says("job_log", job=1, wait=60)
        assert "OSError" in log and "ended, exit status 1" in log

    run(main() if backend.has_sockets else refused())


def test_job_tools_explain_what_is_wrong(desk: Desk, run, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(terminal_module, "MAX_JOBS", 2)

    async def main() -> None:
        assert await desk.says("jobs") == "no jobs"
        assert "there is no job 1; jobs: none" in await desk.says("job_log", job=1)
        for command in ("true", "sleep 60"):
            await desk.says("shell", command=command, background=True)
        await desk.says("job_log", job=1, wait=60)
        assert await desk.says("shell", command="sleep 60", background=True) == "job 3 started"
        assert "2 jobs run; stop one" in await desk.says("shell", command="true", background=True)
        assert "there is no job 1; jobs: 2, 3" in await desk.says("stop_job", job=1)
        await desk.terminal.close()
        assert await desk.says("jobs") == "no jobs"

    run(main())


def test_terminal_snapshot_has_variables_but_no_jobs(sandboxes, box: Sandbox, backend: Backend, run):
    async def main() -> None:
        made = Terminal(box)
        await made.run("mkdir sub; cd sub; export KEY=kept")
        other, missing = await box.fork(sandboxes)
        assert missing is None
        assert (await Terminal(other).run("basename $PWD; echo $KEY")).stdout == "sub\nkept\n"
        await other.close()
        await made.start("sleep 60")
        other, missing = await box.fork(sandboxes)
        await other.close()
        assert "a process was started" in str(missing)

    if backend.name.startswith("e2b"):
        with pytest.raises(NotImplementedError, match="no snapshots"):
            run(main())
    else:
        run(main())


def test_terminal_is_refused_without_processes(run):
    box = run(FakeSandboxes().open())
    with pytest.raises(ConfigError, match="FakeSandbox has no processes"):
        run(Terminal(box).start("true"))
    with pytest.raises(RuntimeError, match="no sandbox open"):
        print(Desk(None).terminal)  # type: ignore[arg-type]
