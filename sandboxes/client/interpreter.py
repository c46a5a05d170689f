"""The host's own line to the interpreter of a local sandbox, without the agent in between.

The agent starts the worker, and ends it. Through a call it sleeps, so that one process wakes up instead of two. What
arrives here was written by foreign code: so frames have a limit, and so has the number of those that answer nothing;
answers and output are read at a limited rate, that of all calls together; and nothing is read between calls.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import ClassVar

from agent_rl.sandboxes.agent.frames import FrameError, Head
from agent_rl.sandboxes.agent.interpreter import FLOOD, Ends, connect
from agent_rl.sandboxes.agent.streams import Capture, take_all
from agent_rl.sandboxes.client.reading import PAUSE, ReadBudget

SHORTEST, LONGEST = 0.001, 0.05
"""Seconds between two looks at the output of a call: the shortest while there is some, ever longer ones while not."""
ALONE = 2
"""Calls at a time that have the shortest; of more, each has its share of as many looks: a look takes some 60 µs."""
MOMENT = 0.0001 if (os.cpu_count() or 1) > 1 else 0.0
"""Seconds for which a call that is alone waits awake: most answers come within it, and to wake up takes as long."""


class DirectInterpreter:
    """An interpreter, by these ends of its connections; its worker is to be started at the others.

    Args:
        bury: ends everything in the sandbox, now or once the worker has ended, and returns how that had.
    """

    _under_way: ClassVar[int] = 0
    """Calls, of all interpreters."""

    def __init__(self, bury: Callable[[bool], Awaitable[str]]) -> None:
        self._end_interpreter = bury
        self._ours, self._theirs = connect()
        self._arrivals, self._output = select.poll(), select.poll()
        self._arrivals.register(self._ours.answers, select.POLLIN)
        for stream in (self._ours.out, self._ours.err):
            self._output.register(stream, select.POLLIN)
        self._listener: asyncio.AbstractEventLoop | None = None
        self._call = 0
        self._done: asyncio.Future[None] | None = None
        """Of the call that is under way: set when its answer is there, or none can come."""
        self._look: asyncio.TimerHandle | None = None
        self._budget = ReadBudget()
        self._pause: asyncio.TimerHandle | None = None
        self._closed = False

    @property
    def ends(self) -> Ends:
        """What the worker is to be started with."""
        return self._theirs

    def handed_over(self) -> None:
        """Close this process's copies of `ends`."""
        for fd in self._theirs:
            os.close(fd)

    async def run(self, call: int, code: bytes, timeout: float, keep: int) -> tuple[Head, bytes]:
        """Run code; answer as the agent does. An interpreter that is lost is of no use any more.

        Raises:
            SandboxError: if the sandbox is lost.
            FrameError: if the interpreter floods the host; what may still come has to be ended with the sandbox.
        """
        loop = asyncio.get_running_loop()
        self._budget.renew()
        self._listen(loop)
        frame, captures = self._ours.begin(call, code, keep)
        self._call, self._done = call, loop.create_future()
        self._look_later(loop, captures, SHORTEST, loop.time() + timeout)
        DirectInterpreter._under_way += 1
        try:
            await self._send(loop, frame, self._done)
            if DirectInterpreter._under_way == 1:
                await asyncio.sleep(0)  # others have their turn while the worker begins
                self._wait_awake(self._done)
            await self._done
        finally:
            DirectInterpreter._under_way -= 1
            self._done = None
            if self._look is not None:
                self._look.cancel()
        if self._ours.flooded:
            raise FrameError(FLOOD)
        expired = self._ours.answer is None and not self._ours.broken
        head = self._ours.outcome(expired)
        if head["lost"]:
            ended = await self._end_interpreter(expired)
            head["error"] = None if expired else ended
        if self._output.poll(0):  # most calls print nothing
            for capture in captures:
                capture.drain_all()
        return take_all(head, captures)

    def close(self) -> None:
        """Close these ends; with a call under way, only have it end without an answer."""
        if self._done is not None:
            self._give_up()
        elif not self._closed:
            self._closed = True
            self._deafen()
            self._ours.close()

    def _listen(self, loop: asyncio.AbstractEventLoop) -> None:
        if loop is not self._listener:
            self._deafen()
            loop.add_reader(self._ours.answers, self._receive)
            self._listener = loop

    def _deafen(self) -> None:
        if self._pause is not None:
            self._pause.cancel()
            self._pause = None
        if self._listener is not None and not self._listener.is_closed():
            self._listener.remove_reader(self._ours.answers)
        self._listener = None

    async def _send(self, loop: asyncio.AbstractEventLoop, frame: bytes, done: asyncio.Future[None]) -> None:
        fd, rest = self._ours.requests.fileno(), memoryview(frame)
        try:
            while not done.done():
                with contextlib.suppress(BlockingIOError):
                    rest = rest[os.write(fd, rest) :]
                if not rest:
                    return
                await _room(loop, fd, done)
        except OSError:  # the reader is gone
            self._give_up()

    def _wait_awake(self, done: asyncio.Future[None]) -> None:
        until = time.perf_counter() + MOMENT
        while DirectInterpreter._under_way == 1 and not done.done() and time.perf_counter() < until:
            if self._arrivals.poll(0):
                self._receive()

    def _give_up(self) -> None:
        self._ours.broken = True
        self._settle()

    def _receive(self) -> None:
        if self._done is None or self._done.done():  # unasked: it waits for the next call, which won't want it
            self._deafen()
            return
        before = self._ours.received
        self._ours.listen(self._call)
        if self._ours.answer is not None or self._ours.broken:
            self._settle()
        elif self._budget.is_spent(self._ours.received - before) and self._listener is not None:
            loop = self._listener
            self._deafen()
            self._pause = loop.call_later(PAUSE, self._listen, loop)

    def _settle(self) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_result(None)

    def _look_later(
        self, loop: asyncio.AbstractEventLoop, captures: Sequence[Capture], delay: float, expires: float
    ) -> None:
        when = min(loop.time() + delay, expires)
        self._look = loop.call_at(when, self._look_at_output, loop, captures, delay, expires)

    def _look_at_output(
        self, loop: asyncio.AbstractEventLoop, captures: Sequence[Capture], delay: float, expires: float
    ) -> None:
        """Make room for more of it: a pipe holds 64 KiB, so all calls together get no more than 128 MB a second."""
        if loop.time() >= expires:
            self._settle()
            return
        before = sum(capture.total for capture in captures)
        for capture in captures:
            capture.drain()
        more = sum(capture.total for capture in captures) > before
        soon = SHORTEST * max(1.0, DirectInterpreter._under_way / ALONE)
        self._look_later(loop, captures, soon if more else min(max(soon, 2 * delay), LONGEST), expires)


async def _room(loop: asyncio.AbstractEventLoop, fd: int, done: asyncio.Future[None]) -> None:
    """Wait until a pipe can be written to, or the call is over."""
    wake = asyncio.Event()

    def over(_: object) -> None:
        wake.set()

    loop.add_writer(fd, wake.set)
    done.add_done_callback(over)
    try:
        await wake.wait()
    finally:
        loop.remove_writer(fd)
        done.remove_done_callback(over)
