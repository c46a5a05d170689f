"""python-v0: questions for a line of Python, run in a sandbox.

Task: such as "digit sum of 7**31" or "3rd largest of 8 45 17 90"; the answer is a number or a word. Tools: `python`,
whose variables stay from call to call. Reward: `correct` (weight 1) for the exact answer, `clean` (weight 0.1) for an
answer that was reached without a failed call or an exception.

Splits: `train`, `eval` and `dev` are disjoint by a hash of the question.

The sandbox is named by `env_args`: `sandbox=local` (the default), `docker` or `e2b`; see `agent-rl sandbox doctor`.

The demonstrations know the form of the tool calls, but of two similar expressions they take the right one only half of
the time. What is left to learn is which expression answers which question.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from agent_rl.core.messages import JSON, Message, Task
from agent_rl.envs.quiz import Quiz, draw_task, one_call
from agent_rl.gym.budget import Budget
from agent_rl.gym.env import Script
from agent_rl.gym.registry import register
from agent_rl.gym.sandboxed import SandboxedEnv
from agent_rl.gym.tool import tool
from agent_rl.sandboxes.base import Limits
from agent_rl.tools.python import MAX_OUTPUT, TIMEOUT, described


@dataclass(frozen=True, slots=True)
class Family:
    """One kind of question; `{}` fields are filled with what `draw` returns."""

    question: str
    code: str
    """An expression whose value is the answer."""
    mistake: str
    """One that looks much like it."""
    answer: Callable[..., object]
    """The same on the host, on the drawn values."""
    draw: Callable[[np.random.Generator], Mapping[str, JSON]]


def _power(rng: np.random.Generator) -> Mapping[str, JSON]:
    return {"a": int(rng.integers(3, 100)), "b": int(rng.integers(10, 60)), "m": int(rng.integers(11, 1000))}


def _bound(rng: np.random.Generator) -> Mapping[str, JSON]:
    return {"n": int(rng.integers(20, 1000))}


def _word(rng: np.random.Generator) -> Mapping[str, JSON]:
    return {"word": "".join(rng.choice(list("abcdeilnorst"), int(rng.integers(6, 13))))}


def _numbers(rng: np.random.Generator) -> Mapping[str, JSON]:
    numbers = rng.choice(100, int(rng.integers(5, 9)), replace=False)
    return {"numbers": " ".join(map(str, numbers)), "k": int(rng.integers(2, 5))}


FAMILIES = (
    Family(
        "digit sum of {a}**{b}",
        "sum(map(int, str({a}**{b})))",
        "sum(map(int, str({a}*{b})))",
        lambda a, b, m: sum(map(int, str(a**b))),
        _power,
    ),
    Family("{a}**{b} modulo {m}", "{a}**{b} % {m}", "{a}**{b} // {m}", lambda a, b, m: pow(a, b, m), _power),
    Family(
        "how many primes below {n}",
        "sum(all(i % d for d in range(2, i)) for i in range(2, {n}))",
        "sum(any(i % d for d in range(2, i)) for i in range(2, {n}))",
        lambda n: sum(all(i % d for d in range(2, i)) for i in range(2, n)),
        _bound,
    ),
    Family("ones in binary {n}", 'bin({n}).count("1")', 'str({n}).count("1")', lambda n: n.bit_count(), _bound),
    Family(
        "sort letters of {word}",
        '"".join(sorted("{word}"))',
        '"".join(reversed("{word}"))',
        lambda word: "".join(sorted(word)),
        _word,
    ),
    Family(
        "how many different letters in {word}",
        'len(set("{word}"))',
        'len("{word}")',
        lambda word: len(set(word)),
        _word,
    ),
    Family(
        "number {k} from the top of {numbers}",
        'sorted(map(int, "{numbers}".split()))[-{k}]',
        'sorted(map(int, "{numbers}".split()))[{k}]',
        lambda numbers, k: sorted(map(int, numbers.split()))[-k],
        _numbers,
    ),
)


def make_task(split: str, index: int) -> Task:
    """Draw questions until one belongs to the split."""

    def draw(rng: np.random.Generator) -> Task:
        kind = int(rng.integers(len(FAMILIES)))
        family = FAMILIES[kind]
        values = family.draw(rng)
        question = family.question.format(**values)
        return {"question": question, "kind": kind, "values": values, "answer": str(family.answer(**values))}

    return draw_task(split, index, draw, "question")


@register(
    "python-v0",
    tasks=make_task,
    splits=("train", "eval", "dev"),
    budget=Budget(turns=5, tool_calls=8, seconds=120),
)
class PythonPuzzles(Quiz, SandboxedEnv):
    """Answer a question with a line of Python, which runs in a sandbox."""

    limits = Limits(memory=128 * 1024 * 1024, processes=16, disk=8 * 1024 * 1024, files=256)
    snapshot_attributes = ("failed",)

    async def reset(self, task: Task, rng: np.random.Generator) -> str:
        """Open a sandbox and ask the question."""
        kind, values = task["kind"], task["values"]
        assert isinstance(kind, int) and isinstance(values, Mapping)
        self.family = FAMILIES[kind]
        self.values = values
        self.answer = str(task["answer"])
        await self.open_sandbox()
        return str(task["question"])

    @tool(timeout=None)  # the sandbox has a timeout of its own, that kills
    async def python(self, code: str) -> str:
        """Run Python code and return what it prints, and the value of its last line. Variables are kept between calls.

        Args:
            code: the code to run.
        """
        result = await self.sandbox.run_python(code, timeout=TIMEOUT, max_output=MAX_OUTPUT)
        self.failed = self.failed or result.error is not None or result.timed_out
        return described(result)

    def oracle(self) -> Script:
        """Evaluate the right expression."""
        (result,) = yield one_call("python", code=self.family.code.format(**self.values))
        yield result.content.strip("'")

    def guess(self, rng: np.random.Generator) -> str:
        """Return a number at random."""
        return str(rng.integers(2, 100))

    def misnamed_call(self) -> Message:
        """Return the right call, with another name for the code."""
        return one_call("python", source=self.family.code.format(**self.values))

    def attempt(self, rng: np.random.Generator, *, stops_early: bool) -> Script:
        """Evaluate one of the two expressions."""
        code = self.family.code if rng.random() < 0.5 else self.family.mistake
        (result,) = yield one_call("python", code=code.format(**self.values))
        yield result.content.strip("'")
