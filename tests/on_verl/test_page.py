"""docs/verl_algorithms.md: its names of verl exist in verl."""

from __future__ import annotations

import re

import pytest
from test_verl_page import TABLE
from verl.trainer.ppo import core_algos

AGGREGATIONS = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")


@pytest.mark.parametrize("name", TABLE)
def test_algorithms_page_names_exist_in_verl(name: str) -> None:
    advantage, objective, aggregation = (re.findall(r" = `([\w-]+)`", cell) for cell in TABLE[name][:3])
    assert all(core_algos.get_adv_estimator_fn(x) for x in advantage)
    assert all(core_algos.get_policy_loss_fn(x) for x in objective)
    assert set(aggregation) <= set(AGGREGATIONS)
