"""ServerSampler: verl's inference servers behind the seam of every engine: token ids in, token ids out."""

from __future__ import annotations

from typing import Any, Protocol

from agent_rl.engines.stateless import EngineOutput, Generate, Settings, StatelessEngine


class Client(Protocol):
    """What is used of `verl.workers.rollout.llm_server.LLMServerClient`."""

    async def generate(self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any]) -> Any:
        """Return a `TokenOutput`."""
        ...


class VerlEngine(StatelessEngine):
    """Implements `InferenceEngine`. A sequence's requests go to the same server, which has its prefix in the cache.

    Args:
        client: verl's.
        context_limit: the servers' `max_model_len`.
        extra: sampling parameters that verl adds to every request, such as `repetition_penalty`.
    """

    def __init__(self, client: Client, context_limit: int, extra: Settings | None = None) -> None:
        hint = "actor_rollout_ref.rollout.calculate_log_probs must be true"
        super().__init__(_asking(client), context_limit, extra or {}, hint=hint)


def _asking(client: Client) -> Generate:
    async def generate(sequence: str, token_ids: list[int], settings: Settings) -> EngineOutput:
        output = await client.generate(sequence, prompt_ids=token_ids, sampling_params={**settings, "logprobs": True})
        return EngineOutput(
            output.token_ids,
            output.log_probs or (),
            aborted=output.stop_reason == "aborted",
            routed_experts=output.routed_experts,
            # a reply that weights changed under has a range of versions; all its tokens count as old as the oldest
            version=int(output.extra_fields.get("min_global_steps") or 0),
        )

    return generate
