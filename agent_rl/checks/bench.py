"""Bench: plays an environment for a check, with recorded replies, and keeps its findings."""

from __future__ import annotations

import asyncio
import math
import re
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace

from agent_rl.checks.report import Finding, place
from agent_rl.core.display import from_here, plural
from agent_rl.core.episode import Episode, Outcome
from agent_rl.core.messages import JSON, Message, Task
from agent_rl.core.trajectory import FinishReason, Trajectory
from agent_rl.core.turns import replies
from agent_rl.errors import PolicyError
from agent_rl.gym.env import Env
from agent_rl.gym.registry import EnvSpec
from agent_rl.gym.tasks import EVALUATION_SEED, episode_seed
from agent_rl.gym.tool import ToolSpec
from agent_rl.policy.base import AnyPolicy, Reply
from agent_rl.rollout.episode import run_episode
from agent_rl.rollout.job import Job

TURNS = 256
"""The turns of an episode whose budget has no limit."""
CONCURRENCY = 8
_FRAME = re.compile(r'File "([^"]+)", line (\d+), in (\w+)')
_REMEDIES = {
    "make": "let the constructor work with the arguments given, or give others: env_args.KEY=VALUE",
    "reset": "let reset open an episode for every task of every split",
    "step": "let step answer whatever a policy says: return ar.Step(messages) that say what is wrong; an episode that "
    "fails is not scored, so that no policy can learn from it",
    "fuzz": "let the tool raise, or return a message: both go back to the policy; only an InfrastructureError, or "
    "an exception of step itself, fails the episode",
    "reward": 'return a finite number or a bool; None for "not scored"',
    "observation": "return a str, an ar.Message or a sequence of them, of text that UTF-8 can hold",
    "oracle": "let oracle() yield an answer in every turn until the episode ends",
    "demonstrate": "let demonstrate(self, rng) yield text or a message in every turn until the episode ends",
    "hang": "let every await end: give it a timeout, and the environment a budget in seconds",
    "spin": "let the loop end, or await something in it; for what takes long, raise seconds",
    "close": "let close() work after every reset, also after one that failed",
}


@dataclass(frozen=True, slots=True)
class Replay:
    """Gives recorded replies, and lets other episodes run before each; implements `Policy`."""

    replies: Sequence[Message]

    def start(self, tools: Sequence[ToolSpec], seed: int) -> _Replies:
        """Begin an episode."""
        return _Replies(iter(self.replies))


@dataclass(slots=True)
class _Replies:
    replies: Iterator[Message]
    context_limit: int | None = None
    trajectories: tuple[Trajectory, ...] = ()

    def observe(self, messages: Sequence[Message]) -> int:
        return 0

    async def reply(self, max_tokens: int | None = None) -> Reply:
        await asyncio.sleep(0)
        reply = next(self.replies, None)
        if reply is None:
            raise PolicyError("the recorded episode was over by now")
        return Reply(reply, FinishReason.STOP)

    def close(self) -> None:
        pass


class _KeepingSpec(EnvSpec):
    """Keeps its instances, so that whatever they left open stays open."""

    kept: list[Env]

    def make(self, /, **env_args: object) -> Env:
        env = EnvSpec.make(self, **env_args)
        self.kept.append(env)
        return env


@dataclass
class Bench:
    """An environment under check."""

    spec: EnvSpec
    env_args: Mapping[str, JSON]
    n: int
    """Tasks of each split."""
    seed: int
    seconds: float
    """How long an episode may take."""
    findings: dict[tuple[str, str], Finding] = field(default_factory=dict)
    """The first of each check and place."""
    skipped: dict[str, str] = field(default_factory=dict)
    played: dict[tuple[str, str], list[Episode]] = field(default_factory=dict)
    """The episodes of the floor table, by policy and split."""
    demonstrated: list[Episode] = field(default_factory=list)
    """Those of `demonstrate`, where the class has one of its own."""
    is_spinning: bool = False
    """Whether an episode held up the event loop, so that no further one is played."""

    @property
    def cls(self) -> type[Env]:
        """The environment's class."""
        return self.spec.cls

    def find(self, check: str, problem: str, where: str, remedy: str) -> None:
        """Add a finding, unless the check has found something at this place."""
        self.findings.setdefault((check, where), Finding(check, problem, where, remedy))

    def tasks(self, split: str) -> list[Task]:
        """Return the first different tasks of a split."""
        return self.spec.tasks.distinct(split, self.n)

    def job(self, task: Task, sample: int = 0, *, is_unlimited: bool = False) -> Job:
        """Return the job of an episode, within the environment's own budget or none."""
        budget = self.spec.budget
        if is_unlimited:
            budget = replace(budget, turns=None, tool_calls=None, seconds=None)
        elif budget.turns is None:
            budget = replace(budget, turns=TURNS)
        return Job(
            self.spec,
            task,
            episode_seed(EVALUATION_SEED + self.seed, task, sample),
            budget=budget,
            env_args=self.env_args,
        )

    async def play(self, job: Job, policy: AnyPolicy) -> Episode | None:
        """Run an episode; None, and a finding, if it does not end in time; None after one that held up all others."""
        if self.is_spinning:
            return None
        try:
            async with asyncio.timeout(self.seconds if math.isfinite(self.seconds) else None):
                episode = await run_episode(job, policy)
            return None if self.is_spinning else episode
        except TimeoutError:
            self.find("hang", f"an episode has not ended after {self.seconds:g} s", place(self.cls), _REMEDIES["hang"])
            return None

    def end(self, stack: str) -> None:
        """Add the finding of an episode that holds up the event loop, and play no further one."""
        self.is_spinning = True
        problem = f"an episode holds up the event loop, without an end in {self.seconds:g} s; nothing else was checked"
        self.find("hang", problem, self._own_place(stack) or place(self.cls), _REMEDIES["spin"])

    async def play_all(self, jobs: Sequence[Job], policies: Sequence[AnyPolicy]) -> list[Episode]:
        """Run episodes, some at a time, each with its policy; return those that end, in order."""
        room = asyncio.Semaphore(CONCURRENCY)

        async def play(job: Job, policy: AnyPolicy) -> Episode | None:
            async with room:
                return await self.play(job, policy)

        return [e for e in await asyncio.gather(*map(play, jobs, policies)) if e is not None]

    @contextmanager
    def hearing(self) -> Iterator[None]:
        """Find what `close` warns of; give all other warnings to the caller."""
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always", RuntimeWarning)
            yield
        for warning in said:
            if "close() failed" in str(warning.message):
                self.find("close", str(warning.message), place(self.cls, "close"), _REMEDIES["close"])
            else:
                warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)

    async def play_again(self, *episodes: Episode) -> list[Episode | None]:
        """Run episodes with the recorded replies, turn by turn together."""
        policies = (Replay(replies(e)) for e in episodes)
        jobs = (replace(self.job(e.task), seed=e.seed) for e in episodes)
        return [*await asyncio.gather(*map(self.play, jobs, policies))]

    def blame(self, episode: Episode, policy: str, check: str = "") -> None:
        """Add the finding of a failed episode.

        Args:
            episode: the one that failed.
            policy: who played, for people.
            check: instead of the name of the stage that failed.
        """
        error = episode.error
        if error is None:
            return
        name = check or {"score": "reward", "policy": "oracle"}.get(error.where, error.where)
        if error.message.startswith(("Step(reward=", "reward ")):
            name = "reward"
        elif error.message.startswith(("an observation is", "Message(", "step returned")):
            name = "observation"
        last = next((m for m in reversed(episode.messages) if m.role == "assistant"), None)
        said = f" after {_described(last)}" if last is not None and error.where == "step" else ""
        problem = f"{error.type} in {error.where}{said}, with policy={policy}: {error.message}"
        where = self._place_of(episode)
        if name != "fuzz" or ("step", where) not in self.findings:
            self.find(name, problem[:1000], where, _REMEDIES.get(name, _REMEDIES["step"]))

    def _place_of(self, episode: Episode) -> str:
        """Return where an episode failed: in the environment's own files, if the traceback goes through them."""
        assert episode.error is not None
        if own := self._own_place(episode.error.traceback):
            return own
        method = next((c.attribute for c in self.cls.reward_components if c.attribute in episode.error.message), "")
        return place(self.cls, method or episode.error.where)

    def _own_place(self, traceback: str) -> str:
        """Return the last place of a traceback that is in the environment's own files; empty if there is none."""
        modules = {
            cls.__module__ for cls in self.cls.__mro__ if not cls.__module__.startswith(("agent_rl.gym", "builtins"))
        }
        frames = [frame for frame in _FRAME.findall(traceback) if frame[0] in _files(modules)]
        if not frames:
            return ""
        file, line, function = frames[-1]
        return f"{self.cls.__name__}.{function} ({from_here(file)}:{line})"

    def ended(self, *policies: str) -> list[Episode]:
        """Return the episodes of the floor table that did not fail; of all policies if none is named."""
        found = (e for (policy, _), es in self.played.items() if policy in policies or not policies for e in es)
        return [e for e in found if e.outcome is not Outcome.FAILED]

    def examples(self) -> list[Episode]:
        """Return an episode of each of some tasks of the first split, of the oracle and of other policies."""
        split = self.spec.tasks.splits[0]
        found = [self.played.get((policy, split), [])[:2] for policy in ("oracle", "random", "nothing")]
        return [e for episodes in found for e in episodes if e.outcome is not Outcome.FAILED]

    def keeping(self) -> tuple[Bench, list[Env]]:
        """Return a bench that keeps the instances it makes, and the list of them."""
        spec = _KeepingSpec(**{f.name: getattr(self.spec, f.name) for f in fields(EnvSpec)})
        kept: list[Env] = []
        object.__setattr__(spec, "kept", kept)
        return replace(self, spec=spec), kept


def difference(one: Episode, other: Episode | None) -> str:
    """Return the first difference between two episodes with the same replies; empty if there is none."""
    if other is None:
        return "the second does not end"
    turn = 0
    for a, b in zip(one.messages, other.messages, strict=False):
        if a != b:
            what = f"the answer to turn {turn}" if turn else "the opening"
            return f"{what} is {a.content[:80]!r}, then {b.content[:80]!r}"
        turn += a.role == "assistant"
    for number, (step, again) in enumerate(zip(one.steps, other.steps, strict=False), 1):
        if step != again:
            return f"turn {number} is {step}, then {again}"
    if (one.outcome, one.stop_reason, len(one.messages)) != (other.outcome, other.stop_reason, len(other.messages)):
        why = f": {other.error.message}" if other.error else ""
        return f"it ends by {one.stop_reason} after {plural(one.turns, 'turn')}, then by {other.stop_reason}{why}"
    rewards = zip(one.rewards, other.rewards, strict=False)
    return next((f"reward '{r.name}' is {r.value}, then {again.value}" for r, again in rewards if r != again), "")


def _described(message: Message) -> str:
    calls = ", ".join(f"{c.name}({str(c.error or dict(c.arguments))[:100]})" for c in message.tool_calls)
    return calls or f"the reply {message.content[:60]!r}"


def _files(modules: set[str]) -> set[str]:
    return {str(getattr(sys.modules.get(name), "__file__", "")) for name in modules}
