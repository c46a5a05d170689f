"""M2PO and its mask over the whole batch."""

import math
from dataclasses import replace

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_rl.algorithms import Algorithm, AlgorithmConfig, collate
from agent_rl.algorithms.objectives.token import m2po, m2po_keep
from tests.batches import weighted
from tests.doubles import example_sample


def row(*values):
    return torch.tensor([values], dtype=torch.float64)


def keep(gaps, advantages, mask=None, **knobs):
    gaps = row(*gaps)
    mask = torch.ones_like(gaps, dtype=torch.bool) if mask is None else torch.tensor([mask])
    return m2po_keep(gaps - 5, torch.full_like(gaps, -5.0), row(*advantages), mask, **knobs)[0].tolist()


def test_m2po_keep_by_hand():
    # squares .09 .01 .25 .04, ascending .01 .04 .09 .25, means of prefixes .01 .025 .0467 .0975: two stay
    gaps = (0.3, 0.1, 0.5, 0.2)
    assert keep(gaps, (1, 1, 1, 1)) == [False, True, False, True]
    assert keep([-g for g in gaps], (-2, -2, -2, -2)) == [False, True, False, True]
    assert keep(gaps, (1, 1, 1, 1), second_moment=0.05) == [True, True, False, True]
    assert keep(gaps, (1, 1, 1, 1), second_moment=0.1) == [True] * 4
    assert keep(gaps, (1, 1, 1, 1), second_moment=0.009) == [False] * 4
    # tokens that move against their advantage stay; neither they nor unmasked tokens dilute the mean
    assert keep((*gaps, -3.0, 3.0, 0.0), (1, 1, 1, 1, 1, -1, 1)) == [False, True, False, True, True, True, True]
    assert keep((*gaps, 3.0), (1, 1, 1, 1, 0)) == [False, True, False, True, True]
    assert keep((*gaps, 9.0, 0.01), (1,) * 6, [True] * 4 + [False] * 2) == [False, True, False, True, False, False]
    assert keep((0.5,), (1,), second_moment=0.25) == [True]  # at most, not less than
    # equal ones go together: 0 and .08 have the mean .04, 0, .08 and .08 more
    assert keep((1e-6, 0.08**0.5, 0.08**0.5), (1, 1, 1)) == [True, False, False]
    assert keep((0.1, 0.1), (1, 1), [False, False]) == [False, False]


def test_m2po_keep_counts_what_went_at_the_bound():
    # squares .01 .04 .09 .25, all capped at the 1st, 2nd, ... of them: means .01 .0325 .0575 .0975
    gaps = (0.3, 0.1, 0.5, 0.2)
    assert keep(gaps, (1,) * 4, beyond="capped") == [False, True, False, True]
    assert keep(gaps, (1,) * 4, second_moment=0.03, beyond="capped") == [False, True, False, False]
    assert keep(gaps, (1,) * 4, second_moment=0.03) == [False, True, False, True]
    assert keep((*gaps, -3.0), (1,) * 5, second_moment=0.098, beyond="capped") == [True] * 5


gaps = st.lists(st.tuples(st.floats(-2, 2), st.sampled_from([-1.0, 0.0, 1.0])), min_size=1, max_size=12)


@settings(deadline=None, max_examples=30)
@given(gaps, st.randoms(use_true_random=False))
def test_m2po_keep_is_maximal_in_any_order(tokens, random):
    kept = keep([g for g, _ in tokens], [a for _, a in tokens])
    concerned = [(g * g, k) for (g, a), k in zip(tokens, kept, strict=True) if g * a > 0 and g - 5 != -5]
    assert all(k for (g, a), k in zip(tokens, kept, strict=True) if g * a <= 0)
    left, gone = sorted(s for s, k in concerned if k), sorted(s for s, k in concerned if not k)
    assert not left or sum(left) / len(left) <= 0.04 + 1e-9
    if gone:  # the next group of equal ones would break the bound
        equal = [s for s in gone if s <= gone[0] + 1e-9]
        assert sum(left + equal) / len(left + equal) > 0.04 - 1e-9
        assert not left or left[-1] <= gone[0] + 1e-9
    order = random.sample(range(len(tokens)), len(tokens))
    shuffled = keep([tokens[i][0] for i in order], [tokens[i][1] for i in order])
    assert shuffled == [kept[i] for i in order]


def test_m2po_by_hand():
    logprobs = row(math.log(0.5), math.log(0.2), math.log(0.2)).requires_grad_()
    mu = row(math.log(0.1), math.log(0.18), math.log(0.4))
    token = m2po(logprobs, mu, row(2.0, 2.0, 2.0))
    (slope,) = torch.autograd.grad(token.loss.sum(), logprobs)
    torch.testing.assert_close(token.loss, row(-10.0, -2 / 0.9, -1.0))
    torch.testing.assert_close(slope, row(-10.0, -2 / 0.9, -1.0))
    torch.testing.assert_close(token.ratio, row(5.0, 1 / 0.9, 0.5))


def test_m2po_masks_the_whole_batch_by_weights():
    # gaps .3 .1 in the first row, .1 .1 in the second: of all four the mean square is .03, of the first row alone .05
    batch = collate([example_sample(3, [1, 2]), example_sample(3, [1, 2], seed=1)])
    mu = torch.tensor([[0.0, -1.3, -1.1], [0.0, -1.1, -1.1]])
    mask = batch.loss_mask
    batch = weighted(replace(batch, rollout_logprobs=mu.flatten()), advantages=mask.float(), weights=0.5 * mask)
    theta = torch.tensor([[9.0, -1.0, -1.0], [math.nan, -1.0, -1.0]]).flatten()  # unsampled tokens have no effect
    default, strict = (Algorithm(AlgorithmConfig(objective={"name": "m2po", "second_moment": m})) for m in (0.04, 0.02))
    prepared, metrics = default.prepare(theta, batch)
    assert prepared.weights.tolist() == [0, 0.5, 0.5] * 2 and metrics == {"train/clip_fraction": 0.0}
    alone, metrics = default.prepare(theta[:3], batch.select([0]))
    assert alone.weights.tolist() == [0, 0, 0.5] and metrics == {"train/clip_fraction": 0.5}
    assert strict.needs_scores_before_update
    assert strict.prepare(theta, batch)[0].weights.tolist() == [0, 0, 0.5, 0, 0.5, 0.5]
