"""A trajectory as one packed block: exact, checked, and about 3 bytes a token instead of JSON's 16.

{"tokens":   {"dtype": "int32", "shape": [T], "crc32": ..., "zstd": "<base64>"},
"logprobs": {"dtype": "float32", "shape": [sampled], ...},     # of the policy's tokens only, in order
"spans":    [[start, stop, source, turn, policy_version], ...],
"forked_from": [parent, position],     # only where it was forked; of a sub-agent true, and where it was called, too
"experts":  {"dtype": "int8", "shape": [rows, layers, top_k], "crc32": ...,    # only where asked for
"file": "episodes.experts", "offset": ..., "length": ...}}
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias, cast

import numpy as np

from agent_rl.core.trajectory import ExpertArray, Fork, Source, Span, Trajectory
from agent_rl.errors import DamagedEpisodeError, TrajectoryError
from agent_rl.store.arrays import ArrayBeside, PackedArray, pack_array, unpack_array

EXPERT_DTYPES = ("int8", "int16", "int32")
KeepExperts: TypeAlias = Callable[[ExpertArray], PackedArray | ArrayBeside]
"""Puts routed experts somewhere: `pack_array` does into the line."""


@dataclass(frozen=True, slots=True)
class PackedTrajectory:
    """What is stored of a trajectory."""

    tokens: PackedArray
    logprobs: PackedArray
    spans: tuple[tuple[int, int, Source, int, int | None], ...]
    forked_from: tuple[int, int] | tuple[int, int, bool] | tuple[int, int, bool, int | None] | None = None
    experts: PackedArray | ArrayBeside | None = None


def pack(trajectory: Trajectory, experts: KeepExperts | None = None) -> PackedTrajectory:
    """Return what to store of a trajectory.

    Args:
        trajectory: what to pack; it is not changed.
        experts: keeps the routed experts, which can outweigh everything else a hundredfold; None leaves them out.
    """
    routed = trajectory.routed_experts if experts else None
    fork = trajectory.forked_from
    return PackedTrajectory(
        tokens=pack_array(trajectory.token_ids),
        logprobs=pack_array(trajectory.sampled_logprobs),
        spans=tuple((s.start, s.stop, s.source, s.turn, s.policy_version) for s in trajectory.spans),
        forked_from=None if fork is None else _forked_from(fork),
        experts=None if experts is None or routed is None else experts(_reported(routed)),
    )


def _forked_from(fork: Fork) -> tuple[int, int] | tuple[int, int, bool, int | None]:
    place = fork.parent, fork.position
    return (*place, True, fork.called_at) if fork.delegated else place


def unpack(block: PackedTrajectory, folder: Path | None = None) -> Trajectory:
    """Return the trajectory that `pack` was given, to the bit.

    Args:
        block: what `pack` returned.
        folder: where routed experts are that are not in the line; None leaves these out.

    Raises:
        DamagedEpisodeError: if a checksum, a length or a dtype is not what it should be.
    """
    tokens = unpack_array(block.tokens, "tokens", ("int32",), 1)
    logprobs = unpack_array(block.logprobs, "logprobs", ("float32",), 1)
    stored, experts = block.experts, None
    if isinstance(stored, PackedArray) or (stored is not None and folder is not None):
        experts = cast(ExpertArray, unpack_array(stored, "experts", EXPERT_DTYPES, 3, folder))
    fork = None if block.forked_from is None else Fork(*block.forked_from)
    try:
        return Trajectory.restore(tokens.tolist(), [Span(*s) for s in block.spans], logprobs.tolist(), experts, fork)
    except TrajectoryError as error:
        raise DamagedEpisodeError(f"the packed trajectory contradicts itself: {error}") from error


def _reported(routed: ExpertArray) -> ExpertArray:
    """Drop the padding at the end, so that a restored trajectory can still be continued by an engine."""
    known = np.flatnonzero((routed != -1).any(axis=(1, 2)))
    return routed[: known[-1] + 1 if known.size else 0]
