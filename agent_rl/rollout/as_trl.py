"""Our environments for TRL: `as_trl("shop-v0")` makes a class for the `environment_factory` of its trainers."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal, Optional, cast

from agent_rl.concurrency import LoopThread, maybe_await
from agent_rl.core.messages import JSON, Message, Task, ToolCall
from agent_rl.core.trajectory import FinishReason
from agent_rl.errors import ConfigError
from agent_rl.gym.budget import Budget
from agent_rl.gym.env import Env
from agent_rl.gym.registry import EnvSpec, spec
from agent_rl.gym.tasks import TRAIN, episode_seed
from agent_rl.gym.tool import ToolSpec
from agent_rl.policy.base import Reply
from agent_rl.rendering.chat_format import require_text
from agent_rl.rollout.as_gymnasium import SteppedEpisodes, observed_text
from agent_rl.rollout.closing import close_env
from agent_rl.rollout.job import Job
from agent_rl.seeds import Stream, rng

OVER = "The episode is over."
RESERVED = ("reset", "get_reward", "answer", "rows")
_TYPES: Mapping[str, Any] = {
    "string": str,
    "integer": int,
    "number": float,
    "boolean": bool,
    "object": dict,
    "array": list,
    "null": None,
}


class TrlEnv:
    """An environment of ours as TRL plays it: a method for each tool, and `answer` for a message without calls.

    TRL never shows an environment the last message: what is not given to `answer` is not scored as an answer. Each call
    is a turn of the budget.
    """

    source: ClassVar[EnvSpec]
    split: ClassVar[str]
    seed: ClassVar[int]
    budget: ClassVar[Budget | None]
    env_args: ClassVar[Mapping[str, JSON]]

    def __init__(self) -> None:
        self._games = SteppedEpisodes(self)
        self._resets = 0

    @classmethod
    def rows(cls, n: int) -> list[dict[str, Any]]:
        """Return rows of the first `n` tasks for a `Dataset`; TRL repeats each, so that a group has one task."""
        tasks = cls.source.tasks
        size = tasks.size(cls.split)
        chosen = (tasks.get(cls.split, index) for index in range(n if size is None else min(n, size)))
        return [{"prompt": [{"role": "user", "content": ""}], "task": json.dumps(task)} for task in chosen]

    def reset(self, task: str | None = None, **row: object) -> str:
        """Begin an episode of a row of `rows`, or of a task of its own; return the opening."""
        tasks = self.source.tasks
        own = self._resets % (tasks.size(self.split) or self._resets + 1)
        found: Task = tasks.get(self.split, own) if task is None else json.loads(task)
        seed = episode_seed(self.seed, found, self._resets)
        self._resets += 1
        game = self._games.begin(Job(self.source, found, seed, budget=self.budget, env_args=self.env_args))
        require_text(game.run.messages, self.source.id)
        return observed_text(game.run.messages)

    def answer(self, text: str) -> str:
        """Say something: the final answer, or the next move where there is more to say.

        Args:
            text: what is said.
        """
        return self._play(Message("assistant", text))

    def get_reward(self) -> float | None:
        """Return the episode's reward, None if it is not scored; it ends here at the latest."""
        if (game := self._games.latest) is None:
            return None
        if not game.task.done():
            game.advance(Reply(Message("assistant"), FinishReason.LENGTH))
        return game.task.result().reward

    def _play(self, message: Message) -> str:
        if (game := self._games.latest) is None or game.task.done():
            return OVER
        before = len(game.run.messages) + 1
        game.advance(Reply(message, FinishReason.STOP))
        require_text(game.run.messages[before:], self.source.id)
        said = "\n".join(message.content for message in game.run.messages[before:])
        return f"{said}\n{OVER}".strip() if game.task.done() else said


def as_trl(
    env: str, *, split: str = TRAIN, seed: int = 0, budget: Budget | None = None, **env_args: JSON
) -> type[TrlEnv]:
    """Return a class for the `environment_factory` of TRL's trainers; its `rows(n)` are a data set's.

    Example::

        Shop = ar.as_trl("shop-v0")
        GRPOTrainer(model, args=args, environment_factory=Shop, train_dataset=Dataset.from_list(Shop.rows(256)))

    Args:
        env: a registered id.
        split: whose tasks are played.
        seed: of the episodes.
        budget: instead of the environment's own.
        env_args: passed to the environment's constructor.

    Raises:
        UnknownEnvError: if there is no such environment.
        ConfigError: if it has no such split or arguments, or a tool of a name that TRL or this class uses.
    """
    source = spec(env)
    source.check_arguments(env_args)
    members: dict[str, object] = {"source": source, "split": source.tasks.require(split), "seed": seed}
    members |= {"budget": budget, "env_args": env_args, "__doc__": source.cls.__doc__}
    for tool in _tools_of(source, split, env_args):
        if tool.name in RESERVED or tool.name.startswith("_") or not tool.name.isidentifier():
            raise ConfigError(f"{source.id}: a tool called '{tool.name}' can't be a method here; rename it")
        members[tool.name] = _method(tool)
    return type(source.cls.__name__, (TrlEnv,), members)


def _tools_of(source: EnvSpec, split: str, env_args: Mapping[str, JSON]) -> Sequence[ToolSpec]:
    """Return an environment's tools; of one that has them from `reset` on, those of its first task."""
    if source.cls.tools is Env.tools:
        return ()
    try:
        found = source.make(**env_args).tools
    except Exception:  # of a toolbox that `reset` makes
        found = ()
    if found:
        return found
    loop = LoopThread("agent_rl tools for TRL")
    try:
        return loop.wait(_tools_of_first(source, split, env_args))
    finally:
        loop.close()


async def _tools_of_first(source: EnvSpec, split: str, env_args: Mapping[str, JSON]) -> Sequence[ToolSpec]:
    env, task = source.make(**env_args), source.tasks.get(split, 0)
    try:
        await maybe_await(env.reset(task, rng(Stream.ENVIRONMENT, 0)))
        return env.tools
    finally:
        await close_env(env, source.budget.close_seconds)


def _method(tool: ToolSpec) -> Callable[..., str]:
    """Return a method with the signature and the docstring that TRL reads a tool's schema off."""

    def call(self: TrlEnv, **arguments: Any) -> str:
        return self._play(Message("assistant", tool_calls=(ToolCall("call_0", tool.name, arguments),)))

    schemas = cast("Mapping[str, Mapping[str, Any]]", tool.parameters.get("properties", {}))
    required = cast("list[str]", tool.parameters.get("required", []))
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    parameters = [
        inspect.Parameter(
            name,
            kind,
            annotation=_hint(schema),
            default=inspect.Parameter.empty if name in required else schema.get("default"),
        )
        for name, schema in sorted(schemas.items(), key=lambda item: item[0] not in required)
    ]
    lines = [
        f"    {name}: {' '.join(str(schema.get('description', name)).split())}" for name, schema in schemas.items()
    ]
    call.__name__ = call.__qualname__ = tool.name
    call.__doc__ = "\n".join([tool.description or tool.name, *(["", "Args:", *lines] if lines else [])])
    call.__annotations__ = {p.name: p.annotation for p in parameters} | {"return": str}
    signature = inspect.Signature([inspect.Parameter("self", kind), *parameters], return_annotation=str)
    call.__signature__ = signature  # type: ignore[attr-defined]
    return call


def _hint(schema: Mapping[str, Any]) -> Any:
    """Return the type hint of a JSON schema; Any of what has none."""
    if "enum" in schema:
        return Literal[tuple(schema["enum"])]
    options = schema.get("anyOf", ())
    plain = [option for option in options if option.get("type") != "null"]
    if len(plain) == 1:
        return Optional[_hint(plain[0])]  # noqa: UP045 - a hint made of a value
    kind = schema.get("type")
    if kind == "array" and schema.get("items"):
        return list[_hint(schema["items"])]  # type: ignore[misc]
    return _TYPES.get(kind, Any) if isinstance(kind, str) else Any
