"""The processes of a sandbox: started with pipes, reaped, and ended without missing one."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import signal
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

PATIENCE = 5.0
"""Seconds that killed processes get to disappear: one that is short of processor time takes its time to die."""
NAP = 0.0005
"""Seconds between two looks. Never spin: what was killed needs the sandbox's share of the processor to die."""
PROC = Path("/proc")
_PR_SET_DUMPABLE, _PR_SET_CHILD_SUBREAPER = 4, 36
_LINGER = 1.0
"""Seconds for which processes are ended one by one, until all are: new ones may be made as fast."""
_IPC_RMID, _SHM_STAT, _SHM_INFO = 0, 13, 14


@dataclass(slots=True)
class Child:
    """A started process and this side's non-blocking ends of its pipes."""

    pid: int
    stdin: int
    out: int
    err: int

    def close_stdin(self) -> None:
        """Tell it that no more comes."""
        if self.stdin >= 0:
            os.close(self.stdin)
        self.stdin = -1

    def close(self) -> None:
        """Close the pipes."""
        self.close_stdin()
        os.close(self.out)
        os.close(self.err)


class ProcessTree:
    """All descendants of this process, which reaps them."""

    def __init__(self, confine: Callable[[], None]) -> None:
        self._confine = confine
        """Called in each process that will run foreign code: what it may do less than this one."""
        self.on_start: Callable[[], None] = lambda: None
        """Called after each process that was started."""
        self.ended: dict[int, int] = {}
        """How those ended that `start` made, by process id: the exit status, or minus the signal."""
        self._known: set[int] = set()
        self._libc = ctypes.CDLL(None)
        self._prctl = self._libc.prctl
        self._prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        self._prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)  # foreign code of the same user can't trace this process
        for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
            signal.signal(number, signal.SIG_IGN)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self.wake, woken = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        """Readable when a process may have ended."""
        signal.set_wakeup_fd(woken, warn_on_full_buffer=False)
        self.is_bounded = _signals_are_bounded()
        """Whether this process can signal no others, so that all that it can signal are its own."""

    def start(
        self, run: Callable[[], None], descriptors: Sequence[int], *, foreign: bool = True, may_kill: bool = True
    ) -> int:
        """Run a function in a new process, of a new session; return its number.

        Args:
            run: ends by exec, or by returning for a status of 0; an OSError ends it with 127 or 126, and its message.
            descriptors: what the process has as 0, 1, 2 and so on; it has no others.
            foreign: whether it will run foreign code; else that can't reach into it.
            may_kill: whether all others are killed if no more can be made. What is started without that keeps its
                own orphans, so that they can be told from others'.

        Raises:
            OSError: if no process can be made.
        """
        pid = self._fork() if may_kill else os.fork()
        if pid == 0:
            if not may_kill:
                self._prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
            self._become(run, descriptors, foreign)
        self._known.add(pid)
        self.ended.pop(pid, None)  # of another one, which had the same number
        self.on_start()
        return pid

    def start_piped(self, run: Callable[[], None], *, foreign: bool, may_kill: bool = True) -> Child:
        """Run a function in a new process, as `start` does, with pipes for stdin, stdout and stderr."""
        inner_in, stdin = os.pipe2(os.O_CLOEXEC)
        out, inner_out = os.pipe2(os.O_CLOEXEC)
        err, inner_err = os.pipe2(os.O_CLOEXEC)
        inner = (inner_in, inner_out, inner_err)
        try:
            pid = self.start(run, inner, foreign=foreign, may_kill=may_kill)
        except OSError:
            for fd in (stdin, out, err):
                os.close(fd)
            raise
        finally:
            for fd in inner:
                os.close(fd)
        for fd in (stdin, out, err):
            os.set_blocking(fd, False)
        return Child(pid, stdin, out, err)

    def reap(self) -> bool:
        """Record the ended processes; return whether any is left."""
        try:
            while (ended := os.waitpid(-1, os.WNOHANG)) != (0, 0):
                pid, status = ended
                if pid in self._known:
                    self._known.remove(pid)
                    self.ended[pid] = os.waitstatus_to_exitcode(status)
        except ChildProcessError:
            return False
        return True

    def end(self, spare: int | None = None, roots: Collection[int] = ()) -> bool:
        """Kill all processes but some; return whether those were spared.

        Args:
            spare: a process, without what descends from it.
            roots: processes, with all that descends from them.

        Raises:
            OSError: if a process can't be killed.
        """
        if (spare is not None or roots) and self.is_bounded and self._end_others(spare, roots):
            return True
        until = time.monotonic() + PATIENCE
        while True:
            self.kill()
            if not self.reap():
                if self.is_bounded:
                    self._remove_segments()
                return False
            if time.monotonic() > until:
                raise OSError(f"processes that were killed are still there after {PATIENCE:g} s")
            time.sleep(NAP)

    def _remove_segments(self) -> None:
        """Free the System V segments of this namespace: they outlive who made them, and count as held memory."""
        status = (ctypes.c_ulong * 32)()  # more than a struct shmid_ds or shm_info
        for index in range(self._libc.shmctl(0, _SHM_INFO, status) + 1):
            segment = self._libc.shmctl(index, _SHM_STAT, status)
            if segment >= 0:
                self._libc.shmctl(segment, _IPC_RMID, None)

    def kill(self) -> None:
        """Send SIGKILL to every process: the kernel does it in one step, in which none can fork."""
        if self.is_bounded:
            _kill(-1)
        else:  # an orphan becomes a child of this process: repeated, that finds all but a storm
            for pid in _children():
                _kill(pid)

    def end_below(self, root: int) -> None:
        """Kill a process and all that descends from it: first those, as orphans would have another parent."""
        until = time.monotonic() + _LINGER
        with contextlib.suppress(OSError):
            os.kill(root, signal.SIGSTOP)  # it is to make no more
        while time.monotonic() < until:
            self.reap()
            below = _descend({root}, self._look()) - {root}
            if not below:
                break
            for pid in below:
                _kill(pid)
            time.sleep(NAP)
        _kill(root)

    def _end_others(self, spare: int | None, roots: Collection[int]) -> bool:
        """Kill all but some; return whether they are gone: new ones may be made as fast."""
        until, calm = time.monotonic() + _LINGER, 0
        while time.monotonic() < until:
            self.reap()
            try:
                parents = self._look()
            except OSError:
                return False
            kept = {spare, *_descend(roots, parents)}
            others = [pid for pid in parents if pid not in kept]
            calm = 0 if others else calm + 1
            if calm == 2:  # one look can miss the child of a process that ended meanwhile
                return True
            for pid in others:
                if not roots or parents[pid] in parents or parents[pid] in (0, 1, os.getpid()):  # else it has another
                    _kill(pid)
            if others:
                time.sleep(NAP)
        return False

    def _look(self) -> dict[int, int]:
        """Return the parents of all processes that are ours and run, by process."""
        pids = [int(path.name) for path in PROC.iterdir() if path.name.isdigit()]
        parents = {pid: self._parent(pid) for pid in pids}
        return {pid: parent for pid, parent in parents.items() if parent is not None}

    def _parent(self, pid: int) -> int | None:
        """Return a process's parent; None if it isn't ours, or is another's zombie without threads."""
        if pid in (1, os.getpid()):
            return None
        try:
            state, parent, *rest = _stat(pid)
            os.kill(pid, 0)
        except OSError:
            return None
        runs = state != b"Z" or int(parent) == os.getpid() or int(rest[15]) > 1  # threads
        return int(parent) if runs else None

    def _fork(self) -> int:
        try:
            return os.fork()
        except OSError:  # others have used up the processes
            self.end()
            return os.fork()

    def _become(self, run: Callable[[], None], descriptors: Sequence[int], foreign: bool) -> None:
        """Run a function in the process that was just forked; never return."""
        status = 126
        try:
            signal.set_wakeup_fd(-1)
            for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
                signal.signal(number, signal.SIG_DFL)
            os.setsid()
            place(descriptors)
            if foreign:
                self._prctl(_PR_SET_DUMPABLE, 1, 0, 0, 0)
                _offer_to_oom_killer()
            self._confine()
            run()
            status = 0
        except FileNotFoundError as error:
            status = 127
            _complain(error)
        except BaseException as error:
            _complain(error)
        finally:
            os._exit(status)


def describe_exit(status: int | None) -> str:
    """Return how a process ended, by its exit status or minus its signal; None: it had not, and was killed."""
    if status is None:
        return "broke its connection and was killed"
    if status >= 0:
        return f"ended with status {status}"
    return f"was killed by signal {-status}" + (" (out of memory?)" if status == -signal.SIGKILL else "")


def _signals_are_bounded() -> bool:
    """Whether `kill(-1)` reaches no process outside: not even this one's parent."""
    if os.getpid() == 1 or os.getppid() == 0:
        return True
    try:
        os.kill(os.getppid(), 0)
    except PermissionError:
        return True
    return False


def _descend(roots: Collection[int], parents: Mapping[int, int]) -> set[int]:
    """Return these processes and all that descend from them."""
    found: set[int] = set(roots)
    before = -1
    while roots and len(found) > before:
        before = len(found)
        found |= {pid for pid, parent in parents.items() if parent in found}
    return found


def _children() -> list[int]:
    """Return who has this process as its parent."""
    found = []
    for path in PROC.glob("[0-9]*"):
        try:
            if int(_stat(int(path.name))[1]) == os.getpid():
                found.append(int(path.name))
        except OSError:
            continue
    return found


def _stat(pid: int) -> list[bytes]:
    """Return a process's state, parent and so on; in front of them is its name, of any bytes."""
    return (PROC / str(pid) / "stat").read_bytes().rpartition(b")")[2].split()


def started(pid: int) -> int:
    """Return when a process started, in the kernel's ticks: no later one of its number has the same."""
    return int(_stat(pid)[19])


def place(descriptors: Sequence[int]) -> None:
    """Make these descriptors 0, 1, 2 and so on, and close all others."""
    above = [fcntl.fcntl(fd, fcntl.F_DUPFD, 16) for fd in descriptors]  # out of the way of one another
    for i, fd in enumerate(above):
        os.dup2(fd, i)
    os.closerange(len(above), os.sysconf("SC_OPEN_MAX"))


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except OSError:  # it has ended
        return


def _offer_to_oom_killer() -> None:
    """Have the kernel, short of memory, take this process rather than the agent."""
    try:
        (PROC / "self" / "oom_score_adj").write_text("1000")
    except OSError:
        return


def _complain(error: BaseException) -> None:
    """Write to stderr what went wrong, as a program does."""
    reason = str(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
    os.write(2, f"{reason}\n".encode(errors="backslashreplace"))
