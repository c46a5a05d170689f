"""Games: several players take turns in one world, each with an episode of its own."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Awaitable, Callable
from typing import ClassVar

import numpy as np

from agent_rl.concurrency import call
from agent_rl.core.messages import Message, Step, Task
from agent_rl.errors import ConfigError, DefinitionError
from agent_rl.gym.env import Env, Script


class Game(Env):
    """A game; an instance is one match. A subclass defines `begin`, `play` and rewards, which look at `episode.seat`.

    In a match every seat has a policy and an episode: `ar.run` with a list of policies, and training with `self_play`.
    Alone, as everywhere else, a policy sits on `seat`, and the `opponent` script on the others.
    """

    seats: ClassVar[int] = 2
    turn: int = 0
    """The seat that is to move; `play` passes it on."""
    over: bool = False
    """Whether the game has ended, set by `play`."""

    def __init__(self, seat: int = 0) -> None:
        """Take a seat, where the policy plays alone.

        Raises:
            ConfigError: if there is no such seat.
        """
        if type(seat) is not int or not 0 <= seat < self.seats:
            raise ConfigError(f"{type(self).__name__}(seat={seat!r}): the seats are 0 to {self.seats - 1}")
        self.seat = seat

    def begin(self, task: Task, rng: np.random.Generator) -> Awaitable[None] | None:
        """Set the game up, sync or async, and tell the players what they see."""
        raise NotImplementedError(f"{type(self).__name__} has to define begin(self, task, rng)")

    def play(self, action: Message) -> Awaitable[None] | None:
        """Make the move of the seat whose `turn` it is, sync or async; tell the others, and pass the turn."""
        raise NotImplementedError(f"{type(self).__name__} has to define play(self, action)")

    def opponent(self) -> Script:
        """Play the other seats, where the policy plays alone; the oracle's way unless overridden."""
        return self.oracle()

    def tell(self, text: str, seat: int | None = None) -> None:
        """Let a seat, or all of them, read a line when it is their turn, or when the game is over.

        Raises:
            DefinitionError: if there is no such seat.
        """
        if seat is not None and seat not in range(self.seats):
            raise DefinitionError(f"{type(self).__name__}.tell(..., {seat!r}): the seats are 0 to {self.seats - 1}")
        for heard in self._heard if seat is None else [self._heard[seat]]:
            heard.append(text)

    async def open(self, task: Task, rng: np.random.Generator) -> None:
        """Begin the match, and check whose turn it is then, as `move` does."""
        self._heard: list[list[str]] = [[] for _ in range(self.seats)]
        await self._call("begin", functools.partial(self.begin, task, rng))

    async def move(self, action: Message) -> None:
        """Play, and check whose turn it is then.

        Raises:
            DefinitionError: if it is no seat's, as all would wait for ever.
        """
        await self._call("play", functools.partial(self.play, action))

    async def _call(self, name: str, method: Callable[[], Awaitable[None] | None]) -> None:
        await call(method, thread=f"{type(self).__name__}.{name}" if self.blocking else None)
        if not self.over and self.turn not in range(self.seats):
            raise DefinitionError(
                f"{type(self).__name__}.{name} set turn={self.turn!r}: the seats are 0 to {self.seats - 1}"
            )

    def heard(self, seat: int) -> tuple[Message, ...]:
        """Return the lines for a seat since it was last asked, as one message."""
        lines, self._heard[seat] = self._heard[seat], []
        return (Message("user", "\n".join(lines)),) if lines else ()

    async def reset(self, task: Task, rng: np.random.Generator) -> tuple[Message, ...]:
        """Begin a match against the scripts."""
        await self.open(task, rng)
        self._scripts = [self.opponent() for _ in range(self.seats)]
        return (await self._answered()).observation

    async def step(self, action: Message) -> Step:
        """Make the policy's move, and the others' until it is its turn again."""
        await self.move(action)
        return await self._answered()

    async def _answered(self) -> Step:
        while not self.over and self.turn != self.seat:
            script, heard = self._scripts[self.turn], self.heard(self.turn)
            begins = inspect.getgeneratorstate(script) == inspect.GEN_CREATED
            try:
                answer = next(script) if begins else script.send(heard)
            except StopIteration:
                raise DefinitionError(f"{type(self).__name__}.opponent ended before the game: let it yield") from None
            await self.move(Message("assistant", answer) if isinstance(answer, str) else answer)
        return Step(self.heard(self.seat), terminated=self.over)
