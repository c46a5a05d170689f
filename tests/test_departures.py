"""agent_rl.stats.departures: where failed episodes first depart from successful ones of their task."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest

from agent_rl.core.episode import Episode, Failure, Origin, Outcome, Reward, StepRecord, StopReason
from agent_rl.core.messages import Message, ToolCall, ToolErrorKind
from agent_rl.stats import departures
from agent_rl.stats.departures import Departure, Departures, find_departures
from agent_rl.stats.diff import evidence_of
from tests.doubles import CALL, example_episode, run_dice, token_policy

Turn = tuple[str | Sequence[ToolCall], str]
"""What the policy says or calls, and what comes back; an empty string for nothing."""


def call(name: str, error: str | None = None, **arguments: object) -> ToolCall:
    return ToolCall("c", name, arguments, error)  # type: ignore[arg-type]


def play(
    *turns: Turn, score: float | None = 0.0, task: int = 0, stop: StopReason = StopReason.DONE, **more: object
) -> Episode:
    """An episode of some turns; its id and group can be given, and what ended it."""
    messages, steps = [Message("user", "Do it.")], []
    for at, (said, result) in enumerate(turns):
        calls = () if isinstance(said, str) else tuple(said)
        messages.append(Message("assistant", said if isinstance(said, str) else "Hm.", tool_calls=calls))
        kind = ToolErrorKind.TIMEOUT if result == "late" else None
        back = [Message("tool", result, name=calls[0].name, tool_error=kind)] if calls else [Message("user", result)]
        messages += back if result else []
        is_cut = stop in (StopReason.LENGTH, StopReason.TOKENS) and at == len(turns) - 1
        steps.append(StepRecord(bool(result), 0.0, terminated=False, truncated=is_cut))
    given = {
        "task": {"n": task},
        "messages": tuple(messages),
        "steps": tuple(steps),
        "rewards": (Reward("correct", score),),
        "stop_reason": stop,
        "outcome": Outcome.TERMINATED if stop is StopReason.DONE else Outcome.TRUNCATED,
        "trajectories": (),
    }
    return example_episode(**{"episode_id": f"e{id(messages)}", **given, **more})


LOOKUP, WEATHER = [call("lookup", key="a")], [call("weather", city="Paris", unit="C")]
GOOD = (LOOKUP, "found"), (WEATHER, "21"), ("It is 21.", "")
MENDED = ([call("lookup", "no JSON")], "malformed"), *GOOD
TALK = ("Where?", "In Paris."), (WEATHER, "21"), ("It is 21.", "")
GAME = ("left", "wall"), ("right", "goal")
LOST = {"outcome": Outcome.FAILED, "error": Failure("step", "SandboxError", "gone")}


def departure_of(bad: Episode, *successful: Episode) -> Departure:
    (kind,) = find_departures([*successful, bad]).kinds
    assert kind.example is not None
    return kind.example


@pytest.mark.parametrize(
    ("good", "bad", "turn", "what"),
    [
        (GOOD, play(([call("search", key="a")], "found"), *GOOD[1:]), 0, "calls search instead of lookup"),
        (GOOD, play(("It is 21.", "")), 0, "answers without calling any tool"),
        (GOOD, play(GOOD[0], ("It is 21.", "")), 1, "answers instead of calling weather"),
        (GOOD, play(*GOOD[:2], ("It is 20.", "")), 2, "same calls, other answer"),
        (GOOD, play(*GOOD[:2], (WEATHER, "21"), GOOD[2]), 2, "calls weather instead of answering"),
        (GOOD, play(GOOD[0], ([call("weather", city="paris", unit="C")], "")), 1, "argument `city` of weather"),
        (GOOD, play(GOOD[0], ([call("weather", city="Paris")], "")), 1, "leaves out argument `unit` of weather"),
        (
            GOOD,
            play(GOOD[0], ([call("weather", city="Paris", day=1, unit="C")], "")),
            1,
            "argument `day` of weather instead of `unit`",
        ),
        (GOOD, play(([call("lookup", key="a", z=1)], "found")), 0, "adds argument `z` to lookup"),
        (GOOD, play((LOOKUP + WEATHER, "found")), 0, "calls weather as well"),
        (((LOOKUP + WEATHER, "found"),), play((LOOKUP, "found")), 0, "leaves out the call of weather"),
        (GOOD, play(([call("lookup", "no JSON")], "malformed")), 0, "a call that can't be read"),
        (MENDED, play(GOOD[0]), 0, "calls lookup instead of writing a call that can't be read"),
        (MENDED, play(("It is 21.", "")), 0, "answers instead of writing a call that can't be read"),
        (MENDED, play(("Hm.", "Go on."), *GOOD), 0, "talks instead of writing a call that can't be read"),
        (GOOD, play(GOOD[0], (WEATHER, "late")), 1, "same call of weather, other result (timeout)"),
        (GOOD, play(GOOD[0], stop=StopReason.TURNS), 0, "cut by turns"),
        (GOOD, play(GOOD[0], ("I th", ""), stop=StopReason.TOKENS), 1, "cut by tokens"),
        (GOOD, play(GOOD[0], ("I th", ""), stop=StopReason.LENGTH), 1, "cut in a reply (length)"),
        (GOOD, play(GOOD[0], stop=StopReason.ERROR, **LOST), 0, "breaks off (sandbox_lost)"),
        (GOOD, play(*GOOD), 2, "same moves, other score"),
        (GOOD, play(GOOD[0], ("Where?", "In Rome."), GOOD[2]), 1, "talks instead of calling weather"),
        (TALK, play(("Which city?", "Paris."), ([call("weather", city="Rome")], "")), 1, "argument `city` of weather"),
        (TALK, play(("No.", "")), 0, "ends the conversation early"),
        (TALK, play(("Why?", "It rains."), *TALK[1:]), 0, "same calls, other reply"),
        (GAME, play(("left", "wall"), ("up", "wall"), ("right", "goal")), 1, "other reply"),
        ((("7", ""),), play(("8", "")), 0, "other answer"),
    ],
)
def test_first_departure_is_found(good: Sequence[Turn], bad: Episode, turn: int, what: str) -> None:
    found = departure_of(bad, play(*good, score=1.0))
    assert (found.turn, found.what) == (turn, what)


def test_cut_reply_is_no_answer() -> None:
    good, bad = run_dice(token_policy(CALL, "6")), run_dice(token_policy("6 6 6", max_tokens=2))
    assert bad.stop_reason is StopReason.LENGTH and bad.final_text
    found = departure_of(bad, good)
    assert (found.turn, found.what) == (0, "cut in a reply (length)")


def test_nearest_successful_episode_is_compared() -> None:
    other, near = play(("21", ""), score=1.0, episode_id="other"), play(*GOOD, score=1.0, episode_id="near")
    bad = play(*GOOD[:2], ("Cold.", ""))
    found = departure_of(bad, other, near, other)
    assert found.successful == "near"
    evidence = evidence_of(found, bad, near)
    assert (evidence.did, evidence.instead_of, evidence.token) == ("Cold.", "It is 21.", None)
    assert not find_departures([bad]).kinds
    assert departure_of(bad, replace(near, group_id="g1"), other).successful == "other"  # its own group first


def run_of(*episodes: tuple[int, float | None, Mapping[str, object], Sequence[Turn]]) -> Departures:
    """Return the departures of episodes `e0`, `e1` ...: of a task, with a score, other fields and turns."""
    played = (play(*turns, score=score, task=task, **more) for task, score, more, turns in episodes)  # type: ignore[arg-type]
    return find_departures(replace(e, id=f"e{i}") for i, e in enumerate(played))


def test_departures_keep_the_tasks_of_environments_apart() -> None:
    found = run_of((1, 0.0, {"env": "a-v0"}, (("No.", ""),)), (1, 1.0, {"env": "b-v0"}, GOOD))
    assert (found.failed, found.compared, found.unsolved_tasks) == (1, 0, 1)


def test_departures_are_counted_by_kind() -> None:
    silent = (("It is 21.", ""),)
    found = run_of(
        (1, 0.0, {}, silent),
        (1, 1.0, {}, GOOD),
        (1, 0.0, {}, silent),
        (2, 0.0, {"group_id": "later", "origin": Origin("train", "train", 9)}, silent),
        (2, 1.0, {}, GOOD),
        (2, 0.0, {}, (*GOOD[:2], ("No.", ""))),
        (3, 0.0, {}, silent),  # of a task that no episode solves
        (3, 0.0, {}, GOOD[:1]),
        (1, None, {}, silent),  # not scored
    )
    assert (found.failed, found.compared, found.left_out, found.by_reward) == (6, 4, 0, False)
    assert [(k.what, k.episodes, len(k.tasks), dict(k.turns)) for k in found.kinds] == [
        ("answers without calling any tool", 3, 2, {0: 3}),
        ("same calls, other answer", 1, 1, {2: 1}),
    ]
    first = found.kinds[0]
    assert first.last_step == 9 and first.example is not None
    assert (first.example.episode, first.example.successful) == ("e3", "e4")  # the newest
    assert (found.unsolved_tasks, found.unsolved, found.unsolved_example) == (1, {"done": 2}, "e7")


def test_graded_rewards_are_compared_with_the_best() -> None:
    found = run_of(*((1, score, {}, ((f"{score}", ""),)) for score in (0.1, 0.5, 0.8, 0.8)), (2, 0.3, {}, GOOD))
    assert found.by_reward and found.compared == 1 and found.kinds[0].what == "other answer"
    assert found.unsolved_tasks == 1


def test_departures_of_all_failed_or_successful() -> None:
    assert (run_of().failed, list(run_of().kinds)) == (0, [])
    solved = run_of(*((n, 1.0, {}, GOOD) for n in range(3)))
    assert (solved.failed, list(solved.kinds), solved.unsolved_tasks) == (0, [], 0)
    failed = run_of(*((n, 0.0, {}, GOOD) for n in range(3)))
    assert (failed.failed, list(failed.kinds), failed.unsolved_tasks) == (3, [], 3)


def test_departures_keep_a_bounded_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(departures, "MOST", 3)
    found = run_of((1, 1.0, {}, GOOD), *((1, 0.0, {}, ((f"{n}", ""),)) for n in (1, 2, 1, 3, 4)))
    assert (found.failed, found.compared, found.left_out) == (5, 3, 2)
