"""Replay of what is more than an environment: tools outside, users, judges, groups and matches."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest

import agent_rl as ar
from agent_rl.core.episode import Episode, StopReason
from agent_rl.core.judgement import Judgement
from agent_rl.core.messages import Message, ToolCall
from agent_rl.gym.budget import Budget
from agent_rl.judge.apply import with_judged_reward
from agent_rl.replay.result import Status
from agent_rl.replay.run import MODES
from tests.doubles import play, token_policy
from tests.fake_openai import FakeOpenAI, said
from tests.recorded import CALL, Ends, one, registered, verified


class Shop(ar.DialogueEnv):
    """Asks a counter outside, which never says the same twice; what `own` says is the environment's."""

    asked: ClassVar[Iterator[int]] = itertools.count()

    def __init__(self, user: ar.User | None = None) -> None:
        self.user = user or ar.ScriptedUser(["hello", "so?"])

    async def reset(self, task: ar.Task, rng: np.random.Generator) -> tuple[Message, ...]:
        self.rng = rng
        return await self.open_dialogue("Serve.")

    @ar.tool
    def own(self) -> int:
        """Draw."""
        return int(self.rng.integers(10**6))

    @ar.reward
    def drawn(self, episode: Episode) -> float:
        return float(self.rng.random())


@ar.tool
def ask(what: str) -> str:
    """Ask outside."""
    if what == "fault":
        raise ValueError(f"fault {next(Shop.asked)}")
    return f"{what} {next(Shop.asked)}"


class OutsideShop(Shop):
    extra_tools = (ask,)


def test_cassette_answers_for_what_is_outside(tmp_path: Path) -> None:
    both = Message(
        "assistant",
        tool_calls=tuple(
            ToolCall(f"c{i}", name, args)
            for i, (name, args) in enumerate(
                [("ask", {"what": "b"}), ("own", {}), ("ask", {"what": "a"}), ("ask", {"what": "a"}), ("ask", {"w": 1})]
            )
        ),
    )
    fault = Message("assistant", tool_calls=(ToolCall("c", "ask", {"what": "fault"}),))
    episode = one(registered("outside-v0", OutsideShop), both, fault, "bye", "bye")
    assert verified(tmp_path / "a", [episode], "cassette").counts == {Status.SAME: 1}
    live = verified(tmp_path / "b", [episode])
    where, result = live.found[0].problem
    assert (where, result.field, result.position) == ("turn 0", "observation[0].content", 2)
    # what the environment itself draws is not taken from the record
    drawn = next(m for m in episode.messages if m.name == "own")
    planted = replace(episode, messages=tuple(replace(m, content="x") if m is drawn else m for m in episode.messages))
    assert verified(tmp_path / "c", [planted], "cassette").found[0].problem[1].field == "observation[1].content"


def test_call_without_recorded_answer_is_a_difference(tmp_path: Path) -> None:
    class Eager(OutsideShop):
        async def step(self, action: Message) -> ar.Step:
            if Eager.also and action.tool_calls:
                action = replace(action, tool_calls=(replace(action.tool_calls[0], arguments={"what": "weight"}),))
            return await super().step(action)

        also: ClassVar[bool] = False

    episode = one(registered("eager-v0", Eager), CALL, "bye", "bye")
    Eager.also = True
    where, result = verified(tmp_path, [episode], "cassette").found[0].problem
    assert where == "turn 0" and "ask({'what': 'weight'}) has no answer in turn 0" in str(result)


class Fickle:
    """A user who never says the same twice."""

    said: ClassVar[Iterator[int]] = itertools.count()

    def reply(self, messages: object) -> str | None:
        return f"hm {next(self.said)}" if len(list(messages)) < 4 else None  # type: ignore[call-overload]


def test_users_words_come_from_the_record(tmp_path: Path) -> None:
    class Fickly(Shop):
        def __init__(self) -> None:
            super().__init__(Fickle())

    class Modelled(Shop):
        def __init__(self) -> None:
            super().__init__(ar.ModelUser(token_policy(f"hm {next(Fickle.said)}"), "You buy."))

    episode = one(registered("fickly-v0", Fickly), "which?", "good")
    assert episode.stop_reason is StopReason.DONE
    assert verified(tmp_path / "a", [episode], "cassette").counts == {Status.SAME: 1}
    assert verified(tmp_path / "b", [episode]).found[0].problem[0] == "opening"
    registered("modelled-v0", Modelled)
    # a model is not asked again, in either mode
    modelled = replace(episode, env="modelled-v0")
    for mode in MODES:
        assert verified(tmp_path / mode, [modelled], mode).counts == {Status.SAME: 1}


def test_served_user_may_be_gone_in_a_verification(tmp_path: Path) -> None:
    with FakeOpenAI([said("Help!"), said("Yes."), said("Bye. ###STOP###")]) as server:
        user = {"user": "openai", "user_args": {"model": "m", "base_url": server.url}}
        (episode,) = ar.run("support-v0", play("What?", "Done."), n=1, env_args=user)
    assert episode.stop_reason is StopReason.DONE and len(server.asked) == 3
    for mode in MODES:
        assert verified(tmp_path / mode, [episode], mode).counts == {Status.SAME: 1}
    with pytest.raises(ar.ConfigError, match="can't be reached"):
        ar.fork(tmp_path / "live", episode.id, 1, "constant", out=str(tmp_path / "fork"))


def test_nondeterministic_environment_is_never_wrong(tmp_path: Path) -> None:
    spec = registered("fickle-v0", OutsideShop, nondeterministic=True)
    found = verified(tmp_path, [one(spec, CALL, "bye", "bye"), one(spec, "bye", "bye", id="e1")])
    assert found.counts == {Status.UNVERIFIED: 1, Status.SAME: 1} and found.exit_code == 0
    (why,) = found.reasons
    assert why == "registered with nondeterministic=True, and observation[0].content differs"


def test_players_of_a_match_are_played_together(tmp_path: Path) -> None:
    episodes = ar.run("nim-v0", [ar.demonstrator(), "random"], n=6, budget=Budget(turns=6))
    episodes = [replace(e, id=f"e{i}") for i, e in enumerate(episodes)]
    assert verified(tmp_path / "a", episodes).counts == {Status.SAME: 12}
    later = next(e for e in episodes if e.task != episodes[0].task and e.seat == 0)
    planted = replace(later, steps=(replace(later.steps[0], state="?"), *later.steps[1:]))
    others = [e for e in episodes if e.group_id == later.group_id.removesuffix("0") + "1"]
    found = verified(tmp_path / "b", [planted, *others[:1], episodes[0]])
    assert {e.id: str(e.status) for e in found.found} == {later.id: "differs", "e0": "unverified"}
    assert next(iter(found.reasons)) == "the file lacks episodes of other players of its match"


class Ranked(Ends):
    @ar.group_reward(weight=0.5)
    def rank(self, group: ar.EpisodeGroup) -> list[float]:
        return [float(episode.turns) for episode in group.episodes]


def test_group_rewards_are_computed_again_from_the_group(tmp_path: Path) -> None:
    registered("verified-ranked-v0", Ranked)
    episodes = ar.run("verified-ranked-v0", "random", n=1, samples=4)
    assert all(e.value("rank") == e.turns for e in episodes)
    assert verified(tmp_path / "a", episodes).counts == {Status.SAME: 4}
    wrong = replace(episodes[1], rewards=tuple(replace(r, value=9.0) for r in episodes[1].rewards if r.name == "rank"))
    wrong = replace(wrong, rewards=(*(r for r in episodes[1].rewards if r.name != "rank"), *wrong.rewards))
    found = verified(tmp_path / "b", [episodes[0], wrong, *episodes[2:]])
    assert [(e.id, e.problem[1].field) for e in found.found] == [(wrong.id, "rewards.rank.value")]
    part = verified(tmp_path / "c", episodes[1:])
    assert part.counts == {Status.UNVERIFIED: 3} and "whole group" in next(iter(part.reasons))


class Counting:
    """A judge that counts how often it is asked."""

    name = "counting"
    asked = 0

    async def judge(self, episode: Episode, rubric: ar.Rubric) -> Judgement:
        self.asked += 1
        return Judgement(rubric.label, self.name, (), 0.5, episode.id)


def test_judges_are_read_again_and_not_asked(tmp_path: Path) -> None:
    judge = Counting()
    rubric = {"name": "r", "criteria": [{"id": "a", "text": "Is it good?"}]}
    registered("judged-v0", ar.judge(rubric=rubric, judge=judge, name="good")(type("Judged", (Ends,), {})))
    episode = one(ar.spec("judged-v0"), CALL, "bye")
    assert judge.asked == 1 and episode.value("good") == 0.5
    assert verified(tmp_path / "a", [episode]).counts == {Status.SAME: 1} and judge.asked == 1
    wrong = replace(episode, rewards=tuple(replace(r, value=1.0) if r.name == "good" else r for r in episode.rewards))
    assert verified(tmp_path / "b", [wrong]).found[0].problem[1].field == "rewards.good.value"
    applied = with_judged_reward(episode, episode.judgements[0], "other", "replace", 1.0)
    assert "were replaced" in next(iter(verified(tmp_path / "c", [applied]).reasons))
