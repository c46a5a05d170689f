"""A terminal in a sandbox: a shell whose folder and variables stay, and commands that go on in the background."""

from __future__ import annotations

from typing import Protocol

from agent_rl.gym.tool import tool
from agent_rl.sandboxes.terminal import JobState, Terminal
from agent_rl.tools.python import paragraphs
from agent_rl.tools.shell import described


class HasTerminal(Protocol):
    """An environment with a terminal, as every `SandboxedEnv` has: `self` of these tools."""

    @property
    def terminal(self) -> Terminal:
        """Of the episode's sandbox."""
        ...


@tool(timeout=None)  # the sandbox has a timeout of its own, that kills
async def shell(self: HasTerminal, command: str, background: bool = False) -> str:
    """Run a shell command and return what it prints. Folder (cd), exported variables and files stay from call to call.

    Args:
        command: for bash, or sh where there is no bash.
        background: whether to return at once, with the number of a job that goes on: for servers and whatever takes
            long. What is started with & instead ends with the call.
    """
    if background:
        return f"job {(await self.terminal.start(command)).number} started"
    result = await self.terminal.run(command)
    said = described(result)
    return f"{said}; give background=true for what takes long" if result.timed_out else said


@tool(timeout=None)
async def jobs(self: HasTerminal) -> str:
    """List the background jobs."""
    return "\n".join(f"{_ending(state)}: {state.job.command}" for state in await self.terminal.states()) or "no jobs"


@tool(timeout=None)
async def job_log(self: HasTerminal, job: int, wait: float = 0) -> str:
    """Return the last of what a background job has printed, and whether it still runs.

    Args:
        job: its number.
        wait: seconds to wait for its end before.
    """
    return _described(await self.terminal.log(job, wait=wait))


@tool(timeout=None)
async def stop_job(self: HasTerminal, job: int) -> str:
    """Stop a background job and all that it has started; return the last of what it printed.

    Args:
        job: its number.
    """
    return _described(await self.terminal.stop(job))


terminal = (shell, jobs, job_log, stop_job)
"""All four, for an environment's `extra_tools`."""


def _described(state: JobState) -> str:
    return paragraphs(["[earlier output left out]" if state.truncated else "", state.output, _ending(state)])


def _ending(state: JobState) -> str:
    how = "runs" if state.returncode is None else f"ended, exit status {state.returncode}"
    return f"job {state.job.number} {how}"
