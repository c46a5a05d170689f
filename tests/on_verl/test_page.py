"""docs: their names of verl exist in verl."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import verl
from pages import OF_VERL
from test_verl_page import TABLE
from tree import ROOT
from verl.trainer.ppo import core_algos

from agent_rl.backends.embedded.optimizer import OptimizerConfig
from agent_rl.backends.verl.config.config_check import compose_verl
from agent_rl.backends.verl.config.settings import VerlConfig
from agent_rl.config import load_config

AGGREGATIONS = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")


@pytest.mark.parametrize("name", TABLE)
def test_algorithms_page_names_exist_in_verl(name: str) -> None:
    advantage, objective, aggregation = (re.findall(r" = `([\w-]+)`", cell) for cell in TABLE[name][:3])
    assert all(core_algos.get_adv_estimator_fn(x) for x in advantage)
    assert all(core_algos.get_policy_loss_fn(x) for x in objective)
    assert set(aggregation) <= set(AGGREGATIONS)


def test_pages_names_of_verl_occur_in_it() -> None:
    files = [file for file in Path(verl.__file__).parent.rglob("*") if file.suffix in (".py", ".yaml")]
    text = "\n".join(file.read_text() for file in files)
    words = [re.split(r"[=.]", name)[-1 if "." in name else 0] for name in OF_VERL]
    assert [word for word in words if word not in text] == []


def test_algorithms_page_has_both_optimizers_defaults() -> None:
    config = load_config("backend/verl", VerlConfig, ["start_from=/models/m"])
    theirs, ours = compose_verl(config, Path("/runs/r")).actor_rollout_ref.actor.optim, OptimizerConfig()
    assert theirs.lr_warmup_steps <= 0 == theirs.lr_warmup_steps_ratio and theirs.clip_grad == ours.max_grad_norm
    (first, second), schedule = theirs.betas, f"a {theirs.lr_scheduler_type} learning rate, `lr` ({theirs.lr:g})"
    rise, fall = f"over {ours.warmup_steps} steps", f"to {ours.final:.0%} from {ours.decay_from:.0%} of the run on"
    page = " ".join((ROOT / "docs" / "verl_algorithms.md").read_text().split())
    assert f"betas {first} and {second}, weight decay {theirs.weight_decay} and {schedule}, without a rise" in page
    assert f"betas {ours.beta1} and {ours.beta2} and, with `start_from`, weight decay {ours.weight_decay:g};" in page
    assert f"its learning rate rises {rise} and falls {fall}." in page
