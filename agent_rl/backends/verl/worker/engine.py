"""verl's workers with two changes: whose step sets the learning rate, and the routes of a mixture of experts.

verl's step the learning rate after each call. Ours set it by the run's step: it is the same in all updates of a step,
and goes on over steps that had none.

RoutedEngine is verl's FSDP engine, with routes replayed and recorded; verl replays on Megatron and VeOmni only. Here
every micro-batch's forward takes the routes that its rows carry, and recomputes the gates from its own router (see
`agent_rl.moe.routes`). The hooks stay until the micro-batch after: gradient checkpointing runs the forward again during
the backward, and must be routed as the first time.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler
from verl.experimental.separation.engine_workers import DetachActorWorker
from verl.utils import tensordict_utils as tu
from verl.workers.config import TrainingWorkerConfig
from verl.workers.engine import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead
from verl.workers.engine_workers import ActorRolloutRefWorker, TrainingWorker

from agent_rl.backends.verl.worker.routes import (
    EQUAL,
    FSDP_STRATEGIES,
    OLD,
    RECORD,
    REPLAY,
    ROLLOUT,
    compare_routes,
)
from agent_rl.moe.routes import Routes, recorded, replayed

ROUTED = "routed_language_model"
"""What this engine is registered as; verl has no other handle to choose one engine for the actor alone."""


@EngineRegistry.register(model_type=ROUTED, backend=list(FSDP_STRATEGIES), device=["cuda", "npu"])
class RoutedEngine(FSDPEngineWithLMHead):
    """Reads `routes.REPLAY` and `routes.RECORD` in the data of each call; without them it is verl's engine."""

    def __init__(self, model_config: Any, *args: Any, **kwargs: Any) -> None:
        model_config.model_type = "language_model"  # what verl loads
        super().__init__(model_config, *args, **kwargs)
        self._hooks = ExitStack()
        self._routes: Routes | None = None

    def prepare_model_inputs(self, micro_batch: TensorDict) -> tuple[dict[str, Any], dict[str, Any]]:
        """Also set the routes of the forward to come."""
        inputs, output_args = super().prepare_model_inputs(micro_batch)
        self._hooks.close()
        record = tu.get_non_tensor_data(micro_batch, RECORD, default=())
        self._routes = self._hooks.enter_context(recorded(self.module)) if record else None
        if field := tu.get_non_tensor_data(micro_batch, REPLAY, default=""):
            given = laid_out(micro_batch[field], *inputs["input_ids"].shape)
            self._hooks.enter_context(replayed(self.module, given))
        return inputs, output_args

    def prepare_model_outputs(self, *args: Any, micro_batch: TensorDict, **kwargs: Any) -> dict[str, Tensor]:
        """Also return the recorded routes, or their agreement, as is asked."""
        outputs: dict[str, Tensor] = super().prepare_model_outputs(*args, micro_batch=micro_batch, **kwargs)
        if self._routes is not None:
            packed = tu.get_non_tensor_data(micro_batch, "use_remove_padding", default=True)
            record = tu.get_non_tensor_data(micro_batch, RECORD, default=())
            offsets = micro_batch["input_ids"].offsets()
            own = torch.nested.nested_tensor_from_jagged(gathered(self._routes, offsets, packed), offsets)
            outputs |= {OLD: own} if OLD in record else {}
            if EQUAL in record:
                rows = (micro_batch[ROLLOUT].unbind(), own.unbind(), micro_batch["response_mask"].unbind())
                for name, parts in compare_routes(*rows).items():
                    outputs[name] = torch.nested.as_nested_tensor(parts, layout=torch.jagged)
        return outputs

    def forward_backward_batch(self, *args: Any, **kwargs: Any) -> Any:
        """Leave no hook behind."""
        with self._hooks:
            return super().forward_backward_batch(*args, **kwargs)


def laid_out(routes: Tensor, rows: int, width: int) -> Tensor:
    """Lay jagged routes `[B, j, layers, top_k]` out as a model is fed: one row a sequence, or all of them in one row.

    Returns:
        `[rows, width, layers, top_k]`; -1 for padding.
    """
    parts: Sequence[Tensor] = routes.unbind()
    parts = parts if len(parts) == rows else [routes.values()]
    out = routes.values().new_full((rows, width, *routes.shape[2:]), -1)
    for row, part in zip(out, parts, strict=True):
        row[: len(part)] = part
    return out


def gathered(routes: Routes, offsets: Tensor, packed: bool) -> Tensor:
    """Return the routes that were recorded without those of padding, int16 `[offsets[-1], layers, top_k]`."""
    own = torch.stack(routes.own, 1).to(torch.int16)
    if packed:
        return own[: int(offsets[-1])]
    lengths = offsets.diff()
    width = len(own) // len(lengths)
    real = torch.arange(width, device=own.device) < lengths[:, None]
    return own[real.flatten()]


STEP = "agent_rl_step"
"""The field that says which step of the run a call belongs to, from 1."""


class SteppedTrainingWorker(TrainingWorker):
    """A training worker whose learning rate is that of the run's step."""

    def train_batch(self, data: TensorDict) -> TensorDict:
        """Take an update at the step's learning rate."""
        set_schedule(self.engine.lr_scheduler, int(tu.get(data, STEP)) - 1)
        updated: TensorDict = super().train_batch(data)
        return updated


def set_schedule(schedule: Any, step: int) -> None:
    """Bring an engine's schedule to where it is after so many finished steps: PyTorch's, or Megatron's."""
    if not isinstance(schedule, LRScheduler):
        schedule.step(step - schedule.num_steps)
    elif schedule.last_epoch != step:
        schedule.last_epoch = step - 1
        schedule.step()


class PolicyWorker(ActorRolloutRefWorker):
    """verl's worker; its policy's learning rate is the step's."""

    actor_worker_cls = SteppedTrainingWorker


class DetachedPolicyWorker(DetachActorWorker):
    """The same for a policy with devices of its own."""

    actor_worker_cls = SteppedTrainingWorker


class RoutedTrainingWorker(SteppedTrainingWorker):
    """A training worker whose engine is ours."""

    def __init__(self, config: TrainingWorkerConfig) -> None:
        super().__init__(replace(config, model_type=ROUTED))


class RoutedWorker(PolicyWorker):
    """Its actor is routed, its reference is not."""

    actor_worker_cls = RoutedTrainingWorker


class RoutedDetachedWorker(DetachedPolicyWorker):
    """The same for an actor with devices of its own."""

    actor_worker_cls = RoutedTrainingWorker
