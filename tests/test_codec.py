"""Episodes survive the way into a line and back, to the bit."""

from __future__ import annotations

import json
import struct
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_rl.core.episode import Episode, Failure, Origin, Outcome, Reward, StepRecord
from agent_rl.core.messages import Message, ToolCall
from agent_rl.core.trajectory import Fork, Source, Span, Trajectory
from agent_rl.errors import DamagedEpisodeError, StoreError
from agent_rl.store.arrays import pack_array
from agent_rl.store.codec import dump_line, load_line
from agent_rl.store.heads import Head, head_of
from agent_rl.store.packing import PackedTrajectory, pack, unpack
from tests.doubles import example_episode


def assert_same_trajectory(a: Trajectory, b: Trajectory) -> None:
    """Trajectories have no equality of their own; NaNs and signed zeros have to be compared by their bits anyway."""
    for name in ("token_ids", "logprobs", "loss_mask", "policy_versions", "turns"):
        assert getattr(a, name).tobytes() == getattr(b, name).tobytes(), name
    assert (a.spans, a.forked_from) == (b.spans, b.forked_from)


def encode(episode: Episode) -> dict[str, Any]:
    return json.loads(dump_line(episode))


def decode(row: dict[str, Any]) -> Episode:
    return load_line(json.dumps(row).encode())


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
    assert_same_trajectory(unpack(pack(trajectory)), trajectory)
    assert_same_trajectory(
        load_line(dump_line(example_episode(trajectories=(trajectory,)))).trajectories[0], trajectory
    )


@pytest.mark.parametrize("dtype", [np.int8, np.int16, np.int32])
def test_pack_keeps_routed_experts_on_request(dtype: type[np.signedinteger]) -> None:
    experts = np.arange(2 * 3 * 2, dtype=dtype).reshape(2, 3, 2)
    spans = [Span(0, 3, Source.PROMPT, 0)]
    trajectory = Trajectory.restore([5, 6, 7], spans, [], experts)
    assert pack(trajectory).experts is None
    packed = pack(trajectory, pack_array)
    assert packed.experts is not None
    assert packed.experts.shape == (2, 3, 2)  # the unreported row is not stored
    again = unpack(packed).routed_experts
    assert again is not None and again.dtype == dtype
    assert np.array_equal(again, trajectory.routed_experts)


def damage(block: PackedTrajectory, name: str, **changes: Any) -> PackedTrajectory:
    return replace(block, **{name: replace(getattr(block, name), **changes)})


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("tokens", {"crc32": 1}, "tokens have the checksum"),
        ("tokens", {"shape": (9,)}, "hold 40 bytes where their shape wants 36|more than 36"),
        ("tokens", {"shape": (11,)}, "hold 40 bytes where their shape wants 44"),
        ("tokens", {"shape": (2, 5)}, "2 dimensions, not 1"),
        ("tokens", {"dtype": "object"}, "unknown dtype 'object'; known: int32"),
        ("logprobs", {"dtype": "float64"}, "unknown dtype 'float64'; known: float32"),
        ("logprobs", {"zstd": "AAAA"}, "logprobs can't be decompressed"),
        ("logprobs", {"zstd": "?"}, "logprobs hold 0 bytes|logprobs can't be decompressed"),
    ],
)
def test_unpack_refuses_damaged_blocks(name: str, changes: dict, message: str) -> None:
    block = pack(example_episode().trajectories[0])
    with pytest.raises(DamagedEpisodeError, match=message):
        unpack(damage(block, name, **changes))


def test_unpack_detects_flipped_bits() -> None:
    block = pack(example_episode().trajectories[0])
    data, noticed = block.tokens.zstd or "", 0
    for at in range(len(data) - 2):  # the last two characters may hold padding bits that mean nothing
        changed = data[:at] + ("A" if data[at] != "A" else "B") + data[at + 1 :]
        try:
            assert_same_trajectory(unpack(damage(block, "tokens", zstd=changed)), unpack(block))
        except DamagedEpisodeError:
            noticed += 1
    assert noticed > len(data) * 0.8  # the others mean nothing to zstd


def test_unpack_refuses_contradicting_spans() -> None:
    block = pack(example_episode().trajectories[0])
    with pytest.raises(DamagedEpisodeError, match=r"contradicts itself.*9 tokens"):
        unpack(replace(block, spans=block.spans[:-1]))


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("spans", 0, 2), "dream", r"trajectories\.0\.spans\.0\.2.*'prompt', 'policy'"),
        (("tokens", "shape", 0), -1, r"trajectories\.0\.tokens\.shape\.0.*greater than or equal to 0"),
        (("tokens", "crc32"), 1, r"trajectories\.0'.*tokens have the checksum"),
        (("logprobs", "zstd"), 3, r"trajectories\.0\.logprobs\.zstd"),
    ],
)
def test_decode_names_damage_by_its_path(path: tuple[str | int, ...], value: object, message: str) -> None:
    row = encode(example_episode())
    place = row["trajectories"][0]
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    with pytest.raises(DamagedEpisodeError, match=message):
        decode(row)


# --- one line --------------------------------------------------------------------------------------------------------


def test_episode_survives_dump_and_load() -> None:
    episode = example_episode(
        parent=("old", 2), outcome=Outcome.FAILED, error=Failure("tool", "KeyError", "'x'", "Traceback\n")
    )
    again = load_line(dump_line(episode))
    assert_same_trajectory(again.trajectories[0], episode.trajectories[0])
    assert (again.messages, again.steps, again.rewards) == (episode.messages, episode.steps, episode.rewards)
    assert (again.error, again.parent, again.versions) == (episode.error, episode.parent, episode.versions)
    assert (again.task, again.env_args, again.seconds) == (episode.task, episode.env_args, episode.seconds)


def test_dump_line_writes_readable_json() -> None:
    line = dump_line(example_episode())
    assert line.endswith(b"\n") and line.count(b"\n") == 1
    assert "café" in line.decode()
    row = json.loads(line)
    assert row["schema"] == 3
    assert row["reward"] == 1 / 3 + 0.125
    assert (row["turns"], row["tool_errors"]) == (2, {"exception": 1})
    assert row["messages"][2] == {
        "role": "assistant",
        "reasoning": "Look it up.",
        "tool_calls": [{"id": "c0", "name": "price", "arguments": {"item": "chair"}}],
    }
    assert row["messages"][4] == {"role": "assistant", "content": "49"}


def test_decode_reads_lines_without_states() -> None:
    row = encode(example_episode())
    assert [step.pop("state") for step in row["steps"]] == ["asked", "asked; failed"]
    assert [step.state for step in decode(row).steps] == [None, None]


def test_codec_omits_snapshots() -> None:
    assert load_line(dump_line(example_episode(snapshots=(object(),)))).snapshots == ()


def test_decode_ignores_derived_and_unknown_fields() -> None:
    row = encode(example_episode())
    row |= {"reward": 99, "turns": "many", "from_the_future": {"x": 1}}
    row["messages"][0]["mood"] = "good"
    assert decode(row).reward == example_episode().reward


@given(st.floats(), st.floats(allow_nan=False, allow_infinity=False))
def test_codec_keeps_every_bit_of_rewards(value: float, weight: float) -> None:
    episode = example_episode(rewards=(Reward("r", value, weight),), steps=(StepRecord(1, value, False, False),))
    again = load_line(dump_line(episode))
    for stored, own in (
        (again.rewards[0].value, value),
        (again.rewards[0].weight, weight),
        (again.steps[0].reward, value),
    ):
        assert struct.pack("d", stored) == struct.pack("d", own) or (stored != stored and own != own)


def test_dump_line_writes_non_finite_numbers_as_json() -> None:
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


@pytest.mark.parametrize("text", ["a\ud83d é", "\ude00", "\ufdd0d83d", "\ud83d \ufdd0 NaN", "\U0001f600"])
def test_codec_keeps_half_a_surrogate_pair(text: str) -> None:
    call = ToolCall("c", "f", {text: [text, float("inf")]})
    episode = example_episode(messages=(Message("assistant", text, tool_calls=(call,)),), task={"x": text})
    line = dump_line(episode)
    again = load_line(line)
    assert (again.messages, again.task, again.stop_reason) == (episode.messages, episode.task, episode.stop_reason)
    assert type(again.stop_reason) is type(episode.stop_reason)
    assert load_line(b" " + line).messages == episode.messages  # also where another program wrote the line


@pytest.mark.parametrize("more", [{}, {"y": float("nan")}, {"y": "\ud800"}])
def test_codec_tells_keys_of_tasks_from_its_own(more: dict[str, object]) -> None:
    task = {"x": {"$float": "NaN"}, "z": "$float", **more}
    line = dump_line(example_episode(task=task))
    assert repr(load_line(line).task) == repr(task) and Head.of(load_line(line)) == head_of(line)


def test_codec_keeps_deeply_nested_arguments() -> None:
    nested: list[object] = []
    for _ in range(220):
        nested = [nested]
    assert load_line(dump_line(example_episode(task={"x": nested}))).task == {"x": nested}


def test_codec_converts_numpy_scalars_and_mappings() -> None:
    episode = example_episode(task=MappingProxyType({"n": np.int64(3)}), rewards=(Reward("r", np.float32(0.5)),))
    again = load_line(dump_line(episode))
    assert (again.task, again.rewards[0].value) == ({"n": 3}, 0.5)


def test_dump_line_refuses_unserialisable_tasks() -> None:
    with pytest.raises(StoreError, match=r"episode 'e0' holds something that JSON can't.*object"):
        dump_line(example_episode(task={"x": object()}))


@pytest.mark.parametrize(
    "name", ["schema", "id", "env", "task", "seed", "group_id", "origin", "messages", "steps", "trajectories",
             "rewards", "stop_reason", "outcome"],
)  # fmt: skip
def test_decode_names_a_missing_field(name: str) -> None:
    row = encode(example_episode())
    del row[name]
    with pytest.raises(DamagedEpisodeError, match=f"field '{name}' is missing"):
        decode(row)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seed": True}, "field 'seed': Input should be a valid integer"),
        ({"id": 4}, "field 'id': Input should be a valid string"),
        ({"stop_reason": "bored"}, "field 'stop_reason': Input should be 'done', "),
        ({"messages": [{"role": "robot"}]}, r"field 'messages\.0\.role': Input should be 'system', "),
        ({"messages": {}}, "field 'messages': Input should be a valid array"),
        ({"parent": ["x"]}, r"field 'parent\.1' is missing"),
        ({"origin": {"purpose": "fun"}}, r"field 'origin\.purpose': Input should be 'train', "),
        ({"rewards": [{"name": "r", "value": "1", "weight": 1, "source": "env"}]}, r"'rewards\.0\.value': .*number"),
        ({"steps": [{"messages": 1, "reward": 0, "terminated": 0, "truncated": False}]}, r"'steps\.0\.terminated'"),
    ],
)
def test_decode_names_a_mistyped_field(changes: dict, message: str) -> None:
    with pytest.raises(DamagedEpisodeError, match=message):
        decode({**encode(example_episode()), **changes})


def test_decode_tells_other_schemas_from_damage() -> None:
    with pytest.raises(StoreError, match="schema 4, and this agent_rl reads schemas 1 to 3") as caught:
        decode({**encode(example_episode()), "schema": 4})
    assert not isinstance(caught.value, DamagedEpisodeError)


# --- earlier schemas -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("schema", [1, 2])
def test_decode_reads_earlier_schemas(schema: int) -> None:
    lines = (Path(__file__).parent / f"data/episodes_of_schema_{schema}.jsonl").read_bytes().splitlines(keepends=True)
    assert {json.loads(line)["schema"] for line in lines} == {schema}
    plain, forked, failed, odd = map(load_line, lines)
    expected = example_episode(plain.id, group_id=plain.group_id, origin=Origin("train", step=3, sample=2))
    assert replace(plain, trajectories=()) == replace(expected, trajectories=())
    assert_same_trajectory(plain.trajectories[0], expected.trajectories[0])
    assert (forked.origin, forked.parent) == (Origin("eval", "test", 60), ("train-00003-007-01", 1))
    first, second = forked.trajectories
    assert first.routed_experts is not None and first.routed_experts.shape == (5, 2, 2)
    assert (second.forked_from, second.token_ids.tolist()) == (Fork(0, 3), [1, 2, 3, 12])
    assert failed.outcome is Outcome.FAILED and failed.error is not None and failed.error.type == "KeyError"
    assert failed.origin == Origin("rollout")
    assert odd.messages[0].content == "half \ud83d of a pair, NaN"
    assert odd.task["limit"] == float("inf") and np.isnan(odd.task["low"][1])  # type: ignore[index, call-overload]
    assert odd.rewards[0].value is not None and np.isnan(odd.rewards[0].value)
    assert dump_line(load_line(dump_line(plain))) == dump_line(plain)


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
def test_decode_reads_origin_of_schema_1_from_id(id: str, origin: Origin) -> None:
    row = {**encode(example_episode(id)), "schema": 1}
    del row["origin"]
    assert decode(row).origin == origin
