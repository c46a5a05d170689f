"""A run in several processes: who does what, and how it fails."""

import asyncio
import subprocess
import time
from collections.abc import Iterator, Sequence
from multiprocessing import Pipe
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from agent_rl.backends.embedded.check import check_run, module_of
from agent_rl.backends.embedded.config import TrainConfig
from agent_rl.backends.embedded.data_parallel import SeveralProcesses, deal, in_processes
from agent_rl.backends.embedded.worker_process import WorkerProcess, answers_of, end_workers
from agent_rl.backends.settings import resumed_changes
from agent_rl.engines.base import SamplingParams
from agent_rl.errors import CheckpointError, ConfigError, WorkerError
from agent_rl.gym.registry import EnvSpec, spec
from agent_rl.judge.config import JudgeConfig
from agent_rl.judge.run import share_of_worker
from agent_rl.rollout import Job


def _job(number: int, **changes: object) -> Job:
    return Job(spec("calculator-v0"), {}, number, **changes)


def _seeds(jobs: Sequence[Job], params: SamplingParams) -> list[int]:
    """Play every job: what it gives is its seed."""
    return [job.seed for job in jobs]


def _pairs(jobs: Sequence[Job], params: SamplingParams) -> list[int]:
    """Play jobs of groups of two: what a group gives is its first seed."""
    return [job.seed for job in jobs[::2]]


class _Fake:
    """A worker that is asked here."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.connection, other = Pipe()
        other.close()  # there is something to read at once

    def ask(self, what: str, how: str, jobs: list[Job], params: SamplingParams) -> None:
        self.jobs, self.play = jobs, {"_seeds": _seeds, "_pairs": _pairs}[how]

    def answer(self) -> tuple[list[int], int]:
        return self.play(self.jobs, SamplingParams()), 10 * len(self.jobs)


@pytest.mark.parametrize("n", [1, 2, 5, 12])
def test_spread_keeps_order_of_jobs(n: int) -> None:
    trainer = SimpleNamespace(actor=SimpleNamespace(engine=SimpleNamespace(tokens=0)))
    workers = [_Fake(1), _Fake(2)]
    processes = SeveralProcesses(trainer, workers)  # type: ignore[arg-type]
    jobs = [_job(number) for number in range(2 * n)]
    assert processes.spread(_seeds, jobs, SamplingParams()) == list(range(2 * n))
    assert max(len(worker.jobs) for worker in workers) <= -(-2 * n // 3)
    sampled = trainer.actor.engine.tokens
    assert sampled == 10 * sum(len(worker.jobs) for worker in workers)
    assert processes.spread(_pairs, jobs, SamplingParams(), 2) == list(range(0, 2 * n, 2))


def test_spread_keeps_snapshots_in_one_process() -> None:
    processes = SeveralProcesses(SimpleNamespace(), [object()])  # type: ignore[arg-type, list-item]
    jobs = [_job(1), _job(2, snapshots=True)]
    assert processes.spread(_seeds, jobs, SamplingParams()) == [1, 2]


def test_deal_keeps_groups_whole_and_loads_even() -> None:
    group, lengths = torch.tensor([0, 0, 1, 2, 2, 3]), torch.tensor([10, 20, 40, 5, 5, 15])
    batch = SimpleNamespace(group=group, rows=SimpleNamespace(lengths=lengths))
    assert deal(batch, 2) == [[2, 3, 4], [0, 1, 5]]  # type: ignore[arg-type]  # 50 and 45 tokens
    assert deal(batch, 5) == [[2], [0, 1], [5], [3, 4], []]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"precision": {"autocast": "float16"}}, "float16"),
        ({"algorithm": {"advantage": {"name": "gae"}, "critic": {"where": "shared"}}}, "critic"),
        ({"judge": {"evolve": True, "model": "m"}}, "judge.evolve"),
        ({"device": "cuda:1"}, "one GPU"),
    ],
)
def test_settings_that_several_processes_lack_are_refused(changes: dict[str, object], named: str) -> None:
    with pytest.raises(ValueError, match=f"processes=2: .*{named}.*set processes=1"):
        TrainConfig.model_validate({"env": "calculator-v0", "processes": 2} | changes)


def test_environment_of_a_script_needs_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    env = spec("calculator-v0")
    assert module_of(env, ()) == "agent_rl.envs.calculator"
    monkeypatch.setattr(env.cls, "__module__", "__main__")
    with pytest.raises(ConfigError, match=r"can't see calculator-v0.*name that in imports"):
        check_run(TrainConfig.model_validate({"env": env.id, "processes": 2}))
    monkeypatch.setattr(EnvSpec, "file", property(lambda self: Path("/envs.py")))
    assert module_of(env, ("/envs.py",)) == ""


def test_model_that_has_no_room_for_processes_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 29376 vs 29270")

    monkeypatch.setattr(torch, "save", full)
    actor = SimpleNamespace(model=SimpleNamespace(device=torch.device("cpu")), tokenizer=None)
    own = TrainConfig.model_validate({"env": "calculator-v0", "processes": 2})
    trainer = SimpleNamespace(config=own, actor=actor, spec=spec("calculator-v0"))
    with pytest.raises(CheckpointError, match=r"can't be written with \d+ MiB free, .*: set TMPDIR to a folder"):
        in_processes(Path("runs/x"), trainer).__enter__()  # type: ignore[arg-type]


def test_processes_may_change_when_embedded_run_resumes() -> None:
    assert resumed_changes("embedded", {"processes": 2, "steps": None}) == {"processes": 2}
    with pytest.raises(ConfigError, match="processes can't change"):
        resumed_changes("verl", {"processes": 2})


def test_judge_limits_are_shared_by_processes() -> None:
    whole = JudgeConfig(model="m", requests_per_minute=60, concurrency=7)
    part = share_of_worker(whole, 3)
    assert (part.requests_per_minute, part.concurrency, part.max_cost) == (20, 2, None)
    assert share_of_worker(whole, 1) == whole


@pytest.fixture
def sleeping() -> Iterator[WorkerProcess]:
    """A worker that never answers."""
    own, other = Pipe()
    worker = WorkerProcess(2, subprocess.Popen(["sleep", "60"]), own, Path("runs/x"))
    yield worker
    worker.process.kill()
    other.close()
    end_workers([worker])


def test_share_ends_when_another_process_is_lost(sleeping: WorkerProcess) -> None:
    cancelled = []

    async def share() -> None:
        sleeping.process.kill()
        try:
            await asyncio.sleep(60)
        finally:
            cancelled.append(True)

    processes, started = SeveralProcesses(SimpleNamespace(), [sleeping]), time.monotonic()  # type: ignore[arg-type]
    with pytest.raises(WorkerError, match="process 2 of the run was killed by signal 9"):
        asyncio.run(processes.watched(share()))
    assert cancelled and time.monotonic() - started < 30
    assert asyncio.run(SeveralProcesses(SimpleNamespace(), []).watched(asyncio.sleep(0, 7))) == 7  # type: ignore[arg-type]


def test_answers_wait_for_no_process_beside_a_lost(sleeping: WorkerProcess) -> None:
    own, other = Pipe()
    lost = WorkerProcess(1, subprocess.Popen(["true"]), own, Path("runs/x"))
    other.close()
    with pytest.raises(WorkerError, match="process 1 of the run ended: 0"):
        answers_of([sleeping, lost])
    end_workers([lost])


def test_lost_process_is_named_with_way_out() -> None:
    own, other = Pipe()
    process = subprocess.Popen(["sleep", "60"])
    worker = WorkerProcess(2, process, own, Path("runs/x"))
    process.kill()
    other.close()
    with pytest.raises(WorkerError, match=r"process 2 .* killed by signal 9.*resume=runs/x processes=1"):
        worker.answer()
    end_workers([worker])
    assert process.poll() is not None
