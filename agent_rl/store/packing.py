"""A trajectory as one packed block: exact, checked, and about 3 bytes a token instead of JSON's 16.

    {"tokens":   {"dtype": "int32", "shape": [T], "crc32": ..., "zlib": "<base64>"},
     "logprobs": {"dtype": "float32", "shape": [sampled], ...},     # of the policy's tokens only, in order
     "spans":    [[start, stop, source, turn, policy_version], ...],
     "forked_from": [parent, position],                             # only where it was forked
     "experts":  {"dtype": "int8", "shape": [rows, layers, top_k], ...}}   # only where asked for

Bytes are little-endian and row-major; the checksum is of the bytes before compression.
"""

from __future__ import annotations

import binascii
import math
import zlib
from collections.abc import Collection
from typing import TypeVar, cast

import numpy as np
import numpy.typing as npt

from agent_rl.core.messages import JSON
from agent_rl.core.trajectory import ExpertArray, Fork, Source, Span, Trajectory
from agent_rl.errors import DamagedEpisodeError, TrajectoryError
from agent_rl.store import fields
from agent_rl.store.fields import Row

EXPERT_DTYPES = ("int8", "int16", "int32")
_LEVEL = 1  # level 6 is four times slower for 7% fewer bytes
_Scalar = TypeVar("_Scalar", bound=np.generic)


def pack(trajectory: Trajectory, *, experts: bool = False) -> dict[str, JSON]:
    """Return the trajectory as a JSON object.

    Args:
        trajectory: what to pack; it is not changed.
        experts: whether to keep the routed experts, which can outweigh everything else a hundredfold.
    """
    block: dict[str, JSON] = {
        "tokens": _pack_array(trajectory.token_ids),
        "logprobs": _pack_array(trajectory.logprobs[trajectory.loss_mask]),
        "spans": [[s.start, s.stop, s.source.value, s.turn, s.policy_version] for s in trajectory.spans],
    }
    if trajectory.forked_from is not None:
        block["forked_from"] = [trajectory.forked_from.parent, trajectory.forked_from.position]
    if experts and (routed := trajectory.routed_experts) is not None:
        block["experts"] = _pack_array(_reported(routed))
    return block


def unpack(block: Row) -> Trajectory:
    """Return the trajectory that `pack` was given, to the bit.

    Raises:
        DamagedEpisodeError: if a checksum, a length, a dtype or a field is not what it should be.
    """
    tokens = _unpack_array(block, "tokens", ("int32",), 1)
    logprobs = _unpack_array(block, "logprobs", ("float32",), 1)
    experts = cast(ExpertArray, _unpack_array(block, "experts", EXPERT_DTYPES, 3)) if "experts" in block else None
    spans = [_span(row) for row in fields.sequence(block, "spans")]
    fork = Fork(*fields.integers(block["forked_from"], "forked_from", 2)) if "forked_from" in block else None
    try:
        return Trajectory.restore(tokens.tolist(), spans, logprobs.tolist(), experts, fork)
    except TrajectoryError as error:
        raise DamagedEpisodeError(f"the packed trajectory contradicts itself: {error}") from error


def _reported(routed: ExpertArray) -> ExpertArray:
    """Drop the padding at the end, so that a restored trajectory can still be continued by an engine."""
    known = np.flatnonzero((routed != -1).any(axis=(1, 2)))
    return routed[: known[-1] + 1 if known.size else 0]


def _pack_array(array: npt.NDArray[_Scalar]) -> dict[str, JSON]:
    raw = array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes()
    return {
        "dtype": array.dtype.name,
        "shape": list(array.shape),
        "crc32": zlib.crc32(raw),
        "zlib": binascii.b2a_base64(zlib.compress(raw, _LEVEL), newline=False).decode("ascii"),
    }


def _unpack_array(block: Row, name: str, allowed: Collection[str], ndim: int) -> npt.NDArray[np.generic]:
    """Return the array called `name`, with `ndim` dimensions and one of the dtypes in `allowed`."""
    packed = fields.mapping(block, name)
    dtype = fields.text(packed, "dtype")
    if dtype not in allowed:
        raise DamagedEpisodeError(f"the packed {name} have the unknown dtype {dtype!r}; known: {', '.join(allowed)}")
    shape = fields.integers(fields.required(packed, "shape"), "shape", ndim)
    if min(shape) < 0:
        raise fields.damaged("shape", "sizes of at least 0", shape)
    little = np.dtype(dtype).newbyteorder("<")
    raw = _inflate(fields.text(packed, "zlib"), name, math.prod(shape) * little.itemsize)
    if zlib.crc32(raw) != (expected := fields.integer(packed, "crc32")):
        raise DamagedEpisodeError(f"the packed {name} have the checksum {zlib.crc32(raw)}, not {expected}")
    return np.frombuffer(raw, little).reshape(shape).astype(dtype)


def _inflate(encoded: str, name: str, length: int) -> bytes:
    """Decompress exactly `length` bytes; never more than one beyond, whatever the block claims to hold."""
    inflater = zlib.decompressobj()
    try:
        raw = inflater.decompress(binascii.a2b_base64(encoded), length + 1)
    except (binascii.Error, ValueError, zlib.error) as error:
        raise DamagedEpisodeError(f"the packed {name} can't be decompressed: {error}") from error
    if len(raw) != length:
        found = len(raw) if len(raw) < length else f"more than {length}"
        raise DamagedEpisodeError(f"the packed {name} hold {found} bytes where their shape wants {length}")
    return raw


def _span(row: JSON) -> Span:
    if not isinstance(row, list) or len(row) != 5:
        raise fields.damaged("spans", "rows of [start, stop, source, turn, policy_version]", row)
    start, stop, turn = fields.integers([row[0], row[1], row[3]], "spans", 3)
    version = None if row[4] is None else fields.integers([row[4]], "spans", 1)[0]
    return Span(start, stop, fields.choice({"source": row[2]}, "source", Source), turn, version)
