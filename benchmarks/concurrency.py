"""Many episodes at once on one event loop, of tools that only wait: `python benchmarks/concurrency.py`.

Each episode calls a tool several times, which sleeps 50 to 300 ms, and each reply of the policy takes a time, as a
model's does: its mean is `--think`, from half to one and a half of it. The ideal is what a machine of infinite speed
would need: the waits of the episodes that follow each other in one place. Printed are the throughput beside it, the CPU
time of a turn beside that of the same sleeps in bare asyncio tasks, and the memory of an episode that is under way.
The clock is that of a core of one's own: on a busy machine it stops, for the sleeps too, while others have the cores.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import heapq
import os
import resource
import selectors
import time
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import TypeAlias

import numpy as np

from agent_rl import Budget, FinishReason, Message, ToolCall, ToolEnv, ToolSpec, reward, tool
from agent_rl.core.episode import Episode
from agent_rl.core.messages import Task
from agent_rl.core.trajectory import Trajectory
from agent_rl.gym.registry import EnvSpec
from agent_rl.gym.tasks import TaskSource
from agent_rl.policy.base import Reply
from agent_rl.rollout import Job
from agent_rl.rollout.pool import run_jobs
from agent_rl.seeds import Stream, rng

Plans: TypeAlias = Sequence[Sequence[float]]
SHORTEST, LONGEST = 0.05, 0.3
"""Seconds of a tool call."""


class Waiting(ToolEnv):
    """A world of one tool, which waits."""

    def reset(self, task: Task, rng: np.random.Generator) -> str:
        """Ask."""
        return "wait"

    @tool
    async def wait(self, seconds: float) -> str:
        """Wait.

        Args:
            seconds: how long.
        """
        await asyncio.sleep(seconds)
        return "done"

    @reward(inline=True)
    def waited(self, episode: Episode) -> bool:
        """Whether every call was answered."""
        return all(message.content == "done" for message in episode.messages if message.role == "tool")


class Player:
    """Waits before each reply; an episode's plan has these waits in turn with those that it asks the tool for."""

    def __init__(self, plans: Plans) -> None:
        self.plans = plans

    def start(self, tools: Sequence[ToolSpec], seed: int) -> Talk:
        """Begin an episode."""
        return Talk(self.plans[seed])


class Talk:
    """The dialogue of one episode."""

    context_limit = None
    trajectories: tuple[Trajectory, ...] = ()

    def __init__(self, plan: Sequence[float]) -> None:
        self._plan = iter(plan)

    def observe(self, messages: Sequence[Message]) -> int:
        """Take the observation."""
        return 0

    async def reply(self, max_tokens: int | None = None) -> Reply:
        """Call the tool, or answer after the last call."""
        if thought := next(self._plan):
            await asyncio.sleep(thought)
        seconds = next(self._plan, None)
        if seconds is None:
            return Reply(Message("assistant", "done"), FinishReason.STOP)
        call = ToolCall("call_0", "wait", {"seconds": seconds})
        return Reply(Message("assistant", tool_calls=(call,)), FinishReason.STOP)

    def close(self) -> None:
        """Hold nothing."""


SPEC = EnvSpec("", "waiting", 0, Waiting, TaskSource(), Budget(turns=None))


def resident() -> int:
    """Return the bytes of memory that this process holds."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def ideal(lengths: Sequence[float], concurrency: int) -> float:
    """Return the seconds that the episodes would take if nothing but waiting took time."""
    free = [0.0] * concurrency
    for length in lengths:
        heapq.heapreplace(free, free[0] + length)
    return max(free)


class Waits(selectors.DefaultSelector):
    """Counts the seconds that the event loop waits of its own accord."""

    seconds = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Wait; what is later than asked for is others' doing."""
        began = time.perf_counter()
        events = super().select(timeout)
        waited = time.perf_counter() - began
        self.seconds += waited if timeout is None else min(waited, timeout)
        return events


class OwnCore(asyncio.SelectorEventLoop):
    """An event loop whose clock stops while others have the cores: time is what it computes and what it waits."""

    def __init__(self) -> None:
        self._waits = Waits()
        super().__init__(self._waits)

    def time(self) -> float:
        """Return the seconds."""
        return time.thread_time() + self._waits.seconds


class Memory:
    """The most memory that was seen, looked at twice a second."""

    def __init__(self) -> None:
        gc.collect()
        self.before = self.most = resident()

    async def watch(self) -> None:
        """Look until cancelled."""
        while True:
            self.most = max(self.most, resident())
            await asyncio.sleep(0.5)


async def timed(work: Coroutine[object, object, object]) -> tuple[float, float, float, int]:
    """Return the seconds on a core of its own, by the wall's clock, of CPU, and the bytes that some work took."""
    memory, clock = Memory(), asyncio.get_running_loop().time
    watching = asyncio.create_task(memory.watch())
    own, wall, cpu = clock(), time.perf_counter(), time.process_time()
    await work
    took = clock() - own, time.perf_counter() - wall, time.process_time() - cpu
    watching.cancel()
    return *took, memory.most - memory.before


async def bare(plans: Plans) -> None:
    """Sleep as the episodes do, in a task each."""

    async def one(plan: Sequence[float]) -> None:
        for seconds in plan:
            if seconds:
                await asyncio.sleep(seconds)

    await asyncio.gather(*map(one, plans))


async def ours(plans: Plans, concurrency: int) -> None:
    """Run the episodes; every one has to be right."""
    jobs = [Job(SPEC, {"index": seed}, seed) for seed in range(len(plans))]
    episodes = await run_jobs(jobs, Player(plans), concurrency=concurrency)
    wrong = next((e for e in episodes if e.reward != 1.0 or e.turns != len(plans[e.seed]) // 2 + 1), None)
    assert wrong is None, wrong


def drawn(episodes: int, calls: int, think: float) -> Plans:
    """Return the waits of each episode: a reply, a call, and so on, and the last reply."""
    numbers = rng(Stream.WORLD, 0)
    plans = numbers.uniform(0.5, 1.5, (episodes, 2 * calls + 1)) * think
    plans[:, 1::2] = numbers.uniform(SHORTEST, LONGEST, (episodes, calls))
    return plans.tolist()  # type: ignore[no-any-return]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--episodes", type=int, default=10_000)
    parser.add_argument("--concurrency", type=int, default=10_000)
    parser.add_argument("--calls", type=int, default=8, help="of an episode")
    parser.add_argument("--think", type=float, nargs="*", default=[0.0, 1.0, 2.0], help="seconds of a reply")
    given = parser.parse_args()
    print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores; {given.episodes} episodes of {given.calls} calls")
    for think in given.think:
        plans = drawn(given.episodes, given.calls, think)
        turns = given.episodes * (given.calls + 1)
        best = ideal(list(map(sum, plans)), given.concurrency)
        works = {"agent_rl": ours(plans, given.concurrency)}
        if given.episodes <= given.concurrency:
            works = {"bare asyncio": bare(plans)} | works
        for name, work in works.items():
            with asyncio.Runner(loop_factory=OwnCore) as runner:
                own, wall, cpu, memory = runner.run(timed(work))
            print(
                f"think {think:3.1f} s  {name:13}{own:6.1f} s (wall {wall:5.1f}), ideal {best:5.1f} s: "
                f"{best / own:5.1%}; {turns / own:7,.0f} turns/s; CPU {cpu / turns * 1e6:5.1f} us a turn; "
                f"{memory / given.concurrency / 1e3:5.1f} kB an episode",
                flush=True,
            )
    print(f"at most {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3:.0f} MB in this process")


if __name__ == "__main__":
    main()
