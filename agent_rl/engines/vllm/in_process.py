"""vLLM's engine in this program: token ids in and out, without a server."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from agent_rl.core.messages import JSON
from agent_rl.engines.stateless import EngineOutput, Settings
from agent_rl.errors import ConfigError, PolicyError, did_you_mean

if TYPE_CHECKING:
    from agent_rl.engines.vllm.receiver import Place

_SET_BY = {
    "model": "by policy.model",
    "max_model_len": "by policy.context",
    "logprobs_mode": "always: other log-probabilities are not of the sampled distribution",
}


class LocalEngine:
    """vLLM's `AsyncLLM`; every method runs in the event loop that `open` ran in.

    The model is a folder in Hugging Face's format, or a name there; `context` is the longest sequence, None for the
    model's own; `arguments` are any other of vLLM's engine arguments, such as `tensor_parallel_size`.

    Raises:
        ConfigError: if an argument has a setting of its own.
    """

    def __init__(self, model: str, context: int | None, arguments: Mapping[str, JSON]) -> None:
        taken = {"model": model, "max_model_len": context, "logprobs_mode": "processed_logprobs"}
        if twice := next((name for name in arguments if name in taken), None):
            raise ConfigError(
                f"policy.engine.{twice} duplicates another setting: it is {taken[twice]} {_SET_BY[twice]}"
            )
        self._arguments: dict[str, Any] = {**taken, **arguments}
        self._requests = 0
        self.root, self.context_limit, self.processed = model, context, True

    async def open(self) -> None:
        """Load the model and start the engine's process.

        Raises:
            ConfigError: if vLLM is not installed, has no such argument, or can't run the model.
        """
        try:
            import vllm
            from vllm.engine.arg_utils import AsyncEngineArgs
            from vllm.platforms import current_platform
            from vllm.v1.engine.async_llm import AsyncLLM
        except ImportError as error:
            raise ConfigError(
                f"policy=vllm with policy.model runs vLLM in this program, which lacks {error.name}: pip install "
                "-e '.[verl]' on a machine with a GPU, `make setup-verl` on one without, or give the address of a "
                "server with policy.url"
            ) from error
        known = [field.name for field in dataclasses.fields(AsyncEngineArgs)]
        for name in self._arguments:
            if name not in known:
                raise ConfigError(
                    f"vLLM {vllm.__version__} has no engine argument '{name}'.{did_you_mean(name, known)}"
                )
        if current_platform.is_cpu():  # its sampler can't take back a draw from a generator, as a cut prompt needs
            self._arguments.setdefault("enable_chunked_prefill", False)
        try:
            self._engine: Any = AsyncLLM.from_engine_args(AsyncEngineArgs(**self._arguments))
        except (ValueError, TypeError, OSError, RuntimeError) as error:
            raise ConfigError(f"vLLM can't run {self._arguments['model']}: {error}") from error
        self.context_limit = int(self._engine.model_config.max_model_len)

    async def close(self) -> None:
        """End the engine's process."""
        self._engine.shutdown()

    async def receive(self, segment: str, places: Sequence[Place]) -> None:
        """Take new weights from shared memory, and forget what was computed with the old ones.

        Raises:
            PolicyError: if vLLM fails at it.
        """
        try:
            await self._engine.collective_rpc("receive_weights", args=(segment, [*places]))
            await self._engine.reset_prefix_cache()
        except Exception as error:
            raise PolicyError(f"vLLM did not take the weights: {type(error).__name__}: {error}") from error

    async def generate(self, sequence: str, token_ids: list[int], settings: Settings) -> EngineOutput:
        """Implements `Generate`; a cancellation aborts the request.

        Raises:
            PolicyError: if vLLM refuses the request, or the engine died.
        """
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        self._requests += 1
        params = SamplingParams(**settings, logprobs=0, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY)
        last: Any = None
        try:
            prompt = {"prompt_token_ids": token_ids}
            async for output in self._engine.generate(prompt, params, f"{sequence}-{self._requests}"):
                last = output
        except Exception as error:
            raise PolicyError(f"vLLM failed: {type(error).__name__}: {error}") from error
        if last is None or not last.outputs:
            return EngineOutput((), (), aborted=True)
        sampled = last.outputs[0]
        return EngineOutput(
            sampled.token_ids,
            [at[token].logprob for token, at in zip(sampled.token_ids, sampled.logprobs or (), strict=True)],
            aborted=sampled.finish_reason == "abort",
            routed_experts=sampled.routed_experts,
        )
