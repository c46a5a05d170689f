"""Stored groups: episodes of an earlier run to learn from, indexed once and read from disk for each batch."""

from __future__ import annotations

from collections.abc import Callable, Container
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import TypeAdapter, ValidationError

from agent_rl.core.display import plural
from agent_rl.core.episode import Episode, group_episodes
from agent_rl.core.sequences import shared_start
from agent_rl.core.trajectory import Source
from agent_rl.core.turns import turns
from agent_rl.errors import ConfigError, StoreError
from agent_rl.gym.tasks import task_key
from agent_rl.seeds import Stream, rng
from agent_rl.store.episodes import episode_at, locate_episodes
from agent_rl.store.shards import Place, shards_of

if TYPE_CHECKING:
    from agent_rl.algorithms import Algorithm
    from agent_rl.rendering.base import Renderer

CHECKED = 8
"""Of how many groups the tokens are compared with the text."""


@dataclass(frozen=True, slots=True)
class StoredGroup:
    """One group: samples of the same task."""

    id: str
    places: tuple[Place, ...]
    """Where the lines of its episodes begin."""


@dataclass(frozen=True, slots=True)
class StoredGroups:
    """The groups of an episode file to learn from; the episodes themselves stay on disk."""

    file: Path
    """An episode file or a run's folder."""
    groups: tuple[StoredGroup, ...]
    largest_token: int
    """The largest token id of their episodes."""

    def batch(self, seed: int, step: int, size: int) -> list[Episode]:
        """Return the episodes of a step's groups; they depend on these three numbers only.

        Every epoch has the groups in another order. What is left over for no whole batch waits for the next epoch, and
        a batch has no group twice: it is smaller than `size` if there are fewer.
        """
        size = min(size, len(self.groups))
        epoch, place = divmod(step, len(self.groups) // size)
        order = rng(Stream.STORED_GROUPS, seed, epoch).permutation(len(self.groups))
        return [e for index in order[place * size : (place + 1) * size] for e in self.read(int(index))]

    def read(self, index: int) -> list[Episode]:
        """Read one group, under an id of its own.

        Raises:
            StoreError: if the file is not the one that was indexed.
        """
        group = self.groups[index]
        episodes = [episode_at(self.file, place) for place in group.places]
        if any(e.group_id != group.id for e in episodes):
            raise StoreError(f"{self.file} was changed since this run began: group {group.id} is not where it was")
        # a file put together from two runs has different tasks under one id
        return [replace(e, group_id=f"stored-{index}") for e in episodes]

    def check_tokens(self, vocab_size: int, decode: Callable[[list[int]], str]) -> None:
        """Check that the token ids are those of a tokenizer, by its size and its function from ids to text.

        Raises:
            ConfigError: if they were made by another tokenizer.
        """
        hint = "start from the checkpoint that sampled them, or one trained on from it: start_from=RUN/checkpoint"
        if self.largest_token >= vocab_size:
            raise ConfigError(
                f"episodes={self.file} have the token id {self.largest_token}, but there are {vocab_size} tokens: "
                f"{hint}"
            )
        for episode in (e for index in range(min(CHECKED, len(self.groups))) for e in self.read(index)):
            text = _squeezed("".join(decode(t.token_ids.tolist()) for t in episode.trajectories))
            for said in _said(episode):
                if _squeezed(said) not in text:
                    raise ConfigError(
                        f"episodes={self.file}: the tokens of {episode.id} don't read {said!r} with this tokenizer: "
                        f"they were made by another; {hint}"
                    )

    def is_rendered_by(self, renderer: Renderer) -> bool:
        """Return whether the first groups' prompts end as a renderer ends them; tools are nearer their beginning."""
        return all(
            _ends_alike(e, renderer) for index in range(min(CHECKED, len(self.groups))) for e in self.read(index)
        )

    def save(self, path: Path) -> None:
        """Write the groups' places to a file; a resumed run learns from the same groups, even if the file has grown."""
        path.write_bytes(TypeAdapter(StoredGroups).dump_json(self))

    @classmethod
    def load(cls, path: Path) -> StoredGroups:
        """Read what `save` wrote.

        Raises:
            StoreError: if the episodes are no longer there.
        """
        try:
            found = TypeAdapter(cls).validate_json(path.read_bytes())
        except (ValidationError, OSError) as error:
            raise StoreError(f"{path}, which says what this run learns from, can't be read: start it again") from error
        if not shards_of(found.file):
            raise StoreError(f"the episodes that this run learns from are gone: there is no {found.file}")
        return found


def index_groups(path: str | Path, env: str, algorithm: Algorithm, held_out: Container[str] = ()) -> StoredGroups:
    """Find the groups of episodes that an algorithm has something to learn from; each is read twice.

    Episodes of evaluations, greedy ones, and those of tasks that this run evaluates on are left out.

    Args:
        path: an episode file, or a run's folder.
        env: the id of the environment that they must be of.
        algorithm: says by its shaping, its filters and its advantage what it learns from.
        held_out: `task_key`s of the tasks that are evaluated on.

    Raises:
        StoreError: if there is no such file, or it is damaged.
        ConfigError: if it has nothing to learn from; the message says why.
    """
    file = Path(path).resolve()
    found: dict[tuple[str, str], list[Place]] = {}
    largest, evaluations, held, silent = -1, 0, 0, 0
    for place, episode in locate_episodes(file):
        if episode.origin.purpose == "eval" or episode.origin.greedy:
            evaluations += 1
            continue
        if episode.env != env:
            raise ConfigError(f"episodes={path}: {episode.id} is of {episode.env}, and this run trains on {env}")
        if (key := task_key(episode.task)) in held_out:
            held += 1
        elif not any(t.loss_mask.any() for t in episode.trajectories):
            silent += 1
        else:
            found.setdefault((episode.group_id, key), []).append(place)
            largest = max(largest, *(int(t.token_ids.max(initial=-1)) for t in episode.trajectories))
    everything = StoredGroups(file, tuple(StoredGroup(id, tuple(at)) for (id, _), at in found.items()), largest)
    groups = tuple(g for i, g in enumerate(everything.groups) if _teaches(everything.read(i), algorithm))
    if groups:
        return replace(everything, groups=groups)
    episodes = sum(len(g.places) for g in everything.groups)
    wanted = "two that differ in reward" if algorithm.config.learns_from_pairs else "one that its filters keep"
    raise ConfigError(
        f"episodes={path} has nothing to learn from: {plural(len(found), 'group')} with {plural(episodes, 'episode')}, "
        f"none with {wanted} as {algorithm.config.name} asks. Left out: {evaluations} of evaluations, {held} of "
        f"tasks that this run evaluates on, {silent} without sampled token ids"
    )


def _teaches(episodes: list[Episode], algorithm: Algorithm) -> bool:
    from agent_rl.algorithms import ScoredRows

    x = algorithm.experience(group_episodes(episodes))
    scored = ScoredRows(x.rows, x.rows.rollout_logprobs)
    return len(x.rows) > 0 and len(algorithm.compute_weights(x, scored)[0]) > 0


def _said(episode: Episode) -> list[str]:
    """Return the texts in an episode's tokens: its opening, and the contents and tool names of its replies."""
    said, begun = [], False
    for message in episode.messages:
        begun = begun or message.role == "assistant"
        if not begun or message.role == "assistant":  # an observation may be cut off by the end of the episode
            said += [message.content, *(call.name for call in message.tool_calls)]
    return said


def _ends_alike(episode: Episode, renderer: Renderer) -> bool:
    """Compare what follows the text of an opening's last message, up to the first reply."""
    if not (opening := next(turns(episode)).messages):
        return True
    *before, last = opening
    ids, longer = (renderer.prompt([*before, replace(last, content=last.content + x)], ()) for x in ("", "."))
    end = [*ids[len(ids) - shared_start(ids[::-1], longer[::-1]) :]]
    trajectory = next(t for t in episode.trajectories if len(t))
    at = next((span.start for span in trajectory.spans if span.source is Source.POLICY), 0)
    stored: list[int] = trajectory.token_ids[max(0, at - len(end)) : at].tolist()
    return stored == end


def _squeezed(text: str) -> str:
    return "".join(text.split())
