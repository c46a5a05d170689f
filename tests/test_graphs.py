"""GraphedForward: which steps are recorded, and that none of them computes anything else than the fused forward."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from agent_rl.engines.base import SamplingParams
from agent_rl.engines.embedded import graphs
from agent_rl.engines.embedded.engine import Engine
from agent_rl.engines.embedded.graphs import ROWS, GraphedForward
from agent_rl.engines.embedded.kv_cache import KVCache
from agent_rl.engines.embedded.layout import Layout
from agent_rl.engines.embedded.module_forward import make_forward
from agent_rl.engines.embedded.pages import PAGE
from tests.engines import DEVICE, VOCAB, Plan, Record, assert_full, play_all, ragged_plans, tiny

CONTEXT = 256


@pytest.fixture
def sizes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, tuple[int, int] | None]]:
    """Of each step, its tokens and the size that it is rounded up to."""
    found = list[tuple[int, tuple[int, int] | None]]()
    size_of = GraphedForward._size

    def noted(self: GraphedForward, layout: Layout) -> tuple[int, int] | None:
        found.append((layout.tokens.shape[1], size_of(self, layout)))
        return found[-1][1]

    monkeypatch.setattr(GraphedForward, "_size", noted)
    return found


def played(plans: list[Plan], slots: int = 16) -> list[Record]:
    model = tiny()
    records = play_all(Engine(model, slots=slots, max_len=160, forward=GraphedForward), plans, SamplingParams())
    for record in records:
        assert_full(model, record)
    return records


def test_steps_are_rounded_up_to_few_sizes(sizes) -> None:
    played(ragged_plans(40))
    taken = [(tokens, size) for tokens, size in sizes if size is not None]
    assert len(taken) > 0.9 * len(sizes)
    assert all(size[0] in ROWS and tokens <= size[0] for tokens, size in taken)
    assert len({size for _, size in taken}) < len({tokens for tokens, _ in taken})


def test_steps_with_copies_or_many_tokens_are_not_recorded(sizes) -> None:
    prompt = np.random.default_rng(0).integers(0, VOCAB, PAGE + 9).tolist()
    played([[(prompt, 5)] for _ in range(3)])  # they share its last page, until each writes into it
    assert (3, None) in sizes and (3, (16, 2)) in sizes
    sizes.clear()
    played([[([i, *prompt], 2)] for i in range(4)])
    assert [size for tokens, size in sizes if tokens == 4 * len(prompt) + 4] == [None]


def test_long_contexts_are_read_in_place(sizes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "GATHERED", 0)
    played(ragged_plans(3))
    assert {size for _, size in sizes} == {None}


def test_memory_that_moves_is_recorded_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    forgotten, forget, model = [], GraphedForward._forget, tiny()
    monkeypatch.setattr(GraphedForward, "_forget", lambda self: forgotten.append(self) or forget(self))
    engine = Engine(model, slots=2, max_len=CONTEXT, forward=GraphedForward)
    (record,) = play_all(engine, [[([1, 2, 3], CONTEXT - 4)]], SamplingParams())
    assert len(forgotten) > 2  # pages for four times as many tokens came one by one
    assert_full(model, record)


def test_new_weights_are_recorded_anew() -> None:
    model = tiny()
    engine = Engine(model, slots=4, max_len=160, forward=GraphedForward)
    for version in range(2):
        with torch.no_grad():
            for weight in model.parameters():
                weight.mul_(1.1)
        engine.release_weights()
        engine.update_weights(version)
        for record in play_all(engine, ragged_plans(4), SamplingParams()):
            assert_full(model, record, rtol=1e-5)


def test_graphs_read_written_pages_only(sizes, monkeypatch: pytest.MonkeyPatch) -> None:
    reserve = KVCache.reserve

    def unwritten(self: KVCache, layer: int, *args) -> tuple[Tensor, Tensor]:
        before = len(self.keys[layer]) if layer in self.keys else 0
        for memory in (found := reserve(self, layer, *args)):
            memory[before:] = torch.nan
        return found

    monkeypatch.setattr(KVCache, "reserve", unwritten)
    model, prompt = tiny(), [*range(VOCAB)] * 2
    engine = Engine(model, slots=ROWS[0], max_len=CONTEXT, forward=GraphedForward)
    for record in play_all(engine, [[(prompt, 2 * PAGE - len(prompt) + 2)]] * ROWS[0], SamplingParams()):
        assert_full(model, record)  # all open their third page in one step, of four in a recorded one
    assert (ROWS[0], (ROWS[0], 4)) in sizes


@pytest.mark.parametrize("architecture", ["qwen3", "qwen3_moe"])
def test_graphs_are_for_dense_models_on_a_gpu(architecture) -> None:
    engine = Engine(tiny(architecture), slots=1, max_len=160, forward=make_forward)
    assert isinstance(engine.forward, GraphedForward) == (DEVICE != "cpu" and architecture == "qwen3")
