"""A whole embedded run: demonstrations, warm start, evaluation, training, evaluation, report."""

from __future__ import annotations

import resource
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TypedDict

import torch
from transformers import PreTrainedModel
from transformers.utils import logging as hf_logging

from agent_rl.algorithms import Algorithm
from agent_rl.backends.embedded.actor import Actor, load_actor, new_actor, new_tokenizer
from agent_rl.backends.embedded.checkpoint import find_checkpoint, load_ahead, load_state, save_checkpoint
from agent_rl.backends.embedded.config import TrainConfig
from agent_rl.backends.embedded.trainer import Trainer
from agent_rl.backends.embedded.warm_start import WarmStep, demonstrate, warm_start
from agent_rl.backends.group_sampling import check_environment
from agent_rl.core.episode import Episode
from agent_rl.engines.embedded.model_folder import require_model
from agent_rl.engines.embedded.quantization import WeightFormat
from agent_rl.gym.registry import EnvSpec
from agent_rl.gym.tasks import distinct_tasks, task_key
from agent_rl.rendering.base import Renderer
from agent_rl.rollout import summarise
from agent_rl.runs.folder import EPISODES, METRICS, new_folder, read_config, save_config
from agent_rl.runs.metrics import MetricsFile, read_metrics
from agent_rl.runs.report import write_reports
from agent_rl.runs.stop import Stop
from agent_rl.runs.stored_groups import StoredGroups, index_groups
from agent_rl.store.episodes import EpisodeWriter, episode_ids
from agent_rl.view.progress import Progress

CHECKPOINT, REFERENCE, STORED = "checkpoint", "reference", "stored_groups.json"
TOKENIZER_EPISODES = 1000
"""How many demonstrations a fresh model's tokenizer is trained on."""


def start_run(config: TrainConfig, progress: Progress, stop: Stop | None = None) -> Path:
    """Train in a new folder; return it.

    Args:
        config: the run's settings.
        progress: where to show it.
        stop: asks the run to stop between two steps; Ctrl-C does so if it is left out.

    Raises:
        ConfigError: if the environment can't be trained on with these settings, or there are no stored episodes to.
        StoreError: if the stored episodes can't be read.
        Interrupted: if the run was asked to stop.
    """
    env, stored = check_run(config)
    folder = new_folder(config.runs_dir, config.name or env.id.replace("/", "-"))
    save_config(folder, config)
    with _Run(folder, env, config, progress, stop) as run:
        actor = run.load(config.start_from) if config.start_from else run.prepare()
        if Algorithm(config.algorithm).needs_reference:
            actor.save(folder / REFERENCE)
        if stored is not None:
            stored.check_tokens(len(actor.tokenizer), actor.decode)
            stored.save(folder / STORED)
        trainer = Trainer(env, actor, config, _reference(folder), stored)
        run.evaluate(trainer, "before")
        save_checkpoint(folder / CHECKPOINT, actor, trainer.optimizer, 0, trainer.critic)
        run.train(trainer)
        return run.finish(trainer)


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
    return env, _find_groups(config, env) if config.episodes else None


def fresh_actor(env: EnvSpec, config: TrainConfig) -> Actor:
    """Make an untrained actor whose tokenizer knows the words of the environment's demonstrations."""
    episodes = _demonstrations(env, config, TOKENIZER_EPISODES)
    tokenizer = new_tokenizer(episodes, config.vocab_size)
    return new_actor(config.model, tokenizer, config.seed, **_engine(env, config))


def resume_run(folder: Path, progress: Progress, stop: Stop | None = None, *, steps: int | None = None) -> Path:
    """Continue a run from its last checkpoint; bit for bit what it would have been, on the same machine.

    Args:
        folder: a run's folder.
        progress: where to show it.
        stop: as of `start_run`.
        steps: a new total number of steps, instead of the configured one.

    Raises:
        CheckpointError: if the folder is no run, or has no checkpoint.
    """
    folder = folder.resolve()
    config = read_config(folder, TrainConfig)
    if steps is not None:
        config = config.model_copy(update={"steps": steps})
        save_config(folder, config)
    env = config.load_env()
    checkpoint = find_checkpoint(folder / CHECKPOINT)
    with _Run(folder, env, config, progress, stop) as run:
        run.set_threads()
        actor = load_actor(checkpoint, **_engine(env, config))
        stored = StoredGroups.load(folder / STORED) if config.episodes else None
        trainer = Trainer(env, actor, config, _reference(folder), stored)
        trainer.step = load_state(checkpoint, trainer.optimizer, trainer.critic)
        trainer.ahead.extend(load_ahead(checkpoint))
        progress.say(f"Continuing from step {trainer.step} of {config.steps} in {folder}")
        run.train(trainer)
        return run.finish(trainer)


class _Run:
    """The files and the display of one run, open while it lasts."""

    def __init__(self, folder: Path, env: EnvSpec, config: TrainConfig, progress: Progress, stop: Stop | None) -> None:
        self.folder, self.env, self.config, self.progress = folder, env, config, progress
        self.stop = stop or Stop(progress.say)
        self.started = time.monotonic()
        self.dev = ""
        self._open = ExitStack()

    def __enter__(self) -> _Run:
        self.known = episode_ids(self.folder / EPISODES)
        with ExitStack() as opened:
            self.metrics = opened.enter_context(MetricsFile(self.folder))
            self.episodes = opened.enter_context(EpisodeWriter(self.folder / EPISODES))
            opened.enter_context(self.stop.on_ctrl_c())
            self._open = opened.pop_all()
        hf_logging.disable_progress_bar()
        return self

    def __exit__(self, *error: object) -> None:
        self._open.close()

    def set_threads(self) -> None:
        # more than a few threads only get in each other's way in a model of this size
        torch.set_num_threads(self.config.threads or min(4, torch.get_num_threads()))

    def load(self, checkpoint: str) -> Actor:
        """Take a model that another run trained."""
        config = self.config
        self.set_threads()
        actor = load_actor(checkpoint, **_engine(self.env, config))
        self.progress.say(f"[bold]{self.env.id}[/bold]: starting from {checkpoint}. Everything goes to {self.folder}/")
        return actor

    def prepare(self) -> Actor:
        """Make a model and warm it up on demonstrations."""
        config, env, say = self.config, self.env, self.progress.say
        self.set_threads()
        say(f"[bold]{env.id}[/bold]: training a small transformer from nothing, on {torch.get_num_threads()} threads.")
        say(f"This takes about {_minutes(config)} on two cores. Everything goes to {self.folder}/\n")
        say("[bold]1. Warm start[/bold]: clone noisy demonstrations that the environment plays itself.")
        actor = fresh_actor(env, config)
        demonstrations = _demonstrations(env, config, config.warm_start.demonstrations, actor.renderer)
        success = summarise(demonstrations).success
        say(
            f"  {success.n} demonstrations, of which {success.n - success.successes} fail ({1 - success.value:.0%}); "
            f"model: {sum(p.numel() for p in actor.model.parameters()):,} parameters, "
            f"{len(actor.tokenizer)} tokens in its vocabulary"
        )
        self.metrics.write("demonstrations", 0, {"n": success.n, "failed": success.n - success.successes})

        def show(step: WarmStep) -> None:
            self.metrics.write(step.phase, step.step, {"loss": step.loss})
            self.progress.phase(step.phase, step.step, step.of, f"loss {step.loss:.3f}")
            self.stop.check("nothing is lost but the warm start; run the same command again")

        trajectories = [t for e in demonstrations for t in e.trajectories]
        actor.model.train()
        warm_start(
            actor.model, trajectories, config.warm_start, tokenizer=actor.tokenizer, seed=config.seed, on_step=show
        )
        actor.model.eval()
        return actor

    def evaluate(self, trainer: Trainer, when: str) -> None:
        """Evaluate on the reported split: sampled, greedy, and at a low temperature."""
        config = self.config
        tasks = distinct_tasks(self.env.tasks, config.eval.split, config.eval.n)
        self.progress.say(f"\n[bold]Held-out tasks {when} RL[/bold] (split '{config.eval.split}', never trained on):")
        for name, temperature in _samplings(config).items():
            params = trainer.actor.params(temperature, config.rollout.max_tokens)
            split = config.eval.split
            result, episodes = trainer.evaluate(tasks, params, split, name)
            self.write(episodes)
            self.metrics.write("eval", trainer.step, result.row(config.eval.split, name))
            self.progress.say(f"  {_label(name, temperature):34s} {result.success}")

    def train(self, trainer: Trainer) -> None:
        """Train to the last step; evaluate on the dev split and save checkpoints at the configured steps."""
        config = self.config
        dev = distinct_tasks(self.env.tasks, config.eval.dev_split, config.eval.dev_n)
        control = " [yellow]Control: rewards are shuffled.[/yellow]" if config.shuffle_rewards else ""
        self.progress.say(f"\n[bold]2. {config.algorithm.name.upper()}[/bold]: {config.describe_training()}.{control}")
        while trainer.step < config.steps:
            result = trainer.train_step()
            self.write(result.episodes)
            self.metrics.write("train", trainer.step, result.metrics)
            if config.eval.every and trainer.step % config.eval.every == 0:
                split = config.eval.dev_split
                evaluation, _ = trainer.evaluate(dev, trainer.rollouts.params, split)
                self.metrics.write("eval", trainer.step, evaluation.row(split, "sampled"))
                self.dev = f"{evaluation.success.value:.1%} of {evaluation.success.n} {config.eval.dev_split} tasks"
            self.progress.train_step(trainer.step, config.steps, result.metrics, self.dev)
            last = trainer.step == config.steps
            if last or self.stop.is_asked or trainer.step % config.checkpoint_every == 0:
                self.episodes.flush()
                state = (trainer.optimizer, trainer.step, trainer.critic, trainer.ahead)
                save_checkpoint(self.folder / CHECKPOINT, trainer.actor, *state)
            if not last:
                self.stop.check(f"continue with: agent-rl train resume={self.folder}")

    def finish(self, trainer: Trainer) -> Path:
        """Evaluate and write the report."""
        if trainer.step:  # without a step, what was seen before is what there is
            self.evaluate(trainer, "after")
        self.episodes.flush()
        wall = time.monotonic() - self.started
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1 if sys.platform == "linux" else 1024) / 1024
        report = write_reports(self.folder, self.config, self.facts(), wall_s=wall, peak_rss_mib=peak)
        say = self.progress.say
        say(f"\nDone in {wall:.0f} s, at most {peak:.0f} MiB. The report: {report}")
        say("Try next:")
        say(f"  agent-rl view {self.folder}                       its episodes, one line each")
        say(f"  agent-rl view {self.folder} {self.config.eval.split}-{trainer.step:05d}-sampled-0000 --tokens")
        say(f"  agent-rl rollout env={self.env.id} policy={self.folder}/{CHECKPOINT}")
        other = "search-v0" if self.env.id != "search-v0" else "calculator-v0"
        say(f"  agent-rl train env={other}")
        return self.folder

    def facts(self) -> dict[str, str]:
        """Return what the report says about this backend's part of the run."""
        config = self.config
        demonstrated = next((r for r in read_metrics(self.folder / METRICS) if r["kind"] == "demonstrations"), None)
        facts = {} if demonstrated is None else {"demonstrations": "{n}, of which {failed} fail".format(**demonstrated)}
        return facts | {
            "training": config.describe_training(),
            "control": "rewards are shuffled" if config.shuffle_rewards else "none",
        }

    def write(self, episodes: list[Episode]) -> None:
        """Store episodes, except those that the run stored before it was killed."""
        for episode in episodes:
            if episode.id not in self.known:
                self.episodes.write(episode)


def _find_groups(config: TrainConfig, env: EnvSpec) -> StoredGroups:
    evaluated = ((config.eval.split, config.eval.n), (config.eval.dev_split, config.eval.dev_n))
    held_out = {task_key(task) for split, n in evaluated for task in distinct_tasks(env.tasks, split, n)}
    return index_groups(config.episodes or "", env.id, Algorithm(config.algorithm), held_out)


def _demonstrations(env: EnvSpec, config: TrainConfig, n: int, renderer: Renderer | None = None) -> list[Episode]:
    return demonstrate(env, n, split=config.split, seed=config.seed, env_args=config.env_args, renderer=renderer)


class _Engine(TypedDict):
    slots: int
    context: int
    weights: WeightFormat


def _engine(env: EnvSpec, config: TrainConfig) -> _Engine:
    rollout, context = config.rollout, config.context(env.budget.tokens)
    return {"slots": rollout.slots, "context": context, "weights": rollout.weights}


def _reference(folder: Path) -> PreTrainedModel | None:
    """Load the policy that the run's algorithm compares with, if it does."""
    return load_actor(folder / REFERENCE, slots=1).model if (folder / REFERENCE).exists() else None


def _minutes(config: TrainConfig) -> str:
    """Return how long a run takes, from times measured on two cores of a 2024 server with the default model."""
    episodes = config.rollout.groups * config.rollout.samples
    seconds = 40 + 0.15 * config.warm_start.clone_steps + config.steps * episodes / 130
    return f"{seconds / 60:.0f} minutes" if seconds > 90 else f"{seconds:.0f} seconds"


def _samplings(config: TrainConfig) -> dict[str, float]:
    return {"sampled": config.rollout.temperature, "low-temperature": config.eval.low_temperature, "greedy": 0.0}


def _label(name: str, temperature: float) -> str:
    return name if name == "greedy" else f"{name} (temperature {temperature:g})"
