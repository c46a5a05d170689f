"""Cost of agent_rl per turn, beside a bare loop, Gymnasium, verifiers and inspect_ai.

`make setup-adapters && .venv-adapters/bin/python benchmarks/overhead.py` (2 minutes); another environment leaves out
the peers that it lacks. One episode throughout: three calls of a calculator, then the answer, scripted; four turns.
Numbers are CPU time (user and system, all threads) per turn, the least of several repetitions: wall time says little on
a shared machine.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Literal

import gymnasium
import numpy as np
from gymnasium.spaces import Text
from overhead_peers import inspect_loop, verifiers_loop

from agent_rl import Budget, Completion, Env, FinishReason, Message, Step, ToolCall, ToolEnv, reward, spec, tool
from agent_rl.core.episode import Episode
from agent_rl.core.messages import Task
from agent_rl.engines.base import SamplingParams
from agent_rl.gym.registry import EnvSpec
from agent_rl.gym.tasks import TaskSource
from agent_rl.policy import AnyPolicy, Scripted, TokenPolicy, oracle
from agent_rl.rendering import ChatMLRenderer, Renderer, train_tokenizer
from agent_rl.rollout import Job, run_episode, run_jobs
from agent_rl.seeds import Stream, rng
from agent_rl.store.episodes import EpisodeWriter
from agent_rl.tools.calculator import calculator

REPETITIONS = 9
STEP, BARE, FULL, RENDERING, FLAT = 15.0, 50.0, 100.0, 300.0, 1.5
"""The bars: µs a turn, and how much a turn may cost at 64 turns relative to one at 4."""

QUESTION, ANSWER = "compute 3*4+5-2", "15"
OPERATIONS: tuple[tuple[Literal["+", "-", "*"], int, int], ...] = (("*", 3, 4), ("+", 12, 5), ("-", 17, 2))
CALLS = tuple(
    Message("assistant", tool_calls=(ToolCall("call_0", "calculator", {"operator": o, "left": a, "right": b}),))
    for o, a, b in OPERATIONS
)
SCRIPT = (*CALLS, Message("assistant", ANSWER))
TURNS = len(SCRIPT)
ACTIONS = [*(f"{operator} {left} {right}" for operator, left, right in OPERATIONS), ANSWER]
SPOKEN = [Message("assistant", action) for action in ACTIONS]


class Sums(ToolEnv):
    """The episode, as an environment of ours."""

    extra_tools = (calculator,)

    def reset(self, task: Task, rng: np.random.Generator) -> str:
        """Ask."""
        return QUESTION

    @reward(inline=True)
    def correct(self, episode: Episode) -> bool:
        """Whether the answer is right."""
        return episode.final_text == ANSWER


class PlainSums(Sums):
    """The same, with a tool and a reward that run in a worker thread, as they do by default."""

    extra_tools = (tool(calculator.function),)

    @reward
    def correct(self, episode: Episode) -> bool:
        """Whether the answer is right."""
        return episode.final_text == ANSWER


class TextSums(Env):
    """The episode without tools, step for step what `GymSums` does."""

    def reset(self, task: Task, rng: np.random.Generator) -> str:
        """Ask."""
        return QUESTION

    def step(self, action: Message) -> Step:
        """Compute, or end with a number."""
        text = action.content
        if text.isdigit():
            return Step(reward=float(text == ANSWER), terminated=True)
        operator, left, right = text.split()
        return Step((Message("user", str(calculator(operator, int(left), int(right)))),))


SPEC = EnvSpec("", "sums", 0, Sums, TaskSource(), Budget(turns=None))
TEXT = EnvSpec("", "text-sums", 0, TextSums, TaskSource(), Budget(turns=None))
PLAIN = EnvSpec("", "plain-sums", 0, PlainSums, TaskSource(), Budget(turns=None))


def microseconds(run: Callable[[], object], turns: int) -> float:
    """Return the CPU time that a turn of `run` costs, the least of several repetitions."""
    run()
    best = float("inf")
    for _ in range(REPETITIONS):
        start = time.process_time()
        run()
        best = min(best, time.process_time() - start)
    return best / turns * 1e6


# Peers


def bare_loop(episodes: int) -> None:
    for _ in range(episodes):
        said = [QUESTION]
        for operation in OPERATIONS:
            said.append(str(calculator(*operation)))
        assert said[-1] == ANSWER


class GymSums(gymnasium.Env):
    """The episode, as an environment of Gymnasium."""

    action_space = observation_space = Text(64, charset="0123456789+-*compute ")

    def reset(
        self, *, seed: int | None = None, options: dict[str, object] | None = None
    ) -> tuple[str, dict[str, object]]:
        """Ask."""
        super().reset(seed=seed)
        return QUESTION, {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, object]]:
        """Compute, or end with a number."""
        if action.isdigit():
            return "", float(action == ANSWER), True, False, {}
        operator, left, right = action.split()
        return str(calculator(operator, int(left), int(right))), 0.0, False, False, {}


def play_gymnasium(env: gymnasium.Env, episodes: int) -> None:
    for seed in range(episodes):
        env.reset(seed=seed)
        for action in ACTIONS:
            _, gained, terminated, _, _ = env.step(action)
        assert terminated
        assert gained == 1


# Ours


def play_by_hand(episodes: int) -> None:
    """What `TextSums` does itself: the work of an environment's author."""
    generator = rng(Stream.ENVIRONMENT, 0)
    for _ in range(episodes):
        env = TextSums()
        env.reset({}, generator)
        for action in SPOKEN:
            ended = env.step(action)
        assert ended.reward == 1


def jobs(episodes: int, spec: EnvSpec = SPEC) -> list[Job]:
    return [Job(spec, {"index": i}, i) for i in range(episodes)]


def check(episodes: Sequence[Episode]) -> None:
    assert all((e.turns, e.reward) == (TURNS, 1.0) for e in episodes), episodes[0].error


def play_pool(policy: AnyPolicy, episodes: int, concurrency: int, spec: EnvSpec = SPEC) -> None:
    check(asyncio.run(run_jobs(jobs(episodes, spec), policy, concurrency=concurrency)))


def play_singly(policy: AnyPolicy, episodes: int) -> None:
    async def main() -> list[Episode]:
        return [await run_episode(job, policy) for job in jobs(episodes)]

    check(asyncio.run(main()))


def play_built_in(id: str, episodes: int) -> tuple[Callable[[], object], int]:
    """Return a function that plays an environment's tasks by its oracle, and the number of turns."""
    env = spec(id)
    work = [Job(env, env.tasks.get("train", i), i) for i in range(episodes)]

    def play() -> list[Episode]:
        played = asyncio.run(run_jobs(work, oracle()))
        assert all(e.success for e in played)
        return played

    return play, sum(e.turns for e in play())


class InstantSampler:
    """Gives the same replies in every sequence, at once; implements `InferenceEngine`."""

    context_limit = None

    def __init__(self, replies: Sequence[Sequence[int]]) -> None:
        self.completions = [
            Completion(tuple(ids), (-0.5,) * len(ids), FinishReason.STOP, (0,) * len(ids)) for ids in replies
        ]

    def open(self, seed: int) -> InstantSession:
        """Begin a sequence."""
        return InstantSession(self.completions)


class InstantSession:
    """One sequence of an `InstantSampler`."""

    def __init__(self, completions: Sequence[Completion]) -> None:
        self.completions = iter(completions)

    async def sample(self, ids: Sequence[int], params: SamplingParams, stop_ids: frozenset[int]) -> Completion:
        """Give the next reply."""
        return next(self.completions)

    def close(self) -> None:
        """Free nothing."""


def play_and_store(policy: AnyPolicy, episodes: int, folder: Path, spec: EnvSpec = SPEC) -> None:
    with closing(EpisodeWriter(folder / f"{time.monotonic_ns()}.jsonl")) as writer:
        check(asyncio.run(run_jobs(jobs(episodes, spec), policy, on_episode=writer.write)))


def converse(renderer: Renderer, turns: int, episodes: int) -> None:
    """Run the policy's part only: render new messages, parse the reply."""
    replies = [renderer.reply(SCRIPT[i % 3]) for i in range(turns)]
    result = (Message("tool", "12", tool_call_id="call_0", name="calculator"),)
    policy = TokenPolicy(InstantSampler(replies), renderer)

    async def main() -> None:
        for _ in range(episodes):
            conversation = policy.start((calculator.spec,), 0)
            conversation.observe((Message("user", QUESTION),))
            await conversation.reply()
            for _ in range(turns - 1):
                conversation.observe(result)
                await conversation.reply()

    asyncio.run(main())


def main() -> None:
    n = 400
    gymnasium.register("Sums-v0", entry_point=GymSums, max_episode_steps=8)
    made, plain = gymnasium.make("Sums-v0"), GymSums()
    script = Scripted(lambda env, seed: (message for message in SCRIPT))
    spoken = Scripted(lambda env, seed: (message for message in SPOKEN))
    renderer = ChatMLRenderer(train_tokenizer([QUESTION, ANSWER]))
    replies = [renderer.reply(m) for m in SCRIPT]
    rendered = TokenPolicy(InstantSampler(replies), renderer)

    costs: dict[str, float] = {}

    def measure(name: str, run: Callable[[], object], turns: int = n * TURNS) -> float:
        costs[name] = microseconds(run, turns)
        ratio = costs[name] / costs.get("gymnasium.make", float("nan"))
        print(f"{name:44} {costs[name]:8.1f} µs" + (f"  {ratio:6.1f} x gymnasium.make" if ratio == ratio else ""))
        return costs[name]

    print("CPU time per turn, without model")
    measure("bare Python loop", lambda: bare_loop(n))
    own = measure("the Env's own reset and steps", lambda: play_by_hand(n))
    measure("gymnasium, bare environment", lambda: play_gymnasium(plain, n))
    measure("gymnasium.make", lambda: play_gymnasium(made, n))
    step = measure("agent_rl, Env, 64 at a time", lambda: play_pool(spoken, n, 64, TEXT)) - own
    bare = measure("agent_rl, ToolEnv, 64 at a time", lambda: play_pool(script, n, 64))
    measure("agent_rl, ToolEnv, one at a time", lambda: play_pool(script, n, 1))
    measure("agent_rl, ToolEnv, run_episode", lambda: play_singly(script, n))
    measure("agent_rl, plain @tool and @reward", lambda: play_pool(script, n, 64, PLAIN))
    for id in ("calculator-v0", "search-v0"):
        measure(f"agent_rl, {id}, its oracle", *play_built_in(id, n))
    measure("agent_rl, tokens", lambda: play_pool(rendered, n, 64))
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder)
        measure("agent_rl, tokens and store", lambda: play_and_store(rendered, n, store))
        full = measure(
            "agent_rl, tokens, store, plain @tool, @reward", lambda: play_and_store(rendered, n, store, PLAIN)
        )
    peers: dict[str, tuple[Callable[[], Callable[[int], None]], int]] = {
        "verifiers, ToolEnv and Rubric": (lambda: verifiers_loop(QUESTION, OPERATIONS, ANSWER, 64), 200),
        "inspect_ai, with its log": (lambda: inspect_loop(QUESTION, OPERATIONS, ANSWER, 64), 64),
        "inspect_ai, log_samples=False": (
            lambda: inspect_loop(QUESTION, OPERATIONS, ANSWER, 64, log_samples=False),
            64,
        ),
    }
    for name, (made_by, episodes) in peers.items():
        try:
            play = made_by()
        except ImportError as error:
            print(f"{name:44} not here: {error}")
        else:
            cost = measure(name, lambda play=play, episodes=episodes: play(episodes), episodes * TURNS)
            print(f"{'':44} {cost / full:8.1f} x ours with tokens and store, {cost / bare:.1f} x ours without")
    rendering = {
        turns: measure(f"rendering and reading, {turns} turns", lambda t=turns: converse(renderer, t, 1024 // t), 1024)
        for turns in (4, 16, 64)
    }

    print()
    growth = rendering[64] / rendering[4]
    for name, value, bar in (
        ("a step of an Env, beyond its own work", step, STEP),
        ("bare, with tools", bare, BARE),
        ("full path without model, plain @tool and @reward", full, FULL),
        ("rendering, at worst", max(rendering.values()), RENDERING),
        ("rendering, 64 turns relative to 4", growth, FLAT),
    ):
        print(f"{'PASS' if value <= bar else 'FAIL'}  {name}: {value:.2f} (at most {bar:g})")


if __name__ == "__main__":
    main()
