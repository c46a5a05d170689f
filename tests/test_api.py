"""`run` and `evaluate`, in a script and in a notebook."""

import asyncio

import pytest

import agent_rl as ar


def test_run_returns_episodes_in_the_order_of_the_tasks() -> None:
    episodes = ar.run("calculator-v0", n=3, samples=2, split="dev")
    tasks = [ar.spec("calculator-v0").tasks.get("dev", i) for i in range(3)]
    assert [e.task for e in episodes] == [t for t in tasks for _ in range(2)]
    assert all(e.success for e in episodes) and len({e.seed for e in episodes}) == 6


def test_evaluate_summarises() -> None:
    assert ar.evaluate("search-v0", "oracle", n=5, split="dev").success.value == 1.0
    assert 0 < ar.evaluate("search-v0", "demonstrator", n=60, split="dev").success.value < 1


def test_both_work_inside_a_running_loop() -> None:
    async def notebook() -> int:
        return len(ar.run("calculator-v0", n=2))

    assert asyncio.run(notebook()) == 2


def test_an_unknown_policy_is_named() -> None:
    with pytest.raises(ar.ConfigError, match="Did you mean 'oracle'"):
        ar.run("calculator-v0", "oracel")
