"""verl's full config of a run: composed, and checked for what verl finds out late or never.

Every key that a user sets must be one that a run reads (`config_keys.readable_keys`), under the settings that make verl
read it, with a value that it takes; verl's own dataclasses and the sizes that must fit come after.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path

from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from agent_rl.backends.verl.config.config_keys import domain_of, idle_without, readable_keys
from agent_rl.backends.verl.config.domains import misfit
from agent_rl.backends.verl.config.settings import VerlConfig, verl_settings
from agent_rl.backends.verl.worker.routes import STRATEGY, VERL_REPLAY_STRATEGIES, captured_routes
from agent_rl.errors import ConfigError, did_you_mean

_ACTOR, _ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
_FSDP = f"{_ACTOR}.fsdp_config"
_POOLS = (
    f"{_ROLLOUT}.nnodes={{nnodes}} is for async.mode=separate, where rollout has devices of its own, and the mode is "
    "{mode}: set async.mode=separate, or take a hardware= without such nodes"
)
_NO_POOL = (
    "async.mode=separate samples on devices of its own, and there are none: set verl.{key}.nnodes and "
    "verl.{key}.n_gpus_per_node, or take hardware=nodes_2x8x80gb_async"
)
_NAIVE = (
    f"{_ROLLOUT}.checkpoint_engine.backend=naive can't send weights to other devices, as async.mode=separate must: "
    "set it to nccl"
)


def compose_verl(config: VerlConfig, folder: Path) -> DictConfig:
    """Return verl's full config for a run in a folder, resolved and checked.

    Raises:
        ConfigError: with everything that is wrong, by key, if anything is.
    """
    from hydra import compose, initialize_config_module

    strategy = config.verl.get(STRATEGY)
    with initialize_config_module("verl.trainer.config", version_base=None):
        composed = compose("ppo_trainer", [f"model_engine={strategy}"] if strategy in VERL_REPLAY_STRATEGIES else [])
    known = _keys(composed)
    ours = verl_settings(config, folder)
    for key in config.verl:
        if domain_of(key) is None:
            raise ConfigError(_unread(key, known | set(ours)))
    for key, value in ours.items():
        if not any(theirs.startswith(f"{key}.") for theirs in config.verl):  # which take the place of a reference
            OmegaConf.update(composed, key, value, force_add=True)
    for key, value in config.verl.items():
        OmegaConf.update(composed, key, value, force_add=True)
    check(composed, config.verl)
    routes = captured_routes(config.algorithm.routing, composed)
    OmegaConf.update(composed, "data.agent_rl.routes", None if routes is None else asdict(routes), force_add=True)
    full: DictConfig = composed
    return full


def _unread(key: str, known: set[str]) -> str:
    """Return that a key is verl's but read by no run, or no key at all."""
    near = did_you_mean(key, readable_keys())
    if key in known:
        return f"verl.{key} would change nothing: no run of agent_rl's on verl reads it.{near}"
    return f"verl has no setting '{key}'.{near}"


def _keys(config: DictConfig, prefix: str = "") -> set[str]:
    """Return every key of a config and of the sections in it."""
    found = {f"{prefix}{key!s}" for key in config}
    for key in config:
        node = config._get_node(key)
        if isinstance(node, DictConfig) and not node._is_none() and not node._is_missing():
            found |= _keys(node, f"{prefix}{key!s}.")
    return found


def check(verl: DictConfig, given: Iterable[str]) -> None:
    """Resolve verl's full config and check all that can be checked without a GPU.

    Args:
        verl: its full config.
        given: the keys of it that the user set.

    Raises:
        ConfigError: with everything that is wrong, by key, if anything is.
    """
    with _by_key():
        OmegaConf.resolve(verl)
    if problems := list(_given(verl, given)):
        raise ConfigError("; ".join(problems))
    with _by_key():
        _by_verl(verl)
    if problems := [*_pools(verl), *_sizes(verl), *_model(verl)]:
        raise ConfigError("; ".join(problems))


@contextlib.contextmanager
def _by_key() -> Iterator[None]:
    """Turn what verl and OmegaConf raise about a config into a ConfigError."""
    try:
        yield
    except (OmegaConfBaseException, HydraException, AssertionError, ValueError, TypeError, RuntimeError) as error:
        cause = error.__cause__ or error
        where = getattr(error, "full_key", None) or ""
        raise ConfigError(f"verl refuses the config: {f'{where}: ' if where else ''}{cause}") from error


# What the user set, key by key


def _given(verl: DictConfig, given: Iterable[str]) -> Iterator[str]:
    def value_of(key: str) -> object:
        found = OmegaConf.select(verl, key)
        return OmegaConf.to_container(found) if OmegaConf.is_config(found) else found

    for key in given:
        value, domain = value_of(key), domain_of(key) or ""
        if why := idle_without(key, value_of):
            yield f"verl.{key} would change nothing: {why}"
        elif why := misfit(key, value, domain, value_of):
            yield f"verl.{key}={value!r}: {why}"


# What must fit together


def _by_verl(verl: DictConfig) -> None:
    """Let verl's own dataclasses and checks say what they refuse."""
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.utils.config import omega_conf_to_dataclass, validate_config

    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():  # it says that it is content
        warnings.simplefilter("ignore")
        validate_config(config=verl, use_reference_policy=need_reference_policy(verl), use_critic=need_critic(verl))
    omega_conf_to_dataclass(verl.actor_rollout_ref.rollout)
    actor = verl.actor_rollout_ref.actor
    if "fsdp_config" in actor:
        omega_conf_to_dataclass(OmegaConf.merge(actor.fsdp_config, {"strategy": actor.strategy}))


def _pools(verl: DictConfig) -> Iterator[str]:
    rollout, mode = verl.actor_rollout_ref.rollout, verl.trainer.v1.trainer_mode
    if mode != "separate_async" and rollout.nnodes:
        yield _POOLS.format(nnodes=rollout.nnodes, mode={"colocate_async": "one_step_off"}.get(mode, mode))
    if mode == "separate_async":
        if not (rollout.nnodes and rollout.n_gpus_per_node):
            yield _NO_POOL.format(key=_ROLLOUT)
        if rollout.checkpoint_engine.backend == "naive":
            yield _NAIVE


def _sizes(verl: DictConfig) -> Iterator[str]:
    """Say which numbers don't fit each other."""
    rollout = verl.actor_rollout_ref.rollout
    training = verl.trainer.nnodes * verl.trainer.n_gpus_per_node
    pools = {"trainer.nnodes * trainer.n_gpus_per_node": training}
    if verl.trainer.v1.trainer_mode == "separate_async":
        pools = {f"{_ROLLOUT}.nnodes * n_gpus_per_node": rollout.nnodes * rollout.n_gpus_per_node}
    replica = rollout.tensor_model_parallel_size * rollout.data_parallel_size
    for name, gpus in pools.items():
        if replica < 1 or gpus % replica:
            yield (
                f"a replica of vLLM takes {_ROLLOUT}.tensor_model_parallel_size={rollout.tensor_model_parallel_size} "
                f"times data_parallel_size={rollout.data_parallel_size} GPUs, which does not divide {name}={gpus}"
            )
    if not rollout.enable_chunked_prefill and rollout.max_num_batched_tokens < rollout.max_model_len:
        yield (
            f"{_ROLLOUT}.max_num_batched_tokens={rollout.max_num_batched_tokens} is less than rollout.context="
            f"{rollout.max_model_len}, which vLLM must then take at once: set enable_chunked_prefill=true, or raise it"
        )
    parts = OmegaConf.select(verl, f"{_FSDP}.ulysses_sequence_parallel_size") or 1
    if training % parts:
        yield f"{_FSDP}.ulysses_sequence_parallel_size={parts} does not divide the {training} GPUs of training"
    shard = OmegaConf.select(verl, f"{_FSDP}.fsdp_size") or -1
    if shard > 0 and training % shard:
        yield f"{_FSDP}.fsdp_size={shard} does not divide the {training} GPUs of training"
    yield from _mini_batches(verl, training // parts)
    yield from _micro_batches(verl, training, parts)
    backend = rollout.checkpoint_engine.backend
    for name in OmegaConf.select(verl, f"{_ROLLOUT}.checkpoint_engine.engine_kwargs") or {}:
        if name != backend:
            yield f"{_ROLLOUT}.checkpoint_engine.engine_kwargs.{name} is not for backend={backend}, which is chosen"


def _mini_batches(verl: DictConfig, ranks: int) -> Iterator[str]:
    """Say why the batch can't be cut into an update's mini-batches, if it is to be cut."""
    size, groups = verl.actor_rollout_ref.actor.ppo_mini_batch_size, verl.data.train_batch_size
    if size == groups:
        return
    given = f"{_ACTOR}.ppo_mini_batch_size={size}"
    if groups % size:
        yield f"{given} does not divide rollout.groups={groups}: it is the number of groups that an update takes"
    elif size * verl.actor_rollout_ref.rollout.n % ranks:
        yield f"{given} times rollout.samples={verl.actor_rollout_ref.rollout.n} can't be dealt to {ranks} ranks evenly"
    if verl.trainer.v1.trainer_mode == "separate_async":
        yield (
            f"{given}: with async.mode=separate verl sends new weights after every mini-batch: leave it out, and set "
            "rollout.groups to what an update should take"
        )


def _micro_batches(verl: DictConfig, training: int, parts: int) -> Iterator[str]:
    """Say which micro-batches can't hold an episode, or don't divide a GPU's share of the batch."""
    actor, rollout = verl.actor_rollout_ref.actor, verl.actor_rollout_ref.rollout
    tokens = {
        f"{_ACTOR}.ppo_max_token_len_per_gpu": actor.use_dynamic_bsz and actor.ppo_max_token_len_per_gpu,
        f"{_ROLLOUT}.log_prob_max_token_len_per_gpu": rollout.log_prob_use_dynamic_bsz
        and rollout.log_prob_max_token_len_per_gpu,
    }
    for key, most in tokens.items():
        if most and most * parts < rollout.max_model_len:
            yield f"{key}={most} can't hold one episode of rollout.context={rollout.max_model_len} tokens: raise it"
    if actor.strategy not in ("fsdp", "fsdp2") or training % parts:
        return
    batch, ranks = verl.data.train_batch_size * rollout.n, training // parts
    share = math.lcm(batch, ranks) // ranks  # verl pads the batch to this
    of_update = share * actor.ppo_mini_batch_size // verl.data.train_batch_size
    rows = {
        f"{_ACTOR}.ppo_micro_batch_size_per_gpu": (
            not actor.use_dynamic_bsz and actor.ppo_micro_batch_size_per_gpu,
            of_update,
        ),
        f"{_ROLLOUT}.log_prob_micro_batch_size_per_gpu": (
            not rollout.log_prob_use_dynamic_bsz and rollout.log_prob_micro_batch_size_per_gpu,
            share,
        ),
    }
    for key, (size, taken) in rows.items():
        if size and taken % size:
            yield (
                f"{key}={size} does not divide the {taken} episodes of a GPU (rollout.groups * rollout.samples={batch} "
                f"over {ranks} ranks and {share // max(1, taken)} mini-batch(es)): set one that does, or "
                "use_dynamic_bsz=true"
            )


def _model(verl: DictConfig) -> Iterator[str]:
    """Say what the model can't do, if its folder is here."""
    file = Path(verl.actor_rollout_ref.model.path) / "config.json"
    if not file.exists():
        return
    model, rollout = json.loads(file.read_text(encoding="utf-8")), verl.actor_rollout_ref.rollout
    heads, positions = model.get("num_attention_heads"), model.get("max_position_embeddings")
    if heads and heads % rollout.tensor_model_parallel_size:
        yield (
            f"{_ROLLOUT}.tensor_model_parallel_size={rollout.tensor_model_parallel_size} does not divide the model's "
            f"{heads} attention heads"
        )
    if positions and positions < rollout.max_model_len:
        yield f"rollout.context={rollout.max_model_len} is more than the model's {positions} positions"
