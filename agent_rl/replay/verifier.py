"""Verifier: verifies the episodes of one file, some at a time, in whatever process it is."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from agent_rl.concurrency import run_together
from agent_rl.core.episode import Episode
from agent_rl.errors import CheckpointError, ConfigError, RenderError, StoreError
from agent_rl.gym.registry import EnvSpec, load_all_once, spec
from agent_rl.remote.client import RemoteEnv
from agent_rl.rendering.config import RendererConfig
from agent_rl.replay.companions import Companions, is_of_match
from agent_rl.replay.compare import compare_episode
from agent_rl.replay.drift import TokenReader, load_reader, with_tokens
from agent_rl.replay.record import Record
from agent_rl.replay.result import Result, VerifiedEpisode, differs, unverified
from agent_rl.replay.run import Mode, Replayed, replay
from agent_rl.store.episodes import episode_at
from agent_rl.store.shards import Place

AT_A_TIME = 16
"""Episodes that a process plays together, as sandboxes and servers are waited for."""


@dataclass(frozen=True)
class VerifyPlan:
    """How to verify a file's episodes, in any process."""

    path: str
    mode: Mode = "live"
    tokenizer: str | None = None
    """A tokenizer's folder; None if there is none."""
    is_named: bool = False
    """Whether the caller asked for this tokenizer: it has to load."""
    renderer: RendererConfig | None = None
    imports: tuple[str, ...] = ()
    """Files that register environments."""


class Verifier:
    """Verifies the episodes of one file."""

    def __init__(self, plan: VerifyPlan) -> None:
        self._plan = plan
        self._companions = Companions(plan.path)
        self._specs: dict[str, EnvSpec | Result] = {}
        self._reader: TokenReader | Result | None = None
        load_all_once(plan.imports)

    def verify_all(self, places: Iterable[Place]) -> list[VerifiedEpisode]:
        """Verify the episodes at some places of the file, several at a time."""
        return asyncio.run(self._all([*places]))

    async def _all(self, places: Sequence[Place]) -> list[VerifiedEpisode]:
        room = asyncio.Semaphore(AT_A_TIME)

        async def one(place: Place) -> VerifiedEpisode:
            async with room:
                return await self.verify(episode_at(self._plan.path, place))

        self._companions.forget()  # tasks are an event loop's
        return await run_together([partial(one, place) for place in places])

    async def verify(self, episode: Episode) -> VerifiedEpisode:
        """Play an episode again, and compare."""
        record = Record(episode)
        found = self._spec_of(episode.env)
        if isinstance(found, Result):
            return self._with_tokens(_all_unverified(episode, found.why), record, None)
        try:
            _ = record.turns
        except StoreError as error:
            return VerifiedEpisode(episode.id, episode.env, differs("messages", str(error), "steps that fit"))
        if issubclass(found.cls, RemoteEnv) and self._plan.mode == "cassette":
            why = "its tools run on a server, where no cassette reaches: --mode live"
            return self._with_tokens(_all_unverified(episode, why), record, None)
        replayed = Replayed(record, found, self._plan.mode)
        seats = [replayed]
        if is_of_match(episode, found):
            players = self._companions.match(episode, found)
            if isinstance(players, Result):
                return self._with_tokens(_all_unverified(episode, players.why), record, None)
            seats = [
                replayed if player is episode else Replayed(Record(player), found, self._plan.mode)
                for player in players
            ]
        await replay(*seats)
        group = await self._companions.group_rewards(episode, found)
        return self._with_tokens(compare_episode(replayed, group), record, replayed)

    def _spec_of(self, env: str) -> EnvSpec | Result:
        """Return an environment, looked for once; or why there is none."""
        if env not in self._specs:
            try:
                self._specs[env] = spec(env)
            except Exception as error:  # of a package, or a file of the user's
                self._specs[env] = unverified(f"{type(error).__name__}: {error}")
        return self._specs[env]

    def _with_tokens(self, found: VerifiedEpisode, record: Record, replayed: Replayed | None) -> VerifiedEpisode:
        return with_tokens(found, record, self.reader, replayed.tools if replayed else None)

    @property
    def reader(self) -> TokenReader | Result:
        """The run's tokenizer and renderer, loaded when the first token ids are met; or why there are none."""
        if self._reader is None:
            self._reader = self._load_reader()
        return self._reader

    def _load_reader(self) -> TokenReader | Result:
        folder = self._plan.tokenizer
        if folder is None:
            return unverified("no tokenizer lies beside the episodes: name one with --tokenizer FOLDER")
        try:
            return load_reader(folder, self._plan.renderer)
        except (CheckpointError, ConfigError, RenderError) as error:
            if self._plan.is_named:
                raise
            return unverified(str(error))


def _all_unverified(episode: Episode, why: str) -> VerifiedEpisode:
    result = unverified(why)
    turns = tuple(result for _ in episode.steps)
    return VerifiedEpisode(episode.id, episode.env, result, turns, result, result)
