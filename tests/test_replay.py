"""Routes in the training forward: replay, recording, and the loss that keeps experts in balance."""

import copy
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from agent_rl.backends.embedded.config import ModelConfig
from agent_rl.backends.embedded.model import make_model
from agent_rl.backends.embedded.scoring import score_tokens
from agent_rl.engines.base import SamplingParams
from agent_rl.engines.embedded.engine import Engine
from agent_rl.errors import ConfigError
from agent_rl.grid import Grid
from agent_rl.moe.balance import RouteLog, balance_loss
from agent_rl.moe.routes import Routes, routed, routers
from tests.engines import TINY, VOCAB, Record, play_all, ragged_plans, shaken, tiny

IDS = torch.randint(0, VOCAB, (3, 12), generator=torch.Generator().manual_seed(4))
FED = 11
"""The last token is not fed."""


def own_routes(model: PreTrainedModel) -> Tensor:
    """`[3, 12, layers, top_k]`; -1 for the last token."""
    log, lengths = RouteLog(36), torch.tensor([12, 12, 12])
    with torch.no_grad(), routed(model) as routes:
        score_tokens(model, IDS)
    log.add(Grid.of(torch.tensor([0, 12, 24]), lengths), routes)
    assert log.own is not None
    own = log.own.view(3, 12, *log.own.shape[1:])
    assert (own[:, -1] == -1).all() and (own[:, :FED] >= 0).all()
    return own


def other_routes(model: PreTrainedModel) -> Tensor:
    """Routes that the model takes nowhere, with distinct experts."""
    own = own_routes(model)
    return torch.where(own >= 0, (own + 1) % 4, own)


def gradients(model: PreTrainedModel, given: Tensor | None) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    with routed(model, given):
        logprobs = score_tokens(model, IDS).logprobs
    (logprobs * torch.linspace(-1, 1, 12)).sum().backward()
    return logprobs.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("normalise", [True, False])
def test_replaying_own_routes_is_exact(normalise: bool) -> None:
    model = tiny("qwen3_moe")
    for router in routers(model):
        router.norm_topk_prob = normalise
    plain, expected = gradients(model, None)
    for given in (own_routes(model), own_routes(model).flip(-1), torch.full((3, 12, 2, 2), -1)):
        replayed, got = gradients(model, given)
        assert torch.allclose(plain, replayed, atol=1e-6) and plain.abs().max() > 1
        assert expected.keys() == got.keys()
        assert all(torch.allclose(expected[n], got[n], atol=1e-5) for n in got)
    same, got = gradients(model, own_routes(model))
    assert torch.equal(plain, same) and all(torch.equal(expected[n], got[n]) for n in got)


def dense_mixture(block: torch.nn.Module, h: Tensor, chosen: Tensor, normalise: bool) -> Tensor:
    """Return the output of a mixture with all experts computed, and gates of 0 for unchosen ones."""
    probabilities = F.linear(h, block.gate.weight).softmax(-1)
    mask = torch.zeros_like(probabilities).scatter(-1, chosen, 1.0)
    gates = probabilities * mask
    if normalise:
        gates = gates / gates.sum(-1, keepdim=True)
    outputs = []
    for gate_up, down in zip(block.experts.gate_up_proj, block.experts.down_proj, strict=True):
        gate, up = (h @ gate_up.T).chunk(2, -1)
        outputs.append((F.silu(gate) * up) @ down.T)
    return (torch.stack(outputs, -1) * gates[..., None, :]).sum(-1)


@pytest.mark.parametrize("normalise", [True, False])
def test_replayed_routes_match_a_dense_computation(normalise: bool) -> None:
    model = tiny("qwen3_moe")
    for router in routers(model):
        router.norm_topk_prob = normalise
    given, block = other_routes(model), model.model.layers[1].mlp
    seen: list[tuple[Tensor, Tensor]] = []
    hook = block.register_forward_hook(lambda _m, inputs, output: seen.append((inputs[0], output)))
    with routed(model, given):
        score_tokens(model, IDS)
    hook.remove()
    ((h, output),) = seen
    expected = dense_mixture(block, h, given[:, :FED, 1].long().to(h.device), normalise)
    assert torch.allclose(output, expected, atol=1e-5)
    weights = torch.linspace(-1, 1, output.numel(), device=output.device).view_as(output)
    for parameter in (block.gate.weight, block.experts.down_proj):  # the gates are the present router's
        one, two = (
            torch.autograd.grad((x * weights).sum(), parameter, retain_graph=True)[0] for x in (output, expected)
        )
        assert torch.allclose(one, two, atol=1e-4) and one.abs().max() > 1e-2


def test_replay_covers_whole_routes_only() -> None:
    model = tiny("qwen3_moe")
    given = other_routes(model)
    given[0, 3:] = -1  # the first row routes for itself from position 3 on
    given[1, 5, 1, 0] = -1  # half a route is none
    taken: list[Tensor] = []
    with torch.no_grad(), routed(model, given) as routes:
        hooks = [r.register_forward_hook(lambda _m, _i, out: taken.append(out[2])) for r in routers(model)]
        score_tokens(model, IDS)
    for hook in hooks:
        hook.remove()
    chosen, own = (torch.stack(x, 1).view(3, FED, 2, 2).cpu() for x in (taken, routes.own))
    free = (given[:, :FED] < 0).any(-1)
    assert torch.equal(chosen[~free].short(), given[:, :FED][~free])
    assert torch.equal(chosen[free], own[free])


def test_routes_reach_no_other_position() -> None:
    model = tiny("qwen3_moe")
    given = torch.full((3, 12, 2, 2), -1)
    given[1, 6] = other_routes(model)[1, 6]
    with torch.no_grad():
        plain = score_tokens(model, IDS).logprobs
        with routed(model, given):
            replayed = score_tokens(model, IDS).logprobs
    changed = (plain - replayed).abs() > 1e-6
    assert not changed[[0, 2]].any() and not changed[1, :7].any() and changed[1, 7]  # token 7 comes from position 6


def test_replay_leaves_no_hooks() -> None:
    model = tiny("qwen3_moe")
    plain, _ = gradients(model, None)
    with pytest.raises(RuntimeError, match="broken"), routed(model, other_routes(model)):
        raise RuntimeError("broken")
    assert not any(r._forward_hooks for r in routers(model))
    assert torch.equal(plain, gradients(model, None)[0])
    assert not torch.allclose(plain, gradients(model, other_routes(model))[0], atol=1e-2)


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        (torch.zeros(3, 12, 3, 2), r"\[layers, top_k\] are \[2, 2\]"),
        (torch.zeros(3, 12, 2), "top_k"),
        (torch.full((3, 12, 2, 2), 4), "expert 4 of 4"),
        (torch.zeros(3, 9, 2, 2), "33 that are fed"),
        (torch.zeros(2, 12, 2, 2), "33 that are fed"),
    ],
)
def test_replay_refuses_routes_of_wrong_shape(given: Tensor, problem: str) -> None:
    model = tiny("qwen3_moe")
    with pytest.raises(ConfigError, match=problem), routed(model, given.long()):
        score_tokens(model, IDS)
    assert not any(r._forward_hooks for r in routers(model))


def test_dense_model_has_no_routes() -> None:
    model = tiny()
    with routed(model) as routes:
        score_tokens(model, IDS)
    assert not routes.own
    with (
        pytest.raises(ConfigError, match="no router to give"),
        routed(model, torch.zeros(3, 12, 2, 2).long()),
    ):
        pass


def replayable(record: Record, layers: int = 2, top_k: int = 1) -> Tensor:
    routes = np.concatenate([c.routed_experts for c in record.completions if c.routed_experts is not None])
    assert len(routes) == len(record.ids) - 1  # every token but the last was fed once, the environment's too
    return torch.from_numpy(np.concatenate([routes, np.full((1, layers, top_k), -1)]))[None]


def test_replayed_rollout_routes_give_its_logprobs() -> None:
    """With one expert a token its gate is always 1, so the router decides nothing but routes."""
    shape = ModelConfig(architecture="qwen3_moe", **TINY | {"experts_per_token": 1})
    model = shaken(make_model(shape, VOCAB, seed=0))
    served = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for router in routers(served):
            router.weight += 0.2 * torch.randn(router.weight.shape, generator=generator)
    gaps, replayed_gaps = [], []
    for record in play_all(Engine(served, slots=4, max_len=160), ragged_plans(4), SamplingParams()):
        ids, mu = torch.tensor([record.ids]), torch.tensor(record.column("logprobs"))
        with torch.no_grad():
            plain = score_tokens(model, ids).logprobs[0, record.sampled]
            with routed(model, replayable(record)):
                replayed = score_tokens(model, ids).logprobs[0, record.sampled]
        gaps.append((plain - mu).abs().max())
        replayed_gaps.append((replayed - mu).abs().max())
    assert max(gaps) > 0.1 and max(replayed_gaps) < 1e-5


def test_route_log_skips_padding() -> None:
    # rows of 3, 1 and 2 tokens: rows 2 and 0 in one micro-batch, row 1 in another
    log, starts, lengths = RouteLog(6), torch.tensor([0, 3, 4]), torch.tensor([3, 1, 2])
    # one layer, four experts; certain of expert 0 at row 0, of expert 1 at row 2; position 2 of row 2 would be padding
    sure = 50.0 * torch.eye(4)
    log.add(
        Grid.of(starts[[2, 0]], lengths[[2, 0]]), Routes([sure[[1, 1, 0, 0]]], [torch.tensor([[1], [1], [0], [0]])])
    )
    log.add(Grid.of(starts[[1]], lengths[[1]]), Routes([sure[[2]]], [torch.tensor([[2]])]))
    assert log.own is not None
    assert log.own[..., 0, 0].tolist() == [0, 0, -1, 2, 1, 1]
    # mean distribution .4 .4 .2: five real positions
    entropy = -(2 * 0.4 * math.log(0.4) + 0.2 * math.log(0.2)) / math.log(4)
    assert log.metrics() == pytest.approx({"routing/entropy": entropy, "routing/busiest_expert": 0.4 * 4})
    assert RouteLog(2).metrics() == {}


def test_balance_loss_by_hand() -> None:
    """Two experts, one picked. P is (.7, .3) in the first layer, where expert 0 gets two of three positions."""
    first = torch.tensor([[0.9, 0.1], [0.8, 0.2], [0.4, 0.6], [0.01, 0.99]]).log()
    second = torch.tensor([[1.0, 1e-9]] * 4).log()  # all to one expert: 2
    real = torch.tensor([[True, True], [True, False]])
    routes = Routes([first, second])
    expected = (2 * (2 / 3 * 0.7 + 1 / 3 * 0.3) + 2) / 2
    assert float(balance_loss(routes, real, top_k=1)) == pytest.approx(expected)
    even = Routes([torch.zeros(4, 4), torch.tensor([[9.0, -9.0, 9.0, -9.0], [-9.0, 9.0, -9.0, 9.0]]).repeat(2, 1)])
    assert float(balance_loss(even, torch.ones(2, 2, dtype=torch.bool), top_k=2)) == pytest.approx(1)


def test_balance_loss_treats_layers_apart() -> None:
    one_sided = torch.tensor([[30.0, -30.0]] * 4)
    routes = Routes([one_sided, -one_sided])  # pooled, this would be balance
    assert float(balance_loss(routes, torch.ones(2, 2, dtype=torch.bool), top_k=1)) == pytest.approx(2)


def test_balance_loss_reaches_the_router() -> None:
    model = tiny("qwen3_moe")
    with routed(model) as routes:
        score_tokens(model, IDS)
    balance_loss(routes, torch.ones(3, FED, dtype=torch.bool), 2).backward()
    assert all(r.weight.grad is not None and r.weight.grad.norm() > 1e-4 for r in routers(model))


def test_routes_can_be_replayed_in_parts() -> None:
    """Routes follow their rows when a batch is cut into micro-batches."""
    model, given = tiny("qwen3_moe"), other_routes(tiny("qwen3_moe"))
    with torch.no_grad():
        with routed(model, given):
            whole = score_tokens(model, IDS).logprobs
        with routed(model, given[[2, 0]]):
            part = score_tokens(model, IDS[[2, 0]]).logprobs
    assert torch.allclose(whole[[2, 0]], part, atol=1e-6)
