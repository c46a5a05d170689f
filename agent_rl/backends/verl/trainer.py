"""The driver's side: verl's trainers, with advantages, corrections and denominators from `agent_rl.algorithms`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import transfer_queue as tq
from tensordict import TensorDict
from torch import Tensor
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1.trainer_base import PPOTrainer
from verl.trainer.ppo.v1.trainer_separate_async import PPOTrainerSeparateAsync
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
from verl.utils.metric import reduce_metrics
from verl.utils.py_functional import rename_dict

from agent_rl.algorithms import Algorithm, Experience
from agent_rl.algorithms.config import AlgorithmConfig
from agent_rl.backends.verl.loss import SENT, WHOLE, loss_function
from agent_rl.backends.verl.rows import check_ids, episode_of
from agent_rl.store.episodes import EpisodeWriter
from agent_rl.types import Episode


@dataclass(frozen=True, slots=True)
class Received:
    """A batch as it came back from verl's queue: its episodes, and where each of verl's rows belongs."""

    episodes: list[Episode]
    places: list[tuple[int, int] | None]
    """By row: episode and number of its row; None for verl's padding."""


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
    """
    x, known = algorithm.experience(received.episodes), set(data.keys())
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
    weighed, whole, _ = algorithm.weigh_rows(x)
    arrays = {"advantages": weighed.advantages, "returns": weighed.returns}
    arrays |= {SENT["weights"]: weighed.weights, SENT["counted"]: weighed.counted.float()}
    sent = {name: spread(spots, array, [n for _, n in lengths]) for name, array in arrays.items()}
    sent[WHOLE] = torch.tensor([[whole.tokens, whole.sequences]] * len(spots))
    metrics = algorithm.diagnose(x) | {"rollout/kept": float(x.kept.double().mean())}
    return TensorDict(sent, batch_size=len(spots)), metrics


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


class AlgorithmTrainer(PPOTrainer):
    """What is changed in verl's trainers; mixed in front of each of them."""

    algorithm: Algorithm
    store: EpisodeWriter

    def _setup(self) -> None:
        super()._setup()
        settings = self.config.data.agent_rl
        self.algorithm = Algorithm(AlgorithmConfig.model_validate_json(settings.algorithm))
        self.store = EpisodeWriter(settings.episodes)
        self.actor_rollout_wg.set_loss_fn(loss_function(self.algorithm.config))

    def _compute_advantage(self, batch: KVBatchMeta, metrics: dict[str, float]) -> KVBatchMeta:
        """Weigh the batch, and send every row what the loss reads."""
        names = ["prompts", "responses", "response_mask", "old_log_probs", "ref_log_prob", "extra_fields"]
        data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=names)
        padding = [bool(tag.get("is_padding", False)) for tag in batch.tags]
        received = receive(batch.keys, data.pop("extra_fields").tolist(), padding)
        for episode in received.episodes:
            self.store.write(episode)
        self.store.flush()
        sent, found = weigh(self.algorithm, received, data)
        metrics |= found
        tq.kv_batch_put(keys=batch.keys, partition_id=batch.partition_id, fields=sent)
        return batch

    def _update_actor(self, batch: KVBatchMeta, metrics: dict[str, float]) -> KVBatchMeta:
        """Take `ppo_epochs` updates on the whole batch: its denominators are those of the whole."""
        actor = self.config.actor_rollout_ref.actor
        batch.extra_info.update(
            calculate_entropy=self.algorithm.config.entropy > 0,
            distillation_use_topk=False,
            distillation_only=False,
            global_batch_size=len(batch),
            mini_batch_size=len(batch),
            epochs=actor.ppo_epochs,
            seed=actor.data_loader_seed,
            dataloader_kwargs={"shuffle": False},
            temperature=self.config.actor_rollout_ref.rollout.temperature,
        )
        output = rename_dict(self.actor_rollout_wg.update_actor(batch)["metrics"], "actor/")
        output["perf/mfu/actor"] = output.pop("actor/mfu")
        metrics |= reduce_metrics(output)
        return batch


class SyncTrainer(AlgorithmTrainer, PPOTrainerSync):
    """Rollout and training take turns on the same devices."""


class SeparateAsyncTrainer(AlgorithmTrainer, PPOTrainerSeparateAsync):
    """Rollout and training run at the same time, on devices of their own."""


TRAINERS: dict[str, type[PPOTrainer]] = {"sync": SyncTrainer, "separate_async": SeparateAsyncTrainer}
