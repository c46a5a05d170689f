"""The workers of verl's trainers: their learning rate, and which of them replay routes."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from engines import tiny
from tensordict import TensorDict
from torch.optim.lr_scheduler import LRScheduler
from transformers import get_cosine_schedule_with_warmup
from verl.trainer.ppo.utils import Role
from verl.utils import tensordict_utils as tu
from verl.workers.engine import EngineRegistry
from verl.workers.engine_workers import ActorRolloutRefWorker, TrainingWorker

from agent_rl.algorithms import Algorithm
from agent_rl.backends.verl.config.config_check import compose_verl
from agent_rl.backends.verl.config.settings import VerlConfig
from agent_rl.backends.verl.driver.trainer import TRAINERS
from agent_rl.backends.verl.worker.engine import (
    ROUTED,
    STEP,
    DetachedPolicyWorker,
    PolicyWorker,
    RoutedDetachedWorker,
    RoutedEngine,
    RoutedTrainingWorker,
    RoutedWorker,
    SteppedTrainingWorker,
    set_schedule,
)
from agent_rl.backends.verl.worker.routes import route_fields

SMALL = {
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": 1,
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu": 1,
}


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("moe")
    tiny("qwen3_moe").config.save_pretrained(folder)
    return folder


def workers(moe: Path, mode: str, **algorithm: object) -> dict[Role, type]:
    """The classes that a trainer would start, by role."""
    reference = {"actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu": 1} if "kl" in algorithm else {}
    settings = {"env": "calculator-v0", "start_from": str(moe), "verl": SMALL | reference, "algorithm": algorithm}
    run = VerlConfig.model_validate(settings | {"rollout": {"context": 128}})
    trainer = TRAINERS[mode].__new__(TRAINERS[mode])
    trainer.config = compose_verl(run, Path("run"))
    trainer._enable_hybrid_replicas = mode != "separate_async"
    trainer.algorithm = Algorithm(run.algorithm)
    trainer.routes = route_fields(run.algorithm.routing, trainer.config)
    trainer._init_resource_pool_mgr()
    found = trainer.role_worker_mapping
    return {role: worker.__ray_metadata__.modified_class.__mro__[1] for role, worker in found.items()}


KL = {"where": "loss", "kind": "k3"}


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_routed_workers_run_only_with_routing(moe: Path) -> None:
    assert workers(moe, "sync") == {Role.ActorRollout: PolicyWorker}
    assert workers(moe, "separate_async") == {Role.Actor: DetachedPolicyWorker}
    for routing in ({"replay": "R2"}, {"replay": "R3"}, {"min_agreement": 0.5}):
        assert workers(moe, "sync", routing=routing, proximal="recompute") == {Role.ActorRollout: RoutedWorker}
    assert workers(moe, "colocate_async", routing={"replay": "R3"}, kl=KL) == {Role.ActorRolloutRef: RoutedWorker}


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_reference_worker_is_not_routed(moe: Path) -> None:
    found = workers(moe, "separate_async", routing={"replay": "R3"}, kl=KL)
    assert found[Role.Actor] is RoutedDetachedWorker
    assert not issubclass(found[Role.RefPolicy], RoutedDetachedWorker)


@pytest.mark.parametrize("worker", [RoutedWorker, RoutedDetachedWorker])
def test_routed_workers_give_the_actor_routed_engine(worker: type[ActorRolloutRefWorker]) -> None:
    assert worker.actor_worker_cls is RoutedTrainingWorker and worker.ref_worker_cls is TrainingWorker
    for strategy in ("fsdp", "fsdp2"):
        assert EngineRegistry.get_engine_cls(ROUTED, strategy) is RoutedEngine


class Megatron:
    """The used part of Megatron's scheduler."""

    def __init__(self) -> None:
        self.num_steps = 0

    def step(self, increment: int) -> None:
        self.num_steps += increment


def test_learning_rate_is_that_of_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    def made() -> tuple[torch.optim.SGD, LRScheduler]:
        optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
        return optimizer, get_cosine_schedule_with_warmup(optimizer, 2, 10)

    expected = []
    optimizer, schedule = made()
    for _ in range(10):
        expected.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    optimizer, schedule = made()
    seen = []
    monkeypatch.setattr(TrainingWorker, "train_batch", lambda self, data: seen.append(optimizer.param_groups[0]["lr"]))
    worker, data = SteppedTrainingWorker.__new__(SteppedTrainingWorker), TensorDict({}, 1)
    worker.engine = SimpleNamespace(lr_scheduler=schedule)
    steps = [1, 2, 2, 2, 5, 10, 10]  # several updates of step 2, none of 3, 4 and 6 to 9
    for step in steps:
        tu.assign_non_tensor(data, **{STEP: step})
        worker.train_batch(data)
        optimizer.step()
        schedule.step()  # verl's, after each call
    assert seen == pytest.approx([expected[step - 1] for step in steps])
    set_schedule(other := Megatron(), 4)
    set_schedule(other, 3)
    assert other.num_steps == 3
