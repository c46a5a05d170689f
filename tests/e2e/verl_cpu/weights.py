"""Weight transfer from the trainer to separate servers without NCCL: one file, written whole, then read."""

from __future__ import annotations

import asyncio
from pathlib import Path

import torch
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry


@CheckpointEngineRegistry.register("file")
class FileCheckpointEngine(CheckpointEngine):
    """`checkpoint_engine.engine_kwargs.file.folder` says where; every process must see it."""

    def __init__(self, bucket_size, is_master=False, folder=None, timeout=120.0):
        self.path, self.timeout, self.rank = Path(folder) / "weights.pt", timeout, None

    def prepare(self):
        """Remove the leftovers of the last sync; all processes have done so before one sends or receives."""
        self.path.unlink(missing_ok=True)
        return {}

    @classmethod
    def build_topology(cls, actor_wg_world_size, rollout_world_size, metadata):
        receivers = [-1 - i for i in range(rollout_world_size)]
        return {"rank": list(range(actor_wg_world_size))}, {"rank": receivers}

    def init_process_group(self, rank):
        self.rank = rank

    def finalize(self):
        pass

    async def send_weights(self, weights, global_steps=None):
        sent = {name: tensor.detach().cpu().clone() for name, tensor in weights}  # on every rank: it is a collective
        if self.rank == 0:
            new = self.path.with_suffix(".new")
            torch.save(sent, new)
            new.replace(self.path)
        return {}

    async def receive_weights(self, global_steps=None):
        async with asyncio.timeout(self.timeout):
            while not self.path.exists():
                await asyncio.sleep(0.05)
        for name, tensor in torch.load(self.path, weights_only=True).items():
            yield name, tensor
