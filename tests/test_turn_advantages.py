"""agent_rl.algorithms.advantages.turn: turn returns and GAE, GiGPO, VinePPO."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from agent_rl.algorithms.advantages import turn
from agent_rl.algorithms.advantages.token import gae, returns_to_go, settle
from agent_rl.algorithms.advantages.turn import spread, turn_gae, turn_returns, turn_starts
from agent_rl.errors import ConfigError
from tests.drawn import factors, grid, numbers, quick, rows
from tests.tensors import bits, i64, same, t64

NAN = math.nan


@st.composite
def rows_of_turns(draw):
    """Rewards, values, mask and turns of a batch; turns may be skipped, and start anywhere."""
    batch = draw(rows())
    turns = grid(draw, st.sampled_from([0, 0, 1, 2]), *batch[0].shape)
    return *batch, i64(turns).cumsum(-1)


def steps(row, turns):
    """The sampled tokens of each turn of a row, in order."""
    at = row.nonzero().flatten().tolist()
    return [[j for j in at if turns[j] == k] for k in sorted({int(turns[j]) for j in at})]


def test_spread_by_hand():
    per_turn = t64([[1, 2, NAN], [4, 5, 6]])
    turns, mask = i64([[-1, 0, 0, 1, 99], [0, 1, 2, 2, 2]]), bits("01110", "00101")
    same(spread(per_turn, turns, mask), t64([[0, 1, 1, 2, 0], [0, 0, 6, 0, 6]]))
    assert not spread(torch.ones(2, 0), turns, mask & False).any()
    with pytest.raises(ConfigError, match="turn 2, but there are numbers for 2 turns"):
        spread(per_turn[:, :2], turns, mask)
    with pytest.raises(ConfigError, match="turn -1; turns are counted from 0"):
        spread(per_turn, turns, ~mask)


def test_turn_starts_by_hand():
    turns, mask = i64([[0, 0, 0, 1, 1, 3, 3], [0, 0, 0, 0, 0, 0, 0]]), bits("0111011", "0000000")
    assert turn_starts(turns, mask).tolist() == bits("0101010", "0000000").tolist()
    assert turn_starts(i64([[0, 0, 1, 1]]), bits("1010")).tolist() == bits("1010").tolist()
    assert turn_starts(i64([[0, 0, 1, 1]]), bits("1111")).tolist() == bits("1010").tolist()


def test_turn_returns_by_hand():
    # turn 0: tokens 1, 2 and the tool's 3; turn 1: 4 and 6 around a forced 5; turn 4: 7, with a closing 8
    turns = i64([[0, 0, 0, 0, 1, 1, 1, 4, 4]])
    mask, rewards = bits("011010110"), t64([[1, 1, 0, 2, 1, 0, 1, 3, 5]])
    # turns have 1 + 1 + 2 = 4, 1 + 1 = 2, 3 + 5 = 8; with gamma .5: 8; 2 + 4 = 6; 4 + 3 = 7
    same(turn_returns(rewards, mask, turns, gamma=0.5), t64([[0, 7, 7, 0, 6, 0, 6, 8, 0]]))
    same(turn_returns(rewards, mask, turns), t64([[0, 14, 14, 0, 10, 0, 10, 8, 0]]))
    assert not turn_returns(rewards, mask & False, turns).any()


def test_turn_gae_by_hand():
    turns, mask = i64([[0, 0, 0, 2, 2, 2]]), bits("011011")
    rewards, values = t64([[0, 0, 0, 1, 0, 4]]), t64([[NAN, 1, 50, NAN, 2, 60]])
    # two turns with values 1 and 2; token 3's reward goes back to token 2, so rewards 1 and 4
    # gamma .5, lam .5: 4 - 2 = 2; 1 + .5 * 2 - 1 + .25 * 2 = 1.5
    advantages, returns = turn_gae(rewards, values, mask, turns, gamma=0.5, lam=0.5)
    same(advantages, t64([[0, 1.5, 1.5, 0, 2, 2]]))
    same(returns, t64([[0, 2.5, 2.5, 0, 4, 4]]))


@quick
@given(rows_of_turns(), factors, factors)
def test_turn_advantages_match_the_plain_recursion(batch, gamma, lam):
    rewards, values, mask, turns = batch
    got = turn_returns(rewards, mask, turns, gamma=gamma)
    advantages, predicted = turn_gae(rewards, values, mask, turns, gamma=gamma, lam=lam)
    settled = settle(rewards, mask)
    for i, row in enumerate(mask):
        total, running, after = 0.0, 0.0, 0.0
        want = torch.zeros(3, len(row), dtype=torch.float64)
        for at in reversed(steps(row, turns[i])):
            reward, value = float(settled[i, at].sum()), float(values[i, at[0]])
            total = reward + gamma * total
            running = reward + gamma * after - value + gamma * lam * running
            after = value
            want[:, at] = t64([total, running, running + value])[:, None]
        same(torch.stack([got[i], advantages[i], predicted[i]]), want)


@quick
@given(rows_of_turns(), factors, factors)
def test_turn_advantages_of_single_tokens_are_token_advantages(batch, gamma, lam):
    rewards, values, mask, _ = batch
    each = torch.arange(mask.shape[-1]).expand_as(mask)
    same(turn_returns(rewards, mask, each, gamma=gamma), returns_to_go(rewards, mask, gamma=gamma))
    got = torch.stack(turn_gae(rewards, values, mask, each, gamma=gamma, lam=lam))
    same(got, torch.stack(gae(rewards, values, mask, gamma=gamma, lam=lam)))


@quick
@given(rows_of_turns(), st.data())
def test_turn_advantages_ignore_gaps(batch, data):
    rewards, values, mask, turns = batch
    rewards = settle(rewards, mask)
    width = mask.shape[-1]
    before = (turn_returns(rewards, mask, turns, gamma=0.5), *turn_gae(rewards, values, mask, turns, gamma=0.5))
    # one column more, of unsampled tokens, somewhere, in the turn of a neighbour
    at = data.draw(st.integers(0, width))
    old = torch.tensor([j for j in range(width + 1) if j != at])

    def wider(x, fill):
        out = torch.full((len(x), width + 1), fill, dtype=x.dtype)
        out[:, old] = x
        return out

    wide = wider(mask, False)
    values = torch.where(wide, wider(values, NAN), NAN)
    turns = torch.where(wide, wider(turns, 0), 1 << 40)
    rewards = wider(rewards, 0.0)
    after = (turn_returns(rewards, wide, turns, gamma=0.5), *turn_gae(rewards, values, wide, turns, gamma=0.5))
    for x, y in zip(before, after, strict=True):
        assert torch.equal(wider(x, 0.0), y)


def test_turn_advantages_settle_rewards_on_tool_results():
    mask, turns, values = bits("01100100"), i64([[0, 0, 0, 0, 1, 1, 1, 2]]), torch.ones(1, 8)
    late, early = torch.zeros(1, 8), torch.zeros(1, 8)
    late[0, 7] = early[0, 5] = 2.0
    got = turn_returns(late, mask, turns, gamma=0.9)
    assert torch.equal(got, turn_returns(early, mask, turns, gamma=0.9))
    same(got, t64([[0, 1.8, 1.8, 0, 0, 2, 0, 0]]))
    assert torch.equal(turn_gae(late, values, mask, turns)[0], turn_gae(early, values, mask, turns)[0])


def step_grouped(scores, groups, returns, states, episode, **knobs):
    """The advantages of some turns, of each its return, state and episode; without discount a return is a reward."""
    at = episode, i64([int((episode[:i] == e).sum()) for i, e in enumerate(episode)])

    def by_episode(x, fill):
        return torch.full((len(scores), 4), fill, dtype=x.dtype).index_put(at, x)

    sampled, states = by_episode(torch.ones_like(states) > 0, False), by_episode(states, -1)
    found = turn.step_grouped(scores, groups, by_episode(returns, 0.0), sampled, states, gamma=0.0, **knobs)
    return found.advantages[at]


def from_state_values(rewards, values, final, **knobs):
    sampled = torch.arange(values.shape[-1]) <= final[:, None]
    return turn.from_state_values(rewards, sampled, values, **knobs).advantages


def test_step_grouped_by_hand():
    scores, groups = t64([1, 0, 5]), i64([3, 3, 4])
    episode = i64([0, 0, 1, 1, 2, 2])
    states = i64([10, 11, 10, 12, 10, 10])
    returns = t64([0.8, 1, 0.2, 0, 4, 6])
    # A_episode: .5, -.5, and 0 for the one of group 4
    # A_step: state 10 of group 3 has .8 and .2, mean .5; 11 and 12 were met once; state 10 of group 4 has 4 and 6
    got = step_grouped(scores, groups, returns, states, episode, std=False)
    same(got, t64([0.8, 0.5, -0.8, -0.5, -1, 1]))
    got = step_grouped(scores, groups, returns, states, episode, std=False, omega=0.5)
    same(got, t64([0.65, 0.5, -0.65, -0.5, -0.5, 0.5]))
    # with deviations: of 1, 0: sqrt(.5); of .8, .2: .3 sqrt(2); of 4, 6: sqrt(2)
    e, s, o = 0.5 / (math.sqrt(0.5) + 0.1), 0.3 / (0.3 * math.sqrt(2) + 0.1), 1 / (math.sqrt(2) + 0.1)
    got = step_grouped(scores, groups, returns, states, episode, eps=0.1)
    same(got, t64([e + s, e, -e - s, -e, -o, o]))


def test_step_grouped_counts_an_episode_once():
    episode = i64([0, 1, 1, 1])
    got = step_grouped(t64([1, 0]), i64([0, 0]), torch.zeros(4), i64([1, 2, 3, 4]), episode, std=False)
    same(got, t64([0.5, -0.5, -0.5, -0.5]))


def test_step_grouped_skips_unscored_episodes():
    scores, groups, episode = t64([1, NAN, 0, 1]), i64([0, 0, 0, 0]), i64([0, 1, 2, 3])
    states, returns = i64([1, 1, 1, 1]), t64([1, 100, 0, 2])
    got = step_grouped(scores, groups, returns, states, episode)
    keep = i64([0, 2, 3])
    assert got.isnan().tolist() == [False, True, False, False]
    same(got[keep], step_grouped(t64([1, 0, 1]), i64([0, 0, 0]), returns[keep], states[keep], i64([0, 1, 2])))
    empty = t64([])
    assert step_grouped(empty, i64([]), empty, i64([]), i64([])).shape == (0,)


@quick
@given(st.data())
def test_step_grouped_ignores_order_and_ids(data):
    count = data.draw(st.integers(1, 4))
    draw = lambda one: data.draw(st.lists(one, min_size=count, max_size=count))  # noqa: E731
    scores, groups = t64([1, 0, 3, 2]), i64([0, 0, 1, 1])
    returns, states, episode = t64(draw(numbers)), i64(draw(st.integers(0, 2))), i64(draw(st.integers(0, 3)))
    got = step_grouped(scores, groups, returns, states, episode, std=False)
    order = i64(data.draw(st.permutations(range(count))))
    same(step_grouped(scores, groups, returns[order], states[order], episode[order], std=False), got[order])
    same(step_grouped(scores, 7 - 3 * groups, returns, (states + 1) * 2**40, episode, std=False), got)
    for group in (0, 1):
        for state in range(3):
            at = (groups[episode] == group) & (states == state)
            step = (got - t64([0.5, -0.5, 0.5, -0.5])[episode])[at]
            same(step, returns[at] - returns[at].mean() if at.any() else step)


def test_from_state_values_by_hand():
    rewards = t64([[0, 1, 2], [0.5, 9, 9], [9, 9, 9], [1, 2, 3]])
    values = t64([[1, 2, 4], [3, NAN, NAN], [NAN, NAN, NAN], [1, NAN, 2]])
    # row 0, gamma .5: 0 + 1 - 1; 1 + 2 - 2; 2 + 0 - 4. Row 1 has one turn: .5 + 0 - 3. Row 2 none.
    # Row 3: nothing is known before turn 1, so turns 0 and 1 are one step: 1 + .5 * 2 + .25 * 2 - 1; 3 + 0 - 2
    got = from_state_values(rewards, values, i64([2, 0, -1, 2]), gamma=0.5)
    same(got, t64([[0, 1, -2], [-2.5, NAN, NAN], [NAN, NAN, NAN], [1.5, 1.5, 1]]))


def test_from_state_values_skips_unvalued_states():
    rewards, final = t64([[1, 2, 4, 8]] * 4), i64([3, 3, 3, 2])
    values = t64([[6, NAN, NAN, 7], [6, NAN, NAN, NAN], [NAN, 5, NAN, NAN], [NAN, NAN, NAN, 100]])
    # gamma .5. Row 0: 1 + 1 + 1 + 7/8 - 6, then 8 - 7. Row 1: 1 + 1 + 1 + 1 - 6. Row 2: nothing to compare turn 0 with,
    # then 2 + 2 + 2 - 5. Row 3 has three turns: the number behind them is no value
    got = from_state_values(rewards, values, final, gamma=0.5)
    same(got, t64([[-2.125] * 3 + [1], [-2] * 4, [NAN, 1, 1, 1], [NAN] * 4]))


@quick
@given(st.lists(st.tuples(numbers, numbers), min_size=1, max_size=6))
def test_from_state_values_telescopes(turns):
    rewards, values = t64([[r for r, _ in turns]]), t64([[v for _, v in turns]])
    got = from_state_values(rewards, values, i64([len(turns) - 1]))
    same(got.sum(-1), rewards.sum(-1) - values[:, 0])


def test_turn_advantages_are_float64_without_gradient():
    x = torch.rand(2, 4, dtype=torch.float32, requires_grad=True)
    mask, turns = bits("1101", "0111"), i64([[0, 0, 1, 1], [0, 1, 1, 2]])
    flat = i64([0, 0, 1, 1])
    for got in (
        spread(x, turns, mask),
        turn_returns(x, mask, turns),
        *turn_gae(x, x, mask, turns),
        step_grouped(x[:, 0], i64([0, 0]), x.flatten()[:4], flat, flat),
        from_state_values(x, x, i64([3, 3])),
    ):
        assert got.dtype == torch.float64
        assert not got.requires_grad
        assert got.isfinite().all()
