"""`agent-rl train | doctor`."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from agent_rl.backends.settings import backend_of, require_files, require_verl, resumed_changes, training_config
from agent_rl.cli.config_text import list_settings, write_config
from agent_rl.cli.settings import settings_of
from agent_rl.config import load_config
from agent_rl.core.display import from_here
from agent_rl.errors import ConfigError

if TYPE_CHECKING:
    from agent_rl.backends.embedded.config import TrainConfig
    from agent_rl.backends.verl.config.settings import VerlConfig

EXAMPLES = """
examples:
  agent-rl train
  agent-rl train env=search-v0 seed=1
  agent-rl train --import my_envs.py env=shop-v0 steps=100
  agent-rl train algorithm=gspo algorithm.objective.clip_high_eps=1e-3 --explain
  agent-rl train algorithm=dpo episodes=runs/latest start_from=runs/latest/checkpoint optimizer.lr=1e-3
  agent-rl train resume=runs/latest                            continue a run; with steps=N, up to there
  agent-rl train --status runs/latest                          which episodes, turns and calls are under way
  agent-rl train backend=verl start_from=MODEL env=search-v0 hardware=gpu_8x80gb --dry-run"""


def train_help() -> str:
    """Return the settings of training and examples, for `--help`."""
    from agent_rl.backends.embedded.config import TrainConfig

    more = "With their whole meaning: agent-rl train --config, or agent-rl train backend=verl --config"
    return f"\n\nsettings:\n{list_settings(load_config('backend/embedded', TrainConfig))}\n\n{more}\n{EXAMPLES}"


def train(arguments: argparse.Namespace) -> int:
    """Train, or print what a run would do, or is doing."""
    if arguments.status is not None:
        from agent_rl.cli.status import print_status

        return print_status(arguments)
    settings = settings_of(arguments)
    asked = [f"--{name}" for name in ("config", "explain", "dry-run") if getattr(arguments, name.replace("-", "_"))]
    if "resume" in settings:
        _check_resumed(settings, asked)
    else:
        if not asked and settings.get("backend") != "verl":
            require_files(settings)
        config = training_config(**settings)  # type: ignore[arg-type]
        if asked:
            print(_shown(config, arguments))
            return 0
        config.load_env()

    from agent_rl import api  # a mistake in the settings shows before
    from agent_rl.runs.stop import Interrupted

    try:
        print(f"Done: {from_here(api.train(**settings).folder)}")  # type: ignore[arg-type]  # checked by the schema
    except Interrupted as hint:
        print(f"Stopped; {hint}")
        return 130
    return 0


def _shown(config: TrainConfig | VerlConfig, arguments: argparse.Namespace) -> str:
    """Return what is asked about a run, in place of the run."""
    if arguments.config:
        return write_config(config)
    if arguments.explain:
        from agent_rl.algorithms.explain import explain

        return explain(config.decided_algorithm)
    from agent_rl.api import checked_config

    return checked_config(config)


def _check_resumed(settings: Mapping[str, object], asked: Sequence[str]) -> None:
    """Refuse to resume what is no run, or with other settings, before `api` is imported."""
    if asked:
        all_asked = ", ".join(asked)
        raise ConfigError(f"{all_asked} can't change when a run is resumed: it keeps its own settings (but for steps)")
    from agent_rl.backends.run import Run

    folder = Path(str(settings["resume"]))
    given = {name: value for name, value in settings.items() if name not in ("resume", "imports", "backend")}
    resumed_changes(str(settings.get("backend") or backend_of(folder)), given)
    Run(folder)


def doctor(arguments: argparse.Namespace) -> int:
    """Check Ray's cluster for a run."""
    settings = settings_of(arguments)
    if settings.pop("backend", None) != "verl":
        raise ConfigError("doctor looks at Ray's cluster: write agent-rl doctor backend=verl, and settings as of train")
    from agent_rl.backends.verl.config.settings import VerlConfig

    config = load_config("backend/verl", VerlConfig, settings={"start_from": "any/model", **settings})
    require_verl()
    from agent_rl.backends.verl.driver import run as verl_run

    return verl_run.doctor(config, print)
