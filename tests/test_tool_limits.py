"""What tools declare: retries, rates, that a call ends the episode; and tools that hang, flood or raise."""

import asyncio
import threading
import time

import pytest

import agent_rl as ar
from agent_rl.core.messages import Message, ToolCall, ToolErrorKind
from agent_rl.core.meter import Meter, meter, sleep_uncounted, time_left, wait_uncounted
from agent_rl.envs.sql import Sql, make_task
from agent_rl.errors import DefinitionError, InfrastructureError, SandboxError
from agent_rl.gym import tool_limits
from agent_rl.gym.tool import Tool, ToolSpec
from agent_rl.gym.tool_calls import BLOCKED, call_tools
from agent_rl.gym.tool_limits import pause
from agent_rl.rollout.episode import EpisodeRun
from agent_rl.rollout.job import Job
from agent_rl.tools.submit import submit

TURN = 0.05
"""Seconds between two turns of a rate here."""


def call(tool: Tool, n: int = 1, **arguments: object) -> tuple[Message, ...]:
    calls = [ToolCall(f"c{i}", tool.spec.name, arguments) for i in range(n)]
    return asyncio.run(call_tools({tool.spec.name: tool}, calls, None))


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The pauses between attempts, which are not waited for."""
    asked: list[float] = []

    def skip(failures: int, error: Exception) -> float:
        asked.append(pause(failures, error))
        return 0

    monkeypatch.setattr("agent_rl.gym.tool_calls.pause", skip)
    return asked


def failing(way: str, errors: list[Exception], **options: object) -> Tool:
    """Return a tool that raises one error after the other, and then returns."""

    def fail() -> str:
        if errors:
            raise errors.pop(0)
        return "done"

    async def fail_later() -> str:
        await asyncio.sleep(0)
        return fail()

    return ar.tool(name="failing", **options)(fail if way == "sync" else fail_later)


@pytest.mark.parametrize("way", ["sync", "async"])
def test_tool_retries_what_it_declares(way, pauses):
    errors = [InfrastructureError("a"), SandboxError("b"), KeyError("c")]
    (message,) = call(failing(way, errors, retries=3, retry_on=(LookupError,)))
    assert (message.content, message.tool_error) == ("done", None)
    assert pauses == [0.5, 1.0, 2.0]


@pytest.mark.parametrize("way", ["sync", "async"])
def test_tool_out_of_retries_fails_as_without(way, pauses):
    with pytest.raises(InfrastructureError, match="third"):
        call(failing(way, [InfrastructureError(text) for text in ("first", "second", "third")], retries=2))
    (message,) = call(
        failing(way, [ValueError(text) for text in ("first", "second")], retries=1, retry_on=(ValueError,))
    )
    assert message.content == "error: ValueError: second"
    assert len(pauses) == 3


@pytest.mark.parametrize("way", ["sync", "async"])
def test_tool_retries_nothing_else(way, pauses):
    errors = [ValueError("the model's doing"), ValueError("again")]
    assert call(failing(way, errors, retries=5))[0].tool_error is ToolErrorKind.EXCEPTION
    assert len(errors) == 1 and not pauses


def test_tool_timeout_is_not_retried(pauses):
    started = []

    @ar.tool(timeout=0.01, retries=5, retry_on=(TimeoutError,))
    async def late() -> None:
        started.append(1)
        await asyncio.sleep(10)

    assert call(late)[0].tool_error is ToolErrorKind.TIMEOUT
    assert started == [1]


def test_pause_heeds_a_server():
    error = InfrastructureError("429")
    assert [pause(n, error) for n in (0, 1, 20)] == [0.5, 1.0, tool_limits.MOST_PAUSE]
    error.retry_after = 7  # type: ignore[attr-defined]
    assert pause(3, error) == 7


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"retries": -1}, "retries=-1"),
        ({"retry_on": ("ValueError",)}, "'ValueError' in retry_on"),
        ({"retry_on": "ValueError"}, "'ValueError' in retry_on"),
        ({"timeout": "5"}, "timeout='5'; give a positive number of seconds, or None"),
        ({"max_output": "2k"}, "max_output='2k'"),
        ({"max_output": 1e4}, r"max_output=10000\.0; give a whole number"),
        ({"retries": 1.5}, r"retries=1\.5; give a whole number"),
        ({"rate": "5"}, "rate='5'"),
        ({"name": 5}, "tool '5': a name"),
        ({"rate": 0}, "rate=0"),
        ({"rate": float("nan")}, "rate=nan"),
        ({"inline": True, "rate": 1}, "drop inline"),
        ({"inline": True, "retries": 1}, "drop inline"),
    ],
)
def test_tool_refuses_options_without_meaning(options, said):
    with pytest.raises(DefinitionError, match=said):
        ar.tool(**{"name": "one", **options})(lambda: 1)


@pytest.mark.parametrize("way", ["sync", "async"])
def test_tool_rate_is_shared_by_threads(way):
    times: list[float] = []

    def note() -> None:
        times.append(time.monotonic())

    async def note_later() -> None:
        note()

    tool = ar.tool(name="note", rate=1 / TURN, timeout=0.001 if way == "async" else 30)(
        note if way == "sync" else note_later
    )
    loops = [threading.Thread(target=call, args=(tool, 3)) for _ in range(2)]
    started = time.monotonic()
    for loop in loops:
        loop.start()
    for loop in loops:
        loop.join()
    times.sort()
    assert len(times) == 6  # none was late, though most waited longer than the timeout
    assert times[-1] - started >= 5 * TURN


class Paced(ar.ToolEnv):
    """Its tool waits for its turn."""

    def reset(self, task, rng):
        return "go"

    @ar.tool(rate=1 / TURN)
    async def quick(self) -> str:
        """Return at once."""
        return "ok"

    def oracle(self):
        yield Message("assistant", tool_calls=tuple(ToolCall(f"c{i}", "quick") for i in range(5)))


def test_rate_waits_are_not_the_environments_time():
    ar.register("paced-v0", tasks=[{}], budget=ar.Budget(turns=1, seconds=60))(Paced)
    job = Job(ar.spec("paced-v0"), {}, seed=0)
    run = EpisodeRun(job, ar.oracle())
    episode = asyncio.run(run.play())
    assert [m.content for m in episode.messages if m.role == "tool"] == ["ok"] * 5
    assert 0 < run.clock.meter.spent < run.clock.seconds - 3.9 * TURN


def test_uncounted_waits_move_the_deadline():
    async def main() -> tuple[float, float, float]:
        started = time.monotonic()
        meter.set(own := Meter())
        async with asyncio.timeout(60) as own.clock:
            before = own.clock.when()
            await asyncio.gather(*(sleep_uncounted(seconds) for seconds in (0.05, 0.2, 0.1)))
            return own.clock.when() - before, own.spent, time.monotonic() - started

    moved, spent, lasted = asyncio.run(main())
    assert moved == pytest.approx(-spent)
    assert 0.199 < moved < lasted + 0.001  # those at the same time once


def test_wait_uncounted_moves_the_deadline_as_long_as_it_lasts(monkeypatch):
    async def main() -> float:
        meter.set(own := Meter())
        async with asyncio.timeout(0.3) as own.clock:
            await wait_uncounted(asyncio.sleep(1.0))
            return time_left()

    monkeypatch.setattr("agent_rl.core.meter.AHEAD", 0.2)
    assert 0 < asyncio.run(main()) <= 0.3


class Ledger(ar.ToolEnv):
    """Its first tool takes a while before it writes what the others read."""

    entries = ()

    @ar.tool
    def slowly(self, text: str) -> None:
        """Write slowly."""
        time.sleep(0.05)
        self.entries = (*self.entries, text)

    @ar.tool(inline=True)
    def at_once(self, text: str) -> None:
        """Write without a thread."""
        self.entries = (*self.entries, text)

    @ar.tool
    async def apart(self) -> int:
        """Count what is written."""
        return len(self.entries)


def test_sync_methods_of_a_turn_are_called_in_order():
    names = ("at_once", "slowly", "at_once", "apart", "slowly", "at_once")
    calls = [ToolCall(str(i), name, {} if name == "apart" else {"text": str(i)}) for i, name in enumerate(names)]
    env = Ledger()
    step = asyncio.run(env.step(Message("assistant", tool_calls=tuple(calls))))
    assert env.entries == ("0", "1", "2", "4", "5")
    assert [message.content for message in step.observation][3] == "1"  # an async one waits for none


# Hanging, flooding, raising


FAULTS = ("flood", "raise", "exit", "hang")
FAULTY = [
    *(
        (way, what, options)
        for way in ("sync", "async")
        for what in FAULTS
        for options in ({}, {"retries": 1, "rate": 1e3})
    ),
    *(("inline", what, {}) for what in FAULTS[:3]),  # inline=True is for what can't hang
    ("blocking", "hang", {}),
]


@pytest.mark.parametrize(("way", "what", "options"), FAULTY)
def test_tool_faults_never_stall_the_loop(way, what, options):
    released = threading.Event()

    def act() -> str:
        if what == "hang":
            released.wait(30)
        if what == "exit":
            raise SystemExit(3)
        if what == "raise":
            raise RuntimeError("x" * 10_000)
        return "head" + "x" * 3_000_000 + "tail"

    async def act_later() -> str:
        await asyncio.sleep(30 if what == "hang" else 0)
        return act()

    async def block() -> None:
        """Hold the event loop up, which is the one thing that can't be prevented: it is named afterwards."""
        time.sleep(0.05 + BLOCKED + 0.1)

    hanging = 0.05 if way == "blocking" else 0.5  # time for some beats, on a busy machine too
    limits = {"inline": True} if way == "inline" else {"timeout": hanging if what == "hang" else 30, **options}
    tool = ar.tool(name="faulty", max_output=1000, **limits)({"async": act_later, "blocking": block}.get(way, act))

    async def main() -> tuple[Message, int]:
        beats = 0

        async def beat() -> None:
            nonlocal beats
            while True:
                beats += 1
                await asyncio.sleep(0.001)

        heart = asyncio.create_task(beat())
        await asyncio.sleep(0)
        (message,) = await call_tools({"faulty": tool}, [ToolCall("c", "faulty")], None)
        heart.cancel()
        return message, beats

    message, beats = asyncio.run(main())
    released.set()
    wanted = {"hang": ToolErrorKind.TIMEOUT, "flood": None}.get(what, ToolErrorKind.EXCEPTION)
    assert message.tool_error is wanted
    assert len(message.content) < 1100
    if what == "flood":
        assert message.content.startswith("head") and message.content.endswith("tail")
        assert "2999008 characters left out" in message.content
    if way == "blocking":
        assert "without an await; make it a sync function" in message.content
    elif what == "hang":
        assert beats > 2


# Calls that end the episode


class Answered(ar.ToolEnv):
    submitted: str | None = None
    extra_tools = (submit,)

    def reset(self, task, rng):
        return "What is 2 + 2?"

    @ar.reward
    def correct(self, episode) -> bool:
        return self.submitted == "4"

    def oracle(self):
        yield Message("assistant", tool_calls=(ToolCall("a", "submit", {"text": "4"}),))
        yield Message(
            "assistant", tool_calls=(ToolCall("b", "submit", {"answer": "4"}), ToolCall("c", "submit", {"answer": "5"}))
        )
        raise AssertionError("the episode has ended")


def test_submit_ends_the_episode():
    ar.register("answered-v0", tasks=[{}])(Answered)
    (episode,) = ar.run("answered-v0", n=1, split="train")
    assert [m.tool_error for m in episode.messages if m.role == "tool"] == ["bad_arguments", None, "exception"]
    assert (episode.outcome, episode.reward, episode.turns) == (ar.Outcome.TERMINATED, 1.0, 2)


class SubmittedSql(Sql):
    """sql-v0 with its answer as a call."""

    submitted: str | None = None
    extra_tools = (submit,)

    @ar.reward
    def correct(self, episode) -> bool:
        return self.submitted == self.answer

    def oracle(self):
        played = super().oracle()
        result = yield next(played)
        yield Message("assistant", tool_calls=(ToolCall("b", "submit", {"answer": played.send(result)}),))
        raise AssertionError("the episode has ended")


def test_submit_suits_a_built_in_environment():
    ar.register("submitted-sql-v0", tasks=make_task)(SubmittedSql)
    assert ar.evaluate("submitted-sql-v0", "oracle", n=4).success.value == 1.0


# Tools of other systems


def test_tool_with_a_spec_passes_arguments_on():
    schema = {"type": "object", "properties": {"class": {"type": "string"}}, "required": ["class"]}
    received = []

    async def forward(**arguments: object) -> str:
        received.append(arguments)
        return "ok"

    tool = Tool(forward, spec=ToolSpec("foreign", "A tool.", schema))
    assert tool.spec.parameters is schema
    assert call(tool, **{"class": "a", "from": 1})[0].content == "ok"
    assert received == [{"class": "a", "from": 1}]
    assert call(tool)[0].content == "error: bad arguments: class: missing"
    closed = Tool(forward, spec=ToolSpec("foreign", "A tool.", {**schema, "additionalProperties": False}))
    (message,) = call(closed, **{"class": "a", "clas": 1})
    assert message.content == "error: bad arguments: clas: no such argument. Did you mean 'class'?"
