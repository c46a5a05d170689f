"""BFCL's multi-turn tasks, by the installed bfcl-eval."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from bfcl_eval.eval_checker.multi_turn_eval import multi_turn_utils

import agent_rl as ar
from agent_rl.envs.adapters import bfcl

NOT_READ: Any = None
IDS = [f"bfcl/{category}-v0" for category in bfcl.CATEGORIES]


def opened(id: str, index: int) -> tuple[bfcl.MultiTurn, str]:
    spec = ar.spec(id)
    env = spec.make()
    assert isinstance(env, bfcl.MultiTurn)
    return env, env.reset(spec.tasks.get("eval", index), np.random.default_rng(0))


def call(name: str, **arguments: object) -> ar.Message:
    return ar.Message("assistant", tool_calls=(ar.ToolCall("call_0", name, arguments),))


@pytest.mark.parametrize("id", IDS)
def test_published_calls_solve_their_tasks(id: str) -> None:
    assert ar.spec(id).tasks.size("eval") == 200
    found = ar.evaluate(id, "oracle", n=50)
    assert (found.success.successes, found.success.n, found.failed) == (50, 50, 0)
    assert not [name for name in vars(multi_turn_utils) if name.startswith("agent_rl_")]


@pytest.mark.parametrize(
    ("code", "is_solved"),
    [
        (None, True),
        ([["cd(folder='document')", "mkdir(dir_name='temp')"]], False),
        (
            [["cd(folder='document')", "mkdir(dir_name='tmp')", "mv(source='final_report.pdf', destination='tmp')"]],
            False,
        ),
        ([[]], False),
    ],
)
def test_reward_asks_for_state_and_results_of_every_turn(code: list[list[str]] | None, is_solved: bool) -> None:
    env, _ = opened(IDS[0], 0)
    turns = env.row["ground_truth"] if code is None else code + env.row["ground_truth"][1:]
    for lines in turns:
        assert env.solved(NOT_READ) is False
        for line in lines:
            env.step(ar.Message("assistant", tool_calls=(env.parse(line, "call_0"),)))
        env.step(ar.Message("assistant", "Done."))
    assert env.solved(NOT_READ) is is_solved
    env.close()


def test_user_speaks_after_an_answer_without_a_call() -> None:
    env, request = opened(IDS[0], 0)
    assert request.startswith("Move 'final_report.pdf' within document directory")
    step = env.step(call("cd", folder="document"))
    assert [(m.role, m.content) for m in step.observation] == [("tool", '{"current_working_directory": "document"}')]
    step = env.step(ar.Message("assistant", "I am in the directory."))
    assert step.observation[0].role == "user" and "budget analysis" in step.observation[0].content
    for _ in range(2):
        step = env.step(ar.Message("assistant", "No."))
    assert not step.terminated and env.step(ar.Message("assistant", "No.")).terminated
    env.close()


def test_missing_function_is_described_by_the_user() -> None:
    env, _ = opened(IDS[1], 0)
    assert "sort" not in [tool.name for tool in env.tools] and "grep" in [tool.name for tool in env.tools]
    for _ in range(3):
        (message,) = env.step(ar.Message("assistant", "I can't.")).observation
    assert message.content.startswith('[{"name": "sort"') and message.content.endswith("What about now?")
    env.close()


def test_wrong_calls_are_answered() -> None:
    env, _ = opened(IDS[0], 0)
    env.docs["power"] = next(doc for doc in bfcl.documents("MathAPI") if doc["name"] == "power")
    malformed = ar.Message("assistant", tool_calls=(ar.ToolCall("call_0", "cd", {}, error="no JSON"),))
    wrong = [malformed, call("remove_all"), call("cd", **{"folder=__import__('os').abort(),x": 1})]
    said = [env.step(message).observation[0] for message in (*wrong, call("power", base=9, exponent=10**30))]
    kinds = ["malformed", "unknown_tool", "bad_arguments", "bad_arguments"]
    assert [str(message.tool_error) for message in said] == kinds
    assert all(message.content.startswith("Error during execution: ") for message in said)
    (answer,) = env.step(call("cd", folder="nowhere")).observation
    assert "cd: 'nowhere': No such file" in answer.content
    assert env.called[-1] == [[], [], [], [], ["cd(folder='nowhere')"]]
    env.close()


def test_more_than_twenty_calls_in_a_turn_end_the_episode() -> None:
    env, _ = opened(IDS[0], 0)
    assert [env.step(call("pwd")).truncated for _ in range(21)] == [False] * 20 + [True]
    env.close()


def test_check_finds_nothing() -> None:
    report = ar.check(IDS[2], n=4)
    assert not report.findings
    assert report.score("random", "eval").success.successes == report.score("nothing", "eval").success.successes == 0
