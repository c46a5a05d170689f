"""The stages of an embedded run: demonstrations, warm start, evaluation, training, evaluation, report."""

from __future__ import annotations

import resource
import sys
from collections.abc import Sequence
from functools import partial
from operator import attrgetter
from pathlib import Path

import torch
from rich.markup import escape

from agent_rl.algorithms import Algorithm
from agent_rl.backends.embedded.actor import Actor, actor_of, fine_tune, load_reference, sampled_as_set
from agent_rl.backends.embedded.checkpoint import best_evaluation, save_best, save_checkpoint
from agent_rl.backends.embedded.config import TrainConfig
from agent_rl.backends.embedded.data_parallel import in_processes
from agent_rl.backends.embedded.fresh import demonstrations_of, fresh_actor
from agent_rl.backends.embedded.live_run import LiveRun
from agent_rl.backends.embedded.precision import PrecisionConfig
from agent_rl.backends.embedded.trainer import Trainer
from agent_rl.backends.embedded.warm_checkpoint import WarmCheckpoint
from agent_rl.backends.embedded.warm_start import WarmStep, warm_start
from agent_rl.core.display import from_here
from agent_rl.core.episode import Episode
from agent_rl.core.trajectory import Trajectory
from agent_rl.engines.base import SamplingParams
from agent_rl.engines.embedded.model_folder import load_model
from agent_rl.engines.model_files import written
from agent_rl.gym.tasks import task_key
from agent_rl.rollout import summarise
from agent_rl.rollout.evaluation import Evaluation
from agent_rl.rollout.fit import check_run_fit
from agent_rl.runs.commands import command, rollout_command
from agent_rl.runs.diagnosis import Diagnosis
from agent_rl.runs.folder import METRICS, make_latest, save_config, warn
from agent_rl.runs.metrics import read_metrics
from agent_rl.runs.report import write_reports
from agent_rl.runs.stalls import PAST_SHORT_CUTS, PATIENT, patience
from agent_rl.runs.stored_groups import StoredGroups

CHECKPOINT, BEST, REFERENCE, STORED = "checkpoint", "best", "reference", "stored_groups.json"
WARM = "warm_start.pt"


def begin(run: LiveRun, stored: StoredGroups | None) -> Path:
    """Make what is trained, warm it up, and train it to the end."""
    folder, env, config = run.folder, run.env, run.config
    actor = _loaded(run, config.start_from) if config.start_from else _fresh(run)
    if Algorithm(config.algorithm).needs_reference and config.lora is None:
        with written(folder / REFERENCE):
            actor.save(folder / REFERENCE)
    if stored is not None:
        _keep_groups(run, stored, actor)
    actor = run.resources.enter_context(sampled_as_set(actor, config))
    trainer = Trainer(env, actor, config, load_reference(folder / REFERENCE, config, actor), stored)
    make_latest(folder)
    for warning in filter(None, (run.held_out.warning, config.uncorrected)):
        warn(folder, warning, run.say)
    save_checkpoint(folder / CHECKPOINT, trainer)
    (folder / WARM).unlink(missing_ok=True)
    run.say_how_to_resume()
    with in_processes(folder, trainer):
        evaluate(run, trainer, "before")
        train(run, trainer)
        return finish(run, trainer)


def _loaded(run: LiveRun, start_from: str) -> Actor:
    """Load the model that the run starts from, and warm it up where that is asked for."""
    config, env = run.config, run.env
    model, tokenizer = load_model(start_from, config.device, dtype=config.dtype)
    if config.fine_tunes:
        fine_tune(model, tokenizer, config, run.folder)
    actor = actor_of(env, config, model, tokenizer)
    _check_fit(run, actor)
    run.progress.say(f"[bold]{env.id}[/bold]: starting from {escape(start_from)}. {run.place()}")
    if config.warms_up:
        _warm_up(run, actor)
    return actor


def _fresh(run: LiveRun) -> Actor:
    """Make a model and warm it up on demonstrations."""
    config, env, say = run.config, run.env, run.progress.say
    say(f"[bold]{env.id}[/bold]: training a small transformer from nothing.")
    say(f"This takes about {_minutes(config)} on two cores. {run.place()}\n")
    actor = fresh_actor(env, config)
    save_config(run.folder, _measured_config(run, actor))  # for a resumed run
    _check_fit(run, actor)
    _warm_up(run, actor)
    if config.fine_tunes:
        fine_tune(actor.model, actor.tokenizer, config, run.folder)
        actor = actor_of(env, _measured_config(run, actor), actor.model, actor.tokenizer)
    return actor


def _keep_groups(run: LiveRun, stored: StoredGroups, actor: Actor) -> None:
    """Store the groups that the run learns from, for when it is resumed; warn of another format than the model's.

    Raises:
        ConfigError: if they are not of this model's tokens.
    """
    stored.check_tokens(len(actor.tokenizer), actor.decode)
    if not stored.is_rendered_by(actor.renderer):
        other = "prompts end otherwise than this model's renderer ends them: it learns another format than it is"
        way_out = "set renderer=NAME as their run did, or start from its checkpoint"
        warn(run.folder, f"episodes={run.config.episodes}: {other} evaluated in; {way_out}", run.say)
    stored.save(run.folder / STORED)


def _warm_up(run: LiveRun, actor: Actor) -> None:
    """Clone demonstrations.

    Raises:
        ConfigError: if there are none, or none that fits into the context.
    """
    config, say = run.config, run.progress.say
    source = config.warm_start.episodes
    which = "noisy demonstrations that the environment plays itself" if source is None else f"episodes of {source}"
    say(f"[bold]1. Warm start[/bold]: clone {escape(which)}.")
    asked, told = config.warm_start.demonstrations, partial(warn, run.folder, say=run.say)
    demonstrations = demonstrations_of(run.env, config, asked, actor.renderer, told)
    n, success = len(demonstrations), summarise(demonstrations).success
    failed = success.n - success.successes
    result = f"of which {failed} fail ({failed / n:.0%})" if success.n else "whose success no reward says"
    say(
        f"  {n} demonstrations, {result}; "
        f"model: {sum(p.numel() for p in actor.model.parameters()):,} parameters, "
        f"{len(actor.tokenizer)} tokens in its vocabulary; threads: {torch.get_num_threads()}"
    )
    run.metrics.write("demonstrations", 0, {"n": n, "failed": failed, "unknown": n - success.n})

    def show(step: WarmStep) -> None:
        run.metrics.write(step.phase, step.step, {"loss": step.loss})
        run.progress.phase(step.phase, step.step, step.of, f"loss {step.loss:.3f}")

    fitting = _fitting(run, demonstrations, actor.engine.context_limit)
    run.say_how_to_resume()
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
        checkpoint=WarmCheckpoint(run.folder / WARM, run.stop),
    )


def _fitting(run: LiveRun, demonstrations: Sequence[Episode], context: int) -> list[Trajectory]:
    """Return the trajectories that fit into a context; warn of the others."""
    trajectories = [t for e in demonstrations for t in e.trajectories]
    fitting = [t for t in trajectories if len(t) <= context]
    if left := len(trajectories) - len(fitting):
        exceed = f"{left} of {len(trajectories)} demonstrations exceed the context of {context} tokens"
        warn(run.folder, f"{exceed} and are left out: raise rollout.context", run.say)
    return fitting


def _measured_config(run: LiveRun, actor: Actor) -> TrainConfig:
    """Return the settings, with the context that the actor was made for."""
    rollout = run.config.rollout.model_copy(update={"context": actor.engine.context_limit})
    return run.config.model_copy(update={"rollout": rollout})


def _check_fit(run: LiveRun, actor: Actor) -> None:
    """Warn if the environment's own solution does not fit; refuse one whose openings leave no room for a reply."""
    env, config, context = run.env, run.config, actor.engine.context_limit
    if warning := check_run_fit(env, config.split, config.env_args, actor.renderer, context, "rollout.context"):
        warn(run.folder, warning, run.say)


def evaluate(run: LiveRun, trainer: Trainer, when: str) -> None:
    """Evaluate on the reported split: sampled, greedy, and at a low temperature.

    Raises:
        Interrupted: if the run was asked to stop; resumed, it evaluates again.
    """
    config, (tasks, which, _) = run.config, run.held_out
    split, sampled, low = config.eval.split, config.eval.sampled(config.rollout), config.eval.low_temperature
    run.progress.say(f"\n[bold]Evaluation {when} RL[/bold] on {which}:")
    for name, temperature in (("sampled", sampled), ("low-temperature", low), ("greedy", 0.0)):
        run.stop.check()
        params = trainer.actor.params(temperature, config.rollout.max_tokens)
        result, episodes = trainer.evaluate(tasks, params, split, name)
        run.write(episodes)
        run.metrics.write("eval", trainer.step, result.row(split, name))
        label = f"{name} (temperature {temperature:g})" if temperature else name
        run.progress.say(f"  {label:34s} {_shown(result)}")
        for env, found in result.of_env.items():
            run.progress.say(f"    {escape(env):32s} {_shown(found)}")
        if name == "sampled" and trainer.step and split == run.dev_split:
            as_before = {*map(task_key, run.dev_tasks)}
            chosen = [e for task, e in zip(tasks, episodes, strict=True) if task_key(task) in as_before]
            _keep_if_best(run, trainer, summarise(chosen))


def _shown(found: Evaluation) -> str:
    return f"{found.success}, {found.failed} failed" if found.failed else str(found.success)


def train(run: LiveRun, trainer: Trainer) -> None:
    """Train to the last step; evaluate and save checkpoints at the configured steps.

    Raises:
        InfrastructureError: if all episodes fail, as `Diagnosis.require_scores` says.
        Interrupted: if the run was asked to stop.
    """
    config = run.config
    sampled = trainer.actor.params(config.eval.sampled(config.rollout), config.rollout.max_tokens)
    control = " [yellow]Control: rewards are shuffled.[/yellow]" if config.shuffle_rewards else ""
    run.progress.say(f"\n[bold]2. {config.algorithm.name.upper()}[/bold]: {config.describe_training()}.{control}")
    if recomputes := config.decided is not None:
        run.say(f"   {config.decided}")
    has = {name: attrgetter(name)(config) for name in PAST_SHORT_CUTS} | {"algorithm": config.algorithm.name}
    names = {PATIENT: patience(has, refused=["rollout.retry_temperature"] if config.self_play else [])}
    samples, steps = config.rollout.samples, config.steps
    diagnosis = Diagnosis(config.algorithm, samples, run.env.cls, run.folder, run.say, steps=steps, names=names)
    while trainer.step < config.steps:
        run.stop.check()
        result = trainer.train_step()
        run.write(result.episodes)
        if run.records is not None:
            run.records.write(result.records)
        diagnosis.episodes = result.episodes
        run.metrics.write("train", trainer.step, result.metrics | diagnosis.observe(result.metrics))
        diagnosis.require_scores(run.stop.hint)
        last = trainer.step == config.steps
        reported = last and run.dev_split == config.eval.split  # by `finish`, on all of its tasks
        if config.eval.every and trainer.step % config.eval.every == 0 and not reported:
            _evaluate_meanwhile(run, trainer, sampled)
        run.progress.train_step(trainer.step, config.steps, result.metrics, run.dev)
        if recomputes and (old := result.metrics.get("perf/old_s")):
            part = old / result.metrics["perf/update_s"]
            run.say(f"   Old took {old:.2f} s, {part:.0%} of this step's update (perf/old_s).")
            recomputes = False
        if last or run.stop.is_asked or trainer.step % config.checkpoint_every == 0:
            run.episodes.flush()
            save_checkpoint(run.folder / CHECKPOINT, trainer)


def _evaluate_meanwhile(run: LiveRun, trainer: Trainer, params: SamplingParams) -> None:
    """Evaluate on the tasks for that, and keep the weights that do best."""
    evaluation, _ = trainer.evaluate(run.dev_tasks, params, run.dev_split)
    run.metrics.write("eval", trainer.step, evaluation.row(run.dev_split, "sampled"))
    success = evaluation.success
    run.dev = f"{success.share} of {success.n} {run.dev_split} tasks at step {trainer.step}"
    _keep_if_best(run, trainer, evaluation)


def _keep_if_best(run: LiveRun, trainer: Trainer, evaluation: Evaluation) -> None:
    """Keep the weights if none did better on the tasks that are evaluated on during training."""
    if run.config.eval.every and run.config.eval.keep_best and evaluation.success.n:
        save_best(run.folder / BEST, trainer, evaluation.success.value)


def finish(run: LiveRun, trainer: Trainer) -> Path:
    """Evaluate and write the report."""
    if trainer.step:  # without a step, what was seen before is what there is
        evaluate(run, trainer, "after")
    run.episodes.flush()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1 if sys.platform == "linux" else 1024) / 1024
    report = write_reports(run.folder, run.config, _facts(run), peak_rss_mib=peak)
    say = run.progress.say
    wall = run.metrics.wall_s
    say(escape(f"\nDone in {wall:.0f} s, at most {peak:.0f} MiB. The report: {from_here(report)}"))
    best = best_evaluation(run.folder / BEST)
    if best is not None and best["step"] < trainer.step:
        where = from_here(run.folder / BEST)
        say(escape(f"The weights that did best during training, {_best_weights(run)}, are in {where}"))
    say("Try next:")
    folder = from_here(run.folder)
    for line in (
        command("view", folder),
        command("view", folder, f"{run.config.eval.split}-{trainer.step:05d}-sampled-0000", "--tokens"),
        rollout_command(run.config, run.env, run.folder / CHECKPOINT),
        command("train", "env=search-v0" if run.env.id != "search-v0" else "env=calculator-v0"),
    ):
        say(f"  {escape(line)}")
    return run.folder


def _best_weights(run: LiveRun) -> str | None:
    """Return in words how the best weights did, if any were kept."""
    if (found := best_evaluation(run.folder / BEST)) is None:
        return None
    return f"with {found['success']:.1%} of the {run.dev_split} tasks at step {found['step']:.0f}"


def _facts(run: LiveRun) -> dict[str, str]:
    """Return what the report says about this backend's part of the run."""
    config = run.config
    demonstrated = next((r for r in read_metrics(run.folder / METRICS) if r["kind"] == "demonstrations"), None)
    facts = dict[str, str]()
    if demonstrated is not None:
        is_known = demonstrated.get("unknown") != demonstrated["n"]
        said = "{n}, of which {failed} fail" if is_known else "{n}, whose success no reward says"
        facts["demonstrations"] = said.format(**demonstrated)
    if (best := _best_weights(run)) is not None:
        facts["best weights"] = f"those {best}"
    return facts | {
        "training": config.describe_training(),
        "control": "rewards are shuffled" if config.shuffle_rewards else "none",
    }


def _minutes(config: TrainConfig) -> str:
    """Return how long a run takes, from times measured on two cores of a 2024 server with the default model."""
    episodes = config.rollout.groups * config.rollout.samples
    cloned = config.warm_start.clone_steps * config.warm_start.batch
    seconds = 40 + cloned / 210 + config.steps * episodes / 130
    return f"{seconds / 60:.0f} minutes" if seconds > 90 else f"{seconds:.0f} seconds"
