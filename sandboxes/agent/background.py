"""Processes that outlive a call: started, spoken to and ended by their handle, beside whatever else the agent does.

    start    argv, cwd, env, limits, pty     → handle; or problem
    connect  address, timeout                → handle, of a process that relays between its pipes and a server

These two wait for their turn, like other calls. What follows does not; `id` and `handle` are in every head:

    take     at, keep, now                   → at, ended;  body: at most `keep` bytes of its output, from `at` on
    give     now;     body: for its input    → problem; once there is room
    wait     now                             → code; None while it runs
    shut                                     → problem; its input has ended
    signal   number                          → {}
    resize   pty                             → problem
    logs     keep                            → out, cut;   body: the last of stdout, and of stderr
    drop                                     → {}; the process is ended, and the handle is free
    hurry    the id of one that waits, which is answered now, with what there is; has no answer of its own

The first three wait, but not if it is to be `now`. A `take` says by `at` how much its host has got, so that nothing is
lost if an answer is. Of a process's output the last `TAIL` bytes are kept, and older ones dropped; a relay's is not
read on until it was taken.

Nothing here may keep the agent from its calls. So inputs and outputs don't block, and are served at a limited rate.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import signal
import struct
import termios
import time
from collections.abc import Callable, Sequence

from .frames import Head
from .job import MOST, Job, Tape
from .process_tree import ProcessTree
from .request import Request

RATE, BURST = 1000.0, 64.0
"""Times a second that something is read or written here in the long run, and at once: 1,000 pieces are 64 MB."""
NO_HANDLE = "there is no such process any more"
_EOF = b"\x04"

ORDERS = frozenset(("take", "give", "wait", "shut", "signal", "resize", "logs", "drop", "hurry"))
Reply = Callable[[int, Head, bytes], None]


class Background:
    """The processes of a sandbox that outlive a call.

    Args:
        processes: of the agent.
        reply: sends the answer to a request, by its id.
    """

    def __init__(self, processes: ProcessTree, reply: Reply) -> None:
        self._processes, self._reply = processes, reply
        self._jobs: dict[int, Job] = {}
        self._events: select.epoll | None = None
        self._by_fd: dict[int, Job] = {}
        self._credit, self._counted = BURST, time.monotonic()

    @property
    def roots(self) -> set[int]:
        """The processes that run."""
        return {job.pid for job in self._jobs.values() if job.code is None}

    @property
    def fd(self) -> int | None:
        """Readable when `serve` has something to do; None before the first process."""
        return None if self._events is None else self._events.fileno()

    def pause(self) -> float:
        """Return the seconds until `serve` may be called again; 0: now."""
        now = time.monotonic()
        self._credit = min(BURST, self._credit + (now - self._counted) * RATE)
        self._counted = now
        return max(0.0, (1.0 - self._credit) / RATE)

    def start(self, call: int, run: Callable[[], None], *, foreign: bool, pty: Sequence[int] | None = None) -> Head:
        """Start a process that becomes foreign code, or is a relay; its handle is the number of the call."""
        if not self._processes.is_bounded:
            return {"problem": "a process can't outlive a call here: this sandbox can't tell it from other processes"}
        if len(self._jobs) >= MOST:
            return {"problem": f"{MOST} processes and streams are open; close one"}
        try:
            job = self._open_terminal(run, pty) if pty else self._open_pipes(run, foreign)
        except OSError as error:
            return {"problem": f"it can't be started: {error}"}
        self._events = self._events or select.epoll()
        self._jobs[call] = job
        self._watch(job)
        return {"handle": call}

    def obey(self, order: Request) -> None:
        """Do what is asked of a process; answer now or when it can be."""
        job = self._jobs.get(order.handle)
        if job is None:
            self._reply(order.id, {"problem": NO_HANDLE}, b"")
        elif order.op in ("take", "give", "wait"):
            job.orders[order.id] = order
            self._advance(job)
            if order.now:
                self.hurry(order.id)
        else:
            try:
                answer = self._do(job, order)
            except OSError as error:
                answer = {"problem": f"{order.op}: {error}"}, b""
            self._reply(order.id, *answer)
            self._advance(job)

    def withdraw(self, call: int) -> None:
        """End what was started by a call whose host did not wait for the answer."""
        if call in self._jobs:
            self._drop(call)

    def hurry(self, number: int) -> None:
        """Answer a waiting request with what there is."""
        for job in self._jobs.values():
            order = job.orders.pop(number, None)
            if order is not None and (answer := job.answer(order, hurry=True)):
                self._reply(number, *answer)
                self._watch(job)

    def serve(self) -> None:
        """Read and write what can be."""
        if self._events is None:
            return
        for fd, event in self._events.poll(0, MOST):
            self._credit -= 1
            job = self._by_fd.get(fd)
            if job is not None:
                job.serve(fd, event)
                self._advance(job)

    def settle(self) -> None:
        """Take note of those that have ended, and end what they leave behind in their sessions."""
        for job in self._jobs.values():
            if job.code is None and job.pid in self._processes.ended:
                job.code = self._processes.ended.pop(job.pid)
                with contextlib.suppress(OSError):
                    os.killpg(job.pid, signal.SIGKILL)
                job.close_stdin()
                job.out.fill_last()
                job.err.fill_last()
                self._advance(job)

    def _do(self, job: Job, order: Request) -> tuple[Head, bytes]:
        if order.op == "logs":
            (_, out), (_, err) = (tape.since(tape.end - order.keep, order.keep) for tape in (job.out, job.err))
            return {"out": len(out), "cut": len(out) < job.out.end or len(err) < job.err.end}, out + err
        if order.op == "shut":
            if job.terminal and job.stdin >= 0:
                job.unwritten += _EOF
            else:
                job.is_shut = True
            job.write()
        elif order.op == "signal":
            self._signal(job, order.number)
        elif order.op == "resize":
            if not job.terminal:
                return {"problem": "it has no pty"}, b""
            if job.stdin >= 0:
                _set_size(job.stdin, order.pty or (24, 80))
        elif order.op == "drop":
            self._drop(order.handle)
        return {"problem": None}, b""

    def _drop(self, handle: int) -> None:
        job = self._jobs[handle]
        self._signal(job, signal.SIGKILL)
        job.close()
        for waiting in list(job.orders):
            self.hurry(waiting)
        self._watch(job)
        del self._jobs[handle]

    def _signal(self, job: Job, number: int) -> None:
        if job.code is not None:
            return
        if number == signal.SIGKILL:
            self._processes.end_below(job.pid)
        else:
            with contextlib.suppress(OSError):
                os.kill(job.pid, number)

    def _advance(self, job: Job) -> None:
        """Answer what can be answered, and wait for what is wanted next."""
        for number, order in list(job.orders.items()):
            answer = job.answer(order)
            if answer is not None:
                del job.orders[number]
                self._reply(number, *answer)
        self._watch(job)

    def _watch(self, job: Job) -> None:
        wished = job.wishes()
        if wished == job.watched or self._events is None:
            return
        for fd in job.watched.keys() - wished.keys():
            self._by_fd.pop(fd, None)
            with contextlib.suppress(OSError):  # it is closed, and with that forgotten
                self._events.unregister(fd)
        for fd, mask in wished.items():
            if job.watched.get(fd) is None:
                self._events.register(fd, mask)
            else:
                self._events.modify(fd, mask)
            self._by_fd[fd] = job
        job.watched = wished

    def _open_pipes(self, run: Callable[[], None], foreign: bool) -> Job:
        child = self._processes.start_piped(run, foreign=foreign, may_kill=False)
        return Job(child.pid, child.stdin, Tape(child.out, drops=foreign), Tape(child.err, drops=True), terminal=False)

    def _open_terminal(self, run: Callable[[], None], size: Sequence[int]) -> Job:
        ours, theirs = os.openpty()
        try:
            _set_size(ours, size)

            def become() -> None:
                fcntl.ioctl(0, termios.TIOCSCTTY, 0)
                run()

            pid = self._processes.start(become, (theirs, theirs, theirs), may_kill=False)
        except BaseException:
            os.close(ours)
            raise
        finally:
            os.close(theirs)
        os.set_blocking(ours, False)
        nothing = Tape(-1, drops=True)
        nothing.ended = True
        return Job(pid, ours, Tape(ours, drops=True), nothing, terminal=True)


def _set_size(terminal: int, size: Sequence[int]) -> None:
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", size[0], size[1], 0, 0))
