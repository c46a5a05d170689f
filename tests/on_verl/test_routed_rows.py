"""Routes of an episode on their way through verl: as an agent loop sends them, and what of them reaches the driver."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from doubles import example_episode
from omegaconf import OmegaConf
from tensordict import TensorDict
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1 import trainer_base
from verl.trainer.ppo.v1.trainer_base import PPOTrainer

from agent_rl.algorithms import Algorithm
from agent_rl.algorithms.config import AlgorithmConfig
from agent_rl.backends.verl.driver import trainer as trainer_module
from agent_rl.backends.verl.driver.trainer import SyncTrainer
from agent_rl.backends.verl.worker.agent_loop import outputs_of, with_routes
from agent_rl.backends.verl.worker.routes import (
    EQUAL,
    OLD,
    RECORD,
    ROLLOUT,
    SHARED,
    RouteShape,
    compare_routes,
    route_fields,
)
from agent_rl.core.episode import Outcome
from on_verl.test_routed_engine import EPISODES
from on_verl.test_trainer import Queue, Setup, Workers

SHAPE = RouteShape(layers=2, top_k=2, experts=4)
FAILED = example_episode("e9", group_id="b", trajectories=(), outcome=Outcome.FAILED, rewards=())


def sent(strategy: str = "fsdp2") -> list[tuple[str, dict[str, object]]]:
    """The rows of all episodes as verl's queue gets them, the last one's blank."""
    return [
        (f"p_{i}_{n}", output.as_dict())
        for i, episode in enumerate([*EPISODES, FAILED])
        for n, output in enumerate(with_routes(outputs_of(episode), SHAPE, strategy))
    ]


def test_rows_send_routes_in_int8() -> None:
    rows = [fields for _, fields in sent()]
    for episode, fields in zip(EPISODES, rows, strict=False):
        routes = episode.trajectories[0].routed_experts
        assert fields[ROLLOUT].dtype == torch.int8 and np.array_equal(fields[ROLLOUT], routes)
        assert (routes[-1] == -1).all() and (routes[:-1] >= 0).all()
    blank = rows[-1]
    assert blank[ROLLOUT].dtype == torch.int8 and blank[ROLLOUT].shape == (2, 2, 2) and (blank[ROLLOUT] == -1).all()
    assert not any(name.startswith("route") and name != ROLLOUT for name in rows[0])


def test_rows_send_routes_in_int16_to_megatron() -> None:
    for (_, ours), (_, theirs) in zip(sent(), sent("megatron"), strict=True):
        assert theirs[ROLLOUT].dtype == torch.int16
        assert torch.equal(theirs[ROLLOUT], ours[ROLLOUT].clamp(min=0).short())


WIDE = RouteShape(layers=48, top_k=8, experts=128)
"""Of Qwen3-30B-A3B."""


class CountingQueue(Queue):
    """Counts the bytes of each field that the driver fetches."""

    def __init__(self, columns: TensorDict, keys: list[str]) -> None:
        super().__init__(columns, keys)
        self.fetched: Counter[str] = Counter()

    def kv_batch_get(self, keys: list[str], partition_id: str, select_fields: list[str]) -> TensorDict:
        found = super().kv_batch_get(keys, partition_id, select_fields)
        for name, column in found.items():
            if isinstance(column, torch.Tensor):
                self.fetched[name] += sum(row.nbytes for row in column.unbind())
        return found


class RoutedWorkers(Workers):
    """Also write what is asked of old's routes: half of the rollout's, and experts of their own."""

    def compute_log_prob(self, batch: KVBatchMeta) -> KVBatchMeta:
        rollout, masks = (self.queue.columns[name].unbind() for name in (ROLLOUT, "response_mask"))
        old = [torch.where(torch.rand(row.shape) < 0.5, row, 0).short() for row in rollout]
        found = {OLD: old, **compare_routes(rollout, old, masks)}
        for name in batch.extra_info[RECORD]:
            self.queue.columns[name] = torch.nested.as_nested_tensor(found[name], layout=torch.jagged)
        return super().compute_log_prob(batch)


@pytest.mark.parametrize("routing", [{}, {"replay": "R2"}, {"replay": "R3", "min_agreement": 0.5}])
def test_routes_do_not_pass_through_the_driver(
    routing: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = AlgorithmConfig.model_validate({"proximal": "recompute", "routing": routing})
    made = Setup(Algorithm(config), tmp_path, monkeypatch)
    lengths = [len(row) for row in made.queue.columns["input_ids"].unbind()]
    routes = [torch.randint(-1, 128, (length, WIDE.layers, WIDE.top_k), dtype=torch.int8) for length in lengths]
    queue = CountingQueue(
        made.queue.columns | {ROLLOUT: torch.nested.as_nested_tensor(routes, layout=torch.jagged)}, made.batch.keys
    )
    for where in (trainer_module, trainer_base):
        monkeypatch.setattr(where, "tq", queue)
    made.trainer.actor_rollout_wg = RoutedWorkers(queue)
    strategy = {"actor": {"strategy": "fsdp2"}, "rollout": {"enable_rollout_routing_replay": True}}
    made.trainer.routes = route_fields(config.routing, OmegaConf.create({"actor_rollout_ref": strategy}))
    made.step("_compute_old_log_prob", "_compute_advantage")
    assert 0 < made.metrics["routing/agreement"] < 1 and "routing/agreement_layer_47" in made.metrics
    # a byte a token of the responses, two numbers a layer and row: 4.6 MB for 512 rows of 8,192 tokens
    carried = {name: n for name, n in queue.fetched.items() if "route" in name or "expert" in name or "layers" in name}
    assert sum(carried.values()) <= sum(lengths) + len(lengths) * 2 * WIDE.layers * 8
    assert carried.keys() == {EQUAL, SHARED}


def test_padding_row_copies_the_shortest_row(monkeypatch: pytest.MonkeyPatch) -> None:
    first: list[str] = []
    monkeypatch.setattr(PPOTrainer, "_balance_batch", lambda self, batch, metrics: first.append(batch.keys[0]))
    monkeypatch.setattr(SyncTrainer, "_mini_batches", 1)
    trainer = SyncTrainer.__new__(SyncTrainer)
    for trainer.routes in ((), (ROLLOUT,)):
        trainer._balance_batch(KVBatchMeta(keys=["a", "b", "c"], tags=[{"seq_len": n} for n in (9, 30, 4)]), {})
    assert first == ["a", "c"]
