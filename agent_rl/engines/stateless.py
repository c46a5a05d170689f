"""Stateless engines, such as servers: every request carries the whole sequence."""

from __future__ import annotations

import asyncio
import uuid
import warnings
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from agent_rl.core.messages import JSON
from agent_rl.core.trajectory import Completion, FinishReason, expert_dtype
from agent_rl.engines.base import SamplingParams
from agent_rl.errors import ConfigError, PolicyError

Settings: TypeAlias = dict[str, JSON]
"""Of one request, by vLLM's names."""

ROUTES_FROM = "routed_experts_prompt_start"
"""vLLM's setting, of releases after 0.26: the first position whose routes to return."""


@dataclass(frozen=True, slots=True)
class EngineOutput:
    """The sampled tokens of one request."""

    token_ids: Sequence[int]
    logprobs: Sequence[float]
    """Of each sampled token, in nats; for greedy draws those of the model's own softmax, as vLLM has it."""
    aborted: bool = False
    routed_experts: npt.NDArray[Any] | None = None
    """`[n, layers, top_k]` of all positions but the last, from the first or from `ROUTES_FROM` on."""
    version: int = 0
    """Of the weights; the oldest, if they changed meanwhile."""


Generate: TypeAlias = Callable[[str, list[int], Settings], Awaitable[EngineOutput]]
"""`(sequence's id, its token ids, settings)`. A cancellation tells the engine to stop; failures are `PolicyError`s."""


@dataclass(slots=True)
class StatelessEngine:
    """Implements `InferenceEngine` in front of a function that answers requests."""

    generate: Generate
    context_limit: int | None
    """The engine's `max_model_len`."""
    extra: Mapping[str, JSON] = field(default_factory=dict)
    """Settings that are added to every request."""
    processed: bool = True
    """Whether log-probabilities are those of the distribution that was sampled from, not of the model's softmax."""
    hint: str = "ask the engine for log-probabilities"
    """What to do if there are none."""
    sends_new_routes: bool = True
    """Whether it can be asked for the routes of new positions only; found out by the first request that asks."""

    def open(self, seed: int) -> StatelessSession:
        """Begin a sequence."""
        return StatelessSession(self, seed)

    def require(self, params: SamplingParams) -> None:
        """Raise ConfigError if the engine would report log-probabilities of another distribution."""
        unmodified = params == SamplingParams(max_tokens=params.max_tokens)  # the model's own softmax
        if not (self.processed or unmodified or params.temperature == 0):
            raise ConfigError(
                f"the engine reports log-probabilities of the model's own softmax, not of what {params} samples from: "
                "start it with --logprobs-mode processed_logprobs, or sample with temperature 1 and nothing cut off"
            )

    def expect_all_routes(self) -> None:
        """Ask for all routes from now on, and warn about the cost."""
        if self.sends_new_routes:
            self.sends_new_routes = False
            warnings.warn(
                f"this engine returns the routes of the whole prompt with every turn, as it lacks {ROUTES_FROM}: their "
                "traffic grows with the square of the turns; use vLLM 0.30 or newer",
                RuntimeWarning,
                stacklevel=2,
            )


class StatelessSession:
    """One sequence; the engine gets the whole of it each time, the caller gives only what is new."""

    def __init__(self, engine: StatelessEngine, seed: int) -> None:
        self._engine, self._seed = engine, seed
        self._request = uuid.uuid4().hex
        self._ids: list[int] = []
        self._routed = 0
        """The number of positions whose routes were returned."""
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
        self._engine.require(params)
        self._check(len(ids))
        self._ids += ids
        answer = await self._answer(self._settings(params, stop_ids))
        self._replies += 1
        sampled, logprobs = tuple(int(i) for i in answer.token_ids), tuple(float(x) for x in answer.logprobs)
        self._ids += sampled
        if answer.aborted:
            reason = FinishReason.ABORT
        else:
            reason = FinishReason.STOP if stop_ids.intersection(sampled[-1:]) else FinishReason.LENGTH
        return Completion(
            token_ids=sampled,
            logprobs=(0.0,) * len(sampled) if params.temperature == 0 else logprobs,  # greedy: a point mass
            finish_reason=reason,
            policy_versions=(answer.version,) * len(sampled),
            routed_experts=answer.routed_experts,
        )

    def _check(self, new: int) -> None:
        limit, length = self._engine.context_limit, len(self._ids) + new
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
        limit, most = self._engine.context_limit, params.max_tokens
        return {
            **self._engine.extra,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "top_k": params.top_k or -1,
            "min_p": params.min_p,
            "max_tokens": most if limit is None else min(most, limit - len(self._ids)),
            "stop_token_ids": sorted(stop_ids),
            "ignore_eos": True,  # else a reply ends at the model's own ids, too, and seems to be cut off
            "seed": (self._seed + self._replies) % 2**63,  # a resumed reply must not repeat the first one's draws
        }

    async def _answer(self, settings: Settings) -> EngineOutput:
        """Ask for the routes of new positions only, where routes come at all and the engine can."""
        if not (self._routed and self._engine.sends_new_routes):
            return await self._ask(settings)
        try:
            return await self._ask({**settings, ROUTES_FROM: self._routed})
        except Exception as error:
            if ROUTES_FROM not in str(error):
                raise
        self._engine.expect_all_routes()
        self._over = None
        return await self._ask(settings)

    async def _ask(self, settings: Settings) -> EngineOutput:
        self._call = asyncio.ensure_future(self._engine.generate(self._request, list(self._ids), settings))
        try:
            answer = await self._call
            tokens, logprobs = len(answer.token_ids), len(answer.logprobs)
            if logprobs != tokens or not (tokens or answer.aborted):
                raise PolicyError(
                    f"the engine returned {tokens} tokens and {logprobs} log-probabilities: there must be one each, "
                    f"and at least one token ({self._engine.hint})"
                )
            return self._with_new_routes(answer, asked=ROUTES_FROM in settings)
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

    def _with_new_routes(self, answer: EngineOutput, *, asked: bool) -> EngineOutput:
        """Cut off routes that were returned with earlier replies."""
        routes = answer.routed_experts
        if routes is None:
            return answer
        fed = len(self._ids) + len(answer.token_ids) - 1
        if asked and len(routes) >= fed:  # an older server ignores the setting
            self._engine.expect_all_routes()
            asked = False
        new = np.asarray(routes)[0 if asked else self._routed :][: fed + 1 - self._routed]
        self._routed += len(new)
        return replace(answer, routed_experts=new.astype(expert_dtype(int(new.max(initial=0)) + 1)))

    def close(self) -> None:
        """End the sequence; an engine drops its prefix when it needs the room."""
        self._over = self._over or "it was closed"
        if self._call is not None:
            self._call.cancel()
