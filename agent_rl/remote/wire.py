"""What client and server say to each other: one JSON object a frame, over one WebSocket for a process's episodes.

A request names its `call`, which the reply repeats. The first, `open`, takes a lease: one place in the server, with one
instance of an environment; `step`, `score` and `play` use it, and `close` frees it.
"""

from __future__ import annotations

import builtins
from collections.abc import Mapping
from typing import Annotated, Literal, TypeAlias, TypeVar

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic_core import PydanticSerializationError

from agent_rl import errors
from agent_rl.core.episode import Reward
from agent_rl.core.messages import JSON, Message, Step, Task
from agent_rl.errors import RemoteError
from agent_rl.gym.budget import Budget
from agent_rl.gym.tool import ToolSpec
from agent_rl.store.codec import escaped, plain, unescaped

PATH = "/v1"
"""Where the server takes connections; the number rises when frames change."""
TOKEN = "AGENT_RL_SERVER_TOKEN"
"""The environment variable with the token that both sides know."""
MAX_BYTES = 32 * 2**20
"""Of one frame."""
MAX_TASKS = 64
"""That one request may ask for."""
T = TypeVar("T")


class _Frame(BaseModel):
    model_config = ConfigDict(extra="forbid", ser_json_inf_nan="constants", frozen=True)


class Random(_Frame):
    """A generator of random numbers, with its state and what it was seeded by, so that it can spawn."""

    entropy: int | list[int]
    spawn_key: list[int]
    spawned: int
    state: int
    inc: int
    has_uint32: int
    uinteger: int

    @classmethod
    def of(cls, rng: np.random.Generator) -> Random:
        """Describe a generator."""
        state, seeds = rng.bit_generator.state, rng.bit_generator.seed_seq
        if state["bit_generator"] != "PCG64" or not isinstance(seeds, np.random.SeedSequence):
            raise TypeError(f"a remote environment takes NumPy's default generator, not {rng.bit_generator!r}")
        entropy = seeds.entropy
        return cls(
            entropy=[int(n) for n in entropy] if isinstance(entropy, list | tuple | np.ndarray) else int(entropy or 0),
            spawn_key=[int(n) for n in seeds.spawn_key],
            spawned=seeds.n_children_spawned,
            **state["state"],
            has_uint32=state["has_uint32"],
            uinteger=state["uinteger"],
        )

    def generator(self) -> np.random.Generator:
        """Return a generator that gives the same numbers."""
        seeds = np.random.SeedSequence(self.entropy, spawn_key=self.spawn_key, n_children_spawned=self.spawned)
        bits = np.random.PCG64(seeds)
        state = {"state": self.state, "inc": self.inc}
        bits.state = {
            "bit_generator": "PCG64",
            "state": state,
            "has_uint32": self.has_uint32,
            "uinteger": self.uinteger,
        }
        return np.random.Generator(bits)


class Describe(_Frame):
    """Ask what an environment is."""

    op: Literal["describe"] = "describe"
    call: int
    env: str


class Tasks(_Frame):
    """Ask for some of its tasks."""

    op: Literal["tasks"] = "tasks"
    call: int
    env: str
    split: str
    start: int = Field(ge=0)
    count: int = Field(ge=1, le=MAX_TASKS)


class Open(_Frame):
    """Take a lease, and reset an instance."""

    op: Literal["open"] = "open"
    call: int
    env: str
    env_args: dict[str, JSON]
    task: Task
    rng: Random


class Act(_Frame):
    """Take a step."""

    op: Literal["step"] = "step"
    call: int
    lease: str
    action: Message


class Score(_Frame):
    """Ask for the rewards of the finished episode: a line of an episode file."""

    op: Literal["score"] = "score"
    call: int
    lease: str
    episode: str
    seconds: float | None


class Compare(_Frame):
    """Ask what a group reward gives the episodes of a task."""

    op: Literal["compare"] = "compare"
    call: int
    env: str
    env_args: dict[str, JSON]
    reward: str
    group: str
    episodes: list[str]


class Play(_Frame):
    """Ask for the next answer of the environment's own script."""

    op: Literal["play"] = "play"
    call: int
    lease: str
    script: Literal["oracle", "demonstrate"]
    rng: Random | None = None
    observed: tuple[Message, ...] = ()


class Close(_Frame):
    """Give the lease back, whatever it is doing."""

    op: Literal["close"] = "close"
    call: int
    lease: str


Request: TypeAlias = Annotated[
    Describe | Tasks | Open | Act | Score | Compare | Play | Close, Field(discriminator="op")
]


class Argument(_Frame):
    """A parameter of the environment's constructor."""

    name: str
    required: bool = False
    more: bool = False
    """Whether it stands for any others: `**kwargs`."""


class Described(_Frame):
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


class Opened(_Frame):
    """A lease, and the opening of its episode."""

    lease: str
    observation: tuple[Message, ...]
    tools: tuple[ToolSpec, ...]


class Problem(_Frame):
    """An exception of the environment, or the server's own."""

    type: str
    message: str
    traceback: str = ""

    def error(self) -> Exception:
        """Return the exception: of the same class if it is Python's or agent_rl's."""
        cls = getattr(errors, self.type, None) or getattr(builtins, self.type, None)
        if not (isinstance(cls, type) and issubclass(cls, Exception)):
            return RuntimeError(f"{self.type}: {self.message}")
        try:
            return cls(self.message)
        except TypeError:  # it takes more than a message
            return RuntimeError(f"{self.type}: {self.message}")


class Reply(_Frame):
    """The answer to a call: an error, or what was asked for."""

    call: int
    error: Problem | None = None
    described: Described | None = None
    tasks: list[Task] | None = None
    opened: Opened | None = None
    step: Step | None = None
    state: str | None = None
    """What `state_hash` says after `open` or `step`."""
    rewards: tuple[Reward, ...] | None = None
    values: list[float | None] | None = None
    """Of a group reward."""
    answer: Message | None = None
    """Of a script; None at its end."""


_REQUEST: TypeAdapter[Request] = TypeAdapter(Request)
_REPLY = TypeAdapter(Reply)


def dump(frame: BaseModel) -> str:
    """Return a frame as text.

    Raises:
        TypeError: if it holds something that JSON can't.
    """
    try:
        return _json(frame)
    except PydanticSerializationError as error:
        if "surrogates not allowed" not in str(error):
            raise TypeError(f"{type(frame).__name__} holds something that JSON can't: {error}") from error
    values = {name: escaped(getattr(frame, name)) for name in type(frame).model_fields}
    return _json(type(frame).model_construct(None, **values))


def load_request(text: str | bytes) -> Request:
    """Return the request of a frame.

    Raises:
        RemoteError: if it is none.
    """
    return _load(_REQUEST, text)


def load_reply(text: str | bytes) -> Reply:
    """Return the reply of a frame.

    Raises:
        RemoteError: if it is none.
    """
    return _load(_REPLY, text)
