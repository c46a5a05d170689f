"""Our environments as Gymnasium's: `gymnasium.make("agent_rl/NAME")` makes a `TextEnv`, text in and text out."""

from __future__ import annotations

import asyncio
import json
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import ClassVar, cast

import gymnasium
from gymnasium.error import ResetNeeded

from agent_rl.core.episode import Episode, Outcome
from agent_rl.core.messages import JSON, Message, Task
from agent_rl.core.trajectory import FinishReason
from agent_rl.errors import ConfigError
from agent_rl.gym.budget import Budget
from agent_rl.gym.registry import spec
from agent_rl.gym.tasks import TRAIN
from agent_rl.gym.text_space import MAX_LENGTH, AnyText
from agent_rl.gym.tool import ToolSpec
from agent_rl.policy.base import Reply
from agent_rl.rendering.hermes import CLOSE, OPEN, read_hermes, write_call
from agent_rl.rollout.clock import CALLER
from agent_rl.rollout.episode import EpisodeRun
from agent_rl.rollout.job import Job
from agent_rl.worker_threads import outside_loop

_CALL = """You may call a tool by <tool_call>{"name": ..., "arguments": {...}}</tool_call>. The tools are:"""


class TextEnv(gymnasium.Env[str, str]):
    """An environment of ours behind Gymnasium's API.

    The first observation is the opening, with the tools' schemas in it; later ones hold what is new. An action is the
    text of a reply: an answer, or `<tool_call>` with a JSON object. A step's reward is that of the step; the last one
    has that of the `@ar.reward` methods, too, so that all steps together earn the episode's reward.

    An environment that raises harms its own episode only: the step truncates, with a reward of 0 and
    `info["outcome"] == "failed"`, so that the others of a vector environment continue. After a failed `reset` the first
    step does. `episode` is the last one that ended, with all that happened.
    """

    metadata: ClassVar[dict[str, object]] = {"render_modes": ["ansi"], "render_fps": 1}  # type: ignore[misc]

    def __init__(
        self,
        env: str,
        *,
        split: str = TRAIN,
        budget: Budget | None = None,
        max_length: int = MAX_LENGTH,
        render_mode: str | None = None,
        **env_args: JSON,
    ) -> None:
        """Choose what `reset` draws from.

        Args:
            env: the id that `@ar.register` gave it.
            split: whose tasks are played.
            budget: instead of the environment's own; tokens and the time of a reply are not limited here.
            max_length: characters of a text; longer observations lose their middle.
            render_mode: "ansi", for the conversation so far, or None.
            env_args: of the environment's class.

        Raises:
            UnknownEnvError: if there is no such environment.
            ConfigError: if it has no such split or arguments.
        """
        self._ours = spec(env)
        self._ours.check_arguments(env_args)
        self._split = self._ours.tasks.require(split)
        self._budget = replace(budget or self._ours.budget, reply_seconds=None)
        self._env_args = env_args
        self.observation_space, self.action_space = AnyText(max_length), AnyText(max_length)
        self._max_length = max_length
        self.render_mode = render_mode
        self.episode: Episode | None = None
        self._games = SteppedEpisodes(self)

    def reset(
        self, *, seed: int | None = None, options: dict[str, JSON] | None = None
    ) -> tuple[str, dict[str, object]]:
        """Begin an episode; return the opening, with the task and the episode's seed in the info.

        Args:
            seed: of the draws of tasks and of the episodes' seeds, from now on.
            options: `task`, a task instead of a drawn one, or `index`, its number in the split; `seed`, the episode's.

        Raises:
            ConfigError: if there are other options, or the task is none.
        """
        super().reset(seed=seed)
        task, episode_seed = self._drawn(dict(options or {}))
        game = self._games.begin(Job(self._ours, task, episode_seed, budget=self._budget, env_args=self._env_args))
        info: dict[str, object] = {"task": json.dumps(task, ensure_ascii=False, default=str), "seed": episode_seed}
        return self._cut(game.opening()), info | game.report()

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, object]]:
        """Answer the action.

        Raises:
            ResetNeeded: if there is no episode under way.
        """
        game = self._games.latest
        if game is None:
            raise ResetNeeded("there is no episode under way: call reset first")
        earned, before = sum(s.reward for s in game.run.steps), len(game.run.messages) + 1
        if not game.task.done():  # else the reset failed, and this step says so
            game.advance(Reply(read_hermes(action), FinishReason.STOP))
        observation = self._cut(observed_text(game.run.messages[before:]))
        if not game.task.done():
            return observation, game.run.steps[-1].reward, False, False, {}
        self._games.latest, self.episode = None, game.task.result()
        terminated = self.episode.outcome is Outcome.TERMINATED
        reward = 0.0 if self.episode.reward is None else self.episode.reward - earned
        return observation, reward, terminated, not terminated, game.report()

    def render(self) -> str | None:
        """Return the conversation so far."""
        if self.render_mode is None:
            return None
        game = self._games.latest
        messages = game.run.messages if game else self.episode.messages if self.episode else ()
        return "\n".join(f"{m.role}: {m.content}{_calls(m)}" for m in messages)

    def close(self) -> None:
        """End what is under way, which the end of this object does, too; `reset` may follow."""
        self._games.close()

    def _cut(self, text: str) -> str:
        limit = self._max_length
        if len(text) <= limit:
            return text
        mark = f"\n[{len(text) - limit} characters and more are left out]\n"
        half = max(0, limit - len(mark)) // 2
        return (text[:half] + mark + text[len(text) - half :])[:limit]

    def _drawn(self, options: dict[str, JSON]) -> tuple[Task, int]:
        """Return a task and an episode's seed; both are drawn in any case, so that options move no later draw."""
        size = self._ours.tasks.size(self._split)
        index, seed = int(self.np_random.integers(size or 2**31)), int(self.np_random.integers(2**63 - 1))
        task, seed = options.pop("task", None), int(cast(int, options.pop("seed", seed)))
        index = int(cast(int, options.pop("index", index)))
        if options:
            raise ConfigError(f"reset takes the options task, index and seed, not {', '.join(map(repr, options))}")
        if not isinstance(task, Mapping | None):
            raise ConfigError(f"reset's option task={task!r} is no task: give a dict, or the number of one as index")
        return self._ours.tasks.get(self._split, index) if task is None else task, seed


class SteppedEpisodes:
    """The episodes that an object plays one after the other, and their event loop.

    They are closed with the object at the latest: when nothing refers to it any more, or at the exit.
    """

    latest: SteppedEpisode | None = None
    """Under way, or ended."""
    _loop: asyncio.AbstractEventLoop | None = None

    def __init__(self, player: object) -> None:
        weakref.finalize(player, self.close)

    def begin(self, job: Job) -> SteppedEpisode:
        """Begin an episode, up to the first reply that it awaits; one that is still under way is broken off."""
        self._break_off()
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
        self.latest = SteppedEpisode(job, self._loop)
        self.latest.advance(None)
        return self.latest

    def close(self) -> None:
        """Break off what is under way, and close the event loop; another episode may begin."""
        self._break_off()
        if self._loop is not None:
            self._loop.close()
            self._loop = None

    def _break_off(self) -> None:
        if self.latest is not None:
            self.latest.cancel()
            self.latest = None


class SteppedEpisode:
    """An episode whose policy is the caller of `step`; implements `Policy` and `Conversation`.

    The event loop runs while the environment has something to do, and is stopped where a reply is awaited.
    """

    context_limit = None
    trajectories = ()

    def __init__(self, job: Job, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._tools: Sequence[ToolSpec] = ()
        self._answer: asyncio.Future[Reply] | None = None
        self.run = EpisodeRun(job, self)
        self.task = loop.create_task(self.run.play())
        self.task.add_done_callback(lambda _: loop.stop())

    def advance(self, reply: Reply | None) -> None:
        """Give the awaited reply, if there is one, and run until the next one is awaited, or the episode has ended."""
        if self._answer is not None and reply is not None:
            self._answer.set_result(reply)
        outside_loop(self._loop.run_forever)

    def cancel(self) -> None:
        """Break off what is under way; the environment is closed."""
        if not self.task.done():
            self.task.cancel()
            outside_loop(self._loop.run_forever)

    def opening(self) -> str:
        """Return the tools' schemas and the first observation."""
        if self.task.done() and (error := self.task.result().error) is not None:
            return f"error: {error.where} failed: {error.type}: {error.message}"
        schemas = [json.dumps(tool.openai(), ensure_ascii=False) for tool in self._tools]
        said = observed_text(self.run.messages)
        return "\n".join([_CALL, *schemas, "", said] if schemas else [said])

    def report(self) -> dict[str, object]:
        """Return how the episode ended; nothing while it is under way."""
        if not self.task.done():
            return {}
        episode = self.task.result()
        scores = {r.name: r.value for r in episode.rewards if r.turn is None and r.value is not None}
        info: dict[str, object] = {"outcome": str(episode.outcome), "stop_reason": str(episode.stop_reason)}
        info |= {"scored": episode.reward is not None, "rewards": scores}
        if episode.success is not None:
            info["success"] = episode.success
        if episode.error is not None:
            info["error"] = f"{episode.error.where}: {episode.error.type}: {episode.error.message}"
        return info

    # the policy

    def start(self, tools: Sequence[ToolSpec], seed: int) -> SteppedEpisode:
        """Begin the episode."""
        self._tools = tools
        return self

    def observe(self, messages: Sequence[Message]) -> int:
        """Return 0: text has no length in tokens."""
        return 0

    async def reply(self, max_tokens: int | None = None) -> Reply:
        """Wait for the caller's."""
        self.run.clock.stage = CALLER
        self._answer = self._loop.create_future()
        self._loop.stop()
        return await self._answer

    def close(self) -> None:
        """Free nothing."""


def _calls(message: Message) -> str:
    return "".join(OPEN + write_call(call) + CLOSE for call in message.tool_calls)


def observed_text(messages: Sequence[Message]) -> str:
    """Return messages as the policy reads them; replies that an opening shows are written as actions are."""
    return "\n".join(
        f"<tool_response>\n{m.content}\n</tool_response>" if m.role == "tool" else f"{m.content}{_calls(m)}"
        for m in messages
    )
