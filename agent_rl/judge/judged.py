"""Judged files: what a judge said of a file's episodes, a header and one line a judgement, only ever appended to."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

from pydantic import TypeAdapter, ValidationError

from agent_rl.core.escaping import ESCAPE, escape, unescape, with_strings
from agent_rl.core.judgement import JudgeFault, Judgement
from agent_rl.core.messages import JSON
from agent_rl.core.usage import Usage
from agent_rl.errors import ConfigError, StoreError
from agent_rl.judge.rubric import Rubric
from agent_rl.store.lines import LineWriter, read_lines
from agent_rl.store.shards import episode_file, read_from, shards_of

_HEAD = b'{"judged":1,'
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class EpisodeSource:
    """The episodes that were judged, as they were then; their file may have grown since, and have been closed."""

    file: str
    """Or a run's folder."""
    size: int
    """Of the lines of its own writer, in bytes."""
    digest: str
    """The SHA-256 of these bytes."""

    @classmethod
    def of(cls, path: str | os.PathLike[str], size: int | None = None) -> EpisodeSource:
        """Describe the first lines of an episode file or a run's folder, of so many bytes; None for all of them."""
        digest, read = hashlib.sha256(), 0
        for line in (line for shard in shards_of(episode_file(path)) for _, line in read_from(shard)):
            if size is not None and read >= size:
                break
            digest.update(line)
            read += len(line)
        return cls(str(Path(path).resolve()), read, digest.hexdigest())


@dataclass(frozen=True, slots=True)
class JudgedHeader:
    """The judge of a file, the rubric and the episodes."""

    judge: str
    rubric: Rubric | None
    """None where each episode has its task's own."""
    task_key: str = ""
    """The task's key that holds its own."""
    settings: Mapping[str, JSON] = field(default_factory=dict)
    """Of the judge, as far as verdicts depend on them."""
    versions: Mapping[str, str] = field(default_factory=dict)
    episodes: EpisodeSource | None = None
    """None for episodes that were in no file."""


@dataclass(frozen=True, slots=True)
class JudgedEpisode:
    """One line: a judgement, and what a table needs of its episode."""

    judgement: Judgement
    group: str = ""
    """The episode's group: samples of one task, or all of an evaluation."""
    rubric: Rubric | None = None
    """The task's own."""
    task: str = ""
    """The task's `task_key`; empty in files of earlier versions."""

    @property
    def drawn_with(self) -> str:
        """What it has in common with the other episodes of its task, which intervals draw together."""
        return self.task or self.group or self.judgement.episode


@dataclass(frozen=True)
class Judged:
    """What a judge said of episodes."""

    header: JudgedHeader
    episodes: tuple[JudgedEpisode, ...]
    """The last judgement of each episode, in the order of the first ones."""
    replaced: tuple[Usage, ...] = field(default=(), repr=False)
    """What the judgements used that were made once more, or that the limit of cost cut short."""
    path: Path | None = None

    @property
    def judgements(self) -> tuple[Judgement, ...]:
        """One an episode."""
        return tuple(each.judgement for each in self.episodes)

    @property
    def tasks(self) -> dict[str, str]:
        """The task of each episode, by the episode's id."""
        return {each.judgement.episode: each.drawn_with for each in self.episodes}

    @property
    def usage(self) -> tuple[Usage, ...]:
        """Of all calls that were made."""
        return (*self.replaced, *(usage for judgement in self.judgements for usage in judgement.usage))

    def rubric_of(self, judged: JudgedEpisode) -> Rubric:
        """Return the rubric that an episode was judged under."""
        rubric = judged.rubric or self.header.rubric
        assert rubric is not None  # a file has one or the other
        return rubric


_HEADER, _LINE = TypeAdapter(JudgedHeader), TypeAdapter(JudgedEpisode)


def load_judged(path: str | os.PathLike[str]) -> Judged:
    """Read a judged file; a torn last line is left out.

    Raises:
        StoreError: if there is no such file, it is no judged file, or a line is damaged.
    """
    file = Path(path)
    if not file.is_file():
        raise StoreError(f"there is no judged file {file}; agent-rl judge run writes one")
    header: JudgedHeader | None = None
    lines: dict[str, JudgedEpisode] = {}
    replaced: list[Usage] = []
    for at, line in read_lines(file):
        if line.startswith(_HEAD):
            header = _parse(_HEADER, line, f"{file}:{at}")
            continue
        if header is None:
            raise _without_head(file)
        each = _parse(_LINE, line, f"{file}:{at}")
        if JudgeFault.COST in each.judgement.faults:
            replaced += each.judgement.usage
            continue
        if (old := lines.get(each.judgement.episode)) is not None:
            replaced += old.judgement.usage
        lines[each.judgement.episode] = each
    if header is None:
        raise StoreError(f"{file} is no judged file: it has no line")
    return Judged(header, tuple(lines.values()), tuple(replaced), file)


class JudgedWriter(LineWriter):
    """Appends judgements to a file; what it held before is in `before`."""

    def __init__(self, path: Path, header: JudgedHeader) -> None:
        """Open the file, or make it, with the header.

        Raises:
            ConfigError: if it holds judgements by another judge, under another rubric, or of other episodes.
            StoreError: if it is no judged file, it is damaged, or another writer has it open.
        """
        if path.exists():
            _require_head(path)  # before the last line of another file is moved aside
        super().__init__(path)
        try:
            held = _has_line(path)  # as no other writer adds to it from here on
            self.before = load_judged(path) if held else Judged(header, (), path=path)
            if held:
                _require_same(path, self.before.header, header)
            if not held or self.before.header.episodes != header.episodes:
                self.write_line(_HEAD + _dump(_HEADER, header)[1:])
            self.before = replace(self.before, header=header)
        except BaseException:
            self.close()
            raise

    def write(self, judged: JudgedEpisode) -> None:
        """Append one judgement; it outlives this process from here on."""
        self.write_line(_dump(_LINE, judged))


def _require_head(path: Path) -> None:
    with path.open("rb") as file:
        if not _HEAD.startswith(file.read(len(_HEAD))):
            raise _without_head(path)


def _without_head(file: Path) -> StoreError:
    return StoreError(f"{file} is no judged file: its first line is no header of one")


def _has_line(path: Path) -> bool:
    return next(iter(read_lines(path)), None) is not None


def _require_same(path: Path, held: JudgedHeader, header: JudgedHeader) -> None:
    """Refuse to mix judgements that can't be compared; the episodes' file may have grown."""
    if (held.rubric, held.task_key) != (header.rubric, header.task_key):
        same = held.rubric is not None and header.rubric is not None and held.rubric.digest == header.rubric.digest
        raise ConfigError(
            f"{path} was judged under another rubric{', with other weights' if same else ''}: name another file with "
            f"-o FILE{'; with the same log of calls it costs no call' if same else ''}"
        )
    if (held.judge, held.settings) != (header.judge, header.settings):
        known = {**held.settings, "judge": held.judge}
        asked = {**header.settings, "judge": header.judge}
        differing = ", ".join(f"{key}={known.get(key)}" for key in known | asked if known.get(key) != asked.get(key))
        raise ConfigError(f"{path} was judged by another judge ({differing}): name another file with -o FILE")
    old, new = held.episodes, header.episodes
    if old != new and not (old and new and old.size <= new.size and _begins(Path(new.file), old)):
        raise ConfigError(
            f"{path} has judgements of other episodes ({old.file if old else 'of no file'}): name another file with "
            "-o FILE"
        )


def _begins(file: Path, source: EpisodeSource) -> bool:
    return EpisodeSource.of(file, source.size).digest == source.digest


def _dump(adapter: TypeAdapter[T], value: T) -> bytes:
    row = with_strings(adapter.dump_python(value, exclude_defaults=True), escape)
    return json.dumps(row, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"


def _parse(adapter: TypeAdapter[T], line: bytes, place: str) -> T:
    try:
        value = adapter.validate_json(line)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise StoreError(f"{place} is damaged: {where}: {first['msg']}; delete it to read the others") from error
    return with_strings(value, unescape) if ESCAPE.encode() in line else value
