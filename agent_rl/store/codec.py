"""An episode as one line of JSON: readable to people and `jq`, with the tokens in a packed block.

pydantic writes and reads the dataclasses of `agent_rl.core`. What has its default is left out; floats keep every bit.
A reward or a model's tool call may hold what JSON lacks: NaN and infinities are written as `{"$float": "NaN"}`, halves
of surrogate pairs as U+FDD0 and four hex digits.
"""

from __future__ import annotations

import json
from dataclasses import MISSING, fields, replace
from operator import attrgetter
from pathlib import Path
from typing import Annotated, cast, get_type_hints

from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationError, create_model
from pydantic_core import PydanticSerializationError, to_json

from agent_rl.core.episode import Episode
from agent_rl.core.escaping import ESCAPE, escape, plain, unescape, with_strings
from agent_rl.core.messages import JSON
from agent_rl.errors import DamagedEpisodeError, StoreError
from agent_rl.store import schema_1
from agent_rl.store.images import KeepImage, Parts, pack_image, pack_parts, with_parts
from agent_rl.store.packing import KeepExperts, PackedTrajectory, pack, unpack

SCHEMA = 3
_NAMED = b'"$float"'
HEADS = (b'{"schema":3,', b'{"schema":2,')  # which differ in arrays only


def _stored_model() -> type[BaseModel]:
    """Return the model of a line: the fields of `Episode`, with packed trajectories and parts, without snapshots."""
    packed = Annotated[PackedTrajectory, AfterValidator(lambda block, info: unpack(block, info.context))]
    hints = get_type_hints(Episode, localns={"Trajectory": packed}, include_extras=True)
    defaults = {
        f.name: f.default if f.default_factory is MISSING else f.default_factory()
        for f in fields(Episode)
        if f.name != "snapshots"
    }
    named = {name: (hints[name], ... if default is MISSING else default) for name, default in defaults.items()}
    named["parts"] = (Parts, ())
    config = ConfigDict(ser_json_inf_nan="constants")
    return cast(type[BaseModel], create_model("StoredEpisode", __config__=config, **named))  # type: ignore[call-overload]


_Stored = _stored_model()
_NAMES = tuple(name for name in _Stored.model_fields if name != "parts")
_values = attrgetter(*_NAMES)


def dump_line(episode: Episode, *, experts: KeepExperts | None = None, images: KeepImage = pack_image) -> bytes:
    """Return the episode as one line of UTF-8 JSON, newline included.

    Args:
        episode: what to write; its snapshots are left out.
        experts: keeps the routed experts, which are huge: `pack_array` in the line; None leaves them out.
        images: keeps the messages' images: `pack_image` in the line.

    Raises:
        StoreError: if the episode holds something that JSON can't.
    """
    try:
        line = _dump(episode, experts, images)
        unsafe = ESCAPE.encode() in line or _NAMED in line
    except PydanticSerializationError as error:
        if not (unsafe := "surrogates not allowed" in str(error)):
            raise StoreError(f"episode {episode.id!r} holds something that JSON can't: {error}") from error
    if unsafe:
        line = _dump(with_strings(episode, _escape), experts, images)
    if b"NaN" in line or b"Infinity" in line:  # perhaps as a number, perhaps as a word
        line = _dumps(json.loads(line, parse_constant=lambda name: {"$float": name}))
    return line + b"\n"


def load_line(line: bytes, folder: Path | None = None, *, experts: bool = True) -> Episode:
    """Return the episode of a line; fields unknown to this version are ignored.

    Args:
        line: what `dump_line` returned.
        folder: where its routed experts and images are, if they are not in the line; None leaves these out, and the
            messages keep their text.
        experts: whether to read the experts there.

    Raises:
        StoreError: if the line was written under a schema that this version can't read.
        DamagedEpisodeError: if it is no JSON object, or a field is missing or holds something else than it should.
    """
    try:
        if not line.startswith(HEADS):
            line = _dumps(_of_this_schema(json.loads(line)))
        stored = dict(_validate(line, folder if experts else None))
        if parts := stored.pop("parts"):
            stored["messages"] = with_parts(stored["messages"], parts, folder)
        episode = Episode(**stored)
    except ValidationError as error:
        raise DamagedEpisodeError("; ".join(_explain(e["loc"], e["type"], e["msg"]) for e in error.errors())) from error
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise DamagedEpisodeError(f"the line is not JSON: {error}") from error
    return with_strings(episode, unescape) if ESCAPE.encode() in line else episode


def _escape(text: str) -> str:
    return f"{ESCAPE}0024float" if text == "$float" else escape(text)  # a key of a tool call's, not a number of ours


def _dump(episode: Episode, experts: KeepExperts | None, images: KeepImage) -> bytes:
    head = {
        "schema": SCHEMA,
        "id": episode.id,  # second, where episode_ids finds it without reading the line
        # for people and jq; they are not read
        "reward": episode.reward,
        "turns": episode.turns,
        "tool_errors": dict(episode.tool_errors),
    }
    parts = pack_parts(episode.messages, images)
    stored = _Stored.__new__(_Stored)  # as model_construct does, in a tenth of its time
    vars(stored).update(
        zip(_NAMES, _values(episode), strict=True),
        trajectories=tuple(pack(t, experts) for t in episode.trajectories),
        messages=tuple(replace(m, parts=()) for m in episode.messages) if parts else episode.messages,
        parts=parts,
    )
    row = _Stored.__pydantic_serializer__.to_json(
        stored,
        exclude={"id"},
        exclude_defaults=True,
        warnings=False,
        fallback=plain,
    )
    return to_json(head, inf_nan_mode="constants", fallback=plain)[:-1] + b"," + row[1:]


def _validate(line: bytes, folder: Path | None) -> BaseModel:
    if _NAMED not in line:
        try:
            return _Stored.model_validate_json(line, strict=True, context=folder)
        except ValidationError as error:
            if "recursion limit" not in str(error):
                raise
    return _Stored.model_validate(json.loads(line, object_hook=_unname_float), context=folder)


def _of_this_schema(row: JSON) -> JSON:
    if not isinstance(row, dict) or "schema" not in row:
        raise DamagedEpisodeError("the field 'schema' is missing")
    if row["schema"] not in (1, 2, SCHEMA):
        raise StoreError(
            f"the episode has schema {row['schema']}, and this agent_rl reads schemas 1 to {SCHEMA}; "
            "read it with the agent_rl that wrote it"
        )
    return schema_1.upgrade(with_strings(row, escape)) if row["schema"] == 1 else row


def _explain(path: tuple[int | str, ...], kind: str, message: str) -> str:
    if kind == "json_invalid":
        return f"the line is not JSON: {message}"
    name = ".".join(map(str, path))
    return f"the field '{name}' is missing" if kind == "missing" else f"the field '{name}': {message}"


def _dumps(row: JSON) -> bytes:
    return json.dumps(row, ensure_ascii=False, separators=(",", ":")).encode()


def _unname_float(row: dict[str, JSON]) -> JSON:
    name = row.get("$float")
    return float(str(name)) if len(row) == 1 and name in ("NaN", "Infinity", "-Infinity") else row
