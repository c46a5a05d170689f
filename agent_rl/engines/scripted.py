"""Scripted engine: replies given in advance as token ids."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from agent_rl.core.trajectory import Completion, FinishReason
from agent_rl.engines.base import SamplingParams
from agent_rl.errors import PolicyError


class ScriptedEngine:
    """Answers every call with the next of the given replies, over all its sessions; implements `InferenceEngine`.

    Replies are completions, or token ids, whose log-probabilities are then NaN and whose version is 0.
    """

    def __init__(self, replies: Iterable[Sequence[int] | Completion], *, context_limit: int | None = None) -> None:
        self.context_limit = context_limit
        self.sessions: list[ScriptedSession] = []
        """In the order in which they were opened."""
        self._replies = iter(replies)

    def open(self, seed: int) -> ScriptedSession:
        """Begin a sequence."""
        self.sessions.append(ScriptedSession(self._replies, seed))
        return self.sessions[-1]


class ScriptedSession:
    """One sequence of a `ScriptedEngine`, with what was asked of it."""

    def __init__(self, replies: Iterator[Sequence[int] | Completion], seed: int) -> None:
        self.seed = seed
        self.token_ids: list[int] = []
        """Every id that was given or replied."""
        self.params: list[SamplingParams] = []
        """Of each call."""
        self.closed = 0
        """How often."""
        self._replies = replies

    async def sample(self, ids: Sequence[int], params: SamplingParams, stop_ids: frozenset[int]) -> Completion:
        """Append `ids` and the next reply, cut to `params.max_tokens`.

        Raises:
            PolicyError: if the session is closed, or no reply is left.
        """
        if self.closed:
            raise PolicyError("this scripted session is closed; open a new one")
        reply = next(self._replies, None)
        if reply is None:
            raise PolicyError("the scripted engine has given all its replies; give it one for every call")
        if not isinstance(reply, Completion):
            unknown = (math.nan,) * len(reply)
            reply = Completion(tuple(reply), unknown, FinishReason.STOP, (0,) * len(reply))
        n = params.max_tokens
        cut = replace(
            reply,
            token_ids=reply.token_ids[:n],
            logprobs=reply.logprobs[:n],
            policy_versions=reply.policy_versions[:n],
            finish_reason=FinishReason.STOP if stop_ids.intersection(reply.token_ids[:n][-1:]) else FinishReason.LENGTH,
        )
        self.params.append(params)
        self.token_ids += [*ids, *cut.token_ids]
        return cut

    def close(self) -> None:
        """End the sequence."""
        self.closed += 1
