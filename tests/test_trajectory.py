"""agent_rl.core.trajectory: append-only ids, and arrays derived from the spans."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_rl.core.trajectory import Completion, FinishReason, Fork, Source, Span, Trajectory, expert_dtype
from agent_rl.errors import TrajectoryError
from tests.doubles import example_episode


def completion(ids: list[int], versions: list[int] | None = None, experts: np.ndarray | None = None) -> Completion:
    logprobs = tuple(-0.5 - i for i in range(len(ids)))
    return Completion(tuple(ids), logprobs, FinishReason.STOP, tuple(versions or [0] * len(ids)), experts)


def test_trajectory_records_source_turn_and_version():
    t = Trajectory()
    t.append([1, 2], Source.PROMPT, 0)
    t.append_completion(completion([10, 11], [7, 7]), 0)
    t.append((3,), Source.TEMPLATE, 0)
    t.append(iter([4, 5]), Source.ENV, 1)
    t.append_completion(completion([12], [8]), 1)
    assert t.token_ids.tolist() == [1, 2, 10, 11, 3, 4, 5, 12]
    assert t.token_ids.dtype == np.int32
    assert t.loss_mask.tolist() == [False, False, True, True, False, False, False, True]
    assert t.policy_versions.tolist() == [-1, -1, 7, 7, -1, -1, -1, 8]
    assert t.turns.tolist() == [0, 0, 0, 0, 0, 1, 1, 1]
    assert t.spans == (
        Span(0, 2, Source.PROMPT, 0),
        Span(2, 4, Source.POLICY, 0, 7),
        Span(4, 5, Source.TEMPLATE, 0),
        Span(5, 7, Source.ENV, 1),
        Span(7, 8, Source.POLICY, 1, 8),
    )
    assert len(t) == 8
    assert repr(t) == "Trajectory(8 tokens, 3 sampled, 5 spans)"


def test_trajectory_logprobs_are_nan_at_unsampled_tokens():
    t = Trajectory()
    t.append([1], Source.PROMPT, 0)
    t.append_completion(completion([10, 11]), 0)
    t.append([2], Source.ENV, 1)
    assert t.logprobs.dtype == np.float32
    np.testing.assert_array_equal(t.logprobs, np.float32([np.nan, -0.5, -1.5, np.nan]))


def test_completion_over_two_versions_is_two_spans():
    t = Trajectory()
    t.append_completion(completion([10, 11, 12, 13], [3, 3, 4, 4]), 2)
    assert t.spans == (Span(0, 2, Source.POLICY, 2, 3), Span(2, 4, Source.POLICY, 2, 4))
    assert t.policy_versions.tolist() == [3, 3, 4, 4]
    assert t.loss_mask.all()


def test_returning_version_opens_a_new_span():
    t = Trajectory()
    t.append_completion(completion([1, 2, 3], [3, 4, 3]), 0)
    assert [(s.start, s.stop, s.policy_version) for s in t.spans] == [(0, 1, 3), (1, 2, 4), (2, 3, 3)]


def test_empty_append_leaves_no_span():
    t = Trajectory()
    t.append([], Source.ENV, 0)
    t.append_completion(completion([]), 0)
    assert t.spans == ()
    assert len(t) == 0
    for empty in (t.token_ids, t.loss_mask, t.logprobs, t.turns, t.policy_versions):
        assert empty.shape == (0,)


def test_trajectory_can_not_be_changed():
    t = Trajectory()
    ids = [1, 2]
    t.append(ids, Source.PROMPT, 0)
    t.append_completion(completion([3]), 0)
    ids.append(9)
    t.token_ids[:] = 0
    t.loss_mask[:] = True
    t.logprobs[:] = 0
    assert t.token_ids.tolist() == [1, 2, 3]
    assert t.loss_mask.tolist() == [False, False, True]
    assert np.isnan(t.logprobs[0])
    with pytest.raises(AttributeError):
        t.token_ids = [1]  # type: ignore[misc, assignment]


def test_append_refuses_sampled_tokens_without_logprobs():
    with pytest.raises(TrajectoryError, match="append_completion"):
        Trajectory().append([1], Source.POLICY, 0)


@pytest.mark.parametrize(("logprobs", "versions"), [((-1.0,), (0, 0)), ((-1.0, -1.0), (0,)), ((), ())])
def test_append_completion_refuses_uneven_lengths(logprobs, versions):
    t = Trajectory()
    with pytest.raises(TrajectoryError, match="a completion of 2 tokens came with"):
        t.append_completion(Completion((1, 2), logprobs, FinishReason.STOP, versions), 0)
    assert len(t) == 0


@given(
    st.lists(
        st.tuples(st.sampled_from(list(Source)), st.lists(st.tuples(st.integers(0, 99), st.integers(0, 2)), max_size=5))
    )
)
def test_append_keeps_every_prefix(pieces):
    t = Trajectory()
    expected: list[tuple[int, bool, int]] = []
    for turn, (source, tokens) in enumerate(pieces):
        before = t.token_ids.tolist(), t.loss_mask.tolist(), t.spans
        ids, versions = [i for i, _ in tokens], [v for _, v in tokens]
        if source is Source.POLICY:
            t.append_completion(completion(ids, versions), turn)
        else:
            t.append(ids, source, turn)
        expected += [(i, source is Source.POLICY, v if source is Source.POLICY else -1) for i, v in tokens]
        assert t.token_ids.tolist()[: len(before[0])] == before[0]
        assert t.loss_mask.tolist()[: len(before[1])] == before[1]
        assert t.spans[: len(before[2])] == before[2]
    got = list(zip(t.token_ids.tolist(), t.loss_mask.tolist(), t.policy_versions.tolist(), strict=True))
    assert got == expected
    assert [i for s in t.spans for i in range(s.start, s.stop)] == list(range(len(t)))
    assert len(t.turns) == len(t)


# Routed experts


def experts(rows: int, first: int) -> np.ndarray:
    return (np.arange(rows * 4, dtype=np.int8).reshape(rows, 2, 2) + first).astype(np.int8)


def test_routed_experts_align_with_input_positions():
    t = Trajectory()
    t.append([1, 2], Source.PROMPT, 0)
    t.append_completion(completion([10], experts=experts(2, 0)), 0)  # the prompt's two positions were fed
    t.append([3], Source.ENV, 1)
    t.append_completion(completion([11, 12], experts=experts(3, 8)), 1)  # 10, 3 and 11 were fed
    routes = t.routed_experts
    assert routes is not None
    assert routes.dtype == np.int8
    np.testing.assert_array_equal(routes[:5], np.concatenate([experts(2, 0), experts(3, 8)]))
    assert (routes[5] == -1).all()


def test_routed_experts_refuse_excess_rows():
    t = Trajectory()
    t.append_completion(completion([1]), 0)
    assert t.routed_experts is None
    t.append_completion(completion([2], experts=experts(3, 0)), 1)
    with pytest.raises(TrajectoryError, match="3 rows of routed experts for 2 tokens"):
        _ = t.routed_experts


# Restore


def test_restore_returns_the_same_trajectory():
    (t,) = example_episode().trajectories
    fork = Fork(0, 3)
    again = Trajectory.restore(t.token_ids, t.spans, t.logprobs[t.loss_mask], experts(8, 0), fork)
    assert again.spans == t.spans
    assert again.forked_from == fork
    for name in ("token_ids", "loss_mask", "logprobs", "policy_versions", "turns"):
        np.testing.assert_array_equal(getattr(again, name), getattr(t, name))
    assert again.routed_experts is not None
    again.append([99], Source.ENV, 2)
    assert again.token_ids[-1] == 99
    assert len(t) + 1 == len(again)


@pytest.mark.parametrize(
    ("ids", "spans", "logprobs", "message"),
    [
        ([1, 2], [Span(1, 2, Source.ENV, 0)], [], "does not continue at token 0"),
        ([1, 2], [Span(0, 1, Source.ENV, 0), Span(0, 2, Source.ENV, 0)], [], "does not continue at token 1"),
        ([1, 2], [Span(0, 0, Source.ENV, 0), Span(0, 2, Source.ENV, 0)], [], "does not continue at token 0"),
        ([1, 2], [Span(0, 3, Source.ENV, 0)], [], "cover 3 tokens"),
        ([1, 2], [Span(0, 1, Source.ENV, 0)], [], "there are 2 tokens"),
        ([1, 2], [Span(0, 2, Source.POLICY, 0, 1)], [-1.0], "2 of them sampled, but there are 2 tokens and 1 log"),
        ([1, 2], [Span(0, 2, Source.ENV, 0)], [-1.0], "0 of them sampled"),
    ],
)
def test_restore_refuses_contradicting_spans(ids, spans, logprobs, message):
    with pytest.raises(TrajectoryError, match=message):
        Trajectory.restore(ids, spans, logprobs)


def test_split_reply_returns_the_last_reply():
    trajectory = Trajectory()
    assert [list(part) for part in trajectory.split_reply()] == [[], []]
    trajectory.append([1, 2], Source.PROMPT, 0)
    trajectory.append([3], Source.TEMPLATE, 0)  # an interruption begins the reply
    trajectory.append_completion(Completion((4, 5), (-1.0,) * 2, FinishReason.STOP, (0, 1)), 0)
    before, reply = trajectory.split_reply()
    assert (list(before), reply, trajectory.sampled) == ([1, 2], [3, 4, 5], 2)
    trajectory.append([6], Source.TEMPLATE, 0)
    trajectory.append([7], Source.ENV, 1)
    assert (len(before), before[-1], before[-2:], list(trajectory.split_reply()[0])) == (
        2,
        2,
        [1, 2],
        [1, 2, 3, 4, 5, 6, 7],
    )
    with pytest.raises(IndexError):
        before[2]


def test_expert_dtype_is_the_narrowest():
    dtypes = [expert_dtype(count) for count in (1, 8, 128, 129, 32768, 32769)]
    assert dtypes == [np.int8, np.int8, np.int8, np.int16, np.int16, np.int32]
