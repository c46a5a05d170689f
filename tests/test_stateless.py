"""agent_rl.engines.stateless: every request carries the whole sequence."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import numpy as np
import pytest

from agent_rl.core.trajectory import Completion, ExpertArray, FinishReason
from agent_rl.engines.base import SamplingParams
from agent_rl.engines.stateless import ROUTES_FROM, EngineOutput, Settings, StatelessEngine, StatelessSession
from agent_rl.errors import ConfigError, PolicyError

STOP = frozenset({9})


class Engine:
    """Gives these answers, and remembers what it was asked; None waits until it is cancelled."""

    def __init__(self, *answers: EngineOutput | Exception | None) -> None:
        self.answers = iter(answers)
        self.asked: list[tuple[str, list[int], Settings]] = []
        self.cancelled = 0

    async def generate(self, sequence: str, token_ids: list[int], settings: Settings) -> EngineOutput:
        self.asked.append((sequence, token_ids, settings))
        answer = next(self.answers)
        if isinstance(answer, Exception):
            raise answer
        if answer is None:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                self.cancelled += 1
                raise
        assert answer is not None
        return answer


def run(
    engine: Engine, work: Callable[[StatelessSession], Awaitable[Completion]], limit: int | None = 64
) -> Completion:
    async def inside() -> Completion:
        return await work(StatelessEngine(engine.generate, limit).open(7))

    return asyncio.run(inside())


@pytest.mark.parametrize(
    ("params", "logprobs"),
    [
        (SamplingParams(), (-0.5,)),
        (SamplingParams(temperature=0), (0.0,)),  # greedy: a point mass, as the embedded engine has it
        (SamplingParams(temperature=0.7), (-0.5,)),
        (SamplingParams(top_p=0.9), (-0.5,)),
        (SamplingParams(top_k=5), (-0.5,)),
        (SamplingParams(min_p=0.1), (-0.5,)),
    ],
)
def test_stateless_session_keeps_known_logprobs(params: SamplingParams, logprobs: tuple[float, ...]) -> None:
    found = run(Engine(EngineOutput([9], [-0.5])), lambda session: session.sample([1], params, STOP))
    assert (found.logprobs, found.finish_reason) == (logprobs, FinishReason.STOP)


def test_stateless_session_asks_for_no_other_end() -> None:
    engine = Engine(EngineOutput([9], [-0.5]))
    run(engine, lambda session: session.sample([1], SamplingParams(), STOP))
    assert (engine.asked[0][2]["stop_token_ids"], engine.asked[0][2]["ignore_eos"]) == ([9], True)


def test_stateless_session_ends_at_the_context_limit() -> None:
    engine = Engine(EngineOutput([5, 6, 7], [-1.0] * 3))
    found = run(engine, lambda session: session.sample([1] * 5, SamplingParams(max_tokens=20), STOP), limit=8)
    assert engine.asked[0][2]["max_tokens"] == 3 and found.finish_reason is FinishReason.LENGTH

    with pytest.raises(
        PolicyError, match="8 tokens leave no room in the engine's context of 8: raise its max_model_len"
    ):
        run(engine, lambda session: session.sample([1] * 8, SamplingParams(), STOP), limit=8)
    with pytest.raises(PolicyError, match="needs at least one token id"):
        run(engine, lambda session: session.sample([], SamplingParams(), STOP))
    assert len(engine.asked) == 1


def test_stateless_session_seeds_each_request_reproducibly() -> None:
    def seeds() -> list[object]:
        engine = Engine(EngineOutput([5], [-1.0]), EngineOutput([6], [-1.0]))

        async def work(session: StatelessSession) -> Completion:
            await session.sample([1], SamplingParams(), STOP)
            return await session.sample([], SamplingParams(), STOP)

        run(engine, work)
        assert [ids for _, ids, _ in engine.asked] == [[1], [1, 5]]
        return [settings["seed"] for _, _, settings in engine.asked]

    assert seeds() == seeds() == [7, 8]


def test_stateless_session_close_aborts_a_running_sample() -> None:
    engine = Engine(None)

    async def work(session: StatelessSession) -> Completion:
        sampling = asyncio.create_task(session.sample([1], SamplingParams(), STOP))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        with pytest.raises(PolicyError, match="already sampling"):
            await session.sample([2], SamplingParams(), STOP)
        session.close()
        found = await asyncio.wait_for(sampling, 60)
        with pytest.raises(PolicyError, match="it was closed"):
            await session.sample([2], SamplingParams(), STOP)
        return found

    found = run(engine, work)
    assert (found.finish_reason, found.token_ids, engine.cancelled) == (FinishReason.ABORT, (), 1)


def test_stateless_session_cancelled_reaches_the_engine_and_ends() -> None:
    engine = Engine(None)

    async def work(session: StatelessSession) -> Completion:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await session.sample([1], SamplingParams(), STOP)
        with pytest.raises(PolicyError, match="over: a call was cancelled"):
            await session.sample([2], SamplingParams(), STOP)
        session.close()
        return Completion((), (), FinishReason.ABORT, ())

    run(engine, work)
    assert engine.cancelled == 1 and len(engine.asked) == 1


@pytest.mark.parametrize("failure", [PolicyError("no answer"), EngineOutput([5, 6], [-1.0]), EngineOutput([], [])])
def test_stateless_session_ends_after_a_failed_call(failure: Exception | EngineOutput) -> None:
    engine = Engine(failure, EngineOutput([5], [-1.0]))

    async def work(session: StatelessSession) -> Completion:
        with pytest.raises(PolicyError):
            await session.sample([1], SamplingParams(), STOP)
        with pytest.raises(PolicyError, match="this sequence is over: a call failed"):
            await session.sample([2], SamplingParams(), STOP)
        return Completion((), (), FinishReason.ABORT, ())

    run(engine, work)
    assert len(engine.asked) == 1


class RoutingEngine:
    """Answers [5, 9] with routes; `can` says how it treats a request for new positions only."""

    def __init__(self, can: str = "sends", dtype: type[np.integer] = np.int64, first: int = 0) -> None:
        self.can, self.dtype, self.first = can, dtype, first
        self.bytes = self.requests = 0

    async def generate(self, sequence: str, token_ids: list[int], settings: Settings) -> EngineOutput:
        self.requests += 1
        if self.can == "fails" and ROUTES_FROM in settings:
            raise TypeError(f"Unexpected keyword argument '{ROUTES_FROM}'")
        start, stop = settings.get(ROUTES_FROM, 0) if self.can == "sends" else 0, len(token_ids) + 1
        assert isinstance(start, int)
        routes = self.first + np.arange(start * 4, stop * 4, dtype=self.dtype).reshape(stop - start, 2, 2)
        self.bytes += routes.nbytes
        return EngineOutput([5, 9], [-1.0, -1.0], routed_experts=routes)

    def play(self, turns: int) -> ExpertArray:
        """Return the routes of one sequence of so many turns."""

        async def run() -> list[ExpertArray]:
            session = StatelessEngine(self.generate, None).open(7)
            replies = [await session.sample([1, 2, 3], SamplingParams(), STOP) for _ in range(turns)]
            return [reply.routed_experts for reply in replies if reply.routed_experts is not None]

        return np.concatenate(asyncio.run(run()))


def test_stateless_session_asks_for_new_routes_only() -> None:
    engine = RoutingEngine()
    routes = engine.play(turns=20)
    assert np.array_equal(routes.ravel(), np.arange(99 * 4))  # every position's once, but for the last token
    assert engine.bytes <= 1.05 * 99 * 4 * np.dtype(np.int64).itemsize


@pytest.mark.parametrize(("can", "requests"), [("ignores", 20), ("fails", 21)])
def test_stateless_session_cuts_routes_sent_whole(can: str, requests: int) -> None:
    engine = RoutingEngine(can)
    with pytest.warns(RuntimeWarning, match="traffic grows with the square of the turns; use vLLM 0.30 or newer"):
        routes = engine.play(turns=20)
    assert np.array_equal(routes.ravel(), np.arange(99 * 4)) and engine.requests == requests


def test_stateless_session_narrows_routes() -> None:
    assert RoutingEngine().play(turns=1).dtype == np.int8
    assert RoutingEngine(first=300).play(turns=1).dtype == np.int16
    assert RoutingEngine(first=40_000).play(turns=1).dtype == np.int32


def test_stateless_engine_refuses_logprobs_of_another_distribution() -> None:
    raw = StatelessEngine(Engine().generate, 64, processed=False)
    for fine in (SamplingParams(max_tokens=5), SamplingParams(temperature=0)):
        raw.require(fine)
    with pytest.raises(ConfigError, match=r"temperature=0.5.*--logprobs-mode processed_logprobs"):
        raw.require(SamplingParams(temperature=0.5))
    with pytest.raises(ConfigError, match="--logprobs-mode"):
        asyncio.run(raw.open(0).sample([1], SamplingParams(top_p=0.5), STOP))
    StatelessEngine(Engine().generate, 64).require(SamplingParams(temperature=0.5))
