"""The built-in games, guess-v0 and frozenlake-v0: oracles, demonstrations, rewards, splits, replay."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

import agent_rl as ar
from agent_rl.envs.frozenlake import FrozenLake
from agent_rl.envs.guess import MOST, Guess
from agent_rl.gym.registry import spec
from agent_rl.policy import Scripted, demonstrator, oracle
from agent_rl.rollout import Job, run_episode, run_jobs, summarise
from tests.doubles import assert_plays_again, plays

GAMES = {"guess-v0": 1.1, "frozenlake-v0": 1.0}
PUZZLE = {"guess-v0": "puzzle", "frozenlake-v0": "map"}


def play(id: str, task: ar.Task, *answers: str) -> ar.Episode:
    script = Scripted(lambda env, seed: (answer for answer in answers))
    return asyncio.run(run_episode(Job(spec(id), task, 0, budget=ar.Budget(turns=len(answers))), script))


@pytest.mark.parametrize("split", ["train", "eval", "dev"])
@pytest.mark.parametrize("id", GAMES)
def test_oracle_wins_every_game(id: str, split: str) -> None:
    played = plays(spec(id), split, oracle(), 60)
    assert {episode.reward for episode in played} == {GAMES[id]}
    assert {episode.success for episode in played} == {True}
    turns = spec(id).budget.turns
    assert turns is not None and max(episode.turns for episode in played) < turns


@pytest.mark.parametrize("id", GAMES)
def test_splits_of_games_share_no_puzzle(id: str) -> None:
    def puzzles(split: str) -> set[object]:
        return {spec(id).tasks.get(split, index)[PUZZLE[id]] for index in range(300)}

    train, held_out, dev = puzzles("train"), puzzles("eval"), puzzles("dev")
    assert not train & held_out and not train & dev and not held_out & dev
    assert len(train) > 200


@pytest.mark.parametrize("id", GAMES)
def test_game_demonstrations_often_fail(id: str) -> None:
    result = summarise(plays(spec(id), "train", demonstrator(), 200))
    print(f"{id}: {result.success} demonstrations succeed")
    assert result.failed == 0
    assert 0.2 < result.success.value < 0.8


@pytest.mark.parametrize("id", GAMES)
def test_game_replays_from_its_answers(id: str) -> None:
    assert all(map(assert_plays_again, plays(spec(id), "train", demonstrator(), 10)))


@pytest.mark.parametrize("id", GAMES)
def test_game_snapshot_continues_the_same_game(id: str) -> None:
    task, answers = spec(id).tasks.get("train", 0), ["7", "right", "60", "down", "3"]

    def fresh() -> ar.Env:
        env = spec(id).make()
        env.reset(task, np.random.default_rng(0))
        env.step(ar.Message("assistant", answers[0]))
        return env

    env, other = fresh(), fresh()
    other.restore(env.snapshot())
    for answer in answers:
        message = ar.Message("assistant", answer)
        assert env.step(message) == other.step(message) and env.state_hash() == other.state_hash()


# guess-v0

TASK = {"low": 10, "high": 40, "number": 19, "puzzle": "19 of 31 from 10"}


def test_guess_answers_by_order() -> None:
    episode = play("guess-v0", TASK, "25", "It is 15.", "19")
    said = [message.content for message in episode.messages if message.role == "user"]
    assert said == ["guess a number from 10 to 40", "lower", "higher", "yes"]
    assert (episode.reward, episode.outcome) == (1.1, ar.Outcome.TERMINATED)


@pytest.mark.parametrize("unsound", ["", "18 or 20", "9", "41", "9" * 5000, "nineteen", "²"])
def test_unsound_guess_costs_the_small_reward(unsound: str) -> None:
    episode = play("guess-v0", TASK, unsound, "19")
    assert (episode.reward, episode.value("found"), episode.value("sound")) == (1.0, 1.0, 0.0)


def test_guess_outside_the_numbers_left_is_unsound() -> None:
    assert play("guess-v0", TASK, "25", "30", "19").value("sound") == 0.0


def test_guess_without_the_number_earns_nothing() -> None:
    assert play("guess-v0", TASK, "11", "12").reward == 0.0


def test_five_guesses_find_each_of_the_numbers() -> None:
    for number in range(1, MOST + 1):
        env = Guess()
        env.reset({"low": 1, "high": MOST, "number": number}, np.random.default_rng(0))
        script = env.oracle()
        assert any(env.step(ar.Message("assistant", str(next(script)))).terminated for _ in range(5))


# frozenlake-v0


def test_lake_of_the_task_is_walked() -> None:
    task = {"map": "SFFF HHHF GFFF FFFF"}
    episode = play("frozenlake-v0", task, *["right"] * 3, "down", "down", "left", "left", "left")
    assert episode.messages[0].content.endswith("\n[S]FFF\nHHHF\nGFFF\nFFFF")
    assert (episode.reward, episode.success) == (1.0, True)
    env = FrozenLake()
    env.reset(task, np.random.default_rng(0))
    script = env.oracle()
    moves = [next(script)]
    while not env.step(ar.Message("assistant", str(moves[-1]))).terminated:
        moves.append(next(script))
    assert moves == [*["right"] * 3, "down", "down", "left", "left", "left"]


def test_lake_hole_ends_with_nothing() -> None:
    episode = play("frozenlake-v0", {"map": "SHFF FFFF FFFF FFFG"}, "right")
    assert (episode.outcome, episode.reward, episode.success) == (ar.Outcome.TERMINATED, 0.0, False)


def test_slippery_lake_is_an_argument() -> None:
    env = spec("frozenlake-v0")
    jobs = [Job(env, env.tasks.get("train", i), i, env_args={"is_slippery": True}) for i in range(40)]
    assert summarise(asyncio.run(run_jobs(jobs, oracle()))).success.value < 0.9
