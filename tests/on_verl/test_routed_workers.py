"""The workers of verl's trainers in a run that replays routes."""

from __future__ import annotations

from pathlib import Path

import pytest
from engines import tiny
from verl.trainer.ppo.utils import Role
from verl.workers.engine import EngineRegistry
from verl.workers.engine_workers import ActorRolloutRefWorker, TrainingWorker

from agent_rl.algorithms import Algorithm
from agent_rl.backends.verl.config.config_check import compose_verl
from agent_rl.backends.verl.config.settings import VerlConfig
from agent_rl.backends.verl.driver.trainer import TRAINERS
from agent_rl.backends.verl.worker.engine import (
    ROUTED,
    RoutedDetachedWorker,
    RoutedEngine,
    RoutedTrainingWorker,
    RoutedWorker,
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
    assert workers(moe, "sync") == {Role.ActorRollout: ActorRolloutRefWorker}
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
