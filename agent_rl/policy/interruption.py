"""Interruption: forced answers, by appending a fixed phrase when a reply exceeds its thinking budget.

ScaleRL's way to bound thinking (Khatri et al. 2025, arXiv 2510.13786, section 2): instead of losing the reply to its
limit, a phrase that ends the thought is appended, and the policy continues. In the trajectory the given tokens are part
of the reply's turn with the source `template`: they are parsed like the rest of the reply, have no log-probability and
no loss, and the following tokens are sampled, and trained, given them. Where they cut into a tool call, the call is
malformed unless they close it; the environment then says so, as to any such call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal, TypeAlias

from agent_rl.core.trajectory import Completion, FinishReason, Source, Trajectory
from agent_rl.engines.base import SamplingParams, Session
from agent_rl.errors import ConfigError
from agent_rl.seeds import Stream, rng

Piece: TypeAlias = Completion | tuple[int, ...]
"""A part of a reply: what was sampled, or ids that were given."""


@dataclass(frozen=True, slots=True)
class Interruption:
    """When to interrupt a reply, and with what."""

    after_tokens: int
    """Sampled tokens, of the reply or of the episode. What is left of the reply's own limit is left for the answer."""
    ids: tuple[int, ...]
    """What is appended, e.g. "Time is up, I answer now.</think>"."""
    per: Literal["reply", "episode"] = "reply"
    """`episode`: its sampled tokens together; once they are used up, every further reply begins with `ids`."""
    spread: int = 0
    """The point is drawn from the last `spread` tokens before `after_tokens`: no single length is to be learned."""
    unless: Callable[[tuple[int, ...]], bool] | None = None
    """Whether a reply with these ids by then, e.g. with the end of its thought, is left alone; None interrupts all."""

    def __post_init__(self) -> None:
        """Check the settings.

        Raises:
            ConfigError: if there is nothing to append, or a number is out of bounds.
        """
        if not self.ids:
            raise ConfigError("an interruption needs text to interrupt with: set interrupt.text")
        if not 0 <= self.spread < self.after_tokens:
            raise ConfigError(
                f"interrupt.spread={self.spread} must be at least 0 and below "
                f"interrupt.after_tokens={self.after_tokens}"
            )

    def point(self, seed: int, turn: int, sampled: int) -> int:
        """Return the number of further sampled tokens before an interruption; a function of the arguments.

        Args:
            seed: the episode's.
            turn: the reply's.
            sampled: the tokens that earlier replies of the episode sampled.
        """
        key = (seed, turn) if self.per == "reply" else (seed,)
        early = int(rng(Stream.INTERRUPTION, *key).integers(self.spread + 1)) if self.spread else 0
        return max(0, self.after_tokens - early - (sampled if self.per == "episode" else 0))


async def sample_reply(
    session: Session,
    ids: Sequence[int],
    params: SamplingParams,
    stop_ids: frozenset[int],
    *,
    room: int | None = None,
    interrupt: Interruption | None = None,
    point: int = 0,
) -> list[Piece]:
    """Sample a reply, interrupted or not; the last piece is a completion.

    Args:
        session: the sequence.
        ids: what comes before the reply and is new.
        params: `max_tokens` bounds the reply's sampled tokens, before and after an interruption together.
        stop_ids: what ends a reply.
        room: how many more tokens the context holds behind `ids`; None for no limit. Where the given ids and one token
            more don't fit, there is no interruption.
        interrupt: None for none.
        point: after how many sampled tokens to interrupt.
    """
    most = params.max_tokens if room is None else min(params.max_tokens, room)

    async def draw(new: Sequence[int], limit: int) -> Completion:
        bounded = params if limit == params.max_tokens else replace(params, max_tokens=limit)
        return await session.sample(new, bounded, stop_ids)

    if interrupt is None or point >= most or (room is not None and point + len(interrupt.ids) >= room):
        return [await draw(ids, most)]
    sampled: list[Piece] = []
    if point:
        first = await draw(ids, point)
        if first.finish_reason is not FinishReason.LENGTH:
            return [first]
        if interrupt.unless is not None and interrupt.unless(first.token_ids):
            return [first, await draw((), most - point)]
        sampled, ids = [first], ()
    left = params.max_tokens - point
    if room is not None:
        left = min(left, room - point - len(interrupt.ids))
    return [*sampled, interrupt.ids, await draw([*ids, *interrupt.ids], left)]


def interruptions(trajectory: Trajectory) -> int:
    """Return how many replies were interrupted: given tokens followed by sampled ones in the same turn."""
    return sum(
        a.source is Source.TEMPLATE and b.source is Source.POLICY and a.turn == b.turn
        for a, b in pairwise(trajectory.spans)
    )
