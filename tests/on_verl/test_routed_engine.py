"""A mixture of experts on verl's FSDP2, sharded over one process, replays and records as the embedded one does."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
import torch.distributed
from doubles import example_episode
from engines import shaken
from tensordict import TensorDict
from torch import Tensor
from transformers import PreTrainedModel
from verl.trainer.config import CheckpointConfig
from verl.utils import tensordict_utils as tu
from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
from verl.workers.utils.padding import response_from_nested

from agent_rl.algorithms import Algorithm, ScoredRows
from agent_rl.algorithms.config import AlgorithmConfig
from agent_rl.backends.embedded.config import ModelConfig
from agent_rl.backends.embedded.model import make_model
from agent_rl.backends.embedded.scoring import score_tokens
from agent_rl.backends.verl.driver.exchange import compute_weights
from agent_rl.backends.verl.driver.received import receive
from agent_rl.backends.verl.worker.engine import RoutedEngine
from agent_rl.backends.verl.worker.loss import loss_function
from agent_rl.backends.verl.worker.routes import EQUAL, OLD, RECORD, REPLAY, ROLLOUT, SHARED
from agent_rl.backends.verl.worker.rows import rows_of
from agent_rl.core.episode import Episode, Reward, group_episodes
from agent_rl.core.trajectory import Completion, FinishReason, Source, Trajectory
from agent_rl.moe.agreement import replayed_routes
from agent_rl.moe.balance import RouteLog
from agent_rl.moe.routes import routed, routers

VOCABULARY, LAYERS, TOP_K, EXPERTS = 50, 2, 2, 4
FULL = {"param_dtype": "fp32", "reduce_dtype": "fp32", "buffer_dtype": "fp32"}


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    tiny = ModelConfig(
        architecture="qwen3_moe", hidden=32, heads=2, kv_heads=2, head_dim=16, layers=LAYERS,
        experts=EXPERTS, experts_per_token=TOP_K, expert_intermediate=16, max_positions=64,
    )  # fmt: skip
    return shaken(make_model(tiny, VOCABULARY, 0))


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "checkpointed"])
def engine(
    model: PreTrainedModel, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RoutedEngine]:
    """The engine with the same weights; with gradient checkpointing, too."""
    folder = tmp_path_factory.mktemp("engine")
    model.save_pretrained(folder)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/group", rank=0, world_size=1)
    engine = RoutedEngine(
        HFModelConfig(
            path=str(folder),
            load_tokenizer=False,
            enable_gradient_checkpointing=request.param,
            override_config={"attn_implementation": "sdpa"},
        ),
        FSDPEngineConfig(strategy="fsdp2", model_dtype="fp32", mixed_precision=FULL, use_torch_compile=False),
        FSDPOptimizerConfig(lr=1e-3, total_training_steps=1),
        CheckpointConfig(),
    )
    engine.initialize()
    yield engine
    torch.distributed.destroy_process_group()


def episode(number: int, reward: float) -> Episode:
    """Two turns of random ids; the rollout routed every position but the last."""
    rng = np.random.default_rng(number)
    trajectory = Trajectory()
    for turn in range(2):
        before = len(trajectory)
        trajectory.append(rng.integers(0, VOCABULARY, rng.integers(2, 6)).tolist(), Source.ENV, turn)
        n = int(rng.integers(2, 7))
        logprobs, ids = tuple(rng.normal(-3.9, 0.1, n).tolist()), tuple(rng.integers(0, VOCABULARY, n).tolist())
        fed = len(trajectory) + n - before - (turn == 0)  # the server's new positions, without the last token
        picks = rng.random((fed, LAYERS, EXPERTS)).argsort(-1)[..., :TOP_K].astype(np.int8)
        trajectory.append_completion(Completion(ids, logprobs, FinishReason.STOP, (0,) * n, picks), turn)
    rewards = (Reward("correct", reward),)
    return example_episode(f"e{number}", group_id="ab"[number // 3], trajectories=(trajectory,), rewards=rewards)


EPISODES = [episode(i, reward) for i, reward in enumerate([1.0, 0.0, 0.5, 1.0, 0.0, 0.75])]


def nested(lists: list[list[float]], dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.nested.as_nested_tensor([torch.tensor(x, dtype=dtype) for x in lists], layout=torch.jagged)


def queue(packed: bool) -> tuple[TensorDict, list[str], list[dict[str, object]]]:
    """verl's rows of the episodes, in another order; in micro-batches of 40 tokens if packed, else of three rows."""
    found = [(f"p{e.group_id}_{i}_{n}", row) for i, e in enumerate(EPISODES) for n, row in enumerate(rows_of(e))]
    keys, rows = zip(*[found[i] for i in np.random.default_rng(0).permutation(len(found))], strict=True)
    routes = [torch.from_numpy(r.routed_experts) for r in rows]
    data = TensorDict(
        {
            "prompts": nested([r.prompt_ids for r in rows]),
            "responses": nested([r.response_ids for r in rows]),
            "input_ids": nested([r.prompt_ids + r.response_ids for r in rows]),
            "position_ids": nested([[*range(len(r.prompt_ids + r.response_ids))] for r in rows]),
            "response_mask": nested([r.response_mask for r in rows]),
            "loss_mask": nested([r.response_mask for r in rows]),
            "rollout_log_probs": nested([r.response_logprobs for r in rows], torch.float32),
            ROLLOUT: torch.nested.as_nested_tensor(routes, layout=torch.jagged),
        },
        batch_size=len(rows),
    )
    cut = {"use_dynamic_bsz": True, "max_token_len_per_gpu": 40} if packed else {"use_dynamic_bsz": False}
    tu.assign_non_tensor(data, use_remove_padding=packed, micro_batch_size_per_gpu=3, temperature=1.0, **cut)
    return data, list(keys), [r.extra_fields for r in rows]


def by_verl(engine: RoutedEngine, algorithm: Algorithm, packed: bool) -> tuple[float, Tensor, dict[str, float]]:
    """One step as the trainer and its workers take it: the loss, its gradient, and what the driver reports."""
    data, keys, extra = queue(packed)
    replay = algorithm.config.routing.replay
    record = (EQUAL, SHARED, *((OLD,) if replay == "R2" else ()))
    tu.assign_non_tensor(data, **{RECORD: record, REPLAY: ROLLOUT if replay == "R3" else ""})
    with engine.eval_mode():
        scored = engine.infer_batch(data)["model_output"]
    for name in record:
        data[name] = scored[name]
    data["old_log_probs"] = response_from_nested(scored["log_probs"], data["response_mask"])
    driver = data.exclude(ROLLOUT, OLD)
    weighed = compute_weights(algorithm, receive(keys, extra, [False] * len(keys)), driver)
    data.update(weighed.sent)
    tu.assign_non_tensor(data, **{RECORD: (), REPLAY: {"none": "", "R2": OLD, "R3": ROLLOUT}[replay]})
    with engine.train_mode(zero_grad_on_exit=False):
        engine.optimizer_zero_grad()
        reported = engine.forward_backward_batch(data, loss_function(algorithm.config))["metrics"]
    gradients = {name: p.grad.full_tensor() for name, p in engine.module.named_parameters()}
    engine.optimizer_zero_grad()
    loss = float(reported["agent_rl/loss"].aggregate())
    return loss, torch.cat([gradients[name].flatten() for name in sorted(gradients)]), weighed.metrics


def embedded(model: PreTrainedModel, algorithm: Algorithm) -> tuple[float, Tensor, dict[str, float]]:
    """The same as the embedded trainer takes it."""
    x = algorithm.experience(group_episodes(EPISODES))
    log, every, grid = RouteLog(len(x.rows.token_ids)), x.rows.padded(), x.rows.grid()
    given = every.routed_experts if algorithm.config.routing.replay == "R3" else None
    with torch.no_grad(), routed(model, given) as routes:
        old = score_tokens(model, every.token_ids).logprobs
    log.add(grid, routes)
    old = grid.flat(torch.where(every.loss_mask, old, 0.0), len(x.rows.token_ids))
    rows = ScoredRows(x.rows, old, old_experts=log.own)
    batch, whole = algorithm.compute_weights(x, rows)
    batch = batch.padded()
    model.zero_grad()
    replay, both = algorithm.config.routing.replay, (batch.rows.routed_experts, batch.scored.old_experts)
    with routed(model, None if replay == "none" else replayed_routes(replay, *both)):
        scores = score_tokens(model, batch.rows.token_ids)
    loss = algorithm.loss(scores.logprobs, scores.entropy, batch.inputs, whole).loss
    loss.backward()
    gradients = dict(model.named_parameters())
    flat = torch.cat([gradients[name].grad.flatten() for name in sorted(gradients)])
    return loss.item(), flat, algorithm.diagnose(x, rows)


def algorithm_of(**routing: object) -> Algorithm:
    settings = {"proximal": "recompute", "weight": {"name": "token-tis", "cap": 50.0}, "routing": routing}
    return Algorithm(AlgorithmConfig.model_validate(settings))


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("routing", [{}, {"replay": "R2"}, {"replay": "R3"}, {"replay": "R3", "min_agreement": 0.4}])
def test_routed_engine_matches_the_embedded_trainer(
    routing: dict[str, object], packed: bool, engine: RoutedEngine, model: PreTrainedModel
) -> None:
    algorithm = algorithm_of(**routing)
    expected_loss, expected, reported = embedded(model, algorithm)
    loss, gradient, metrics = by_verl(engine, algorithm, packed)
    assert not any(router._forward_hooks for router in routers(engine.module))
    assert loss == pytest.approx(expected_loss, rel=1e-5, abs=1e-6)
    torch.testing.assert_close(gradient, expected, rtol=0, atol=1e-5 * float(expected.norm()))
    assert metrics == pytest.approx(metrics | reported, rel=1e-4, abs=1e-5) and "routing/agreement" in metrics
    assert metrics["routing/flipped_tokens"] > 0
    if routing == {"replay": "R3"}:
        _, free, _ = embedded(model, algorithm_of())
        assert float((free - gradient).norm()) > 0.1 * float(expected.norm())  # replay changes the gradient
