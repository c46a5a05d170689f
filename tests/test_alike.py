"""Which presets make the same update where all ratios are 1: what the configs say, and what gradients say."""

from dataclasses import replace
from itertools import combinations

import pytest
import torch

from agent_rl.algorithms import Algorithm, AlgorithmConfig
from agent_rl.algorithms.alike import same_updates
from agent_rl.config import choices
from tests.fidelity import preset
from tests.test_properties import SCORES, rows, slope

CHOSEN = ("shaping", "filters", "refill", "vine", "entropy")
"""Settings of which episodes there are, and what they score, and the bonus that the slopes here leave out."""


def test_same_updates_are_those_of_equal_direction() -> None:
    configs = {name: preset(name) for name in choices("algorithm")}
    same, directions = same_updates(configs), {}
    x, scored = rows(SCORES, gap=0.0)
    # what each preset alone reads: a critic's values, two rewards, states, and what is earned from them
    tokens = x.rows.token_ids * x.rows.loss_mask / 50
    scored = replace(scored, values=tokens, reference_logprobs=x.rows.rollout_logprobs - tokens)
    parts = {"component_names": ("r", "s"), "component_weights": torch.ones(2, dtype=torch.float64)}
    parts["components"] = torch.stack([x.scores**2, x.scores - x.scores**2], -1)
    x = replace(x, states=torch.arange(8)[:, None] // 3, state_values=torch.arange(8.0)[:, None] / 9, **parts)
    for name, config in configs.items():
        batch, whole = Algorithm(config).compute_weights(x, scored)
        gradient = slope(config, [batch.padded()], whole)
        directions[name] = gradient / gradient.norm()
    for one, other in combinations(configs, 2):
        alike = torch.allclose(directions[one], directions[other], atol=1e-6)
        elsewhere = any(getattr(configs[one], part) != getattr(configs[other], part) for part in CHOSEN)
        assert (other in same[one]) == (one in same[other]) == (alike and not elsewhere), (one, other)
    assert sum(map(bool, same.values())) >= 3


@pytest.mark.parametrize(
    "changes",
    [
        {"kl": {"where": "loss"}},
        {"entropy": 0.01},
        {"endings": {"truncated": "mask"}},
        {"aggregation": "seq-mean-token-mean"},
        {"objective": "luspo"},
        {"advantage": {"name": "group-relative", "std": False}},
    ],
)
def test_update_is_another_with_other_parts(changes: dict[str, object]) -> None:
    configs = {"plain": AlgorithmConfig(), "other": AlgorithmConfig(**changes)}
    assert same_updates(configs) == {"plain": [], "other": []}


@pytest.mark.parametrize(
    "changes",
    [
        {"objective": {"name": "cispo", "clip_high_cap": 2.0}},
        {"proximal": "recompute", "weight": "token-tis", "rejection": "token", "denominators": "kept"},
        {"negative_mask": {"name": "opsm", "delta": 0.1}, "aggregation": "token-sum", "count_zero_advantage": False},
    ],
)
def test_update_is_the_same_with_knobs_at_rest(changes: dict[str, object]) -> None:
    configs = {"plain": AlgorithmConfig(), "other": AlgorithmConfig(**changes)}
    assert same_updates(configs) == {"plain": ["other"], "other": ["plain"]}
