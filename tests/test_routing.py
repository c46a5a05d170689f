"""Routes in an algorithm: their replay, the metrics of their agreement, and the mask of disagreeing tokens."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from agent_rl.algorithms import Algorithm, AlgorithmConfig, Experience, ScoredRows, collate
from agent_rl.algorithms.corrections import rollout_gap
from agent_rl.algorithms.explain import explain
from agent_rl.errors import ConfigError
from agent_rl.moe.agreement import RouteAgreement, replayed_routes, routing_metrics
from tests.batches import by_row, weigh
from tests.doubles import example_sample
from tests.test_gradients import experience, samples_of

RECOMPUTED = {"proximal": "recompute"}


def scored_rows(rollout: Tensor, old: Tensor, sampled: list[int], gaps: list[float]) -> ScoredRows:
    """One row; `gaps` are log old/mu of its sampled tokens."""
    batch = collate([example_sample(len(rollout), sampled)])
    logprobs = batch.rollout_logprobs.clone()
    logprobs[sampled] += torch.tensor(gaps)
    rows = replace(batch, routed_experts=rollout)
    return ScoredRows(rows, logprobs, old_experts=old)


def metrics(batch: ScoredRows, mask: Tensor) -> dict[str, float]:
    rows = batch.rows
    gaps = rollout_gap(batch.old_logprobs, rows.rollout_logprobs, mask)
    return routing_metrics(batch.agreement, gaps, mask, rows.sum(mask) > 0)


ROLLOUT = torch.tensor(
    # two layers, two experts of four; by input position
    [[[0, 1], [2, 3]], [[0, 1], [2, 3]], [[0, 1], [2, 3]], [[0, 1], [2, 3]], [[-1, -1], [-1, -1]]]
)
OLD = torch.tensor(
    # the same in another order; one expert of layer 1 differs; both of layer 0; one of each
    [[[1, 0], [3, 2]], [[0, 1], [2, 0]], [[2, 3], [2, 3]], [[0, 3], [1, 3]], [[0, 1], [2, 3]]]
)


def test_route_metrics_by_hand() -> None:
    batch = scored_rows(ROLLOUT, OLD, [1, 2, 4], [0.1, -0.3, 0.5])
    # tokens 1, 2 and 4 come from positions 0, 1 and 3
    expected = {
        "routing/agreement": (1 + 1 + 1 + 0.5 + 0.5 + 0.5) / 6,
        "routing/agreement_layer_0": (1 + 1 + 0.5) / 3,
        "routing/agreement_layer_1": (1 + 0.5 + 0.5) / 3,
        "routing/flipped_tokens": 2 / 3,
        "mismatch/gap_flipped": (0.3 + 0.5) / 2,
        "mismatch/gap_same": 0.1,
    }
    assert metrics(batch, batch.rows.loss_mask) == pytest.approx(expected, abs=1e-6)
    one = scored_rows(ROLLOUT, OLD, [1], [0.1])
    got = metrics(one, one.rows.loss_mask)
    assert got["routing/flipped_tokens"] == 0 and got["mismatch/gap_same"] == pytest.approx(0.1, abs=1e-6)
    assert "mismatch/gap_flipped" not in got
    parts = [[getattr(rows.agreement, name) for rows in (batch, one)] for name in RouteAgreement.__slots__]
    both = RouteAgreement(*map(torch.cat, parts))
    mask = torch.cat([torch.zeros_like(one.rows.loss_mask), one.rows.loss_mask])  # only tokens trained on count
    assert routing_metrics(both, torch.full(mask.shape, 0.1), mask, torch.tensor([False, True])) == pytest.approx(got)


def test_route_metrics_skip_unknown_routes() -> None:
    rollout = ROLLOUT.clone()
    rollout[0] = -1  # token 1's
    rollout[1, 1, 1] = -1  # half of token 2's layer 1; its layer 0 agrees
    batch = scored_rows(rollout, OLD, [1, 2, 4], [0.1, -0.3, 0.5])
    got = metrics(batch, batch.rows.loss_mask)
    assert got["routing/agreement"] == pytest.approx((1 + 0.5 + 0.5) / 3)
    assert got["routing/agreement_layer_1"] == pytest.approx(0.5) and got["routing/flipped_tokens"] == 0.5
    assert got["mismatch/gap_same"] == pytest.approx(0.3, abs=1e-6)
    assert batch.agreement is not None and math.isnan(batch.agreement.tokens[1])
    unknown = replace(batch, rows=replace(batch.rows, routed_experts=torch.full_like(ROLLOUT, -1)))
    assert metrics(unknown, batch.rows.loss_mask) == {}
    assert metrics(replace(batch, old_experts=None), batch.rows.loss_mask) == {}


def routed_experience(agreeing: Tensor) -> tuple[Experience, ScoredRows]:
    """The gradient tests' rows; one layer, and position t routes alike where `agreeing` says so."""
    x = experience(samples_of(list(range(8))), [i // 4 for i in range(8)])
    rollout = torch.zeros(*x.rows.token_ids.shape, 1, 1, dtype=torch.int8)
    old = torch.where(agreeing, 0, 1)[..., None, None].to(torch.int16)
    x = replace(x, rows=replace(x.rows, routed_experts=rollout))
    return x, ScoredRows(x.rows, x.rows.rollout_logprobs, old_experts=old)


def test_min_agreement_masks_tokens_but_counts_them() -> None:
    x = experience(samples_of(list(range(8))), [i // 4 for i in range(8)])
    agreeing = torch.rand(x.rows.token_ids.shape, generator=torch.Generator().manual_seed(0)) < 0.6
    x, scored = routed_experience(agreeing)
    strict = Algorithm(AlgorithmConfig.model_validate(RECOMPUTED | {"routing": {"min_agreement": 0.5}}))
    batch, whole = weigh(strict, x, scored)
    free, free_whole = weigh(Algorithm(AlgorithmConfig.model_validate(RECOMPUTED)), x, scored)
    assert whole == free_whole and len(batch) == len(free)
    before = agreeing.roll(1)  # token t comes from position t - 1
    before[x.rows.starts] = True
    laid, rows = by_row(x.rows, before), x.rows.padded()
    for row in range(len(batch)):
        original = next(i for i in range(8) if torch.equal(rows.token_ids[i, :4], batch.rows.token_ids[row, :4]))
        mask = batch.rows.loss_mask[row]
        assert torch.equal(batch.weights[row][mask] != 0, laid[original, : len(mask)][mask])
    assert (free.weights[free.rows.loss_mask] == 1).all() and (batch.weights[batch.rows.loss_mask] == 0).any()
    metrics_of = strict.diagnose(x, scored)
    lost = 1 - before[x.rows.loss_mask].double().mean()
    assert metrics_of["mismatch/weight_zero_fraction"] == pytest.approx(float(lost))
    assert metrics_of["routing/flipped_tokens"] == pytest.approx(float(lost))


def test_min_agreement_keeps_tokens_of_unknown_agreement() -> None:
    x = experience(samples_of(list(range(8))), [i // 4 for i in range(8)])
    x, scored = routed_experience(torch.zeros(x.rows.token_ids.shape, dtype=torch.bool))
    assert scored.old_experts is not None
    scored.old_experts[x.rows.starts[1] :] = -1
    strict = Algorithm(AlgorithmConfig.model_validate(RECOMPUTED | {"routing": {"min_agreement": 0.5}}))
    batch, _ = strict.compute_weights(x, scored)
    free, _ = Algorithm(AlgorithmConfig.model_validate(RECOMPUTED)).compute_weights(x, scored)
    assert len(batch) == len(free) - 1 and torch.equal(batch.weights != 0, batch.rows.loss_mask)


def test_replayed_routes_chooses_by_mode() -> None:
    assert replayed_routes("R2", ROLLOUT, OLD) is OLD and replayed_routes("R3", ROLLOUT, OLD) is ROLLOUT
    for replay, whose in (("R2", "old's forward pass"), ("R3", "the rollout")):
        with pytest.raises(ConfigError, match=whose):
            replayed_routes(replay, None, None)
    x = experience(samples_of(list(range(8))), [i // 4 for i in range(8)])
    strict = Algorithm(AlgorithmConfig.model_validate(RECOMPUTED | {"routing": {"min_agreement": 0.5}}))
    with pytest.raises(ConfigError, match="min_agreement"):
        strict.compute_weights(x, ScoredRows(x.rows, x.rows.rollout_logprobs))


@pytest.mark.parametrize("routing", [{"replay": "R2"}, {"min_agreement": 0.5}])
def test_routing_needs_recompute_for_old_routes(routing: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="set proximal=auto or recompute"):
        AlgorithmConfig.model_validate({"routing": routing, "proximal": "rollout"})
    assert AlgorithmConfig.model_validate({"routing": routing}).recomputes_old


def test_routing_r3_needs_no_recompute() -> None:
    assert AlgorithmConfig.model_validate({"routing": {"replay": "R3"}}).routing.replay == "R3"


def test_routing_is_explained() -> None:
    def metrics_of(**routing: object) -> str:
        return explain(AlgorithmConfig.model_validate(RECOMPUTED | {"routing": routing}))

    assert "routing" not in metrics_of()
    assert "R2: the update takes the experts of old's forward pass" in metrics_of(replay="R2")
    assert "the rollout's experts" in metrics_of(replay="R3") and "2510.11370" in metrics_of(replay="R3")
    assert "less than 0.7 of the layers" in metrics_of(min_agreement=0.7)


def test_routes_follow_rows_through_cuts() -> None:
    x = experience(samples_of(list(range(8))), [i // 4 for i in range(8)])
    agreeing = torch.rand(x.rows.token_ids.shape, generator=torch.Generator().manual_seed(0)) < 0.5
    _, batch = routed_experience(agreeing)
    for rows in batch.cut_rows(40):
        part, laid = batch.padded(rows), x.rows.grid(torch.tensor(rows))
        assert part.old_experts is not None and part.old_experts.shape[:2] == part.rows.token_ids.shape
        assert torch.equal(part.old_experts[..., 0, 0] == 0, laid.lay(agreeing))
