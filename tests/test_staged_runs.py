"""Five runs that go wrong, made to: each is real and short, and says what is wrong; test_stalls.py has the others."""

from __future__ import annotations

import re
from collections.abc import Iterator
from html import unescape
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import agent_rl as ar
from agent_rl.backends.embedded import trainer
from agent_rl.backends.embedded.config import TrainConfig
from agent_rl.backends.embedded.run import start_run
from agent_rl.backends.embedded.scoring import score_tokens
from agent_rl.config import load_config
from agent_rl.runs.folder import REPORT, read_warnings
from agent_rl.runs.metrics import read_metrics
from agent_rl.view.progress import Progress
from tests.runs import config

WORDS = ("yes", "no", "red", "blue", "up", "down", "old", "new", "left", "right", "day", "night")
STILL = {"lr": 1e-7, "warmup_steps": 0}
"""An optimizer that moves nothing: what is there stays."""


@ar.register("staged-v0", tasks=lambda split, index: {"n": index}, splits=("train", "eval", "dev"))
class Staged(ar.Env):
    """Asks for one of some words; it is the first word in a share `usual` of the tasks, where the model says it.

    With `named`, each task names a word, which the model says; in the other tasks another one is asked for.
    """

    def __init__(self, words: int = 2, usual: float = 1.0, said: float = 0.6, named: bool = False) -> None:
        self.words, self.usual, self.said, self.named = WORDS[:words], usual, said, named

    def reset(self, task: ar.Task, rng: np.random.Generator) -> str:
        draw = np.random.default_rng(int(str(task["n"])))
        first, *others = np.roll(self.words, draw.integers(len(self.words))).tolist() if self.named else self.words
        self.answer = first if draw.random() < self.usual else others[draw.integers(len(others))]
        self.first = first
        return f"which of {first}?" if self.named else "which?"

    def step(self, action: ar.Message) -> ar.Step:
        return ar.Step(terminated=True)

    @ar.reward
    def right(self, episode: ar.Episode) -> bool:
        return episode.final_text == self.answer

    def demonstrate(self, rng: np.random.Generator) -> Iterator[str]:
        others = self.words[1:]
        yield (
            self.first
            if self.named
            else self.words[0]
            if rng.random() < self.said
            else others[rng.integers(len(others))]
        )


def said(tmp_path: Path, **changes: Any) -> tuple[list[str], list[dict[str, Any]]]:
    """Return what a run warned of, and the metrics of its steps."""
    chosen = {
        "env": "staged-v0",
        "steps": 24,
        "checkpoint_every": 100,
        "token_records": False,
        "eval": {"n": 4, "dev_n": 4, "every": 0},
        "rollout": {"groups": 16, "samples": 4, "temperature": 1.0, "slots": 64, "max_tokens": 8},
        "warm_start": {"demonstrations": 200, "copy_steps": 0, "clone_steps": 40, "batch": 16},
    }
    if name := changes.pop("algorithm", None):
        changes["algorithm"] = load_config("backend/embedded", TrainConfig, [f"algorithm={name}"]).algorithm
    folder = start_run(config(tmp_path, **(chosen | changes)), Progress())
    warnings, report = read_warnings(folder), unescape((folder / REPORT).read_text())
    assert all(warning in report for warning in warnings)
    return warnings, [row for row in read_metrics(folder / "metrics.jsonl") if row["kind"] == "train"]


STAGES: dict[str, tuple[dict[str, Any], str]] = {
    "one answer": (
        {"optimizer": STILL, "env_args": {"usual": 0.7, "said": 0.85}},
        "of the episodes end with the same answer",
    ),
    "too hard": (
        {"optimizer": STILL, "env_args": {"words": 12, "usual": 0.0, "said": 0.3}},
        "of the rows have a gradient",
    ),
    "no exploration": (
        {
            "optimizer": STILL,
            "env_args": {"words": 4, "usual": 0.5, "named": True},
            "warm_start": {"demonstrations": 200, "copy_steps": 0, "clone_steps": 120, "batch": 16},
        },
        r"repeat another of their task.*; hundreds of steps with algorithm=maxrl, rollout.temperature=1.3 came",
    ),
    "clipped": (
        {
            "steps": 4,
            "algorithm": "gspo",
            "updates": {"epochs": 4},
            "env_args": {"words": 12, "usual": 0.1, "said": 0.2},
        },
        "the clip cut off or capped",
    ),
}


@pytest.mark.sandbox
@pytest.mark.parametrize(("changes", "line"), STAGES.values(), ids=STAGES)
def test_staged_run_names_its_stall(changes: dict[str, Any], line: str, tmp_path: Path) -> None:
    warnings, steps = said(tmp_path, **dict(changes))
    assert any(re.search(line, warning) for warning in warnings), (warnings, steps[-1])


@pytest.mark.sandbox
def test_staged_run_with_another_temperature_names_the_mismatch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def hotter(model: Any, ids: Any, temperature: float = 1.0, **options: Any) -> Any:
        return score_tokens(model, ids, 3 * temperature, **options)

    monkeypatch.setattr(trainer, "score_tokens", hotter)
    warnings, steps = said(tmp_path, steps=4, optimizer=STILL)
    assert any("training and rollout differ by" in warning for warning in warnings), (warnings, steps[-1])
