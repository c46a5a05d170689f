"""Episode: everything that happened between one environment and one policy."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Literal, TypeAlias

from agent_rl.core.display import Displayed, plural
from agent_rl.core.ending import Ending, ending_of
from agent_rl.core.judgement import Judgement
from agent_rl.core.making import made_quickly, replacing
from agent_rl.core.messages import JSON, Message, Task, own_task
from agent_rl.core.sandbox_loss import SandboxLoss
from agent_rl.core.trajectory import Trajectory
from agent_rl.core.usage import Usage

ROUNDING = 1e-6
"""Rewards that are closer than this differ by rounding only: ten steps of 0.1 add up to less than 1."""


class StopReason(StrEnum):
    """Why an episode ended."""

    DONE = "done"
    """The environment said `terminated`: the task's own end."""
    ENV_TRUNCATED = "env_truncated"
    """The environment said `truncated`."""
    TURNS = "turns"
    TOKENS = "tokens"
    TOOL_CALLS = "tool_calls"
    SECONDS = "seconds"
    LENGTH = "length"
    """One reply hit its own limit before its end-of-turn token."""
    ERROR = "error"


class Outcome(StrEnum):
    """What an episode is good for: only the first two may be trained on."""

    TERMINATED = "terminated"
    TRUNCATED = "truncated"
    FAILED = "failed"
    """An infrastructure failure: no reward, no part in its group's baseline."""


@made_quickly
@dataclass(frozen=True, slots=True)
class StepRecord:
    """A step as replay compares it; its messages are in `Episode.messages`."""

    messages: int
    """How many messages the observation had."""
    reward: float
    terminated: bool
    truncated: bool
    state: str | None = None
    """What `Env.state_hash` said before the policy's reply; None where the environment doesn't say."""


@made_quickly
@dataclass(frozen=True, slots=True)
class Reward:
    """One component of an episode's reward; a `value` of None is "not scored", never 0."""

    name: str
    value: float | None
    weight: float = 1.0
    source: str = "env"
    turn: int | None = None
    """The turn that earned it, or None for the whole episode."""
    error: str | None = None
    """Why it is not scored, if its method failed."""

    @property
    def without_gain(self) -> Reward:
        """The same of an episode that counts as failed: what it lost stays, what it earned or was not scored is 0."""
        kept = self.value is not None and (self.value * self.weight < 0 or self.value <= 0 == self.weight)
        return self if kept else replace(self, value=0.0)


@dataclass(frozen=True, slots=True)
class Failure:
    """An exception as data: its stage, type, message and traceback."""

    where: str
    type: str
    message: str
    traceback: str = ""
    kind: str = ""
    """The nearest class of agent_rl's or Python's that its type derives from, where it is none of these itself."""


Purpose: TypeAlias = Literal["train", "eval", "rollout", "demonstration"]


@dataclass(frozen=True, slots=True)
class Origin:
    """Why an episode was run; ids are for people and mean nothing."""

    purpose: Purpose
    split: str = ""
    """The tasks' split; an empty string if the task is from none."""
    step: int | None = None
    """The training step, counted from 0."""
    sample: int = 0
    """The episode's number in its group."""
    greedy: bool = False
    """Sampled at temperature 0, as a baseline of its group."""


@made_quickly
@dataclass(frozen=True, slots=True)
class Episode(Displayed):
    """Everything that happened; one line of the episode file."""

    id: str
    env: str
    task: Task
    seed: int
    group_id: str
    origin: Origin
    messages: tuple[Message, ...]
    steps: tuple[StepRecord, ...]
    trajectories: tuple[Trajectory, ...]
    rewards: tuple[Reward, ...]
    stop_reason: StopReason
    outcome: Outcome
    error: Failure | None = None
    parent: tuple[str, int] | None = None
    """The episode and turn that this one was continued from; everything before that turn is the parent's."""
    versions: Mapping[str, str] = field(default_factory=dict)
    env_args: Mapping[str, JSON] = field(default_factory=dict)
    seconds: float = 0.0
    usage: tuple[Usage, ...] = ()
    """What each reply used, where a served model gave it, with one that failed."""
    judgements: tuple[Judgement, ...] = ()
    """Of judges that its environment's rewards asked, in their order."""
    sandbox_loss: SandboxLoss | None = None
    """How its sandbox was lost, if it was."""
    snapshots: tuple[object, ...] = field(default=(), compare=False, repr=False)
    """The environment's before each turn, where the job asked for them; they are not stored."""

    def __repr__(self) -> str:
        reward = "not scored" if self.reward is None else f"reward {self.reward:.4g}"
        return f"Episode({self.id!r}, {self.env}, {reward}, {plural(self.turns, 'turn')}, {self.stop_reason})"

    @property
    def reward(self) -> float | None:
        """The weighted sum of the rewards; None if the episode failed or a weighted component is not scored."""
        if not self.trainable:
            return None
        counted = [r for r in self.rewards if r.weight != 0]
        if any(r.value is None or not math.isfinite(r.value) for r in counted):
            return None
        return sum(r.value * r.weight for r in counted if r.value is not None)

    @property
    def trainable(self) -> bool:
        """Whether the episode ran to an end that the policy is answerable for."""
        return self.outcome in (Outcome.TERMINATED, Outcome.TRUNCATED)

    @property
    def has_ended_sandbox(self) -> bool:
        """Whether the policy's code ended its sandbox, which makes the episode a failure."""
        return self.sandbox_loss is not None and self.sandbox_loss.is_failure

    @property
    def ending(self) -> Ending:
        """How it ended, finer than `outcome`: `agent_rl.core.ending` has the table."""
        error, last = self.error, self.messages[-1] if self.messages else None
        return ending_of(
            error.where if error else "",
            (error.kind or error.type) if error else "",
            is_done=self.outcome is Outcome.TERMINATED,
            is_unjudged=any(r.error is not None and r.weight != 0 for r in self.rewards),
            is_unread=last is not None and last.role == "assistant" and any(c.error for c in last.tool_calls),
            has_ended_sandbox=self.has_ended_sandbox,
        )

    @property
    def success(self) -> bool | None:
        """Whether the first reward component, the task's own, reached 1; None if it is not known.

        Where only steps are rewarded, it is whether they add up to 1.
        """
        if not self.trainable or not self.rewards or self.rewards[0].value is None:
            return None
        if self.rewards[0].source == "step":
            return self.reward is not None and self.reward >= 1 - ROUNDING
        return self.rewards[0].value >= 1 - ROUNDING

    @property
    def final_text(self) -> str:
        """The policy's last message if it is an answer (no tool calls), else an empty string."""
        last = next((m for m in reversed(self.messages) if m.role == "assistant"), None)
        return last.content if last and not last.tool_calls else ""

    @property
    def seat(self) -> int:
        """Which of a game's players it is about, counted from 0; 0 where there is one."""
        seat = self.env_args.get("seat")
        return seat if isinstance(seat, int) else 0

    @property
    def turns(self) -> int:
        """How many times the policy replied."""
        return len(self.steps)

    @property
    def cut_in_reply(self) -> bool:
        """Whether a limit of tokens cut its last reply, of which the environment was given nothing."""
        is_limit = self.stop_reason in (StopReason.LENGTH, StopReason.TOKENS)
        return is_limit and bool(self.steps) and self.steps[-1].truncated

    @property
    def played(self) -> tuple[Message, ...]:
        """The messages from the policy's first reply on; an example in the opening is none of its."""
        return self.messages[max(0, len(self.messages) - sum(1 + step.messages for step in self.steps)) :]

    @property
    def tool_calls(self) -> int:
        """How many tool calls the policy made, malformed ones included."""
        return sum(len(m.tool_calls) for m in self.played)

    @property
    def tool_errors(self) -> Mapping[str, int]:
        """How many of them failed, by class."""
        return Counter(str(m.tool_error) for m in self.played if m.tool_error is not None)

    def scored(self, rewards: tuple[Reward, ...], judgements: tuple[Judgement, ...]) -> Episode:
        """Return it with these."""
        return _scored(self, rewards, judgements)

    def with_own_task(self) -> Episode:
        """Return it with a copy of its task, which a reward may change, as by sorting an answer's list."""
        return _with_task(self, own_task(self.task))

    def value(self, name: str) -> float | None:
        """Return the value of the reward component called `name`, or None if it is absent or not scored.

        Of one that is earned in turns, such as "step", it is what they add up to.
        """
        values = [r.value for r in self.rewards if r.name == name]
        return sum(v for v in values if v is not None) if values and None not in values else None


def component_values(episode: Episode) -> dict[str, float | None]:
    """Return the value of each reward component by its name, in the order in which they first came."""
    return {name: episode.value(name) for name in dict.fromkeys(reward.name for reward in episode.rewards)}


_scored, _with_task = replacing(Episode, "rewards", "judgements"), replacing(Episode, "task")


@dataclass(frozen=True, slots=True)
class EpisodeGroup(Displayed):
    """Samples of one task: the episodes that algorithms compare with each other."""

    id: str
    episodes: tuple[Episode, ...]
    greedy: Episode | None = None
    """One more episode of the task, sampled greedily: a baseline that is not trained on."""

    def __repr__(self) -> str:
        return f"EpisodeGroup({self.id!r}, {plural(len(self.episodes), 'episode')})"

    @property
    def task(self) -> Task:
        """The task that all of them are about."""
        return self.episodes[0].task

    @property
    def env(self) -> str:
        """The id of the environment that they are of."""
        return self.episodes[0].env


def group_episodes(episodes: Sequence[Episode], greedy: Sequence[Episode] = ()) -> list[EpisodeGroup]:
    """Sort episodes into their groups, which are in the order of their first episodes; greedy ones are baselines."""
    found: dict[str, list[Episode]] = {}
    for episode in episodes:
        found.setdefault(episode.group_id, []).append(episode)
    baselines = {e.group_id: e for e in greedy}
    return [EpisodeGroup(id, tuple(members), baselines.get(id)) for id, members in found.items()]
