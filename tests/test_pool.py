"""agent_rl.rollout.pool: many episodes at once, and a failure that costs only its own."""

import asyncio
import gc
from dataclasses import replace

import pytest

from agent_rl.core.episode import Outcome, StopReason
from agent_rl.core.messages import Message, Step
from agent_rl.core.trajectory import FinishReason
from agent_rl.engines.scripted import ScriptedEngine
from agent_rl.errors import ConfigError
from agent_rl.gym.budget import Budget
from agent_rl.policy import Scripted, TokenPolicy
from agent_rl.rollout import Job, group_jobs, run_episode, run_jobs, stream_jobs
from tests.doubles import CALL, Dice, dice_spec, play, run_dice, small_renderer


@pytest.fixture(autouse=True)
def nothing_closed_yet():
    Dice.closed.clear()


# Failures


@pytest.mark.parametrize(
    ("where", "kind"),
    [(where, "break") for where in ("make", "reset", "policy", "step", "score")]
    + [(where, kind) for kind in ("cancel", "cancel itself", "panic") for where in ("reset", "step", "score")],
)
def test_failure_costs_its_own_episode_only(where, kind):
    s = dice_spec()
    bad = Job(s, {kind: where, "name": "bad"}, 1, env_args={"sides": 0} if where == "make" else {})
    jobs = [Job(s, {"name": str(i)}, i) for i in range(4)]
    jobs.insert(2, bad)

    def script(env, seed):
        if env.task.get("break") == "policy":
            raise KeyError("broken policy")
        yield CALL
        yield "6"

    episodes = asyncio.run(run_jobs(jobs, Scripted(script), concurrency=2))
    assert [e.outcome is Outcome.FAILED for e in episodes] == [False, False, True, False, False]
    assert [e.reward for e in episodes] == [1.0, 1.0, None, 1.0, 1.0]
    failed = episodes[2]
    assert (failed.stop_reason, failed.trainable, failed.rewards) == (StopReason.ERROR, False, ())
    assert failed.error is not None
    raised = {"break": "KeyError", "panic": "Panic"}.get(kind, "CancelledError")
    wanted = {"make": "ValueError"}.get(where, raised)
    assert (failed.error.where, failed.error.type) == (where, wanted)
    assert "Traceback" in failed.error.traceback
    assert kind != "break" or ("a die has sides" if where == "make" else f"broken {where}") in failed.error.message
    assert failed.task == bad.task
    assert failed.turns == {"make": 0, "reset": 0, "policy": 0, "step": 1, "score": 2}[where]
    assert sorted(Dice.closed) == ["0", "1", "2", "3"] + ["bad"] * (where != "make")


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (None, "step returned None: return ar.Step(observation, "),
        (((), 0.0, True, False, {}), "a tuple of 5"),
        (Step((3,)), "an observation is a str, a Message"),
    ],  # type: ignore[arg-type]
)
def test_invalid_step_fails_the_episode(returned, message):
    class Odd(Dice):
        async def step(self, action):
            return returned

    episode = run_dice(play("6"), cls=Odd)
    assert episode.error is not None
    assert episode.error.where == "step"
    assert message in episode.error.message


def test_exhausted_script_is_a_policy_error():
    episode = run_dice(play(CALL))
    assert episode.error is not None
    assert (episode.error.where, episode.error.type) == ("policy", "PolicyError")
    assert episode.turns == 1


def test_aborted_reply_fails_the_episode():
    class Aborting(ScriptedEngine):
        def open(self, seed):
            session = super().open(seed)
            sample = session.sample

            async def aborted(*args):
                return replace(await sample(*args), finish_reason=FinishReason.ABORT)

            session.sample = aborted
            return session

    renderer = small_renderer()
    episode = run_dice(TokenPolicy(Aborting([renderer.reply(Message("assistant", "6"))]), renderer))
    assert (episode.outcome, episode.reward) == (Outcome.FAILED, None)
    assert episode.error is not None
    assert (episode.error.where, episode.error.message) == ("policy", "the policy aborted its reply")
    assert episode.trajectories[0].loss_mask.any()  # the sampled tokens are kept


def test_failed_close_is_a_warning():
    with pytest.warns(RuntimeWarning, match=r"dice-v0: close\(\) failed: KeyError: 'broken close'"):
        episode = run_dice(play("6"), {"break": "close"})
    assert episode.reward == 1.0


def test_failing_policy_close_still_closes_the_environment():
    def script(env, seed):
        try:
            yield "6"
        finally:
            raise OSError("no clean-up")

    with pytest.warns(RuntimeWarning, match="OSError: no clean-up"):
        episode = run_dice(Scripted(script))
    assert episode.reward == 1.0
    assert Dice.closed == [""]


def test_open_script_is_closed():
    ended = []

    def script(env, seed):
        try:
            while True:
                yield CALL
        finally:
            ended.append(True)

    run_dice(Scripted(script), budget=Budget(turns=2))
    assert ended == [True]


@pytest.mark.parametrize("where", ["reset", "step", "score"])
def test_cancelling_an_episode_closes_it(where):
    async def main():
        task = asyncio.create_task(run_episode(Job(dice_spec(), {"hang": where, "name": "it"}, 0), play("6")))
        for _ in range(5):
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert Dice.closed == ["it"]


# Pools


def counting(counts: list[int]):
    """Dice that note how many of them are open at once, and take a moment."""

    class Counting(Dice):
        open = 0

        async def reset(self, task, rng):
            Counting.open += 1
            counts.append(Counting.open)
            await asyncio.sleep(0)
            return await super().reset(task, rng)

        async def close(self):
            Counting.open -= 1

    return dice_spec(Counting)


@pytest.mark.parametrize(("concurrency", "most"), [(1, 1), (3, 3), (64, 7)])
def test_run_jobs_bounds_concurrency(concurrency, most):
    counts: list[int] = []
    s = counting(counts)
    episodes = asyncio.run(run_jobs([Job(s, {"i": i}, i) for i in range(7)], play("6"), concurrency=concurrency))
    assert [e.task["i"] for e in episodes] == list(range(7))
    assert max(counts) == most


def test_run_jobs_returns_episodes_in_order():
    class Slow(Dice):
        async def reset(self, task, rng):
            for _ in range(task["wait"]):
                await asyncio.sleep(0)
            return await super().reset(task, rng)

    seen: list[int] = []
    jobs = [Job(dice_spec(Slow), {"wait": wait}, 0) for wait in (20, 1, 10)]
    episodes = asyncio.run(run_jobs(jobs, play("6"), on_episode=lambda e: seen.append(e.task["wait"])))
    assert seen == [1, 10, 20]
    assert [e.task["wait"] for e in episodes] == [20, 1, 10]


def test_stream_jobs_draws_jobs_lazily():
    drawn: list[int] = []

    def jobs():
        for i in range(100):
            drawn.append(i)
            yield Job(dice_spec(), {"hang": "step"} if i else {}, i)

    async def main():
        stream = stream_jobs(jobs(), play("6"), concurrency=4)
        index, episode = await anext(stream)
        assert (index, episode.reward) == (0, 1.0)
        await asyncio.sleep(0)
        await stream.aclose()

    asyncio.run(main())
    assert drawn == [0, 1, 2, 3, 4]
    assert len(Dice.closed) == 5


@pytest.mark.parametrize("first", [0, 1])
def test_overlapping_streams_give_the_garbage_collector_back(first):
    usual = gc.get_threshold()

    async def main():
        streams = [
            stream_jobs([Job(dice_spec(), {}, i) for i in range(2)], play("6"), concurrency=n) for n in (300, 500)
        ]
        for stream in streams:
            await anext(stream)
        assert gc.get_threshold() == (8000, *usual[1:])
        await streams[first].aclose()
        assert usual[0] < gc.get_threshold()[0] < 8000
        await streams[1 - first].aclose()

    asyncio.run(main())
    assert gc.get_threshold() == usual


def test_run_jobs_takes_no_jobs():
    assert asyncio.run(run_jobs([], play())) == []


@pytest.mark.parametrize("jobs", [0, 1])
def test_run_jobs_refuses_a_concurrency_of_zero(jobs):
    with pytest.raises(ConfigError, match="concurrency=0"):
        asyncio.run(run_jobs([Job(dice_spec(), {}, 0)] * jobs, play("6"), concurrency=0))


def test_stream_jobs_raises_source_errors_last():
    def jobs():
        yield Job(dice_spec(), {"name": "first"}, 0)
        raise OSError("no more tasks")

    got = []

    async def main():
        async for _, episode in stream_jobs(jobs(), play("6"), concurrency=2):
            got.append(episode.reward)

    with pytest.raises(OSError, match="no more tasks"):
        asyncio.run(main())
    assert got == [1.0]
    assert Dice.closed == ["first"]


def test_run_jobs_stops_at_a_raising_callback():
    def stop(episode):
        raise BufferError("disk full")

    async def main():
        jobs = [Job(dice_spec(), {"name": "quick"}, 0), Job(dice_spec(), {"name": "stuck", "hang": "step"}, 0)]
        with pytest.raises(BufferError):
            await run_jobs(jobs, play("6"), on_episode=stop)
        assert Dice.closed == ["quick", "stuck"]
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(main())


def test_cancelling_the_pool_closes_everything():
    async def main():
        jobs = [Job(dice_spec(), {"name": str(i), "hang": "step"}, i) for i in range(5)]
        pool = asyncio.create_task(run_jobs(jobs, play("6"), concurrency=3))
        for _ in range(5):
            await asyncio.sleep(0)
        pool.cancel()
        with pytest.raises(asyncio.CancelledError):
            await pool
        assert sorted(Dice.closed) == ["0", "1", "2"]

    asyncio.run(main())


def test_group_jobs_share_a_task_with_own_seeds():
    dice = dice_spec()
    first, again = (group_jobs(dice, {"q": 1}, 4, 7, env_args={"sides": 3}) for _ in range(2))
    assert first == again
    assert len({j.seed for j in first}) == 4
    assert len({j.group_id for j in first}) == 1
    assert all(j.env_args == {"sides": 3} for j in first)
    others = group_jobs(dice, {"q": 1}, 4, 8), group_jobs(dice, {"q": 2}, 4, 7)
    ids = {j.group_id for jobs in (first, *others) for j in jobs}
    assert len(ids) == 3
    assert len({j.seed for jobs in (first, *others) for j in jobs}) == 12
