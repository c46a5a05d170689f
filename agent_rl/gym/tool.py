"""Tools: functions that a model may call, with a JSON schema read off their signatures."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial, update_wrapper
from typing import Concatenate, Generic, ParamSpec, TypeAlias, TypeVar, cast, overload

from agent_rl.core.messages import JSON
from agent_rl.errors import DefinitionError, InfrastructureError
from agent_rl.gym.tool_limits import DEFAULT_TIMEOUT, check_options
from agent_rl.gym.tool_schema import arguments_model, check_arguments, json_schema, parse_docstring
from agent_rl.pacing import Pace

P = ParamSpec("P")
Q = ParamSpec("Q")
T = TypeVar("T")
Owner = TypeVar("Owner")
R_co = TypeVar("R_co", covariant=True)

MAX_OUTPUT = 65536
"""Characters of a result that the model gets to read by default."""


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
