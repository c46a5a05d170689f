"""Verdicts of grading, whatever the sandbox: what is compared on the host, how, and in which time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from weakref import WeakKeyDictionary

import pytest

from agent_rl.core.messages import JSON
from agent_rl.core.meter import Meter, meter
from agent_rl.errors import ConfigError
from agent_rl.sandboxes import grading
from agent_rl.sandboxes.base import Sandboxes
from agent_rl.sandboxes.calls import ExecResult
from agent_rl.sandboxes.grading import Call, Program, Verdict, _same_lines, grade
from agent_rl.sandboxes.local.backend import LocalSandboxes
from agent_rl.testing import FakeSandbox, FakeSandboxes
from tests.sandbox.backends import skip_if_refused
from tests.sandbox.grading import ADD, RIGHT, Graded, grading_in


@pytest.fixture(scope="module")
def sandboxes(runner: asyncio.Runner) -> Iterator[Sandboxes]:
    sandboxes = LocalSandboxes(require=())
    with skip_if_refused():
        runner.run(runner.run(sandboxes.open()).close())
    yield sandboxes
    runner.run(sandboxes.close())


@pytest.fixture
def graded(sandboxes: Sandboxes, runner: asyncio.Runner) -> Graded:
    return grading_in(sandboxes, runner)


def test_grade_shares_partial_success(graded: Graded) -> None:
    verdict = graded("def add(a, b): return 5", *ADD)
    assert verdict.passed == (True, False) and verdict.share == 0.5
    assert verdict.reasons[1] == "returned 5, not 'ab'"


@pytest.mark.parametrize("text", ["a\n", "a  \nb", "\r\n a\rb\x0bc\u2028", "", " \n\n", "a\n\nb\n\n"])
def test_same_lines_is_equality_of_split_lines(text: str) -> None:
    def lines(text: str) -> list[str]:
        return [line.rstrip() for line in text.rstrip().splitlines()]

    for other in (text, text + "\n \n", text + "x", "\n" + text, text.replace("\n", "\r\n"), text[1:], ""):
        assert _same_lines(other, text) == (lines(other) == lines(text)), (other, text)


@pytest.mark.parametrize(
    "answer",
    ["[" + "[]," * 349_000 + "0]", "[" + "1e9," * 260_000 + "1]", "x\n" * 500_000],
    ids=["lists", "numbers", "lines"],
)
def test_judging_a_large_answer_leaves_the_event_loop_free(monkeypatch: pytest.MonkeyPatch, answer: str) -> None:
    async def printed(*args: object) -> str:
        return answer

    monkeypatch.setattr(grading, "_output", printed)
    test = Program(["true"], "x\ny") if answer[0] == "x" else Call("solution:f", [], [1, 2])
    judging = grading._judge({}, test, grading._Runs(LocalSandboxes(), 1.0, None))
    before = time.thread_time()
    with pytest.raises(StopIteration) as done:
        judging.send(None)
    assert time.thread_time() - before < 0.02  # they took 50 to 80 ms
    assert done.value.value


def test_grade_compares_output_of_programs(graded: Graded) -> None:
    program = ("python3", "solution.py")
    verdict = graded("print(int(input()) * 2)  ", Program(program, "8", "4"), Program(program, "9\n", "4"))
    assert verdict.passed == (True, False)
    assert graded("import sys\nprint(8)\nsys.exit(1)", Program(program, "8")).passed == (False,)


@pytest.mark.parametrize(
    ("value", "expected", "tolerance", "passes"),
    [
        ("[1, {'a': None}]", [1, {"a": None}], 0.0, True),
        ("(1, 2)", [1, 2], 0.0, True),
        ("'[1, 2]'", [1, 2], 0.0, False),
        ("[1, 2, 3]", [1, 2], 0.0, False),
        ("{'a': 1, 'b': 2}", {"a": 1}, 0.0, False),
        ("0.1 + 0.2", 0.3, 0.0, False),
        ("0.1 + 0.2", 0.3, 1e-9, True),
        ("float('nan')", 1.0, 1e-9, False),
        ("10 ** 400", 1.0, 1e-9, False),
        ("1", True, 0.0, False),
        ("None", None, 0.0, True),
        ("0", None, 0.0, False),
    ],
)
def test_grade_compares_values_as_json(
    graded: Graded, value: str, expected: JSON, tolerance: float, passes: bool
) -> None:
    verdict = graded(f"def f(): return {value}", Call("solution:f", [], expected, tolerance))
    assert verdict.passed == (passes,)


async def graded_by_rewards(solution: str, seconds: float, at_once: int, sandboxes: Sandboxes) -> list[Verdict]:
    """Grade by four tests of a second, some times at once, as rewards that have so many seconds."""

    async def one() -> Verdict:
        box = await sandboxes.open()
        token = meter.set(own := Meter())
        try:
            await box.write_file("solution.py", solution.encode())
            async with asyncio.timeout(seconds) as own.clock:
                return await grade(box, ["solution.py"], (*ADD, *ADD), sandboxes, timeout=1.0)
        finally:
            meter.reset(token)
            await box.close()

    return await asyncio.gather(*(asyncio.create_task(one()) for _ in range(at_once)))


def test_grade_that_hangs_ends_within_the_budget(runner: asyncio.Runner, sandboxes: Sandboxes) -> None:
    (verdict,) = runner.run(graded_by_rewards("while True: pass", grading.RESERVE + 2.5, 1, sandboxes))
    assert verdict.passed == (False,) * 4 and "left no time" in verdict.reasons[3], verdict.reasons


def test_grade_leaves_out_the_wait_for_a_processor(
    runner: asyncio.Runner, sandboxes: Sandboxes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grading.os, "cpu_count", lambda: 1)  # type: ignore[attr-defined]
    monkeypatch.setattr(grading, "_turns", WeakKeyDictionary())
    monkeypatch.setattr(grading, "RESERVE", 0.25)
    slow = f"import time\ntime.sleep(0.1)\n{RIGHT}"
    verdicts = runner.run(graded_by_rewards(slow, 4.0, 12, sandboxes))  # 4.8 s of sleep, one at a time
    assert [verdict.share for verdict in verdicts] == [1.0] * 12


def test_grade_on_a_slow_host_fails_no_tests(runner: asyncio.Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow(FakeSandboxes):
        async def open(self, **_: object) -> FakeSandbox:  # type: ignore[override]
            await asyncio.sleep(0.2)
            return await super().open()

    monkeypatch.setattr(grading, "RESERVE", 0.1)
    with pytest.raises(TimeoutError):
        runner.run(graded_by_rewards("", 0.5, 1, Slow(on_exec=lambda argv: ExecResult(0, "5", ""))))


def test_grade_refuses_empty_and_malformed_tests(graded: Graded) -> None:
    with pytest.raises(ConfigError, match="no tests"):
        graded(RIGHT)
    with pytest.raises(ConfigError, match="solution:add"):
        Call("add", [], None)
