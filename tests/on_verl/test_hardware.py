"""`--dry-run` without a GPU: every preset of hardware composes, and mistakes are named by key."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from omegaconf import DictConfig

from agent_rl.backends.verl.config.config_check import compose_verl
from agent_rl.backends.verl.config.settings import VerlConfig
from agent_rl.config import choices, load_config
from agent_rl.errors import ConfigError

ACTOR, ROLLOUT = "verl.actor_rollout_ref.actor", "verl.actor_rollout_ref.rollout"
NODES = "hardware=nodes_2x8x80gb_async"


def composed(*overrides: str, model: str = "/models/m") -> DictConfig:
    settings = load_config("backend/verl", VerlConfig, [f"start_from={model}", *overrides])
    return compose_verl(settings, Path("/runs/r"))


@pytest.mark.parametrize("name", [name for name in choices("hardware") if name != "none"])
def test_hardware_presets_compose_and_fit(name: str, mixture: str) -> None:
    found = composed(f"hardware={name}", model=mixture if name.endswith("moe") else "/models/m")
    actor, rollout = found.actor_rollout_ref.actor, found.actor_rollout_ref.rollout
    gpus = found.trainer.nnodes * found.trainer.n_gpus_per_node
    assert gpus == (1 if name == "gpu_80gb" else 8)
    assert actor.strategy == "fsdp2" and actor.use_dynamic_bsz is True
    assert actor.ppo_max_token_len_per_gpu >= rollout.max_model_len == 8192
    assert actor.fsdp_config.model_dtype == "fp32"  # the 16 bytes a parameter of the presets' arithmetic
    assert (found.trainer.v1.trainer_mode == "separate_async") == name.startswith("nodes") == bool(rollout.nnodes)
    assert rollout.enable_prefix_caching and rollout.free_cache_engine and rollout.logprobs_mode == "processed_logprobs"
    assert actor.fsdp_config.param_offload is False


def test_compose_takes_megatron_without_a_preset(tmp_path: Path) -> None:
    chosen = ["hardware=none", f"{ACTOR}.strategy=megatron", f"{ACTOR}.use_dynamic_bsz=true"]
    chosen += [f"{ROLLOUT}.tensor_model_parallel_size=8", f"{ACTOR}.megatron.expert_model_parallel_size=8"]
    found = composed(*chosen, f"{ROLLOUT}.expert_parallel_size=8")
    assert found.actor_rollout_ref.actor.megatron.expert_model_parallel_size == 8
    assert found.actor_rollout_ref.rollout.expert_parallel_size == 8


def test_moe_preset_replays_the_rollout_routes(mixture: str) -> None:
    found = composed("hardware=gpu_8x80gb_moe", "algorithm=icepop", model=mixture)
    assert found.data.agent_rl.routes == {"layers": 48, "top_k": 8, "experts": 128}
    assert found.actor_rollout_ref.rollout.enable_rollout_routing_replay is True
    with pytest.raises(ConfigError, match="experts of start_from=/models/m, whose config can't be read"):
        composed("hardware=gpu_8x80gb_moe")


def test_overrides_win_over_the_preset() -> None:
    assert composed(f"{ACTOR}.ppo_max_token_len_per_gpu=9000").actor_rollout_ref.actor.ppo_max_token_len_per_gpu == 9000
    assert composed(NODES, f"{ROLLOUT}.nnodes=3").actor_rollout_ref.rollout.nnodes == 3


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        # types, where verl would take anything
        ([f"{ACTOR}.ppo_max_token_len_per_gpu=many"], r"len_per_gpu='many': it takes a whole number of at least 1"),
        ([f"{ACTOR}.use_dynamic_bsz=perhaps"], r"use_dynamic_bsz='perhaps'"),
        ([f"{ACTOR}.fsdp_config.offload_policy=7"], r"fsdp_config\.offload_policy=7"),
        (["verl.trainer.n_gpus_per_node=all"], r"trainer\.n_gpus_per_node='all'"),
        # keys
        ([f"{ROLLOUT}.tensor_parallel=2"], r"verl has no setting 'actor_rollout_ref.rollout.tensor_parallel'"),
        # verl's own checks
        ([f"{ACTOR}.strategy=fdsp"], r"strategy='fdsp': it takes fsdp or .*Did you mean 'fsdp'"),
        ([f"{ACTOR}.fsdp_config.model_dtype=fp12"], r"model_dtype='fp12': it takes fp32 or"),
        ([f"{ACTOR}.use_dynamic_bsz=false"], r"ppo_max_token_len_per_gpu would change nothing: .*use_dynamic_bsz=true"),
        (["hardware=none"], r"Please set at least one of 'actor.ppo_micro_batch_size'"),
        ([f"{ROLLOUT}.pipeline_model_parallel_size=2"], r"pipeline_model_parallel_size=2: it takes 1"),
        ([f"{ROLLOUT}.expert_parallel_size=2"], r"expert_parallel_size must be equal to"),
        # sizes
        (["hardware=gpu_8x80gb", f"{ROLLOUT}.tensor_model_parallel_size=3"], r"size=3 .*does not divide .*_per_node=8"),
        ([f"{ROLLOUT}.tensor_model_parallel_size=2"], r"does not divide trainer\.nnodes \* trainer\.n_gpus_per_node=1"),
        ([f"{ROLLOUT}.tensor_model_parallel_size=0"], r"tensor_model_parallel_size=0"),
        (["rollout.context=20000"], r"ppo_max_token_len_per_gpu=16384 can't hold one episode of rollout.context=20000"),
        ([f"{ROLLOUT}.gpu_memory_utilization=70"], r"gpu_memory_utilization=70: it takes a number in \(0, 1\]"),
        ([f"{ROLLOUT}.enable_chunked_prefill=false", f"{ROLLOUT}.max_num_batched_tokens=4096"], r"batched_tokens=4096"),
        ([f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size=2"], r"parallel_size=2 does not divide the 1 GPUs"),
        # mini-batches
        ([f"{ACTOR}.ppo_mini_batch_size=5"], r"size=5 does not divide rollout\.groups=64"),
        (["hardware=gpu_8x80gb", "rollout.samples=3", f"{ACTOR}.ppo_mini_batch_size=1"], r"=3 can't be dealt to 8"),
        ([NODES, "async.mode=separate", f"{ACTOR}.ppo_mini_batch_size=16"], r"new weights after every mini-batch"),
        # the mode and the hardware
        ([NODES, "async.mode=sync"], r"rollout\.nnodes=1 is for async\.mode=separate.*the mode is sync: set async"),
        ([NODES, "async.mode=one_step_off"], r"the mode is one_step_off"),
        ([NODES, f"{ROLLOUT}.checkpoint_engine.backend=naive"], r"naive can't send weights"),
        ([NODES, f"{ROLLOUT}.tensor_model_parallel_size=16"], r"does not divide actor_rollout_ref\.rollout\.nnodes"),
    ],
)  # fmt: skip
def test_compose_names_mistakes_by_key(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        composed(*overrides)


def test_compose_takes_mini_batches() -> None:
    assert composed(f"{ACTOR}.ppo_mini_batch_size=16").actor_rollout_ref.actor.ppo_mini_batch_size == 16
    rows = [f"{ACTOR}.use_dynamic_bsz=false", "hardware=none", f"{ACTOR}.ppo_micro_batch_size_per_gpu=64"]
    rows += [
        f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu=64",
        "verl.trainer.n_gpus_per_node=1",
        f"{ROLLOUT}.tensor_model_parallel_size=1",
    ]
    composed("rollout.groups=16", "rollout.samples=4", *rows)
    with pytest.raises(ConfigError, match=r"ppo_micro_batch_size_per_gpu=64 does not divide the 16 episodes"):
        composed("rollout.groups=16", "rollout.samples=4", f"{ACTOR}.ppo_mini_batch_size=4", *rows)


def test_compose_names_all_mistakes_at_once() -> None:
    with pytest.raises(ConfigError, match=r"does not divide .*; .*can't hold one episode"):
        composed(f"{ROLLOUT}.tensor_model_parallel_size=2", "rollout.context=20000")
    with pytest.raises(ConfigError, match=r"verl\.trainer\.nnodes=0: .*; .*gpu_memory_utilization=2: "):
        composed(f"{ROLLOUT}.gpu_memory_utilization=2", "verl.trainer.nnodes=0")


def test_compose_takes_keys_of_verl_dataclasses() -> None:
    assert composed(f"{ROLLOUT}.enable_sleep_mode=false").actor_rollout_ref.rollout.enable_sleep_mode is False
    sdpa = "verl.actor_rollout_ref.model.override_config.attn_implementation=sdpa"
    assert composed(sdpa).actor_rollout_ref.model.override_config == {"attn_implementation": "sdpa"}
    with pytest.raises(ConfigError, match=r"verl has no setting 'actor_rollout_ref.rollout.enable_slep_mode'"):
        composed(f"{ROLLOUT}.enable_slep_mode=false")


def test_compose_checks_a_local_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"num_attention_heads": 12, "max_position_embeddings": 4096}))
    with pytest.raises(
        ConfigError, match=r"size=8 does not divide the model's 12 .*; .*context=8192 is more than .*4096"
    ):
        composed("hardware=gpu_8x80gb", f"{ROLLOUT}.tensor_model_parallel_size=8", model=str(tmp_path))
