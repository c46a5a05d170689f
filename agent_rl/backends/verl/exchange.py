"""Exchange: verl's rows → our experience → what every row's loss reads, with each token checked on the way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from agent_rl.algorithms import Algorithm, Experience
from agent_rl.backends.verl.loss import SENT, WHOLE
from agent_rl.backends.verl.rows import check_ids, episode_of
from agent_rl.types import Episode

SAMPLES = "train/samples"
"""The metric that counts the rows with a gradient."""


@dataclass(frozen=True, slots=True)
class Received:
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
        x = algorithm.experience(self.episodes, self.greedy)
        if not self.values:
            return x
        return replace(x, state_values=torch.stack([self.values[e.id] for e in self.episodes]))


def receive(keys: Sequence[str], extra_fields: Sequence[dict[str, Any]], padding: Sequence[bool]) -> Received:
    """Read the episodes that the rows of a batch carry; keys are verl's `{prompt}_{session}_{number}`."""
    episodes: list[Episode] = []
    index: dict[str, int] = {}
    for key, fields, is_padding in zip(keys, extra_fields, padding, strict=True):
        episode = None if is_padding else episode_of(fields)
        if episode is not None:
            index[key.rpartition("_")[0]] = len(episodes)
            episodes.append(episode)
    places = [
        None if is_padding else (index[key.rpartition("_")[0]], int(key.rpartition("_")[2]))
        for key, is_padding in zip(keys, padding, strict=True)
    ]
    return Received(episodes, places)


def weigh(algorithm: Algorithm, received: Received, data: TensorDict) -> tuple[TensorDict, dict[str, float]]:
    """Compute what the loss reads for every row of verl's batch, and the metrics of the algorithm.

    Args:
        algorithm: what to compute.
        received: the batch's episodes.
        data: verl's `prompts`, `responses`, `old_log_probs` and, if there is a reference, `ref_log_prob`, all nested.

    Raises:
        RuntimeError: if no episode sampled anything, or verl changed a token.
    """
    x, known = received.experience(algorithm), set(data.keys())
    if x.batch is None:
        raise RuntimeError(_nothing_sampled(received.episodes))
    prompts, responses = data["prompts"], data["responses"]
    lengths = list(zip(prompts.offsets().diff().tolist(), responses.offsets().diff().tolist(), strict=True))
    spots = [
        None if row is None else (row, slice(prompt, prompt + response))
        for row, (prompt, response) in zip(own_rows(x, received), lengths, strict=True)
    ]
    for spot, place, *halves in zip(spots, received.places, prompts.unbind(), responses.unbind(), strict=True):
        if spot is not None and place is not None:
            ids = x.rows.token_ids[spot[0], : int(x.rows.lengths[spot[0]])].tolist()
            check_ids(received.episodes[place[0]], place[1], ids, [i for half in halves for i in half.tolist()])
    batch = x.rows
    for ours, theirs in (("old_logprobs", "old_log_probs"), ("reference_logprobs", "ref_log_prob")):
        if theirs in known:
            batch = replace(batch, **{ours: gathered(spots, data[theirs].unbind(), batch.old_logprobs)})
    x = replace(x, batch=batch)
    weighed, whole, wanted = algorithm.weigh_rows(x)
    arrays = {"advantages": weighed.advantages, "returns": weighed.returns}
    arrays |= {SENT["weights"]: weighed.weights, SENT["counted"]: weighed.counted.float()}
    sent = {name: spread(spots, array, [n for _, n in lengths]) for name, array in arrays.items()}
    shares = [0.0 if spot is None else float(weighed.prompt_shares[spot[0]]) for spot in spots]
    sent[SENT["prompt_shares"]] = torch.tensor(shares)
    sent[WHOLE] = torch.tensor([[whole.tokens, whole.sequences]] * len(spots))
    metrics = algorithm.diagnose(x) | {"rollout/kept": float(x.kept.double().mean())}
    metrics[SAMPLES] = float(wanted.sum())
    return TensorDict(sent, batch_size=len(spots)), metrics


def _nothing_sampled(episodes: Sequence[Episode]) -> str:
    errors = [e.error for e in episodes if e.error is not None]
    first = f"the first broke in {errors[0].where}: {errors[0].type}: {errors[0].message}" if errors else "none broke"
    return f"none of the {len(episodes)} episodes of this step sampled a token: {first}"


Spots = Sequence[tuple[int, slice] | None]
"""For each of verl's rows: our row and the columns of its response; None where there is nothing to train on."""


def own_rows(x: Experience, received: Received) -> list[int | None]:
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


def spread(spots: Spots, array: Tensor, lengths: Sequence[int]) -> Tensor:
    """Cut the responses of verl's rows out of an array over our rows; zeros where there is nothing to train on."""
    parts = [
        array.new_zeros(length) if spot is None else array[spot] for spot, length in zip(spots, lengths, strict=True)
    ]
    return torch.nested.as_nested_tensor(parts, layout=torch.jagged)
