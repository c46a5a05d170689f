"""reasoning_gym/NAME-v0: the generated puzzles of reasoning-gym, one environment for each of its data sets.

Task: the `seed` of a data set and an `index` in it. Reply: whatever thoughts, then <answer>...</answer>; without these
tags the whole reply is the answer. Reward: `correct`, between 0 and 1, is what the data set's own `score_answer` says.
`env_args` are settings of the data set: `env_args.max_terms=9`.

Splits: `train` and `eval` share no question, as a hash of the question says which of the two it belongs to.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import itertools
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import reasoning_gym
from reasoning_gym.factory import DATASETS
from reasoning_gym.utils import extract_answer

from agent_rl.core.episode import Episode
from agent_rl.core.messages import Message, Step, Task
from agent_rl.envs.quiz import task_rng
from agent_rl.errors import ConfigError
from agent_rl.gym.budget import Budget
from agent_rl.gym.env import Env, Script
from agent_rl.gym.registry import register
from agent_rl.gym.reward import reward
from agent_rl.gym.tasks import world_seed

LEFT_OUT = {
    "boxnet": "has no gold answer, and raises on a number",
    "coin_flip": "gives 1.0 to the answer 0, whatever the probability",
    "composite": "is a mixture of the others, and empty by default",
    "game_of_life": "raises on a JSON object",
    "game_of_life_halting": "gives 1.0 to every answer",
    "graph_color": "has no gold answer",
    "prime_factorization": "raises on words",
    "propositional_logic": "has no gold answer",
    "puzzle24": "gives 1.0 to any four numbers that make 24, such as 6*4*1*1, not to the puzzle's alone",
    "rubiks_cube": "has no gold answer",
    "rush_hour": "has no gold answer",
}
"""The data sets of version 0.1.25 that no environment is made of, and why; a test finds them again."""
EVALUATED = ("binary_matrix", "n_queens", "spiral_matrix", "string_insertion")
"""Data sets that give an answer to Python's `eval`, which would run what a model writes."""
PARSED = ("countdown", "intermediate_integration", "polynomial_multiplication", "simple_integration")
"""Data sets that give an answer to SymPy's parser, which evaluates it as well."""
FUNCTIONS = {"Abs", "acos", "asin", "atan", "cos", "cosh", "exp", "ln", "log", "sec", "sin", "sinh", "sqrt", "tan"}
SIZE = 500
"""Tasks of one seed: what a data set loads is loaded once for them."""
_STRIDE = 2**31 - 1
_FORM = "Think as long as you like, then give the answer alone between <answer> and </answer>."
_VALUE = (ast.Expression, ast.List, ast.Tuple, ast.Load, ast.Constant, ast.UnaryOp, ast.USub)
_FORMULA: tuple[type[ast.AST], ...] = (
    ast.Expression,
    ast.Load,
    ast.Name,
    ast.Call,
    ast.Constant,
    ast.UnaryOp,
    ast.USub,
    ast.UAdd,
    ast.BinOp,
)
_FORMULA += (ast.Add, ast.Sub, ast.Mult, ast.Div, ast.Pow)


@functools.lru_cache(maxsize=32)
def open_dataset(name: str, seed: int, **settings: object) -> Any:
    """Return a data set of reasoning-gym: a sequence of entries with a question, its answer and metadata."""
    return reasoning_gym.create_dataset(name, seed=seed, size=SIZE, **settings)


def make_task(name: str, split: str, index: int) -> Task:
    """Draw entries until the question of one belongs to the split."""
    for number in itertools.count(index, _STRIDE):
        block, place = divmod(number, SIZE)
        seed = int(task_rng(split, block).integers(2**31))
        if split_of(open_dataset(name, seed)[place]) == split:
            return {"seed": seed, "index": place}
    raise AssertionError("a count has no end")


def split_of(entry: Mapping[str, Any]) -> str:
    """Return the split that an entry belongs to, by a hash of its question."""
    digest = hashlib.blake2b(entry["question"].encode(), digest_size=1).digest()
    return ("eval", "train")[digest[0] % 2]


class Puzzle(Env):
    """A question of one of reasoning-gym's data sets."""

    dataset: ClassVar[str]
    snapshot_attributes = ()

    def __init__(self, **settings: object) -> None:
        self.settings = settings

    def reset(self, task: Task, rng: np.random.Generator) -> str:
        """Ask; with settings, the first question from the task's on that belongs to its split.

        Raises:
            ConfigError: if the settings leave the split no question.
        """
        seed, index = world_seed(task), int(str(task["index"]))
        self.entries = open_dataset(self.dataset, seed, **self.settings)
        ahead = (self.entries[place % SIZE] for place in range(index, index + SIZE))
        split = split_of(open_dataset(self.dataset, seed)[index])
        entry = next((entry for entry in ahead if split_of(entry) == split), None)
        if entry is None:
            raise ConfigError(f"{self.dataset}: with {self.settings} no question is left for '{split}'")
        self.entry = entry
        return f"{self.entry['question']}\n\n{_FORM}"

    def step(self, action: Message) -> Step:
        """Take the answer."""
        return Step(terminated=True)

    @reward
    def correct(self, episode: Episode) -> float:
        """Return the data set's own score; code in the place of a value scores 0."""
        text = episode.final_text
        answer = extract_answer(text) or text.strip()
        if answer != self.entry["answer"] and not is_harmless(self.dataset, answer):
            return 0.0
        return float(self.entries.score_answer(answer, self.entry))

    def oracle(self) -> Script:
        """Give the gold answer."""
        yield f"<answer>{self.entry['answer']}</answer>"


def is_harmless(dataset: str, answer: str) -> bool:
    """Whether a data set may score an answer: what it evaluates has to be a list, a number or a short formula."""
    if dataset not in (*EVALUATED, *PARSED):
        return True
    try:
        nodes = list(ast.walk(ast.parse(answer.strip(), mode="eval")))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return dataset in EVALUATED  # eval refuses it, too; SymPy's parser knows more than Python
    if dataset in EVALUATED:
        return all(isinstance(node, _VALUE) for node in nodes)
    return all(isinstance(node, _FORMULA) and _is_small(node) for node in nodes)


def _is_small(node: ast.AST) -> bool:
    """Whether a call is of a known function, and an exponent a number below 100, not of another power."""
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name) and node.func.id in FUNCTIONS and not node.keywords
    if isinstance(node, ast.Constant):
        return isinstance(node.value, int | float)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow):
        inner = [part for side in (node.left, node.right) for part in ast.walk(side)]
        exponents = [part.value for part in ast.walk(node.right) if isinstance(part, ast.Constant)]
        return not any(isinstance(part, ast.Pow) for part in inner) and all(float(str(n)) < 100 for n in exponents)
    return True


for _name in sorted(DATASETS.keys() - LEFT_OUT):
    _members = {"dataset": _name, "__module__": __name__, "__doc__": f"Puzzles of reasoning-gym's {_name}."}
    register(
        f"reasoning_gym/{_name}-v0", tasks=functools.partial(make_task, _name), budget=Budget(turns=1, score_seconds=60)
    )(type(_name, (Puzzle,), _members))
