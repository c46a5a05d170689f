"""The calls that most people need: `run` some episodes, `evaluate` a policy, `train` or `load` one."""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from agent_rl.backends.run import Run
from agent_rl.backends.settings import (
    EnvNames,
    backend_of,
    id_of,
    require_torch,
    require_verl,
    resumed_changes,
    schema_of,
    training_config,
)
from agent_rl.checks.report import CheckReport
from agent_rl.config import check_config
from agent_rl.core.episode import Episode, Origin
from agent_rl.core.messages import JSON
from agent_rl.errors import ConfigError
from agent_rl.gym.budget import Budget
from agent_rl.gym.env import Env
from agent_rl.gym.registry import EnvSpec, load_once, spec
from agent_rl.gym.tasks import EVAL, TRAIN
from agent_rl.judge.reward import require_judges
from agent_rl.policy import AnyPolicy, PolicyConfig, TokenPolicy, open_policy, sampling_params
from agent_rl.policy.by_name import require_policy
from agent_rl.rendering.config import RendererConfig
from agent_rl.rollout import Evaluation, run_groups, run_jobs, split_jobs, summarise
from agent_rl.rollout.closing import check_constructor
from agent_rl.rollout.fit import check_policy_fit
from agent_rl.rollout.match import match_jobs
from agent_rl.runs.folder import CONFIG, check_place, load_imports
from agent_rl.worker_threads import outside_loop

if TYPE_CHECKING:
    from agent_rl.backends.embedded.config import TrainConfig
    from agent_rl.backends.verl.config.settings import VerlConfig
    from agent_rl.runs.stop import Stop
    from agent_rl.view.progress import Progress

PolicyChoice: TypeAlias = AnyPolicy | str | Path | Mapping[str, JSON]


def run(
    env: str | type[Env],
    policy: PolicyChoice | list[PolicyChoice] = "oracle",
    *,
    n: int = 1,
    samples: int = 1,
    split: str = TRAIN,
    seed: int = 0,
    concurrency: int = 64,
    budget: Budget | None = None,
    env_args: Mapping[str, JSON] | None = None,
) -> list[Episode]:
    """Run episodes of an environment and return them, in the order of their tasks.

    Args:
        env: a registered id or class.
        policy: any `Policy`; the name of one, such as "oracle" for the environment's own script; the folder of a
            checkpoint or run; or a name with settings, `{"name": name, key: value}`. A list is one for each player of
            a `Game`, who have episodes and groups of their own.
        n: how many tasks, the first of the split.
        samples: episodes per task; those of a task form a group.
        split: which tasks.
        seed: of the episodes' random numbers.
        concurrency: how many episodes may be under way at a time.
        budget: instead of the environment's own.
        env_args: passed to the environment's constructor.

    Raises:
        UnknownEnvError: if there is no such environment.
        ConfigError: if there is no such policy or split, or the arguments don't fit the environment.
    """
    return _run(env, policy, n, samples, Origin("rollout", split), seed, concurrency, budget, env_args)


def evaluate(
    env: str | type[Env],
    policy: PolicyChoice = "oracle",
    *,
    n: int = 256,
    samples: int = 1,
    split: str = EVAL,
    seed: int = 0,
    concurrency: int = 64,
    budget: Budget | None = None,
    env_args: Mapping[str, JSON] | None = None,
) -> Evaluation:
    """Run the first `n` tasks of a split and summarise them; arguments as of `run`.

    Example::

        with ar.OpenAIPolicy("gpt-5-mini") as policy:
            result = ar.evaluate("search-v0", policy, n=32, samples=4)
        print(result.success, result.pass_at(4), result.usage, result.by("relation"))

    The split is all of its tasks if it has fewer; `Evaluation.success.n` counts them. A part of `train` is held out as
    `eval` where an environment names no such split; a warning says so once.
    """
    if split == EVAL and (note := spec(id_of(env)).tasks.describe_held_out()):
        _warn_once(f"{id_of(env)}: {note}")
    return summarise(_run(env, policy, n, samples, Origin("eval", split), seed, concurrency, budget, env_args))


def check(
    env: str | type[Env],
    *,
    n: int = 16,
    seed: int = 0,
    seconds: float = 60.0,
    env_args: Mapping[str, JSON] | None = None,
) -> CheckReport:
    """Play an environment with its oracle and with policies without skill, and report what is wrong with it.

    Its tools are called with arbitrary arguments: what they act on should be a sandbox or a stand-in.

    Example::

        assert not ar.check("shop-v0").findings

    Args:
        env: a registered id or class.
        n: tasks of each split.
        seed: of the episodes.
        seconds: how long one episode may take.
        env_args: passed to the environment's constructor.

    Raises:
        UnknownEnvError: if there is no such environment.
        ConfigError: if the arguments don't fit it, or its tasks can't be read.
    """
    from agent_rl.checks.check import CheckSettings, check_env

    settings = check_config(CheckSettings, {"env": id_of(env), "n": n, "seed": seed, "seconds": seconds})
    return check_env(
        spec(settings.env), n=settings.n, seed=settings.seed, seconds=settings.seconds, env_args=env_args or {}
    )


def train(
    env: EnvNames | None = None,
    *,
    backend: str | None = None,
    resume: Path | str | None = None,
    imports: Sequence[str | Path] = (),
    progress: bool = True,
    **settings: object,
) -> Run:
    """Train a model on an environment and return its run; also in a notebook.

    Ctrl-C, or a notebook's interrupt, stops after the present step.

    Example::

        run = ar.train("calculator-v0", algorithm="gspo", steps=100, rollout={"groups": 8})
        print(ar.evaluate("calculator-v0", run.policy(temperature=0)).success)

    Args:
        env: a registered id or class, or a mixture, a list of them and of `{"env": ..., "weight": 3}`; calculator-v0 if
            left out.
        backend: "embedded", which makes a small model unless `start_from` names one, or "verl", on Ray with vLLM. Left
            out, it is the resumed run's, otherwise "embedded".
        resume: the folder of a run to continue, with its own settings but for `steps`, `judge.max_cost` and
            `judge.prices`, and `device` and `processes` of an embedded one.
        imports: files that register environments and parts of algorithms.
        progress: whether to show it.
        settings: any other setting, by its name in `agent-rl train --config`: of a section as a dictionary, or by its
            full name, as in `**{"rollout.groups": 8}`. `async_` is `async`.

    Raises:
        ConfigError: naming the setting that is wrong, or what is not installed.
        CheckpointError: if there is no run to resume, or no model to start from.
        Interrupted: if the run was asked to stop; the message says how to continue.
    """
    if resume is None:
        return Run(_start(training_config(env, backend=backend, imports=imports, **settings), progress))
    folder = Path(resume)
    for file in imports:  # of a run that began before its imports were stored
        load_once(str(Path(file).resolve()))
    backend = backend or backend_of(folder)
    return Run(_resume(folder, backend, resumed_changes(backend, {"env": env} | settings), progress))


def checked_config(config: TrainConfig | VerlConfig) -> str:
    """Check all that can be checked without training; return the full config as YAML: verl's own for a run on verl.

    Raises:
        ConfigError: if the environment can't be trained on with these settings.
    """
    from omegaconf import OmegaConf

    from agent_rl.backends.embedded.config import TrainConfig

    if isinstance(config, TrainConfig):
        from agent_rl.backends.embedded.check import check_run, index_stored

        env = check_run(config)
        index_stored(config, env)
        try:
            from agent_rl.backends.embedded.memory import require_memory
        except ImportError:
            memory = "memory: estimated where torch is installed"
        else:
            memory = str(require_memory(config, env))
        return f"# {memory}\n{OmegaConf.to_yaml(config.model_dump(mode='json', by_alias=True))}"
    require_verl()
    from agent_rl.backends.verl.driver import run as verl

    return verl.dry_run(config)


def load(
    folder: str | Path,
    temperature: float = 1.0,
    *,
    max_tokens: int | None = None,
    context: int | None = None,
    device: str = "cpu",
    renderer: str | None = None,
) -> TokenPolicy:
    """Return the model of a run, a checkpoint or any folder in Hugging Face's format as a policy.

    Example::

        episodes = ar.run("calculator-v0", ar.load("runs/latest"), n=4)

    Args:
        folder: a run's folder, its checkpoint's, or a model's.
        temperature: 0 is greedy.
        max_tokens: of one reply; None for the run's or the model's own limit.
        context: the longest sequence, in tokens; None for the run's, otherwise 1024, of a model of so many positions.
        device: "cpu", "cuda", "cuda:1", "mps", or "auto", a GPU if there is one.
        renderer: its name, as in `load_renderer`, for a model that is no run's; a run's remembers its own.

    Raises:
        ConfigError: if torch or transformers are missing, or the device.
        CheckpointError: if the folder holds no model, or its run's imports are not there.
    """
    load_imports(folder)
    require_torch()
    folder = Path(folder)
    run = folder.parent if folder.name in ("checkpoint", "best") else folder
    if (run / CONFIG).exists():
        own = folder if folder.name == "best" else None
        return Run(run).policy(temperature, max_tokens=max_tokens, context=context, device=device, folder=own)
    from agent_rl.backends.embedded.actor import load_actor

    actor = load_actor(folder, context=context, device=device, renderer=RendererConfig(name=renderer))
    return actor.policy(actor.params(temperature, max_tokens))


def _start(config: TrainConfig | VerlConfig, progress: bool) -> Path:
    from agent_rl.backends.embedded.config import TrainConfig

    if isinstance(config, TrainConfig):
        from agent_rl.backends.embedded.check import check_run

        env = check_run(config)  # a mistake shows before torch is imported
        check_place(config.runs_dir, config.name or env.name)
        require_torch()
        from agent_rl.backends.embedded.run import start_run

        return _shown(partial(start_run, config, env=env), progress)
    check_place(config.runs_dir, config.name or config.load_env().name)
    require_torch()
    require_verl()
    from agent_rl.backends.verl.driver.run import start

    return outside_loop(partial(start, config))


def _resume(folder: Path, backend: str, changes: Mapping[str, object], progress: bool) -> Path:
    from agent_rl.runs.folder import read_config

    load_imports(folder)
    read_config(folder, schema_of(backend)).load_env()  # a mistake here shows before torch is imported
    require_torch()
    if backend == "embedded":
        from agent_rl.backends.embedded.run import resume_run

        return _shown(lambda shown, stop: resume_run(folder, shown, stop, **changes), progress)
    require_verl()
    from agent_rl.backends.verl.driver.run import resume

    return outside_loop(partial(resume, folder, **changes))


def _shown(work: Callable[[Progress, Stop], Path], progress: bool) -> Path:
    """Run with a display, until it ends or is asked to stop."""
    from agent_rl.runs.stop import Stop
    from agent_rl.view.progress import Progress, Screen

    with Progress(Screen(quiet=not progress)) as shown:
        stop = Stop(shown.say)
        return outside_loop(lambda: work(shown, stop), stop.interrupt)


def _run(
    env: str | type[Env],
    policy: PolicyChoice | list[PolicyChoice],
    n: int,
    samples: int,
    origin: Origin,
    seed: int,
    concurrency: int,
    budget: Budget | None,
    env_args: Mapping[str, JSON] | None,
) -> list[Episode]:
    whole = {"n": (n, 1), "samples": (samples, 1), "seed": (seed, 0), "concurrency": (concurrency, 1)}
    for name, (value, least) in whole.items():
        if not isinstance(value, int) or value < least:
            raise ConfigError(f"{name}={value!r}: give a whole number of at least {least}")
    if not isinstance(budget, Budget | None):
        raise ConfigError(f"budget={budget!r}: give ar.Budget(turns=N)")
    chosen = [_chosen(each) for each in (policy if isinstance(policy, list) else [policy])]
    env_spec = replace(own := spec(id_of(env)), budget=budget or own.budget)
    if env_args:
        check_constructor(env_spec, env_args)
    jobs = split_jobs(env_spec, n, samples, seed, origin=origin, budget=budget, env_args=env_args)
    require_judges(env_spec)
    with ExitStack() as opened:
        players = [opened.enter_context(_opened(each, env_spec)) for each in chosen]
        for warning in filter(None, (check_policy_fit(jobs, player) for player in players)):
            warnings.warn(warning, RuntimeWarning, stacklevel=3)
        if isinstance(policy, list):
            jobs = [seated for job in jobs for seated in match_jobs(job, players)]
        if origin.purpose == "eval":
            return outside_loop(lambda: asyncio.run(run_jobs(jobs, players[0], concurrency=concurrency)))
        groups = outside_loop(lambda: asyncio.run(run_groups(jobs, players[0], concurrency=concurrency)))
        return [episode for group in groups for episode in group.episodes]


@cache
def _warn_once(text: str) -> None:
    """Warn the caller of this module's caller, once in a process."""
    warnings.warn(text, stacklevel=3)


def _chosen(policy: PolicyChoice) -> AnyPolicy | PolicyConfig:
    if isinstance(policy, str | Path):
        policy = {"name": str(policy)}
    chosen = check_config(PolicyConfig, policy) if isinstance(policy, Mapping) else policy
    if isinstance(chosen, PolicyConfig):
        load_imports(chosen.folder)
    return chosen


def _opened(policy: AnyPolicy | PolicyConfig, env: EnvSpec) -> AbstractContextManager[AnyPolicy]:
    if isinstance(policy, PolicyConfig):
        return open_policy(policy, sampling_params(policy), env)
    return nullcontext(require_policy(policy))
