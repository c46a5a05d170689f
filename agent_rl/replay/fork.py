"""Forks: a stored episode continued from one of its turns, by another policy, in an environment that replays its turns.

Snapshots are not stored. A fresh environment gets there by stepping the recorded replies, and has to say each time what
is recorded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from agent_rl.core.display import plural
from agent_rl.core.episode import Episode, Origin, StepRecord, StopReason
from agent_rl.core.messages import Message
from agent_rl.core.sequences import shared_start
from agent_rl.errors import AgentRLError, ConfigError, ReplayError
from agent_rl.gym.budget import Budget
from agent_rl.gym.cassette import cassette
from agent_rl.gym.env import Env, messages_of
from agent_rl.gym.registry import EnvSpec
from agent_rl.gym.tasks import episode_seed
from agent_rl.gym.tool import ToolSpec
from agent_rl.policy import AnyPolicy, TokenPolicy
from agent_rl.policy.base import Conversation, EnvPolicy, Prefix, require_resumable
from agent_rl.policy.baselines import nothing_policy
from agent_rl.policy.delegation import DELEGATE
from agent_rl.policy.shortening import summarised
from agent_rl.rendering.base import Renderer
from agent_rl.replay.cassette import RecordedAnswers
from agent_rl.replay.companions import is_of_match
from agent_rl.replay.compare import compare_answer, compare_messages
from agent_rl.replay.record import Record
from agent_rl.replay.result import Result, Status
from agent_rl.rollout.clock import EpisodeClock
from agent_rl.rollout.closing import close_env
from agent_rl.rollout.episode import EpisodeRun
from agent_rl.rollout.job import Branch, Job, Reset
from agent_rl.rollout.prefix import context_before, messages_before, prefix_of, seen_before
from agent_rl.rollout.sub_agents import amid_sub_agent, began_sub_agent, require_caller

_BUDGETS = (StopReason.TURNS, StopReason.TOKENS, StopReason.SECONDS)
"""Endings after which the environment would have heard another reply."""


@dataclass(frozen=True, slots=True)
class ReplayedBranch(Branch):
    """Where an episode leaves a stored one; its environment gets there by stepping the recorded replies.

    Raises:
        ConfigError: if there was no such turn, and none could have followed the last one.
    """

    def __post_init__(self) -> None:
        episode, turn = self.episode, self.turn
        if 0 <= turn < episode.turns:
            return
        if turn != episode.turns or not turn:
            raise ConfigError(
                f"episode {episode.id!r} has {plural(episode.turns, 'turn')}, counted from 0: there is no {turn}"
            )
        if episode.stop_reason not in _BUDGETS or episode.steps[-1].truncated or episode.steps[-1].terminated:
            raise ConfigError(
                f"episode {episode.id!r} has {plural(turn, 'turn')} and ended in the last ({episode.stop_reason}): "
                f"nothing follows it; fork at turn {turn - 1} or before"
            )

    async def reach(self, env: Env, reset: Reset, clock: EpisodeClock) -> None:
        """Step the recorded replies; a user that a model plays says what is recorded, and is asked from the turn on.

        Raises:
            ReplayError: with the first difference.
        """
        answers = RecordedAnswers(Record(self.episode), outside=False, goes_on=True)
        before = cassette.set(answers)
        try:
            await self._step(env, await reset(env), clock, answers)
        finally:
            cassette.reset(before)

    async def _step(
        self, env: Env, opening: tuple[Message, ...], clock: EpisodeClock, answers: RecordedAnswers
    ) -> None:
        episode = self.episode
        at = len(messages_before(episode, 0))
        _require_same(episode, "the opening", compare_messages("opening", episode.messages[:at], opening))
        for turn, record in enumerate(episode.steps[: self.turn]):
            answers.begin(turn)
            reply, observed = episode.messages[at], episode.messages[at + 1 : at + 1 + record.messages]
            step = await clock.step(env, reply)
            heard = messages_of(step.observation)
            now = StepRecord(len(heard), step.reward, step.terminated, step.truncated, record.state)
            _require_same(episode, f"turn {turn}", compare_answer(record, now, observed, heard))
            at += 1 + record.messages

    def begin(self, policy: AnyPolicy, env: Env) -> Conversation:
        """Begin the policy's conversation where the prefix ends; a script begins at its own beginning.

        Raises:
            PolicyError: if the policy can't continue.
        """
        if isinstance(policy, EnvPolicy):
            return policy.start_in(env, self.seed)
        return require_resumable(policy).resume(env.tools, self.seed, self.prefix(policy, env.tools))

    def prefix(self, policy: AnyPolicy, tools: Sequence[ToolSpec]) -> Prefix:
        """Return the dialogue before the turn, with the ids that the engine had seen, if the policy reads such.

        Raises:
            ConfigError: if a sub-agent was at work.
        """
        episode, turn = self.episode, self.turn
        if not isinstance(policy, TokenPolicy):
            return prefix_of(episode, turn, seen_before(episode, turn) if turn < episode.turns else ())
        shown = policy.shown(tools)
        if not wrote_tokens(policy.renderer, episode, shown):
            return prefix_of(episode, turn, ())
        return prefix_of(
            episode, turn, self._seen(policy.renderer, shown), context_before(episode, turn, policy.renderer)
        )

    def _seen(self, renderer: Renderer, tools: Sequence[ToolSpec]) -> tuple[int, ...]:
        """Return the ids before the turn; after the last one with what the environment said there, not rendered yet."""
        episode, turn = self.episode, self.turn
        require_caller(episode, turn)
        seen = seen_before(episode, turn)
        if turn < episode.turns or began_sub_agent(episode, turn):
            return seen
        if seen:  # a summary that left no room
            return ()
        observed = episode.messages[len(episode.messages) - episode.steps[-1].messages :]
        before, reply = next(t for t in reversed(episode.trajectories) if not t.is_delegated).split_reply()
        said = renderer.parse(reply, before, tools) if episode.trajectories[-1].is_delegated else None
        if said is not None and any(call.name == DELEGATE.name for call in said.tool_calls):
            raise amid_sub_agent(episode, turn)
        bridge = renderer.bridge(before, reply, observed, tools)
        return () if bridge is None else (*before, *reply, *bridge.closing, *bridge.ids)


def wrote_tokens(renderer: Renderer, episode: Episode, tools: Sequence[ToolSpec]) -> bool:
    """Return whether a renderer makes an episode's first token ids of its first messages.

    A fork's may go on from a summary, which no message holds: what comes before one is rendered, whatever it says.
    """
    first = next((t for t in episode.trajectories if len(t)), None)
    opening = messages_before(episode, 0)
    if first is None or not opening:
        return False
    starts = [renderer.prompt(opening, tools)]
    if episode.parent is not None:
        one, other = (renderer.prompt(summarised(opening, summary), tools) for summary in ("a", "\n"))
        starts.append(one[: shared_start(one, other)])
    return any(first.token_ids[: len(start)].tolist() == start for start in starts)


def fork_jobs(
    spec: EnvSpec,
    episode: Episode,
    at_turn: int,
    *,
    n: int = 1,
    first: int = 0,
    seed: int = 0,
    budget: Budget | None = None,
) -> list[Job]:
    """Return the jobs of a group that continues an episode from one of its turns.

    The environment's random numbers are the episode's, the policy's are each sample's own. What was used before the
    turn counts in the budget.

    Args:
        spec: the episode's environment.
        episode: as it was stored.
        at_turn: the first turn to be played again, counted from 0; the number of its turns, if a budget ended it.
        n: how many samples.
        first: the number of the first, in a group that has others already.
        seed: of what the policy samples.
        budget: instead of the environment's own.

    Raises:
        ConfigError: if there is no such turn, the budget leaves none, or other players had a part in the episode.
    """
    if is_of_match(episode, spec):
        raise ConfigError(
            f"episode {episode.id!r} is one player's of a match, whose other players can't be brought back: fork one "
            f"that was played against {spec.id} itself"
        )
    seeds = {i: episode_seed(seed, {"fork": episode.id, "turn": at_turn}, i) for i in range(first, first + n)}
    branches = {sample: ReplayedBranch(episode, at_turn, of_sample) for sample, of_sample in seeds.items()}
    limit = (budget or spec.budget).turns
    if limit is not None and at_turn >= limit:
        raise ConfigError(f"budget.turns={limit} leaves no turn after the {at_turn} before the fork: raise it")
    return [
        Job(
            spec,
            episode.task,
            episode.seed,
            fork_group(episode, at_turn, seed),
            budget,
            episode.env_args,
            origin=Origin("rollout", episode.origin.split, sample=sample),
            branch=branch,
        )
        for sample, branch in branches.items()
    ]


def fork_group(episode: Episode, at_turn: int, seed: int = 0) -> str:
    """Return the id of the group that continues an episode from a turn."""
    return f"{episode.id}-turn{at_turn}" + (f"-seed{seed}" if seed else "")


async def verify_prefix(job: Job) -> Sequence[ToolSpec]:
    """Replay what comes before a fork, in an environment of its own; return its tools.

    Raises:
        ReplayError: with the first difference.
    """
    assert job.branch is not None
    run = EpisodeRun(job, nothing_policy(), env := job.spec.make(**job.env_args))
    try:
        await job.branch.reach(env, run.reset, run.clock)
        return env.tools
    except AgentRLError:
        raise
    except Exception as error:  # the environment's own
        what = f"{run.clock.stage} raised {type(error).__name__}: {error}"
        raise ReplayError(f"episode {job.branch.episode.id!r} does not replay: {what}") from error
    finally:
        await close_env(env, run.budget.close_seconds)


def _require_same(episode: Episode, where: str, found: Result) -> None:
    if found.status is not Status.SAME:
        raise ReplayError(f"episode {episode.id!r} does not replay: {where}: {found}")
