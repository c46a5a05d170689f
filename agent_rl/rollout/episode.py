"""One episode: an environment and a policy talk until one of them, or the budget, ends it."""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import reprlib
import traceback
import warnings
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import cast

from agent_rl.concurrency import ENDING, is_cancelled_by_others
from agent_rl.core.episode import Episode, Failure, Outcome, Reward, StepRecord, StopReason
from agent_rl.core.judgement import Judgement
from agent_rl.core.messages import Message, Step, own_task
from agent_rl.core.meter import meter
from agent_rl.core.sandbox_loss import loss_told_by
from agent_rl.core.trajectory import FinishReason
from agent_rl.errors import ConfigError, PolicyError, RenderError, kind_of
from agent_rl.gym.env import Env, messages_of
from agent_rl.policy.base import AnyPolicy, Conversation, EnvPolicy, FullContextError, Policy, unread
from agent_rl.rollout.clock import EpisodeClock, OutOfTimeError
from agent_rl.rollout.closing import close_env
from agent_rl.rollout.job import Branch, Job
from agent_rl.rollout.lost_sandbox import only_losses, scored_anyway
from agent_rl.rollout.prefix import messages_before
from agent_rl.seeds import Stream, rng
from agent_rl.version import __version__

_log = logging.getLogger(__name__)


async def run_episode(
    job: Job, policy: AnyPolicy, *, scored: bool = True, before_judges: Callable[[], Awaitable[None]] | None = None
) -> Episode:
    """Run one episode to its end. An exception fails this episode only; it is recorded in `Episode.error`.

    Only a cancellation from outside propagates, after the environment was closed. One that fails is run again as often
    as `Job.retries` says for its ending.

    Args:
        job: what to run.
        policy: who plays.
        scored: whether to ask for rewards.
        before_judges: awaited once the policy is done, where a judge scores the episode.
    """
    episode = await EpisodeRun(job, policy, before_judges=before_judges).play(scored=scored)
    attempt = 0
    while job.retries and attempt < job.retries.get(episode.ending, 0):
        attempt += 1
        _log.info("%s, group %s: %s, so run again", job.spec.id, job.group_id, episode.ending)
        episode = await EpisodeRun(job, policy, before_judges=before_judges).play(scored=scored)
    return episode


class EpisodeRun:
    """One episode under way, and its growing record."""

    def __init__(
        self,
        job: Job,
        policy: AnyPolicy,
        env: Env | None = None,
        before_judges: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self.job, self.policy, self.before_judges = job, policy, before_judges
        self.budget = job.budget or job.spec.budget
        self.is_observed = job.snapshots or job.spec.cls.state_hash is not Env.state_hash
        self.messages: list[Message] = []
        self.steps: list[StepRecord] = []
        self.snapshots: list[object] = []
        self.judgements: list[Judgement] = []
        self.state: str | None = None
        self.env = env
        self.conversation: Conversation | None = None
        self.is_talking = True
        """Whether the conversation is open, if it was begun."""
        self.replies = self.calls = 0
        self.clock = EpisodeClock(job.spec, self.budget)

    async def play(self, *, scored: bool = True) -> Episode:
        """Run the episode as `run_episode` does; once."""
        before = meter.set(self.clock.meter)
        _under_way[id(self)] = self
        try:
            episode = self.ended_by(await self.run_within_budget())
            return await self.score(episode) if scored else episode
        except BaseException as error:  # neither sys.exit() nor a panic of Rust's must end the others
            if _from_outside(error):
                raise
            if self.env is not None and self.env.sandbox_loss is not None:
                return await self.without_sandbox(error, scored=scored)
            return self.failed(error)
        finally:
            try:
                await self.free(self.conversation if self.is_talking else None, self.env)
            finally:
                meter.reset(before)
                del _under_way[id(self)]

    async def run_within_budget(self) -> StopReason:
        """Make the environment and play; return what ended it."""
        if (env := self.env) is None:
            self.env = env = self.job.spec.make(**self.job.env_args)
        try:
            return await self.interact(env)
        except FullContextError:
            return StopReason.TOKENS
        except OutOfTimeError as late:
            if env.asking:
                raise TimeoutError(*late.args) from None
            return StopReason.SECONDS

    async def interact(self, env: Env) -> StopReason:
        """Play from the opening, or from the branch."""
        if self.job.branch is None:
            observation = await self.reset(env)
            self.clock.stage = "policy"
            self.conversation = conversation = self.start(env)
        else:
            self.conversation = conversation = await self.resume(env, self.job.branch)
            observation = ()  # the prefix holds all that was observed
            if (over := self.ended(terminated=False, truncated=False)) is not None:
                return over
        limits = (self.budget.tokens, conversation.context_limit)
        limit = min((n for n in limits if n is not None), default=None)
        while True:
            self.clock.stage = "policy"
            self.messages += observation
            try:
                length = conversation.observe(observation)
            except RenderError as error:
                raise unread(error, observation, self.job.spec.id) from error
            if limit is not None and length >= limit:
                self.require_room(length, limit)
                return StopReason.TOKENS
            if self.is_observed:
                await self.observe_state(env)
                self.clock.stage = "policy"
            reply = await self.clock.reply(conversation, None if limit is None else limit - length)
            self.messages.append(reply.message)
            self.replies += 1
            if reply.finish_reason is FinishReason.ABORT:
                raise PolicyError("the policy aborted its reply")
            if reply.finish_reason is FinishReason.LENGTH:
                return StopReason.TOKENS if reply.is_full else StopReason.LENGTH
            self.calls += len(reply.message.tool_calls)
            if self.budget.tool_calls is not None and self.calls > self.budget.tool_calls:
                return StopReason.TOOL_CALLS
            step = await self.clock.step(env, reply.message)
            if not isinstance(step, Step):
                raise TypeError(
                    f"step returned {_named(step)}: return ar.Step(observation, reward, terminated, truncated)"
                )
            observation = messages_of(step.observation)
            self.record(len(observation), float(step.reward), bool(step.terminated), bool(step.truncated))
            ended = self.ended(step.terminated, step.truncated)
            if ended is not None:
                self.messages += observation
                return ended

    async def reset(self, env: Env) -> tuple[Message, ...]:
        """Reset the environment with the job's task and seed; return the opening."""
        generator = rng(Stream.ENVIRONMENT, self.job.seed)
        return messages_of(await self.clock.call("reset", env.reset, own_task(self.job.task), generator))

    def start(self, env: Env) -> Conversation:
        """Begin the dialogue; a script gets the environment."""
        if _sees_env(type(self.policy)):
            return cast(EnvPolicy, self.policy).start_in(env, self.job.seed)
        return cast(Policy, self.policy).start(env.tools, self.job.seed)

    async def resume(self, env: Env, branch: Branch) -> Conversation:
        """Bring the environment, and begin the conversation, where the branch left them."""
        await branch.reach(env, self.reset, self.clock)
        turn = self.replies = branch.turn
        self.calls = branch.tool_calls
        self.messages += messages_before(branch.episode, turn)
        self.steps += branch.episode.steps[:turn]
        self.snapshots += branch.episode.snapshots[:turn]
        self.clock.stage = "policy"
        return branch.begin(self.policy, env)

    def require_room(self, length: int, limit: int) -> None:
        """Raise an error if the policy gets no turn at all: that is no score of 0."""
        if not self.replies:
            of = f"budget.tokens={limit}" if limit == self.budget.tokens else f"the policy's context of {limit}"
            raise ConfigError(f"the opening alone takes {length} tokens, and {of} leaves no room for a reply: raise it")

    async def observe_state(self, env: Env) -> None:
        """Record the state that the policy is about to reply in."""
        if self.job.spec.cls.state_hash is not Env.state_hash:
            self.state = await self.clock.call("state_hash", env.state_hash)
            if self.state is not None and not isinstance(self.state, str):
                raise TypeError(f"state_hash returned {self.state!r}: return a str, or None")
        if self.job.snapshots:
            self.snapshots.append(await self.clock.call("snapshot", env.snapshot))

    def record(self, messages: int, reward: float, terminated: bool, truncated: bool) -> None:
        """Store the environment's answer."""
        self.steps.append(StepRecord(messages, reward, terminated, truncated, self.state))

    def ended(self, terminated: bool, truncated: bool) -> StopReason | None:
        """Return why there is no further turn; None if there is one."""
        if terminated:
            return StopReason.DONE
        if truncated:
            return StopReason.ENV_TRUNCATED
        if self.budget.turns is not None and self.replies >= self.budget.turns:
            return StopReason.TURNS
        return StopReason.SECONDS if self.clock.is_over else None

    def ended_by(self, stop: StopReason) -> Episode:
        """Return the episode, not scored yet."""
        return self.episode(stop, Outcome.TERMINATED if stop is StopReason.DONE else Outcome.TRUNCATED)

    async def score(self, episode: Episode) -> Episode:
        """Return the episode with its rewards; judges keep nothing waiting but the environment."""
        assert self.env is not None
        if self.env.is_judged and self.before_judges is not None:
            await self.free(self.conversation)
            self.is_talking = False
            await self.before_judges()
        self.clock.enter("score")
        rewards = await self.env.score(episode, self.budget.score_seconds, self.judgements)
        if (loss := self.env.sandbox_loss) is not None:  # seen by a reward, perhaps
            episode = replace(episode, sandbox_loss=loss)
        steps = self.step_rewards(is_alone=not rewards, ended_sandbox=loss is not None)
        return episode.scored((*rewards, *steps), tuple(self.judgements))

    def step_rewards(self, *, is_alone: bool, ended_sandbox: bool) -> list[Reward]:
        """Return what the steps earned or lost; what they lost, of a policy that ended its sandbox.

        Where nothing else rewards, nothing earned is 0, and no success.
        """
        steps = [Reward("step", s.reward, source="step", turn=i) for i, s in enumerate(self.steps) if s.reward]
        steps = only_losses(steps) if ended_sandbox else steps
        if steps or not is_alone or self.job.spec.cls.group_reward_components:
            return steps
        return [Reward("step", 0.0, source="step", turn=max(0, len(self.steps) - 1))]

    def failed(self, error: BaseException) -> Episode:
        """Return the episode with what broke it."""
        trace = "".join(traceback.format_exception(error))
        failure = Failure(self.clock.stage, type(error).__name__, str(error), trace, kind_of(error))
        where = (self.job.spec.id, self.job.group_id, failure.where)
        _log.warning("%s, group %s: %s failed: %s: %.300s", *where, failure.type, failure.message)
        return replace(self.episode(StopReason.ERROR, Outcome.FAILED), error=failure, sandbox_loss=loss_told_by(error))

    async def without_sandbox(self, error: BaseException, *, scored: bool) -> Episode:
        """Return the episode of a policy that ended its own sandbox."""
        episode, components = self.ended_by(StopReason.DONE), self.job.spec.cls.reward_components
        if not scored:
            return episode
        return await scored_anyway(episode, error, self.score, components, self.judgements)

    def episode(self, stop: StopReason, outcome: Outcome) -> Episode:
        """Return what happened so far."""
        job = self.job
        if len(self.steps) < self.replies:  # the environment never got to answer the last reply
            self.record(0, 0.0, terminated=False, truncated=outcome is Outcome.TRUNCATED)
        return Episode(
            id=job.id or os.urandom(16).hex(),
            env=job.spec.id,
            task=job.task,
            seed=job.seed,
            group_id=job.group_id,
            origin=job.origin,
            messages=tuple(self.messages),
            steps=tuple(self.steps),
            trajectories=self.conversation.trajectories if self.conversation else (),
            rewards=(),
            stop_reason=stop,
            outcome=outcome,
            versions={"agent_rl": __version__},
            parent=(job.branch.episode.id, job.branch.turn) if job.branch else None,
            env_args=job.env_args,
            seconds=self.clock.seconds,
            usage=getattr(self.conversation, "usage", ()),  # of a served model
            judgements=tuple(self.judgements),
            sandbox_loss=None if self.env is None else self.env.sandbox_loss,
            snapshots=tuple(self.snapshots),
        )

    async def free(self, *held: Conversation | Env | None) -> None:
        """Free what the episode holds. The episode itself is complete, so that a failure is only a warning."""
        self.clock.enter("close")
        problems = list[str]()
        for holder in held:
            try:
                if isinstance(holder, Env):
                    await close_env(holder, self.budget.close_seconds)
                elif holder is not None:
                    holder.close()
            except BaseException as error:
                if _from_outside(error):
                    raise
                problems.append(f"{type(error).__name__}: {error}")
        for problem in problems:
            warnings.warn(f"{self.job.spec.id}: close() failed: {problem}", RuntimeWarning, stacklevel=2)


_under_way: dict[int, EpisodeRun] = {}


def runs_under_way() -> list[EpisodeRun]:
    """Return the episodes that this process plays now; from any thread."""
    return list(_under_way.values())


def _named(value: object) -> str:
    return f"a tuple of {len(value)}" if isinstance(value, tuple) else reprlib.repr(value)


@functools.cache
def _sees_env(policy: type[AnyPolicy]) -> bool:
    return issubclass(policy, EnvPolicy)  # 3 µs, which every episode would pay again


def _from_outside(error: BaseException) -> bool:
    """Whether the run is to end, not the episode alone: an environment may cancel itself."""
    if isinstance(error, asyncio.CancelledError):
        return is_cancelled_by_others()
    return isinstance(error, ENDING)
