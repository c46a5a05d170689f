"""Objects with the shape of verifiers' environments, of classes of their own: verifiers is not needed."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

import agent_rl as ar
from agent_rl.envs.quiz import one_call
from agent_rl.policy import Scripted

ROWS = [{"question": f"{n} + {n + 1}?", "answer": str(2 * n + 1), "info": {"n": n}} for n in range(6)]


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def correct(completion: Any, answer: str) -> float:
    return float(completion[-1]["content"] == answer)


async def used_tool(prompt: Any, state: dict[str, Any], info: dict[str, int], **rest: Any) -> float:
    await asyncio.sleep(0)
    assert prompt[0] == {"role": "system", "content": "Add."} and f"{info['n']} +" in prompt[-1]["content"]
    return float(any(message["role"] == "tool" for message in state["completion"]))


def shaped(**instead: Any) -> SimpleNamespace:
    rubric = SimpleNamespace(funcs=[used_tool, correct], weights=[0.0, 1.0])
    given = {"dataset": ROWS, "tools": [add], "rubric": rubric, "system_prompt": "Add.", "max_turns": 4}
    return SimpleNamespace(**{name: value for name, value in (given | instead).items() if value is not None})


def test_shaped_tools_are_called_and_rubric_scores() -> None:
    def play(env: ar.Env, seed: int) -> ar.Script:
        n = env.state["info"]["n"]  # type: ignore[attr-defined]
        (found,) = yield one_call("add", a=n, b=n + 1)
        yield found.content

    ar.register("shape-test/sums-v0")(ar.from_verifiers(shaped()))
    (episode,) = ar.run("shape-test/sums-v0", Scripted(play), n=1)
    assert [m.role for m in episode.messages] == ["system", "user", "assistant", "tool", "assistant"]
    assert [(r.name, r.value, r.weight) for r in episode.rewards] == [("correct", 1.0, 1.0), ("used_tool", 1.0, 0.0)]
    (empty,) = ar.run("shape-test/sums-v0", "empty")
    assert (empty.reward, empty.turns, empty.outcome) == (0.0, 1, ar.Outcome.TERMINATED)


class Guess:
    """Guess a digit."""

    eval_dataset = (row for row in [{"prompt": [{"role": "user", "content": "Which digit?"}], "answer": "7"}])
    dataset = None
    max_turns = -1

    def __init__(self) -> None:
        self.reward_funcs = [lambda state, **_: state["last"] == "yes"]

    def setup_state(self, state: dict[str, Any]) -> None:
        state["last"] = ""

    def is_completed(self, messages: Any, state: dict[str, Any], **kwargs: Any) -> bool:
        return state["last"] == "yes" or state["turn"] >= 5

    async def env_response(self, messages: Any, state: dict[str, Any]) -> Any:
        said = messages[-1]["content"]
        state["last"] = "yes" if said == state["answer"] else "more" if said < state["answer"] else "less"
        return [{"role": "user", "content": state["last"]}], state


def test_shaped_responses_and_ends_are_its_own() -> None:
    ar.register("shape-test/guess-v0")(ar.from_verifiers(Guess()))
    counting = Scripted(lambda env, seed: (str(n) for n in range(5, 10)))  # type: ignore[arg-type,misc]
    (episode,) = ar.run("shape-test/guess-v0", counting, split="eval")
    assert [m.content for m in episode.messages[2::2]] == ["more", "more", "yes"] and episode.reward == 1.0
    (lost,) = ar.run("shape-test/guess-v0", "empty", split="eval")
    assert (lost.turns, lost.reward, lost.outcome) == (5, 0.0, ar.Outcome.TERMINATED)


def asks_too_much(completion: Any, colour: str) -> float:
    return 0.0


@pytest.mark.parametrize(
    ("instead", "said"),
    [
        ({"dataset": None}, "lacks `dataset`"),
        ({"dataset": [{"text": "1"}]}, "`prompt` or `question` in its rows, which have text"),
        ({"rubric": None}, "lacks reward functions: `rubric.funcs`"),
        ({"rubric": SimpleNamespace(funcs=[correct], weights=[1.0, 2.0])}, "1 funcs and 2 weights"),
        ({"rubric": SimpleNamespace(reward_funcs=[asks_too_much])}, "asks_too_much asks for colour"),
        ({"env_response": lambda said: said}, "env_response asks for said"),
    ],
)
def test_shape_that_lacks_something_says_what(instead: dict[str, Any], said: str) -> None:
    with pytest.raises(ar.ConfigError, match=said):
        ar.from_verifiers(shaped(**instead))
