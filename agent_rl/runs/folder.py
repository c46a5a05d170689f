"""The folder of a run: runs/<time>-<name>, the files in it, and runs/latest, which points at the newest."""

from __future__ import annotations

import errno
import logging
import os
import re
import shutil
import time
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar, cast

from pydantic import BaseModel

from agent_rl.config import check_config, filled_in
from agent_rl.errors import CheckpointError, ConfigError, InfrastructureError, in_brief
from agent_rl.gym.registry import load_once
from agent_rl.store.shards import episode_file
from agent_rl.version import __version__

_log = logging.getLogger(__name__)

CONFIG, METRICS, EPISODES, SUMMARY, REPORT, WARNINGS = (
    "config.yaml",
    "metrics.jsonl",
    "episodes.jsonl",
    "summary.json",
    "report.html",
    "warnings.txt",
)
"""What every run's folder holds; backends add their checkpoints."""
_MODELS = ((), ("checkpoint",), ("best",), ("checkpoints",))
"""Where in a run's folder its models are, on either backend."""
M = TypeVar("M", bound=BaseModel)


def status_of(path: str | Path) -> Path:
    """Return the file in which a rollout or a run under way says what it is doing."""
    return episode_file(str(path)).with_suffix(".status.json")


def settings_file(episodes: Path) -> Path:
    """Return the file of the settings that episodes outside of a training run were played with."""
    return episodes.with_suffix(".yaml")


def save_config(folder: Path, config: BaseModel, name: str = CONFIG) -> None:
    """Write a run's settings; those that are there stay where that fails."""
    from omegaconf import OmegaConf

    new = folder / f"{name}.new"
    OmegaConf.save(config.model_dump(mode="json", by_alias=True), new)
    new.replace(folder / name)


def read_config(folder: Path, schema: type[M], name: str = CONFIG) -> M:
    """Return a run's settings.

    Raises:
        CheckpointError: if the folder is no run, or another version's.
    """
    file = folder / name
    if not file.exists():
        raise CheckpointError(f"'{folder}' is no run: it has no {name}")
    values = dict(_read_yaml(file))
    if (epochs := values.pop("updates_per_batch", None)) is not None:  # what older versions had in the place of updates
        values["updates"] = {"epochs": epochs}
    values = filled_in(values, getattr(schema, "BEFORE", {}))
    try:
        return check_config(schema, values)
    except ConfigError as error:
        raise CheckpointError(f"{file} is not one of this version, {__version__}: {error}") from error


def load_imports(model: str | Path, instead: Iterable[str] = ()) -> tuple[str, ...]:
    """Load the files that a run was started with, given its folder or a checkpoint in it; return those loaded.

    A file in `instead` replaces one of its name. A folder that is in no run has none.

    Raises:
        CheckpointError: if a file is not there, or the run's settings can't be read.
    """
    path, others = Path(model).absolute(), {Path(file).name for file in instead}
    inside = ((folder, path.relative_to(folder).parts) for folder in (path, *path.parents))
    runs = (folder for folder, below in inside if below[:1] in _MODELS and (folder / METRICS).exists())
    folder = next(runs, None)
    return () if folder is None else tuple(_load_named(folder / CONFIG, others))


def load_imports_beside(episodes: Path) -> list[str]:
    """Load the files that stored episodes were run with, by the settings that lie beside them; return those loaded.

    Raises:
        CheckpointError: if a file is not there, or the settings can't be read.
    """
    beside = next((file for file in (settings_file(episodes), episodes.with_name(CONFIG)) if file.exists()), None)
    return [] if beside is None else list(_load_named(beside))


def _load_named(settings: Path, others: Container[str] = ()) -> Iterator[str]:
    """Load the imports of settings, but those whose name is in `others`; yield their paths."""
    for name in map(str, cast(list[object], _read_yaml(settings).get("imports") or [])):
        if Path(name).name in others:
            continue
        if not Path(name).exists():
            way_out = f"put it back, or write its new place into that {settings.name}"
            raise CheckpointError(f"{settings} imports {name}, which is not there: {way_out}")
        load_once(name)
        yield name


def _read_yaml(file: Path) -> Mapping[str, object]:
    from omegaconf import OmegaConf

    try:
        values = OmegaConf.to_container(OmegaConf.load(file))  # what looks like a reference is a text of the user's
    except Exception as error:  # of YAML, OmegaConf and the encoding
        raise CheckpointError(f"{file} is damaged: {in_brief(error)}") from error
    if not isinstance(values, dict):
        raise CheckpointError(f"{file} is damaged: it holds no settings")
    return {str(name): value for name, value in values.items()}


def warn(folder: Path, text: str, say: Callable[[str], object]) -> None:
    """Print a warning, and store it with the run: once, also if the run is resumed."""
    text = " ".join(text.splitlines())  # an environment's error may have several, and the file has one a warning
    if text not in read_warnings(folder):
        with (folder / WARNINGS).open("a", encoding="utf-8") as stored:
            stored.write(text + "\n")
        say(f"warning: {text}")


def read_warnings(folder: Path) -> list[str]:
    """Return the warnings that are stored with a run."""
    file = folder / WARNINGS
    return file.read_text(encoding="utf-8").splitlines() if file.exists() else []


def check_place(runs_dir: str, name: str) -> None:
    """Check that a run's folder can be made, and make the folder of runs.

    Raises:
        ConfigError: if the name can't be a folder's.
        OSError: if there can be no folder of runs, or none in it.
    """
    if not re.sub(r"[-_.+]", "", name).isalnum():
        raise ConfigError(f"name={name!r} can't be a folder's name: use letters, digits, '-', '_', '.' and '+'")
    runs = Path(runs_dir)
    runs.mkdir(parents=True, exist_ok=True)
    if not os.access(runs, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(runs))


def name_of(env: str) -> str:
    """Return what a run is called by its environment: its id, or its address on a server, as a folder's name."""
    return re.sub(r"[^\w.+-]+", "-", env)


def new_folder(runs_dir: str, name: str) -> Path:
    """Make a run's folder; return its absolute path, as an environment may change the working directory.

    Raises:
        ConfigError: if the name can't be a folder's.
        OSError: if it can't be made.
    """
    check_place(runs_dir, name)
    runs = Path(runs_dir).absolute()
    stamp = time.strftime("%Y%m%d-%H%M%S")
    for attempt in range(100):
        folder = runs / (f"{stamp}-{name}" if not attempt else f"{stamp}-{name}-{attempt}")
        try:
            folder.mkdir()
        except FileExistsError:
            continue
        _log.info("the run is in %s", folder)
        return folder
    raise ConfigError(f"no free folder name below {runs}/{stamp}-{name}")


@contextmanager
def file_of(out: str | None, kind: str) -> Iterator[Path]:
    """Yield the episode file of a command: `out`, or in a new folder, runs/<time>-<kind>.

    The folder is made at once, as several commands may begin in one second, and goes again if it stays empty.
    """
    if out:
        yield episode_file(out)
        return
    folder = new_folder("runs", kind)
    try:
        yield episode_file(folder.relative_to(Path.cwd()))
    finally:
        with suppress(OSError):  # there is something in it
            folder.rmdir()
            folder.parent.rmdir()


def make_latest(folder: Path) -> None:
    """Point `runs/latest` at a run that has started."""
    link = folder.parent / f".latest-{os.getpid()}"
    link.unlink(missing_ok=True)
    link.symlink_to(folder.name)
    link.replace(folder.parent / "latest")


@contextmanager
def removed_if_unused(folder: Path) -> Iterator[None]:
    """Remove a run's folder if the start fails before a metric, an episode or a checkpoint is in it.

    One that the machine failed stays: it can be continued.
    """
    try:
        yield
    except InfrastructureError:
        raise
    except BaseException:
        measured = any(file.exists() and file.stat().st_size for file in (folder / METRICS, folder / EPISODES))
        if not measured and not (folder / "checkpoint").exists():
            shutil.rmtree(folder, ignore_errors=True)
        raise
