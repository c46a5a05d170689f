"""Task files and data sets, as rows; a format's library is imported when a file needs it."""

from __future__ import annotations

import csv
import itertools
import json
import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from pathlib import Path
from typing import TypeAlias, cast

from agent_rl.core.messages import Task
from agent_rl.errors import ConfigError

TaskRows: TypeAlias = str | Path | Iterable[Mapping[str, object]]
"""The tasks of a split: a file, a folder of `Dataset.save_to_disk`, or any iterable of dicts, such as a `Dataset`."""

MOST_UNCOUNTED = 100_000
"""Tasks that are taken of an iterable without a length, which may have no end: a generator, a data set that streams."""
_log = logging.getLogger(__name__)
_SPLITS = "dataset_dict.json"
"""Where `DatasetDict.save_to_disk` stores the names of its splits; each has a folder of that name."""


def cache_folder() -> Path:
    """Return the folder for files that took long to make: `AGENT_RL_CACHE`, or ~/.cache/agent_rl."""
    return Path(os.environ.get("AGENT_RL_CACHE") or Path.home() / ".cache" / "agent_rl")


def rows_by_split(tasks: Mapping[str, TaskRows] | TaskRows, base: Path) -> Mapping[str, TaskRows]:
    """Return the rows of each split, unread; those without splits are "train".

    Raises:
        ConfigError: if they are no rows.
    """
    if isinstance(tasks, Mapping):
        return tasks
    if isinstance(tasks, str | Path):
        saved = base / tasks / _SPLITS
        names = json.loads(saved.read_text(encoding="utf-8"))["splits"] if saved.is_file() else []
        return {name: saved.with_name(name) for name in names} or {"train": tasks}
    if isinstance(tasks, Iterable):
        return {"train": tasks}
    raise ConfigError(f"tasks={tasks!r} are no tasks: give rows, a file, a mapping of splits, or a function of both")


def read_rows(rows: TaskRows, split: str, base: Path) -> Sequence[Task]:
    """Return the rows of a split as tasks; relative files start from `base`.

    Raises:
        ConfigError: if there are none, a row is no dict, or the file can't be read.
    """
    if isinstance(rows, str | Path):
        file = base / rows
        try:
            tasks = _reader_of(file)(file / split if (file / _SPLITS).is_file() else file)
        except OSError as error:
            raise ConfigError(f"the task file {file} can't be read: {error.strerror or error}") from error
        if not tasks:
            raise ConfigError(f"the task file {file} is empty; write one task a row")
    elif isinstance(rows, Iterable):
        tasks = cast("list[Task]", list(rows) if isinstance(rows, Sized) else _first(rows, split))
    else:
        raise ConfigError(f"split '{split}' is {rows!r}: give a file, or dicts in a list")
    if not tasks:
        raise ConfigError(f"split '{split}' has no tasks; leave it out or give it some")
    for index, task in enumerate(tasks):
        if not isinstance(task, Mapping):
            raise ConfigError(f"task {index} of split '{split}' is {task!r}, not a dict")
    return tasks


def _first(rows: Iterable[Mapping[str, object]], split: str) -> list[Mapping[str, object]]:
    found = list(itertools.islice(rows, MOST_UNCOUNTED + 1))
    if len(found) > MOST_UNCOUNTED:
        del found[MOST_UNCOUNTED:]
        _log.warning(
            "split '%s' has no length: its first %d tasks are taken; a function (split, index) makes any number",
            split,
            MOST_UNCOUNTED,
        )
    return found


def _reader_of(file: Path) -> Callable[[Path], Sequence[Task]]:
    if file.is_dir():
        return _read_saved
    if file.exists() and file.suffix not in _READERS:
        raise ConfigError(
            f"{file} is no task file: give {', '.join(_READERS)}, a folder of Dataset.save_to_disk, or rows"
        )
    return _READERS.get(file.suffix, _read_jsonl)


def _read_jsonl(file: Path) -> list[Task]:
    """Return the objects of a .jsonl file; blank lines don't count."""
    lines = file.read_bytes().splitlines()
    return [_parse_line(line, f"{file}:{number}") for number, line in enumerate(lines, start=1) if line.strip()]


def _parse_line(line: bytes, where: str) -> Task:
    task = _parse(line, where)
    if not isinstance(task, dict):
        raise ConfigError(f"{where}: a {type(task).__name__}, not a JSON object: {line.decode('utf-8-sig')[:80]}")
    return task


def _read_json(file: Path) -> list[Task]:
    tasks = _parse(file.read_bytes(), str(file))
    if not isinstance(tasks, list):
        raise ConfigError(f"{file}: a {type(tasks).__name__}, not a list of JSON objects")
    return tasks


def _parse(text: bytes, where: str) -> object:
    try:
        found: object = json.loads(text.decode("utf-8-sig"), parse_constant=_refuse)
    except ValueError as error:
        raise ConfigError(f"{where}: not JSON: {error}") from error
    return found


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON number")


def _read_csv(file: Path) -> list[Task]:
    """Return the rows under a header; every value is text."""
    with file.open(encoding="utf-8-sig", newline="") as lines:
        reader = csv.DictReader(lines)
        try:
            tasks: list[Task] = []
            header = reader.fieldnames or ()
            if twice := [name for at, name in enumerate(header) if name in header[:at]]:
                raise ConfigError(f"{file}: two columns are called '{twice[0]}'; rename one")
            for row in reader:
                if None in row or None in row.values():
                    raise ConfigError(f"{file}:{reader.line_num}: not as many fields as the header has")
                tasks.append(row)
        except (csv.Error, UnicodeDecodeError) as error:
            raise ConfigError(f"{file}:{reader.line_num}: not CSV: {error}") from error
    return tasks


def _read_parquet(file: Path) -> list[Task]:
    try:
        from pyarrow import parquet
    except ImportError as error:
        raise ConfigError(f"{file} needs pyarrow: pip install pyarrow") from error
    try:
        tasks: list[Task] = parquet.read_table(file).to_pylist()
    except ValueError as error:  # what pyarrow's errors are
        raise ConfigError(f"{file}: not Parquet: {error}") from error
    return tasks


def _read_saved(folder: Path) -> list[Task]:
    try:
        from datasets import load_from_disk
    except ImportError as error:
        raise ConfigError(f"{folder} is a folder, which needs datasets: pip install datasets") from error
    return list(load_from_disk(str(folder)))


_READERS: dict[str, Callable[[Path], Sequence[Task]]] = {
    ".jsonl": _read_jsonl,
    ".json": _read_json,
    ".csv": _read_csv,
    ".parquet": _read_parquet,
}
