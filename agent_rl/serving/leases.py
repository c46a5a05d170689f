"""Leases: the places of a server, held by clients until they give them back, their time is up or the client is gone."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from agent_rl.errors import RemoteError


@dataclass(eq=False)
class Lease:
    """A client's claim to one place; what is in the place is a subclass's."""

    id: str
    """The client's name for it."""
    owner: Owner[Any]
    patience: float | None
    """Seconds that what is done for it has to stop when it is ended; None: any number."""
    until: float = float("inf")
    """When it is over, used or not, by the clock."""
    used: float = 0.0
    """When it was last used, by the clock."""
    work: set[asyncio.Task[None]] = field(default_factory=set)
    """What is done for it at present; a lease at work does not run out."""
    ending: asyncio.Task[None] | None = None
    """Its end, once that has begun."""


L = TypeVar("L", bound=Lease)


@dataclass(eq=False)
class Owner(Generic[L]):
    """A client's connection."""

    leases: dict[str, L] = field(default_factory=dict)
    calls: dict[int, asyncio.Task[None]] = field(default_factory=dict)
    """What it waits for, by the call's number."""
    held_bytes: int = 0
    """Of the requests that it waits for."""

    def cancel(self, call: int) -> None:
        """Stop a call, if it is under way."""
        if (task := self.calls.get(call)) is not None:
            task.cancel()

    async def idle(self, id: str) -> L:
        """Return an idle lease, after the end of what was cancelled.

        Raises:
            RemoteError: if there is none of that id, or it is at work.
        """
        while True:
            lease = self.find(id)
            if not lease.work:
                return lease
            if not all(work.cancelling() for work in lease.work):
                raise RemoteError("the lease is at work: one call at a time")
            await asyncio.wait(lease.work)

    def find(self, id: str) -> L:
        """Return a lease.

        Raises:
            RemoteError: if there is none of that id.
        """
        if (lease := self.leases.get(id)) is None:
            raise RemoteError("the lease is gone: it ran out, unused; serve with a longer --ttl")
        return lease


class Leases(Generic[L]):
    """All places: taken in the order of asking, freed once."""

    def __init__(self, capacity: int, ttl: float, clock: Callable[[], float] = time.monotonic) -> None:
        """Take the number of places, and how many seconds one may lie unused."""
        self.capacity, self.ttl, self.clock = capacity, ttl, clock
        self._held: set[L] = set()
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

    async def take(self, lease: L, wait: float) -> None:
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

    def renew(self, lease: L) -> None:
        """Say that a lease was used until now."""
        lease.used = self.clock()

    @contextmanager
    def working(self, lease: L) -> Iterator[None]:
        """Keep a lease from running out while the current task works for it."""
        task = asyncio.current_task()
        assert task is not None
        lease.work.add(task)
        try:
            yield
        finally:
            lease.work.discard(task)
            self.renew(lease)

    def drop(self, lease: L) -> bool:
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

    def overdue(self) -> list[L]:
        """Return the idle leases that were not used for too long, or whose time is over."""
        now = self.clock()
        return [one for one in self._held if not one.work and (one.used < now - self.ttl or one.until < now)]

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
