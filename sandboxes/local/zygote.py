"""The zygote: a process with a clean environment and no foreign descriptors that forks sandboxes for its host.

The host sends a message for each sandbox (a `Spec` as JSON) with two sockets: the agent's end of a connection, and the
lease. A sandbox ends when its host shuts the lease down, when its lifetime is over, or when the host is gone; when
nothing of it runs any more, the zygote closes its end of the lease, and removes in the background what files are left.
All sandboxes end with the zygote.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import select
import signal
import socket
import stat
import sys
import sysconfig
import time
from dataclasses import dataclass, replace
from pathlib import Path

from ..agent import own_program
from ..agent.agent import Agent
from ..agent.frames import CHUNK, Frames, Head, pack
from ..agent.memory_watchdog import Watchdog
from ..agent.process_tree import describe_exit, place
from . import cgroups, homes, jail, landlock, seccomp, syscalls
from .spec import Spec

FIRST_UID = 1 << 28
"""Under root, the code of each sandbox is a user of its own, of numbers that no other user has."""
USERS = 1024
"""How many numbers a zygote has for them."""
RETRY = 0.002
"""Seconds until a cgroup that was still busy is tried again."""
PATIENCE = 5.0
"""Seconds that an agent gets to end by itself."""
READ_ONLY = tuple(dict.fromkeys((sys.base_prefix, sys.base_exec_prefix)))
HIDDEN = tuple(sysconfig.get_path(name) for name in ("purelib", "platlib"))
PROBE = Spec(slot=0, memory=256 << 20, processes=8, cpus=1, disk=1 << 20, files=64, lifetime=PATIENCE)


@dataclass(slots=True)
class SandboxProcess:
    """A sandbox, from its start until its last traces are removed."""

    pid: int
    number: int
    """Which of the host's users its code is, where each sandbox has one of its own."""
    control: socket.socket
    lease: socket.socket
    expires: float
    """When it has to end, and after that, when it is killed; as `time.monotonic` counts."""
    folders: list[Path]
    """Of its cgroup."""
    home: Path | None
    ending: bool = False
    status: int | None = None
    """How its first process ended, if it has."""

    @property
    def dead(self) -> bool:
        """Whether its first process has ended."""
        return self.status is not None


class Zygote:
    """Forks sandboxes, ends them, and removes their traces."""

    def __init__(self, commands: socket.socket, packages: str = "") -> None:
        self.commands, self.packages = commands, packages
        self.tier = "none"
        self.refused: dict[str, str] = {}
        self.wards: dict[int, SandboxProcess] = {}
        self.hierarchies = cgroups.find()
        cgroups.collect(self.hierarchies, homes.alive)
        homes.collect()
        self.wake, woken = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(woken, warn_on_full_buffer=False)

    def choose_tier(self, wanted: tuple[str, ...]) -> None:
        """Take the first kind of sandbox that works, by making one."""
        for tier in wanted:
            self.tier = tier
            reason = self._try()
            if reason is None:
                return
            self.refused[tier] = reason
        self.tier = "none"

    def serve(self) -> None:
        """Fork sandboxes, and clean up after them, until the host is gone."""
        host = os.pidfd_open(os.getppid())  # a host's forks may hold its sockets open
        folders = [str(hierarchy.path / cgroups.ROOT / homes.MARK) for hierarchy in self.hierarchies]
        hello = {
            **{"tier": self.tier, "refused": self.refused},
            **{"controllers": self._controllers(), "cgroups": folders},
        }
        self.commands.send(json.dumps(hello).encode())
        while True:
            ready = self._poll(self.commands.fileno(), host)
            if host in ready:
                break
            if self.commands.fileno() in ready and not self._obey():
                break
        for ward in self.wards.values():
            self.end(ward)
        while self.wards:
            self._poll()

    def spawn(self, spec: Spec, control: socket.socket, lease: socket.socket) -> None:
        """Fork a sandbox, whose agent says over `control` whether it works."""
        number = self._free_number(spec.slot)
        uid = _uid(number)
        spec = replace(spec, read_only=READ_ONLY, hidden=HIDDEN, packages=self.packages)
        spec = replace(spec, cpu_quota="cpu" in self._controllers())
        ward = SandboxProcess(0, number, control, lease, time.monotonic() + spec.lifetime, [], None)
        go, going = -1, -1
        try:
            if self.tier != "jail":
                ward.home = homes.make(spec.slot, uid if self.tier == "landlock" else os.getuid())
                spec = replace(spec, home=str(ward.home / homes.WORK), visible=landlock.visible(spec))
            name = f"{homes.MARK}-{spec.slot}"
            ward.folders = cgroups.make(
                self.hierarchies, name, memory=spec.memory, processes=spec.processes + jail.SPARE, cpus=spec.cpus
            )
            go, going = os.pipe2(os.O_CLOEXEC)
            ward.pid = syscalls.clone(jail.NAMESPACES) if self.tier == "jail" else os.fork()
            if ward.pid == 0:
                os.close(going)
                self._become(spec, control.fileno(), go, uid)
            if self.tier == "jail":
                jail.map_ids(ward.pid, uid, uid if os.geteuid() == 0 else os.getegid())
            cgroups.join(ward.folders, ward.pid)
            with contextlib.suppress(BrokenPipeError):  # it has ended already, and how is seen when it is reaped
                os.write(going, b"!")
        except OSError as error:
            _report(control, error)
            ward.status = None if ward.pid else 1
            self.end(ward)
        finally:
            for fd in (go, going):
                if fd >= 0:
                    os.close(fd)
        self.wards[spec.slot] = ward

    def _free_number(self, slot: int) -> int:
        """Return a number that no other sandbox has, unless there are more sandboxes than numbers."""
        taken = {ward.number for ward in self.wards.values()}
        numbers = ((slot + further) % USERS for further in range(USERS))
        return next((number for number in numbers if number not in taken), slot % USERS)

    def end(self, ward: SandboxProcess) -> None:
        """Kill a sandbox by its cgroup or its first process; where neither takes all along, have its agent do it."""
        if ward.ending:
            return
        ward.ending, ward.expires = True, time.monotonic() + PATIENCE
        with contextlib.suppress(OSError):
            ward.control.shutdown(socket.SHUT_RDWR)
        cgroups.kill(ward.folders)
        if self.tier == "jail" and ward.pid and not ward.dead:
            os.kill(ward.pid, signal.SIGKILL)

    def _obey(self) -> bool:
        """Do what the host asks for; return whether there is a host."""
        message, fds = _receive(self.commands)
        if not message:
            return False
        control, lease = (socket.socket(fileno=fd) for fd in fds)
        lease.setblocking(False)
        self.spawn(Spec(**json.loads(message)), control, lease)
        return True

    def _poll(self, *others: int) -> set[int]:
        """Wait for something, and see to the sandboxes; return which of `others` is readable."""
        events = select.poll()
        leases = {ward.lease.fileno(): ward for ward in self.wards.values() if not ward.ending}
        for fd in (self.wake, *others, *leases):
            events.register(fd, select.POLLIN)
        now = time.monotonic()
        times = [RETRY if ward.dead else ward.expires - now for ward in self.wards.values()]
        ready = {fd for fd, _ in events.poll(max(0.0, min(times)) * 1000 + 1 if times else None)}
        if self.wake in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(self.wake, CHUNK)
            self._reap()
        now = time.monotonic()
        for fd, ward in leases.items():
            if fd in ready or ward.expires <= now:
                self.end(ward)
        for slot, ward in list(self.wards.items()):
            if not ward.dead and ward.ending and ward.expires <= now:
                os.kill(ward.pid, signal.SIGKILL)
            if ward.dead and self._forget(ward):
                del self.wards[slot]
        return ready & set(others)

    def _reap(self) -> None:
        pids = {ward.pid: ward for ward in self.wards.values()}
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG)) != (0, 0):
                if ended[0] in pids:
                    ward = pids[ended[0]]
                    ward.status = os.waitstatus_to_exitcode(ended[1])
                    _testify(ward)

    def _forget(self, ward: SandboxProcess) -> bool:
        """Remove the traces of an ended sandbox; return whether all are gone."""
        ward.folders = cgroups.remove(ward.folders)
        if ward.folders:
            cgroups.kill(ward.folders)  # where nothing else bounds them, some may have got away
            return False
        if ward.home is not None:
            try:
                homes.remove([ward.home])
            except OSError:  # no process is left for it, as code may have them all
                if time.monotonic() < ward.expires:
                    return False  # else the next zygote removes it
        ward.control.close()
        ward.lease.close()
        return True

    def _become(self, spec: Spec, control: int, go: int, uid: int) -> None:
        """Become the sandbox's agent in the process that was just forked; never return."""
        try:
            signal.set_wakeup_fd(-1)
            null = os.open(os.devnull, os.O_RDWR)
            place((null, null, null, control, go))
            if os.read(4, 1) != b"!":
                os._exit(1)
            os.close(4)
            jail.forbid_cores()
            confine = {"jail": jail.confine, "landlock": landlock.confine, "unsafe": jail.confine}[self.tier]
            if self.tier == "jail":
                jail.enter(spec)
            elif self.tier == "landlock":
                landlock.enter(spec, uid if os.geteuid() == 0 else None)
            host = socket.socket(fileno=3)
            packages = jail.PACKAGES if spec.packages and self.tier == "jail" else spec.packages
            agent = Agent(3, 3, home=spec.home, confine=lambda: confine(spec), receive=lambda: _receive(host))
            agent.environment["PATH"] = f"{Path(spec.home).parent / homes.PYTHON}:{agent.environment['PATH']}"
            if packages:
                agent.environment["PYTHONPATH"] = packages
                sys.path.append(packages)  # of the interpreter, too, which is a fork of this process
            if self.tier == "landlock":  # the kernel sends it when the zygote ends; code can't
                signal.signal(signal.SIGTERM, lambda *_: agent.stop())
            if self.tier != "unsafe" and "memory" not in self._controllers():
                agent.processes.on_start = Watchdog(agent.processes.kill, spec.memory).check_soon
            agent.serve()
        except BaseException as error:
            _report(socket.socket(fileno=3), error)
        finally:
            os._exit(1)

    def _try(self) -> str | None:
        """Make a sandbox; return why that doesn't work, or None if it does."""
        ours, control = socket.socketpair()
        lease, theirs = socket.socketpair()
        ours.settimeout(PATIENCE)
        with ours, lease:
            reason = _refusal(self.tier, self.packages)
            if reason is not None:
                return reason
            self.spawn(PROBE, control, theirs)
            ward = self.wards[PROBE.slot]
            while not ward.dead and ours.fileno() not in self._poll(ours.fileno()):
                pass
            if ward.dead:
                ours.setblocking(False)
            head = _first_frame(ours, ward)
        while self.wards:
            self._poll()
        return None if head.get("ready") is True else str(head.get("failed", head))

    def _controllers(self) -> list[str]:
        return [name for hierarchy in self.hierarchies for name in hierarchy.controllers]


def _refusal(tier: str, packages: str) -> str | None:
    """Return what rules a tier out before it is tried."""
    if not seccomp.supported():
        return f"there is no table of system calls for {os.uname().machine}"
    if tier == "landlock" and landlock.abi() < landlock.MIN_ABI:
        return f"the kernel has Landlock {max(0, landlock.abi())}; {landlock.MIN_ABI} is needed (Linux 6.12)"
    if tier == "landlock" and os.geteuid() == 0:
        for wanted, folders in ((sys.executable, READ_ONLY), (packages, (packages,) if packages else ())):
            if closed := [path for path in _ways(folders) if not path.stat().st_mode & stat.S_IXOTH]:
                return f"code runs as another user, who can't reach {wanted} through {closed[0]}"
    return None


def _ways(paths: tuple[str, ...]) -> list[Path]:
    """Return these folders and all above them."""
    return [folder for path in paths for folder in (Path(path), *Path(path).parents)]


def _first_frame(connection: socket.socket, ward: SandboxProcess) -> Head:
    frames = Frames()
    while (frame := frames.pop()) is None:
        try:
            data = connection.recv(CHUNK)
        except OSError:
            data = b""
        if not data:
            return {"failed": f"its first process {describe_exit(ward.status) if ward.dead else 'did not answer'}"}
        frames.feed(data)
    return frame[0]


def _receive(connection: socket.socket) -> tuple[bytes, list[int]]:
    """Read bytes and descriptors from a Unix socket; no program that is started later inherits them."""
    data, fds, _, _ = socket.recv_fds(connection, CHUNK, 4)
    for fd in fds:  # Python 3.11's recv_fds ignores MSG_CMSG_CLOEXEC
        os.set_inheritable(fd, False)
    return data, fds


def _uid(number: int) -> int:
    """Return which user of the host's a sandbox's code is."""
    if os.geteuid() != 0:
        return os.getuid()
    uid = FIRST_UID + os.getpid() % (1 << 18) * USERS + number
    ranges = [map(int, line.split()) for line in Path("/proc/self/uid_map").read_text().splitlines()]
    return uid if any(start <= uid < start + count for start, _, count in ranges) else landlock.SHARED_UID


def _testify(ward: SandboxProcess) -> None:
    """Tell the host how a sandbox's first process ended, and what its cgroup has counted."""
    evidence = {"status": ward.status, **cgroups.events(ward.folders)}
    with contextlib.suppress(OSError):
        ward.lease.send(json.dumps(evidence).encode() + b"\n")


def _report(control: socket.socket, error: BaseException) -> None:
    """Tell the host why there is no sandbox."""
    with contextlib.suppress(OSError):
        control.send(pack({"failed": str(error) or type(error).__name__}))


def main() -> None:
    """Serve the host at the descriptor that the first argument names; the second lists the tiers to try.

    The third is the folder of packages, if there is one.
    """
    sys.executable = os.path.realpath(sys.executable)  # a virtual environment's link is not in a sandbox
    own_program.codes()  # a sandbox can't read the files
    gc.collect()
    gc.freeze()  # so that the garbage collector of a fork doesn't copy these pages
    commands = socket.socket(fileno=int(sys.argv[1]))
    commands.set_inheritable(False)
    zygote = Zygote(commands, *sys.argv[3:])
    zygote.choose_tier(tuple(sys.argv[2].split(",")))
    zygote.serve()
