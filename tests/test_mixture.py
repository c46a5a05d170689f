"""agent_rl.gym.mixture and .task_selection: several environments and a part of their tasks, from a run's settings."""

import asyncio
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

import agent_rl as ar
from agent_rl.backends.embedded import stages
from agent_rl.backends.embedded.config import TrainConfig
from agent_rl.backends.embedded.run import resume_run, start_run
from agent_rl.backends.verl.config.settings import VerlConfig, agent_loop, verl_settings
from agent_rl.backends.verl.worker.dataset import TaskDataset
from agent_rl.config import load_config
from agent_rl.errors import ConfigError
from agent_rl.gym.budget import BudgetConfig
from agent_rl.gym.mixture import EnvironmentSettings, MixedTasks, assign, load_environment, members_of
from agent_rl.gym.registry import EnvSpec, spec
from agent_rl.gym.task_selection import TaskSelection, parse_condition, select_tasks
from agent_rl.gym.tasks import RL_START, TaskSource, task_key
from agent_rl.rollout import Evaluation, run_groups, summarise
from agent_rl.runs.folder import read_config
from agent_rl.runs.metrics import read_metrics
from agent_rl.runs.rollout import RolloutSettings, resume_rollout, rollout_jobs, start_rollout
from agent_rl.store.episodes import read_episodes
from agent_rl.view.progress import Progress
from tests.runs import config, metrics_of

ROWS = [{"n": n, "kind": "even" if n % 2 == 0 else "odd", "meta": {"level": n // 4}} for n in range(12)]


class Numbers(ar.Env):
    """Say the number; a group reward for the shortest."""

    def __init__(self, offset: int = 0) -> None:
        self.offset = offset

    def reset(self, task, rng):
        self.n = task["n"] + self.offset
        return f"Say {self.n}."

    def step(self, action):
        return ar.Step(terminated=True)

    @ar.reward
    def said(self, episode) -> bool:
        return episode.final_text == str(self.n)

    def oracle(self):
        yield str(self.n)


class Ranked(Numbers):
    @ar.group_reward
    def alike(self, group) -> list[float]:
        assert {episode.env for episode in group.episodes} == {"mixed/ranked-v0"}
        return [0.5] * len(group.episodes)


ar.register("mixed/numbers-v0", tasks={"train": ROWS, "eval": [{"n": 99}]})(Numbers)
ar.register("mixed/ranked-v0", tasks=lambda split, index: {"n": index}, splits=("train", "eval"))(Ranked)
BOTH = [{"env": "mixed/numbers-v0", "weight": 3, "env_args": {"offset": 1}}, "mixed/ranked-v0"]


def load(env: Any, **settings: Any) -> EnvSpec:
    found = EnvironmentSettings.model_validate({"env": env, **settings})
    return load_environment(found, split="train", budget=BudgetConfig())


def ids(env: EnvSpec, tasks: list[Any]) -> Counter[str]:
    return Counter(assign(env, {}, task).spec.id for task in tasks)


@pytest.mark.parametrize(
    ("where", "kept"),
    [
        ("n < 3", [0, 1, 2]),
        ("2 <= n < 5 and kind == 'even'", [2, 4]),
        ("kind=odd", [1, 3, 5, 7, 9, 11]),
        ("n=7", [7]),
        ("meta.level in [0, 2] and not n in (0, 1, 2)", [3, 8, 9, 10, 11]),
        ("n == -1 or n > 10", [11]),
        ("missing == None and n < 1", [0]),
        ("missing < 3 or n == 4", [4]),
    ],
)
def test_condition_selects_tasks_by_their_keys(where: str, kept: list[int]) -> None:
    source = select_tasks(TaskSource({"train": ROWS, "eval": ROWS}), TaskSelection(where=where), "train")
    for split in source.splits:
        assert [source.get(split, i)["n"] for i in range(source.size(split) or 0)] == kept


@pytest.mark.parametrize(
    ("where", "kept"),
    [
        *((f"easy{how}", [0]) for how in ("=true", "=True", " == true", " == True and not easy == false")),
        ("easy != true", [1, 2]),
        ("easy=null", [2]),
        ("easy == null", [2]),
    ],
)
def test_condition_reads_words_of_json(where: str, kept: list[int]) -> None:
    holds = parse_condition(where)
    assert [n for n, task in enumerate([{"easy": True}, {"easy": False}, {}]) if holds(task)] == kept


@pytest.mark.parametrize(
    "text",
    [
        "true",
        "__import__('os')",
        "n.__class__()",
        "n <",
        "[x for x in n]",
        "n + 1 > 2",
        "lambda: 1",
        "n if n else 2",
        "f'{n}'",
        "-7.5",
    ],
)
def test_condition_refuses_whatever_is_no_comparison(text: str) -> None:
    with pytest.raises(ConfigError, match=r"tasks\.where="):
        parse_condition(text)


def test_selection_counts_offset_limit_and_repeats_of_its_split() -> None:
    source = TaskSource({"train": ROWS, "eval": ROWS[:2]})
    chosen = select_tasks(source, TaskSelection(where="kind=odd", offset=1, limit=2, repeats=3, shuffle=False), "train")
    assert chosen.size("train") == 6 and chosen.size("eval") == 1
    assert [chosen.stream("train").at(i)["n"] for i in range(8)] == [3, 3, 3, 5, 5, 5, 3, 3]
    drawn = select_tasks(source, TaskSelection(limit=3, repeats=2), "train").stream("train", 1)
    epochs = [[drawn.at(6 * epoch + i)["n"] for i in range(6)] for epoch in range(4)]
    assert all(sorted(epoch) == [0, 0, 1, 1, 2, 2] for epoch in epochs) and len({*map(tuple, epochs)}) > 1
    times = [(drawn.at(RL_START + i)["n"], drawn.again(RL_START + i)) for i in range(24)]
    assert len({*times}) == 24 and min(time for _, time in times) == 0
    with pytest.raises(IndexError, match="no 6"):
        chosen.get("train", 6)
    with pytest.raises(ConfigError, match=r"tasks\.where='n > 50' leaves none of 12 tasks.*'n': 0"):
        select_tasks(source, TaskSelection(where="n > 50"), "train").size("train")


def test_selection_filters_an_endless_generator() -> None:
    source = TaskSource(lambda split, index: {"level": index % 5, "index": index})
    easy = select_tasks(source, TaskSelection(where="level < 2"), "train")
    assert easy.size("train") is None
    assert {easy.stream("train", 3).at(i)["level"] for i in range(50)} == {0, 1}
    assert {easy.stream("train", 3).again(i) for i in range(50)} == {0}
    few_kinds = select_tasks(TaskSource(lambda split, index: {"n": index % 3}), TaskSelection(), "train").stream(
        "train"
    )
    assert [few_kinds.again(i, range(i)) for i in range(7)] == [0, 0, 0, 1, 1, 1, 2]
    assert [few_kinds.again(i, range(3, i)) for i in range(3, 7)] == [0, 0, 0, 1]
    assert len({task_key(easy.get("train", i)) for i in range(0, 50, 5)}) == 10
    few = select_tasks(source, TaskSelection(where="level < 2", offset=1, limit=3), "train")
    assert [few.get("train", i)["index"] for i in range(3)] == [1, 5, 6] and few.size("train") == 3
    with pytest.raises(ConfigError, match="leaves none of 200"):
        select_tasks(source, TaskSelection(where="level > 9"), "train").get("train", 0)


def test_mixture_holds_each_environment_by_weight_in_every_block() -> None:
    env = load(BOTH)
    stream = env.tasks.stream("train", 5)
    tasks = [stream.at(position) for position in range(48)]
    for start in range(0, 48, 4):
        assert ids(env, tasks[start : start + 4]) == {"mixed/numbers-v0": 3, "mixed/ranked-v0": 1}
    numbers = [task["task"]["n"] for task in tasks if task["member"] == 0]
    assert sorted(numbers) == sorted([*range(12)] * 3), "each epoch of a member has each of its tasks once"
    assert [stream.at(position) for position in (47, 3, 20)] == [tasks[47], tasks[3], tasks[20]]
    assert len({(task["member"], task["task"]["n"], stream.again(i)) for i, task in enumerate(tasks)}) == 48
    assert [env.tasks.stream("train", 6).at(p)["member"] for p in range(48)] != [task["member"] for task in tasks]
    assert env.id == "mixed/numbers-v0+mixed/ranked-v0" and env.tasks.splits == ("train", "eval")
    assert [m.args for m in members_of(env, {})] == [{"offset": 1}, {}]


def test_mixture_holds_each_environment_by_weight_in_every_batch() -> None:
    env = load([{"env": "mixed/numbers-v0", "weight": 2}, "mixed/ranked-v0"])
    stream = env.tasks.stream("train", 5)
    for first in (0, RL_START):
        tasks = [stream.at(first + place) for place in range(24)]
        for start in range(0, 24, 6):
            assert ids(env, tasks[start : start + 6]) == {"mixed/numbers-v0": 4, "mixed/ranked-v0": 2}


def test_mixture_divides_evaluation_tasks_by_weight() -> None:
    env = load([{"env": "mixed/ranked-v0", "weight": 0.7}, "calculator-v0", "search-v0"])
    assert isinstance(env.tasks, MixedTasks) and env.tasks.divide(27) == [7, 10, 10]
    assert ids(env, env.tasks.distinct("eval", 27)) == {"mixed/ranked-v0": 7, "calculator-v0": 10, "search-v0": 10}


def test_mixture_of_one_environment_plays_its_own_order() -> None:
    env, alone = load(["calculator-v0"]), spec("calculator-v0").tasks.stream("train", 2)
    stream = env.tasks.stream("train", 2)
    assert [stream.at(p)["task"] for p in (0, 5, 2**24)] == [alone.at(p) for p in (0, 5, 2**24)]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"env": []}, "env"),
        ({"env": [{"env": "calculator-v0", "weight": 0}]}, "weight"),
        ({"env": [{"env": "calculator-v0", "wieght": 1}]}, r"^no key 'wieght' in env\[0\]. Did you mean 'weight'\?$"),
        ({"env": ["a-v0", {"env": "b-v0", "weight": "a"}]}, r"^env\[1\].weight='a': input should be a valid number"),
        ({"env": [{"weight": 3}]}, r"^env\[0\].env: field required$"),
        ({"env": [{"env": "b-v0", "tasks": {"limt": 1}}]}, r"^no key 'limt' in env\[0\].tasks. Did you mean 'limit'"),
        ({"env": ["calculator-v0"], "env_args": {"a": 1}}, "env_args is for one environment"),
        ({"env": ["calculator-v0"], "tasks": {"limit": 3}}, "tasks is for one environment"),
        ({"env": ["calculater-v0"]}, "calculator-v0"),
        ({"env": [{"env": "mixed/numbers-v0", "env_args": {"ofset": 1}}]}, "offset"),
        ({"env": "calculator-v0", "tasks": {"where": "import os"}}, "no condition"),
    ],
)
def test_mixture_names_a_wrong_setting(settings: dict[str, Any], message: str) -> None:
    with pytest.raises((ConfigError, LookupError), match=message):
        load_config("backend/embedded", TrainConfig, settings=settings).load_env()


class Numbered(ar.ToolEnv):
    """Says the wrong word; its group reward counts."""

    word = "no"

    def reset(self, task, rng):
        return "Say yes."

    @ar.reward
    def says_yes(self, episode) -> bool:
        return episode.final_text == "yes"

    @ar.group_reward(weight=0.0)
    def size(self, group) -> list[float]:
        assert {episode.env for episode in group.episodes} == {f"mixed/{type(self).__name__.lower()}-v0"}
        return [len(group.episodes)] * len(group.episodes)

    def oracle(self):
        yield self.word


class Agreeing(Numbered):
    """Says the right one."""

    word = "yes"


ar.register("mixed/numbered-v0")(Numbered)
ar.register("mixed/agreeing-v0")(Agreeing)


def rolled_out(file: Path, n: int, *envs: str) -> Evaluation:
    own = {"env": envs, "n": n, "samples": 2, "policy": {"name": "oracle"}, "floors": False, "out": str(file)}
    return start_rollout(RolloutSettings.model_validate(own), Progress()).evaluation


def test_rollout_keeps_equal_tasks_of_environments_apart(tmp_path: Path) -> None:
    result = rolled_out(tmp_path / "e.jsonl", 4, "mixed/agreeing-v0", "mixed/numbered-v0")
    assert (result.success.successes, result.success.n, result.tasks) == (4, 8, 4)
    assert [e.value("size") for e in result.episodes] == [2.0] * 8
    assert len({e.id for e in result.episodes}) == 8


def test_resumed_rollout_ranks_whole_groups(tmp_path: Path) -> None:
    file = tmp_path / "e.jsonl"
    rolled_out(file, 2, "mixed/numbers-v0", "mixed/numbered-v0")
    file.write_bytes(b"".join(file.read_bytes().splitlines(keepends=True)[:-1]))  # killed amid a group
    result = resume_rollout(str(file), Progress()).evaluation
    assert [e.value("size") for e in result.episodes] == [None, None, 2.0, 2.0]
    assert len(list(read_episodes(file))) == 5, "what is not ranked is not played again"


def test_rollout_of_a_mixture_scores_each_environment_and_its_groups() -> None:
    settings = RolloutSettings.model_validate({"env": BOTH, "n": 8, "samples": 2, "split": "train"})
    jobs = rollout_jobs(settings)
    assert Counter((job.spec.id, job.env_args.get("offset")) for job in jobs) == {
        ("mixed/numbers-v0", 1): 12,
        ("mixed/ranked-v0", None): 4,
    }
    groups = asyncio.run(run_groups(jobs, ar.oracle()))
    found = summarise([episode for group in groups for episode in group.episodes])
    assert found.reward == pytest.approx((12 + 4 * 1.5) / 16) and found.of_env["mixed/ranked-v0"].reward == 1.5
    row = found.row("train", "sampled")
    assert (row["success/mixed/numbers-v0"], row["n/mixed/ranked-v0"], row["n"]) == (1.0, 4, 16) and "of_env" not in row
    with pytest.raises(ValueError, match=r"samples=N"):
        RolloutSettings.model_validate({"env": "mixed/numbers-v0", "tasks": {"repeats": 2}})


def test_rollout_of_shuffled_tasks_draws_them_by_its_seed() -> None:
    def drawn(seed: int, **tasks: Any) -> list[Any]:
        given = {"env": "mixed/numbers-v0", "tasks": tasks, "n": 12, "split": "train", "seed": seed}
        return [job.task["n"] for job in rollout_jobs(RolloutSettings.model_validate(given))]

    assert drawn(1) == [*range(12)] != drawn(1, shuffle=True) != drawn(2, shuffle=True)
    assert sorted(drawn(1, shuffle=True)) == [*range(12)] and drawn(1, where="kind=odd", limit=2) == [1, 3]


def test_dataset_of_verl_has_the_rows_of_a_mixture() -> None:
    run = VerlConfig.model_validate({"env": BOTH, "start_from": "model", "seed": 5})
    settings = verl_settings(run, Path("run"))["data.agent_rl"]
    dataset = TaskDataset("train", OmegaConf.create({"agent_rl": settings}))
    rows = [dataset[index] for index in range(8)]
    assert Counter(row["data_source"] for row in rows) == {"mixed/numbers-v0/train": 6, "mixed/ranked-v0/train": 2}
    stream, first = run.load_env().tasks.stream("train", 5), settings["first"]  # type: ignore[call-overload,index]
    assert [json.loads(row["task"]) for row in rows] == [stream.at(first + index) for index in range(8)]
    assert agent_loop(run, Path("run"))[0]["env"] == [
        {"env": "mixed/numbers-v0", "weight": 3.0, "env_args": {"offset": 1}},
        {"env": "mixed/ranked-v0"},
    ]
    selected = run.model_copy(update={"env": "mixed/numbers-v0", "tasks": TaskSelection(limit=2)})
    data = OmegaConf.create({"agent_rl": verl_settings(selected, Path("run"))["data.agent_rl"]})
    assert {json.loads(TaskDataset("train", data)[i]["task"])["n"] for i in range(9)} == {0, 1}


def test_dataset_of_verl_gives_the_environment_its_arguments() -> None:
    class Required(Numbers):
        def __init__(self, offset: int) -> None:
            super().__init__(offset)

    ar.register("mixed/required-v0", tasks={"train": ROWS})(Required)
    run = VerlConfig.model_validate({"env": "mixed/required-v0", "env_args": {"offset": 2}, "start_from": "model"})
    data = OmegaConf.create({"agent_rl": verl_settings(run, Path("run"))["data.agent_rl"]})
    assert TaskDataset("train", data)[0]["data_source"] == "mixed/required-v0/train"


def test_mixture_judges_best_weights_by_all_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    judged: list[Counter[str]] = []

    def observe(run: object, trainer: object, evaluation: Evaluation) -> None:
        judged.append(Counter({env: found.success.n for env, found in evaluation.of_env.items()}))

    monkeypatch.setattr(stages, "_keep_if_best", observe)
    sizes = {"n": 8, "dev_split": "eval", "every": 1}
    for dev_n in (4, 16):
        env = ["calculator-v0", "search-v0"]
        start_run(config(tmp_path, env=env, steps=2, eval={**sizes, "dev_n": dev_n}), Progress())
        n = min(dev_n, 8) // 2
        assert judged == [{"calculator-v0": n, "search-v0": n}] * 2
        judged.clear()


def test_training_on_a_mixture_reports_each_environment_and_resumes(tmp_path: Path) -> None:
    env = [{"env": "calculator-v0", "weight": 3}, {"env": "search-v0", "tasks": {"limit": 1}}]
    whole = start_run(
        config(tmp_path, env=env, steps=2, rollout={"groups": 8, "samples": 2, "max_tokens": 8}), Progress()
    )
    episodes = list(read_episodes(whole / "episodes.jsonl"))
    for step in range(2):
        groups = {e.group_id: e.env for e in episodes if (e.origin.purpose, e.origin.step) == ("train", step)}
        assert Counter(groups.values()) == {"calculator-v0": 6, "search-v0": 2}
    trained = [e for e in episodes if e.origin.purpose == "train"]
    assert len({task_key(e.task) for e in trained if e.env == "search-v0"}) == 1
    assert len({e.seed for e in trained}) == len(trained) == 32, "a task that comes again has other samples"
    assert {e.env for e in episodes if e.origin.purpose == "eval"} == {"calculator-v0", "search-v0"}
    assert all("member" not in e.task for e in episodes), "an episode has its environment's own task"
    rows = read_metrics(whole / "metrics.jsonl")
    assert all({"success/calculator-v0", "n/search-v0"} <= row.keys() for row in rows if row["kind"] == "eval")
    assert any("rollout/reward/search-v0" in row for row in rows if row["kind"] == "train")
    resumed = read_config(whole, TrainConfig)
    budgets = [member.spec.budget for member in members_of(resumed.load_env(), {})]
    assert budgets == [ar.spec(id).budget for id in ("calculator-v0", "search-v0")] and resumed.rollout.context
    resume_run(whole, Progress(), steps=3)
    assert metrics_of(whole)[-1]["step"] == 3
