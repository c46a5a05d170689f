"""Another process of a run, as rank 0 sees it: started, asked over a pipe, waited for and ended."""

from __future__ import annotations

import io
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, cast

from agent_rl.config import write_setting
from agent_rl.errors import AgentRLError, WorkerError
from agent_rl.gym.registry import EnvSpec
from agent_rl.runs.commands import command

OF_THE_GROUP = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that a terminal or a scheduler sends to all processes: rank 0 decides."""
PATIENCE = 10.0
"""Seconds that workers have to end by themselves."""


@dataclass(frozen=True)
class WorkerProcess:
    """Another process of the run."""

    rank: int
    process: subprocess.Popen[bytes]
    connection: Connection
    folder: Path
    """The run's."""

    def ask(self, what: str, *arguments: object) -> None:
        """Have something done.

        Raises:
            WorkerError: if the process has ended.
        """
        with self._alive():
            self.connection.send_bytes(dump((what, arguments)))

    def answer(self) -> Any:
        """Wait for what was asked.

        Raises:
            WorkerError: if the process has ended.
            AgentRLError: what it raised.
        """
        with self._alive():
            answer = pickle.loads(self.connection.recv_bytes())
        if isinstance(answer, AgentRLError):
            raise answer
        if isinstance(answer, str):
            raise WorkerError(f"process {self.rank} of the run failed: {answer}")
        return answer

    @contextmanager
    def _alive(self) -> Iterator[None]:
        try:
            yield
        except (EOFError, OSError):
            self.connection.close()
            raise self.lost() from None

    def lost(self) -> WorkerError:
        """Return what to say where it has gone, or is about to."""
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(PATIENCE)
        code = self.process.returncode
        how = f"was killed by signal {-code}" if code and code < 0 else f"ended: {code}"
        if code == -signal.SIGKILL:
            how += ", perhaps for want of memory"
        return WorkerError(
            f"process {self.rank} of the run {how}; continue from the last checkpoint, with as many processes or "
            f"fewer: {command('train', write_setting('resume', str(self.folder)), 'processes=1')}"
        )


def start_worker(rank: int, folder: Path) -> WorkerProcess:
    """Start one, which waits to be asked."""
    own, other = Pipe()
    # the threads of two processes must not spin against each other; torch reads it when it is loaded
    environment = {"OMP_WAIT_POLICY": "PASSIVE", **os.environ}
    program = [sys.executable, "-m", "agent_rl.backends.embedded.worker", str(other.fileno())]
    before = signal.pthread_sigmask(signal.SIG_BLOCK, OF_THE_GROUP)  # until it ignores them
    try:
        process = subprocess.Popen(program, pass_fds=(other.fileno(),), env=environment, stdin=subprocess.DEVNULL)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    other.close()
    return WorkerProcess(rank, process, own, folder)


def answers_of(workers: Sequence[WorkerProcess]) -> list[Any]:
    """Wait for what each was asked; raise as `answer` as soon as one has ended, whoever still works."""
    answers = dict[int, Any]()
    while waiting := {worker.connection: worker for worker in workers if worker.rank not in answers}:
        for ready in wait([*waiting]):
            worker = waiting[cast(Connection, ready)]
            answers[worker.rank] = worker.answer()
    return [answers[worker.rank] for worker in workers]


def end_workers(workers: Sequence[WorkerProcess]) -> None:
    """Let all of them end, and make sure that they do within `PATIENCE`."""
    for worker in workers:
        worker.connection.close()
    until = time.monotonic() + PATIENCE
    for worker in workers:
        try:
            worker.process.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            worker.process.kill()
            worker.process.wait()


class _Pickler(pickle.Pickler):
    """Writes environments by their ids: what is registered may hold functions that no other process can read."""

    def persistent_id(self, value: object) -> str | None:
        return value.id if isinstance(value, EnvSpec) else None


def dump(value: object) -> bytes:
    """Pickle a value for another process of the run."""
    file = io.BytesIO()
    _Pickler(file, pickle.HIGHEST_PROTOCOL).dump(value)
    return file.getvalue()
