"""Three tasks of the shape of SWE-bench's, made here: repositories with a bug each, its tests, and a solution."""

from __future__ import annotations

import difflib
import json
import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

Files = Mapping[str, str]


@dataclass(frozen=True)
class Repository:
    """A repository at its base, what a solution makes of it, and its tests afterwards."""

    files: Files
    solution: Mapping[str, str | None]
    """The files that it changes; None: one that it removes."""
    tests: Files
    """The file of the tests, with those that were hidden."""
    fails: str
    """The test that only a solution passes: module.class.name."""
    passes: str
    """One that always passed."""


ROMAN = """
SIGNS = {"I": 1, "V": 5, "X": 10}

def value(text):
    total = 0
    for sign in text:
        total += SIGNS[sign]
    return total
"""
ROMAN_SOLVED = """
SIGNS = {"I": 1, "V": 5, "X": 10}

def value(text):
    total = 0
    for sign, after in zip(text, text[1:] + "I"):
        total += SIGNS[sign] if SIGNS[sign] >= SIGNS[after] else -SIGNS[sign]
    return total
"""
ROMAN_TESTS = """
import unittest
from roman import value

class Roman(unittest.TestCase):
    def test_sum(self):
        self.assertEqual(value("XVI"), 16)
"""
ROMAN_HIDDEN = """
    def test_less(self):
        self.assertEqual(value("XIV"), 14)
"""
CACHE = """
class Cache:
    def __init__(self, size):
        self.size = size
        self.values = {}

    def get(self, key):
        return self.values.get(key)

    def put(self, key, value):
        if len(self.values) >= self.size:
            self.values.pop(next(iter(self.values)))
        self.values[key] = value
"""
CACHE_SOLVED = """
class Cache:
    def __init__(self, size):
        self.size = size
        self.values = {}

    def get(self, key):
        if key in self.values:
            self.values[key] = self.values.pop(key)
        return self.values.get(key)

    def put(self, key, value):
        self.values.pop(key, None)
        if len(self.values) >= self.size:
            self.values.pop(next(iter(self.values)))
        self.values[key] = value
"""
CACHE_TESTS = """
import unittest
from src.cache import Cache

class Caches(unittest.TestCase):
    def test_get(self):
        cache = Cache(1)
        cache.put(1, 2)
        self.assertEqual(cache.get(1), 2)
"""
CACHE_HIDDEN = """
    def test_recent(self):
        cache = Cache(2)
        cache.put(1, 1)
        cache.put(2, 2)
        cache.get(1)
        cache.put(3, 3)
        self.assertEqual((cache.get(1), cache.get(2)), (1, None))
"""
SLUG = """
def slug(title):
    return title.lower().replace(" ", "-")
"""
SLUG_SOLVED = """
from words import kept

def slug(title):
    return "".join(filter(kept, title)).lower().replace(" ", "-")
"""
SLUG_TESTS = """
import unittest
from slug import slug

class Slugs(unittest.TestCase):
    def test_words(self):
        self.assertEqual(slug("A b"), "a-b")
"""
SLUG_HIDDEN = """
    def test_signs(self):
        self.assertEqual(slug("What? Now!"), "what-now")
"""
LONG = f"\n# {'more than one command takes ' * 9}" * 600
REPOSITORIES = {
    "us/roman": Repository(
        {"roman.py": ROMAN, "test_roman.py": ROMAN_TESTS},
        {"roman.py": ROMAN_SOLVED},
        {"test_roman.py": ROMAN_TESTS + ROMAN_HIDDEN},
        "test_roman.Roman.test_less",
        "test_roman.Roman.test_sum",
    ),
    "us/cache": Repository(
        {"src/cache.py": CACHE, "src/__init__.py": "", "tests/__init__.py": "", "tests/test_cache.py": CACHE_TESTS},
        {"src/cache.py": CACHE_SOLVED},
        {"tests/test_cache.py": CACHE_TESTS + CACHE_HIDDEN},
        "tests.test_cache.Caches.test_recent",
        "tests.test_cache.Caches.test_get",
    ),
    "us/slug": Repository(
        {"slug.py": SLUG + LONG, "old.py": "unused = True\n", "test_slug.py": SLUG_TESTS},
        {
            "slug.py": SLUG_SOLVED + LONG,
            "words.py": 'def kept(letter):\n    return letter.isalnum() or letter == " "',
            "old.py": None,
        },
        {"test_slug.py": SLUG_TESTS + SLUG_HIDDEN},
        "test_slug.Slugs.test_signs",
        "test_slug.Slugs.test_words",
    ),
}


def diff(before: Files, after: Mapping[str, str | None]) -> str:
    """Return what changes as `git diff` writes it."""
    text = ""
    for path, new in after.items():
        old = before.get(path)
        names = "/dev/null" if old is None else f"a/{path}", "/dev/null" if new is None else f"b/{path}"
        lines = difflib.unified_diff((old or "").splitlines(True), (new or "").splitlines(True), *names)
        text += "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines)
    return text


def commit(folder: Path, files: Files, encoding: str = "utf-8") -> str:
    """Make a repository of files; return its commit."""
    for path, text in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text, encoding=encoding)
    git = ["git", "-C", str(folder), "-c", "user.name=us", "-c", "user.email=us@here"]
    when = {**os.environ, "GIT_AUTHOR_DATE": "2026-01-01T00:00:00Z", "GIT_COMMITTER_DATE": "2026-01-01T00:00:00Z"}
    for command in (["init", "-q"], ["add", "-Af"], ["commit", "-qm", "base"]):  # the commit says which split it is of
        subprocess.run([*git, *command], check=True, capture_output=True, env=when)
    return subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()


def name_of(test: str) -> str:
    """Return a test's name as unittest prints it."""
    return f"{test.rpartition('.')[2]} ({test})"


def write_tasks(folder: Path) -> Path:
    """Make the repositories below a folder; return the file of the tasks."""
    rows = []
    for name, made in REPOSITORIES.items():
        rows.append(
            {
                "instance_id": name.replace("/", "__"),
                "repo": name,
                "base_commit": commit(folder / name.replace("/", "__"), made.files),
                "problem_statement": f"{made.fails.rpartition('_')[2]} is wrong.",
                "patch": diff(made.files, made.solution),
                "test_patch": diff(made.files, dict(made.tests)),
                "FAIL_TO_PASS": json.dumps([name_of(made.fails)]),
                "PASS_TO_PASS": [name_of(made.passes)],
                "test_command": f"python3 -m unittest -v {made.fails.rsplit('.', 2)[0]}",
            }
        )
    (folder / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder / "tasks.jsonl"
