"""agent_rl.engines.embedded.quantization: weights of low precision, and engines that sample with them."""

import copy

import pytest
import torch
from transformers import PreTrainedModel

from agent_rl.engines.base import SamplingParams
from agent_rl.engines.embedded.engine import Engine
from agent_rl.engines.embedded.quantization import forward_in, round_weights, to_bfloat16, to_float8, to_int4
from agent_rl.errors import ConfigError
from tests.engines import full_logprobs, play_all, ragged_plans, tiny
from tests.families import make

WEIGHT = torch.randn(3, 16, 256, generator=torch.Generator().manual_seed(0)) * torch.logspace(-3, 3, 16)[:, None]


def test_bfloat16_keeps_eight_bits() -> None:
    assert torch.equal(to_bfloat16(WEIGHT), WEIGHT.bfloat16().float())
    # between 1 and 2 the steps are 2^-7; a tie goes to the even one
    assert to_bfloat16(torch.tensor([1 + 2**-7, 1 + 2**-8, 1 + 3 * 2**-8])).tolist() == [1 + 2**-7, 1, 1 + 2**-6]


def test_float8_is_e4m3_scaled_by_output_channel() -> None:
    row = torch.tensor([[448.0, 17.0, 19.0, -300.0, 2**-9, 0.0]])  # steps of 2 from 16, of 32 from 256, 2^-9 from 0
    assert to_float8(row).tolist() == [[448.0, 16.0, 20.0, -288.0, 2**-9, 0.0]]  # ties to even
    assert torch.equal(to_float8(row * 2**-5), to_float8(row) * 2**-5)  # its own scale for every row
    two = torch.cat([row, row * 2**10])
    assert torch.equal(to_float8(two), torch.cat([to_float8(row), to_float8(row) * 2**10]))
    error = (to_float8(WEIGHT) - WEIGHT).abs()
    smallest = WEIGHT.abs().amax(-1, keepdim=True) / 448 * 2**-10  # half a step of the subnormal numbers
    assert (error <= torch.maximum(WEIGHT.abs() * 2**-4 * 1.001, smallest)).all() and error.max() > 0


def test_int4_has_fifteen_levels_per_group() -> None:
    got = to_int4(WEIGHT)
    for group, original in zip(got.view(-1, 128), WEIGHT.view(-1, 128), strict=True):
        step = original.abs().max() / 7
        levels = (group / step).round()
        assert 8 < len(group.unique()) <= 15 and levels.abs().max() == 7
        assert torch.allclose(group, levels * step)
        assert (group - original).abs().max() <= step / 2 * 1.001
    row = torch.tensor([[7.0, 1.4, 1.6, -7.0, -0.4, 3.5]])  # 6 inputs: one group
    assert to_int4(row).tolist() == [[7.0, 1.0, 2.0, -7.0, 0.0, 4.0]]


@pytest.mark.parametrize("rounding", [to_bfloat16, to_float8, to_int4])
def test_rounding_is_idempotent_and_keeps_zeros(rounding) -> None:
    once = rounding(WEIGHT)
    assert torch.allclose(rounding(once), once, rtol=1e-6)
    assert torch.equal(rounding(torch.zeros(2, 128)), torch.zeros(2, 128))
    assert WEIGHT.dtype == once.dtype and WEIGHT.shape == once.shape


@pytest.mark.parametrize("architecture", ["qwen3", "qwen3_moe"])
def test_round_weights_skips_embeddings_norms_and_routers(architecture) -> None:
    model = tiny(architecture)
    target = copy.deepcopy(model)
    round_weights(model, target, "int4")
    kinds = set()
    for (name, before), after in zip(model.named_parameters(), target.parameters(), strict=True):
        projection = not any(part in name for part in ("embed_tokens", "norm", "lm_head", "mlp.gate.weight"))
        kinds.add(projection)
        assert torch.equal(after, to_int4(before) if projection else before.bfloat16().float()), name
    assert kinds == {True, False}


def test_int4_leaves_biases_in_bfloat16() -> None:
    model = make("qwen2")
    with torch.no_grad():
        bias = model.model.layers[0].self_attn.k_proj.bias.copy_(torch.linspace(-100, 100, 16))
    rounded = copy.deepcopy(model)
    round_weights(model, rounded, "int4")
    assert torch.equal(rounded.model.layers[0].self_attn.k_proj.bias, to_bfloat16(bias))


def test_projections_of_other_names_are_refused() -> None:
    model = make("gpt2")
    with pytest.raises(ConfigError, match=r"rollout.weights=int4 .*, and gpt2 computes with c_attn, c_fc, c_proj, too"):
        Engine(model, slots=1, max_len=16, forward=forward_in("int4"))
    Engine(model, slots=1, max_len=16, forward=forward_in("bfloat16"))


def played(model: PreTrainedModel, engine: Engine) -> float:
    """The largest gap between an engine's log-probabilities and a model's."""
    worst = 0.0
    for record in play_all(engine, ragged_plans(3), SamplingParams()):
        expected = full_logprobs(model, record.ids)[record.sampled]
        worst = max(worst, float((expected - torch.tensor(record.column("logprobs"))).abs().max()))
    return worst


@pytest.mark.parametrize("weights", ["bfloat16", "float8", "int4"])
def test_quantized_forward_rounds_a_copy_of_the_weights(weights) -> None:
    model = tiny("qwen3_moe")
    before = copy.deepcopy(model)
    engine = Engine(model, slots=4, max_len=160, forward=forward_in(weights))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before.parameters(), strict=True))
    rounded = copy.deepcopy(model)
    round_weights(model, rounded, weights)
    assert played(rounded, engine) < 1e-4 < played(model, engine)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter *= 1.1
    assert played(rounded, engine) < 1e-4  # not before a refresh
    engine.update_weights(1)
    round_weights(model, rounded, weights)
    assert played(rounded, engine) < 1e-4


def test_forward_in_refuses_other_formats() -> None:
    model = tiny()
    assert played(model, Engine(model, slots=4, max_len=160, forward=forward_in("float32"))) < 1e-4
    with pytest.raises(ConfigError, match="float32, bfloat16, float8, int4"):
        forward_in("int8")  # type: ignore[arg-type]
