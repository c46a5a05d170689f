"""A whole embedded run: started, or resumed."""

from __future__ import annotations

from pathlib import Path

from rich.markup import escape

from agent_rl.backends.embedded.actor import actor_of, load_reference, sampled_as_set
from agent_rl.backends.embedded.check import check_run, index_stored
from agent_rl.backends.embedded.checkpoint import find_checkpoint, restore
from agent_rl.backends.embedded.config import TrainConfig
from agent_rl.backends.embedded.data_parallel import in_processes
from agent_rl.backends.embedded.fine_tuning import freeze_parameters
from agent_rl.backends.embedded.live_run import open_run
from agent_rl.backends.embedded.memory import require_memory
from agent_rl.backends.embedded.stages import CHECKPOINT, REFERENCE, STORED, WARM, begin, evaluate, finish, train
from agent_rl.backends.embedded.trainer import Trainer
from agent_rl.config import with_settings
from agent_rl.core.display import from_here
from agent_rl.engines.embedded.device import device_of
from agent_rl.engines.embedded.model_folder import load_model
from agent_rl.engines.model_files import require_model
from agent_rl.errors import CheckpointError, ConfigError
from agent_rl.gym.registry import EnvSpec
from agent_rl.runs.folder import EPISODES, name_of, new_folder, read_config, removed_if_unused, save_config
from agent_rl.runs.stop import Stop
from agent_rl.runs.stored_groups import StoredGroups
from agent_rl.store.shards import existing_shards
from agent_rl.view.progress import Progress


def start_run(config: TrainConfig, progress: Progress, stop: Stop | None = None, *, env: EnvSpec | None = None) -> Path:
    """Train in a new folder; return it. `stop` ends the run between two steps; Ctrl-C does so if it is left out.

    `env` is the environment where `check_run` returned it already.

    Raises:
        ConfigError: if the environment can't be trained on with these settings, or there are no stored episodes to.
        StoreError: if the stored episodes can't be read.
        Interrupted: if the run was asked to stop.
    """
    env = env or check_run(config)
    device_of(config.device)
    memory = require_memory(config, env)
    stored = index_stored(config, env)
    folder = new_folder(config.runs_dir, config.name or name_of(env.id))
    with removed_if_unused(folder), open_run(folder, env, config, progress, stop) as run:
        save_config(folder, config)
        run.say(str(memory))
        if note := env.tasks.describe_held_out():
            progress.say(f"[yellow]{env.id}: {note}.[/yellow]")
        return begin(run, stored)


def resume_run(folder: Path, progress: Progress, stop: Stop | None = None, **changes: object) -> Path:
    """Continue a run from its last checkpoint or in its warm start; on the same machine bit for bit what it would be.

    `changes` are settings instead of the configured ones, see `resumed_changes`.

    Raises:
        CheckpointError: if the folder is no run, or has no checkpoint.
        ConfigError: if a change has no meaning, or the run has taken more steps.
    """
    folder = folder.resolve()
    config = before = read_config(folder, TrainConfig)
    if changes:
        config = with_settings(config, changes)
    device_of(config.device)
    env = config.load_env()
    try:
        checkpoint = find_checkpoint(folder / CHECKPOINT)
    except CheckpointError:
        if not (folder / WARM).exists():
            raise
        return _resume_warm_start(folder, config, env, progress, stop)
    existing_shards(folder / EPISODES)
    require_model(checkpoint)
    memory = require_memory(config, env, checkpoint)
    with open_run(folder, env, config, progress, stop) as run:
        run.say(str(memory))
        model, tokenizer = load_model(checkpoint, config.device, dtype=config.dtype, merged=False)
        freeze_parameters(model, config.freeze)
        actor = actor_of(env, config, model, tokenizer)
        stored = StoredGroups.load(folder / STORED) if config.episodes else None
        actor = run.resources.enter_context(sampled_as_set(actor, config))
        trainer = Trainer(env, actor, config, load_reference(folder / REFERENCE, config, actor), stored)
        restore(checkpoint, trainer)
        if trainer.step > config.steps:
            raise ConfigError(f"steps={config.steps}: the run has taken {trainer.step}; name as many, or more")
        for step in range(trainer.step, trainer.step + len(trainer.ahead)):
            if config.temperature_at(step) != (sampled := before.temperature_at(step)):
                raise ConfigError(
                    f"steps={config.steps}: step {step + 1} is sampled already, at the temperature {sampled:.4g} that "
                    f"rollout.final_temperature gives it in {before.steps} steps: resume without it to the end, then "
                    "with more steps"
                )
        if changes:
            save_config(folder, config)
        run.rewind(trainer.step)
        progress.say(f"Continuing from step {trainer.step} of {config.steps} in {escape(from_here(folder))}")
        run.say_how_to_resume()
        with in_processes(folder, trainer):
            if not trainer.step:
                evaluate(run, trainer, "before")  # which may have been cut short
            train(run, trainer)
            return finish(run, trainer)


def _resume_warm_start(folder: Path, config: TrainConfig, env: EnvSpec, progress: Progress, stop: Stop | None) -> Path:
    """Continue a run that has no checkpoint yet: begin again, but for the steps that its warm start took."""
    memory, stored = require_memory(config, env), index_stored(config, env)
    with open_run(folder, env, config, progress, stop) as run:
        save_config(folder, config)
        run.say(str(memory))
        run.say(f"Continuing the warm start in {escape(from_here(folder))}")
        return begin(run, stored)
