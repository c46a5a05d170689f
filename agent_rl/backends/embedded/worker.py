"""A worker of a run in several processes: `python -m agent_rl.backends.embedded.worker FD`, see `data_parallel.py`."""

from __future__ import annotations

import importlib
import io
import logging
import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from transformers.utils import logging as hf_logging

from agent_rl.algorithms import Denominators, WeightedRows
from agent_rl.backends.embedded.actor import actor_of
from agent_rl.backends.embedded.config import TrainConfig
from agent_rl.backends.embedded.data_parallel import device_of_rank, join_group, send_weights, sum_gradients
from agent_rl.backends.embedded.processes import Gradient
from agent_rl.backends.embedded.trainer import Trainer
from agent_rl.backends.embedded.worker_process import OF_THE_GROUP, dump
from agent_rl.core.episode import Episode, EpisodeGroup
from agent_rl.engines.base import SamplingParams
from agent_rl.errors import AgentRLError
from agent_rl.gym.mixture import members_of
from agent_rl.gym.registry import EnvSpec
from agent_rl.judge.reward import judge_rewards, use_judge
from agent_rl.judge.run import judge_of_worker
from agent_rl.rollout import Job
from agent_rl.runs.folder import read_config

_log = logging.getLogger(__name__)


class Worker:
    """One process's model, engine and share of the work; a method for each thing that rank 0 asks for."""

    trainer: Trainer

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._specs: dict[str, EnvSpec] = {}
        self._closing = ExitStack()

    def serve(self) -> None:
        """Do what rank 0 asks until it ends, and answer with the result, or with what was raised."""
        with self._closing:
            while True:
                try:
                    what, arguments = _Unpickler(io.BytesIO(self._connection.recv_bytes()), self._specs).load()
                    answer = _outcome(getattr(self, what), arguments)
                    if answer is not None:
                        self._connection.send_bytes(dump(answer))
                except (EOFError, OSError):
                    return

    def start(self, path: list[str], modules: list[str], folder: Path, shared: str, rank: int) -> bool:
        """Make of a run's settings, and of rank 0's model, what it trains and samples with; return that it is done."""
        sys.path[:] = path
        for module in filter(None, modules):
            importlib.import_module(module)
        hf_logging.disable_progress_bar()
        config = read_config(folder, TrainConfig)
        env, n = config.load_env(), config.processes
        self._specs.update({member.spec.id: member.spec for member in members_of(env, config.env_args)})
        device = device_of_rank(config.device, rank)
        model, tokenizer = torch.load(Path(shared) / "model", map_location=device, weights_only=False)
        actor = actor_of(env, config, model, tokenizer)
        # as a reference, its own: batches that are compared with one arrive with what it said
        self.trainer = Trainer(env, actor, config, model)
        if judge_rewards(env):
            judge = judge_of_worker(config.judge, folder / f"judge_calls-{rank}.jsonl", n)
            self._closing.enter_context(use_judge(judge))
            if judge is not None:
                self._closing.callback(judge.close)
        return True

    def join(self, shared: str, rank: int, n: int) -> None:
        """Join the other processes."""
        join_group(shared, rank, n, self.trainer.actor.model.device)

    def update_weights(self, version: int) -> None:
        """Take rank 0's weights."""
        send_weights(self.trainer.actor.model)
        self.trainer.actor.engine.update_weights(version)

    def play(self, how: str, jobs: list[Job], params: SamplingParams) -> tuple[list[Episode | EpisodeGroup], int]:
        """Play jobs by a method of `RolloutSampler`; return its results, and how many tokens were sampled."""
        engine = self.trainer.actor.engine
        before = engine.tokens
        return getattr(self.trainer.rollouts, how)(jobs, params), engine.tokens - before

    def gradients(self, step: int, batch: WeightedRows, whole: Denominators) -> list[Gradient]:
        """Compute the gradients of a part of a batch; `add` sums them."""
        self.trainer.step = step
        self.trainer.actor.engine.release_weights()
        return list(self.trainer.gradients(batch, whole))

    def add(self) -> None:
        """Add the gradients to the other processes'."""
        sum_gradients(self.trainer.optimizer.parameters)
        for parameter in self.trainer.optimizer.parameters:
            parameter.grad = None


class _Unpickler(pickle.Unpickler):
    """Reads what `dump` wrote."""

    def __init__(self, file: io.BytesIO, specs: Mapping[str, EnvSpec]) -> None:
        super().__init__(file)
        self._specs = specs

    def persistent_load(self, id: str) -> EnvSpec:
        """Return the environment of an id, with the run's tasks and budget."""
        return self._specs[id]


def _outcome(work: Callable[..., object], arguments: Sequence[object]) -> object:
    """Return a result, an error of ours, or another's in words."""
    try:
        return work(*arguments)
    except AgentRLError as error:
        return error
    except Exception as error:
        _log.exception("a worker failed")
        return f"{type(error).__name__}: {error}"


def _end_with(parent: int) -> None:
    """End when the run has ended, whatever is under way here."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)


def main() -> None:
    """Serve the process that started this one."""
    for number in OF_THE_GROUP:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, OF_THE_GROUP)
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    Worker(Connection(int(sys.argv[1]))).serve()
    os._exit(0)  # gloo's threads wait for other processes that are still there


if __name__ == "__main__":
    main()
