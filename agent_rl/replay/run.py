"""An episode played again: recorded replies in a fresh environment, by the code of any other episode."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal, TypeAlias, cast

from agent_rl.core.episode import Episode, Outcome, StopReason
from agent_rl.core.judgement import Judgement
from agent_rl.core.messages import Message
from agent_rl.core.trajectory import FinishReason, Trajectory
from agent_rl.gym.budget import Budget
from agent_rl.gym.cassette import cassette
from agent_rl.gym.env import Env
from agent_rl.gym.registry import EnvSpec
from agent_rl.gym.reward import RewardComponent
from agent_rl.gym.tool import ToolSpec
from agent_rl.judge.reward import JudgeReward
from agent_rl.judge.rules import RuleJudge
from agent_rl.policy.base import Reply
from agent_rl.replay.cassette import RecordedAnswers
from agent_rl.replay.record import Record
from agent_rl.rollout.episode import EpisodeRun
from agent_rl.rollout.job import Job
from agent_rl.rollout.match import run_match

Mode: TypeAlias = Literal["cassette", "live"]
MODES: tuple[Mode, ...] = ("cassette", "live")
SECONDS, SLOWER = 120.0, 20.0
"""A replay is given up after so many seconds, or so many times as long as the episode took, whichever is longer."""


class Replayed:
    """The replay of one episode, and the policy that plays it; implements `Policy`."""

    def __init__(self, record: Record, spec: EnvSpec, mode: Mode) -> None:
        self.record, self.spec = record, spec
        self.answers = RecordedAnswers(record, outside=mode == "cassette")
        self.tools: Sequence[ToolSpec] | None = None
        """That the policy was shown; None if the environment did not open."""
        self.episode: Episode | None = None
        """With the rewards that could be computed again, unless it was given up."""
        self.problem: tuple[str, BaseException] | None = None
        """What broke the replay, and in which stage."""
        self.reread: tuple[str, ...] = ()
        """The rewards that a model's judge gave: they are read, not asked for again."""
        self.is_scored = False

    @property
    def job(self) -> Job:
        """The episode as a job that ends where the record does."""
        episode, own = self.record.episode, self.spec.budget
        # one token: a conversation that is at its end says that it has one
        budget = Budget(turns=None, tokens=1, score_seconds=own.score_seconds, close_seconds=own.close_seconds)
        return Job(
            self.spec,
            episode.task,
            episode.seed,
            episode.group_id,
            budget=budget,
            env_args=dict(episode.env_args),
            id=episode.id,
            origin=episode.origin,
            policy=self,
        )

    @property
    def seconds(self) -> float:
        """After how long to give it up."""
        return max(SECONDS, SLOWER * self.record.episode.seconds)

    def start(self, tools: Sequence[ToolSpec], seed: int) -> _Replies:
        """Begin to reply."""
        self.tools = tools
        return _Replies(self)


class _Replies:
    """Gives the recorded replies, and says that the context is full behind the last."""

    context_limit = None
    trajectories: tuple[Trajectory, ...] = ()

    def __init__(self, replayed: Replayed) -> None:
        self._replayed, self._turn = replayed, 0

    def observe(self, messages: Sequence[Message]) -> int:
        """Return 1 where the record has no further reply, else 0."""
        return int(self._turn == len(self._replayed.record.replies) or self._is_cut)

    @property
    def _is_cut(self) -> bool:
        """Whether the next reply is one whose answer can't be known."""
        record = self._replayed.record
        return bool(record.cut) and self._turn == record.answered

    async def reply(self, max_tokens: int | None = None) -> Reply:
        """Return the next reply; one that the environment was not asked about counts as cut."""
        record, turn = self._replayed.record, self._turn
        self._turn += 1
        self._replayed.answers.begin(turn)
        await asyncio.sleep(0)  # let others play
        is_asked = turn < record.answered
        return Reply(record.replies[turn], FinishReason.STOP if is_asked else FinishReason.LENGTH)

    def close(self) -> None:
        """Hold nothing."""


class _Run(EpisodeRun):
    """Keeps what breaks, and scores what is recorded by all rewards that ask no model."""

    @property
    def replayed(self) -> Replayed:
        """Where the results go."""
        return cast(Replayed, self.policy)

    def require_room(self, length: int, limit: int) -> None:
        """Let an episode have no turn."""

    def failed(self, error: BaseException) -> Episode:
        """Keep what broke the replay."""
        self.replayed.problem = (self.clock.stage, error)
        return self.episode(StopReason.ERROR, Outcome.FAILED)

    async def score(self, episode: Episode) -> Episode:
        """Compute the rewards of the recorded episode again, save those of judges that are models."""
        recorded, env = self.replayed.record.episode, self.env
        assert env is not None
        self.replayed.episode = episode
        if recorded.outcome is Outcome.FAILED or episode.turns < recorded.turns - bool(self.replayed.record.cut):
            return episode
        components = self.job.spec.cls.reward_components
        left = [c for c in components if not _is_reread(c, self.job.spec.cls, recorded)]
        self.replayed.reread = tuple(c.name for c in components if c not in left)
        if len(left) < len(components):
            if type(env).score is not Env.score:
                return episode
            vars(env)["reward_components"] = tuple(left)
        self.clock.enter("score")
        finished = replace(recorded, rewards=(), judgements=())
        judgements: list[Judgement] = []
        rewards = await env.score(finished, self.budget.score_seconds, judgements)
        ended_sandbox = (env.sandbox_loss or recorded.sandbox_loss) is not None
        steps = self.step_rewards(is_alone=not (rewards or components), ended_sandbox=ended_sandbox)
        self.replayed.is_scored = True
        return episode.scored((*rewards, *steps), tuple(judgements))


def _is_reread(component: RewardComponent, cls: type[Env], recorded: Episode) -> bool:
    """Return whether a reward was a model's judgement, or may be one."""
    given = inspect.getattr_static(cls, component.attribute, None)
    if not isinstance(given, JudgeReward):
        return any(r.name == component.name and r.source == "judge" for r in recorded.rewards)
    try:
        label = given.rubric_for(recorded.task).label
    except Exception:  # its file is gone
        return True
    return not any(j.judge == RuleJudge.name and j.rubric == label for j in recorded.judgements)


async def replay(*seats: Replayed) -> None:
    """Play an episode again; or a match, given those of all its players."""
    outer = asyncio.timeout(max(each.seconds for each in seats))
    try:
        async with outer:
            if len(seats) == 1:
                await _alone(seats[0])
            else:
                for each, episode in zip(seats, await run_match([s.job for s in seats], seats[0], _Run), strict=True):
                    each.episode = episode
    except TimeoutError:
        for each in seats:
            each.problem = each.problem or ("replay", TimeoutError(f"the replay took more than {each.seconds:.0f} s"))


async def _alone(replayed: Replayed) -> None:
    before = cassette.set(replayed.answers)
    try:
        replayed.episode = await _Run(replayed.job, replayed).play()
    finally:
        cassette.reset(before)
