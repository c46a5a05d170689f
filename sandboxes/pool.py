"""Sandboxes kept open ahead of their use, for a backend whose sandboxes take long to open.

Each is handed out once and closed after its use, never given to a second owner. Between calls a sandbox belongs to no
event loop, so the ones kept warm in one `asyncio.run` serve the next, and those of several threads at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass

from agent_rl.core.sandbox_loss import Cause, SandboxLoss
from agent_rl.errors import ConfigError, SandboxError
from agent_rl.sandboxes.base import Capabilities, Limits, Sandbox, Sandboxes
from agent_rl.sandboxes.calls import DEFAULT_TIMEOUT, MAX_FILE, MAX_OUTPUT, Command, ExecResult, PythonResult
from agent_rl.sandboxes.process import Launch, Process, Stream
from agent_rl.sandboxes.snapshot import Snapshot

_log = logging.getLogger(__name__)

HEALTH_TIMEOUT = 5.0
"""Seconds that a warm sandbox has to answer before it is handed out."""


@dataclass(frozen=True, slots=True)
class _Warm:
    sandbox: Sandbox
    opened: float


class WarmPool:
    """A backend on top of another one, with `warm` sandboxes ready and at most `most` open."""

    def __init__(
        self,
        backend: Sandboxes,
        *,
        warm: int,
        most: int = 256,
        limits: Limits | None = None,
        lifetime: float = 3600.0,
    ) -> None:
        """Store the settings; the first `open` or `fill` begins.

        Args:
            backend: where the sandboxes come from; closing the pool closes it.
            warm: how many are kept open for the next calls.
            most: how many may be open, warm ones included; further owners wait.
            limits: of the warm ones, the backend's own if None; a call with others waits for a new sandbox.
            lifetime: seconds that one may be kept warm, and then again seconds that it may be held; who wants
                more waits for a new sandbox.

        Raises:
            ConfigError: if the numbers don't fit each other.
        """
        if not 0 < warm <= most:
            raise ConfigError(f"warm={warm}, most={most}: keep at least one warm, and no more than may be open")
        if not lifetime > 0:
            raise ConfigError(f"lifetime={lifetime}: give a positive number of seconds")
        self.backend = backend
        self._size, self._most, self._limits, self._lifetime = warm, most, limits, lifetime
        self._ready: deque[_Warm] = deque()
        self._held: set[_PooledSandbox] = set()
        self._opening = 0
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._background: set[asyncio.Task[None]] = set()
        self._closed = False

    @property
    def ready(self) -> int:
        """How many sandboxes are warm."""
        return len(self._ready)

    async def open(self, *, owner: str = "", limits: Limits | None = None, lifetime: float = 3600.0) -> Sandbox:
        """Hand out a warm sandbox, or a new one if none is left or other limits are wanted; wait while it is full.

        Raises:
            SandboxError: if none can be had, or the pool is closed.
        """
        usual = limits in (None, self._limits) and lifetime <= self._lifetime
        sandbox = await self._warm_one() if usual else None
        while sandbox is None and self._open >= self._most and not self._closed:
            if self._ready:  # only these are in the way
                await _discard(self._ready.popleft().sandbox)
                continue
            await self._turn()
            sandbox = await self._warm_one() if usual else None
        if sandbox is None:
            self._check_open()
            with self._place():
                sandbox = await self.backend.open(owner=owner, limits=limits or self._limits, lifetime=lifetime)
        pooled = _PooledSandbox(self._give_back, sandbox, lifetime)
        self._held.add(pooled)
        self._refill()
        return pooled

    async def fill(self) -> None:
        """Wait until as many are warm as shall be, or may be.

        Raises:
            SandboxError: if one can't be opened, or the pool is closed.
        """
        self._check_open()
        self._refill()
        await asyncio.gather(*self._background)

    async def capabilities(self) -> Capabilities:
        """Return what the backend guarantees."""
        return await self.backend.capabilities()

    async def close(self) -> None:
        """Close every sandbox, warm or held, and the backend."""
        self._closed = True
        self._wake()
        fills = tuple(self._background)
        for fill in fills:
            fill.cancel()
        await asyncio.gather(*fills, return_exceptions=True)
        held = [pooled.close() for pooled in tuple(self._held)]
        warm = [_discard(warm.sandbox) for warm in self._ready]
        self._ready.clear()
        await asyncio.gather(*held, *warm, return_exceptions=True)
        await self.backend.close()

    @property
    def _open(self) -> int:
        return len(self._ready) + len(self._held) + self._opening

    def _check_open(self) -> None:
        if self._closed:
            raise SandboxError("the pool of sandboxes is closed")

    async def _warm_one(self) -> Sandbox | None:
        """Return a warm sandbox that answers, if there is one."""
        while self._ready and not self._closed:
            warm = self._ready.popleft()
            with self._place():
                try:
                    if time.monotonic() - warm.opened < self._lifetime and await _answers(warm.sandbox):
                        return warm.sandbox
                    await _discard(warm.sandbox)
                except asyncio.CancelledError:
                    await asyncio.shield(_discard(warm.sandbox))
                    raise
        return None

    @contextlib.contextmanager
    def _place(self) -> Iterator[None]:
        """Take a place among the open ones; whoever waits gets it if there is nothing to open after all."""
        self._opening += 1
        try:
            yield
        except BaseException:
            self._opening -= 1
            self._wake()
            raise
        self._opening -= 1

    async def _turn(self) -> None:
        """Wait until something has changed."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        if self._open < self._most or self._closed:  # since it was looked at, by another thread
            self._wake()
        await turn

    def _wake(self) -> None:
        waiting, self._waiting = self._waiting, deque()
        for turn in waiting:
            with contextlib.suppress(RuntimeError):  # its loop was closed
                turn.get_loop().call_soon_threadsafe(_wake, turn)

    def _refill(self) -> None:
        """Begin to open the missing ones; waiting calls come first. A failure shows at the next `open`."""
        self._background = {fill for fill in self._background if not fill.get_loop().is_closed()}
        wanted = 0 if self._closed or self._waiting else self._size - len(self._ready) - len(self._background)
        for _ in range(min(wanted, self._most - self._open)):
            self._opening += 1
            fill = asyncio.create_task(self._warm_up())
            self._background.add(fill)
            fill.add_done_callback(self._filled)

    def _filled(self, fill: asyncio.Task[None]) -> None:
        self._background.discard(fill)
        self._wake()
        if not fill.cancelled() and (error := fill.exception()):
            _log.warning("no warm sandbox could be opened: %s", error)

    async def _warm_up(self) -> None:
        """Open a sandbox and its interpreter; its place is taken already."""
        try:
            # twice: it may be handed out when it has been warm for nearly as long as it may be
            sandbox = await self.backend.open(owner="warm", limits=self._limits, lifetime=2 * self._lifetime)
            try:
                if (await sandbox.run_python("")).state_lost:
                    raise SandboxError("a sandbox that was to be kept warm does not answer")
            except BaseException:
                await asyncio.shield(_discard(sandbox))
                raise
            self._ready.append(_Warm(sandbox, time.monotonic()))
        finally:
            self._opening -= 1

    async def _give_back(self, pooled: _PooledSandbox) -> None:
        if pooled not in self._held:
            return
        self._held.remove(pooled)
        try:
            await pooled.end()
        finally:
            self._wake()
            self._refill()


class _PooledSandbox(Sandbox):
    """A sandbox that is held for a time; closing it ends the sandbox."""

    def __init__(
        self, give_back: Callable[[_PooledSandbox], Awaitable[None]], sandbox: Sandbox, lifetime: float
    ) -> None:
        self._sandbox, self._give_back = sandbox, give_back
        self._until = time.monotonic() + lifetime
        reason = "the sandbox was held for longer than its lifetime; ask for more in open(lifetime=...)"
        self._over = SandboxLoss(Cause.LIFETIME, reason, {"lifetime": lifetime})
        self._expired: asyncio.Task[None] | None = None
        self._timer = asyncio.get_running_loop().call_later(lifetime, self._expire)

    def _expire(self) -> None:
        self._expired = asyncio.ensure_future(self.close())

    def _held(self) -> Sandbox:
        """Return the sandbox, until its lifetime is over."""
        if self._is_over:  # the timer may have gone with its loop
            raise SandboxError(self._over.reason, self._over)
        return self._sandbox

    @property
    def _is_over(self) -> bool:
        return time.monotonic() >= self._until

    @property
    def loss(self) -> SandboxLoss | None:
        loss = self._sandbox.loss
        is_closed = loss is None or loss.cause is Cause.CLOSED  # by the timer, then, also in the middle of a call
        return self._over if is_closed and self._is_over else loss

    def refuse_users(self) -> str | None:
        return self._held().refuse_users()

    async def run_command(self, command: Command) -> ExecResult:
        return await self._held().run_command(command)

    async def start_process(self, launch: Launch) -> Process:
        return await self._held().start_process(launch)

    async def open_stream(self, address: int | str, timeout: float) -> Stream:
        return await self._held().open_stream(address, timeout)

    async def run_python(
        self, code: str, *, timeout: float = DEFAULT_TIMEOUT, max_output: int = MAX_OUTPUT
    ) -> PythonResult:
        return await self._held().run_python(code, timeout=timeout, max_output=max_output)

    async def read_file(self, path: str, *, max_bytes: int = MAX_FILE) -> bytes:
        return await self._held().read_file(path, max_bytes=max_bytes)

    async def write_file(self, path: str, data: bytes) -> None:
        await self._held().write_file(path, data)

    async def snapshot(self) -> Snapshot:
        return await self._held().snapshot()

    async def restore(self, snapshot: Snapshot) -> str | None:
        return await self._held().restore(snapshot)

    async def close(self) -> None:
        self._timer.cancel()
        await self._give_back(self)

    async def end(self) -> None:
        """Close the sandbox itself."""
        await self._sandbox.close()


def _wake(turn: asyncio.Future[None]) -> None:
    if not turn.done():  # it may have been cancelled
        turn.set_result(None)


async def _answers(sandbox: Sandbox) -> bool:
    try:
        return not (await sandbox.run_python("", timeout=HEALTH_TIMEOUT)).state_lost
    except SandboxError:
        return False


async def _discard(sandbox: Sandbox) -> None:
    with contextlib.suppress(SandboxError):
        await sandbox.close()
