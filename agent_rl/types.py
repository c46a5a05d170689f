"""The nouns: what passes between environments, rendering, policies, the store and the backends.

All are frozen values. Arrays: token ids int32 `[T]`; log-probabilities float32 `[T]`, in nats, NaN where no token
was sampled; routed experts a narrow signed integer `[T, layers, top_k]`, aligned to input positions, -1 for "none".
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Literal, TypeAlias, Union

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from agent_rl.trajectory import Trajectory

JSON: TypeAlias = Union[bool, int, float, str, Sequence["JSON"], Mapping[str, "JSON"], None]  # noqa: UP007 - recursive
Task: TypeAlias = Mapping[str, JSON]
"""What one episode is about; anything that JSON can hold. The same task may be sampled many times."""

Role: TypeAlias = Literal["system", "user", "assistant", "tool"]
IntArray: TypeAlias = npt.NDArray[np.int32]
FloatArray: TypeAlias = npt.NDArray[np.float32]
BoolArray: TypeAlias = npt.NDArray[np.bool_]
ExpertArray: TypeAlias = npt.NDArray[np.signedinteger]


class ToolErrorKind(StrEnum):
    """Why a tool call came back as an error message to the model."""

    MALFORMED = "malformed"
    UNKNOWN_TOOL = "unknown_tool"
    BAD_ARGUMENTS = "bad_arguments"
    TIMEOUT = "timeout"
    EXCEPTION = "exception"


class FinishReason(StrEnum):
    """Why a policy stopped sampling."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


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


class Source(StrEnum):
    """Where a token came from; only `policy` tokens are trained on."""

    PROMPT = "prompt"
    POLICY = "policy"
    ENV = "env"
    TEMPLATE = "template"
    """Tokens of a reply that the policy did not sample: what the chat template closes it with, or an interruption."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call that the model asked for; `error` says why it could not be parsed."""

    id: str
    name: str
    arguments: Mapping[str, JSON] = field(default_factory=dict)
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Message:
    """One chat message, with OpenAI's roles and names."""

    role: Role
    content: str = ""
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    name: str | None = None
    tool_error: ToolErrorKind | None = None
    """Set on a tool message that reports an error instead of a result."""


@dataclass(frozen=True, slots=True)
class Step:
    """Gymnasium's five-tuple, with messages for the observation."""

    observation: tuple[Message, ...] = ()
    reward: float = 0.0
    terminated: bool = False
    truncated: bool = False
    info: Mapping[str, JSON] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StepRecord:
    """What replay compares: a step without its messages, which stand in `Episode.messages`."""

    messages: int
    """How many messages the observation had."""
    reward: float
    terminated: bool
    truncated: bool
    state: str | None = None
    """What `Env.state_hash` said before the policy's reply; None where the environment doesn't say."""


@dataclass(frozen=True, slots=True)
class Completion:
    """What a policy sampled in one turn, exactly."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """Of each sampled token, under the distribution it was sampled from."""
    raw_logprobs: tuple[float, ...]
    """Of each sampled token, under the model's own softmax (temperature 1, nothing cut off)."""
    finish_reason: FinishReason
    policy_versions: tuple[int, ...]
    """The version of the weights that sampled each token."""
    routed_experts: ExpertArray | None = None
    """`[n, layers, top_k]` for the n input positions that were fed since the last completion."""


@dataclass(frozen=True, slots=True)
class Span:
    """Where the tokens `[start, stop)` came from."""

    start: int
    stop: int
    source: Source
    turn: int
    policy_version: int | None = None


@dataclass(frozen=True, slots=True)
class Fork:
    """Where a trajectory branched off: it repeats the first `position` tokens of trajectory `parent`."""

    parent: int
    position: int


@dataclass(frozen=True, slots=True)
class Reward:
    """One component of an episode's reward; a `value` of None is "not scored", never 0."""

    name: str
    value: float | None
    weight: float = 1.0
    source: str = "env"
    turn: int | None = None
    """The turn that earned it, or None for the whole episode."""


@dataclass(frozen=True, slots=True)
class Failure:
    """An exception as data: what broke, where, with the traceback to read."""

    where: str
    type: str
    message: str
    traceback: str = ""


@dataclass(frozen=True, slots=True)
class Episode:
    """Everything that happened; one line of the episode file."""

    id: str
    env: str
    task: Task
    seed: int
    group_id: str
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
    snapshots: tuple[object, ...] = field(default=(), compare=False, repr=False)
    """The environment's before each turn, where the job asked for them; they are not stored."""

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
    def success(self) -> bool | None:
        """Whether the first reward component, the task's own, reached 1; None if it is not known."""
        if not self.trainable or not self.rewards or self.rewards[0].value is None:
            return None
        return self.rewards[0].value >= 1.0

    @property
    def final_text(self) -> str:
        """The last assistant message if it is an answer (no tool calls), else an empty string."""
        last = self.messages[-1] if self.messages else None
        return last.content if last and last.role == "assistant" and not last.tool_calls else ""

    @property
    def turns(self) -> int:
        """How many times the policy replied."""
        return len(self.steps)

    @property
    def tool_calls(self) -> int:
        """How many tool calls the policy made, malformed ones included."""
        return sum(len(m.tool_calls) for m in self.messages)

    @property
    def tool_errors(self) -> Mapping[str, int]:
        """How many tool calls failed, by class."""
        return Counter(str(m.tool_error) for m in self.messages if m.tool_error is not None)

    def value(self, name: str) -> float | None:
        """Return the value of the reward component called `name`, or None if it is absent or not scored."""
        return next((r.value for r in self.rewards if r.name == name), None)


@dataclass(frozen=True, slots=True)
class Sample:
    """One trajectory, ready to train on; every array has the trajectory's length T."""

    token_ids: IntArray
    loss_mask: BoolArray
    rollout_logprobs: FloatArray
    """0 where `loss_mask` is False, so that no NaN can reach a sum."""
    rewards: FloatArray
    """What each turn earned, on its last sampled token."""
    policy_versions: IntArray
    """-1 where no token was sampled."""
    turns: IntArray
    sources: IntArray
    """An index into the members of `Source`."""
    episode: int
    """The place of its episode among those of the step."""
    episode_id: str
    group_id: str
    routed_experts: ExpertArray | None = None
