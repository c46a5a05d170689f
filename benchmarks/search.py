"""Search over millions of passages: how long its index takes to build, how large it is, and what a query costs.

    python benchmarks/search.py [--passages 2000000] [--folder FOLDER]

The passages are made of those of `wordnet-v0` (`python -m agent_rl.envs.wordnet_corpus`): each of runs of five words
from as many places as it takes to be as long as one of them, under that one's title, with a name of its own, so that
words are as frequent as there, no two passages are alike, and the vocabulary grows with the corpus. The questions are
those of `wordnet-v0`; its own corpus is asked, too. Building and asking are processes of their own, as memory counts:
"anonymous" is what a process holds, "mapped" what it shows of files, which the kernel may take back.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np

from agent_rl.envs.wordnet_corpus import corpus_folder
from agent_rl.tools.search import open_index

ASKED, RUN, FOUND = 200, 5, 5
"""Questions; words that stay together; passages that a query returns."""


def write(real: Path, path: Path, n: int) -> None:
    """Write a corpus of `n` passages."""
    draws = np.random.default_rng(0)
    rows = [json.loads(line) for line in real.open(encoding="utf-8")]
    words = np.array([word for row in rows for word in row["text"].split()], object)
    with path.open("w", encoding="utf-8") as out:
        for i in range(n):
            like = rows[i % len(rows)]
            starts = draws.integers(0, len(words) - RUN, -(-len(like["text"].split()) // RUN))
            text = " ".join(word for start in starts.tolist() for word in words[start : start + RUN])
            passage = {"id": f"{i}", "title": like["title"], "text": f"name{i}: {text}"}
            out.write(json.dumps(passage, ensure_ascii=False) + "\n")


def megabytes(key: str) -> float:
    """Return a line of this process's status, in MB."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))
    return int(line.split()[1]) / 1e3


def build(path: Path) -> str:
    """Build the index."""
    cpu, wall = time.process_time(), time.perf_counter()
    index = open_index(path)
    took = f"{time.process_time() - cpu:.0f} CPU-s, {time.perf_counter() - wall:.0f} s"
    size = path.with_name(f"{path.name}.index.sqlite").stat().st_size / 1e6
    most = megabytes("VmHWM")
    corpus = f"{len(index):,} passages, {path.stat().st_size / 1e6:.0f} MB"
    return f"{corpus}: built in {took}; index {size:.0f} MB; the process had at most {most:.0f} MB"


def ask(path: Path, tasks: Path) -> str:
    """Open the index, and ask questions."""
    before, cpu = megabytes("RssAnon"), time.process_time()
    index = open_index(path)
    opened = time.process_time() - cpu
    rows = [json.loads(line) for line in tasks.open(encoding="utf-8")]
    times, walls = [], []
    for row in rows[:: len(rows) // ASKED][:ASKED]:
        cpu, wall = time.process_time(), time.perf_counter()
        index.search(row["question"], FOUND)
        times.append((time.process_time() - cpu) * 1e3)
        walls.append((time.perf_counter() - wall) * 1e3)
    p50, p99, worst = np.percentile(times, [50, 99, 100])
    memory = f"anonymous {megabytes('RssAnon') - before:.0f} MB more, mapped {megabytes('RssFile'):.0f} MB"
    return (
        f"{len(index):,} passages: opened in {opened * 1e3:.1f} ms; a query takes {p50:.1f} ms of CPU (p50), {p99:.1f} "
        f"(p99), {worst:.1f} at most, p50 by the wall's clock {np.median(walls):.1f}; {memory}"
    )


def alone(function: Callable[..., str], *args: Path) -> None:
    """Run a function in a process of its own, and print what it says."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        print(pool.submit(function, *args).result(), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--passages", type=int, default=2_000_000)
    parser.add_argument("--folder", type=Path, help="for corpus and index: 2 GB; a temporary one if left out")
    given = parser.parse_args()
    real = corpus_folder()
    print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        path = Path(folder) / "passages.jsonl"
        write(real / "passages.jsonl", path, given.passages)
        alone(build, path)
        for corpus in (path, real / "passages.jsonl"):
            alone(ask, corpus, real / "tasks.jsonl")
    print(f"load {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
