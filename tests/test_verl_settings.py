"""agent_rl.backends.verl.settings: what becomes of our settings, and what is refused."""

from pathlib import Path

import pytest
from pydantic import ValidationError

from agent_rl.backends.verl.settings import VerlConfig, agent_loop, verl_settings


def config(**changes: object) -> VerlConfig:
    return VerlConfig.model_validate({"env": "calculator-v0", "start_from": "/models/m"} | changes)


def test_the_settings_in_verl_s_words() -> None:
    found = verl_settings(
        config(
            rollout={"groups": 4, "samples": 6, "context": 128, "temperature": 0.7},
            eval={"split": "dev", "n": 32, "every": 0, "temperature": 0},
            steps=30,
            updates_per_batch=2,
        ),
        Path("/runs/r"),
    )
    assert found["data.train_batch_size"] == found["actor_rollout_ref.actor.ppo_mini_batch_size"] == 4
    assert found["actor_rollout_ref.rollout.n"] == 6 and found["actor_rollout_ref.actor.ppo_epochs"] == 2
    assert found["data.val_files"] == "dev:32" and found["trainer.test_freq"] == 30
    assert found["actor_rollout_ref.rollout.val_kwargs.do_sample"] is False
    assert found["trainer.default_local_dir"] == "/runs/r/checkpoints"


@pytest.mark.parametrize(("proximal", "bypass"), [("rollout", True), ("recompute", False)])
def test_old_is_what_the_algorithm_says(proximal: str, bypass: bool) -> None:
    found = verl_settings(config(algorithm={"proximal": proximal}), Path("r"))
    assert found["algorithm.rollout_correction.bypass_mode"] is bypass


@pytest.mark.parametrize(("where", "wanted"), [("none", False), ("loss", True), ("reward", True)])
def test_a_kl_penalty_makes_verl_keep_a_reference(where: str, wanted: bool) -> None:
    found = verl_settings(config(algorithm={"kl": {"where": where, "kind": "k3"}}), Path("r"))
    assert found["actor_rollout_ref.actor.use_kl_loss"] is wanted


@pytest.mark.parametrize(
    ("key", "why"),
    [
        ("algorithm.adv_estimator", "agent_rl's algorithm takes its place"),
        ("+algorithm.rollout_correction.rollout_is", "agent_rl's algorithm takes its place"),
        ("actor_rollout_ref.actor.clip_ratio_high", "agent_rl's algorithm takes its place"),
        ("actor_rollout_ref.actor.entropy_coeff", "set algorithm.entropy"),
        ("actor_rollout_ref.rollout.n", "set rollout.samples"),
        ("data.train_files", "tasks come from the environment"),
    ],
)
def test_a_key_that_verl_would_not_read_is_refused(key: str, why: str) -> None:
    with pytest.raises(ValidationError, match=f"would change nothing: {why}"):
        config(verl={key: 1})


def test_keys_that_only_begin_like_a_refused_one_pass() -> None:
    assert config(verl={"actor_rollout_ref": {"rollout": {"nnodes": 1, "n_gpus_per_node": 4}}}).verl == {
        "actor_rollout_ref.rollout.nnodes": 1,
        "actor_rollout_ref.rollout.n_gpus_per_node": 4,
    }


def test_an_algorithm_that_can_t_run_is_refused_with_the_reason() -> None:
    with pytest.raises(ValidationError, match=r"algorithm=remax needs a greedy episode of each task.*embedded can"):
        config(algorithm={"name": "remax", "advantage": "over-greedy"})
    with pytest.raises(ValidationError, match="needs dynamic sampling"):
        config(algorithm={"filters": ["varied-groups"], "refill": {"max_rounds": 2}})


def test_the_agent_loop_s_file_names_the_environment() -> None:
    (loop,) = agent_loop(config(imports=["/my_envs.py"], env_args={"hard": True}))
    assert loop["_target_"] == "agent_rl.backends.verl.loop.EnvAgentLoop"
    assert loop["env"] == "calculator-v0" and loop["imports"] == ["/my_envs.py"] and loop["env_args"] == {"hard": True}
