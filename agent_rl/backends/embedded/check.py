"""Checks before an embedded run begins: without torch, but for the episodes that it learns from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec

from agent_rl.algorithms.requirements import Requirements
from agent_rl.backends.embedded.config import TrainConfig
from agent_rl.backends.embedded.fine_tuning import require_peft
from agent_rl.backends.embedded.optimizer import require_optimizer
from agent_rl.backends.group_sampling import check_environment
from agent_rl.core.messages import JSON
from agent_rl.engines.model_files import require_model
from agent_rl.errors import ConfigError
from agent_rl.gym.env import Env
from agent_rl.gym.mixture import Mixture, assign, members_of
from agent_rl.gym.registry import EnvSpec
from agent_rl.gym.tasks import task_key
from agent_rl.rendering.by_name import require_renderer
from agent_rl.rollout.match import seats_of
from agent_rl.runs.stored_groups import StoredGroups, index_groups
from agent_rl.runs.writers import require_writers
from agent_rl.store.shards import existing_shards


def check_run(config: TrainConfig) -> EnvSpec:
    """Check a run before it begins; return its environment.

    Raises:
        ConfigError: if the environment can't be trained on with these settings, or there is no such renderer.
        CheckpointError: if `start_from` has no model.
        StoreError: if there is no file of stored `episodes`.
    """
    env = check_environment(config)
    env.tasks.size(config.eval.during(env.tasks.splits))
    config.context(env.budget.tokens)
    require_writers(config.report_to)
    require_optimizer(config.optimizer.kind, config.device)
    require_renderer(config.renderer.name)
    if config.processes > 1:
        for member, _, _ in members_of(env, config.env_args):
            module_of(member, config.imports)
    if config.lora is not None:
        require_peft()
    if config.engine == "vllm":
        require_vllm()
    if config.self_play:
        require_self_play(env, config)
    if config.rollout.delegate and Requirements(config.algorithm).needs_values:
        raise ConfigError(
            f"rollout.delegate: advantage={config.algorithm.advantage['name']} continues episodes from their turns, "
            "and those of sub-agents can't be: choose another algorithm, such as grpo"
        )
    if config.start_from:
        require_model(config.start_from)
    if config.warm_start.episodes is not None:
        existing_shards(config.warm_start.episodes)
    elif config.warms_up:
        for member, args, _ in members_of(env, config.env_args):
            require_demonstrations(member, args, "a fresh model" if config.start_from is None else "a warm start")
    if config.episodes is not None:
        existing_shards(config.episodes)
    return env


def require_vllm() -> None:
    """Check that vLLM is installed.

    Raises:
        ConfigError: if it is not.
    """
    if find_spec("vllm") is None:
        raise ConfigError(
            "engine=vllm needs vLLM: `make setup-verl` installs it for a machine without a GPU, pip install -e "
            "'.[verl]' for one with; or leave out engine"
        )


def require_self_play(env: EnvSpec, config: TrainConfig) -> None:
    """Refuse self-play where it means nothing.

    Raises:
        ConfigError: if the environment is no game, or its episodes are needed one by one.
    """
    if seats_of(env) > config.rollout.slots:
        raise ConfigError(
            f"rollout.slots={config.rollout.slots} hold no match of {env.id}: give a slot for each player"
        )
    needs = Requirements(config.algorithm)
    if needs.needs_greedy or needs.needs_values:
        raise ConfigError(
            f"self_play: advantage={config.algorithm.advantage['name']} plays single episodes again, and a "
            "match has several: choose another algorithm, such as grpo"
        )


def module_of(env: EnvSpec, imports: Sequence[str]) -> str:
    """Return the module that another process imports to see an environment; empty if that is one of the imports.

    Raises:
        ConfigError: if only this process has it.
    """
    name = env.cls.__module__
    if name == "__main__" and str(env.file) not in imports:
        where = "a notebook" if env.file is None else f"{env.file}, which runs as a script"
        raise ConfigError(
            f"processes: other processes can't see {env.id}, defined in {where}: put it into a file of its own, and "
            "name that in imports"
        )
    return "" if name == "__main__" or str(env.file) in imports else name


def index_stored(config: TrainConfig, env: EnvSpec) -> StoredGroups | None:
    """Return the stored groups that a run learns from, but for tasks that it evaluates on; None if it samples its own.

    Raises:
        ConfigError: if none of the groups can be learned from.
        StoreError: if the stored episodes can't be read.
    """
    if config.episodes is None:
        return None
    if isinstance(env, Mixture):
        raise ConfigError(f"episodes={config.episodes}: stored groups are of one environment, and this is {env.id}")
    from agent_rl.algorithms import Algorithm

    algorithm = Algorithm(config.algorithm.within(config.context(env.budget.tokens)))
    return index_groups(config.episodes, env.id, algorithm, evaluated_tasks(config, env))


def evaluated_tasks(config: TrainConfig, env: EnvSpec) -> set[str]:
    """Return the keys of the tasks that a run evaluates on."""
    evaluated = ((config.eval.split, config.eval.n), (config.eval.during(env.tasks.splits), config.eval.dev_n))
    tasks = (task for split, n in evaluated for task in env.tasks.distinct(split, n))
    return {task_key(assign(env, config.env_args, task).task) for task in tasks}


def require_demonstrations(env: EnvSpec, env_args: Mapping[str, JSON], what: str = "a fresh model") -> None:
    """Refuse an environment that a model can't be warmed up on; `what` begins with demonstrations.

    Raises:
        ConfigError: with a template of `demonstrate`, made of the environment's first tool.
    """
    if env.cls.demonstrate is not Env.demonstrate or env.cls.oracle is not Env.oracle:
        return
    tool = next(iter(env.make(**env_args).tools), None)
    script = 'yield "my answer"'
    if tool is not None:
        names = tool.parameters.get("properties")
        arguments = ", ".join(f'"{name}": self.{name}' for name in (names if isinstance(names, Mapping) else ()))
        call = f'ar.ToolCall("call_0", "{tool.name}", {{{arguments}}})'
        script = f'(found,) = yield ar.Message("assistant", tool_calls=({call},)); yield found.content'
    way = "set start_from=FOLDER of a pretrained model" if what == "a fresh model" else "set warm_start.episodes=FILE"
    raise ConfigError(
        f"{what} begins with demonstrations, and {env.id} has none: {way}, or paste into {env.cls.__name__}, with your "
        "own calls and some mistakes:\n"
        f"    def demonstrate(self, rng):\n        {script}"
    )
