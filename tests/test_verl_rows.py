"""agent_rl.backends.verl.worker.rows: an episode as rows, and back."""

from dataclasses import replace

import numpy as np
import pytest

from agent_rl.algorithms import collate, to_samples
from agent_rl.backends.verl.worker.rows import check_row, episode_of, rewards_of, rows_of
from agent_rl.core.episode import Outcome, Reward
from agent_rl.core.trajectory import Completion, FinishReason, Fork, Source, Span, Trajectory
from agent_rl.store.heads import Head
from tests.doubles import example_episode


def test_rows_of_cuts_at_the_first_sampled_token() -> None:
    episode = example_episode()
    (row,) = rows_of(episode)
    assert (row.prompt_ids, row.response_ids) == ([1, 2, 3], [10, 11, 4, 5, 12, 13, 6])
    assert row.response_mask == [1, 1, 0, 0, 1, 1, 0]
    assert row.response_logprobs == pytest.approx([-0.5, -0.0625, 0, 0, -0.1, -2.5, 0])
    assert row.versions == (7, 8)


def test_rows_carry_experts_for_the_store() -> None:
    experts = np.zeros((2, 3, 2), np.int8)
    spans = [Span(0, 1, Source.PROMPT, 0), Span(1, 3, Source.POLICY, 0, 1)]
    routed = example_episode(trajectories=(Trajectory.restore([5, 6, 7], spans, [-1.0, -1.0], experts),))
    for asked in (False, True):
        carried = episode_of(rows_of(routed, experts=asked)[0].extra_fields)
        assert carried is not None and (carried.trajectories[0].routed_experts is not None) == asked


def test_episode_of_inverts_rows_of() -> None:
    episode = example_episode()
    (row,) = rows_of(episode)
    again = episode_of(row.extra_fields)
    assert again is not None and again.rewards == episode.rewards and again.group_id == episode.group_id
    ours, theirs = (collate(to_samples([e])) for e in (episode, again))
    for name in ("token_ids", "loss_mask", "rollout_logprobs", "rewards", "turns", "versions", "sources"):
        assert getattr(ours, name).equal(getattr(theirs, name)), name


def test_rows_of_gives_a_fork_its_row() -> None:
    fork = Trajectory(Fork(0, 4))
    fork.append([1, 2, 3], Source.PROMPT, 0)
    fork.append_completion(Completion((10, 30), (-0.5, -1.0), FinishReason.STOP, (7, 7)), 1)
    episode = example_episode()
    first, second = rows_of(replace(episode, trajectories=(*episode.trajectories, fork)))
    assert episode_of(first.extra_fields) is not None and episode_of(second.extra_fields) is None
    assert (second.prompt_ids, second.response_ids) == ([1, 2, 3, 10], [30])  # token 10 is trained on in its parent


def test_rows_of_gives_empty_episodes_blank_rows() -> None:
    failed = example_episode(trajectories=(), outcome=Outcome.FAILED, rewards=())
    (row,) = rows_of(failed)
    assert row.response_mask == [0] and len(row.prompt_ids) == 1
    again = episode_of(row.extra_fields)
    assert again is not None and again.outcome is Outcome.FAILED
    assert rewards_of(failed) == {"failed": 1.0, "scored": 0.0}  # neither success nor 0


def test_rewards_of_reports_to_verl() -> None:
    assert rewards_of(example_episode()) == {
        **{"success": 0.0, "failed": 0.0, "scored": 1.0, "correct": 1 / 3, "format": 0.25}
    }


def test_rewards_of_adds_up_what_turns_earn() -> None:
    steps = tuple(Reward("step", earned, source="step", turn=turn) for turn, earned in enumerate((0.75, 0.25)))
    flags = {"success": 1.0, "failed": 0.0, "scored": 1.0}
    assert rewards_of(example_episode(rewards=steps)) == {"step": 1.0} | flags
    assert Head.of(example_episode(rewards=steps)).value("rewards.step") == 1.0
    unscored = example_episode(rewards=(*steps, Reward("step", None, source="step", turn=1)))
    assert unscored.value("step") is None and unscored.value("other") is None


def test_check_row_refuses_changed_rows() -> None:
    check_row(example_episode(), 0, "ids", [1, 2, 3], [1, 2, 3])
    with pytest.raises(RuntimeError, match="row 1 of episode e0 came back from verl changed at token 2 of its ids"):
        check_row(example_episode(), 1, "ids", [1, 2, 3], [1, 2, 4])
    with pytest.raises(RuntimeError, match=r"at token 2 of its mask .3 sent, 2 received."):
        check_row(example_episode(), 1, "mask", [1, 0, 1], [1, 0])
