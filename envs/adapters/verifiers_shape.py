"""Objects with the shape of verifiers' environments, of any class: `from_verifiers` plays them without verifiers.

Read are `dataset`, rows with a `prompt` or a `question`, and the reward functions with their weights: `funcs` and
`weights`, or `reward_funcs` and `reward_weights`, of `rubric`, of its `rubrics`, or of the object itself. All else may
be left out: `eval_dataset`, `system_prompt`, `few_shot`, `max_turns`, `tools` (functions), `setup_state(state)`,
`is_completed(messages, state)` and `env_response(messages, state)`, sync or async, on OpenAI's messages. Without
`env_response` the tools are called here, and a message without calls is the answer.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np

from agent_rl.concurrency import maybe_await
from agent_rl.core.episode import Episode
from agent_rl.core.messages import Message, Step, Task
from agent_rl.errors import ConfigError
from agent_rl.formats.chat import chat_messages, read_chat
from agent_rl.gym.budget import Budget
from agent_rl.gym.env import ToolEnv
from agent_rl.gym.reward import reward
from agent_rl.gym.tool import Tool, tool

_GIVEN = frozenset(("prompt", "completion", "answer", "info", "task", "state", "parser"))
"""What a reward function may ask for besides the row's columns, by its parameters' names."""
_METHODS = {"setup_state": ("state",), "is_completed": ("messages", "state"), "env_response": ("messages", "state")}


class Scoring(NamedTuple):
    """A reward function."""

    name: str
    function: Callable[..., Any]
    weight: float


class ShapedEnv(ToolEnv):
    """A task of such an object, `foreign`, which all episodes share."""

    foreign: ClassVar[Any]
    scorings: ClassVar[Sequence[Scoring]]

    def __init__(self) -> None:
        self.state: dict[str, Any] = {}
        self._scores: dict[str, float] | None = None
        self._once = asyncio.Lock()

    async def reset(self, task: Task, rng: np.random.Generator) -> tuple[Message, ...]:
        """Begin with the task's prompt."""
        self.state = {"answer": "", "info": {}, "task": "default", **task, "turn": 0}
        self.state |= {"completion": [], "responses": []}
        self.state["prompt"] = opening = _opening(self.foreign, task)
        if (set_up := getattr(self.foreign, "setup_state", None)) is not None:
            self.state = await asked(set_up, {"state": self.state}) or self.state
        return read_chat(opening)

    async def step(self, action: Message) -> Step:
        """Add the reply; let the object, or the tools, respond, unless it is completed."""
        self.state["turn"] += 1
        self._add([action])
        self.state["responses"].append(self.state["completion"][-1])
        if await self._is_completed():
            return Step(terminated=True)
        if (respond := getattr(self.foreign, "env_response", None)) is None:
            step = await super().step(action)
            self._add(step.observation)
            return step
        said = await asked(respond, {"messages": self._messages, "state": self.state})
        if isinstance(said, tuple):  # as before version 0.1.6
            said, self.state = said
        said = [{"role": "user", "content": said}] if isinstance(said, str) else said
        messages = read_chat([said] if isinstance(said, Mapping) else said) if said else ()
        self._add(messages)
        return Step(messages, terminated=not messages or await self._is_completed())

    @property
    def _messages(self) -> list[Any]:
        return [*self.state["prompt"], *self.state["completion"]]

    def _add(self, messages: Iterable[Message]) -> None:
        self.state["completion"] = [*self.state["completion"], *chat_messages(list(messages))]

    async def _is_completed(self) -> bool:
        ends = getattr(self.foreign, "is_completed", None)
        return ends is not None and bool(await asked(ends, {"messages": self._messages, "state": self.state}))

    async def score_of(self, name: str, episode: Episode) -> float:
        """Return what a reward function says; all are asked in their order, as they may share the state."""
        async with self._once:
            if self._scores is None:
                said = chat_messages(episode.messages[len(self.state["prompt"]) :])  # a reply that was cut, too
                self.state["completion"] = said
                parser = getattr(getattr(self.foreign, "rubric", None), "parser", None)
                given = {"parser": parser or getattr(self.foreign, "parser", None), "state": self.state}
                objects = {**self.state, **given}
                self._scores = {s.name: float(await asked(s.function, objects)) for s in self.scorings}
        return self._scores[name]


def from_shape(env: object, module: str) -> type[ShapedEnv]:
    """Return an `Env` class of an object with the shape that the module describes.

    Args:
        env: the object.
        module: the name of the module that the class is to belong to.

    Raises:
        ConfigError: if it lacks something, or a function asks for what there is not; it says what.
    """
    name = type(env).__name__
    sets = {split: _rows(getattr(env, f"{head}dataset", None)) for split, head in (("train", ""), ("eval", "eval_"))}
    tasks = {split: rows for split, rows in sets.items() if rows}
    scorings = _scorings(env)
    if not tasks:
        raise _refused(env, "`dataset`: rows with a `prompt` or a `question`")
    if not scorings:
        raise _refused(env, "reward functions: `rubric.funcs` with `rubric.weights`, or `reward_funcs`")
    columns = set.intersection(*(set(row) for rows in tasks.values() for row in rows))
    if columns.isdisjoint(("prompt", "question")):
        raise _refused(env, f"`prompt` or `question` in its rows, which have {', '.join(sorted(columns)) or 'nothing'}")
    for scoring in scorings:
        _require_known(f"{name}'s reward function {scoring.name}", scoring.function, columns | _GIVEN)
    for method, known in _METHODS.items():
        if (function := getattr(env, method, None)) is not None:
            _require_known(f"{name}.{method}", function, known)
    turns = getattr(env, "max_turns", None)
    members: dict[str, Any] = {
        "foreign": env,
        "scorings": scorings,
        "extra_tools": tuple(
            each if isinstance(each, Tool) else tool(each) for each in getattr(env, "tools", ()) or ()
        ),
        "default_tasks": tasks,
        "default_budget": Budget(turns=turns) if isinstance(turns, int) and turns > 0 else Budget(),
        "__doc__": (type(env).__doc__ or "An environment with the shape of verifiers'.").strip().split("\n")[0],
        "__module__": module,
    }
    for scoring in scorings:
        members[f"score_{scoring.name}"] = score_method(scoring.name, scoring.weight)
    return type(name, (ShapedEnv,), members)


def score_method(name: str, weight: float) -> Any:
    """Return a reward method that gives what the environment's `score_of` says of a function."""

    async def score(self: Any, episode: Episode) -> float:
        return float(await self.score_of(name, episode))

    return reward(weight=weight, name=name)(score)


async def asked(function: Callable[..., Any], objects: Mapping[str, object]) -> Any:
    """Call a function, sync or async, with what its parameters name."""
    parameters = inspect.signature(function).parameters
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    return await maybe_await(function(**{k: v for k, v in objects.items() if takes_all or k in parameters}))


def _refused(env: object, lacks: str) -> ConfigError:
    return ConfigError(f"{env!r:.80} is no environment of verifiers 0.1, nor has it the shape of one: it lacks {lacks}")


def _require_known(what: str, function: Callable[..., Any], known: Iterable[str]) -> None:
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    parameters = inspect.signature(function).parameters.values()
    needed = {p.name for p in parameters if p.default is p.empty and p.kind not in kinds}
    if unknown := needed - {*known}:
        raise ConfigError(f"{what} asks for {', '.join(sorted(unknown))}: there are {', '.join(sorted(known))}")


def _rows(rows: Any) -> list[dict[str, Any]]:
    return [dict(row) for row in (rows() if callable(rows) else rows) or ()]


def _scorings(env: object) -> list[Scoring]:
    """Return the reward functions, those with a weight first."""
    rubric = getattr(env, "rubric", None)
    found: list[tuple[Callable[..., Any], float]] = []
    for holder in (env,) if rubric is None else getattr(rubric, "rubrics", None) or (rubric,):
        for functions, weights in (("funcs", "weights"), ("reward_funcs", "reward_weights")):
            if held := getattr(holder, functions, None):
                given = getattr(holder, weights, None) or [1.0] * len(held)
                if len(given) != len(held):
                    counts = f"{len(held)} {functions} and {len(given)} {weights}"
                    raise ConfigError(f"{type(holder).__name__} has {counts}: give each function one weight")
                found += zip(held, map(float, given), strict=True)
                break
    names = [getattr(function, "__name__", type(function).__name__) for function, _ in found]
    scorings = [
        Scoring(f"{name}_{before + 1}" if (before := names[:at].count(name)) else name, *found[at])
        for at, name in enumerate(names)
    ]
    return sorted(scorings, key=lambda scoring: scoring.weight == 0)


def _opening(env: object, row: Mapping[str, Any]) -> list[Any]:
    """Return a row's prompt as messages, behind the system prompt and the examples."""
    asks = row.get("prompt") or row["question"]
    if not isinstance(asks, str):
        prompt = [dict(message) for message in asks]
    else:
        prompt = [*(getattr(env, "few_shot", None) or ()), {"role": "user", "content": asks}]
    system = getattr(env, "system_prompt", None)
    return [{"role": "system", "content": system}, *prompt] if system and prompt[0]["role"] != "system" else prompt
