"""textworld/NAME-v0: games that TextWorld generates, played by text: coins, treasures, a kitchen, a meal.

Task: the `seed` of a game. An answer's last line is a command, such as "go east" or "take coin". Reward: the points of
each step, as a share of the game's most; `won` (weight 0) says whether the game was won. `env_args.hints=false` leaves
the possible commands out of the observations; other `env_args` are settings of the generator.

A game takes seconds to make. It is kept in the folder of `AGENT_RL_CACHE`, or ~/.cache/agent_rl, and made once.
`train` and `eval` have different seeds, and the cooking game different food.
"""

from __future__ import annotations

import json
import re
import shutil
import tempfile
import threading
from collections.abc import Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import textworld
from textworld.challenges import CHALLENGES
from textworld.generator import compile_game

from agent_rl.core.episode import Episode
from agent_rl.core.messages import Message, Step, Task
from agent_rl.envs.quiz import task_rng
from agent_rl.gym.budget import Budget
from agent_rl.gym.env import Env, Script
from agent_rl.gym.registry import register
from agent_rl.gym.reward import reward
from agent_rl.gym.task_files import cache_folder
from agent_rl.gym.tasks import world_seed

GAMES: Mapping[str, tuple[str, Mapping[str, object]]] = {
    "coin_collector": ("Find a coin in a row of rooms.", {"level": 105}),
    "cooking": (
        "Cook a meal by a cookbook's recipe.",
        {"recipe": 1, "take": 1, "go": 6, "open": True, "cook": True, "cut": True, "drop": False, "recipe_seed": 0},
    ),
    "simple": ("Grill something in the kitchen of a house.", {"rewards": "dense", "goal": "brief", "test": False}),
    "treasure_hunter": ("Take the right one of two things, perhaps from behind locks.", {"level": 20}),
}
"""What TextWorld's generators make, with their settings."""
META = {
    *("again", "g", "oops", "q", "quit", "restart", "restore", "save", "script"),
    *("transcrip", "undo", "verify", "version"),
}
"""First words of commands to the program that runs the game, which would write files or undo what was scored; it knows
words by nine letters."""
_ASKED = textworld.EnvInfos(
    **dict.fromkeys(("admissible_commands", "policy_commands", "objective", "max_score", "description"), True),
    **dict.fromkeys(("inventory", "score", "won"), True),
    extras=["walkthrough"],
)
_PROMPT = re.compile(r"\n*(\*\*\* The End \*\*\*.*)?>?[^\n>]*\Z", re.DOTALL)
_NEXT = re.compile(r"[.,;]|\bthen\b", re.IGNORECASE)
"""What another command may follow, of which the first word is not looked at."""
_one_at_a_time = threading.RLock()
"""TextWorld has one parser for all games, which is not made for threads."""


def make_task(split: str, index: int) -> Task:
    """Draw the seed of a game."""
    return {"seed": int(task_rng(split, index).integers(2**31)), "split": split}


def open_game(name: str, seed: int, settings: Mapping[str, object]) -> Path:
    """Return the file of a game, which is made first if there is none yet."""
    key = blake2b(json.dumps([textworld.__version__, settings], sort_keys=True).encode(), digest_size=6).hexdigest()
    folder = cache_folder() / "textworld" / f"{name}-{key}" / str(seed)
    if not (folder / "game.z8").exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        new = Path(tempfile.mkdtemp(dir=folder.parent))  # others may be making it now
        try:
            options = textworld.GameOptions()
            options.seeds, options.path = seed, str(new / "game.z8")
            options.grammar.only_last_action = True  # an objective that is no walkthrough
            with _one_at_a_time:
                compile_game(CHALLENGES[f"tw-{name}"][1](dict(settings), options), options)
            (new / "game.ni").unlink()
            if not folder.exists():
                new.rename(folder)
        finally:
            shutil.rmtree(new, ignore_errors=True)
    return folder / "game.z8"


class TextWorld(Env):
    """A generated game, by text commands."""

    blocking = True
    game: ClassVar[str]
    settings: ClassVar[Mapping[str, object]]
    world: Any = None

    def __init__(self, *, hints: bool = True, **settings: object) -> None:
        self.hints = hints
        self.made_with = {**self.settings, **settings}

    def reset(self, task: Task, rng: np.random.Generator) -> str:
        """Open the task's game."""
        food = {"split": "train" if task["split"] == "train" else "test"} if self.game == "cooking" else {}
        made_with = {**self.made_with, **food}
        with _one_at_a_time:
            self.world = textworld.start(str(open_game(self.game, world_seed(task), made_with)), _ASKED)
            self.now = self.world.reset()
        self.points = 0
        return f"{self.now.objective} Answer with one command.\n\n{_plain(self.now.description)}{self._possible()}"

    def step(self, action: Message) -> Step:
        """Give the game the command."""
        line = (action.content.strip().splitlines() or [""])[-1].strip("> ")
        command = _NEXT.split(line)[0].encode("ascii", "ignore").decode()[:150]  # of 197 bytes at most
        if {word[:9] for word in command.lower().split()[:1]} & META:
            return Step((Message("user", f"That's not a verb I recognise.{self._possible()}"),))
        with _one_at_a_time:
            self.now, _, done = self.world.step(command)
        earned, self.points = self.now.score - self.points, self.now.score
        said = _plain(_PROMPT.sub("", self.now.feedback)) + ("" if done else self._possible())
        return Step((Message("user", said),), earned / self.now.max_score, terminated=bool(done))

    def close(self) -> None:
        """End the game's program; not during a step, whose memory would go: that ends the process."""
        if self.world is not None:
            with _one_at_a_time:
                self.world.close()

    @reward(weight=0.0)
    def won(self, episode: Episode) -> bool:
        """Whether the game was won."""
        return bool(self.now.won)

    def state_hash(self) -> str:
        """Return the place with what is in it, what is carried, and the points."""
        return f"{self.now.description}\n{self.now.inventory}\n{self.points}"

    def oracle(self) -> Script:
        """Give the commands that the game was made with."""
        for command in self.now["extra.walkthrough"]:  # noqa: UP028  a list's iterator can't be sent the observations
            yield command

    def demonstrate(self, rng: np.random.Generator) -> Script:
        """Give the next command of a solution, or one in four times any that is possible."""
        while True:
            ahead = self.now.policy_commands
            lost = not ahead or rng.random() < 0.25
            yield str(rng.choice(self.now.admissible_commands)) if lost else ahead[0]

    def _possible(self) -> str:
        return f"\n\nPossible commands: {', '.join(self.now.admissible_commands)}" if self.hints else ""


def _plain(text: str) -> str:
    return re.sub(r"\s*\n\s*\n\s*", "\n\n", text).strip()


for _name, (_doc, _settings) in GAMES.items():
    _members = {"game": _name, "settings": _settings, "__module__": __name__, "__doc__": _doc}
    register(f"textworld/{_name}-v0", tasks=make_task, budget=Budget(turns=50))(type(_name, (TextWorld,), _members))
