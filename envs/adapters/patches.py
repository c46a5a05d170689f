"""Unified diffs, as `git diff` writes them, applied to texts."""

from __future__ import annotations

import io
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
    lines, found, i = _lines(text), list[FilePatch](), 0
    is_diff = False
    while i < len(lines):
        if lines[i].startswith("diff --git "):
            patch, i = _read_header(lines, i)
            found += [patch] if patch is not None else []
            is_diff = True
        elif lines[i].startswith("--- ") and lines[i + 1 : i + 2] and lines[i + 1].startswith("+++ "):
            hunks, end = _read_hunks(lines, i + 2)
            found.append(FilePatch(_path(lines[i]), _path(lines[i + 1]), hunks))
            i = end
        else:
            i += 1
    if text.strip() and not found and not is_diff:
        raise ConfigError(f"no unified diff: {text[:60]!r}")
    return found


def _read_header(lines: Sequence[str], i: int) -> tuple[FilePatch | None, int]:
    """Return what git's header of a file says where no lines of it change, and where the header ends."""
    end = next((j for j in range(i + 1, len(lines)) if lines[j].startswith(("diff --git ", "--- "))), len(lines))
    if lines[end : end + 1] and lines[end].startswith("--- "):
        return None, end
    header = "".join(lines[i + 1 : end])
    if (renamed := re.search(r"^rename from (.*)\nrename to (.*)$", header, re.MULTILINE)) is not None:
        return FilePatch(_unquoted(renamed[1]), _unquoted(renamed[2]), ()), end
    both = lines[i].removeprefix("diff --git ").rstrip("\r\n")
    name = _unquoted(both[: len(both) // 2]).removeprefix("a/")  # the same twice
    if re.search(r"^new file mode", header, re.MULTILINE):  # of an empty one, as of a deleted one
        return FilePatch(None, name, ()), end
    return (FilePatch(name, None, ()) if re.search(r"^deleted file mode", header, re.MULTILINE) else None), end


def _lines(text: str) -> list[str]:
    """Return lines with their ends, as git knows them: a form feed or a lone carriage return ends none."""
    return list(io.StringIO(text, newline="\n"))


def apply_patch(patch: FilePatch, before: str) -> str:
    """Return a file's text after a patch.

    Raises:
        ConfigError: if the patch is of another text.
    """
    lines = _lines(before)
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
    name = _unquoted(header[4:].rstrip("\r\n").split("\t")[0])
    return None if name == "/dev/null" else name.removeprefix("a/") if header[0] == "-" else name.removeprefix("b/")


def _unquoted(name: str) -> str:
    """Return a path as git names it: one that is not ASCII stands in quotes, its bytes in octal numbers."""
    return name[1:-1].encode().decode("unicode_escape").encode("latin-1").decode() if name.startswith('"') else name
