"""Shared prompts: the scores and gradients of rows whose prompts are computed once are those of whole rows."""

from __future__ import annotations

from contextlib import nullcontext

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM, PreTrainedModel

from agent_rl.algorithms import Rows, collate
from agent_rl.algorithms.samples import Sample
from agent_rl.backends.embedded import prompts
from agent_rl.backends.embedded.fine_tuning import enable_checkpointing
from agent_rl.backends.embedded.precision import PrecisionConfig
from agent_rl.backends.embedded.prompts import cut_groups, is_exact, sharing
from agent_rl.backends.embedded.scoring import score_rows, score_tokens
from tests.engines import DEVICE, VOCAB, shaken, tiny

SMALL = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256,
}  # fmt: skip
GROUP = torch.tensor([0, 0, 0, 1, 1, 2, 2])
PROMPTS = (9, 4, 14)


def rows_of_groups(common: int = 0) -> Rows:
    """Rows of 18 to 34 tokens that begin with the prompt of their group; the last group's agree in nothing.

    The first two of a group have as many more tokens in `common`, some of them sampled.
    """
    random, prompts, samples = np.random.default_rng(0), {}, []
    for number in GROUP.tolist():
        prompt = prompts.setdefault(number, random.integers(0, VOCAB, PROMPTS[number]))
        own = random.integers(0, VOCAB, random.integers(14, 20))
        before = samples[-1].token_ids[len(prompt) :] if common and len(samples) in (1, 4) else own
        own[:common] = before[:common]
        ids = np.concatenate([prompt if number < 2 else random.permutation(VOCAB)[: len(prompt)], own])
        mask = np.concatenate([np.zeros(len(prompt), bool), random.random(len(own)) < 0.6])
        mask[[len(prompt), -1]] = True
        nothing = np.zeros(len(ids), np.int32)
        samples.append(
            Sample(ids, mask, nothing * 0.0, nothing * 0.0, nothing, nothing, nothing, nothing, len(samples))
        )
    return collate(samples)


def llama() -> PreTrainedModel:
    torch.manual_seed(0)
    return shaken(LlamaForCausalLM(LlamaConfig(**SMALL))).to(DEVICE)


def trained(
    model: PreTrainedModel, rows: Rows, budget: int, *, share: bool, cuts: list[list[int]] | None = None
) -> tuple[Tensor, Tensor]:
    """The log-probabilities of a batch that is cut, and the gradients of a loss over all of it."""
    model.zero_grad()
    shape = rows.padded().token_ids.shape
    weights = torch.randn(shape, generator=torch.Generator().manual_seed(1)).double().to(DEVICE)
    whole = torch.zeros(shape, dtype=torch.float64)
    with sharing(model, rows, GROUP if share else torch.arange(len(rows)), PrecisionConfig()) as shared:
        assert (shared is not None) == share
        for cut in cuts or rows.cut_rows(budget):
            part = rows.padded(cut, model.device)
            prompt = shared.of(cut) if shared else None
            scores = score_tokens(model, part.token_ids, 0.8, wanted=part.loss_mask, prompt=prompt)
            width = part.token_ids.shape[1]
            (scores.logprobs * weights[cut, :width]).sum().backward()
            whole[cut, :width] = scores.logprobs.detach().double().cpu()
    return whole, torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


@pytest.mark.parametrize("make", [tiny, llama])
@pytest.mark.parametrize(("dtype", "error"), [(torch.float64, 1e-7), (torch.float32, 1e-6)], ids=str)
def test_shared_prompts_leave_scores_and_gradients_as_they_are(
    make: type[PreTrainedModel], dtype: torch.dtype, error: float
) -> None:
    model, rows = make().to(dtype), rows_of_groups()
    expected, gradient = trained(model, rows, 10**6, share=False)
    for budget in (1, 70, 10**6):
        found, same = trained(model, rows, budget, share=True)
        assert torch.allclose(found, expected, rtol=0, atol=20 * error)
        assert (same - gradient).norm() <= error * gradient.norm()


@pytest.mark.parametrize("frozen", [0, 1])
def test_large_models_prompts_run_again_for_equal_gradients(frozen: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model, rows, kept = llama().double(), rows_of_groups(), list[int]()
    for part in (model.model.embed_tokens, model.model.layers[0])[: 2 * frozen]:
        part.requires_grad_(False)
    expected, gradient = trained(model, rows, 70, share=False)
    for large in (10**9, 0):
        monkeypatch.setattr(prompts, "LARGE", large)
        held = list[Tensor]()
        with saved_tensors_hooks(lambda x, held=held: held.append(x) or x, lambda x: x):
            context = sharing(model, rows, GROUP, PrecisionConfig())
            context.__enter__()
        kept.append(len(held))
        found, same = trained(model, rows, 70, share=True)
        assert torch.allclose(found, expected, rtol=0, atol=2e-6)
        assert (same - gradient).norm() <= 1e-7 * gradient.norm()
    assert kept[1] < kept[0] / 10  # of all that the prompts computed


def test_shared_prompts_end_gradients_at_frozen_layers() -> None:
    model, rows = llama().double(), rows_of_groups()
    for part in (model.model.embed_tokens, model.model.layers[0]):
        part.requires_grad_(False)
    (expected, gradient), (found, same) = (trained(model, rows, 70, share=share) for share in (False, True))
    assert torch.allclose(found, expected, rtol=0, atol=2e-6) and len(same) < sum(p.numel() for p in model.parameters())
    assert (same - gradient).norm() <= 1e-7 * gradient.norm()


@pytest.mark.parametrize(("budget", "saved"), [(1, 0), (70, 15), (10**6, 15)])  # 2 x 6, and prompts' last
def test_common_tokens_behind_prompts_are_computed_once(budget: int, saved: int) -> None:
    model, rows, fed = llama().double(), rows_of_groups(common=6), list[int]()
    expected, gradient = trained(model, rows, 70, share=False)
    model.model.embed_tokens.register_forward_hook(lambda _, ids, __: fed.append(ids[0].numel()))
    with sharing(model, rows, GROUP, PrecisionConfig()) as shared:
        cuts = shared.cut_rows(budget)
        laid = [shared.of(cut) for cut in cuts]
    sizes = [prompt.token_ids.numel() for prompt in laid]
    assert sorted(row for cut in cuts for row in cut) == [*range(len(rows))]
    assert all(size <= budget or len(cut) == 1 for size, cut in zip(sizes, cuts, strict=True))
    fed.clear()
    found, same = trained(model, rows, budget, share=True, cuts=cuts)
    assert torch.allclose(found, expected, rtol=0, atol=2e-6) and (same - gradient).norm() <= 1e-7 * gradient.norm()
    assert fed[1:] == sizes  # the first one is the prompts
    assert sum(len(prompt.cell) - len(prompt.cell.unique()) for prompt in laid) == saved


def test_score_rows_equal_those_of_whole_rows() -> None:
    model, rows = tiny(), rows_of_groups(common=6)
    how = (["logprobs", "entropy"], 0.7, PrecisionConfig(), 70)
    alone, together = (score_rows(model, rows, *how, group) for group in (torch.arange(len(rows)), GROUP))
    assert all(torch.allclose(a, b, rtol=0, atol=1e-4) for a, b in zip(alone, together, strict=True))
    assert (alone[0] != 0).sum() == rows.loss_mask.sum()


def test_gradients_through_prompts_are_repeatable(monkeypatch: pytest.MonkeyPatch) -> None:
    on_gpu = list[bool]()
    monkeypatch.setattr(prompts, "repeatable", lambda where: nullcontext(on_gpu.append(where)))
    trained(llama(), rows_of_groups(), 200, share=True)
    assert on_gpu == [DEVICE.startswith("cuda")]  # once, at the end of the block


def test_sharing_computes_as_much_as_a_group_has_in_common() -> None:
    rows = rows_of_groups()
    with torch.no_grad(), sharing(tiny(), rows, GROUP, PrecisionConfig()) as shared:
        assert shared.lengths.tolist() == [8, 8, 8, 3, 3, 0, 0]  # the last token of a prompt predicts
        assert [tuple(leaf.shape) for leaf in shared.leaves] == [(3, 2, 8, 8)] * 4
    with sharing(tiny(), rows, torch.arange(7), PrecisionConfig()) as shared:
        assert shared is None


def test_models_that_read_prompts_otherwise_do_not_share() -> None:
    assert is_exact(tiny()) and is_exact(llama())
    assert not is_exact(tiny("qwen3_moe"))
    assert not is_exact(MistralForCausalLM(MistralConfig(sliding_window=8, **SMALL)))
    model = llama()
    enable_checkpointing(model)
    assert not is_exact(model)
    model = llama()
    model.config.rope_parameters = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    assert not is_exact(model)


def test_cut_groups_keeps_groups_whole() -> None:
    rows = rows_of_groups()
    assert cut_groups(tiny(), rows, GROUP, 10**6) == [[*range(7)]] == cut_groups(tiny("qwen3_moe"), rows, GROUP, 1)
    assert cut_groups(tiny(), rows, GROUP, 1) == [[0, 1, 2], [3, 4], [5, 6]]
    longest = int(rows.lengths[:5].max())
    assert cut_groups(tiny(), rows, GROUP, 2 * longest) == [[0, 1, 2, 3, 4], [5, 6]]
