"""The loss that verl's workers call: `Algorithm.loss` on a micro-batch, with the denominators of the whole batch."""

from __future__ import annotations

from dataclasses import fields
from functools import partial
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor
from verl.utils.metric import AggregationType, Metric
from verl.workers.utils.padding import no_padding_2_padding

from agent_rl.algorithms import Algorithm, Batch, Denominators
from agent_rl.algorithms.config import AlgorithmConfig

SENT = {
    "loss_mask": "response_mask",
    "old_logprobs": "old_log_probs",
    "rollout_logprobs": "rollout_log_probs",
    "reference_logprobs": "ref_log_prob",
    "advantages": "advantages",
    "weights": "agent_rl_weights",
    "counted": "agent_rl_counted",
    "prompt_shares": "agent_rl_prompt_shares",
}
"""Fields of a `Batch` that the loss reads, and their names in verl."""
WHOLE = "agent_rl_whole"
"""int64 `[B, 2]`: counted tokens and sequences of the whole batch, the same in every row."""


def loss_function(config: AlgorithmConfig) -> Any:
    """Return what `set_loss_fn` of verl's workers takes."""
    return partial(algorithm_loss, algorithm=Algorithm(config))


def algorithm_loss(
    model_output: dict[str, Tensor], data: TensorDict, dp_group: object = None, *, algorithm: Algorithm
) -> tuple[Tensor, dict[str, Any]]:
    """Return a micro-batch's share of the loss and its metrics.

    FSDP averages gradients over data-parallel ranks, while the shares of all ranks add up to the loss of the batch:
    hence the factor `dp_size`.
    """
    logprobs = no_padding_2_padding(model_output["log_probs"], data)
    entropy = model_output.get("entropy")
    entropy = torch.zeros_like(logprobs) if entropy is None else no_padding_2_padding(entropy, data)
    dp_size = int(data["dp_size"])
    known = set(data.keys())
    padded = data.select(*known.intersection(SENT.values()), WHOLE).to_padded_tensor()
    tokens, sequences = padded[WHOLE][0].tolist()
    terms = algorithm.loss(logprobs, entropy, batch_of(padded, logprobs), Denominators(tokens, sequences))
    metrics = {
        f"agent_rl/{name}": Metric(value=value / tokens, aggregation=AggregationType.SUM)
        for name, value in terms.sums.items()
    }
    metrics["agent_rl/loss"] = Metric(value=float(terms.loss.detach()), aggregation=AggregationType.SUM)
    return terms.loss * dp_size, metrics


def batch_of(padded: TensorDict, like: Tensor) -> Batch:
    """Build the batch that the loss reads from verl's padded responses, `[B, T]`; what it doesn't read stays 0."""
    known = set(padded.keys())
    sent = {ours: padded[theirs].to(like.device) for ours, theirs in SENT.items() if theirs in known}
    nothing = torch.zeros_like(like, dtype=torch.float32)
    unread: dict[str, Any] = {f.name: nothing for f in fields(Batch)} | {"routed_experts": None, "old_experts": None}
    flags = {name: sent[name].bool() for name in ("loss_mask", "counted")}
    return Batch(**{**unread, "reference_logprobs": sent["old_logprobs"], **sent, **flags})
