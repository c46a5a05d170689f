"""Train: what `agent-rl train` does, on the backend that is asked for."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from agent_rl.config import load_config
from agent_rl.errors import ConfigError

TRAIN_HELP = """\
Train a model on an environment; by default the embedded one: warm start, then reinforcement learning.

settings (any key of configs/backend/embedded.yaml; the most used):
  env=calculator-v0        what to train on; `agent-rl envs` lists them
  steps=100 seed=0          how long, and from which random numbers
  algorithm=grpo           a file in configs/algorithm/; `agent-rl algorithms` lists them
  model=tiny               a file in configs/model/ (tiny, tiny_moe)
  rollout.groups=16        tasks per step            rollout.samples=8   episodes per task
  optimizer.lr=2e-3        learning rate
  start_from=DIR           a checkpoint to train on from, instead of a fresh model and its warm start
  episodes=DIR             an earlier run whose stored episodes to learn from, instead of rollouts (algorithm=dpo)
  async.mode=one_step_off  learn from what weights async.max_staleness=1 updates ago sampled
  env_args.key=value       passed to the environment's constructor
  resume=runs/latest       go on where a run was stopped (with steps=N: up to there)
  backend=verl             train start_from=MODEL on Ray with vLLM, with the settings of configs/backend/verl.yaml

examples:
  agent-rl train
  agent-rl train env=search-v0 seed=1
  agent-rl train --import my_envs.py env=shop-v0 steps=100
  agent-rl train algorithm=gspo algorithm.objective.clip_high_eps=1e-3 --explain
  agent-rl train algorithm=dpo episodes=runs/latest start_from=runs/latest/checkpoint optimizer.lr=1e-3
  agent-rl train resume=runs/latest
  agent-rl train backend=verl start_from=MODEL env=search-v0 hardware=gpu_8x80gb --dry-run"""


def train(
    overrides: Sequence[str], imports: Sequence[str] = (), *, explain: bool = False, dry_run: bool = False
) -> int:
    """Train, or say what would be trained; return the exit status.

    Args:
        overrides: `key=value` settings; `backend=verl` trains on Ray with vLLM, `resume=FOLDER` goes on with a run.
        imports: files that register environments.
        explain: only print the algorithm's formula.
        dry_run: only check the settings and the environment, and print the full config: verl's with `backend=verl`.

    Raises:
        ConfigError: naming the setting that is wrong, or what is not installed.
    """
    given = dict(_pair(text) for text in overrides)
    backend = given.pop("backend", "embedded")
    if backend not in ("embedded", "verl"):
        raise ConfigError(f"no backend '{backend}': there are embedded and verl")
    require_torch()
    if dry_run and backend == "embedded" and "resume" not in given:
        return _dry_run(overrides)
    rest = [text for text in overrides if not text.startswith("backend=")]
    return _on_verl(rest, given, imports, explain, dry_run) if backend == "verl" else _embedded(rest, given, explain)


def _embedded(overrides: Sequence[str], given: dict[str, str], explain: bool) -> int:
    from agent_rl import algorithms
    from agent_rl.backends.embedded.config import TrainConfig
    from agent_rl.backends.embedded.run import Interrupted, resume_run, start_run
    from agent_rl.view.progress import Progress

    if explain:
        print(algorithms.explain(load_config("backend/embedded", TrainConfig, overrides).algorithm))
        return 0
    folder = given.pop("resume", None)
    if folder is not None:
        _check_resumed(set(given))
    try:
        with Progress() as progress:
            if folder is not None:
                resume_run(Path(folder), progress, steps=_steps(given.get("steps")))
            else:
                start_run(load_config("backend/embedded", TrainConfig, overrides), progress)
    except Interrupted as hint:
        print(f"Stopped; {hint}")
        return 130
    return 0


def _on_verl(
    overrides: Sequence[str], given: dict[str, str], imports: Sequence[str], explain: bool, dry_run: bool
) -> int:
    from omegaconf import OmegaConf

    from agent_rl import algorithms
    from agent_rl.backends.verl.config.settings import VerlConfig

    if "episodes" in given:
        raise ConfigError(
            f"episodes={given['episodes']}: learning from stored episodes is the embedded backend's; on verl, "
            "algorithm=dpo learns from pairs of its own rollouts: leave out episodes, or backend=verl"
        )
    resumed = given.get("resume")
    if resumed is not None:
        asked = {"--import": bool(imports), "--explain": explain, "--dry-run": dry_run}
        _check_resumed(set(given) - {"resume"} | {name for name, is_asked in asked.items() if is_asked})
    files = ",".join(str(Path(file).resolve()) for file in imports)
    config = (
        None
        if resumed
        else load_config("backend/verl", VerlConfig, [*overrides, *([f"imports=[{files}]"] if files else [])])
    )
    if explain and config is not None:
        print(algorithms.explain(config.algorithm))
        return 0
    if find_spec("verl") is None:
        raise ConfigError(
            "backend=verl needs verl, vLLM and Ray: `make setup-verl` installs them for a machine without a GPU, "
            "pip install 'agent-rl[verl]' for one with"
        )
    from agent_rl.backends.verl.driver.run import check_run, resume, start

    if resumed is not None:
        print(f"Done: {resume(Path(resumed), steps=_steps(given.get('steps')))}")
    elif config is not None and dry_run:
        print(OmegaConf.to_yaml(check_run(config)))
    elif config is not None:
        print(f"Done: {start(config)}")
    return 0


def _dry_run(overrides: Sequence[str]) -> int:
    from omegaconf import OmegaConf

    from agent_rl.backends.embedded.config import TrainConfig
    from agent_rl.backends.group_sampling import check_environment

    config = load_config("backend/embedded", TrainConfig, [o for o in overrides if not o.startswith("backend=")])
    check_environment(config).tasks.require(config.eval.dev_split)
    print(OmegaConf.to_yaml(config.model_dump(mode="json", by_alias=True)))
    return 0


def doctor(overrides: Sequence[str], imports: Sequence[str] = ()) -> int:
    """Tell whether Ray's cluster can run the settings, which need not name a model; return the exit status.

    Raises:
        ConfigError: if the settings are wrong, or there is no cluster.
    """
    given = [text for text in overrides if text != "backend=verl"]
    if len(given) == len(overrides):
        raise ConfigError("doctor looks at Ray's cluster: write agent-rl doctor backend=verl, and settings as of train")
    from agent_rl.backends.verl.config.settings import VerlConfig
    from agent_rl.backends.verl.driver import run

    files = ",".join(str(Path(file).resolve()) for file in imports)
    config = load_config("backend/verl", VerlConfig, ["start_from=MODEL", f"imports=[{files}]", *given])
    return run.doctor(config, print)


def _check_resumed(given: set[str]) -> None:
    if odd := ", ".join(sorted(given - {"steps"})):
        raise ConfigError(f"{odd} can't change when a run is resumed: it goes on with its own settings (but for steps)")


def _pair(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals:
        raise ConfigError(f"'{text}' is no setting: write key=value, such as steps=20")
    return key, value


def _steps(text: str | None) -> int | None:
    if text is None:
        return None
    if not text.isdigit():
        raise ConfigError(f"steps={text} must be a whole number")
    return int(text)


def require_torch() -> None:
    """Check that [train] is installed.

    Raises:
        ConfigError: if it is not.
    """
    try:
        import torch  # noqa: F401
        import transformers  # noqa: F401
    except ImportError as error:
        raise ConfigError(f"this needs {error.name}: pip install 'agent-rl[train]'") from error
