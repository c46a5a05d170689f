"""The built-in environments: tasks, oracles, demonstrations, and their common properties."""

import asyncio
import functools
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_rl.core.episode import Episode, Outcome
from agent_rl.core.messages import Message, ToolCall, ToolErrorKind
from agent_rl.envs.calculator import Calculator, solve
from agent_rl.envs.search import Search
from agent_rl.gym.budget import Budget
from agent_rl.gym.registry import spec
from agent_rl.gym.tasks import TaskStream, task_key
from agent_rl.policy import Scripted, demonstrator, oracle
from agent_rl.rollout import Job, run_episode, summarise
from agent_rl.tools.calculator import calculator
from tests.doubles import assert_plays_again, plays

BUILT_IN = ("calculator-v0", "search-v0")
SPLITS = [(id, split) for id in BUILT_IN for split in spec(id).tasks.splits]


@pytest.mark.parametrize(("id", "split"), SPLITS)
def test_oracle_solves_every_task(id, split):
    played = plays(spec(id), split, oracle(), 80)
    assert {e.success for e in played} == {True}
    assert {e.value("clean") for e in played} == {1.0}
    assert {round(e.reward or 0, 9) for e in played} == {1.1}
    limits = spec(id).budget
    assert limits.turns is not None
    assert max(e.turns for e in played) < limits.turns  # one turn to spare, for a detour


def content(id: str, split: str, n: int) -> set[str]:
    tasks = [spec(id).tasks.get(split, i) for i in range(n)]
    return {str(t["expression"]) if id == "calculator-v0" else str(sorted(t["facts"])) for t in tasks}


@pytest.mark.parametrize("id", BUILT_IN)
def test_splits_share_no_task(id):
    parts = {split: content(id, split, 300) for split in spec(id).tasks.splits}
    for a in parts:
        for b in parts:
            assert a == b or not parts[a] & parts[b], (a, b)


def test_search_tasks_never_repeat():
    assert len(content("search-v0", "train", 500)) == 500


@pytest.mark.parametrize("id", BUILT_IN)
def test_task_stream_draws_other_tasks_per_seed(id):
    streams = [TaskStream(spec(id).tasks, "train", seed) for seed in (0, 1)]
    keys = [[task_key(s.at(i)) for i in range(50)] for s in streams]
    assert keys[0] != keys[1]
    assert keys[0] == [task_key(streams[0].at(i)) for i in range(50)]


@pytest.mark.parametrize(("id", "low", "high"), [("calculator-v0", 0.1, 0.7), ("search-v0", 0.1, 0.7)])
def test_demonstrations_are_well_formed_but_often_fail(id, low, high):
    played = plays(spec(id), "train", demonstrator(), 300)
    result = summarise(played)
    print(f"{id}: {result.success} demonstrations succeed, {result.tool_errors:.2f} tool errors each")
    assert result.failed == 0
    assert low < result.success.value < high
    assert 0 < result.tool_errors < 0.3
    assert all(e.final_text for e in played)


@pytest.mark.parametrize("id", BUILT_IN)
def test_stored_episode_replays_observations_and_rewards(id):
    for policy in (demonstrator(), oracle()):
        assert all(map(assert_plays_again, plays(spec(id), "train", policy, 60)))


def answer(id: str, *messages: str | Message, index: int = 0) -> Episode:
    script = Scripted(lambda env, seed: (m for m in messages))
    return asyncio.run(run_episode(Job(spec(id), spec(id).tasks.get("train", index), 0), script))


@pytest.mark.parametrize("id", BUILT_IN)
def test_correct_reward_requires_the_exact_answer(id):
    right = str(spec(id).tasks.get("train", 0)["answer"])
    assert answer(id, f" {right}\n").success is True
    for wrong in ("", "x" + right, right + "0", f"the answer is {right}"):
        assert answer(id, wrong).success is False
    assert answer(id, right).reward == pytest.approx(1.1)
    assert answer(id, "").reward == 0.0
    assert answer(id, "x").reward == pytest.approx(0.1)


@pytest.mark.parametrize(("id", "tool"), [("calculator-v0", "calculator"), ("search-v0", "search")])
def test_clean_reward_fails_failed_calls(id, tool):
    right = str(spec(id).tasks.get("train", 0)["answer"])
    bad = Message("assistant", tool_calls=(ToolCall("c", tool, {"nonsense": "1"}),))
    episode = answer(id, bad, right)
    assert episode.tool_errors == {"bad_arguments": 1}
    assert episode.reward == 1.0


@pytest.mark.parametrize("id", BUILT_IN)
def test_episode_without_answer_earns_nothing(id):
    (first, *_) = [m for m in plays(spec(id), "train", oracle(), 1)[0].messages if m.role == "assistant"]
    env = spec(id)
    job = Job(env, env.tasks.get("train", 0), 0, budget=Budget(turns=1))
    episode = asyncio.run(run_episode(job, Scripted(lambda env, seed: (m for m in [first]))))
    assert (episode.success, episode.reward) == (False, 0.0)


# calculator-v0


@st.composite
def expressions(draw: st.DrawFn, most: int = 4, brackets: bool = True) -> str:
    inner = expressions(2, brackets=False).map("({})".format) if brackets else st.nothing()
    terms = st.integers(0, 99).map(str) | inner
    return draw(terms) + "".join(draw(st.sampled_from("+-*")) + draw(terms) for _ in range(draw(st.integers(1, most))))


@given(expressions())
def test_solve_matches_python(expression):
    steps = solve(expression)
    assert steps[-1][1] == eval(expression)
    assert len(steps) == sum(expression.count(sign) for sign in "+-*")
    for operation, value in steps:
        assert calculator(*operation) == value


@given(expressions(), st.integers(0, 2**32))
def test_calculator_demonstration_computes_operations_of_the_expression(expression, seed):
    env = Calculator()
    env.reset({"expression": expression, "answer": eval(expression)}, np.random.default_rng(0))
    script, said = env.demonstrate(np.random.default_rng(seed)), []
    message = next(script)
    while isinstance(message, Message):
        (call,) = message.tool_calls
        said.append(call)
        value = calculator(*call.arguments.values())
        try:
            message = script.send((Message("tool", str(value), tool_call_id=call.id),))
        except StopIteration:
            pytest.fail("a demonstration ended without an answer")
    assert len(said) <= sum(expression.count(sign) for sign in "+-*")
    assert int(message) is not None


@pytest.mark.parametrize(("operation", "value"), [(("*", 12, 7), 84), (("-", 5, 9), -4), (("+", -4, 18), 14)])
def test_calculator_computes_one_operation(operation, value):
    assert calculator(*operation) == value


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"operator": "/", "left": 1, "right": 2},
        {"operator": "+", "left": "one", "right": 2},
        {"operator": "+", "left": 1.5, "right": 2},
        {"operator": "+", "left": 1},
        {"operator": "+", "left": 1, "right": 2, "third": 3},
        {"expression": "1+2"},
    ],
)
def test_calculator_refuses_other_arguments(arguments):
    call = ToolCall("c", "calculator", arguments)
    episode = answer("calculator-v0", Message("assistant", tool_calls=(call,)), "1")
    assert episode.messages[2].tool_error is ToolErrorKind.BAD_ARGUMENTS
    assert episode.outcome is Outcome.TERMINATED


def test_calculator_hard_tasks_have_more_operations():
    def operations(split: str) -> set[int]:
        return {len(solve(e)) for e in content("calculator-v0", split, 100)}

    assert operations("train") == {1, 2}
    assert operations("train-hard") == operations("train-brackets") == {3}


def test_calculator_brackets_change_values():
    tasks = [spec("calculator-v0").tasks.get("train-brackets", i) for i in range(100)]
    assert np.mean([eval(re.sub("[()]", "", str(t["expression"]))) != t["answer"] for t in tasks]) > 0.95


def test_calculator_requires_operator_precedence():
    def left_to_right(expression: str) -> int:
        first, *rest = re.findall(r"\d+|[-+*]", expression)
        return functools.reduce(lambda value, step: calculator(step[0], value, int(step[1])), batched(rest), int(first))

    def batched(terms: list[str]) -> list[tuple[str, str]]:
        return list(zip(terms[::2], terms[1::2], strict=True))

    tasks = [spec("calculator-v0").tasks.get("train", i) for i in range(200)]
    share = np.mean([left_to_right(str(t["expression"])) == t["answer"] for t in tasks])
    assert 0.4 < share < 0.8


# search-v0


def test_search_hard_demonstrations_find_less_than_others():
    easy, hard = (summarise(plays(spec("search-v0"), split, demonstrator(), 200)) for split in ("dev", "dev-hard"))
    assert 0.03 < hard.success.value < easy.success.value - 0.2


def test_search_question_has_one_two_fact_answer():
    for index in range(100):
        task = spec("search-v0").tasks.get("eval", index)
        facts = [str(f).split() for f in task["facts"]]
        (home,) = [f for f in facts if f[0] == task["person"] and task["relation"] in f]
        (capital,) = [f for f in facts if f[0] == home[-1]]
        assert capital[-1] == task["answer"]
        assert len(facts) == len(set(map(tuple, facts))) == 12


@pytest.mark.parametrize(
    ("split", "key", "others"),
    [
        ("train", "relation", {"born": "lives", "lives": "born"}),
        ("train-hard", "relation", {"born": "lives", "lives": "born"}),
        ("train-hard", "habit", {"eats": "speaks", "speaks": "eats"}),
    ],
)
def test_search_wrong_relation_gives_a_wrong_answer(split, key, others):
    for index in range(50):
        task = spec("search-v0").tasks.get(split, index)
        env = Search()
        env.reset({**task, key: others[task[key]]}, np.random.default_rng(0))
        script, found = env.oracle(), ()
        message = next(script)
        while isinstance(message, Message):
            found = (Message("tool", env.search(str(message.tool_calls[0].arguments["query"]))),)
            message = script.send(found)
        assert message != task["answer"]
