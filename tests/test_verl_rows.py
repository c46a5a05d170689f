"""agent_rl.backends.verl.worker.sampler and .rows: what needs no verl to be tested."""

import asyncio
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest

from agent_rl.algorithms import collate, to_samples
from agent_rl.backends.verl.worker.rows import check_row, episode_of, rewards_of, rows_of
from agent_rl.backends.verl.worker.sampler import VerlEngine
from agent_rl.core.episode import Outcome
from agent_rl.core.trajectory import Completion, FinishReason, Fork, Source, Trajectory
from agent_rl.engines.base import SamplingParams
from agent_rl.errors import PolicyError
from tests.doubles import example_episode


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


def test_a_server_is_sent_the_whole_sequence_and_gives_back_what_is_new() -> None:
    routes = np.arange(2 * 7, dtype=np.uint8).reshape(7, 2, 1)
    server = Server(
        Output([5, 9], [-0.5, -0.25], routes[:3]), Output([6], [-1.0], routes, extra_fields={"min_global_steps": 5})
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


def test_an_aborted_reply_keeps_what_it_has_and_a_reply_without_logprobs_is_refused() -> None:
    (cut,) = sample(Server(Output([5], [-0.5], stop_reason="aborted")), [1])
    assert cut.finish_reason is FinishReason.ABORT and cut.token_ids == (5,)
    (nothing,) = sample(Server(Output([], [], stop_reason="aborted")), [1])
    assert nothing.finish_reason is FinishReason.ABORT and nothing.token_ids == ()
    with pytest.raises(PolicyError, match=r"2 tokens and 0 log-probabilities.*calculate_log_probs"):
        sample(Server(Output([5, 6], None)), [1])
    with pytest.raises(PolicyError, match="at least one token"):
        sample(Server(Output([], [])), [1])


def test_a_row_is_the_trajectory_cut_at_the_first_sampled_token() -> None:
    episode = example_episode()
    (row,) = rows_of(episode)
    assert (row.prompt_ids, row.response_ids) == ([1, 2, 3], [10, 11, 4, 5, 12, 13, 6])
    assert row.response_mask == [1, 1, 0, 0, 1, 1, 0]
    assert row.response_logprobs == pytest.approx([-0.5, -0.0625, 0, 0, -0.1, -2.5, 0])
    assert row.versions == (7, 8)


def test_an_episode_comes_back_as_it_went() -> None:
    episode = example_episode()
    (row,) = rows_of(episode)
    again = episode_of(row.extra_fields)
    assert again is not None and again.rewards == episode.rewards and again.group_id == episode.group_id
    ours, theirs = (collate(to_samples([e])) for e in (episode, again))
    for name in ("token_ids", "loss_mask", "rollout_logprobs", "rewards", "turns", "versions", "sources"):
        assert getattr(ours, name).equal(getattr(theirs, name)), name


def test_a_fork_is_a_row_of_its_own_and_the_episode_travels_once() -> None:
    fork = Trajectory(Fork(0, 4))
    fork.append([1, 2, 3], Source.PROMPT, 0)
    fork.append_completion(Completion((10, 30), (-0.5, -1.0), (-0.5, -1.0), FinishReason.STOP, (7, 7)), 1)
    episode = example_episode()
    first, second = rows_of(replace(episode, trajectories=(*episode.trajectories, fork)))
    assert episode_of(first.extra_fields) is not None and episode_of(second.extra_fields) is None
    assert (second.prompt_ids, second.response_ids) == ([1, 2, 3, 10], [30])  # token 10 is trained on in its parent


def test_an_episode_that_sampled_nothing_is_a_blank_row() -> None:
    failed = example_episode(trajectories=(), outcome=Outcome.FAILED, rewards=())
    (row,) = rows_of(failed)
    assert row.response_mask == [0] and len(row.prompt_ids) == 1
    again = episode_of(row.extra_fields)
    assert again is not None and again.outcome is Outcome.FAILED
    assert rewards_of(failed) == {"success": 0.0, "failed": 1.0}


def test_what_verl_reports_of_an_episode() -> None:
    assert rewards_of(example_episode()) == {"success": 0.0, "failed": 0.0, "correct": 1 / 3, "format": 0.25}


def test_a_changed_row_is_not_trained_on() -> None:
    check_row(example_episode(), 0, "ids", [1, 2, 3], [1, 2, 3])
    with pytest.raises(RuntimeError, match="row 1 of episode e0 came back from verl changed at token 2 of its ids"):
        check_row(example_episode(), 1, "ids", [1, 2, 3], [1, 2, 4])
    with pytest.raises(RuntimeError, match=r"at token 2 of its mask .3 sent, 2 received."):
        check_row(example_episode(), 1, "mask", [1, 0, 1], [1, 0])
