"""Resume replies that a weight update aborted, under the new weights."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np

from agent_rl.core.trajectory import Completion, FinishReason
from agent_rl.engines.base import InferenceEngine, SamplingParams, Session

_log = logging.getLogger(__name__)

REFUSED_S = 1.0
"""How long to wait before the next request after one that sampled nothing."""


@dataclass(frozen=True, slots=True)
class ResumingEngine:
    """Implements `InferenceEngine` in front of one whose replies may be aborted.

    verl has such a client, too, but it returns only a reply's oldest and newest version. Here every request is a piece
    of its own, and no request outlives the weights that it began with: a server gets new ones only after it has
    aborted all requests. So each token has the version of the weights that sampled it, and none is sampled twice.
    """

    engine: InferenceEngine

    @property
    def context_limit(self) -> int | None:
        """The longest sequence, in tokens."""
        return self.engine.context_limit

    def open(self, seed: int) -> ResumingSession:
        """Begin a sequence."""
        return ResumingSession(self.engine.open(seed), self.engine.context_limit)


class ResumingSession:
    """One sequence; only a closed one returns an aborted reply."""

    def __init__(self, session: Session, context_limit: int | None) -> None:
        self._session, self._limit = session, context_limit
        self._length = 0
        self._closed = False

    async def sample(self, ids: Sequence[int], params: SamplingParams, stop_ids: frozenset[int]) -> Completion:
        """Append `ids` to the sequence and sample a whole reply, in one piece or more."""
        self._length += len(ids)
        pieces = [await self._piece(ids, params, stop_ids)]
        while pieces[-1].finish_reason is FinishReason.ABORT and not self._closed:
            left = params.max_tokens - sum(len(piece.token_ids) for piece in pieces)
            if left < 1 or (self._limit is not None and self._length >= self._limit):
                pieces[-1] = replace(pieces[-1], finish_reason=FinishReason.LENGTH)
                break
            _log.debug("an aborted reply is sampled on, with %d tokens left", left)
            if not pieces[-1].token_ids:  # a server that shuts down rejects every request at once
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
    """Return the pieces of one reply as one completion, which ends as the last of them."""
    routes = [piece.routed_experts for piece in pieces if piece.routed_experts is not None]
    return Completion(
        token_ids=tuple(chain.from_iterable(piece.token_ids for piece in pieces)),
        logprobs=tuple(chain.from_iterable(piece.logprobs for piece in pieces)),
        finish_reason=pieces[-1].finish_reason,
        policy_versions=tuple(chain.from_iterable(piece.policy_versions for piece in pieces)),
        routed_experts=np.concatenate(routes) if routes else None,
    )
