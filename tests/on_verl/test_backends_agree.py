"""One batch, two backends: the loss and the gradient of verl's workers are those of the embedded trainer."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

import numpy as np
import pytest
import torch
from doubles import example_episode  # site-packages has a `tests`, too
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu
from verl.utils.metric import Metric
from verl.workers.utils.padding import response_from_nested

from agent_rl.algorithms import Algorithm, Rows, ScoredRows, to_samples
from agent_rl.algorithms.loss import EXTREMES, LossTerms
from agent_rl.backends.embedded.config import ModelConfig, TrainConfig
from agent_rl.backends.embedded.model import make_model
from agent_rl.backends.embedded.scoring import score_tokens
from agent_rl.backends.verl.driver.exchange import COMPUTED, compute_weights, prepare
from agent_rl.backends.verl.driver.received import receive
from agent_rl.backends.verl.worker.loss import SENT, loss_function
from agent_rl.backends.verl.worker.rows import rows_of
from agent_rl.config import choices, load_config
from agent_rl.core.episode import Episode, Failure, Outcome, Reward, StepRecord, group_episodes
from agent_rl.core.trajectory import Completion, FinishReason, Source, Trajectory

VOCABULARY = 50
ENGINE = {"log_probs": "logprobs", "entropy": "entropy"}
"""What verl's engine calls the scores of tokens."""


def preset(name: str, *changes: str) -> Algorithm:
    settings = [f"algorithm={name}", *(f"algorithm.{change}" for change in changes)]
    return Algorithm(load_config("backend/embedded", TrainConfig, settings).algorithm)


PRESETS = [
    (name,)
    for name in choices("algorithm")
    if not name.endswith("-paper") and preset(name).config.critic.where != "shared"
]
PARTS = [
    ("a2c", "critic.where=separate"),
    ("grpo", "advantage=optimal-baseline", "proximal=recompute"),
    ("rloo", "advantage={name: optimal-baseline, gamma: 0.9}", "proximal=recompute"),
    ("grpo", "entropy=0.05"),
    ("grpo", "kl={where: loss, coefficient: 0.3, kind: unbiased}"),
    ("grpo", "kl={where: loss, coefficient: 0.3, kind: k3+}", "entropy=0.05", "aggregation=seq-mean-token-mean"),
    ("reinforce", "kl={where: reward, coefficient: 0.3, kind: k1}"),
    ("m2po", "proximal=recompute", "kl={where: loss, coefficient: 0.3, kind: k2}"),
    ("grpo", "negative_mask={name: opsm, delta: 0.01}"),
    ("grpo", "aggregation=token-sum"),
    ("grpo", "aggregation=prompt-mean", "count_zero_advantage=false"),
    ("icepop", "rejection={name: worst-token, low: 0.82, high: 1.22}", "denominators=kept"),
]
"""Settings that no preset has."""


def episode(number: int, group: str, reward: float | None) -> Episode:
    """Two turns of random ids; episode 3 has a third, episode 5 sampled nothing and failed."""
    rng = np.random.default_rng(number)
    trajectory, turns = Trajectory(), 3 if number == 3 else 2
    for turn in range(turns):
        trajectory.append(rng.integers(0, VOCABULARY, rng.integers(2, 6)).tolist(), Source.ENV, turn)
        n = int(rng.integers(1, 7))
        logprobs = tuple(rng.normal(-3.9, 0.1, n).tolist())
        ids = tuple(rng.integers(0, VOCABULARY, n).tolist())
        trajectory.append_completion(Completion(ids, logprobs, FinishReason.STOP, (0,) * n), turn)
    failed = number == 5
    return example_episode(
        f"e{number}",
        group_id=group,
        trajectories=() if failed else (trajectory,),
        steps=tuple(StepRecord(1, 0.0, False, False, state=f"s{turn * (number % 2)}") for turn in range(turns)),
        rewards=(Reward("correct", reward), Reward("step", 0.25, turn=0)),
        outcome=Outcome.FAILED if failed else Outcome.TERMINATED,
    )


REWARDS = [1.0, 0.0, 0.5, 1.0, 0.0, 1.0, None, 0.75]
EPISODES = [episode(i, "ab"[i // 4], reward) for i, reward in enumerate(REWARDS)]
GREEDY = [episode(20, "a", 0.5), episode(21, "b", 0.25)]
VALUES = {e.id: torch.tensor([0.6, 0.3 + 0.05 * i, 0.1 * i]) for i, e in enumerate(EPISODES)}
"""Return state values, if the algorithm reads them: of each episode's first state, and of some later ones."""


def asked(algorithm: Algorithm) -> dict[str, object]:
    return {
        "greedy": GREEDY if algorithm.needs_greedy else (),
        "values": VALUES if algorithm.needs_values else {},
    }


@pytest.fixture(scope="module")
def model():
    tiny = ModelConfig(hidden=32, heads=2, kv_heads=2, head_dim=16, layers=2, intermediate=64)
    return make_model(tiny, VOCABULARY, 0).double()


def nested(lists, dtype=torch.int64):
    return torch.nested.as_nested_tensor([torch.tensor(x, dtype=dtype) for x in lists], layout=torch.jagged)


def in_verl(episodes: list[Episode]) -> tuple[TensorDict, list[str], list[dict], list[bool]]:
    """The queue's data for a batch, in an order of verl's choosing, with a padding row at the end."""
    rows = [(f"p{e.group_id}_{i}_{n}", row) for i, e in enumerate(episodes) for n, row in enumerate(rows_of(e))]
    rows = [rows[i] for i in np.random.default_rng(0).permutation(len(rows))]
    pad = replace(rows[0][1], prompt_ids=[0], response_ids=[0], response_mask=[0], response_logprobs=[0.0])
    keys, rows = [*(k for k, _ in rows), "pad_0_0"], [*(r for _, r in rows), replace(pad, extra_fields={})]
    data = TensorDict(
        {
            "prompts": nested([r.prompt_ids for r in rows]),
            "responses": nested([r.response_ids for r in rows]),
            "input_ids": nested([r.prompt_ids + r.response_ids for r in rows]),
            "response_mask": nested([r.response_mask for r in rows]),
            "rollout_log_probs": nested([r.response_logprobs for r in rows], torch.float32),
        },
        batch_size=len(rows),
    )
    return data, keys, [r.extra_fields for r in rows], [False] * (len(rows) - 1) + [True]


def moved(data: TensorDict, seed: int) -> torch.Tensor:
    """Return log-probabilities of another policy for the responses: mu with some noise."""
    rng = np.random.default_rng(seed)
    mu = data["rollout_log_probs"].unbind()
    return nested([(x + torch.from_numpy(rng.normal(0, 0.1, len(x)))).tolist() for x in mu], torch.float32)


def computed(algorithm: Algorithm, data: TensorDict) -> dict[str, torch.Tensor]:
    """Return the columns of verl's engines at the time of weighing, except a critic's values."""
    found = {"old_log_probs": moved(data, 1) if algorithm.config.recomputes_old else data["rollout_log_probs"]}
    if algorithm.needs_reference:
        found["ref_log_prob"] = moved(data, 2)
    if algorithm.needs_distributions:
        found["sum_pi_squared"] = nested([x.exp().mul(2).tolist() for x in moved(data, 3).unbind()], torch.float32)
    return found


def by_ids(data: TensorDict, name: str) -> dict[tuple[int, ...], torch.Tensor]:
    """A column of verl's, of whole rows, by the ids of the row."""
    parts = zip(*(data[key].unbind() for key in ("prompts", "responses", name)), strict=True)
    return {(*p.tolist(), *r.tolist()): torch.cat([torch.zeros(len(p)), x]) for p, r, x in parts}


def filled(rows: Rows, data: TensorDict) -> ScoredRows:
    """The embedded backend's rows with the same scores; 0 at tokens that were not sampled."""
    found: dict[str, torch.Tensor] = {}
    for ours, theirs in COMPUTED.items():
        if theirs in data.keys():  # noqa: SIM118 - a TensorDict
            known, column = by_ids(data, theirs), torch.zeros_like(rows.rollout_logprobs)
            for ids, part in zip(*(x.split(rows.lengths.tolist()) for x in (rows.token_ids, column)), strict=True):
                values = known[tuple(ids.tolist())]
                part[: len(values)] = values
            found[ours] = torch.where(rows.loss_mask, column, 0.0)
    return ScoredRows(rows, **found)


def embedded(algorithm: Algorithm, model, data: TensorDict, temperature: float = 1.0) -> tuple[LossTerms, Rows]:
    """The embedded backend's loss of the batch, and the rows that have a gradient."""
    x = algorithm.experience(group_episodes(EPISODES, GREEDY if algorithm.needs_greedy else ()))
    if algorithm.needs_values:
        x = replace(x, state_values=torch.stack([VALUES[e.id] for e in EPISODES]))
    batch, whole = algorithm.compute_weights(x, filled(x.rows, data))
    scores = score_tokens(model, batch.padded().rows.token_ids, temperature, entropy_gradient=True)
    theta = batch.rows.grid().flat(scores.logprobs.detach().float(), len(batch.rows.token_ids))
    prepared = algorithm.prepare(theta, batch)[0].padded()
    return algorithm.loss(scores.logprobs, scores.entropy, prepared.inputs, whole), batch.rows


def gradient(loss: torch.Tensor, model) -> torch.Tensor:
    model.zero_grad()
    loss.backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def as_engine(rows: list[torch.Tensor]) -> torch.Tensor:
    """Scores of tokens as verl's engine has them: token t's at position t - 1."""
    return torch.nested.as_nested_tensor([torch.cat([x[1:], x.new_zeros(1)]) for x in rows], layout=torch.jagged)


def over_ranks(reports: list[list[Metric]]) -> float:
    """What verl makes of a metric of the micro-batches of each data-parallel rank."""
    of_ranks = [Metric(micro_batches[0].aggregation) for micro_batches in reports]
    for of_rank, micro_batches in zip(of_ranks, reports, strict=True):
        for metric in micro_batches:
            of_rank.append(metric)
    return Metric.aggregate_dp([Metric(x.aggregation, float(x.aggregate())) for x in of_ranks])


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("case", PRESETS + PARTS, ids=" ".join)
def test_gradient_matches_on_both_backends(case: tuple[str, ...], ranks: int, model) -> None:
    algorithm = preset(*case)
    data, keys, extra, padding = in_verl(EPISODES)
    data.update(computed(algorithm, data))
    if algorithm.config.critic.where != "none":
        data["values"] = moved(data, 4)
    terms, rows = embedded(algorithm, model, data)
    expected = gradient(terms.loss, model)

    received = replace(receive(keys, extra, padding), **asked(algorithm))
    weighed = compute_weights(algorithm, received, data)
    data.update(weighed.sent)
    if algorithm.needs_scores_before_update:
        scored = as_engine([score_tokens(model, i[None]).logprobs[0].detach() for i in data["input_ids"].unbind()])
        theta = weighed.by_token(response_from_nested(scored, data["response_mask"]).unbind(), range(len(keys)))
        data.update(prepare(algorithm, weighed, theta, range(len(keys)))[0])

    function, total = loss_function(algorithm.config), torch.zeros(len(expected), dtype=torch.float64)
    reports: list[dict[str, list[Metric]]] = []
    for rank in range(ranks):  # data-parallel ranks with micro-batches of three rows; FSDP averages over ranks
        share, report = list(range(rank, len(keys), ranks)), defaultdict[str, list[Metric]](list)
        reports.append(report)
        for start in range(0, len(share), 3):
            part = tu.index_select_tensor_dict(data, share[start : start + 3])
            scores = [score_tokens(model, i[None], entropy_gradient=True) for i in part["input_ids"].unbind()]
            output = {"log_probs": as_engine([x.logprobs[0] for x in scores])}
            if algorithm.config.entropy:
                output["entropy"] = as_engine([x.entropy[0] for x in scores])
            tu.assign_non_tensor(part, dp_size=ranks)
            loss, metrics = function(output, part)
            for name, metric in metrics.items():
                report[name].append(metric)
            total += gradient(loss, model) / ranks
    assert float(expected.norm()) > 1e-3
    found = {name: over_ranks([report[name] for report in reports]) for name in reports[0]}
    sampled = int(rows.loss_mask.sum())
    means = {f"agent_rl/{name}": x if name in EXTREMES else x / sampled for name, x in terms.sums.items()}
    means["agent_rl/loss"] = terms.loss.item()
    assert found == pytest.approx({name: means[name] for name in found}, rel=1e-5, abs=1e-6)
    torch.testing.assert_close(total, expected, rtol=0, atol=1e-5 * float(expected.norm()))
    assert weighed.metrics["train/samples"] == len(rows)
    assert weighed.metrics["rollout/kept"] == pytest.approx(
        algorithm.experience(group_episodes(EPISODES)).kept.double().mean()
    )


def test_loss_ignores_padding_and_blank_rows() -> None:
    data, keys, extra, padding = in_verl(EPISODES)
    data["old_log_probs"] = data["rollout_log_probs"]
    sent = compute_weights(preset("grpo"), receive(keys, extra, padding), data).sent
    blank = next(i for i, row in enumerate(data["response_mask"].unbind()) if not row.any())
    for row in (blank, len(keys) - 1):
        assert not sent["advantages"].unbind()[row].any() and not sent[SENT["weights"]].unbind()[row].any()
    counted = sum(int(x.sum()) for x in sent[SENT["counted"]].unbind())
    trained = sum(int(s.loss_mask.sum()) for s in to_samples([e for e in EPISODES if e.reward is not None]))
    assert counted == trained == int(sent["agent_rl_whole"][0, 0])


@pytest.mark.parametrize(("column", "what"), [("responses", "ids"), ("response_mask", "mask")])
def test_compute_weights_refuses_rows_changed_by_verl(column: str, what: str) -> None:
    data, keys, extra, padding = in_verl(EPISODES)
    data["old_log_probs"] = data["rollout_log_probs"]
    data[column].values()[3] = 1 - data[column].values()[3]
    with pytest.raises(RuntimeError, match=f"came back from verl changed at token .* of its {what}"):
        compute_weights(preset("grpo"), receive(keys, extra, padding), data)


def test_compute_weights_names_the_failure_without_tokens() -> None:
    failed = [
        replace(e, trajectories=(), outcome=Outcome.FAILED, error=Failure("policy", "Dead", "gone")) for e in EPISODES
    ]
    data, keys, extra, padding = in_verl(failed)
    data["old_log_probs"] = data["rollout_log_probs"]
    with pytest.raises(
        RuntimeError, match=r"none of 8 episodes.*sampled a token: the first broke in policy: Dead: gone"
    ):
        compute_weights(preset("grpo"), receive(keys, extra, padding), data)
