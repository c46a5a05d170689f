"""An episode as one line of JSON: readable to people and `jq`, with the tokens in a packed block.

Rewards keep every bit (JSON holds a float's shortest exact form). JSON has no NaN and no infinity, so these stand as
`{"$float": "NaN"}`, `"Infinity"` or `"-Infinity"`: a reward function or a model's tool call may well produce one, and
such an episode must not be lost.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import cast, get_args

from agent_rl.core.episode import Episode, Failure, Origin, Outcome, Purpose, Reward, StepRecord, StopReason
from agent_rl.core.messages import JSON, Message, Role, ToolCall, ToolErrorKind
from agent_rl.errors import DamagedEpisodeError, StoreError
from agent_rl.store import fields
from agent_rl.store.fields import Row
from agent_rl.store.packing import pack, unpack

SCHEMA = 2
_ROLES = ("system", "user", "assistant", "tool")
_NAMED_FLOATS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def encode(episode: Episode, *, experts: bool = False) -> dict[str, JSON]:
    """Return the episode as a JSON object; `experts` keeps the routed experts, which are huge."""
    row: dict[str, JSON] = {
        "schema": SCHEMA,
        "id": episode.id,  # second, where episode_ids finds it without reading the line
        "env": episode.env,
        "group_id": episode.group_id,
        "origin": _origin_row(episode.origin),
        # For people and jq; decode works these out again and never reads them.
        "reward": episode.reward,
        "turns": episode.turns,
        "tool_errors": dict(episode.tool_errors),
        "stop_reason": episode.stop_reason.value,
        "outcome": episode.outcome.value,
        "seed": episode.seed,
        "seconds": episode.seconds,
        "task": episode.task,
        "messages": [_message_row(m) for m in episode.messages],
        "steps": [_step_row(s) for s in episode.steps],
        "rewards": [_reward_row(r) for r in episode.rewards],
        "versions": episode.versions,
        "trajectories": [pack(t, experts=experts) for t in episode.trajectories],
    }
    if episode.env_args:
        row["env_args"] = episode.env_args
    if episode.parent is not None:
        row["parent"] = list(episode.parent)
    if (failure := episode.error) is not None:
        row["error"] = {
            "where": failure.where,
            "type": failure.type,
            "message": failure.message,
            "traceback": failure.traceback,
        }
    return row


def decode(row: Row) -> Episode:
    """Return the episode that `encode` was given; fields it does not know are left alone.

    Raises:
        StoreError: if the row was written under a schema that this version can't read.
        DamagedEpisodeError: if a field is missing or holds something else than it should.
    """
    schema = fields.integer(row, "schema")
    if schema not in (1, SCHEMA):
        raise StoreError(
            f"the episode has schema {schema}, and this agent_rl reads schemas 1 and {SCHEMA}; "
            "read it with the agent_rl that wrote it"
        )
    versions = fields.optional_mapping(row, "versions")
    return Episode(
        id=fields.text(row, "id"),
        env=fields.text(row, "env"),
        task=fields.mapping(row, "task"),
        seed=fields.integer(row, "seed"),
        group_id=fields.text(row, "group_id"),
        origin=_origin(fields.mapping(row, "origin")) if schema == SCHEMA else _origin_by_id(fields.text(row, "id")),
        messages=tuple(_message(r) for r in fields.rows(row, "messages")),
        steps=tuple(_step(r) for r in fields.rows(row, "steps")),
        trajectories=tuple(unpack(r) for r in fields.rows(row, "trajectories")),
        rewards=tuple(_reward(r) for r in fields.rows(row, "rewards")),
        stop_reason=fields.choice(row, "stop_reason", StopReason),
        outcome=fields.choice(row, "outcome", Outcome),
        error=_failure(fields.mapping(row, "error")) if row.get("error") is not None else None,
        parent=_parent(row["parent"]) if row.get("parent") is not None else None,
        versions={name: fields.text(versions, name) for name in versions},
        env_args=fields.optional_mapping(row, "env_args"),
        seconds=fields.number(row, "seconds") if "seconds" in row else 0.0,
    )


def dump_line(episode: Episode, *, experts: bool = False) -> bytes:
    """Return the episode as one line of UTF-8 JSON, newline included.

    Raises:
        StoreError: if the episode holds something that JSON can't.
    """
    row = encode(episode, experts=experts)
    try:
        try:
            text = _dumps(row)
        except ValueError:  # a NaN or an infinity: rare, so looked for only when met
            text = _dumps(_name_floats(row))
    except (TypeError, ValueError, RecursionError) as error:
        raise StoreError(f"episode {episode.id!r} holds something that JSON can't: {error}") from error
    try:
        return text.encode() + b"\n"
    except UnicodeEncodeError:  # half of a surrogate pair, as a model's "\ud83d" gives
        return json.dumps(json.loads(text), separators=(",", ":")).encode() + b"\n"


def load_line(line: bytes) -> Episode:
    """Return the episode that a line holds.

    Raises:
        StoreError: as `decode` does; a DamagedEpisodeError also if the line is no JSON object.
    """
    try:
        hook = _unname_float if b'"$float"' in line else None
        row = json.loads(line, object_hook=hook)
    except (ValueError, RecursionError) as error:
        raise DamagedEpisodeError(f"the line is not JSON: {error}") from error
    return decode(fields.as_mapping(row, "episode"))


def _origin_row(origin: Origin) -> dict[str, JSON]:
    row: dict[str, JSON] = {"purpose": origin.purpose, "split": origin.split}
    if origin.step is not None:
        row["step"] = origin.step
    if origin.sample:
        row["sample"] = origin.sample
    if origin.greedy:
        row["greedy"] = True
    return row


def _origin(row: Row) -> Origin:
    purpose = fields.text(row, "purpose")
    if purpose not in get_args(Purpose):
        raise fields.damaged("purpose", f"one of {', '.join(get_args(Purpose))}", purpose)
    return Origin(
        purpose=cast(Purpose, purpose),
        split=fields.text(row, "split"),
        step=fields.optional_integer(row, "step"),
        sample=fields.integer(row, "sample") if "sample" in row else 0,
        greedy=fields.boolean(row, "greedy") if "greedy" in row else False,
    )


def _origin_by_id(id: str) -> Origin:
    """Return the origin that schema 1 told by the id only."""
    if trained := re.fullmatch(r"train-(\d+)-\d+-(\d+|greedy)", id):
        step, sample = trained.groups()
        return Origin("train", "", int(step), 0 if sample == "greedy" else int(sample), sample == "greedy")
    if evaluated := re.fullmatch(r"(.+?)-(\d+)-(?:(sampled|greedy|low-temperature)-)?\d+(?:-(\d+))?", id):
        split, step, sampling, sample = evaluated.groups()
        return Origin("eval", split, int(step), int(sample or 0), sampling == "greedy")
    return Origin("rollout")


def _message_row(message: Message) -> dict[str, JSON]:
    row: dict[str, JSON] = {"role": message.role}
    if message.name is not None:
        row["name"] = message.name
    if message.reasoning is not None:
        row["reasoning"] = message.reasoning
    if message.content:
        row["content"] = message.content
    if message.tool_calls:
        row["tool_calls"] = [_call_row(call) for call in message.tool_calls]
    if message.tool_call_id is not None:
        row["tool_call_id"] = message.tool_call_id
    if message.tool_error is not None:
        row["tool_error"] = message.tool_error.value
    return row


def _message(row: Row) -> Message:
    role = fields.text(row, "role")
    if role not in _ROLES:
        raise fields.damaged("role", f"one of {', '.join(_ROLES)}", role)
    return Message(
        role=cast(Role, role),
        content=fields.text(row, "content") if "content" in row else "",
        reasoning=fields.optional_text(row, "reasoning"),
        tool_calls=tuple(_call(r) for r in fields.rows(row, "tool_calls")) if "tool_calls" in row else (),
        tool_call_id=fields.optional_text(row, "tool_call_id"),
        name=fields.optional_text(row, "name"),
        tool_error=fields.choice(row, "tool_error", ToolErrorKind) if "tool_error" in row else None,
    )


def _call_row(call: ToolCall) -> dict[str, JSON]:
    row: dict[str, JSON] = {"id": call.id, "name": call.name}
    if call.arguments:
        row["arguments"] = call.arguments
    if call.error is not None:
        row["error"] = call.error
    return row


def _call(row: Row) -> ToolCall:
    return ToolCall(
        id=fields.text(row, "id"),
        name=fields.text(row, "name"),
        arguments=fields.optional_mapping(row, "arguments"),
        error=fields.optional_text(row, "error"),
    )


def _step_row(step: StepRecord) -> dict[str, JSON]:
    row: dict[str, JSON] = {"messages": step.messages, "reward": step.reward}
    row |= {"terminated": step.terminated, "truncated": step.truncated}
    if step.state is not None:
        row["state"] = step.state
    return row


def _step(row: Row) -> StepRecord:
    return StepRecord(
        messages=fields.integer(row, "messages"),
        reward=fields.number(row, "reward"),
        terminated=fields.boolean(row, "terminated"),
        truncated=fields.boolean(row, "truncated"),
        state=fields.optional_text(row, "state"),
    )


def _reward_row(reward: Reward) -> dict[str, JSON]:
    row: dict[str, JSON] = {"name": reward.name, "value": reward.value, "weight": reward.weight}
    row["source"] = reward.source
    if reward.turn is not None:
        row["turn"] = reward.turn
    return row


def _reward(row: Row) -> Reward:
    return Reward(
        name=fields.text(row, "name"),
        value=None if fields.required(row, "value") is None else fields.number(row, "value"),
        weight=fields.number(row, "weight"),
        source=fields.text(row, "source"),
        turn=fields.optional_integer(row, "turn"),
    )


def _failure(row: Row) -> Failure:
    trace = fields.optional_text(row, "traceback") or ""
    return Failure(fields.text(row, "where"), fields.text(row, "type"), fields.text(row, "message"), trace)


def _parent(value: JSON) -> tuple[str, int]:
    if not isinstance(value, list) or len(value) != 2 or not isinstance(value[0], str):
        raise fields.damaged("parent", "[episode id, turn]", value)
    return value[0], fields.integers(value[1:], "parent", 1)[0]


def _dumps(row: JSON) -> str:
    return json.dumps(row, ensure_ascii=False, separators=(",", ":"), allow_nan=False, default=_plain)


def _plain(value: object) -> object:
    """Turn what means a JSON value into one: any mapping, and NumPy's scalars."""
    if isinstance(value, Mapping):
        return dict(value)
    if callable(item := getattr(value, "item", None)) and getattr(value, "ndim", None) == 0:
        return item()
    raise TypeError(f"{value!r} of type {type(value).__name__}; use numbers, strings, lists and objects")


def _name_floats(value: JSON) -> JSON:
    if isinstance(value, float) and not math.isfinite(value):
        return {"$float": "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"}
    if isinstance(value, Mapping):
        return {key: _name_floats(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_name_floats(item) for item in value]
    return value


def _unname_float(row: dict[str, JSON]) -> JSON:
    name = row.get("$float")
    return _NAMED_FLOATS.get(name, row) if len(row) == 1 and isinstance(name, str) else row
