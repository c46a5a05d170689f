"""Device names, and a GPU beside the CPU: the same tokens, scores and updates."""

import copy
import shutil
from pathlib import Path

import pytest
import torch
from torch import Tensor

import agent_rl as ar
from agent_rl.algorithms import Experience
from agent_rl.backends.embedded.actor import load_actor
from agent_rl.backends.embedded.checkpoint import find_checkpoint, restore
from agent_rl.backends.embedded.config import TrainConfig
from agent_rl.backends.embedded.optimizer import Optimizer, OptimizerConfig
from agent_rl.backends.embedded.run import resume_run, start_run
from agent_rl.backends.embedded.scoring import score_tokens
from agent_rl.backends.embedded.trainer import Trainer
from agent_rl.config import load_config
from agent_rl.core.episode import group_episodes
from agent_rl.engines.base import SamplingParams
from agent_rl.engines.embedded.device import device_of, float64_device
from agent_rl.engines.embedded.engine import Engine
from agent_rl.engines.embedded.forward import FusedForward
from agent_rl.engines.embedded.module_forward import ModuleForward, make_forward
from agent_rl.engines.embedded.quantization import forward_in
from agent_rl.errors import ConfigError
from agent_rl.gym.registry import spec
from agent_rl.policy.checkpoint import checkpoint_policy as policy_of
from agent_rl.store.episodes import read_episodes
from agent_rl.view.progress import Progress
from tests.batches import weighted
from tests.engines import GREEDY, Architecture, needs_gpu, play_all, ragged_plans, tiny
from tests.runs import SMALL, assert_same_run, config, untimed, whole_and_killed

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


CRITIC = {"critic": {"where": "separate"}, "advantage": "gae"}

# Names


@pytest.mark.parametrize(
    ("name", "gpus", "expected"),
    [("cpu", 2, "cpu"), ("cuda", 2, "cuda:0"), ("cuda:1", 2, "cuda:1"), ("auto", 2, "cuda:0"), ("auto", 0, "cpu")],
)
def test_device_has_name(monkeypatch: pytest.MonkeyPatch, name: str, gpus: int, expected: str) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    assert device_of(name) == torch.device(expected)


@pytest.mark.parametrize(
    ("name", "gpus", "expected"), [("auto", 0, "mps"), ("mps", 0, "mps"), ("auto", 1, "cuda:0"), ("cpu", 0, "cpu")]
)
def test_apples_device_comes_after_cuda(monkeypatch: pytest.MonkeyPatch, name: str, gpus: int, expected: str) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    assert device_of(name) == torch.device(expected)
    assert float64_device(torch.device(expected)).type == expected.replace("mps", "cpu").partition(":")[0]
    with pytest.raises(ConfigError, match=r"device=tpu: this machine has cpu, .*mps; set one"):
        device_of("tpu")


class Elsewhere:
    """A model whose device is said to be another one."""

    device = torch.device("mps")

    def __init__(self, model: object) -> None:
        self._model = model

    def __getattr__(self, name: str) -> object:
        return getattr(self._model, name)


@pytest.mark.parametrize("changes", [{"algorithm": CRITIC}, {"precision": {"autocast": "float16"}}])
def test_trainer_refuses_what_mps_lacks(talker: Path, tmp_path: Path, changes: dict[str, object]) -> None:
    actor = load_actor(talker)
    object.__setattr__(actor, "model", Elsewhere(actor.model))
    with pytest.raises(ConfigError, match=r"device=mps has no float64.*: set device=cpu"):
        Trainer(spec("calculator-v0"), actor, config(tmp_path, **changes))
    with pytest.raises(ConfigError, match="device=mps is one GPU"):
        load_config("backend/embedded", TrainConfig, settings={"device": "mps", "processes": 2, "env": "nim-v0"})


@pytest.mark.parametrize("name", ["cuda:2", "mps", "tpu"])
def test_absent_device_names_those_present(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ConfigError, match=f"device={name}: this machine has cpu, cuda:0, cuda:1; set one"):
        device_of(name)


def test_rows_move_to_device(folder: Path) -> None:
    rows = Experience.of(group_episodes(list(read_episodes(folder))[:4])).rows
    batch, meta = weighted(rows), torch.device("meta")
    found = batch.padded([1, 0], meta)
    for part in (found, found.scored, found.rows):
        assert {x.device for name in part.__slots__ if isinstance(x := getattr(part, name), Tensor)} == {meta}
    assert batch.rows.token_ids.device == CPU and len(found) == 2
    assert {part.rows.token_ids.device for part in batch.cut(100, meta)} == {meta}


def test_absent_device_is_refused_before_run(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    again = shutil.copytree(folder, tmp_path / "run")
    stored = (again / "config.yaml").read_text()
    for call in (
        lambda: ar.train(progress=False, **SMALL | {"device": "cuda", "runs_dir": str(tmp_path / "runs")}),
        lambda: ar.train(resume=again, device="cuda", progress=False),
        lambda: ar.load(again / "checkpoint", device="cuda"),
        policy_of(str(again / "checkpoint"), params=GREEDY, env=spec("calculator-v0"), device="cuda").__enter__,
    ):
        with pytest.raises(ConfigError, match=r"device=cuda: this machine has cpu; set one, or device=auto$"):
            call()
    assert not any((tmp_path / "runs").glob("*")) and (again / "config.yaml").read_text() == stored


def test_resumed_run_stores_its_device(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    again = shutil.copytree(folder, tmp_path / "run")
    assert ar.train(resume=again, device="auto", progress=False).config.device == "auto"


def test_backward_keeps_determinism_setting() -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    for before in (False, True):
        torch.use_deterministic_algorithms(before)
        Optimizer(torch.nn.ParameterList([weight]), OptimizerConfig()).backward(weight.sum())
        assert torch.are_deterministic_algorithms_enabled() == before
    torch.use_deterministic_algorithms(False)


# A GPU


MOE = SMALL["model"] | {"architecture": "qwen3_moe", "experts": 4, "expert_intermediate": 16}


def both(architecture: Architecture) -> tuple[torch.nn.Module, torch.nn.Module]:
    model = tiny(architecture).to(CPU)
    return model, copy.deepcopy(model).to(GPU)


@needs_gpu
@pytest.mark.parametrize("architecture", ["qwen3", "qwen3_moe"])
@pytest.mark.parametrize(
    "forward", [FusedForward, ModuleForward, make_forward, forward_in("float8"), forward_in("int4")]
)
def test_gpu_engine_samples_same_tokens(architecture: Architecture, forward) -> None:
    plans = ragged_plans(12)
    for params in (GREEDY, SamplingParams(temperature=0.7, top_k=20, top_p=0.9)):
        found = [
            play_all(Engine(model, slots=8, max_len=160, forward=forward), plans, params)
            for model in both(architecture)
        ]
        for one, two in zip(*found, strict=True):
            assert one.ids == two.ids
            assert one.column("logprobs") == pytest.approx(two.column("logprobs"), abs=1e-4)


@needs_gpu
@pytest.mark.parametrize("architecture", ["qwen3", "qwen3_moe"])
def test_gpu_scores_agree(architecture: Architecture) -> None:
    ids = torch.randint(0, 50, (16, 120), generator=torch.Generator().manual_seed(0))
    one, two = (score_tokens(m, ids.to(m.device), entropy_gradient=True) for m in both(architecture))
    for name in ("logprobs", "entropy", "sum_pi_squared"):
        torch.testing.assert_close(getattr(one, name), getattr(two, name).cpu(), atol=1e-4, rtol=1e-4)


PRESETS = sorted(p.stem for p in (Path(__file__).parent.parent / "configs" / "algorithm").glob("*.yaml"))


def state(trainer: Trainer) -> dict[str, Tensor]:
    return {name: weight.detach().cpu() for name, weight in trainer.actor.model.named_parameters()}


@needs_gpu
@pytest.mark.parametrize("preset", PRESETS)
def test_gpu_update_agrees(talker: Path, tmp_path: Path, preset: str) -> None:
    small = config(tmp_path).model_dump(by_alias=True, exclude_unset=True)
    trainers = [
        Trainer(
            spec("calculator-v0"),
            load_actor(talker, slots=8, context=256, device=device),
            load_config("backend/embedded", TrainConfig, settings=small | {"algorithm": preset, "device": device}),
            load_actor(talker, device=device).model,
        )
        for device in ("cpu", "cuda")
    ]
    batch = trainers[0]._next()
    found = []
    for trainer in trainers:
        x = batch.experience(trainer.algorithm)
        found.append(trainer.update(x) | trainer.update(x))
    one, two = found
    assert one.keys() == two.keys()
    for name, value in untimed(one).items():
        assert value == pytest.approx(two[name], rel=1e-2, abs=1e-3), name
    before = load_actor(talker, device="cpu").model.state_dict()
    for name, weight in state(trainers[0]).items():
        other = state(trainers[1])[name]
        moved = (weight - before[name]).norm()
        assert (weight - other).norm() <= 0.05 * moved + 1e-6, (name, float((weight - other).norm() / moved))


@needs_gpu
@pytest.mark.parametrize("changes", [{}, {"model": MOE}, {"algorithm": CRITIC}], ids=["grpo", "moe", "ppo"])
def test_gpu_run_repeats(tmp_path: Path, changes: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> None:
    settings = config(tmp_path / "one", device="cuda", **changes)
    whole, killed = whole_and_killed(settings, monkeypatch)
    resume_run(killed, Progress())
    assert_same_run(whole, killed)
    assert_same_run(whole, start_run(config(tmp_path / "two", device="cuda", **changes), Progress()))


@needs_gpu
@pytest.mark.parametrize(("first", "second"), [("cuda", "cpu"), ("cpu", "cuda")])
def test_run_resumes_on_other_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: str, second: str) -> None:
    settings = config(tmp_path, device=first, algorithm=CRITIC)
    _, killed = whole_and_killed(settings, monkeypatch)
    place, states = find_checkpoint(killed / "checkpoint"), []
    for device in (first, second):
        trainer = Trainer(spec("calculator-v0"), load_actor(place, device=device), settings)
        restore(place, trainer)
        assert {p.device.type for p in trainer.critic.parameters()} == {device}
        states.append(trainer.optimizer.state_dict())
    for one, two in zip(*(torch.utils._pytree.tree_leaves(s) for s in states), strict=True):
        assert torch.equal(one.cpu(), two.cpu()) if isinstance(one, Tensor) else one == two
    resume_run(killed, Progress(), device=second)
