"""agent_rl.rollout: episodes that continue an earlier one from a turn."""

import asyncio
from dataclasses import replace

import pytest

from agent_rl.algorithms import to_samples
from agent_rl.core.episode import Episode, Outcome, Reward, StopReason
from agent_rl.core.messages import Message, ToolCall, ToolErrorKind
from agent_rl.core.trajectory import Fork, Source
from agent_rl.engines.base import SamplingParams
from agent_rl.engines.scripted import ScriptedEngine
from agent_rl.errors import ConfigError
from agent_rl.gym.budget import Budget
from agent_rl.policy import AnyPolicy, TokenPolicy
from agent_rl.rollout import Job, continuation, run_episode
from agent_rl.stats.statistics import Statistics, ToolUse
from tests.doubles import CALL, Dice, UnprovenRenderer, dice_spec, play, sampled, small_renderer

TWO_CALLS = Message("assistant", "hm ", tool_calls=(ToolCall("x", "roll"), ToolCall("x", "rol")))


class Fair(Dice):
    """Dice whose state is the position in its random numbers."""

    snapshot_attributes = ("rng",)

    def state_hash(self):
        return str(self.rng.bit_generator.state)


def replying(*replies: str | Message, unproven: frozenset[int] = frozenset()) -> TokenPolicy:
    renderer = UnprovenRenderer(small_renderer(), unproven)
    ids = [renderer.reply(Message("assistant", r) if isinstance(r, str) else r) for r in replies]
    return TokenPolicy(ScriptedEngine(sampled(ids)), renderer, SamplingParams(max_tokens=64))


def first(policy: AnyPolicy, **job: object) -> Episode:
    """An episode that can be continued."""
    spec = dice_spec(job.pop("cls", Fair), job.pop("budget", None))
    return asyncio.run(run_episode(Job(spec, job.pop("task", {}), 5, "g", id="first", snapshots=True, **job), policy))


def then(policy: AnyPolicy, episode: Episode, turn: int, **options: object) -> Episode:
    spec = dice_spec(options.pop("cls", Fair))
    return asyncio.run(run_episode(continuation(spec, episode, turn, 77, **options), policy))


PARENT = first(replying(CALL, TWO_CALLS, CALL, "6"))


class Shown(Fair):
    """Shows a call first."""

    async def reset(self, task, rng):
        return [
            Message("user", "roll"),
            CALL,
            Message("tool", "late", tool_call_id="call_0", name="roll", tool_error=ToolErrorKind.TIMEOUT),
            Message("user", await super().reset(task, rng)),
        ]


def test_calls_shown_in_the_opening_count_nowhere() -> None:
    parent = first(replying(CALL, "6"), cls=Shown)
    again = then(replying(CALL, "6"), parent, 1, cls=Shown, budget=Budget(tool_calls=2))
    assert (parent.tool_calls, again.tool_calls, again.stop_reason) == (1, 2, StopReason.DONE)
    statistics = Statistics()
    statistics.add(again)
    assert not again.tool_errors and statistics.tools == {"roll": ToolUse(calls=2)}


@pytest.mark.parametrize("turn", range(4))
def test_continuation_starts_from_exact_parent_ids(turn):
    policy = replying(CALL, "6")
    episode = then(policy, PARENT, turn)
    (old,), (new,), (session,) = PARENT.trajectories, episode.trajectories, policy.engine.sessions
    at = [s.start for s in old.spans if s.source is Source.POLICY][turn]
    assert new.token_ids[:at].tolist() == old.token_ids[:at].tolist()
    assert new.token_ids.tolist() == session.token_ids
    assert (session.seed, session.closed) == (77, 1)
    assert new.spans[0].stop == at and not new.loss_mask[:at].any()
    (sample,) = to_samples([episode])
    sampled = [i for reply in (CALL, Message("assistant", "6")) for i in small_renderer().reply(reply)]
    assert sample.token_ids[sample.loss_mask].tolist() == sampled
    assert sorted(set(sample.turns[sample.loss_mask].tolist())) == [turn, turn + 1]


@pytest.mark.parametrize("turn", range(4))
def test_continuation_is_a_whole_episode(turn):
    episode = then(replying(*[CALL, TWO_CALLS, CALL, "6"][turn:]), PARENT, turn)  # repeats its parent's replies
    assert (episode.messages, episode.steps, episode.rewards) == (PARENT.messages, PARENT.steps, PARENT.rewards)
    assert (episode.env, episode.task, episode.seed, episode.group_id) == ("dice-v0", {}, 5, "g")
    assert episode.parent == ("first", turn) and PARENT.parent is None
    assert episode.stop_reason is StopReason.DONE and episode.reward == 1.0
    assert len({s.state for s in episode.steps}) == 4 and episode.snapshots == PARENT.snapshots[:turn]


def test_continuation_with_another_reply_diverges():
    episode = then(replying(CALL, "5"), PARENT, 1)
    assert episode.messages[:3] == PARENT.messages[:3]
    assert [m.role for m in episode.messages] == ["user", "assistant", "tool", "assistant", "tool", "assistant"]
    assert episode.messages[4].content == PARENT.messages[4].content  # the parent's next roll
    assert [c.id for m in episode.messages for c in m.tool_calls] == ["call_0_0", "call_1_0"]
    assert episode.reward == 0.0


def test_continuation_keeps_earlier_step_rewards():
    class Paying(Fair):
        async def step(self, action):
            return replace(await super().step(action), reward=0.25)

    parent = first(replying(CALL, CALL, "6"), cls=Paying)
    episode = then(replying("5"), parent, 2, cls=Paying)
    paid = tuple(Reward("step", 0.25, source="step", turn=turn) for turn in range(3))
    assert episode.rewards == (Reward("six", 0.0), *paid)


def test_continuation_can_be_continued():
    middle = then(replying(CALL, CALL, "6"), PARENT, 1, snapshots=True, id="middle")
    assert len(middle.snapshots) == 4
    last = then(replying("5"), middle, 3)
    assert last.parent == ("middle", 3) and last.seed == 5
    assert last.messages[:-1] == middle.messages[:-1]
    start = middle.trajectories[0].before(3)
    assert start is not None
    assert last.trajectories[0].token_ids[: len(start)].tolist() == start.tolist()
    with pytest.raises(ConfigError, match=r"'middle' sampled no token in turn 0.*or its parent"):
        then(replying("5"), middle, 0)


# Forks


def test_continuation_starts_within_a_fork():
    parent = first(replying(CALL, CALL, CALL, "6", unproven=frozenset({2})))
    old, fork = parent.trajectories
    assert fork.forked_from == Fork(0, len(old))
    for turn, trajectory in enumerate((old, old, fork, fork)):
        episode = then(replying(CALL, "6"), parent, turn)
        (new,) = episode.trajectories
        seen = trajectory.before(turn)
        assert seen is not None and new.forked_from is None
        assert new.token_ids[: len(seen)].tolist() == seen.tolist()


def test_continuation_can_fork():
    episode = then(replying(CALL, CALL, "6", unproven=frozenset({2})), PARENT, 1)
    one, two = episode.trajectories
    assert two.forked_from == Fork(0, len(one))
    whole = small_renderer().prompt(episode.messages[:-1], Dice().tools)
    assert two.token_ids[: len(whole)].tolist() == whole
    assert sum(int(s.loss_mask.sum()) for s in to_samples([episode])) == sum(
        len(small_renderer().reply(m)) for m in (CALL, CALL, Message("assistant", "6"))
    )


# Budgets


@pytest.mark.parametrize(("turns", "plays"), [(4, 2), (3, 1), (2, 0)])
def test_continuation_counts_earlier_turns(turns, plays):
    episode = then(replying(*[CALL] * 9), PARENT, 2, budget=Budget(turns=turns))
    assert (episode.stop_reason, episode.turns) == (StopReason.TURNS, 2 + plays)
    assert [m.role for m in episode.messages].count("assistant") == 2 + plays


def test_continuation_counts_earlier_calls():
    assert then(replying(CALL, CALL, "6"), PARENT, 2, budget=Budget(tool_calls=5)).stop_reason is StopReason.DONE
    episode = then(replying(CALL, CALL, "6"), PARENT, 2, budget=Budget(tool_calls=4))  # three in the two turns before
    assert (episode.stop_reason, episode.turns) == (StopReason.TOOL_CALLS, 4)


def test_continuation_counts_earlier_tokens():
    start = PARENT.trajectories[0].before(2)
    assert start is not None
    episode = then(replying("x" * 40), PARENT, 2, budget=Budget(tokens=len(start) + 7))
    assert (episode.stop_reason, len(episode.trajectories[0])) == (StopReason.TOKENS, len(start) + 7)
    full = then(replying("6"), PARENT, 2, budget=Budget(tokens=len(start)))
    assert (full.stop_reason, full.turns, full.trajectories[0].token_ids.size) == (StopReason.TOKENS, 2, 0)
    assert full.messages == PARENT.messages[:6] and to_samples([full]) == []


# Failed parents


@pytest.mark.parametrize(
    ("task", "replies", "end"),
    [
        ({"break": "score"}, [CALL, "6"], StopReason.ERROR),
        ({"truncate": True}, [CALL], StopReason.ENV_TRUNCATED),
        ({}, [CALL, "x" * 99], StopReason.LENGTH),
    ],
    ids=lambda value: str(value)[:20],
)
def test_continuation_accepts_any_parent_ending(task, replies, end):
    parent = first(replying(*replies), task=task)
    assert parent.stop_reason is end
    episode = then(replying("6"), replace(parent, task={}), 0)
    assert (episode.outcome, episode.reward, episode.turns) == (Outcome.TERMINATED, 1.0, 1)


def test_continuation_precedes_a_broken_step():
    class Brittle(Fair):
        async def step(self, action):
            if action.content == "hm ":
                raise KeyError("broken")
            return await super().step(action)

    parent = first(replying(CALL, TWO_CALLS), cls=Brittle)
    assert (parent.outcome, parent.turns, len(parent.snapshots)) == (Outcome.FAILED, 2, 2)
    episode = then(replying(CALL, "6"), parent, 1, cls=Brittle)
    assert episode.outcome is Outcome.TERMINATED and episode.messages[:3] == parent.messages[:3]
    assert len(episode.messages) == 6


def test_continuation_reports_broken_hooks():
    class Lost(Fair):
        async def restore(self, snapshot):
            raise KeyError("gone")

        def snapshot(self):
            return 0

    lost = then(replying("6"), first(replying(CALL, "6"), cls=Lost), 1, cls=Lost)
    assert (lost.outcome, lost.error and lost.error.where) == (Outcome.FAILED, "restore")
    assert lost.parent == ("first", 1)
    scripted = then(play("6"), PARENT, 1)
    assert scripted.error is not None and scripted.error.where == "policy"
    assert "Scripted can't continue an episode: it has no resume" in scripted.error.message
    shy = first(replying("6"), cls=Dice)
    assert shy.error is not None and (shy.error.where, shy.error.type) == ("snapshot", "NotImplementedError")

    class Numbered(Dice):
        def state_hash(self):
            return 3

    odd = first(replying("6"), cls=Numbered)
    assert odd.error is not None and odd.error.message == "state_hash returned 3: return a str, or None"


def test_continuation_awaits_async_hooks():
    class Slow(Fair):
        async def state_hash(self):
            return "s"

        async def snapshot(self):
            return super().snapshot()

        async def restore(self, snapshot):
            super().restore(snapshot)

    parent = first(replying(CALL, CALL, "6"), cls=Slow)
    assert [s.state for s in parent.steps] == ["s"] * 3
    assert then(replying(CALL, "6"), parent, 1, cls=Slow).messages == parent.messages


@pytest.mark.parametrize(
    ("turn", "changes", "problem"),
    [
        (4, {}, "has 4 turns, counted from 0: there is no 4"),
        (-1, {}, "there is no -1"),
        (0, {"snapshots": ()}, r"no snapshot before turn 0: run it with Job\(snapshots=True\)"),
        (0, {"trajectories": ()}, "sampled no token in turn 0"),
    ],
)
def test_continuation_refuses_impossible_starts(turn, changes, problem):
    with pytest.raises(ConfigError, match=problem):
        continuation(dice_spec(Fair), replace(PARENT, **changes), turn, 0)
