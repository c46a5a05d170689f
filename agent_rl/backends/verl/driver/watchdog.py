"""Watchdog: detect processes of verl's that died or are stuck, and stop the run with a reason.

verl polls for episodes until they are there, and sends weights until a server has taken them. Both wait for ever if the
process that should answer is dead or stuck. A thread beside the trainer therefore asks all of them regularly.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, cast

from agent_rl.errors import InfrastructureError

if TYPE_CHECKING:
    from ray.actor import ActorHandle

FAULT = "fault.txt"
"""In a run's folder: why it was stopped."""
EVERY_S = 5.0
STUCK_S = 900.0
"""An event loop that has not answered for so long is blocked by an environment."""
CLOSE_S = 30.0
"""How long environments get to close."""
DIAGNOSIS_S = 5.0
"""How long processes get to answer once the trainer has lost one of them."""


@dataclass(slots=True)
class WatchedProcess:
    """A process that the run depends on."""

    name: str
    """With what it runs, for people."""
    ask: Callable[[], Future[str | None]]
    """Sends a question: the answer is None, or what is wrong. The future raises if the process is dead."""
    patience: float | None = None
    """After how many seconds without an answer it is stuck; None if it may be busy for any time."""
    advice: str = ""
    """What to do about one that is stuck."""
    _answer: Future[str | None] | None = field(default=None, init=False)
    _asked: float = field(default=0.0, init=False)

    def fault(self, now: float) -> str | None:
        """Return what is wrong with it at a time, in seconds of any clock; None if nothing is known to be."""
        if self._answer is None:
            self._answer, self._asked = self.ask(), now
        answer = self._answer
        if not answer.done():
            late = self.patience is not None and now - self._asked > self.patience
            return f"{self.name} has not answered for {now - self._asked:.0f} s: {self.advice}" if late else None
        self._answer = None
        if (error := answer.exception()) is not None:
            return f"{self.name} is dead: {describe_death(error)}"
        return f"{self.name}: {answer.result()}" if answer.result() else None


def describe_death(error: BaseException) -> str:
    """Return what Ray knows about the death of a process: its id and why it ended."""
    text = " ".join(str(error).split())
    known = {name: re.search(pattern, text) for name, pattern in _DEATH.items()}
    parts = [f"{name} {found[1]}" for name, found in known.items() if found]
    return ", ".join(parts) or f"{type(error).__name__}: {next(iter(str(error).strip().splitlines()), '')}"


_DEATH = {
    "process": r"\bpid: (\d+)",
    "of class": r"\bclass_name: (\w+)",
    "on": r"\bip: ([\w.:]+)",
    "exit type": r"Worker exit type: (\w+)",
    "because": r"Worker exit detail: (.+?)(?: If the process was killed by| There are|$)",
}
"""Where the facts are in Ray's message about a dead actor."""


class Watchdog:
    """Asks all watched processes regularly while its `with` block runs.

    A lost process that the block itself stumbles on, and an `InfrastructureError` in it, stop the run in the same way.
    """

    def __init__(self, watched: Sequence[WatchedProcess], stop: Callable[[str], None], every: float = EVERY_S) -> None:
        """Keep what to watch.

        Args:
            watched: in the order in which faults are looked for.
            stop: is called once with what is wrong, from another thread or at the end of the block.
            every: seconds between two rounds of questions.
        """
        self._watched, self._stop, self._every = watched, stop, every
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def _watch(self) -> None:
        while not self._over.wait(self._every):
            if (fault := self._fault()) is not None:
                self._stop(fault)
                return

    def _fault(self) -> str | None:
        now = time.monotonic()
        return next((found for process in self._watched if (found := process.fault(now))), None)

    def __enter__(self) -> Watchdog:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()
        if isinstance(error, InfrastructureError):
            self._stop(str(error))
        elif error is not None and (lost := _loss(error)) is not None:
            until = time.monotonic() + DIAGNOSIS_S
            while (fault := self._fault()) is None and time.monotonic() < until:
                time.sleep(0.1)  # an answer from before the loss says nothing: ask again
            self._stop(fault or f"a process of verl's is dead: {describe_death(lost)}")


def _loss(error: BaseException) -> BaseException | None:
    """Return the error of Ray's about a lost process: this one or a cause of it; None otherwise."""
    from ray.exceptions import ActorDiedError, ActorUnavailableError, NodeDiedError, WorkerCrashedError

    kinds: tuple[type[BaseException], ...] = (ActorDiedError, ActorUnavailableError, NodeDiedError, WorkerCrashedError)
    if isinstance(error, kinds):
        return error
    cause: BaseException | None = getattr(error, "cause", None) or error.__cause__
    return _loss(cause) if cause is not None and cause is not error else None


def stop_with(folder: Path) -> Callable[[str], None]:
    """Return a function that writes the reason into a folder and ends this process at once."""

    def stop(fault: str) -> None:
        (folder / FAULT).write_text(fault, encoding="utf-8", errors="replace")  # any text of an error's
        os._exit(1)

    return stop


def read_fault(folder: Path) -> str | None:
    """Return why a run was stopped, if a watchdog stopped it."""
    file = folder / FAULT
    return file.read_text(encoding="utf-8") if file.exists() else None


def watched_processes(trainer: Any, loops: Any, env: str) -> list[WatchedProcess]:
    """Return the inference servers and the workers that run the episodes of an environment.

    The trainer's own workers are not among them: verl waits for their answers, which raise when one dies.
    """
    servers = [handle for manager in server_managers(trainer) for handle in manager.server_handles]
    return [
        *(
            WatchedProcess(f"inference server {i}, which runs vLLM,", _asking(s, _engine_fault))
            for i, s in enumerate(servers)
        ),
        *(
            WatchedProcess(
                f"rollout worker {i}, which runs episodes of {env},",
                _asking(worker, _nothing),
                STUCK_S,
                "an environment blocks its event loop. Make what takes long async, or run it in a thread (sync tools "
                "are, unless they are inline)",
            )
            for i, worker in enumerate(loops.agent_loop_workers)
        ),
    ]


def server_managers(trainer: Any) -> list[Any]:
    """Return the managers of a trainer's inference servers: on its own devices, and on others."""
    managers = [trainer.llm_server_manager, getattr(trainer, "standalone_server_manager", None)]
    return [manager for manager in managers if manager is not None]


def _asking(actor: ActorHandle, question: Any) -> Any:
    return lambda: cast("Future[str | None]", actor.__ray_call__.remote(question).future())


def _nothing(worker: object) -> None:
    """Do nothing: an answer proves that the event loop responds."""


def _engine_fault(server: Any) -> str | None:
    """Run in a server: return what is wrong with vLLM's engine behind it."""
    engine = getattr(server, "engine", None)
    return "vLLM's engine has died; its log says why" if engine is not None and engine.errored else None


def stop_episodes(loops: Any) -> None:
    """Cancel all running episodes, and wait up to `CLOSE_S` for their environments to close."""
    import ray
    from ray.exceptions import RayError

    def ask(question: Any) -> list[int]:
        answers = [worker.__ray_call__.remote(question) for worker in loops.agent_loop_workers]
        found: list[int] = ray.get(answers, timeout=CLOSE_S)
        return found

    deadline = time.monotonic() + CLOSE_S
    try:
        ask(_cancel)
        while any(ask(_running)) and time.monotonic() < deadline:
            time.sleep(0.2)
    except RayError:  # a worker that is dead or stuck has nothing to close
        return


def _cancel(worker: Any) -> None:
    """Run in a worker: cancel its tasks, and with them their episodes."""
    for task in worker.background_tasks:
        task.cancel()


def _running(worker: Any) -> int:
    """Run in a worker: return how many groups are running."""
    return len(worker.background_tasks)
