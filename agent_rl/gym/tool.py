"""Tools: functions that a model may call, with a JSON schema read off their signatures."""

from __future__ import annotations

import asyncio
import inspect
import time
import types
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, update_wrapper
from itertools import count
from typing import Concatenate, Generic, ParamSpec, TypeAlias, TypeVar, cast, overload

from pydantic import ValidationError

from agent_rl.concurrency import is_awaitable, maybe_await, run_together
from agent_rl.core.messages import JSON, Message, ToolCall, ToolErrorKind
from agent_rl.core.meter import sleep_uncounted
from agent_rl.errors import DefinitionError, InfrastructureError, did_you_mean
from agent_rl.gym.cassette import Cassette, cassette
from agent_rl.gym.tool_limits import DEFAULT_TIMEOUT, check_options, pause
from agent_rl.gym.tool_messages import exception_message, explain, failure_message, result_message
from agent_rl.gym.tool_schema import arguments_model, check_arguments, json_schema, parse_docstring
from agent_rl.pacing import Pace
from agent_rl.worker_threads import WorkerCall, in_thread

P = ParamSpec("P")
Q = ParamSpec("Q")
T = TypeVar("T")
Owner = TypeVar("Owner")
R_co = TypeVar("R_co", covariant=True)

MAX_OUTPUT = 65536
"""Characters of a result that the model gets to read by default."""
BLOCKED = 0.5
"""Seconds beyond its timeout that an async tool may take, as the event loop may be busy elsewhere."""


@dataclass(frozen=True, slots=True)
class ToolSpec:
    """A tool as it is described to a model."""

    name: str
    description: str
    parameters: Mapping[str, JSON]
    """A JSON schema of type "object"."""

    def openai(self) -> dict[str, JSON]:
        """Return the entry of this tool in an OpenAI request's `tools`."""
        function: JSON = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": function}


class Tool(Generic[P, R_co]):
    """A function with its spec; called directly it is the plain function, on an instance a plain method."""

    def __init__(
        self,
        function: Callable[P, R_co],
        *,
        name: str | None = None,
        timeout: float | None = DEFAULT_TIMEOUT,
        inline: bool = False,
        max_output: int = MAX_OUTPUT,
        retries: int = 0,
        retry_on: tuple[type[Exception], ...] = (),
        rate: float | None = None,
        ends: bool = False,
        spec: ToolSpec | None = None,
    ) -> None:
        """Make a tool; `tool` explains the options.

        Args:
            function: what is called.
            name: what the model calls it.
            timeout: in seconds.
            inline: whether a sync function runs on the event loop.
            max_output: characters of a result.
            retries: how often a failed call is made again.
            retry_on: exceptions that it is made again after.
            rate: calls per second.
            ends: whether a call that succeeds ends the episode.
            spec: the schema for the model in place of the signature, for tools of another system. The function
                takes any arguments by name and is given them as they are, once all that are required are there.
        """
        update_wrapper(cast(Callable[..., object], self), function)
        self._converted: Callable[[Mapping[str, JSON]], Mapping[str, object]]
        parameters = list(inspect.signature(function).parameters.values())
        name = spec.name if spec else name or getattr(function, "__name__", None)
        if name is None:
            raise DefinitionError(f"@ar.tool({function!r}): decorate a function, such as one that calls it")
        self.function = function
        self.timeout = timeout
        self.inline = inline
        self.max_output = max_output
        self.retries = retries
        more: tuple[type[Exception], ...] = retry_on if isinstance(retry_on, tuple | list) else (retry_on,)
        self.retry_on: tuple[type[Exception], ...] = (InfrastructureError, *more)
        self.ends = ends
        self.is_async = inspect.iscoroutinefunction(function)
        self.is_method = bool(parameters) and parameters[0].name == "self"
        check_options(self, name, rate)
        self.rate_limit = Pace(rate) if rate else None
        if spec:
            self.spec = spec
            self.parameters = tuple(cast("Mapping[str, JSON]", spec.parameters.get("properties", {})))
            self._converted = partial(check_arguments, spec.name, spec.parameters)
            return
        if self.is_method:
            del parameters[0]
        self.parameters = names = tuple(p.name for p in parameters)
        arguments = arguments_model(name, function, parameters)
        validate = arguments.__pydantic_validator__.validate_python
        # a model's __dict__ holds its fields in the order they were declared in
        self._converted = lambda given: dict(zip(names, validate(dict(given)).__dict__.values(), strict=True))
        self.spec = ToolSpec(name, parse_docstring(function.__doc__)[0], json_schema(arguments))

    def __repr__(self) -> str:
        return f"Tool({self.spec.name!r})"

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R_co:
        """Call the plain function: no validation, no timeout."""
        return self.function(*args, **kwargs)

    @overload
    def __get__(self, instance: None, owner: type) -> Tool[P, R_co]: ...
    @overload
    def __get__(self: Tool[Concatenate[Owner, Q], T], instance: Owner, owner: type) -> Callable[Q, T]: ...
    def __get__(self, instance: object, owner: type) -> object:
        """Bind as a method does, so that an environment can call its own tools."""
        return self if instance is None or not self.is_method else types.MethodType(self.function, instance)

    def bind(self, arguments: Mapping[str, JSON], instance: object) -> Callable[[], object]:
        """Validate and convert `arguments`; return the call that is left to make.

        Raises:
            pydantic.ValidationError: if they don't fit the schema.
        """
        converted = self._converted(arguments)
        function = cast("Callable[..., object]", self.function)
        return partial(function, instance, **converted) if self.is_method else partial(function, **converted)


AnyTool: TypeAlias = Tool[..., object]
_Start: TypeAlias = Callable[[], Awaitable[Message]]


@overload
def tool(function: Callable[P, T], /) -> Tool[P, T]: ...
@overload
def tool(
    *,
    name: str | None = None,
    timeout: float | None = DEFAULT_TIMEOUT,
    inline: bool = False,
    max_output: int = MAX_OUTPUT,
    retries: int = 0,
    retry_on: tuple[type[Exception], ...] = (),
    rate: float | None = None,
    ends: bool = False,
) -> Callable[[Callable[P, T]], Tool[P, T]]: ...
def tool(
    function: Callable[P, T] | None = None,
    /,
    *,
    name: str | None = None,
    timeout: float | None = DEFAULT_TIMEOUT,
    inline: bool = False,
    max_output: int = MAX_OUTPUT,
    retries: int = 0,
    retry_on: tuple[type[Exception], ...] = (),
    rate: float | None = None,
    ends: bool = False,
) -> Tool[P, T] | Callable[[Callable[P, T]], Tool[P, T]]:
    """Make a tool of a free function or of a `ToolEnv` method, sync or async.

    The docstring's first paragraph describes the tool, its `Args:` section the parameters; every parameter needs a
    type that pydantic knows. An async function is awaited; a sync one runs in a worker thread, so that a slow one
    does not hold up other episodes.

    Args:
        function: the function, when used as a bare `@tool`.
        name: what the model calls it; the function's name if left out.
        timeout: seconds until the model reads "timeout"; None waits for ever. A thread can't be killed: a sync
            function that is late is abandoned and continues in the background until it returns.
        inline: run a sync function straight on the event loop: much the fastest, and in order, but nothing else runs
            meanwhile and no timeout applies. For pure computation of microseconds.
        max_output: characters of a result that the model gets to read: half from the head, half from the tail, with a
            line in the gap that says how many were left out.
        retries: how often a call is made again after an InfrastructureError, such as that of a server which is down.
            Before the first there are 0.5 s, before each further one twice as much, or as long as the exception's
            `retry_after` says. Each attempt has the timeout; one that is late is not made again, as it may have worked.
        retry_on: more exceptions to do this after.
        rate: calls per second, retries included, of all episodes of the process together; `rate=1 / 60` is one a
            minute. They start at even distances. The wait for it counts neither for the timeout nor for
            `Budget.seconds`.
        ends: whether a call that succeeds ends the episode, once the other calls of the turn have been made.

    Raises:
        DefinitionError: if no schema can be read off the signature, or the options contradict each other.
    """
    if function is not None:
        if not callable(function):
            raise DefinitionError(f"@ar.tool({function!r}): options have names, such as @ar.tool(timeout=30)")
        return Tool(function)
    return lambda function: Tool(
        function,
        name=name,
        timeout=timeout,
        inline=inline,
        max_output=max_output,
        retries=retries,
        retry_on=retry_on,
        rate=rate,
        ends=ends,
    )


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
        in_order = called is not None and called.is_method and not called.is_async
        answer = partial(_begin_later, begin) if in_order and is_behind else begin()
        if in_order and not isinstance(answer, Message):
            answer, is_behind = partial(_in_turn, lock, answer), True
        answers.append(answer)
    waiting = [a for a in answers if not isinstance(a, Message)]
    if not waiting:
        return cast("tuple[Message, ...]", tuple(answers))
    late = iter(await run_together(waiting))
    return tuple(a if isinstance(a, Message) else next(late) for a in answers)


async def _settled(answer: Message | _Start) -> Message:
    """Wait for an answer, if that has to be."""
    return answer if isinstance(answer, Message) else await answer()


async def _begin_later(begin: Callable[[], Message | _Start]) -> Message:
    """Begin a call that had to wait, and answer it."""
    return await _settled(begin())


async def _in_turn(lock: asyncio.Lock, start: _Start) -> Message:
    """Make a call after those that took the lock before."""
    async with lock:
        return await start()


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
    except (Exception, SystemExit) as error:
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
    except (Exception, SystemExit) as error:
        if isinstance(error, TimeoutError) and clock.expired():  # not one that the tool itself raised
            late = f"timeout: {call.name} took more than {called.timeout:g} s"
            return failure_message(call, ToolErrorKind.TIMEOUT, late)
        if isinstance(error, raised):
            raise
        return exception_message(call, error)
