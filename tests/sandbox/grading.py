"""What the tests of grading share: solutions that a model left in a sandbox, and their verdicts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from agent_rl.sandboxes.base import Sandboxes
from agent_rl.sandboxes.grading import Call, Program, Verdict, grade

Graded = Callable[..., Verdict]
ADD = (Call("solution:add", [2, 3], 5), Call("solution:add", ["a", "b"], "ab"))
RIGHT = "def add(a, b):\n    print('adding')\n    return a + b\n"


def grading_in(sandboxes: Sandboxes, runner: asyncio.Runner) -> Graded:
    """Return what grades a solution.py that a model left, after it ran `before`."""

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
