"""agent_rl.backends.verl.worker.dataset: the rows that verl's loader asks for, made without verl."""

import json

import pytest
from omegaconf import DictConfig, OmegaConf

from agent_rl.backends.verl.worker.dataset import ENDLESS, TaskDataset
from agent_rl.errors import ConfigError
from agent_rl.gym.registry import spec
from agent_rl.gym.tasks import RL_START, TaskStream, task_key


def settings(**changes: object) -> DictConfig:
    given = {"env": "calculator-v0", "imports": [], "seed": 3, "first": RL_START, "groups": 8, "asked": {}}
    return OmegaConf.create({"agent_rl": given | changes})


def test_dataset_rows_match_the_embedded_task_order() -> None:
    dataset = TaskDataset("train", settings())
    stream = TaskStream(spec("calculator-v0").tasks, "train", 3)
    rows = [dataset[i] for i in range(40)]
    assert [json.loads(row["task"]) for row in rows] == [stream.at(RL_START + i) for i in range(40)]
    assert [row["index"] for row in rows] == list(range(40)) and len(dataset) == ENDLESS
    of_step = [range(RL_START + i - i % 8, RL_START + i) for i in range(40)]
    assert [row["again"] for row in rows] == [stream.again(RL_START + i, step) for i, step in enumerate(of_step)]
    assert {(row["split"], row["evaluation"], row["data_source"]) for row in rows} == {
        ("train", False, "calculator-v0/train")
    }
    assert TaskDataset("train", settings(seed=4))[0]["task"] != rows[0]["task"]


def test_dataset_marks_distinct_evaluation_tasks() -> None:
    dataset = TaskDataset("eval:50", settings())
    rows = [dataset[i] for i in range(len(dataset))]
    assert [json.loads(row["task"]) for row in rows] == spec("calculator-v0").tasks.distinct("eval", 50)
    assert len({task_key(json.loads(row["task"])) for row in rows}) == len(rows) == 50
    assert all(row["evaluation"] and row["split"] == "eval" for row in rows)


def test_dataset_takes_a_list_and_known_splits() -> None:
    assert TaskDataset(["eval:2"], settings())[1] == TaskDataset("eval:2", settings())[1]
    with pytest.raises(ConfigError, match="nowhere"):
        TaskDataset("nowhere", settings())
