"""Environments: `Env` speaks in messages and steps, `ToolEnv` answers tool calls; a fresh instance per episode."""

from __future__ import annotations

import copy
import functools
import reprlib
from collections.abc import Awaitable, Collection, Generator, Mapping, Sequence
from itertools import product
from typing import ClassVar, TypeAlias, cast

import numpy as np

from agent_rl.concurrency import call
from agent_rl.core.episode import Episode, Reward
from agent_rl.core.images import Image
from agent_rl.core.judgement import Judgement
from agent_rl.core.messages import Message, Observation, Step, Task
from agent_rl.core.sandbox_loss import SandboxLoss
from agent_rl.errors import DefinitionError
from agent_rl.gym.budget import Budget
from agent_rl.gym.reward import RewardComponent, collect_rewards, declared_members, is_reward
from agent_rl.gym.scoring import Scoring
from agent_rl.gym.task_files import TaskRows
from agent_rl.gym.tasks import TaskFunction
from agent_rl.gym.tool import AnyTool, Tool, ToolSpec
from agent_rl.gym.tool_calls import call_tools

_BASES = f"{__package__}."
"""Where the classes are that environments derive from."""

Script: TypeAlias = Generator[str | Message, tuple[Message, ...], None]
"""Plays the policy: yields an answer (a str is an assistant message), is sent the observation that it led to."""


def _collect_tools(cls: type[ToolEnv]) -> dict[str, AnyTool]:
    tools: dict[str, AnyTool] = {}
    if callable(cls.extra_tools):
        what = "one tool" if isinstance(cls.extra_tools, Tool) else repr(cls.extra_tools)
        raise DefinitionError(f"{cls.__name__}.extra_tools is {what}: write a tuple of tools, extra_tools = (tool,)")
    own = dict(declared_members(cls, _is_tool, "@tool"))
    _refuse_replacing(cls, own, "tool", "@tool")
    for tool in [*own.values(), *cls.extra_tools]:
        if not isinstance(tool, Tool):
            raise DefinitionError(
                f"{cls.__name__}.extra_tools holds {tool!r}, which is no tool: decorate it with @tool"
            )
        if tool.spec.name in tools:
            raise DefinitionError(
                f"{cls.__name__} has two tools called '{tool.spec.name}'; rename one: @tool(name=...)"
            )
        tools[tool.spec.name] = tool
    return tools


def _refuse_replacing(cls: type[Env], names: Collection[str], kind: str, decorator: str) -> None:
    """Refuse what has a decorator and the name of something that `Env`, `ToolEnv` or another of their kind has."""
    ours = [base for base in cls.__mro__ if base.__module__.startswith(_BASES) and base is not cls]
    for base, name in product(ours, names):
        is_declared = _is_tool(vars(base).get(name)) or is_reward(vars(base).get(name))
        if not is_declared and (name in vars(base) or name in vars(base).get("__annotations__", ())):
            raise DefinitionError(
                f"{cls.__name__}.{name} is a {kind} in the place of {base.__name__}.{name}, which it would "
                f'replace: call the method otherwise, and the {kind} by {decorator}(name="{name}")'
            )


def _is_tool(member: object) -> bool:
    return isinstance(member, Tool)


class Env:
    """One episode's world: `reset` opens it, `step` answers the policy, `@reward` methods judge how it went."""

    default_tasks: ClassVar[Mapping[str, TaskRows] | TaskRows | TaskFunction | None] = None
    """What `register` takes where it is given no tasks."""
    default_budget: ClassVar[Budget] = Budget()
    """What `register` takes where it is given no budget."""
    reward_components: ClassVar[tuple[RewardComponent, ...]] = ()
    group_reward_components: ClassVar[tuple[RewardComponent, ...]] = ()
    is_judged: ClassVar[bool] = False
    """Whether a judge rewards its episodes, which takes long: others are played meanwhile."""
    snapshot_attributes: ClassVar[Sequence[str] | None] = None
    """The names of all attributes that change after `reset` (with that of the `rng`, if it is drawn from later on):
    what the default `snapshot` copies. None: not declared, so there are no snapshots."""
    blocking: ClassVar[bool] = False
    """Whether sync methods take long enough to keep others waiting (a simulator, `time.sleep`, a blocking HTTP client).
    Each call then runs in a worker thread while other episodes continue; one that the budget's seconds run out on
    continues in the background. Without it, all but `close` and rewards run on the event loop, one after the other."""
    asking: bool = False
    """Whether somebody else than the policy, as a dialogue's user, has yet to answer: an episode whose time runs out on
    that has failed."""
    _calls_tools: ClassVar[bool] = False

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        cls.collect_rewards()
        if not cls._calls_tools and (stray := dict(declared_members(cls, _is_tool, "@tool"))):
            raise DefinitionError(f"{cls.__name__}.{next(iter(stray))} is a tool, but only a ToolEnv calls tools")
        if isinstance(cls.snapshot_attributes, str):
            raise DefinitionError(
                f"{cls.__name__}.snapshot_attributes is the string '{cls.snapshot_attributes}'; give a tuple of names"
            )
        if (cls.snapshot is Env.snapshot) != (cls.restore is Env.restore):
            raise DefinitionError(f"{cls.__name__} defines one of snapshot and restore; each needs the other")

    @classmethod
    def collect_rewards(cls) -> None:
        """List the components of the reward, of a class that got another one, too."""
        cls.reward_components, cls.group_reward_components = collect_rewards(cls)
        components = (*cls.reward_components, *cls.group_reward_components)
        _refuse_replacing(cls, [c.attribute for c in components], "reward", "@ar.reward")
        cls.is_judged = any(c.is_judged for c in cls.reward_components)

    def reset(self, task: Task, rng: np.random.Generator) -> Observation | Awaitable[Observation]:
        """Begin the episode, sync or async; return what the policy sees first.

        A str is a user message, and so is an `Image`, or a list of texts and images.

        Args:
            task: what the episode is about.
            rng: this episode's own random numbers; an environment that uses no others can be replayed.
        """
        raise NotImplementedError(f"{type(self).__name__} has to define reset(self, task, rng)")

    def step(self, action: Message) -> Step | Awaitable[Step]:
        """Answer the policy's message, sync or async."""
        raise NotImplementedError(f"{type(self).__name__} has to define step(self, action), or subclass ToolEnv")

    def close(self) -> Awaitable[None] | None:
        """Free what the episode held, sync (in a worker thread) or async; called once, also after a failure."""
        return None

    @property
    def tools(self) -> tuple[ToolSpec, ...]:
        """The tools in the policy's prompt."""
        return ()

    @property
    def sandbox_loss(self) -> SandboxLoss | None:
        """How the policy's code ended the sandbox that it worked in, if it did: the episode counts as failed then."""
        return None

    def state_hash(self) -> str | Awaitable[str | None] | None:
        """Say, sync or async, which state the task is in; asked before each reply of the policy.

        Turns of one task that got the same string were taken in the same state: algorithms compare what came of them
        (GiGPO) or let them share an estimate (VinePPO). Into it belongs all that decides what can still be earned: what
        has been found out or done, order-independent, and what already costs reward.
        Wording, the number of turns taken and the task itself don't belong into it: two ways to say the same thing
        would make two states that are never compared. Give a digest of what is long.

        Returns:
            None, unless overridden: the environment does not say.
        """
        return None

    def snapshot(self) -> object:
        """Return, sync or async, what has changed since `reset`, asked for before a reply of the policy.

        A fresh instance after `reset` with the same task and an equal `rng`, and `restore` of this, must continue
        exactly as this one does. The snapshot must not change while this instance continues; it is kept in memory,
        never stored.
        Unless overridden, it is a deep copy of the attributes named in `snapshot_attributes`.

        Raises:
            NotImplementedError: if there is no such list.
        """
        if self.snapshot_attributes is None:
            raise NotImplementedError(
                f"{type(self).__name__} has no snapshots: list the attributes that change after reset in "
                "snapshot_attributes = (...), () if none does; or define snapshot(self) and restore(self, snapshot)"
            )
        return copy.deepcopy({name: getattr(self, name) for name in self.snapshot_attributes})

    def restore(self, snapshot: object) -> Awaitable[None] | None:
        """Take a snapshot's state on, sync or async; called once, after `reset`. The snapshot may be used again.

        Raises:
            TypeError: if an overridden `snapshot` returned something else than the default does.
        """
        if not isinstance(snapshot, Mapping):
            raise TypeError(f"{type(self).__name__} can't restore a {type(snapshot).__name__}; define restore, too")
        for name, value in copy.deepcopy(dict(snapshot)).items():
            setattr(self, name, value)
        return None

    @classmethod
    def has_snapshots(cls) -> bool:
        """Whether `snapshot` is supported."""
        return cls.snapshot_attributes is not None or cls.snapshot is not Env.snapshot

    async def score(
        self, episode: Episode, seconds: float | None = None, judgements: list[Judgement] | None = None
    ) -> tuple[Reward, ...]:
        """Run the `@reward` methods on the finished episode: inline ones, then sync ones in a thread beside async ones.

        Args:
            episode: the finished one.
            seconds: how long they may take together.
            judgements: a list for those that they return, filled even if another one raises.

        Raises:
            TypeError: if one returns something that is no number.
            ValueError: if one returns NaN or an infinity.
            TimeoutError: if they take more than `seconds` together.
        """
        scoring = Scoring(self, self.reward_components, episode.with_own_task(), judgements)
        return await scoring.run(seconds, blocking=self.blocking)

    def oracle(self) -> Script:
        """Play a solution of the task that `reset` was given."""
        raise NotImplementedError(
            f"{type(self).__name__} has no oracle: define oracle(self), a generator that yields the answers of a "
            "perfect policy, to check the environment or to warm a model up"
        )

    def demonstrate(self, rng: np.random.Generator) -> Script:
        """Play the task as a policy would that has the form right but makes mistakes; for warm starts.

        Without one, the oracle plays, which leaves less to learn.
        """
        return self.oracle()


class ToolEnv(Env):
    """An environment whose steps are tool calls: its own `@tool` methods and the functions in `extra_tools`.

    A message with calls is answered with their results; one without is the final answer, unless `on_answer` says
    otherwise. A tool with `ends=True` ends the episode, too.
    """

    extra_tools: ClassVar[Sequence[AnyTool]] = ()
    _tools: ClassVar[Mapping[str, AnyTool]] = {}
    _calls_tools: ClassVar[bool] = True

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        cls._tools = _collect_tools(cls)

    @property
    def toolbox(self) -> Mapping[str, AnyTool]:
        """The tools by name; override it where they differ from instance to instance."""
        return self._tools

    @property
    def tools(self) -> tuple[ToolSpec, ...]:
        """The tools in the policy's prompt."""
        return tuple(tool.spec for tool in self.toolbox.values())

    async def step(self, action: Message) -> Step:
        """Make the message's tool calls, or take it as an answer."""
        if action.tool_calls:
            toolbox = self.toolbox
            results = await call_tools(toolbox, action.tool_calls, self)
            ends = any(
                m.tool_error is None and toolbox[c.name].ends for m, c in zip(results, action.tool_calls, strict=True)
            )
            return Step(results, terminated=ends)
        thread = f"{type(self).__name__}.on_answer" if self.blocking else None
        return await call(functools.partial(self.on_answer, action), thread=thread)

    def on_answer(self, action: Message) -> Step | Awaitable[Step]:
        """Take a message without tool calls, sync or async; ends the episode unless overridden."""
        return Step(terminated=True)


def messages_of(observation: Observation) -> tuple[Message, ...]:
    """Return an observation as messages; a str, an image, or a list of texts and images is one user message.

    Raises:
        TypeError: if it holds something else than messages.
    """
    if isinstance(observation, str):
        return (Message("user", observation),)
    if isinstance(observation, tuple):
        messages: tuple[object, ...] = observation
        if len(messages) == 2 and isinstance(messages[1], dict):
            raise TypeError("an observation is a pair with a dict, as Gymnasium's: return it alone, without info")
    else:
        messages = tuple(observation) if isinstance(observation, Sequence) else (observation,)
    for message in messages:
        if not isinstance(message, Message):
            if any(isinstance(m, Image) for m in messages) and all(isinstance(m, str | Image) for m in messages):
                return (Message("user", parts=cast("tuple[str | Image, ...]", messages)),)
            hint = ": write ar.Message(role, content)" if isinstance(message, dict) else ""
            shown = reprlib.repr(message)
            raise TypeError(f"an observation is a str, a Message or a sequence of them, not {shown}{hint}")
    return cast("tuple[Message, ...]", messages)
