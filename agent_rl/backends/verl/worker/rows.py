"""Rows: how an episode, its snapshots and its continuations travel through verl, and how they are checked.

Snapshots are any Python objects of an environment. They travel pickled; the driver only passes them on and never
unpickles them: in the driver, `Episode.snapshots` holds the pickles as texts.
"""

from __future__ import annotations

import base64
import json
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from agent_rl.algorithms.samples import to_samples
from agent_rl.core.episode import Episode, component_values
from agent_rl.core.messages import JSON
from agent_rl.core.sequences import shared_start
from agent_rl.core.trajectory import ExpertArray
from agent_rl.errors import ConfigError
from agent_rl.gym.mixture import member_of
from agent_rl.gym.registry import EnvSpec
from agent_rl.rollout import Job, continuation
from agent_rl.rollout.job import Branch
from agent_rl.store.arrays import pack_array
from agent_rl.store.codec import dump_line, load_line

EPISODE = "agent_rl_episode"
"""The extra field that holds the whole episode, with its first row."""
GROUP = "agent_rl_group"
"""The extra field that holds an episode's group, with its first row: to be read without the episode."""
SNAPSHOTS = "agent_rl_snapshots"
"""The extra field that holds an episode's snapshots, with its first row."""


@dataclass(frozen=True, slots=True)
class Row:
    """A row of verl's: one trajectory, cut at the first sampled token."""

    prompt_ids: list[int]
    response_ids: list[int]
    response_mask: list[int]
    response_logprobs: list[float]
    routed_experts: ExpertArray | None
    versions: tuple[int, int]
    """The oldest and the newest weights that sampled it."""
    extra_fields: dict[str, JSON]


def rows_of(episode: Episode, *, experts: bool = False) -> list[Row]:
    """Return an episode's rows: one per trajectory with tokens of its own, or a blank one if there are none.

    The blank row has nothing to train on. It is there so that verl's bookkeeping, which counts rows, sees the episode,
    and the driver gets to store it, its routed experts too if they are asked for.
    """
    found = []
    for sample in to_samples([episode]):
        start = int(np.argmax(sample.loss_mask))
        versions = sample.policy_versions[sample.loss_mask]
        found.append(
            Row(
                prompt_ids=sample.token_ids[:start].tolist(),
                response_ids=sample.token_ids[start:].tolist(),
                response_mask=sample.loss_mask[start:].astype(int).tolist(),
                response_logprobs=sample.rollout_logprobs[start:].tolist(),
                routed_experts=sample.routed_experts,
                versions=(int(versions.min()), int(versions.max())),
                extra_fields={},
            )
        )
    rows = found or [Row([0], [0], [0], [0.0], None, (0, 0), {})]
    rows[0].extra_fields[GROUP] = episode.group_id
    rows[0].extra_fields[EPISODE] = dump_line(episode, experts=pack_array if experts else None).decode()
    if episode.snapshots:
        rows[0].extra_fields[SNAPSHOTS] = pack_snapshots(episode)
    return rows


def episode_of(extra_fields: dict[str, JSON]) -> Episode | None:
    """Return the episode that a row carries, its snapshots packed; only an episode's first row does."""
    line = extra_fields.get(EPISODE)
    return with_snapshots(load_line(str(line).encode()), extra_fields) if line is not None else None


def rewards_of(episode: Episode) -> dict[str, float]:
    """Return what verl's evaluation averages of an episode: success and components as far as they are known, and flags.

    `failed` and `scored` are 0 or 1; verl averages every name over the episodes that have it.
    """
    found = {name: float(value) for name, value in component_values(episode).items() if value is not None}
    if episode.success is not None:
        found["success"] = float(episode.success)
    return found | {"failed": float(not episode.trainable), "scored": float(episode.reward is not None)}


def check_row(episode: Episode, number: int, what: str, sent: Sequence[int], received: Sequence[int]) -> None:
    """Compare one of verl's rows with the sampled trajectory, before it is trained on.

    Args:
        episode: the row's.
        number: which of the episode's rows it is.
        what: is compared: "ids", of every token, or "mask", of the response's: 1 where the policy sampled.
        sent: what the trajectory says.
        received: what verl has.

    Raises:
        RuntimeError: if they differ anywhere.
    """
    if list(sent) != list(received):
        at = shared_start(sent, received)
        raise RuntimeError(
            f"row {number} of episode {episode.id} came back from verl changed at token {at} of its {what} "
            f"({len(sent)} sent, {len(received)} received): it must not be trained on"
        )


def pack_snapshots(episode: Episode) -> list[str]:
    """Return an episode's snapshots as texts.

    Raises:
        ConfigError: if one can't be pickled.
    """
    try:
        return [base64.b64encode(pickle.dumps(snapshot)).decode() for snapshot in episode.snapshots]
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"a snapshot of {episode.env} can't go to another process, as pickle refuses it ({error}): keep what it "
            "names out of snapshot_attributes, or define snapshot() and restore() with plain data"
        ) from error


def with_snapshots(episode: Episode, extra_fields: Mapping[str, JSON]) -> Episode:
    """Return an episode with the packed snapshots that its row carries, if any."""
    packed = extra_fields.get(SNAPSHOTS)
    return replace(episode, snapshots=tuple(packed)) if isinstance(packed, Sequence) else episode


def dump_branch(branch: Branch) -> str:
    """Return a branch as JSON; its episode's snapshots are packed."""
    line = dump_line(branch.episode).decode()
    return json.dumps({"episode": line, "turn": branch.turn, "seed": branch.seed, "snapshot": branch.snapshot})


def load_continuation(text: str, env: EnvSpec) -> Job:
    """Return the job that continues a branch from `dump_branch` in an environment, or one of a mixture."""
    row = json.loads(text)
    snapshot = pickle.loads(base64.b64decode(row["snapshot"]))
    turn = int(row["turn"])
    episode = replace(load_line(row["episode"].encode()), snapshots=(None,) * turn + (snapshot,))
    return continuation(member_of(env, episode.env), episode, turn, int(row["seed"]))
