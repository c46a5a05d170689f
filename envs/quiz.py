"""Quiz: the common part of the built-in environments, questions with one exact answer.

A task belongs to the split that a hash of its text names.
"""

from __future__ import annotations

import base64
import functools
import hashlib
from collections.abc import Callable, Iterable

import numpy as np

from agent_rl.core.episode import Episode
from agent_rl.core.messages import JSON, Message, Step, Task, ToolCall
from agent_rl.gym.env import Script, ToolEnv
from agent_rl.gym.reward import reward
from agent_rl.seeds import Stream, rng

PIECE = 48 * 1024
"""Bytes of a file that one command writes; a program takes 128 KiB as an argument."""


class Quiz(ToolEnv):
    """A question with one exact answer, which `reset` sets; demonstrations fail in three ways."""

    answer: str
    failed = False
    """Whether a call has failed."""

    async def step(self, action: Message) -> Step:
        """Make the calls, and record whether one failed."""
        step = await super().step(action)
        self.failed = self.failed or any(message.tool_error for message in step.observation)
        return step

    @reward(inline=True)
    def correct(self, episode: Episode) -> bool:
        """Whether the final answer is the right one."""
        return episode.final_text.strip() == self.answer

    @reward(weight=0.1, inline=True)
    def clean(self, episode: Episode) -> bool:
        """Whether there is an answer, and no call failed on the way to it."""
        return bool(episode.final_text) and not self.failed

    def demonstrate(self, rng: np.random.Generator) -> Script:
        """Guess, misname an argument or stop early now and then; else attempt the question."""
        mood = rng.random()
        if mood >= 0.26:
            yield from self.attempt(rng, stops_early=mood < 0.36)
            return
        if mood >= 0.20:
            yield self.misnamed_call()
        yield self.guess(rng)

    def state_of(self, found: Iterable[str]) -> str:
        """Return what was found out, and "failed" after a failed call, as that costs `clean`."""
        return "; ".join([*sorted(found), *(["failed"] if self.failed else [])])

    def guess(self, rng: np.random.Generator) -> str:
        """Return an answer at random."""
        raise NotImplementedError(f"{type(self).__name__} has to define guess(self, rng)")

    def misnamed_call(self) -> Message:
        """Return a call whose argument has a wrong name."""
        raise NotImplementedError(f"{type(self).__name__} has to define misnamed_call(self)")

    def attempt(self, rng: np.random.Generator, *, stops_early: bool) -> Script:
        """Play with the right form, but with mistakes."""
        raise NotImplementedError(f"{type(self).__name__} has to define attempt(self, rng, *, stops_early)")


def one_call(tool: str, **arguments: JSON) -> Message:
    """Return a message with one tool call."""
    return Message("assistant", tool_calls=(ToolCall("call_0", tool, arguments),))


def write_calls(name: str, data: bytes) -> Script:
    """Yield calls of a tool `shell` that write a file, in pieces that one command takes; the shell reads the name."""
    for start in range(0, max(1, len(data)), PIECE):
        packed = base64.b64encode(data[start : start + PIECE]).decode()
        write = f"base64 -d <<'END' {'>>' if start else '>'}{name}\n{packed}\nEND"
        yield one_call("shell", command=f'mkdir -p "$(dirname {name})" && {write}')


@functools.cache
def part_of(text: str) -> str:
    """Return the part of the data that a task's text belongs to: eight in ten to train, one each to dev and eval."""
    digest = hashlib.blake2b(text.encode(), digest_size=2).digest()
    return {0: "eval", 1: "dev"}.get(int.from_bytes(digest, "big") % 10, "train")


def task_rng(split: str, index: int) -> np.random.Generator:
    """Return the generator of a task. `eval` was once called `test` and keeps its tasks."""
    return rng(Stream.TASKS, *split.replace("eval", "test").encode(), index)


def draw_task(split: str, index: int, draw: Callable[[np.random.Generator], Task | None], text: str) -> Task:
    """Draw tasks until one belongs to a split; the same for the same split and index.

    Args:
        split: "train", "dev" or "eval"; behind a hyphen there may be a kind of tasks, as in "eval-hard".
        index: of the task in its split.
        draw: returns a task, or None to draw again.
        text: the key of the task's text, which decides on the part.
    """
    generator = task_rng(split, index)
    part = split.partition("-")[0]
    while True:
        task = draw(generator)
        if task is not None and part_of(str(task[text])) == part:
            return task
