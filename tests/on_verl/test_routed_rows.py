"""Routes of an episode on their way through verl: as an agent loop sends them, and as the driver weighs them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from doubles import example_episode
from tensordict import TensorDict

from agent_rl.algorithms import Algorithm, ScoredRows
from agent_rl.algorithms.config import AlgorithmConfig
from agent_rl.backends.verl.driver.exchange import compute_weights, receive
from agent_rl.backends.verl.worker.agent_loop import outputs_of, with_routes
from agent_rl.backends.verl.worker.routes import OLD, ROLLOUT, RouteShape
from agent_rl.core.episode import Outcome
from on_verl.test_routed_engine import EPISODES

SHAPE = RouteShape(layers=2, top_k=2, experts=4)
FAILED = example_episode("e9", group_id="b", trajectories=(), outcome=Outcome.FAILED, rewards=())


def sent(strategy: str = "fsdp2") -> list[tuple[str, dict[str, object]]]:
    """The rows of all episodes as verl's queue gets them, the last one's blank."""
    return [
        (f"p_{i}_{n}", output.as_dict())
        for i, episode in enumerate([*EPISODES, FAILED])
        for n, output in enumerate(with_routes(outputs_of(episode), SHAPE, strategy))
    ]


def test_rows_send_routes_in_int8() -> None:
    rows = [fields for _, fields in sent()]
    for episode, fields in zip(EPISODES, rows, strict=False):
        routes = episode.trajectories[0].routed_experts
        assert fields[ROLLOUT].dtype == torch.int8 and np.array_equal(fields[ROLLOUT], routes)
        assert (routes[-1] == -1).all() and (routes[:-1] >= 0).all()
    blank = rows[-1]
    assert blank[ROLLOUT].dtype == torch.int8 and blank[ROLLOUT].shape == (2, 2, 2) and (blank[ROLLOUT] == -1).all()
    assert not any(name.startswith("route") and name != ROLLOUT for name in rows[0])


def test_rows_send_routes_in_int16_to_megatron() -> None:
    for (_, ours), (_, theirs) in zip(sent(), sent("megatron"), strict=True):
        assert theirs[ROLLOUT].dtype == torch.int16
        assert torch.equal(theirs[ROLLOUT], ours[ROLLOUT].clamp(min=0).short())


def test_driver_aligns_routes_of_shuffled_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[ScoredRows] = []
    monkeypatch.setattr(Algorithm, "diagnose", lambda self, x, scored, version: seen.append(scored) or {})
    shuffled = [sent()[i] for i in np.random.default_rng(1).permutation(len(EPISODES) + 1)]
    keys, rows = [key for key, _ in shuffled], [fields for _, fields in shuffled]

    def nested(name: str) -> torch.Tensor:
        return torch.nested.as_nested_tensor([row[name] for row in rows], layout=torch.jagged)

    data = TensorDict(
        {name: nested(name) for name in ("prompts", "responses", "response_mask", ROLLOUT)}, batch_size=len(rows)
    )
    data["old_log_probs"] = nested("rollout_log_probs")
    data[OLD] = torch.nested.as_nested_tensor([row[ROLLOUT].short() + 7 for row in rows], layout=torch.jagged)
    algorithm = Algorithm(AlgorithmConfig.model_validate({"proximal": "recompute", "routing": {"replay": "R3"}}))
    received = receive(keys, [row["extra_fields"] for row in rows], [False] * len(rows))
    compute_weights(algorithm, received, data, {"routed_experts": ROLLOUT, "old_experts": OLD})
    batch, old = seen[0].rows, seen[0].old_experts
    for row, index in enumerate(batch.episode.tolist()):
        expected = next(e for e in EPISODES if e.id == received.episodes[index].id).trajectories[0].routed_experts
        length = len(expected)
        assert np.array_equal(batch.routed_experts[row, :length], expected)
        assert np.array_equal(old[row, :length], expected + 7)
        assert (batch.routed_experts[row, length:] == -1).all() and (old[row, length:] == -1).all()
    assert len(batch) == len(EPISODES)
