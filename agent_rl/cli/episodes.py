"""`agent-rl rollout`: run episodes."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from rich.console import Console

from agent_rl.cli.config_text import list_settings
from agent_rl.cli.project.init import SETTINGS
from agent_rl.cli.settings import read_settings, settings_of
from agent_rl.cli.status import print_status
from agent_rl.config import load_config, write_setting
from agent_rl.core.display import from_here, plural
from agent_rl.errors import ConfigError
from agent_rl.gym.registry import spec
from agent_rl.gym.tasks import TRAIN
from agent_rl.runs.commands import command, env_word, judge_words
from agent_rl.runs.rollout import (
    CHANGEABLE,
    RolloutResult,
    RolloutSettings,
    floors_of,
    is_unpaid,
    resume_rollout,
    start_rollout,
)
from agent_rl.runs.stop import Interrupted
from agent_rl.store.heads import Head
from agent_rl.view.progress import Progress
from agent_rl.view.results import dump_results, headline, print_results, result_table
from agent_rl.view.text import failure_lines, print_table, short_id

ROLLOUT_EXAMPLES = """
policies: oracle, demonstrator, vllm, openai (any OpenAI-compatible server), the folder of a checkpoint or run, or your
          own (@ar.register_policy);
          without skill: random, constant, empty (answers), nothing (calls no tool)
  policy.text=TEXT         of constant: what it says in every turn
  policy.model=DIR         of vllm: run vLLM here, on this folder or name
  policy.url=URL           of vllm: a vLLM server (VLLM_API_KEY, if it wants a key)
  policy.engine.KEY=VALUE  of vllm: more of vLLM's engine arguments, such as tensor_parallel_size
  policy.tokenizer=DIR     of vllm: if it is not with the model
  policy.model=NAME        of openai; its key is read from OPENAI_API_KEY (policy.api_key_env=OTHER)
  policy.base_url=URL      of openai: the server, such as http://localhost:8000/v1; OpenAI's own if left out
  policy.retries=5         of openai: attempts after the first; policy.timeout=600: seconds of each
  policy.requests_per_minute=N, policy.tokens_per_minute=N   of openai
  policy.concurrency=64    of openai, and of vllm with policy.url: requests under way at the server
  policy.extra.KEY=VALUE   of openai: more of the request, such as reasoning_effort
  policy.send_reasoning=true   of openai: later requests hold the reasoning of earlier replies
  policy.check=false       of openai: don't look for the model before the first episode
  policy.slots=64          of a checkpoint: sequences that are sampled at a time
  policy.device=cuda       of a checkpoint: cpu, cuda, cuda:N or auto
of a checkpoint and of vllm:
  policy.renderer=NAME     instead of the one that fits the tokenizer; settings are policy.renderer.KEY=VALUE
  policy.context=N         the longest sequence in tokens
  policy.shorten.KEY=VALUE, policy.delegate.KEY=VALUE   as rollout.shorten and rollout.delegate of agent-rl train

examples:
  agent-rl rollout env=search-v0
  agent-rl rollout policy=runs/latest/checkpoint temperature=0 n=64
  agent-rl rollout policy=vllm policy.model=Qwen/Qwen3-4B max_tokens=1024 policy.context=8192
  agent-rl rollout policy=vllm policy.url=http://localhost:8000
  agent-rl rollout policy=openai policy.model=gpt-5-mini n=100 samples=4 max_tokens=8192
  agent-rl rollout resume=runs/20261122-101500-rollout         continue one that was interrupted
  agent-rl rollout resume=runs/20261122-101500-rollout retry_failed=true
  agent-rl rollout --status runs/20261122-101500-rollout       which episodes, turns and calls are under way"""


def rollout_help() -> str:
    """Return the settings of a rollout and examples, for `--help`."""
    return f"\n\nsettings:\n{list_settings(load_config(None, RolloutSettings))}\n{ROLLOUT_EXAMPLES}"


def rollout(arguments: argparse.Namespace) -> int:
    """Run episodes and store them; or say what a rollout is doing."""
    if arguments.status is not None:
        return print_status(arguments)
    settings = settings_of(arguments)
    resumed, retry_failed = settings.pop("resume", None), settings.pop("retry_failed", None)
    if retry_failed is not None and (resumed is None or not isinstance(retry_failed, bool)):
        raise ConfigError("retry_failed=true belongs to resume=FILE: it runs the rollout's failed episodes again")
    if resumed is not None and (fixed := [name for name in settings if name not in CHANGEABLE]):
        raise ConfigError(
            f"{', '.join(fixed)} can't change when a rollout is resumed: it keeps its own settings "
            f"(but for {', '.join(CHANGEABLE)}; retry_failed=true runs its failures again)"
        )
    started = time.monotonic()
    try:
        with Progress() as progress:
            if resumed is not None:
                ran = resume_rollout(str(resumed), progress, retry_failed=bool(retry_failed), changes=settings)
            else:
                ran = start_rollout(load_config(None, RolloutSettings, settings=settings), progress)
    except Interrupted as hint:
        print(f"Stopped; {hint}")
        return 130
    _report(ran, time.monotonic() - started)
    return 0


def _report(ran: RolloutResult, took: float) -> None:
    """Store a rollout's results beside its episodes, and print both."""
    result, settings, console = ran.evaluation, ran.settings, Console()
    episodes, file = result.episodes, from_here(ran.file)
    floors = floors_of(ran, took)
    prices = {"prices": settings.prices, "judge_prices": settings.judge.prices}
    rows = {env: of_env.table() for env, of_env in floors.items()}
    shown = rows if len(rows) > 1 else next(iter(rows.values()), {})
    table = result_table(result, by=settings.by, **prices) | ({"floors": shown} if shown else {})
    ran.file.with_suffix(".results.json").write_text(dump_results(table), encoding="utf-8")
    print_table(map(Head.of, episodes[:20]), console)
    print_results(result, console, title=settings.env_id, by=settings.by, **prices)
    for env, found in result.of_env.items():
        print(headline(env, found))
    for env, of_env in floors.items():
        print(f"{env}: {of_env}" if len(floors) > 1 else of_env)
    if failures := failure_lines(episodes):
        print("\n".join(failures))
    again = command("rollout", write_setting("resume", file), "retry_failed=true")
    if unpaid := sum(map(is_unpaid, episodes)):
        print(
            f"judge.max_cost is spent, which leaves {unpaid} of {plural(len(episodes), 'episode')} without a score. "
            f"Run them again, when judges may spend as much again, or more with judge.max_cost=N: {again}\n"
            f"Or judge them as they are: {command('judge', 'run', file, 'RUBRIC')}"
        )
    elif result.failed:
        print(f"Run them again: {again}")
    view = command("view", file, short_id(episodes[0].id))
    print(f"{plural(len(episodes), 'episode')} in {file}; read one: {view}")
    envs = dict.fromkeys(episode.env for episode in episodes)
    can_train = all(TRAIN in spec(env).tasks.splits for env in envs) and not settings.env_args
    if settings.policy.name == "oracle" and can_train and all(e.success and e.reward is not None for e in episodes):
        print(f"The oracle solves all of them; train on them: {_training(settings)}")


def _training(settings: RolloutSettings) -> str:
    """Return the command that trains on a rollout's environment, with the project's own settings if it has them."""
    files, judge = [Path(from_here(file)) for file in settings.imports], judge_words(settings.judge)
    for own in (file.with_name(SETTINGS) for file in files):
        if own.exists() and read_settings(own).get("env") == settings.env:
            return command("train", write_setting("config", str(own)), *judge)
    return command("train", env_word(settings), *judge, imports=files)
