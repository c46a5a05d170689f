"""Token records: what an update made of every sampled token, in `token_records.jsonl` beside a run's episodes.

    {"schema": 1, "episode": "train-00003-0001-2", "trajectory": 0, "step": 3,
     "advantages": {"dtype": "float32", "shape": [sampled], "crc32": ..., "zstd": "<base64>"},   # or absent
     "logprobs": {...}}

A line is one trajectory in one step; its arrays are over the trajectory's sampled tokens, in order, as those of an
episode's line. A trajectory that is learned from twice has two lines.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Literal, cast

from pydantic import TypeAdapter, ValidationError
from pydantic_core import to_json

from agent_rl.core.trajectory import FloatArray
from agent_rl.errors import DamagedEpisodeError
from agent_rl.store.arrays import PackedArray, pack_array, unpack_array
from agent_rl.store.lines import LineWriter, read_lines
from agent_rl.store.shards import episode_file

TOKEN_RECORDS = "token_records.jsonl"
_STEP = re.compile(rb'\{"schema":1,"episode":"(?:[^"\\]|\\.)*","trajectory":\d+,"step":(\d+),')


@dataclass(frozen=True, slots=True, eq=False)
class TokenRecord:
    """What one update made of a trajectory's sampled tokens; both arrays have one number for each, in order."""

    episode: str
    trajectory: int
    step: int
    """Of training, counted from 0 as in `Origin`."""
    advantages: FloatArray | None
    """NaN where a token was not trained on; None where the algorithm has no advantages."""
    logprobs: FloatArray
    """Under the weights before the update, in nats; NaN where they were not computed."""


@dataclass(frozen=True, slots=True)
class _Line:
    schema: Literal[1]
    episode: str
    trajectory: int
    step: int
    logprobs: PackedArray
    advantages: PackedArray | None = None


_LINES = TypeAdapter(_Line)


class TokenRecordWriter(LineWriter):
    """Appends the records of each step; at most one writer a run."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Open the file beside a run's episodes.

        Raises:
            StoreError: if another writer has the file open.
        """
        super().__init__(_file(path))

    def rewind(self, step: int) -> None:
        """Take off what there is of `step` and later: a resumed run takes these steps again."""
        end = 0
        for _, line in read_lines(self.path):
            if (match := _STEP.match(line)) and int(match[1]) >= step:  # one that is damaged is no reason to cut there
                break
            end += len(line)
        os.truncate(self.path, end)

    def write(self, records: Iterable[TokenRecord]) -> None:
        """Append a step's records, in order."""
        self.write_line(b"".join(map(_dump, records)))


def token_records(path: str | os.PathLike[str], episode_id: str) -> list[TokenRecord]:
    """Return the records of one episode, in the order of the steps; none where none were written.

    Args:
        path: a run's folder, or an episode file.
        episode_id: the episode's id, whole.

    Raises:
        DamagedEpisodeError: if a line can't be read.
    """
    file = _file(path)
    if not file.exists() or not file.stat().st_size:
        return []
    with file.open("rb") as handle, mmap(handle.fileno(), 0, access=ACCESS_READ) as text:
        found = [_load(file, start, line) for start, line in _lines_of(text, _beginning(episode_id))]
    if not found:  # a line that can't be told from others may be the episode's
        _refuse_damaged(file)
    return found


def read_token_records(path: str | os.PathLike[str]) -> Iterator[TokenRecord]:
    """Yield all records of a run, in the order of the steps, read one at a time.

    Raises:
        DamagedEpisodeError: if a line can't be read.
    """
    file, start = _file(path), 0
    for _, line in read_lines(file) if file.exists() else ():
        yield _load(file, start, line)
        start += len(line)


def _refuse_damaged(file: Path) -> None:
    start = 0
    for _, line in read_lines(file):
        if not _STEP.match(line):
            _load(file, start, line)
        start += len(line)


def _lines_of(text: mmap, beginning: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield the whole lines with a beginning, each with its place, without a look at the others."""
    start = text.find(beginning)
    while start >= 0:
        stop = text.find(b"\n", start) + 1
        if stop and (start == 0 or text[start - 1] == 10):
            yield start, text[start:stop]
        start = text.find(beginning, start + 1)


def _load(file: Path, start: int, line: bytes) -> TokenRecord:
    try:
        row = _LINES.validate_json(line, strict=True)
        advantages = None if row.advantages is None else _unpack(row.advantages, "advantages")
        return TokenRecord(row.episode, row.trajectory, row.step, advantages, _unpack(row.logprobs, "logprobs"))
    except (DamagedEpisodeError, ValidationError) as error:
        why = "; ".join(str(error).splitlines()[:2])
        raise DamagedEpisodeError(f"{file}, byte {start}: {why}; delete this line to read the others") from error


def _unpack(packed: PackedArray, name: str) -> FloatArray:
    return cast(FloatArray, unpack_array(packed, name, ("float32",), 1))


def _dump(record: TokenRecord) -> bytes:
    advantages = None if record.advantages is None else pack_array(record.advantages)
    rest = {"step": record.step, "advantages": advantages, "logprobs": pack_array(record.logprobs)}
    head = _beginning(record.episode)
    return b'%s,"trajectory":%d,%s\n' % (head, record.trajectory, to_json(rest, exclude_none=True)[1:])


def _beginning(episode_id: str) -> bytes:
    return b'{"schema":1,"episode":' + json.dumps(episode_id).encode()


def _file(path: str | os.PathLike[str]) -> Path:
    return episode_file(path).parent / TOKEN_RECORDS
