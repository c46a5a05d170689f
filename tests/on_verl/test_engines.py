"""verl's own engines, without Ray, compute the same of a batch as the embedded backend."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed
from tensordict import TensorDict
from transformers import AutoModelForCausalLM
from verl.utils import tensordict_utils as tu
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.engine import EngineRegistry
from verl.workers.utils.padding import response_from_nested
from verl_cpu.settings import SETTINGS

from agent_rl.backends.embedded.config import ModelConfig
from agent_rl.backends.embedded.critic import Critic
from agent_rl.backends.embedded.model import make_model
from agent_rl.backends.embedded.optimizer import OptimizerConfig
from agent_rl.backends.embedded.scoring import score_tokens
from agent_rl.backends.verl.config.config_check import compose_verl
from agent_rl.backends.verl.config.settings import VerlConfig
from agent_rl.backends.verl.driver.canary import TOKENS, canary_rows
from agent_rl.backends.verl.driver.exchange import compute_weights
from agent_rl.backends.verl.driver.received import receive
from agent_rl.backends.verl.worker.loss import loss_function, value_loss_function
from agent_rl.cli import main
from agent_rl.rendering import train_tokenizer
from on_verl.test_backends_agree import EPISODES, VOCABULARY, computed, embedded, in_verl, nested, preset
from on_verl.test_critic_agrees import embedded as embedded_critic

TOLERANCE = 1e-4  # relative: engines compute in float32 here, on GPUs in bfloat16
FLOAT32 = {"param_dtype": "fp32", "reduce_dtype": "fp32", "buffer_dtype": "fp32"}
EXACT = {f"+{where}.mixed_precision": FLOAT32 for where in ("actor_rollout_ref.actor.fsdp_config", "critic.fsdp")}
NO_TOKENIZER = {f"+{where}.model.load_tokenizer": False for where in ("actor_rollout_ref", "critic")}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A tiny model on disk; with a process group of one."""
    path = tmp_path_factory.mktemp("engines")
    tiny = ModelConfig(hidden=32, heads=2, kv_heads=2, head_dim=16, layers=2, intermediate=64)
    make_model(tiny, VOCABULARY, 0).save_pretrained(path / "model")
    torch.distributed.init_process_group("gloo", init_method=f"file://{path}/group", rank=0, world_size=1)
    yield path
    torch.distributed.destroy_process_group()


def engine(folder: Path, kind: str, **settings: object):
    """verl's engine of the policy or of a critic, from the settings of a run with a critic."""
    run = {"env": "calculator-v0", "start_from": str(folder / "model"), "verl": SETTINGS | EXACT | NO_TOKENIZER}
    run |= settings
    config = compose_verl(VerlConfig(**run, algorithm=preset("ppo").config, rollout={"context": 128}), folder)
    section, model = (
        (config.critic, config.critic.model)
        if kind == "value_model"
        else (config.actor_rollout_ref.actor, config.actor_rollout_ref.model)
    )
    settings, model_config = omega_conf_to_dataclass(section), omega_conf_to_dataclass(model)
    model_config.model_type = kind
    made = EngineRegistry.new(
        model_type=kind,
        backend=settings.engine.strategy,
        model_config=model_config,
        engine_config=settings.engine,
        optimizer_config=settings.optim,
        checkpoint_config=settings.checkpoint,
    )
    made.initialize()
    return made


def ready(data: TensorDict, **settings: object) -> TensorDict:
    """A batch as verl's workers hand it to an engine; micro-batches of at most 60 tokens."""
    data["loss_mask"] = data["response_mask"]
    data["position_ids"] = nested([range(len(ids)) for ids in data["input_ids"].unbind()])
    tu.assign_non_tensor(
        data, temperature=0.8, use_remove_padding=False, use_dynamic_bsz=True, max_token_len_per_gpu=60, **settings
    )
    return data


def gradient(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    full = {name: getattr(p.grad, "full_tensor", lambda p=p: p.grad)() for name, p in module.named_parameters()}
    return {name.removeprefix("model.").removeprefix("trunk."): value.double() for name, value in full.items()}


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    norm = torch.cat([x.flatten() for x in expected.values()]).norm()
    assert norm > 1e-3
    gaps = {name: float((found[name] - value).abs().max() / norm) for name, value in expected.items()}
    assert max(gaps.values()) < TOLERANCE, gaps


def test_verl_engine_scores_match_the_embedded_model(folder: Path) -> None:
    actor = engine(folder, "language_model")
    data, *_ = in_verl(EPISODES)
    with actor.eval_mode():
        found = actor.infer_batch(ready(data, calculate_entropy=True, calculate_sum_pi_squared=True))["model_output"]
    model = type(make_model(ModelConfig(hidden=32), VOCABULARY, 0)).from_pretrained(folder / "model")
    for row, (ids, prompt) in enumerate(zip(data["input_ids"].unbind(), data["prompts"].unbind(), strict=True)):
        scores = score_tokens(model, ids[None], 0.8)
        for theirs, ours in [
            ("log_probs", scores.logprobs),
            ("entropy", scores.entropy),
            ("sum_pi_squared", scores.sum_pi_squared),
        ]:
            of_response = response_from_nested(found[theirs], data["response_mask"]).unbind()[row]
            torch.testing.assert_close(of_response, ours[0, len(prompt) :], rtol=TOLERANCE, atol=1e-6)


@pytest.mark.parametrize("entropy", [0.0, 0.2])
def test_verl_engine_gradient_includes_the_entropy_bonus(entropy: float, folder: Path) -> None:
    algorithm = preset("grpo", f"entropy={entropy}")
    actor = engine(folder, "language_model")
    data, keys, extra, padding = in_verl(EPISODES)
    data.update(computed(algorithm, data))
    data.update(compute_weights(algorithm, receive(keys, extra, padding), data).sent)
    with actor.train_mode():
        output = actor.forward_backward_batch(
            ready(data, calculate_entropy=entropy > 0), loss_function(algorithm.config)
        )
        found = gradient(actor.module)  # cleared at the end of train_mode
    model = type(make_model(ModelConfig(hidden=32), VOCABULARY, 0)).from_pretrained(folder / "model")
    embedded(algorithm, model, data, temperature=0.8)[0].loss.backward()
    assert_same(found, gradient(model))
    assert ("agent_rl/entropy" in output["metrics"]) == (entropy > 0)


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")
def test_verl_critic_learns_like_the_embedded_one(folder: Path) -> None:
    worker, algorithm = engine(folder, "value_model"), preset("ppo")
    head = worker.module.score
    assert all(float(p.full_tensor().detach().abs().max()) < 1e-5 for p in head.parameters())
    model = type(make_model(ModelConfig(hidden=32), VOCABULARY, 0)).from_pretrained(folder / "model")
    critic = Critic(model, algorithm, OptimizerConfig())
    torch.nn.init.normal_(critic.head.weight, std=0.1, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        head.weight.to_local().copy_(critic.head.weight)

    data, keys, extra, padding = in_verl(EPISODES)
    data["old_log_probs"] = data["rollout_log_probs"]
    with worker.eval_mode():
        values = worker.infer_batch(ready(data))["model_output"]["values"]
    data["values"] = response_from_nested(values, data["response_mask"])
    data.update(compute_weights(algorithm, receive(keys, extra, padding), data).sent)
    with worker.train_mode():
        output = worker.forward_backward_batch(ready(data), value_loss_function(algorithm.config))
        found = {name.replace("score.", "head."): value for name, value in gradient(worker.module).items()}
    batch, loss = embedded_critic(critic)
    critic.zero_grad()
    loss.backward()
    assert sum(output["loss"]) == pytest.approx(loss.item(), rel=TOLERANCE)
    assert_same(found, gradient(critic))
    assert int(batch.critic.valued.sum()) == int(data["agent_rl_whole"][0, 2])


def test_verl_engine_scores_the_canary_like_the_model(folder: Path) -> None:
    ids = np.random.default_rng(0).integers(0, VOCABULARY, TOKENS + 1).tolist()
    data = canary_rows(ids, 1)
    tu.assign_non_tensor(data, use_remove_padding=False)  # the worker's default; micro-batches are the canary's
    actor = engine(folder, "language_model")
    with actor.eval_mode():
        logprobs = actor.infer_batch(data)["model_output"]["log_probs"]
    (found,) = response_from_nested(logprobs, data["response_mask"]).unbind()
    model = type(make_model(ModelConfig(hidden=32), VOCABULARY, 0)).from_pretrained(folder / "model")
    with torch.no_grad():
        expected = score_tokens(model, torch.tensor([ids])).logprobs[0, 1:]
    torch.testing.assert_close(found, expected, rtol=TOLERANCE, atol=1e-6)


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")
def test_verl_adapter_exports_what_was_trained_and_sent(folder: Path, tmp_path: Path) -> None:
    """The checkpoint of an adapter after an update, merged, scores as verl's engine; servers get the same."""
    lora = {"lora": {"rank": 4, "alpha": 8}, "lr": 1e-2}
    algorithm, actor = preset("rft", "filters=[]"), engine(folder, "language_model", **lora)
    data, keys, extra, padding = in_verl(EPISODES)
    data.update(computed(algorithm, data))
    data.update(compute_weights(algorithm, receive(keys, extra, padding), data).sent)
    with actor.train_mode():
        actor.forward_backward_batch(ready(data, calculate_entropy=False), loss_function(algorithm.config))
        actor.optimizer_step()
    with actor.eval_mode():
        found = actor.infer_batch(ready(data))["model_output"]["log_probs"]
    actor.save_checkpoint(str(tmp_path / "actor"), None, 1)
    train_tokenizer([]).save_pretrained(tmp_path / "actor" / "huggingface")
    assert main(["export", str(tmp_path), str(tmp_path / "model"), "--merge"]) == 0
    start, merged = (AutoModelForCausalLM.from_pretrained(f) for f in (folder / "model", tmp_path / "model"))
    apart = []
    for row, (ids, prompt) in enumerate(zip(data["input_ids"].unbind(), data["prompts"].unbind(), strict=True)):
        of_response = response_from_nested(found, data["response_mask"]).unbind()[row]
        with torch.no_grad():
            before, after = (
                score_tokens(model, ids[None], 0.8).logprobs[0, len(prompt) :] for model in (start, merged)
            )
        torch.testing.assert_close(of_response, after, rtol=TOLERANCE, atol=1e-5)
        apart.append(float((before - after).abs().max()))
    assert max(apart) > 0.02

    parameters, config = actor.get_per_tensor_param()
    total, sent = merged.state_dict(), dict(parameters)
    assert config is None  # no adapter, but its sum with the model, in bfloat16
    assert all(torch.equal(sent[name], x.bfloat16()) for name, x in total.items() if name != "lm_head.weight")  # tied
