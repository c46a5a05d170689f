"""Reward shaping: hand-computed scores, and the neutrality of unscored episodes."""

import json
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_rl.algorithms import AlgorithmConfig, components, shaping
from agent_rl.backends.verl.config.settings import VerlConfig, verl_settings
from agent_rl.errors import ConfigError

NAN = math.nan


def f64(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def ids(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


def close(got: torch.Tensor, *wanted: float) -> None:
    assert got.dtype == torch.float64
    torch.testing.assert_close(got, f64(*wanted), rtol=1e-12, atol=1e-12, equal_nan=True)


def l1(scores: torch.Tensor, lengths: torch.Tensor, targets: torch.Tensor, **knobs: float) -> torch.Tensor:
    tasks = [{"tokens": None if math.isnan(n) else n} for n in targets.tolist()]
    return shaping.length_l1(scores, lengths, tasks, target="tokens", **knobs)


def l1_max(scores: torch.Tensor, lengths: torch.Tensor, targets: torch.Tensor, **knobs: float) -> torch.Tensor:
    tasks = [{"tokens": None if math.isnan(n) else n} for n in targets.tolist()]
    return shaping.length_l1_max(scores, lengths, tasks, target="tokens", **knobs)


def format_gate(scores: torch.Tensor, formatted: torch.Tensor, value: float = 0.0) -> torch.Tensor:
    known = torch.ones(len(scores), 1, dtype=torch.bool)
    return shaping.format_gate(scores, formatted[:, None], ["format"], known, component="format", value=value)


# --- lengths against a limit ---


def test_soft_overlong_grows_over_the_buffer():
    lengths = ids(0, 80, 85, 100, 101, 10_000)
    # nothing up to 100 - 20; 85: 5/20 of it; all of it from 100
    close(shaping.soft_overlong(torch.ones(6), lengths, max_length=100, buffer=20), 1, 1, 0.75, 0, 0, 0)
    close(shaping.soft_overlong(f64(-1, 0.5), ids(90, 99), max_length=100, buffer=20, penalty=0.4), -1.2, 0.12)


def test_soft_overlong_without_buffer_is_a_step():
    close(shaping.soft_overlong(f64(1, 1, 1), ids(99, 100, 101), max_length=100, buffer=0), 1, 1, 0)


def test_soft_overlong_takes_the_context_of_the_run():
    chosen = AlgorithmConfig(shaping=["soft-overlong"])
    close(shaping.soft_overlong(f64(1, 1), ids(9, 10**6)), 1, 1)  # by itself there is no limit
    assert chosen.within(None) is chosen
    within = chosen.within(400)
    assert within.shaping[0]["max_length"] == 400 and within.within(800) is within
    shape = components.shaping.bind(within.shaping[0]).function
    close(shape(f64(1, 1, 1), ids(300, 350, 400)), 1, 0.5, 0)  # the last quarter of it
    verl = VerlConfig.model_validate(
        {"env": "calculator-v0", "start_from": "M", "algorithm": chosen, "rollout": {"context": 4096}}
    )
    sent = json.loads(verl_settings(verl, Path("r"))["data.agent_rl"]["algorithm"])
    assert sent["shaping"][0]["max_length"] == 4096


def test_soft_overlong_can_begin_at_the_first_token():
    close(shaping.soft_overlong(f64(1, 1, 1), ids(0, 25, 100), max_length=100, buffer=100), 1, 0.75, 0)


@pytest.mark.parametrize("buffer", [-1, 101])
def test_soft_overlong_refuses_a_buffer_outside_length(buffer):
    with pytest.raises(ConfigError, match=f"buffer={buffer}.*max_length=100"):
        shaping.soft_overlong(f64(1), ids(1), max_length=100, buffer=buffer)


# --- lengths against a target ---


def test_length_l1_loses_alpha_per_token():
    lengths, targets = ids(1000, 2000, 500, 1000), ids(1000, 1000, 1000, 1500)
    # 1 - .0003 * 0, 1 - .0003 * 1000, 0 - .0003 * 500, .5 - .0003 * 500
    close(l1(f64(1, 1, 0, 0.5), lengths, targets), 1, 0.7, -0.15, 0.35)
    close(l1(f64(1), ids(7), ids(5), alpha=0.25), 0.5)


def test_length_l1_max_scales_by_the_room_left():
    lengths, targets = ids(1000, 500, 3000, 1500, 1500, 0), ids(*[1000] * 5, 9000)
    scores = f64(1, 1, 1, 0, 0.5, 1)
    # factors: .5; .5 + .0003 * 500; .5 - .6 → 0; (wrong); .5 - .15 = .35; .5 + 2.7 → 1
    close(l1_max(scores, lengths, targets), 0.5, 0.65, 0, 0, 0.175, 1)
    close(l1_max(f64(1, 1), ids(8, 13), ids(10, 10), alpha=0.1, delta=0.2), 0.4, 0)


def test_length_l1_max_never_rewards_wrong_answers():
    close(l1_max(f64(-1, -1), ids(10, 10**6), ids(10, 10)), -1, -1)


@pytest.mark.parametrize("shape", [l1, l1_max])
def test_length_l1_needs_a_valid_target(shape):
    close(shape(f64(1, -2, NAN), ids(5000, 1, 1), f64(NAN, NAN, -1)), 1, -2, NAN)
    with pytest.raises(ConfigError, match=r"target -1\.0"):
        shape(f64(1, 1), ids(10, 10), ids(10, -1))


# --- lengths against the group ---


def test_length_group_follows_kimi():
    scores = f64(1, 1, 0, 0, 1)
    lengths = ids(100, 300, 150, 250, 200)
    # lambda = .5 - (length - 100) / 200 = .5, -.5, .25, -.25, 0; wrong: min(0, lambda)
    got = shaping.length_group(scores, lengths, ids(*[5] * 5), coefficient=1)
    close(got, 1.5, 0.5, 0, -0.25, 1)
    close(shaping.length_group(scores, lengths, ids(*[5] * 5), coefficient=0.1), 1.05, 0.95, 0, -0.025, 1)


def test_length_group_compares_within_groups():
    got = shaping.length_group(f64(1, 1, 1, 1), ids(10, 1000, 20, 3000), ids(-4, 90, -4, 90), coefficient=1)
    close(got, 1.5, 1.5, 0.5, 0.5)


def test_length_group_needs_a_comparison():
    # one alone, and two of one length
    close(shaping.length_group(f64(1, 1, 0), ids(10, 7, 7), ids(0, 1, 1), coefficient=1), 1, 1, 0)


def test_length_group_threshold_can_be_set():
    scores, lengths, groups = f64(0.8, 0.2), ids(10, 20), ids(0, 0)
    close(shaping.length_group(scores, lengths, groups, coefficient=1), 0.8, -0.3)
    close(shaping.length_group(scores, lengths, groups, coefficient=1, correct=0.8), 1.3, -0.3)
    noisy = f64(sum([0.1] * 10), 0)  # 0.9999999999999999 is correct
    close(shaping.length_group(noisy, lengths, groups, coefficient=1), 1.5, -0.5)


def test_relative_cost_follows_prime_rl():
    scores, costs, groups = f64(1, 1, 0, 0, 0), ids(10, 40, 20, 3, 9), ids(2, 2, 2, 6, 6)
    # group 2: mean 2/3, highest 40: .3 * 2/3 = .2 times 1/4, 1, 1/2; group 6 never solves it: nothing
    close(shaping.relative_cost(scores, costs, groups, coefficient=0.3), 0.95, 0.8, -0.1, 0, 0)
    close(shaping.relative_cost(scores, costs, groups, coefficient=0.3, gated=True), 0.95, 0.8, 0, 0, 0)


def test_relative_cost_never_rewards_cost():
    # means -.5 and .5; the wrong one of the second pays nothing if gated: 2 - .5 * 1 * 2, -1 - .5 * .5 * 0
    scores, costs, groups = f64(-1, 0, 2, -1), ids(10, 20, 40, 20), ids(0, 0, 1, 1)
    close(shaping.relative_cost(scores, costs, groups, coefficient=1), -1, 0, 1.5, -1.25)
    close(shaping.relative_cost(scores, costs, groups, coefficient=1, gated=True), -1, 0, 1, -1)


def test_relative_cost_of_zero_is_zero():
    close(shaping.relative_cost(f64(1, 1), ids(0, 0), ids(0, 0), coefficient=1), 1, 1)


# --- values ---


def test_clip_and_scale_by_hand():
    scores = f64(-1e4, -0.5, 0.25, 1e4, NAN)
    close(shaping.clip(scores, low=-1, high=0.5), -1, -0.5, 0.25, 0.5, NAN)
    close(shaping.clip(scores, low=-math.inf, high=0), -1e4, -0.5, 0, 0, NAN)
    close(shaping.scale(scores, factor=2, shift=-1), -20001, -2, -0.5, 19999, NAN)
    close(shaping.scale(torch.tensor([1, 3]), factor=0.5), 0.5, 1.5)


@pytest.mark.parametrize(("low", "high"), [(1, 0), (NAN, 1), (0, NAN)])
def test_clip_and_scale_refuse_impossible_bounds(low, high):
    with pytest.raises(ConfigError, match=f"low={low}.*high={high}"):
        shaping.clip(f64(0.5), low=low, high=high)


def test_format_gate_overrides_unformatted_scores():
    scores = f64(1, 1, 0.3, 1, NAN, NAN)
    formatted = f64(1, 0, 2, NAN, 0, 1)
    close(format_gate(scores, formatted), 1, 0, 0.3, NAN, NAN, NAN)
    close(format_gate(scores, formatted, value=-1), 1, -1, 0.3, NAN, NAN, NAN)
    close(format_gate(f64(1, 1), f64(0.99, 1 - 1e-12)), 0, 1)  # partly is not kept, noise is


# --- properties of all ---

SHAPES = {
    "soft_overlong": lambda s, n, g: shaping.soft_overlong(s, n, max_length=50, buffer=20),
    "length_l1": lambda s, n, g: l1(s, n, torch.full_like(s, 30)),
    "length_l1_max": lambda s, n, g: l1_max(s, n, torch.full_like(s, 30), alpha=0.01),
    "length_group": lambda s, n, g: shaping.length_group(s, n, g, coefficient=0.5),
    "relative_cost": lambda s, n, g: shaping.relative_cost(s, n, g, coefficient=0.5),
    "relative_cost, gated": lambda s, n, g: shaping.relative_cost(s, n, g, coefficient=0.5, gated=True),
    "format_gate": lambda s, n, g: format_gate(s, n / 30),
    "clip": lambda s, n, g: shaping.clip(s, low=0, high=0.5),
    "scale": lambda s, n, g: shaping.scale(s, factor=3),
}
rows = st.lists(
    st.tuples(st.sampled_from([-1.0, 0.0, 0.5, 1.0]), st.integers(0, 60), st.integers(0, 2)), min_size=1, max_size=8
)


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("garbage", [NAN, math.inf, -1e9])
@given(rows, st.integers(0, 2))
@settings(deadline=None, max_examples=15)
def test_shaping_ignores_unscored_episodes(name, garbage, batch, group):
    shape = SHAPES[name]
    scores, lengths, groups = (torch.tensor(column) for column in zip(*batch, strict=True))
    alone = shape(scores.double(), lengths.double(), groups)
    both = shape(
        torch.cat([f64(NAN), scores.double()]),
        torch.cat([f64(garbage), lengths.double()]),
        torch.cat([ids(group), groups]),
    )
    assert not alone.isnan().any()
    close(both, NAN, *alone.tolist())


@pytest.mark.parametrize("name", SHAPES)
def test_shaping_takes_an_empty_batch(name):
    assert SHAPES[name](f64(), f64(), ids()).shape == (0,)


@pytest.mark.parametrize("name", ["soft_overlong", "length_l1", "length_l1_max", "length_group", "relative_cost"])
def test_shaping_refuses_mismatched_and_unknown_values(name):
    with pytest.raises(ConfigError, match=r"shape \(1,\) for scores of shape \(2,\)"):
        SHAPES[name](f64(1, 1), f64(5), ids(0, 0))
    with pytest.raises(ConfigError, match="NaN for a scored episode"):
        SHAPES[name](f64(1, 1), f64(5, NAN), ids(0, 0))


@given(rows)
@settings(deadline=None, max_examples=30)
def test_length_shaping_never_prefers_the_longer(batch):
    scores, lengths, groups = (torch.tensor(column) for column in zip(*batch, strict=True))
    for name in ("soft_overlong", "length_l1_max", "length_group", "relative_cost", "relative_cost, gated"):
        shaped = SHAPES[name](scores.double(), lengths.double(), groups)
        for i in range(len(batch)):
            for j in range(len(batch)):
                if scores[i] == scores[j] and groups[i] == groups[j] and lengths[i] > lengths[j]:
                    assert shaped[i] <= shaped[j] + 1e-12, name
