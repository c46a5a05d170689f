"""GiGPO and VinePPO by hand: advantages through `Algorithm.compute_weights`, and the choice of valued states."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from agent_rl.algorithms import Algorithm, AlgorithmConfig
from agent_rl.algorithms.explain import explain
from agent_rl.algorithms.state_values import StateValueConfig, plan, return_from
from agent_rl.core.episode import Episode, Outcome, Reward, StepRecord, group_episodes
from agent_rl.core.trajectory import Completion, FinishReason, Fork, Source, Trajectory
from agent_rl.errors import ConfigError
from tests.batches import weigh
from tests.doubles import example_episode

STOP = FinishReason.STOP


def walk(name: str, group: str, reward: float | None, *states: str | None, **changes: object) -> Episode:
    """An episode with a turn in each of the states; turn k samples k + 1 tokens, and its prompt names the group."""
    trajectory = Trajectory()
    trajectory.append([ord(group)], Source.PROMPT, 0)
    for turn in range(len(states)):
        ids = tuple(range(10, 11 + turn))
        trajectory.append_completion(Completion(ids, (-1.0,) * len(ids), STOP, (0,) * len(ids)), turn)
        trajectory.append([len(name)], Source.ENV, turn + 1)
    rewards = {"rewards": (Reward("r", reward),)} | changes
    steps = tuple(StepRecord(0, 0.0, False, False, state) for state in states)
    return example_episode(name, group_id=group, steps=steps, trajectories=(trajectory,), **rewards)


def by_turn(algorithm: Algorithm, episodes: list[Episode], values: torch.Tensor | None = None) -> list[list[float]]:
    """Advantages by turn of each episode; none for an episode without a gradient."""
    x = algorithm.experience(group_episodes(episodes))
    x = x if values is None else replace(x, state_values=values)
    batch, _ = weigh(algorithm, x)
    rows = batch.rows
    found: list[list[float]] = [[] for _ in episodes]
    for row, episode in enumerate(rows.episode.tolist()):
        mask, turns = rows.loss_mask[row], rows.turns[row]
        for turn in sorted(set(turns[mask].tolist())):
            (value,) = set(batch.advantages[row][mask & (turns == turn)].tolist())  # one number for all its tokens
            found[episode].append(value)
        assert not batch.advantages[row][~mask].any()
    return found


# GiGPO

GIGPO = {"name": "step-grouped", "gamma": 0.5, "std": False}


def test_step_grouped_compares_turns_of_equal_state():
    paid = (Reward("r", 1.0), Reward("step", 0.5, source="step", turn=0))
    episodes = [
        walk("e0", "a", 1.0, "start", "left"),
        walk("e1", "a", 0.0, "start", "left", "left"),
        walk("e2", "a", 1.5, "start", rewards=(Reward("r", 1.5),)),
        walk("e3", "b", 1.5, "start", "left", rewards=paid),  # another task: never compared with the others
        walk("lost", "a", None, "start", "left"),
    ]
    # group a: mean 2.5 / 3, leads 1/6, -5/6, 4/6; group b is alone
    # returns: e0 .5, 1; e1 0, 0, 0; e2 1.5; in "start" mean 2/3, in "left" mean 1/3
    got = by_turn(Algorithm(AlgorithmConfig(advantage=GIGPO)), episodes)
    expected = [[1 / 6 - 1 / 6, 1 / 6 + 2 / 3], [-5 / 6 - 2 / 3, -5 / 6 - 1 / 3, -5 / 6 - 1 / 3], [4 / 6 + 5 / 6]]
    for turns, wanted in zip(got, expected, strict=False):
        assert turns == pytest.approx(wanted, abs=1e-6)
    assert got[3:] == [[], []]
    half = by_turn(Algorithm(AlgorithmConfig(advantage=GIGPO | {"omega": 0.5})), episodes)
    assert half[2] == pytest.approx([4 / 6 + 5 / 12])
    spread = by_turn(Algorithm(AlgorithmConfig(advantage=GIGPO | {"std": True})), episodes)
    group, start = math.sqrt((1 + 25 + 16) / 36 / 2), math.sqrt((1 / 36 + 4 / 9 + 25 / 36) / 2)
    assert spread[2] == pytest.approx([4 / 6 / group + 5 / 6 / start], rel=1e-4)


def test_step_grouped_counts_returns_from_the_turn():
    early = (Reward("r", 0.0), Reward("step", 1.0, source="step", turn=0))
    episodes = [walk("e0", "a", 0.0, "s", "t", rewards=early), walk("e1", "a", 1.0, "s", "t")]
    # returns: 1, 0 and .5, 1; both episodes earned 1
    got = by_turn(Algorithm(AlgorithmConfig(advantage=GIGPO)), episodes)
    assert got[0] == pytest.approx([0.25, -0.5]) and got[1] == pytest.approx([-0.25, 0.5])


def test_step_grouped_sees_no_difference_in_rounding():
    """0.9 by other components: in float32 these sums differ, and a deviation of their rounding would divide them."""
    parts = [(0.2, 0.7), (0.1, 0.8), (0.9, 0.0), (0.6, 0.3)]
    episodes = [
        walk(f"e{i}", "a", None, "s", rewards=tuple(map(Reward, ("right", "short"), part)))
        for i, part in enumerate(parts)
    ]
    for changes in ({}, {"shaping": [{"name": "scale", "factor": 0.3}]}):
        algorithm = Algorithm(AlgorithmConfig.model_validate({"advantage": "step-grouped"} | changes))
        assert by_turn(algorithm, episodes) == [[], [], [], []]


def test_state_advantages_merge_rows_of_forks():
    episodes = [walk("e0", "a", 1.0, "s", "t"), walk("e1", "a", 0.0, "s", "t"), walk("e2", "a", 0.0, "s", "t")]
    one = by_turn(Algorithm(AlgorithmConfig(advantage=GIGPO)), episodes)
    (whole,) = episodes[0].trajectories
    start, at = whole.before(1), len(whole) - 3  # the second turn's two tokens, and its closing
    assert start is not None and len(start) == at
    before, after = Trajectory(), Trajectory(Fork(0, at))
    before.append([ord("a")], Source.PROMPT, 0)
    before.append_completion(Completion((10,), (-1.0,), FinishReason.STOP, (0,)), 0)
    after.append(start.tolist(), Source.PROMPT, 1)
    after.append_completion(Completion((10, 11), (-1.0,) * 2, FinishReason.STOP, (0, 0)), 1)
    forked = [replace(episodes[0], trajectories=(before, after)), *episodes[1:]]
    assert by_turn(Algorithm(AlgorithmConfig(advantage=GIGPO)), forked) == one
    values = torch.tensor([[0.5, 0.75]] * 3).double()
    assert by_turn(Algorithm(vine_config()), forked, values) == [[0.25, 0.25], [0.25, -0.75], [0.25, -0.75]]


def test_step_grouped_requires_every_state():
    algorithm = Algorithm(AlgorithmConfig(advantage="step-grouped"))
    x = algorithm.experience(
        group_episodes([walk("e0", "a", 1.0, "s", None), walk("e1", "a", 0.0, "s"), walk("e2", "a", None, None)])
    )
    assert x.states.tolist() == [[0, -1], [0, -1], [-1, -1]]
    with pytest.raises(ConfigError, match=r"but 1 turns have none: let the environment define state_hash\(self\)"):
        weigh(algorithm, x)


# VinePPO


def vine_config(**settings: object) -> AlgorithmConfig:
    return AlgorithmConfig(**{"advantage": "state-values", "vine": {"continuations": 2, "max_episodes": 8}} | settings)


def test_state_values_advantage_by_hand():
    paid = (Reward("r", 1.0), Reward("step", 0.25, source="step", turn=0))
    episodes = [
        walk("e0", "a", 1.25, "s", "t", "u", rewards=paid),
        walk("e1", "a", 0.0, "s", "t", "u"),
        walk("e2", "a", 1.0, "s"),
        walk("lost", "a", None, "s", "t"),
    ]
    nan = math.nan
    values = torch.tensor([[0.5, 0.75, 0.25], [0.5, nan, 0.25], [nan, nan, nan], [0.5, 0.75, nan]]).double()
    got = by_turn(Algorithm(vine_config()), episodes, values)
    assert got == [
        [0.25 + 0.75 - 0.5, 0.25 - 0.75, 1 - 0.25],
        [0.25 - 0.5, 0.25 - 0.5, -0.25],  # the state between the first two turns has no value: they are one step
        [],  # nothing to compare with
        [],
    ]
    got = by_turn(Algorithm(vine_config(advantage={"name": "state-values", "gamma": 0.5})), episodes, values)
    assert got[0] == pytest.approx([0.25 + 0.375 - 0.5, 0.125 - 0.75, 1 - 0.25])
    assert got[1] == pytest.approx([0.0625 - 0.5, 0.0625 - 0.5, -0.25])


EPISODES = [
    walk("e0", "a", 1.0, "s", "t", "u"),
    walk("e1", "a", 0.0, "s", "u"),
    walk("e2", "b", 0.0, "s", "t"),
    walk("dropped", "b", 1.0, "s", "w"),
]
STATES = ({(0, 0), (1, 0)}, {(0, 1)}, {(0, 2), (1, 1)}, {(2, 0)}, {(2, 1)})
WANTED = [True, True, True, False]


def planned(each: int, most: int, seed: int = 0, episodes: list[Episode] = EPISODES):
    return plan(episodes, WANTED, StateValueConfig(continuations=each, max_episodes=most), np.random.default_rng(seed))


def test_vine_plan_shares_equal_states():
    vine = planned(3, 100)
    assert tuple(map(set, vine.states)) == STATES
    assert sorted(vine.valued) == [0, 1, 2, 3, 4] and len(vine.starts) == 15
    assert len({s.seed for s in vine.starts}) == 15
    at = vine.valued.index(2) * 3  # in turn from every place where the state was met
    assert [(s.episode, s.turn) for s in vine.starts[at : at + 3]] == [(0, 2), (1, 1), (0, 2)]


def test_vine_plan_compares_prompts_without_hashes():
    blind = [replace(e, steps=tuple(replace(s, state=None) for s in e.steps)) for e in EPISODES]
    # the beginnings are shared, and as all sample the same ids, so are the turns behind them; b has another prompt
    assert list(map(set, planned(1, 100, episodes=blind).states)) == [
        {(0, 0), (1, 0)},
        {(0, 1), (1, 1)},
        {(0, 2)},
        {(2, 0)},
        {(2, 1)},
    ]


def test_vine_plan_values_no_turn_begun_with_a_summary():
    whole = EPISODES[0].trajectories[0]
    reply = Trajectory(Fork(0, 1))
    reply.append([ord("a")], Source.PROMPT, 1)
    reply.append_completion(Completion((20,), (-1.0,), STOP, (0,)), 1)
    summarised = [replace(EPISODES[0], trajectories=(whole, reply)), *EPISODES[1:]]
    assert tuple(map(set, planned(3, 100, episodes=summarised).states)) == (STATES[0], *STATES[2:])


def test_vine_plan_values_beginnings_first():
    assert [s.episode for s in planned(2, 5).starts] == [0, 1, 2, 2] and planned(2, 5).valued == (0, 3)
    assert planned(2, 3).valued == (0,) and planned(2, 1).starts == ()
    rest = [planned(2, 6, seed).valued[2:] for seed in range(20)]
    assert {i for valued in rest for i in valued} == {1, 2, 4} and set(map(len, rest)) == {1}
    assert planned(2, 6, 7) == planned(2, 6, 7)


def test_vine_values_are_means_of_returns():
    vine = planned(2, 8)
    assert vine.valued == (0, 3, 2, 4)
    steps = tuple(Reward("step", 1.0, source="step", turn=turn) for turn in range(3))
    runs = {
        0: [walk("x", "a", 1.0, "s", "v"), walk("y", "a", 0.5, "s")],
        3: [walk("x", "b", None, "s"), walk("y", "b", 0.75, "s", "v", "v", outcome=Outcome.TERMINATED)],
        2: [walk("x", "a", None, "s", "v", "v", rewards=steps)] * 2,
        4: [walk("x", "a", 1.0, "s", "v", "v", outcome=Outcome.FAILED)] * 2,
    }
    continued = [e for index in vine.valued for e in runs[index]]
    values, metrics = vine.values(continued, (4, 3), gamma=0.5)
    expected = torch.full((4, 3), math.nan, dtype=torch.float64)
    expected[0, 0] = expected[1, 0] = (0.5 * 1 + 0.5) / 2
    expected[2, 0] = 0.25 * 0.75
    expected[0, 2] = expected[1, 1] = (1 + 1.5) / 2  # one began in turn 2, the other in turn 1
    torch.testing.assert_close(values, expected, equal_nan=True)
    names = ("states", "valued", "episodes", "unscored", "unjudged")
    assert metrics == {f"vine/{name}": n for name, n in zip(names, (5, 3, 8, 3, 0), strict=True)}
    half, metrics = planned(2, 2).values([walk("x", "a", 1.0, "s")] * 2, (4, 3), gamma=1.0)
    assert half.isfinite().nonzero().tolist() == [[0, 0], [1, 0]]
    assert metrics["vine/valued"] == 1 and metrics["vine/unjudged"] == 2  # the two turns of e2


def test_return_from_excludes_earlier_rewards():
    rewards = (Reward("r", 1.0, 2.0), Reward("none", None, 0.0), Reward("step", 4.0, source="step", turn=0))
    episode = walk("e", "a", 0.0, "s", "t", "u", rewards=rewards)
    assert [return_from(episode, turn, 0.5) for turn in range(3)] == [4.5, 1.0, 2.0]
    assert return_from(replace(episode, outcome=Outcome.FAILED), 0, 1.0) is None


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"vine": {}}, "vine.max_episodes=0 lets it value none: set it to 4 times the states"),
        ({"vine": {"continuations": 9, "max_episodes": 8}}, "vine.continuations=9 episodes per state"),
        ({"shaping": [{"name": "scale", "factor": 2.0}]}, "but not the values that continuations measure"),
        ({"kl": {"where": "reward", "kind": "k1"}}, "put the KL penalty in the loss"),
        ({"advantage": "step-grouped"}, "vine.max_episodes=8 values states for advantage=state-values only"),
    ],
)
def test_vine_refuses_meaningless_settings(settings, problem):
    with pytest.raises(ValidationError, match=problem):
        vine_config(**settings)


def test_explain_names_the_vine_budget():
    assert "2 continuations a state, at most 8 a step" in explain(vine_config())
    assert "vine" not in explain(AlgorithmConfig())
