"""Shared prompts: what the rows of a group begin with runs through the model once, and its gradient is exact.

The rows of a group are answers to one prompt. Its keys and values are computed once and every row attends to its copy;
the gradients of all rows, over all micro-batches, are summed there and go back through the prompt at the end. Measured
in BENCHMARKS.md ("Training steps"): a fourth of the tokens of calculator-v0's rows, most of those of few-shot prompts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import DynamicCache, PreTrainedModel

from agent_rl.algorithms import Rows
from agent_rl.backends.embedded.optimizer import LARGE, repeatable
from agent_rl.backends.embedded.precision import PrecisionConfig
from agent_rl.engines.embedded.parts import body_of, unwrapped
from agent_rl.grid import Grid

WORTHWHILE = 0.1
"""The share of a batch's tokens that sharing has to save."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """The keys and values of the prompts of some rows, for their forward."""

    lengths: Tensor
    """int64 `[B]`: how many of each row's tokens they stand for."""
    layers: list[tuple[Tensor, Tensor]]
    """By layer, `[B, heads, P, head_dim]` each, padded on the right."""

    def states(self, model: PreTrainedModel, token_ids: Tensor) -> Tensor:
        """Return the last states of the tokens 0 to T - 2 of whole rows, `[B, T - 1, hidden]`; 0 in the prompts."""
        first, last = self.lengths[:, None], token_ids.shape[1] - 2
        steps = torch.arange(last + 1 - int(self.lengths.min()), device=token_ids.device)
        places = first + steps
        inside = places.clamp(max=last)
        seen = torch.arange(self.layers[0][0].shape[2], device=token_ids.device) < first
        mask = torch.cat(
            [
                seen[:, None].expand(-1, len(steps), -1),
                (steps <= steps[:, None]).expand(len(seen), -1, -1),
            ],
            -1,
        )
        found = body_of(model)(
            input_ids=token_ids.gather(1, inside),
            position_ids=inside,
            attention_mask=mask[:, None],
            past_key_values=DynamicCache(self.layers),
            use_cache=True,
        ).last_hidden_state
        whole: Tensor = found.new_zeros(len(found), last + 1, found.shape[-1])
        row, step = torch.nonzero(places <= last, as_tuple=True)
        return whole.index_put((row, places[row, step]), found[row, step])


@dataclass(slots=True)
class SharedPrompts:
    """The prompts of some rows, computed once."""

    lengths: Tensor
    """int64 `[B]`, of each row."""
    place: Tensor
    """int64 `[B]`: which prompt it is."""
    computed: list[Tensor]
    """Keys and values by turns, `[G, heads, P, head_dim]`, as the model computed them."""
    leaves: list[Tensor]
    """Their copies in which the gradients of the rows meet, in float32 at least."""

    def of(self, rows: Sequence[int]) -> Prompt:
        """Return the prompts of some rows."""
        index = torch.as_tensor(rows, device=self.place.device)
        lengths, place = self.lengths[index], self.place[index]
        width, form = int(lengths.max()), self.computed[0].dtype
        parts = [leaf.index_select(0, place)[:, :, :width].to(form) for leaf in self.leaves]
        return Prompt(lengths, list(zip(parts[::2], parts[1::2], strict=True)))

    def backward(self) -> None:
        """Take the gradients of all rows back through the prompts."""
        reached = [(made, leaf.grad) for made, leaf in zip(self.computed, self.leaves, strict=True)]
        gradients = {made: grad.to(made.dtype) for made, grad in reached if grad is not None}
        if gradients:
            with repeatable(next(iter(gradients)).is_cuda):
                torch.autograd.backward(list(gradients), list(gradients.values()))


KINDS = frozenset({"llama", "qwen2", "qwen3"})
"""Kinds of models, SmolLM2's among them, that attend to what a mask says, by rotated positions that are given."""


def is_exact(model: PreTrainedModel) -> bool:
    """Whether a model computes the same with its prompts apart, and lets the rows read them.

    Not with routers, whose replayed routes are by position in whole rows, nor with windows that slide, nor with
    positions that depend on the length; checkpointed gradients need forwards without a cache.
    """
    config = unwrapped(model).config
    rope = getattr(config, "rope_parameters", None) or {}
    return (
        config.model_type in KINDS
        and set(getattr(config, "layer_types", None) or ["full_attention"]) == {"full_attention"}
        and rope.get("rope_type", "default") in ("default", "linear", "llama3", "yarn")
        and config._attn_implementation in ("sdpa", "eager")
        and not any(getattr(part, "gradient_checkpointing", False) for part in model.modules())
    )


@contextmanager
def sharing(
    model: PreTrainedModel, rows: Rows, group: Tensor, precision: PrecisionConfig
) -> Iterator[SharedPrompts | None]:
    """Compute what rows of the same `group`, int64 `[B]`, begin with; None where that isn't exact, or saves little.

    At the end of the block the gradients of all micro-batches go on through the prompts.
    """
    found = _common(rows, group) if is_exact(model) else None
    if found is None:
        yield None
        return
    lengths, place, first = found
    grid = Grid.of(rows.starts[first], lengths[first])
    ids = grid.lay(rows.token_ids).to(model.device)  # nothing reads what is behind a shorter one
    large = sum(p.numel() for p in model.parameters()) >= LARGE
    with precision.region(model.device):
        # a large model's prompts run once more for their gradient: their activations would be held beside those of
        # each micro-batch in turn
        computed = (
            checkpoint(_keys_and_values, model, ids, use_reentrant=False) if large else _keys_and_values(model, ids)
        )
    leaves = [  # those of frozen layers learn nothing
        x.detach().to(torch.promote_types(x.dtype, torch.float32)).requires_grad_(x.requires_grad) for x in computed
    ]
    shared = SharedPrompts(lengths.to(model.device), place.to(model.device), computed, leaves)
    yield shared
    shared.backward()


def _keys_and_values(model: PreTrainedModel, ids: Tensor) -> list[Tensor]:
    """Return what a model keeps of ids `[G, P]`: by layer keys and values in turn, `[G, heads, P, head_dim]` each."""
    cache = body_of(model)(input_ids=ids, past_key_values=DynamicCache(), use_cache=True).past_key_values
    return [x for layer in cache.layers for x in (layer.keys, layer.values)]


def cut_groups(model: PreTrainedModel, rows: Rows, group: Tensor, token_budget: int) -> list[list[int]]:
    """Cut rows into sets of whole groups whose prompts, and one answer to each, have `token_budget` tokens at most.

    All rows are one set where a model shares no prompts.
    """
    if not is_exact(model):
        return [list(range(len(rows)))]
    members: dict[int, list[int]] = {}
    for row, number in enumerate(group.tolist()):
        members.setdefault(number, []).append(row)
    sets, count, width = list[list[int]](), 0, 0
    for some in members.values():
        count, width = count + 1, max(width, int(rows.lengths[some].max()))
        if sets and count * width <= token_budget:
            sets[-1] += some
        else:
            sets.append(some)
            count, width = 1, int(rows.lengths[some].max())
    return sets


def _common(rows: Rows, group: Tensor) -> tuple[Tensor, Tensor, Tensor] | None:
    """Return how many tokens each row shares with its group, `[B]`, which one that is, `[B]`, and a row of each, `[G]`.

    Up to the last token before the first that anyone sampled, which that one is predicted from.
    """
    _, place = torch.unique(group, return_inverse=True)
    index, count = torch.arange(len(place)), len(place.unique())
    first = index.new_full((count,), len(place)).scatter_reduce(0, place, index, "amin")
    grid = rows.grid()
    token_ids = grid.lay(rows.token_ids)
    own = grid.lay(rows.loss_mask) | (token_ids != token_ids[first[place]])
    alike = (own.int().argmax(1) - 1).clamp(min=0)
    lengths = alike.new_full((count,), token_ids.shape[1]).scatter_reduce(0, place, alike, "amin")
    saved = lengths[place].sum() - lengths.sum()
    return (lengths[place], place, first) if saved > WORTHWHILE * rows.lengths.sum() else None
