"""Unified diffs, as `git diff` writes them, applied to texts."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from agent_rl.errors import ConfigError

_HUNK = re.compile(r"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")


@dataclass(frozen=True, slots=True)
class FilePatch:
    """What a diff does to one file."""

    old: str | None
    """Its path before; None: it is new."""
    new: str | None
    """Its path afterwards; None: it is removed."""
    hunks: tuple[tuple[int, tuple[str, ...]], ...]
    """Of each the first line before, from 1, and its lines, with the mark in front and their ends."""


def read_patch(text: str) -> list[FilePatch]:
    """Return what a diff does.

    Raises:
        ConfigError: if it is none, or one of binary files.
    """
    if "\nGIT binary patch\n" in text or re.search(r"^Binary files .* differ$", text, re.MULTILINE):
        raise ConfigError("a patch of binary files can't be applied; give one of texts")
    lines = text.splitlines(keepends=True)
    headers = [i for i in range(len(lines) - 1) if lines[i].startswith("--- ") and lines[i + 1].startswith("+++ ")]
    found, end = [], 0
    for i in headers:
        if i >= end:  # else it is a removed line that begins so
            hunks, end = _read_hunks(lines, i + 2)
            found.append(FilePatch(_path(lines[i]), _path(lines[i + 1]), hunks))
    if text.strip() and not found:
        raise ConfigError(f"no unified diff: {text[:60]!r}")
    return found


def apply_patch(patch: FilePatch, before: str) -> str:
    """Return a file's text after a patch.

    Raises:
        ConfigError: if the patch is of another text.
    """
    lines = before.splitlines(keepends=True)
    after, at = list[str](), 0
    for start, hunk in patch.hunks:
        there = [line[1:] for line in hunk if line[0] in " -"]
        first = max(start - 1, 0) if there else min(start, len(lines))
        if first < at or lines[first : first + len(there)] != there:
            raise ConfigError(f"a patch of {patch.new or patch.old} does not fit line {start} of that file")
        after += lines[at:first] + [line[1:] for line in hunk if line[0] in " +"]
        at = first + len(there)
    return "".join(after + lines[at:])


def patched(patches: Sequence[FilePatch], before: Mapping[str, str]) -> dict[str, str | None]:
    """Return the texts of the files that a diff touches, by path; None: it is gone.

    Raises:
        ConfigError: if the diff is of other texts.
    """
    after: dict[str, str | None] = {}
    for patch in patches:
        if patch.old is not None and patch.old not in before:
            raise ConfigError(f"a patch is of {patch.old}, which is not there")
        text = apply_patch(patch, before[patch.old] if patch.old is not None else "")
        if patch.old is not None and patch.old != patch.new:
            after[patch.old] = None
        if patch.new is not None:
            after[patch.new] = text
    return after


def _read_hunks(lines: list[str], i: int) -> tuple[tuple[tuple[int, tuple[str, ...]], ...], int]:
    hunks = []
    while i < len(lines) and (found := _HUNK.match(lines[i])):
        start, old, new = int(found[1]), int(found[2] or 1), int(found[4] or 1)
        hunk = tuple(_take(lines, i + 1, old, new))
        i += 1 + len(hunk)
        bare = list(hunk)
        if i < len(lines) and lines[i].startswith("\\"):
            i += 1
            bare[-1] = bare[-1].removesuffix("\n")
        for n, line in enumerate(bare):
            if line.startswith("\\"):  # "\ No newline at end of file", of the line before it
                bare[n - 1] = bare[n - 1].removesuffix("\n")
        hunks.append((start, tuple(line for line in bare if not line.startswith("\\"))))
    return tuple(hunks), i


def _take(lines: list[str], i: int, old: int, new: int) -> Iterator[str]:
    """Yield the lines of a hunk: so many of before, and of afterwards."""
    while (old > 0 or new > 0) and i < len(lines):
        line = lines[i] if lines[i].strip("\r\n") else " " + lines[i]  # some editors strip the mark of an empty line
        old -= line[0] in " -"
        new -= line[0] in " +"
        yield line
        i += 1


def _path(header: str) -> str | None:
    name = header[4:].rstrip("\r\n").split("\t")[0]
    return None if name == "/dev/null" else name.removeprefix("a/") if header[0] == "-" else name.removeprefix("b/")
