"""Requests to an agent that don't wait for their turn: many at a time, each answered by its number when it can be."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from agent_rl.sandboxes.agent.frames import Head, pack

Answer = tuple[Head, bytes]


class Beside:
    """The requests of a sandbox that wait beside the call whose turn it is.

    Args:
        send: sends a frame, whatever becomes of who asked for it.
        watch: gives the sandbox up if a request is not answered soon after so many seconds; returns what stops that.
    """

    def __init__(
        self,
        send: Callable[[bytes], object],
        watch: Callable[[asyncio.Future[Answer], float], asyncio.TimerHandle],
    ) -> None:
        self._send, self._watch = send, watch
        self._waiting: dict[int, asyncio.Future[Answer]] = {}
        """By number; those that were cancelled, too, until their answer has come."""

    async def ask(self, op: str, number: int, head: Head, body: bytes, timeout: float) -> Answer:
        """Send a request and return its answer, which the agent gives when it can be, or when the time is over.

        Args:
            op: what is asked.
            number: of the request; no other has it.
            head: what belongs to it.
            body: the same.
            timeout: seconds that it may wait in the agent; 0: it is answered at once.
        """
        loop = asyncio.get_running_loop()
        frame = pack({"op": op, "id": number, **head}, body)
        answer: asyncio.Future[Answer] = loop.create_future()
        self._waiting[number] = answer
        expiry = loop.call_later(timeout, self._hurry, number)
        alarm = self._watch(answer, timeout)
        try:
            self._send(frame)
            return await answer
        except asyncio.CancelledError:
            forget(answer)
            if not answer.done() or answer.cancelled():
                answer.cancel()
                self._hurry(number)
            raise
        finally:
            alarm.cancel()
            expiry.cancel()

    def settle(self, head: Head, body: bytes) -> bool:
        """Take a frame that answers one of these; return whether it does."""
        number = head.get("id")
        answer = self._waiting.pop(number, None) if isinstance(number, int) else None
        if answer is None:
            return False
        if not answer.done():
            answer.set_result((head, body))
        return True

    def fail(self, error: Callable[[], Exception]) -> None:
        """Have all fail: there is no agent any more."""
        waiting, self._waiting = self._waiting, {}
        for answer in waiting.values():
            if not answer.done() and not answer.get_loop().is_closed():
                answer.set_exception(error())

    def _hurry(self, number: int) -> None:
        if number in self._waiting:
            self._send(pack({"op": "hurry", "id": number}))


def forget(answer: asyncio.Future[Answer]) -> None:
    """Have asyncio not complain of a failed answer that came as the call was cancelled."""
    if answer.done() and not answer.cancelled():
        answer.exception()
