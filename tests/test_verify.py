"""Replay: recorded episodes, played again in fresh environments and compared turn by turn."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import agent_rl as ar
from agent_rl.core.episode import Episode, Failure, Outcome, StepRecord, StopReason
from agent_rl.core.messages import Message
from agent_rl.core.sandbox_loss import Cause, SandboxLoss
from agent_rl.core.turns import turns
from agent_rl.gym.budget import Budget
from agent_rl.replay.result import Status
from agent_rl.replay.run import MODES, Mode
from agent_rl.rollout import Job, continuation, run_episode
from agent_rl.store.episodes import read_episodes
from tests.doubles import token_policy
from tests.recorded import CALL, DETERMINISTIC, Ends, one, recorded, registered, stored, verified

BUDGETS = (None, Budget(turns=2), Budget(turns=8, tool_calls=1))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twenty episodes of each deterministic environment."""
    episodes = (episode for env in DETERMINISTIC for episode in recorded(env, 20, BUDGETS))
    return stored(tmp_path_factory.mktemp("run"), episodes)


@pytest.mark.parametrize("mode", MODES)
def test_replay_of_built_in_environments_is_the_same(folder: Path, mode: Mode) -> None:
    found = ar.verify(folder, mode=mode)
    assert found.counts == {Status.SAME: 20 * len(DETERMINISTIC)}, found.found[:3]
    assert {e.stop_reason for e in read_episodes(folder)} >= {"done", "turns", "tool_calls"}
    assert found.exit_code == 0 and not found.reasons


Plant = Callable[[Episode, int, int], tuple[Episode, str]]
"""Changes an episode at a turn, in a way that a number decides; returns it with where the change is found."""


def in_step(name: str, change: Callable[[object], object]) -> Plant:
    def plant(episode: Episode, turn: int, pick: int) -> tuple[Episode, str]:
        step = episode.steps[turn]
        changed = replace(step, **{name: change(getattr(step, name))})
        return replace(episode, steps=(*episode.steps[:turn], changed, *episode.steps[turn + 1 :])), f"turn {turn}"

    return plant


def in_text(episode: Episode, turn: int, pick: int) -> tuple[Episode, str]:
    """Change one character of what the environment said: in the opening, where the turn's answer says nothing."""
    opening, *replied = turns(episode)
    said = [m for m in replied[turn].messages[1:] if m.content] or [m for m in opening.messages if m.content]
    message = said[pick % len(said)]
    at = pick % len(message.content)
    new = "x" if message.content[at] != "x" else "y"
    changed = replace(message, content=message.content[:at] + new + message.content[at + 1 :])
    where = f"turn {turn}" if message in replied[turn].messages else "opening"
    messages = tuple(changed if m is message else m for m in episode.messages)
    return replace(episode, messages=messages), where


def in_tool_error(episode: Episode, turn: int, pick: int) -> tuple[Episode, str]:
    answers = [m for m in list(turns(episode))[turn + 1].messages[1:] if m.role == "tool"]
    assume(answers)
    wrong = ar.core.messages.ToolErrorKind.MALFORMED if answers[0].tool_error is None else None
    messages = tuple(replace(m, tool_error=wrong) if m is answers[0] else m for m in episode.messages)
    return replace(episode, messages=messages), f"turn {turn}"


def in_rewards(episode: Episode, turn: int, pick: int) -> tuple[Episode, str]:
    at = pick % len(episode.rewards)
    value = episode.rewards[at].value
    assert value is not None
    rewards = (*episode.rewards[:at], replace(episode.rewards[at], value=value + 1), *episode.rewards[at + 1 :])
    return replace(episode, rewards=rewards), "rewards"


def in_ending(episode: Episode, turn: int, pick: int) -> tuple[Episode, str]:
    is_done = episode.stop_reason is StopReason.DONE
    outcome = Outcome.TRUNCATED if is_done else Outcome.TERMINATED
    return replace(episode, stop_reason=StopReason.TURNS if is_done else StopReason.DONE, outcome=outcome), "ending"


PLANTS: tuple[Plant, ...] = (
    in_step("reward", lambda value: float(str(value)) + 1),
    in_step("terminated", lambda value: not value),
    in_step("truncated", lambda value: not value),
    in_step("state", lambda value: "another"),
    in_text,
    in_tool_error,
    in_rewards,
    in_ending,
)


@settings(max_examples=60)
@given(data=st.data())
def test_planted_change_is_found_at_its_turn(
    folder: Path, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    episodes = [e for e in read_episodes(folder) if e.stop_reason is not StopReason.TOOL_CALLS]
    episode = data.draw(st.sampled_from(episodes))
    plant, turn = data.draw(st.sampled_from(PLANTS)), data.draw(st.integers(0, episode.turns - 1))
    changed, where = plant(episode, turn, data.draw(st.integers(0, 1000)))
    # a cassette takes the word of a free function's record, as calculator-v0's is
    mode = data.draw(st.sampled_from(MODES)) if episode.env != "calculator-v0" else "live"
    found = verified(tmp_path_factory.mktemp("planted"), [changed], mode)
    assert found.counts == {Status.DIFFERS: 1} and found.exit_code == 1
    assert found.found[0].problem[0] == where, (plant, found.found[0].problem)


def test_sandbox_that_the_policy_ended_takes_what_steps_earned(tmp_path: Path) -> None:
    class Losing(ar.Env):
        sandbox_loss = None

        def reset(self, task: ar.Task, rng: np.random.Generator) -> str:
            return "hi"

        def step(self, action: Message) -> ar.Step:
            if action.content == "crash":
                self.sandbox_loss = SandboxLoss(Cause.MEMORY)
            return ar.Step("go on", reward=0.5, terminated=self.sandbox_loss is not None)

    episode = one(registered("losing-v0", Losing), "work", "crash")
    assert episode.ending == "sandbox_ended" and episode.steps[0].reward == 0.5 and episode.reward == 0
    assert verified(tmp_path, [episode]).counts == {Status.SAME: 1}


@pytest.mark.parametrize(
    ("task", "budget", "stop", "turns", "status", "why"),
    [
        ({}, Budget(turns=2), "turns", 2, "same", ""),
        ({"truncate": 2}, Budget(), "env_truncated", 2, "same", ""),
        ({}, Budget(tool_calls=2), "tool_calls", 3, "same", ""),
        ({"hang": 2}, Budget(seconds=0.2), "seconds", 2, "unverified", "seconds ran out within the step"),
        ({"break": 3}, Budget(), "error", 3, "unverified", "failed in step: InfrastructureError: no server"),
        ({"break": 1}, Budget(), "error", 1, "unverified", "failed in step"),
    ],
)
def test_endings_are_verified_as_far_as_known(
    tmp_path: Path, task: ar.Task, budget: Budget, stop: str, turns: int, status: str, why: str
) -> None:
    episode = one(ar.spec("ends-v0"), CALL, CALL, CALL, "bye", task=task, budget=budget)
    assert (episode.stop_reason, episode.turns) == (stop, turns)
    found = verified(tmp_path, [episode])
    assert found.counts == {status: 1}
    expected = {Status.SAME: turns} if status == "same" else {Status.SAME: turns - 1, Status.UNVERIFIED: 1}
    assert found.turns == Counter(expected) or found.turns == +Counter(expected)
    if why:
        assert why in next(iter(found.reasons)) and found.exit_code == 2


def test_cut_reply_is_not_played_again(tmp_path: Path) -> None:
    policy = token_policy(CALL, "a reply that is longer than its limit", max_tokens=30)
    job = Job(ar.spec("ends-v0"), {"n": 1}, 3, id="e0")
    episode = asyncio.run(run_episode(job, policy))
    assert (episode.stop_reason, episode.turns) == (StopReason.LENGTH, 2)
    again = asyncio.run(run_episode(replace(job, id="e1", budget=Budget(tokens=90)), token_policy(CALL, CALL, CALL)))
    assert again.stop_reason is StopReason.TOKENS
    assert verified(tmp_path, [episode, again]).counts == {Status.SAME: 2}


def test_continued_episode_is_played_from_its_start(tmp_path: Path) -> None:
    spec = ar.spec("guess-v0")
    task = spec.tasks.get("train", 0)
    parent = asyncio.run(
        run_episode(Job(spec, task, 3, id="p", snapshots=True, budget=Budget(turns=3)), token_policy("5", "9", "2"))
    )
    child = asyncio.run(
        run_episode(continuation(spec, parent, 1, 77, id="c", budget=Budget(turns=2)), token_policy("7"))
    )
    assert child.parent == ("p", 1)
    assert verified(tmp_path, [parent, child]).counts == {Status.SAME: 2}


def test_missing_environment_is_unverified_with_its_reason(tmp_path: Path) -> None:
    episode = one(ar.spec("ends-v0"), "bye")
    broken = replace(episode, id="e1", steps=(StepRecord(5, 0.0, True, False),))
    found = verified(tmp_path, [replace(episode, env="gone-v0"), broken])
    assert "no environment 'gone-v0'" in next(iter(found.reasons)) and found.exit_code == 1
    assert found.found[1].problem[1].field in ("messages", "opening[0].role", "the number of messages of opening")


def test_messages_behind_the_last_step_end_no_verification(tmp_path: Path) -> None:
    episode = one(ar.spec("ends-v0"), CALL, CALL, "bye")
    cut = replace(episode, id="cut", steps=episode.steps[:-1])
    failed = replace(cut, id="f", outcome=Outcome.FAILED, rewards=(), error=Failure("step", "E", "x"))
    found = verified(tmp_path, [cut, failed, episode])
    assert found.counts == {Status.DIFFERS: 1, Status.UNVERIFIED: 1, Status.SAME: 1}
    assert found.found[0].problem[1].field == "messages" and found.turns[Status.SAME] >= 3 + 1


def test_failed_environment_is_unverified_and_raising_one_differs(tmp_path: Path) -> None:
    episode = one(ar.spec("ends-v0"), CALL, CALL, "bye")
    planted = [replace(episode, id=str(n), task={"break": n}) for n in (1, 2)]
    failed = replace(episode, id="f", outcome=Outcome.FAILED, rewards=(), error=Failure("policy", "PolicyError", "x"))
    found = verified(tmp_path, [*planted, failed])
    assert found.counts == {Status.UNVERIFIED: 3} and found.turns[Status.SAME] == 1 + 3
    strict = registered("strict-v0", type("Strict", (Ends,), {"reset": lambda self, task, rng: task["key"]}))
    found = verified(tmp_path / "b", [replace(episode, env=strict.id)])
    assert found.found[0].problem[1].replayed == "reset raises KeyError: 'key'" and found.exit_code == 1
