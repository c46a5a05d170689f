"""The losses of verl's workers, on a micro-batch of an update's rows."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor
from verl.utils.metric import AggregationType, Metric
from verl.workers.utils.padding import no_padding_2_padding

from agent_rl.algorithms import Algorithm, Denominators
from agent_rl.algorithms.batch import CriticTargets, LossInputs
from agent_rl.algorithms.config import AlgorithmConfig
from agent_rl.algorithms.loss import EXTREMES
from agent_rl.gym.registry import load_all_once

SENT = {
    "loss_mask": "response_mask",
    "old_logprobs": "old_log_probs",
    "rollout_logprobs": "rollout_log_probs",
    "reference_logprobs": "ref_log_prob",
    "advantages": "advantages",
    "weights": "agent_rl_weights",
    "counted": "agent_rl_counted",
    "prompt_shares": "agent_rl_prompt_shares",
    "sequence_tokens": "agent_rl_sequence_tokens",
    "sequences": "agent_rl_sequences",
    "values": "values",
    "returns": "returns",
    "valued": "agent_rl_valued",
}
"""What the losses read, `LossInputs` and `CriticTargets`, and their names in verl."""
WHOLE = "agent_rl_whole"
"""int64 `[B, 4]`: the `Denominators` of the rows that an update takes, and the sampled tokens of those that have a
gradient, over which metrics are means; the same in each row."""
WANTED = "agent_rl_wanted"
"""bool `[B]`: whether the row has a gradient."""


def loss_function(config: AlgorithmConfig, imports: Sequence[str] = ()) -> Any:
    """Return what `set_loss_fn` of verl's actor workers takes.

    Args:
        config: of the algorithm, which is built in the worker.
        imports: the user's files, loaded there before.
    """
    return partial(algorithm_loss, settings=config.model_dump_json(), imports=tuple(imports))


def value_loss_function(config: AlgorithmConfig, imports: Sequence[str] = ()) -> Any:
    """Return what `set_loss_fn` of verl's critic workers takes; see `loss_function`."""
    return partial(critic_loss, settings=config.model_dump_json(), imports=tuple(imports))


@functools.cache
def _algorithm(settings: str, imports: tuple[str, ...]) -> Algorithm:
    load_all_once(imports)
    return Algorithm(AlgorithmConfig.model_validate_json(settings))


def algorithm_loss(
    model_output: dict[str, Tensor],
    data: TensorDict,
    dp_group: object = None,
    *,
    settings: str,
    imports: tuple[str, ...] = (),
) -> tuple[Tensor, dict[str, Any]]:
    """Return a micro-batch's share of the loss and its metrics.

    FSDP averages gradients over data-parallel ranks, and verl metrics, while the shares of all ranks add up to those of
    the batch: hence the factor `dp_size` of both.

    Raises:
        ConfigError: if the algorithm reads what verl did not compute, such as the reference's log-probabilities.
        RuntimeError: if verl left out the entropies that the loss needs.
    """
    algorithm = _algorithm(settings, imports)
    logprobs = no_padding_2_padding(model_output["log_probs"], data)
    found = model_output.get("entropy")
    if algorithm.config.entropy and found is None:
        raise RuntimeError(f"algorithm.entropy={algorithm.config.entropy}, and verl's engine computed no entropies")
    entropy = torch.zeros_like(logprobs) if found is None else no_padding_2_padding(found, data)
    columns, whole, sampled = received(data, logprobs.device)
    terms = algorithm.loss(logprobs, entropy, loss_inputs(columns), whole)
    sums = {name: value for name, value in terms.sums.items() if name != "entropy" or found is not None}
    ranks = int(data["dp_size"])
    metrics = {f"agent_rl/{n}": _share(ranks * x / sampled) for n, x in sums.items() if n not in EXTREMES}
    metrics |= {f"agent_rl/{n}": Metric(value=sums[n], aggregation=of.__name__) for n, of in EXTREMES.items()}
    metrics["agent_rl/loss"] = _share(ranks * float(terms.loss.detach()))
    return terms.loss * ranks, metrics


def critic_loss(
    model_output: dict[str, Tensor],
    data: TensorDict,
    dp_group: object = None,
    *,
    settings: str,
    imports: tuple[str, ...] = (),
) -> tuple[Tensor, dict[str, Any]]:
    """Return a micro-batch's share of the value loss and its metrics; `dp_size` as in `algorithm_loss`."""
    values = no_padding_2_padding(model_output["values"], data)
    columns, whole, _ = received(data, values.device)
    targets = CriticTargets(columns["values"], columns["returns"], columns["valued"].bool())
    terms = _algorithm(settings, imports).value_loss(values, targets, whole)
    ranks = int(data["dp_size"])
    metrics = {f"critic/{name}": _share(ranks * value / whole.valued) for name, value in terms.sums.items()}
    return terms.loss * ranks, metrics


def received(data: TensorDict, device: torch.device) -> tuple[dict[str, Tensor], Denominators, int]:
    """Read a micro-batch's rows, padded to `[B, T]`, by our names, and what the update divides losses and metrics by.

    Rows without a gradient have nothing sampled here: they are no part of any loss or metric, as on other backends.
    """
    padded = data.select(*set(data.keys()).intersection(SENT.values()), WANTED, WHOLE).to_padded_tensor()
    known = set(padded.keys())
    columns = {ours: padded[theirs].to(device) for ours, theirs in SENT.items() if theirs in known}
    columns["loss_mask"] = columns["loss_mask"].bool() & padded[WANTED].to(device)[:, None]
    *whole, sampled = padded[WHOLE][0].tolist()
    return columns, Denominators(*whole), sampled


def loss_inputs(columns: dict[str, Tensor]) -> LossInputs:
    """Return what the policy's loss reads."""
    return LossInputs(
        loss_mask=columns["loss_mask"],
        rollout_logprobs=columns["rollout_logprobs"],
        old_logprobs=columns["old_logprobs"],
        reference_logprobs=columns.get("reference_logprobs"),
        advantages=columns["advantages"],
        weights=columns["weights"],
        counted=columns["counted"].bool(),
        prompt_shares=columns.get("prompt_shares"),
        sequence_tokens=columns.get("sequence_tokens"),
        sequences=columns.get("sequences"),
    )


def _share(value: float) -> Metric:
    return Metric(value=value, aggregation=AggregationType.SUM)
