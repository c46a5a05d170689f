"""A mixture of experts trained on real rollouts: balanced routers, replayed routes, rounded weights, resume."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from agent_rl.backends.embedded import scoring
from agent_rl.backends.embedded import trainer as trainer_module
from agent_rl.backends.embedded.actor import Actor, load_actor
from agent_rl.backends.embedded.config import TrainConfig
from agent_rl.backends.embedded.fresh import fresh_actor
from agent_rl.backends.embedded.run import resume_run, start_run
from agent_rl.backends.embedded.scoring import Scores, score_tokens
from agent_rl.backends.embedded.trainer import Trainer
from agent_rl.backends.embedded.warm_start import demonstrate, warm_start
from agent_rl.core.episode import Episode
from agent_rl.core.trajectory import Trajectory
from agent_rl.engines.embedded.quantization import QuantizedForward
from agent_rl.errors import ConfigError
from agent_rl.grid import Grid
from agent_rl.gym.registry import spec
from agent_rl.moe.balance import RouteLog
from agent_rl.moe.routes import Routes, routed, routers
from agent_rl.runs.metrics import read_metrics
from agent_rl.store.episodes import read_episodes
from agent_rl.view.progress import Progress
from tests.runs import SMALL, assert_same_run, config, whole_and_killed

MODEL = {"hidden": 32, "layers": 2, "heads": 2, "kv_heads": 2, "head_dim": 16}
MOE = MODEL | {"architecture": "qwen3_moe", "experts": 8, "experts_per_token": 2, "expert_intermediate": 16}
ROLLOUT = {"groups": 3, "samples": 4, "slots": 8, "max_tokens": 24}
BOTH_SIDES = {"proximal": "recompute", "weight": "token-tis"}


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The checkpoint of a small mixture of experts after its warm start."""
    return str(start_run(config(tmp_path_factory.mktemp("moe"), model=MOE, steps=0), Progress()) / "checkpoint")


def settings(tmp_path: Path, start: str, routing: dict[str, object], **changes: object) -> TrainConfig:
    algorithm = BOTH_SIDES | {"routing": routing}
    rollout = ROLLOUT | {"weights": "int4"}
    return config(tmp_path, start_from=start, model=MOE, algorithm=algorithm, rollout=rollout, **changes)


def trainer_of(settings: TrainConfig) -> Trainer:
    actor = load_actor(str(settings.start_from), slots=8, context=256, weights=settings.rollout.weights)
    return Trainer(spec("calculator-v0"), actor, settings)


@dataclass(frozen=True)
class Forward:
    """The inputs and results of a training forward."""

    learns: bool
    ids: Tensor
    given: Tensor | None
    routes: Routes

    def by_row(self, routes: Tensor) -> dict[tuple[int, ...], Tensor]:
        return {key(ids): row for ids, row in zip(self.ids, routes, strict=True)}


def key(ids: Tensor) -> tuple[int, ...]:
    return tuple(np.trim_zeros(ids.cpu().numpy(), "b").tolist())  # padding is 0


def watched(trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> tuple[list[Forward], list[Episode]]:
    """Take a step that learns; return its training forwards, and the episodes."""
    forwards: list[Forward] = []
    inside: list[tuple[Tensor | None, Routes]] = []

    @contextmanager
    def recording(model: PreTrainedModel, given: Tensor | None = None) -> Iterator[Routes]:
        with routed(model, given) as routes:
            inside.append((given, routes))
            yield routes
            inside.pop()

    def scored(model: PreTrainedModel, ids: Tensor, *args: float, **knobs: bool) -> Scores:
        forwards.append(Forward(torch.is_grad_enabled(), ids, *(inside or [(None, Routes())])[-1]))
        return score_tokens(model, ids, *args, **knobs)

    monkeypatch.setattr(scoring, "routed", recording)
    monkeypatch.setattr(trainer_module, "replayed", recording)
    for module in (trainer_module, scoring):
        monkeypatch.setattr(module, "score_tokens", scored)
    while True:
        forwards.clear()
        result = trainer.train_step()
        if result.metrics["train/samples"]:
            return forwards, result.episodes


@pytest.mark.sandbox
@pytest.mark.parametrize("replay", ["none", "R2", "R3"])
def test_forward_takes_the_configured_routes(
    replay: str, start: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = settings(tmp_path, start, {"replay": replay}, updates={"epochs": 2}, micro_batch_tokens=10**6)
    (old, *updates), episodes = watched(trainer_of(chosen), monkeypatch)
    assert not old.learns and len(updates) == 2 and all(u.learns for u in updates)
    assert (old.given is not None) == (replay == "R3")
    own = torch.stack(old.routes.own, 1)
    trajectories = [e.trajectories[0] for e in episodes]
    fed_of = {key(ids): len(ids) - 1 for ids in (ids_of(t)[0] for t in trajectories)}  # a sampled token may be 0, too
    expected = {
        "none": {},
        "R2": old.by_row(own.view(len(old.ids), -1, *own.shape[1:])),
        "R3": {key(ids_of(t)[0]): torch.from_numpy(t.routed_experts) for t in trajectories},
    }[replay]
    for forward in [*updates, *([old] if replay == "R3" else [])]:
        assert (forward.given is None) == (replay == "none")
        for row, given in forward.by_row(forward.given).items() if forward.given is not None else ():
            fed, given = fed_of[row], given.cpu()
            assert torch.equal(given[:fed].long(), expected[row].cpu()[:fed].long()) and (given[:fed] >= 0).all()
            assert (given[fed + 1 :] == -1).all()


def test_int4_rollout_shows_in_the_metrics(start: str, tmp_path: Path) -> None:
    trainer = trainer_of(settings(tmp_path, start, {}))
    while not (metrics := trainer.train_step().metrics)["train/samples"]:
        pass
    assert metrics["mismatch/gap_mean"] > 1e-3 and metrics["train/rollout_gap"] > 1e-3
    layers = [metrics[f"routing/agreement_layer_{i}"] for i in range(2)]
    assert metrics["routing/agreement"] == pytest.approx(np.mean(layers)) and 0.5 < min(layers) < 1
    share = metrics["routing/flipped_tokens"]
    gap = share * metrics["mismatch/gap_flipped"] + (1 - share) * metrics["mismatch/gap_same"]
    assert 0 < share < 1 and gap == pytest.approx(metrics["mismatch/gap_mean"])
    assert 0.5 < metrics["routing/entropy"] <= 1 <= metrics["routing/busiest_expert"] <= 4


def test_fresh_actor_samples_with_quantized_weights(tmp_path: Path) -> None:
    chosen = config(tmp_path, model=MOE, rollout=ROLLOUT | {"weights": "float8"})
    forward = fresh_actor(spec(chosen.env), chosen).engine.forward
    assert isinstance(forward, QuantizedForward) and forward.weights == "float8"


def test_float32_rollout_matches_training_routes(start: str, tmp_path: Path) -> None:
    exact = settings(tmp_path, start, {}).model_copy(update={"rollout": config(tmp_path).rollout})
    metrics = trainer_of(exact).train_step().metrics
    assert metrics["routing/agreement"] > 0.999 and metrics["mismatch/gap_max"] < 1e-3


@pytest.mark.parametrize(
    ("routing", "mode"),
    [
        pytest.param({"replay": "R2"}, "sync", marks=pytest.mark.sandbox),
        ({"replay": "R3", "min_agreement": 0.6}, "one_step_off"),
    ],
    ids=["R2-sync", "R3-one_step_off"],
)
def test_moe_run_resumes_bit_for_bit(
    routing: dict[str, object], mode: str, start: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = settings(tmp_path, start, routing, updates={"epochs": 2}, store_experts=True, **{"async": {"mode": mode}})
    whole, killed = whole_and_killed(chosen, monkeypatch)
    trained = [row for row in read_metrics(whole / "metrics.jsonl") if row.get("train/samples")]
    assert trained and all(float(str(row["mismatch/gap_mean"])) > 1e-3 for row in trained)

    resume_run(killed, Progress())
    assert_same_run(whole, killed)
    for pair in zip(*(read_episodes(run, experts=True) for run in (whole, killed)), strict=True):
        one, two = (episode.trajectories[0].routed_experts for episode in pair)
        assert pair[0].id == pair[1].id and one is not None and np.array_equal(one, two)


def test_dense_model_refuses_routing_settings(folder: Path, tmp_path: Path) -> None:
    algorithm = {"routing": {"replay": "R3"}}
    with pytest.raises(ValueError, match="tiny_moe"):
        config(tmp_path, algorithm=algorithm)
    dense = config(tmp_path, algorithm=algorithm, start_from=str(folder / "checkpoint"))  # the trainer finds it dense
    with pytest.raises(ConfigError, match="dense"):
        trainer_of(dense)


def fresh(tmp_path: Path, balance: float) -> tuple[TrainConfig, Actor, list[Trajectory]]:
    """A student whose routers prefer two experts of eight, and demonstrations."""
    phases = SMALL["warm_start"] | {"copy_steps": 5, "clone_steps": 60, "balance": balance}  # type: ignore[operator]
    chosen = config(tmp_path, model=MOE, warm_start=phases)
    actor = fresh_actor(spec(chosen.env), chosen)
    episodes = demonstrate(spec(chosen.env), 64, split="train", seed=0, renderer=actor.renderer)
    demonstrations = [e.trajectories[0] for e in episodes]
    for router in routers(actor.model):
        seen: list[Tensor] = []
        hook = router.register_forward_hook(lambda _m, inputs, _o, seen=seen: seen.append(inputs[0].reshape(-1, 32)))
        with torch.no_grad():
            score_tokens(actor.model, ids_of(demonstrations[0]))
            hook.remove()
            mean = seen[0].mean(0)
            router.weight[:2] += 5 * mean / mean.square().sum()  # 5 nats ahead
    return chosen, actor, demonstrations


def ids_of(trajectory: Trajectory) -> Tensor:
    return torch.from_numpy(trajectory.token_ids[None].astype(np.int64))


def balance_of(actor: Actor, demonstrations: list[Trajectory]) -> dict[str, float]:
    lengths = torch.tensor([len(t) for t in demonstrations])
    log, starts = RouteLog(int(lengths.sum())), lengths.cumsum(0) - lengths
    for row, trajectory in enumerate(demonstrations):
        with torch.no_grad(), routed(actor.model) as routes:
            score_tokens(actor.model, ids_of(trajectory))
        log.add(Grid.of(starts[[row]], lengths[[row]]), routes)
    return log.metrics()


@pytest.mark.sandbox
@pytest.mark.parametrize("balance", [0.02, 0.0])
def test_warm_start_keeps_routers_balanced(balance: float, tmp_path: Path) -> None:
    chosen, actor, demonstrations = fresh(tmp_path, balance)
    shown = demonstrations[:16]
    before = balance_of(actor, shown)
    assert before["routing/entropy"] < 0.5 and before["routing/busiest_expert"] > 3.9
    warm_start(actor.model, demonstrations, chosen.warm_start, tokenizer=actor.tokenizer, seed=0)
    after = balance_of(actor, shown)
    if balance:
        assert after["routing/entropy"] > 0.95 and after["routing/busiest_expert"] < 2.5
    else:  # it does not recover by itself
        assert after["routing/entropy"] < 0.75 and after["routing/busiest_expert"] > 3.5
