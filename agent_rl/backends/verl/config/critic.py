"""Critic: what a separate critic's settings are in verl's config, and which of verl's would change nothing."""

from __future__ import annotations

from pydantic import JsonValue

from agent_rl.algorithms.config import CriticConfig

ZERO_HEAD = 1e-6
"""The spread of the value head's first weights: the smallest that transformers takes for one rather than for unset.

With verl's default, 0.02, a model of 4096 channels begins with values that are about 1.3 off at random."""

_OPTIM = (
    *("weight_decay", "betas", "clip_grad"),
    *("lr_warmup_steps", "lr_warmup_steps_ratio", "lr_scheduler_type", "min_lr_ratio", "num_cycles"),
)
_ENGINE = (
    *("param_offload", "optimizer_offload", "offload_policy", "reshard_after_forward", "fsdp_size"),
    *("model_dtype", "dtype", "use_torch_compile", "ulysses_sequence_parallel_size"),
)
_MODEL = ("tokenizer_path", "trust_remote_code", "external_lib", "use_remove_padding", "enable_gradient_checkpointing")


def critic_settings(critic: CriticConfig, start_from: str, context: int) -> dict[str, JsonValue]:
    """Return what an algorithm's critic is in verl's config.

    It is trained as the policy is, as the embedded backend's: optimizer, schedule, engine and precision are the
    policy's unless the run says otherwise, key by key.

    Args:
        critic: the algorithm's.
        start_from: the model that it begins as a copy of.
        context: tokens of a whole episode.
    """
    if critic.where == "none":
        return {"critic.enable": False}
    actor = "actor_rollout_ref.actor"
    same = {f"critic.optim.{key}": f"{actor}.optim.{key}" for key in _OPTIM}
    same |= {f"critic.fsdp.{key}": f"{actor}.fsdp_config.{key}" for key in _ENGINE}
    same |= {f"critic.model.{key}": f"actor_rollout_ref.model.{key}" for key in _MODEL}
    same["critic.strategy"] = f"{actor}.strategy"
    return {
        "critic.enable": True,
        "critic.model.path": start_from,
        "+critic.model.override_config.initializer_range": ZERO_HEAD,
        "critic.optim.lr": critic.lr,
        "critic.use_dynamic_bsz": True,  # what verl's engine does whatever this says; then it asks for no rows
        "+critic.ppo_infer_max_token_len_per_gpu": max(32768, context),  # of a micro-batch, in training as well
        # verl counts steps from 1, and updates the policy from the one that this names
        "trainer.critic_warmup": critic.warmup_steps + 1 if critic.warmup_steps else 0,
        **{key: f"${{{theirs}}}" for key, theirs in same.items()},
    }


_BY_TOKENS = "verl's critic cuts its batches by tokens: set +critic.ppo_infer_max_token_len_per_gpu"
REPLACED = {
    "critic.enable": "set algorithm.critic.where",
    "critic.cliprange_value": "set algorithm.critic.clip_eps",
    "critic.loss_": "the critic's loss is the mean over the tokens that it is trained at",
    "critic.ppo_mini_batch_size": "an update takes the whole batch; set rollout.groups",
    "critic.ppo_epochs": "set updates_per_batch",
    "critic.shuffle": "an update takes the whole batch",
    "critic.data_loader_seed": "an update takes the whole batch",
    "critic.ppo_micro_batch_size": _BY_TOKENS,
    "critic.ppo_infer_micro_batch_size": _BY_TOKENS,
    "critic.ppo_max_token_len": _BY_TOKENS,
    "critic.forward_": _BY_TOKENS,
    "critic.use_dynamic_bsz": _BY_TOKENS,
    "critic.grad_clip": "verl reads critic.optim.clip_grad",
    "critic.ulysses_sequence_parallel_size": "verl reads critic.fsdp.ulysses_sequence_parallel_size",
}
"""Keys of verl's critic that nothing reads here, as `settings.REPLACED` has those of the rest."""
NO_CRITIC = {"critic.": "there is no critic: set algorithm.critic.where=separate, and an advantage over its values"}
"""The same, of a run without one."""
