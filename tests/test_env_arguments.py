"""agent_rl.gym.env_arguments: what `env_args` may be, by the types of the class's signature."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import pytest

import agent_rl as ar
from agent_rl.cli import main
from agent_rl.gym.registry import spec

if TYPE_CHECKING:
    from decimal import Decimal


class Operation(Enum):
    ADD = "add"


@dataclass
class Range:
    low: int = 1
    high: int = 9


@ar.register("typed-arguments-v0", tasks=[{"n": n} for n in range(20)])
class Typed(ar.ToolEnv):
    def __init__(
        self,
        n: int = 3,
        kind: Literal["sum", "product"] = "sum",
        folder: Path = Path(),
        words: Sequence[str] = (),
        range: Range = Range(),  # noqa: B008
        operation: Operation = Operation.ADD,
        share: float | None = None,
        careless: int = None,  # noqa: RUF013
        later: "Decimal" = 0,
        free=None,
        unreadable: "Nowhere" = 0,  # noqa: F821
    ):
        self.got = {name: value for name, value in locals().items() if name not in ("self", "__class__")}

    def reset(self, task, rng):
        self.got["free"].append(task["n"])
        return f"{self.got['free']}"

    @ar.reward
    def correct(self, episode) -> bool:
        return True

    def oracle(self):
        yield "yes"


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ({"n": "abc"}, r"typed-arguments-v0: env_args\.n='abc': input should be a valid integer"),
        ({"n": 2.5}, r"env_args\.n=2\.5: .* fractional part"),
        ({"n": None}, r"env_args\.n=None: input should be a valid integer"),
        ({"n": "5"}, r"env_args\.n='5': input should be a number"),
        ({"n": True}, r"env_args\.n=True: input should be a number"),
        ({"kind": "sun"}, r"env_args\.kind='sun': input should be 'sum' or 'product'"),
        ({"folder": 5}, r"env_args\.folder=5: .* path"),
        ({"words": ["a", 5]}, r"env_args\.words\[1\]=5: input should be a valid string"),
        ({"words": "ab"}, r"env_args\.words='ab'"),
        ({"range": {"low": "x"}}, r"env_args\.range\.low='x': input should be a valid integer"),
        ({"range": {"lo": 2}}, r"env_args\.range\.lo=2: unexpected keyword argument"),
        ({"operation": "or"}, r"env_args\.operation='or': input should be 'add'"),
        ({"share": "most", "n": "two"}, r"env_args\.share='most': .*; env_args\.n='two': "),
    ],
)
def test_env_args_of_another_type_are_refused(arguments, complaint):
    for take in (spec("typed-arguments-v0").check_arguments, lambda given: ar.make("typed-arguments-v0", **given)):
        with pytest.raises(ar.ConfigError, match=complaint):
            take(arguments)


@pytest.mark.parametrize(
    ("name", "given", "taken"),
    [
        ("n", 2.0, 2),
        ("folder", "data", Path("data")),
        ("words", ["a"], ["a"]),
        ("range", {"low": 2}, Range(2, 9)),
        ("operation", "add", Operation.ADD),
        ("share", 1, 1.0),
        ("careless", None, None),
        ("later", "x", "x"),
        ("free", 5, 5),
    ],
)
def test_env_args_arrive_as_their_types(name, given, taken):
    got = ar.make("typed-arguments-v0", **{name: given}).got[name]
    assert got == taken
    assert type(got) is type(taken)


def test_env_args_are_each_episodes_own():
    arguments = {"free": []}
    episodes = ar.run("typed-arguments-v0", "oracle", n=3, env_args=arguments)
    assert [episode.messages[0].content.count(",") for episode in episodes] == [0, 0, 0]
    assert (arguments, episodes[0].env_args) == ({"free": []}, {"free": []})


def test_env_args_of_text_name_the_quotes(tmp_path, capsys):
    file = tmp_path / "spoken.py"
    file.write_text(
        "import agent_rl as ar\n@ar.register('spoken-v0', tasks=[{}] * 9)\nclass Spoken(ar.ToolEnv):\n"
        "    def __init__(self, word: str = 'a'):\n        self.word = word\n"
        "    def reset(self, task, rng):\n        return self.word\n"
        "    def oracle(self):\n        yield self.word\n"
    )
    command = ["rollout", "--import", str(file), "env=spoken-v0", "n=1", f"out={tmp_path / 'episodes.jsonl'}"]
    assert main([*command, "env_args.word=5"]) != 0
    assert """env_args.word=5: input should be a valid string; if it is text, write 'env_args.word="5"'""" in (
        capsys.readouterr().err
    )
    assert main([*command, 'env_args.word="5"']) == 0
