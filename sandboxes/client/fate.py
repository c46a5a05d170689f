"""What becomes of a sandbox, from the host's side: by what it was lost, and by whose fault."""

from __future__ import annotations

import signal
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import TypeVar

from agent_rl.core.messages import JSON
from agent_rl.core.sandbox_loss import HOST_ERRORS, Cause, SandboxLoss, find_cause
from agent_rl.errors import SandboxError
from agent_rl.sandboxes.call_clock import counted

T = TypeVar("T")
Evidence = Callable[[bool], Awaitable[Mapping[str, JSON]]]
"""Returns what is known of a sandbox; waits for how its first process ended if told that it has."""
KILLED = (-signal.SIGKILL, 128 + signal.SIGKILL)
"""How a command ends that the kernel killed, by itself or below a shell."""
SAID = {
    Cause.LIFETIME: ", as its lifetime was over; ask for more in open(lifetime=...)",
    Cause.MEMORY: ", as the sandbox had reached its limit of memory",
    Cause.HOST_MEMORY: " by the kernel, as the host had too little memory: the sandbox had not reached its limit",
}
"""What a reason adds by the evidence."""


class EndedByCodeError(Exception):
    """The sandbox is gone, by what its code did."""


class Fate:
    """Whether a sandbox is lost, and how.

    Args:
        expires: when it ends by itself, as `time.monotonic` counts.
        host_failure: says what has failed of what the sandbox runs on; None if nothing has.
        evidence: of how it ended; none if left out.
    """

    def __init__(
        self, expires: float, host_failure: Callable[[], Awaitable[str | None]], evidence: Evidence | None = None
    ) -> None:
        self.lost: str | None = None
        """Why no call can be made any more, as the host noticed it."""
        self.loss: SandboxLoss | None = None
        """The same with its cause, once a call has asked."""
        self.has_run_code = self.is_closed = False
        """Whether foreign code had its turn; whether the host ended it."""
        self._expires, self._host_failure, self._evidence = expires, host_failure, evidence
        self.seen, self._is_over = Cause.AGENT_ENDED, False
        """What was seen of the loss."""

    def note(self, reason: str, seen: Cause) -> None:
        """Record the loss, by what was seen of it."""
        self.lost, self.seen, self._is_over = reason, seen, time.monotonic() >= self._expires

    def error(self) -> SandboxError:
        """Return what a call raises that can't be made."""
        return SandboxError(f"the sandbox was lost: {self.lost}")

    async def attribute(self, call: Awaitable[T]) -> T:
        """Await a call; if the sandbox is lost, find out by whose fault.

        Raises:
            SandboxError: if it is not the code's.
            EndedByCodeError: if it is, as far as can be seen.
        """
        try:
            with counted():
                return await call
        except SandboxError:
            loss = self.loss = self.loss or await self._find()
        except (OSError, MemoryError) as error:
            if isinstance(error, OSError) and error.errno not in HOST_ERRORS:
                raise
            reason = f"the host has too little left for a call: {error!r}"
            raise SandboxError(reason, SandboxLoss(Cause.HOST_RESOURCES, reason)) from error
        if self.is_closed or not loss.is_failure:
            raise SandboxError(f"the sandbox was lost: {loss.reason}", loss)
        raise EndedByCodeError(
            f"the sandbox was lost: {loss.reason}. The code in it ended it; nothing runs in it any more"
        )

    async def check_memory(self) -> None:
        """Ask, after code was killed, whether it was for memory.

        Raises:
            SandboxError: if the kernel killed it though the sandbox had not reached its limit.
        """
        evidence = dict(await self._evidence(False)) if self._evidence else {}
        cause = find_cause(Cause.AGENT_ENDED, has_run_code=True, evidence=evidence)
        if cause is Cause.HOST_MEMORY:
            reason = f"code in the sandbox was killed{SAID[cause]}"
            raise SandboxError(reason, SandboxLoss(cause, reason, evidence))

    async def _find(self) -> SandboxLoss:
        failure, evidence = None, dict[str, JSON]()
        if self.has_run_code and not (self.is_closed or self._is_over):
            failure = await self._host_failure()
            if failure is None and self.seen is Cause.AGENT_ENDED and self._evidence:
                evidence = dict(await self._evidence(True))
        cause = find_cause(
            self.seen,
            has_run_code=self.has_run_code,
            is_closed=self.is_closed,
            is_over=self._is_over,
            host_failure=failure,
            evidence=evidence,
        )
        reason = f"{self.lost}{SAID.get(cause, '')}{'' if failure is None else f'; {failure}'}"
        return SandboxLoss(cause, reason, evidence)
