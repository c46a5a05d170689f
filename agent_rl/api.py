"""The two calls that most people need: `run` some episodes, `evaluate` a policy."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Mapping
from typing import TypeVar

from agent_rl.core.episode import Episode, Origin
from agent_rl.core.messages import JSON
from agent_rl.gym.budget import Budget
from agent_rl.gym.registry import spec
from agent_rl.policy import AnyPolicy, demonstrator, oracle
from agent_rl.rollout import Evaluation, group_jobs, run_jobs, summarise

T = TypeVar("T")


def run(
    env: str,
    policy: AnyPolicy | str = "oracle",
    *,
    n: int = 1,
    samples: int = 1,
    split: str = "train",
    seed: int = 0,
    concurrency: int = 64,
    budget: Budget | None = None,
    env_args: Mapping[str, JSON] | None = None,
) -> list[Episode]:
    """Run episodes of an environment and return them, in the order of their tasks.

    Args:
        env: a registered id.
        policy: any `Policy`, or "oracle" or "demonstrator" for the environment's own scripts.
        n: how many tasks, the first of the split.
        samples: episodes per task; those of a task form a group.
        split: which tasks.
        seed: of the episodes' random numbers.
        concurrency: how many episodes may be under way at a time.
        budget: instead of the environment's own.
        env_args: passed to the environment's constructor.
    """
    return _run(env, policy, n, samples, Origin("rollout", split), seed, concurrency, budget, env_args)


def evaluate(
    env: str,
    policy: AnyPolicy | str = "oracle",
    *,
    n: int = 256,
    split: str = "eval",
    seed: int = 0,
    env_args: Mapping[str, JSON] | None = None,
) -> Evaluation:
    """Run the first `n` tasks of a split once each and summarise them; arguments as of `run`."""
    return summarise(_run(env, policy, n, 1, Origin("eval", split), seed, 64, None, env_args))


def _run(
    env: str,
    policy: AnyPolicy | str,
    n: int,
    samples: int,
    origin: Origin,
    seed: int,
    concurrency: int,
    budget: Budget | None,
    env_args: Mapping[str, JSON] | None,
) -> list[Episode]:
    if isinstance(policy, str):
        policy = _named(policy)
    env_spec = spec(env)
    size = env_spec.tasks.size(origin.split)
    tasks = [env_spec.tasks.get(origin.split, i) for i in range(n if size is None else min(n, size))]
    jobs = [
        job
        for task in tasks
        for job in group_jobs(env_spec, task, samples, seed, origin=origin, budget=budget, env_args=env_args)
    ]
    return _blocking(run_jobs(jobs, policy, concurrency=concurrency))


def _named(name: str) -> AnyPolicy:
    from agent_rl.errors import ConfigError, did_you_mean

    named = {"oracle": oracle, "demonstrator": demonstrator}
    if name not in named:
        raise ConfigError(
            f"no policy '{name}'.{did_you_mean(name, named)} Give one of {', '.join(named)}, or a Policy."
        )
    return named[name]()


def _blocking(coroutine: Coroutine[object, object, T]) -> T:
    """Run to the end, also from within a notebook, whose loop is already running."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(coroutine)
    results: list[T] = []
    errors: list[BaseException] = []

    def work() -> None:
        try:
            results.append(asyncio.run(coroutine))
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]
