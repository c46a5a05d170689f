"""Replay's second check: stored ids that follow from the messages, and sampled ids that text would not bring back."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import agent_rl as ar
from agent_rl.core.episode import Episode
from agent_rl.core.messages import Message, ToolCall
from agent_rl.core.trajectory import FinishReason, Source, Span, Trajectory
from agent_rl.engines.base import SamplingParams
from agent_rl.engines.scripted import ScriptedEngine
from agent_rl.errors import CheckpointError
from agent_rl.gym.budget import Budget
from agent_rl.policy import Interruption, TokenPolicy
from agent_rl.policy.delegation import Delegation
from agent_rl.policy.shortening import Shortening
from agent_rl.rendering import train_tokenizer
from agent_rl.replay.result import Status
from agent_rl.rollout import Job, continuation, run_episode, run_jobs, split_jobs
from agent_rl.store.episodes import read_episodes
from tests.doubles import UnprovenRenderer, sampled, small_renderer
from tests.recorded import stored, verified

LOOK = Message("assistant", tool_calls=(ToolCall("call_0", "search", {"query": "bafo born"}),))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of `small_renderer`'s tokenizer."""
    folder = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer(["compute 3*4+5 calculator expression"], 432).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Demonstrations of two environments, with token ids."""
    jobs = [
        replace(job, id=f"{env}-{i:03d}")
        for env in ("calculator-v0", "search-v0")
        for i, job in enumerate(split_jobs(ar.spec(env), 15, 1, 0, origin=ar.Origin("rollout", "train")))
    ]
    policy = ar.demonstrator(small_renderer())
    return stored(tmp_path_factory.mktemp("run"), asyncio.run(run_jobs(jobs, policy)))


def test_stored_ids_follow_from_the_messages(run: Path, tokenizer: Path) -> None:
    found = ar.verify(run, tokenizer=tokenizer)
    assert found.counts == {Status.SAME: 30} and found.tokens == {Status.SAME: 30}
    assert found.sampled == found.turns[Status.SAME] and found.drifted == 0
    without = ar.verify(run)
    assert without.counts == {Status.SAME: 30} and without.tokens == {Status.UNVERIFIED: 30}
    assert "name one with --tokenizer FOLDER" in next(iter(without.reasons)) and without.exit_code == 0
    with pytest.raises(CheckpointError, match="has no tokenizer"):
        ar.verify(run, tokenizer=run / "nothing")


def with_ids(episode: Episode, at: int, token: int) -> Episode:
    (old,) = episode.trajectories
    ids = old.token_ids.tolist()
    ids[at] = token
    return replace(episode, trajectories=(Trajectory.restore(ids, old.spans, old.logprobs[old.loss_mask].tolist()),))


def with_spans(episode: Episode, spans: list[Span]) -> Episode:
    (old,) = episode.trajectories
    n = sum(s.stop - s.start for s in spans if s.source is Source.POLICY)
    return replace(episode, trajectories=(Trajectory.restore(old.token_ids.tolist(), spans, [-0.5] * n),))


@settings(max_examples=40)
@given(data=st.data())
def test_planted_token_is_found_at_its_turn(
    run: Path, tokenizer: Path, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    episode = data.draw(st.sampled_from(list(read_episodes(run))))
    (trajectory,) = episode.trajectories
    number = data.draw(st.integers(0, len(trajectory.spans) - 1))
    span = trajectory.spans[number]
    if data.draw(st.booleans()):
        at = data.draw(st.integers(span.start, span.stop - 1))
        old = int(trajectory.token_ids[at])
        # a number's token is no end of a turn, and says something else
        digits = [small_renderer()._text(digit)[0] for digit in "0123456789"]
        planted = with_ids(episode, at, data.draw(st.sampled_from([d for d in digits if d != old])))
    else:
        wrong = replace(span, source=Source.ENV if span.source is not Source.ENV else Source.TEMPLATE)
        if data.draw(st.booleans()):
            wrong = replace(span, turn=span.turn + 1)
        planted = with_spans(episode, [wrong if s is span else s for s in trajectory.spans])
    found = verified(tmp_path_factory.mktemp("planted"), [planted], tokenizer=tokenizer)
    assert found.counts == {Status.DIFFERS: 1} and found.turns[Status.DIFFERS] == 0
    where, result = found.found[0].problem
    turns = {span.turn, span.turn + (span.source is Source.TEMPLATE)}
    assert where in {f"turn {turn}, tokens" for turn in turns}, (span, result)


def play_tokens(policy: TokenPolicy, **job: object) -> Episode:
    spec = ar.spec("search-v0")
    given = {"task": spec.tasks.get("train", 0), "seed": 3, "id": "e0", "budget": Budget(turns=2), **job}
    return asyncio.run(run_episode(Job(spec, **given), policy))  # type: ignore[arg-type]


def policy(*replies: str | Message, **options: object) -> TokenPolicy:
    renderer = small_renderer()
    ids = [renderer.reply(Message("assistant", r) if isinstance(r, str) else r) for r in replies]
    return TokenPolicy(ScriptedEngine(sampled(ids)), renderer, SamplingParams(max_tokens=64), **options)  # type: ignore[arg-type]


def test_drift_counts_replies_that_encode_to_other_ids(tokenizer: Path, tmp_path: Path) -> None:
    renderer = small_renderer()
    letters = [renderer._text(letter)[0] for letter in "calculator"]
    assert renderer._text("calculator") != letters
    replies = [renderer.reply(LOOK), [*letters, *renderer.reply(Message("assistant", ""))]]
    episode = play_tokens(TokenPolicy(ScriptedEngine(sampled(replies)), renderer, SamplingParams(max_tokens=64)))
    found = verified(tmp_path, [episode, replace(play_tokens(policy(LOOK, "b")), id="e1")], tokenizer=tokenizer)
    assert found.counts == {Status.SAME: 2} == dict(found.tokens)
    assert (found.sampled, found.drifted, found.drifted_episodes) == (4, 1, 1)


def test_interrupted_and_forked_replies_follow_from_the_messages(tokenizer: Path, tmp_path: Path) -> None:
    renderer = small_renderer()
    forking = TokenPolicy(
        ScriptedEngine(sampled(renderer.reply(m) for m in (LOOK, Message("assistant", "b")))),
        UnprovenRenderer(renderer, {1}),
        SamplingParams(max_tokens=64),
    )
    forked = play_tokens(forking)
    assert len(forked.trajectories) == 2
    found = verified(tmp_path, [forked], tokenizer=tokenizer)
    assert found.counts == {Status.SAME: 1} and found.tokens == {Status.SAME: 1}
    (first, second) = forked.trajectories
    ids = second.token_ids.tolist()
    ids[0] += 1
    wrong = Trajectory.restore(ids, second.spans, second.logprobs[second.loss_mask].tolist(), None, second.forked_from)
    planted = verified(tmp_path / "b", [replace(forked, trajectories=(first, wrong))], tokenizer=tokenizer)
    assert planted.tokens == {Status.UNVERIFIED: 1}  # as if its context had been rewritten


def test_interrupted_reply_is_read_whole(tokenizer: Path, tmp_path: Path) -> None:
    renderer = small_renderer()
    half, end = renderer._text("so"), [*renderer._text("mada"), *renderer.stop_ids][:-1]
    first, second = sampled([half, [*end, min(renderer.stop_ids)]])
    engine = ScriptedEngine([replace(first, finish_reason=FinishReason.LENGTH), second])
    rule = Interruption(len(half), tuple(renderer._text("now ")))
    episode = play_tokens(TokenPolicy(engine, renderer, SamplingParams(max_tokens=64), rule))
    assert Source.TEMPLATE in [span.source for span in episode.trajectories[0].spans]
    found = verified(tmp_path, [episode], tokenizer=tokenizer)
    assert found.counts == {Status.SAME: 1} == dict(found.tokens)


@pytest.mark.parametrize("rule", ["drop_tool_results", "summarise"])
def test_rewritten_context_is_unverified(
    rule: Literal["drop_tool_results", "summarise"], tokenizer: Path, tmp_path: Path
) -> None:
    said: tuple[str | Message, ...] = (LOOK, LOOK, "bafo") if rule != "summarise" else (LOOK, "a summary", LOOK, "b")
    shorten = Shortening(rule=rule, over_tokens=60, keep=0)
    episode = play_tokens(policy(*said, shorten=shorten), budget=Budget(turns=3 if rule != "summarise" else 2))
    assert len(episode.trajectories) > 1, episode.error
    found = verified(tmp_path, [episode], tokenizer=tokenizer)
    assert found.counts == {Status.SAME: 1} and "rewritten" in next(iter(found.reasons))


def test_refused_delegation_is_unverified(tokenizer: Path, tmp_path: Path) -> None:
    asks = Message("assistant", tool_calls=(ToolCall("call_0", "delegate", {"task": " "}),))
    episode = play_tokens(policy(asks, LOOK, "bafo", delegate=Delegation()))
    assert (len(episode.trajectories), episode.turns) == (1, 2)
    found = verified(tmp_path, [episode], tokenizer=tokenizer)
    assert found.counts == {Status.SAME: 1} and "delegate was refused" in next(iter(found.reasons))


def test_summary_without_room_for_a_reply_is_unverified(tokenizer: Path, tmp_path: Path) -> None:
    renderer = small_renderer()
    byte = next(i for i in range(432) if renderer._tokenizer.decode([i]) == "\ufffd")  # as text it takes three
    said = [renderer.reply(LOOK), [byte] * 63 + [min(renderer.stop_ids)], renderer.reply(Message("assistant", "b"))]
    shorten = Shortening(rule="summarise", over_tokens=60)

    def play(tokens: int | None) -> Episode:
        params = SamplingParams(max_tokens=64)
        summing = TokenPolicy(ScriptedEngine(sampled(said)), renderer, params, shorten=shorten)
        return play_tokens(summing, budget=Budget(turns=2, tokens=tokens))

    asked, rewritten = play(None).trajectories
    assert len(asked) < rewritten.spans[0].stop
    episode = play(len(asked))
    assert (episode.stop_reason, episode.turns, len(episode.trajectories)) == (ar.StopReason.TOKENS, 1, 1)
    found = verified(tmp_path, [episode], tokenizer=tokenizer)
    assert found.counts == {Status.SAME: 1} and "rewritten" in next(iter(found.reasons))


def test_continuation_is_compared_from_its_own_turns(tokenizer: Path, tmp_path: Path) -> None:
    parent = play_tokens(policy(LOOK, LOOK), snapshots=True)
    spec = ar.spec("search-v0")
    job = continuation(spec, parent, 1, 77, id="e1", budget=Budget(turns=2))
    child = asyncio.run(run_episode(job, policy("bafo")))
    found = verified(tmp_path, [parent, child], tokenizer=tokenizer)
    assert found.counts == {Status.SAME: 2} == dict(found.tokens)
