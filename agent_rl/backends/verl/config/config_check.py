"""Checks of verl's full config that verl makes late or never: types, its own dataclasses, sizes that must fit."""

from __future__ import annotations

import contextlib
import io
import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_type_hints

from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import ConfigDict, JsonValue, TypeAdapter, ValidationError

from agent_rl.errors import ConfigError, did_you_mean

_ACTOR, _ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
_ULYSSES = f"{_ACTOR}.fsdp_config.ulysses_sequence_parallel_size"
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


def belongs(verl: DictConfig, key: str) -> bool:
    """Whether one of verl's dataclasses has a place for a key that its config files don't list."""
    cls, name = _dataclass(verl, key)
    return cls is not None and name in get_type_hints(cls)


def mistyped(verl: DictConfig, key: str, value: JsonValue) -> str | None:
    """Say why verl has no use for a value at a key, or None if it is of the right type.

    Args:
        verl: its full config, before the value is put in.
        key: in full, without a `+`.
        value: what to put there; an interpolation passes.
    """
    if isinstance(value, str) and "${" in value:
        return None
    default = OmegaConf.select(verl, key)
    cls, name = _dataclass(verl, key)
    hints = get_type_hints(cls) if cls is not None else {}
    if name in hints:
        return _unlike(key, value, hints[name]) if key.endswith(f".{name}") else None
    if cls is not None and default is None and name not in OmegaConf.select(verl, key.rpartition(f".{name}")[0]):
        return f"{key}: verl's {cls.__name__} has no '{name}'.{did_you_mean(name, hints)}"
    return _unlike(key, value, type(default)) if isinstance(default, (bool, int, float, str)) else None


def _dataclass(verl: DictConfig, key: str) -> tuple[type | None, str]:
    """Return the innermost of verl's dataclasses that a key is in, and the name of its field there."""
    from hydra.utils import get_class

    parts = key.split(".")
    for at in range(len(parts) - 1, 0, -1):
        section = OmegaConf.select(verl, ".".join(parts[:at]))
        if isinstance(section, DictConfig) and isinstance(section.get("_target_"), str):
            return get_class(section._target_), parts[at]
    return None, parts[-1]


def _unlike(key: str, value: JsonValue, wanted: Any) -> str | None:
    try:
        TypeAdapter(wanted, config=ConfigDict(arbitrary_types_allowed=True)).validate_python(value)
    except ValidationError as error:
        return f"{key}={value!r}: {error.errors()[0]['msg'][0].lower()}{error.errors()[0]['msg'][1:]}"
    return None


def check(verl: DictConfig) -> None:
    """Resolve verl's full config and check all that can be checked without a GPU.

    Raises:
        ConfigError: with everything that is wrong, by key, if anything is.
    """
    try:
        OmegaConf.resolve(verl)
        _by_verl(verl)
    except (OmegaConfBaseException, HydraException, AssertionError, ValueError, TypeError, RuntimeError) as error:
        cause = error.__cause__ or error
        where = getattr(error, "full_key", None) or ""
        raise ConfigError(f"verl refuses the config: {f'{where}: ' if where else ''}{cause}") from error
    if problems := [*_pools(verl), *_sizes(verl), *_model(verl)]:
        raise ConfigError("; ".join(problems))


def _by_verl(verl: DictConfig) -> None:
    """Let verl's own dataclasses and checks say what they refuse."""
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.utils.config import omega_conf_to_dataclass, validate_config
    from verl.utils.torch_dtypes import PrecisionType

    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():  # it says that it is content
        warnings.simplefilter("ignore")
        validate_config(config=verl, use_reference_policy=need_reference_policy(verl), use_critic=need_critic(verl))
    omega_conf_to_dataclass(verl.actor_rollout_ref.rollout)
    actor = verl.actor_rollout_ref.actor
    if "fsdp_config" in actor:
        omega_conf_to_dataclass(OmegaConf.merge(actor.fsdp_config, {"strategy": actor.strategy}))
        for name in ("dtype", "model_dtype"):
            if actor.fsdp_config[name] is not None:
                PrecisionType.to_dtype(actor.fsdp_config[name])


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
    actor, rollout = verl.actor_rollout_ref.actor, verl.actor_rollout_ref.rollout
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
    if not 0 < rollout.gpu_memory_utilization <= 1:
        yield f"{_ROLLOUT}.gpu_memory_utilization={rollout.gpu_memory_utilization} is a share: in (0, 1]"
    if not rollout.enable_chunked_prefill and rollout.max_num_batched_tokens < rollout.max_model_len:
        yield (
            f"{_ROLLOUT}.max_num_batched_tokens={rollout.max_num_batched_tokens} is less than rollout.context="
            f"{rollout.max_model_len}, which vLLM must then take at once: set enable_chunked_prefill=true, or raise it"
        )
    parts = OmegaConf.select(verl, _ULYSSES) or 1
    if training % parts:
        yield f"{_ULYSSES}={parts} does not divide the {training} GPUs of training"
    tokens = {
        f"{_ACTOR}.ppo_max_token_len_per_gpu": actor.use_dynamic_bsz and actor.ppo_max_token_len_per_gpu,
        f"{_ROLLOUT}.log_prob_max_token_len_per_gpu": rollout.log_prob_use_dynamic_bsz
        and rollout.log_prob_max_token_len_per_gpu,
    }
    for key, most in tokens.items():
        if most and most * parts < rollout.max_model_len:
            yield f"{key}={most} can't hold one episode of rollout.context={rollout.max_model_len} tokens: raise it"


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
