"""Continued: replies that a server breaks off, because it is about to get new weights, go on under the new ones."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np

from agent_rl.core.trajectory import Completion, FinishReason
from agent_rl.engines.base import InferenceEngine, SamplingParams, Session

REFUSED_S = 1.0
"""How long to wait before asking again where nothing was sampled."""


@dataclass(frozen=True, slots=True)
class ResumingEngine:
    """Implements `InferenceEngine` in front of one whose replies may be aborted.

    verl has a client that does so by itself, but tells only a reply's oldest and newest version. Here every request is
    a piece of its own, and no request outlives the weights that it began with: a server gets new ones only after it has
    aborted everything. So each token has the version of the weights that sampled it, and none is sampled twice.
    """

    sampler: InferenceEngine

    @property
    def context_limit(self) -> int | None:
        """The longest sequence, in tokens."""
        return self.sampler.context_limit

    def open(self, seed: int) -> ResumingSession:
        """Begin a sequence."""
        return ResumingSession(self.sampler.open(seed), self.sampler.context_limit)


class ResumingSession:
    """One sequence; only a closed one hands on an aborted reply."""

    def __init__(self, session: Session, context_limit: int | None) -> None:
        self._session, self._limit = session, context_limit
        self._length = 0
        self._closed = False

    async def sample(self, ids: Sequence[int], params: SamplingParams, stop_ids: frozenset[int]) -> Completion:
        """Append `ids` to the sequence and sample a whole reply, in as many pieces as it takes."""
        self._length += len(ids)
        pieces = [await self._piece(ids, params, stop_ids)]
        while pieces[-1].finish_reason is FinishReason.ABORT and not self._closed:
            left = params.max_tokens - sum(len(piece.token_ids) for piece in pieces)
            if left < 1 or (self._limit is not None and self._length >= self._limit):
                pieces[-1] = replace(pieces[-1], finish_reason=FinishReason.LENGTH)
                break
            if not pieces[-1].token_ids:  # a server on its way out refuses at once, again and again
                await asyncio.sleep(REFUSED_S)
            pieces.append(await self._piece((), replace(params, max_tokens=left), stop_ids))
        return pieces[0] if len(pieces) == 1 else joined(pieces)

    async def _piece(self, ids: Sequence[int], params: SamplingParams, stop_ids: frozenset[int]) -> Completion:
        piece = await self._session.sample(ids, params, stop_ids)
        self._length += len(piece.token_ids)
        whole = piece.finish_reason is FinishReason.ABORT and bool(stop_ids.intersection(piece.token_ids[-1:]))
        return replace(piece, finish_reason=FinishReason.STOP) if whole else piece

    def close(self) -> None:
        """End the sequence."""
        self._closed = True
        self._session.close()


def joined(pieces: Sequence[Completion]) -> Completion:
    """Return the pieces of one reply as one completion, which ended as the last of them did."""
    routes = [piece.routed_experts for piece in pieces if piece.routed_experts is not None]
    return Completion(
        token_ids=tuple(chain.from_iterable(piece.token_ids for piece in pieces)),
        logprobs=tuple(chain.from_iterable(piece.logprobs for piece in pieces)),
        raw_logprobs=tuple(chain.from_iterable(piece.raw_logprobs for piece in pieces)),
        finish_reason=pieces[-1].finish_reason,
        policy_versions=tuple(chain.from_iterable(piece.policy_versions for piece in pieces)),
        routed_experts=np.concatenate(routes) if routes else None,
    )
