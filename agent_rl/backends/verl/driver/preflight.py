"""Preflight: checks of Ray's cluster and of every node, within seconds, before a run.

verl waits without end for CPUs that Ray does not have, and fails after minutes where GPUs or files are missing.
"""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from agent_rl.algorithms.config import AlgorithmConfig
from agent_rl.backends.group_sampling import check_environment
from agent_rl.backends.verl.config.settings import VerlConfig
from agent_rl.backends.verl.driver.checkpoints import bytes_of_parts, parameters_of
from agent_rl.backends.verl.driver.secret_settings import without_secrets
from agent_rl.engines.model_files import is_hub_id, load_options
from agent_rl.errors import CheckpointError, ConfigError

TRAINING_CPUS, ROLLOUT_CPUS = 3, 2
"""What verl 0.9.1 reserves beside a GPU: `ResourcePoolManager.max_colocate_count`, and a standalone replica's."""
UNITS = "transfer_queue.backend.SimpleStorage.num_data_storage_units"
UNKNOWN_CHECKPOINT = 10**9
"""The bytes of a checkpoint of a model that is not here."""
PATIENCE_S = 60.0
"""How long a node may take to answer."""


@dataclass(frozen=True, slots=True)
class Node:
    """A machine of Ray's cluster, with what is free on it."""

    id: str
    address: str
    cpus: float
    gpus: float


@dataclass(frozen=True, slots=True)
class Pool:
    """GPUs that verl reserves: `gpus` on each of `nodes` machines, each with `cpus` CPUs."""

    keys: str
    nodes: int
    gpus: int
    cpus: int


def pools(verl: DictConfig) -> list[Pool]:
    """Return the pools of verl's full config, in verl's order."""
    trainer, rollout = verl.trainer, verl.actor_rollout_ref.rollout
    found = [Pool("trainer", trainer.nnodes, trainer.n_gpus_per_node, TRAINING_CPUS)]
    if trainer.v1.trainer_mode == "separate_async":
        replica = min(rollout.n_gpus_per_node, rollout.tensor_model_parallel_size * rollout.data_parallel_size)
        parts = rollout.nnodes * rollout.n_gpus_per_node // replica
        found.append(Pool("actor_rollout_ref.rollout", parts, replica, ROLLOUT_CPUS))
    return found


def missing_resources(verl: DictConfig, nodes: Sequence[Node], *, joined: bool) -> list[str]:
    """Return what the cluster lacks.

    Args:
        verl: the full config of a run.
        nodes: of the cluster.
        joined: whether Ray was running before; otherwise the run starts it.
    """
    found = []
    cpus, gpus = {node.id: node.cpus for node in nodes}, {node.id: node.gpus for node in nodes}
    for pool in pools(verl):
        for _ in range(pool.nodes):
            fitting = [id for id, free in gpus.items() if free >= pool.gpus]
            if not fitting:
                found.append(_too_few_gpus(pool, nodes))
                break
            chosen = max(fitting, key=lambda id: (-gpus[id], cpus[id]))
            gpus[chosen] -= pool.gpus
            cpus[chosen] -= pool.gpus * pool.cpus
    units = OmegaConf.select(verl, UNITS) if verl.transfer_queue.backend.storage_backend == "SimpleStorage" else 0
    workers = sum(pool.nodes * pool.gpus * pool.cpus for pool in pools(verl))
    needed, free = units + 2 + workers, sum(node.cpus for node in nodes)
    if min(cpus.values(), default=0) >= 0 and free >= needed:
        return found
    more = f"verl.ray_kwargs.ray_init.num_cpus={needed}" if not joined else f"`ray start --num-cpus={needed}`"
    return [
        *found,
        f"verl reserves {needed} of Ray's CPUs and {free:g} are free: {units + 1} for its TransferQueue, {workers} "
        f"beside the GPUs, 1 for the driver. Set verl.{UNITS}=1 (now {units}), or have Ray count more CPUs than there "
        f"are, as most of these processes wait: {more}",
    ]


def _too_few_gpus(pool: Pool, nodes: Sequence[Node]) -> str:
    has = ", ".join(f"{node.gpus:g} on {node.address}" for node in nodes)
    mode = "" if pool.keys == "trainer" else " beside those of training, as async.mode=separate samples on its own"
    return (
        f"verl.{pool.keys}.nnodes and n_gpus_per_node reserve {pool.gpus} GPUs on each of {pool.nodes} nodes{mode}, "
        f"and Ray has: {has}. Set these keys or hardware= to what there is, or join nodes with "
        "`ray start --address=HEAD:6379`"
    )


@dataclass(frozen=True, slots=True)
class Request:
    """What every node is asked to check."""

    config: VerlConfig
    marker: str
    """A file that the driver made in `runs_dir`."""
    modules: Mapping[str, str]
    """Modules that must be installed there, and what to do if one is not."""
    checkpoint_bytes: int


def missing_on_node(request: Request) -> list[str]:
    """Return the problems of this machine."""
    return list(_missing_here(request))


def _missing_here(request: Request) -> Iterator[str]:
    config, folder = request.config, Path(request.marker).parent
    shared = "put it on a file system that all nodes mount under the same path"
    if not Path(request.marker).exists():
        yield f"runs_dir={config.runs_dir}: {folder} is not the driver's: {shared}"
    elif (free := shutil.disk_usage(folder).free) < request.checkpoint_bytes:
        yield (
            f"runs_dir={config.runs_dir}: a checkpoint takes about {request.checkpoint_bytes / 1e9:.0f} GB, and "
            f"{free / 1e9:.1f} GB are free: set runs_dir to a larger disk"
        )
    if Path(config.start_from).is_absolute() and not (Path(config.start_from) / "config.json").exists():
        yield f"start_from={config.start_from} has no config.json: {shared}"
    if is_hub_id(config.start_from):
        try:
            load_options(config.start_from)
        except CheckpointError as error:
            yield str(error)
    for name, remedy in request.modules.items():
        if find_spec(name) is None:
            yield f"{name} is not installed: {remedy}"
    if absent := [file for file in config.imports if not Path(file).is_file()]:
        yield f"--import {' '.join(absent)}: no such file: {shared}"
        return
    try:
        check_environment(config)
    except Exception as error:  # whatever the user's file raises
        yield f"env={config.env_id} can't be made: {type(error).__name__}: {error}"


def required_modules(verl: DictConfig, algorithm: AlgorithmConfig) -> dict[str, str]:
    """Return the modules needed on every node, each with its remedy."""
    found = {"verl": "pip install -e '.[verl]'", "vllm": "pip install -e '.[verl]'"}
    model, attention = verl.actor_rollout_ref.model, "flash_attention_2"
    if verl.trainer.device == "cpu":
        return found
    chosen = (OmegaConf.select(model, "override_config") or {}).get("attn_implementation", attention)
    if algorithm.critic.where == "separate":
        found["flash_attn"] = "pip install flash-attn: verl loads every critic with it"
    elif chosen == attention:
        key = "verl.actor_rollout_ref.model"
        found["flash_attn"] = (
            f"pip install flash-attn, or set {key}.override_config.attn_implementation=sdpa and "
            f"{key}.use_remove_padding=false"
        )
    if (
        verl.trainer.v1.trainer_mode == "separate_async"
        and verl.actor_rollout_ref.rollout.checkpoint_engine.backend == "nccl"
    ):
        found["cupy"] = "pip install cupy-cuda12x: weights travel by NCCL with it"
    return found


def join_ray(verl: DictConfig) -> bool:
    """Start Ray or join its cluster as verl does; return whether it was running before.

    Raises:
        ConfigError: if there is none at the address, or Ray does not take the settings.
    """
    import ray
    from verl.trainer.constants_ppo import get_ppo_ray_runtime_env

    if ray.is_initialized():
        return True
    given: dict[str, Any] = dict(OmegaConf.to_container(verl.ray_kwargs.ray_init))  # type: ignore[arg-type]
    given["runtime_env"] = OmegaConf.to_container(
        OmegaConf.merge(get_ppo_ray_runtime_env(verl), given.get("runtime_env") or {})
    )
    try:
        context = ray.init(**given)
    except (ConnectionError, ValueError, RuntimeError, TypeError) as error:
        shown = without_secrets(given)
        raise ConfigError(f"Ray does not start with verl.ray_kwargs.ray_init={shown}: {error}") from error
    started = getattr(ray._private.worker._global_node, "head", False)
    return context is not None and not started


def cluster_nodes() -> list[Node]:
    """Return the nodes of the cluster that this process has joined."""
    import ray

    free = ray._private.state.available_resources_per_node()
    found = []
    for node in ray.nodes():
        if node["Alive"]:
            has = free.get(node["NodeID"], node["Resources"])
            found.append(
                Node(node["NodeID"], node["NodeManagerAddress"], has.get("CPU", 0), has.get("GPU", has.get("NPU", 0)))
            )
    return found


def ask_nodes(nodes: Sequence[Node], request: Request) -> list[str]:
    """Return what any node lacks, each with the node's address."""
    import ray
    from ray.exceptions import RayError
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    def remote(node: Node) -> Any:
        strategy = NodeAffinitySchedulingStrategy(node.id, soft=False)
        return ray.remote(num_cpus=0)(missing_on_node).options(scheduling_strategy=strategy).remote(request)

    answers = {node.address: remote(node) for node in nodes}
    answered, _ = ray.wait(list(answers.values()), num_returns=len(answers), timeout=PATIENCE_S)
    found = []
    for address, answer in answers.items():
        if answer not in answered:
            found.append(f"{address}: no answer within {PATIENCE_S:.0f} s: is it overloaded?")
            continue
        try:
            found += [f"{address}: {problem}" for problem in ray.get(answer)]
        except RayError as error:
            found.append(f"{address}: agent_rl can't run there: {str(error).strip().splitlines()[-1]}")
    return found


def preflight(config: VerlConfig, verl: DictConfig, say: Callable[[str], object] = lambda text: None) -> list[str]:
    """Return all that keeps the cluster from running this config; Ray is joined afterwards.

    Args:
        config: our settings.
        verl: verl's full config of them.
        say: prints what was found.

    Raises:
        ConfigError: if there is no cluster.
    """
    joined = join_ray(verl)
    nodes = cluster_nodes()
    for node in nodes:
        say(f"node {node.address}: {node.cpus:g} CPUs and {node.gpus:g} GPUs free")
    runs = Path(config.runs_dir).resolve()
    runs.mkdir(parents=True, exist_ok=True)
    marker = runs / f".preflight-{uuid.uuid4().hex}"
    marker.touch()
    try:
        modules = required_modules(verl, config.algorithm)
        parameters = parameters_of(Path(config.start_from))
        size = parameters * sum(bytes_of_parts(verl).values()) if parameters else UNKNOWN_CHECKPOINT
        request = Request(config, str(marker), modules, size)
        return [*missing_resources(verl, nodes, joined=joined), *ask_nodes(nodes, request)]
    finally:
        marker.unlink()
