"""The stages of an embedded run: demonstrations, warm start, evaluation, training, evaluation, report."""

from __future__ import annotations

import resource
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

import torch
from rich.markup import escape
from transformers.utils import logging as hf_logging

from agent_rl.algorithms import Algorithm
from agent_rl.backends.embedded.actor import Actor, actor_of, fine_tune, load_reference, sampled_as_set
from agent_rl.backends.embedded.checkpoint import best_evaluation, save_best, save_checkpoint
from agent_rl.backends.embedded.config import TrainConfig
from agent_rl.backends.embedded.data_parallel import in_processes
from agent_rl.backends.embedded.fresh import demonstrations_of, fresh_actor
from agent_rl.backends.embedded.precision import PrecisionConfig
from agent_rl.backends.embedded.trainer import Trainer
from agent_rl.backends.embedded.warm_checkpoint import WarmCheckpoint
from agent_rl.backends.embedded.warm_start import WarmStep, warm_start
from agent_rl.backends.group_sampling import HeldOut, held_out_tasks
from agent_rl.core.display import from_here
from agent_rl.core.episode import Episode
from agent_rl.core.messages import Task
from agent_rl.core.trajectory import Trajectory
from agent_rl.engines.base import SamplingParams
from agent_rl.engines.embedded.model_folder import load_model
from agent_rl.engines.embedded.threads import torch_as_it_starts
from agent_rl.engines.model_files import written
from agent_rl.gym.registry import EnvSpec
from agent_rl.judge.run import run_judge
from agent_rl.rollout import summarise
from agent_rl.rollout.evaluation import Evaluation
from agent_rl.rollout.fit import check_run_fit
from agent_rl.rollout.watch import watching
from agent_rl.runs.commands import command, resume_command, rollout_command
from agent_rl.runs.diagnosis import Diagnosis
from agent_rl.runs.folder import EPISODES, METRICS, make_latest, save_config, status_of, warn
from agent_rl.runs.metrics import MetricsFile, read_metrics
from agent_rl.runs.report import write_reports
from agent_rl.runs.stop import Stop
from agent_rl.runs.stored_groups import StoredGroups
from agent_rl.runs.writers import Writers
from agent_rl.store.episodes import EpisodeWriter
from agent_rl.store.selection import episode_ids, select
from agent_rl.store.token_records import TokenRecordWriter
from agent_rl.view.progress import Progress

CHECKPOINT, BEST, REFERENCE, STORED = "checkpoint", "best", "reference", "stored_groups.json"
WARM = "warm_start.pt"


@dataclass
class LiveRun:
    """One run while it lasts: its settings, files and display."""

    folder: Path
    env: EnvSpec
    config: TrainConfig
    progress: Progress
    stop: Stop
    metrics: MetricsFile
    episodes: EpisodeWriter
    records: TokenRecordWriter | None
    known: set[str]
    """The ids of the episodes that the run stored before it was killed."""
    resources: ExitStack
    """What ends with the run."""
    dev: str = ""
    """The last evaluation during training, in words."""

    @cached_property
    def held_out(self) -> HeldOut:
        """The tasks that the run reports on."""
        config = self.config
        if config.episodes is None:
            return held_out_tasks(self.env, config, self.scripted)
        tasks = self.env.tasks.distinct(config.eval.split, config.eval.n)
        return HeldOut(tasks, f"{len(tasks)} tasks of '{config.eval.split}', left out of the stored groups")

    @property
    def dev_split(self) -> str:
        """The split that is evaluated on during training."""
        return self.config.eval.during(self.env.tasks.splits)

    @cached_property
    def dev_tasks(self) -> list[Task]:
        """The tasks that are evaluated on during training."""
        return self.env.tasks.distinct(self.dev_split, self.config.eval.dev_n)

    @property
    def scripted(self) -> int:
        """How many demonstrations the environment plays itself, on tasks of the run's split."""
        has_own = self.config.warms_up and self.config.warm_start.episodes is None
        return self.config.warm_start.demonstrations if has_own else 0

    def begin(self, stored: StoredGroups | None) -> Path:
        """Make what is trained, warm it up, and train it to the end."""
        folder, env, config = self.folder, self.env, self.config
        actor = self.load(config.start_from) if config.start_from else self.prepare()
        if Algorithm(config.algorithm).needs_reference and config.lora is None:
            with written(folder / REFERENCE):
                actor.save(folder / REFERENCE)
        if stored is not None:
            self.keep_groups(stored, actor)
        actor = self.resources.enter_context(sampled_as_set(actor, config))
        trainer = Trainer(env, actor, config, load_reference(folder / REFERENCE, config, actor), stored)
        make_latest(folder)
        for warning in filter(None, (self.held_out.warning, config.uncorrected)):
            warn(folder, warning, self.say)
        save_checkpoint(folder / CHECKPOINT, trainer)
        (folder / WARM).unlink(missing_ok=True)
        self.say_how_to_resume()
        with in_processes(folder, trainer):
            self.evaluate(trainer, "before")
            self.train(trainer)
            return self.finish(trainer)

    def load(self, start_from: str) -> Actor:
        """Load the model that the run starts from, and warm it up where that is asked for."""
        config, env = self.config, self.env
        model, tokenizer = load_model(start_from, config.device, dtype=config.dtype)
        if config.fine_tunes:
            fine_tune(model, tokenizer, config, self.folder)
        actor = actor_of(env, config, model, tokenizer)
        self.check_fit(actor)
        self.progress.say(f"[bold]{env.id}[/bold]: starting from {escape(start_from)}. {self.place()}")
        if config.warms_up:
            self.warm_up(actor)
        return actor

    def prepare(self) -> Actor:
        """Make a model and warm it up on demonstrations."""
        config, env, say = self.config, self.env, self.progress.say
        say(f"[bold]{env.id}[/bold]: training a small transformer from nothing.")
        say(f"This takes about {_minutes(config)} on two cores. {self.place()}\n")
        actor = fresh_actor(env, config)
        save_config(self.folder, self.measured_config(actor))  # for a resumed run
        self.check_fit(actor)
        self.warm_up(actor)
        if config.fine_tunes:
            fine_tune(actor.model, actor.tokenizer, config, self.folder)
            actor = actor_of(env, self.measured_config(actor), actor.model, actor.tokenizer)
        return actor

    def keep_groups(self, stored: StoredGroups, actor: Actor) -> None:
        """Store the groups that the run learns from, for when it is resumed; warn of another format than the model's.

        Raises:
            ConfigError: if they are not of this model's tokens.
        """
        stored.check_tokens(len(actor.tokenizer), actor.decode)
        if not stored.is_rendered_by(actor.renderer):
            other = "prompts end otherwise than this model's renderer ends them: it learns another format than it is"
            way_out = "set renderer=NAME as their run did, or start from its checkpoint"
            warn(self.folder, f"episodes={self.config.episodes}: {other} evaluated in; {way_out}", self.say)
        stored.save(self.folder / STORED)

    def warm_up(self, actor: Actor) -> None:
        """Clone demonstrations.

        Raises:
            ConfigError: if there are none, or none that fits into the context.
        """
        config, say = self.config, self.progress.say
        source = config.warm_start.episodes
        which = "noisy demonstrations that the environment plays itself" if source is None else f"episodes of {source}"
        say(f"[bold]1. Warm start[/bold]: clone {escape(which)}.")
        n, told = config.warm_start.demonstrations, partial(warn, self.folder, say=self.say)
        demonstrations = demonstrations_of(self.env, config, n, actor.renderer, told)
        success = summarise(demonstrations).success
        say(
            f"  {success.n} demonstrations, of which {success.n - success.successes} fail ({1 - success.value:.0%}); "
            f"model: {sum(p.numel() for p in actor.model.parameters()):,} parameters, "
            f"{len(actor.tokenizer)} tokens in its vocabulary; threads: {torch.get_num_threads()}"
        )
        self.metrics.write("demonstrations", 0, {"n": success.n, "failed": success.n - success.successes})

        def show(step: WarmStep) -> None:
            self.metrics.write(step.phase, step.step, {"loss": step.loss})
            self.progress.phase(step.phase, step.step, step.of, f"loss {step.loss:.3f}")

        fitting = self.fitting(demonstrations, actor.engine.context_limit)
        self.say_how_to_resume()
        actor.engine.release_weights()
        warm_start(
            actor.model,
            fitting,
            config.warm_start,
            tokenizer=actor.tokenizer,
            seed=config.seed,
            token_budget=config.forward_tokens,
            precision=config.precision if config.start_from else PrecisionConfig(),
            on_step=show,
            checkpoint=WarmCheckpoint(self.folder / WARM, self.stop),
        )

    def fitting(self, demonstrations: Sequence[Episode], context: int) -> list[Trajectory]:
        """Return the trajectories that fit into a context; warn of the others."""
        trajectories = [t for e in demonstrations for t in e.trajectories]
        fitting = [t for t in trajectories if len(t) <= context]
        if left := len(trajectories) - len(fitting):
            exceed = f"{left} of {len(trajectories)} demonstrations exceed the context of {context} tokens"
            warn(self.folder, f"{exceed} and are left out: raise rollout.context", self.say)
        return fitting

    def measured_config(self, actor: Actor) -> TrainConfig:
        """Return the settings, with the context that the actor was made for."""
        rollout = self.config.rollout.model_copy(update={"context": actor.engine.context_limit})
        return self.config.model_copy(update={"rollout": rollout})

    def check_fit(self, actor: Actor) -> None:
        """Warn if the environment's own solution does not fit; refuse one whose openings leave no room for a reply."""
        env, config, context = self.env, self.config, actor.engine.context_limit
        if warning := check_run_fit(env, config.split, config.env_args, actor.renderer, context, "rollout.context"):
            warn(self.folder, warning, self.say)

    def say_how_to_resume(self) -> None:
        """Let who stops the run from now on be told how to continue it."""
        self.stop.hint = f"continue with: {resume_command(self.config, self.env, self.folder)}"

    def say(self, text: str) -> None:
        """Print a line without markup."""
        self.progress.say(escape(text))

    def evaluate(self, trainer: Trainer, when: str) -> None:
        """Evaluate on the reported split: sampled, greedy, and at a low temperature.

        Raises:
            Interrupted: if the run was asked to stop; resumed, it evaluates again.
        """
        config, (tasks, which, _) = self.config, self.held_out
        split, sampled, low = config.eval.split, config.eval.sampled(config.rollout), config.eval.low_temperature
        self.progress.say(f"\n[bold]Evaluation {when} RL[/bold] on {which}:")
        for name, temperature in (("sampled", sampled), ("low-temperature", low), ("greedy", 0.0)):
            self.stop.check()
            params = trainer.actor.params(temperature, config.rollout.max_tokens)
            result, episodes = trainer.evaluate(tasks, params, split, name)
            self.write(episodes)
            self.metrics.write("eval", trainer.step, result.row(split, name))
            label = f"{name} (temperature {temperature:g})" if temperature else name
            self.progress.say(f"  {label:34s} {result.success}")
            for env, found in result.of_env.items():
                self.progress.say(f"    {escape(env):32s} {found.success}")
            if name == "sampled" and trainer.step and split == self.dev_split:
                self.keep_if_best(trainer, summarise(episodes[: len(self.dev_tasks)]))  # the first, as in training

    def train(self, trainer: Trainer) -> None:
        """Train to the last step; evaluate and save checkpoints at the configured steps.

        Raises:
            InfrastructureError: if all episodes fail, as `Diagnosis.require_scores` says.
            Interrupted: if the run was asked to stop.
        """
        config = self.config
        sampled = trainer.actor.params(config.eval.sampled(config.rollout), config.rollout.max_tokens)
        control = " [yellow]Control: rewards are shuffled.[/yellow]" if config.shuffle_rewards else ""
        self.progress.say(f"\n[bold]2. {config.algorithm.name.upper()}[/bold]: {config.describe_training()}.{control}")
        if recomputes := config.decided is not None:
            self.say(f"   {config.decided}")
        diagnosis = Diagnosis(
            config.algorithm, config.rollout.samples, self.env.cls, self.folder, self.say, steps=config.steps
        )
        while trainer.step < config.steps:
            self.stop.check()
            result = trainer.train_step()
            self.write(result.episodes)
            if self.records is not None:
                self.records.write(result.records)
            diagnosis.episodes = result.episodes
            self.metrics.write("train", trainer.step, result.metrics | diagnosis.observe(result.metrics))
            diagnosis.require_scores(self.stop.hint)
            last = trainer.step == config.steps
            reported = last and self.dev_split == config.eval.split  # by `finish`, on all of its tasks
            if config.eval.every and trainer.step % config.eval.every == 0 and not reported:
                self.evaluate_meanwhile(trainer, sampled)
            self.progress.train_step(trainer.step, config.steps, result.metrics, self.dev)
            if recomputes and (old := result.metrics.get("perf/old_s")):
                part = old / result.metrics["perf/update_s"]
                self.say(f"   Old took {old:.2f} s, {part:.0%} of this step's update (perf/old_s).")
                recomputes = False
            if last or self.stop.is_asked or trainer.step % config.checkpoint_every == 0:
                self.episodes.flush()
                save_checkpoint(self.folder / CHECKPOINT, trainer)

    def evaluate_meanwhile(self, trainer: Trainer, params: SamplingParams) -> None:
        """Evaluate on the tasks for that, and keep the weights that do best."""
        evaluation, _ = trainer.evaluate(self.dev_tasks, params, self.dev_split)
        self.metrics.write("eval", trainer.step, evaluation.row(self.dev_split, "sampled"))
        success = evaluation.success
        self.dev = f"{success.share} of {success.n} {self.dev_split} tasks at step {trainer.step}"
        self.keep_if_best(trainer, evaluation)

    def keep_if_best(self, trainer: Trainer, evaluation: Evaluation) -> None:
        """Keep the weights if none did better on the tasks that are evaluated on during training."""
        if self.config.eval.every and self.config.eval.keep_best and evaluation.success.n:
            save_best(self.folder / BEST, trainer, evaluation.success.value)

    def finish(self, trainer: Trainer) -> Path:
        """Evaluate and write the report."""
        if trainer.step:  # without a step, what was seen before is what there is
            self.evaluate(trainer, "after")
        self.episodes.flush()
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1 if sys.platform == "linux" else 1024) / 1024
        report = write_reports(self.folder, self.config, self.facts(), peak_rss_mib=peak)
        say = self.progress.say
        wall = self.metrics.wall_s
        say(escape(f"\nDone in {wall:.0f} s, at most {peak:.0f} MiB. The report: {from_here(report)}"))
        best = best_evaluation(self.folder / BEST)
        if best is not None and best["step"] < trainer.step:
            where = from_here(self.folder / BEST)
            say(escape(f"The weights that did best during training, {self.best()}, are in {where}"))
        say("Try next:")
        folder = from_here(self.folder)
        for line in (
            command("view", folder),
            command("view", folder, f"{self.config.eval.split}-{trainer.step:05d}-sampled-0000", "--tokens"),
            rollout_command(self.config, self.env, self.folder / CHECKPOINT),
            command("train", "env=search-v0" if self.env.id != "search-v0" else "env=calculator-v0"),
        ):
            say(f"  {escape(line)}")
        return self.folder

    def place(self) -> str:
        """Return a line about where the run is."""
        return escape(f"Everything goes to {from_here(self.folder)}/")

    def best(self) -> str | None:
        """Return in words how the best weights did, if any were kept."""
        if (found := best_evaluation(self.folder / BEST)) is None:
            return None
        split = self.config.eval.during(self.env.tasks.splits)
        return f"with {found['success']:.1%} of the {split} tasks at step {found['step']:.0f}"

    def facts(self) -> dict[str, str]:
        """Return what the report says about this backend's part of the run."""
        config = self.config
        demonstrated = next((r for r in read_metrics(self.folder / METRICS) if r["kind"] == "demonstrations"), None)
        facts = {} if demonstrated is None else {"demonstrations": "{n}, of which {failed} fail".format(**demonstrated)}
        if (best := self.best()) is not None:
            facts["best weights"] = f"those {best}"
        return facts | {
            "training": config.describe_training(),
            "control": "rewards are shuffled" if config.shuffle_rewards else "none",
        }

    def rewind(self, step: int) -> None:
        """Take off the record what came after the checkpoint of `step`: it comes again, and may be other than it was.

        Settings may have changed, and a judge or vLLM says the same twice on no machine.
        """
        later = select(self.folder / EPISODES, where=["purpose = train", f"step >= {step}"], limit=1).places
        if later:
            self.episodes.cut(later[0])
            self.known = episode_ids(self.folder / EPISODES)
        self.metrics.rewind(step)
        if self.records is not None:
            self.records.rewind(step)

    def write(self, episodes: list[Episode]) -> None:
        """Store episodes, except those that the run stored before it was killed."""
        for episode in episodes:
            if episode.id not in self.known:
                self.episodes.write(episode)


@contextmanager
def open_run(
    folder: Path, env: EnvSpec, config: TrainConfig, progress: Progress, stop: Stop | None
) -> Iterator[LiveRun]:
    """Open all that a run writes to, and what lasts as long as it does."""
    known, stop = episode_ids(folder / EPISODES), stop or Stop(progress.say)
    stop.hint = "nothing is lost; run the same command again"
    shown = config.model_dump(mode="json", by_alias=True)
    hf_logging.disable_progress_bar()
    with (
        torch_as_it_starts(),
        EpisodeWriter(folder / EPISODES, experts=config.store_experts) as episodes,  # first, as it locks the run
        MetricsFile(folder, Writers(config.report_to, folder, shown, progress.say)) as metrics,
        TokenRecordWriter(folder) if config.token_records else nullcontext() as records,
        run_judge(config.judge, env, folder, workers=config.processes, evolves=True),
        stop.on_signals(),
        watching(status_of(folder)),
        ExitStack() as resources,
    ):
        yield LiveRun(folder, env, config, progress, stop, metrics, episodes, records, known, resources)


def _minutes(config: TrainConfig) -> str:
    """Return how long a run takes, from times measured on two cores of a 2024 server with the default model."""
    episodes = config.rollout.groups * config.rollout.samples
    seconds = 40 + 0.15 * config.warm_start.clone_steps + config.steps * episodes / 130
    return f"{seconds / 60:.0f} minutes" if seconds > 90 else f"{seconds:.0f} seconds"
