"""The corpus of wordnet-v0: passages and tasks of WordNet and GCIDE, from Debian's packages, by one command.

    python -m agent_rl.envs.wordnet_corpus            # downloads wordnet-base and dict-gcide by apt-get, 21 MB
    python -m agent_rl.envs.wordnet_corpus FOLDER     # with the two .deb files, or with what they unpack to

It writes passages.jsonl, tasks.jsonl and a search index into `AGENT_RL_CACHE`, or ~/.cache/agent_rl: 0.2 GB.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import re
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import reduce
from pathlib import Path
from typing import NamedTuple, TypeAlias

from agent_rl.core.messages import Task
from agent_rl.errors import AgentRLError, ConfigError
from agent_rl.gym.task_files import cache_folder
from agent_rl.tools.search import open_index

PACKAGES = ("wordnet-base", "dict-gcide")
COMMAND = "python -m agent_rl.envs.wordnet_corpus"
SAME_ANSWER = 100
PARTS_OF_SPEECH = {"noun": "n", "verb": "v", "adj": "a", "adv": "r"}
RELATIONS = {"@i": "an instance of", "#p": "part of", "#m": "member of", "@": "a kind of"}
"""WordNet's pointers that passages tell, in their order."""
_DIGITS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"
_LIFE = re.compile(r"\((?:born [^)]*)?(\d{4})\s?-\s?\d{4}\)")
_CAPITAL = re.compile(r"capital (?:and largest city |city )?of ([A-Z][A-Za-z ]+?)(?:;|,| and| on| in|$)")

Key: TypeAlias = tuple[str, str]
"""A synset's part of speech and its offset in the file."""


class Synset(NamedTuple):
    """Words of one meaning."""

    words: list[str]
    gloss: str
    related: Mapping[str, list[Key]]


def corpus_folder() -> Path:
    """Return where the corpus is kept."""
    return cache_folder() / "wordnet"


def build(source: Path | None, out: Path) -> tuple[int, int]:
    """Write the passages, the tasks and the search index of a corpus; return how many passages and tasks there are.

    Args:
        source: a folder with the two .deb files, or with what they unpack to; downloaded if left out.
        out: the folder to write into.

    Raises:
        ConfigError: if the packages can't be downloaded or unpacked, or are not there.
    """
    with tempfile.TemporaryDirectory() as temporary:
        unpacked = _unpack(source or _download(Path(temporary)), Path(temporary) / "root")
        synsets = {key: synset for file in PARTS_OF_SPEECH for key, synset in _synsets(_only(unpacked, f"data.{file}"))}
        definitions = _definitions(_only(unpacked, "gcide.index"), _only(unpacked, "gcide.dict.dz"))
        out.mkdir(parents=True, exist_ok=True)
        passages = _write(out / "passages.jsonl", (*_passages(synsets), *definitions))
        open_index(out / "passages.jsonl")
        return passages, _write(out / "tasks.jsonl", [*_without_favourites(_Questions(synsets))])


def _download(folder: Path) -> Path:
    _run(["apt-get", "download", *PACKAGES], folder, "or get both .deb files from packages.debian.org")
    return folder


def _unpack(folder: Path, root: Path) -> Path:
    archives = sorted(folder.glob("*.deb"))
    for archive in archives:
        _run(["dpkg-deb", "-x", str(archive.resolve()), str(root)], folder, "or unpack both .deb files by other means")
    return root if archives else folder


def _run(command: Sequence[str], folder: Path, remedy: str) -> None:
    try:
        subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError) as error:
        said = (getattr(error, "stderr", None) or str(error)).strip().splitlines()[-1:]
        raise ConfigError(
            f"{' '.join(command[:2])} fails: {''.join(said)}; {remedy}, and run {COMMAND} FOLDER"
        ) from None


def _only(folder: Path, name: str) -> Path:
    found = sorted(folder.rglob(name))
    if not found:
        raise ConfigError(f"{folder} has no {name}: give a folder with the .deb files of {' and '.join(PACKAGES)}")
    return found[0]


def _synsets(file: Path) -> Iterator[tuple[Key, Synset]]:
    for line in file.read_text(encoding="latin1").splitlines():
        if line.startswith(" "):  # the licence
            continue
        head, _, gloss = line.rstrip().partition(" | ")
        fields = head.split()
        end = 4 + 2 * int(fields[3], 16)
        words = [word.partition("(")[0].replace("_", " ") for word in fields[4:end:2]]
        related = defaultdict(list)
        for place in range(end + 1, end + 1 + 4 * int(fields[end]), 4):
            pointer, offset, kind, _ = fields[place : place + 4]
            if pointer in RELATIONS:
                related[RELATIONS[pointer]].append((kind.replace("s", "a"), offset))
        yield (PARTS_OF_SPEECH[file.suffix[1:]], fields[0]), Synset(words, gloss, related)


def _definitions(index: Path, dictionary: Path) -> Iterator[Task]:
    """Yield the passages of GCIDE, each once: several words may share one."""
    data = gzip.decompress(dictionary.read_bytes())
    seen = set()
    for line in index.read_text(encoding="utf-8").splitlines():
        word, *numbers = line.split("\t")
        start, length = (reduce(lambda n, digit: n * 64 + _DIGITS.index(digit), number, 0) for number in numbers)
        if (start, length) not in seen and not word.startswith("00"):
            seen.add((start, length))
            text = " ".join(data[start : start + length].decode("utf-8", "replace").split())
            if len(text) > 40:
                yield {"id": f"gcide-{start}", "title": word, "text": text[:4000]}


def _passages(synsets: Mapping[Key, Synset]) -> Iterator[Task]:
    names = {short: long for long, short in PARTS_OF_SPEECH.items()}
    for key, synset in synsets.items():
        said = [
            f" It is {relation} {', '.join(synsets[other].words[0] for other in synset.related[relation][:4])}."
            for relation in RELATIONS.values()
            if relation in synset.related
        ]
        text = f"{', '.join(synset.words)} ({names[key[0]]}): {synset.gloss}{''.join(said)}"
        yield {"id": _id(key), "title": synset.words[0], "text": text}


def _id(key: Key) -> str:
    return f"wn-{''.join(key)}"


class _Questions:
    """The questions about nouns that have one meaning, with all names of the answer."""

    def __init__(self, synsets: Mapping[Key, Synset]) -> None:
        self._synsets = synsets
        self._meanings = Counter(word.lower() for synset in synsets.values() for word in synset.words)

    def __iter__(self) -> Iterator[Task]:
        for key in self._synsets:
            if key[0] == "n" and self._is_clear(key):
                yield from self._about(key)

    def _about(self, key: Key) -> Iterator[Task]:
        _, gloss, related = self._synsets[key]
        if instance_of := related.get("an instance of"):
            if life := _LIFE.search(gloss):
                question = f"In which year was {self._name(key)}, the {self._name(instance_of[0])}, born?"
                yield self._task("born", question, [life[1]], key)
            yield from self._about_place_of(key)
        elif "part of" not in related:
            yield from self._about_kind_of(key)

    def _about_place_of(self, key: Key) -> Iterator[Task]:
        place = self._only(key, "part of")
        if place is None or not self._synsets[place].related.get("an instance of"):
            return
        if (region := self._only(place, "part of")) is not None:
            question = (
                f"{self._name(key)} lies in a place. Which larger place or region is that place itself a part of?"
            )
            yield self._task("part of part", question, self._synsets[region].words, key, place)
        if capital := _CAPITAL.search(self._synsets[place].gloss):
            question = f"{self._name(key)} is in a city that is a capital. Of what is that city the capital?"
            yield self._task("capital", question, [capital[1]], key, place)

    def _about_kind_of(self, key: Key) -> Iterator[Task]:
        thing = self._only(key, "a kind of")
        kind = None if thing is None else self._only(thing, "a kind of")
        if thing is None or kind is None or self._name(kind).lower() in self._synsets[key].gloss.lower():
            return
        question = f"Of what is the thing that {self._name(key)} is a kind of itself a kind?"
        yield self._task("kind of kind", question, self._synsets[kind].words, key, thing)

    def _name(self, key: Key) -> str:
        return self._synsets[key].words[0]

    def _is_clear(self, key: Key) -> bool:
        return self._meanings[self._name(key).lower()] == 1

    def _only(self, key: Key, relation: str) -> Key | None:
        """Return the only thing that a synset is related to, if its name is clear."""
        found = self._synsets[key].related.get(relation, [])
        return found[0] if len(found) == 1 and self._is_clear(found[0]) else None

    def _task(self, kind: str, question: str, answers: Sequence[str], *support: Key) -> Task:
        path: dict[str, list[str]] = {
            "support": [_id(key) for key in support],
            "names": [self._name(key) for key in support],
        }
        return {"kind": kind, "question": question, "answers": list(answers), **path}


def _without_favourites(tasks: Iterable[Task]) -> Iterator[Task]:
    """Yield tasks in an order by a hash, at most `SAME_ANSWER` of an answer: one in ten would have "dicot genus"."""
    counts = Counter[str]()
    for task in sorted(tasks, key=lambda task: hashlib.blake2b(str(task["question"]).encode()).digest()):
        answer = json.dumps(task["answers"])
        counts[answer] += 1
        if counts[answer] <= SAME_ANSWER:
            yield task


def _write(file: Path, rows: Iterable[Task]) -> int:
    new = file.with_suffix(".new")
    number = 0
    with new.open("w", encoding="utf-8") as lines:
        for number, row in enumerate(rows, 1):  # noqa: B007
            lines.write(json.dumps(row, ensure_ascii=False) + "\n")
    new.replace(file)
    return number


def main() -> int:
    """Build the corpus, by the command line."""
    parser = argparse.ArgumentParser(prog=COMMAND, description="Build the corpus of wordnet-v0.")
    parser.add_argument("folder", nargs="?", type=Path, help=f"with the .deb files of {' and '.join(PACKAGES)}")
    try:
        passages, tasks = build(parser.parse_args().folder, corpus_folder())
    except AgentRLError as error:
        print(f"{COMMAND}: {error}", file=sys.stderr)
        return 1
    print(f"{passages:,} passages and {tasks:,} tasks in {corpus_folder()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
