"""Scoring: log-probabilities and entropies of a padded batch, with a gradient for training.

Logits are the largest thing in training: those of 4096 tokens and Qwen's vocabulary take 2.3 GiB, several times over.
Here they exist for some tokens at a time and are computed again for the gradient; a small vocabulary's fit at once and
are kept. By hand rather than through `torch.utils.checkpoint`, which took 1.3 times as long and more memory (measured).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import FunctionCtx
from transformers import PreTrainedModel

from agent_rl.algorithms import Rows
from agent_rl.backends.embedded.precision import PrecisionConfig
from agent_rl.backends.embedded.prompts import Prompt, micro_batches
from agent_rl.engines.embedded.parts import Head, head_of, states_of
from agent_rl.moe.balance import RouteLog
from agent_rl.moe.routes import routed


@dataclass(frozen=True, slots=True)
class Scores:
    """Of every token given those before it, or of some; the first column, which nothing predicts, is 0."""

    logprobs: Tensor
    """float32 `[B, T]`, in nats."""
    entropy: Tensor
    """float32 `[B, T]`, in nats, of the distribution that the token came from."""
    sum_pi_squared: Tensor
    """float32 `[B, T]`: the sum of that distribution's squared probabilities; without gradient."""
    states: Tensor
    """`[B, T - 1, hidden]`: the last states, of the tokens 0 to T - 2."""

    @property
    def hidden(self) -> Tensor:
        """`[B, T, hidden]`: the state that each token was predicted from, after the last norm; a value head reads it.

        Computed by every access.
        """
        return F.pad(self.states, (0, 0, 1, 0))


def score_tokens(
    model: PreTrainedModel,
    token_ids: Tensor,
    temperature: float = 1.0,
    *,
    wanted: Tensor | None = None,
    prompt: Prompt | None = None,
    entropy_gradient: bool = False,
    precision: PrecisionConfig = PrecisionConfig(),  # noqa: B008 - frozen
) -> Scores:
    """Score every token given those before it, int64 `[B, T]`, by a causal LM whose head is linear.

    Padding on the right needs no attention mask: a causal model's real tokens don't see it. A float64 model's scores
    are float64. Greedy sampling (temperature 0) scores like 1. With `entropy_gradient` the entropies have one, too.
    Where only some tokens are `wanted`, bool `[B, T]`, there are logits for these alone, and the others score 0. With
    the `prompt` of the rows only what comes after it runs through the model; nothing in it can be wanted.
    """
    with precision.region(token_ids.device):
        states = states_of(model, token_ids[:, :-1]) if prompt is None else prompt.states(model, token_ids)
    head = head_of(model)
    form, chunk = precision.head_format(head.weight), precision.tokens_at_a_time(head.weight.shape[0])
    how = _How(temperature or 1.0, entropy_gradient, form, chunk, head)
    chosen = token_ids[:, 1:]
    here = torch.ones_like(chosen, dtype=torch.bool) if wanted is None else wanted[:, 1:]
    scores = _Head.apply(states[here], head.weight, head.bias, chosen[here], how)  # type: ignore[no-untyped-call]
    logprobs, entropy, squares = (F.pad(x.new_zeros(here.shape).masked_scatter(here, x), (1, 0)) for x in scores)
    return Scores(logprobs, entropy, squares, states)


@torch.no_grad()
def score_rows(
    model: PreTrainedModel,
    rows: Rows,
    names: Sequence[str],
    temperature: float,
    precision: PrecisionConfig,
    token_budget: int,
    group: Tensor,
    *,
    given: Tensor | None = None,
    log: RouteLog | None = None,
) -> list[Tensor]:
    """Return some of a model's `Scores` of whole rows by their names, each float32 `[N]`; 0 outside the mask.

    They are scored without gradient in micro-batches of `token_budget` padded tokens, those of a `group`, int64 `[B]`,
    with what they have in common computed once. A mixture of experts takes the routes `given`, `[N, layers, top_k]`;
    `log` stores those that it would have taken.
    """
    whole = [torch.zeros_like(rows.rollout_logprobs) for _ in names]
    for indices, prompt in micro_batches(model, rows, group, precision, token_budget):
        part, grid = rows.padded(indices), rows.grid(torch.tensor(indices))
        with routed(model, None if given is None else grid.lay(given, -1)) as routes:
            ids, wanted = part.token_ids.to(model.device), part.loss_mask.to(model.device)  # mps has no float64
            scores = score_tokens(model, ids, temperature, wanted=wanted, prompt=prompt, precision=precision)
        if log is not None:
            log.add(grid, routes)
        for out, name in zip(whole, names, strict=True):
            grid.put(getattr(scores, name), out)
    return whole


@dataclass(frozen=True, slots=True)
class _How:
    """How the head computes."""

    temperature: float
    entropy_gradient: bool
    format: torch.dtype
    """Of the products; what follows is in float32, or float64 for float64 logits."""
    chunk: int
    """Tokens at a time."""
    head: Head
    """For what it does to the products."""

    def normalised(self, states: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | float]:
        """Return the log-softmax of some tokens, `[n, vocabulary]`, and the slope of their logits.

        `weight` is in `format` already.
        """
        logits = F.linear(states.to(self.format), weight, None if bias is None else bias.to(self.format))
        logits = self.head.shaped(logits.to(torch.promote_types(self.format, torch.float32)))
        scale, cap = self.head.scale, self.head.cap
        slope = scale if cap is None else (1 - (logits / cap).square()) * scale
        return torch.log_softmax(logits.div_(self.temperature), -1), slope


class _Context(FunctionCtx):
    """What the forward leaves for the backward."""

    how: _How
    saved_tensors: tuple[Tensor, ...]
    needs_input_grad: tuple[bool, ...]


class _Head(torch.autograd.Function):
    """(states, weight, bias, chosen ids) → log-probabilities, entropies and sums of squared probabilities, `[N]` each.

    With p the distribution at temperature T and H its entropy, d log p(chosen) / d logit_j = (1[j chosen] - p_j) / T
    and d H / d logit_j = -p_j (log p_j + H) / T.
    """

    @staticmethod
    def forward(
        ctx: _Context, states: Tensor, weight: Tensor, bias: Tensor | None, chosen: Tensor, how: _How
    ) -> tuple[Tensor, Tensor, Tensor]:
        logprobs, entropy, squares = states.new_empty(
            3, len(states), dtype=torch.promote_types(how.format, torch.float32)
        ).unbind()
        multiplier, kept = weight.to(how.format), list[Tensor]()
        for start in range(0, len(states), how.chunk):
            part = slice(start, start + how.chunk)
            log_p, slope = how.normalised(states[part], multiplier, bias)
            p = log_p.exp()
            logprobs[part] = log_p.gather(-1, chosen[part, None])[:, 0]
            entropy[part] = torch.linalg.vecdot(p, log_p).neg_()
            squares[part] = torch.linalg.vecdot(p, p)
            if len(states) <= how.chunk and any(ctx.needs_input_grad) and not isinstance(slope, Tensor):
                kept.append(log_p)
        ctx.how = how
        ctx.save_for_backward(states, weight, bias, chosen, entropy, *kept)  # type: ignore[arg-type]
        ctx.mark_non_differentiable(*([squares] if how.entropy_gradient else [entropy, squares]))
        return logprobs, entropy, squares

    @staticmethod
    def backward(ctx: _Context, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        how, of_logprobs, of_entropy = ctx.how, gradients[0][:, None], gradients[1][:, None]
        states, weight, bias, chosen, entropy, *kept = ctx.saved_tensors
        multiplier = weight.to(how.format)
        of_states = torch.empty_like(states)
        of_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        of_bias = torch.zeros_like(bias) if ctx.needs_input_grad[2] else None
        for start in range(0, len(states), how.chunk):
            part = slice(start, start + how.chunk)
            log_p, slope = (kept[0], how.head.scale) if kept else how.normalised(states[part], multiplier, bias)
            if how.entropy_gradient:
                factor = (log_p + entropy[part, None]).mul_(of_entropy[part]).add_(of_logprobs[part]).neg_()
                of_logits = log_p.exp().mul_(factor)
            else:
                of_logits = log_p.exp().mul_(-of_logprobs[part])
            of_logits.scatter_add_(-1, chosen[part, None], of_logprobs[part])
            if isinstance(slope, Tensor) or slope != 1:
                of_logits.mul_(slope)
            product = of_logits.div_(how.temperature).to(how.format)
            of_states[part] = product @ multiplier
            if of_weight is not None and of_weight.dtype == how.format:
                of_weight.addmm_(product.T, states[part].to(how.format))  # no second matrix of the vocabulary's size
            elif of_weight is not None:
                of_weight += product.T @ states[part].to(how.format)  # a sum in the weights' own format
            if of_bias is not None:
                of_bias += of_logits.sum(0)
        return of_states, of_weight, of_bias, None, None
