"""docs/verl.md names episodes as verl's are; docs/verl_algorithms.md has every preset, with what it chooses."""

import re

import pytest
from tree import ROOT

from agent_rl.algorithms.config import AlgorithmConfig
from agent_rl.backends.embedded.config import TrainConfig
from agent_rl.backends.verl.config.settings import VerlRolloutConfig
from agent_rl.config import choices, load_config
from agent_rl.core.episode import Origin
from agent_rl.rollout.naming import names_of

PRESETS = [name for name in choices("algorithm") if not name.endswith("-paper")]
"""How NAME-paper differs from NAME is docs/fidelity.md's."""
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in (ROOT / "docs" / "verl_algorithms.md").read_text().splitlines()
    if line.startswith("| ") and not line.startswith("| preset ")
]
TABLE = {name: cells for name, *cells in ROWS}


def named(cell: str) -> str:
    """Ours in a cell, the first of its names."""
    found = re.match(r"`([\w-]+)`", cell)
    assert found, f"'{cell}' names nothing of ours"
    return found[1]


def test_algorithms_page_has_every_preset() -> None:
    assert sorted(TABLE) == sorted(PRESETS) and len(ROWS) == len(TABLE)


@pytest.mark.parametrize("name", PRESETS)
def test_algorithms_page_rows_match_their_presets(name: str) -> None:
    preset: AlgorithmConfig = load_config("backend/embedded", TrainConfig, [f"algorithm={name}"]).algorithm
    *parts, more_parts = TABLE[name]
    chosen = [preset.advantage, preset.objective, preset.aggregation]
    assert [named(cell) for cell in parts] == [c["name"] for c in chosen]
    assert all(("=" in cell) != (": cases by hand" in cell or "TRL" in cell) for cell in parts)
    chosen_too = [*preset.shaping, *preset.filters, preset.weight, *preset.rejection, preset.negative_mask]
    assert all(f"`{c['name']}`" in more_parts for c in chosen_too if c is not None)
    assert ("value loss" in more_parts) == (preset.critic.where != "none")
    assert ("norm_adv_by_std_in_grpo=False" in parts[0]) == (preset.advantage.get("std") is False)


def test_verl_page_names_an_episode_of_verl() -> None:
    (shown,) = re.findall(r"train-\d+-\d+-\d+", (ROOT / "docs" / "verl.md").read_text())
    step, digits = 100, 7  # by verl's rows, a task's number is its place in the run
    assert shown == names_of(Origin("train", "train", step), (step - 1) * VerlRolloutConfig().groups, digits=digits)[1]
