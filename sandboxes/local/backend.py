"""Sandboxes on this machine, without a daemon and without root: jails, or Landlock domains where there can't be any.

    sandboxes = LocalSandboxes()
    sandbox = await sandboxes.open(owner="episode-7")
    result = await sandbox.run_python("print(6 * 7)")
    await sandboxes.close()

A zygote (`zygote.py`), started with an empty environment, forks them: nothing of this process's memory, environment
or descriptors is in them, and when this process ends, however it does, so do they.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import MappingProxyType

from agent_rl.errors import ConfigError, SandboxError
from agent_rl.sandboxes.agent.agent import ENVIRONMENT
from agent_rl.sandboxes.base import Capabilities, Guarantee, Limits
from agent_rl.sandboxes.client.backend import AgentSandboxes
from agent_rl.sandboxes.client.recorded import RecordedSandbox
from agent_rl.sandboxes.local.lease import START_TIMEOUT, Lease
from agent_rl.sandboxes.local.packages import check_requirements, provide
from agent_rl.sandboxes.local.spec import Spec
from agent_rl.sandboxes.registry import register_sandbox

TIERS = ("jail", "landlock", "unsafe")
ESSENTIAL = frozenset({Guarantee.FILES, Guarantee.NETWORK, Guarantee.SIGNALS, Guarantee.KERNEL, Guarantee.KILL_ALL})
"""What a sandbox is not one without; the others bound what it uses up."""
_SO_PASSRIGHTS = 83
BOOT = Path(__file__).with_name("boot.py")
_WITHOUT_CGROUPS: Capabilities = {
    Guarantee.MEMORY: "RSS watchdog, best effort",
    Guarantee.PROCESSES: "RLIMIT_NPROC",
    Guarantee.CPU: "CPU affinity",
}
_CGROUPS = {"memory": Guarantee.MEMORY, "pids": Guarantee.PROCESSES, "cpu": Guarantee.CPU}
"""What each controller keeps."""
MECHANISMS: Mapping[str, Capabilities] = {
    "jail": {
        **_WITHOUT_CGROUPS,
        Guarantee.FILES: "mount namespace, read-only binds",
        Guarantee.NETWORK: "network namespace, seccomp",
        Guarantee.SIGNALS: "PID namespace, seccomp",
        Guarantee.KERNEL: "seccomp, no capabilities",
        Guarantee.DISK: "sized tmpfs",
        Guarantee.KILL_ALL: "PID namespace",
    },
    "landlock": {
        **_WITHOUT_CGROUPS,
        Guarantee.FILES: "Landlock",
        Guarantee.NETWORK: "seccomp: no sockets",
        Guarantee.SIGNALS: "Landlock scope, seccomp",
        Guarantee.KERNEL: "seccomp, no capabilities",
        Guarantee.DISK: None,
        Guarantee.KILL_ALL: "Landlock scope",
    },
    "unsafe": dict.fromkeys(Guarantee),
}
"""What should keep each guarantee, where no cgroup does."""


class NoneWorksError(SandboxError):
    """No kind of local sandbox that was asked for works here."""

    refused: Mapping[str, str] = MappingProxyType({})
    """Why each does not; for "zygote", what the zygote complained of."""

    @classmethod
    def of(cls, refused: Mapping[str, str]) -> NoneWorksError:
        """Return the error with each kind's reason."""
        reasons = "; ".join(f"{kind}: {reason}" for kind, reason in refused.items())
        way_out = "use another backend, or, for code that you trust, allow_unsafe=True"
        error = cls(f"no local sandbox works here ({reasons}); {way_out}")
        error.refused = refused
        return error


@register_sandbox("local")
class LocalSandboxes(AgentSandboxes):
    """Opens sandboxes on this machine.

    Args:
        limits: of each sandbox, unless it is opened with others.
        python: the interpreter that runs inside, with its standard library; this one if left out.
        packages: what pip installs for it, once and on the host, before the first sandbox opens; no others are there.
        require: what has to be guaranteed, as `capabilities` finds; `ESSENTIAL` if left out.
        tier: the kind of sandbox; the first of `TIERS` that works if left out.
        allow_unsafe: where nothing else works, take processes that are limited but not isolated: for code you trust.
        launcher: a command that runs the zygote, which is its arguments, such as `setpriv --reuid=...`.
    """

    hint = "`agent-rl sandbox doctor` says why. Use another backend, or, for code that you trust, allow_unsafe=True"

    def __init__(
        self,
        limits: Limits | None = None,
        *,
        python: str | None = None,
        packages: Sequence[str] = (),
        require: Collection[str] | None = None,
        tier: str | None = None,
        allow_unsafe: bool = False,
        launcher: Sequence[str] = (),
    ) -> None:
        if tier is not None and tier not in TIERS:
            raise ConfigError(f"tier={tier!r}; choose one of {', '.join(TIERS)}")
        if tier == "unsafe" and not allow_unsafe:
            raise ConfigError("tier='unsafe' isolates nothing; if you trust the code, say so: allow_unsafe=True")
        super().__init__(limits, (() if allow_unsafe else ESSENTIAL) if require is None else require)
        self._python = python or sys.executable
        self._packages = check_requirements(packages)
        self._unbuilt: SandboxError | None = None
        """Why there are no packages: a backend asks pip once."""
        self._tiers = (tier,) if tier else TIERS[: 3 if allow_unsafe else 2]
        self._launcher = tuple(launcher)
        self._zygote: _Zygote | None = None
        self._starting = threading.Lock()
        self._slots = 0

    async def claims(self) -> Capabilities:
        """Return by what mechanism each guarantee should be kept."""
        return (await self._running()).claims()

    async def close(self) -> None:
        """Close every sandbox that is still open, and the zygote."""
        await super().close()
        await asyncio.to_thread(self._stop)

    async def spawn(self, owner: str, limits: Limits, lifetime: float) -> RecordedSandbox:
        """Have the zygote fork a sandbox."""
        zygote = await self._running()
        self._slots += 1
        expires = time.monotonic() + lifetime
        spec = Spec(slot=self._slots, lifetime=lifetime, **asdict(limits))
        with contextlib.ExitStack() as taken:
            ours, control = map(taken.enter_context, socket.socketpair())
            held, theirs = map(taken.enter_context, socket.socketpair())
            for sock in (ours, held):
                refuse_descriptors(sock)
            await zygote.send(json.dumps(asdict(spec)).encode(), (control, theirs))
            taken.pop_all()
        control.close()
        theirs.close()
        lease = Lease(held, zygote.cgroup(spec.slot))
        sandbox = RecordedSandbox(
            ours,
            name=owner,
            expires=expires,
            kill=lease.give_up,
            ended=lease.ended,
            host_failure=zygote.failure,
            evidence=lease.evidence,
            direct=True,
        )
        async with self.starting(sandbox):
            await sandbox.ready(START_TIMEOUT)
        return sandbox

    async def _running(self) -> _Zygote:
        """Return the zygote, started if there is none, or none any more."""
        zygote = self._zygote
        return zygote if zygote is not None and zygote.runs() else await asyncio.to_thread(self._start)

    def _start(self) -> _Zygote:
        with self._starting:
            if self._zygote is None or not self._zygote.runs():
                if self._zygote is not None:
                    self._zygote.stop()
                self._zygote = _Zygote(self._python, self._tiers, self._launcher, self._build())
            return self._zygote

    def _stop(self) -> None:
        with self._starting:  # of which a cancelled `open` may be in the middle
            if self._zygote is not None:
                self._zygote.stop()
                self._zygote = None

    def _build(self) -> str:
        """Return the folder of packages; empty if none were asked for."""
        if not self._packages:
            return ""
        if self._unbuilt is None:
            try:
                return str(provide(self._packages, self._python))
            except SandboxError as error:
                self._unbuilt = error
        raise SandboxError(str(self._unbuilt))


class _Zygote:
    """The process that forks sandboxes, from the host's side.

    Raises:
        SandboxError: if it doesn't start, or no kind of sandbox works here.
    """

    def __init__(self, python: str, tiers: Sequence[str], launcher: Sequence[str], packages: str = "") -> None:
        if sys.platform != "linux":
            raise SandboxError(f"local sandboxes need Linux, and this is {sys.platform}; use docker")
        self._commands, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            try:
                self._process = subprocess.Popen(
                    [*launcher, python, "-s", "-S", "-B", str(BOOT), str(theirs.fileno()), ",".join(tiers), packages],
                    pass_fds=[theirs.fileno()],
                    env={**ENVIRONMENT, "PYTHONHASHSEED": "0"},  # sets have the same order in all sandboxes
                    cwd="/",
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.PIPE,
                    start_new_session=True,
                )
            except OSError as error:
                self._commands.close()
                raise SandboxError(f"the zygote of the local sandboxes does not start: {error}") from error
        self._commands.settimeout(START_TIMEOUT)
        try:
            hello = json.loads(self._commands.recv(65536) or b"{}")
        except OSError as error:
            hello = {"error": str(error)}
        self._commands.setblocking(False)
        self.tier = str(hello.get("tier", "none"))
        self._controllers = frozenset(map(str, hello.get("controllers", ())))
        self._cgroups: list[str] = list(hello.get("cgroups", ()))
        if self.tier == "none":
            refused: dict[str, str] = hello.get("refused", {})
            complaint = self.stop().splitlines() or [str(hello.get("error", "" if refused else "it ended at once"))]
            raise NoneWorksError.of(refused | ({"zygote": complaint[-1]} if complaint[-1] else {}))

    def runs(self) -> bool:
        """Whether it is still there: its end of the connection closes before its sandboxes end with it."""
        hung_up = select.poll()
        hung_up.register(self._commands, 0)
        return self._process.poll() is None and self._commands.fileno() >= 0 and not hung_up.poll(0)

    async def failure(self) -> str | None:
        """Return what became of it; None if it runs."""
        return None if self.runs() else "the zygote of the local sandboxes is gone"

    def stop(self) -> str:
        """End it, with all sandboxes; return what it complained of."""
        self._commands.close()
        try:
            complaint = self._process.communicate(timeout=START_TIMEOUT)[1]
        except subprocess.TimeoutExpired:
            self._process.kill()  # its sandboxes end with it
            complaint = self._process.communicate()[1]
        return complaint.decode(errors="replace").strip()

    async def send(self, message: bytes, sockets: Sequence[socket.socket]) -> None:
        """Ask for a sandbox."""
        fds = [sock.fileno() for sock in sockets]
        while True:
            try:
                socket.send_fds(self._commands, [message], fds)
                return
            except BlockingIOError:  # many at once
                await asyncio.sleep(0.002)
            except OSError as error:
                raise SandboxError(f"the zygote of the local sandboxes is gone: {error}; open another one") from error

    def cgroup(self, slot: int) -> list[Path]:
        """Return the folders of a sandbox's cgroup."""
        return [Path(f"{prefix}-{slot}") for prefix in self._cgroups]

    def claims(self) -> Capabilities:
        """Return by what mechanism each guarantee should be kept."""
        limited = {_CGROUPS[controller]: f"cgroup {controller}" for controller in self._controllers}
        return {**MECHANISMS[self.tier], **limited}


def refuse_descriptors(sock: socket.socket) -> None:
    """Have the kernel refuse descriptors that are sent to a socket, where it can (Linux 6.16)."""
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, _SO_PASSRIGHTS, 0)
