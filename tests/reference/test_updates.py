"""Whole steps, several updates long, of forked episodes with chained rejections: ours against verl's and TRL's losses.

Theta's log-probabilities are old's plus features times the parameters `w`, so that every update moves every token.
The references get each episode in one row, as they know no forks, and its mini-batches in our order.
"""

from dataclasses import fields, replace

import pytest
import torch
from batches import scored
from doubles import example_episode

from agent_rl.algorithms import Algorithm, AlgorithmConfig
from agent_rl.algorithms.objectives.sequence import off_policy_sequences
from agent_rl.algorithms.updates import UpdatesConfig, deal
from agent_rl.backends.embedded.mini_batches import mini_batches
from agent_rl.core.episode import Reward, group_episodes
from agent_rl.core.trajectory import Completion, FinishReason, Fork, Source, Trajectory
from reference.conftest import required, rows
from reference.test_trl import trl_loss, trl_weights
from reference.test_verl_corrections import inverse
from reference.test_verl_objectives import theirs as verl_loss

verl = required("verl.trainer.ppo.core_algos")
corrections = required("verl.trainer.ppo.rollout_corr_helper")

UPDATES = UpdatesConfig(minibatches=3, epochs=2)
LR = 0.5
WIDTH = 32


def step_of(seed, spread=0.1):
    """Rows whose groups are numbered as they come; scores and mu are float32, as episodes have them."""
    batch = rows(seed, spread=spread, empty=False, singletons=False)
    order = list(dict.fromkeys(batch.groups.tolist()))
    groups = torch.tensor([order.index(group) for group in batch.groups.tolist()])
    return replace(batch, groups=groups, scores=batch.scores.float().double(), mu=batch.mu.float().double())


def features(seed, batch):
    made = torch.randn((*batch.mask.shape, 4), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return torch.where(batch.mask[..., None], made, 0.0)


def episodes(batch, places):
    """Episodes that fork before these places; a token's id says where it is in the batch, 0 where none is sampled."""
    return [episode(batch, number, places) for number in range(len(batch.mask))]


def episode(batch, number, places):
    mask, mu = batch.mask[number].tolist(), batch.mu[number].tolist()
    end = WIDTH - mask[::-1].index(True)
    cuts = sorted({place for place in places if 0 < place < end})
    trajectories = []
    for start, stop in zip([0, *cuts], [*cuts, end], strict=True):
        made = Trajectory(Fork(len(trajectories) - 1, start) if start else None)
        for at in range(stop):
            token = number * WIDTH + at
            if mask[at] and at >= start:
                made.append_completion(Completion((token,), (mu[at],), FinishReason.STOP, (0,)), 0)
            else:
                made.append([token], Source.ENV, 0)
        trajectories.append(made)
    score = Reward("correct", float(batch.scores[number]))
    group = str(int(batch.groups[number]))
    return example_episode(str(number), group_id=group, trajectories=tuple(trajectories), rewards=(score,))


def ours(settings, batch, x_of, places):
    """Return the parameters after every update of a step."""
    algorithm = Algorithm(AlgorithmConfig.model_validate(settings))
    x = algorithm.experience(group_episodes(episodes(batch, places)))
    old = batch.old.flatten()[x.rows.token_ids.long()]
    weighed, _, wanted = algorithm.compute_weights_in_place_order(x, scored(x.rows, old_logprobs=old))
    some, w, found = weighed.select(torch.nonzero(wanted)[:, 0]), torch.zeros(4, dtype=torch.float64), []

    def theta(ids, w):
        return (batch.old + x_of @ w).flatten()[ids.long()]

    for part in mini_batches(weighed, wanted, some, UPDATES, 0, 0):
        prepares = algorithm.prepares(part.batch)
        prepared = algorithm.prepare(theta(part.batch.rows.token_ids, w), part.batch)[0] if prepares else part.batch
        gradient = torch.zeros(4, dtype=torch.float64)
        for cut in prepared.cut_rows(48):
            leaf, micro = w.clone().requires_grad_(), prepared.padded(cut)
            logprobs = theta(micro.rows.token_ids, leaf)
            loss = algorithm.loss(logprobs, torch.zeros_like(logprobs), micro.inputs, part.whole).loss
            gradient += torch.autograd.grad(loss, leaf)[0]
        w = w - LR * gradient
        found.append(w)
    return torch.stack(found)


def followed(batch, x_of, slope):
    """Return the parameters after every update that takes these slopes of the loss by theta's log-probabilities."""
    w, found = torch.zeros(4, dtype=torch.float64), []
    for _, groups in deal(range(int(batch.groups.max()) + 1), UPDATES, 0, 0):
        chosen = torch.isin(batch.groups, torch.tensor(groups))
        part = replace(batch, **{f.name: getattr(batch, f.name)[chosen] for f in fields(batch)})
        part = replace(part, theta=torch.where(part.mask, part.old + x_of[chosen] @ w, 0.0))
        w = w - LR * torch.einsum("bt,btk->k", slope(part, chosen), x_of[chosen])
        found.append(w)
    return torch.stack(found)


def assert_same_course(ours, theirs):
    moved = ours.diff(dim=0).abs().amax(-1) > 1e-4  # gspo's clip may stop a whole update
    assert len(ours) == UPDATES.most and moved.sum() >= 3
    torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-6)  # advantages and weights are float32


def weighed_by_verl(batch, rules, cap=None, std=True):
    """Return the batch as verl trains it, with its own advantages and its chain of rejections, and its weights."""
    options = {"rollout_is": "token", "rollout_is_threshold": cap} if cap else {"rollout_is": None}
    if rules:
        names, bounds = zip(*rules, strict=True)
        options |= {"rollout_rs": ",".join(names), "rollout_rs_threshold": ",".join(map(str, bounds))}
    weights, mask, _ = corrections.compute_rollout_correction_and_rejection_mask(
        batch.old, batch.mu, batch.mask.double(), **options
    )
    advantages, _ = verl.compute_grpo_outcome_advantage(
        batch.terminal, batch.mask.double(), batch.index, norm_adv_by_std_in_grpo=std
    )
    weights = None if weights is None else weights.batch["rollout_is_weights"]
    return replace(batch, advantages=advantages.double(), mask=mask.bool()), weights


CLIP = {"name": "ppo-clip", "clip_low_eps": 0.05, "clip_high_eps": 0.08}
NARROW = {"clip_ratio_low": 0.05, "clip_ratio_high": 0.08, "clip_ratio_c": 1e9}
SEQUENCE = {"name": "gspo", "clip_low_eps": 0.02, "clip_high_eps": 0.03}
CHAIN = [
    {"name": "geometric", "low": 0.94, "high": 1.07},
    {"name": "token", "low": 0.85, "high": 1.15},
    {"name": "k3", "max_k3": 0.05, "over": "max"},
]
RULES = [("seq_mean_k1", inverse(0.94, 1.07)), ("token_k1", inverse(0.85, 1.15)), ("seq_max_k3", 0.05)]
CORRECTED = {"weight": {"name": "token-tis", "cap": 1.1}, "rejection": CHAIN, "denominators": "kept"}
OF_VERL = {
    "dapo": ({"objective": CLIP}, "vanilla", "token-mean", NARROW, [], None),
    "grpo": (
        {"objective": CLIP, "aggregation": "seq-mean-token-mean"},
        "vanilla",
        "seq-mean-token-mean",
        NARROW,
        [],
        None,
    ),
    "gpg": (
        {"advantage": {"name": "group-relative", "std": False}, "objective": "reinforce"},
        "gpg",
        "token-mean",
        {},
        [],
        None,
    ),
    "corrected": ({"objective": CLIP} | CORRECTED, "vanilla", "token-mean", NARROW, RULES, 1.1),
}
forked = pytest.mark.parametrize("places", [(), (5, 9, 16)], ids=["", "forked"])
seeds = pytest.mark.parametrize("seed", range(3))


@seeds
@forked
@pytest.mark.parametrize(("settings", "name", "mode", "knobs", "rules", "cap"), OF_VERL.values(), ids=OF_VERL)
def test_steps_of_several_updates_match_verl(seed, places, settings, name, mode, knobs, rules, cap):
    batch = step_of(seed)
    x_of = features(seed, batch)
    trained, weights = weighed_by_verl(batch, rules, cap, std=name != "gpg")
    course = ours({"proximal": "recompute", **settings}, batch, x_of, places)

    def slope(part, chosen):
        return verl_loss(name, part, mode, weight=None if weights is None else weights[chosen], **knobs)[1]

    assert_same_course(course, followed(trained, x_of, slope))


@seeds
def test_chain_of_rejections_keeps_what_all_of_verl_keep(seed):
    batch = step_of(seed, spread=0.15)
    x = Algorithm(AlgorithmConfig()).experience(group_episodes(episodes(batch, (7,))))
    at = x.rows.token_ids.long()
    kept, alone = [], []
    for chain, rules in ((CHAIN, RULES), *(([one], [rule]) for one, rule in zip(CHAIN, RULES, strict=True))):
        algorithm = Algorithm(AlgorithmConfig.model_validate({"rejection": chain, "denominators": "kept"}))
        given = scored(x.rows, old_logprobs=batch.old.flatten()[at])
        found = torch.zeros(batch.mask.numel(), dtype=torch.bool)
        counted = algorithm.compute_weights_in_place_order(x, given)[0].counted
        found[at[counted]] = True
        assert found.view_as(batch.mask).tolist() == weighed_by_verl(batch, rules)[0].mask.tolist()
        (kept if len(rules) > 1 else alone).append(int(found.sum()))
    assert 0 < kept[0] < min(alone), "each link rejects what another keeps"


WIDE = {"epsilon_low": 0.05, "epsilon_high": 0.08}
OF_TRL = {
    "dapo": ({"objective": CLIP}, "dapo", WIDE),
    "grpo": ({"objective": CLIP, "aggregation": "seq-mean-token-mean"}, "grpo", WIDE),
    "gspo": (
        {"objective": SEQUENCE, "aggregation": "seq-mean-token-mean"},
        "grpo",
        {"epsilon_low": 0.02, "epsilon_high": 0.03, "level": "sequence"},
    ),
    "cispo": ({"objective": {"name": "cispo", "clip_high_cap": 1.05}}, "cispo", {"epsilon_high": 1.05}),
    "sequences rejected by old/mu, then by theta/mu": (
        {
            "objective": CLIP,
            "weight": {"name": "sequence-tis", "cap": 1.2},
            "rejection": {"name": "sequence", "low": 0.0, "high": 1.2},
            "negative_mask": {"name": "opsm", "delta": 0.02},
        },
        "dapo",
        WIDE | {"off_policy_mask_threshold": 0.02},
    ),
}


@seeds
@forked
@pytest.mark.parametrize(("settings", "loss_type", "knobs"), OF_TRL.values(), ids=OF_TRL)
def test_steps_of_several_updates_match_trl(seed, places, settings, loss_type, knobs):
    batch = step_of(seed)
    x_of = features(seed, batch)
    trained = weighed_by_verl(batch, [])[0]  # TRL's groups are of one size; test_trl.py compares its advantages
    course = ours({"proximal": "recompute", **settings}, batch, x_of, places)
    weights = trl_weights(batch, "sequence_mask", None, 1.2) if "weight" in settings else None

    def slope(part, chosen):
        return trl_loss(part, loss_type, weights=None if weights is None else weights[chosen], **knobs)[1]

    assert_same_course(course, followed(trained, x_of, slope))


def test_chain_of_trl_has_two_links_that_differ():
    """The comparison above is of a chain: neither link is empty, and neither is the whole."""
    by_old, by_theta = [], []
    for seed in range(3):
        batch = step_of(seed)
        by_old.append(trl_weights(batch, "sequence_mask", None, 1.2)[:, 0] == 0)
        advantages = weighed_by_verl(batch, [])[0].advantages
        by_theta.append(off_policy_sequences(batch.old, batch.mu, advantages, batch.mask, delta=0.02))
    one, other = torch.cat(by_old), torch.cat(by_theta)
    assert (one & ~other).any() and (other & ~one).any()
