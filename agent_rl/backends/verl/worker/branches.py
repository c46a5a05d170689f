"""Branches: how an episode's snapshots reach the driver, and how a continuation reaches the worker that runs it.

Snapshots are any Python objects of an environment. They cross pickled, and the driver, which only hands them on, never
unpickles them: what it has in `Episode.snapshots` are these texts.
"""

from __future__ import annotations

import base64
import json
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import replace

from agent_rl.core.episode import Episode
from agent_rl.core.messages import JSON
from agent_rl.errors import ConfigError
from agent_rl.gym.budget import Budget
from agent_rl.gym.registry import EnvSpec
from agent_rl.rollout import Job, continuation
from agent_rl.rollout.job import Branch
from agent_rl.store.codec import dump_line, load_line

SNAPSHOTS = "agent_rl_snapshots"
"""The extra field that holds an episode's snapshots, with its first row."""


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


def load_continuation(text: str, spec: EnvSpec, budget: Budget) -> Job:
    """Return the job that runs on from a branch that `dump_branch` wrote, within an episode's budget."""
    row = json.loads(text)
    snapshot = pickle.loads(base64.b64decode(row["snapshot"]))
    turn = int(row["turn"])
    episode = replace(load_line(row["episode"].encode()), snapshots=(None,) * turn + (snapshot,))
    return continuation(spec, episode, turn, int(row["seed"]), budget=budget)
