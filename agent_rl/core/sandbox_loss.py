"""How an episode lost its sandbox: the causes, by whom each counts, and the rule that finds a loss's cause.

A policy that could leave an episode unscored by ending its own sandbox would do so wherever it can't solve the task. So
what its code did counts as a failure of the task, and only what its code can't cause leaves the episode unscored. The
rule uses what the host saw, and nothing that the code in the sandbox said.
"""

from __future__ import annotations

import errno
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal

from agent_rl.core.messages import JSON
from agent_rl.errors import SandboxError


class Cause(StrEnum):
    """Why a sandbox was lost."""

    MEMORY = "memory"
    """The kernel ended its agent at the sandbox's own limit of memory."""
    AGENT_ENDED = "agent_ended"
    """Its agent ended, or its connection did, and nothing on the host's side did that."""
    AGENT_FAILED = "agent_failed"
    """Its agent answered that it can't do its part: it gets no process, no descriptor or no memory in there."""
    SILENT = "silent"
    """Its agent did not answer in time, while the host's event loop ran."""
    BAD_FRAME = "bad_frame"
    """Its agent sent what is no frame, or no answer to the call."""
    NOT_OPENED = "not_opened"
    """There never was one."""
    UNUSED = "unused"
    """It was lost before any code of the policy ran in it."""
    CLOSED = "closed"
    """The host closed it."""
    LIFETIME = "lifetime"
    """The time was over for which it was opened."""
    LIFETIME_SPENT = "lifetime_spent"
    """The same, and at least half of that time went into calls that the policy made in it."""
    BACKEND_GONE = "backend_gone"
    """What it runs on is gone: the zygote, the Docker engine, the service."""
    HOST_MEMORY = "host_memory"
    """The kernel killed processes in it for memory, though it had not reached its own limit."""
    HOST_RESOURCES = "host_resources"
    """The host has no descriptor, process or memory left for its side of a call."""
    NO_PROGRAM = "no_program"
    """A program that grading needs, such as python3, is not in a fresh sandbox."""


COUNTS_AS: Mapping[Cause, Literal["failure", "infrastructure"]] = {
    Cause.MEMORY: "failure",
    Cause.AGENT_ENDED: "failure",
    Cause.AGENT_FAILED: "failure",
    Cause.SILENT: "failure",
    Cause.BAD_FRAME: "failure",
    Cause.LIFETIME_SPENT: "failure",
    Cause.NOT_OPENED: "infrastructure",
    Cause.UNUSED: "infrastructure",
    Cause.CLOSED: "infrastructure",
    Cause.LIFETIME: "infrastructure",
    Cause.BACKEND_GONE: "infrastructure",
    Cause.HOST_MEMORY: "infrastructure",
    Cause.HOST_RESOURCES: "infrastructure",
    Cause.NO_PROGRAM: "infrastructure",
}
"""A failure is the policy's act: the episode is scored, and earns nothing. Infrastructure leaves it unscored."""

HOST_ERRORS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS, errno.ETOOMANYREFS})
"""What the kernel says to the host where it has too little of something."""


@dataclass(frozen=True, slots=True)
class SandboxLoss:
    """The loss of a sandbox, as the host saw it."""

    cause: Cause
    reason: str = ""
    evidence: Mapping[str, JSON] = field(default_factory=dict)
    """Of the first process: `status`, its exit status, or minus its signal. Of the cgroup: `oom_kills`, how many
    processes the kernel killed, `limit_hits`, how often its own limit was reached, `forks_refused`. Of a pool's:
    `lifetime`, the seconds that it might be held."""

    @property
    def is_failure(self) -> bool:
        """Whether it counts as a failure of the policy."""
        return COUNTS_AS[self.cause] == "failure"


def loss_told_by(error: BaseException) -> SandboxLoss | None:
    """Return how a sandbox was lost, if it is that which the error tells of."""
    return error.loss if isinstance(error, SandboxError) and isinstance(error.loss, SandboxLoss) else None


def find_cause(
    seen: Cause,
    *,
    has_run_code: bool,
    is_closed: bool = False,
    is_over: bool = False,
    host_failure: str | None = None,
    evidence: Mapping[str, JSON] | None = None,
) -> Cause:
    """Return why a sandbox was lost.

    Args:
        seen: by what the host noticed.
        has_run_code: whether foreign code had run in it.
        is_closed: whether the host ended it.
        is_over: whether its lifetime is over.
        host_failure: what became of what it runs on; None if that is well.
        evidence: of its first process and its cgroup, as in `SandboxLoss`.
    """
    if COUNTS_AS[seen] == "infrastructure":
        return seen
    if is_closed:
        return Cause.CLOSED
    if not has_run_code:
        return Cause.UNUSED
    if is_over:
        return Cause.LIFETIME
    if host_failure is not None:
        return Cause.BACKEND_GONE
    if seen is Cause.AGENT_ENDED and evidence and evidence.get("oom_kills"):
        return Cause.MEMORY if evidence.get("limit_hits") else Cause.HOST_MEMORY
    return seen
