"""The losses that verl's workers call: policy's and critic's on a micro-batch, with the whole batch's denominators."""

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
    "values": "values",
    "returns": "returns",
    "valued": "agent_rl_valued",
}
"""Fields of a `Batch` that the losses read, and their names in verl."""
WHOLE = "agent_rl_whole"
"""int64 `[B, 3]`: the `Denominators` of the whole batch, the same in every row."""


def loss_function(config: AlgorithmConfig) -> Any:
    """Return what `set_loss_fn` of verl's actor workers takes."""
    return partial(algorithm_loss, algorithm=Algorithm(config))


def value_loss_function(config: AlgorithmConfig) -> Any:
    """Return what `set_loss_fn` of verl's critic workers takes."""
    return partial(critic_loss, algorithm=Algorithm(config))


def algorithm_loss(
    model_output: dict[str, Tensor], data: TensorDict, dp_group: object = None, *, algorithm: Algorithm
) -> tuple[Tensor, dict[str, Any]]:
    """Return a micro-batch's share of the loss and its metrics.

    FSDP averages gradients over data-parallel ranks, while the shares of all ranks add up to the loss of the batch:
    hence the factor `dp_size`.

    Raises:
        RuntimeError: if verl left out what the algorithm reads, the entropies or the reference's log-probabilities.
    """
    logprobs = no_padding_2_padding(model_output["log_probs"], data)
    found = model_output.get("entropy")
    batch, whole = micro_batch(data, logprobs)
    if algorithm.config.entropy and found is None:
        raise RuntimeError(f"algorithm.entropy={algorithm.config.entropy}, and verl's engine computed no entropies")
    if algorithm.needs_reference and SENT["reference_logprobs"] not in data.keys():  # noqa: SIM118 - a TensorDict
        raise RuntimeError(f"algorithm={algorithm.config.name} compares with a reference, and verl scored no row by it")
    entropy = torch.zeros_like(logprobs) if found is None else no_padding_2_padding(found, data)
    terms = algorithm.loss(logprobs, entropy, batch, whole)
    sums = {name: value for name, value in terms.sums.items() if name != "entropy" or found is not None}
    metrics = {f"agent_rl/{name}": _share(value / whole.tokens) for name, value in sums.items()}
    metrics["agent_rl/loss"] = _share(float(terms.loss.detach()))
    return terms.loss * int(data["dp_size"]), metrics


def critic_loss(
    model_output: dict[str, Tensor], data: TensorDict, dp_group: object = None, *, algorithm: Algorithm
) -> tuple[Tensor, dict[str, Any]]:
    """Return a micro-batch's share of the value loss and its metrics; `dp_size` as in `algorithm_loss`."""
    values = no_padding_2_padding(model_output["values"], data)
    batch, whole = micro_batch(data, values)
    terms = algorithm.value_loss(values, batch, whole)
    metrics = {f"critic/{name}": _share(value / whole.valued) for name, value in terms.sums.items()}
    return terms.loss * int(data["dp_size"]), metrics


def micro_batch(data: TensorDict, like: Tensor) -> tuple[Batch, Denominators]:
    """Read the rows of a micro-batch, and what the whole batch counts."""
    padded = data.select(*set(data.keys()).intersection(SENT.values()), WHOLE).to_padded_tensor()
    return batch_of(padded, like), Denominators(*padded[WHOLE][0].tolist())


def _share(value: float) -> Metric:
    return Metric(value=value, aggregation=AggregationType.SUM)


def batch_of(padded: TensorDict, like: Tensor) -> Batch:
    """Build the batch that the loss reads from verl's padded responses, `[B, T]`; what it doesn't read stays 0."""
    known = set(padded.keys())
    sent = {ours: padded[theirs].to(like.device) for ours, theirs in SENT.items() if theirs in known}
    nothing = torch.zeros_like(like, dtype=torch.float32)
    unread: dict[str, Any] = {f.name: nothing for f in fields(Batch)} | {"routed_experts": None, "old_experts": None}
    flags = {name: sent[name].bool() for name in ("loss_mask", "counted", "valued")}
    return Batch(**{**unread, "reference_logprobs": sent["old_logprobs"], **sent, **flags})
