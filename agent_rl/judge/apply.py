"""Judged rewards: a judged file's scores as rewards of its episodes, in a new episode file to learn from."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, TypeAlias

from agent_rl.core.display import plural
from agent_rl.core.episode import Episode, Reward
from agent_rl.core.judgement import Judgement
from agent_rl.errors import ConfigError, StoreError
from agent_rl.gym.tasks import task_key
from agent_rl.judge.judged import Judged, JudgedEpisode
from agent_rl.store.episodes import EpisodeWriter, read_episodes
from agent_rl.store.selection import episode_ids
from agent_rl.store.shards import episode_file, shards_of

Mode: TypeAlias = Literal["replace", "add"]


@dataclass(frozen=True, slots=True)
class Applied:
    """What became of a file's episodes."""

    file: Path
    written: int
    unscored: int
    """Of these: their judged reward is not scored, so that they are in no baseline."""
    left_out: int
    """Episodes without a judgement."""


def apply_judged(
    judged: Judged,
    out: str | os.PathLike[str],
    *,
    mode: Mode = "replace",
    weight: float = 1.0,
    episodes: str | os.PathLike[str] | None = None,
) -> Applied:
    """Write the judged episodes into a new file, each with its score as a reward and its judgement.

    Args:
        judged: the judgements.
        out: a new episode file.
        mode: "replace" gives the rewards that were there the weight 0, and their source says what it was; "add" keeps
            them.
        weight: of the judged reward.
        episodes: where the episodes are now; None for where they were judged.

    Raises:
        ConfigError: if the new file has episodes already, or the weight is not finite.
        StoreError: if the episodes are gone, or can't be read.
    """
    if not math.isfinite(weight):
        raise ConfigError(f"weight={weight}: give a finite number")
    source, target = episodes_of(judged, episodes), episode_file(out)
    _require_new(target)
    found = {each.judgement.episode: each for each in judged.episodes}
    name = judged.header.rubric.name if judged.header.rubric else judged.header.task_key
    written = unscored = left_out = 0
    with EpisodeWriter(target, experts=True) as writer:
        _require_new(target)  # as another may have written it in between
        for episode in read_episodes(source, experts=True):
            if (judgement := _judgement_of(episode, found)) is None:
                left_out += 1
                continue
            writer.write(with_judged_reward(episode, judgement, name, mode, weight))
            written += 1
            unscored += judgement.score is None
    return Applied(target, written, unscored, left_out)


def _require_new(file: Path) -> None:
    if stored := len(episode_ids(file)):
        raise ConfigError(f"{file} has {plural(stored, 'episode')} already: name another file with -o FILE")


def with_judged_reward(episode: Episode, judgement: Judgement, name: str, mode: Mode, weight: float) -> Episode:
    """Return an episode with a judgement and its score as a reward."""
    taken = {reward.name for reward in episode.rewards}
    names = (name if n == 1 else f"{name}-{n}" for n in range(1, len(taken) + 2))
    faults = ", ".join(f"{fault} ({n})" for fault, n in Counter(judgement.faults).items())
    error = f"no verdict: {faults or 'no criterion applies'}" if judgement.score is None else None
    own = Reward(next(n for n in names if n not in taken), judgement.score, weight, "judge", error=error)
    old = tuple(map(_replaced, episode.rewards)) if mode == "replace" else episode.rewards
    is_first = all(reward.source.startswith("step") for reward in old)  # else the task's own tells success
    rewards = (own, *old) if is_first else (*old, own)
    return replace(episode, rewards=rewards, judgements=(*episode.judgements, judgement))


def _replaced(reward: Reward) -> Reward:
    """Return a reward with weight 0; one that never counted stays as it is."""
    if reward.weight == 0:
        return reward
    return replace(reward, weight=0.0, source=f"{reward.source}, replaced (weight {reward.weight:g})")


def episodes_of(judged: Judged, file: str | os.PathLike[str] | None = None) -> Path:
    """Return the file of the episodes of a judged file.

    Raises:
        StoreError: if it is not there, or has none of them.
    """
    if file is None and judged.header.episodes is None:
        raise StoreError(f"{judged.path} does not say where its episodes are: name their file with --episodes FILE")
    found = Path(judged.header.episodes.file if file is None and judged.header.episodes else file or "")
    if not shards_of(found):
        raise StoreError(f"{judged.path}: its episodes are not at {found}: name their file with --episodes FILE")
    known = {each.judgement.episode: each for each in judged.episodes}
    if all(_judgement_of(episode, known) is None for episode in read_episodes(found)):
        raise StoreError(
            f"{found} has none of the episodes that {judged.path} judges: there is {_some(episode_ids(found))}, judged "
            f"{_some(known)}; name their file with --episodes FILE"
        )
    return found


def _judgement_of(episode: Episode, judged: Mapping[str, JudgedEpisode]) -> Judgement | None:
    """Return an episode's judgement; one of the same id and another task is of another run's episode."""
    each = judged.get(episode.id)
    return each.judgement if each is not None and each.task in ("", task_key(episode.task)) else None


def _some(ids: Collection[str]) -> str:
    return ", ".join(sorted(ids)[:3]) + (f" and {len(ids) - 3:,} more" if len(ids) > 3 else "") or "none"
