"""The stateful interpreter of a sandbox: a process that runs piece after piece of Python in one `__main__`.

The agent sends `{"id", "keep"}` with the code as the body; the answer is `{"id", "value", "error"}`, with the length of
each text (None: there is none), and the texts in the body. What the code prints goes to descriptors 1 and 2, which the
agent drains. Nothing here is a protection: the code that runs can change all of it, and what it answers is its own
business. The limits are drawn around this process.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import functools
import io
import linecache
import os
import signal
import sys
import traceback
import types
from typing import TYPE_CHECKING, NoReturn, cast

from . import plots
from .frames import CHUNK, Frames, pack, write_all

if TYPE_CHECKING:  # it takes as long to import as the rest: only for code that awaits
    import asyncio
    from collections.abc import Coroutine

UNCOUNTED = b"# between cells\n"
"""The beginning of code that is no cell: what restores an interpreter does not show in the numbers of later ones."""
_IS_COROUTINE = 0x80
"""The flag of a code object that makes a coroutine, `inspect.CO_COROUTINE`."""


def serve(requests: int, answers: int) -> NoReturn:
    """Answer requests until the agent closes its end."""
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # an OSError instead, as Python has it
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for fd in (requests, answers):  # who outlives this process holds neither, so that its end is noticed
        os.set_inheritable(fd, False)
    os.register_at_fork(after_in_child=functools.partial(_close, requests, answers))
    for name, fd in (("stdout", 1), ("stderr", 2)):
        raw = io.FileIO(fd, "w", closefd=False)  # by the line, so that what was printed outlives a kill
        text = io.TextIOWrapper(io.BufferedWriter(raw), "utf-8", "backslashreplace", line_buffering=True)
        setattr(sys, name, text)
    sys.stdin = io.TextIOWrapper(io.BufferedReader(io.FileIO(0, closefd=False)), "utf-8", "replace")
    builtins.input = _no_input
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    sys.path.insert(0, "")
    pid, count, frames = os.getpid(), 0, Frames()
    while True:
        while (frame := frames.pop()) is None:
            data = os.read(requests, CHUNK)
            if not data:
                os._exit(0)
            frames.feed(data)
        head, code = frame
        is_cell = not code.startswith(UNCOUNTED)
        count += is_cell
        value, error = _run(code, main.__dict__, f"<cell {count}>" if is_cell else "<between cells>")
        drawn = plots.take()
        _flush()
        if os.getpid() != pid:  # the code forked, and this is the child
            os._exit(0)
        keep = int(str(head["keep"]))
        answer = {"id": head["id"], "value": shorten(value, keep), "error": shorten(error, keep)}
        write_all(answers, pack(*plots.answer_to_body(answer, b"", drawn)))


def shorten(text: str | None, keep: int) -> str | None:
    """Return a text of at most `keep` characters: its head and its tail."""
    if text is None or len(text) <= keep:
        return text
    tail = keep // 2
    return f"{text[: keep - tail]}\n[... {len(text) - keep} characters left out ...]\n{text[len(text) - tail :]}"


def _run(code: bytes, namespace: dict[str, object], name: str) -> tuple[str | None, str | None]:
    """Return the `repr` of a last expression, and the traceback of an exception."""
    try:
        source = code.decode("utf-8", "surrogatepass")
        linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
        value = None
        for part in _compile(source, name):
            value = _evaluate(part, namespace)
        return (None if value is None else str(repr(value))), None
    except BaseException as error:
        return None, _describe(error, name)


def _compile(source: str, name: str) -> list[types.CodeType]:
    """Return the code of all statements but a last expression, if there are any, and of that expression, if it is one.

    A source that is an expression is tried first: to part a tree takes twice the time.
    """
    build = functools.partial(compile, filename=name, flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
    with contextlib.suppress(SyntaxError):
        return [build(source, mode="eval")]
    tree = ast.parse(source, name)
    if not tree.body or not isinstance(last := tree.body[-1], ast.Expr):
        return [build(tree, mode="exec")]
    del tree.body[-1]
    return [build(tree, mode="exec"), build(ast.Expression(last.value), mode="eval")]


def _evaluate(code: types.CodeType, namespace: dict[str, object]) -> object:
    """Run a piece of code, which may await, and return the value of an expression."""
    value = eval(code, namespace)
    if code.co_flags & _IS_COROUTINE:
        return _event_loop().run_until_complete(cast("Coroutine[object, None, object]", value))
    return value


@functools.lru_cache(maxsize=1)
def _event_loop() -> asyncio.AbstractEventLoop:
    """Return the loop of all code that awaits: a task that one piece begins goes on while another awaits."""
    import asyncio

    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    return loop


def _close(*fds: int) -> None:
    for fd in fds:
        with contextlib.suppress(OSError):  # the code has closed it
            os.close(fd)


def _no_input(prompt: object = "", /) -> NoReturn:
    raise EOFError("input() has nobody to answer it here: put what it would return into the code")


def _describe(error: BaseException, name: str) -> str:
    try:
        here = error.__traceback__
        while here is not None and here.tb_frame.f_code.co_filename != name:
            here = here.tb_next  # leaves out this file, and the parser
        error.__traceback__ = here
        return "".join(traceback.format_exception(error))
    except BaseException:
        return f"{type(error).__name__}: an exception that can't be printed"


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except BaseException:  # the code replaced or closed it
            continue
