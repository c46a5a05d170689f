"""The state of an environment: `state_hash`, `snapshot` and `restore`."""

import asyncio
import functools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_rl.concurrency import maybe_await
from agent_rl.core.messages import Message, Step, ToolCall
from agent_rl.errors import DefinitionError
from agent_rl.gym.env import Env
from agent_rl.gym.registry import spec
from agent_rl.policy import demonstrator, oracle
from agent_rl.rollout import Job, run_episode
from tests.doubles import CALL, Dice

BUILT_IN = {"calculator-v0": "calculator", "search-v0": "search"}


class Fair(Dice):
    """Dice with snapshots: only the random generator changes."""

    snapshot_attributes = ("rng",)


def opened(env: Env, task: object, seed: int) -> Env:
    asyncio.run(maybe_await(env.reset(task, np.random.default_rng(seed))))
    return env


def go(env: Env, messages: list[Message]) -> list[tuple[Step, str | None]]:
    """Take a step with each message; return the steps and the states after them."""
    return [(asyncio.run(maybe_await(env.step(message))), env.state_hash()) for message in messages]


@functools.cache
def said(id: str, index: int) -> tuple[Message, ...]:
    """The messages of a demonstration, an oracle and a failed call."""
    env = spec(id)
    job = Job(env, env.tasks.get("train", index), index)
    played = [asyncio.run(run_episode(job, policy)) for policy in (demonstrator(), oracle())]
    bad = Message("assistant", tool_calls=(ToolCall("bad", BUILT_IN[id], {"nonsense": 1}),))
    return (*(m for e in played for m in e.messages if m.role == "assistant"), bad, Message("assistant", "x"))


@pytest.mark.parametrize("id", BUILT_IN)
@settings(deadline=None, max_examples=30)
@given(st.integers(0, 40), st.floats(0, 1), st.randoms(use_true_random=False))
def test_restore_continues_like_the_old_instance(id, index, share, shuffler):
    env, task = spec(id), spec(id).tasks.get("train", index)
    messages = [*said(id, index)]
    shuffler.shuffle(messages)
    turn = int(share * len(messages))
    old = opened(env.make(), task, 0)
    go(old, messages[:turn])
    taken, state = old.snapshot(), old.state_hash()
    on = go(old, messages[turn:])
    for _ in range(2):  # neither what the old instance does later nor an earlier restore changes a snapshot
        fresh = opened(env.make(), task, 0)
        fresh.restore(taken)
        assert fresh.state_hash() == state
        assert go(fresh, messages[turn:]) == on


def test_restore_continues_the_random_numbers():
    old = opened(Fair(), {}, 5)
    go(old, [CALL] * 2)
    taken = old.snapshot()
    on = go(old, [CALL] * 8)
    for _ in range(2):
        fresh = opened(Fair(), {}, 5)
        fresh.restore(taken)
        assert go(fresh, [CALL] * 8) == on
    assert go(opened(Fair(), {}, 5), [CALL] * 8) != on


def test_restore_keeps_shared_references():
    class Pair(Dice):
        snapshot_attributes = ("a", "b")

    env = Pair()
    env.a = env.b = [1]
    taken = env.snapshot()
    env.a.append(2)
    env.restore(taken)
    assert env.a == [1] and env.a is env.b


def test_env_has_no_hash_or_snapshots_by_default():
    env = Dice()
    assert env.state_hash() is None and not Dice.has_snapshots() and Fair.has_snapshots()
    with pytest.raises(NotImplementedError, match=r"Dice has no snapshots.*snapshot_attributes.*or define snapshot"):
        env.snapshot()
    with pytest.raises(TypeError, match="can't restore a str; define restore"):
        env.restore("state")


def test_snapshots_can_be_made_by_hand():
    class Counter(Dice):
        def snapshot(self):
            return 3

        def restore(self, snapshot):
            self.count = snapshot

    assert Counter.has_snapshots()
    env = Counter()
    env.restore(env.snapshot())
    assert env.count == 3
    with pytest.raises(DefinitionError, match="Half defines one of snapshot and restore"):

        class Half(Dice):
            def snapshot(self):
                return 3

    with pytest.raises(DefinitionError, match="is the string 'rng'; give a tuple"):

        class Text(Dice):
            snapshot_attributes = "rng"


# The built-in environments


def state(id: str, *calls: dict[str, object], task: dict[str, object] | None = None) -> str | None:
    """The state that some calls, one a turn, lead to."""
    env = opened(spec(id).make(), task or spec(id).tasks.get("train", 0), 0)
    messages = [Message("assistant", tool_calls=(ToolCall("c", BUILT_IN[id], call),)) for call in calls]
    return [env.state_hash(), *(found for _, found in go(env, messages))][-1]


def compute(operator: str, left: object, right: object) -> dict[str, object]:
    return {"operator": operator, "left": left, "right": right}


PRODUCT, SUM = compute("*", 3, 6), compute("+", 18, 4)
WORLD = {
    "facts": ["bafo was born in kiba", "bafo lives in nola", "kiba is the capital of mimi"],
    "person": "bafo",
    "relation": "born",
    "answer": "mimi",
}


def test_calculator_state_lists_computed_results():
    at = functools.partial(state, "calculator-v0")
    assert at() == ""
    assert at(PRODUCT) == at(compute("*", 6, 3)) == at(compute("*", "3", 6.0)) == at(PRODUCT, PRODUCT) == "3*6=18"
    assert at(PRODUCT, SUM) == at(SUM, PRODUCT) == "3*6=18; 4+18=22"
    assert at(PRODUCT, {}) == at({}, PRODUCT) == "3*6=18; failed"
    different = [at(), at({}), at(PRODUCT), at(SUM), at(compute("-", 7, 2)), at(compute("-", 2, 7))]
    assert len(set(different)) == len(different)


def test_search_state_lists_found_facts():
    at = functools.partial(state, "search-v0", task=WORLD)
    home, city = {"query": "bafo born"}, {"query": "kiba capital"}
    assert at() == at({"query": "unknown"}) == ""
    assert at(home) == at({"query": "BORN bafo"}) == at(home, home) == WORLD["facts"][0]
    assert at(home, city) == at(city, home) == "; ".join([WORLD["facts"][0], WORLD["facts"][2]])
    assert at({"query": "bafo"}) == at(home, {"query": "lives"}) != at(home)  # one search that finds both, or two
    assert at(home, {"q": "x"}) == f"{WORLD['facts'][0]}; failed"


def test_calculator_states_recur_between_episodes():
    env = spec("calculator-v0")
    episodes = [asyncio.run(run_episode(Job(env, env.tasks.get("train", 3), s), demonstrator())) for s in range(40)]
    states = [[step.state for step in episode.steps] for episode in episodes]
    assert {s[0] for s in states} == {""}
    later = [state for s in states for state in s[1:]]
    assert 1 < len(set(later)) < len(later) / 4
