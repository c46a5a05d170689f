"""The host's side of an agent: a `Sandbox` whose agent answers at the other end of a socket."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TypeVar

from agent_rl.concurrency import LoopLock
from agent_rl.core.messages import JSON
from agent_rl.core.sandbox_loss import HOST_ERRORS, Cause, SandboxLoss
from agent_rl.errors import ConfigError, SandboxError
from agent_rl.sandboxes.agent.frames import (
    CHUNK,
    MAX_ANSWER_HEAD,
    MAX_BODY,
    MAX_STRAYS,
    FrameError,
    Frames,
    Head,
    pack,
)
from agent_rl.sandboxes.agent.plots import answer_from_body
from agent_rl.sandboxes.base import Sandbox
from agent_rl.sandboxes.calls import (
    DEFAULT_TIMEOUT,
    MAX_FILE,
    MAX_OUTPUT,
    Command,
    ExecResult,
    FileAccessError,
    PythonResult,
    check_call,
)
from agent_rl.sandboxes.client.alarm import set_alarm
from agent_rl.sandboxes.client.answers import exec_result, python_result, without_sandbox
from agent_rl.sandboxes.client.beside import Beside, forget
from agent_rl.sandboxes.client.fate import KILLED, EndedByCodeError, Fate
from agent_rl.sandboxes.client.interpreter import DirectInterpreter
from agent_rl.sandboxes.client.parts import Body
from agent_rl.sandboxes.client.processes import AgentProcess, AgentStream, Read, handle_of, of_process, refuse
from agent_rl.sandboxes.client.reading import PAUSE, ReadBudget
from agent_rl.sandboxes.client.send_queue import SendQueue
from agent_rl.sandboxes.process import Launch, Process, Stream

_log = logging.getLogger(__name__)

T = TypeVar("T")
GRACE = 10.0
"""Seconds beyond a call's own timeout until the agent is held to be lost: it ends what is late itself."""
FILE_TIMEOUT = 30.0
EngineOutput = tuple[Head, bytes]


class AgentSandbox(Sandbox):
    """A sandbox that is reached over a socket; `await ready()` comes first.

    Args:
        sock: the connection; it is this object's from now on.
        name: who holds it, for messages.
        expires: when it ends by itself, as `time.monotonic` counts.
        kill: ends the sandbox at once, without waiting; more than once does no harm.
        ended: waits until nothing is left of it; it may return what has failed of what the sandbox runs on.
        host_failure: says that without waiting; `ended` if left out.
        evidence: how its first process ended, and what its cgroup counted, as in `SandboxLoss`; waits for that if told
            that the sandbox has ended.
        decode: takes the agent's bytes out of what the socket brings, where there is more.
        direct: whether the socket carries descriptors, so that the interpreter can be lent.
    """

    def __init__(
        self,
        sock: socket.socket,
        *,
        name: str = "",
        expires: float = float("inf"),
        kill: Callable[[], None],
        ended: Callable[[], Awaitable[str | None]],
        host_failure: Callable[[], Awaitable[str | None]] | None = None,
        evidence: Callable[[bool], Awaitable[Mapping[str, JSON]]] | None = None,
        decode: Callable[[bytes], bytes] | None = None,
        direct: bool = False,
    ) -> None:
        sock.setblocking(False)
        self.name, self._sock = name, sock
        self._kill, self._ended = kill, ended
        self.fate = Fate(expires, host_failure or ended, evidence)
        """Whether it is lost, and how."""
        self._decode, self._direct = decode, direct
        self._interpreter: DirectInterpreter | None = None
        self._frames = Frames(MAX_ANSWER_HEAD)
        self._strays = 0
        """Frames since the last answer that answered nothing, less those of cancelled calls."""
        self._budget = ReadBudget()
        self._turn, self._outgoing = LoopLock(), SendQueue(sock, self._break_off)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._count = 0
        self._call: object = None
        self._answer: asyncio.Future[EngineOutput] | None = None
        self._body = Body()
        self._beside = Beside(self._outgoing.put, lambda answer, timeout: self._watch(answer, timeout + GRACE))

    def __repr__(self) -> str:
        return f"AgentSandbox({self.name!r}{'' if self.fate.lost is None else ', lost'})"

    @property
    def loss(self) -> SandboxLoss | None:
        """How the sandbox was lost, once a call has found out."""
        return self.fate.loss

    async def ready(self, timeout: float) -> None:
        """Wait for the agent's first frame.

        Raises:
            SandboxError: if it doesn't come, or says what went wrong.
        """
        async with self._turn:
            head, _ = await self._await_answer(None, b"", timeout)
        if head.get("ready") is not True:
            reason = str(head.get("failed", head))
            self._lose(reason, Cause.NOT_OPENED)
            raise SandboxError(f"no sandbox could be made: {reason}")

    async def run_command(self, command: Command) -> ExecResult:
        """Run a command to its end; whatever it leaves running in the background is ended, too."""
        head: Head = {"argv": command.argv, "cwd": command.cwd, "env": command.env, "keep": command.max_output}
        head |= {"timeout": command.timeout, "limits": command.limits.given()}
        call = self._request("exec", head, command.input, command.timeout)
        try:
            result = await self._run_code(self._read(call, exec_result))
        except EndedByCodeError as end:
            return ExecResult(-signal.SIGKILL, "", f"{end}\n", sandbox_lost=True)
        if result.returncode in KILLED and not result.timed_out:
            await self.fate.check_memory()
        return result

    async def start_process(self, launch: Launch) -> Process:
        """Start a process that outlives the call."""
        head: Head = {"argv": launch.argv, "cwd": launch.cwd, "env": launch.env, "limits": launch.limits.given()}
        return AgentProcess(self._ask_process, await self._start("start", head | {"pty": launch.pty}))

    async def open_stream(self, address: int | str, timeout: float) -> Stream:
        """Connect to a server in the sandbox."""
        stream = AgentStream(self._ask_process, await self._start("connect", {"address": address, "timeout": timeout}))
        await stream.connected(timeout + FILE_TIMEOUT)
        return stream

    async def run_python(
        self, code: str, *, timeout: float = DEFAULT_TIMEOUT, max_output: int = MAX_OUTPUT
    ) -> PythonResult:
        """Run code in the sandbox's interpreter, which keeps its variables from call to call."""
        check_call(timeout, max_output)
        source = code.encode("utf-8", "surrogatepass")
        if len(source) > MAX_BODY:
            raise ConfigError(f"code of {len(source)} bytes; at most {MAX_BODY} are run")
        if self._direct:
            call = self._run_directly(source, timeout, max_output)
        else:
            call = self._run_by_agent(source, timeout, max_output)
        try:
            result = await self._run_code(self._read(call, python_result), is_foreign=bool(source))
        except EndedByCodeError as end:
            return without_sandbox(end)
        if result.state_lost and not result.timed_out:
            await self.fate.check_memory()
        return result

    async def read_file(self, path: str, *, max_bytes: int = MAX_FILE) -> bytes:
        """Return a regular file's bytes."""
        if not 0 <= max_bytes <= MAX_BODY:
            raise ConfigError(f"max_bytes={max_bytes}; give 0 to {MAX_BODY}")
        return (await self._access_file("read", {"path": path, "keep": max_bytes}, b""))[1]

    async def write_file(self, path: str, data: bytes) -> None:
        """Write a file, and the folders above it."""
        if len(data) > MAX_BODY:
            raise FileAccessError(f"{path} would have {len(data)} bytes; at most {MAX_BODY} are written")
        await self._access_file("write", {"path": path}, data)

    async def close(self) -> None:
        """End everything in it and give back what it held."""
        self.let_go()
        await self._ended()

    def let_go(self) -> None:
        """End everything in it, without waiting for that."""
        self.fate.is_closed = True
        self._lose("the sandbox was closed", Cause.CLOSED)

    async def _access_file(self, op: str, head: Head, body: bytes) -> EngineOutput:
        try:
            answer = await self.fate.attribute(self._request(op, head, body, FILE_TIMEOUT))
        except EndedByCodeError as end:
            raise FileAccessError(str(end)) from None
        if answer[0].get("problem") is not None:
            raise FileAccessError(str(answer[0]["problem"]))
        return answer

    async def _start(self, op: str, head: Head) -> int:
        """Start a process or a relay, and return its handle."""
        return await of_process(self._run_code(self._read(self._request(op, head, b"", FILE_TIMEOUT), handle_of)))

    async def _ask_process(self, op: str, head: Head, body: bytes, timeout: float, read: Read[T]) -> T:
        """Ask something of a process, beside the call whose turn it is."""

        async def ask() -> T:
            self._listen(asyncio.get_running_loop())
            self._count += 1
            result = await self._read(self._beside.ask(op, self._count, head, body, timeout), read)
            if op == "wait" and result in KILLED:
                await self.fate.check_memory()
            return result

        return await of_process(self.fate.attribute(ask()))

    async def _run_code(self, call: Awaitable[T], *, is_foreign: bool = True) -> T:
        """Await a call that runs code; a pool's own, which is empty, is not foreign."""
        self.fate.has_run_code = self.fate.has_run_code or (is_foreign and self.fate.lost is None)
        return await self.fate.attribute(call)

    async def _read(self, call: Awaitable[EngineOutput], read: Callable[[Head, bytes, float], Awaitable[T]]) -> T:
        """Await a call, and read its answer."""
        start = time.perf_counter()
        head, body = await call
        refuse(head)
        try:
            return await read(head, body, time.perf_counter() - start)
        except (KeyError, TypeError) as error:
            self._lose(f"its agent's answer is none: {error}", Cause.BAD_FRAME)
            raise self.fate.error() from None

    async def _request(self, op: str, head: Head, body: bytes, timeout: float) -> EngineOutput:
        async with self._turn:
            return await self._ask(op, head, body, timeout)

    async def _run_by_agent(self, source: bytes, timeout: float, keep: int) -> EngineOutput:
        answer = await self._request("python", {"timeout": timeout, "keep": keep}, source, timeout)
        try:
            return answer_from_body(*answer)
        except FrameError as error:
            self._lose(str(error), Cause.BAD_FRAME)
            raise self.fate.error() from None

    async def _run_directly(self, source: bytes, timeout: float, keep: int) -> EngineOutput:
        async with self._turn:
            self._check_held()
            interpreter = self._interpreter = self._interpreter or await self._lend()
            self._count += 1
            lost = True
            try:
                head, body = await interpreter.run(self._count, source, timeout, keep)
                lost = head["lost"] is True
            except FrameError as error:
                self._lose(str(error))
                self._check_held()
                raise
            except asyncio.CancelledError:
                self._outgoing.put(pack({"op": "end", "id": self._count, "now": True}))
                raise
            finally:
                if lost:
                    interpreter.close()
                    self._interpreter = None
        return head, body

    async def _lend(self) -> DirectInterpreter:
        """Have the agent start an interpreter whose other ends are here."""

        async def bury(now: bool) -> str:
            return str((await self._ask("end", {"now": now}, b"", 0.0))[0].get("error"))

        interpreter = DirectInterpreter(bury)
        try:
            await self._ask("lend", {}, b"", 0.0, interpreter.ends)
        except BaseException:
            interpreter.close()
            raise
        finally:
            interpreter.handed_over()
        return interpreter

    async def _ask(self, op: str, head: Head, body: bytes, timeout: float, fds: Sequence[int] = ()) -> EngineOutput:
        """Send a request, with descriptors, and return the answer; it has to be one's turn."""
        self._count += 1
        try:
            frame = pack({"op": op, "id": self._count, **head}, body)
        except FrameError as error:
            raise ConfigError(f"{op}: {error}") from None
        head, body = await self._await_answer(self._count, frame, timeout + GRACE, fds)
        if "failed" in head:
            self._lose(str(head["failed"]), Cause.AGENT_FAILED)
            self._check_held()
        return head, body

    async def _await_answer(self, call: object, frame: bytes, timeout: float, fds: Sequence[int] = ()) -> EngineOutput:
        """Send a frame and wait for the answer; a cancellation also cancels the call in the agent, and no more."""
        loop = asyncio.get_running_loop()
        self._listen(loop)
        answer: asyncio.Future[EngineOutput] = loop.create_future()
        self._call, self._answer, self._body = call, answer, Body()
        alarm = self._watch(answer, timeout)
        request = self._outgoing.put(frame, fds)
        try:
            return await answer
        except asyncio.CancelledError:
            forget(answer)
            if not self._outgoing.withdraw(request):
                self._strays -= answer.cancelled() or not answer.done()  # then its answer will come, late
                self._outgoing.put(pack({"op": "cancel", "id": call}))
            raise
        finally:
            alarm.cancel()
            self._answer = None

    def _listen(self, loop: asyncio.AbstractEventLoop) -> None:
        """Hear what the agent sends, in this loop from now on."""
        self._check_held()
        if loop is not self._loop:
            self._deafen()
            loop.add_reader(self._sock, self._receive)
            self._outgoing.use(loop)
            self._loop = loop
        self._budget.renew()

    def _deafen(self) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(self._sock)

    def _watch(self, answer: asyncio.Future[EngineOutput], timeout: float) -> asyncio.TimerHandle:
        return set_alarm(
            answer, timeout, GRACE, lambda: self._lose(f"it did not answer within {timeout:g} s", Cause.SILENT)
        )

    def _receive(self) -> None:
        """Read from the agent; drop the answers of cancelled calls, and no more than a few others."""
        if asyncio.get_running_loop() is not self._loop:  # it was about to, when another one began to listen
            return
        try:
            data = self._sock.recv(CHUNK)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            data = b""
        if not data:
            self._lose("its agent ended")
            return
        try:
            self._frames.feed(data if self._decode is None else self._decode(data))
            while (frame := self._frames.pop()) is not None:
                answer = self._answer
                if answer is not None and not answer.done() and frame[0].get("id") == self._call:
                    if (body := self._body.add(*frame)) is not None:
                        answer.set_result((frame[0], body))
                        self._strays, self._body = 0, Body()
                    continue
                self._strays = 0 if self._beside.settle(*frame) else self._strays + 1
                if self._strays > MAX_STRAYS:
                    raise FrameError(f"its agent sent more than {MAX_STRAYS} frames that answer nothing")
        except FrameError as error:
            self._lose(str(error), Cause.BAD_FRAME)
            return
        if self._budget.is_spent(len(data)) and self._loop is not None:
            self._loop.remove_reader(self._sock)
            self._loop.call_later(PAUSE, self._go_on_reading, self._loop)

    def _go_on_reading(self, loop: asyncio.AbstractEventLoop) -> None:
        if loop is self._loop and self.fate.lost is None:
            loop.add_reader(self._sock, self._receive)

    def _break_off(self, error: OSError) -> None:
        cause = Cause.HOST_RESOURCES if error.errno in HOST_ERRORS else Cause.AGENT_ENDED
        self._lose(f"its connection broke: {error}", cause)

    def _check_held(self) -> None:
        if self.fate.lost is not None:
            raise self.fate.error()

    def _lose(self, reason: str, seen: Cause = Cause.AGENT_ENDED) -> None:
        """End the sandbox; a call that waits for an answer fails with the reason."""
        if self.fate.lost is not None:
            return
        self.fate.note(reason, seen)
        _log.info("%s: %s", self.name, reason)
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(self.fate.error())
        self._beside.fail(self.fate.error)
        self._deafen()
        self._outgoing.close()
        self._sock.close()
        if self._interpreter is not None:
            self._interpreter.close()
        self._kill()
