"""Code of an environment that never returns: only its own episode fails, in time."""

import asyncio
import os
import subprocess
import sys
import threading
import time
from functools import partial

import pytest

from agent_rl.core.episode import Outcome
from agent_rl.core.meter import wait_uncounted
from agent_rl.gym.budget import Budget
from agent_rl.gym.reward import reward
from agent_rl.rollout import Job, run_jobs
from agent_rl.worker_threads import WorkerCall, in_thread
from tests.doubles import Dice, dice_spec, play, run_dice

SHORT = Budget(score_seconds=0.05, close_seconds=0.05)


@pytest.fixture
def release():
    event = threading.Event()
    yield event
    event.set()


@pytest.mark.parametrize("way", ["sync", "async"])
def test_reward_timeout_fails_its_episode(way, release):
    cancelled = []

    class Sync(Dice):
        @reward
        def judge(self, episode) -> float:
            if self.task.get("hang") == "judge":
                release.wait(30)
            return 1.0

    class Async(Dice):
        @reward
        async def judge(self, episode) -> float:
            try:
                await self.at("judge")
            except asyncio.CancelledError:
                cancelled.append(True)
                raise
            return 1.0

    spec = dice_spec(Sync if way == "sync" else Async, SHORT)
    started = time.monotonic()
    hung, fine = asyncio.run(run_jobs([Job(spec, {"hang": "judge"}, 0), Job(spec, {}, 0)], play("6")))
    assert time.monotonic() - started < 10
    assert (hung.outcome, hung.reward, fine.reward) == (Outcome.FAILED, None, 2.0)
    assert hung.error is not None and (hung.error.where, hung.error.type) == ("score", "TimeoutError")
    assert hung.error.message == "score (of judge) took more than the budget's 0.05 s"
    assert cancelled == [True] * (way == "async")


def test_score_leaves_out_the_wait_for_a_turn():
    class Patient(Dice):
        @reward
        async def judge(self, episode) -> float:
            await wait_uncounted(asyncio.sleep(0.5))
            return 1.0

    spec = dice_spec(Patient, Budget(score_seconds=0.3))
    (episode,) = asyncio.run(run_jobs([Job(spec, {}, 0)], play("6")))
    assert episode.reward == 2.0, episode.error


def test_reset_leaves_out_the_wait_for_a_turn():
    class Patient(Dice):
        async def reset(self, task, rng):
            await wait_uncounted(asyncio.sleep(0.15))
            return await super().reset(task, rng)

    (episode,) = asyncio.run(run_jobs([Job(dice_spec(Patient, Budget(seconds=0.1)), {}, 0)], play("6")))
    assert episode.error is None


@pytest.mark.parametrize("way", ["sync", "async"])
def test_close_timeout_is_a_warning(way, release):
    class Sync(Dice):
        def close(self):  # type: ignore[override]
            release.wait(30)

    cls, task = (Sync, {}) if way == "sync" else (Dice, {"hang": "close"})
    with pytest.warns(RuntimeWarning, match=r"dice-v0: close\(\) failed: TimeoutError: close took more than .* 0.05 s"):
        episode = run_dice(play("6"), task, SHORT, cls)
    assert episode.reward == 1.0


def test_reward_keeps_its_own_timeout_error():
    class Late(Dice):
        @reward
        def judge(self, episode) -> float:
            raise TimeoutError("upstream")

    episode = run_dice(play("6"), budget=SHORT, cls=Late)
    assert episode.error is not None and (episode.error.where, episode.error.message) == ("score", "upstream")


def test_sync_rewards_run_in_turn():
    seen = []

    class Two(Dice):
        @reward
        def first(self, episode) -> float:
            time.sleep(0.01)
            seen.append("first")
            return 1.0

        @reward
        def second(self, episode) -> float:
            seen.append("second")
            return 0.5

    assert [r.name for r in run_dice(play("6"), cls=Two).rewards] == ["six", "first", "second"]
    assert seen == ["first", "second"]


@pytest.mark.parametrize("where", ["reward", "tool"])
def test_exit_does_not_wait_for_stuck_threads(where):
    code = f"""
import threading, agent_rl as ar
@ar.register("stuck-v0", budget=ar.Budget(score_seconds=0.05))
class Stuck(ar.ToolEnv):
    def reset(self, task, rng): return "?"
    @ar.tool(timeout=0.05)
    def ask(self) -> str: return threading.Event().wait() if {where!r} == "tool" else ""
    @ar.reward
    def judge(self, episode) -> float: return threading.Event().wait() if {where!r} == "reward" else 1.0
    def oracle(self):
        (result,) = yield ar.Message("assistant", tool_calls=(ar.ToolCall("c", "ask"),))
        yield result.content
(episode,) = ar.run("stuck-v0")
print(episode.outcome, episode.final_text, episode.error and episode.error.message)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    wanted = {
        "tool": "terminated error: timeout: ask took more than 0.05 s None",
        "reward": "failed  score (of judge) took more than the budget's 0.05 s",
    }
    assert done.stdout.strip() == wanted[where], done.stderr


# Worker threads


def test_slow_calls_hold_up_the_loop_once():
    async def main():
        for is_known_as_slow in (False, True):
            turns, ended = [], threading.Event()
            asyncio.get_running_loop().call_soon(turns.append, 1)
            slow = WorkerCall(partial(ended.wait, 30), "judge", quick=True)
            assert not await slow.returns_quickly()
            assert (not turns) == is_known_as_slow
            ended.set()
            assert await slow.result()
        quick = [
            await in_thread(int, "judge") or await WorkerCall(int, "judge", quick=True).returns_quickly()
            for _ in range(50)
        ]
        assert any(quick)  # after a quick one; not each time where the machine is busy

    asyncio.run(main())


def test_worker_threads_are_reused(release):
    async def main():
        first = await in_thread(threading.current_thread, "first")
        assert await in_thread(threading.current_thread, "second") is first
        stuck = WorkerCall(lambda: (threading.current_thread(), release.wait(30)), "stuck")
        other = await in_thread(threading.current_thread, "third")
        assert other is not first and first.daemon and other.daemon
        release.set()
        assert (await stuck.result())[0] is first and first.name == "stuck"

    asyncio.run(main())


def test_worker_calls_all_return_under_load():
    async def main():
        calls = [in_thread(lambda i=i: time.sleep(0.001 * (i % 3)) or i, "call", quick=i % 2 == 0) for i in range(200)]
        assert await asyncio.gather(*calls) == list(range(200))

    asyncio.run(main())
    time.sleep(0.05)
    assert sum(type(t).__name__ == "_Worker" for t in threading.enumerate()) <= 70


def test_quick_calls_of_a_turn_share_a_worker():
    async def main():
        calls = [in_thread(threading.current_thread, "quick", quick=True) for _ in range(20)]
        return await asyncio.gather(*calls)

    assert any(len(set(asyncio.run(main()))) == 1 for _ in range(20))  # not each time where the machine is busy


def test_quick_calls_behind_a_stuck_one_return(release):
    async def main():
        stuck = WorkerCall(lambda: release.wait(30), "stuck", quick=True)
        behind = [WorkerCall(lambda i=i: i, "behind", quick=True) for i in range(20)]
        assert not await stuck.returns_quickly()
        assert [await call.result() for call in behind] == list(range(20))
        release.set()
        assert await stuck.result()

    asyncio.run(main())


def test_quick_call_that_is_cancelled_in_time_is_not_made():
    made = []

    async def main():
        given_up = asyncio.create_task(in_thread(lambda: made.append(1), "given up", quick=True))
        await asyncio.sleep(0)
        given_up.cancel()
        await asyncio.wait([given_up])
        await in_thread(lambda: made.append(2), "kept", quick=True)

    asyncio.run(main())
    assert made == [2]


def test_worker_call_raises_the_error_of_its_function():
    def fails():
        raise SystemExit("out")

    with pytest.raises(SystemExit, match="out"):
        asyncio.run(in_thread(fails, "fails", quick=True))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_worker_calls_return_after_a_fork():
    asyncio.run(in_thread(int, "before"))
    child = os.fork()
    if not child:
        try:
            asyncio.run(asyncio.wait_for(in_thread(int, "after"), 60))
        except BaseException:
            os._exit(1)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
