"""Python in a sandbox: the model's code, with variables kept from call to call."""

from __future__ import annotations

from collections.abc import Iterable

from agent_rl.core.images import Image
from agent_rl.gym.sandboxed import HasSandbox
from agent_rl.gym.tool import tool
from agent_rl.sandboxes.calls import PythonResult

TIMEOUT = 10.0
"""Seconds that a call's code, or a shell's command, may run."""
MAX_OUTPUT = 8192
"""Bytes that the model gets to read of each of stdout and stderr: head and tail."""


@tool(timeout=None)  # the sandbox has a timeout of its own, that kills
async def python(self: HasSandbox, code: str) -> str:
    """Run Python code and return what it prints, and the value of its last line. Variables are kept between calls.

    Args:
        code: the code to run.
    """
    return described(await self.sandbox.run_python(code, timeout=TIMEOUT, max_output=MAX_OUTPUT))


@tool(name="python", timeout=None)
async def python_with_plots(self: HasSandbox, code: str) -> str | list[str | Image]:
    """Run Python code and return what it prints, the value of its last line, and open figures of matplotlib as images.

    Variables are kept between calls.

    Args:
        code: the code to run.
    """
    result = await self.sandbox.run_python(code, timeout=TIMEOUT, max_output=MAX_OUTPUT)
    return [described(result), *map(Image, result.plots)] if result.plots else described(result)


def described(result: PythonResult) -> str:
    """Return a result as a model reads it: as an interactive interpreter would show it."""
    parts = [result.stdout, result.stderr, result.value or "", result.error or ""]
    sizes = [Image(plot).size for plot in result.plots]
    parts += [f"[plot {n}: {width}x{height} png]" for n, (width, height) in enumerate(sizes, 1)]
    if result.timed_out:
        parts.append("timeout: the code took too long and was stopped")
    if result.state_lost and not result.sandbox_lost:
        parts.append("the interpreter was restarted: its variables are gone")
    return paragraphs(parts)


def paragraphs(parts: Iterable[str]) -> str:
    """Return the parts that say something, each on lines of its own."""
    return "\n".join(part.rstrip("\n") for part in parts if part.strip("\n"))
