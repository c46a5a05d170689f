"""Conversations of other systems as episodes: to judge, to read, to compare; they have no token ids."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import MappingProxyType

from agent_rl.core.episode import Episode, Origin, Outcome, Reward, StepRecord, StopReason
from agent_rl.core.messages import JSON, Message
from agent_rl.errors import ConfigError, did_you_mean
from agent_rl.formats.atif import read_atif
from agent_rl.formats.chat import read_chat

_Read = Callable[[JSON], tuple[tuple[Message, ...], Mapping[str, JSON]]]
_FACTS = ("id", "env", "task", "group", "reward", "rewards", "model")


def import_episodes(path: str | os.PathLike[str], format: str | None = None, *, env: str = "") -> Iterator[Episode]:
    """Yield the conversations of a file, or of all JSON files in a folder, as episodes.

    Args:
        path: JSON lines, or JSON: one object or a list; a folder of either.
        format: "openai", rows with `messages`, or "atif"; found out from each row if left out.
        env: what the episodes are said to be of, where a row doesn't say.

    Raises:
        ConfigError: if there is no such file or format.
        ValueError: if a row is no conversation; the message names file, row and field.
    """
    if format is not None and format not in READERS:
        raise ConfigError(
            f"no format '{format}' is read.{did_you_mean(format, READERS)} There are: {', '.join(READERS)}"
        )
    return _unique(_episodes(Path(path), format, env))


def _episodes(path: Path, format: str | None, env: str) -> Iterator[Episode]:
    files = sorted(f for f in path.rglob("*") if f.suffix in (".json", ".jsonl")) if path.is_dir() else [path]
    if not files or not all(file.exists() for file in files):
        raise ConfigError(f"{path}: there is no such file, or no .json or .jsonl file in it")
    for file in files:
        for at, row in _rows(file):
            try:
                messages, facts = READERS[format or _format_of(row)](row)
                yield _episode(messages, facts, env or f"imported/{file.stem}", f"{file.name}:{at}")
            except (ValueError, OverflowError) as error:
                raise ConfigError(f"{file}:{at}: {error}") from error


def _rows(file: Path) -> Iterator[tuple[int, JSON]]:
    """Yield the rows of a file, with the numbers of their lines or their places in the list, from 1."""
    if file.suffix == ".jsonl":
        with file.open("rb") as lines:
            for at, line in enumerate(lines, start=1):
                if line.strip():
                    yield at, _parsed(line, file, at)
        return
    whole = _parsed(file.read_bytes(), file, 1)
    is_list = isinstance(whole, Sequence) and not isinstance(whole, str)
    yield from enumerate(whole if is_list else [whole], start=1)  # type: ignore[arg-type]


def _parsed(text: bytes, file: Path, at: int) -> JSON:
    try:
        found: JSON = json.loads(text.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        way = "" if file.suffix == ".jsonl" else "; call a file with an object a line .jsonl"
        raise ConfigError(f"{file}:{at}: not JSON: {error}{way}") from error
    return found


def _format_of(row: JSON) -> str:
    return "atif" if isinstance(row, Mapping) and "schema_version" in row else "openai"


def _read_openai(row: JSON) -> tuple[tuple[Message, ...], Mapping[str, JSON]]:
    if not isinstance(row, Mapping) or "messages" not in row:
        raise ValueError('a row is an object with "messages"')
    return read_chat(row["messages"]), {name: row[name] for name in _FACTS if name in row}


READERS: Mapping[str, _Read] = MappingProxyType({"openai": _read_openai, "atif": read_atif})


def _episode(messages: tuple[Message, ...], facts: Mapping[str, JSON], env: str, source: str) -> Episode:
    replies = [at for at, message in enumerate(messages) if message.role == "assistant"]
    ends = [*replies[1:], len(messages)][: len(replies)]
    lengths = [end - start - 1 for start, end in zip(replies, ends, strict=True)]
    steps = [StepRecord(n, 0.0, at == len(replies) - 1, truncated=False) for at, n in enumerate(lengths)]
    asked, given = next((m.content for m in messages if m.role == "user"), ""), facts.get("task")
    task = given if isinstance(given, Mapping) else {"prompt": asked if given is None else given}
    id = str(facts.get("id") or _digest(repr((source, messages))))
    return Episode(
        id=id,
        env=str(facts.get("env") or env),
        task=task,
        seed=0,
        group_id=str(facts.get("group") or _digest(json.dumps(task, sort_keys=True))),
        origin=Origin("rollout"),
        messages=messages,
        steps=tuple(steps),
        trajectories=(),
        rewards=tuple(_rewards(facts)),
        stop_reason=StopReason.DONE if replies else StopReason.ENV_TRUNCATED,
        outcome=Outcome.TERMINATED if replies else Outcome.TRUNCATED,
        versions={"imported": source} | ({"model": str(facts["model"])} if facts.get("model") else {}),
    )


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _rewards(facts: Mapping[str, JSON]) -> Iterator[Reward]:
    total, named = facts.get("reward"), facts.get("rewards")
    found = named if total is None and isinstance(named, Mapping) and named else {"reward": total}
    for name, value in found.items():
        if not isinstance(value, int | float | None):
            raise ValueError(f"{name}={value!r:.80}: give a number, or null where it is not scored")
        yield Reward(name, None if value is None or not math.isfinite(value) else float(value), source="imported")


def _unique(episodes: Iterator[Episode]) -> Iterator[Episode]:
    """Number ids that come up again: an id is one episode's in a file."""
    seen, used = set[str](), dict[str, int]()
    for episode in episodes:
        names = ((n, f"{episode.id}-{n}" if n else episode.id) for n in count(used.get(episode.id, 0)))
        used[episode.id], id = next((n, free) for n, free in names if free not in seen)
        seen.add(id)
        yield episode if id == episode.id else replace(episode, id=id)
