"""The in-sandbox agent: executes the host's requests.

It speaks frames (`wire`) over a byte stream: a socket in a local jail, stdin and stdout in a container. It takes one
request at a time, in order, and answers each with one frame that carries the request's `id`:

    exec    argv, cwd, env, timeout, keep, limits;
                                           body: stdin    → code, expired, out, cut;               body: the output
    python  timeout, keep;         body: the code → value, error, plots, lost, expired, out, cut; body: see `plots`
    lend    and four descriptors (`interpreter.Ends`)    → {}
    end                                                   → error
    read    path, keep                                    → problem;                               body: the file
    write   path;                          body: the file → problem
    pack    keep                                          → problem;                               body: all files
    unpack                         body: what was packed  → problem
    cancel  the id of a call, which ends as if its time had expired; has no answer of its own
    start, connect, and what is asked of the processes that they start: as `background` has it

A request's head is `{"op": "exec", "id": 7, ...}`, an answer's `{"id": 7, "code": 0, ...}`. The output is stdout, which
is `out` bytes long, and stderr; at most `keep` bytes of each (`cut` says whether there were more). The texts are those
of `value` and `error`, whose lengths are in the head (None: there is none). `code` is -n after signal n. `lost` says
that the interpreter is gone, with its variables. `problem` is None if all went well. An answer `{"id", "failed"}` says
that the agent could not do its part. Of `read` and `pack`, frames `{"id", "part": true}` may come first,
with all of the body but the rest. The first frame, `{"ready": true}`, answers nothing. When the stream ends, so does
everything in the sandbox.

A host that can pass descriptors drives the interpreter itself: `lend` starts one at the other ends of what the host
holds, and `end` ends it, with everything else, and says how it had ended if it had. Then the agent sleeps through a
call, which takes half as long.

When a command ends or its time expires, everything but the interpreter and what was started to outlive it is killed;
when the time of Python expires, the interpreter is, too. So that this misses nothing, the agent is PID 1 of its own
namespace, or in a Landlock domain that it can't signal out of.

The interpreter is forked from an agent that has read nothing yet. Later it is a program of its own: in a fork, code
could find what came with earlier requests.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, cast

from . import background, call_limits, files, relay, worker, workplace
from .background import Background
from .frames import CHUNK, Frames, Head, pack, write_all
from .interpreter import FLOOD, Ends, Interpreter, connect, start
from .plots import answer_to_body
from .process_tree import NAP, ProcessTree, describe_exit
from .request import Request
from .streams import Capture, Feed, Parts, take_all

ENVIRONMENT = {"PATH": "/usr/local/bin:/usr/bin:/bin", "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1", "MPLBACKEND": "Agg"}
ENVIRONMENT |= {"MALLOC_ARENA_MAX": "1"}  # else each thread reserves 64 MiB of the address space, which is limited
_WITHOUT_INPUT = ("lend", "end", "python")
"""Requests that bring nothing which an interpreter that is started for them may not see."""
DYING = 0.25
"""Seconds that an ended process may take from closing its files to being told of, on a busy machine."""
MIN_ERROR = 4096
"""Bytes kept of a command's stderr, at least: why a file can't be read has to fit."""
MAX_PROBLEM = 2048
"""Characters kept of that, which names a path of any length: in the head of an answer each takes up to twelve bytes."""


class Agent:
    """One sandbox's state: its host, the call that it is at, its processes, its interpreter."""

    def __init__(
        self,
        requests: int,
        replies: int,
        *,
        home: str,
        confine: Callable[[], None],
        receive: Callable[[], tuple[bytes, Sequence[int]]] | None = None,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        self.requests, self.replies = requests, replies
        self.receive = receive or (lambda: (os.read(requests, CHUNK), ()))
        """Reads what the host sent, and the descriptors that came along."""
        self.lent: list[int] = []
        self.home = home
        self.environment = {**ENVIRONMENT, "HOME": home, "PATH": _path(), **(variables or {})}
        """The variables of all that runs here."""
        self.frames = Frames()
        self.waiting: deque[Request] = deque()
        self.call = -1
        self.cancelled: set[int] = set()
        self.worker: int | None = None
        self.interpreter: Interpreter | None = None
        """The connections to the worker, if it isn't lent to the host."""
        self.has_inputs = False
        """Whether this process has read what code in a fork of it could find."""
        self.processes = ProcessTree(confine)
        self.background = Background(self.processes, self._reply)

    def serve(self) -> NoReturn:
        """Answer until the host goes away; then end everything."""
        os.environ.clear()
        os.environ.update(self.environment)
        if self.home != files.WORK:
            os.environ["TMPDIR"] = str(Path(self.home).parent / "tmp")
            os.environ["GIT_CONFIG_NOSYSTEM"] = "1"  # one that git may not read ends it
        os.environ["MPLCONFIGDIR"] = f"{os.environ.get('TMPDIR', '/tmp')}/matplotlib"
        try:
            self._serve()
        except (EOFError, ConnectionError):
            self.stop()
        finally:  # a fault of its own: no process is left to control what runs
            self.processes.end()
            os._exit(1)

    def stop(self) -> NoReturn:
        """End everything, this process included."""
        self.processes.end()
        os._exit(0)

    def _serve(self) -> None:
        answers = {
            **{"exec": self._exec, "read": self._read, "write": self._write},
            **{"python": self._python, "lend": self._lend, "end": self._end},
            **{"pack": self._pack, "unpack": self._unpack},
            **{"start": self._start, "connect": self._connect},
        }
        write_all(self.replies, pack({"ready": True}))
        while True:
            self._wait(lambda: bool(self.waiting), float("inf"), {})
            request = self.waiting.popleft()
            self.call = request.id
            try:
                answer, body = answers[request.op](request)
                if self.call in self.cancelled:
                    self.background.withdraw(self.call)
            except OSError as error:
                answer, body = {"failed": worker.shorten(f"{request.op}: {error}", MAX_PROBLEM)}, b""
            self.call = -1
            self.cancelled.discard(request.id)
            self.background.settle()
            self._reply(request.id, answer, body)

    def _reply(self, call: int, answer: Head, body: bytes) -> None:
        write_all(self.replies, pack({"id": call, **answer}, body))

    def _send_part(self, data: bytes) -> None:
        self._reply(self.call, {"part": True}, data)

    # One method per kind of request

    def _exec(self, request: Request) -> tuple[Head, bytes]:
        return self._run(request, self._program(request), foreign=True)

    def _start(self, request: Request) -> tuple[Head, bytes]:
        return self.background.start(request.id, self._program(request), foreign=True, pty=request.pty), b""

    def _connect(self, request: Request) -> tuple[Head, bytes]:
        path = request.address if isinstance(request.address, int) else files.locate(request.address, self.home)
        return self.background.start(request.id, lambda: relay.relay(path, request.timeout), foreign=False), b""

    def _program(self, request: Request) -> Callable[[], None]:
        """Return what makes a process become the program."""

        def become() -> None:
            try:
                os.chdir(files.locate(request.cwd, self.home))
            except OSError as error:
                raise NotADirectoryError(f"cwd {request.cwd}: {error.strerror}") from None
            call_limits.lower(request.limits)
            try:
                os.execvpe(request.argv[0], request.argv, {**os.environ, **request.env})
            except FileNotFoundError:
                raise FileNotFoundError(f"{request.argv[0]}: no such program") from None

        return become

    def _read(self, request: Request) -> tuple[Head, bytes]:
        path = files.locate(request.path, self.home)
        answer, body = self._run(request, lambda: files.send(path, request.keep))
        problem = _problem(answer, body)
        return {"problem": problem}, b"" if problem else body

    def _write(self, request: Request) -> tuple[Head, bytes]:
        path = files.locate(request.path, self.home)
        return {"problem": _problem(*self._run(request, lambda: files.receive(path)))}, b""

    def _pack(self, request: Request) -> tuple[Head, bytes]:
        answer, body = self._run(request, lambda: workplace.pack(workplace.roots(self.home), request.keep))
        problem = _problem(answer, body)
        return {"problem": problem}, b"" if problem else body

    def _unpack(self, request: Request) -> tuple[Head, bytes]:
        return {"problem": _problem(*self._run(request, lambda: workplace.unpack(workplace.roots(self.home))))}, b""

    def _run(self, request: Request, run: Callable[[], None], *, foreign: bool = False) -> tuple[Head, bytes]:
        """Run a process to its end, and end what it leaves behind; without foreign code, pass on its output."""
        expires = time.monotonic() + request.timeout
        child = self.processes.start_piped(run, foreign=foreign)
        out = Capture(child.out, request.keep) if foreign else Parts(child.out, self._send_part)
        captures = (out, Capture(child.err, max(request.keep, MIN_ERROR)))
        try:
            expired = self._wait(
                lambda: child.pid in self.processes.ended,
                expires,
                {capture.fd: capture.drain for capture in captures},
                Feed(child.stdin, request.body, child.close_stdin),
            )
            self.processes.end(spare=self.worker, roots=self.background.roots)
            for capture in captures:
                capture.drain_all()
        finally:
            child.close()
        return take_all({"code": self.processes.ended.pop(child.pid, -signal.SIGKILL), "expired": expired}, captures)

    def _python(self, request: Request) -> tuple[Head, bytes]:
        expires = time.monotonic() + request.timeout
        if self.interpreter is None:
            self.interpreter, ends = connect()
            self._start_worker(ends)
        self.has_inputs = True
        interpreter = self.interpreter
        frame, captures = interpreter.begin(request.id, request.body, request.keep)
        expired = self._wait(
            lambda: interpreter.answer is not None or interpreter.broken or self.worker in self.processes.ended,
            expires,
            {
                interpreter.answers.fileno(): lambda: interpreter.listen(request.id),
                **{capture.fd: capture.drain for capture in captures},
            },
            Feed(interpreter.requests.fileno(), frame),
        )
        if interpreter.flooded:
            raise OSError(FLOOD)
        answer = interpreter.outcome(expired)
        lost = answer["lost"] is True
        if lost:
            ended = self._end_interpreter(now=expired)
            answer["error"] = None if expired else ended
        for capture in captures:
            if capture.total or lost:  # what was printed before the answer was seen with it
                capture.drain_all()
        if lost:
            interpreter.close()
            self.interpreter = None
        return answer_to_body(*take_all(answer, captures), cast("list[bytes]", answer["plots"]))

    def _lend(self, request: Request) -> tuple[Head, bytes]:
        if self.worker is not None:
            self._end_interpreter(now=True)
        ends, self.lent = self.lent, []
        if len(ends) != 4:
            raise OSError(f"{len(ends)} descriptors came along, not 4")
        self._start_worker((ends[0], ends[1], ends[2], ends[3]))
        return {}, b""

    def _end(self, request: Request) -> tuple[Head, bytes]:
        return {"error": self._end_interpreter(now=request.now)}, b""

    def _end_interpreter(self, *, now: bool) -> str:
        """End everything; return how the interpreter had ended: but `now`, who closed its channel may be about to."""
        until = time.monotonic() + (0.0 if now else DYING)
        time.sleep(NAP)
        while self.processes.reap() and self.worker not in self.processes.ended and time.monotonic() < until:
            time.sleep(NAP)
        how = f"the interpreter {describe_exit(self.processes.ended.get(self.worker or 0))}"
        self.processes.end(roots=self.background.roots)
        self.processes.ended.pop(self.worker or 0, None)
        self.worker = None
        return how

    # What they share

    def _start_worker(self, ends: Ends) -> None:
        """Start a worker, whose code finds nothing that came with other requests."""
        has_inputs = self.has_inputs or bool(self.waiting) or self.frames.has_more
        self.worker = start(self.processes, self.home, ends, forked=not has_inputs)

    def _wait(
        self,
        done: Callable[[], bool],
        expires: float,
        readers: Mapping[int, Callable[[], bool]],
        feed: Feed | None = None,
    ) -> bool:
        """Serve what comes in until `done`; return whether the time expired, or the call was cancelled, before.

        Args:
            done: looked at whenever something happened.
            expires: as `time.monotonic` counts.
            readers: what to call when a descriptor is readable; False ends that.
            feed: what is to be written meanwhile.
        """
        events = select.poll()
        wanted = dict.fromkeys((self.requests, self.processes.wake, *readers), select.POLLIN)
        if feed is not None and feed.push():
            wanted[feed.fd] = select.POLLOUT
        for fd, mask in wanted.items():
            events.register(fd, mask)
        while not done():
            left = expires - time.monotonic()
            if left <= 0 or self.call in self.cancelled:
                return True
            left = min(left, self._pace(events))
            for fd, _ in events.poll(None if left == float("inf") else left * 1000 + 1):
                if fd == self.requests:
                    self._receive()
                elif fd == self.processes.wake:
                    os.read(fd, CHUNK)
                    self.processes.reap()
                    self.background.settle()
                elif fd == self.background.fd:
                    self.background.serve()
                elif feed is not None and fd == feed.fd:
                    if not feed.push():
                        events.unregister(fd)
                elif not readers[fd]():
                    events.unregister(fd)
        return False

    def _pace(self, events: select.poll) -> float:
        """Wait for the processes in the background, too, unless they have had their share; return until when."""
        if self.background.fd is None:
            return float("inf")
        pause = self.background.pause()
        events.register(self.background.fd, 0 if pause else select.POLLIN)
        return pause or float("inf")

    def _receive(self) -> None:
        """Take what the host sent."""
        data, lent = self.receive()
        self.lent += lent
        if not data:
            raise EOFError("the host is gone")
        self.frames.feed(data)
        while (frame := self.frames.pop()) is not None:
            head, body = frame
            if head["op"] == "cancel":
                self._cancel(cast(int, head["id"]))
                continue
            request = Request(body=body, **cast("dict[str, Any]", head))
            self.has_inputs = self.has_inputs or request.op not in _WITHOUT_INPUT
            if request.op not in background.ORDERS:
                self.waiting.append(request)
            elif request.op == "hurry":
                self.background.hurry(request.id)
            else:
                self.background.obey(request)

    def _cancel(self, call: int) -> None:
        if call == self.call or any(request.id == call for request in self.waiting):
            self.cancelled.add(call)
        self.background.withdraw(call)


def _path() -> str:
    """Return where programs are looked for: those beside the interpreter that runs here come first."""
    own, usual = str(Path(sys.executable).parent), ENVIRONMENT["PATH"]
    return usual if own in ("", ".", *usual.split(":")) else f"{own}:{usual}"


def _problem(answer: Head, output: bytes) -> str | None:
    """Return what kept a file from being read or written."""
    if answer["expired"]:
        return "it took too long"
    if answer["code"] == 0:
        return None
    said = output[cast(int, answer["out"]) :].decode(errors="backslashreplace").strip()
    return worker.shorten(said, MAX_PROBLEM) or f"status {answer['code']}"
