"""TextWorld's games: made once, played to their end, beside each other, without commands to the program behind them."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import numpy as np
import pytest
from textworld.core import GameNotRunningError

import agent_rl as ar
from agent_rl.envs.adapters import textworld as adapter
from agent_rl.envs.adapters.textworld import GAMES, META, make_task, open_game
from agent_rl.gym.registry import spec
from agent_rl.policy import Scripted
from agent_rl.rollout import Job, run_episode

pytestmark = pytest.mark.filterwarnings("ignore:Game .* is not fully supported")  # of jericho; TextWorld mutes it


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory):
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("games")
        patch.setenv("AGENT_RL_CACHE", str(folder))
        yield folder


def play(name: str, *commands: str, **env_args: object) -> ar.Episode:
    job = Job(spec(f"textworld/{name}-v0"), make_task("eval", 0), 0, env_args=env_args)
    return asyncio.run(run_episode(job, Scripted(lambda env, seed: (command for command in commands))))


@pytest.mark.parametrize("name", GAMES)
def test_walkthrough_wins_and_chance_does_not(name: str) -> None:
    won = ar.evaluate(f"textworld/{name}-v0", "oracle", n=1)
    assert (won.success.value, won.reward) == (1.0, pytest.approx(1.0))
    for policy in ("random", "empty", "nothing"):
        assert ar.evaluate(f"textworld/{name}-v0", policy, n=1).success.value == 0.0


def test_games_beside_each_other_are_not_mixed() -> None:
    episodes = ar.run("textworld/cooking-v0", "oracle", n=1, samples=6)
    assert [episode.reward for episode in episodes] == pytest.approx([1.0] * 6)


def test_game_is_made_once_and_again_the_same(cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    first = play("coin_collector", "look")
    made = sorted(cache.rglob("game.z8"))
    monkeypatch.setattr(adapter, "compile_game", None)
    assert play("coin_collector", "look").messages == first.messages
    assert sorted(cache.rglob("game.z8")) == made
    monkeypatch.undo()
    monkeypatch.setenv("AGENT_RL_CACHE", str(tmp_path))
    again = open_game("coin_collector", make_task("eval", 0)["seed"], GAMES["coin_collector"][1])
    assert again.is_relative_to(tmp_path) and {*cache.iterdir()} == {cache / "textworld"}
    assert play("coin_collector", "look").messages == first.messages


def test_failed_making_leaves_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fail(game: object, options: object) -> None:
        raise OSError("no space left")

    monkeypatch.setenv("AGENT_RL_CACHE", str(tmp_path))
    monkeypatch.setattr(adapter, "compile_game", fail)
    assert "no space left" in str(play("coin_collector", "look").error)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


@pytest.mark.parametrize("word", ["save", "Undo", "> restart now", "transcripts"])
def test_program_behind_the_game_takes_no_commands(word: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert {"save", "undo", "restart"} <= META
    episode = play("coin_collector", word, "look")
    assert episode.messages[2].content.startswith("That's not a verb I recognise.")
    assert "-= " in episode.messages[4].content and not [*tmp_path.iterdir()]


def test_second_command_of_a_line_is_not_given() -> None:
    episode = play("coin_collector", "look THEN quit", "look")
    assert all("-= " in episode.messages[at].content for at in (2, 4))


def test_last_line_is_one_command_and_hints_are_optional() -> None:
    assert "Possible commands:" in play("simple", "look").messages[0].content
    episode = play("simple", "I look.\n\n> open chest drawer. look", "", "é ☃" * 200, hints=False)
    replies = [message.content for message in episode.messages if message.role == "user"]
    assert not any("Possible commands:" in reply for reply in replies) and "-= " not in replies[1]
    assert episode.error.where == "policy" and len(replies) == 4


def test_close_waits_for_a_step_under_way() -> None:
    env = spec("textworld/coin_collector-v0").make()
    env.reset(make_task("eval", 0), np.random.default_rng(0))
    closing = threading.Thread(target=env.close)
    with adapter._one_at_a_time:  # as a step has it
        closing.start()
        closing.join(0.2)
        assert closing.is_alive()
    closing.join(10)
    assert not closing.is_alive()
    with pytest.raises(GameNotRunningError):
        env.step(ar.Message("assistant", "look"))


def test_settings_are_the_generators() -> None:
    short = play("coin_collector", level=1)
    assert "commands: go" not in short.messages[0].content and "take coin" in short.messages[0].content
