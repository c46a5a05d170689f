"""agent_rl.backends.verl.driver.watchdog: a lost or stuck process is named once, and ends the run."""

import threading
import time
from concurrent.futures import Future
from pathlib import Path

import pytest

from agent_rl.backends.verl.driver import watchdog
from agent_rl.backends.verl.driver.watchdog import (
    Watchdog,
    WatchedProcess,
    describe_death,
    read_fault,
    stop_with,
)
from agent_rl.errors import InfrastructureError


class Asked:
    """A process: futures that the test answers."""

    def __init__(self) -> None:
        self.futures: list[Future[str | None]] = []

    def __call__(self) -> Future[str | None]:
        self.futures.append(Future())
        return self.futures[-1]


def test_watched_process_is_asked_one_at_a_time() -> None:
    asked = Asked()
    part = WatchedProcess("worker 0", asked)
    assert part.fault(0) is None and len(asked.futures) == 1
    assert part.fault(5) is None and len(asked.futures) == 1  # one question at a time
    asked.futures[0].set_result(None)
    assert part.fault(10) is None and part.fault(15) is None and len(asked.futures) == 2
    asked.futures[1].set_result("its engine has died")
    assert part.fault(20) == "worker 0: its engine has died"


def test_watched_process_names_the_cause_of_death() -> None:
    asked = Asked()
    part = WatchedProcess("worker 0", asked)
    part.fault(0)
    asked.futures[0].set_exception(ConnectionError("\n  killed by signal 9\nand a long trace"))
    assert part.fault(5) == "worker 0 is dead: ConnectionError: killed by signal 9"


RAY_SAYS = """The actor died unexpectedly before finishing this task.
\tclass_name: AgentLoopWorkerTQ
\tactor_id: 5394a3b9a2621798a60ea1bd01000000
\tpid: 26533
\tname: x
\tip: 192.0.2.2
The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR Worker exit detail: Worker \
unexpectedly exits with a connection error code 2. End of file. Some common causes include: (1) the process was killed \
by the OOM killer due to high memory usage, (2) ray stop --force was called, or (3) the worker crashed unexpectedly \
due to SIGSEGV or another unexpected error. If the process was killed by the kernel OOM killer ..."""


def test_describe_death_names_process_place_and_reason() -> None:
    assert describe_death(ConnectionError(RAY_SAYS)) == (
        "process 26533, of class AgentLoopWorkerTQ, on 192.0.2.2, exit type SYSTEM_ERROR, because Worker unexpectedly "
        "exits with a connection error code 2. End of file. Some common causes include: (1) the process was killed by "
        "the OOM killer due to high memory usage, (2) ray stop --force was called, or (3) the worker crashed "
        "unexpectedly due to SIGSEGV or another unexpected error."
    )


def test_watched_process_is_stuck_after_its_patience() -> None:
    busy, stuck = (
        WatchedProcess("server 0", Asked()),
        WatchedProcess("worker 0", Asked(), patience=60, advice="make it async"),
    )
    assert busy.fault(100) is None and stuck.fault(100) is None
    assert busy.fault(10_000) is None and stuck.fault(160) is None
    assert stuck.fault(161) == "worker 0 has not answered for 61 s: make it async"


def test_watched_process_answer_renews_its_patience() -> None:
    asked = Asked()
    part = WatchedProcess("worker 0", asked, patience=60)
    part.fault(0)
    asked.futures[0].set_result(None)
    part.fault(50)
    part.fault(55)  # asks again
    assert part.fault(110) is None and part.fault(116) is not None


def test_watchdog_reports_the_first_fault_once() -> None:
    said: list[str] = []

    def broken() -> Future[str | None]:
        answer: Future[str | None] = Future()
        answer.set_result("broken")
        return answer

    with Watchdog([WatchedProcess("server 0", Asked()), WatchedProcess("worker 0", broken)], said.append, every=0.01):
        time.sleep(0.3)
    assert said == ["worker 0: broken"]


def test_watchdog_is_silent_after_its_exit() -> None:
    asked, said = Asked(), list[str]()
    with Watchdog([WatchedProcess("worker 0", asked)], said.append, every=0.01):
        while not asked.futures:
            pass
    asked.futures[0].set_result("broken")
    assert not said and not [t for t in threading.enumerate() if t.name == "watchdog"]


def test_stop_with_writes_the_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    statuses: list[int] = []
    monkeypatch.setattr(watchdog.os, "_exit", statuses.append)
    assert read_fault(tmp_path) is None
    stop_with(tmp_path)("worker 0: broken … \ud800")  # of a text that was cut amid a character
    assert statuses == [1] and read_fault(tmp_path) == "worker 0: broken … ?"


def test_watchdog_stops_the_run_at_an_infrastructure_error() -> None:
    said: list[str] = []
    with (
        pytest.raises(InfrastructureError),
        Watchdog([WatchedProcess("worker 0", Asked())], said.append),
    ):
        raise InfrastructureError("vLLM serves other weights")
    assert said == ["vLLM serves other weights"]


def test_watchdog_asks_again_after_an_outdated_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "_loss", lambda error: error)
    asked, said = Asked(), list[str]()
    process = WatchedProcess("worker 0", asked)
    assert process.fault(0.0) is None  # asks
    asked.futures[0].set_result(None)  # it was well

    def answer_the_second_question() -> None:
        while len(asked.futures) < 2:
            time.sleep(0.01)
        asked.futures[1].set_exception(RuntimeError("pid: 7"))

    threading.Thread(target=answer_the_second_question, daemon=True).start()
    with pytest.raises(RuntimeError), Watchdog([WatchedProcess("busy", Asked()), process], said.append, every=60):
        raise RuntimeError("lost")
    assert said == ["worker 0 is dead: process 7"]
