"""code-v0: write a function; hidden tests run it in fresh sandboxes, and what it returns is compared outside of them.

Task: such as "write solve(numbers) in solution.py: of the numbers above 7, each times 3, return the sum", with two
examples. Tools: `write_file`, `python` and `run_tests`, which tries the examples. Reward: `correct` (weight 1), for a
solution.py that returns the right value for each of four hidden inputs, all with different values. Nothing else counts:
no file but solution.py leaves the place where the model worked, and neither the hidden inputs nor what is expected are
ever there, so that code which lies about equality, leaves early, prints the answer or searches for tests earns nothing.

Splits: `train`, `eval` and `dev` have different functions, by a hash of the description.

The demonstrations write well-formed functions, but half of them forget which numbers, or words, were asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import numpy as np

from agent_rl.core.episode import Episode
from agent_rl.core.messages import JSON, Task
from agent_rl.envs.quiz import draw_task, one_call
from agent_rl.gym.budget import Budget
from agent_rl.gym.env import Script
from agent_rl.gym.registry import register
from agent_rl.gym.reward import reward
from agent_rl.gym.sandboxed import SandboxedEnv
from agent_rl.gym.tool import tool
from agent_rl.sandboxes.base import Limits
from agent_rl.sandboxes.grading import Call, grade
from agent_rl.tools.files import write_file
from agent_rl.tools.python import python

FILE = "solution.py"
EXAMPLES, HIDDEN = 2, 4
"""How many inputs a task shows, and how many it hides."""
TIMEOUT = 10.0
"""Seconds for one input."""

FAMILIES = {
    "numbers": (
        {
            "above {k}": "x > {k}",
            "below {k}": "x < {k}",
            "divisible by {d}": "x % {d} == 0",
            "not divisible by {d}": "x % {d} != 0",
            "with an absolute value of at least {k}": "abs(x) >= {k}",
        },
        {"times {a}": "x * {a}", "plus {a}": "x + {a}", "squared, minus {a}": "x * x - {a}", "modulo {a}": "x % {a}"},
        {
            "the sum": "sum(found)",
            "the largest, or 0": "max(found, default=0)",
            "the difference of the largest and the smallest, or 0": "max(found, default=0) - min(found, default=0)",
            "a sorted list": "sorted(found)",
            "a list from the last to the first": "found[::-1]",
        },
    ),
    "words": (
        {
            "of more than {d} letters": "len(x) > {d}",
            "of at most {d} letters": "len(x) <= {d}",
            "that do not contain {c}": "'{c}' not in x",
            "that come after {c} in the alphabet": "x > '{c}'",
        },
        {
            "reversed": "x[::-1]",
            "with {c} in front": "'{c}' + x",
            "without its first {s} letters": "x[{s}:]",
            "repeated {s} times": "x * {s}",
        },
        {
            "the number of letters in total": "sum(map(len, found))",
            "a sorted list": "sorted(found)",
            "a text, joined by {j}": "'{j}'.join(found)",
            "the longest, the first one of several, or an empty text": "max(found, key=len, default='')",
        },
    ),
}
"""For each kind of input: which of its items, what is done to each, and what is returned; with the Python of it."""


def make_task(split: str, index: int) -> Task:
    """Draw functions until one belongs to the split and its inputs have different values."""

    def draw(rng: np.random.Generator) -> Task | None:
        kind = list(FAMILIES)[rng.integers(len(FAMILIES))]
        values = {"k": int(rng.integers(1, 30)), "d": int(rng.integers(2, 6)), "a": int(rng.integers(2, 30))}
        fills = {**values, "c": rng.choice(list("eimnors")), "s": int(rng.integers(2, 4)), "j": rng.choice(list("-+/"))}
        parts = [list(options.items())[rng.integers(len(options))] for options in FAMILIES[kind]]
        (which, keep), (change, each), (what, result) = ([part.format(**fills) for part in both] for both in parts)
        code = f"def solve({kind}):\n    found = [{each} for x in {kind} if {keep}]\n    return {result}\n"
        solve = _function(code)
        inputs = [_items(kind, rng) for _ in range(EXAMPLES + HIDDEN)]
        tests: list[list[JSON]] = [[given, solve(given)] for given in inputs]
        if len({repr(value) for _, value in tests}) < len(tests):
            return None
        question = f"write solve({kind}) in {FILE}: of the {kind} {which}, each {change}, return {what}"
        mistake = code.replace(f" if {keep}", "")
        return {
            **{"question": question, "code": code, "mistake": mistake},
            **{"examples": tests[:EXAMPLES], "hidden": tests[EXAMPLES:]},
        }

    return draw_task(split, index, draw, "question")


def _function(code: str) -> Callable[[JSON], JSON]:
    scope: dict[str, Callable[[JSON], JSON]] = {}
    exec(code, cast(dict[str, object], scope))  # made of the texts above
    return scope["solve"]


def _items(kind: str, rng: np.random.Generator) -> list[JSON]:
    n = int(rng.integers(6, 12))
    if kind == "numbers":
        return [int(x) for x in rng.integers(-60, 60, n)]
    return ["".join(rng.choice(list("abdeiklmnorstu"), int(rng.integers(2, 9)))) for _ in range(n)]


@register(
    "code-v0", tasks=make_task, splits=("train", "eval", "dev"), budget=Budget(turns=8, seconds=120, score_seconds=600)
)
class Code(SandboxedEnv):
    """Write a function for hidden tests."""

    extra_tools = (write_file, python)
    limits = Limits(memory=128 * 1024 * 1024, processes=16, disk=8 * 1024 * 1024, files=256)
    snapshot_attributes = ()

    async def reset(self, task: Task, rng: np.random.Generator) -> str:
        """Open a sandbox, and describe the function."""
        self.code, self.mistake = str(task["code"]), str(task["mistake"])
        self.examples, self.hidden = (_calls(task[name]) for name in ("examples", "hidden"))
        await self.open_sandbox()
        examples = "\n".join(f"solve({call.args[0]!r}) == {call.expected!r}" for call in self.examples)
        return f"{task['question']}\n{examples}"

    @tool(timeout=None)  # each test has one of its own
    async def run_tests(self) -> str:
        """Try solution.py on the examples."""
        verdict = await grade(self.sandbox, [FILE], self.examples, self._backend, timeout=TIMEOUT, limits=self.limits)
        return "\n".join(f"example {n}: {reason or 'passed'}" for n, reason in enumerate(verdict.reasons, 1))

    @reward
    async def correct(self, episode: Episode) -> bool:
        """Whether solution.py passes every hidden test."""
        verdict = await grade(self.sandbox, [FILE], self.hidden, self._backend, timeout=TIMEOUT, limits=self.limits)
        return all(verdict.passed)

    def oracle(self) -> Script:
        """Write the function."""
        yield one_call("write_file", path=FILE, text=self.code)
        yield "done"

    def demonstrate(self, rng: np.random.Generator) -> Script:
        """Write the function, or one that takes all items; forget the file's name now and then."""
        if rng.random() < 0.1:
            yield one_call("write_file", text=self.code)
        yield one_call("write_file", path=FILE, text=self.code if rng.random() < 0.5 else self.mistake)
        yield "done"


def _calls(tests: JSON) -> Sequence[Call]:
    pairs = cast(Sequence[tuple[JSON, JSON]], tests)
    return [Call("solution:solve", [given], expected) for given, expected in pairs]
