"""The judge of a run: from its settings to the rewards that ask it, with its calls and rubrics in the run's folder."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from agent_rl.errors import ConfigError, StoreError
from agent_rl.gym.registry import EnvSpec
from agent_rl.judge.base import Judge
from agent_rl.judge.build import build_judge
from agent_rl.judge.config import JudgeConfig
from agent_rl.judge.files import dump_rubric, rubric_of
from agent_rl.judge.model import ModelJudge
from agent_rl.judge.proposing import evolving
from agent_rl.judge.reward import judge_rewards, require_judges, use_judge
from agent_rl.judge.rubric import Rubric
from agent_rl.store.lines import has_writer

CALLS, RUBRICS = "judge_calls.jsonl", "rubrics.json"


def check_judges(config: JudgeConfig, env: EnvSpec) -> None:
    """Refuse settings without a judge for an environment's rubrics, and those of a judge that nothing asks.

    Raises:
        ConfigError: naming what to set.
    """
    with use_judge(_model_of(config)):
        require_judges(env)
    given = judge_rewards(env)
    of_named = {"prices"} if given and config.model is None else None  # of judges that the environment names
    settings = config.model_dump(exclude=of_named, exclude_defaults=True)
    if config.evolve or not settings or (config.model is not None and any(own.may_ask_run for _, own in given)):
        return
    why = f"the judges of {env.id} need no model, or name their own" if given else f"{env.id} has no @ar.judge"
    name, value = next(iter(settings.items()))
    raise ConfigError(f"judge.{name}={value} changes nothing: {why}; leave it out")


@contextmanager
def run_judge(
    config: JudgeConfig, env: EnvSpec, folder: Path, *, workers: int = 1, evolves: bool = False
) -> Iterator[None]:
    """Let the judge of a run's settings score the episodes that are run meanwhile.

    Args:
        config: the settings.
        env: the run's environment; without judges, nothing is written.
        folder: of the run, for the rubrics of all tasks and for the calls.
        workers: how many processes of the run judge; this one takes its share of what is limited.
        evolves: whether rubrics may evolve: whether something learns from the groups, see `evolving_judge`.

    Raises:
        ConfigError: as `check_judges` does, and if rubrics are to evolve where they can't.
        StoreError: if another run is judging in the folder.
    """
    check_judges(config, env)
    given = judge_rewards(env)
    if config.evolve and not (evolves and given):
        where = "on the backend embedded" if given else "in an environment with @ar.judge"
        raise ConfigError(f"judge.evolve=true: criteria evolve in training, {where}; leave it out here")
    if not given:
        yield
        return
    folder.mkdir(parents=True, exist_ok=True)
    judge = judge_of_worker(config, log := folder / CALLS, workers)
    if judge is not None and has_writer(log):  # or each episode would fail at its end
        raise StoreError(
            f"another run is judging in {folder}, and has its log {log.name} open: wait for its end, or give "
            "this one a folder of its own, such as out=FOLDER"
        )
    save_rubrics([own.rubric for _, own in given if own.rubric is not None], folder / RUBRICS)
    try:
        with use_judge(judge):
            yield
    finally:
        if judge is not None:
            judge.close()


def save_rubrics(rubrics: list[Rubric], file: Path) -> None:
    """Write rubrics by their labels, beside those that a file has."""
    found = {**read_rubrics(file), **{rubric.label: rubric for rubric in rubrics}}
    if found:
        dumped: Mapping[str, object] = {label: dump_rubric(rubric) for label, rubric in found.items()}
        new = file.with_suffix(".new")  # a kill or a full disk leaves those that are there
        new.write_text(json.dumps(dumped, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        new.replace(file)


def read_rubrics(file: Path) -> dict[str, Rubric]:
    """Return the rubrics of a run by their labels, as judgements name them; none if it stored none."""
    if not file.exists():
        return {}
    return {label: rubric_of(value) for label, value in json.loads(file.read_text(encoding="utf-8")).items()}


def judge_of_worker(config: JudgeConfig, log: Path, workers: int) -> Judge | None:
    """Return the judge of one of several processes of a run, with its share of what is limited; None without a model.

    Args:
        config: the run's settings.
        log: the file of this process's calls.
        workers: how many processes there are.
    """
    return _model_of(share_of_worker(config, workers), log)


def share_of_worker(config: JudgeConfig, workers: int) -> JudgeConfig:
    """Return the settings with the share of what is limited that one of several processes of a run has."""
    if workers == 1:
        return config
    limits = {name: getattr(config, name) for name in ("requests_per_minute", "tokens_per_minute", "max_cost")}
    shares: dict[str, float] = {name: limit / workers for name, limit in limits.items() if limit is not None}
    return config.model_copy(update={**shares, "concurrency": max(1, config.concurrency // workers)})


def _model_of(config: JudgeConfig, log: Path | None = None) -> Judge | None:
    if config.model is None:
        return None
    judge = build_judge(config, log)
    return evolving(judge) if config.evolve and isinstance(judge, ModelJudge) else judge
