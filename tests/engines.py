"""Small models and callers for the tests of the embedded engine."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, TypeVar

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from agent_rl.algorithms.batch import Rows
from agent_rl.backends.embedded.config import ModelConfig
from agent_rl.backends.embedded.model import make_model
from agent_rl.backends.embedded.scoring import score_tokens
from agent_rl.core.trajectory import Completion
from agent_rl.engines.base import SamplingParams
from agent_rl.engines.embedded.engine import Engine
from agent_rl.engines.embedded.pages import PAGE

T = TypeVar("T")
Architecture = Literal["qwen3", "qwen3_moe"]
VOCAB = 50
TINY = {
    "hidden": 32, "heads": 4, "kv_heads": 2, "head_dim": 8, "layers": 2, "intermediate": 64,
    "experts": 4, "expert_intermediate": 16, "max_positions": 256,
}  # fmt: skip
"""Arguments of `ModelConfig`."""
DEVICE = os.environ.get("AGENT_RL_TEST_DEVICE", "cpu")
"""Where the models of tests are."""
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
GREEDY = SamplingParams(temperature=0.0)
NEVER: frozenset[int] = frozenset()
Plan = list[tuple[list[int], int]]
"""Turns: the environment's ids, and the number of tokens to sample."""


def shaken(model: PreTrainedModel, seed: int = 0) -> PreTrainedModel:
    """Make the weights so large that every output depends visibly on the whole context."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight += 0.25 * torch.randn(weight.shape, generator=generator).to(weight.device)
    return model


def tiny(architecture: Architecture = "qwen3") -> PreTrainedModel:
    return shaken(make_model(ModelConfig(architecture=architecture, **TINY), VOCAB, seed=0)).to(DEVICE)


def assert_sampled_in(rows: Rows, model: PreTrainedModel) -> None:
    """Check that the model gives each sampled token of padded rows the log-probability that it was sampled with."""
    with torch.no_grad():
        logits = model(rows.token_ids.to(DEVICE)).logits[:, :-1].log_softmax(-1).cpu()
    again, mask = logits.gather(-1, rows.token_ids[:, 1:, None])[..., 0], rows.loss_mask[:, 1:]
    torch.testing.assert_close(again[mask], rows.rollout_logprobs[:, 1:][mask], atol=1e-3, rtol=1e-3)


@dataclass
class Record:
    """One sequence as seen by its caller."""

    ids: list[int] = field(default_factory=list)
    sampled: list[int] = field(default_factory=list)
    """Positions of the sampled tokens."""
    completions: list[Completion] = field(default_factory=list)

    def add(self, new: Sequence[int], completion: Completion) -> None:
        self.ids += new
        self.sampled += range(len(self.ids), len(self.ids) + len(completion.token_ids))
        self.ids += completion.token_ids
        self.completions.append(completion)

    def column(self, name: str) -> list[float]:
        return [x for c in self.completions for x in getattr(c, name)]


async def play(engine: Engine, seed: int, plan: Plan, params: SamplingParams = GREEDY) -> Record:
    record, sequence = Record(), engine.open(seed)
    try:
        for ids, count in plan:
            record.add(ids, await sequence.sample(ids, replace(params, max_tokens=count), NEVER))
    finally:  # else those that wait for its slot would wait for ever
        sequence.close()
    return record


def play_all(engine: Engine, plans: Sequence[Plan], params: SamplingParams = GREEDY) -> list[Record]:
    async def main() -> list[Record]:
        return await asyncio.gather(*[play(engine, seed, plan, params) for seed, plan in enumerate(plans)])

    return run(main)


def play_alone(model: PreTrainedModel, seed: int, plan: Plan, params: SamplingParams = GREEDY) -> Record:
    """Play on an engine with one slot."""
    return run(lambda: play(Engine(model, slots=1, max_len=160), seed, plan, params))


def ragged_plans(count: int, seed: int = 0) -> list[Plan]:
    """Two to four turns of 1 to 14 tokens, answered with 1 to 9; the first sequence reaches into a third chunk."""
    rng = np.random.default_rng(seed)

    def ids(length: int) -> list[int]:
        return rng.integers(0, VOCAB, length).tolist()

    plans = [
        [(ids(rng.integers(1, 15)), int(rng.integers(1, 10))) for _ in range(rng.integers(2, 5))] for _ in range(count)
    ]
    plans[0] = [(ids(PAGE - 3), 7), (ids(PAGE), 5), (ids(1), 1)]
    return plans


def full_logprobs(model: PreTrainedModel, ids: Sequence[int], temperature: float = 1.0) -> Tensor:
    with torch.no_grad():
        return score_tokens(model, torch.tensor([list(ids)]), temperature).logprobs[0]


def assert_full(
    model: PreTrainedModel, record: Record, temperature: float = 1.0, *, atol: float = 1e-5, rtol: float = 0.0
) -> None:
    """Check a record's log-probabilities against a forward of the model over the whole sequence."""
    expected = full_logprobs(model, record.ids, temperature)[record.sampled]
    torch.testing.assert_close(torch.tensor(record.column("logprobs")), expected, atol=atol, rtol=rtol)


def run(main: Callable[[], Awaitable[T]]) -> T:
    async def bounded() -> T:
        async with asyncio.timeout(300):
            return await main()

    return asyncio.run(bounded())


async def steps(engine: Engine, count: int) -> None:
    """Let the engine do `count` more steps."""
    goal = engine.steps + count
    while engine.steps < goal:
        await asyncio.sleep(0)
