"""Launch: settings → verl's full config, checked → a run on Ray."""

from __future__ import annotations

import os
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from agent_rl.backends.folder import new_folder
from agent_rl.backends.verl.check import belongs, check, mistyped
from agent_rl.backends.verl.settings import VerlConfig, agent_loop, load_once, verl_settings
from agent_rl.errors import CheckpointError, ConfigError, did_you_mean
from agent_rl.registry import spec

CONFIG = "config.yaml"


def compose_verl(config: VerlConfig, folder: Path) -> DictConfig:
    """Return verl's full config for a run, resolved and checked against verl's own schema.

    Raises:
        ConfigError: if verl has no such key, or finds the config wrong.
    """
    from hydra import compose, initialize_config_module

    with initialize_config_module("verl.trainer.config", version_base=None):
        composed = compose("ppo_trainer")
    known = _keys(composed)
    for key, value in {**verl_settings(config, folder), **config.verl}.items():
        name = key.removeprefix("+")
        if not key.startswith("+") and name not in known and not belongs(composed, name):
            raise ConfigError(f"verl has no setting '{name}'.{did_you_mean(name, known)}")
        if problem := mistyped(composed, name, value):
            raise ConfigError(problem)
        OmegaConf.update(composed, name, value, force_add=True)
    check(composed)
    full: DictConfig = composed
    return full


def _keys(config: DictConfig, prefix: str = "") -> set[str]:
    """Every key of a config and of the sections in it."""
    found = {f"{prefix}{key!s}" for key in config}
    for key in config:
        node = config._get_node(key)
        if isinstance(node, DictConfig) and not node._is_none() and not node._is_missing():
            found |= _keys(node, f"{prefix}{key!s}.")
    return found


def print_config(config: VerlConfig) -> None:
    """Print verl's full config of a run that would go to `runs_dir`."""
    print(OmegaConf.to_yaml(compose_verl(config, Path(config.runs_dir) / "dry-run")))


def start(config: VerlConfig) -> Path:
    """Train in a new folder below `runs_dir`; return it.

    Raises:
        ConfigError: if the environment or verl's config can't do what is asked.
    """
    return run(config, new_folder(config.runs_dir, config.name or config.env.replace("/", "-")))


def resume(folder: Path) -> Path:
    """Go on where a run's last checkpoint left it, with its own settings.

    Raises:
        CheckpointError: if the folder is no run.
    """
    if not (folder / CONFIG).exists():
        raise CheckpointError(f"'{folder}' is no run: it has no {CONFIG}")
    return run(VerlConfig.model_validate(OmegaConf.to_container(OmegaConf.load(folder / CONFIG))), folder)


def run(config: VerlConfig, folder: Path) -> Path:
    """Train in a folder, from its last checkpoint if it has one; return it."""
    from verl.trainer.main_ppo import run_ppo

    from agent_rl.backends.verl.runner import Runner

    for file in config.imports:
        load_once(file)
    for split in (config.split, config.eval.split):
        spec(config.env).tasks.require(split)
    folder = folder.resolve()
    composed = compose_verl(config, folder)
    OmegaConf.save(config.model_dump(mode="json", by_alias=True), folder / CONFIG)
    OmegaConf.save(agent_loop(config), folder / "agent_loop.yaml")
    OmegaConf.save(composed, folder / "verl.yaml")
    os.environ["VERL_FILE_LOGGER_PATH"] = str(folder / "metrics.jsonl")
    run_ppo(composed, task_runner_class=Runner)
    return folder
