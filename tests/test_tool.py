"""agent_rl.gym.tool and tool_calls: ways of running, errors as messages."""

import asyncio
import contextvars
import functools
import threading

import pytest
from pydantic import BaseModel, Field

from agent_rl.core.messages import Message, ToolCall, ToolErrorKind
from agent_rl.errors import DefinitionError, InfrastructureError, SandboxError
from agent_rl.gym.tool import Tool, tool
from agent_rl.gym.tool_calls import call_tools
from tests.doubles import Panic


class Point(BaseModel):
    x: int


def call(*tools: Tool, **arguments: object) -> Message:
    """Call the first of `tools` and return its message."""
    (message,) = call_all(tools, ToolCall("c0", tools[0].spec.name, arguments))
    return message


def call_all(tools, *calls: ToolCall) -> tuple[Message, ...]:
    return asyncio.run(call_tools({t.spec.name: t for t in tools}, calls, None))


@tool(inline=True)
def add(a: int, b: int = 1) -> int:
    """Add two numbers."""
    return a + b


async def sleeper() -> str: ...


@pytest.mark.parametrize(
    "make",
    [
        lambda: tool(name="one", inline=True, timeout=5)(lambda: 1),
        lambda: tool(inline=True)(sleeper),
        lambda: tool(timeout=0)(sleeper),
        lambda: tool(max_output=0)(sleeper),
        lambda: tool(timeout=float("nan"))(sleeper),
        lambda: tool(name="two words")(sleeper),
    ],
)
def test_tool_refuses_contradicting_options(make):
    with pytest.raises(DefinitionError):
        make()


# Running


@tool
def in_a_thread(n: int) -> str:
    return f"{n} {threading.current_thread() is threading.main_thread()} {threading.current_thread().daemon}"


@tool
async def awaited(n: int) -> str:
    await asyncio.sleep(0)
    return f"{n} {threading.current_thread() is threading.main_thread()}"


@tool(inline=True)
def inline(n: int) -> str:
    return f"{n} {threading.current_thread() is threading.main_thread()}"


def test_tool_ways_answer_in_call_order():
    names = ("in_a_thread", "awaited", "inline", "nothing", "awaited")
    calls = [ToolCall(f"c{i}", name, {"n": i}) for i, name in enumerate(names)]
    messages = call_all([in_a_thread, awaited, inline], *calls)
    assert [m.tool_call_id for m in messages] == ["c0", "c1", "c2", "c3", "c4"]
    assert [m.name for m in messages] == list(names)
    assert all(m.role == "tool" for m in messages)
    answers = [m.content for m in messages if m.tool_error is None]
    assert answers == ["0 False True", "1 True", "2 True", "4 True"]


def test_tool_calls_of_a_turn_overlap():
    barrier = threading.Barrier(3)

    @tool(timeout=5)
    def meet() -> str:
        barrier.wait()  # passed only if all three are there
        return "met"

    assert [m.content for m in call_all([meet], *[ToolCall(str(i), "meet") for i in range(3)])] == ["met"] * 3


def test_inline_tools_make_no_tasks(monkeypatch):
    async def tasks_made_by(called: Tool, **arguments: object) -> int:
        loop = asyncio.get_running_loop()
        made: list[object] = []
        create_task = loop.create_task
        with monkeypatch.context() as patch:
            patch.setattr(loop, "create_task", lambda *args, **kw: made.append(args) or create_task(*args, **kw))
            calls = [ToolCall(str(i), called.spec.name, arguments) for i in range(2)]
            await call_tools({called.spec.name: called}, calls, None)
        return len(made)

    assert asyncio.run(tasks_made_by(add, a=1)) == 0
    assert asyncio.run(tasks_made_by(awaited, n=1)) == 2


def test_tool_threads_see_context_variables():
    variable = contextvars.ContextVar("variable", default="unset")

    @tool
    def read() -> str:
        return variable.get()

    variable.set("set")
    assert call(read).content == "set"


@pytest.mark.parametrize("way", ["sync", "async"])
def test_tool_timeout_returns_without_waiting(way):
    release = threading.Event()

    @tool(name="late", timeout=0.01)
    def late_sync() -> None:
        release.wait(10)

    @tool(name="late", timeout=0.01)
    async def late_async() -> None:
        await asyncio.sleep(10)

    message = call(late_sync if way == "sync" else late_async)
    assert not release.is_set()
    assert message.tool_error is ToolErrorKind.TIMEOUT
    assert message.content == "error: timeout: late took more than 0.01 s"
    release.set()


def test_tool_timeout_error_is_an_exception():
    @tool
    async def fetch() -> None:
        raise TimeoutError("the server")

    assert call(fetch).tool_error is ToolErrorKind.EXCEPTION


# Errors


@pytest.mark.parametrize(
    ("asked", "kind", "content"),
    [
        (ToolCall("c", "add", error="no closing brace"), "malformed", "error: malformed call: no closing brace"),
        (
            ToolCall("c", "ad"),
            "unknown_tool",
            "error: there is no tool 'ad'. Did you mean 'add'? The tools are: add.",
        ),
        (ToolCall("c", "add", {}), "bad_arguments", "error: bad arguments: a: missing"),
        (
            ToolCall("c", "add", {"a": 1, "bb": 2}),
            "bad_arguments",
            "error: bad arguments: bb: no such argument. Did you mean 'b'?",
        ),
        (
            ToolCall("c", "add", {"a": "x"}),
            "bad_arguments",
            "error: bad arguments: a: input should be a valid integer, unable to parse string as an integer (got 'x')",
        ),
    ],
)
def test_tool_bad_calls_return_messages(asked, kind, content):
    assert call_all([add], asked) == (
        Message("tool", content, tool_call_id="c", name=asked.name, tool_error=ToolErrorKind(kind)),
    )


@pytest.mark.parametrize("inline", [True, False])
@pytest.mark.parametrize(
    ("error", "content"),
    [
        (KeyError("x"), "error: KeyError: 'x'"),
        (ValueError(), "error: ValueError"),
        (ValueError("two\n  lines"), "error: ValueError: two lines"),
        (SystemExit(2), "error: SystemExit: 2"),
    ],
    ids=repr,
)
def test_tool_exception_is_one_line(inline, error, content):
    @tool(inline=inline)
    def broken() -> None:
        raise error

    message = call(broken)
    assert (message.content, message.tool_error) == (content, ToolErrorKind.EXCEPTION)


@pytest.mark.parametrize("inline", [True, False])
def test_tool_raising_stop_iteration_is_an_exception(inline):
    @tool(inline=inline, timeout=None if inline else 2)
    def broken() -> None:
        next(iter(()))

    assert call(broken).tool_error is ToolErrorKind.EXCEPTION


def test_tool_long_message_is_cut():
    @tool(inline=True)
    def broken() -> None:
        raise ValueError("x" * 10_000)

    assert len(call(broken).content) < 600


def test_tool_validation_error_is_an_exception():
    @tool(inline=True)
    def broken() -> None:
        Point.model_validate({})

    assert call(broken).tool_error is ToolErrorKind.EXCEPTION


@pytest.mark.parametrize("others", [0, 1], ids=["alone", "beside another"])
@pytest.mark.parametrize("inline", [True, False])
def test_tool_infrastructure_errors_propagate(inline, others):
    @tool(inline=inline)
    def lost() -> None:
        raise SandboxError("gone")

    with pytest.raises(SandboxError, match="gone"):
        call_all([lost, awaited], ToolCall("a", "lost"), *[ToolCall("b", "awaited", {"n": 1})] * others)


def test_tool_error_cancels_its_siblings():
    seen: list[str] = []

    @tool
    async def slow() -> None:
        try:
            await asyncio.sleep(10)
        except asyncio.CancelledError:
            seen.append("cancelled")
            raise

    @tool
    async def lost() -> None:
        await asyncio.sleep(0)
        raise InfrastructureError("gone")

    with pytest.raises(InfrastructureError):
        call_all([slow, lost], ToolCall("a", "slow"), ToolCall("b", "lost"))
    assert seen == ["cancelled"]


def test_tool_call_is_cancelled_with_its_turn():
    async def main() -> None:
        task = asyncio.create_task(call_tools({"forever": forever}, [ToolCall("a", "forever")], None))
        await asyncio.sleep(0.001)
        task.cancel()
        await task

    @tool
    async def forever() -> None:
        await asyncio.sleep(10)

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(main())


@pytest.mark.parametrize("inline", [True, False])
def test_tool_keyboard_interrupt_propagates(inline):
    @tool(inline=inline)
    def interrupted() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        call(interrupted)


# Results


def test_tool_result_without_json_is_an_exception():
    @tool(inline=True)
    def broken() -> object:
        return threading.Lock()

    message = call(broken)
    assert message.tool_error is ToolErrorKind.EXCEPTION
    assert "type lock has no JSON form" in message.content


# As a function


@pytest.mark.parametrize("options", [{}, {"inline": True}, {"retries": 1}])
def test_tool_awaits_what_a_plain_wrapper_returns(options):
    async def look(seconds: float) -> str:
        await asyncio.sleep(seconds)
        return "seen"

    @functools.wraps(look)
    def counted(*args, **kwargs):
        return look(*args, **kwargs)

    assert call(tool(**options)(counted), seconds=0.0).content == "seen"
    if not options:
        assert call(tool(timeout=0.01)(counted), seconds=9.0).tool_error is ToolErrorKind.TIMEOUT


def test_tool_still_works_as_function_and_method():
    class Shop:
        base = 10

        @tool
        def price(self, item: int) -> int:
            """Price it."""
            return self.base + item

    assert add(1, b=2) == 3
    assert Shop().price(2) == 12
    assert isinstance(Shop.price, Tool)
    assert Shop.price.__doc__ == "Price it."
    assert list(Shop.price.spec.parameters["properties"]) == ["item"]


@pytest.mark.parametrize("options", [{}, {"inline": True}], ids=["thread", "inline"])
def test_tool_cuts_long_results_in_the_middle(options):
    @tool(max_output=11, **options)
    def say(text: str) -> str:
        return text

    assert call(say, text="x" * 11).content == "x" * 11
    assert call(say, text="abcdefghijklmnop").content == "abcdef\n[... 5 characters left out ...]\nlmnop"


def test_tool_floods_are_cut_by_default():
    @tool
    async def flood() -> str:
        return "x" * 10_000_000

    assert len(call(flood).content) < 70_000


def test_tool_takes_constraints_and_defaults_of_pydantic():
    @tool
    def page(n: int = Field(3, ge=1, description="Which."), *, query: str = Field(description="What.")) -> str:  # type: ignore[assignment]
        return f"{query} {n!r}"

    assert page.spec.parameters["properties"] == {
        "n": {"type": "integer", "default": 3, "minimum": 1, "description": "Which."},
        "query": {"type": "string", "description": "What."},
    }
    assert page.spec.parameters["required"] == ["query"]
    assert call(page, query="a").content == "a 3" and call(page, query="a", n=0).tool_error is not None


@pytest.mark.parametrize("options", [{}, {"inline": True}], ids=["thread", "inline"])
def test_tool_panic_is_a_message(options):
    @tool(**options)
    def broken() -> None:
        raise Panic("at the disco")

    assert call(broken).content == "error: Panic: at the disco"
