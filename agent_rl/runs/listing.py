"""The runs of a folder at a glance, from what each left there: settings, metrics, episodes and its status."""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias, cast

from agent_rl.core.messages import JSON
from agent_rl.errors import StoreError
from agent_rl.rollout.watch import is_under_way
from agent_rl.runs.folder import CONFIG, EPISODES, METRICS, SUMMARY, status_of
from agent_rl.store.index import INDEX
from agent_rl.store.lines import has_writer
from agent_rl.store.shards import shards_of

RunState: TypeAlias = Literal["running", "finished", "stopped"]
COUNTED = 100_000_000
"""The bytes of episodes up to which their lines are counted where there is no index."""


@dataclass(frozen=True, slots=True)
class ListedRun:
    """What a list says of a run."""

    folder: str
    kind: Literal["train", "rollout"]
    state: RunState
    env: str
    what: str
    """The algorithm, and its backend where it is not the embedded one; of a rollout, its policy."""
    step: int | None
    """Steps that are done, of `steps`; None of a rollout."""
    steps: int | None
    before: float | None
    """Success on the evaluation's split before training, where it was measured."""
    success: float | None
    """The last success that was measured: by an evaluation or a rollout, otherwise in training."""
    episodes: int | None
    """None where there is no index, and they are too many to count."""
    judged: int
    """Judged files."""
    bytes: int
    """Of all its files, checkpoints included."""
    changed: float
    """When something was last written there, in seconds since 1970."""


def list_runs(folder: str | os.PathLike[str]) -> list[ListedRun]:
    """Return the runs in a folder, the one that changed last first.

    Raises:
        StoreError: if there is no such folder.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise StoreError(f"there is no folder of runs '{folder}': name one, as agent-rl runs FOLDER")
    inside = (path for path in folder.iterdir() if path.is_dir() and not path.is_symlink())
    found = [listed for path in inside if (listed := _listed(path)) is not None]
    return sorted(found, key=lambda run: -run.changed)


def _listed(folder: Path) -> ListedRun | None:
    is_training = (folder / METRICS).exists()
    shards = shards_of(folder)
    if not is_training and not shards:
        return None
    settings = _settings(folder / CONFIG if is_training else folder / "episodes.yaml")
    named = settings.get("algorithm" if is_training else "policy")
    name = str(named.get("name", "")) if isinstance(named, Mapping) else ""
    result = _result(folder / (SUMMARY if is_training else "episodes.results.json"))
    of_rollout = cast(float | None, (result or {}).get("success"))
    step, before, success = _progress(folder / METRICS) if is_training else (None, None, of_rollout)
    steps, env = settings.get("steps"), settings.get("env", "")
    files = [*_files(folder)]
    return ListedRun(
        folder=str(folder),
        kind="train" if is_training else "rollout",
        state=_state(folder, result, steps),
        env=env if isinstance(env, str) else "mixture",
        what=f"{name}, verl" if (folder / "verl.yaml").exists() else name,
        step=step,
        steps=steps if is_training and isinstance(steps, int) else None,
        before=before,
        success=success,
        episodes=_episodes(folder),
        judged=len([*folder.glob("judged/*.jsonl")]),
        bytes=sum(file.st_size for file in files),
        changed=max(file.st_mtime for file in files),
    )


def _files(folder: Path) -> Iterator[os.stat_result]:
    """Yield the size and age of each file, checkpoints included; a run under way may rename some meanwhile."""
    for inside, _, names in os.walk(folder):
        for name in names:
            with suppress(FileNotFoundError):
                yield os.lstat(Path(inside, name))


def _settings(file: Path) -> Mapping[str, JSON]:
    import yaml  # type: ignore[import-untyped]

    try:
        found = yaml.load(file.read_text(encoding="utf-8"), getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except (OSError, ValueError, yaml.YAMLError):  # of a run that is no longer whole: the rest is said
        return {}
    return found if isinstance(found, dict) else {}


def _progress(metrics: Path) -> tuple[int, float | None, float | None]:
    """Return the steps that are done, and success before and now."""
    step, training = 0, None
    measured: list[float] = []
    for line in metrics.read_bytes().splitlines():
        if b'"train"' not in line and b'"eval"' not in line:
            continue
        with suppress(ValueError, KeyError, TypeError, AttributeError, ZeroDivisionError):  # being written, or damaged
            row = json.loads(line)
            if row.get("kind") == "train":
                step, training = int(row["step"]), row.get("rollout/success", training)
            elif row.get("sampling") == "sampled" and row.get("n"):
                measured.append(row["successes"] / row["n"])
    return step, measured[0] if measured else None, measured[-1] if len(measured) > 1 else training


def _result(file: Path) -> Mapping[str, JSON] | None:
    """Return what was written at a run's end, nothing of it if that is damaged; None before the end."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except OSError:
        return None
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _state(folder: Path, result: Mapping[str, JSON] | None, steps: JSON) -> RunState:
    if is_under_way(status_of(folder)) or has_writer(folder / EPISODES):  # runs on verl write no status
        return "running"
    taken = None if result is None else result.get("steps")
    # a summary of fewer steps is from before the run was resumed with more
    is_short = isinstance(taken, int) and isinstance(steps, int) and taken < steps
    return "stopped" if result is None or is_short else "finished"


def _episodes(folder: Path) -> int | None:
    with suppress(sqlite3.Error):
        file = f"{(folder / INDEX).resolve().as_uri()}?mode=ro"
        with closing(sqlite3.connect(file, uri=True)) as database:
            return int(database.execute("SELECT total(episodes) FROM shards").fetchone()[0])
    files = [shard.path for shard in shards_of(folder)]
    if any(file.suffix == ".zst" for file in files) or sum(file.stat().st_size for file in files) > COUNTED:
        return None
    return sum(part.count(b"\n") for file in files for part in _parts(file))


def _parts(file: Path) -> Iterator[bytes]:
    with file.open("rb") as handle:
        while part := handle.read(1 << 20):
            yield part
