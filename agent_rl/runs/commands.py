"""Commands that a run prints: they work when pasted, for a user's environment too."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Mapping
from pathlib import Path

from pydantic import JsonValue

from agent_rl.config import write_setting
from agent_rl.core.display import from_here
from agent_rl.gym.mixture import EnvironmentSettings, members_of
from agent_rl.gym.registry import BUILTIN, EnvSpec
from agent_rl.judge.config import JudgeConfig
from agent_rl.runs.config import RunConfig


def command(name: str, *words: str, imports: Iterable[str | Path] = ()) -> str:
    """Return a command line of agent-rl; imports below the working directory are named from there."""
    return shlex.join(["agent-rl", name, *(word for file in imports for word in ("--import", from_here(file))), *words])


def resume_command(config: RunConfig, env: EnvSpec, folder: Path) -> str:
    """Return how to continue a run, whose folder holds its imports."""
    if _is_of_this_session(config, env):
        return f"ar.train(resume={str(folder)!r})"
    return command(
        "train", write_setting("resume", from_here(folder)), imports=() if config.imports else _imports(config, env)
    )


def rollout_command(config: RunConfig, env: EnvSpec, policy: Path) -> str:
    """Return how to run a run's policy on the tasks that it was evaluated on."""
    if _is_of_this_session(config, env):
        return f"ar.run({env.id!r}, {str(policy)!r}, split={config.eval.split!r})"
    args = (_argument(f"env_args.{name}", value) for name, value in config.env_args.items())
    judge = judge_words(config.judge.model_copy(update={"evolve": False}))  # which training alone does
    words = (env_word(config), f"split={config.eval.split}", *args, *judge, write_setting("policy", from_here(policy)))
    return command("rollout", *words, imports=_imports(config, env))


def env_word(settings: EnvironmentSettings) -> str:
    """Return the setting `env` as it is written on a command line."""
    if isinstance(settings.env, str):
        return f"env={settings.env}"
    choices = (choice.model_dump(exclude_defaults=True) for choice in settings.env)
    return f"env=[{','.join(_written(choice) for choice in choices)}]"


def judge_words(judge: JudgeConfig) -> list[str]:
    """Return the settings of a judge as they are written on a command line."""
    return [_argument(f"judge.{name}", value) for name, value in judge.model_dump(exclude_defaults=True).items()]


def _argument(key: str, value: JsonValue) -> str:
    return write_setting(key, value) if isinstance(value, str) else f"{key}={json.dumps(value, ensure_ascii=False)}"


def _written(choice: Mapping[str, object]) -> str:
    return str(choice["env"]) if len(choice) == 1 else json.dumps(choice, ensure_ascii=False)


def _is_of_this_session(config: RunConfig, env: EnvSpec) -> bool:
    """Whether a script or notebook defines the environment, so that only it can use it."""
    return not config.imports and any(m.spec.cls.__module__ == "__main__" for m in members_of(env, {}))


def _imports(config: RunConfig, env: EnvSpec) -> tuple[str | Path, ...]:
    own = [env for env, _, _ in members_of(env, {}) if env.id not in BUILTIN and env.file is not None]
    return config.imports or tuple(dict.fromkeys(env.file for env in own if env.file is not None))
