"""agent_rl.gym.reward: signatures and results of `@reward` methods."""

import asyncio
import threading

import numpy as np
import pytest

from agent_rl.core.episode import Episode, Origin, Outcome, Reward, StopReason
from agent_rl.errors import DefinitionError
from agent_rl.gym.dialogue import DialogueEnv
from agent_rl.gym.env import Env
from agent_rl.gym.from_gym import GymnasiumEnv
from agent_rl.gym.game import Game
from agent_rl.gym.reward import reward
from agent_rl.gym.sandboxed import SandboxedEnv

EPISODE = Episode("e", "odd-v0", {}, 0, "g", Origin("rollout"), (), (), (), (), StopReason.DONE, Outcome.TERMINATED)


def score(env: Env) -> tuple[Reward, ...]:
    return asyncio.run(env.score(EPISODE))


def scoring(value: object) -> Env:
    """Return an environment whose only reward, `odd`, is `value`."""

    class Odd(Env):
        @reward
        def odd(self, episode) -> float:
            return value

    return Odd()


def test_score_without_rewards_is_empty():
    assert score(Env()) == ()


@pytest.mark.parametrize(
    ("value", "scored"),
    [(None, None), (True, 1.0), (2, 2.0), (0.5, 0.5), (np.float32(0.5), 0.5), (np.int64(2), 2.0), (np.True_, 1.0)],
    ids=repr,
)
def test_score_converts_numbers_and_keeps_none(value, scored):
    (component,) = score(scoring(value))
    assert component == Reward("odd", scored)
    assert type(component.value) is type(scored)


@pytest.mark.parametrize(
    ("value", "error"),
    [(float("nan"), ValueError), (float("-inf"), ValueError), ("1", TypeError), ([1.0], TypeError)],
    ids=repr,
)
def test_reward_refuses_non_numbers(value, error):
    with pytest.raises(error, match=r"Odd\.odd returned"):
        score(scoring(value))


def test_async_rewards_overlap_and_raise_unwrapped():
    arrived: list[str] = []

    class Judged(Env):
        @reward
        async def first(self, episode):
            arrived.append("first")
            while len(arrived) < 2:  # ends only if the other one runs too
                await asyncio.sleep(0)
            return 1

        @reward
        async def second(self, episode):
            arrived.append("second")
            return 1

    class Broken(Judged):
        @reward
        async def third(self, episode):
            raise KeyError("judge")

    assert [r.value for r in score(Judged())] == [1.0, 1.0]
    with pytest.raises(KeyError, match="judge"):
        score(Broken())


def test_inline_reward_stays_in_the_thread_of_the_loop():
    class Threads(Env):
        @reward(inline=True)
        def here(self, episode):
            return threading.current_thread() is threading.main_thread()

        @reward(weight=0.5)
        def elsewhere(self, episode):
            return threading.current_thread() is not threading.main_thread()

        @reward(inline=True)
        def unscored(self, episode):
            return None

    assert score(Threads()) == (Reward("here", 1.0), Reward("elsewhere", 1.0, 0.5), Reward("unscored", None))
    with pytest.raises(DefinitionError, match="is async and inline: drop inline=True"):

        @reward(inline=True)
        async def judged(self, episode):
            return 1


def test_reward_is_not_hidden_by_an_attribute_of_its_name():
    class Remembers(Env):
        def __init__(self) -> None:
            self.solved = 1

        @reward
        def solved(self, episode):  # type: ignore[no-redef]
            return self.solved / 2

    assert score(Remembers()) == (Reward("solved", 0.5),)


def test_reward_replaces_nothing_of_its_bases():
    for base, name in ((Game, "over"), (DialogueEnv, "user"), (SandboxedEnv, "terminal"), (Env, "step")):
        with pytest.raises(DefinitionError, match=rf"in the place of {base.__name__}\.{name}, which it would replace"):
            type("Mine", (base,), {name: reward(lambda self, episode: 1)})
    own = type("Own", (GymnasiumEnv,), {"solved": reward(lambda self, episode: 1)})
    assert [c.attribute for c in own.reward_components] == ["solved"], "a reward may take another one's place"


def test_reward_refuses_wrong_signature_and_weight():
    with pytest.raises(DefinitionError, match=r"correct\(self\)'.*def correct\(self, episode\)"):

        class NoEpisode(Env):
            @reward
            def correct(self):
                return 1

    with pytest.raises(DefinitionError, match="weight=nan"):
        reward(weight=float("nan"))(lambda self, episode: 1)
