"""Gymnasium's environments as text: `from_gym("FrozenLake-v1")` makes an `Env` of one for a language model."""

from __future__ import annotations

import functools
import inspect
import math
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Any, ClassVar, cast

import gymnasium
import numpy as np
from gymnasium.envs.registration import EnvSpec, load_env_creator

from agent_rl.core.episode import Episode
from agent_rl.core.images import Image
from agent_rl.core.messages import Message, Observation, Step, Task
from agent_rl.errors import ConfigError, did_you_mean
from agent_rl.gym.classic import CLASSIC, Known
from agent_rl.gym.env import Env, Script
from agent_rl.gym.env_arguments import convert
from agent_rl.gym.reward import reward
from agent_rl.gym.spaces import describe, explain, read, write
from agent_rl.gym.tasks import world_seed

_ANSI = re.compile(r"\x1b\[([\d;]*)m([^\x1b]*)(?:\x1b\[0?m)?")


class GymnasiumEnv(Env):
    """A Gymnasium environment, `gym_id`, that is described in words and played by words.

    A task's `seed` is that of Gymnasium's `reset`, else a hash of the task: all samples of a task meet the same world.
    Its `options` are those of `reset`, its `gym_args` those of `gymnasium.make`. An answer without a legal action gets
    a complaint, and moves nothing. Rewards are Gymnasium's own, step by step; `solved` (weight 0) says whether those of
    a whole episode reached the environment's stated threshold.
    """

    gym_id: ClassVar[str | EnvSpec]
    """What `gymnasium.make` takes."""
    gym_args: ClassVar[Mapping[str, object]] = {}
    action_names: ClassVar[Sequence[str]] = ()
    """Of a `Discrete` space, in order; found out where the environment, or `CLASSIC`, knows them."""
    instructions: ClassVar[str] = ""
    """What the opening begins with; what is known of the environment if left out."""
    images: ClassVar[bool] = False
    """Whether observations show what Gymnasium renders, beside their text."""
    illegal_reward: ClassVar[float] = 0.0
    """For an answer that means no legal action."""
    snapshot_attributes = ("gym", "earned", "mask", "shown", "over", "cut")

    def __init__(self, **gym_args: object) -> None:
        self._made_with = {**self.gym_args, **_checked(self.gym_id, gym_args)}
        self.gym: gymnasium.Env[Any, Any] | None = None
        self.earned, self.cut = 0.0, False
        self.mask: object = None
        self.shown = ""
        """The last observation."""
        self.over = False

    def make(self, task: Task) -> gymnasium.Env[Any, Any]:
        """Make the Gymnasium environment of a task, one that renders pixels if they are shown, or text if it can."""
        of_task = cast("Mapping[str, object]", task.get("gym_args", {}))
        mode = {"render_mode": "ansi"} if not self.images and _renders_text(self.gym_id) else {}
        mode |= {"render_mode": "rgb_array"} if self.images else {}
        arguments: dict[str, Any] = {"disable_env_checker": True, **mode, **self._made_with, **of_task}
        return gymnasium.make(self.gym_id, **arguments)

    def describe(self, observation: object) -> str:
        """Return an observation as text, with the rendered text if there is any, or that alone for a state's number."""
        game = self._game
        said = describe(game.observation_space, observation, self._known.features)
        if game.render_mode != "ansi":
            return said
        drawn = _ANSI.sub(_without_colour, str(game.render())).strip()
        return drawn if isinstance(game.observation_space, gymnasium.spaces.Discrete) else f"{said}\n{drawn}"

    def parse(self, text: str) -> object:
        """Return the action that the policy's text means.

        Raises:
            ValueError: if it means none; the policy reads the message. A LookupError is as good.
        """
        return read(self._game.action_space, text, self.names)

    @functools.cached_property
    def names(self) -> Sequence[str]:
        """The names of the actions; empty if there are only numbers.

        Raises:
            ConfigError: if `action_names` are not as many as there are actions.
        """
        game = self._game
        if not isinstance(game.action_space, gymnasium.spaces.Discrete):
            return self.action_names
        if self.action_names:
            if len(self.action_names) != game.action_space.n:
                given = f"action_names of {_title(self.gym_id)} are {', '.join(self.action_names)}"
                raise ConfigError(f"{given}: give one for each action of {game.action_space}")
            return self.action_names
        meanings, actions = (getattr(game.unwrapped, name, None) for name in ("get_action_meanings", "actions"))
        if callable(meanings):
            return [str(name).lower() for name in meanings()]
        if isinstance(actions, type) and issubclass(actions, Enum) and len(actions) >= game.action_space.n:
            return [action.name for action in actions][: game.action_space.n]  # some take the first few alone
        return self._known.actions

    @property
    def _game(self) -> gymnasium.Env[Any, Any]:
        assert self.gym is not None
        return self.gym

    @property
    def _known(self) -> Known:
        spec = self._game.spec
        return CLASSIC.get(spec.name, Known()) if spec is not None else Known()

    def reset(self, task: Task, rng: np.random.Generator) -> Observation:
        """Open the environment with the task's seed; say what may be answered."""
        self.gym = game = self.make(task)
        options = cast("dict[str, Any] | None", task.get("options"))
        observation, info = game.reset(seed=world_seed(task), options=options)
        instructions = self.instructions or self._known.rules or f"Play {_title(self.gym_id)}."
        rule = f"Answer with {explain(game.action_space, self.names)}."
        said = f"{instructions} {rule}\n{self._observed(observation, info)}"
        return self._shown_with(said) if self.images else said

    def step(self, action: Message) -> Step:
        """Take the action that the answer means, or say why it means none.

        Raises:
            RuntimeError: if the episode has ended; what a step does then, Gymnasium leaves open.
        """
        if self.over:
            raise RuntimeError(f"{_title(self.gym_id)} has ended")
        try:
            meant = self.parse(action.content)
            if not self._is_legal(meant):
                raise ValueError(f"{write(self._game.action_space, meant, self.names)} is not possible now")
        except (ValueError, LookupError) as error:
            complaint = (
                f"illegal: {error}. Answer with {self._legal() or explain(self._game.action_space, self.names)}."
            )
            return Step((Message("user", complaint),), self.illegal_reward)
        observation, earned, terminated, truncated, info = self._game.step(meant)
        self.earned += float(earned)
        self.over, self.cut = bool(terminated or truncated), bool(truncated and not terminated)
        said = self._observed(observation, info)
        return Step((self._shown_with(said),), float(earned), bool(terminated), bool(truncated))

    def close(self) -> None:
        """Close the environment."""
        if self.gym is not None:
            self.gym.close()

    @reward(weight=0.0, inline=True)
    def solved(self, episode: Episode) -> bool | None:
        """Whether a whole episode's rewards reach the threshold at which Gymnasium calls the environment solved.

        One that is cut, by its budget or a time limit below Gymnasium's, is not solved: where each step costs, few cost
        little. None without a threshold.
        """
        made = self._game.spec
        if made is None or made.reward_threshold is None:
            return None
        full = gymnasium.registry.get(made.id, made).max_episode_steps or 0
        is_long = (made.max_episode_steps or math.inf) >= full
        return self.over and (is_long or not self.cut) and self.earned >= made.reward_threshold

    def state_hash(self) -> str:
        """Return what is observed."""
        return self.shown

    def demonstrate(self, rng: np.random.Generator) -> Script:
        """Play at random, but legally."""
        while True:
            yield self.random_action(rng)

    def random_action(self, rng: np.random.Generator) -> str:
        """Return a legal action at random."""
        space = self._game.action_space
        space.seed(int(rng.integers(2**31)))
        masked = isinstance(space, gymnasium.spaces.Discrete) and self.mask is not None
        return write(space, space.sample(cast(Any, self.mask)) if masked else space.sample(), self.names)

    def _observed(self, observation: object, info: Mapping[str, object]) -> str:
        self.mask = info.get("action_mask")
        self.shown = self.describe(observation)
        legal = self._legal()
        return f"{self.shown}\nlegal now: {legal}" if legal else self.shown

    def _shown_with(self, text: str) -> Message:
        """Return an observation; with the frame behind its text, if frames are shown."""
        if not self.images:
            return Message("user", text)
        frame = self._game.render()
        if not isinstance(frame, np.ndarray):
            raise ConfigError(f"{_title(self.gym_id)} renders no rgb_array, so there is nothing to show: images=False")
        return Message("user", parts=[text, Image.of(frame)])

    def _is_legal(self, action: object) -> bool:
        space = self._game.action_space
        if self.mask is None or not isinstance(space, gymnasium.spaces.Discrete):
            return True
        return bool(cast(Any, self.mask)[int(cast(int, action)) - int(space.start)])

    def _legal(self) -> str:
        """Return the actions possible now; empty if the environment does not say."""
        space = self._game.action_space
        if self.mask is None or not isinstance(space, gymnasium.spaces.Discrete):
            return ""
        actions = (int(space.start + offset) for offset in np.flatnonzero(cast(Any, self.mask)))
        return ", ".join(write(space, action, self.names) for action in actions)


def from_gym(
    id: str | Callable[..., gymnasium.Env[Any, Any]],
    *,
    describe: Callable[[Any], str] | None = None,
    parse: Callable[[str], object] | None = None,
    action_names: Sequence[str] = (),
    instructions: str = "",
    images: bool = False,
    **gym_args: object,
) -> type[GymnasiumEnv]:
    """Return an `Env` class that plays a Gymnasium environment by text, for `@ar.register`.

    Args:
        id: what `gymnasium.make` takes, such as "FrozenLake-v1"; or a class or function that makes an environment.
        describe: makes text of an observation; by default its space decides, and what it renders as text.
        parse: makes an action of an answer, and raises a ValueError or LookupError on one that means none; by default
            the last action that is named in it, or as many numbers as it takes.
        action_names: of a `Discrete` space, in order.
        instructions: what the opening begins with.
        images: whether observations show the pixels that Gymnasium renders, too.
        gym_args: of `gymnasium.make`, or of the class; `env_args` of a run replace them.

    Raises:
        ConfigError: if Gymnasium has no such environment, or it is neither an id nor makes one.
    """
    found = _spec(id)
    members: dict[str, object] = {
        "gym_id": id if isinstance(id, str) else found,
        "gym_args": gym_args,
        "__module__": sys._getframe(1).f_globals["__name__"],
    }
    members |= {"action_names": tuple(action_names), "instructions": instructions, "images": images}
    members["__doc__"] = f"Gymnasium's {_title(id if isinstance(id, str) else found)}."
    if describe is not None:
        members["describe"] = lambda self, observation: describe(observation)
    if parse is not None:
        members["parse"] = lambda self, text: parse(text)
    return type(found.name, (GymnasiumEnv,), members)


def _spec(id: object) -> EnvSpec:
    """Return Gymnasium's entry of an id; of a class or function, one that is not registered."""
    if isinstance(id, str):
        try:
            return gymnasium.spec(id)
        except (gymnasium.error.Error, ModuleNotFoundError) as error:
            raise ConfigError(f"from_gym({id!r}): {error}") from None
    if isinstance(id, gymnasium.Env) or not callable(id):
        raise ConfigError(f"from_gym({id!r}): give an id, or a class or function: each episode makes an environment")
    name = re.sub(r"\W", "", getattr(id, "__name__", type(id).__name__))
    return EnvSpec(f"{name}-v0", entry_point=id)


def _checked(id: str | EnvSpec, given: Mapping[str, object]) -> Mapping[str, object]:
    """Return `env_args`, checked and converted by the signature of what makes the environment."""
    entry = (gymnasium.spec(id) if isinstance(id, str) else id).entry_point
    if not given or entry is None:
        return given
    creator = load_env_creator(entry) if isinstance(entry, str) else entry
    try:
        takes = inspect.signature(creator).parameters
    except ValueError:  # of a class that is not written in Python
        return given
    known = [*takes, *inspect.signature(gymnasium.make).parameters]
    if all(p.kind is not p.VAR_KEYWORD for p in takes.values()) and (odd := [n for n in given if n not in known]):
        hint = did_you_mean(odd[0], takes)
        raise ConfigError(f"{_title(id)}: no argument '{odd[0]}'.{hint} It takes: {', '.join(takes) or 'none'}.")
    return convert(_title(id), creator, given)


def _title(id: str | EnvSpec) -> str:
    return id if isinstance(id, str) else id.name


def _renders_text(id: str | EnvSpec) -> bool:
    if isinstance(id, str):
        return _registered_renders_text(id)
    return "ansi" in getattr(id.entry_point, "metadata", {}).get("render_modes", ())


@functools.cache
def _registered_renders_text(id: str) -> bool:
    game: gymnasium.Env[Any, Any] = gymnasium.make(id, disable_env_checker=True)
    game.close()
    return "ansi" in game.metadata.get("render_modes", ())


def _without_colour(found: re.Match[str]) -> str:
    """Return coloured text in brackets: square ones for a coloured background, curly ones for magenta."""
    codes, text = set(found[1].split(";")), found[2]
    if any(len(code) == 2 and code[0] == "4" for code in codes):
        return f"[{text}]"
    if "35" in codes:
        return f"{{{text}}}"
    return f"({text})" if text.strip() and codes - {"", "0", "1"} else text
