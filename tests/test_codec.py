"""Episodes survive the way into a line and back, to the bit."""

from __future__ import annotations

import json
import struct
from types import MappingProxyType

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_rl.core.episode import Failure, Origin, Outcome, Reward, StepRecord
from agent_rl.core.messages import Message, ToolCall
from agent_rl.core.trajectory import Fork, Source, Span, Trajectory
from agent_rl.errors import DamagedEpisodeError, StoreError
from agent_rl.store.codec import decode, dump_line, encode, load_line
from agent_rl.store.packing import pack, unpack
from tests.doubles import example_episode


def assert_same_trajectory(a: Trajectory, b: Trajectory) -> None:
    """Trajectories have no equality of their own; NaNs and signed zeros have to be compared by their bits anyway."""
    for name in ("token_ids", "logprobs", "loss_mask", "policy_versions", "turns"):
        assert getattr(a, name).tobytes() == getattr(b, name).tobytes(), name
    assert (a.spans, a.forked_from) == (b.spans, b.forked_from)


# --- packing ---------------------------------------------------------------------------------------------------------

float32s = st.floats(width=32, allow_nan=False)  # infinities, subnormals and -0.0 included
span_parts = st.lists(
    st.tuples(st.sampled_from(Source), st.integers(1, 9), st.integers(0, 40), st.integers(0, 2**31 - 1)), max_size=8
)


@st.composite
def trajectories(draw: st.DrawFn) -> Trajectory:
    spans, at = [], 0
    for source, length, turn, version in draw(span_parts):
        spans.append(Span(at, at + length, source, turn, version if source is Source.POLICY else None))
        at += length
    sampled = sum(s.stop - s.start for s in spans if s.source is Source.POLICY)
    ids = draw(st.lists(st.integers(0, 2**31 - 1), min_size=at, max_size=at))
    logprobs = draw(st.lists(float32s, min_size=sampled, max_size=sampled))
    fork = draw(st.none() | st.builds(Fork, st.integers(0, 9), st.integers(0, 9)))
    return Trajectory.restore(ids, spans, logprobs, forked_from=fork)


@given(trajectories())
def test_packing_keeps_every_bit(trajectory: Trajectory) -> None:
    assert_same_trajectory(unpack(json.loads(json.dumps(pack(trajectory)))), trajectory)


@pytest.mark.parametrize("dtype", [np.int8, np.int16, np.int32])
def test_routed_experts_are_kept_only_where_asked_for(dtype: type[np.signedinteger]) -> None:
    experts = np.arange(2 * 3 * 2, dtype=dtype).reshape(2, 3, 2)
    spans = [Span(0, 3, Source.PROMPT, 0)]
    trajectory = Trajectory.restore([5, 6, 7], spans, [], experts)
    assert "experts" not in pack(trajectory)
    packed = pack(trajectory, experts=True)
    assert packed["experts"]["shape"] == [2, 3, 2]  # the row that no engine reported is not stored
    again = unpack(packed).routed_experts
    assert again is not None and again.dtype == dtype
    assert np.array_equal(again, trajectory.routed_experts)


def damage(block: dict, name: str, **changes: object) -> dict:
    return {**block, name: {**block[name], **changes}}


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("tokens", {"crc32": 1}, "tokens have the checksum"),
        ("tokens", {"shape": [9]}, "hold 40 bytes where their shape wants 36|more than 36"),
        ("tokens", {"shape": [11]}, "hold 40 bytes where their shape wants 44"),
        ("tokens", {"shape": [-1]}, "sizes of at least 0"),
        ("tokens", {"shape": [2, 5]}, "1 integers"),
        ("tokens", {"dtype": "object"}, "unknown dtype 'object'; known: int32"),
        ("logprobs", {"dtype": "float64"}, "unknown dtype 'float64'; known: float32"),
        ("logprobs", {"zlib": "AAAA"}, "logprobs can't be decompressed"),
        ("logprobs", {"zlib": "?"}, "logprobs hold 0 bytes|logprobs can't be decompressed"),
    ],
)
def test_a_damaged_block_is_refused(name: str, changes: dict, message: str) -> None:
    block = pack(example_episode().trajectories[0])
    with pytest.raises(DamagedEpisodeError, match=message):
        unpack(damage(block, name, **changes))


def test_a_flipped_bit_is_noticed_wherever_it_is() -> None:
    block = pack(example_episode().trajectories[0])
    data = block["tokens"]["zlib"]
    for at in range(len(data) - 2):  # the last two characters may hold padding bits that mean nothing
        changed = data[:at] + ("A" if data[at] != "A" else "B") + data[at + 1 :]
        with pytest.raises(DamagedEpisodeError):
            unpack(damage(block, "tokens", zlib=changed))


def test_spans_that_contradict_the_tokens_are_refused() -> None:
    block = pack(example_episode().trajectories[0])
    with pytest.raises(DamagedEpisodeError, match=r"contradicts itself.*9 tokens"):
        unpack({**block, "spans": block["spans"][:-1]})
    with pytest.raises(DamagedEpisodeError, match="'source' should be one of prompt, policy"):
        unpack({**block, "spans": [[0, 10, "dream", 0, None]]})


# --- one line --------------------------------------------------------------------------------------------------------


def test_an_episode_survives_the_line() -> None:
    episode = example_episode(
        parent=("old", 2), outcome=Outcome.FAILED, error=Failure("tool", "KeyError", "'x'", "Traceback\n")
    )
    again = load_line(dump_line(episode))
    assert_same_trajectory(again.trajectories[0], episode.trajectories[0])
    assert (again.messages, again.steps, again.rewards) == (episode.messages, episode.steps, episode.rewards)
    assert (again.error, again.parent, again.versions) == (episode.error, episode.parent, episode.versions)
    assert (again.task, again.env_args, again.seconds) == (episode.task, episode.env_args, episode.seconds)


def test_the_line_is_readable_json() -> None:
    line = dump_line(example_episode())
    assert line.endswith(b"\n") and line.count(b"\n") == 1
    assert "café" in line.decode()
    row = json.loads(line)
    assert row["schema"] == 2
    assert row["reward"] == 1 / 3 + 0.125
    assert (row["turns"], row["tool_errors"]) == (2, {"exception": 1})
    assert row["messages"][2] == {
        "role": "assistant",
        "reasoning": "Look it up.",
        "tool_calls": [{"id": "c0", "name": "price", "arguments": {"item": "chair"}}],
    }
    assert row["messages"][4] == {"role": "assistant", "content": "49"}


def test_a_line_that_was_written_before_states_were_is_read() -> None:
    row = encode(example_episode())
    assert [step.pop("state") for step in row["steps"]] == ["asked", "asked; failed"]
    assert [step.state for step in decode(row).steps] == [None, None]
    assert all("state" not in step for step in encode(decode(row))["steps"])


def test_snapshots_are_not_stored() -> None:
    assert load_line(dump_line(example_episode(snapshots=(object(),)))).snapshots == ()


def test_derived_and_unknown_fields_are_not_read() -> None:
    row = encode(example_episode())
    row |= {"reward": 99, "turns": "many", "from_the_future": {"x": 1}}
    row["messages"][0]["mood"] = "good"
    assert decode(row).reward == example_episode().reward


@given(st.floats(), st.floats(allow_nan=False, allow_infinity=False))
def test_rewards_keep_every_bit(value: float, weight: float) -> None:
    episode = example_episode(rewards=(Reward("r", value, weight),), steps=(StepRecord(1, value, False, False),))
    again = load_line(dump_line(episode))
    for stored, own in (
        (again.rewards[0].value, value),
        (again.rewards[0].weight, weight),
        (again.steps[0].reward, value),
    ):
        assert struct.pack("d", stored) == struct.pack("d", own) or (stored != stored and own != own)


def test_what_is_not_finite_stays_valid_json() -> None:
    call = ToolCall("c", "f", {"x": float("inf"), "$float": "mine"})
    message = Message("assistant", tool_calls=(call,))
    line = dump_line(example_episode(rewards=(Reward("r", float("nan")),), messages=(message,)))

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    row = json.loads(line, parse_constant=refuse)
    assert row["rewards"][0]["value"] == {"$float": "NaN"}
    again = load_line(line)
    assert np.isnan(again.rewards[0].value)
    assert again.messages[0].tool_calls[0].arguments == call.arguments


def test_half_of_a_surrogate_pair_is_kept() -> None:
    episode = example_episode(messages=(Message("assistant", "a\ud83d é"),))
    assert load_line(dump_line(episode)).messages == episode.messages


def test_numpy_scalars_and_foreign_mappings_become_json() -> None:
    episode = example_episode(task=MappingProxyType({"n": np.int64(3)}), rewards=(Reward("r", np.float32(0.5)),))
    again = load_line(dump_line(episode))
    assert (again.task, again.rewards[0].value) == ({"n": 3}, 0.5)


def test_what_json_cannot_hold_is_an_error_with_the_id() -> None:
    with pytest.raises(StoreError, match=r"episode 'e0' holds something that JSON can't.*set"):
        dump_line(example_episode(task={"x": {1}}))


@pytest.mark.parametrize(
    "name", ["schema", "id", "env", "task", "seed", "group_id", "origin", "messages", "steps", "trajectories",
             "rewards", "stop_reason", "outcome"],
)  # fmt: skip
def test_a_missing_field_is_named(name: str) -> None:
    row = encode(example_episode())
    del row[name]
    with pytest.raises(DamagedEpisodeError, match=f"field '{name}' is missing"):
        decode(row)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seed": True}, "'seed' should be an integer, not True"),
        ({"id": 4}, "'id' should be a string, not 4"),
        ({"stop_reason": "bored"}, "'stop_reason' should be one of done, .*not 'bored'"),
        ({"messages": [{"role": "robot"}]}, "'role' should be one of system, .*not 'robot'"),
        ({"messages": {}}, "'messages' should be an array"),
        ({"parent": ["x"]}, "'parent' should be"),
        ({"rewards": [{"name": "r", "value": "1", "weight": 1, "source": "env"}]}, "'value' should be a number"),
        ({"steps": [{"messages": 1, "reward": 0, "terminated": 0, "truncated": False}]}, "'terminated' should be true"),
    ],
)
def test_a_mistyped_field_is_named(changes: dict, message: str) -> None:
    with pytest.raises(DamagedEpisodeError, match=message):
        decode({**encode(example_episode()), **changes})


def test_another_schema_is_not_called_damage() -> None:
    with pytest.raises(StoreError, match="schema 3, and this agent_rl reads schemas 1 and 2") as caught:
        decode({**encode(example_episode()), "schema": 3})
    assert not isinstance(caught.value, DamagedEpisodeError)


@pytest.mark.parametrize(
    ("id", "origin"),
    [
        ("train-00003-007-12", Origin("train", step=3, sample=12)),
        ("train-00003-0000012-greedy", Origin("train", step=3, greedy=True)),
        ("test-hard-00060-low-temperature-0004", Origin("eval", "test-hard", 60)),
        ("test-00060-greedy-0004", Origin("eval", "test", 60, greedy=True)),
        ("train-00002-sampled-0004-01", Origin("eval", "train", 2, sample=1)),
        ("dev-00010-0003", Origin("eval", "dev", 10)),
        ("0d3c9b1a8f1e4a6d9c1b2a3f4e5d6c7b", Origin("rollout")),
    ],
)
def test_schema_1_tells_the_origin_by_the_id(id: str, origin: Origin) -> None:
    row = {**encode(example_episode(id)), "schema": 1}
    del row["origin"]
    assert decode(row).origin == origin
