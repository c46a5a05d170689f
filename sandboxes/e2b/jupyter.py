"""A microVM of E2B's code interpreter: Python runs in its Jupyter kernel, and all else is the agent's.

The kernel is one of our own (a "code context"), in `WORK`, so that commands and Python see each other's files, and it
gives up the rights of root before it sees the model's code. What differs from the agent's interpreter:

- Code may use IPython's own lines (`%timeit`). Values come as their `repr`, whatever richer form they have; what is
  displayed beyond that, such as a plot, is dropped.
- What Python leaves running ends with the next timeout or with the sandbox, not with the next command.
- The order of what Python and its subprocesses print is not kept.
- E2B's template lets every process of the microVM become root (its Jupyter server runs as root and asks for no token).
  So code that wants to can outlive a timeout, though not the sandbox, and `kill_all` is not promised.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import shlex
from collections.abc import Awaitable
from typing import TYPE_CHECKING, Any, TypeVar

from agent_rl.errors import SandboxError
from agent_rl.sandboxes.agent.frames import MAX_TEXT
from agent_rl.sandboxes.agent.streams import Capture
from agent_rl.sandboxes.agent.worker import shorten
from agent_rl.sandboxes.calls import DEFAULT_TIMEOUT, MAX_OUTPUT, WORK, PythonResult, check_call
from agent_rl.sandboxes.client.answers import without_sandbox
from agent_rl.sandboxes.client.fate import EndedByCodeError
from agent_rl.sandboxes.client.hosted import LinkedSandbox
from agent_rl.sandboxes.e2b import kernel
from agent_rl.sandboxes.e2b.link import USER, E2BLink

if TYPE_CHECKING:
    from e2b_code_interpreter import Context, Execution, OutputMessage, Result

T = TypeVar("T")
PATIENCE = 30.0
"""Seconds that the service has for what is not the model's code, such as to start a kernel."""
MAX_FLOOD = 64 * 1024 * 1024
"""Characters that one call may print and display: the SDK keeps all of them until the call is over."""
PREPARE = f"{inspect.getsource(kernel.prepare)}\nprepare(get_ipython(), {WORK!r}, {USER!r})\ndel prepare"
"""The first piece of code that a kernel of ours runs."""
SWEEP = "python3 -I -S -c " + shlex.quote(f"{inspect.getsource(kernel.sweep)}\nsweep({USER!r})")
"""For root, outside the agent's namespace."""
_ENDED = ("ContextRestarting", "WebSocketError", "UnexpectedEndOfExecution")
"""The errors, without a traceback, by which the service says that a kernel has ended."""


class _FloodError(Exception):
    """A call printed more than is kept in memory."""


class JupyterSandbox(LinkedSandbox):
    """A sandbox whose interpreter is a Jupyter kernel; `await ready()` comes first."""

    def __init__(self, link: E2BLink, *, name: str = "", expires: float) -> None:
        super().__init__(link, name=name, expires=expires)
        self._machine: Any = link.machine  # an AsyncSandbox of e2b_code_interpreter's
        self._gone = link.gone
        self._context: Context | None = None

    async def ready(self, timeout: float) -> None:
        """Wait for the agent, and for a kernel.

        Raises:
            SandboxError: if either doesn't come.
        """
        await super().ready(timeout)
        async with self._turn:
            self._context = await self._served(self._machine.create_code_context(cwd=WORK))
            await self._prepare()

    async def run_python(
        self, code: str, *, timeout: float = DEFAULT_TIMEOUT, max_output: int = MAX_OUTPUT
    ) -> PythonResult:
        """Run code in the kernel, which keeps its variables from call to call."""
        check_call(timeout, max_output)
        try:
            code.encode()
        except UnicodeEncodeError as error:  # which JSON can't carry
            return PythonResult("", "", error=f"UnicodeEncodeError: {error}\n")
        try:
            return await self._run_code(self._run_in_turn(code, timeout, max_output), is_foreign=bool(code))
        except EndedByCodeError as end:
            return without_sandbox(end)

    async def _run_in_turn(self, code: str, timeout: float, keep: int) -> PythonResult:
        async with self._turn:
            self._check_held()
            return await self._run(code, timeout, keep)

    async def _run(self, code: str, timeout: float, keep: int) -> PythonResult:
        loop = asyncio.get_running_loop()
        start = loop.time()
        heard = _Heard(keep)
        running: asyncio.Task[Execution] = loop.create_task(self._execute(code, heard))
        running.add_done_callback(lambda task: task.cancelled() or task.exception())  # marks it as retrieved
        gone = loop.create_task(self._gone.wait())
        try:
            await asyncio.wait((running, gone), timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
            expired = not running.done()
            value, error, lost = (None, None, True) if expired else self._outcome(running)
            if lost:
                await self._replace()
            if expired:  # what was printed comes when the kernel has ended
                await asyncio.wait((running,), timeout=PATIENCE if self.fate.lost is None else 0)
        except asyncio.CancelledError:
            replacing = loop.create_task(self._replace())
            while not replacing.done():  # else the next call would be killed, too
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.wait((replacing,))
            raise
        finally:
            running.cancel()
            gone.cancel()
        self._check_held()
        limit, cut = min(keep, MAX_TEXT), heard.out.cut or heard.err.cut
        out, err = (kept.take().decode("utf-8", "backslashreplace") for kept in (heard.out, heard.err))
        return PythonResult(
            out,
            err,
            shorten(value, limit),
            shorten(error, limit),
            timed_out=expired,
            truncated=cut,
            state_lost=lost,
            seconds=loop.time() - start,
        )

    async def _execute(self, code: str, heard: _Heard) -> Execution:
        on = {"on_stdout": heard.stdout, "on_stderr": heard.stderr, "on_result": heard.result}
        return await self._machine.run_code(code, context=self._context, timeout=0, **on)  # timeouts are ours

    def _outcome(self, running: asyncio.Task[Execution]) -> tuple[str | None, str | None, bool]:
        """Return the value, the error, and whether the kernel is to be replaced.

        Raises:
            SandboxError: if the service failed.
        """
        failure = running.exception()
        if isinstance(failure, _FloodError):
            return None, f"the interpreter was ended: it printed more than {MAX_FLOOD} characters", True
        if failure is not None:
            self._lose(f"the code interpreter failed: {failure!r}")
            self._check_held()
        execution = running.result()
        error = execution.error
        if error is not None and error.name in _ENDED and not error.traceback:
            return None, f"the interpreter ended: {error.value}", True
        if execution.execution_count == 1:  # that was the preparation's, in the kernel that we know
            return None, "the interpreter had ended before this call", True
        return execution.text, error and (error.traceback or f"{error.name}: {error.value}"), False

    async def _replace(self) -> None:
        """Kill Python's processes and start another kernel; if that fails, the sandbox is lost."""
        if self.fate.lost is not None:
            return
        with contextlib.suppress(SandboxError):
            await self._served(self._machine.commands.run(SWEEP, user="root", timeout=0))
            await self._served(self._machine.restart_code_context(self._context))
            await self._prepare()

    async def _prepare(self) -> None:
        done = await self._served(self._execute(PREPARE, _Heard(MAX_TEXT)))
        if done.error is not None:
            self._lose(f"its kernel can't be used: {done.error.name}: {done.error.value}")
            self._check_held()

    async def _served(self, call: Awaitable[T]) -> T:
        """Wait for the service, for so long.

        Raises:
            SandboxError: if it fails; the sandbox is lost then.
        """
        try:
            async with asyncio.timeout(PATIENCE):
                return await call
        except Exception as error:  # the SDK's have no common root
            self._lose(f"the code interpreter failed: {error!r}")
            raise SandboxError(f"the sandbox was lost: {self.fate.lost}") from error


class _Heard:
    """The captured output of a call."""

    def __init__(self, keep: int) -> None:
        self.out, self.err = Capture(-1, keep), Capture(-1, keep)
        self._total = 0

    def stdout(self, message: OutputMessage) -> None:
        self._count(message.line)
        self.out.add(message.line.encode("utf-8", "backslashreplace"))

    def stderr(self, message: OutputMessage) -> None:
        self._count(message.line)
        self.err.add(message.line.encode("utf-8", "backslashreplace"))

    def result(self, result: Result) -> None:
        self._count(*(text for text in vars(result).values() if isinstance(text, str)))

    def _count(self, *texts: str) -> None:
        self._total += sum(map(len, texts))
        if self._total > MAX_FLOOD:
            raise _FloodError
