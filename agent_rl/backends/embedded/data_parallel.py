"""Several processes of one run: each samples a share of a step's groups and computes a share of its gradients.

Rank 0 is the run itself: it has the files, the optimizer and every decision. The others are `worker.py`: they have the
model and an engine, and do what they are told over a pipe. Advantages and denominators are those of the whole batch, so
that gradients, which `torch.distributed` sums, are those of one process but for the order of the sum.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from agent_rl.algorithms import Denominators, WeightedRows
from agent_rl.backends.embedded.check import module_of
from agent_rl.backends.embedded.processes import Gradient, OneProcess
from agent_rl.backends.embedded.trainer import Trainer
from agent_rl.backends.embedded.worker_process import PATIENCE, WorkerProcess, answers_of, end_workers, start_worker
from agent_rl.engines.base import SamplingParams
from agent_rl.engines.embedded.device import device_of
from agent_rl.engines.model_files import written
from agent_rl.errors import ConfigError
from agent_rl.gym.mixture import members_of
from agent_rl.rollout import Job

T = TypeVar("T")
NOTICED = 1.0
"""Seconds from one look at the other processes to the next, while this one plays its share."""
LONGEST_WAIT = 600.0
"""Seconds that processes wait for each other in a sum: all of them are there when it begins."""


class SeveralProcesses(OneProcess):
    """Rank 0's side."""

    def __init__(self, trainer: Trainer, workers: Sequence[WorkerProcess]) -> None:
        self._trainer, self._workers = trainer, workers

    def spread(
        self,
        play: Callable[[Sequence[Job], SamplingParams], list[T]],
        jobs: Sequence[Job],
        params: SamplingParams,
        size: int = 1,
    ) -> list[T]:
        """Play every n-th block of `size` jobs here, the others in the workers; what hangs on a snapshot stays here."""
        if any(job.snapshots or job.branch is not None for job in jobs):
            return play(jobs, params)
        n = len(self._workers) + 1
        blocks = [list(jobs[start : start + size]) for start in range(0, len(jobs), size)]
        parts = [blocks[rank::n] for rank in range(n)]
        for worker, part in zip(self._workers, parts[1:], strict=True):
            worker.ask("play", play.__name__, [job for block in part for job in block], params)
        found = [play([job for block in parts[0] for job in block], params)]
        for results, tokens in answers_of(self._workers):
            found.append(results)
            self._trainer.actor.engine.tokens += tokens
        ordered = list[list[T]]([[]] * len(blocks))
        for rank, (part, results) in enumerate(zip(parts, found, strict=True)):
            each = len(results) // max(1, len(part))
            ordered[rank::n] = [results[i * each : (i + 1) * each] for i in range(len(part))]
        return [result for block in ordered for result in block]

    async def watched(self, share: Coroutine[Any, Any, T]) -> T:
        """Play this process's share while the others are there.

        Raises:
            WorkerError: as soon as one has ended; the share is not worth its time any more.
        """
        playing = asyncio.ensure_future(share)
        try:
            while not (await asyncio.wait([playing], timeout=NOTICED))[0]:
                for worker in self._workers:
                    if worker.process.poll() is not None:
                        raise worker.lost()
        finally:
            playing.cancel()
            await asyncio.gather(playing, return_exceptions=True)
        return playing.result()

    def gradients(
        self,
        accumulate: Callable[[WeightedRows, Denominators], Iterator[Gradient]],
        batch: WeightedRows,
        whole: Denominators,
    ) -> Iterator[Gradient]:
        """Add the gradients of a batch: of some groups here, of the others in the workers."""
        parts = deal(batch, len(self._workers) + 1)
        busy = [worker for worker, part in zip(self._workers, parts[1:], strict=True) if part]
        for worker, part in zip(busy, parts[1:], strict=False):  # parts without a group are the last ones
            worker.ask("gradients", self._trainer.step, batch.select(part), whole)
        found = [list(accumulate(batch.select(parts[0]), whole)), *answers_of(busy)]
        for worker in self._workers:  # all of them are there: nobody waits in vain
            worker.ask("add")
        with self._together():
            sum_gradients(self._trainer.optimizer.parameters)
        for part, gradients in zip(parts, found, strict=False):
            for rows, sums, logprobs in gradients:
                yield Gradient([part[row] for row in rows], sums, logprobs)

    def update_weights(self, version: int) -> None:
        """Send the weights that are trained."""
        for worker in self._workers:
            worker.ask("update_weights", version)
        with self._together():
            send_weights(self._trainer.actor.model)

    @contextmanager
    def _together(self) -> Iterator[None]:
        """Name the process that is lost where gloo says that a connection is."""
        try:
            yield
        except RuntimeError as error:
            # nothing was to be answered: the end of a pipe is closed, if a moment after gloo's connection
            ended = wait([worker.connection for worker in self._workers], PATIENCE)
            for worker in self._workers:
                if worker.connection in ended:
                    raise worker.lost() from error
            raise


@contextmanager
def in_processes(folder: Path, trainer: Trainer) -> Iterator[None]:
    """Let as many processes as the run's settings say do the trainer's work; they end with the context.

    Raises:
        ConfigError: if another process can't see the environment, or there are not as many devices.
        CheckpointError: if there is no room for the model that they read.
        WorkerError: if one of them does not start.
    """
    config = trainer.config
    if config.processes == 1:
        yield
        return
    gpus = {"cuda": torch.cuda.device_count(), "mps": 1}
    if (there := gpus.get(trainer.actor.model.device.type, config.processes)) < config.processes:
        raise ConfigError(f"processes={config.processes}: each takes a GPU, and there are {there}")
    modules = [module_of(member.spec, config.imports) for member in members_of(trainer.spec, config.env_args)]
    if dist.is_initialized():
        raise ConfigError("processes: this process is in a group of torch.distributed already; leave out its launcher")
    workers: list[WorkerProcess] = []
    with tempfile.TemporaryDirectory(prefix="agent_rl_") as shared:
        model = Path(shared) / "model"
        with written(model, "set TMPDIR to a folder with room for the model"):
            torch.save((trainer.actor.model, trainer.actor.tokenizer), model)
        try:
            for rank in range(1, config.processes):
                workers.append(start_worker(rank, folder))
                workers[-1].ask("start", sys.path, modules, folder, shared, rank)
            answers_of(workers)
            for worker in workers:
                worker.ask("join", shared, worker.rank, config.processes)
            join_group(shared, 0, config.processes, trainer.actor.model.device)
            model.unlink()
            trainer.processes = trainer.rollouts.processes = SeveralProcesses(trainer, workers)
            yield
        finally:
            trainer.processes = trainer.rollouts.processes = OneProcess()
            end_workers(workers)
            if dist.is_initialized():
                dist.destroy_process_group()


def device_of_rank(name: str, rank: int) -> torch.device:
    """Return the device of one of a run's processes: a GPU of its own, or the CPU that all share."""
    device = device_of(name)
    return torch.device("cuda", rank) if device.type == "cuda" else device


def join_group(shared: str, rank: int, n: int, device: torch.device) -> None:
    """Join the other processes, by a file in a folder of this machine."""
    backend = "nccl" if device.type == "cuda" else "gloo"
    # no address of the file: one would be cut at a "#" or a "?"
    store = dist.FileStore(f"{shared}/rendezvous", n)  # type: ignore[attr-defined]
    wait = timedelta(seconds=LONGEST_WAIT)
    dist.init_process_group(backend, store=store, rank=rank, world_size=n, timeout=wait)


def sum_gradients(parameters: Sequence[Tensor]) -> None:
    """Add every process's gradients up at rank 0; elsewhere they are spent.

    What no process has a gradient of keeps none: of zeros, the optimizer would take a step by momentum and decay.
    """
    found = torch.tensor([p.grad is not None for p in parameters], dtype=torch.uint8, device=parameters[0].device)
    sums = [dist.reduce(found, 0, dist.ReduceOp.MAX, async_op=True)]
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        sums.append(dist.reduce(parameter.grad, 0, async_op=True))
    for each in sums:
        each.wait()
    for parameter, has_gradient in zip(parameters, found.tolist(), strict=True):
        if not has_gradient:
            parameter.grad = None


def send_weights(model: torch.nn.Module) -> None:
    """Give every process rank 0's values of the parameters that are trained."""
    with torch.no_grad():
        for sent in [dist.broadcast(p.data, 0, async_op=True) for p in model.parameters() if p.requires_grad]:
            sent.wait()


def deal(batch: WeightedRows, n: int) -> list[list[int]]:
    """Divide a batch's rows by groups into `n` parts of about as many tokens."""
    rows_of = dict[int, list[int]]()
    for row, group in enumerate(batch.group.tolist()):
        rows_of.setdefault(group, []).append(row)
    tokens = {group: int(batch.rows.lengths[rows].sum()) for group, rows in rows_of.items()}
    parts, loads = [list[int]() for _ in range(n)], [0] * n
    for group in sorted(rows_of, key=lambda group: -tokens[group]):
        lightest = loads.index(min(loads))
        parts[lightest] += rows_of[group]
        loads[lightest] += tokens[group]
    return [sorted(part) for part in parts]
