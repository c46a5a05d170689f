"""Shared prompts: what the rows of a group begin with runs through the model once, and its gradient is exact.

The rows of a group are answers to one prompt. Its keys and values are computed once and every row attends to its copy;
the gradients of all rows, over all micro-batches, are summed there and go back through the prompt at the end. What
some of the rows have in common after that, such as a first call and its result, is computed once for each micro-batch:
their tokens are a tree, in which each sees those on its path from the root (Tree Training, arXiv 2511.00413). Measured
in BENCHMARKS.md ("Training steps"): half to two thirds of the tokens of calculator-v0's and wordnet-v0's rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import DynamicCache, PreTrainedModel

from agent_rl.algorithms import Rows
from agent_rl.backends.embedded.optimizer import LARGE
from agent_rl.backends.embedded.precision import PrecisionConfig, repeatable
from agent_rl.engines.embedded.parts import body_of, unwrapped
from agent_rl.grid import Grid, cut_lengths

Ids = NDArray[np.int64]
WORTHWHILE = 0.1
"""The share of a batch's tokens that sharing has to save."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """What the forward of some rows begins with, and what of the rest is common to several of them.

    Rows of one prompt are a tree, and lie in a line of `N` tokens.
    """

    layers: list[tuple[Tensor, Tensor]]
    """Keys and values of the lines' prompts by layer, `[G, heads, P, head_dim]` each, padded on the right."""
    token_ids: Tensor
    """int64 `[G, N]`, padded on the right."""
    positions: Tensor
    """int64 `[G, N]`, in their rows."""
    visible: Tensor
    """bool `[G, N, P + N]`: what each token attends to, of the prompt and of its line."""
    row: Tensor
    """int64 `[S]`: the rows of all tokens that come after prompts and before a row's last one."""
    step: Tensor
    """int64 `[S]`: where in their rows they are."""
    cell: Tensor
    """int64 `[S]`: where in the lines, flattened."""

    def states(self, model: PreTrainedModel, token_ids: Tensor) -> Tensor:
        """Return the last states of the tokens 0 to T - 2 of whole rows, `[B, T - 1, hidden]`; 0 in the prompts."""
        found = body_of(model)(
            input_ids=self.token_ids,
            position_ids=self.positions,
            attention_mask=self.visible[:, None],
            past_key_values=DynamicCache(self.layers),
            use_cache=True,
        ).last_hidden_state.flatten(0, 1)
        whole: Tensor = found.new_zeros(len(token_ids), token_ids.shape[1] - 1, found.shape[-1])
        return whole.index_put((self.row, self.step), found[self.cell])


@dataclass(slots=True)
class SharedPrompts:
    """The prompts of some rows, computed once."""

    rows: Rows
    lengths: Tensor
    """int64 `[B]`, of each row's."""
    place: Tensor
    """int64 `[B]`: which prompt it is."""
    computed: list[Tensor]
    """Keys and values by turns, `[G, heads, P, head_dim]`, as the model computed them."""
    leaves: list[Tensor]
    """Their copies in which the gradients of the rows meet, in float32 at least."""

    def cut_rows(self, token_budget: int) -> list[list[int]]:
        """Return the rows of micro-batches whose lines have `token_budget` padded tokens at most; alike ones together.

        A row that alone has more gets a micro-batch of its own.
        """
        trees = list[list[int]]()
        sizes = list[int]()
        for number in torch.unique(self.place).tolist():
            size, before = token_budget, None
            for row, ids in self._answers(torch.nonzero(self.place == number)[:, 0].tolist()):
                own = len(ids) - (0 if before is None else alike(ids, before))
                if before is None or size + own > token_budget:
                    trees.append([])
                    sizes.append(0)
                    own = len(ids)
                trees[-1].append(row)
                size = sizes[-1] = sizes[-1] + own
                before = ids
        return [[row for tree in cut for row in trees[tree]] for cut in cut_lengths(torch.tensor(sizes), token_budget)]

    def of(self, rows: Sequence[int]) -> Prompt:
        """Return the prompts of some rows, and the trees of what follows."""
        place, lengths = self.place[rows], self.lengths[rows]
        numbers, line = torch.unique(place, return_inverse=True)
        trees = [self._tree([i for i, own in enumerate(line.tolist()) if own == n], rows) for n in range(len(numbers))]
        size, width = max(len(ids) for ids, _, _ in trees), int(lengths.max())
        token_ids, positions = torch.zeros(2, len(trees), size, dtype=torch.int64)
        visible = torch.zeros(len(trees), size, width + size, dtype=torch.bool)
        visible[:, torch.arange(size), width + torch.arange(size)] = True  # padding, too, has to see something
        row, step, cell = list[Tensor](), list[Tensor](), list[Tensor]()
        for number, (ids, nodes, first) in enumerate(trees):
            token_ids[number, : len(ids)] = torch.from_numpy(ids)
            visible[number, : len(ids), :first] = True
            for index, path in nodes:
                path_of = torch.from_numpy(path)
                depth = torch.arange(len(path))
                visible[number, path_of[:, None], width + path_of] = depth <= depth[:, None]
                positions[number, path_of] = first + depth
                row.append(torch.full_like(path_of, index))
                step.append(first + depth)
                cell.append(number * size + path_of)
        device, form = self.leaves[0].device, self.computed[0].dtype
        parts = [leaf.index_select(0, numbers.to(device))[:, :, :width].to(form) for leaf in self.leaves]
        layers = list(zip(parts[::2], parts[1::2], strict=True))
        laid = (token_ids, positions, visible, torch.cat(row), torch.cat(step), torch.cat(cell))
        return Prompt(layers, *(x.to(device) for x in laid))

    def _answers(self, rows: Sequence[int]) -> list[tuple[int, Ids]]:
        """Return what comes after the prompts of rows and before their last tokens, those that begin alike in a row."""
        starts, ids = self.rows.starts.tolist(), self.rows.token_ids.cpu().numpy()
        ends, firsts = self.rows.lengths.tolist(), self.lengths.tolist()
        found = [(row, ids[starts[row] + firsts[row] : starts[row] + ends[row] - 1]) for row in rows]
        return sorted(found, key=lambda answer: answer[1].tolist())

    def _tree(self, members: Sequence[int], rows: Sequence[int]) -> tuple[Ids, list[tuple[int, Ids]], int]:
        """Return the tokens of a line, the path of each of its rows by the row's place in `rows`, and the prompt's end.

        Args:
            members: the places in `rows` of those with one prompt.
            rows: those of a micro-batch.
        """
        index_of = {rows[member]: member for member in members}
        ids, nodes, size = list[Ids](), list[tuple[int, Ids]](), 0
        before, path = np.empty(0, np.int64), np.empty(0, np.int64)
        for row, answer in self._answers([*index_of]):
            common = alike(answer, before)
            own = np.arange(size, size + len(answer) - common)
            before, path = answer, np.concatenate([path[:common], own])
            ids.append(answer[common:])
            nodes.append((index_of[row], path))
            size += len(own)
        return np.concatenate(ids), nodes, int(self.lengths[rows[members[0]]])

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
        and config._attn_implementation == "sdpa"
        and not body_of(model).gradient_checkpointing
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
    shared = SharedPrompts(rows, lengths, place, computed, leaves)
    yield shared
    shared.backward()


def _keys_and_values(model: PreTrainedModel, ids: Tensor) -> list[Tensor]:
    """Return what a model keeps of ids `[G, P]`: by layer keys and values in turn, `[G, heads, P, head_dim]` each."""
    cache = body_of(model)(input_ids=ids, past_key_values=DynamicCache(), use_cache=True).past_key_values
    return [x for layer in cache.layers for x in (layer.keys, layer.values)]


def micro_batches(
    model: PreTrainedModel, rows: Rows, group: Tensor, precision: PrecisionConfig, token_budget: int
) -> Iterator[tuple[list[int], Prompt | None]]:
    """Yield the rows of micro-batches of `token_budget` tokens, and what they begin with if it was computed apart.

    `group`, int64 `[B]`, is of each row. After the last of those that share prompts their gradients go on through them.
    """
    for part in cut_groups(model, rows, group, token_budget):
        some = rows.select(part)
        with sharing(model, some, group[part], precision) as shared:
            for cut in (some if shared is None else shared).cut_rows(token_budget):
                yield [part[row] for row in cut], None if shared is None else shared.of(cut)


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
    agreeing = (own.int().argmax(1) - 1).clamp(min=0)
    lengths = agreeing.new_full((count,), token_ids.shape[1]).scatter_reduce(0, place, agreeing, "amin")
    answers = [ids.cpu().numpy() for ids in torch.split(rows.token_ids, rows.lengths.tolist())]
    order = sorted(range(len(rows)), key=lambda row: (int(place[row]), answers[row].tolist()))
    saved = sum(alike(answers[a], answers[b]) for a, b in pairwise(order) if place[a] == place[b])
    return (lengths[place], place, first) if saved > WORTHWHILE * rows.lengths.sum() else None


def alike(one: Ids, other: Ids) -> int:
    """Return with how many of the same ids two sequences begin."""
    shorter = min(len(one), len(other))
    differing = one[:shorter] != other[:shorter]
    return int(differing.argmax()) if differing.any() else shorter
