"""Real runs in two processes: what one process gives, failures, ends."""

import signal
import subprocess
import sys
import tempfile
import threading
import time
from multiprocessing import Pipe
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from agent_rl.backends.embedded import worker_process
from agent_rl.backends.embedded.data_parallel import SeveralProcesses, join_group, sum_gradients
from agent_rl.backends.embedded.run import resume_run, start_run
from agent_rl.backends.embedded.trainer import StepResult, Trainer
from agent_rl.backends.embedded.worker_process import OF_THE_GROUP, WorkerProcess, end_workers, start_worker
from agent_rl.errors import CheckpointError, WorkerError
from agent_rl.runs.metrics import read_metrics
from agent_rl.store.episodes import read_episodes
from agent_rl.view.progress import Progress
from tests.runs import config, untimed, weights
from tests.test_stored import DPO, ROLLOUT

pytestmark = pytest.mark.sandbox


def _tokens(folder: Path) -> dict[str, list[list[int]]]:
    return {e.id: [t.token_ids.tolist() for t in e.trajectories] for e in read_episodes(folder)}


def test_processes_train_as_one_and_resume_as_one(tmp_path: Path) -> None:
    updates = {"minibatches": 2, "epochs": 2}
    changes = {"steps": 2, "updates": updates, "rollout": {"groups": 3, "samples": 4, "slots": 8, "max_tokens": 24}}
    folders = [start_run(config(tmp_path, name=f"of{n}", processes=n, **changes), Progress()).resolve() for n in (1, 2)]
    assert not dist.is_initialized()
    resume_run(folders[0], Progress(), steps=3)
    resume_run(folders[1], Progress(), steps=3, processes=1)
    one, two = map(weights, folders)
    # sums in another order: one unit in the last place of a float32 gradient, as Adam magnifies it
    assert all(torch.allclose(one[name], two[name], rtol=0, atol=2e-5) for name in one)
    assert _tokens(folders[0]) == _tokens(folders[1])
    for first, second in zip(*(read_metrics(folder / "metrics.jsonl") for folder in folders), strict=True):
        assert untimed(first) == pytest.approx(untimed(second), abs=1e-4)


def test_sum_of_gradients_leaves_alone_what_has_none(tmp_path: Path) -> None:
    learns, rests = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2))
    learns.grad = torch.tensor([1.0, 0.0])
    join_group(str(tmp_path), 0, 1, torch.device("cpu"))
    try:
        sum_gradients([learns, rests])
    finally:
        dist.destroy_process_group()
    assert learns.grad.tolist() == [1.0, 0.0] and rests.grad is None, "weight decay would reach it"


def test_processes_learn_stored_episodes_as_one(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is sampled, for which the other processes would take the present weights."""
    (odd := tmp_path / "a?b#c").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(odd))
    stored = {"algorithm": DPO, "episodes": str(folder), "start_from": str(folder / "checkpoint"), "steps": 3}
    changes = stored | {"rollout": ROLLOUT, "eval": {"n": 4, "dev_n": 4, "every": 0}}
    runs = [start_run(config(tmp_path, name=f"of{n}", processes=n, **changes), Progress()).resolve() for n in (1, 2)]
    one, two = map(weights, runs)
    assert all(torch.allclose(one[name], two[name], rtol=0, atol=2e-5) for name in one)


def test_run_ends_when_one_process_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, lost = Trainer.train_step, list[subprocess.Popen[bytes]]()

    def dies(self: Trainer) -> StepResult:
        (worker,) = self.processes._workers  # type: ignore[attr-defined]
        worker.process.kill()
        lost.append(worker.process)
        return real(self)

    monkeypatch.setattr(Trainer, "train_step", dies)
    with pytest.raises(WorkerError, match="process 1 of the run was killed by signal 9"):
        start_run(config(tmp_path, processes=2), Progress())
    assert lost[0].poll() == -signal.SIGKILL and not dist.is_initialized()


def test_worker_reports_errors_outlives_signals_and_ends(tmp_path: Path) -> None:
    worker = start_worker(1, tmp_path)
    for _ in range(2):  # the first ones come while it starts
        for number in OF_THE_GROUP:
            worker.process.send_signal(number)
        worker.ask("start", sys.path, [], tmp_path, str(tmp_path), 1)
        with pytest.raises(CheckpointError, match="is no run"):
            worker.answer()
    status = Path(f"/proc/{worker.process.pid}/status").read_text()
    assert "SigBlk:\t0000000000000000\n" in status, "its sandboxes would block signals, too"
    worker.ask("play", "play", [], None)
    with pytest.raises(WorkerError, match="process 1 of the run failed: AttributeError"):
        worker.answer()
    end_workers([worker])
    assert worker.process.returncode == 0


def test_lost_worker_is_named_where_gloo_saw_first(tmp_path: Path) -> None:
    own, other = Pipe()
    process = subprocess.Popen(["sleep", "60"], pass_fds=(other.fileno(),))
    other.close()
    processes = SeveralProcesses(None, [WorkerProcess(1, process, own, tmp_path)])  # type: ignore[arg-type]
    with pytest.raises(WorkerError, match="process 1 of the run was killed by signal 9"), processes._together():
        threading.Timer(0.3, process.kill).start()
        raise RuntimeError("Connection reset by peer")


def test_workers_that_are_busy_end_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_process, "PATIENCE", 1.0)
    busy = [subprocess.Popen(["sleep", "60"]) for _ in range(4)]
    began = time.monotonic()
    end_workers([WorkerProcess(rank, process, Pipe()[0], tmp_path) for rank, process in enumerate(busy, 1)])
    assert time.monotonic() - began < 2.5 and {process.returncode for process in busy} == {-signal.SIGKILL}


def test_worker_ends_with_killed_run(tmp_path: Path) -> None:
    script = f"""if True:
        import os, pathlib, sys
        from agent_rl.backends.embedded.worker_process import start_worker
        worker = start_worker(1, pathlib.Path({str(tmp_path)!r}))
        worker.ask("start", sys.path, [], pathlib.Path({str(tmp_path)!r}), "", 1)
        worker.connection.poll(60)
        print(worker.process.pid, flush=True)
        os.kill(os.getpid(), 9)"""
    pid = int(subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True).stdout)
    until = time.monotonic() + 10
    while Path(f"/proc/{pid}").exists() and "Z" not in Path(f"/proc/{pid}/stat").read_text().split()[2]:
        assert time.monotonic() < until
        time.sleep(0.1)
