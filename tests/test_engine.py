"""The engine against the training forward: the same tokens, log-probabilities and experts in any batch."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from agent_rl.core.trajectory import FinishReason
from agent_rl.engines.base import SamplingParams
from agent_rl.engines.embedded import engine as engine_module
from agent_rl.engines.embedded.engine import Engine
from agent_rl.engines.embedded.forward import Forward, FusedForward
from agent_rl.engines.embedded.graphs import GraphedForward
from agent_rl.engines.embedded.kv_cache import KVCache
from agent_rl.engines.embedded.module_forward import ModuleForward
from agent_rl.engines.embedded.pages import PAGE
from tests.engines import (
    DEVICE,
    NEVER,
    VOCAB,
    Record,
    assert_full,
    full_logprobs,
    play,
    play_all,
    play_alone,
    ragged_plans,
    run,
    shaken,
    steps,
    tiny,
)

every_forward = pytest.mark.parametrize(
    ("architecture", "forward"),
    [*((a, f) for a in ("qwen3", "qwen3_moe") for f in (FusedForward, ModuleForward)), ("qwen3", GraphedForward)],
)


# --- exactness -------------------------------------------------------------------------------------------------------


@every_forward
def test_engine_greedy_tokens_match_the_training_argmax(architecture: str, forward: Callable[..., Forward]) -> None:
    model = tiny(architecture)
    engine = Engine(model, slots=5, max_len=160, forward=forward)
    for record in play_all(engine, ragged_plans(12)):
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([record.ids], device=model.device)).logits[0]
        best = logits.argmax(-1)
        assert [record.ids[p] for p in record.sampled] == [int(best[p - 1]) for p in record.sampled]
        assert set(record.column("logprobs")) == {0.0}


@every_forward
def test_engine_logprobs_match_the_training_forward(architecture: str, forward: Callable[..., Forward]) -> None:
    model = tiny(architecture)
    engine = Engine(model, slots=5, max_len=160, forward=forward)
    for temperature in (0.7, 1.0):
        for record in play_all(engine, ragged_plans(12, seed=1), SamplingParams(temperature=temperature)):
            assert_full(model, record, temperature, atol=1e-5 if DEVICE == "cpu" else 1e-4)  # 1.3e-5 on an H100


@every_forward
def test_engine_reports_experts_of_every_fed_position(architecture: str, forward: Callable[..., Forward]) -> None:
    model = tiny(architecture)
    records = play_all(Engine(model, slots=3, max_len=160, forward=forward), ragged_plans(7))
    for record in records:
        if architecture == "qwen3":
            assert all(c.routed_experts is None for c in record.completions)
            continue
        experts = np.concatenate([c.routed_experts for c in record.completions])
        assert (experts.shape, experts.dtype) == ((len(record.ids) - 1, 2, 2), np.int8)
        np.testing.assert_array_equal(experts, router_choices(model, record.ids[:-1]))


def router_choices(model: PreTrainedModel, ids: Sequence[int]) -> np.ndarray:
    with torch.no_grad():
        logits = model(
            input_ids=torch.tensor([list(ids)], device=model.device), output_router_logits=True
        ).router_logits
    return torch.stack([layer.topk(2, -1).indices for layer in logits], 1).cpu().numpy()


def test_engine_runs_other_architectures_through_their_modules() -> None:
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, use_cache=False,
    )  # fmt: skip
    model = shaken(LlamaForCausalLM(config))
    engine = Engine(model, slots=3, max_len=160, forward=ModuleForward)
    for record in play_all(engine, ragged_plans(6), SamplingParams()):
        assert_full(model, record, rtol=1e-5)
    assert model.config._attn_implementation != "agent_rl_slots"


@pytest.mark.parametrize("forward", [FusedForward, GraphedForward])
def test_engine_slides_over_its_cache(forward: Callable[..., Forward]) -> None:
    config = Qwen3Config(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, use_sliding_window=True, sliding_window=8, max_window_layers=1,
    )  # fmt: skip
    model = shaken(Qwen3ForCausalLM(config))
    assert isinstance(Engine(model).forward, FusedForward)
    engine = Engine(model, slots=3, max_len=160, forward=forward)
    for record in play_all(engine, ragged_plans(4), SamplingParams()):
        assert_full(model, record)


@pytest.mark.skipif(DEVICE != "cpu", reason="a GPU has another kernel")
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_long_prompts_take_the_fused_kernel(kv_heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=kv_heads, max_position_embeddings=1024, use_cache=False,
    )  # fmt: skip
    model, begun, real = shaken(LlamaForCausalLM(config)), list[int](), KVCache._prefill_long
    monkeypatch.setattr(KVCache, "_prefill_long", lambda self, *args: begun.append(args[-1]) or real(self, *args))
    monkeypatch.setattr(engine_module, "PREFILL", 4 * PAGE)
    ids = np.random.default_rng(0).integers(0, VOCAB, 900).tolist()
    record = play_all(Engine(model, slots=2, max_len=1000), [[(ids[:700], 2), (ids[700:], 2)]], SamplingParams())[0]
    assert_full(model, record)
    assert {4 * PAGE, 8 * PAGE} <= {*begun}


@pytest.mark.parametrize("forward", [FusedForward, ModuleForward, GraphedForward])
def test_bfloat16_engine_stays_near_the_plain_forward(forward: Callable[..., Forward]) -> None:
    model = tiny().bfloat16()
    exact, own, plain = copy.deepcopy(model).float(), list[Tensor](), list[Tensor]()
    for record in play_all(Engine(model, slots=4, max_len=160, forward=forward), ragged_plans(8), SamplingParams()):
        expected = full_logprobs(exact, record.ids)[record.sampled]
        own.append(torch.tensor(record.column("logprobs")) - expected)
        plain.append(full_logprobs(model, record.ids)[record.sampled] - expected)
    engines, models = torch.cat(own).abs(), torch.cat(plain).abs()
    assert 1e-3 < engines.mean() < 1.3 * models.mean() and engines.max() < 2 * models.max()


# --- randomness ------------------------------------------------------------------------------------------------------


def test_engine_samples_do_not_depend_on_the_batch() -> None:
    model, plans = tiny(), ragged_plans(21)
    crowd = play_all(Engine(model, slots=16, max_len=160), plans, SamplingParams())
    for seed in (0, 7, 20):
        alone = play_alone(model, seed, plans[seed], SamplingParams())
        assert alone.ids == crowd[seed].ids
        np.testing.assert_allclose(alone.column("logprobs"), crowd[seed].column("logprobs"), atol=1e-5, rtol=0)


def test_engine_repeats_bits_for_the_same_order() -> None:
    engine = Engine(tiny("qwen3_moe"), slots=4, max_len=160)  # also: one engine serves several event loops
    first, second = (
        [(r.ids, r.column("logprobs")) for r in play_all(engine, ragged_plans(9), SamplingParams())] for _ in range(2)
    )
    assert first == second


def test_engine_draws_one_seeded_number_per_token() -> None:
    model = tiny()
    record = play_all(Engine(model, slots=1, max_len=160), [[([1, 2], 20), ([3], 30)]], SamplingParams())[0]
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([record.ids], device=model.device)).logits[0]
        cumulative = torch.softmax(logits.double(), -1).cumsum(-1)
    numbers = np.random.default_rng(0).random(50)
    for position, number in zip(record.sampled, numbers, strict=True):
        assert record.ids[position] == int((cumulative[position - 1] <= number).sum())


def test_engine_samples_depend_on_the_seed() -> None:
    plan = [([1, 2, 3], 20)]
    records = play_all(Engine(tiny(), slots=4, max_len=64), [plan, plan], SamplingParams())
    assert records[0].ids != records[1].ids


@pytest.mark.parametrize("k", [0, 1, 7])
def test_engine_resumes_aborted_samples_with_same_draws(k: int) -> None:
    engine = Engine(tiny(), slots=2, max_len=64)
    whole = run(lambda: play(engine, 5, [([1, 2, 3], 20)], SamplingParams()))

    async def interrupted() -> Record:
        record, sequence = Record(), engine.open(5)
        task = asyncio.create_task(sequence.sample([1, 2, 3], SamplingParams(max_tokens=20), NEVER))
        await asyncio.sleep(0)
        await steps(engine, k - engine.steps + started)
        sequence.abort()
        record.add([1, 2, 3], await task)
        rest = SamplingParams(max_tokens=20 - len(record.sampled))
        record.add([], await sequence.sample([], rest, NEVER))
        return record

    started = engine.steps
    record = run(interrupted)
    assert record.completions[0].finish_reason is FinishReason.ABORT
    assert len(record.completions[0].token_ids) == k
    assert record.ids == whole.ids


# --- new weights -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize("architecture", ["qwen3", "qwen3_moe"])
def test_engine_changes_weights_in_mid_reply(architecture: str, recompute: bool) -> None:
    model = tiny(architecture)
    engine = Engine(model, slots=2, max_len=96)
    sequence = engine.open(3)
    record, idle = Record(), engine.open(4)

    async def main() -> None:
        record.add([1, 2, 3], await sequence.sample([1, 2, 3], SamplingParams(max_tokens=5), NEVER))
        await idle.sample([1, 2, 3], SamplingParams(max_tokens=5), NEVER)
        task = asyncio.create_task(sequence.sample([4, 5], SamplingParams(max_tokens=20), NEVER))
        await steps(engine, 8)
        shaken(model, seed=1)
        engine.update_weights(7, recompute=recompute)
        record.add([4, 5], await task)
        record.add([6], await sequence.sample([6], SamplingParams(max_tokens=3), NEVER))

    run(main)
    assert record.column("policy_versions") == [0] * (5 + 8) + [7] * (12 + 3)
    later = record.sampled[5 + 8 :]
    gap = torch.tensor(record.column("logprobs")[5 + 8 :]) - full_logprobs(model, record.ids)[later]
    assert float(gap.abs().max()) < 1e-5 if recompute else float(gap.abs().max()) > 0.01
    if architecture == "qwen3_moe":  # positions that were fed twice are reported once
        assert sum(len(c.routed_experts) for c in record.completions) == len(record.ids) - 1
