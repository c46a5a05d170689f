"""A shell in a sandbox: commands that a model wrote. Files stay from call to call; variables of the shell don't."""

from __future__ import annotations

from agent_rl.gym.sandboxed import HasSandbox
from agent_rl.gym.tool import tool
from agent_rl.sandboxes.calls import ExecResult
from agent_rl.tools.python import MAX_OUTPUT, TIMEOUT, paragraphs


@tool(timeout=None)  # the sandbox has a timeout of its own, that kills
async def shell(self: HasSandbox, command: str) -> str:
    """Run a shell command in the working folder and return what it prints. Nothing continues in the background.

    Args:
        command: for `sh -c`.
    """
    return described(await self.sandbox.exec(["sh", "-c", command], timeout=TIMEOUT, max_output=MAX_OUTPUT))


def described(result: ExecResult) -> str:
    """Return a result as a model reads it: the output, and how the command ended if not well."""
    parts = [result.stdout, result.stderr]
    if result.timed_out:
        parts.append("timeout: the command took too long and was killed")
    elif result.returncode:
        parts.append(f"exit status {result.returncode}")
    return paragraphs(parts)
