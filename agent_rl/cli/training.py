"""`agent-rl train | doctor`."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path

from agent_rl.backends.run import Run
from agent_rl.backends.settings import backend_of, require_verl, resumed_changes, training_config
from agent_rl.cli.settings import settings_of
from agent_rl.config import list_settings, load_config, write_config
from agent_rl.errors import ConfigError

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
    config = None if "resume" in settings else training_config(**settings)  # type: ignore[arg-type]
    if config is None:
        _check_resumed(settings)
    elif not asked:
        config.load_env()

    from agent_rl import api  # a mistake in the settings shows before
    from agent_rl.runs.stop import Interrupted

    if not asked:
        try:
            print(f"Done: {api.train(**settings).folder}")  # type: ignore[arg-type]  # checked by the schema
        except Interrupted as hint:
            print(f"Stopped; {hint}")
            return 130
        return 0
    if config is None:
        all_asked = ", ".join(asked)
        raise ConfigError(f"{all_asked} can't change when a run is resumed: it keeps its own settings (but for steps)")
    if arguments.config:
        print(write_config(config))
    elif arguments.explain:
        from agent_rl.algorithms.explain import explain

        print(explain(config.algorithm))
    else:
        print(api.checked_config(config))
    return 0


def _check_resumed(settings: Mapping[str, object]) -> None:
    """Refuse to resume what is no run, or with other settings, before `api` is imported."""
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

    config = load_config("backend/verl", VerlConfig, settings={"start_from": "MODEL", **settings})
    require_verl()
    from agent_rl.backends.verl.driver import run as verl_run

    return verl_run.doctor(config, print)
