"""agent_rl.backends.verl.config.settings: our settings as verl's, and refused ones."""

from pathlib import Path

import pytest
from pydantic import ValidationError

import agent_rl as ar
from agent_rl.backends.verl.config.settings import VerlConfig, agent_loop, verl_settings
from agent_rl.errors import ConfigError


def config(**changes: object) -> VerlConfig:
    return VerlConfig.model_validate({"env": "calculator-v0", "start_from": "/models/m"} | changes)


def test_verl_settings_maps_our_settings() -> None:
    found = verl_settings(
        config(
            rollout={"groups": 4, "samples": 6, "context": 128, "temperature": 0.7},
            eval={"split": "dev", "n": 32, "every": 0, "temperature": 0},
            steps=30,
            updates={"epochs": 2},
        ),
        Path("/runs/r"),
    )
    assert found["data.train_batch_size"] == found["actor_rollout_ref.actor.ppo_mini_batch_size"] == 4
    assert found["actor_rollout_ref.rollout.n"] == 6 and found["actor_rollout_ref.actor.ppo_epochs"] == 2
    assert found["data.val_files"] == "dev:32" and found["trainer.test_freq"] == 30
    assert found["actor_rollout_ref.rollout.val_kwargs.do_sample"] is False
    assert found["trainer.default_local_dir"] == "/runs/r/checkpoints"


SIZE = "actor_rollout_ref.actor.ppo_mini_batch_size"


def test_verl_settings_maps_mini_batches() -> None:
    found = verl_settings(
        config(updates={"minibatches": 4, "shuffle": False, "target_kl": 0.1}, rollout={"groups": 12}), Path("r")
    )
    assert found[SIZE] == 3 and found["data.agent_rl"]["shuffle"] is False
    assert found["data.agent_rl"]["target_kl"] == 0.1
    assert verl_settings(config(rollout={"groups": 12}), Path("r"))[SIZE] == 12


@pytest.mark.parametrize(
    ("updates", "verl", "why"),
    [
        ({"minibatches": 5}, {}, "minibatches=5 does not divide rollout.groups=64"),
        ({"minibatches": 2}, {SIZE: 8}, "says what updates.minibatches=2 does"),
    ],
)
def test_verl_settings_refuses_updates_that_verl_has_not(updates: object, verl: dict[str, int], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        config(updates=updates, verl=verl)


def test_verl_settings_refuses_mini_batches_with_separate_devices() -> None:
    assert config(**{"updates": {"epochs": 2}, "async": {"mode": "separate"}}).updates.most == 2
    with pytest.raises(ValueError, match=r"minibatches=2: with async.mode=separate verl sends new weights"):
        config(**{"updates": {"minibatches": 2}, "async": {"mode": "separate"}})


def test_verl_recomputes_old_unless_it_is_told() -> None:
    bypass = "algorithm.rollout_correction.bypass_mode"
    assert verl_settings(config(), Path("r"))[bypass] is False
    assert verl_settings(config(algorithm={"proximal": "rollout"}), Path("r"))[bypass] is True


@pytest.mark.parametrize(("proximal", "bypass"), [("rollout", True), ("recompute", False)])
def test_verl_settings_bypasses_old_as_the_algorithm_asks(proximal: str, bypass: bool) -> None:
    found = verl_settings(config(algorithm={"proximal": proximal}), Path("r"))
    assert found["algorithm.rollout_correction.bypass_mode"] is bypass


@pytest.mark.parametrize(("where", "wanted"), [("none", False), ("loss", True), ("reward", True)])
def test_verl_settings_keeps_a_kl_reference(where: str, wanted: bool) -> None:
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
        ("actor_rollout_ref.rollout.ignore_eos", "a reply ends where its renderer says"),
        ("data.train_files", "tasks come from the environment"),
        ("algorithm.use_kl_in_reward", "agent_rl's algorithm takes its place"),
        ("algorithm.filter_groups.enable", "agent_rl's algorithm takes its place"),
        ("actor_rollout_ref.actor.ppo_epochs", "set updates.epochs"),
        ("actor_rollout_ref.actor.kl_loss_coef", "set algorithm.kl"),
        ("actor_rollout_ref.actor.grad_clip", "verl reads actor_rollout_ref.actor.optim.clip_grad"),
        ("actor_rollout_ref.actor.calculate_entropy", "what the engine computes is what the algorithm reads"),
        ("actor_rollout_ref.rollout.val_kwargs.temperature", "set eval.temperature"),
        ("trainer.critic_warmup", "set algorithm.critic.warmup_steps"),
        ("trainer.max_actor_ckpt_to_keep", "the best stays, too: set keep_checkpoints"),
        ("trainer.use_v1", "agent_rl's trainers are v1's"),
        ("reward.reward_model.enable", "the environment rewards"),
        ("distillation.enabled", "agent_rl's loss distils nothing"),
        ("critic.fsdp.param_offload", "there is no critic"),
    ],
)
def test_config_refuses_ineffective_keys(key: str, why: str) -> None:
    with pytest.raises(ValidationError, match=f"would change nothing: {why}"):
        config(verl={key: 1})


CRITIC = {"name": "ppo", "advantage": "gae", "critic": {"where": "separate", "lr": 3e-4, "warmup_steps": 5}}


def test_verl_settings_maps_the_critic() -> None:
    found = verl_settings(config(algorithm=CRITIC, rollout={"context": 65536}), Path("r"))
    assert found["critic.enable"] is True and found["critic.model.path"] == "/models/m"
    assert found["critic.optim.lr"] == 3e-4
    assert found["critic.optim.clip_grad"] == "${oc.select:actor_rollout_ref.actor.optim.clip_grad}"
    assert found["critic.ppo_infer_max_token_len_per_gpu"] == 65536  # no row is longer
    assert found["trainer.critic_warmup"] == 6  # the policy's first step; steps count from 1
    none = verl_settings(config(), Path("r"))
    assert [(k, v) for k, v in none.items() if "critic" in k] == [("critic.enable", False)]


@pytest.mark.parametrize(
    ("key", "why"),
    [
        ("critic.cliprange_value", "set algorithm.critic.clip_eps"),
        ("critic.ppo_micro_batch_size_per_gpu", "verl's critic cuts its batches by tokens"),
        ("critic.use_dynamic_bsz", "verl's critic cuts its batches by tokens"),
        ("critic.grad_clip", "verl reads critic.optim.clip_grad"),
        ("critic.loss_agg_mode", "the mean over the tokens that it is trained at"),
        ("critic.enable", "set algorithm.critic.where"),
    ],
)
def test_config_refuses_ineffective_critic_keys(key: str, why: str) -> None:
    with pytest.raises(ValidationError, match=f"would change nothing: .*{why}"):
        config(algorithm=CRITIC, verl={key: 1})


def test_config_leaves_other_critic_keys_to_verl() -> None:
    keys = ("critic.fsdp.param_offload", "critic.optim.weight_decay", "+critic.ppo_infer_max_token_len_per_gpu")
    assert set(config(algorithm=CRITIC, verl=dict.fromkeys(keys, 1)).verl) == {key.lstrip("+") for key in keys}


def test_verl_settings_keeps_a_reference_for_dpo() -> None:
    dpo = {"objective": "dpo", "advantage": "best-against-worst", "aggregation": "token-sum"}
    assert verl_settings(config(algorithm=dpo), Path("r"))["actor_rollout_ref.actor.use_kl_loss"] is True


def test_config_passes_keys_with_a_refused_prefix() -> None:
    assert config(verl={"actor_rollout_ref": {"rollout": {"nnodes": 1, "n_gpus_per_node": 4}}}).verl == {
        "actor_rollout_ref.rollout.nnodes": 1,
        "actor_rollout_ref.rollout.n_gpus_per_node": 4,
    }


def test_config_refuses_a_shared_critic() -> None:
    with pytest.raises(ValidationError, match=r"can't share a trunk: set algorithm.critic.where=separate"):
        config(algorithm=CRITIC | {"critic": {"where": "shared"}})


VINE = {"name": "vineppo", "advantage": "state-values", "vine": {"continuations": 2, "max_episodes": 8}}


@pytest.mark.parametrize(
    ("algorithm", "asked"),
    [
        ({}, {}),
        ({"advantage": "over-greedy"}, {"__rollout_n__": 7, "greedy": 6}),
        (VINE, {"snapshots": True}),
        ({"filters": ["varied-groups"], "refill": {"max_rounds": 2}}, {}),
    ],
    ids=["grpo", "remax", "vineppo", "dapo"],
)
def test_asked_lists_requests_of_rows(algorithm: dict[str, object], asked: dict[str, object]) -> None:
    found = verl_settings(config(algorithm=algorithm, rollout={"samples": 6}), Path("r"))
    data = found["data.agent_rl"]
    assert isinstance(data, dict) and data["asked"] == asked
    assert found["actor_rollout_ref.rollout.n"] == 6 and found["data.gen_batch_size"] == 1


MEGATRON = {"actor_rollout_ref.actor.strategy": "megatron"}


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"judge": {"model": "m", "evolve": True}}, r"judge\.evolve=true: criteria evolve on the embedded backend"),
        ({"async": {"max_staleness": 4}}, r"max_staleness=4 changes nothing with async.mode=sync"),
        ({"async": {"on_stale": "wait"}}, r"on_stale=wait changes nothing with async.mode=sync"),
        ({"lora": {"rank": 8}, "verl": MEGATRON}, r"strategy=megatron reads no lora, and would train all weights"),
        ({"algorithm": CRITIC, "verl": MEGATRON}, r"algorithm=ppo: .*strategy=megatron .*strategy=fsdp2"),
    ],
    ids=["evolve", "stale", "wait", "lora", "critic"],
)
def test_config_refuses_what_no_run_would_do(changes: dict[str, object], why: str) -> None:
    with pytest.raises(ValidationError, match=why):
        config(**changes)


def test_config_refuses_state_values_in_asynchronous_modes() -> None:
    config(algorithm=VINE, **{"async": {"mode": "sync"}})
    with pytest.raises(ValidationError, match=r"async.mode=one_step_off: algorithm=vineppo values states.*mode=sync"):
        config(algorithm=VINE, **{"async": {"mode": "one_step_off"}})


def test_train_refuses_stored_episodes_on_verl() -> None:
    with pytest.raises(ConfigError, match="episodes=runs/x: learning from stored episodes is the embedded backend's"):
        ar.train(backend="verl", start_from="m", algorithm="dpo", episodes="runs/x")


def test_agent_loop_names_the_environment() -> None:
    (loop,) = agent_loop(config(imports=["/my_envs.py"], env_args={"hard": True}), Path("run"))
    assert loop["_target_"] == "agent_rl.backends.verl.worker.agent_loop.EnvAgentLoop"
    assert loop["env"] == "calculator-v0" and loop["imports"] == ["/my_envs.py"] and loop["env_args"] == {"hard": True}
