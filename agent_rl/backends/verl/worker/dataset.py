"""TaskDataset: an environment's tasks as verl's dataset; no file is written, a row is made when it is asked for."""

from __future__ import annotations

import json
from typing import Any, cast

from omegaconf import DictConfig, OmegaConf
from torch.utils.data import Dataset

from agent_rl.gym.mixture import assign, environment_of
from agent_rl.rollout.naming import EVALUATION

ENDLESS = 2**20
"""The length that a stream of training tasks claims to have."""


class TaskDataset(Dataset[dict[str, Any]]):
    """Rows of one split; `data.train_files` and `data.val_files` are `split`, or `split:n` for n different tasks.

    Without an `n` it is the endless stream that the embedded trainer reads, in the same order, behind the tasks that
    its demonstrations use.
    """

    def __init__(self, data_files: Any, config: DictConfig, **ignored: Any) -> None:
        name = data_files if isinstance(data_files, str) else str(data_files[0])
        split, _, count = name.partition(":")
        settings = cast(dict[str, Any], OmegaConf.to_container(config.agent_rl, resolve=True))
        self.split, self.env = split, environment_of(settings)
        source = self.env.tasks
        source.require(split)
        self._first, self._groups = int(settings["first"]), int(settings["groups"])
        self._asked = dict(settings["asked"])
        self._stream = source.stream(split, int(settings["seed"]))
        self._tasks = source.distinct(split, int(count)) if count else None

    def __len__(self) -> int:
        return ENDLESS if self._tasks is None else len(self._tasks)

    def __getitem__(self, index: int) -> dict[str, Any]:
        place, is_training = self._first + index, self._tasks is None
        of_step = range(place - index % self._groups, place)
        task = self._stream.at(place) if self._tasks is None else self._tasks[index]
        row = {
            "raw_prompt": [{"role": "user", "content": ""}],  # verl counts these; the environment's `reset` opens
            "task": json.dumps(task),
            "split": self.split,
            EVALUATION: not is_training,
            "index": index,
            "again": self._stream.again(place, of_step) if is_training else 0,
            "data_source": f"{assign(self.env, {}, task).spec.id}/{self.split}",
            "reward_model": {"style": "environment", "ground_truth": ""},
        }
        return row | self._asked if is_training else row
