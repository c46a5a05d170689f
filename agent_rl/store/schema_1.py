"""Schema 1, the lines of agent_rl before `Episode.origin`: the one place that reads meaning from ids."""

from __future__ import annotations

import re

from agent_rl.core.messages import JSON

_TRAINED = re.compile(r"train-(\d+)-\d+-(\d+|greedy)")
_EVALUATED = re.compile(r"(.+?)-(\d+)-(?:(sampled|greedy|low-temperature)-)?\d+(?:-(\d+))?")


def upgrade(row: dict[str, JSON]) -> dict[str, JSON]:
    """Return a row of schema 1 as one of schema 2."""
    return row | {"schema": 2, "origin": _origin(str(row.get("id")))}


def _origin(id: str) -> dict[str, JSON]:
    if trained := _TRAINED.fullmatch(id):
        step, sample = trained.groups()
        greedy = sample == "greedy"
        return {"purpose": "train", "step": int(step), "sample": 0 if greedy else int(sample), "greedy": greedy}
    if evaluated := _EVALUATED.fullmatch(id):
        split, step, sampling, sample = evaluated.groups()
        greedy = sampling == "greedy"
        return {"purpose": "eval", "split": split, "step": int(step), "sample": int(sample or 0), "greedy": greedy}
    return {"purpose": "rollout"}
