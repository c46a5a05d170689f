"""Adapters, frozen parameters and bfloat16 weights: what is trained, sampled, stored and resumed."""

from __future__ import annotations

import copy
import io
import json
import shutil
from contextlib import nullcontext
from pathlib import Path

import peft
import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from agent_rl.backends.embedded.check import check_run
from agent_rl.backends.embedded.config import TrainConfig
from agent_rl.backends.embedded.fine_tuning import (
    FreezeConfig,
    LoraConfig,
    checkpointed,
    freeze_parameters,
    linear_names,
    new_adapter,
)
from agent_rl.backends.embedded.optimizer import Optimizer, OptimizerConfig, OptimizerKind
from agent_rl.backends.embedded.run import resume_run, start_run
from agent_rl.backends.embedded.scoring import score_tokens
from agent_rl.engines.base import SamplingParams
from agent_rl.engines.embedded.adapters import load_adapter, merge, merged_parameters, without_adapters
from agent_rl.engines.embedded.engine import Engine
from agent_rl.engines.embedded.model_folder import in_format, load_model
from agent_rl.errors import CheckpointError, ConfigError
from agent_rl.view.progress import Progress
from tests.engines import VOCAB, assert_full, needs_gpu, play_all, ragged_plans, tiny
from tests.families import make
from tests.runs import assert_same_run, config, metrics_of, whole_and_killed

IDS = torch.randint(0, VOCAB, (3, 12), generator=torch.Generator().manual_seed(1))


def adapted(architecture: str = "qwen3", *, layers: int = 0, **lora: object):
    """A tiny model whose adapter has an effect."""
    model = tiny(architecture)
    new_adapter(model, LoraConfig.model_validate({"rank": 4} | lora), FreezeConfig(layers=layers), 0)
    generator = torch.Generator().manual_seed(2)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)
    return model.eval()


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=IDS).logits


@pytest.mark.parametrize("architecture", ["qwen3", "qwen3_moe"])
@pytest.mark.parametrize("dora", [False, True])
def test_engine_samples_from_weights_with_adapter(architecture: str, dora: bool) -> None:
    model = adapted(architecture, dora=dora)
    with_adapter, before = logits(model), {name: t.clone() for name, t in model.state_dict().items()}
    for record in play_all(Engine(model, slots=4, max_len=160), ragged_plans(4), SamplingParams()):
        assert_full(model, record)
    assert all(torch.equal(before[name], t) for name, t in model.state_dict().items())
    with without_adapters(model):
        own = logits(model)
    assert torch.equal(own, logits(tiny(architecture).eval())) and (own - with_adapter).abs().max() > 0.1
    read = dict(merged_parameters(model))
    merged = merge(model)
    assert {n: p.tolist() for n, p in merged.named_parameters()} == {n: p.tolist() for n, p in read.items()}
    torch.testing.assert_close(logits(merged), with_adapter, rtol=0, atol=2e-5)


def test_adapter_alone_is_trained_above_frozen_layers() -> None:
    model = adapted(layers=1)
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert trained and all(name.startswith("model.layers.1.") and "lora_" in name for name in trained)
    with pytest.raises(ConfigError, match=r"lora.targets=\('nope',\): the model's linear modules are down_proj, "):
        new_adapter(tiny(), LoraConfig(targets=("nope",)), FreezeConfig(), 0)


def test_adapter_target_that_no_module_has_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"none is called v_prj, attn\.q_proj"):
        new_adapter(tiny(), LoraConfig(targets=("q_proj", "v_prj", "attn.q_proj")), FreezeConfig(), 0)


def test_adapter_in_frozen_layers_alone_is_refused() -> None:
    model, freeze = adapted(), FreezeConfig(layers=2)
    with pytest.raises(ConfigError, match=r"freeze.layers=2, .*: nothing is left to train.*; freeze fewer"):
        freeze_parameters(model, freeze)


@pytest.mark.parametrize(("target", "part"), [("embed_tokens", "embeddings"), ("lm_head", "head")])
def test_adapter_of_embeddings_or_head_is_refused(target: str, part: str) -> None:
    with pytest.raises(ConfigError, match=rf"lora.targets=\('q_proj', '{target}'\) names the model's {part}"):
        new_adapter(make("llama"), LoraConfig(targets=("q_proj", target)), FreezeConfig(), 0)


def test_numbered_linear_modules_get_adapters() -> None:
    model = make("ctrl")
    assert linear_names(model) == ["Wk", "Wq", "Wv", "dense", "ffn.0", "ffn.2"]
    new_adapter(model, LoraConfig(rank=2), FreezeConfig(), 0)
    with pytest.raises(ConfigError, match=r"peft says: .* 'out_proj' is incompatible with Mamba"):
        new_adapter(make("mamba"), LoraConfig(rank=2), FreezeConfig(), 0)


@pytest.mark.parametrize("kind", ["deepseek_v3", "afmoe", "phimoe", "llama4_text"])
def test_adapters_pass_over_experts_and_routers(kind: str) -> None:
    model = make(kind)
    new_adapter(model, LoraConfig(rank=2), FreezeConfig(), 0)
    names = {name.rpartition(".lora_")[0].rpartition(".")[2] for name, p in model.named_parameters() if p.requires_grad}
    assert names >= {"o_proj"} and not names & {"router", "gate", "experts"}
    Engine(model, slots=1, max_len=16)
    with pytest.raises(ConfigError, match=r"names the model's experts|the model's linear modules are"):
        new_adapter(make("deepseek_v3"), LoraConfig(targets=("down_proj",)), FreezeConfig(), 0)


@pytest.mark.parametrize(("freeze", "trained"), [({"layers": 1}, True), ({"layers": 1, "embeddings": True}, False)])
def test_frozen_parameters_take_no_gradient(freeze: dict[str, object], trained: bool) -> None:
    model, whole = tiny(), tiny()
    freeze_parameters(model, FreezeConfig.model_validate(freeze))
    for one in (model, whole):
        score_tokens(one, IDS).logprobs.mean().backward()
    expected = dict(whole.named_parameters())
    for name, parameter in model.named_parameters():
        if name.startswith("model.layers.0."):
            assert parameter.grad is None
        elif name == "model.embed_tokens.weight":  # as the head
            assert (parameter.grad is not None) == trained
        else:
            assert torch.equal(parameter.grad, expected[name].grad)
    count = sum(1 for p in model.parameters() if p.requires_grad)
    assert len(Optimizer(model, OptimizerConfig()).parameters) == count
    with pytest.raises(ConfigError, match=r"freeze.layers=3: the model has 2"):
        freeze_parameters(tiny(), FreezeConfig(layers=3))


def test_frozen_layers_keep_positions_from_learning() -> None:
    model = make("gpt2")
    freeze_parameters(model, FreezeConfig(layers=1))
    score_tokens(model, IDS).logprobs.mean().backward()
    assert model.transformer.wpe.weight.grad is None and model.transformer.wte.weight.grad is not None  # as the head


def test_checkpointed_layers_drop_nothing() -> None:
    model = make("opt")
    for layer in model.model.decoder.layers:
        layer.dropout = 0.5
    expected = score_tokens(model, IDS).logprobs
    with checkpointed(model):
        found = score_tokens(model, IDS).logprobs
    assert torch.equal(found, expected)
    pairs = (torch.autograd.grad(x.mean(), [*model.parameters()], allow_unused=True) for x in (found, expected))
    assert all(a is b or torch.equal(a, b) for a, b in zip(*pairs, strict=True))


@pytest.mark.parametrize("architecture", ["qwen3", "qwen3_moe"])
def test_checkpointed_layers_keep_gradients_and_less(architecture: str) -> None:
    found = []
    for sparing in (False, True):
        model, kept = adapted(architecture, layers=1), list[int]()
        how = checkpointed(model) if sparing else nullcontext()
        with how, torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.numel()) or t, lambda t: t):  # noqa: B023
            scores = score_tokens(model, IDS)
        assert not any(module.training for module in model.modules())
        assert not model.get_input_embeddings()(IDS).requires_grad
        scores.logprobs.mean().backward()
        found.append((sum(kept), [p.grad for p in model.parameters() if p.requires_grad]))
    (whole, gradients), (spared, others) = found
    assert spared < 0.7 * whole and all(torch.equal(a, b) for a, b in zip(gradients, others, strict=True))


@pytest.mark.parametrize(
    ("kind", "device"),
    [
        ("adamw_8bit", "cpu"),
        *(
            pytest.param(kind, "cuda", marks=needs_gpu, id=f"{kind}-cuda")
            for kind in ("adamw_8bit", "paged_adamw", "paged_adamw_8bit")
        ),
    ],
)
def test_optimizer_of_each_kind_follows_adamw(kind: OptimizerKind, device: str) -> None:
    linear = torch.nn.utils.skip_init(torch.nn.Linear, 256, 512, bias=False, device=device)  # smaller ones aren't paged
    torch.nn.init.zeros_(linear.weight)
    models = [linear, copy.deepcopy(linear), copy.deepcopy(linear)]
    one, two, resumed = (
        Optimizer(model, OptimizerConfig(kind=kind, lr=1e-3))
        for model, kind in zip(models, ("adamw", kind, kind), strict=True)
    )
    inputs = torch.randn(5, 32, 256, generator=torch.Generator().manual_seed(3)).to(device)

    def step(number: int, optimizer: Optimizer) -> None:
        model = models[(one, two, resumed).index(optimizer)]
        optimizer.backward((model(inputs[number]) - inputs[number].repeat(1, 2)).square().mean())
        optimizer.step(1.0)

    for number in range(4):
        step(number, one)
        step(number, two)
    assert torch.cosine_similarity(models[0].weight.flatten(), models[1].weight.flatten(), dim=0) > 0.99
    saved = io.BytesIO()
    torch.save(two.state_dict(), saved)
    assert len(saved.getvalue()) < (4 if "8bit" in kind else 9) * linear.weight.numel()  # two float32 are 8 bytes
    saved.seek(0)
    resumed.load_state_dict(torch.load(saved, weights_only=True))
    models[2].load_state_dict(models[1].state_dict())
    step(4, two)
    step(4, resumed)
    assert torch.equal(models[1].weight, models[2].weight)


@pytest.mark.parametrize(("kind", "bits", "paged"), [("paged_adamw", 32, True), ("paged_adamw_8bit", 8, True)])
def test_optimizer_kind_says_bits_and_paging(kind: str, bits: int, paged: bool) -> None:
    model = torch.nn.utils.skip_init(torch.nn.Linear, 4, 4)
    ((part, lr),) = Optimizer(model, OptimizerConfig(kind=kind, lr=1e-3))._parts  # a paged one steps on a GPU only
    assert (part.args.optim_bits, part.is_paged, lr) == (bits, paged, 1e-3)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"optimizer": {"kind": "paged_adamw_8bit"}}, "on device=cpu set adamw_8bit"),
        ({"gradient_checkpointing": True, "model": {"architecture": "qwen3_moe"},
          "algorithm": {"routing": {"replay": "R3"}}}, "algorithm.routing.replay=none"),
        ({"lora": {}, "start_from": "X", "warm_start": {"episodes": "Y"}, "algorithm": {"kl": {"where": "loss"}}},
         "clone in a run of its own"),
    ],
)  # fmt: skip
def test_settings_that_cannot_be_served_are_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises((ConfigError, ValueError), match=message):
        check_run(TrainConfig.model_validate({"env": "calculator-v0"} | settings))


def test_missing_libraries_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for settings, name in (({"lora": {}}, "train"), ({"optimizer": {"kind": "adamw_8bit"}}, "bnb")):
        with pytest.raises(ConfigError, match=rf"pip install -e '.\[{name}\]'"):
            check_run(TrainConfig.model_validate({"env": "calculator-v0"} | settings))


@pytest.mark.parametrize("muon_lr", [0.0, 0.05])
def test_masters_take_steps_too_small_for_bfloat16(muon_lr: float) -> None:
    one, two = tiny(), in_format(tiny(), "bfloat16")
    for parameter, rounded in zip(one.parameters(), two.parameters(), strict=True):
        parameter.data = rounded.detach().float()
    start = [p.detach().clone() for p in one.parameters()]
    settings = OptimizerConfig(lr=1e-5, muon_lr=muon_lr and 1e-4)
    optimizers = Optimizer(one, settings), Optimizer(two, settings)
    for _ in range(3):
        for model, optimizer in zip((one, two), optimizers, strict=True):
            for row in IDS:
                optimizer.backward(-score_tokens(model, row[None]).logprobs.mean())
            optimizer.step(1.0)
    moved, of_masters = (
        torch.cat([(p.detach() - s).flatten() for p, s in zip(o.parameters, start, strict=True)]) for o in optimizers
    )
    assert torch.cosine_similarity(moved, of_masters, dim=0) > 0.8
    for weight, master in zip(two.parameters(), optimizers[1].parameters, strict=True):
        assert master.dtype == torch.float32 and torch.equal(weight, master.bfloat16())
    again = Optimizer(two, settings)
    again.load_state_dict(optimizers[1].state_dict())
    assert all(torch.equal(a, b) for a, b in zip(again.parameters, optimizers[1].parameters, strict=True))


@pytest.mark.parametrize(("dora", "parts"), [(False, ["Muon"]), (True, ["AdamW", "Muon"])])
def test_optimizer_leaves_adapters_of_matrices_to_muon(dora: bool, parts: list[str]) -> None:
    models = [adapted(dora=dora) for _ in range(2)]
    one, resumed = (Optimizer(model, OptimizerConfig(muon_lr=0.01)) for model in models)
    assert [type(part).__name__ for part, _ in one._parts] == parts
    assert one.lr == (2e-3 if dora else 0.01)

    def step(model: torch.nn.Module, optimizer: Optimizer) -> list[torch.Tensor]:
        optimizer.backward(-score_tokens(model, IDS).logprobs.mean())
        optimizer.step(1.0)
        return [p.detach().clone() for p in optimizer.parameters]

    before = step(models[0], one)
    models[1].load_state_dict(models[0].state_dict())
    resumed.load_state_dict(copy.deepcopy(one.state_dict()))
    after = zip(before, step(models[0], one), step(models[1], resumed), strict=True)
    assert all(torch.equal(b, c) and not torch.equal(a, b) for a, b, c in after)


@pytest.mark.parametrize(("kind", "count"), [("gpt2", 8), ("gpt_oss", 8)])
def test_muon_steps_neither_embeddings_nor_routers(kind: str, count: int) -> None:
    model = make(kind)
    muon = Optimizer(model, OptimizerConfig(muon_lr=0.01))._parts[-1][0].param_groups[0]["params"]
    names = {name for name, p in model.named_parameters() if any(p is own for own in muon)}
    assert len(names) == count and all("attn" in name or ".mlp.c_" in name for name in names)


def test_autocast_is_refused_beside_bfloat16_weights() -> None:
    with pytest.raises(ValueError, match=r"precision.autocast=bfloat16 changes nothing that dtype=bfloat16 does not"):
        TrainConfig.model_validate({"env": "calculator-v0", "dtype": "bfloat16", "precision": {"autocast": "bfloat16"}})


@pytest.fixture(scope="module")
def adapter_run(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A run with an adapter and a reference, and what a kill in its fourth step would have left."""
    settings = config(
        tmp_path_factory.mktemp("lora"),
        start_from=str(folder / "checkpoint"),
        lora={"rank": 4},
        optimizer={"lr": 0.02},
        algorithm={"entropy": 0.01, "kl": {"where": "loss", "coefficient": 0.1}},
        eval={"n": 4, "dev_n": 4, "every": 0},
    )
    with pytest.MonkeyPatch.context() as patched:
        return whole_and_killed(settings, patched)


def test_adapter_run_resumes_bit_for_bit(adapter_run: tuple[Path, Path]) -> None:
    whole, killed = adapter_run
    assert_same_run(whole, resume_run(killed, Progress()))
    gaps = [row["train/rollout_gap"] for row in metrics_of(whole) if "train/rollout_gap" in row]
    kls = [row["train/reference_kl"] for row in metrics_of(whole) if "train/reference_kl" in row]
    assert gaps and max(gaps) < 1e-5 and abs(kls[0]) < 1e-6 < kls[-1]  # the reference is the start
    assert not (whole / "reference").exists()


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft 0.21 asks so
def test_adapter_checkpoint_loads_with_peft(adapter_run: tuple[Path, Path], folder: Path) -> None:
    checkpoint = adapter_run[0] / "checkpoint"
    assert not (checkpoint / "model.safetensors").exists()
    base = AutoModelForCausalLM.from_pretrained(folder / "checkpoint", dtype=torch.float32)
    ours, _ = load_model(checkpoint)
    torch.testing.assert_close(
        logits(ours), logits(PeftModel.from_pretrained(base, str(checkpoint)).eval()), rtol=0, atol=1e-5
    )


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft 0.21 asks so
@pytest.mark.parametrize(
    ("what", "name"), [("modules_to_save", "lm_head"), ("target_parameters", "mlp.experts.gate_up_proj")]
)
def test_adapter_of_more_than_linear_modules_is_refused(what: str, name: str, tmp_path: Path) -> None:
    settings = peft.LoraConfig(target_modules=["q_proj"], **{what: [name]}, task_type="CAUSAL_LM")
    model = tiny("qwen3_moe")
    model.config.tie_word_embeddings = False  # peft warns of these
    peft.get_peft_model(model, settings).save_pretrained(str(tmp_path))
    with pytest.raises(CheckpointError, match=rf"{what}=\['{name}'\]: merge it into its model first"):
        load_adapter(tiny("qwen3_moe"), tmp_path)


def test_run_from_adapter_keeps_its_base(adapter_run: tuple[Path, Path], tmp_path: Path) -> None:
    changes = {"steps": 1, "eval": {"n": 4, "dev_n": 4, "every": 0}, "lora": {"rank": 2}}
    run = start_run(config(tmp_path, start_from=str(adapter_run[0] / "checkpoint"), **changes), Progress())
    torch.testing.assert_close(
        logits(load_model(run / "base")[0]), logits(load_model(adapter_run[0] / "checkpoint")[0]), rtol=0, atol=1e-5
    )
    moved = shutil.move(run, tmp_path / "moved")
    load_model(moved / "checkpoint")
    shutil.rmtree(moved / "base")
    with pytest.raises(CheckpointError, match="which is gone: put that model back"):
        load_model(moved / "checkpoint")
    (moved / "checkpoint" / "adapter_config.json").write_text(json.dumps({}))
    with pytest.raises(CheckpointError, match="it names no base_model_name_or_path"):
        load_model(moved / "checkpoint")


def test_run_from_adapter_trains_all_weights(adapter_run: tuple[Path, Path], tmp_path: Path) -> None:
    warm = {"clone_steps": 1, "demonstrations": 8, "batch": 8}
    changes = {"steps": 0, "eval": {"n": 4, "dev_n": 4, "every": 0}, "warm_start": warm}
    start = adapter_run[0] / "checkpoint"
    run = start_run(config(tmp_path, start_from=str(start), **changes), Progress())
    before, after = (load_model(of)[0].state_dict() for of in (start, run / "checkpoint"))
    assert before and not any(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.sandbox
@pytest.mark.parametrize(
    "changes",
    [
        {"dtype": "bfloat16"},
        {"dtype": "bfloat16", "lora": {"rank": 4, "dora": True}, "freeze": {"layers": 1}},
        {"freeze": {"layers": 1, "embeddings": True}, "optimizer": {"lr": 1e-3, "muon_lr": 0.01}},
    ],
)
def test_fresh_run_resumes_bit_for_bit(
    changes: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    algorithm = {"entropy": 0.01, "kl": {"where": "loss", "coefficient": 0.1}}
    whole, killed = whole_and_killed(config(tmp_path, algorithm=algorithm, **changes), monkeypatch)
    assert_same_run(whole, resume_run(killed, Progress()))
    gaps = [row["train/rollout_gap"] for row in metrics_of(whole) if "train/rollout_gap" in row]
    assert gaps and max(gaps) < (0.1 if "dtype" in changes else 1e-5)
