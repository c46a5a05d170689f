"""Splits: training takes `train` and evaluation `eval`, in every command; what is missing is a part of `train`."""

from __future__ import annotations

import io
import shlex
import warnings
from pathlib import Path

import pytest
from rich.console import Console
from tree import ROOT

import agent_rl as ar
from agent_rl import api
from agent_rl.backends.embedded.config import TrainConfig
from agent_rl.backends.embedded.run import resume_run, start_run
from agent_rl.backends.group_sampling import held_out_tasks
from agent_rl.cli import main
from agent_rl.config import parse_setting
from agent_rl.gym.registry import load_once
from agent_rl.gym.tasks import RL_START, TaskSource, task_key
from agent_rl.runs.commands import resume_command, rollout_command
from agent_rl.runs.folder import WARNINGS
from agent_rl.store.episodes import read_episodes
from agent_rl.view.progress import Progress
from tests.runs import config, metrics_of

TASKS: list[ar.Task] = [{"n": n} for n in range(200)]
TWO: list[ar.Task] = [{"item": "red chair", "answer": "3"}, {"item": "red lamp", "answer": "4"}]


@pytest.fixture
def shop() -> str:
    """Register the shop of the examples with a train split only; return its id."""
    example = load_once(ROOT / "examples" / "shop.py")
    ar.register("whole-shop-v0", tasks={"train": example.tasks_of("train")})(example.Shop)
    return "whole-shop-v0"


def keys(source: TaskSource, split: str, n: int = 300) -> set[str]:
    return {task_key(task) for task in source.distinct(split, n)}


@pytest.mark.parametrize("source", [TaskSource({"train": TASKS}), TaskSource(lambda s, i: {"n": i}, splits=["train"])])
def test_task_source_holds_a_tenth_out(source: TaskSource) -> None:
    assert source.splits == ("train", "eval") and "held out" in source.describe_held_out()
    train, held_out = keys(source, "train"), keys(source, "eval")
    assert not train & held_out
    found = {source.get("train", RL_START + i)["n"] for i in range(99)} if source.size("train") is None else set()
    assert len(found) in (0, 99)  # no neighbours in place of what is held out
    if source.size("train") is not None:
        assert len(train | held_out) == 200 and 8 <= len(held_out) <= 32


def test_task_source_holds_same_tasks_out_of_more() -> None:
    fewer, more = (keys(TaskSource({"train": tasks}), "eval") for tasks in (TASKS[:100], TASKS))
    assert fewer < more


@pytest.mark.parametrize("n", range(2, 8))
def test_task_source_leaves_either_split_a_task(n: int) -> None:
    for start in range(20):
        source = TaskSource({"train": TASKS[start : start + n]})
        assert source.size("train") and source.size("eval")
        assert len(keys(source, "train")) + len(keys(source, "eval")) == n


@pytest.mark.parametrize(
    "source", [TaskSource({"train": [{"n": 1}, {"n": 1}]}), TaskSource(lambda split, index: {"n": 1}, splits=["train"])]
)
def test_task_source_of_one_task_shares_it(source: TaskSource) -> None:
    assert source.get("train", 0) == source.get("eval", 0) == {"n": 1}


def test_task_source_keeps_named_splits() -> None:
    source = TaskSource({"train": TASKS[:1], "eval": TASKS[1:2], "hard": TASKS[2:3]})
    assert source.splits == ("train", "eval", "hard") and source.describe_held_out() == ""


@pytest.mark.parametrize(
    ("env", "split", "key"),
    [
        ("calculator-v0", "eval", "fd49d50dc0e267aa"),
        ("calculator-v0", "eval-hard", "2b44d32b19a0440d"),
        ("search-v0", "eval", "28d04369657882f7"),
        ("python-v0", "eval", "808fc392b40b947d"),
    ],
)
def test_built_in_environments_keep_tasks_of_earlier_versions(env: str, split: str, key: str) -> None:
    assert task_key(ar.spec(env).tasks.get(split, 0)) == key


def test_evaluate_takes_eval_of_any_environment(shop: str) -> None:
    api._warn_once.cache_clear()
    assert ar.evaluate("calculator-v0", n=3).success.n == 3
    with pytest.warns(UserWarning, match=r"no split 'eval' is named: \d+ of the 48 tasks of 'train' are held out"):
        assert ar.evaluate(shop, n=3).success.value == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a second time, also where Python shows every warning
        assert ar.evaluate(shop, n=3).success.value == 1


def test_rollout_says_what_is_held_out(shop: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rollout", f"env={shop}", "n=40", f"out={tmp_path}"]) == 0
    said, size = capsys.readouterr().out, ar.spec(shop).tasks.size("eval")
    assert f"{size} of the 48 tasks of 'train' are held out" in said
    assert f"n=40: split 'eval' has {size} tasks" in said
    assert {episode.origin.split for episode in read_episodes(tmp_path)} == {"eval"}


def test_run_says_which_tasks_are_held_out(shop: str, tmp_path: Path) -> None:
    shown, size = io.StringIO(), ar.spec(shop).tasks.size("eval")
    folder = start_run(config(tmp_path, env=shop, steps=2, eval={"every": 1}), Progress(Console(file=shown, width=200)))
    assert f"{size} of the 48 tasks of 'train' are held out" in shown.getvalue()
    which = (
        f"{size} tasks of 'eval', all that there are for eval.n=384, none of them among {48 - (size or 0)} of 'train'"
    )
    assert f"Evaluation before RL on {which}:" in shown.getvalue()
    rows = [row for row in metrics_of(folder) if row["kind"] == "eval" and row["sampling"] == "sampled"]
    assert [(row["step"], row["split"], row["n"]) for row in rows] == [(step, "eval", size) for step in (0, 1, 2)]


def test_held_out_tasks_counts_those_trained_on(shop: str) -> None:
    ar.register("seen-shop-v0", tasks={"train": TWO, "eval": TWO[:1]})(ar.spec(shop).cls)
    ar.register("seen-endless-shop-v0", tasks=lambda split, index: TWO[index % 2])(ar.spec(shop).cls)
    for env, seen in (("seen-shop-v0", 1), ("seen-endless-shop-v0", 2)):
        settings = TrainConfig.model_validate({"env": env, "eval": {"n": seen}})
        found = held_out_tasks(settings.load_env(), settings)
        assert len(found.tasks) == seen and f"{seen} of them are in 'train', too: trained on" in found.which
        assert str(found.warning).startswith(f"{seen} of {seen} evaluation tasks are trained on")


def test_run_stores_overlap_once(shop: str, tmp_path: Path) -> None:
    ar.register("overlap-shop-v0", tasks={"train": TWO, "eval": TWO})(ar.spec(shop).cls)
    shown = io.StringIO()
    folder = start_run(config(tmp_path, env="overlap-shop-v0", steps=1), Progress(Console(file=shown, width=200)))
    resume_run(folder, Progress(Console(file=shown, width=200)), steps=2)
    (stored,) = (folder / WARNINGS).read_text().splitlines()
    assert stored.startswith("2 of 2 evaluation tasks are trained on, so that success on 'eval' may be memory: take")
    assert shown.getvalue().count("warning: 2 of 2 evaluation tasks") == 1


def test_commands_import_what_registers_the_environment(shop: str, monkeypatch: pytest.MonkeyPatch) -> None:
    env, file, folder = ar.spec(shop), "shop.py", Path("runs/my run")
    monkeypatch.chdir(ROOT / "examples")
    settings = TrainConfig.model_validate({"env": shop, "env_args": {"size": 3}})
    assert resume_command(settings, env, folder) == f"agent-rl train --import {file} 'resume=runs/my run'"
    args = f"env={shop} split=eval env_args.size=3"
    assert rollout_command(settings, env, Path("x")) == f"agent-rl rollout --import {file} {args} policy=x"
    stored = settings.model_copy(update={"imports": ("own.py",)})
    assert resume_command(stored, env, folder) == "agent-rl train 'resume=runs/my run'"
    assert rollout_command(stored, env, Path("x")) == f"agent-rl rollout --import own.py {args} policy=x"
    built_in = TrainConfig.model_validate({"env": "search-v0"})
    assert (
        rollout_command(built_in, built_in.load_env(), Path("x"))
        == "agent-rl rollout env=search-v0 split=eval policy=x"
    )
    monkeypatch.setattr(env.cls, "__module__", "__main__")  # as in a notebook
    assert resume_command(settings, env, folder) == "ar.train(resume='runs/my run')"
    assert rollout_command(settings, env, Path("x")) == "ar.run('whole-shop-v0', 'x', split='eval')"


def test_commands_hand_on_any_text_that_is_pasted(shop: str) -> None:
    args = {"name": "it's é", "few": ["é", 1]}
    settings = TrainConfig.model_validate({"env": shop, "env_args": args})
    words = shlex.split(rollout_command(settings, ar.spec(shop), Path("/a, b/é")))
    given = dict(parse_setting(word) for word in words if "=" in word)
    assert [given["env_args.name"], given["env_args.few"], given["policy"]] == [*args.values(), "/a, b/é"]
