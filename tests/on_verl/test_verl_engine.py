"""agent_rl.backends.verl.worker.agent_loop.VerlEngine: verl's client as an engine of ours."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from agent_rl.backends.verl.worker.agent_loop import VerlEngine
from agent_rl.core.trajectory import Completion, FinishReason
from agent_rl.engines.base import SamplingParams
from agent_rl.engines.stateless import ROUTES_FROM
from agent_rl.errors import PolicyError


@dataclass
class Output:
    """verl's TokenOutput."""

    token_ids: list[int]
    log_probs: list[float] | None
    routed_experts: Any = None
    stop_reason: str | None = "completed"
    extra_fields: dict[str, Any] = field(default_factory=lambda: {"min_global_steps": 3, "max_global_steps": 4})


class Server:
    """verl's client: gives these outputs, and remembers what it was asked."""

    def __init__(self, *outputs: Output) -> None:
        self.outputs = iter(outputs)
        self.asked: list[tuple[str, list[int], dict[str, Any]]] = []

    async def generate(self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any]) -> Output:
        self.asked.append((request_id, prompt_ids, sampling_params))
        return next(self.outputs)


def sample(server: Server, *turns: list[int], params: SamplingParams | None = None) -> list[Completion]:
    async def run() -> list[Completion]:
        session = VerlEngine(server, 64, {"repetition_penalty": 1.0}).open(7)
        return [await session.sample(ids, params or SamplingParams(max_tokens=5), frozenset({9})) for ids in turns]

    return asyncio.run(run())


def test_verl_engine_sends_the_whole_sequence() -> None:
    routes = np.arange(2 * 7, dtype=np.uint8).reshape(7, 2, 1)
    server = Server(
        Output([5, 9], [-0.5, -0.25], routes[:3]), Output([6], [-1.0], routes[3:], extra_fields={"min_global_steps": 5})
    )
    first, second = sample(server, [1, 2], [3, 4, 8])
    assert [prompt for _, prompt, _ in server.asked] == [[1, 2], [1, 2, 5, 9, 3, 4, 8]]
    assert server.asked[0][0] == server.asked[1][0]  # the same server has the prefix
    assert (first.token_ids, first.logprobs, first.finish_reason) == ((5, 9), (-0.5, -0.25), FinishReason.STOP)
    assert (second.finish_reason, second.policy_versions) == (FinishReason.LENGTH, (5,))
    assert first.policy_versions == (3, 3)  # weights changed under it: as old as the oldest
    # 1, 2, 5 were fed for the first reply, then 9, 3, 4, 8: every position's routes once
    assert np.array_equal(np.concatenate([first.routed_experts, second.routed_experts]), routes)
    assert first.routed_experts.dtype == np.int8
    one, two = (settings for _, _, settings in server.asked)
    assert one["stop_token_ids"] == [9] and one["max_tokens"] == 5 and one["top_k"] == -1 and one["logprobs"] is True
    assert one["repetition_penalty"] == 1.0 and one["seed"] != two["seed"]
    assert ROUTES_FROM not in one and two[ROUTES_FROM] == 3  # those of the first reply are not sent again


def test_verl_engine_keeps_aborted_replies() -> None:
    (cut,) = sample(Server(Output([5], [-0.5], stop_reason="aborted")), [1])
    assert cut.finish_reason is FinishReason.ABORT and cut.token_ids == (5,)
    (nothing,) = sample(Server(Output([], [], stop_reason="aborted")), [1])
    assert nothing.finish_reason is FinishReason.ABORT and nothing.token_ids == ()
    with pytest.raises(PolicyError, match=r"2 tokens and 0 log-probabilities.*calculate_log_probs"):
        sample(Server(Output([5, 6], None)), [1])
    with pytest.raises(PolicyError, match="at least one token"):
        sample(Server(Output([], [])), [1])
