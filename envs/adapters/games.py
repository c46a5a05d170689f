"""Text games of other libraries, or objects like theirs: `from_gem` and `from_textarena` make an `Env` of one."""

from __future__ import annotations

import copy
import functools
import importlib
import inspect
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar, TypeAlias, cast

import numpy as np

from agent_rl.concurrency import maybe_await
from agent_rl.core.episode import Episode
from agent_rl.core.messages import Message, Step, Task
from agent_rl.errors import ConfigError, did_you_mean
from agent_rl.gym.env import Env, Script
from agent_rl.gym.reward import reward
from agent_rl.gym.tasks import world_seed
from agent_rl.seeds import OwnRandom

Opponent: TypeAlias = Callable[[str], str | Awaitable[str]]
"""Another player, sync or async: what it observes to what it does."""


class GameEnv(Env):
    """A foreign game object, played by text; each episode has one of its own, and its own global random numbers.

    A task's `seed` is the game's, else a hash of the task: all samples of a task meet the same game. With
    `blocking = True` the global random numbers are the process's, so that episodes of a game that draws from them can't
    be replayed.
    """

    make: ClassVar[Callable[..., object]]
    """Makes a game of the arguments."""
    game_args: ClassVar[Mapping[str, object]] = {}
    solved_at: ClassVar[float] = 1.0
    snapshot_attributes: ClassVar[Sequence[str]] = ("game", "last", "over", "own_random")

    def __init__(self, **game_args: object) -> None:
        self._made_with = {**self.game_args, **game_args}
        self.game: Any = None
        self.last = 0.0
        """The last reward."""
        self.over = False
        self.own_random: AbstractContextManager[None] = nullcontext()

    def open_game(self, task: Task, **given: object) -> Any:
        """Make the game and its random numbers; return what its `reset` returns, given its seed and so on.

        An argument that its `reset` does not take is left out.
        """
        seed = world_seed(task)
        if not self.blocking:
            self.own_random = OwnRandom(seed)
        with self.own_random:
            self.game = self.make(**self._made_with)
            return self.game.reset(**_taken(self.game.reset, {"seed": seed, **given}))

    def require_running(self) -> None:
        """Refuse a move after the end.

        Raises:
            RuntimeError: if the game is over.
        """
        if self.over:
            raise RuntimeError("the game is over: reset begins another")

    @reward(weight=0.0)
    def solved(self, episode: Episode) -> bool:
        """Whether the last reward is at least that of a solved game."""
        return self.last >= self.solved_at


class GemEnv(GameEnv):
    """A game of GEM's interface: Gymnasium's `reset` and `step`, with text for observations and actions."""

    def reset(self, task: Task, rng: np.random.Generator) -> str:
        """Begin the game."""
        opening = self.open_game(task)
        return _said(*opening) if isinstance(opening, tuple) else _said(opening, {})

    def step(self, action: Message) -> Step:
        """Give the game the answer."""
        self.require_running()
        with self.own_random:
            observation, earned, terminated, *cut, info = self.game.step(action.content)
        truncated = any(cut)  # older games have no such value
        self.last, self.over = float(earned), bool(terminated or truncated)
        said = (Message("user", _said(observation, info)),)
        return Step(said, self.last, bool(terminated), bool(truncated))

    def close(self) -> None:
        """Close the game, if it can be."""
        getattr(self.game, "close", lambda: None)()

    def demonstrate(self, rng: np.random.Generator) -> Script:
        """Play at random, if the game has random actions."""
        if not hasattr(self.game, "sample_random_action"):
            yield from self.oracle()
        while True:
            with self.own_random:
                action = str(self.game.sample_random_action())
            yield action


class TextArenaEnv(GameEnv):
    """A game of TextArena's interface, for one player or with `opponents` for the others."""

    player: ClassVar[int] = 0
    """Which player the policy is."""
    opponents: ClassVar[Mapping[int, Opponent]] = {}
    snapshot_attributes = (*GameEnv.snapshot_attributes, "seen", "begun")

    async def reset(self, task: Task, rng: np.random.Generator) -> str:
        """Begin the game; opponents that come first move."""
        self.seen: dict[int, str] = {}
        self.open_game(task, num_players=1 + len(self.opponents))
        self.begun = await self._until_our_turn(done=False)
        return self.begun.observation[0].content

    async def step(self, action: Message) -> Step:
        """Play the answer, and the opponents' moves until it is the policy's turn."""
        begun, self.begun = self.begun, Step()
        if begun.terminated:  # before the policy's first turn
            return Step((), begun.reward, terminated=True)
        self.require_running()
        with self.own_random:
            done, _ = self.game.step(action.content)
        return await self._until_our_turn(bool(done))

    async def _until_our_turn(self, done: bool) -> Step:
        while not done:
            with self.own_random:
                player, observation = self.game.get_observation()
                said = self._new(player, observation)
                move = None if player == self.player else self.opponents[player](said)
            if move is None:
                return Step((Message("user", said),))
            action = await maybe_await(move)
            with self.own_random:
                done, _ = self.game.step(action)
        ended = self.game.close()
        rewards, info = ended if isinstance(ended, tuple) else (ended, {})
        self.last, self.over = float((rewards or {}).get(self.player, 0.0)), True
        reason = str((info or {}).get(self.player, {}).get("reason") or "The game is over.")
        return Step((Message("user", reason),), self.last, terminated=True)

    def _new(self, player: int, observation: object) -> str:
        """Return what a player has not read yet: wrappers of TextArena's repeat all that was said."""
        if isinstance(observation, str):
            before, self.seen[player] = self.seen.get(player, ""), observation
            return observation.removeprefix(before).strip()
        names: Mapping[int, str] = getattr(getattr(self.game, "state", None), "role_mapping", {})
        lines = [
            f"[{names.get(sender, f'Player {sender}')}] {text}"
            for sender, text, *_ in cast("list[tuple[int, str]]", observation)
            if sender != player
        ]
        return "\n".join(lines)


def from_gem(game: object, *, solved_at: float = 1.0, **game_args: object) -> type[GemEnv]:
    """Return an `Env` class that plays a game of GEM's interface, for `@ar.register`.

    The game has `reset(seed=...)`, which returns text and an info, or text alone, and `step(text)`, which returns text,
    the reward, whether it has terminated or is truncated (one value, of older games, or two), and an info. An info's
    "suffix", GEM's, is part of what is said.

    Args:
        game: an id of GEM's, such as "game:Mastermind-v0"; a class or function that makes a game; or a game, which is
            copied for each episode.
        solved_at: the last reward at which the game is solved.
        game_args: of what makes the game; `env_args` of a run replace them.

    Raises:
        ConfigError: if there is no such game.
    """
    return _adapted(GemEnv, game, "gem", "gem-llm", game_args, {"solved_at": solved_at})


def from_textarena(
    game: object, *, player: int = 0, opponents: Mapping[int, Opponent] | Opponent | None = None, **game_args: object
) -> type[TextArenaEnv]:
    """Return an `Env` class that plays a game of TextArena's interface, for `@ar.register`.

    The game has `reset(num_players=..., seed=...)`, `get_observation()`, which returns the player whose turn it is and
    text or messages, `step(text)`, which returns whether the game is done and an info, and `close()`, which returns the
    rewards by player, alone or with an info.

    Args:
        game: an id of TextArena's, such as "Mastermind-v0-raw" (whose policy reads only what is new); a class or
            function that makes a game; or a game, which is copied for each episode.
        player: which one the policy is.
        opponents: the other players by number, or the only one; each takes what it observes and returns its move.
        game_args: of what makes the game; `env_args` of a run replace them.

    Raises:
        ConfigError: if there is no such game.
    """
    others = opponents or {}
    others = others if isinstance(others, Mapping) else {1 - player: others}
    return _adapted(TextArenaEnv, game, "textarena", "textarena", game_args, {"player": player, "opponents": others})


def _adapted(
    base: type[Any], game: object, library: str, package: str, game_args: Mapping[str, object], members: dict[str, Any]
) -> type[Any]:
    name = game if isinstance(game, str) else getattr(game, "__name__", type(game).__name__)
    members["make"] = staticmethod(_maker(game, library, package))
    members |= {"game_args": game_args, "__doc__": f"The game {name}."}
    members["__module__"] = sys._getframe(2).f_globals["__name__"]
    short = name.rpartition(":")[2].partition("-")[0]
    return type(short if short.isidentifier() else "Game", (base,), members)


def _maker(game: object, library: str, package: str) -> Callable[..., object]:
    if isinstance(game, str):
        try:
            known = importlib.import_module(f"{library}.envs.registration").ENV_REGISTRY
        except ImportError as error:
            raise ConfigError(f"the game {game!r} needs {library} ({error}): pip install {package}") from error
        if game not in known:
            raise ConfigError(f"{library} has no game {game!r}.{did_you_mean(game, list(known))}")
        return functools.partial(importlib.import_module(library).make, game)
    if hasattr(game, "reset") and not isinstance(game, type):
        return lambda: copy.deepcopy(game)
    if not callable(game):
        raise ConfigError(f"{game!r} is no game: it has no reset, and can't be called to make one")
    return game


def _taken(function: Callable[..., object], given: Mapping[str, object]) -> Mapping[str, object]:
    parameters = inspect.signature(function).parameters
    takes_all = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    return {name: value for name, value in given.items() if takes_all or name in parameters}


def _said(observation: object, info: Mapping[str, object]) -> str:
    return "\n".join(str(part) for part in (observation, info.get("suffix")) if part)
