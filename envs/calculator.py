"""calculator-v0: arithmetic in several steps, with a calculator that does one operation per call.

Task: an expression such as `4+3*6`, of numbers that differ; the answer is a whole number. Tools: `calculator`. Reward:
`correct` (weight 1) for the exact answer, `clean` (weight 0.1) for an answer that was reached without a failed call.

Splits: `train`, `eval` and `dev` hold expressions with two operations (one in five has one) and are disjoint by a hash
of the expression; `train-hard` and `eval-hard` hold three operations.

The demonstrations know the form of the tool calls but not the precedence of operators: they choose the first operation
at random, slightly more often the wrong one. What is left to learn is which one is right.
"""

from __future__ import annotations

import re
from typing import Literal, TypeAlias, cast

import numpy as np
from pydantic import TypeAdapter

from agent_rl.core.messages import Message, Step, Task, ToolCall
from agent_rl.envs.quiz import Quiz, draw_task, one_call
from agent_rl.gym.budget import Budget
from agent_rl.gym.env import Script
from agent_rl.gym.registry import register
from agent_rl.tools.calculator import calculator

FORMS = {
    "1": ("a+b", "a*b", "c-a"),
    "2": ("a*b+c", "a*b-c", "c-a+b", "c+a*b", "c-a*b", "b+c*a"),
    "3": ("a*b+c*d", "c+a*b-d", "c-a+b*d", "a*b-c+d"),
}
"""Forms of expressions by difficulty level; half of the level-2 forms begin at the left, half at the right."""

_SHARES = {"train": ("2", "2", "2", "2", "1"), "train-hard": ("3",)}
Operator: TypeAlias = Literal["+", "-", "*"]
Operation: TypeAlias = tuple[Operator, int, int]
_TERM = re.compile(r"\d+|[-+*]")
_NUMBER = TypeAdapter(int)


def make_task(split: str, index: int) -> Task:
    """Draw expressions until one belongs to the split."""
    levels = _SHARES["train-hard" if split.endswith("-hard") else "train"]

    def draw(rng: np.random.Generator) -> Task | None:
        level = levels[rng.integers(len(levels))]
        form = FORMS[level][rng.integers(len(FORMS[level]))]
        numbers = {name: int(rng.integers(2, 19 if name == "c" else 10)) for name in "abcd"}
        expression = "".join(str(numbers.get(c, c)) for c in form)
        if len(set(numbers.values())) < len(numbers):
            return None
        return {"expression": expression, "answer": solve(expression)[-1][1]}

    return draw_task(split, index, draw, "expression")


def _first(terms: list[str]) -> int:
    """Return the position of the operator that precedence puts first."""
    return terms.index("*") if "*" in terms else 1


def solve(expression: str) -> list[tuple[Operation, int]]:
    """Return the operations that lead to the value, in order of precedence, each with its result."""
    terms, steps = _TERM.findall(expression), []
    while len(terms) > 1:
        at = _first(terms)
        operation = _operation(terms, at)
        value = calculator(*operation)
        steps.append((operation, value))
        terms[at - 1 : at + 2] = [str(value)]
    return steps


def _operation(terms: list[str], at: int) -> Operation:
    return cast(Operator, terms[at]), int(terms[at - 1]), int(terms[at + 1])


@register(
    "calculator-v0",
    tasks=make_task,
    splits=("train", "eval", "dev", "train-hard", "eval-hard"),
    budget=Budget(turns=6, tool_calls=8),
)
class Calculator(Quiz):
    """Compute an expression with a calculator that knows one operation at a time."""

    extra_tools = (calculator,)
    snapshot_attributes = ("known", "failed")

    def reset(self, task: Task, rng: np.random.Generator) -> str:
        """Ask for the value of the expression."""
        self.expression, self.answer = str(task["expression"]), str(task["answer"])
        self.known: set[str] = set()
        return f"compute {self.expression}"

    async def step(self, action: Message) -> Step:
        """Make the calls, and record what they returned."""
        step = await super().step(action)
        for call, result in zip(action.tool_calls, step.observation, strict=True):
            if result.tool_error is None:
                self.known.add(_fact(call, result.content))
        return step

    def state_hash(self) -> str:
        """Return the known values."""
        return self.state_of(self.known)

    def oracle(self) -> Script:
        """Multiply first, then go from left to right."""
        for operation, _ in solve(self.expression):
            yield _call(operation)
        yield self.answer

    def guess(self, rng: np.random.Generator) -> str:
        """Return a number at random."""
        return str(rng.integers(4, 100))

    def misnamed_call(self) -> Message:
        """Return the first operation, with another name for the operator."""
        return _call(_operation(_TERM.findall(self.expression), 1), name="op")

    def attempt(self, rng: np.random.Generator, *, stops_early: bool) -> Script:
        """Compute, slightly more often than not in a wrong order."""
        terms = _TERM.findall(self.expression)
        value = ""
        while len(terms) > 1:
            at = _first(terms)
            others = [i for i in range(1, len(terms), 2) if i != at]
            if others and rng.random() < 0.55:
                at = int(rng.choice(others))
            (result,) = yield _call(_operation(terms, at))
            value = result.content
            terms[at - 1 : at + 2] = [value]
            if stops_early:
                break
        yield value


def _fact(call: ToolCall, result: str) -> str:
    """Return a result as text; 3*6 and 6*3 are the same."""
    sign, *numbers = (call.arguments[name] for name in ("operator", "left", "right"))
    left, right = map(_NUMBER.validate_python, numbers)  # as the tool read them: "3" and 3.0 are 3
    a, b = (left, right) if sign == "-" else sorted((left, right))
    return f"{a}{sign}{b}={result}"


def _call(operation: Operation, name: str = "operator") -> Message:
    operator, left, right = operation
    return one_call("calculator", **{name: operator}, left=left, right=right)
