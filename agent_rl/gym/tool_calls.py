"""The making of a turn's tool calls: each ends as a message, with a result or with what went wrong."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from itertools import count
from typing import TypeAlias, cast

from pydantic import ValidationError

from agent_rl.concurrency import ENDING, is_awaitable, maybe_await, run_together
from agent_rl.core.messages import Message, ToolCall, ToolErrorKind
from agent_rl.core.meter import sleep_uncounted
from agent_rl.errors import did_you_mean
from agent_rl.gym.cassette import Cassette, cassette
from agent_rl.gym.tool import AnyTool
from agent_rl.gym.tool_limits import pause
from agent_rl.gym.tool_messages import exception_message, explain, failure_message, result_message
from agent_rl.worker_threads import WorkerCall, in_thread

BLOCKED = 0.5
"""Seconds beyond its timeout that an async tool may take, as the event loop may be busy elsewhere."""

_Start: TypeAlias = Callable[[], Awaitable[Message]]


async def call_tools(tools: Mapping[str, AnyTool], calls: Sequence[ToolCall], instance: object) -> tuple[Message, ...]:
    """Make all calls of a turn; return one tool message per call, in the calls' order.

    Sync methods are called in that order, one after the other, as one may change what the next one reads. All other
    calls are made at once. What goes wrong with a call comes back as its message, `tool_error` set and the content
    starting with "error: ". No task is made as long as at most one call has to be waited for.

    Args:
        tools: by name.
        calls: of one assistant message.
        instance: the `self` of tools that are methods.

    Raises:
        InfrastructureError: if a tool raised it, as soon as it did; the other calls are cancelled.
    """
    recorded = cassette.get()
    if len(calls) == 1:  # as most often, and 1 µs faster
        return (await _settled(_begin(tools, calls[0], instance, recorded)),)
    answers: list[Message | _Start] = []
    lock, is_behind = asyncio.Lock(), False  # a lock lets those in that came first
    for call in calls:
        begin = partial(_begin, tools, call, instance, recorded)
        called = tools.get(call.name)
        if called and called.is_method and not called.is_async and (is_behind or not called.inline):
            answers.append(partial(_in_turn, lock, begin))
            is_behind = True
        else:
            answers.append(begin())
    waiting = [a for a in answers if not isinstance(a, Message)]
    if not waiting:
        return cast("tuple[Message, ...]", tuple(answers))
    late = iter(await run_together(waiting))
    return tuple(a if isinstance(a, Message) else next(late) for a in answers)


async def _settled(answer: Message | _Start) -> Message:
    """Wait for an answer, if that has to be."""
    return answer if isinstance(answer, Message) else await answer()


async def _in_turn(lock: asyncio.Lock, begin: Callable[[], Message | _Start]) -> Message:
    """Begin and answer a call after those that took the lock before."""
    async with lock:
        return await _settled(begin())


def _begin(
    tools: Mapping[str, AnyTool], call: ToolCall, instance: object, recorded: Cassette | None
) -> Message | _Start:
    """Answer a call at once, or return a function that starts it."""
    if call.error is not None:
        return failure_message(call, ToolErrorKind.MALFORMED, f"malformed call: {call.error}")
    called = tools.get(call.name)
    if called is None:
        known = f" The tools are: {', '.join(tools)}." if tools else " There are no tools."
        complaint = f"there is no tool '{call.name}'.{did_you_mean(call.name, tools)}{known}"
        return failure_message(call, ToolErrorKind.UNKNOWN_TOOL, complaint)
    try:
        bound = called.bind(call.arguments, instance)
    except ValidationError as error:
        return failure_message(call, ToolErrorKind.BAD_ARGUMENTS, explain(error, called.parameters))
    except Exception as error:  # a validator of the tool's own
        return exception_message(call, error)
    if recorded is not None and not called.is_method and (answer := recorded.answer(call)) is not None:
        return answer
    if called.retries or called.rate_limit:
        return partial(_repeat, called, call, bound)
    if called.is_async:
        return partial(_wait, called, call, cast("Callable[[], Awaitable[object]]", bound))
    if not called.inline:
        return partial(_work, called, call, bound)
    return _answer(called, call, bound)


def _answer(called: AnyTool, call: ToolCall, bound: Callable[[], object]) -> Message | _Start:
    """Answer with what a function returns or raises at once; what it returns may have to be waited for."""
    try:
        value = bound()
        if is_awaitable(value):  # of a wrapper of an async function
            return partial(_wait, called, call, lambda: value)
        return result_message(call, value, called.max_output)
    except BaseException as error:
        if isinstance(error, ENDING):
            raise
        return exception_message(call, error)


async def _work(called: AnyTool, call: ToolCall, bound: Callable[[], object]) -> Message:
    """Make a sync call in a worker thread; the tool's timeout is for one that is not quick."""
    running = WorkerCall(bound, f"tool {call.name}", quick=True)
    if await running.returns_quickly():
        return await _settled(_answer(called, call, running.finished))
    return await _wait(called, call, running.result)


async def _repeat(called: AnyTool, call: ToolCall, bound: Callable[[], object]) -> Message:
    """Make a call at its tool's rate; make it again where the tool says so."""
    start = cast("Callable[[], Awaitable[object]]", bound)
    if not called.is_async:
        start = partial(in_thread, bound, f"tool {call.name}", quick=True)
    for done in count():
        if called.rate_limit:
            await called.rate_limit.wait(sleep=sleep_uncounted)
        try:
            return await _wait(called, call, start, raised=called.retry_on if done < called.retries else ())
        except called.retry_on as error:
            if done == called.retries:
                raise
            await asyncio.sleep(pause(done, error))
    raise AssertionError


async def _wait(
    called: AnyTool,
    call: ToolCall,
    start: Callable[[], Awaitable[object]],
    *,
    raised: tuple[type[Exception], ...] = (),
) -> Message:
    """Wait for a call, within the tool's timeout; some exceptions are `raised` instead of shown to the model."""
    started = time.monotonic()
    try:
        async with asyncio.timeout(called.timeout) as clock:
            value = await maybe_await(await start())
        if (
            called.is_async
            and called.timeout is not None
            and (seconds := time.monotonic() - started) > called.timeout + BLOCKED
        ):
            why = f"it took {seconds:.1f} s without an await; make it a sync function, which runs in a thread"
            return failure_message(call, ToolErrorKind.TIMEOUT, f"timeout: {call.name} has {called.timeout:g} s: {why}")
        return result_message(call, value, called.max_output)
    except BaseException as error:
        if isinstance(error, ENDING):
            raise
        if isinstance(error, TimeoutError) and clock.expired():  # not one that the tool itself raised
            late = f"timeout: {call.name} took more than {called.timeout:g} s"
            return failure_message(call, ToolErrorKind.TIMEOUT, late)
        if isinstance(error, raised):
            raise
        return exception_message(call, error)
