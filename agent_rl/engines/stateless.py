"""Served: engines that keep no sequence of ours, such as servers: each request holds the whole of it."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from agent_rl.core.messages import JSON
from agent_rl.core.trajectory import Completion, ExpertArray, FinishReason
from agent_rl.engines.base import SamplingParams
from agent_rl.errors import ConfigError, PolicyError

Settings: TypeAlias = dict[str, JSON]
"""Of one request, by vLLM's names."""


@dataclass(frozen=True, slots=True)
class EngineOutput:
    """What an engine sampled for one request."""

    token_ids: Sequence[int]
    logprobs: Sequence[float]
    """Of each sampled token, in nats; for greedy draws those of the model's own softmax, as vLLM has it."""
    aborted: bool = False
    routed_experts: npt.NDArray[np.integer[Any]] | None = None
    """`[n, layers, top_k]`, from the sequence's first position on: all but the last token's."""
    version: int = 0
    """Of the weights; the oldest, if they changed meanwhile."""


Generate: TypeAlias = Callable[[str, list[int], Settings], Awaitable[EngineOutput]]
"""`(sequence's id, its token ids, settings)`. A cancellation tells the engine to stop; failures are `PolicyError`s."""


@dataclass(frozen=True, slots=True)
class StatelessEngine:
    """Implements `InferenceEngine` in front of whatever answers requests."""

    generate: Generate
    context_limit: int | None
    """The engine's `max_model_len`."""
    extra: Mapping[str, JSON] = field(default_factory=dict)
    """Settings that are added to every request."""
    processed: bool = True
    """Whether log-probabilities are those of the distribution that was sampled from, not of the model's softmax."""
    hint: str = "ask the engine for log-probabilities"
    """What to do if there are none."""

    def open(self, seed: int) -> StatelessSession:
        """Begin a sequence."""
        return StatelessSession(self, seed)

    def require(self, params: SamplingParams) -> None:
        """Check that log-probabilities will be known.

        Raises:
            ConfigError: if the engine reports those of another distribution.
        """
        if not (self.processed or _plain(params) or params.temperature == 0):
            raise ConfigError(
                f"the engine reports log-probabilities of the model's own softmax, not of what {params} samples from: "
                "start it with --logprobs-mode processed_logprobs, or sample with temperature 1 and nothing cut off"
            )


class StatelessSession:
    """One sequence; the engine is given the whole of it each time, the caller gives only what is new."""

    def __init__(self, sampler: StatelessEngine, seed: int) -> None:
        self._sampler, self._seed = sampler, seed
        self._request = uuid.uuid4().hex
        self._ids: list[int] = []
        self._routed = 0
        """How many positions' routes were already handed on."""
        self._replies = 0
        self._call: asyncio.Future[EngineOutput] | None = None
        self._over: str | None = None
        """Why nothing more can be sampled."""

    async def sample(self, ids: Sequence[int], params: SamplingParams, stop_ids: frozenset[int]) -> Completion:
        """Append `ids` to the sequence and sample.

        Raises:
            ConfigError: if the engine would report log-probabilities of another distribution.
            PolicyError: if the sequence is busy, over or empty, leaves no room in the context, or the engine failed or
                gave not one log-probability per token. After a failed or cancelled call the sequence is over.
        """
        self._sampler.require(params)
        self._check(len(ids))
        self._ids += ids
        answer = await self._ask(self._settings(params, stop_ids))
        self._replies += 1
        sampled, logprobs = [int(i) for i in answer.token_ids], tuple(float(x) for x in answer.logprobs)
        self._ids += sampled
        stopped = bool(sampled) and sampled[-1] in stop_ids
        greedy = params.temperature == 0
        return Completion(
            token_ids=tuple(sampled),
            logprobs=(0.0,) * len(sampled) if greedy else logprobs,
            raw_logprobs=logprobs if greedy or _plain(params) else (),
            finish_reason=(
                FinishReason.ABORT if answer.aborted else FinishReason.STOP if stopped else FinishReason.LENGTH
            ),
            policy_versions=(answer.version,) * len(sampled),
            routed_experts=self._routes(answer.routed_experts),
        )

    def _check(self, new: int) -> None:
        limit, length = self._sampler.context_limit, len(self._ids) + new
        if self._over is not None:
            raise PolicyError(f"this sequence is over: {self._over}; open a new one")
        if self._call is not None:
            raise PolicyError("this sequence is already sampling; await that call first")
        if not length:
            raise PolicyError("nothing to sample from: the first call needs at least one token id")
        if limit is not None and length >= limit:
            raise PolicyError(
                f"{length} tokens leave no room in the engine's context of {limit}: raise its max_model_len or lower "
                "the environment's token budget"
            )

    def _settings(self, params: SamplingParams, stop_ids: frozenset[int]) -> Settings:
        limit, most = self._sampler.context_limit, params.max_tokens
        return {
            **self._sampler.extra,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "top_k": params.top_k or -1,
            "min_p": params.min_p,
            "max_tokens": most if limit is None else min(most, limit - len(self._ids)),
            "stop_token_ids": sorted(stop_ids),
            "seed": (self._seed + self._replies) % 2**63,  # a reply that goes on must not repeat the first one's draws
        }

    async def _ask(self, settings: Settings) -> EngineOutput:
        sampler = self._sampler
        self._call = asyncio.ensure_future(sampler.generate(self._request, list(self._ids), settings))
        try:
            answer = await self._call
            tokens, logprobs = len(answer.token_ids), len(answer.logprobs)
            if logprobs != tokens or not (tokens or answer.aborted):
                raise PolicyError(
                    f"the engine returned {tokens} tokens and {logprobs} log-probabilities: there must be one each, "
                    f"and at least one token ({sampler.hint})"
                )
            return answer
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if self._over is not None and not (task is not None and task.cancelling()):
                return EngineOutput((), (), aborted=True)  # closed by another task
            self._over = "a call was cancelled"
            raise
        except Exception as error:
            self._over = f"a call failed: {type(error).__name__}: {error}"
            raise
        finally:
            self._call = None

    def _routes(self, routed: npt.NDArray[np.integer[Any]] | None) -> ExpertArray | None:
        """Cut off what earlier replies handed on."""
        if routed is None:
            return None
        new = np.asarray(routed)[self._routed : len(self._ids)]
        self._routed += len(new)
        return new.astype(np.int8 if not new.size or new.max() <= np.iinfo(np.int8).max else np.int16)

    def close(self) -> None:
        """End the sequence; an engine drops its prefix when it needs the room."""
        self._over = self._over or "it was closed"
        if self._call is not None:
            self._call.cancel()


def _plain(params: SamplingParams) -> bool:
    """Whether the model's own softmax is sampled from."""
    return params == SamplingParams(max_tokens=params.max_tokens)
