"""MiniGrid and BabyAI by `ar.from_gym`: every id that the installed package registers, and those that need more."""

from __future__ import annotations

import asyncio
import warnings

import gymnasium
import minigrid  # noqa: F401  registers its environments
import pytest

import agent_rl as ar
from agent_rl.gym.registry import spec
from agent_rl.policy import demonstrator
from agent_rl.rollout import Job, run_episode

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of Gymnasium, about a few old versions
NEED_WFC = {
    f"MiniGrid-WFC-{name}-v0"
    for name in ("DungeonMazeScaled", "MazeSimple", "ObstaclesAngular", "ObstaclesBlackdots", "ObstaclesHogs3")
} | {"MiniGrid-WFC-RoomsFabric-v0"}
"""They need imageio and networkx: pip install 'minigrid[wfc]'."""


@pytest.fixture(scope="module")
def ids() -> list[str]:
    return sorted(id for id in gymnasium.registry if id.startswith(("MiniGrid", "BabyAI")))


def test_ids_play_but_six(ids: list[str]) -> None:
    refused = {}
    for id in ids:
        game = ar.from_gym(id)()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                opening = game.reset({"seed": 1}, None)
            said = [game.step(ar.Message("assistant", word)).observation[0].content for word in ("left", "fly")]
        except gymnasium.error.DependencyNotInstalled as error:
            refused[id] = str(error)
            continue
        finally:
            game.close()
        actions = "left, right or forward" if "Dynamic" in id else "left, right, forward, pickup, drop, toggle or done"
        assert f"Answer with {actions}." in opening, id
        assert "mission" in opening and "mission" in said[0] and said[1].startswith("illegal: "), id
    assert len(ids) == 178 and refused.keys() == NEED_WFC
    assert all("minigrid[wfc]" in message for message in refused.values())


def test_grid_can_be_shown_and_replayed() -> None:
    class Door(ar.from_gym("MiniGrid-DoorKey-5x5-v0")):
        def describe(self, observation):
            return f"{observation['mission']}\n{self.gym.unwrapped.pprint_grid()}"

    ar.register("minigrid-test/door-v0", budget=ar.Budget(turns=20))(Door)
    job = Job(spec("minigrid-test/door-v0"), {"seed": 3}, 5)
    first, again = (asyncio.run(run_episode(job, demonstrator())) for _ in range(2))
    assert first.error is None and first.messages == again.messages
    assert "WGWGWGWGWG" in first.messages[0].content
    assert not any("illegal" in message.content for message in first.messages)
