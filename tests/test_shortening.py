"""Contexts that have grown too long: tool results dropped, or a summary, as forks whose tokens are trained once."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from agent_rl.algorithms.samples import collate, to_samples
from agent_rl.backends.embedded.config import ModelConfig
from agent_rl.backends.embedded.model import make_model
from agent_rl.backends.embedded.run import start_run
from agent_rl.core.episode import Episode, StopReason
from agent_rl.core.messages import Message, Step
from agent_rl.core.trajectory import Source
from agent_rl.engines.base import SamplingParams
from agent_rl.engines.embedded.engine import Engine
from agent_rl.engines.scripted import ScriptedEngine
from agent_rl.gym.budget import Budget
from agent_rl.gym.env import Env
from agent_rl.policy import TokenPolicy
from agent_rl.policy.base import Prefix
from agent_rl.policy.shortening import DROPPED, REQUEST, SUMMARY, Shortening
from agent_rl.replay.fork import fork_jobs
from agent_rl.rollout import Job, continuation, run_episode
from agent_rl.rollout.evaluation import rollout_metrics
from agent_rl.runs.metrics import read_metrics
from agent_rl.store.episodes import read_episodes
from agent_rl.view.progress import Progress
from tests.doubles import CALL, Dice, UnprovenRenderer, dice_spec, run_dice, sampled, small_renderer
from tests.engines import DEVICE, TINY, assert_sampled_in, shaken
from tests.runs import config

RENDERER = small_renderer()


def ids(*replies: str | Message) -> list[list[int]]:
    return [RENDERER.reply(Message("assistant", r) if isinstance(r, str) else r) for r in replies]


def played(rule: Shortening | None, *replies: str | Message, unproven=(), **job: object) -> tuple[Episode, TokenPolicy]:
    renderer = UnprovenRenderer(RENDERER, unproven)
    policy = TokenPolicy(ScriptedEngine(sampled(ids(*replies))), renderer, SamplingParams(max_tokens=64), None, rule)
    return run_dice(policy, **job), policy


def after(*replies: str | Message) -> int:
    """The length of a context in which so many replies have been answered: one of the last over it is too long."""
    episode, _ = played(None, *replies, "6")
    return sum(s.stop - s.start for s in episode.trajectories[0].spans[:-1])


def text(episode: Episode, trajectory: int, source: Source = Source.PROMPT) -> str:
    t = episode.trajectories[trajectory]
    found = [t.token_ids[s.start : s.stop].tolist() for s in t.spans if s.source is source]
    return "".join(RENDERER._tokenizer.decode(ids, skip_special_tokens=False) for ids in found)


def trained(episode: Episode) -> list[int]:
    return [i for s in to_samples([episode]) for i in s.token_ids[s.loss_mask].tolist()]


DROP = Shortening(rule="drop_tool_results", over_tokens=after(CALL, CALL) - 1)
SUM = Shortening(rule="summarise", over_tokens=after(CALL, CALL) - 1)


def test_short_context_is_left_alone() -> None:
    for rule in (DROP, SUM):
        (episode, policy), (plain, _) = played(rule, CALL, "6"), played(None, CALL, "6")
        (trajectory,), (expected,) = episode.trajectories, plain.trajectories
        assert trajectory.spans == expected.spans and len(policy.engine.sessions) == 1


def test_dropped_results_fork_the_trajectory() -> None:
    episode, policy = played(DROP, CALL, CALL, "6")
    assert [t.token_ids.tolist() for t in episode.trajectories] == [s.token_ids for s in policy.engine.sessions]
    first, fork = episode.trajectories
    results = [m.content for m in episode.messages if m.role == "tool"]
    assert DROPPED not in results  # the episode has what was said
    assert text(episode, 1).count(DROPPED) == 1 and text(episode, 1).count("<tool_response>") <= 2
    assert fork.forked_from is not None and fork.forked_from.parent == 0
    at = fork.forked_from.position
    assert first.token_ids[:at].tolist() == fork.token_ids[:at].tolist() and at > first.spans[0].stop
    assert rollout_metrics([episode])["rollout/forks"] == 1.0
    assert [s.turn for s in fork.spans if s.source is Source.POLICY] == [2]


@pytest.mark.parametrize("unproven", [(), {2}, {3}])  # 3: the request for a summary
@pytest.mark.parametrize("rule", [DROP, SUM])
def test_sampled_tokens_are_trained_once(rule: Shortening, unproven) -> None:
    said = [CALL, CALL, *([] if rule is DROP else ["two rolls"]), "6"]
    episode, policy = played(rule, *said, unproven=unproven)
    assert trained(episode) == [i for reply in ids(*said) for i in reply]
    assert [t.token_ids.tolist() for t in episode.trajectories] == [
        s.token_ids for s in policy.engine.sessions if s.params
    ]
    for trajectory, sample in zip(episode.trajectories, to_samples([episode]), strict=True):
        fork = trajectory.forked_from
        assert fork is None or not sample.loss_mask[: max(fork.position, trajectory.spans[0].stop)].any()


def test_results_that_are_not_answered_stay() -> None:
    rule = DROP.model_copy(update={"keep": 0})
    episode, _ = played(rule, CALL, CALL, "6")
    assert text(episode, 1).count(DROPPED) == 1
    messages = rule.rewrite(episode.messages)
    assert [m.content for m in messages if m.role == "tool"] == [DROPPED, DROPPED]
    assert DROP.model_copy(update={"keep": 5}).rewrite(episode.messages) == list(episode.messages)


def test_context_with_nothing_to_drop_grows() -> None:
    episode, _ = played(DROP.model_copy(update={"over_tokens": 1, "keep": 9}), CALL, CALL, "6")
    assert len(episode.trajectories) == 1


def test_summary_replaces_the_conversation() -> None:
    episode, policy = played(SUM, CALL, CALL, "rolled a 3 and a 4", "6")
    first, fork = episode.trajectories
    assert REQUEST in text(episode, 0, Source.ENV) and SUMMARY + "rolled a 3 and a 4" in text(episode, 1)
    assert "tool_call" not in text(episode, 1).partition(SUMMARY)[2]
    assert [m.content for m in episode.messages if m.role == "assistant"] == ["", "", "6"]  # the summary is no reply
    assert [t.turns[t.loss_mask].tolist()[-1] for t in (first, fork)] == [2, 2] and episode.turns == 3
    assert fork.forked_from is not None and fork.forked_from.parent == 0 and len(policy.engine.sessions) == 2
    again = SUM.rewrite([*SUM.rewrite(episode.messages, "one"), *episode.messages[1:]], "two")
    assert [m.content for m in again] == ["roll" + SUMMARY + "two"]  # in the place of the earlier one


@pytest.mark.parametrize("resumed", [False, True])
def test_summary_keeps_the_question_behind_examples(resumed: bool) -> None:
    shown = [Message("user", "1+1?"), Message("assistant", "2"), Message("user", "2+2?")]
    rule = Shortening(rule="summarise", over_tokens=40)
    policy = TokenPolicy(ScriptedEngine(sampled(ids("Hm.", "none yet", "4"))), RENDERER, shorten=rule)
    before = Prefix((*shown, Message("assistant", "So?"), Message("user", "Go on.")), (), 1)
    talk = policy.resume((), 0, before) if resumed else policy.start((), 0)

    async def main() -> None:
        talk.observe(() if resumed else shown)
        await talk.reply()
        talk.observe([Message("user", "Well? " * 20)])
        await talk.reply()

    asyncio.run(main())
    prompt = RENDERER._tokenizer.decode(talk.trajectories[1].token_ids.tolist(), skip_special_tokens=False)
    assert all(m.content in prompt for m in shown) and "2+2?" + SUMMARY + "none yet" in prompt and "So?" not in prompt


def test_summary_counts_in_the_room_for_replies() -> None:
    room = after(CALL, CALL) + 200
    episode, policy = played(SUM, CALL, CALL, "rolled", "6", budget=Budget(tokens=room))
    asked, answered = (session.params[-1].max_tokens for session in policy.engine.sessions)
    assert episode.stop_reason is StopReason.DONE and asked <= answered == 64
    cut, _ = played(SUM, CALL, CALL, "rolled", "6", budget=Budget(tokens=after(CALL, CALL)))
    assert cut.stop_reason is StopReason.TOKENS  # the request itself does not fit


def test_summary_that_fills_the_context_ends_the_episode() -> None:
    byte = next(i for i in range(432) if RENDERER._tokenizer.decode([i]) == "\ufffd")  # as text it takes three tokens
    replies = [*ids(CALL), [byte] * 63 + [min(RENDERER.stop_ids)], *ids("6")]
    rule = Shortening(rule="summarise", over_tokens=30)

    def play(tokens: int | None) -> Episode:
        policy = TokenPolicy(ScriptedEngine(sampled(replies)), RENDERER, SamplingParams(max_tokens=64), None, rule)
        return run_dice(policy, budget=Budget(tokens=tokens))

    _, rewritten = play(None).trajectories
    room = rewritten.spans[0].stop
    assert [len(play(room + more).trajectories) for more in (0, 1)] == [1, 2]
    for tokens in (room, room - 20):
        episode = play(tokens)
        assert (episode.stop_reason, episode.error, episode.turns) == (StopReason.TOKENS, None, 1)
        assert trained(episode) == [i for reply in replies[:2] for i in reply]
        policy = TokenPolicy(ScriptedEngine(sampled(ids("6"))), RENDERER)
        (job,) = fork_jobs(dice_spec(), episode, 1)
        later = asyncio.run(run_episode(job, policy))  # what it continues from asks for no summary
        assert later.messages[:-1] == episode.messages and text(later, 0).endswith("assistant\n")
        assert REQUEST not in text(later, 0)


def test_turn_with_a_summary_continues_after_it() -> None:
    class Fair(Dice):
        snapshot_attributes = ("rng",)

    parent, _ = played(SUM, CALL, CALL, "rolled", "6", cls=Fair, snapshots=True)
    policy = TokenPolicy(ScriptedEngine(sampled(ids("5"))), RENDERER, SamplingParams(max_tokens=64), None, SUM)
    again = asyncio.run(run_episode(continuation(dice_spec(Fair), parent, 2, 7), policy))
    prompt = parent.trajectories[1].spans[0].stop
    assert policy.engine.sessions[0].token_ids[:prompt] == parent.trajectories[1].token_ids[:prompt].tolist()
    assert trained(again) == ids("5")[0]


def test_fork_of_a_fork_keeps_a_summarised_context() -> None:
    def forked(parent: Episode, turn: int, *replies: str | Message) -> Episode:
        policy = TokenPolicy(ScriptedEngine(sampled(ids(*replies))), RENDERER, SamplingParams(max_tokens=64))
        child = asyncio.run(run_episode(*fork_jobs(dice_spec(), parent, turn), policy))
        (trajectory,) = child.trajectories
        seen = next(t.before(turn) for t in reversed(parent.trajectories) if t.before(turn) is not None)
        assert trajectory.token_ids[: trajectory.spans[0].stop].tolist() == seen.tolist()
        return child

    parent, _ = played(SUM, CALL, CALL, "rolled", CALL, "6")
    child = forked(parent, 2, CALL, CALL, "6")
    grandchild = forked(child, 3, CALL, "5")
    assert "rolled" in text(forked(grandchild, 3, "4"), 0)


def test_continuations_render_the_summary_where_nothing_is_appended() -> None:
    class Fair(Dice):
        snapshot_attributes = ("rng",)

    def check(job: Job, *replies: str | Message) -> None:
        renderer = UnprovenRenderer(RENDERER, range(99))
        child = asyncio.run(run_episode(job, TokenPolicy(ScriptedEngine(sampled(ids(*replies))), renderer)))
        assert child.trajectories[0].token_ids[: len(seen)].tolist() == seen
        assert child.stop_reason is StopReason.DONE and len(child.trajectories) == len(replies)
        for at in range(len(child.trajectories)):
            shown = text(child, at)
            assert "rolled" in shown and shown.count("<|im_start|>tool") == shown.count("<|im_start|>assistant") - 1

    calls, unproven = [CALL] * 4, range(99)
    rule = Shortening(rule="summarise", over_tokens=after(*calls) - 1)
    parent, _ = played(rule, *calls, "rolled", CALL, "6", unproven=unproven, cls=Fair, snapshots=True)
    assert parent.stop_reason is StopReason.DONE and len(parent.trajectories) == 7
    for turn, replies in ((4, (CALL, CALL, "6")), (5, (CALL, "6"))):
        seen = next(t.before(turn) for t in reversed(parent.trajectories) if t.before(turn) is not None).tolist()
        check(*fork_jobs(dice_spec(Fair), parent, turn), *replies)
        check(continuation(dice_spec(Fair), parent, turn, 7), *replies)
    cut, _ = played(rule, *calls, "rolled", CALL, unproven=unproven, budget=Budget(turns=5))
    check(*fork_jobs(dice_spec(), cut, 5), "6")


class Talk(Env):
    """Answers whatever is said with a tool's result, four times."""

    def reset(self, task, rng):
        self.left = 4
        return "roll"

    def step(self, action):
        self.left -= 1
        return Step((Message("tool", "1 2 3 4 5 6", tool_call_id="call_0", name="roll"),), terminated=not self.left)


@pytest.mark.parametrize("rule", ["drop_tool_results", "summarise"])
def test_model_samples_each_token_in_its_row_context(rule: str) -> None:
    model = shaken(make_model(ModelConfig(**TINY | {"max_positions": 1024}), 432, seed=0)).to(DEVICE)
    renderer = UnprovenRenderer(RENDERER, ())
    renderer.stop_ids = frozenset(range(432))  # whatever a random model says is a whole reply
    shorten = Shortening(rule=rule, over_tokens=40)
    policy = TokenPolicy(Engine(model, slots=1, max_len=1024), renderer, SamplingParams(max_tokens=8), None, shorten)
    episode = run_dice(policy, cls=Talk)
    assert episode.turns == 4 and len(episode.trajectories) > 1
    rows = collate(to_samples([episode])).padded()
    assert rows.loss_mask.sum() == sum(t.sampled for t in episode.trajectories) >= 4
    assert_sampled_in(rows, model)


def test_training_counts_its_forks(tmp_path: Path) -> None:
    rollout = {"groups": 2, "samples": 2, "max_tokens": 8, "shorten": {"rule": "summarise", "over_tokens": 8}}
    short = {"budget": {"tokens": 512, "turns": 3}, "eval": {"n": 1, "dev_n": 1, "every": 0}}
    warm = {"demonstrations": 16, "copy_steps": 1, "clone_steps": 2, "batch": 8}
    settings = config(tmp_path, env="guess-v0", steps=1, rollout=rollout, warm_start=warm, **short)
    folder = start_run(settings, Progress())
    episodes = [e for e in read_episodes(folder / "episodes.jsonl") if e.origin.purpose == "train"]
    forks = sum(len(e.trajectories) - 1 for e in episodes)
    (row,) = [r for r in read_metrics(folder / "metrics.jsonl") if r["kind"] == "train"]
    assert row["rollout/forks"] == forks / len(episodes)
    assert all(t.forked_from is not None for e in episodes for t in e.trajectories[1:])


def test_shortening_is_checked() -> None:
    with pytest.raises(ValueError, match="over_tokens"):
        Shortening(rule="summarise", over_tokens=0)
