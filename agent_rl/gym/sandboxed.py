"""An environment with a sandbox: opened before each episode, on the backend that the config names, closed after it."""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Protocol

from agent_rl.concurrency import call
from agent_rl.core.episode import Episode, Reward
from agent_rl.core.judgement import Judgement
from agent_rl.core.messages import JSON, Message, Step
from agent_rl.core.sandbox_loss import Cause, SandboxLoss
from agent_rl.errors import SandboxError
from agent_rl.gym.env import ToolEnv
from agent_rl.gym.reward import rewards_of_failure
from agent_rl.sandboxes.base import Limits, Sandbox
from agent_rl.sandboxes.call_clock import CallClock, counting
from agent_rl.sandboxes.calls import FileAccessError
from agent_rl.sandboxes.process import ProcessError
from agent_rl.sandboxes.registry import shared_backend
from agent_rl.sandboxes.snapshot import Snapshot
from agent_rl.sandboxes.terminal import Terminal

_log = logging.getLogger(__name__)

HOST_SECONDS = 5.0
"""Within which a sandbox does the least that it can, unless the host is overloaded."""


@dataclass(frozen=True, slots=True)
class SandboxedState:
    """A snapshot of an environment with a sandbox."""

    attributes: object
    sandbox: Snapshot | None
    problem: str
    """Why there is none of the sandbox: what the policy's code left there can't be packed."""
    has_acted: bool


class HasSandbox(Protocol):
    """An environment with a sandbox: `self` of the tools that run code."""

    sandbox: Sandbox


class SandboxedEnv(ToolEnv):
    """A `ToolEnv` with a sandbox: `reset` awaits `self.open_sandbox()`, and tools use `self.sandbox`.

    A sandbox that can't be opened, or is lost to the infrastructure, fails the episode, which is not scored. One that
    the policy ends makes the episode a failure of the policy: it ends with that step, and its rewards are 0
    where they would be more, or raise. `agent_rl.core.sandbox_loss` lists the causes and as what each counts.
    So does what the policy left there that a `step` of the class's own can't read (`FileAccessError`, `ProcessError`).
    """

    limits: ClassVar[Limits | None] = None
    """What its sandboxes may use; the backend's own limits if None."""
    lifetime: ClassVar[float] = 3600.0
    """Seconds that an episode may hold its sandbox. Half of them are the policy's own: if its calls took that long, the
    end of the lifetime counts as its failure."""

    def __init__(self, sandbox: str = "local", sandbox_args: Mapping[str, JSON] | None = None) -> None:
        """Choose the backend.

        Args:
            sandbox: the backend: local, docker, e2b, modal, daytona, remote, or one of `@register_sandbox`.
            sandbox_args: the backend's own options, such as `{"image": "mine:1", "warm": 8}` for docker, or
                `{"interpreter": "jupyter"}` for e2b.

        Raises:
            ConfigError: if there is no such backend, or it does not take these options.
        """
        self._backend = shared_backend(sandbox, sandbox_args or {})
        self._opened: Sandbox | None = None
        self._terminal: Terminal | None = None
        self._has_acted = self._has_broken_step = False
        self._calls = CallClock()

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        if not hasattr(own := cls.step, "is_charged"):  # the class's, or one of a base that knows of no sandbox

            @functools.wraps(own)
            async def step(self: SandboxedEnv, action: Message) -> Step:
                return await self._charged(functools.partial(own, self, action))

            vars(step)["is_charged"] = True
            cls.step = step  # type: ignore[assignment, method-assign]

    @property
    def sandbox(self) -> Sandbox:
        """The episode's sandbox.

        Raises:
            RuntimeError: if it is not open.
        """
        if self._opened is None:
            raise RuntimeError(f"{type(self).__name__} has no sandbox open: await self.open_sandbox() in reset")
        return self._opened

    @property
    def terminal(self) -> Terminal:
        """The episode's terminal, of `make_terminal`.

        Raises:
            RuntimeError: if the sandbox is not open.
        """
        if self._terminal is None or self._terminal.sandbox is not self.sandbox:
            self._terminal = self.make_terminal()
        return self._terminal

    def make_terminal(self) -> Terminal:
        """Return a terminal of `self.sandbox`: override this for another folder to begin in, variables or limits."""
        return Terminal(self.sandbox)

    @property
    def sandbox_loss(self) -> SandboxLoss | None:
        """How the policy ended the sandbox, if it did: by its code, or by using up the time."""
        loss = self._opened.loss if self._opened is not None and self._has_acted else None
        if loss is not None and loss.cause is Cause.LIFETIME and self._has_spent(loss):
            loss = replace(loss, cause=Cause.LIFETIME_SPENT)
        return loss if loss is not None and loss.is_failure else None

    def _has_spent(self, loss: SandboxLoss) -> bool:
        """Whether the policy itself used up a lifetime; else its replies did, or what else the host is slow at."""
        lifetime = loss.evidence.get("lifetime", self.lifetime)  # a pool's may be shorter
        return isinstance(lifetime, int | float) and self._calls.seconds >= lifetime / 2

    async def _charged(self, step: Callable[[], Step | Awaitable[Step]]) -> Step:
        """Take a step; what the policy did to its sandbox ends the episode, and is charged to it.

        Raises:
            SandboxError: if the sandbox was lost before the policy's first act.
        """
        if not self._has_acted and self._opened is not None and (loss := self._opened.loss) is not None:
            raise SandboxError(loss.reason, replace(loss, cause=Cause.UNUSED))
        self._has_acted = True
        before = self._calls.seconds
        try:
            with counting(self._calls):
                taken = await call(step, thread=f"{type(self).__name__}.step" if self.blocking else None)
        except Exception as error:
            if self.sandbox_loss is None:
                if not await self._is_act(error, self._calls.seconds - before, None):
                    raise
                self._has_broken_step = True
            said = f"error: {type(error).__name__}: {error}"
            return Step((Message("user", said),), terminated=True)
        return replace(taken, terminated=True) if self._is_charged else taken

    @property
    def _is_charged(self) -> bool:
        """Whether the policy ended its sandbox, or broke a step by what it left there: it earns nothing then."""
        return self._has_broken_step or self.sandbox_loss is not None

    async def score(
        self, episode: Episode, seconds: float | None = None, judgements: list[Judgement] | None = None
    ) -> tuple[Reward, ...]:
        """Run the `@reward` methods, as `Env.score`; of a policy that ended its sandbox none is above 0 or raises.

        All are 0 if one can't read what the policy left, or gets no answer from its sandbox in time.
        """
        before = self._calls.seconds
        try:
            with counting(self._calls):
                rewards = await super().score(episode, seconds, judgements)
        except Exception as error:
            if not self._is_charged and not await self._is_act(error, self._calls.seconds - before, seconds):
                raise
            rewards = rewards_of_failure(self.reward_components)
        return tuple(reward.without_gain for reward in rewards) if self._is_charged else rewards

    async def _is_act(self, error: Exception, waited: float, most: float | None) -> bool:
        """Whether a step or a reward failed by what the policy left in its sandbox, and not by what the host lacks.

        Args:
            error: the failure.
            waited: seconds that went into calls of sandboxes.
            most: seconds that the rewards may take.

        Raises:
            SandboxError: if the sandbox tells that the host lacks something.
        """
        is_late = isinstance(error, TimeoutError) and most is not None and waited >= most / 2
        if self._opened is None or not self._has_acted:
            return False
        if not (is_late or isinstance(error, FileAccessError | ProcessError)):
            return False
        try:  # a command that is killed has the backend look whether the kernel kills for the host's lack of memory
            await self._opened.exec(["sh", "-c", "kill -9 $$"], timeout=HOST_SECONDS)
        except SandboxError:
            if self.sandbox_loss is None:
                raise
        is_act = (waited < HOST_SECONDS and not is_late) or await self._host_is_quick()
        if is_act:
            _log.info("%s: what the policy left fails its episode: %r", type(self).__name__, error)
        return is_act

    async def _host_is_quick(self) -> bool:
        """Whether a sandbox without the policy's code answers at once, so that the host is not what was slow."""
        try:
            async with asyncio.timeout(6 * HOST_SECONDS):
                await self.sandbox.close()  # its place may be the last one
                fresh = await self._backend.open(owner=type(self).__name__, limits=self.limits, lifetime=60.0)
                try:
                    started = time.monotonic()
                    await fresh.exec(["true"], timeout=HOST_SECONDS)
                    return time.monotonic() - started < HOST_SECONDS
                finally:
                    await fresh.close()
        except (SandboxError, TimeoutError):
            return False

    @classmethod
    def has_snapshots(cls) -> bool:
        """Whether `snapshot` is supported: of the attributes, too."""
        return cls.snapshot_attributes is not None or cls.snapshot is not SandboxedEnv.snapshot

    async def snapshot(self) -> object:
        """Return what has changed since `reset`: the attributes of `snapshot_attributes`, and the sandbox.

        Raises:
            NotImplementedError: if no attributes are declared, or the backend has no snapshots.
        """
        attributes = super().snapshot()
        try:
            return SandboxedState(attributes, await self.sandbox.snapshot(), "", self._has_acted)
        except FileAccessError as error:  # the policy's doing: no reason to break the episode off
            return SandboxedState(attributes, None, str(error), self._has_acted)

    async def restore(self, snapshot: object) -> None:
        """Take a snapshot's state on.

        Raises:
            SandboxError: if the sandbox can't be brought to what it was: `Sandbox.restore` lists the reasons.
            TypeError: if it is no snapshot of this class.
        """
        if not isinstance(snapshot, SandboxedState):
            raise TypeError(f"{type(self).__name__} can't restore a {type(snapshot).__name__}")
        super().restore(snapshot.attributes)
        problem: str | None = snapshot.problem
        if snapshot.sandbox is not None:
            try:
                problem = await self.sandbox.restore(snapshot.sandbox)
            except FileAccessError as error:
                problem = str(error)
        if problem is not None:
            raise SandboxError(f"{type(self).__name__} can't continue from here: {problem}")
        self._has_acted = snapshot.has_acted

    async def open_sandbox(self) -> Sandbox:
        """Open the episode's sandbox.

        Raises:
            SandboxError: if none can be had.
        """
        await self.close()
        self._has_acted = self._has_broken_step = False
        self._calls = CallClock()
        self._opened = await self._backend.open(owner=type(self).__name__, limits=self.limits, lifetime=self.lifetime)
        return self._opened

    async def close(self) -> None:
        """Close the sandbox, and with it whatever ran in it."""
        opened, self._opened = self._opened, None
        if opened is not None:
            await opened.close()
