"""calculator-v0: arithmetic in several steps, with a calculator that does one operation per call.

Task: an expression such as `4+3*6`, of numbers that differ; the answer is a whole number. Tools: `calculator`. Reward:
`correct` (weight 1) for the exact answer, `clean` (weight 0.1) for an answer that was reached without a failed call.

Splits: `train`, `eval` and `dev` hold expressions with two operations (one in five has one) and are disjoint by a hash
of the expression; `train-hard` and `eval-hard` hold three operations, and `train-brackets`, `eval-brackets` and
`dev-brackets` three operations with brackets.

The demonstrations know the form of the tool calls but neither precedence nor brackets: they choose the next operation
at random, slightly more often a wrong one. What is left to learn is which one is right.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
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
    "()": ("(a+b)*d-c", "(c-a)*b+d", "(b-a+c)*d", "c-(a+b)*d", "a*(c-b)+d", "(c+a*b)*d", "c-(a+b*d)", "d-(c-a*b)"),
}
"""Forms of expressions by difficulty level; half of the level-2 forms begin at the left, half at the right. Those with
brackets begin at the first, second or third operation."""

_LEVELS = {"": ("2", "2", "2", "2", "1"), "hard": ("3",), "brackets": ("()",)}
"""Of the kinds of tasks that a split's name has behind a hyphen."""
Operator: TypeAlias = Literal["+", "-", "*"]
Operation: TypeAlias = tuple[Operator, int, int]
_TERM = re.compile(r"\d+|[-+*()]")
_NUMBER = TypeAdapter(int)


def make_task(split: str, index: int) -> Task:
    """Draw expressions until one belongs to the split."""
    levels = _LEVELS[split.partition("-")[2]]

    def draw(rng: np.random.Generator) -> Task | None:
        level = levels[rng.integers(len(levels))]
        form = FORMS[level][rng.integers(len(FORMS[level]))]
        numbers = {name: int(rng.integers(2, 19 if name == "c" else 10)) for name in "abcd"}
        expression = "".join(str(numbers.get(c, c)) for c in form)
        if len(set(numbers.values())) < len(numbers):
            return None
        return {"expression": expression, "answer": solve(expression)[-1][1]}

    return draw_task(split, index, draw, "expression")


@dataclass(slots=True)
class _Terms:
    """An expression without its brackets: numbers, operators between them, and how deep in brackets each term was."""

    terms: list[str]
    depths: list[int]

    @classmethod
    def of(cls, expression: str) -> _Terms:
        """Read an expression."""
        found, depth = cls([], []), 0
        for term in _TERM.findall(expression):
            if term in "()":
                depth += 1 if term == "(" else -1
            else:
                found.terms.append(term)
                found.depths.append(depth)
        return found

    @property
    def operators(self) -> range:
        """The positions of the operators that are left."""
        return range(1, len(self.terms), 2)

    def first(self) -> int:
        """Return the position of the operator that brackets, precedence and the order put first."""
        return max(self.operators, key=lambda at: (self.depths[at], self.terms[at] == "*", -at))

    def operation(self, at: int) -> Operation:
        """Return an operator with the numbers beside it."""
        return cast(Operator, self.terms[at]), int(self.terms[at - 1]), int(self.terms[at + 1])

    def reduce(self, at: int, value: str) -> None:
        """Put a value in an operation's place."""
        self.terms[at - 1 : at + 2] = [value]
        self.depths[at - 1 : at + 2] = [self.depths[at]]


def solve(expression: str) -> list[tuple[Operation, int]]:
    """Return the operations that lead to the value, in order of precedence, each with its result."""
    terms, steps = _Terms.of(expression), []
    while terms.operators:
        operation = terms.operation(at := terms.first())
        steps.append((operation, calculator(*operation)))
        terms.reduce(at, str(steps[-1][1]))
    return steps


@register(
    "calculator-v0",
    tasks=make_task,
    splits=("train", "eval", "dev", "train-hard", "eval-hard", "train-brackets", "eval-brackets", "dev-brackets"),
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
        """Begin in the innermost brackets, multiply first, then go from left to right."""
        for operation, _ in solve(self.expression):
            yield _call(operation)
        yield self.answer

    def guess(self, rng: np.random.Generator) -> str:
        """Return a number at random."""
        return str(rng.integers(4, 100))

    def misnamed_call(self) -> Message:
        """Return the first operation, with another name for the operator."""
        return _call(_Terms.of(self.expression).operation(1), name="op")

    def attempt(self, rng: np.random.Generator, *, stops_early: bool) -> Script:
        """Compute, slightly more often than not in a wrong order."""
        terms, value = _Terms.of(self.expression), ""
        while terms.operators:
            at = terms.first()
            others = [i for i in terms.operators if i != at]
            if others and rng.random() < 0.55:
                at = int(rng.choice(others))
            (result,) = yield _call(terms.operation(at))
            value = result.content
            terms.reduce(at, value)
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
