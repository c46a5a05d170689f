"""A writer of episodes that is killed again and again, with a reader beside it."""

from __future__ import annotations

import threading
import time
import warnings
from collections import Counter
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Semaphore
from pathlib import Path

import numpy as np

from agent_rl.store.codec import load_line
from agent_rl.store.episodes import EpisodeWriter
from agent_rl.store.shards import read_from, shards_of
from tests.doubles import example_episode
from tests.forking import fork_server

SHARD_BYTES = 12_000
"""A few lines: most kills fall into the closing of a shard."""
AHEAD = 8
"""Episodes that a writer may be ahead of what was heard of it: on a busy machine it would write thousands a life."""


def write_forever(folder: Path, name: str, life: int, told: Connection, ahead: Semaphore) -> None:
    """Write episodes, and tell the id of each that is written."""
    warnings.simplefilter("ignore")  # of the torn line that the last life left
    with EpisodeWriter(folder, name=name, shard_bytes=SHARD_BYTES) as writer:
        for number in range(100_000):
            ahead.acquire()
            episode = example_episode(f"{name or 'own'}-{life}-{number}")
            writer.write(episode)
            told.send(episode.id)


def stored(folder: Path) -> Counter[str]:
    """Return how often each id is there; every line is read in full."""
    return Counter(load_line(line).id for shard in shards_of(folder) for _, line in read_from(shard))


class Reader(threading.Thread):
    """Reads all the time: what is missing of what was written before, and what is there twice."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder, self.written = folder, list[str]()
        self.passes, self.faults, self.is_over = 0, list[str](), threading.Event()

    def run(self) -> None:
        while not self.is_over.is_set():
            before, began = list(self.written), time.perf_counter()
            try:
                found = stored(self.folder)
            except Exception as error:
                self.faults.append(f"{type(error).__name__}: {error}")
                return
            self.faults += [f"{id} is missing" for id in before if id not in found]
            self.faults += [f"{id} is there {n} times" for id, n in found.items() if n > 1]
            self.passes += bool(found)
            self.is_over.wait(time.perf_counter() - began)  # the writers' turn: a thread that only reads holds them up


def kill_writers(folder: Path, kills: int, seed: int) -> Reader:
    """Kill writers that many times, each somewhere after a few episodes; return the reader that was beside them."""
    processes = fork_server("tests.store_crashes")
    generator = np.random.default_rng(seed)
    folder.mkdir()
    reader = Reader(folder)
    reader.start()
    try:
        for life in range(kills):
            (told, telling), ahead = processes.Pipe(duplex=False), processes.Semaphore(AHEAD)
            own = (folder, ("", "worker-3")[life % 2], life, telling, ahead)
            writer = processes.Process(target=write_forever, args=own)
            writer.start()
            telling.close()
            for _ in range(int(generator.integers(1, 12))):
                reader.written.append(told.recv())
                ahead.release()
            writer.kill()
            writer.join()
            try:
                while True:
                    reader.written.append(told.recv())
            except (EOFError, OSError):
                pass
    finally:
        reader.is_over.set()
        reader.join()
    return reader
