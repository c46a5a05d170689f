"""What settings of the embedded backend are called on verl, in texts that name them; what it lacks is left out."""

NAMES_ON_VERL = {
    " (and rollout.retry_temperature=2)": "",
    "optimizer.lr": "lr",
    "optimizer.weight_decay": "verl.actor_rollout_ref.actor.optim.weight_decay",
    "gradient_checkpointing": "verl.actor_rollout_ref.model.enable_gradient_checkpointing",
    "micro_batch_tokens": "verl.actor_rollout_ref.actor.ppo_max_token_len_per_gpu",
}
