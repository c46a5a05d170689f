"""Adapters of protocols, on stand-ins; tests/adapters has the packages themselves."""

from __future__ import annotations

import random

import pytest

import agent_rl as ar


class Coin:
    """A game as GEM's are: it draws from the global random numbers."""

    def __init__(self, sides: int = 2) -> None:
        self.sides = sides

    def reset(self, seed: int | None = None) -> tuple[str, dict[str, object]]:
        random.seed(seed)
        self.left = 3
        self.face = random.randrange(self.sides)
        return "Which side?", {"suffix": f"A number below {self.sides}."}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, object]]:
        hit, self.left = action == str(self.face), self.left - 1
        shown, self.face = self.face, random.randrange(self.sides)
        return f"It was {shown}.", float(hit), hit, not hit and self.left == 0, {}


@pytest.mark.parametrize("game", [Coin, Coin(50), lambda sides=9: Coin(sides)])
def test_gem_objects_play_their_own_random_numbers(game: object) -> None:
    ar.register("protocols-test/coin-v0")(type("Tossed", (ar.from_gem(game),), {}))
    state = random.getstate()
    alone = [ar.run("protocols-test/coin-v0", "random", n=n)[-1] for n in (1, 2, 3, 4)]
    together = ar.run("protocols-test/coin-v0", "random", n=4)
    assert random.getstate() == state
    assert [e.messages for e in alone] == [e.messages for e in together]
    assert {e.turns for e in together} <= {1, 2, 3} and together[0].messages[0].content.startswith("Which side?\nA num")
    assert {finding.check for finding in ar.check("protocols-test/coin-v0", n=4).findings} <= {"floor"}


def test_gem_arguments_and_mistakes_are_named() -> None:
    ar.register("protocols-test/five-v0")(ar.from_gem(Coin, sides=5))
    assert "below 5" in ar.run("protocols-test/five-v0", "empty")[0].messages[0].content
    assert "below 7" in ar.run("protocols-test/five-v0", "empty", env_args={"sides": 7})[0].messages[0].content
    with pytest.raises(ar.ConfigError, match="3 is no game"):
        ar.from_gem(3)
    with pytest.raises(ar.ConfigError, match="pip install gem-llm"):
        ar.from_gem("game:Sudoku-v0")
