"""agent_rl.engines.resuming: replies that weight updates cut into pieces."""

import asyncio
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from agent_rl.core.trajectory import Completion, FinishReason
from agent_rl.engines import resuming
from agent_rl.engines.base import SamplingParams
from agent_rl.engines.resuming import ResumingEngine
from agent_rl.engines.stateless import ROUTES_FROM, EngineOutput, StatelessEngine


class Server:
    """Gives these outputs, and remembers what it was asked."""

    def __init__(self, *outputs: EngineOutput) -> None:
        self.outputs = iter(outputs)
        self.asked: list[tuple[list[int], dict[str, Any]]] = []

    async def generate(self, sequence: str, token_ids: list[int], settings: dict[str, Any]) -> EngineOutput:
        self.asked.append((token_ids.copy(), settings))
        output = next(self.outputs)
        routes = output.routed_experts
        return output if routes is None else replace(output, routed_experts=routes[settings.get(ROUTES_FROM, 0) :])


def sample(
    server: Server, *turns: list[int], params: SamplingParams | None = None, context: int = 64
) -> list[Completion]:
    async def run() -> list[Completion]:
        session = ResumingEngine(StatelessEngine(server.generate, context)).open(7)
        return [await session.sample(ids, params or SamplingParams(max_tokens=5), frozenset({9})) for ids in turns]

    return asyncio.run(run())


def output(*ids: int, logprob: float = -1.0, routes: Any = None, version: int = 3, aborted: bool = False):
    return EngineOutput(ids, [logprob] * len(ids), aborted, routes, version)


def aborted(*ids: int, version: int = 3, routes: Any = None) -> EngineOutput:
    return output(*ids, logprob=-0.5, routes=routes, version=version, aborted=True)


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The recorded waits; nothing sleeps."""
    found: list[float] = []

    async def sleep(seconds: float) -> None:
        found.append(seconds)

    monkeypatch.setattr(resuming.asyncio, "sleep", sleep)
    return found


def test_resuming_continues_an_aborted_reply_under_new_weights(waits: list[float]) -> None:
    server = Server(aborted(5, 6), EngineOutput([7, 9], [-1.0, -2.0], version=4))
    (reply,) = sample(server, [1, 2])
    assert [prompt for prompt, _ in server.asked] == [[1, 2], [1, 2, 5, 6]]  # nothing is sampled twice
    assert reply.token_ids == (5, 6, 7, 9) and reply.policy_versions == (3, 3, 4, 4)
    assert reply.logprobs == (-0.5, -0.5, -1.0, -2.0)
    assert reply.finish_reason is FinishReason.STOP and not waits
    one, two = (settings for _, settings in server.asked)
    assert (one["max_tokens"], two["max_tokens"]) == (5, 3)  # the limit is the reply's
    assert one["seed"] != two["seed"]  # or the same draws again


def test_resuming_takes_further_aborts_and_empty_pieces(waits: list[float]) -> None:
    last = output(8, version=6)
    server = Server(aborted(version=3), aborted(5, version=4), aborted(6, 7, version=5), last)
    (reply,) = sample(server, [1], params=SamplingParams(max_tokens=4))
    assert reply.token_ids == (5, 6, 7, 8) and reply.policy_versions == (4, 5, 5, 6)
    assert [settings["max_tokens"] for _, settings in server.asked] == [4, 4, 3, 1]
    assert reply.finish_reason is FinishReason.LENGTH
    assert waits == [resuming.REFUSED_S]  # once: where nothing was sampled


def test_resuming_joins_pieces_before_the_next_turn() -> None:
    server = Server(aborted(5), output(9), output(9))
    sample(server, [1], [2])
    assert server.asked[-1][0] == [1, 5, 9, 2] and server.asked[-1][1]["max_tokens"] == 5


def test_resuming_ends_a_reply_aborted_at_its_limit() -> None:
    (full,) = sample(Server(aborted(5, 6)), [1], params=SamplingParams(max_tokens=2))
    assert full.finish_reason is FinishReason.LENGTH and full.token_ids == (5, 6)
    (no_room,) = sample(Server(aborted(5, 6)), [1, 2], context=4)  # a server refuses a prompt that fills the context
    assert no_room.finish_reason is FinishReason.LENGTH and no_room.token_ids == (5, 6)


def test_resuming_ends_an_aborted_reply_at_stop() -> None:
    (reply,) = sample(Server(aborted(5, 9)), [1])
    assert reply.finish_reason is FinishReason.STOP and reply.token_ids == (5, 9)


@pytest.mark.parametrize("seen", [3, None])
def test_resuming_returns_routes_once(seen: int | None) -> None:
    routes = np.arange(2 * 5, dtype=np.uint8).reshape(5, 2, 1)  # of 1, 2, 5, 6, 7: the last sampled token is not fed
    first = None if seen is None else routes[:seen]  # a server may keep an aborted reply's to itself
    server = Server(aborted(5, 6, routes=first), output(7, 9, routes=routes))
    (reply,) = sample(server, [1, 2])
    assert np.array_equal(reply.routed_experts, routes)


def test_resuming_ends_with_a_closed_session() -> None:
    class Closing(Server):
        async def generate(self, *args: Any) -> EngineOutput:
            session.close()
            return await super().generate(*args)

    server = Closing(aborted(5))
    session = ResumingEngine(StatelessEngine(server.generate, 64)).open(7)
    reply = asyncio.run(session.sample([1], SamplingParams(max_tokens=5), frozenset()))
    assert reply.finish_reason is FinishReason.ABORT and len(server.asked) == 1
