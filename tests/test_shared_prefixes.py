"""Sequences that open alike share pages: the same ids and log-probabilities as alone, with less work and memory."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from agent_rl.core.trajectory import FinishReason
from agent_rl.engines.base import SamplingParams
from agent_rl.engines.embedded import engine as engine_module
from agent_rl.engines.embedded.engine import Engine
from agent_rl.engines.embedded.pages import PAGE, Pages, Table
from tests.engines import NEVER, Record, assert_full, play, play_alone, ragged_plans, run, shaken, steps, tiny

PROMPT = np.random.default_rng(0).integers(0, 50, 3 * PAGE).tolist()
SAMPLED = SamplingParams()

lengths = st.sampled_from([1, 2, 20, PAGE - 1, PAGE, PAGE + 1, PAGE + 20, 2 * PAGE])
own_ids = st.lists(st.integers(0, 49), max_size=12)
openings = st.lists(st.tuples(lengths, own_ids, st.integers(0, 4), st.integers(1, 12)), min_size=2, max_size=7)


@pytest.mark.parametrize("architecture", ["qwen3", "qwen3_moe"])
@given(openings=openings, chunk=st.sampled_from([PAGE, 2048]))
@example(openings=[(PAGE, [1, 2], 0, 2), (PAGE, [], 0, 2)], chunk=2048)  # a prompt of whole pages that opens another
@example(openings=[(100, [], 0, 9), (1, [3] * 70, 3, 2), (40, [1, 2], 3, 2), (40, [], 3, 2)], chunk=PAGE)
@settings(max_examples=8, deadline=None)
def test_shared_prefixes_change_nothing(architecture, openings, chunk) -> None:
    """Each opening: ids of the common prompt, ids of its own, steps to wait, and tokens to sample."""
    model = tiny(architecture)
    plans = [[(PROMPT[:common] + own, count), ([7, 8], 3)] for common, own, _, count in openings]

    async def late(engine: Engine, seed: int) -> Record:
        await steps(engine, openings[seed][2] if seed else 0)
        return await play(engine, seed, plans[seed], SAMPLED)

    async def together() -> list[Record]:
        engine = Engine(model, slots=5, max_len=256)
        tasks = [asyncio.create_task(late(engine, seed)) for seed in range(len(plans))]
        while not all(task.done() for task in tasks):
            await asyncio.sleep(0)
            engine.steps += not engine._active  # nobody is left for the late ones to wait for
        assert engine.cache.pages.used == 0
        return [task.result() for task in tasks]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_module, "PREFILL", chunk)
        records = run(together)
    for seed, record in enumerate(records):
        alone = play_alone(model, seed, plans[seed], SAMPLED)
        assert record.ids == alone.ids
        np.testing.assert_allclose(record.column("logprobs"), alone.column("logprobs"), atol=1e-5, rtol=0)
        if architecture == "qwen3_moe":
            for one, two in zip(record.completions, alone.completions, strict=True):
                np.testing.assert_array_equal(one.routed_experts, two.routed_experts)


@pytest.mark.parametrize(("together", "fed"), [(True, 150), (False, 150 + 7)])
def test_group_computes_its_prompt_once(together: bool, fed: int) -> None:
    engine, count = Engine(tiny(), slots=8, max_len=256), 0
    forward = engine.forward

    def counted(layout):
        nonlocal count
        count += len(layout.ids)
        return forward(layout)

    engine.forward = counted

    async def main() -> None:
        sequences = [engine.open(seed) for seed in range(8)]
        calls = [s.sample(PROMPT[:150], replace(SAMPLED, max_tokens=1), NEVER) for s in sequences]
        if together:
            await asyncio.gather(*calls)
            assert engine.steps == 1 and engine.cache.pages.used == 3
        else:
            for call in calls:
                await call
            assert engine.cache.pages.used == 3 + 7  # two full ones are shared, the third is copied
        for sequence in sequences:
            sequence.close()

    run(main)
    assert count == fed
    assert engine.cache.pages.used == 0


@pytest.mark.parametrize("recompute", [True, False])
def test_prefix_of_older_weights_is_not_shared(recompute: bool) -> None:
    model = tiny()
    engine = Engine(model, slots=4, max_len=256)

    async def main() -> list[Record]:
        old = engine.open(0)
        await old.sample(PROMPT[:150], replace(SAMPLED, max_tokens=2), NEVER)
        shaken(model, seed=1)
        engine.update_weights(1, recompute=recompute)
        record = await play(engine, 1, [(PROMPT[:150], 5)], SAMPLED)
        await old.sample([1], replace(SAMPLED, max_tokens=2), NEVER)
        return [record, await play(engine, 2, [(PROMPT[:150], 5)], SAMPLED)]

    for record in run(main):
        assert_full(model, record)


def test_prompt_is_prefilled_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "PREFILL", PAGE)
    model, widest = tiny(), 0
    engine = Engine(model, slots=4, max_len=256)
    forward = engine.forward

    def watched(layout):
        nonlocal widest
        widest = max(widest, len(layout.ids))
        return forward(layout)

    engine.forward = watched

    async def main() -> list[Record]:
        short = asyncio.create_task(play(engine, 0, [([1, 2], 9)], SAMPLED))
        long = [asyncio.create_task(play(engine, n, [([n, *PROMPT[:180]], 3)], SAMPLED)) for n in (1, 2)]
        aborted = engine.open(3)
        task = asyncio.create_task(aborted.sample(PROMPT[:180], SAMPLED, NEVER))
        await steps(engine, 2)
        aborted.abort()
        assert (await task).finish_reason is FinishReason.ABORT
        record = Record()
        record.add(PROMPT[:180], await aborted.sample([], replace(SAMPLED, max_tokens=3), NEVER))
        return [record, await short, *[await task for task in long]]

    for record in run(main):
        assert_full(model, record)
    assert widest <= PAGE + 4


def test_cache_grows_with_use_and_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(tiny(), slots=64, max_len=256)
    assert engine.cache.nbytes == 0
    run(lambda: play(engine, 0, [([1, 2, 3], 2)]))
    page = engine.cache.nbytes
    assert page == 2 * 2 * 2 * 8 * PAGE * 4  # keys and values of 2 layers, 2 heads of 8 numbers
    run(lambda: play(engine, 0, ragged_plans(1)[0]))
    assert engine.cache.nbytes == 3 * page
    monkeypatch.setattr(engine_module, "KEPT", page)
    run(lambda: play(engine, 0, [([1, 2, 3], 2)]))
    assert engine.cache.nbytes == 0


def test_pages_give_the_lowest_free_number() -> None:
    pages, tables = Pages(), [Table() for _ in range(4)]
    for first, table in enumerate(tables):
        pages.write(table, [first] * (PAGE + 1))
    assert [[page.number for page in t.pages] for t in tables] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    pages.settle()
    pages.release(tables[2])
    pages.release(tables[0])
    pages.write(tables[0], range(2 * PAGE + 1))
    assert [page.number for page in tables[0].pages] == [0, 1, 4]
    assert (pages.used, pages.high, pages.fresh) == (7, 8, [0, 1, 4])


def test_pages_are_copied_before_a_sharer_writes() -> None:
    pages, (one, two, three) = Pages(), (Table() for _ in range(3))
    assert pages.share(one, PROMPT[:100]) == 0
    pages.write(one, PROMPT[:100])
    assert pages.share(two, PROMPT[:100], ends={1}) == 100  # in the same step: logits and all
    pages.settle()
    assert one.pages == two.pages and pages.used == 2
    assert pages.share(three, PROMPT[:100]) == 99 and pages.copies == [(1, 2, 35)]
    pages.write(three, PROMPT[99:100])
    pages.write(one, [1])
    assert pages.copies == [(1, 2, 35), (1, 3, 36)]
    pages.write(two, [2])
    assert [t.pages[1].ids[-2:] for t in (one, two, three)] == [[PROMPT[99], 1], [PROMPT[99], 2], PROMPT[98:100]]
    assert [t.pages[1].number for t in (one, two, three)] == [3, 1, 2] and pages.used == 4
    for table in (one, two, three):
        pages.release(table)
    assert pages.used == 0 and pages.share(Table(), PROMPT[:100]) == 0


def test_logits_are_shared_only_where_a_step_computes_them() -> None:
    pages, (longer, same, waiting, short) = Pages(), (Table() for _ in range(4))
    pages.write(longer, PROMPT[: PAGE + 1])
    assert pages.share(same, PROMPT[:PAGE], ends={1}) == 0  # the first page's last position is none of them
    pages.settle()
    assert pages.share(waiting, [*PROMPT[:40], 1, 2]) == 40  # and nothing of it is fed in this step
    assert pages.share(short, PROMPT[:40]) == 39


def test_pages_copied_in_a_step_are_no_source_in_it() -> None:
    pages, (one, two, three) = Pages(), (Table() for _ in range(3))
    pages.write(one, PROMPT[:40])
    pages.settle()
    for table in (two, three):
        ids = [*PROMPT[:40], 1, 2, len(pages.copies)]
        pages.write(table, ids[pages.share(table, ids) :])
    assert pages.copies == [(0, 1, 40), (0, 2, 40)]
