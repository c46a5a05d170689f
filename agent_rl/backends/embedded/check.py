"""What can be checked before an embedded run begins; without torch, unless it learns from stored episodes."""

from __future__ import annotations

from agent_rl.backends.embedded.config import TrainConfig
from agent_rl.backends.group_sampling import check_environment
from agent_rl.engines.model_files import require_model
from agent_rl.gym.registry import EnvSpec
from agent_rl.gym.tasks import distinct_tasks, task_key
from agent_rl.runs.stored_groups import StoredGroups, index_groups
from agent_rl.store.episodes import existing_file


def check_run(config: TrainConfig) -> tuple[EnvSpec, StoredGroups | None]:
    """Check a run before it begins; return its environment, and the stored groups of `episodes`.

    Raises:
        ConfigError: if the environment can't be trained on with these settings, or there are no stored episodes to.
        CheckpointError: if `start_from` has no model.
        StoreError: if the stored episodes can't be read.
    """
    env = check_environment(config)
    env.tasks.require(config.eval.dev_split)
    config.context(env.budget.tokens)
    if config.start_from:
        require_model(config.start_from)
    if config.episodes is None:
        return env, None
    existing_file(config.episodes)
    from agent_rl.algorithms import Algorithm

    evaluated = ((config.eval.split, config.eval.n), (config.eval.dev_split, config.eval.dev_n))
    held_out = {task_key(task) for split, n in evaluated for task in distinct_tasks(env.tasks, split, n)}
    return env, index_groups(config.episodes, env.id, Algorithm(config.algorithm), held_out)
