"""A trajectory for the page: ids and numbers packed as binary, the texts of the distinct ids beside them."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from agent_rl.core.messages import JSON
from agent_rl.core.trajectory import FloatArray, Trajectory
from agent_rl.store.token_records import TokenRecord
from agent_rl.view.decoding import Decode, pieces

MOST_EXPERTS = 1 << 20
"""The bytes of routed experts of one trajectory that a page takes; a large model's are a hundred times its tokens."""


def trajectory_json(trajectory: Trajectory, records: Sequence[TokenRecord] = (), decode: Decode | None = None) -> JSON:
    """Return a trajectory, as 60_tokens.js reads it.

    `ids` are the distinct ids, `texts` their texts, and `tokens` indices into both; `joined` has the texts of tokens
    that read differently together: [first, how many, text]. Numbers of sampled tokens are rounded to float16: three
    digits. A ratio is kept as its logarithm.

    Args:
        trajectory: which.
        records: what updates made of its tokens.
        decode: from ids to text; without it, there are ids only.
    """
    distinct, indices = np.unique(trajectory.token_ids, return_inverse=True)
    texts = None if decode is None else [decode([int(id)]) for id in distinct]
    fork, logprobs = trajectory.forked_from, trajectory.sampled_logprobs
    narrow = len(distinct) <= 1 << 16
    return {
        "count": len(trajectory),
        "sampled": trajectory.sampled,
        "fork": None if fork is None else [fork.parent, fork.position, fork.delegated],
        "spans": [[s.start, s.stop, s.source, s.turn, s.policy_version] for s in trajectory.spans],
        "ids": distinct.tolist(),
        "texts": texts,
        "tokens": _packed(indices.astype("<u2" if narrow else "<u4")),
        "width": 16 if narrow else 32,
        "joined": [] if decode is None or texts is None else list(_joined(trajectory, indices, texts, decode)),
        "logprobs": _rounded(logprobs),
        "records": [_record_json(record, logprobs) for record in records],
        "experts": _experts(trajectory),
    }


def _record_json(record: TokenRecord, sampled: FloatArray) -> JSON:
    return {
        "step": record.step,
        "advantages": None if record.advantages is None else _rounded(record.advantages),
        "logratios": _rounded(record.logprobs - sampled) if len(record.logprobs) == len(sampled) else None,
    }


def _experts(trajectory: Trajectory) -> JSON:
    """Return the experts of sampled tokens, or how many bytes they would take; None where none were stored."""
    routed = trajectory.routed_experts
    if routed is None:
        return None
    kept = routed[trajectory.loss_mask].astype("<i2")
    if kept.nbytes > MOST_EXPERTS:
        return {"bytes": kept.nbytes}
    return {"layers": kept.shape[1], "top_k": kept.shape[2], "packed": _packed(kept)}


def _joined(
    trajectory: Trajectory, indices: npt.NDArray[np.integer], texts: Sequence[str], decode: Decode
) -> Iterator[JSON]:
    """Yield where tokens together read differently than one by one."""
    ids = trajectory.token_ids
    for span in trajectory.spans:
        own = ids[span.start : span.stop].tolist()
        if "".join(texts[at] for at in indices[span.start : span.stop]) == decode(own):
            continue
        for text, start, stop in pieces(own, decode, span.start):
            if stop - start > 1 or texts[indices[start]] != text:
                yield [start, stop - start, text]


def _rounded(numbers: FloatArray) -> str:
    largest = np.finfo(np.float16).max
    return _packed(np.clip(numbers, -largest, largest).astype("<f2"))


def _packed(array: npt.NDArray[np.generic]) -> str:
    return base64.b64encode(array.tobytes()).decode()
