"""Environments of verifiers, version 0.1: `from_verifiers(env)` makes an `Env` of a data set, tools and a rubric.

Its own methods do the work (`setup_state`, `env_response`, tools, stop conditions, clean-up), without its clients: our
policy gives the replies. Each function of the rubric is a component of the reward, under its name and with its weight.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, cast

import numpy as np

from agent_rl.core.episode import Episode, EpisodeGroup
from agent_rl.core.messages import JSON, Message, Step, Task, ToolCall
from agent_rl.envs.adapters.verifiers_shape import asked, from_shape, score_method
from agent_rl.errors import ConfigError
from agent_rl.gym.budget import Budget
from agent_rl.gym.env import Env
from agent_rl.gym.reward import group_reward
from agent_rl.gym.tool import ToolSpec

CUT = ("max_turns_reached", "max_total_completion_tokens_reached", "prompt_too_long")
"""Stop conditions that truncate."""


class VerifiersEnv(Env):
    """A task of an environment of verifiers, `foreign`, which all episodes share."""

    foreign: ClassVar[Any]

    def __init__(self) -> None:
        self.state: Any = None
        self._prompt: list[Any] = []
        self._scores: dict[str, float] | None = None
        self._once = asyncio.Lock()
        self._cleaned = False
        self._heard = 0
        """Replies that are in the state."""

    @property
    def tools(self) -> tuple[ToolSpec, ...]:
        """The task's tools, or the environment's."""
        tools = self.foreign.tool_defs if self.state is None else self.state["tool_defs"]
        return tuple(ToolSpec(t.name, t.description, cast("Mapping[str, JSON]", t.parameters)) for t in tools or ())

    async def reset(self, task: Task, rng: np.random.Generator) -> tuple[Message, ...]:
        """Begin with the task's prompt."""
        from verifiers.clients import Client

        absent = type("Absent", (Client,), dict.fromkeys(Client.__abstractmethods__, _no_client))
        self.state = await self.foreign.init_state(dict(task), absent(None), "agent_rl", {})
        await self.foreign.setup_state(self.state)
        step = await self._continued()
        if step.terminated or step.truncated:
            raise RuntimeError(f"it stopped before the first reply: {self.state.get('stop_condition')}")
        return step.observation

    async def step(self, action: Message) -> Step:
        """Add the reply; let the environment respond, unless it stops."""
        if self.state["is_completed"]:
            raise RuntimeError(f"the episode is over: {self.state.get('stop_condition')}")
        await self._hear(action)
        return await self._continued()

    async def _hear(self, action: Message, *, is_cut: bool = False) -> None:
        """Add a reply to the state."""
        from verifiers.types import Response, ResponseMessage

        self._heard += 1
        message = ResponseMessage(
            content=action.content,
            reasoning_content=action.reasoning,
            tool_calls=[
                {"id": call.id, "name": call.name, "arguments": call.error or json.dumps(dict(call.arguments))}
                for call in action.tool_calls
            ]
            or None,
            finish_reason="length" if is_cut else "tool_calls" if action.tool_calls else "stop",
            is_truncated=is_cut,
        )
        response = Response(id="", created=0, model="agent_rl", message=message)
        await self.foreign.add_model_response(self.state, self._prompt, response)

    async def _continued(self) -> Step:
        """Return what the environment says next."""
        from verifiers.utils.message_utils import maybe_normalize_messages

        state, foreign, seen = self.state, self.foreign, len(self._prompt)
        if not await foreign.is_completed(state):
            prompt = maybe_normalize_messages(await foreign.get_prompt_messages(state), field_name="prompt")
            said = state.get("final_env_response")
            if said is None:
                if prompt[:seen] != self._prompt:
                    rewrites = f"{type(foreign).__name__}.get_prompt_messages rewrites the prompt"
                    raise NotImplementedError(f"{rewrites}; a conversation only grows here")
                self._prompt = prompt
                return Step(tuple(map(_ours, prompt[seen + (seen > 0) :])))
            await foreign.is_completed(state)
        else:
            said = ()
        if state.get("error") is not None:
            raise state["error"]
        is_cut = state.get("stop_condition") in CUT and foreign.max_turns != 1
        last = tuple(map(_ours, maybe_normalize_messages(said, field_name="final_env_response"))) if said else ()
        return Step(last, terminated=not is_cut, truncated=is_cut)

    async def close(self) -> None:
        """Clean up, as the environment and the rubric ask."""
        if self.state is not None:
            await self._clean_up()
            await self.foreign.rubric.cleanup(self.state)

    async def _clean_up(self) -> None:
        if not self._cleaned:
            self._cleaned = True
            await self.foreign.cleanup(self.state)  # it renders the completion, too

    async def score_of(self, name: str, episode: Episode) -> float:
        """Return what a function of the rubric says; all are asked in their order, as they may share the state."""
        async with self._once:
            if self._scores is None:
                if episode.turns > self._heard:  # a reply that was cut
                    await self._hear(episode.messages[-1], is_cut=True)
                await self._clean_up()
                self._scores = {
                    each: float(await asked(function, rubric.score_objects(self.state)))
                    for each, rubric, function, _ in _functions(self.foreign.rubric, group=False)
                }
        return self._scores[name]

    async def group_scores_of(self, name: str, group: EpisodeGroup) -> list[float]:
        """Return what a function of the rubric says of a group."""
        states = [_state_of(episode) for episode in group.episodes]
        _, rubric, function, _ = next(f for f in _functions(self.foreign.rubric, group=True) if f[0] == name)
        return [float(score) for score in await asked(function, rubric.group_score_objects(states))]


def from_verifiers(env: object) -> type[Env]:
    """Return an `Env` class of an environment of verifiers 0.1, or of an object with its shape, for `@ar.register`.

    Its data sets are the `default_tasks`, its `max_turns` the `default_budget`. A function of the rubric that raises
    fails the episode; verifiers itself would give 0.

    Args:
        env: what `load_environment` returns: a `ToolEnv`, a `SingleTurnEnv`, or any other `MultiTurnEnv`; or an object
            with a data set, reward functions and perhaps tools, as `verifiers_shape` describes it.

    Raises:
        ConfigError: if it is something else; it says what it lacks.
    """
    foreign: Any = env
    if hasattr(env, "envs"):
        raise ConfigError(f"{env!r:.80} is an EnvGroup: register each of its environments")
    if not all(hasattr(env, name) for name in ("rubric", "is_completed", "get_prompt_messages", "add_model_response")):
        return from_shape(env, sys._getframe(1).f_globals["__name__"])
    sets = {"train": foreign.build_dataset(), "eval": foreign.build_eval_dataset()}
    members: dict[str, Any] = {
        "foreign": env,
        "default_tasks": {split: rows for split, rows in sets.items() if rows is not None},
        "default_budget": Budget(turns=foreign.max_turns) if foreign.max_turns > 0 else Budget(),
        "__doc__": (type(env).__doc__ or "An environment of verifiers.").strip().split("\n")[0],
        "__module__": sys._getframe(1).f_globals["__name__"],
    }
    for name, _, _, weight in _functions(foreign.rubric, group=False):
        members[f"score_{name}"] = score_method(name, weight)
    for name, _, _, weight in _functions(foreign.rubric, group=True):
        members[f"score_{name}"] = group_reward(weight=weight, name=name)(_group_method(name))
    return type(type(env).__name__, (VerifiersEnv,), members)


def _group_method(name: str) -> Any:
    async def score(self: VerifiersEnv, group: EpisodeGroup) -> list[float]:
        return await self.group_scores_of(name, group)

    return score


def _functions(rubric: Any, *, group: bool) -> Iterator[tuple[str, Any, Any, float]]:
    """Yield the rubric's functions, those with a weight first: name, rubric, function and weight."""
    rubrics: Sequence[Any] = getattr(rubric, "rubrics", (rubric,))
    found = [(one, f, w) for one in rubrics for f, w in zip(one.funcs, one.weights, strict=True)]
    names = [getattr(function, "__name__", repr(function)) for _, function, _ in found]
    for index, (one, function, weight) in sorted(enumerate(found), key=lambda item: item[1][2] == 0):
        if one._is_group_func(function) == group:
            before = names[:index].count(names[index])
            yield f"{names[index]}_{before + 1}" if before else names[index], one, function, float(weight)


def _state_of(episode: Episode) -> Any:
    from verifiers.types import State
    from verifiers.utils.message_utils import normalize_messages

    prompt = normalize_messages(cast(Any, episode.task["prompt"]), field_name="prompt")
    said = [_theirs(message) for message in episode.messages[len(prompt) :]]
    state = State(input=dict(episode.task))
    state["completion"] = normalize_messages(cast(Any, said), field_name="completion")
    state["trajectory"] = []
    return state


def _theirs(message: Message) -> dict[str, object]:
    found: dict[str, object] = {"role": message.role, "content": message.content}
    if message.tool_calls:
        calls = [{"id": c.id, "name": c.name, "arguments": json.dumps(dict(c.arguments))} for c in message.tool_calls]
        found["tool_calls"] = calls
    return found | ({"tool_call_id": message.tool_call_id} if message.tool_call_id else {})


def _ours(message: Any) -> Message:
    content = message.content or ""
    if not isinstance(content, str):
        if any(part.get("type") != "text" for part in content):
            raise TypeError("a message has parts that are no text")
        content = "\n".join(part.get("text") for part in content)
    calls = tuple(
        ToolCall(call.id, call.name, json.loads(call.arguments)) for call in getattr(message, "tool_calls", None) or ()
    )
    id = getattr(message, "tool_call_id", None)
    return Message(message.role, content, tool_calls=calls, tool_call_id=id)


def _no_client(self: object, *args: object, **kwargs: object) -> None:
    raise RuntimeError("this environment is played by agent_rl's policy: it has no client")
