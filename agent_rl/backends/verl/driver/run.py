"""Launch: settings → verl's full config, checked → a run on Ray."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from agent_rl.algorithms import Algorithm
from agent_rl.backends.group_sampling import require_hooks
from agent_rl.backends.verl.config.config_check import belongs, check, mistyped
from agent_rl.backends.verl.config.settings import VerlConfig, agent_loop, verl_settings
from agent_rl.backends.verl.driver.resume import go_back, last_checkpoint
from agent_rl.backends.verl.driver.watchdog import FAULT, explain
from agent_rl.backends.verl.worker.routes import STRATEGY, THEIRS, captured_routes
from agent_rl.errors import CheckpointError, ConfigError, InfrastructureError, did_you_mean
from agent_rl.runs.folder import new_folder

CONFIG = "config.yaml"


def compose_verl(config: VerlConfig, folder: Path) -> DictConfig:
    """Return verl's full config for a run, resolved and checked against verl's own schema.

    Raises:
        ConfigError: if verl has no such key, or finds the config wrong, or can't do what is asked about routes.
    """
    from hydra import compose, initialize_config_module

    strategy = config.verl.get(STRATEGY)
    with initialize_config_module("verl.trainer.config", version_base=None):
        composed = compose("ppo_trainer", [f"model_engine={strategy}"] if strategy in THEIRS else [])
    known = _keys(composed)
    for key, value in {**verl_settings(config, folder), **config.verl}.items():
        name = key.removeprefix("+")
        if not key.startswith("+") and name not in known and not belongs(composed, name):
            raise ConfigError(f"verl has no setting '{name}'.{did_you_mean(name, known)}")
        if problem := mistyped(composed, name, value):
            raise ConfigError(problem)
        OmegaConf.update(composed, name, value, force_add=True)
    check(composed)
    routes = captured_routes(config.algorithm.routing, composed)
    OmegaConf.update(composed, "data.agent_rl.routes", None if routes is None else asdict(routes), force_add=True)
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


def resume(folder: Path, *, steps: int | None = None) -> Path:
    """Go on where a run's last checkpoint left it, with its own settings; anew if it did not get so far.

    Args:
        folder: a run's folder.
        steps: a new total number of steps, instead of the configured one.

    Raises:
        CheckpointError: if the folder is no run, or its checkpoint is of no use.
        ConfigError: if there is nothing left to do.
        StoreError: if the run is still going.
    """
    folder = folder.resolve()
    if not (folder / CONFIG).exists():
        raise CheckpointError(f"'{folder}' is no run: it has no {CONFIG}")
    config = VerlConfig.model_validate(OmegaConf.to_container(OmegaConf.load(folder / CONFIG)))
    if steps is not None:
        config = config.model_copy(update={"steps": steps})
    if (done := last_checkpoint(folder / "checkpoints")) >= config.steps:
        raise ConfigError(f"the run is at step {done} already: give more with steps=N to go on")
    return run(config, folder, go_back(folder))


def run(config: VerlConfig, folder: Path, step: int = 0) -> Path:
    """Train in a folder, from the checkpoint of a step if it is not 0; return the folder.

    Raises:
        ConfigError: if the environment or verl's config can't do what is asked.
        InfrastructureError: if a process that the run depends on was lost.
    """
    from ray.exceptions import RayError
    from verl.trainer.main_ppo import run_ppo

    from agent_rl.backends.verl.driver.runner import Runner

    require_hooks(config.load_env(), Algorithm(config.algorithm))
    folder = folder.resolve()
    composed = compose_verl(config, folder)
    OmegaConf.save(config.model_dump(mode="json", by_alias=True), folder / CONFIG)
    OmegaConf.save(agent_loop(config), folder / "agent_loop.yaml")
    OmegaConf.save(composed, folder / "verl.yaml")
    (folder / FAULT).unlink(missing_ok=True)
    composed.trainer.val_before_train = step == 0  # the checkpoint was evaluated
    try:
        run_ppo(composed, task_runner_class=Runner)
    except RayError as error:
        if (fault := explain(folder)) is None:
            raise
        raise InfrastructureError(f"{fault}. Go on with: agent-rl train backend=verl resume={folder}") from error
    return folder
