"""Faults: what verl would wait for without end is noticed, named, and ends the run.

verl polls for episodes until they are there, and sends weights until a server has taken them. Where the process that
should answer is gone, or is stuck, both wait for ever. A thread beside the trainer asks all of them now and then.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from ray.actor import ActorHandle

FAULT = "fault.txt"
"""In a run's folder: why it was ended."""
EVERY_S = 5.0
STUCK_S = 900.0
"""An event loop that has not answered for so long is blocked by an environment."""
CLOSE_S = 30.0
"""How long environments get to close."""


@dataclass(slots=True)
class WatchedProcess:
    """A process that the run can't do without."""

    name: str
    ask: Callable[[], Future[str | None]]
    """Asks for a sign of life: None, or what is wrong. The future raises if the process is gone."""
    patience: float | None = None
    """After how many seconds no answer is a fault; None if it may be busy for as long as it likes."""
    advice: str = ""
    """What to do about one that does not answer."""
    _answer: Future[str | None] | None = field(default=None, init=False)
    _asked: float = field(default=0.0, init=False)

    def fault(self, now: float) -> str | None:
        """Return what is wrong with it by now, in seconds of any clock; None if nothing is known to be."""
        if self._answer is None:
            self._answer, self._asked = self.ask(), now
        if not self._answer.done():
            late = self.patience is not None and now - self._asked > self.patience
            return f"{self.name} has not answered for {now - self._asked:.0f} s: {self.advice}" if late else None
        answer, self._answer = self._answer, None
        if (error := answer.exception()) is not None:
            return f"{self.name} is gone: {type(error).__name__}: {_first_line(error)}"
        return f"{self.name}: {answer.result()}" if answer.result() else None


def _first_line(error: BaseException) -> str:
    return next((line for line in str(error).splitlines() if line.strip()), "")


class Watchdog:
    """Looks at everything that is watched, until it is left; `with Watchdog(...):`."""

    def __init__(self, watched: Sequence[WatchedProcess], end: Callable[[str], None], every: float = EVERY_S) -> None:
        """Take note of what to watch.

        Args:
            watched: in the order in which faults are looked for.
            end: is called once, from another thread, with what is wrong.
            every: seconds between two looks.
        """
        self._watched, self._end, self._every = watched, end, every
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, name="watchdog", daemon=True)

    def _look(self) -> None:
        while not self._over.wait(self._every):
            fault = next((found for part in self._watched if (found := part.fault(time.monotonic()))), None)
            if fault is not None:
                self._end(fault)
                return

    def __enter__(self) -> Watchdog:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()


def end_with(folder: Path) -> Callable[[str], None]:
    """Return what ends this process at once, whatever its main thread waits for, and leaves the reason in a folder."""

    def end(fault: str) -> None:
        (folder / FAULT).write_text(fault)
        os._exit(1)

    return end


def explain(folder: Path) -> str | None:
    """Return why a run was ended, if a watchdog ended it."""
    file = folder / FAULT
    return file.read_text() if file.exists() else None


def watched(trainer: Any, loops: Any) -> list[WatchedProcess]:
    """Return what to watch: the inference servers and the workers that run the episodes.

    Not the trainer's own workers: verl waits for their answers, and hears of it when one dies.
    """
    managers = [trainer.llm_server_manager, getattr(trainer, "standalone_server_manager", None)]
    servers = [handle for manager in managers if manager is not None for handle in manager.server_handles]
    return [
        *(WatchedProcess(f"inference server {i}", _asking(s, _engine_fault)) for i, s in enumerate(servers)),
        *(
            WatchedProcess(
                f"rollout worker {i}",
                _asking(worker, _nothing),
                STUCK_S,
                "an environment blocks its event loop. Make what takes long async, or run it in a thread (sync tools "
                "are, unless they are inline)",
            )
            for i, worker in enumerate(loops.agent_loop_workers)
        ),
    ]


def _asking(actor: ActorHandle, question: Any) -> Any:
    return lambda: cast("Future[str | None]", actor.__ray_call__.remote(question).future())


def _nothing(worker: object) -> None:
    """Be executed: the event loop runs."""


def _engine_fault(server: Any) -> str | None:
    """Run in a server: say whether vLLM's engine behind it still lives."""
    engine = getattr(server, "engine", None)
    return "vLLM's engine has died; its log says why" if engine is not None and engine.errored else None


def stop_episodes(loops: Any) -> None:
    """Cancel the episodes that are running, so that their environments are closed; wait for that, but not for long."""
    import ray
    from ray.exceptions import RayError

    def ask(question: Any) -> list[int]:
        answers = [worker.__ray_call__.remote(question) for worker in loops.agent_loop_workers]
        found: list[int] = ray.get(answers, timeout=CLOSE_S)
        return found

    deadline = time.monotonic() + CLOSE_S
    try:
        ask(_cancel)
        while any(ask(_under_way)) and time.monotonic() < deadline:
            time.sleep(0.2)
    except RayError:  # a worker that is gone or stuck has nothing to close
        return


def _cancel(worker: Any) -> None:
    """Run in a worker: cancel its tasks, which cancel the episodes that they wait for."""
    for task in worker.background_tasks:
        task.cancel()


def _under_way(worker: Any) -> int:
    """Run in a worker: return how many groups are not done."""
    return len(worker.background_tasks)
