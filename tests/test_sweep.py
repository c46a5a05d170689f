"""Every knob of every preset acts: at four mini-batches an epoch it changes what a small policy becomes."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from agent_rl.algorithms import Algorithm, AlgorithmConfig, Experience, ScoredRows
from agent_rl.algorithms.explain import KINDS
from agent_rl.algorithms.updates import UpdatesConfig
from agent_rl.backends.embedded.config import TrainConfig
from agent_rl.backends.embedded.mini_batches import mini_batches
from agent_rl.config import choices, load_config
from tests.doubles import example_sample
from tests.fidelity import updates
from tests.test_gradients import experience

pytestmark = pytest.mark.sandbox
PRESETS = choices("algorithm")
UPDATES = UpdatesConfig(minibatches=4, epochs=2)
GROUPS, SAMPLES, LENGTH, VOCAB = 8, 4, 14, 50
RATE = {"token-sum": 0.3, "seq-mean-token-sum": 1.0}
"""Of the policy's plain gradient steps, by aggregation; 8 for means over tokens, so that ratios leave their bounds."""

SHORT = {
    "dapo": {"shaping": ({"name": "soft-overlong", "max_length": 8, "buffer": 4},)},
    "dapo-paper": {"shaping": ({"name": "soft-overlong", "max_length": 9, "buffer": 5},)},
    "rft": {"filters": ({"name": "successful", "threshold": 1.0, "most": 2},)},
}
"""Knobs that suit rows of 3 to 9 sampled tokens, four of a task."""
OTHER: Mapping[str, object] = {
    "clip_low_eps": 0.05, "clip_high_eps": 0.03, "clip_high_cap": 1.01, "dual_clip": 1.01, "ratio_cap": 1.05,
    "second_moment": 0.001, "tau_positive": 3.0, "tau_negative": 3.0, "beta": 1.0, "label_smoothing": 0.2,
    "gamma": 0.8, "lam": 0.5, "omega": 0.3, "std": None, "eps": 0.5, "whiten": None, "margin": 1.6,
    "cap": 1.05, "normalise": None, "low": 0.97, "high": 1.04, "length": 32,
    "max_length": 7, "buffer": 2, "penalty": 0.5, "tolerance": 1.6, "threshold": 0.3, "most": 1,
    "delta": 0.01,
}  # fmt: skip
"""Another value of each knob; None turns a switch."""
SAMPLING = "refill", "vine"
"""Sections that act while episodes are sampled."""


@functools.cache
def preset(name: str) -> AlgorithmConfig:
    chosen = load_config("backend/embedded", TrainConfig, [f"algorithm={name}"]).algorithm
    return AlgorithmConfig.model_validate(chosen.model_dump() | SHORT.get(name, {}))


@functools.cache
def batch() -> tuple[Experience, Tensor]:
    """Return groups of unlike episodes of two turns, the last of them all equal, and the policy that sampled them."""
    generator = torch.Generator().manual_seed(0)
    policy = torch.randn(VOCAB, VOCAB, generator=generator)
    samples, n = [], GROUPS * SAMPLES
    for i in range(n):
        reward = 1.0 if i >= n - SAMPLES else [1.0, 0.0, 0.5, 0.0][i % SAMPLES] * (1 + i // SAMPLES % 3)
        places = [p for p in range(3, 6 + (i % 7 if i < n - SAMPLES else 4)) if p != 5]
        samples.append(example_sample(LENGTH, places, reward=reward, seed=i, episode=i))
    x = experience(samples, [i // SAMPLES for i in range(n)])
    rows = replace(x.rows, turns=torch.where(torch.arange(LENGTH) < 5, 0, 1).repeat(n))
    far = torch.rand(n, LENGTH, generator=generator) < 0.1  # as a rollout of rounded weights is
    noise = torch.where(far, 1.5, 0.05) * torch.randn(n, LENGTH, generator=generator)
    mu = torch.where(rows.loss_mask, (logprobs(policy, rows.token_ids.view(n, LENGTH)) + noise).flatten(), 0.0)
    rows = replace(rows, rollout_logprobs=mu.float(), sources=rows.loss_mask.long())
    style = torch.rand(n, 1, generator=generator, dtype=torch.float64)
    style[-SAMPLES:] = 0.5
    states = torch.stack([torch.zeros(n), torch.arange(n) % 2 + 1], 1).long()
    values = torch.rand(n, 2, generator=generator, dtype=torch.float64)
    x = replace(
        x,
        rows=rows,
        states=states,
        state_values=values,
        component_names=("r", "style"),
        component_weights=torch.tensor([1.0, 0.5]).double(),
    )
    scores = x.scores + 0.5 * style[:, 0]
    baselines = torch.where(torch.arange(n) < n - SAMPLES, 0.25, scores)
    return replace(x, components=torch.cat([x.scores[:, None], style], 1), scores=scores, baselines=baselines), policy


def logprobs(policy: Tensor, ids: Tensor) -> Tensor:
    """Return the log-probability of each token after the one before it, `[B, T]`; 0 for the first."""
    steps = policy.log_softmax(-1)[ids[:, :-1], ids[:, 1:]]
    return torch.nn.functional.pad(steps, (1, 0))


def trained(config: AlgorithmConfig) -> Tensor:
    """Return the policy and the critic after the updates, as one vector: a table of logits by the token before."""
    algorithm, (x, start) = Algorithm(config), batch()
    policy, critic = start.clone().requires_grad_(), torch.zeros(VOCAB, requires_grad=True)
    rate = RATE.get(str(config.aggregation["name"]), 8.0)
    rows = x.rows
    read = SimpleNamespace(mask=rows.loss_mask, unshaped=x.scores)
    for shape in algorithm.shaping:
        x = x.rescored(shape(x, rows, read))
    for keep in algorithm.filters:
        x = replace(x, kept=x.kept & keep(x, rows, read))
    rows = x.rows
    with torch.no_grad():
        theta = logprobs(policy, rows.token_ids.view(-1, LENGTH)).flatten()
        old = theta if config.recomputes_old else rows.rollout_logprobs
        values = torch.where(rows.loss_mask, (rows.token_ids % 7).float() / 7, 0.0)
        scored = ScoredRows(rows, old, reference_logprobs=rows.rollout_logprobs - 0.1, values=values)
    weighed, _, wanted = algorithm.compute_weights_in_place_order(x, scored)
    whole = weighed.select(torch.nonzero(wanted)[:, 0])
    taken = 0
    for part in mini_batches(weighed, wanted, whole, UPDATES, 0, 0):
        now = part.batch.rows.token_ids.view(-1, LENGTH)
        prepared, _ = algorithm.prepare(logprobs(policy.detach(), now).flatten(), part.batch)
        prepared = prepared.padded()
        theta = logprobs(policy, now)
        loss = algorithm.loss(theta, torch.zeros_like(theta), prepared.inputs, part.whole).loss
        if prepared.critic is not None:
            guess = torch.where(prepared.critic.valued, critic[now] + prepared.critic.values, 0.0)
            loss = loss + config.critic.lr * 1e3 * algorithm.value_loss(guess, prepared.critic, part.whole).loss
        gradients = torch.autograd.grad(loss, [policy, critic], allow_unused=True)
        for weights, gradient in zip((policy, critic), gradients, strict=True):
            if gradient is not None:
                weights.data -= rate * gradient
        taken += 1
    assert taken >= 3
    return torch.cat([policy.detach().flatten(), critic.detach()])


@functools.cache
def base(name: str) -> Tensor:
    return trained(preset(name))


def knobs_of(config: AlgorithmConfig) -> dict[str, dict[str, object]]:
    """Return what to change of a preset: the setting's name, and its other value."""
    found: dict[str, dict[str, object]] = {}
    for kind in KINDS:
        field = "filters" if kind == "filter" else kind.replace(" ", "_")
        chosen = getattr(config, field)
        listed = chosen if isinstance(chosen, tuple) else (chosen,) if chosen else ()
        for one in listed:
            for knob in one:
                if knob != "name":
                    changed = one | {knob: other(knob, one[knob])}
                    if knob == "clip_high_eps" and one.get("clip_high_cap"):
                        changed["clip_high_cap"] = None  # two spellings of one bound
                    found[f"{field}.{knob}"] = {field: (changed,) if isinstance(chosen, tuple) else changed}
    found["count_zero_advantage"] = {"count_zero_advantage": not config.count_zero_advantage}
    found["kl"] = {"kl": {"where": "loss", "coefficient": 0.3}}
    if config.rejection is None:
        found["rejection"] = {"rejection": {"name": "token", "low": 0.97, "high": 1.03}}
    if config.critic.where != "none":
        for knob, value in {"coefficient": 2.0, "clip_eps": 0.01, "lr": 5e-3}.items():
            found[f"critic.{knob}"] = {"critic": config.critic.model_dump() | {knob: value}}
    return found


def other(knob: str, value: object) -> object:
    """Return another value of a knob."""
    if isinstance(value, bool):
        return not value
    if knob == "whiten":
        return "no" if value != "no" else "tokens"
    return OTHER[knob]


BY_TOKENS = ("a2c", "ppo", "ppo-paper", "reinforce_pp", "reinforce_pp-paper", "vineppo", "vineppo-paper")
BY_TOKEN = "its advantages are of tokens, and hardly ever 0 in a whole row"
VARIED = "the filter has left out the groups whose advantages are 0"
IDLE = (
    {(name, "count_zero_advantage"): BY_TOKEN for name in BY_TOKENS}
    | {(name, "count_zero_advantage"): VARIED for name in ("dapo", "dapo-paper", "olmo3", "scalerl")}
    | {(name, "advantage.eps"): "without std nothing is divided" for name in ("dr_grpo", "gpg", "minirl", "olmo3")}
    | {(name, "count_zero_advantage"): "an episode that is kept has the advantage 1" for name in ("rft", "rft-paper")}
)
"""What changes nothing there, and why."""


@pytest.mark.parametrize("name", PRESETS)
def test_knobs_of_presets_change_the_policy_or_are_refused(name: str) -> None:
    config, idle = preset(name), list[str]()
    for knob, change in knobs_of(config).items():
        try:
            changed = AlgorithmConfig.model_validate(config.model_dump() | change)
        except ValidationError as error:
            assert knob in ("kl", "rejection") and "set " in str(error)  # refused, with what to set instead
            continue
        if (trained(changed) - base(name)).norm() <= 1e-5 * (base(name) - start()).norm():
            idle.append(knob)
    assert {(name, knob) for knob in idle} == {key for key in IDLE if key[0] == name}


def start() -> Tensor:
    return torch.cat([batch()[1].flatten(), torch.zeros(VOCAB)])


def test_presets_are_as_many_algorithms() -> None:
    """At as many updates as each other; presets that their own number alone tells apart are no others there."""
    moved = {name: base(name) - start() for name in PRESETS}
    assert all(change.isfinite().all() and change.norm() > 0.01 for change in moved.values())
    same = [
        (one, two)
        for number, one in enumerate(PRESETS)
        for two in list(PRESETS)[number + 1 :]
        if (moved[one] - moved[two]).norm() <= 1e-4 * moved[one].norm()
    ]
    assert same == [(name, f"{name}-paper") for name in ("cispo", "gspo", "m2po")]
    assert all(
        updates(one) != updates(two) and preset(one).model_copy(update={"name": two}) == preset(two)
        for one, two in same
    )
