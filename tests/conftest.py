"""Conditions of every test: no network, one thread, and no built-in package under a second name."""

from __future__ import annotations

import fcntl
import functools
import gc
import ipaddress
import os
import socket
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import settings

# before any import that reads them; also for the processes of tests
os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1", HF_DATASETS_OFFLINE="1", WANDB_MODE="disabled")
os.environ.update(TOKENIZERS_PARALLELISM="false", MPLBACKEND="agg")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # torch on tiny models: no slower, and sums in one order everywhere

USUAL = gc.get_threshold()
gc.set_threshold(50_000)  # until all is imported: collections of what imports keep were a fifth of their time

settings.register_profile("agent_rl", deadline=None)  # a busy machine is no failure
settings.load_profile("agent_rl")

TOP_LEVEL = ("configs", "envs", "sandboxes", "tools")
"""The folders that import under agent_rl only: under a name of their own, everything in them would exist twice."""

ENDED_BY_THEIR_OWNER = ("agent_rl calls", "agent_rl follow", "agent_rl page", "agent_rl watchdog", "vllm", "watchdog")
"""Names of threads. Those of connections, which live as long as the process, have others."""

_refused: list[object] = []
_guarded = False


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say what was not tested for want of something, and why."""
    for report in terminalreporter.stats.get("skipped", ()):
        if isinstance(report.longrepr, tuple) and "NOT TESTED" in report.longrepr[2]:
            terminalreporter.write_line(f"{report.nodeid}: {report.longrepr[2]}", yellow=True)


def pytest_sessionstart(session: pytest.Session) -> None:
    """Let what reruns tests in several workers send at once: 40 ms a test passed between two small messages of its."""
    if (sock := getattr(getattr(session.config, "failures_db", None), "sock", None)) is not None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def pytest_collection_finish() -> None:
    """Let no collection look again at what was imported, which stays."""
    gc.set_threshold(*USUAL)
    gc.collect()
    gc.freeze()


def is_local(host: object) -> bool:
    """Whether a host is this machine; None and "" are the ones that a server listens on."""
    name = host.decode() if isinstance(host, bytes) else str(host or "localhost")
    if name in ("localhost", socket.gethostname()):
        return True
    try:
        return ipaddress.ip_address(name.partition("%")[0]).is_loopback
    except ValueError:
        return False


def _refuse_network(event: str, args: tuple[object, ...]) -> None:
    if not _guarded or not event.startswith("socket."):
        return
    if event in ("socket.connect", "socket.sendto", "socket.sendmsg"):
        sock, address = args[0], args[1]
        if getattr(sock, "family", None) not in (socket.AF_INET, socket.AF_INET6) or not isinstance(address, tuple):
            return
        host = address[0]
    elif event in ("socket.getaddrinfo", "socket.gethostbyname", "socket.gethostbyaddr"):
        host = args[0]
    else:
        return
    if not is_local(host):
        _refused.append(host)
        raise RuntimeError(f"a test wants to reach {host!r}, but tests run without a network")


sys.addaudithook(_refuse_network)  # below every library; it can't be removed, so a flag turns it on


def pytest_configure() -> None:
    """Put the models of tests where AGENT_RL_TEST_DEVICE says: `cuda` tests the embedded backend on a GPU."""
    if device := os.environ.get("AGENT_RL_TEST_DEVICE"):
        from torch import Tensor

        from agent_rl.backends.embedded import scoring
        from agent_rl.backends.embedded.actor import load_actor
        from agent_rl.backends.embedded.scoring import Scores
        from tests import runs

        score = scoring.score_tokens

        def score_anywhere(model: object, ids: Tensor, *args: float, **knobs: bool) -> Scores:
            scores = score(model, ids.to(model.device), *args, **knobs)  # type: ignore[attr-defined]
            return replace(scores, **{name: getattr(scores, name).to(ids.device) for name in Scores.__slots__})

        scoring.score_tokens = score_anywhere
        load_actor.__kwdefaults__["device"] = runs.SMALL["device"] = device


@pytest.fixture(autouse=True)
def no_floors_unasked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Floors beside evaluations are tested where they are asked for: they would take a second of each."""
    monkeypatch.setattr("agent_rl.checks.floors.SECONDS", 0.0)
    monkeypatch.setattr("agent_rl.checks.floors.SHARE", 0.0)


@pytest.fixture
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """Retry a served model at once, and read no key of the machine."""
    monkeypatch.setattr("agent_rl.policy.openai_client.PAUSE", 0.0)
    for name in ("OPENAI_API_KEY", "OPENAI_BASE_URL"):
        monkeypatch.delenv(name, raising=False)


@functools.cache
def _curve_of_nothing(narrow: bool) -> str:
    from agent_rl.view.curve import learning_curve_svg

    return learning_curve_svg([], [], narrow=narrow)


@pytest.fixture(autouse=True)
def curves_drawn_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reports of runs show a curve of nothing: theirs would take half a second, and `test_view.py` draws some."""
    if report := sys.modules.get("agent_rl.runs.report"):
        monkeypatch.setattr(report, "learning_curve_svg", lambda *_, narrow=False: _curve_of_nothing(narrow))


@pytest.fixture(scope="session", autouse=True)
def short_demonstrations() -> None:
    """Let fresh models' tokenizers learn from fewer demonstrations: half a second less of each run."""
    if fresh := sys.modules.get("agent_rl.backends.embedded.fresh"):
        fresh.TOKENIZER_EPISODES = 150


@pytest.fixture(autouse=True)
def refused(request: pytest.FixtureRequest) -> Iterator[list[object]]:
    """The hosts that this test was kept from reaching; one fails it, though its error was caught. Not for e2e."""
    global _guarded
    _guarded = request.node.get_closest_marker("e2e") is None
    yield _refused
    _guarded = False
    hosts = _refused.copy()
    _refused.clear()
    if hosts:
        pytest.fail(f"the test wanted to reach {hosts}, but tests run without a network")


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """Fail a test that leaves an episode under way, or a thread of ours that somebody has to end.

    Another test of the same process would find it, and fail in its place.
    """
    before = _under_way()
    yield
    if _under_way().keys() - before.keys():
        gc.collect()  # what nothing refers to any more is closed here
    left = _under_way()
    if new := sorted(left[found] for found in left.keys() - before.keys()):
        pytest.fail(f"the test left under way: {'; '.join(new)}: close what it opened")


def _under_way() -> dict[object, str]:
    """Return the episodes that this process plays, and our threads that somebody has to end, with names."""
    found: dict[object, str] = {t: f"thread {t}" for t in threading.enumerate() if t.name in ENDED_BY_THEIR_OWNER}
    if "agent_rl.rollout.episode" in sys.modules:
        from agent_rl.rollout.watch import activity_of, describe, runs_under_way

        found |= {run: describe(activity_of(run)) for run in runs_under_way()}
    return found


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    """Keep a file's tests in one worker, for its fixtures; and those of sandboxes in one, as they count processes."""
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return "sandbox" if nodeid.startswith("tests/sandbox/") else nodeid.partition("::")[0]

    return ByFile(config, log)


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown() -> None:
    """Fail the test that imported a built-in under its top-level name."""
    if twice := [name for name in TOP_LEVEL if sys.modules.pop(name, None)]:
        pytest.fail(f"imported at top level: {twice}; import them as agent_rl.<name>")


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a small finished run; for reading only."""
    from agent_rl.backends.embedded.run import start_run
    from agent_rl.view.progress import Progress
    from tests.runs import config

    return start_run(config(tmp_path_factory.mktemp("run")), Progress())


@pytest.fixture(scope="session")
def talker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a model trained on the form of tool calls, for all workers; its episodes have several turns."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "talker"
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            _train_talker(half := folder.with_suffix(".half"))
            half.rename(folder)
    return folder


def _train_talker(folder: Path) -> None:
    """Train it in a folder, which is left half-made if that fails."""
    from agent_rl.backends.embedded.fresh import fresh_actor
    from agent_rl.backends.embedded.warm_start import demonstrate, warm_start
    from agent_rl.gym.registry import spec
    from tests.runs import config

    settings = config(folder, warm_start={"demonstrations": 300, "copy_steps": 5, "clone_steps": 120, "batch": 16})
    actor = fresh_actor(spec(settings.env), settings)
    played = demonstrate(spec(settings.env), 300, split="train", seed=0, renderer=actor.renderer)
    actor.model.train()
    trajectories = [e.trajectories[0] for e in played]
    warm_start(actor.model, trajectories, settings.warm_start, tokenizer=actor.tokenizer, seed=0)
    actor.save(folder)
