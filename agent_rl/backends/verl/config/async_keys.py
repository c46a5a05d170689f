"""What `async:` is in verl's config, and which of its values verl can't keep."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import JsonValue

from agent_rl.runs.config import AsyncConfig

_ROLLOUT = "actor_rollout_ref.rollout"
_ENGINE = f"{_ROLLOUT}.checkpoint_engine.backend"

MODES = {"sync": "sync", "one_step_off": "colocate_async", "separate": "separate_async"}
"""What verl calls each `async.mode`."""


def asynchronous(config: AsyncConfig) -> dict[str, JsonValue]:
    """Return the settings of verl that follow from `async:`.

    verl evicts a group, or waits for it, by its age: the step `s` that wants to train on it less the step `p` that its
    task was handed out in. Weights are sent after every update, so that step `p` samples with version `p - 1` or newer,
    and step `s` is about to update version `s - 1`: a token's staleness is at most the group's age, `s - p`. verl
    evicts where `s - p + 1` exceeds its threshold; `max_staleness + 1` is the one that bounds staleness as promised.

    `wait` keeps that bound only as long as no more groups can reach the threshold at once than a step takes. They are
    what was handed out before the step and is left: as much as was sampled ahead, which therefore is one batch.
    """
    settings: dict[str, JsonValue] = {
        "trainer.v1.trainer_mode": MODES[config.mode],
        "trainer.v1.sampler.max_off_policy_threshold": config.max_staleness + 1,
        "trainer.v1.sampler.max_off_policy_strategy": config.on_stale,
        "trainer.v1.colocate_async.num_warmup_batches": 1,
        "trainer.v1.separate_async.num_warmup_batches": 1,
        "trainer.v1.separate_async.parameter_sync_step": 1,
    }
    if config.mode == "separate":
        settings |= {
            "actor_rollout_ref.hybrid_engine": False,
            f"{_ROLLOUT}.nnodes": "${trainer.nnodes}",
            f"{_ROLLOUT}.n_gpus_per_node": "${trainer.n_gpus_per_node}",
            _ENGINE: "nccl",
        }
    return settings


def impossible(config: AsyncConfig, verl: Mapping[str, JsonValue]) -> str | None:
    """Return why a run can't be asynchronous in that way; None if it can.

    Args:
        config: what is asked for.
        verl: the user's own settings of verl, by full key.
    """
    if config.mode == "one_step_off" and config.max_staleness > 1:
        return (
            f"async.max_staleness={config.max_staleness} is more than async.mode=one_step_off can have: it samples one "
            "step ahead, so set max_staleness=1, or mode=separate"
        )
    if config.mode != "separate":
        return None
    if verl.get(_ENGINE) == "naive":
        return f"verl.{_ENGINE}=naive can't send weights to other devices, which async.mode=separate must: set nccl"
    for key in (f"{_ROLLOUT}.nnodes", f"{_ROLLOUT}.n_gpus_per_node"):
        if verl.get(key) == 0:
            return f"verl.{key}=0 leaves async.mode=separate no devices to sample on: set at least 1"
    return None
