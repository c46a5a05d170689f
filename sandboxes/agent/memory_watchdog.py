"""A watchdog over a sandbox's memory, for where no cgroup limits it: best effort.

It runs in the agent, by timers and their signal, and kills all processes when they together hold more than they
may: mapped pages (a shared one counts once), open files in memory, and System V segments. SECURITY.md says what it
misses.

While a process computes, it looks every `PERIOD`; while none does, ever less often, with timers on the processor time
of each, so that it knows when one continues.
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

PERIOD, REST = 0.05, 60.0
"""Seconds from look to look, while a process computes, and at most."""
START = 0.0001
"""Seconds of processor time after which a process counts as active."""
SHARE = 0.05
"""The share of a processor that may be spent on looking, however many processes there are and signals come."""
_PAGE = os.sysconf("SC_PAGE_SIZE")
_SHM_INFO = 14


class Watchdog:
    """Looks whenever SIGALRM comes; forged ones make it look, no more."""

    def __init__(self, kill: Callable[[], None], limit: int) -> None:
        """Begin.

        Args:
            kill: ends all processes but this one at once; it may come between any two steps of this process.
            limit: bytes.
        """
        self._kill, self._limit = kill, limit
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._memory_device = _device_of_files_in_memory()
        self._used: dict[int, int] = {}
        """Nanoseconds of processor time, by process, at the last look."""
        self._timers: dict[int, ctypes.c_void_p] = {}
        self._earliest = 0.0
        self._pause = PERIOD
        self._looking = False
        signal.signal(signal.SIGALRM, lambda *_: self._wake())
        signal.setitimer(signal.ITIMER_REAL, PERIOD)

    def check_soon(self) -> None:
        """Look soon: there is a process that was not there."""
        if self._pause > PERIOD:  # else it will, and is not put off
            self._pause = PERIOD
            signal.setitimer(signal.ITIMER_REAL, PERIOD)

    def _wake(self) -> None:
        if self._looking:  # a signal in the midst of this
            return
        self._looking = True
        wait = self._earliest - time.monotonic()
        if wait <= 0:
            start = time.process_time()
            self._pause = min(2 * self._pause, REST) if self._look() else PERIOD
            calm = (time.process_time() - start) / SHARE
            self._earliest = time.monotonic() + calm
            wait = max(self._pause, calm)
        signal.setitimer(signal.ITIMER_REAL, wait)
        self._looking = False

    def _look(self) -> bool:
        """Kill all if they hold too much; return True if all are idle and a CPU timer is armed for each."""
        if self._pause > PERIOD and self._used == _processor_times(self._used):
            return True  # no process ran, so nothing can have changed
        pids = list(_descendants(os.getpid()))
        if self._held(pids) > self._limit:
            self._kill()
        used = _processor_times(pids)
        idle, self._used = used == self._used, used
        for pid in self._timers.keys() - used.keys():
            self._libc.timer_delete(self._timers.pop(pid))
        return idle and all(list(map(self._arm_cpu_timer, pids)))

    def _arm_cpu_timer(self, pid: int) -> bool:
        """Arm a signal for when a process computes again; return whether that worked."""
        if pid not in self._timers:
            timer = ctypes.c_void_p()
            if self._libc.timer_create(_clock(pid), None, ctypes.byref(timer)) != 0:
                return False
            self._timers[pid] = timer
        once = (ctypes.c_long * 4)(0, 0, 0, int(START * 1e9))
        if self._libc.timer_settime(self._timers[pid], 0, once, None) != 0:  # of another, who had this number before
            self._libc.timer_delete(self._timers.pop(pid))
            return False
        return True

    def _held(self, pids: list[int]) -> int:
        """Return the bytes held in all; 0 if a cheap upper bound is within the limit."""
        files = sum({key: size for pid in pids for key, size in self._files_in_memory(pid)}.values())
        shared = files + self._segments()
        resident = {pid: _resident(pid) for pid in pids}
        if sum(resident.values()) + shared <= self._limit:
            return 0
        own = mapped = 0
        for pid in pids:
            pss, of_shared = _proportional(pid) or (resident[pid], 0)
            own, mapped = own + pss - of_shared, mapped + of_shared
        return own + max(mapped, shared)  # most of what is shared is in both

    def _files_in_memory(self, pid: int) -> Iterator[tuple[int, int]]:
        """Yield the inode and size of each file that is in no folder and open here."""
        for entry in _listed(f"/proc/{pid}/fd"):
            try:
                status = entry.stat()
            except OSError:  # it is gone
                continue
            if status.st_dev == self._memory_device:
                yield status.st_ino, status.st_blocks * 512

    def _segments(self) -> int:
        """Return the bytes of all System V segments of this namespace."""
        info = (ctypes.c_ulong * 6)()  # struct shm_info: used_ids, shm_tot, shm_rss, shm_swp, ...
        return info[2] * _PAGE if self._libc.shmctl(0, _SHM_INFO, info) >= 0 else 0


def _device_of_files_in_memory() -> int:
    fd = os.memfd_create("probe")
    try:
        return os.fstat(fd).st_dev
    finally:
        os.close(fd)


def _descendants(pid: int) -> Iterator[int]:
    """Yield all that descend from a process."""
    for task in _listed(f"/proc/{pid}/task"):
        for child in _read(f"/proc/{pid}/task/{task.name}/children").split():
            yield int(child)
            yield from _descendants(int(child))


def _resident(pid: int) -> int:
    """Return the mapped bytes of a process, shared ones included."""
    fields = _read(f"/proc/{pid}/statm").split()
    return int(fields[1]) * _PAGE if fields else 0


def _proportional(pid: int) -> tuple[int, int] | None:
    """Return a process's share of mapped bytes, and its part in shared memory; None if it can't be read."""
    rows = (line.split() for line in _read(f"/proc/{pid}/smaps_rollup").splitlines()[1:])
    sizes = {row[0]: int(row[1]) * 1024 for row in rows}
    return (sizes["Pss:"], sizes.get("Pss_Shmem:", 0)) if "Pss:" in sizes else None


def _processor_times(pids: Iterable[int]) -> dict[int, int]:
    """Return the processor time of each process, ns; -1 if it has ended."""
    times = {}
    for pid in pids:
        try:
            times[pid] = time.clock_gettime_ns(_clock(pid))
        except OSError:
            times[pid] = -1
    return times


def _clock(pid: int) -> int:
    """Return the clock of a process's processor time, as the kernel numbers it."""
    return (~pid << 3) | 2


def _listed(path: str) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(path) as entries:
            return list(entries)
    except OSError:  # it is gone, or forbids to look
        return []


def _read(path: str) -> str:
    try:
        return Path(path).read_text(errors="replace")
    except OSError:  # it is gone
        return ""
