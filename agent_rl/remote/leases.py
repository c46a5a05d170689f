"""Leases: the places of a server, each held by one episode until that ends, its time is up or its client is gone."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from agent_rl.errors import RemoteError
from agent_rl.gym.env import Env, Script
from agent_rl.gym.registry import EnvSpec


@dataclass(eq=False, slots=True)
class Lease:
    """A client's claim to one place, and the instance in it."""

    id: str
    """The client's name for it."""
    owner: Owner
    spec: EnvSpec
    used: float = 0.0
    """When it was last used, by the clock."""
    env: Env | None = None
    script: Script | None = None
    work: asyncio.Task[None] | None = None
    """What is done for it at present; a lease at work does not run out."""


@dataclass(eq=False, slots=True)
class Owner:
    """A client's connection."""

    leases: dict[str, Lease] = field(default_factory=dict)

    async def idle(self, id: str) -> Lease:
        """Return an idle lease, after the end of what was cancelled.

        Raises:
            RemoteError: if there is none of that id, or it is at work.
        """
        while True:
            if (lease := self.leases.get(id)) is None:
                raise RemoteError("the lease is gone: it ran out, unused; serve with a longer --ttl")
            if (work := lease.work) is None:
                return lease
            if not work.cancelling():
                raise RemoteError("the lease is at work: one call at a time")
            await asyncio.wait([work])


class Leases:
    """All places: taken in the order of asking, freed once."""

    def __init__(self, capacity: int, ttl: float, clock: Callable[[], float] = time.monotonic) -> None:
        """Take the number of places, and how many seconds one may lie unused."""
        self.capacity, self.ttl, self._clock = capacity, ttl, clock
        self._held: set[Lease] = set()
        self._promised = 0
        """Places of leases that are being closed, or that were given to one who has not woken up yet."""
        self._waiting: deque[asyncio.Future[None]] = deque()
        self.opened = self.refused = 0
        """How many were given out, and how many asked in vain."""

    @property
    def taken(self) -> int:
        """How many places are not free."""
        return len(self._held) + self._promised

    @property
    def waiting(self) -> int:
        """How many wait for a place."""
        return len(self._waiting)

    async def take(self, lease: Lease, wait: float) -> None:
        """Give a lease a place; wait for one to get free if there is none.

        Raises:
            RemoteError: if none does in `wait` seconds.
        """
        if self.taken >= self.capacity:
            free = asyncio.get_running_loop().create_future()
            self._waiting.append(free)
            try:
                async with asyncio.timeout(wait):
                    await free
            except TimeoutError:
                self._leave(free)
                self.refused += 1
                raise RemoteError(
                    f"the server is full: all {self.capacity} places are taken, and none got free in {wait:g} s; "
                    "run fewer episodes at a time, or serve with a larger --capacity"
                ) from None
            except asyncio.CancelledError:
                self._leave(free)
                raise
            self._promised -= 1
        self._held.add(lease)
        self.opened += 1
        self.renew(lease)

    def renew(self, lease: Lease) -> None:
        """Say that a lease was used until now."""
        lease.used = self._clock()

    def drop(self, lease: Lease) -> bool:
        """Take the place of a lease back, once; it is free only after `free`. Return whether it had one."""
        if lease not in self._held:
            return False
        self._held.remove(lease)
        self._promised += 1
        return True

    def free(self) -> None:
        """Give the place of a dropped lease to the next who waits."""
        self._promised -= 1
        self._hand_on()

    def overdue(self) -> list[Lease]:
        """Return the leases that were not used for too long."""
        before = self._clock() - self.ttl
        return [lease for lease in self._held if lease.work is None and lease.used < before]

    def _leave(self, free: asyncio.Future[None]) -> None:
        """Stop waiting; a place that was handed over meanwhile goes to the next."""
        if free.done() and not free.cancelled():
            self._promised -= 1
            self._hand_on()
        elif free in self._waiting:
            self._waiting.remove(free)

    def _hand_on(self) -> None:
        while self._waiting and self.taken < self.capacity:
            free = self._waiting.popleft()
            if not free.done():
                self._promised += 1  # held for it until it wakes up
                free.set_result(None)
