"""Heads: what a list of episodes shows and a filter asks, under the names of `--where`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from pydantic import TypeAdapter, ValidationError

from agent_rl.core.episode import Episode, Failure, Origin, Outcome, Reward, StepRecord, StopReason, component_values
from agent_rl.core.escaping import ESCAPE
from agent_rl.core.messages import JSON, Message, Task
from agent_rl.core.sandbox_loss import SandboxLoss
from agent_rl.core.trajectory import Source, Trajectory
from agent_rl.core.turns import opening_question
from agent_rl.store.codec import HEADS, load_line

QUESTION, SCALAR = 200, 300
"""The characters that are kept of a question, and of a text in a task."""


@dataclass(frozen=True, slots=True)
class Head:
    """An episode without what was said and sampled; a number or text is None where it has none."""

    id: str
    group: str
    env: str
    purpose: str
    split: str
    step: int | None
    sample: int
    greedy: bool
    seed: int
    parent: str | None
    reward: float | None
    success: bool | None
    outcome: str
    stop: str
    ending: str
    error: str | None
    """The type of the exception that it failed by."""
    turns: int
    calls: int
    errors: int
    """Tool calls that failed."""
    seconds: float
    tokens: int
    sampled: int
    version: int | None
    """The newest weights that sampled a token."""
    question: str
    """The beginning of the first user message."""
    task: Mapping[str, str | float | bool]
    """Its scalars; long texts are cut."""
    rewards: Mapping[str, float | None]
    """The value of each component; None is not scored."""
    tool_errors: Mapping[str, int]
    """Tool calls that failed, by class."""

    @classmethod
    def of(cls, episode: Episode) -> Head:
        """Return the head of an episode."""
        return _head(episode, [_sizes(trajectory) for trajectory in episode.trajectories])

    def value(self, field: str) -> JSON:
        """Return the value of a field of `--where`, `task.KEY` and `rewards.NAME` among them."""
        outer, _, inner = field.partition(".")
        found: Mapping[str, JSON] = getattr(self, outer) if inner else {}
        return found.get(inner) if inner else getattr(self, outer)


def head_of(line: bytes) -> Head:
    """Return the head of a line, without unpacking its tokens.

    Raises:
        StoreError: if the line was written under a schema that this version can't read.
        DamagedEpisodeError: if it can't be read.
    """
    if line.startswith(HEADS) and ESCAPE.encode() not in line:
        try:
            light = _LINES.validate_json(line, strict=True)
        except ValidationError:  # a number that JSON lacks, or damage
            pass
        else:
            return _head(light.episode(), light.trajectories)
    return Head.of(load_line(line))


_Span: TypeAlias = tuple[int, int, Source, int, int | None]


@dataclass(frozen=True, slots=True)
class _Array:
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Sizes:
    """A packed trajectory as it is stored, without the arrays."""

    tokens: _Array
    logprobs: _Array
    spans: tuple[_Span, ...]


@dataclass(frozen=True, slots=True)
class _Line:
    """What is read of a stored line."""

    id: str
    env: str
    task: Task
    seed: int
    group_id: str
    origin: Origin
    messages: tuple[Message, ...]
    steps: tuple[StepRecord, ...]
    trajectories: tuple[_Sizes, ...]
    rewards: tuple[Reward, ...]
    stop_reason: StopReason
    outcome: Outcome
    error: Failure | None = None
    parent: tuple[str, int] | None = None
    seconds: float = 0.0
    sandbox_loss: SandboxLoss | None = None

    def episode(self) -> Episode:
        """Return it as an episode without trajectories."""
        values = {name: getattr(self, name) for name in self.__slots__}
        return Episode(**values | {"trajectories": ()})


_LINES = TypeAdapter(_Line)


def _sizes(trajectory: Trajectory) -> _Sizes:
    spans = tuple((s.start, s.stop, s.source, s.turn, s.policy_version) for s in trajectory.spans)
    return _Sizes(_Array((len(trajectory),)), _Array((int(trajectory.loss_mask.sum()),)), spans)


def _head(episode: Episode, trajectories: Sequence[_Sizes]) -> Head:
    origin, errors = episode.origin, episode.tool_errors
    versions = (span[4] for sizes in trajectories for span in sizes.spans)
    return Head(
        id=episode.id,
        group=episode.group_id,
        env=episode.env,
        purpose=origin.purpose,
        split=origin.split,
        step=origin.step,
        sample=origin.sample,
        greedy=origin.greedy,
        seed=episode.seed,
        parent=None if episode.parent is None else episode.parent[0],
        reward=episode.reward,
        success=episode.success,
        outcome=episode.outcome.value,
        stop=episode.stop_reason.value,
        ending=episode.ending.value,
        error=None if episode.error is None else episode.error.type,
        turns=episode.turns,
        calls=episode.tool_calls,
        errors=sum(errors.values()),
        seconds=episode.seconds,
        tokens=sum(sizes.tokens.shape[0] for sizes in trajectories),
        sampled=sum(sizes.logprobs.shape[0] for sizes in trajectories),
        version=max((version for version in versions if version is not None), default=None),
        question=opening_question(episode)[:QUESTION],
        task={key: kept for key, value in episode.task.items() if (kept := _scalar(value)) is not None},
        rewards={name: _finite(value) for name, value in component_values(episode).items()},
        tool_errors=errors,
    )


def _scalar(value: JSON) -> str | float | bool | None:
    if isinstance(value, str):
        return value[:SCALAR]
    return value if isinstance(value, int) else _finite(value) if isinstance(value, float) else None


def _finite(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else value
