"""Keys of verl's config: those that a run reads, those that agent_rl sets, and the replacements of all others."""

from __future__ import annotations

import functools
from collections.abc import Callable
from importlib import resources

from pydantic import JsonValue

from agent_rl.algorithms.config import AlgorithmConfig
from agent_rl.algorithms.sections import CriticConfig

_ACTOR, _REF, _MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.ref", "actor_rollout_ref.model"
_ROLLOUT = "actor_rollout_ref.rollout"


@functools.cache
def readable_keys() -> dict[str, str]:
    """Return the domain of every key that a user may set; `a.b.*` is for all keys below `a.b`."""
    found: dict[str, str] = {}
    sections: list[str] = []
    for line in (resources.files(__package__) / "verl_keys.txt").read_text().splitlines():
        if line.startswith("["):
            sections = line.strip("[]").split()
        elif line and not line.startswith("#"):
            name, domain, _ = line.split()
            found |= {f"{section}.{name}": domain for section in sections}
    return found


def domain_of(key: str) -> str | None:
    """Return what a key takes; None if no run reads it."""
    known, parts = readable_keys(), key.split(".")
    above = (f"{'.'.join(parts[:n])}.*" for n in range(len(parts) - 1, 0, -1))
    return known.get(key) or next((known[name] for name in above if name in known), None)


# What agent_rl decides

ZERO_HEAD = 1e-6
"""The spread of the value head's first weights: the smallest that transformers takes for one rather than for unset.

With verl's default, 0.02, a model of 4096 channels begins with values that are about 1.3 off at random."""

_CRITIC_OPTIM = (
    "weight_decay",
    "betas",
    "clip_grad",
    "lr_warmup_steps",
    "lr_warmup_steps_ratio",
    "lr_scheduler_type",
    "min_lr_ratio",
    "num_cycles",
)
_CRITIC_ENGINE = (
    "param_offload",
    "optimizer_offload",
    "offload_policy",
    "reshard_after_forward",
    "fsdp_size",
    "model_dtype",
    "mixed_precision",
    "use_torch_compile",
    "ulysses_sequence_parallel_size",
)
_CRITIC_MODEL = (
    "tokenizer_path",
    "trust_remote_code",
    "external_lib",
    "use_remove_padding",
    "enable_gradient_checkpointing",
)


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
    same = {f"critic.optim.{key}": f"{_ACTOR}.optim.{key}" for key in _CRITIC_OPTIM}
    same |= {f"critic.fsdp.{key}": f"{_ACTOR}.fsdp_config.{key}" for key in _CRITIC_ENGINE}
    same |= {f"critic.model.{key}": f"{_MODEL}.{key}" for key in _CRITIC_MODEL}
    same["critic.strategy"] = f"{_ACTOR}.strategy"
    return {
        "critic.enable": True,
        "critic.model.path": start_from,
        "critic.model.override_config.initializer_range": ZERO_HEAD,
        "critic.optim.lr": critic.lr,
        "critic.use_dynamic_bsz": True,  # what verl's engine does whatever this says; then it asks for no rows
        "critic.ppo_infer_max_token_len_per_gpu": max(32768, context),  # of a micro-batch, in training as well
        # verl counts steps from 1, and updates the policy from the one that this names
        "trainer.critic_warmup": critic.warmup_steps + 1 if critic.warmup_steps else 0,
        **{key: f"${{oc.select:{theirs}}}" for key, theirs in same.items()},
    }


_OURS = "agent_rl's algorithm takes its place, see `agent-rl train --explain`"
_WHOLE = "an update of the critic takes the whole batch"
_IN_ORDER = "an update takes the episodes in the batch's order"
_BY_TOKENS = "verl's critic cuts its batches by tokens: set critic.ppo_infer_max_token_len_per_gpu"
_REPLACED = {
    "algorithm.": _OURS,
    "actor_rollout_ref.actor.policy_loss": _OURS,
    "actor_rollout_ref.actor.clip_ratio": _OURS,
    "actor_rollout_ref.actor.tau_": _OURS,
    "actor_rollout_ref.actor.loss_": _OURS,
    "actor_rollout_ref.actor.entropy_coeff": "set algorithm.entropy",
    "actor_rollout_ref.actor.calculate_": "what the engine computes is what the algorithm reads",
    "actor_rollout_ref.actor.grad_clip": "verl reads actor_rollout_ref.actor.optim.clip_grad",
    "actor_rollout_ref.actor.use_kl_loss": "set algorithm.kl",
    "actor_rollout_ref.actor.kl_loss": "set algorithm.kl",
    "actor_rollout_ref.actor.ppo_epochs": "set updates.epochs",
    "actor_rollout_ref.actor.shuffle": _IN_ORDER,
    "actor_rollout_ref.actor.data_loader_seed": _IN_ORDER,
    "actor_rollout_ref.actor.use_prefix_grouper": "verl's v1 trainers don't read it",
    "actor_rollout_ref.actor.megatron.router_replay": "set algorithm.routing.replay",
    "actor_rollout_ref.actor.veomni.router_replay": "set algorithm.routing.replay",
    "actor_rollout_ref.rollout.n=": "set rollout.samples",
    "actor_rollout_ref.rollout.temperature": "set rollout.temperature",
    "actor_rollout_ref.rollout.do_sample": "set rollout.temperature",
    "actor_rollout_ref.rollout.val_kwargs.temperature": "set eval.temperature",
    "actor_rollout_ref.rollout.val_kwargs.do_sample": "set eval.temperature",
    "actor_rollout_ref.rollout.max_model_len": "set rollout.context",
    "actor_rollout_ref.rollout.multi_turn": "the environment takes the turns",
    "trainer.default_local_dir": "checkpoints are in the run's folder: set runs_dir",
    "trainer.resume": "a new run starts from start_from; agent-rl train backend=verl resume=FOLDER continues one",
    "trainer.critic_warmup": "set algorithm.critic.warmup_steps",
    "trainer.use_v1": "agent_rl's trainers are v1's",
    "trainer.v1.trainer_mode": "set async.mode",
    "trainer.v1.sampler.max_off_policy": "set async.max_staleness, async.on_stale",
    "trainer.v1.separate_async.parameter_sync_step": "the servers get new weights after every update",
    "trainer.v1.separate_async.num_warmup_batches": "one batch is sampled ahead: set async.max_staleness",
    "trainer.v1.colocate_async.num_warmup_batches": "one batch is sampled ahead: that is one_step_off",
    "actor_rollout_ref.hybrid_engine": "set async.mode",
    "data.": "tasks come from the environment: set env, split, eval",
    "reward.custom_reward_function": "the environment rewards",
    "reward.reward_": "the environment rewards",
    "distillation.": "agent_rl's loss distils nothing",
    "actor_rollout_ref.actor.use_fused_kernels": "verl reads actor_rollout_ref.model.use_fused_kernels",
    "actor_rollout_ref.actor.use_remove_padding": "verl reads actor_rollout_ref.model.use_remove_padding",
    "actor_rollout_ref.actor.use_torch_compile": "verl reads actor_rollout_ref.actor.fsdp_config.use_torch_compile",
    "actor_rollout_ref.actor.ulysses_": "verl reads actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size",
    "actor_rollout_ref.actor.entropy_": "verl reads the key of this name in fsdp_config, or the strategy's section",
    "actor_rollout_ref.actor.pad_to_length": "verl reads the key of this name in the strategy's section",
    "actor_rollout_ref.actor.qat": "verl reads actor_rollout_ref.actor.fsdp_config.qat",
    "actor_rollout_ref.actor.fsdp_config.dtype": f"verl reads {_ACTOR}.fsdp_config.mixed_precision.param_dtype",
    "actor_rollout_ref.actor.fsdp_config.strategy": "set actor_rollout_ref.actor.strategy",
    "actor_rollout_ref.actor.fsdp_config.use_fused_kernels": "verl reads actor_rollout_ref.model.use_fused_kernels",
    "actor_rollout_ref.actor.fsdp_config.use_remove_padding": "verl reads actor_rollout_ref.model.use_remove_padding",
    "actor_rollout_ref.actor.optim.lr=": "set lr",
    "actor_rollout_ref.actor.optim.total_training_steps": "set steps",
    "actor_rollout_ref.model.path": "set start_from",
    "actor_rollout_ref.model.mtp": "agent_rl's loss trains the next token only",
    "actor_rollout_ref.ref.strategy": "the reference is on the actor's: set actor_rollout_ref.actor.strategy",
    "actor_rollout_ref.ref.fsdp_config.dtype": f"verl reads {_REF}.fsdp_config.mixed_precision.param_dtype",
    "actor_rollout_ref.ref.use_torch_compile": "verl reads actor_rollout_ref.ref.fsdp_config.use_torch_compile",
    "actor_rollout_ref.rollout.prompt_length": "set rollout.context",
    "actor_rollout_ref.rollout.response_length": "set rollout.max_tokens",
    "actor_rollout_ref.rollout.seed": "every reply has a seed of its own: set seed",
    "actor_rollout_ref.rollout.full_determinism": "every reply has a seed of its own: set seed",
    "actor_rollout_ref.rollout.ignore_eos": "a reply ends where its renderer says: set renderer",
    "actor_rollout_ref.rollout.limit_images": "episodes are text",
    "actor_rollout_ref.rollout.moe_load_balance": (
        "all routes would pass through the driver: docs/metrics.md has what is measured of them, routing/"
    ),
    "actor_rollout_ref.rollout.mtp": "agent_rl's loss trains the next token only",
    "actor_rollout_ref.rollout.disaggregation": "agent_rl was never run with prefill and decode on different servers",
    "actor_rollout_ref.rollout.trace": "runs/latest/episodes.jsonl has every episode, see agent-rl view",
    "actor_rollout_ref.rollout.val_kwargs.n": "set eval.n",
    "actor_rollout_ref.rollout.agent.agent_": "agent_rl's agent loop runs the episodes: set env",
    "actor_rollout_ref.rollout.agent.default_agent_loop": "agent_rl's agent loop runs the episodes: set env",
    "actor_rollout_ref.rollout.agent.custom_": "agent_rl's agent loop runs the episodes: set env",
    "model_engine": "set actor_rollout_ref.actor.strategy",
    "skip.": "every step samples episodes of its own",
    "trainer.balance_batch": "verl's v1 trainers always balance",
    "trainer.save_freq": "set checkpoint_every",
    "trainer.max_actor_ckpt_to_keep": "the best stays, too: set keep_checkpoints",
    "trainer.max_critic_ckpt_to_keep": "the best stays, too: set keep_checkpoints",
    "trainer.test_freq": "set eval.every",
    "trainer.total_": "set steps",
    "trainer.val_before_train": "a run is evaluated before its first step; a resumed one was",
    "trainer.val_only": "agent-rl rollout evaluates a policy",
    "trainer.v1.sampler.": "agent_rl's replay buffer takes its place",
    "trainer.v1.separate_async.hybrid_rollout": "rollout keeps devices of its own: set async.mode",
    "transfer_queue.enable": "verl's v1 trainers always use it",
}
"""Keys that change nothing here, by their beginning (with `=`, whole), and what to set instead."""
_REPLACED_CRITIC = {
    "critic.enable": "set algorithm.critic.where",
    "critic.cliprange_value": "set algorithm.critic.clip_eps",
    "critic.loss_": "the critic's loss is the mean over the tokens that it is trained at",
    "critic.ppo_mini_batch_size": _WHOLE,
    "critic.ppo_epochs": "set updates.epochs",
    "critic.shuffle": _WHOLE,
    "critic.data_loader_seed": _WHOLE,
    "critic.ppo_micro_batch_size": _BY_TOKENS,
    "critic.ppo_infer_micro_batch_size": _BY_TOKENS,
    "critic.ppo_max_token_len": _BY_TOKENS,
    "critic.forward_": _BY_TOKENS,
    "critic.use_dynamic_bsz": _BY_TOKENS,
    "critic.grad_clip": "verl reads critic.optim.clip_grad",
    "critic.ulysses_sequence_parallel_size": "verl reads critic.fsdp.ulysses_sequence_parallel_size",
    "critic.model.path": "set start_from",
    "critic.optim.lr=": "set algorithm.critic.lr",
    "critic.optim.total_training_steps": "set steps",
    "critic.strategy": "set actor_rollout_ref.actor.strategy",
    "critic.fsdp.dtype": "verl reads critic.fsdp.mixed_precision.param_dtype",
}
_NO_CRITIC = {"critic.": "there is no critic: set algorithm.critic.where=separate, and an advantage over its values"}
_NO_REFERENCE = {"actor_rollout_ref.ref.": "there is no reference: set algorithm.kl"}


def replaced_by(key: str, algorithm: AlgorithmConfig, *, reference: bool) -> str | None:
    """Return why a key of verl's changes nothing, and what to set instead; None if agent_rl leaves it to verl.

    Args:
        key: in full.
        algorithm: of the run.
        reference: whether the run keeps a reference.
    """
    reasons = _REPLACED | (_NO_CRITIC if algorithm.critic.where == "none" else _REPLACED_CRITIC)
    reasons |= {} if reference else _NO_REFERENCE
    return next((why for prefix, why in reasons.items() if f"{key}=".startswith(prefix)), None)


_ANY = ("a value",)
_ONLY_WITH: dict[str, tuple[str, tuple[object, ...]]] = {
    f"{_ACTOR}.fsdp_config.": (f"{_ACTOR}.strategy", ("fsdp", "fsdp2")),
    f"{_REF}.fsdp_config.": (f"{_ACTOR}.strategy", ("fsdp", "fsdp2")),
    "critic.fsdp.": (f"{_ACTOR}.strategy", ("fsdp", "fsdp2")),
    f"{_ACTOR}.megatron.": (f"{_ACTOR}.strategy", ("megatron",)),
    f"{_REF}.megatron.": (f"{_ACTOR}.strategy", ("megatron",)),
    f"{_ACTOR}.veomni.": (f"{_ACTOR}.strategy", ("veomni",)),
    f"{_REF}.veomni.": (f"{_ACTOR}.strategy", ("veomni",)),
    f"{_ACTOR}.ppo_max_token_len_per_gpu": (f"{_ACTOR}.use_dynamic_bsz", (True,)),
    f"{_ACTOR}.ppo_micro_batch_size_per_gpu": (f"{_ACTOR}.use_dynamic_bsz", (False,)),
    f"{_ROLLOUT}.log_prob_max_token_len_per_gpu": (f"{_ROLLOUT}.log_prob_use_dynamic_bsz", (True,)),
    f"{_ROLLOUT}.log_prob_micro_batch_size_per_gpu": (f"{_ROLLOUT}.log_prob_use_dynamic_bsz", (False,)),
    f"{_REF}.log_prob_max_token_len_per_gpu": (f"{_REF}.log_prob_use_dynamic_bsz", (True,)),
    f"{_REF}.log_prob_micro_batch_size_per_gpu": (f"{_REF}.log_prob_use_dynamic_bsz", (False,)),
    f"{_ACTOR}.fsdp_config.entropy_from_logits_chunk_size": (
        f"{_ACTOR}.fsdp_config.entropy_from_logits_with_chunking",
        (True,),
    ),
    f"{_ACTOR}.fsdp_config.pad_to_length_bucket": (f"{_ACTOR}.fsdp_config.pad_to_length", (True,)),
    f"{_ACTOR}.fsdp_config.seed": (f"{_ACTOR}.fsdp_config.full_determinism", (True,)),
    f"{_ACTOR}.fsdp_config.use_orig_params": (f"{_ACTOR}.strategy", ("fsdp",)),
    f"{_ACTOR}.optim.min_lr_ratio": (f"{_ACTOR}.optim.lr_scheduler_type", ("cosine",)),
    f"{_ACTOR}.optim.num_cycles": (f"{_ACTOR}.optim.lr_scheduler_type", ("cosine",)),
    f"{_MODEL}.lora_rank": (f"{_ACTOR}.strategy", ("fsdp", "fsdp2", "veomni")),
    f"{_MODEL}.lora_alpha": (f"{_MODEL}.lora_rank", _ANY),
    f"{_MODEL}.target_modules": (f"{_MODEL}.lora_rank", _ANY),
    f"{_MODEL}.exclude_modules": (f"{_MODEL}.lora_rank", _ANY),
    f"{_MODEL}.lora.merge": (f"{_MODEL}.lora_rank", _ANY),
    f"{_MODEL}.fused_kernel_options.": (f"{_MODEL}.use_fused_kernels", (True,)),
    f"{_ROLLOUT}.prometheus.file": (f"{_ROLLOUT}.prometheus.enable", (True,)),
    f"{_ROLLOUT}.prometheus.port": (f"{_ROLLOUT}.prometheus.enable", (True,)),
    f"{_ROLLOUT}.prometheus.served_model_name": (f"{_ROLLOUT}.prometheus.enable", (True,)),
    f"{_ROLLOUT}.quantization_config_file": (f"{_ROLLOUT}.quantization", _ANY),
    "transfer_queue.backend.MooncakeStore.": ("transfer_queue.backend.storage_backend", ("MooncakeStore",)),
    "transfer_queue.backend.SimpleStorage.": ("transfer_queue.backend.storage_backend", ("SimpleStorage",)),
}
"""Keys that verl reads only while another has one of these values, or any but null, 0 and false."""


def idle_without(key: str, value_of: Callable[[str], object]) -> str | None:
    """Return which other key must be set for verl to read this one; None if it reads it.

    Args:
        key: in full.
        value_of: looks other keys up in verl's full config.
    """
    for prefix, (other, values) in _ONLY_WITH.items():
        if f"{key}=".startswith((prefix, f"{prefix}=")):
            found = value_of(other)
            if not (bool(found) if values is _ANY else found in values):
                wanted = " or ".join(str(value).lower() if isinstance(value, bool) else str(value) for value in values)
                return (
                    f"verl reads it only with {other}={wanted}, which is {found}: leave it out, or take hardware=none "
                    "if a preset sets it"
                )
    return None
