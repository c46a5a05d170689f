"""Exchange: verl's rows → our experience → what every row's loss reads, with each token checked on the way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from agent_rl.algorithms import Algorithm, Batch, Experience
from agent_rl.algorithms.objectives.pairwise import PreparedBatch
from agent_rl.algorithms.objectives.value import critic_metrics
from agent_rl.backends.verl.worker.loss import SENT, WHOLE
from agent_rl.backends.verl.worker.rows import check_row, episode_of
from agent_rl.core.episode import Episode, group_episodes

SAMPLES = "train/samples"
"""The metric that counts the rows with a gradient."""


@dataclass(frozen=True, slots=True)
class TrainingRows:
    """A batch as it came back from verl's queue: its episodes, and where each of verl's rows belongs."""

    episodes: list[Episode]
    places: list[tuple[int, int] | None]
    """By row: episode and number of its row; None for verl's padding."""
    greedy: Sequence[Episode] = ()
    """Episodes of the same groups that took the likeliest tokens, where the algorithm asked for them."""
    values: Mapping[str, Tensor] = field(default_factory=dict)
    """By episode id: what is to be expected from the state before each turn on, `[K]`, where it was asked for."""

    def experience(self, algorithm: Algorithm) -> Experience:
        """Return what an algorithm learns from."""
        x = algorithm.experience(group_episodes(self.episodes, self.greedy))
        if not self.values:
            return x
        return replace(x, state_values=torch.stack([self.values[e.id] for e in self.episodes]))


def receive(keys: Sequence[str], extra_fields: Sequence[dict[str, Any]], padding: Sequence[bool]) -> TrainingRows:
    """Read the episodes that the rows of a batch carry; keys are verl's `{prompt}_{session}_{number}`.

    Episodes are in the order of their ids, whatever order they ended in: of two that are equally good, the first counts
    as the better one.
    """
    carried = {
        key.rpartition("_")[0]: episode
        for key, fields, is_padding in zip(keys, extra_fields, padding, strict=True)
        if not is_padding and (episode := episode_of(fields)) is not None
    }
    sessions = sorted(carried, key=lambda session: carried[session].id)
    index = {session: number for number, session in enumerate(sessions)}
    places = [
        None if is_padding else (index[key.rpartition("_")[0]], int(key.rpartition("_")[2]))
        for key, is_padding in zip(keys, padding, strict=True)
    ]
    return TrainingRows([carried[session] for session in sessions], places)


Spots = Sequence[tuple[int, slice] | None]
"""For each of verl's rows: our row and the columns of its response; None where there is nothing to train on."""


@dataclass(frozen=True, slots=True)
class VerlWeightedRows:
    """A batch that is ready for its losses, or for `prepare`, and what goes back to verl of it."""

    batch: Batch
    """Every row, in our order."""
    wanted: Tensor
    """bool `[B]`: the rows that have a gradient."""
    spots: Spots
    lengths: Sequence[int]
    """Of the responses, by verl's row."""
    sent: TensorDict
    """What every row's loss reads, by verl's row."""
    metrics: dict[str, float]

    def by_token(self, responses: Sequence[Tensor]) -> Tensor:
        """Put what verl's rows have at the tokens of their responses where our rows have these, `[B, T]`."""
        return gathered(self.spots, responses, self.batch.old_logprobs)


COMPUTED = {
    "old_logprobs": "old_log_probs",
    "reference_logprobs": "ref_log_prob",
    "sum_pi_squared": "sum_pi_squared",
    "values": "values",
}
"""Fields of a `Batch` that verl's engines compute, and their names in verl; all nested over responses."""


def compute_weights(
    algorithm: Algorithm,
    received: TrainingRows,
    data: TensorDict,
    routes: Mapping[str, str] = MappingProxyType({}),
    version: int | None = None,
) -> VerlWeightedRows:
    """Compute what the loss reads for every row of verl's batch, and the metrics of the algorithm.

    Args:
        algorithm: what to compute.
        received: the batch's episodes.
        data: verl's `prompts`, `responses`, `response_mask` and what of `COMPUTED` the algorithm asks for; all nested.
        routes: the fields of it that hold routes, by what they are in our batch.
        version: of the weights that are about to be trained, which tokens' ages are counted from.

    Raises:
        RuntimeError: if no episode sampled anything, or verl changed a token or a mask, or lacks what it must compute.
    """
    x, known = received.experience(algorithm), set(data.keys())
    if lacking := _required(algorithm) - known:
        raise RuntimeError(f"algorithm={algorithm.config.name} reads {sorted(lacking)}, which verl did not compute")
    if x.batch is None:
        raise RuntimeError(_nothing_sampled(received.episodes))
    prompts, responses = data["prompts"], data["responses"]
    lengths = list(zip(prompts.offsets().diff().tolist(), responses.offsets().diff().tolist(), strict=True))
    spots = [
        None if row is None else (row, slice(prompt, prompt + response))
        for row, (prompt, response) in zip(own_rows(x, received), lengths, strict=True)
    ]
    columns = (prompts.unbind(), responses.unbind(), data["response_mask"].unbind())
    for spot, place, prompt, response, mask in zip(spots, received.places, *columns, strict=True):
        if spot is not None and place is not None:
            row = received.episodes[place[0]], place[1]
            ids = x.rows.token_ids[spot[0], : int(x.rows.lengths[spot[0]])].tolist()
            check_row(*row, "ids", ids, prompt.tolist() + response.tolist())
            check_row(*row, "mask", x.rows.loss_mask[spot].int().tolist(), mask.tolist())
    batch = x.rows
    for ours, theirs in COMPUTED.items():
        if theirs in known:
            batch = replace(batch, **{ours: gathered(spots, data[theirs].unbind(), batch.old_logprobs)})
    for ours, theirs in routes.items():
        batch = replace(batch, **{ours: gathered_routes(spots, data[theirs].unbind(), batch.token_ids)})
    x = replace(x, batch=batch)
    weighed, whole, wanted = algorithm.compute_weights_in_place_order(x)
    arrays = {SENT[name]: getattr(weighed, name) for name in ("advantages", "returns", "weights")}
    arrays |= {SENT[name]: getattr(weighed, name).float() for name in ("counted", "valued")}
    responses_of = [n for _, n in lengths]
    sent = {name: spread(spots, array, responses_of) for name, array in arrays.items()}
    shares = [0.0 if spot is None else float(weighed.prompt_shares[spot[0]]) for spot in spots]
    sent[SENT["prompt_shares"]] = torch.tensor(shares)
    sent[WHOLE] = torch.tensor([[whole.tokens, whole.sequences, whole.valued]] * len(spots))
    metrics = algorithm.diagnose(x, version) | critic_metrics(weighed.values, weighed.returns, weighed.valued)
    metrics |= {"rollout/kept": float(x.kept.double().mean()), SAMPLES: float(wanted.sum())}
    return VerlWeightedRows(weighed, wanted, spots, responses_of, TensorDict(sent, batch_size=len(spots)), metrics)


def prepare(algorithm: Algorithm, weighed: VerlWeightedRows, theta: Tensor) -> tuple[TensorDict, dict[str, float]]:
    """Prepare the rows for one update: replace their advantages and weights.

    Args:
        algorithm: what to compute.
        weighed: the batch.
        theta: log-probabilities of our rows under the weights that are about to be updated, `[B, T]`.

    Returns:
        What to send, by verl's row, and what the objective reports; nothing to report if no row has a gradient.
    """
    whole, rows = weighed.batch, torch.nonzero(weighed.wanted)[:, 0]
    part = whole.rows(rows.tolist())
    width = part.token_ids.shape[1]
    prepared = algorithm.prepare(theta[rows, :width], part) if len(part) else PreparedBatch(part, {})
    sent = {}
    for name in ("advantages", "weights"):
        array = torch.zeros_like(getattr(whole, name))
        array[rows, :width] = getattr(prepared.batch, name)
        sent[SENT[name]] = spread(weighed.spots, array, weighed.lengths)
    return TensorDict(sent, batch_size=len(weighed.spots)), prepared.metrics


def _required(algorithm: Algorithm) -> set[str]:
    """What verl's engines must have computed."""
    wanted = {
        "old_logprobs": True,
        "reference_logprobs": algorithm.needs_reference,
        "sum_pi_squared": algorithm.needs_distributions,
        "values": algorithm.config.critic.where != "none",
    }
    return {COMPUTED[name] for name, needed in wanted.items() if needed}


def _nothing_sampled(episodes: Sequence[Episode]) -> str:
    errors = [e.error for e in episodes if e.error is not None]
    first = f"the first broke in {errors[0].where}: {errors[0].type}: {errors[0].message}" if errors else "none broke"
    return f"none of the {len(episodes)} episodes of this step sampled a token: {first}"


def own_rows(x: Experience, received: TrainingRows) -> list[int | None]:
    """Find the rows of `x` that verl's rows came from; None for padding and for blank rows."""
    firsts: dict[int, int] = {}
    for row, episode in enumerate(x.rows.episode.tolist()):
        firsts.setdefault(episode, row)
    return [None if p is None or p[0] not in firsts else firsts[p[0]] + p[1] for p in received.places]


def gathered(spots: Spots, responses: Sequence[Tensor], like: Tensor) -> Tensor:
    """Put verl's arrays over responses into an array over our rows, `[B, T]`; 0 elsewhere."""
    out = torch.zeros_like(like)
    for spot, values in zip(spots, responses, strict=True):
        if spot is not None:
            out[spot] = values.to(out.dtype)
    return out


def gathered_routes(spots: Spots, rows: Sequence[Tensor], like: Tensor) -> Tensor:
    """Put the routes of verl's rows, of prompt and response, into `[B, T, layers, top_k]`; -1 elsewhere."""
    out = rows[0].new_full((*like.shape, *rows[0].shape[1:]), -1)
    for spot, routes in zip(spots, rows, strict=True):
        if spot is not None:
            out[spot[0], : len(routes)] = routes
    return out


def spread(spots: Spots, array: Tensor, lengths: Sequence[int]) -> Tensor:
    """Cut the responses of verl's rows out of an array over our rows; zeros where there is nothing to train on."""
    parts = [
        array.new_zeros(length) if spot is None else array[spot] for spot, length in zip(spots, lengths, strict=True)
    ]
    return torch.nested.as_nested_tensor(parts, layout=torch.jagged)
