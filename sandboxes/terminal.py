"""A shell in a sandbox as a terminal has it: its folder and variables stay, and commands go on in the background.

    terminal = Terminal(sandbox)
    await terminal.run("cd src && export MODE=fast")
    job = await terminal.start("make check")
    print((await terminal.run("pwd; echo $MODE")).stdout, await terminal.log(job, wait=60))

Each command has a shell of its own, which begins where the last one ended: the folder and the exported variables are a
file in the sandbox, so that they are in its snapshots. What else a shell knows (options, functions) ends with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from agent_rl.sandboxes.base import Sandbox
from agent_rl.sandboxes.calls import ExecResult
from agent_rl.sandboxes.process import MAX_LOG, Process

MAX_JOBS = 16
"""Jobs that are remembered, running or ended: half of the processes that a sandbox can have."""
SECONDS, MAX_OUTPUT = 60.0, 8192

_SHELL = 'exec "$(command -v bash || command -v sh)" -c "$@"'
_BEGIN = """exec 2>&1
_state="${TMPDIR:-/tmp}/.terminal" _here="$PWD" _there="$PWD"
if [ -f "$_state" ]; then
    . "$_state"
    [ "$_there" = "$_here" ] || eval "$(sed "s|${_there%/work}|${_here%/work}|g" "$_state")"
    cd -- "$PWD" || cd -- "$_here"
else
    eval "$2"
fi
"""
"""`_there` differs where a snapshot came from a Landlock sandbox, whose folders have names of their own."""
_SAVE = """trap '{ echo "_there=$_here"; export PWD; export -p; } >"$_state.new" && mv -- "$_state.new" "$_state"' EXIT
"""
"""By a rename, as a full disk would leave half a file."""
_FOREGROUND = _BEGIN + _SAVE + 'eval "$1"\n'
_BACKGROUND = _BEGIN + 'exec </dev/null\neval "$1"\n'


@dataclass(frozen=True, slots=True)
class TerminalJob:
    """A command in the background."""

    number: int
    command: str
    process: Process


@dataclass(frozen=True, slots=True)
class JobState:
    """How a job does."""

    job: TerminalJob
    returncode: int | None
    """As `ExecResult.returncode`; None while it runs."""
    output: str = ""
    """The last of what it printed."""
    truncated: bool = False
    """Whether it had printed more before."""


class Terminal:
    """A sandbox's terminal.

    Args:
        sandbox: where the commands run.
        setup: for the shell, before the first command; such as `cd /app`.
        env: variables of all commands; what a command exports comes before them.
        seconds: that a command, or a wait for a job, may take.
        max_output: bytes kept of what a command prints, half of the head, half of the tail; of a job's log the last.
    """

    def __init__(
        self,
        sandbox: Sandbox,
        *,
        setup: str = "",
        env: Mapping[str, str] | None = None,
        seconds: float = SECONDS,
        max_output: int = MAX_OUTPUT,
    ) -> None:
        self.sandbox, self.setup, self.env = sandbox, setup, dict(env or {})
        self.seconds, self.max_output = seconds, max_output
        self._jobs: dict[int, TerminalJob] = {}
        self._started = 0

    async def run(self, command: str) -> ExecResult:
        """Run a command to its end, by bash or sh; stdout and stderr are both in `stdout`, in their order.

        One that takes too long is killed, and the folder and variables stay what they were before it.
        """
        return await self.sandbox.exec(
            self._argv(_FOREGROUND, command), env=self.env, timeout=self.seconds, max_output=self.max_output
        )

    async def start(self, command: str) -> TerminalJob:
        """Start a command that goes on in the background, until it ends, is stopped, or the sandbox is closed.

        Raises:
            ProcessError: if the sandbox can't have another process.
            ValueError: if too many jobs run.
        """
        if len(self._jobs) >= MAX_JOBS:
            await self._forget_one()
        process = await self.sandbox.start(self._argv(_BACKGROUND, command), env=self.env)
        self._started += 1
        job = self._jobs[self._started] = TerminalJob(self._started, command, process)
        return job

    async def states(self) -> list[JobState]:
        """Return how all jobs do, without what they printed, in the order in which they were started."""
        return [JobState(job, await job.process.poll()) for job in tuple(self._jobs.values())]

    async def log(self, number: int, *, wait: float = 0.0) -> JobState:
        """Return how a job does and the last of what it printed; wait for its end, at most so many seconds.

        Raises:
            ValueError: if there is no such job.
        """
        job = self._job(number)
        ended = await job.process.wait(timeout=min(max(wait, 0.0), self.seconds))
        logs = await job.process.logs(min(self.max_output, MAX_LOG))
        return JobState(job, ended, logs.stdout, logs.truncated)

    async def stop(self, number: int) -> JobState:
        """Kill a job and all that it has started; return how it had ended.

        Raises:
            ValueError: if there is no such job.
        """
        await self._job(number).process.kill()
        return await self.log(number, wait=self.seconds)

    async def close(self) -> None:
        """Kill all jobs, and forget them."""
        for number in tuple(self._jobs):
            await self._jobs.pop(number).process.close()

    def _job(self, number: int) -> TerminalJob:
        if number not in self._jobs:
            raise ValueError(f"there is no job {number}; jobs: {', '.join(map(str, self._jobs)) or 'none'}")
        return self._jobs[number]

    async def _forget_one(self) -> None:
        """Forget the oldest job that has ended."""
        for state in await self.states():
            if state.returncode is not None:
                await self._jobs.pop(state.job.number).process.close()
                return
        raise ValueError(f"{MAX_JOBS} jobs run; stop one first")

    def _argv(self, script: str, command: str) -> list[str]:
        return ["sh", "-c", _SHELL, "sh", script, "terminal", command, self.setup]
