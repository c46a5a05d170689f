"""ServerSampler: verl's inference servers behind the seam of every engine: token ids in, token ids out."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from agent_rl.errors import PolicyError
from agent_rl.policy.sampling import SamplingParams
from agent_rl.types import Completion, ExpertArray, FinishReason


class Client(Protocol):
    """What is used of `verl.workers.rollout.llm_server.LLMServerClient`."""

    async def generate(self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any]) -> Any:
        """Return a `TokenOutput`."""
        ...


class ServerSampler:
    """Implements `Sampler`. A sequence's requests go to the same server, which has its prefix in the cache.

    Args:
        client: verl's.
        context_limit: the servers' `max_model_len`.
        extra: sampling parameters that verl adds to every request, such as `repetition_penalty`.
    """

    def __init__(self, client: Client, context_limit: int, extra: dict[str, Any] | None = None) -> None:
        self.client, self.context_limit, self.extra = client, context_limit, extra or {}

    def open(self, seed: int) -> ServerSession:
        """Begin a sequence."""
        return ServerSession(self, seed)


class ServerSession:
    """One sequence; servers are given the whole of it each time, the caller only what is new."""

    def __init__(self, sampler: ServerSampler, seed: int) -> None:
        self._sampler, self._seed = sampler, seed
        self._request = uuid.uuid4().hex
        self._ids: list[int] = []
        self._routed = 0
        """How many positions' routes were already handed on."""
        self._replies = 0

    async def sample(self, ids: Sequence[int], params: SamplingParams, stop_ids: frozenset[int]) -> Completion:
        """Append `ids` to the sequence and sample.

        Raises:
            PolicyError: if the server gave no log-probabilities, or not one of each per token.
        """
        self._ids += ids
        settings = {
            **self._sampler.extra,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "top_k": params.top_k or -1,
            "min_p": params.min_p,
            "max_tokens": params.max_tokens,
            "logprobs": True,
            "stop_token_ids": sorted(stop_ids),
            "seed": (self._seed + self._replies) % 2**63,  # a reply that goes on must not repeat the first one's draws
        }
        output = await self._sampler.client.generate(
            self._request, prompt_ids=list(self._ids), sampling_params=settings
        )
        self._replies += 1
        sampled = [int(i) for i in output.token_ids]
        aborted = output.stop_reason == "aborted"
        logprobs = [float(x) for x in output.log_probs or ()]
        if len(logprobs) != len(sampled) or not (sampled or aborted):
            raise PolicyError(
                f"the server returned {len(sampled)} tokens and {len(logprobs)} log-probabilities: there must be one "
                "each, and at least one token (actor_rollout_ref.rollout.calculate_log_probs must be true)"
            )
        self._ids += sampled
        stopped = bool(sampled) and sampled[-1] in stop_ids
        reason = FinishReason.ABORT if aborted else FinishReason.STOP if stopped else FinishReason.LENGTH
        # a reply that weights changed under has a range of versions; all its tokens count as old as the oldest
        version = output.extra_fields.get("min_global_steps")
        return Completion(
            token_ids=tuple(sampled),
            logprobs=tuple(logprobs),
            raw_logprobs=tuple(logprobs) if params == SamplingParams(max_tokens=params.max_tokens) else (),
            finish_reason=reason,
            policy_versions=(int(version or 0),) * len(sampled),
            routed_experts=self._routes(output.routed_experts),
        )

    def _routes(self, routed: object) -> ExpertArray | None:
        """Cut off what earlier replies handed on; a server reports routes from the sequence's start."""
        if routed is None:
            return None
        new = np.asarray(routed)[self._routed : len(self._ids)]
        self._routed += len(new)
        return new.astype(np.int8 if not new.size or new.max() <= np.iinfo(np.int8).max else np.int16)

    def close(self) -> None:
        """Nothing is held: a server drops a prefix when it needs the room."""
