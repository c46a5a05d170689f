"""agent_rl.backends.verl.config.async_keys, .staleness and agent_rl.gym.budget: verl's settings for asynchrony."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
from pydantic import ValidationError

from agent_rl.backends.settings import training_config
from agent_rl.backends.verl.config.settings import VerlConfig, agent_loop, verl_settings
from agent_rl.backends.verl.driver.staleness import check_staleness
from agent_rl.errors import ConfigError
from agent_rl.gym.budget import Budget, BudgetConfig
from tests.doubles import example_episode

SAMPLER = "trainer.v1.sampler"


def config(**changes: object) -> VerlConfig:
    return VerlConfig.model_validate({"env": "calculator-v0", "start_from": "/models/m"} | changes)


def settings(**asynchrony: object) -> dict[str, object]:
    return dict(verl_settings(config(**{"async": asynchrony}), Path("/runs/r")))


@pytest.mark.parametrize(
    ("mode", "theirs"), [("sync", "sync"), ("one_step_off", "colocate_async"), ("separate", "separate_async")]
)
def test_asynchronous_maps_the_mode(mode: str, theirs: str) -> None:
    found = settings(mode=mode)
    assert found["trainer.v1.trainer_mode"] == theirs
    assert (found.get("actor_rollout_ref.hybrid_engine") is False) == (mode == "separate")


def test_asynchronous_sets_the_rollout_pool() -> None:
    found = settings(mode="separate", max_staleness=3, on_stale="wait")
    assert found["trainer.v1.separate_async.parameter_sync_step"] == 1  # so that verl's steps are updates
    assert found["trainer.v1.separate_async.num_warmup_batches"] == 1
    assert found[f"{SAMPLER}.max_off_policy_threshold"] == 4 and found[f"{SAMPLER}.max_off_policy_strategy"] == "wait"
    assert found["data.train_batch_size"] == found["actor_rollout_ref.actor.ppo_mini_batch_size"]
    assert found["actor_rollout_ref.rollout.n_gpus_per_node"] == "${trainer.n_gpus_per_node}"
    assert found["actor_rollout_ref.rollout.checkpoint_engine.backend"] == "nccl"


def test_verl_settings_bounds_the_staleness() -> None:
    def limit(**asynchrony: object) -> object:
        agent_rl = settings(**asynchrony)["data.agent_rl"]
        assert isinstance(agent_rl, dict)
        return agent_rl["max_staleness"]

    assert limit(mode="separate", max_staleness=3) == 3 and limit(mode="one_step_off") == 1
    assert limit(mode="sync") == 0


@pytest.mark.parametrize(
    ("asynchrony", "verl", "why"),
    [
        ({"mode": "one_step_off", "max_staleness": 2}, {}, r"max_staleness=2 is more than.*one_step_off can have"),
        (
            {"mode": "separate"},
            {"actor_rollout_ref.rollout.checkpoint_engine.backend": "naive"},
            "=naive can't send weights to other devices",
        ),
        ({"mode": "separate"}, {"actor_rollout_ref.rollout.nnodes": 0}, "nnodes=0 leaves async.mode=separate no"),
        ({}, {"trainer.v1.separate_async.num_warmup_batches": 2}, "one batch is sampled ahead"),
        ({}, {"trainer.v1.separate_async.parameter_sync_step": 4}, "new weights after every update"),
        ({}, {"actor_rollout_ref.hybrid_engine": True}, "set async.mode"),
    ],
)
def test_config_refuses_impossible_modes(asynchrony: dict[str, object], verl: dict[str, object], why: str) -> None:
    with pytest.raises(ValidationError, match=why):
        config(**{"async": asynchrony, "verl": verl})


def test_check_staleness_counts_from_current_weights() -> None:
    episode = example_episode()  # two tokens by version 7, then one each by 7 and 8
    check_staleness([episode, example_episode(trajectories=())], version=9, limit=2)
    with pytest.raises(RuntimeError, match=r"episode e0 has a token that version 7.*version 9.*staleness of 1"):
        check_staleness([episode], version=9, limit=1)
    check_staleness([example_episode(trajectories=())], version=9, limit=0)


def test_budget_config_replaces_the_set_limits() -> None:
    own = Budget(turns=6, tokens=256, seconds=None)
    assert BudgetConfig().instead_of(own) == own
    assert BudgetConfig(seconds=30, turns=2).instead_of(own) == replace(own, seconds=30, turns=2)
    with pytest.raises(ValidationError, match="greater than 0"):
        BudgetConfig(seconds=0)


def test_agent_loop_has_the_budget() -> None:
    (loop,) = agent_loop(config(budget={"seconds": 5}), Path("run"))
    assert loop["budget"] == {"seconds": 5}


def test_adapter_becomes_verls_keys() -> None:
    found = verl_settings(config(lora={"rank": 8, "targets": ["q_proj", "v_proj"]}), Path("/runs/r"))
    model = {key.rpartition(".")[2]: value for key, value in found.items() if ".model." in key}
    assert model["lora_rank"] == 8 and model["lora_alpha"] == 32 and model["target_modules"] == ["q_proj", "v_proj"]
    assert not any("lora" in key for key in verl_settings(config(), Path("/runs/r")))
    assert found["actor_rollout_ref.model.lora.merge"] is True


@pytest.mark.parametrize(
    ("given", "way"),
    [
        (
            {"model": "smollm2"},
            "model=smollm2 is a setting of the embedded backend. On verl, set start_from=FOLDER",
        ),
        ({"freeze": {"layers": 2}}, "all weights are trained, or an adapter of every layer: lora.rank=16"),
        ({"warm_start.clone_steps": 5}, "start_from the checkpoint of an embedded run of steps=0 that did it"),
        ({"optimizer.weight_decay": 0.1}, "it is verl.actor_rollout_ref.actor.optim.weight_decay"),
        ({"optimizer.max_grad_norm": 0.2}, "it is verl.actor_rollout_ref.actor.optim.clip_grad"),
        ({"optimizer": {"beta1": 0.8}}, "its settings are those below verl.actor_rollout_ref.actor.optim"),
        ({"dtype": "bfloat16"}, "it is verl.actor_rollout_ref.actor.fsdp_config.model_dtype"),
        ({"rollout.slots": 4}, "rollout.slots=4 is a setting of the embedded backend. On verl, there is none like it"),
    ],
)
def test_embedded_setting_on_verl_names_the_way_out(given: dict[str, object], way: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(way)):
        training_config("calculator-v0", backend="verl", start_from="/models/m", **given)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lora": {"dora": True}}, "lora.dora: verl's adapters on FSDP are plain LoRA"),
        ({"lora": {"alpha": 0.5}}, "lora.alpha=0.5: verl takes a whole number"),
        ({"lora": {}, "verl": {"actor_rollout_ref.model.lora_rank": 4}}, "model.lora_rank says what lora does"),
    ],
)
def test_adapter_that_verl_lacks_is_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config(**settings)
