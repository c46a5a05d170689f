"""How second tries did lately, and which tasks it makes worth another one."""

from agent_rl.backends.embedded.second_tries import SecondTries
from agent_rl.core.episode import EpisodeGroup, Reward
from tests.episodes import example_episode

SKILL, CHANCE = "skill-v0", "chance-v0"


def group_of(env: str, successes: int, failures: int, lost: int = 0) -> EpisodeGroup:
    """Return a group of episodes that ended so."""
    ends = [1.0] * successes + [0.0] * failures + [None] * lost
    rewards = [(Reward("right", value),) for value in ends]
    return EpisodeGroup("g0", tuple(example_episode(env=env, rewards=found) for found in rewards))


def test_luck_is_told_by_environment_and_lately() -> None:
    tries = SecondTries()
    skilled, lucky = (group_of(env, 0, 4) for env in (SKILL, CHANCE))
    unsolved = {3: lucky, 5: skilled, 6: lucky, 9: skilled}
    assert tries.choose(unsolved) == [3, 5, 6, 9]
    tries.observe([*group_of(skilled.env, 1, 15).episodes, *group_of(lucky.env, 3, 13).episodes])
    assert tries.succeed_rarely(skilled) and not tries.succeed_rarely(lucky)
    assert tries.choose(unsolved) == [3, 5, 9]
    for _ in range(5):
        tries.observe(group_of(lucky.env, 0, 8).episodes)
    assert tries.choose(unsolved) == [3, 5, 6, 9]


def test_second_try_that_was_lost_counts_as_none() -> None:
    tries = SecondTries()
    tries.observe(group_of(SKILL, 1, 3, lost=100).episodes)
    assert tries.counts == {SKILL: (1, 4)}
