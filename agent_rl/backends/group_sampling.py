"""What GiGPO and VinePPO ask of an environment, and the episodes that value states; for every backend."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import cast

import numpy as np

from agent_rl.algorithms import Algorithm, Experience
from agent_rl.algorithms.state_values import plan
from agent_rl.concurrency import maybe_await
from agent_rl.core.episode import Episode
from agent_rl.errors import ConfigError
from agent_rl.gym.env import Env
from agent_rl.gym.registry import EnvSpec
from agent_rl.rollout import Job, continuation
from agent_rl.runs.config import RunConfig


def require_hooks(spec: EnvSpec, algorithm: Algorithm) -> None:
    """Refuse an environment that lacks what the algorithm asks of it.

    Raises:
        ConfigError: naming what to define.
    """
    name = algorithm.config.advantage["name"]
    if algorithm.needs_states and spec.cls.state_hash is Env.state_hash:
        raise ConfigError(
            f"advantage={name} compares turns that were taken in the same state, but {spec.id} does not say which that "
            f"is: define {spec.cls.__name__}.state_hash(self), or choose another algorithm"
        )
    if algorithm.needs_values and not spec.cls.has_snapshots():
        raise ConfigError(
            f"advantage={name} runs episodes on from their turns, but {spec.id} has no snapshots: list the attributes "
            f"that change after reset in {spec.cls.__name__}.snapshot_attributes, or choose another algorithm"
        )


def check_environment(config: RunConfig) -> EnvSpec:
    """Check that a run can use its environment, of which an instance is made; return it.

    Raises:
        UnknownEnvError: if nothing is registered under its id.
        ConfigError: naming the file, argument or split that is wrong, what the constructor raises, or what to define.
    """
    env = config.load_env()
    require_hooks(env, Algorithm(config.algorithm))
    try:
        instance = env.make(**config.env_args)
    except ConfigError:
        raise
    except Exception as error:  # of the user's own class
        raise ConfigError(f"env={env.id}: its constructor raises {type(error).__name__}: {error}") from error
    asyncio.run(maybe_await(instance.close()))
    return env


def value_states(
    x: Experience,
    episodes: Sequence[Episode],
    spec: EnvSpec,
    algorithm: Algorithm,
    rng: np.random.Generator,
    run: Callable[[list[Job]], list[Episode]],
) -> tuple[Experience, dict[str, float]]:
    """Value the states of a step by running on from them.

    Args:
        x: what `episodes` were read as; the states of those that it keeps are valued.
        episodes: run with `Job(snapshots=True)`.
        spec: their environment.
        algorithm: with `needs_values`.
        rng: draws the continuations' seeds, and the states to value if the budget is not enough for all.
        run: runs jobs with the policy that sampled the episodes, and returns theirs in order; they are neither to be
            stored nor to be trained on.

    Returns:
        `x` with `state_values`, and the metrics of `StateValuePlan.values`.
    """
    vine = plan(episodes, x.kept.tolist(), algorithm.config.vine, rng)
    continued = run([continuation(spec, episodes[s.episode], s.turn, s.seed) for s in vine.starts])
    gamma = cast(float, algorithm.config.advantage["gamma"])  # a knob of state-values
    values, metrics = vine.values(continued, (len(episodes), x.states.shape[1]), gamma=gamma)
    return replace(x, state_values=values), metrics
