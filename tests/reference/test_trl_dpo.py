"""agent_rl's DPO against TRL's DPOTrainer: the loss itself, and over a batch that is cut into single rows."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from batches import flat, scored, weighted

from agent_rl.algorithms import Algorithm, AlgorithmConfig, Denominators, collate
from agent_rl.algorithms.objectives.pairwise import dpo_loss, sequence_logprob
from agent_rl.algorithms.samples import Sample
from reference.conftest import required, rows, same, slope
from reference.trl_trainers import trainer

DPOTrainer = required("trl.trainer.dpo_trainer").DPOTrainer

seeds = pytest.mark.parametrize("seed", range(4))
FLOAT32 = 1e-6  # of our advantages


def sample(mask):
    """A row of which only the mask matters."""
    whole, zeros = np.zeros(len(mask), np.int32), np.zeros(len(mask), np.float32)
    return Sample(whole, mask.numpy(), zeros, zeros, whole, whole, whole, whole, 0)


def trl_dpo(mask, logprobs, reference):
    """DPOTrainer's loss, its gradient by `logprobs`, and its metrics, of rows as `pairs` has them."""
    theta = logprobs.clone().requires_grad_()
    zeros, mask = torch.zeros_like(theta), mask.long()
    chosen, rejected = (reference * mask).sum(-1).chunk(2)
    output = SimpleNamespace(log_probs=theta * mask, entropy=zeros, mean_logits=zeros, is_top1=zeros.bool())
    options = {"loss_types": ["sigmoid"], "loss_weights": [1.0], "beta": 0.3, "f_divergence_type": "reverse_kl"}
    options |= {"ld_alpha": None, "precompute_ref_logps": True, "use_weighting": False}
    made = trainer(DPOTrainer, _total_train_tokens=0, _tp_size=1, **options)
    shifted = torch.nn.functional.pad(mask, (1, 0))  # TRL's masks are of inputs, its log-probabilities of what follows
    inputs = {"input_ids": shifted, "attention_mask": shifted, "completion_mask": shifted}
    inputs |= {"ref_chosen_logps": chosen, "ref_rejected_logps": rejected}
    loss = made._compute_loss(lambda **_: output, inputs, False)
    return loss.detach(), slope(loss, theta), {name: values[0] for name, values in made._metrics["train"].items()}


def pairs(seed):
    """The masks, theta's and the reference's log-probabilities of ten pairs, all better rows before the worse ones."""
    better, worse = rows(seed + 100, empty=False), rows(seed, empty=False)
    return (torch.cat([getattr(better, name), getattr(worse, name)]) for name in ("mask", "theta", "reference"))


@seeds
def test_dpo_matches_trl(seed):
    mask, logprobs, reference = pairs(seed)
    loss, gradient, metrics = trl_dpo(mask, logprobs, reference)
    theta = logprobs.clone().requires_grad_()
    references = sequence_logprob(reference, mask).chunk(2)
    ours, margin = dpo_loss(*sequence_logprob(theta, mask).chunk(2), *references, beta=0.3)
    same(ours.mean(), loss)
    same(slope(ours.mean(), theta), gradient)
    assert margin.mean().item() == pytest.approx(metrics["rewards/margins"])


@seeds
def test_dpo_of_single_rows_matches_trl(seed):
    """The better rows and the worse ones of a pair in micro-batches of their own."""
    mask, logprobs, reference = pairs(seed)
    loss, gradient, metrics = trl_dpo(mask, logprobs, reference)
    parts = {"advantage": "best-against-worst", "aggregation": "token-sum"}
    algorithm = Algorithm(AlgorithmConfig(objective={"name": "dpo", "beta": 0.3}, **parts))
    count = len(mask) // 2
    batch = collate([sample(row) for row in mask])
    sides = mask * torch.tensor([1.0, -1.0]).repeat_interleave(count)[:, None]
    batch = scored(batch, reference_logprobs=reference)
    batch = weighted(batch, advantages=sides, group=torch.arange(count).repeat(2))
    prepared, ours = algorithm.prepare(flat(batch.rows, logprobs), batch)
    theta = logprobs.clone().requires_grad_()
    for row in range(2 * count):
        part, width = prepared.padded([row]).inputs, int(batch.rows.lengths[row])
        terms = algorithm.loss(theta[row : row + 1, :width], torch.zeros(1, width), part, Denominators(1, 1))
        terms.loss.backward()
    same(theta.grad, gradient, FLOAT32)
    assert ours["train/loss"] == pytest.approx(loss.item())
    for name in ("chosen", "rejected", "margins", "accuracies"):
        assert ours[f"rewards/{name}"] == pytest.approx(metrics[f"rewards/{name}"]), name
    for name in ("logps/chosen", "logps/rejected"):
        assert ours[name] == pytest.approx(metrics[name]), name
