"""The log of a judge's calls, requests and answers, so that no call is made twice.

A file of lines that is only appended to: it is the cache, what a killed run resumes from, and what an audit reads. An
answer is found by everything that it depends on: model, sampling, messages, schema and the sample's number. Weights are
no part of it, so that a rubric with other weights costs no call. An answer is in the file before it is used; a call
that failed is in it, too, and is made again by the next run.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import secrets
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import asdict
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from agent_rl.core.judgement import JudgeFault
from agent_rl.core.messages import JSON
from agent_rl.core.usage import Usage
from agent_rl.errors import StoreError
from agent_rl.judge.reply import Answer
from agent_rl.rendering.chat_format import as_unicode
from agent_rl.store.lines import LineWriter, has_writer, read_lines

_KEY = b'{"key":"'
_ANSWER = TypeAdapter(Answer)


class CallLog:
    """The answers to a judge's calls; used in one event loop, by one process at a time."""

    def __init__(self, path: Path | None = None) -> None:
        """Open the file, or make it; None keeps nothing.

        Raises:
            StoreError: if another writer has it open, or it is no log of calls.
        """
        self.path = path
        self.secret = secrets.token_bytes(16)
        """What marks in requests follow from: the same ones for the same content, and no policy can know them."""
        self.unstructured = set[str]()
        """Servers that refuse to answer by a schema."""
        self.found = 0
        """Calls that it answered."""
        self._places: dict[str, int] = {}
        self._under_way: dict[str, asyncio.Task[Answer]] = {}
        self._waiting: dict[str, int] = {}
        self._size = 0
        self._file: LineWriter | None = None
        if path is not None:
            try:
                self._file = LineWriter(path)
            except StoreError as error:
                if not has_writer(path):
                    raise
                raise StoreError(
                    f"another writer has {path} open, a judge's log of calls: wait for its end, or give this judge a "
                    "log of its own: --calls FILE, in Python log=Path(FILE)"
                ) from error
            try:
                self._read(path)
            except BaseException:
                self.close()
                raise

    def __len__(self) -> int:
        return len(self._places)

    def find(self, key: str) -> Answer | None:
        """Return the answer to a call that was made before.

        Raises:
            StoreError: if its line is damaged.
        """
        if (place := self._places.get(key)) is None or self.path is None:
            return None
        with self.path.open("rb") as file:
            file.seek(place)
            line = file.readline()
        try:
            return _ANSWER.validate_python(json.loads(line)["answer"])
        except (ValueError, KeyError, ValidationError) as error:
            raise StoreError(f"{self.path}: the call at byte {place} is damaged; delete its line: {error}") from error

    async def get(self, key: str, ask: Callable[[], Coroutine[object, object, Answer]]) -> Answer:
        """Return the answer of a key: the file's, that of the same call under way, or a new one.

        What has asked last is cancelled with the last that waits for it.
        """
        if (known := self.find(key)) is not None:
            self.found += 1
            return known
        if (task := self._under_way.get(key)) is None:
            task = self._under_way[key] = asyncio.create_task(ask())
            task.add_done_callback(lambda _: self._under_way.pop(key, None))
        self._waiting[key] = self._waiting.get(key, 0) + 1
        try:
            return await asyncio.shield(task)
        finally:
            self._waiting[key] -= 1
            if not self._waiting[key]:
                del self._waiting[key]
                task.cancel()

    def keep(self, key: str, answer: Answer, usage: Usage, about: Mapping[str, JSON]) -> None:
        """Write an answer; it outlives this process from here on.

        Raises:
            OSError: if the disk refuses.
        """
        self._places[key] = self._write({"key": key, **about, "answer": asdict(answer), "usage": asdict(usage)})

    def fail(self, key: str, fault: JudgeFault, detail: str, usage: Usage, about: Mapping[str, JSON]) -> None:
        """Write that a call had no answer; `find` does not return it."""
        self._write({"failed": key, **about, "fault": fault, "detail": detail, "usage": asdict(usage)})

    def refuse_schema(self, server: str) -> None:
        """Write that a server refuses to answer by a schema."""
        if server not in self.unstructured:
            self.unstructured.add(server)
            self._write({"unstructured": server})

    def close(self) -> None:
        """Give the file back; more than once is fine."""
        if self._file is not None:
            self._file.close()

    def _write(self, line: Mapping[str, object]) -> int:
        """Append a line; return where it begins."""
        place = self._size
        if self._file is not None:
            text = as_unicode(json.dumps(line, ensure_ascii=False, separators=(",", ":"))).encode() + b"\n"
            self._file.write_line(text)
            self._size += len(text)
        return place

    def _read(self, path: Path) -> None:
        """Find the place of each answer, and read the secret; a new file gets one."""
        for _, line in read_lines(path):
            if line.startswith(_KEY):
                self._places[line[len(_KEY) : len(_KEY) + 64].decode("ascii", "replace")] = self._size
            elif not self._size or line.startswith(b'{"unstructured"'):
                self._read_note(path, self._size, line)
            self._size += len(line)
        if not self._size:
            self._write({"calls": 1, "secret": self.secret.hex()})

    def _read_note(self, path: Path, place: int, line: bytes) -> None:
        try:
            note = json.loads(line)
            if place:
                self.unstructured.add(str(note["unstructured"]))
            else:
                self.secret = bytes.fromhex(note["secret"])
        except (ValueError, KeyError, TypeError) as error:
            raise StoreError(f"{path} is no log of a judge's calls: {error}; give another file") from error


def call_key(**parts: JSON) -> str:
    """Return the key of a call: 64 hex digits of all that its answer depends on."""
    text = json.dumps(parts, ensure_ascii=False, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()
