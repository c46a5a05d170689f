"""The engine and its callers: ends of replies, refusals, slots, cancellations and failures."""

from __future__ import annotations

import asyncio

import pytest
import torch
from transformers import PreTrainedModel

from agent_rl.core.trajectory import Completion, FinishReason
from agent_rl.engines.base import SamplingParams
from agent_rl.engines.embedded.engine import Engine
from agent_rl.engines.embedded.forward import StepOutput
from agent_rl.engines.embedded.kv_cache import KVCache
from agent_rl.engines.embedded.layout import Layout
from agent_rl.engines.embedded.module_forward import make_forward
from agent_rl.errors import ConfigError, PolicyError
from tests.engines import GREEDY, NEVER, VOCAB, Record, play, play_alone, run, steps, tiny

# --- ends of a reply -------------------------------------------------------------------------------------------------


def test_sequence_ends_at_stop_id_or_max_tokens() -> None:
    engine = Engine(tiny(), slots=1, max_len=64)
    free = run(lambda: play(engine, 0, [([1, 2, 3], 9)])).completions[0]
    assert (free.finish_reason, len(free.token_ids)) == (FinishReason.LENGTH, 9)
    stop = free.token_ids[4]
    first = free.token_ids.index(stop)
    stopped = run(lambda: engine.open(0).sample([1, 2, 3], GREEDY, frozenset({stop, VOCAB + 1})))
    assert (stopped.finish_reason, stopped.token_ids) == (FinishReason.STOP, free.token_ids[: first + 1])


def test_sequence_ends_a_reply_at_the_context_limit() -> None:
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
def test_sequence_refuses_bad_ids_and_stays_usable(ids: list[int], message: str) -> None:
    engine = Engine(tiny(), slots=1, max_len=32)
    sequence = engine.open(0)

    async def main() -> Completion:
        with pytest.raises(PolicyError, match=message):
            await sequence.sample(ids, GREEDY, NEVER)
        return await sequence.sample([1, 2], GREEDY, NEVER)

    fresh = Engine(engine.forward.model, slots=1, max_len=32)
    assert run(main) == run(lambda: play(fresh, 0, [([1, 2], GREEDY.max_tokens)])).completions[0]


def test_engine_refuses_impossible_sizes() -> None:
    model = tiny()
    for settings, message in (({"slots": 0}, "not 0 and"), ({"max_len": 257}, "max_len=257 exceeds the model's 256")):
        with pytest.raises(ConfigError, match=message):
            Engine(model, **settings)


# --- slots and callers -----------------------------------------------------------------------------------------------


def test_sequence_refuses_concurrent_and_closed_sampling() -> None:
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


def test_engine_refuses_a_second_thread_that_samples() -> None:
    engine = Engine(tiny(), slots=4, max_len=64)

    async def main() -> Completion:
        await engine.open(0).sample([1, 2, 3], GREEDY, NEVER)
        with pytest.raises(PolicyError, match="sampled in another thread"):
            await asyncio.wait_for(asyncio.to_thread(run, lambda: engine.open(1).sample([1, 2], GREEDY, NEVER)), 20)
        return await engine.open(0).sample([1, 2, 3], GREEDY, NEVER)

    assert run(main).token_ids == run(lambda: engine.open(1).sample([1, 2, 3], GREEDY, NEVER)).token_ids


def test_sequence_close_lets_a_waiting_one_in() -> None:
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

    fresh = Engine(engine.forward.model, slots=1, max_len=64)
    assert run(main) == run(lambda: play(fresh, 1, [([3, 4], GREEDY.max_tokens)])).completions[0]


def test_sequence_cancelled_leaves_the_others_alone() -> None:
    model = tiny()
    engine = Engine(model, slots=1, max_len=64)
    expected = play_alone(model, 0, [([1, 2], 12)], SamplingParams()).completions[0]
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
        tasks[2].cancel()  # in mid-reply: its tokens are lost to the caller
        with pytest.raises(asyncio.CancelledError):
            await tasks[2]
        with pytest.raises(PolicyError, match="over: a call was cancelled"):
            await last.sample([], params, NEVER)
        last.close()
        assert await engine.open(0).sample([1, 2], params, NEVER) == expected

    run(main)


class Flaky:
    """A forward that fails on request."""

    def __init__(self, model: PreTrainedModel, cache: KVCache) -> None:
        self.inner, self.broken = make_forward(model, cache), False

    def __call__(self, layout: Layout) -> StepOutput:
        if self.broken:
            raise MemoryError("no room")
        return self.inner(layout)

    def refresh(self) -> None:
        self.inner.refresh()

    def release(self) -> None:
        self.inner.release()


def test_engine_survives_a_failing_step() -> None:
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

    assert run(main).completions == play_alone(model, 0, plan).completions


def test_engine_raises_for_diverged_weights() -> None:
    model = tiny()
    with torch.no_grad():
        model.model.norm.weight.fill_(float("nan"))
    with pytest.raises(PolicyError, match="1 of 1 rows of logits hold NaN"):
        play_alone(model, 0, [([1], 3)])


def test_engine_without_its_weights_refuses_to_sample() -> None:
    engine = Engine(tiny(), slots=1, max_len=64)
    held, plan = len(engine.forward.layers), [([1, 2], 6)]
    first = run(lambda: play(engine, 0, plan))
    engine.release_weights()
    assert held and not engine.forward.layers
    sequence = engine.open(0)
    with pytest.raises(PolicyError, match="call update_weights before it samples"):
        run(lambda: sequence.sample([1, 2], GREEDY, NEVER))
    sequence.close()
    engine.update_weights(0)
    assert run(lambda: play(engine, 0, plan)) == first
