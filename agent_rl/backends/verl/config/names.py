"""What settings of the embedded backend are called on verl."""

from agent_rl.runs.stalls import PATIENT, patience

NAMES_ON_VERL = {
    "optimizer.lr": "lr",
    "optimizer.weight_decay": "verl.actor_rollout_ref.actor.optim.weight_decay",
    "optimizer.max_grad_norm": "verl.actor_rollout_ref.actor.optim.clip_grad",
    "gradient_checkpointing": "verl.actor_rollout_ref.model.enable_gradient_checkpointing",
    "micro_batch_tokens": "verl.actor_rollout_ref.actor.ppo_max_token_len_per_gpu",
}
IN_WARNINGS = {PATIENT: patience(refused=["rollout.retry_temperature"]), **NAMES_ON_VERL}
"""What a warning says on verl in place of what it says of an embedded run."""
