"""agent_rl.algorithms.corrections: weights and rejections from old / mu."""

import math
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_rl.algorithms import components
from agent_rl.algorithms.corrections import (
    batch_normalised,
    geometric_rejection,
    geometric_tis,
    k3_rejection,
    sequence_normalised,
    sequence_rejection,
    sequence_tis,
    token_icepop,
    token_rejection,
    token_tis,
    worst_token_rejection,
)
from agent_rl.errors import ConfigError

NAN, INF = math.nan, math.inf
TIS = [token_tis, sequence_tis, geometric_tis]
WEIGH = [token_icepop, *TIS]
BY_SEQUENCE = [sequence_rejection, geometric_rejection, k3_rejection, partial(k3_rejection, over="max")]
BY_SEQUENCE += [worst_token_rejection]
REJECT = [token_rejection, *BY_SEQUENCE]


def given_ratios(rows, dtype=torch.float64):
    """Log-probabilities whose old / mu are the given numbers; None is not sampled, and NaN or inf on one side."""
    width = max(map(len, rows))
    padded = [[*row, *[None] * (width - len(row))] for row in rows]
    mask = torch.tensor([[w is not None for w in row] for row in padded])
    mu = torch.where(mask, -1.5, NAN).to(dtype)
    old = torch.tensor([[INF if w is None else -1.5 + math.log(w) for w in row] for row in padded], dtype=dtype)
    return old, mu, mask


# gaps between turns; a row with nothing sampled; a lone token
ROWS = [[None, 0.5, 2.0, None, 8.0, None], [None] * 6, [None, 0.2]]


def close(got, expected):
    torch.testing.assert_close(got, torch.tensor(expected, dtype=got.dtype), atol=1e-9, rtol=1e-6)


# Weights


def test_token_tis_by_hand():
    close(token_tis(*given_ratios([[9.0, 0.25]])), [[2.0, 0.25]])
    close(token_tis(*given_ratios(ROWS), cap=3.0), [[0, 0.5, 2, 0, 3, 0], [0] * 6, [0, 0.2, 0, 0, 0, 0]])


def test_sequence_tis_by_hand():
    # .5 * 2 * 8 = 8 and .2
    close(sequence_tis(*given_ratios(ROWS), cap=9.0), [[0, 8, 8, 0, 8, 0], [0] * 6, [0, 0.2, 0, 0, 0, 0]])
    close(sequence_tis(*given_ratios(ROWS), cap=5.0)[0], [0, 5, 5, 0, 5, 0])


def test_geometric_tis_by_hand():
    # 8^(1/3) = 2: the mean is over the three sampled tokens, not the six positions
    close(geometric_tis(*given_ratios(ROWS), cap=9.0), [[0, 2, 2, 0, 2, 0], [0] * 6, [0, 0.2, 0, 0, 0, 0]])
    close(geometric_tis(*given_ratios(ROWS), cap=1.5)[0], [0, 1.5, 1.5, 0, 1.5, 0])


def test_icepop_masks_ratios_outside_the_bounds():
    row = [0.49, 0.51, 1.0, 4.9, 5.1, None]
    close(token_icepop(*given_ratios([row])), [[0, 0.51, 1, 4.9, 0, 0]])
    # both ends included
    old, mu, mask = torch.zeros(1, 1).double(), torch.zeros(1, 1).double(), torch.ones(1, 1).bool()
    close(token_icepop(old, mu, mask, low=1.0, high=1.0), [[1.0]])


def test_batch_normalised_over_tokens_and_over_rows():
    weight = torch.tensor([[0.5, 2.0, NAN, 8.0], [NAN] * 4, [0.2, NAN, NAN, NAN]])
    mask = ~weight.isnan()
    # (.5 + 2 + 8 + .2) / 4 = 2.675
    tokens = [[0.5 / 2.675, 2 / 2.675, 0, 8 / 2.675], [0] * 4, [0.2 / 2.675, 0, 0, 0]]
    close(batch_normalised(weight, mask), tokens)
    # rows: 10.5 / 3 = 3.5 and .2, their mean 1.85; the empty row does not count
    rows = [[0.5 / 1.85, 2 / 1.85, 0, 8 / 1.85], [0] * 4, [0.2 / 1.85, 0, 0, 0]]
    close(sequence_normalised(weight, mask, torch.arange(3)), rows)
    assert batch_normalised(weight, mask).dtype == torch.float32


def test_sequence_normalised_takes_rows_of_an_episode_as_one():
    weight, mask = torch.tensor([[1.0], [1.0], [4.0]]), torch.ones(3, 1, dtype=torch.bool)
    close(sequence_normalised(weight, mask, torch.tensor([5, 5, 9])), [[0.4], [0.4], [1.6]])


@pytest.mark.parametrize("normalised", [batch_normalised, lambda w, m: sequence_normalised(w, m, torch.arange(2))])
def test_normalised_zero_weights_are_zero(normalised):
    mask = torch.tensor([[True, True], [False, False]])
    close(normalised(torch.zeros(2, 2), mask), [[0.0, 0.0], [0.0, 0.0]])
    close(normalised(torch.ones(2, 2), ~mask & False), [[0.0, 0.0], [0.0, 0.0]])


def normalised(name, **knobs):
    old, mu, mask = given_ratios(ROWS)
    chosen = components.weight.check({"name": name, "normalise": True, **knobs})
    known = SimpleNamespace(old_logprobs=old, rollout_logprobs=mu, mask=mask, episode=torch.arange(len(mask)))
    found = components.weight.bind(chosen)(known)
    return components.weight.bind_finish(chosen)(SimpleNamespace(found=found), known)


def test_tis_normalises_after_the_cap():
    # capped at 3: .5, 2, 3 and .2, mean 5.7 / 4
    close(normalised("token-tis", cap=3.0)[0], [0, 0.5 / 1.425, 2 / 1.425, 0, 3 / 1.425, 0])
    # rows 5 and .2, mean 2.6, though the first has three tokens
    close(normalised("sequence-tis", cap=5.0)[:, 1], [5 / 2.6, 0, 0.2 / 2.6])
    # rows 1.5 and .2, mean .85
    close(normalised("geometric-tis", cap=1.5)[:, 1], [1.5 / 0.85, 0, 0.2 / 0.85])


# Rejections


def kept(f, rows, **knobs):
    return f(*given_ratios(rows), **knobs).int().tolist()


def test_token_rejection_by_hand():
    assert kept(token_rejection, ROWS, low=0.4, high=3.0) == [[0, 1, 1, 0, 0, 0], [0] * 6, [0] * 6]
    assert kept(token_rejection, [[0.49, 0.51, 1.99, 2.01]]) == [[0, 1, 1, 0]]


def test_token_rejection_bounds_are_the_inverse_of_verl():
    """verl's "0.5_5.0" rejects 3 and 4.9 and keeps .3; IcePop's "0.5_5.0" does the opposite."""
    ratios = [0.19, 0.21, 0.3, 1.0, 1.9, 3.0, 4.9]
    verl = [int(0.5 <= 1 / w <= 5.0) for w in ratios]
    assert verl == [0, 1, 1, 1, 1, 0, 0]
    assert kept(token_rejection, [ratios], low=1 / 5.0, high=1 / 0.5) == [verl]
    assert kept(token_rejection, [ratios], low=0.5, high=5.0) == [[0, 0, 0, 1, 1, 1, 1]]
    assert (token_icepop(*given_ratios([ratios]), low=0.5, high=5.0) != 0).int().tolist() == [[0, 0, 0, 1, 1, 1, 1]]


def test_sequence_rejection_drops_whole_rows():
    # 4 * .4 = 1.6 stays; 4 * .6 = 2.4 and .7 * .7 = .49 go; 1.5, with gaps, stays
    rows = [[4.0, 0.4], [4.0, 0.6], [0.7, 0.7], [None, 1.5], [None, None]]
    assert kept(sequence_rejection, rows) == [[1, 1], [0, 0], [0, 0], [0, 1], [0, 0]]
    assert kept(sequence_rejection, rows, low=0.0, high=2.5) == [[1, 1], [1, 1], [1, 1], [0, 1], [0, 0]]


def test_geometric_rejection_does_not_depend_on_the_length():
    # sqrt(1.03 * .972) = 1.00058; sqrt(1.003 * 1.001) = 1.0020; .9985 alone; .9992 a hundred times has product .923
    long = [[1.03, 0.972], [1.003, 1.001], [0.9985], [0.9992] * 100]
    assert [row[0] for row in kept(geometric_rejection, long)] == [1, 0, 0, 1]
    assert [row[0] for row in kept(geometric_rejection, long, low=0.998, high=1.003)] == [1, 1, 1, 1]
    assert [row[0] for row in kept(sequence_rejection, [[1.002] * 100, [1.002] * 1000])] == [1, 0]
    # the mean is over sampled tokens: 1.0015 would be 1.0005 over all three
    assert kept(geometric_rejection, [[None, 1.0015, None]]) == [[0, 0, 0]]


def test_k3_rejection_by_hand():
    # k3(1.2) = .2 - ln 1.2 = .01768; k3(1) = 0; k3(.8) = -.2 - ln .8 = .02314
    rows = [[1.2, 1.0], [1.2, 0.8], [1.2, None], [1.0, 1.0], [1.2, 1.2]]
    assert [row[0] for row in kept(k3_rejection, rows)] == [1, 0, 0, 1, 0]  # means .0088, .0204, .0177, 0, .0177
    assert [row[0] for row in kept(k3_rejection, rows, over="max")] == [0, 0, 0, 1, 0]
    assert [row[0] for row in kept(k3_rejection, rows, over="max", max_k3=0.018)] == [1, 0, 1, 1, 1]
    # of w, not of its inverse: k3(2) = 1 - ln 2 = .307, k3(.5) = -.5 + ln 2 = .193
    assert [row[0] for row in kept(k3_rejection, [[2.0], [0.5]], max_k3=0.25)] == [0, 1]
    # of the sequence, unlike in the product, opposite deviations don't cancel
    assert kept(sequence_rejection, [[2.0, 0.5]]) == [[1, 1]]
    assert kept(k3_rejection, [[2.0, 0.5]]) == [[0, 0]]


def test_worst_token_rejection_vetoes_rows():
    rows = [[1.0, 0.9e-4, 1.0], [1.0, 1.1e-4, 1e6], [None, 99.0, 101.0]]
    assert kept(worst_token_rejection, rows) == [[0, 0, 0], [1, 1, 1], [0, 1, 1]]
    assert kept(worst_token_rejection, rows, high=100.0) == [[0] * 3] * 3
    assert kept(worst_token_rejection, rows, low=0.0) == [[1, 1, 1], [1, 1, 1], [0, 1, 1]]


def test_rejection_can_drop_the_whole_batch():
    for f in REJECT[1:]:
        assert not f(*given_ratios([[1e-6, 1e-6], [1e-6, None]])).any()


@pytest.mark.parametrize("f", [token_icepop, token_rejection, sequence_rejection, geometric_rejection])
@pytest.mark.parametrize("bounds", [(0.2, 0.5), (1.2, 5.0), (2.0, 0.5), (-1.0, 2.0), (NAN, 2.0)])
def test_corrections_refuse_bounds_without_1(f, bounds):
    low, high = bounds
    with pytest.raises(ConfigError, match=rf"\[{low}, {high}\].*between"):
        f(*given_ratios([[1.0]]), low=low, high=high)


# Properties of all

log_probability = st.floats(-30, 0, width=32)
rows_of = st.lists(
    st.lists(st.tuples(log_probability, log_probability, st.booleans()), min_size=4, max_size=4), min_size=1, max_size=4
)


def split(rows, dtype=torch.float32):
    old, mu, mask = (torch.tensor([[cell[i] for cell in row] for row in rows]) for i in range(3))
    return old.to(dtype), mu.to(dtype), mask.bool()


@settings(deadline=None, max_examples=30)
@given(rows_of)
def test_corrections_keep_everything_for_equal_policies(rows):
    old, _, mask = split(rows)
    for f in WEIGH:
        assert torch.equal(f(old, old.clone(), mask), mask.float())
    for f in REJECT:
        assert torch.equal(f(old, old.clone(), mask), mask)


@settings(deadline=None, max_examples=30)
@given(rows_of, st.sampled_from([NAN, INF, -INF, 1e4]), st.sampled_from([NAN, INF, -INF, -1e4]))
def test_corrections_ignore_unmasked_tokens(rows, a, b):
    old, mu, mask = split(rows)
    dirty = torch.where(mask, old, a), torch.where(mask, mu, b), mask
    for f in WEIGH:
        assert torch.equal(f(*dirty), f(old, mu, mask))
        assert (f(*dirty)[~mask] == 0).all()
    for f in REJECT:
        assert torch.equal(f(*dirty), f(old, mu, mask))
        assert not (f(*dirty) & ~mask).any()


@settings(deadline=None, max_examples=30)
@given(rows_of)
def test_sequence_corrections_are_constant_in_a_row(rows):
    old, mu, mask = split(rows)
    for f in (sequence_tis, geometric_tis):
        weight = f(old, mu, mask)
        assert torch.equal(weight, torch.where(mask, weight.amax(-1, keepdim=True), 0.0))
    for f in BY_SEQUENCE:
        keep = f(old, mu, mask)
        assert torch.equal(keep, mask & keep.any(-1, keepdim=True))


@pytest.mark.parametrize("gap", [-1e4, 1e4, -INF, INF])
def test_corrections_stay_finite_at_absurd_gaps(gap):
    mu, mask = torch.full((1, 3), -1.0), torch.ones(1, 3).bool()
    old = mu + gap
    for f in WEIGH:
        assert torch.isfinite(f(old, mu, mask)).all()
    bound = math.exp(20 if gap > 0 else -20)
    for f in TIS:
        close(f(old, mu, mask, cap=1e12), [[bound] * 3])
    for f in REJECT[1:-1]:
        assert not f(old, mu, mask).any()
    assert worst_token_rejection(old, mu, mask).all() == (gap > 0)


def test_tis_clamps_rows_after_the_sum():
    # +30 and -29 make 1; clamped by token they would make 20 - 20 = 0
    old, mu, mask = torch.tensor([[30.0, -29.0]]).double(), torch.zeros(1, 2).double(), torch.ones(1, 2).bool()
    close(sequence_tis(old, mu, mask, cap=9.0), [[math.e, math.e]])
    close(geometric_tis(old, mu, mask, cap=9.0), [[math.exp(0.5)] * 2])


def test_long_rows_sum_in_double_precision():
    # 2^16 tokens of 2^-24 add up to 2^-8; beside -1e3, float32 would lose every one of them
    old = torch.full((1, 2**16 + 2), 2.0**-24)
    old[0, :2] = torch.tensor([1e3, -1e3])
    got = sequence_tis(old, torch.zeros_like(old), torch.ones_like(old).bool())
    assert got[0, 0].item() == pytest.approx(math.exp(2.0**-8), rel=1e-6)


def test_corrections_keep_nan_in_its_row():
    old, mu, mask = torch.tensor([[NAN, 0.0], [0.0, 0.0]]), torch.zeros(2, 2), torch.ones(2, 2).bool()
    for f in (token_icepop, *TIS):
        weight = f(old, mu, mask)
        assert weight[0, 0].isnan()
        assert weight[1].tolist() == [1, 1]
    assert token_rejection(old, mu, mask).tolist() == [[False, True], [True, True]]
    for f in BY_SEQUENCE:
        assert f(old, mu, mask).tolist() == [[False, False], [True, True]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_corrections_keep_dtype_without_gradient(dtype):
    old, mu, mask = given_ratios(ROWS, dtype)
    old.requires_grad_()
    mu.requires_grad_()
    for f in WEIGH:
        weight = f(old, mu, mask)
        assert weight.dtype == dtype
        assert not weight.requires_grad
    for f in REJECT:
        assert f(old, mu, mask).dtype == torch.bool


@pytest.mark.parametrize("registry", [components.weight, components.rejection], ids=["weight", "rejection"])
def test_corrections_bind_with_their_defaults(registry):
    old, mu, mask = given_ratios(ROWS)
    known = SimpleNamespace(old_logprobs=old, rollout_logprobs=mu, mask=mask)
    for name in registry:
        assert registry.bind(registry.check(name))(known).shape == mask.shape


def test_bind_sets_a_knob():
    old, mu, mask = given_ratios(ROWS)
    capped = components.weight.bind(components.weight.check({"name": "token-tis", "cap": 1.5}))
    known = SimpleNamespace(old_logprobs=old, rollout_logprobs=mu, mask=mask)
    close(capped(known)[0], [0, 0.5, 1.5, 0, 1.5, 0])
