"""The command line: `agent-rl envs | algorithms | train | rollout | view | doctor | sandbox`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path
from typing import TypeAlias

from rich.console import Console
from rich.table import Table
from rich.text import Text

from agent_rl.api import checked_config, require_torch, train, training_config
from agent_rl.config import choices, list_settings, load_config, parse_setting, write_config
from agent_rl.errors import AgentRLError, ConfigError
from agent_rl.gym.registry import env_ids, load_once, spec
from agent_rl.rollout import summarise
from agent_rl.runs.rollout import RolloutSettings, resume_rollout, start_rollout
from agent_rl.runs.stop import Interrupted
from agent_rl.store.episodes import episode_file, find_episode, read_episodes
from agent_rl.version import __version__
from agent_rl.view.progress import Progress
from agent_rl.view.text import failure_lines, print_episode, print_table

TRAIN_EXAMPLES = """
examples:
  agent-rl train
  agent-rl train env=search-v0 seed=1
  agent-rl train --import my_envs.py env=shop-v0 steps=100
  agent-rl train algorithm=gspo algorithm.objective.clip_high_eps=1e-3 --explain
  agent-rl train algorithm=dpo episodes=runs/latest start_from=runs/latest/checkpoint optimizer.lr=1e-3
  agent-rl train resume=runs/latest                            continue a run; with steps=N, up to there
  agent-rl train backend=verl start_from=MODEL env=search-v0 hardware=gpu_8x80gb --dry-run"""

ROLLOUT_EXAMPLES = """
policies: oracle, demonstrator, vllm, a checkpoint's folder, or your own (@ar.register_policy)
  policy.model=DIR         of vllm: run vLLM here, on this folder or name
  policy.url=URL           of vllm: a vLLM server (VLLM_API_KEY, if it wants a key)
  policy.engine.KEY=VALUE  of vllm: more of vLLM's engine arguments, such as tensor_parallel_size
  policy.concurrency=64    of vllm: requests under way at a server
  policy.tokenizer=DIR     of vllm: if it is not with the model
  policy.slots=64          of a checkpoint: sequences that are sampled at a time
  policy.renderer=NAME     of both: instead of the one that fits the tokenizer
  policy.context=N         of both: the longest sequence in tokens

examples:
  agent-rl rollout env=search-v0
  agent-rl rollout policy=runs/latest/checkpoint temperature=0 n=64
  agent-rl rollout policy=vllm policy.model=Qwen/Qwen3-4B max_tokens=1024 policy.context=8192
  agent-rl rollout policy=vllm policy.url=http://localhost:8000
  agent-rl rollout resume=runs/20261122-101500-rollout         continue one that was interrupted"""

VIEW_HELP = """\
Read stored episodes.

examples:
  agent-rl view runs/latest                                    a table, and the first episode
  agent-rl view runs/latest eval-00100-sampled-0000 --tokens   one episode, with the tokens that were sampled"""


Command: TypeAlias = Callable[[argparse.Namespace], int]


class _Parser(argparse.ArgumentParser):
    """Adds a command's settings to its help when it is asked for: those of training import torch."""

    list_settings: Callable[[], str] = staticmethod(str)

    def format_help(self) -> str:
        self.description = f"{self.description or ''}{self.list_settings()}"
        return super().format_help()


def _train_settings() -> str:
    require_torch()
    from agent_rl.backends.embedded.config import TrainConfig

    more = "With their whole meaning: agent-rl train --config, or agent-rl train backend=verl --config"
    return f"\n\nsettings:\n{list_settings(load_config('backend/embedded', TrainConfig))}\n\n{more}\n{TRAIN_EXAMPLES}"


def _rollout_settings() -> str:
    return f"\n\nsettings:\n{list_settings(load_config('rollout', RolloutSettings))}\n{ROLLOUT_EXAMPLES}"


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; return its exit status: 0, 1 for an error, 2 for a wrong command line, 130 after Ctrl-C."""
    arguments = _parser().parse_args(argv)
    command: Command = arguments.command
    try:
        for file in getattr(arguments, "imports", None) or []:
            load_once(str(Path(file).resolve()))
        return command(arguments)
    except AgentRLError as error:
        print(f"agent-rl: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="agent-rl", description="Train, run and read tool-using language-model agents.", formatter_class=raw
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(
        parser_class=_Parser, required=True, metavar="envs | algorithms | train | rollout | view | doctor | sandbox"
    )
    imports = _Parser(add_help=False)
    imports.add_argument(
        "--import", dest="imports", action="append", metavar="FILE", help="a Python file that registers environments"
    )

    def add(name: str, command: Command, text: str, *, description: str | None = None, settings: str = "") -> _Parser:
        added = commands.add_parser(name, parents=[imports], help=text, description=description, formatter_class=raw)
        added.set_defaults(command=command)
        if settings:
            added.add_argument("overrides", nargs="*", metavar="key=value", help=settings)
        return added

    add("envs", _envs, "list the registered environments")
    about = "Train a model on an environment; by default a small one: warm start, then reinforcement learning."
    training = add("train", _train, about, description=about, settings="settings; backend=verl; resume=FOLDER")
    training.list_settings = _train_settings
    for option, text in {
        "--config": "print every setting and its meaning; train nothing",
        "--explain": "print the algorithm's formula; train nothing",
        "--dry-run": "check the settings and the environment, print the full config; train nothing",
    }.items():
        training.add_argument(option, action="store_true", help=text)
    about = "Run episodes without training, print them as a table, and store them."
    add(
        "rollout", _rollout, about, description=about, settings="settings; resume=FILE"
    ).list_settings = _rollout_settings
    about = "say what Ray's cluster lacks for a run: doctor backend=verl hardware=NAME"
    add("doctor", _doctor, about, settings="settings, as of train")
    add("algorithms", _algorithms, "list the algorithms and the parts that they are made of, with formulas")
    view = commands.add_parser("view", help="read stored episodes", description=VIEW_HELP, formatter_class=raw)
    view.add_argument("file", help="an episodes.jsonl, or a run's folder")
    view.add_argument("id", nargs="?", help="an episode's id, or the beginning of one")
    view.add_argument("--tokens", action="store_true", help="show which tokens were sampled")
    view.add_argument("--limit", type=int, default=20, help="rows of the table")
    view.set_defaults(command=_view)
    sandbox = commands.add_parser("sandbox", help="look after the places where model-written code runs")
    actions = sandbox.add_subparsers(required=True, metavar="doctor | build-image")
    sandboxes = actions.add_parser(
        "doctor", help="say what sandboxes guarantee on this machine, and what to do about it"
    )
    sandboxes.set_defaults(command=_sandbox_doctor)
    image = actions.add_parser("build-image", help="make Docker's base image of this interpreter, offline")
    image.add_argument("--tag", help="the image's name; the one that the docker sandbox takes by default")
    image.set_defaults(command=_build_image)
    return parser


def _envs(arguments: argparse.Namespace) -> int:
    table = Table("id", "splits", "what it is", box=None, header_style="bold", padding=(0, 2, 0, 0))
    for name in env_ids():
        env = spec(name)
        table.add_row(name, ", ".join(env.tasks.splits), (env.cls.__doc__ or "").strip().split("\n")[0])
    Console().print(table)
    return 0


def _algorithms(arguments: argparse.Namespace) -> int:
    require_torch()
    from agent_rl.algorithms.explain import KINDS, formula
    from agent_rl.backends.embedded.config import TrainConfig

    table = Table("algorithm=", "formula", box=None, header_style="bold", padding=(0, 2, 0, 0))
    for name in choices("algorithm"):
        config = load_config("backend/embedded", TrainConfig, [f"algorithm={name}"])
        table.add_row(name, Text(formula(config.algorithm)))
    Console().print(table)
    parts = Table("part", "name", "formula", box=None, header_style="bold", padding=(0, 2, 0, 0))
    for kind, registry in KINDS.items():
        for name in registry:
            parts.add_row(kind, name, Text(registry[name].formula))
    Console().print(parts)
    return 0


def _train(arguments: argparse.Namespace) -> int:
    settings = _settings(arguments)
    asked = [f"--{name}" for name in ("config", "explain", "dry-run") if getattr(arguments, name.replace("-", "_"))]
    if not asked:
        try:
            print(f"Done: {train(**settings).folder}")  # type: ignore[arg-type]  # checked by the schema
        except Interrupted as hint:
            print(f"Stopped; {hint}")
            return 130
        return 0
    if "resume" in settings:
        all_asked = ", ".join(asked)
        raise ConfigError(f"{all_asked} can't change when a run is resumed: it keeps its own settings (but for steps)")
    require_torch()
    config = training_config(**settings)  # type: ignore[arg-type]
    if arguments.config:
        print(write_config(config))
    elif arguments.explain:
        from agent_rl import algorithms

        print(algorithms.explain(config.algorithm))
    else:
        print(checked_config(config))
    return 0


def _settings(arguments: argparse.Namespace) -> dict[str, object]:
    """Return the settings of a command line; `--import` adds to `imports`."""
    settings = dict(map(parse_setting, arguments.overrides))
    named = settings.get("imports", [])
    files = [*(named if isinstance(named, list) else [named]), *(arguments.imports or ())]
    return settings | ({"imports": [str(Path(str(file)).resolve()) for file in files]} if files else {})


def _doctor(arguments: argparse.Namespace) -> int:
    settings = _settings(arguments)
    if settings.pop("backend", None) != "verl":
        raise ConfigError("doctor looks at Ray's cluster: write agent-rl doctor backend=verl, and settings as of train")
    require_torch()
    from agent_rl.backends.verl.config.settings import VerlConfig
    from agent_rl.backends.verl.driver import run as verl_run

    config = load_config("backend/verl", VerlConfig, settings={"start_from": "MODEL", **settings})
    return verl_run.doctor(config, print)


def _rollout(arguments: argparse.Namespace) -> int:
    settings = _settings(arguments)
    resumed = settings.pop("resume", None)
    if resumed is not None and settings:
        raise ConfigError(f"{', '.join(settings)} can't change when a rollout is resumed: it keeps its own settings")
    try:
        with Progress() as progress:
            if resumed is not None:
                file, episodes = resume_rollout(str(resumed), progress)
            else:
                file, episodes = start_rollout(load_config("rollout", RolloutSettings, settings=settings), progress)
    except Interrupted as hint:
        print(f"Stopped; {hint}")
        return 130
    print_table(episodes[:20], Console())
    result = summarise(episodes)
    print(f"{episodes[0].env}: success {result.success}, reward {result.reward:.3f}, {result.failed} failed")
    print("\n".join(failure_lines(episodes)), end="\n" if result.failed else "")
    print(f"{len(episodes)} episodes in {file}; read one: agent-rl view {file} {episodes[0].id[:12]}")
    return 0


def _view(arguments: argparse.Namespace) -> int:
    console, file = Console(), episode_file(arguments.file)
    decode = _decoder(file.parent) if arguments.tokens else None
    if arguments.id is not None:
        print_episode(find_episode(file, arguments.id), console, tokens=arguments.tokens, decode=decode)
        return 0
    stored = read_episodes(file)
    first = list(islice(stored, max(1, arguments.limit)))
    count = len(first) + sum(1 for _ in stored)
    if not first:
        raise ConfigError(f"{file} has no episodes yet")
    if count > 1:
        print_table(first, console)
        console.print(
            f"{len(first)} of {count} episodes; another: agent-rl view {arguments.file} ID\n", highlight=False
        )
    print_episode(first[0], console, tokens=arguments.tokens, decode=decode)
    return 0


def _sandbox_doctor(arguments: argparse.Namespace) -> int:
    from agent_rl.sandboxes.doctor import doctor

    return doctor(Console())


def _build_image(arguments: argparse.Namespace) -> int:
    from agent_rl.sandboxes import docker

    tag = arguments.tag or docker.IMAGE
    print(f"{tag}: {docker.build_image(docker.Engine(), tag)}")
    return 0


def _decoder(folder: Path) -> Callable[[Sequence[int]], str] | None:
    """Return the decoder of the tokenizer that a run left beside its episodes, if there is one."""
    file = folder / "checkpoint" / "tokenizer.json"
    if not file.exists():
        return None
    try:
        from tokenizers import Tokenizer
    except ImportError:
        return None
    tokenizer = Tokenizer.from_file(str(file))
    return lambda ids: str(tokenizer.decode(list(ids), skip_special_tokens=False))
