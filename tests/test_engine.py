"""The engine against the training forward: same tokens, same log-probabilities, same experts; and its manners."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from agent_rl.backends.embedded.cache import CHUNK, Layout
from agent_rl.backends.embedded.engine import Engine, narrow
from agent_rl.backends.embedded.engine import Sequence as TokenSequence
from agent_rl.backends.embedded.forward import Forward, FusedForward, ModuleForward, StepOutput, make_forward
from agent_rl.backends.embedded.logprobs import token_logprobs
from agent_rl.backends.embedded.model import ModelConfig, make_model
from agent_rl.errors import ConfigError, PolicyError
from agent_rl.policy.sampling import SamplingParams
from agent_rl.types import Completion, FinishReason

T = TypeVar("T")
VOCAB = 50
TINY = dict(hidden=32, heads=4, kv_heads=2, head_dim=8, layers=2, intermediate=64, experts=4, expert_intermediate=16)
GREEDY = SamplingParams(temperature=0.0)
NEVER: frozenset[int] = frozenset()
Plan = list[tuple[list[int], int]]
"""Turns: what the environment says, and how many tokens to sample."""

every_forward = pytest.mark.parametrize(
    ("architecture", "forward"),
    [(a, f) for a in ("qwen3", "qwen3_moe") for f in (FusedForward, ModuleForward)],
)


def shaken(model: PreTrainedModel, seed: int = 0) -> PreTrainedModel:
    """Make the weights so large that every output depends visibly on the whole context."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight += 0.25 * torch.randn(weight.shape, generator=generator)
    return model


def tiny(architecture: str = "qwen3") -> PreTrainedModel:
    return shaken(make_model(ModelConfig(architecture=architecture, max_positions=256, **TINY), VOCAB, seed=0))


@dataclass
class Record:
    """One sequence as its caller saw it."""

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
    for ids, count in plan:
        turn = SamplingParams(params.temperature, params.top_p, params.top_k, params.min_p, count)
        record.add(ids, await sequence.sample(ids, turn, NEVER))
    sequence.close()
    return record


def play_all(engine: Engine, plans: Sequence[Plan], params: SamplingParams = GREEDY) -> list[Record]:
    async def main() -> list[Record]:
        return await asyncio.gather(*[play(engine, seed, plan, params) for seed, plan in enumerate(plans)])

    return asyncio.run(main())


def ragged_plans(count: int, seed: int = 0) -> list[Plan]:
    """Two to four turns of 1 to 14 tokens, answered with 1 to 9; the first sequence reaches into a third chunk."""
    rng = np.random.default_rng(seed)

    def ids(length: int) -> list[int]:
        return rng.integers(0, VOCAB, length).tolist()

    plans = [
        [(ids(rng.integers(1, 15)), int(rng.integers(1, 10))) for _ in range(rng.integers(2, 5))] for _ in range(count)
    ]
    plans[0] = [(ids(CHUNK - 3), 7), (ids(CHUNK), 5), (ids(1), 1)]
    return plans


def full_logprobs(model: PreTrainedModel, ids: Sequence[int], temperature: float = 1.0) -> Tensor:
    with torch.no_grad():
        return token_logprobs(model, torch.tensor([list(ids)]), temperature)[0][0]


def run(main: Callable[[], Awaitable[T]]) -> T:
    async def bounded() -> T:
        async with asyncio.timeout(20):
            return await main()

    return asyncio.run(bounded())


async def steps(engine: Engine, count: int) -> None:
    """Let the engine do `count` more steps."""
    goal = engine.steps + count
    while engine.steps < goal:
        await asyncio.sleep(0)


# --- exactness -------------------------------------------------------------------------------------------------------


@every_forward
def test_greedy_tokens_are_the_argmax_of_the_training_forward(
    architecture: str, forward: Callable[..., Forward]
) -> None:
    model = tiny(architecture)
    engine = Engine(model, slots=5, max_len=160, forward=forward)
    for record in play_all(engine, ragged_plans(12)):
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([record.ids])).logits[0]
        best = logits.argmax(-1)
        assert [record.ids[p] for p in record.sampled] == [int(best[p - 1]) for p in record.sampled]
        raw = torch.tensor(record.column("raw_logprobs"))
        torch.testing.assert_close(raw, full_logprobs(model, record.ids)[record.sampled], atol=1e-5, rtol=0)
        assert set(record.column("logprobs")) == {0.0}


@every_forward
def test_logprobs_are_those_of_the_training_forward(architecture: str, forward: Callable[..., Forward]) -> None:
    model = tiny(architecture)
    engine = Engine(model, slots=5, max_len=160, forward=forward)
    for record in play_all(engine, ragged_plans(12, seed=1), SamplingParams(temperature=0.7)):
        for name, temperature in (("logprobs", 0.7), ("raw_logprobs", 1.0)):
            expected = full_logprobs(model, record.ids, temperature)[record.sampled]
            torch.testing.assert_close(torch.tensor(record.column(name)), expected, atol=1e-5, rtol=0)


@every_forward
def test_every_fed_position_reports_its_experts(architecture: str, forward: Callable[..., Forward]) -> None:
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
        logits = model(input_ids=torch.tensor([list(ids)]), output_router_logits=True).router_logits
    return torch.stack([layer.topk(2, -1).indices for layer in logits], 1).numpy()


def test_the_narrowest_integers_hold_the_experts() -> None:
    dtypes = [narrow(torch.zeros(1, 1, 1, dtype=torch.int64), count).dtype for count in (8, 128, 129, 32768, 32769)]
    assert dtypes == [np.int8, np.int8, np.int16, np.int16, np.int32]


def test_other_architectures_run_through_their_own_modules() -> None:
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, use_cache=False,
    )  # fmt: skip
    model = shaken(LlamaForCausalLM(config))
    engine = Engine(model, slots=3, max_len=160)
    assert isinstance(engine.forward, ModuleForward)
    for record in play_all(engine, ragged_plans(6), SamplingParams()):
        expected = full_logprobs(model, record.ids)[record.sampled]
        torch.testing.assert_close(torch.tensor(record.column("logprobs")), expected, atol=1e-5, rtol=0)
    assert model.config._attn_implementation != "agent_rl_slots"


def test_sliding_windows_are_refused() -> None:
    config = Qwen3Config(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, use_sliding_window=True, sliding_window=8, max_window_layers=1,
    )  # fmt: skip
    with pytest.raises(ConfigError, match="full attention in every layer; qwen3 has sliding_attention"):
        Engine(Qwen3ForCausalLM(config), slots=2, max_len=32)


# --- randomness ------------------------------------------------------------------------------------------------------


def test_samples_do_not_depend_on_who_shares_the_batch() -> None:
    model, plans = tiny(), ragged_plans(21)
    crowd = play_all(Engine(model, slots=16, max_len=160), plans, SamplingParams())
    for seed in (0, 7, 20):
        alone = asyncio.run(play(Engine(model, slots=1, max_len=160), seed, plans[seed], SamplingParams()))
        assert alone.ids == crowd[seed].ids
        np.testing.assert_allclose(alone.column("logprobs"), crowd[seed].column("logprobs"), atol=1e-5, rtol=0)


def test_the_same_opening_order_gives_the_same_bits() -> None:
    engine = Engine(tiny("qwen3_moe"), slots=4, max_len=160)  # also: one engine serves several event loops
    first, second = (
        [[(c.token_ids, c.logprobs) for c in r.completions] for r in play_all(engine, ragged_plans(9), SamplingParams())]
        for _ in range(2)
    )
    assert first == second


def test_seeds_matter() -> None:
    plan = [([1, 2, 3], 20)]
    records = play_all(Engine(tiny(), slots=4, max_len=64), [plan, plan], SamplingParams())
    assert records[0].ids != records[1].ids


@pytest.mark.parametrize("k", [0, 1, 7])
def test_abort_and_resume_continue_the_same_draws(k: int) -> None:
    engine = Engine(tiny(), slots=2, max_len=64)
    whole = asyncio.run(play(engine, 5, [([1, 2, 3], 20)], SamplingParams()))

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


# --- ends of a reply -------------------------------------------------------------------------------------------------


def test_a_reply_ends_at_a_stop_id_or_at_max_tokens() -> None:
    engine = Engine(tiny(), slots=1, max_len=64)
    free = asyncio.run(play(engine, 0, [([1, 2, 3], 9)])).completions[0]
    assert (free.finish_reason, len(free.token_ids)) == (FinishReason.LENGTH, 9)
    stop = free.token_ids[4]
    first = free.token_ids.index(stop)
    stopped = run(lambda: engine.open(0).sample([1, 2, 3], GREEDY, frozenset({stop, VOCAB + 1})))
    assert (stopped.finish_reason, stopped.token_ids) == (FinishReason.STOP, free.token_ids[: first + 1])


def test_the_context_limit_ends_a_reply_and_refuses_the_next() -> None:
    engine = Engine(tiny(), slots=1, max_len=16)
    assert engine.context_limit == 16
    sequence = engine.open(0)

    async def main() -> Completion:
        completion = await sequence.sample(list(range(10)), SamplingParams(max_tokens=40), NEVER)
        with pytest.raises(PolicyError, match="17 tokens leave no room in the engine's context of 16"):
            await sequence.sample([1], GREEDY, NEVER)
        return completion

    completion = run(main)
    assert (completion.finish_reason, len(completion.token_ids)) == (FinishReason.LENGTH, 6)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([], "needs at least one token id"),
        ([1, 50, 2], "token id 50 is outside the model's vocabulary of 50"),
        ([1, -3], "token id -3 is outside"),
        ([1] * 32, "32 tokens leave no room in the engine's context of 32"),
    ],
)
def test_bad_ids_are_refused_and_leave_the_sequence_as_it_was(ids: list[int], message: str) -> None:
    engine = Engine(tiny(), slots=1, max_len=32)
    sequence = engine.open(0)

    async def main() -> Completion:
        with pytest.raises(PolicyError, match=message):
            await sequence.sample(ids, GREEDY, NEVER)
        return await sequence.sample([1, 2], GREEDY, NEVER)

    assert run(main) == asyncio.run(play(engine, 0, [([1, 2], GREEDY.max_tokens)])).completions[0]


def test_impossible_engines_are_refused() -> None:
    model = tiny()
    for settings, message in (({"slots": 0}, "not 0 and"), ({"max_len": 257}, "max_len=257 exceeds the model's 256")):
        with pytest.raises(ConfigError, match=message):
            Engine(model, **settings)


# --- slots and callers -----------------------------------------------------------------------------------------------


def test_a_sequence_samples_once_at_a_time_and_not_after_its_close() -> None:
    engine = Engine(tiny(), slots=1, max_len=64)
    sequence = engine.open(0)

    async def main() -> None:
        task = asyncio.create_task(sequence.sample([1], SamplingParams(max_tokens=30), NEVER))
        await steps(engine, 2)
        with pytest.raises(PolicyError, match="already sampling"):
            await sequence.sample([2], GREEDY, NEVER)
        sequence.close()
        assert (await task).finish_reason is FinishReason.ABORT
        sequence.close()
        with pytest.raises(PolicyError, match="over: it was closed"):
            await sequence.sample([2], GREEDY, NEVER)

    run(main)


def test_closing_an_idle_sequence_lets_a_waiting_one_in() -> None:
    engine = Engine(tiny(), slots=1, max_len=64)
    idle, waiting = engine.open(0), engine.open(1)

    async def main() -> Completion:
        await idle.sample([1, 2], GREEDY, NEVER)
        task = asyncio.create_task(waiting.sample([3, 4], GREEDY, NEVER))
        for _ in range(20):
            await asyncio.sleep(0)
        assert not task.done()
        idle.close()
        return await task

    assert run(main) == asyncio.run(play(Engine(engine.forward.model, slots=1, max_len=64), 1, [([3, 4], 64)])).completions[0]


def test_a_cancelled_caller_leaves_the_others_alone() -> None:
    model = tiny()
    engine = Engine(model, slots=1, max_len=64)
    expected = asyncio.run(play(Engine(model, slots=1, max_len=64), 0, [([1, 2], 12)], SamplingParams())).completions[0]
    params = SamplingParams(max_tokens=12)

    async def main() -> None:
        running, waiting, last = engine.open(0), engine.open(1), engine.open(0)
        tasks = [asyncio.create_task(s.sample([1, 2], params, NEVER)) for s in (running, waiting, last)]
        await steps(engine, 3)
        tasks[1].cancel()
        assert await tasks[0] == expected
        with pytest.raises(asyncio.CancelledError):
            await tasks[1]
        running.close()
        await steps(engine, 3)
        tasks[2].cancel()  # this one is in mid-reply: what it sampled is lost to its caller
        with pytest.raises(asyncio.CancelledError):
            await tasks[2]
        with pytest.raises(PolicyError, match="over: a call was cancelled"):
            await last.sample([], params, NEVER)
        last.close()
        assert await engine.open(0).sample([1, 2], params, NEVER) == expected

    run(main)


class Flaky:
    """A forward that fails when told to."""

    def __init__(self, model: PreTrainedModel, cache: object) -> None:
        self.inner, self.broken = make_forward(model, cache), False

    def __call__(self, layout: Layout) -> StepOutput:
        if self.broken:
            raise MemoryError("no room")
        return self.inner(layout)

    def refresh(self) -> None:
        self.inner.refresh()


def test_a_failing_step_reaches_every_caller_and_the_engine_goes_on() -> None:
    model = tiny()
    engine = Engine(model, slots=2, max_len=64, forward=Flaky)
    plan = [([1, 2], 12)]

    async def main() -> Record:
        sequences = [engine.open(i) for i in range(3)]
        tasks = [asyncio.create_task(s.sample([1, 2], SamplingParams(max_tokens=12), NEVER)) for s in sequences]
        await steps(engine, 3)
        engine.forward.broken = True
        for error in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(error, PolicyError) and isinstance(error.__cause__, MemoryError)
            assert str(error) == "the engine's step failed: MemoryError: no room"
        engine.forward.broken = False
        for sequence in sequences:
            with pytest.raises(PolicyError, match="over: the engine's step failed: MemoryError"):
                await sequence.sample([], GREEDY, NEVER)
            sequence.close()
        return await play(engine, 0, plan)

    assert run(main).completions == asyncio.run(play(Engine(model, slots=1, max_len=64), 0, plan)).completions


def test_diverged_weights_are_an_error_not_a_sample() -> None:
    model = tiny()
    with torch.no_grad():
        model.model.norm.weight.fill_(float("nan"))
    with pytest.raises(PolicyError, match="1 of 1 rows of logits hold NaN"):
        asyncio.run(play(Engine(model, slots=1, max_len=64), 0, [([1], 3)]))


# --- new weights -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize("architecture", ["qwen3", "qwen3_moe"])
def test_weights_change_in_mid_reply(architecture: str, recompute: bool) -> None:
    model = tiny(architecture)
    engine = Engine(model, slots=2, max_len=96)
    sequence: TokenSequence = engine.open(3)
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
