"""ClientThread: a served model's client and the thread that it runs in, both made when they are first asked for."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

from agent_rl.concurrency import LoopThread
from agent_rl.policy.openai_client import ChatClient


class ClientThread:
    """A client in an event loop of its own, which outlives `asyncio.run`."""

    def __init__(self, name: str, connect: Callable[[], ChatClient]) -> None:
        """Keep the thread's name, and how the client is made."""
        self._name, self._connect = name, connect

    @cached_property
    def loop(self) -> LoopThread:
        """The event loop of the connections."""
        return LoopThread(self._name)

    @cached_property
    def client(self) -> ChatClient:
        """The client."""
        return self._connect()

    def close(self) -> None:
        """Close the connections; they may be used again."""
        if (client := self.__dict__.pop("client", None)) is not None:
            self.loop.wait(client.close())
        if (loop := self.__dict__.pop("loop", None)) is not None:
            loop.close()
