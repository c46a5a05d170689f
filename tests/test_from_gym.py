"""Gymnasium's environments played by text: spaces, legal actions, seeds, ends, overrides."""

from __future__ import annotations

import asyncio
import warnings
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.envs.registration import EnvSpec as EntryOfGymnasium
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Text, Tuple
from gymnasium.utils.env_checker import check_env

import agent_rl as ar
from agent_rl.checks.check import check_env as check_env_of_ours
from agent_rl.gym.from_gym import GymnasiumEnv, from_gym
from agent_rl.gym.registry import EnvSpec, spec
from agent_rl.gym.spaces import describe, explain, read, write
from agent_rl.policy import Scripted, demonstrator
from agent_rl.rollout import Job, run_episode

CLASSIC = (
    *("FrozenLake-v1", "FrozenLake8x8-v1", "CliffWalking-v1", "Taxi-v4", "Blackjack-v1", "CartPole-v1"),
    *("MountainCar-v0", "MountainCarContinuous-v0", "Acrobot-v1", "Pendulum-v1"),
)
LAKE = from_gym("FrozenLake-v1", is_slippery=False)
WAY = ("down", "down", "right", "right", "down", "right")


def registered(cls: type[GymnasiumEnv], turns: int = 8) -> EnvSpec:
    ar.register("from-gym-test/one-v0", budget=ar.Budget(turns=turns))(type("One", (cls,), {}))
    return spec("from-gym-test/one-v0")


def play(cls: type[GymnasiumEnv], *answers: str, task: ar.Task | None = None, turns: int = 8) -> ar.Episode:
    job = Job(registered(cls, turns), task or {}, 0)
    return asyncio.run(run_episode(job, Scripted(lambda env, seed: (answer for answer in answers))))


@pytest.mark.parametrize("id", CLASSIC)
def test_random_play_is_legal_and_can_be_replayed(id: str) -> None:
    cls = from_gym(id)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        episode = asyncio.run(run_episode(Job(registered(cls), {"split": "train", "index": 3}, 4), demonstrator()))
    assert episode.error is None and episode.reward is not None
    assert "Answer with" in episode.messages[0].content
    assert not any("illegal" in message.content for message in episode.messages)
    answers = [message.content for message in episode.messages if message.role == "assistant"]
    again = play(cls, *answers, task=episode.task)
    assert (again.messages, again.steps) == (episode.messages, episode.steps)


def test_lake_is_walked_to_its_end() -> None:
    episode = play(LAKE, *WAY)
    opening, first = episode.messages[0].content, episode.messages[2].content
    assert opening.endswith("Answer with left, down, right or up.\n[S]FFF\nFHFH\nFFFH\nHFFG")
    assert first == "(Down)\nSFFF\n[F]HFH\nFFFH\nHFFG"
    assert (episode.outcome, episode.reward, episode.value("solved")) == (ar.Outcome.TERMINATED, 1.0, 1.0)
    assert [step.reward for step in episode.steps] == [0, 0, 0, 0, 0, 1.0]
    assert play(LAKE, "down", "right").value("solved") == 0.0


def test_time_limit_of_gymnasium_truncates() -> None:
    episode = play(from_gym("CartPole-v1", max_episode_steps=2), "left", "right")
    assert (episode.stop_reason, episode.reward, episode.success) == (ar.StopReason.ENV_TRUNCATED, 2.0, False)


@pytest.mark.parametrize("limit", [None, 3])
def test_cut_episode_is_not_solved_by_the_costs_it_spared(limit: int | None) -> None:
    episode = play(from_gym("MountainCar-v0", max_episode_steps=limit), "left", "left", "left", turns=3)
    assert (episode.reward, episode.value("solved"), episode.success) == (-3.0, 0.0, False)


def test_whole_episode_that_gymnasium_truncates_may_be_solved(monkeypatch: pytest.MonkeyPatch) -> None:
    limited = EntryOfGymnasium("Limited-v0", "gymnasium.envs.classic_control:CartPoleEnv", 2.0, max_episode_steps=2)
    monkeypatch.setitem(gymnasium.registry, "Limited-v0", limited)
    episode = play(from_gym("Limited-v0"), "0", "1")
    assert (episode.stop_reason, episode.value("solved")) == (ar.StopReason.ENV_TRUNCATED, 1.0)


@pytest.mark.parametrize("answer", ["", "north", "I don't know", "7", "-1", "1.5", "1e999"])
def test_illegal_answer_gets_a_complaint_and_moves_nothing(answer: str) -> None:
    episode = play(LAKE, answer, *WAY)
    complaint = episode.messages[2].content
    assert complaint.startswith("illegal: ") and complaint.endswith("Answer with left, down, right or up.")
    assert episode.reward == 1.0


def test_illegal_reward_is_counted() -> None:
    strict = type("Strict", (LAKE,), {"illegal_reward": -0.5})
    assert play(strict, "?", *WAY).reward == 0.5


@pytest.mark.parametrize(
    ("said", "meant"),
    [("down", 1), ("DOWN!", 1), ("2", 2), ("left or right? right", 2), ("<answer>up</answer>", 3), ("upward, 0", 0)],
)
def test_last_action_of_an_answer_is_meant(said: str, meant: int) -> None:
    assert read(Discrete(4), said, ("left", "down", "right", "up")) == meant


@pytest.mark.parametrize("names", ["ldr", "ldrux"])
def test_actions_need_a_name_each(names: str) -> None:
    episode = play(from_gym("FrozenLake-v1", action_names=tuple(names)), "l")
    assert episode.error is not None and "give one for each action of Discrete(4)" in episode.error.message


def test_masked_actions_are_said_and_refused() -> None:
    taxi = from_gym("Taxi-v4")
    opening = play(taxi, "north", turns=1).messages[0].content
    legal = opening.rpartition("legal now: ")[2].split(", ")
    masked = sorted({"south", "north", "east", "west", "pickup", "dropoff"} - set(legal))
    episode = play(taxi, masked[0], legal[0], turns=2)
    assert episode.messages[2].content == (f"illegal: {masked[0]} is not possible now. Answer with {', '.join(legal)}.")
    assert [step.reward for step in episode.steps] == [0.0, -1.0]
    assert "[" in opening and "(" in opening and "{" in opening


def test_seed_follows_from_the_task() -> None:
    def opening(**task: int) -> str:
        return play(from_gym("CartPole-v1"), "left", task=task, turns=1).messages[0].content

    assert opening(index=1) == opening(index=1) != opening(index=2)
    cart = gymnasium.make("CartPole-v1")
    start = cart.reset(seed=5)[0]
    assert describe(cart.observation_space, start).strip("[]").split(", ")[0] in opening(seed=5)


@pytest.mark.parametrize(
    ("space", "value", "text"),
    [
        (Box(0, 10**6, (2,), np.int64), np.array([123456, 7]), "[123456, 7]"),
        (Box(0, 10**6, (), np.int64), np.array(123456), "123456"),
        (MultiDiscrete([10**6, 5]), np.array([123456, 3]), "[123456, 3]"),
        (Box(0, 10**6, (2,)), np.array([123456.7, 0.5]), "[1.235e+05, 0.5]"),
    ],
)
def test_observed_whole_numbers_are_written_out(space: gymnasium.Space[Any], value: object, text: str) -> None:
    assert describe(space, value) == text


def test_bounds_of_an_action_keep_their_order() -> None:
    steering = Box(np.array([0, -2], np.float32), np.array([1, 2], np.float32))
    assert explain(steering) == "2 numbers from [0, -2] to [1, 2]"
    assert explain(Box(-np.inf, np.inf, (3,))) == "3 numbers from -inf to inf"
    assert explain(Box(0, 100_000, (1,), np.int64)) == "one number from 0 to 100000"


SPACES: list[gymnasium.Space[Any]] = [
    Discrete(5, start=-2),
    Box(-1, 1, (3,)),
    Box(0, 255, (2, 2), np.uint8),
    Box(-np.inf, np.inf, ()),
    MultiDiscrete([3, 4]),
    MultiDiscrete(np.array([[2, 3], [4, 5]])),
    MultiBinary(3),
    Text(6),
    Tuple((Discrete(2), Box(-1, 1, (2,)))),
    Dict({"move": Discrete(4), "say": Text(5), "force": Box(0, 1, (2,)), "more": Dict({"b": MultiBinary(2)})}),
]


@pytest.mark.parametrize("space", SPACES, ids=repr)
def test_written_actions_are_read_back(space: gymnasium.Space[Any]) -> None:
    space.seed(0)
    for _ in range(20):
        action = space.sample()
        again = (
            read(space, f"I choose {text}" if not isinstance(space, Text) else text)
            if (text := write(space, action))
            else action
        )
        assert space.contains(again) and write(space, again) == text
    assert explain(space) and isinstance(describe(space, action), str)


@pytest.mark.parametrize(
    ("space", "text"),
    [
        (Box(-1, 1, (2,)), "0.5"),
        (Box(-1, 1, (2,)), "0.5 1.5"),
        (Box(-1, 1, (1,)), "none"),
        (Box(-np.inf, np.inf, ()), "1e999"),
        (Box(0, 255, (2,), np.uint8), "0.5 1"),
        (Box(0, 255, (2,), np.uint8), "1 300"),
        (MultiBinary(1), "256"),
        (Tuple((Discrete(2),)), "[" * 100_000 + "]" * 100_000),
        (MultiDiscrete([3, 4]), "1 4"),
        (MultiDiscrete([3, 4]), "1 1.5"),
        (MultiBinary(2), "0 2"),
        (Text(3), "abcd"),
        (Dict({"a": Discrete(2)}), '{"b": 1}'),
        (Dict({"a": Discrete(2)}), '{"a": 2}'),
        (Dict({"a": Discrete(2)}), "a: 1"),
        (Tuple((Discrete(2), Discrete(2))), "[1]"),
        (Tuple((Discrete(2), Discrete(2))), "[[1], {}"),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_text_outside_a_space_is_refused(space: gymnasium.Space[Any], text: str) -> None:
    with pytest.raises(ValueError, match=r"no action|out of range"):
        read(space, text)


def test_space_without_a_text_form_is_refused() -> None:
    with pytest.raises(ar.DefinitionError, match="define parse"):
        explain(gymnasium.spaces.Sequence(Discrete(2)))


def test_observations_are_described_by_their_space() -> None:
    assert describe(MultiDiscrete([3, 4]), np.array([2, 1])) == "[2, 1]"
    assert describe(Box(0, 9, (2, 2)), np.array([[1, 2], [3, 4]])) == "[1, 2]\n[3, 4]"
    both = Dict({"at": Box(-1, 1, (2,)), "mission": Text(9)})
    assert describe(both, {"at": np.array([0.25, -1]), "mission": "go"}) == "at: [0.25, -1]\nmission: go"
    assert describe(Box(0, 9, (2, 2, 1)), np.zeros((2, 2, 1))) == "0 0\n0 0"
    image = Box(0, 255, (64, 64, 3), np.uint8)
    assert len(describe(image, image.sample())) < 2000


class Robot(gymnasium.Env[Any, Any]):
    """An environment with a Dict for actions; it raises on request."""

    observation_space, action_space = Text(20), SPACES[-1]

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        return f"level {(options or {}).get('level', 1)}", {}

    def step(self, action: Any) -> tuple[str, float, bool, bool, dict[str, Any]]:
        if action["say"] == "crash":
            raise RuntimeError("out of oil")
        return f"moved {action['move']}", 1.5, False, False, {}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"is_slippery": "maybe"}, r"FrozenLake-v1: env_args\.is_slippery='maybe': input should be a valid boolean"),
        ({"map_nam": "8x8"}, r"FrozenLake-v1: no argument 'map_nam'\. Did you mean 'map_name'\? It takes: "),
    ],
)
def test_gym_arguments_are_checked_before_a_run(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ar.ConfigError, match=said):
        from_gym("FrozenLake-v1")(**given)
    from_gym("FrozenLake-v1")(is_slippery=False, max_episode_steps=3, map_name="8x8")
    from_gym(lambda size, **more: gymnasium.make("FrozenLake-v1"), size=4)(anything=3)


class Endless(Robot):
    """Goes on after its end, as Gymnasium allows."""

    action_space = Discrete(2)

    def step(self, action: Any) -> tuple[str, float, bool, bool, dict[str, Any]]:
        return "moved", 1.0, bool(action), False, {}


def test_step_after_the_end_raises() -> None:
    ending = type("Ending", (from_gym(Endless),), {"oracle": lambda self: (yield "1")})
    ending_spec = EnvSpec("", "ending", 0, ending, spec("guess-v0").tasks, ar.Budget(turns=9))
    found = check_env_of_ours(ending_spec, n=2, seed=0, seconds=30, env_args={}).findings
    assert "end" not in {finding.check for finding in found}


gymnasium.register("Robot-v0", entry_point=Robot)
ACT = '{"move": 2, "say": "hi", "force": [0.5, 1], "more": {"b": [0, 1]}}'


def test_dict_actions_are_json_objects() -> None:
    episode = play(from_gym("Robot-v0"), f"Now: {ACT}", "{}", task={"options": {"level": 3}}, turns=2)
    said = [message.content for message in episode.messages if message.role == "user"]
    assert said[0].startswith('Play Robot-v0. Answer with a JSON object with "force": 2 numbers from 0 to 1, "more"')
    assert said[0].endswith("\nlevel 3") and said[1] == "moved 2" and said[2].startswith("illegal: there is no action")
    assert (episode.reward, episode.success) == (1.5, None)


def test_class_or_function_plays_without_a_registration() -> None:
    episode = play(from_gym(Robot), ACT, task={"options": {"level": 3}}, turns=1)
    assert episode.messages[0].content.startswith("Play Robot. Answer with a JSON object") and episode.reward == 1.5
    lake = from_gym(lambda size=4, **given: gymnasium.make(f"FrozenLake{size}x{size}-v1", **given), size=8)
    assert play(lake, "left", turns=1).messages[0].content.startswith("Play lambda.")
    for wrong in (Robot(), 3):
        with pytest.raises(ar.ConfigError, match="give an id, or a class or function"):
            from_gym(wrong)


def test_raising_environment_fails_its_episode() -> None:
    episode = play(from_gym("Robot-v0"), ACT.replace("hi", "crash"))
    assert (episode.outcome, episode.reward) == (ar.Outcome.FAILED, None)
    assert episode.error is not None and episode.error.message == "out of oil"


def test_describer_parser_and_words_are_replaceable() -> None:
    lake = from_gym(
        "FrozenLake-v1",
        describe=lambda place: f"you are at {divmod(int(place), 4)}",
        parse=lambda text: {"w": 0, "s": 1, "e": 2, "n": 3}[text[0]],
        instructions="Mind the holes.",
        is_slippery=False,
    )
    said = [message.content for message in play(lake, "south", "?", turns=2).messages if message.role == "user"]
    assert said[0] == "Mind the holes. Answer with left, down, right or up.\nyou are at (0, 0)"
    assert said[1] == "you are at (1, 0)" and said[2].startswith("illegal: '?'. Answer with")
    named = from_gym("FrozenLake-v1", action_names=("w", "s", "e", "n"), is_slippery=False)
    assert "[F]HFH" in play(named, "s", turns=1).messages[2].content


def test_unknown_environment_is_refused_at_definition() -> None:
    with pytest.raises(ar.ConfigError, match=r"from_gym\('FrozenLaka-v1'\).*FrozenLake"):
        from_gym("FrozenLaka-v1")


USERS = """
import agent_rl as ar

ar.register("from-gym-test/user-v0")(ar.from_gym("FrozenLake-v1", is_slippery=False))


@ar.register("from-gym-test/subclass-v0", budget=ar.Budget(turns=100))
class Lake(ar.from_gym("FrozenLake8x8-v1")):
    illegal_reward = -0.1
"""


def test_file_of_few_lines_registers_environments(tmp_path: Path) -> None:
    file = tmp_path / "lakes.py"
    file.write_text(USERS)
    ar.load_file(file)
    ar.load_file(file)  # takes its own place
    found = spec("from-gym-test/user-v0")
    assert (found.file, found.cls.__name__) == (file.resolve(), "FrozenLake")
    assert ar.run("from-gym-test/subclass-v0", policy="demonstrator", n=1)[0].error is None


def test_snapshot_continues_the_same_game() -> None:
    def fresh() -> GymnasiumEnv:
        env = from_gym("Taxi-v4")()
        env.reset({"seed": 1}, np.random.default_rng(0))
        return env

    env, rng = fresh(), np.random.default_rng(0)
    env.step(ar.Message("assistant", env.random_action(rng)))
    snapshot, other = env.snapshot(), fresh()
    answers = [ar.Message("assistant", name) for name in ("south", "north", "east", "pickup", "west")]
    went = [env.step(answer) for answer in answers]
    other.restore(snapshot)
    assert [other.step(answer) for answer in answers] == went


def test_text_environment_returns_to_gymnasium() -> None:
    registered(LAKE)
    env = gymnasium.make("agent_rl/from-gym-test.one-v0").unwrapped
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_env(env)
    env.reset(seed=0)
    assert [env.step(answer)[1] for answer in WAY][-1] == 1.0
    env.close()


def test_minigrid_is_played_by_the_names_of_its_actions() -> None:
    pytest.importorskip("minigrid")  # not in the lock
    grid = from_gym("MiniGrid-DoorKey-5x5-v0")
    shown = type("Shown", (grid,), {"describe": lambda self, _: str(self.gym.unwrapped.pprint_grid())})
    said = [m.content for m in play(shown, "forward", "left", "jump").messages if m.role == "user"]
    assert "left, right, forward, pickup, drop, toggle or done" in said[0] and said[3].startswith("illegal")
    assert said[1] != said[2] and "mission: use the key" in play(grid, "left", turns=1).messages[0].content
