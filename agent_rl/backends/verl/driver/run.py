"""A whole run on verl: settings → verl's full config → checks → a Ray actor that drives the training."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from agent_rl.backends.embedded.fine_tuning import require_peft
from agent_rl.backends.group_sampling import check_environment, held_out_tasks
from agent_rl.backends.verl.config.config_check import compose_verl
from agent_rl.backends.verl.config.settings import VerlConfig, agent_loop
from agent_rl.backends.verl.driver.checkpoints import describe_checkpoint
from agent_rl.backends.verl.driver.preflight import preflight
from agent_rl.backends.verl.driver.resume import last_checkpoint, owes_evaluation, rewind_to_checkpoint
from agent_rl.backends.verl.driver.secret_settings import without_secrets
from agent_rl.backends.verl.driver.watchdog import (
    FAULT,
    Watchdog,
    read_fault,
    stop_episodes,
    stop_with,
    watched_processes,
)
from agent_rl.config import with_settings, write_setting
from agent_rl.core.display import plural
from agent_rl.engines.model_files import is_hub_id, require_model
from agent_rl.errors import AgentRLError, ConfigError, InfrastructureError, in_brief
from agent_rl.judge.config import JudgeConfig
from agent_rl.judge.run import run_judge
from agent_rl.rendering import load_renderer
from agent_rl.rendering.by_name import require_renderer
from agent_rl.rollout.fit import check_run_fit
from agent_rl.runs.commands import command
from agent_rl.runs.folder import CONFIG, make_latest, name_of, new_folder, read_config, removed_if_unused, warn
from agent_rl.runs.report import write_reports
from agent_rl.runs.writers import require_writers
from agent_rl.view.progress import Progress

RUNTIME_ENV = "ray_kwargs.ray_init.runtime_env"


def dry_run(config: VerlConfig) -> str:
    """Check a config as `check_run` does; return verl's full config in YAML, and what a checkpoint takes."""
    verl = check_run(config)
    return f"# {describe_checkpoint(verl)}\n{OmegaConf.to_yaml(without_secrets(OmegaConf.to_container(verl)))}"


def check_run(config: VerlConfig) -> DictConfig:
    """Check a config without Ray; return verl's full config of it.

    Raises:
        UnknownEnvError: if there is no such environment.
        ConfigError: if the environment or verl's config can't do what is asked, or there is no such renderer.
        CheckpointError: if `start_from` is a relative path without a model; of all others, the nodes know.
    """
    check_environment(config)
    require_writers(config.report_to)
    require_renderer(config.renderer.name)
    if not (Path(config.start_from).is_absolute() or is_hub_id(config.start_from) or "://" in config.start_from):
        require_model(config.start_from)
    if config.lora is not None:
        require_peft()
    return compose_verl(config, Path(config.runs_dir) / "dry-run")


def doctor(config: VerlConfig, say: Callable[[str], object]) -> int:
    """Tell whether this machine's Ray cluster can run a config; return the exit status."""
    verl = check_run(config)
    problems = preflight(config, verl, say)
    say(describe_checkpoint(verl))
    for problem in problems:
        say(f"missing: {problem}")
    if not problems:
        say("nothing is missing: verl can run this config here")
    return 1 if problems else 0


def start(config: VerlConfig) -> Path:
    """Train in a new folder below `runs_dir`; return it.

    Raises:
        ConfigError: if the environment, verl's config or the cluster can't do what is asked.
    """
    warnings = require_cluster(config)
    folder = new_folder(config.runs_dir, config.name or name_of(config.env_id))
    with removed_if_unused(folder):
        for warning in warnings:
            warn(folder, warning, print)
        return run(config, folder)


def check_fit(config: VerlConfig) -> str | None:
    """Compare the environment's openings and solutions with an episode's tokens; return a warning.

    Raises:
        ConfigError: if there is no such renderer, or no opening leaves room for a reply.
        RenderError: if the renderer does not fit the tokenizer: no worker could make it.
    """
    from transformers import AutoTokenizer

    own = ("tokenizer_path", "custom_chat_template")
    place, template = (config.verl.get(f"actor_rollout_ref.model.{name}") for name in own)
    try:
        tokenizer = AutoTokenizer.from_pretrained(place or config.start_from)
    except (OSError, ValueError) as error:  # the workers may know more, such as code of the model's
        return (
            f"start_from={config.start_from}: rollout.context={config.rollout.context} and budget.tokens were not "
            f"compared with the openings of {config.env_id}, as its tokenizer can't be used "
            f"({type(error).__name__}: {in_brief(error)})"
        )
    tokenizer.chat_template = template or tokenizer.chat_template
    renderer = load_renderer(tokenizer, config.renderer)
    context = config.rollout.context
    return check_run_fit(config.load_env(), config.split, config.env_args, renderer, context, "rollout.context")


def resume(folder: Path, **changes: object) -> Path:
    """Continue a run from its last checkpoint, with its own settings; from the start if it has none.

    Args:
        folder: a run's folder.
        changes: settings instead of the configured ones, see `resumed_changes`.

    Raises:
        CheckpointError: if the folder is no run, or its checkpoint is of no use.
        ConfigError: if there is nothing left to do, or the cluster can't do it.
        StoreError: if the run is still going.
    """
    folder = folder.resolve()
    config = with_settings(read_config(folder, VerlConfig), changes)
    done = last_checkpoint(folder / "checkpoints")
    if done > config.steps or (done == config.steps and not owes_evaluation(folder, config, done)):
        raise ConfigError(f"the run is at step {done} already: give more with steps=N")
    for warning in require_cluster(config):
        warn(folder, warning, print)
    return run(config, folder, rewind_to_checkpoint(folder))


def require_cluster(config: VerlConfig) -> list[str]:
    """Join Ray and check that it can run a config, before anything is written; print what checkpoints will take.

    Returns:
        Warnings, to be stored with the run.

    Raises:
        ConfigError: naming all that is missing, and what to set.
    """
    verl = check_run(config)
    say, env = Progress().say, config.load_env()
    if note := env.tasks.describe_held_out():
        say(f"[yellow]{env.id}: {note}.[/yellow]")
    held_out = held_out_tasks(env, config)
    say(f"Evaluation on {held_out.which}.")
    if config.decided:
        say(f"{config.decided} timing_s/old_log_prob says what it costs.")
    print(describe_checkpoint(verl), flush=True)
    if problems := preflight(config, verl):
        raise ConfigError("; ".join(problems))
    return [warning for warning in (held_out.warning, check_fit(config), config.uncorrected) if warning]


def run(config: VerlConfig, folder: Path, step: int = 0) -> Path:
    """Train in a folder, from the checkpoint of a step if it is not 0; return the folder.

    Raises:
        ConfigError: if verl's config can't do what is asked.
        InfrastructureError: if a process that the run depends on died or is stuck, or serves other weights.
    """
    import ray
    from ray.exceptions import RayError
    from verl.trainer.main_ppo import run_ppo

    folder = folder.resolve()
    composed = compose_verl(config, folder)
    OmegaConf.save(without_secrets(config.model_dump(mode="json", by_alias=True)), folder / CONFIG)
    OmegaConf.save(agent_loop(config, folder), folder / "agent_loop.yaml")
    OmegaConf.save(without_secrets(OmegaConf.to_container(composed)), folder / "verl.yaml")
    (folder / FAULT).unlink(missing_ok=True)
    composed.trainer.val_before_train = owes_evaluation(folder, config, step)
    try:
        run_ppo(composed, task_runner_class=ray.remote(Runner))
    except RayError as error:  # its traceback is the driver's: what says more comes first
        if (fault := read_fault(folder)) is not None:
            resumed = command("train", "backend=verl", write_setting("resume", str(folder)))
            how = f"Continue from the last checkpoint with: {resumed}"
            raise InfrastructureError(f"{fault}. {how}") from None
        if isinstance(cause := getattr(error, "cause", None), AgentRLError):
            raise cause from None
        raise
    rollout = config.rollout
    facts = {
        "model": config.start_from,
        "training": f"{plural(config.steps, 'step')} of {plural(rollout.groups, 'task')} x "
        f"{plural(rollout.samples, 'episode')} on verl, "
        f"async.mode={config.asynchrony.mode}",
    }
    write_reports(folder, config, facts)
    return folder


class Runner:
    """The Ray actor that drives a run; `verl.trainer.main_ppo.run_ppo` starts it."""

    def run(self, config: DictConfig) -> None:
        """Train to the end.

        Raises:
            ConfigError: if the config asks for what can't be done.
        """
        import transfer_queue as tq
        from verl.trainer.ppo.v1 import AgentLoopManagerTQ
        from verl.utils.logging_utils import configure_verl_logging

        from agent_rl.backends.verl.driver.trainer import TRAINERS

        configure_verl_logging()
        config.transfer_queue.enable = True
        OmegaConf.resolve(config)
        if OmegaConf.select(config, RUNTIME_ENV):  # Ray has it by now; verl hands its loggers the config, keys and all
            OmegaConf.update(config, RUNTIME_ENV, {}, merge=False)
        tq.init(config.transfer_queue)
        try:
            trainer = TRAINERS[config.trainer.v1.trainer_mode](config=config)
            trainer.init()
            manager = AgentLoopManagerTQ.create(
                config=config,
                llm_client=trainer.get_llm_client(),
                teacher_client=trainer.get_teacher_client(),
                reward_loop_worker_handles=trainer.get_reward_handles(),
            )
            folder = Path(config.data.agent_rl.episodes).parent
            if not last_checkpoint(folder / "checkpoints"):  # a new run, whose models and servers are there
                make_latest(folder)
            watched = watched_processes(trainer, manager, trainer.env.id)
            judge = JudgeConfig.model_validate(OmegaConf.to_container(config.data.agent_rl.judge))
            with Watchdog(watched, stop_with(folder)), run_judge(judge, trainer.env, folder):
                try:
                    trainer.fit(manager)
                finally:
                    stop_episodes(manager)
            trainer.logger.finish(exit_code=0)
        finally:
            tq.close()
