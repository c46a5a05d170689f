"""agent_rl.policy.baselines: policies without skill, by name."""

from __future__ import annotations

from typing import Any

import pytest

import agent_rl as ar
from agent_rl.checks.floors import constant_answers
from agent_rl.gym.tool import tool
from agent_rl.policy.baselines import draw_value
from agent_rl.seeds import Stream, rng
from tests.doubles import example_episode


def said(episode: ar.Episode) -> list[Any]:
    return [(m.content, [(c.name, dict(c.arguments)) for c in m.tool_calls]) for m in episode.messages]


def test_random_policy_repeats_by_seed() -> None:
    first, again, other = (ar.run("search-v0", "random", n=4, seed=seed) for seed in (0, 0, 1))
    assert list(map(said, first)) == list(map(said, again)) != list(map(said, other))


def test_random_policy_makes_valid_calls_of_every_tool() -> None:
    episodes = ar.run("calculator-v0", "random", n=64)
    calls = [c for e in episodes for m in e.messages for c in m.tool_calls]
    assert {c.arguments["operator"] for c in calls} == {"+", "-", "*"}
    assert not any(e.tool_errors for e in episodes)
    assert any(e.final_text for e in episodes) and len({str(c.arguments) for c in calls}) > 20


@pytest.mark.parametrize(
    ("policy", "text"),
    [("empty", ""), ("nothing", "I am done."), ("constant", "yes"), ({"name": "constant", "text": 42}, "42")],
)
def test_policies_without_skill_repeat_themselves(policy: Any, text: str) -> None:
    episodes = ar.run("calculator-v0", policy, n=3)
    assert [e.messages[-1] for e in episodes] == [ar.Message("assistant", text)] * 3


def test_draw_value_fits_the_schema() -> None:
    @tool
    def book(
        day: int, hours: list[float], note: str | None, room: dict[str, int] | bool = False, *, size: str = "s"
    ) -> str:
        return "booked"

    generator = rng(Stream.BASELINE, 1)
    drawn = [draw_value(book.spec.parameters, ["blue"], generator) for _ in range(100)]
    for arguments in drawn:
        assert isinstance(arguments, dict) and book.bind(arguments, None)() == "booked"
    assert {type(a["note"]) for a in drawn if isinstance(a, dict)} == {str, type(None)}  # type: ignore[index]


def test_draw_value_follows_references_and_bounds() -> None:
    schema: dict[str, Any] = {
        "type": "object",
        "$defs": {"Node": {"type": "object", "properties": {"next": {"$ref": "#/$defs/Node"}}, "required": ["next"]}},
        "properties": {"age": {"type": "integer", "minimum": 3, "maximum": 5}, "kind": {"const": "cat"}},
        "required": ["age", "kind"],
    }
    generator = rng(Stream.BASELINE, 2)
    drawn = [draw_value(schema, [], generator) for _ in range(50)]
    assert {a["age"] for a in drawn} == {3, 4, 5} and {a["kind"] for a in drawn} == {"cat"}  # type: ignore[index,call-overload]


def test_constant_answers_leave_the_own_task_out() -> None:
    answers = ["a", "a", "b", ""]
    episodes = [example_episode(task={"n": i}, messages=(ar.Message("assistant", a),)) for i, a in enumerate(answers)]
    assert constant_answers(episodes) == ["a", "a", "a", "a"]
    assert constant_answers(episodes[1:3]) == ["b", "a"] and constant_answers(episodes[:1]) == ["yes"]
