"""`check_env`: everything that can be checked of an environment without a model."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Mapping

from pydantic import Field, JsonValue

from agent_rl.checks.bench import Bench
from agent_rl.checks.episodes import (
    check_determinism,
    check_end,
    check_isolation,
    check_observations,
    check_snapshots,
)
from agent_rl.checks.floors import (
    check_demonstrations,
    check_floors,
    check_scored,
    check_termination,
    floor_table,
    play_floors,
)
from agent_rl.checks.groups import check_group_rewards
from agent_rl.checks.gymnasium import check_gymnasium
from agent_rl.checks.leaks import check_leaks
from agent_rl.checks.report import CheckReport
from agent_rl.checks.spins import ended_spins
from agent_rl.checks.tasks import check_splits, check_unchanged, task_keys
from agent_rl.checks.tools import check_fuzz, check_schemas
from agent_rl.config import Count, Section
from agent_rl.core.messages import JSON
from agent_rl.gym.registry import EnvSpec
from agent_rl.worker_threads import outside_loop

CHECKS = (
    check_splits,
    check_floors,
    check_demonstrations,
    check_scored,
    check_termination,
    check_observations,
    check_determinism,
    check_isolation,
    check_end,
    check_snapshots,
    check_schemas,
    check_fuzz,
    check_group_rewards,
    check_leaks,
    check_gymnasium,
)
"""In this order, after the floor table was played."""


class CheckSettings(Section):
    """What `agent-rl check` takes."""

    env: str = "calculator-v0"
    """The id of a registered environment."""
    env_args: dict[str, JsonValue] = Field(default_factory=dict)
    """Passed to the environment's constructor."""
    imports: list[str] = Field(default_factory=list)
    """Files that register environments; --import adds one."""
    n: Count = 16
    """Tasks of each split."""
    seed: int = Field(0, ge=0)
    """Of the episodes."""
    seconds: float = Field(60.0, gt=0)
    """How long one episode may take."""


def check_env(spec: EnvSpec, *, n: int, seed: int, seconds: float, env_args: Mapping[str, JSON]) -> CheckReport:
    """Play an environment with its oracle and with policies without skill, and report what is wrong with it.

    Arguments as of `agent_rl.check`.

    Raises:
        ConfigError: if the class does not take these arguments, or the tasks can't be read.
    """
    spec.check_arguments(env_args)
    bench = Bench(spec, env_args, n, seed, seconds)
    return outside_loop(lambda: asyncio.run(_check(bench)))


async def _check(bench: Bench) -> CheckReport:
    with bench.hearing(), ended_spins(bench.seconds, bench.end):
        before, started = task_keys(bench), time.process_time()
        await play_floors(bench)
        spent = time.process_time() - started
        turns = sum(episode.turns for episodes in bench.played.values() for episode in episodes)
        for check in CHECKS:
            if not bench.is_spinning:
                await check(bench)
        check_unchanged(bench, before)
    return CheckReport(
        bench.spec.id,
        bench.n,
        bench.seed,
        tuple(bench.findings.values()),
        floor_table(bench),
        1e6 * spent / turns if turns else math.nan,
        bench.skipped,
    )
