"""What every row's loss reads: computed from the episodes of a batch, and laid out by verl's rows."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor
from verl.utils.metric import Metric, reduce_metrics
from verl.utils.py_functional import rename_dict

from agent_rl.algorithms import Algorithm, Rows, ScoredRows, WeightedRows
from agent_rl.algorithms.components import computed
from agent_rl.algorithms.config import AlgorithmConfig
from agent_rl.algorithms.objectives.value import critic_metrics
from agent_rl.backends.group_sampling import episodes_of
from agent_rl.backends.verl.driver.received import ReceivedBatch, own_rows
from agent_rl.backends.verl.worker.loss import SENT, WANTED, WHOLE
from agent_rl.backends.verl.worker.routes import EQUAL, SHARED
from agent_rl.backends.verl.worker.rows import check_row
from agent_rl.core.display import plural
from agent_rl.core.episode import Episode, group_episodes
from agent_rl.moe.agreement import RouteAgreement
from agent_rl.runs.token_records import Learned
from agent_rl.store.token_records import TokenRecord

SAMPLES = "train/samples"
"""The metric that counts the rows with a gradient."""


Positions = Sequence[tuple[int, slice] | None]
"""For each of verl's rows: our row, and where its response is in our flat arrays; None if there is nothing to train."""


@dataclass(frozen=True, slots=True)
class SentBatch:
    """A batch ready for its losses or `prepare`, and its part that is sent to verl."""

    batch: WeightedRows
    """Every row, in our order."""
    wanted: Tensor
    """bool `[B]`: the rows that have a gradient."""
    kept: Tensor
    """bool `[E]`: the episodes that are trained on."""
    positions: Positions
    lengths: Sequence[int]
    """Of the responses, by verl's row."""
    sent: TensorDict
    """What every row's loss reads, by verl's row."""
    metrics: dict[str, float]
    mini_batches: list[list[int]]
    """The rows of verl's of each mini-batch in which some row has a gradient, in the order of their updates."""

    def by_token(self, responses: Sequence[Tensor], rows: Sequence[int]) -> Tensor:
        """Move values from the responses of some rows of verl's to the same tokens of ours, `[N]`."""
        positions = [self.positions[row] for row in rows]
        return from_verl_rows(positions, responses, self.batch.rows.rollout_logprobs)

    def rows_with_gradient(self, rows: Sequence[int]) -> list[int]:
        """Return those of our rows that have a gradient, among some of verl's."""
        ours = (position[0] for row in rows if (position := self.positions[row]) is not None)
        return sorted(row for row in ours if self.wanted[row])

    def old_kl(self, theta: Tensor, rows: Sequence[int]) -> float:
        """Return KL(old, theta) over the sampled tokens of some of our rows, by k3, in nats per token.

        `theta` is by token, `[N]`. It is what the loss of an update on these rows reports as `old_kl`.
        """
        places = self.batch.rows.places(torch.tensor(rows))
        sampled = places[self.batch.rows.loss_mask[places]]
        moved = (theta - self.batch.scored.old_logprobs)[sampled].double()
        return float((moved.expm1() - moved).mean())

    def records(self, received: ReceivedBatch, step: int, config: AlgorithmConfig) -> list[TokenRecord]:
        """Return what to store of the batch that it was computed from."""
        episodes = episodes_of(group_episodes(received.episodes))
        return Learned(self.batch, self.kept).records(episodes, step, config)


COMPUTED = {
    "old_logprobs": "old_log_probs",
    "reference_logprobs": "ref_log_prob",
    "sum_pi_squared": "sum_pi_squared",
    "values": "values",
}
"""Fields of `ScoredRows` that verl's engines compute, and their names in verl; all nested over responses."""


def compute_weights(
    algorithm: Algorithm,
    received: ReceivedBatch,
    data: TensorDict,
    version: int | None = None,
    mini_batches: Sequence[int] = (),
) -> SentBatch:
    """Compute what the loss reads for every row of verl's batch, and the metrics of the algorithm.

    Args:
        algorithm: what to compute.
        received: the batch's episodes.
        data: verl's `prompts`, `responses`, `response_mask`, what of `COMPUTED` the algorithm asks for, and how far
            routes agree where they are recorded; all nested.
        version: of the weights that are about to be trained, which tokens' ages are counted from.
        mini_batches: by verl's row, the number of the update that takes it; left out if each takes the whole batch.

    Raises:
        ConfigError: if the algorithm reads what verl did not compute.
        RuntimeError: if no episode sampled anything, or verl changed a token or a mask.
    """
    x = received.experience(algorithm)
    if not len(x.rows):
        raise RuntimeError(_nothing_sampled(received.episodes))
    prompts, responses = data["prompts"], data["responses"]
    lengths = list(zip(prompts.offsets().diff().tolist(), responses.offsets().diff().tolist(), strict=True))
    starts = x.rows.starts.tolist()
    positions = [
        None if row is None else (row, slice(starts[row] + prompt, starts[row] + prompt + response))
        for row, (prompt, response) in zip(own_rows(x, received), lengths, strict=True)
    ]
    _check_tokens(x.rows, received, positions, data)
    scored = _scored(x.rows, positions, data)
    if algorithm.needs_reference:  # here, not only in the workers' loss
        computed(scored.reference_logprobs, "reference_logprobs", f"algorithm={algorithm.config.name}")
    batch, _, wanted = algorithm.compute_weights_in_place_order(x, scored)
    numbers = list(mini_batches) or [0] * len(positions)
    batch, counts = _by_mini_batch(algorithm, batch, wanted, positions, numbers)
    responses_of = [n for _, n in lengths]
    metrics = algorithm.diagnose(x, scored, version)
    if batch.critic is not None:
        metrics |= critic_metrics(batch.critic.values, batch.critic.returns, batch.critic.valued)
    metrics |= {"rollout/kept": float(x.kept.double().mean()), SAMPLES: float(wanted.sum())}
    metrics["train/with_gradient"] = metrics[SAMPLES] / len(wanted)
    sent = _sent(batch, wanted, counts, positions, responses_of)
    learning = {n for n, position in zip(numbers, positions, strict=True) if position and wanted[position[0]]}
    parts = [[row for row, its in enumerate(numbers) if its == number] for number in sorted(learning)]
    return SentBatch(batch, wanted, x.kept, positions, responses_of, sent, metrics, parts)


def _check_tokens(rows: Rows, received: ReceivedBatch, positions: Positions, data: TensorDict) -> None:
    """Check that tokens and masks came back as the episodes hold them."""
    columns = (data["prompts"].unbind(), data["responses"].unbind(), data["response_mask"].unbind())
    for position, place, prompt, response, mask in zip(positions, received.places, *columns, strict=True):
        if position is not None and place is not None:
            row = received.episodes[place[0]], place[1]
            ids = rows.token_ids[rows.places(torch.tensor([position[0]]))].tolist()
            check_row(*row, "ids", ids, prompt.tolist() + response.tolist())
            check_row(*row, "mask", rows.loss_mask[position[1]].int().tolist(), mask.tolist())


def _scored(rows: Rows, positions: Positions, data: TensorDict) -> ScoredRows:
    """Collect what verl's engines computed of our rows."""
    known, found = set(data.keys()), dict[str, Tensor | None]()
    for ours, theirs in COMPUTED.items():
        values = data[theirs].unbind() if theirs in known else None
        found[ours] = None if values is None else from_verl_rows(positions, values, rows.rollout_logprobs)
    old = computed(found.pop("old_logprobs"), "old_logprobs", "compute_weights")
    agreement = _agreement(rows, positions, data) if EQUAL in known else None
    return ScoredRows(rows, old, **found, measured_agreement=agreement)


def _agreement(rows: Rows, positions: Positions, data: TensorDict) -> RouteAgreement:
    """Collect what verl's workers found comparing routes."""
    equal = from_verl_rows(positions, data[EQUAL].unbind(), rows.rollout_logprobs)
    of_layers = data[SHARED].unbind()
    sums = torch.zeros(len(rows), *of_layers[0].shape, dtype=torch.float64)
    for position, found in zip(positions, of_layers, strict=True):
        if position is not None:
            sums[position[0]] = found
    return RouteAgreement(torch.where(equal < 0, torch.nan, equal / sums.shape[-1]), *sums.unbind(1))


SHARES = ("prompt_shares", "sequence_tokens")
"""What an aggregation may read of all rows of an update."""


def _by_mini_batch(
    algorithm: Algorithm, batch: WeightedRows, wanted: Tensor, positions: Positions, numbers: Sequence[int]
) -> tuple[WeightedRows, Tensor]:
    """Count the rows of each mini-batch as if they were all.

    Returns:
        The rows, with what their aggregation reads of the mini-batch, and by row of verl's what losses and metrics are
        divided by (`WHOLE`), int64 `[rows, 4]`.
    """
    number_of = torch.tensor([-1] * len(batch))
    for position, number in zip(positions, numbers, strict=True):
        if position is not None:
            number_of[position[0]] = number
    sampled = torch.where(wanted, batch.rows.sum(batch.rows.loss_mask), 0)
    found = dict[int, list[int]]()
    of_rows = {name: torch.zeros(len(batch)) for name in SHARES if getattr(batch, name) is not None}
    for number in {*numbers}:
        rows = torch.nonzero(number_of == number)[:, 0]
        part = algorithm.shares(batch.select(rows))
        whole = part.denominators
        found[number] = [whole.tokens, whole.sequences, whole.valued, max(1, int(sampled[rows].sum()))]
        for name, shares in of_rows.items():
            shares[rows] = getattr(part, name)
    return replace(batch, **of_rows), torch.tensor([found[number] for number in numbers])  # type: ignore[arg-type]


def _sent(
    batch: WeightedRows, wanted: Tensor, counts: Tensor, positions: Positions, lengths: Sequence[int]
) -> TensorDict:
    """Lay out what the losses read, by verl's row."""
    arrays = {"advantages": batch.advantages, "weights": batch.weights, "counted": batch.counted.float()}
    arrays["returns"] = batch.advantages  # verl's metrics ask for some, as its own estimators give them
    if batch.critic is not None:
        arrays |= {"returns": batch.critic.returns, "valued": batch.critic.valued.float()}
    sent = {SENT[name]: to_verl_rows(positions, array, lengths) for name, array in arrays.items()}
    for name in SHARES:
        if (of_rows := getattr(batch, name)) is not None:
            sent[SENT[name]] = torch.tensor([0.0 if p is None else float(of_rows[p[0]]) for p in positions])
    sent[WANTED] = torch.tensor([p is not None and bool(wanted[p[0]]) for p in positions])
    sent[WHOLE] = counts
    return TensorDict(sent, batch_size=len(positions))


def prepare(
    algorithm: Algorithm, weighed: SentBatch, logprobs: Tensor, rows: Sequence[int]
) -> tuple[TensorDict, dict[str, float]]:
    """Prepare the rows of one update: replace their advantages and weights.

    Args:
        algorithm: what to compute.
        weighed: the batch.
        logprobs: of our rows under the weights that are about to be updated, `[N]`.
        rows: of verl's, that the update takes.

    Returns:
        What to send, by these rows, and what the objective reports.
    """
    whole, ours = weighed.batch, torch.tensor(weighed.rows_with_gradient(rows))
    places, positions = whole.rows.places(ours), [weighed.positions[row] for row in rows]
    part, metrics = algorithm.prepare(logprobs[places], whole.select(ours))
    sent, lengths = {}, [weighed.lengths[row] for row in rows]
    for name in ("advantages", "weights"):
        array = torch.zeros_like(getattr(whole, name))
        array[places] = getattr(part, name)
        sent[SENT[name]] = to_verl_rows(positions, array, lengths)
    if part.sequences is not None:
        of_rows = torch.ones(len(whole) + 1, part.sequences.shape[1])  # of others nothing is read
        of_rows[ours] = part.sequences
        sent[SENT["sequences"]] = of_rows[[-1 if p is None else p[0] for p in positions]]
    return TensorDict(sent, batch_size=len(positions)), metrics


def _nothing_sampled(episodes: Sequence[Episode]) -> str:
    errors = [e.error for e in episodes if e.error is not None]
    first = f"the first broke in {errors[0].where}: {errors[0].type}: {errors[0].message}" if errors else "none broke"
    return f"none of {plural(len(episodes), 'episode')} of this step sampled a token: {first}"


def from_verl_rows(positions: Positions, responses: Sequence[Tensor], like: Tensor) -> Tensor:
    """Put verl's arrays over responses into an array over our tokens, `[N]`; 0 elsewhere."""
    out = torch.zeros_like(like)
    for position, values in zip(positions, responses, strict=True):
        if position is not None:
            out[position[1]] = values.to(out.dtype)
    return out


def to_verl_rows(positions: Positions, array: Tensor, lengths: Sequence[int]) -> Tensor:
    """Cut the responses of verl's rows out of an array over our rows; zeros where there is nothing to train on."""
    parts = [
        array.new_zeros(length) if position is None else array[position[1]]
        for position, length in zip(positions, lengths, strict=True)
    ]
    return torch.nested.as_nested_tensor(parts, layout=torch.jagged)


def reported(outputs: Iterable[TensorDict], worker: str) -> dict[str, float]:
    """Name and average what a worker's updates reported; largest and smallest values stay such."""
    found: dict[str, list[Any]] = {}
    for output in outputs:
        for name, its in rename_dict(output["metrics"], f"{worker}/").items():  # some have the prefix already
            found.setdefault(name, []).extend([its.aggregate()] if isinstance(its, Metric) else its)
    if mfu := found.pop(f"{worker}/mfu", None):
        found[f"perf/mfu/{worker}"] = mfu
    return dict(reduce_metrics(found))


def averaged(reports: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the mean over updates of what their preparation reported."""
    return {name: math.fsum(found[name] for found in reports) / len(reports) for name in (reports or [{}])[0]}


def score_metrics(episodes: Sequence[Episode]) -> dict[str, float]:
    """Return verl's `critic/score/...` and `critic/rewards/...` over the scored episodes; NaN if there are none."""
    scores = [e.reward for e in episodes if e.reward is not None] or [math.nan]
    stats = {"mean": math.fsum(scores) / len(scores), "max": max(scores), "min": min(scores)}
    return {f"critic/{name}/{stat}": value for name in ("score", "rewards") for stat, value in stats.items()}
