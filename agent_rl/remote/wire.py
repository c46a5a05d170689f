"""What a server of environments and its clients say to each other, in the frames of `agent_rl.serving`.

The first request, `open`, takes a lease: one place in the server, with one
instance of an environment; `reset`, `step`, `score` and `play` use it, and `close` frees it.
"""

from __future__ import annotations

from functools import partial
from typing import Annotated, Literal, TypeAlias

from pydantic import Field, TypeAdapter

from agent_rl.core.episode import Reward
from agent_rl.core.judgement import Judgement
from agent_rl.core.messages import JSON, Message, Step, Task
from agent_rl.core.sandbox_loss import SandboxLoss
from agent_rl.gym.budget import Budget
from agent_rl.gym.tool import ToolSpec
from agent_rl.seeds import RngState
from agent_rl.serving import frames as serving
from agent_rl.serving.frames import Cancel, Frame, load

PATH = "/v3"
"""Where the server takes connections; the number rises when frames change."""
MAX_TASKS = 64
"""That one request may ask for."""


class Describe(serving.Request):
    """Ask what an environment is."""

    op: Literal["describe"]
    env: str


class Tasks(serving.Request):
    """Ask for some of its tasks."""

    op: Literal["tasks"]
    env: str
    split: str
    start: int = Field(ge=0)
    count: int = Field(ge=1, le=MAX_TASKS)


class Open(serving.Request):
    """Take a lease, once a place is free, and make an instance."""

    op: Literal["open"]
    lease: str = Field(max_length=64)
    """The client's own name for it."""
    env: str
    env_args: dict[str, JSON]


class Reset(serving.Request):
    """Begin the episode."""

    op: Literal["reset"]
    lease: str
    task: Task
    rng: RngState


class Act(serving.Request):
    """Take a step."""

    op: Literal["step"]
    lease: str
    action: Message


class Score(serving.Request):
    """Ask for the rewards of the finished episode: a line of an episode file."""

    op: Literal["score"]
    lease: str
    episode: str
    seconds: float | None


class Compare(serving.Request):
    """Ask what a group reward gives the episodes of a task."""

    op: Literal["compare"]
    env: str
    env_args: dict[str, JSON]
    reward: str
    group: str
    episodes: list[str]


class Play(serving.Request):
    """Ask for the next answer of the environment's own script."""

    op: Literal["play"]
    lease: str
    script: Literal["oracle", "demonstrate"]
    rng: RngState | None = None
    observed: tuple[Message, ...] = ()


class Close(serving.Request):
    """Give the lease back, whatever it is doing."""

    op: Literal["close"]
    lease: str


Request: TypeAlias = Annotated[
    Describe | Tasks | Open | Reset | Act | Score | Compare | Play | Cancel | Close, Field(discriminator="op")
]


class Argument(Frame):
    """A parameter of the environment's constructor."""

    name: str
    required: bool = False
    more: bool = False
    """Whether it stands for any others: `**kwargs`."""


class Described(Frame):
    """What a client has to know of an environment before it opens one."""

    id: str
    about: str
    splits: dict[str, int | None]
    """The tasks of each; None if a function makes any number."""
    held_out: str
    budget: Budget
    nondeterministic: bool
    arguments: list[Argument]
    tools: tuple[ToolSpec, ...]
    """Of an instance without arguments; empty if there is none."""
    methods: list[Literal["state_hash", "oracle", "demonstrate"]]
    group_rewards: dict[str, float]
    is_judged: bool = False


class Opened(Frame):
    """The opening of an episode."""

    observation: tuple[Message, ...]
    tools: tuple[ToolSpec, ...]


class Reply(serving.Reply):
    """The answer to a call: an error, or what was asked for."""

    described: Described | None = None
    tasks: list[Task] | None = None
    opened: Opened | None = None
    step: Step | None = None
    state: str | None = None
    """What `state_hash` says after `reset` or `step`."""
    sandbox_loss: SandboxLoss | None = None
    """How the policy's code ended the lease's sandbox, if it did."""
    rewards: tuple[Reward, ...] | None = None
    judgements: tuple[Judgement, ...] = ()
    values: list[float | None] | None = None
    """Of a group reward."""
    answer: Message | None = None
    """Of a script; None at its end."""


load_request = partial(load, TypeAdapter[Request](Request))
load_reply = partial(load, TypeAdapter(Reply))
