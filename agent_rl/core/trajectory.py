"""Trajectory: an append-only list of token ids with the source of each token.

Arrays: token ids int32 `[T]`; log-probabilities float32 `[T]`, in nats, NaN where no token was sampled; routed experts
a narrow signed integer `[T, layers, top_k]`, aligned to input positions, -1 for "none".
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import groupby, islice
from typing import TypeAlias, TypeVar, overload

import numpy as np
import numpy.typing as npt

from agent_rl.core.display import Displayed, plural
from agent_rl.core.making import made_quickly
from agent_rl.errors import TrajectoryError

IntArray: TypeAlias = npt.NDArray[np.int32]
FloatArray: TypeAlias = npt.NDArray[np.float32]
BoolArray: TypeAlias = npt.NDArray[np.bool_]
ExpertArray: TypeAlias = npt.NDArray[np.signedinteger]
_Number = TypeVar("_Number", bound=np.generic)


def expert_dtype(experts: int) -> type[np.signedinteger]:
    """Return the narrowest signed integers that hold the indices of so many experts, and -1."""
    return next(d for d in (np.int8, np.int16, np.int32) if experts - 1 <= np.iinfo(d).max)


class FinishReason(StrEnum):
    """Why a policy stopped sampling."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


class Source(StrEnum):
    """Where a token came from; only `policy` tokens are trained on."""

    PROMPT = "prompt"
    POLICY = "policy"
    ENV = "env"
    TEMPLATE = "template"
    """Tokens of a reply that the policy did not sample: what the chat template closes it with, or an interruption."""


@made_quickly
@dataclass(frozen=True, slots=True)
class Completion:
    """What a policy sampled in one turn, exactly."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """Of each sampled token, under the distribution it was sampled from."""
    finish_reason: FinishReason
    policy_versions: tuple[int, ...]
    """The version of the weights that sampled each token."""
    routed_experts: ExpertArray | None = None
    """`[n, layers, top_k]` for the n input positions that were fed since the last completion."""


@made_quickly
@dataclass(frozen=True, slots=True)
class Span:
    """Where the tokens `[start, stop)` came from."""

    start: int
    stop: int
    source: Source
    turn: int
    policy_version: int | None = None


@dataclass(frozen=True, slots=True)
class Fork:
    """Where a trajectory branched off: it repeats the first `position` tokens of trajectory `parent`."""

    parent: int
    position: int
    delegated: bool = False
    """Whether a sub-agent wrote it: in a context of its own, after which the one that called it goes on."""
    called_at: int | None = None
    """How many tokens its caller's trajectory had when it called a sub-agent whose first trajectory this is."""


class _Prefix(Sequence[int]):
    """The first `length` ids of a list that only grows, without a copy: a long episode's turns stay cheap."""

    __slots__ = ("_ids", "_length")

    def __init__(self, ids: list[int], length: int) -> None:
        self._ids, self._length = ids, length

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[int]:
        return islice(self._ids, self._length)

    @overload
    def __getitem__(self, index: int) -> int: ...

    @overload
    def __getitem__(self, index: slice) -> list[int]: ...

    def __getitem__(self, index: int | slice) -> int | list[int]:
        at = range(self._length)[index]
        return self._ids[at] if isinstance(at, int) else [self._ids[i] for i in at]


class Trajectory(Displayed):
    """Token ids that were given to an engine and given back by it, in order, never rewritten.

    The loss mask is derived from the spans, so it can't drift from them. Nothing removes or changes a token; a prefix
    that must change becomes a new trajectory with `forked_from`.
    """

    __slots__ = ("_experts", "_ids", "_logprobs", "_spans", "forked_from")

    def __init__(self, forked_from: Fork | None = None) -> None:
        self.forked_from = forked_from
        self._ids: list[int] = []
        self._logprobs: list[float] = []  # of the policy's tokens only, in order
        self._spans: list[Span] = []
        self._experts: list[ExpertArray] = []

    def __len__(self) -> int:
        return len(self._ids)

    def __repr__(self) -> str:
        spans = plural(len(self._spans), "span")
        return f"Trajectory({plural(len(self), 'token')}, {len(self._logprobs)} sampled, {spans})"

    def append(self, ids: Iterable[int], source: Source, turn: int) -> None:
        """Append tokens that the policy did not sample.

        Raises:
            TrajectoryError: if `source` is `policy`; sampled tokens come as a `Completion`.
        """
        if source is Source.POLICY:
            raise TrajectoryError("sampled tokens carry log-probabilities: use append_completion(completion, turn)")
        self._extend(list(ids), source, turn, None)

    def append_completion(self, completion: Completion, turn: int) -> None:
        """Append what the policy sampled, with its log-probabilities, versions and routes.

        Raises:
            TrajectoryError: if ids, log-probabilities and versions differ in length.
        """
        n = len(completion.token_ids)
        if len(completion.logprobs) != n or len(completion.policy_versions) != n:
            raise TrajectoryError(
                f"a completion of {n} tokens came with {len(completion.logprobs)} log-probabilities and "
                f"{len(completion.policy_versions)} policy versions; there must be one of each per token"
            )
        at = 0
        for version, run in groupby(completion.policy_versions):
            length = len(list(run))
            self._extend(list(completion.token_ids[at : at + length]), Source.POLICY, turn, version)
            at += length
        self._logprobs.extend(completion.logprobs)
        if completion.routed_experts is not None:
            self._experts.append(completion.routed_experts)

    def _extend(self, ids: list[int], source: Source, turn: int, version: int | None) -> None:
        if ids:
            start = len(self._ids)
            self._ids.extend(ids)
            self._spans.append(Span(start, start + len(ids), source, turn, version))

    @property
    def spans(self) -> tuple[Span, ...]:
        """The spans, in order; together they cover every token once."""
        return tuple(self._spans)

    @property
    def token_ids(self) -> IntArray:
        """Token ids, int32 `[T]` (a copy)."""
        return np.asarray(self._ids, dtype=np.int32)

    @property
    def sampled(self) -> int:
        """The number of tokens that the policy sampled."""
        return len(self._logprobs)

    @property
    def last_turn(self) -> int:
        """The turn of the last token; 0 where there is none."""
        return self._spans[-1].turn if self._spans else 0

    def split_reply(self) -> tuple[Sequence[int], list[int]]:
        """Return the ids before the last turn's reply, and those of the reply, given tokens included."""
        start, turn = len(self._ids), self.last_turn
        for span in reversed(self._spans):
            if span.turn != turn or span.source is Source.PROMPT or span.source is Source.ENV:
                break
            start = span.start
        return _Prefix(self._ids, start), self._ids[start:]

    @property
    def is_delegated(self) -> bool:
        """Whether a sub-agent wrote it."""
        return self.forked_from is not None and self.forked_from.delegated

    def before(self, turn: int) -> IntArray | None:
        """The ids before a turn's reply, int32 `[t]`; None if nothing was sampled in it here.

        A reply may begin with what an interruption gave.
        """
        spans, wanted = self._spans, (Source.POLICY, turn)
        first = next((i for i, s in enumerate(spans) if (s.source, s.turn) == wanted), None)
        if first is None:
            return None
        while first and spans[first - 1].source is Source.TEMPLATE and spans[first - 1].turn == turn:
            first -= 1
        return np.asarray(self._ids[: spans[first].start], dtype=np.int32)

    @property
    def loss_mask(self) -> BoolArray:
        """True where the policy sampled the token, bool `[T]`."""
        return self._per_token([s.source is Source.POLICY for s in self._spans], np.bool_)

    @property
    def own_loss_mask(self) -> BoolArray:
        """The loss mask without what a fork repeats of its parent, bool `[T]`: each sampled token counts once."""
        mask = self.loss_mask
        if self.forked_from is not None:
            mask[: self.forked_from.position] = False
        return mask

    @property
    def logprobs(self) -> FloatArray:
        """Log-probabilities under the sampling distribution, float32 `[T]`, NaN where no token was sampled."""
        out = np.full(len(self), np.nan, dtype=np.float32)
        out[self.loss_mask] = self._logprobs
        return out

    @property
    def sampled_logprobs(self) -> FloatArray:
        """Those of the sampled tokens alone, in order, float32 `[sampled]`."""
        return np.asarray(self._logprobs, dtype=np.float32)

    @property
    def policy_versions(self) -> IntArray:
        """The version of the weights behind each sampled token, int32 `[T]`; -1 for the other tokens."""
        return self._per_token([-1 if (v := s.policy_version) is None else v for s in self._spans], np.int32)

    @property
    def turns(self) -> IntArray:
        """The turn of each token, int32 `[T]`."""
        return self._per_token([s.turn for s in self._spans], np.int32)

    @property
    def sources(self) -> IntArray:
        """Who wrote each token, int32 `[T]`: an index into the members of `Source`."""
        members = list(Source)
        return self._per_token([members.index(s.source) for s in self._spans], np.int32)

    def _per_token(self, of_spans: list[int], dtype: type[_Number]) -> npt.NDArray[_Number]:
        return np.repeat(np.asarray(of_spans, dtype=dtype), [s.stop - s.start for s in self._spans])

    @property
    def routed_experts(self) -> ExpertArray | None:
        """Routed experts `[T, layers, top_k]`; rows that no engine reported (the last token's) are -1."""
        if not self._experts:
            return None
        known = np.concatenate(self._experts)
        if len(known) > len(self):
            raise TrajectoryError(f"{len(known)} rows of routed experts for {len(self)} tokens")
        out = np.full((len(self), *known.shape[1:]), -1, dtype=known.dtype)
        out[: len(known)] = known
        return out

    @classmethod
    def restore(
        cls,
        token_ids: Sequence[int],
        spans: Sequence[Span],
        logprobs: Sequence[float],
        routed_experts: ExpertArray | None = None,
        forked_from: Fork | None = None,
    ) -> Trajectory:
        """Rebuild a stored trajectory; `logprobs` are those of the sampled tokens, in order.

        Raises:
            TrajectoryError: if the spans don't cover the tokens once, or the log-probabilities don't match them.
        """
        self = cls(forked_from)
        at = 0
        for span in spans:
            if span.start != at or span.stop <= at:
                raise TrajectoryError(f"span {span} does not continue at token {at}")
            at = span.stop
        sampled = sum(s.stop - s.start for s in spans if s.source is Source.POLICY)
        if at != len(token_ids) or sampled != len(logprobs):
            raise TrajectoryError(
                f"spans cover {at} tokens, {sampled} of them sampled, but there are {len(token_ids)} tokens and "
                f"{len(logprobs)} log-probabilities"
            )
        self._ids = [int(i) for i in token_ids]
        self._logprobs = [float(x) for x in logprobs]
        self._spans = list(spans)
        if routed_experts is not None:
            self._experts = [routed_experts]
        return self
