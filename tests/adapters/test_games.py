"""GEM's and TextArena's own games, of the installed packages, played through the adapters."""

import random
import re

import pytest

import agent_rl as ar
from agent_rl.policy import Scripted

SEEDS = {"train": [{"seed": n} for n in range(12)], "eval": [{"seed": n} for n in range(100, 112)]}


def bisecting(form: str) -> Scripted:
    """Guesses between the bounds that the hints leave."""

    def play(env: ar.Env, seed: int) -> ar.Script:
        low, high = 1, 20
        while True:
            middle = (low + high) // 2
            (answer,) = yield form.format(middle)
            low, high = (middle + 1, high) if "higher" in answer.content else (low, middle - 1)

    return Scripted(play)


def any_move(observation: str) -> str:
    return random.choice(re.findall(r"'(\[\d\])'", observation.rpartition("Available Moves")[2]))


@pytest.mark.parametrize(
    ("adapted", "form"),
    [
        (ar.from_gem("game:GuessTheNumber-v0-easy", min_number=1, max_number=20, max_turns=9), "\\boxed{{{}}}"),
        (ar.from_textarena("GuessTheNumber-v0-raw"), "[{}]"),
        (ar.from_textarena("GuessTheNumber-v0"), "[{}]"),
    ],
)
def test_number_is_guessed_and_seeds_replay(adapted: type[ar.Env], form: str) -> None:
    ar.register("games-test/guess-v0", tasks=SEEDS)(type("Guess", (adapted,), {}))
    first, again = (ar.run("games-test/guess-v0", bisecting(form), n=12) for _ in range(2))
    assert all(episode.reward == 1.0 and episode.success for episode in first)
    assert [episode.messages for episode in first] == [episode.messages for episode in again]
    assert len({episode.messages[-1].content for episode in first} | {len(e.messages) for e in first}) > 2
    report = ar.check("games-test/guess-v0", n=4)
    assert not report.findings and report.score("random", "eval").success.value <= 0.2


def test_opponent_moves_and_check_finds_nothing() -> None:
    ar.register("games-test/three-v0", tasks=SEEDS)(ar.from_textarena("TicTacToe-v0-raw", player=1, opponents=any_move))

    def best(env: ar.Env, seed: int) -> ar.Script:
        said = env.game.get_observation()  # type: ignore[attr-defined]
        assert said == (1, [])  # read by the adapter
        while True:
            board = env.game.state.game_state["board"]  # type: ignore[attr-defined]
            yield f"[{_best_cell([cell for row in board for cell in row])}]"

    played = ar.run("games-test/three-v0", Scripted(best), n=12)
    assert all(episode.reward in (0.0, 1.0) for episode in played) and sum(e.success or 0 for e in played) > 4
    assert "[Player 0] [" in played[0].messages[0].content and "[Player 1] [" not in played[0].messages[2].content
    assert not ar.check("games-test/three-v0", n=4).findings


def _best_cell(cells: list[str]) -> int:
    """Win, else block, else the middle, else any."""
    lines = ["012", "345", "678", "036", "147", "258", "048", "246"]
    free = [n for n, cell in enumerate(cells) if not cell]
    for mark in "XO":
        for line in lines:
            held = [cells[int(n)] for n in line]
            if held.count(mark) == 2 and "" in held:
                return int(line[held.index("")])
    return 4 if 4 in free else free[0]


def test_unknown_game_is_named() -> None:
    with pytest.raises(ar.ConfigError, match=r"textarena has no game 'TicTacTo-v0'\. Did you mean 'TicTacToe-v0'"):
        ar.from_textarena("TicTacTo-v0")
