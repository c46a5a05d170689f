"""vLLM's engine beside the model that is trained: its weights are copied over in memory whenever they have changed."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import replace
from multiprocessing.shared_memory import SharedMemory

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from agent_rl.concurrency import LoopThread
from agent_rl.core.messages import JSON
from agent_rl.engines.embedded.adapters import merged_parameters
from agent_rl.engines.embedded.model_folder import write_generation
from agent_rl.engines.stateless import EngineOutput, Settings, StatelessEngine, StatelessSession
from agent_rl.engines.vllm.in_process import LocalEngine
from agent_rl.engines.vllm.receiver import Place
from agent_rl.errors import ConfigError
from agent_rl.moe.routes import routers

_ALIGNED = 64
"""Bytes: where a weight may begin."""
SHARE = 0.4
"""Of the device's memory, `gpu_memory_utilization`, unless it is given: the rest is for training."""
OWN = ("load_format", "worker_extension_cls", "enable_return_routed_experts")
"""vLLM's arguments that are set here."""


class SyncedEngine:
    """Samples from a model that is trained in this process, by vLLM in a process of its own.

    Implements `TrainedEngine`. The same seeds need not give the same ids: vLLM's kernels depend on who shares a batch.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        slots: int,
        context: int,
        arguments: Mapping[str, JSON],
    ) -> None:
        """Start vLLM's process, without weights; the first `update_weights` brings them.

        Args:
            model: in any of Hugging Face's architectures that vLLM has, too.
            tokenizer: the model's.
            slots: sequences that are sampled at a time.
            context: the longest sequence, in tokens.
            arguments: any other of vLLM's engine arguments.

        Raises:
            ConfigError: if vLLM is not installed, has no such argument, or can't run the model.
        """
        self._model = model
        self.slots, self.context_limit, self.version, self.tokens = slots, context, -1, 0
        require_synced(model)
        self._places, size = _layout(merged_parameters(model))
        with tempfile.TemporaryDirectory(prefix="agent-rl-vllm-") as folder:  # read until the engine has started
            config = copy.deepcopy(model.config)
            config.architectures = [type(model).__name__]
            config.save_pretrained(folder)
            write_generation(model.generation_config, folder)
            tokenizer.save_pretrained(folder)
            self._client = LocalEngine(folder, context, _arguments(model, slots, arguments))
            self._loop = LoopThread("vllm")
            try:
                self._loop.wait(self._client.open())
            except BaseException:
                self._loop.close()
                raise
        self._shared = SharedMemory(create=True, size=size)
        self._stateless = StatelessEngine(self._generate, context)

    async def _generate(self, sequence: str, token_ids: list[int], settings: Settings) -> EngineOutput:
        output = await self._loop.run(self._client.generate(sequence, token_ids, settings))
        self.tokens += len(output.token_ids)
        return replace(output, version=self.version)

    def open(self, seed: int) -> StatelessSession:
        """Begin a sequence."""
        return self._stateless.open(seed)

    def release_weights(self) -> None:
        """Keep them: vLLM's process holds them, not this one."""

    def update_weights(self, version: int) -> None:
        """Copy the model's present weights over, unless this version of them is in use; no sequence may be sampling."""
        if version == self.version:
            return
        copy_weights(self._model, self._shared, self._places)
        self._loop.wait(self._client.receive(self._shared.name, self._places))
        self.version = version

    def close(self) -> None:
        """End vLLM's process and free the shared memory."""
        self._loop.wait(self._client.close())
        self._loop.close()
        self._shared.close()
        self._shared.unlink()


@torch.no_grad()
def copy_weights(model: PreTrainedModel, shared: SharedMemory, places: Iterable[Place]) -> None:
    """Copy a model's weights, with what adapters add to them, to their places in shared memory."""
    for (_, weight), (_, form, shape, offset) in zip(merged_parameters(model), places, strict=True):
        count, form_of = weight.numel(), getattr(torch, form)
        torch.frombuffer(shared.buf, dtype=form_of, count=count, offset=offset).view(*shape).copy_(weight)


def require_synced(model: PreTrainedModel) -> None:
    """Refuse models whose new weights vLLM would not take.

    Raises:
        ConfigError: for a mixture of experts on a CPU: there vLLM packs the experts once and keeps computing with them.
    """
    if routers(model) and model.device.type == "cpu":
        raise ConfigError(
            "engine=vllm: on a CPU, vLLM does not take new weights of a mixture of experts: use engine=torch, or a GPU"
        )


def _layout(weights: Iterable[tuple[str, torch.Tensor]]) -> tuple[list[Place], int]:
    """Return where each weight lies in the shared memory, and its size in bytes."""
    places, at = list[Place](), 0
    for name, weight in weights:
        places.append((name, str(weight.dtype).removeprefix("torch."), [*weight.shape], at))
        at += -(-weight.numel() * weight.element_size() // _ALIGNED) * _ALIGNED
    return places, at


def _arguments(model: PreTrainedModel, slots: int, arguments: Mapping[str, JSON]) -> dict[str, JSON]:
    if twice := next((name for name in arguments if name in OWN), None):
        raise ConfigError(f"engine_args.{twice} is set by engine=vllm itself: leave it out")
    defaults: dict[str, JSON] = {
        "dtype": str(model.dtype).removeprefix("torch."),
        "max_num_seqs": slots,
        "gpu_memory_utilization": SHARE,
    }
    own: dict[str, JSON] = {
        "load_format": "dummy",
        "worker_extension_cls": "agent_rl.engines.vllm.receiver.WeightReceiver",
    }
    return defaults | dict(arguments) | own
