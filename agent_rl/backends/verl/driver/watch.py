"""Watch: which of verl's processes a run depends on, how to ask them, and how to let the last episodes go."""

from __future__ import annotations

import time
from concurrent.futures import Future
from typing import Any, cast

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError

from agent_rl.backends.verl.driver.watchdog import STUCK_S, WatchedProcess

CLOSE_S = 30.0
"""How long environments get to close."""


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
    """Cancel the episodes that are under way, so that their environments are closed; wait for that for a while."""

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
