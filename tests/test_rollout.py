"""agent_rl.rollout.episode: how an episode ends, what breaks in it, and what it leaves."""

import asyncio
import random
from collections.abc import Iterator

import numpy as np
import pytest

from agent_rl.env import Budget, Env, ToolEnv
from agent_rl.policy import SamplingParams, Scripted, TokenPolicy
from agent_rl.registry import EnvSpec
from agent_rl.rewards import reward
from agent_rl.rollout import Job, run_episode, run_jobs
from agent_rl.tasks import TaskSource
from agent_rl.tool import tool
from agent_rl.types import (
    Episode,
    FinishReason,
    Message,
    Outcome,
    Reward,
    Source,
    Step,
    StepRecord,
    StopReason,
    ToolCall,
)
from tests.doubles import ScriptedSampler, small_renderer

CALL = Message("assistant", tool_calls=(ToolCall("call_0", "roll"),))


class Dice(ToolEnv):
    """Rolls dice; breaks, hangs or stops where its task says."""

    closed: list[str] = []

    def __init__(self, sides: int = 6) -> None:
        if sides < 1:
            raise ValueError("a die has sides")
        self.sides = sides

    async def reset(self, task, rng):
        self.task, self.rng = task, rng
        await self.at("reset")
        return "roll"

    @tool(inline=True)
    def roll(self) -> int:
        return int(self.rng.integers(self.sides)) + 1

    async def step(self, action):
        await self.at("step")
        step = await super().step(action)
        return Step(step.observation, self.task.get("pay", 0.0), step.terminated, bool(self.task.get("truncate")))

    async def at(self, where: str) -> None:
        if self.task.get("break") == where:
            raise KeyError(f"broken {where}")
        if self.task.get("cancel") == where:
            raise asyncio.CancelledError
        if self.task.get("hang") == where:
            await asyncio.Event().wait()

    @reward
    async def six(self, episode) -> float | None:
        await self.at("score")
        return None if self.task.get("unscored") else float(episode.final_text == "6")

    async def close(self) -> None:
        Dice.closed.append(str(self.task.get("name", "")) if hasattr(self, "task") else "unopened")
        await self.at("close")


@pytest.fixture(autouse=True)
def fresh_list() -> Iterator[None]:
    Dice.closed.clear()
    yield


def spec(cls: type[Env] = Dice, budget: Budget | None = None) -> EnvSpec:
    return EnvSpec("dice-v0", cls, TaskSource(), budget or Budget())


def play(*answers: str | Message, breaks: bool = False) -> Scripted:
    def script(opening):
        yield from answers
        if breaks:
            raise OSError("policy lost")

    return Scripted(script)


def run(policy, task=None, budget: Budget | None = None, cls: type[Env] = Dice, **job) -> Episode:
    return asyncio.run(run_episode(Job(spec(cls, budget), task or {}, 0, **job), policy))


def token_policy(*replies: str | Message, max_tokens: int = 64, context_limit: int | None = None) -> TokenPolicy:
    renderer = small_renderer()
    messages = [Message("assistant", r) if isinstance(r, str) else r for r in replies]
    sampler = ScriptedSampler([renderer.reply(m) for m in messages], context_limit=context_limit)
    return TokenPolicy(sampler, renderer, SamplingParams(max_tokens=max_tokens))


# Ends


def test_done_is_the_environment_s_own_end():
    episode = run(play(CALL, "6"))
    assert (episode.stop_reason, episode.outcome) == (StopReason.DONE, Outcome.TERMINATED)
    assert [m.role for m in episode.messages] == ["user", "assistant", "tool", "assistant"]
    assert episode.steps == (StepRecord(1, 0.0, False, False), StepRecord(0, 0.0, True, False))
    assert episode.rewards == (Reward("six", 1.0),)
    assert (episode.turns, episode.reward, episode.success) == (2, 1.0, True)
    assert episode.seconds > 0


def test_the_environment_may_truncate():
    episode = run(play(CALL), {"truncate": True})
    assert (episode.stop_reason, episode.outcome) == (StopReason.ENV_TRUNCATED, Outcome.TRUNCATED)
    assert episode.messages[-1].role == "tool"
    assert episode.steps[-1].truncated


def test_terminated_wins_where_an_environment_says_both():
    assert run(play("6"), {"truncate": True}).outcome is Outcome.TERMINATED


def test_turns_run_out_after_the_last_reply_was_answered():
    episode = run(play(CALL, CALL, CALL), budget=Budget(turns=2))
    assert (episode.stop_reason, episode.outcome) == (StopReason.TURNS, Outcome.TRUNCATED)
    assert episode.turns == 2
    assert [m.role for m in episode.messages].count("tool") == 2


def test_the_last_turn_may_finish_the_task():
    assert run(play(CALL, "6"), budget=Budget(turns=2)).stop_reason is StopReason.DONE


def test_a_call_beyond_the_budget_is_not_made():
    two = Message("assistant", tool_calls=(ToolCall("a", "roll"), ToolCall("b", "roll")))
    episode = run(play(CALL, two), budget=Budget(tool_calls=2))
    assert (episode.stop_reason, episode.outcome) == (StopReason.TOOL_CALLS, Outcome.TRUNCATED)
    assert [m.role for m in episode.messages] == ["user", "assistant", "tool", "assistant"]
    assert episode.steps[-1] == StepRecord(0, 0.0, False, True)
    assert run(play(CALL, CALL, "6"), budget=Budget(tool_calls=2)).stop_reason is StopReason.DONE


@pytest.mark.parametrize(("pays", "reason"), [(8, StopReason.LENGTH), (64, StopReason.TOKENS)])
def test_a_reply_without_an_end_is_cut_by_its_own_limit_or_by_the_budget(pays, reason):
    prompt = small_renderer().prompt([Message("user", "roll")], Dice().tools)
    policy = token_policy("x" * 100, max_tokens=pays)
    episode = run(policy, budget=Budget(tokens=len(prompt) + 16))
    assert (episode.stop_reason, episode.outcome) == (reason, Outcome.TRUNCATED)
    assert len(episode.trajectories[0]) == len(prompt) + min(pays, 16)
    assert episode.steps == (StepRecord(0, 0.0, False, True),)
    assert episode.reward == 0.0


def test_the_policy_s_own_context_limit_ends_an_episode_too():
    prompt = small_renderer().prompt([Message("user", "roll")], Dice().tools)
    episode = run(token_policy("x" * 100, context_limit=len(prompt) + 5), budget=Budget(tokens=1000))
    assert episode.stop_reason is StopReason.TOKENS
    assert len(episode.trajectories[0]) == len(prompt) + 5


def test_an_observation_that_leaves_no_room_ends_the_episode_before_the_engine_sees_it():
    renderer = small_renderer()
    start = renderer.prompt([Message("user", "roll")], Dice().tools) + renderer.reply(CALL)
    episode = run(token_policy(CALL, "never"), budget=Budget(tokens=len(start) + 3))
    assert (episode.stop_reason, episode.outcome) == (StopReason.TOKENS, Outcome.TRUNCATED)
    assert episode.trajectories[0].token_ids.tolist() == start
    assert episode.messages[-1].role == "tool"
    assert episode.turns == 1


@pytest.mark.parametrize("where", ["step", "policy"])
def test_seconds_run_out(where):
    class Hanging:
        def start(self, opening):
            conversation = play(CALL).start(opening)
            if where == "policy":
                conversation.reply = lambda max_tokens=None: asyncio.Event().wait()
            return conversation

    episode = run(Hanging(), {"hang": where}, Budget(seconds=0.005))
    assert (episode.stop_reason, episode.outcome) == (StopReason.SECONDS, Outcome.TRUNCATED)
    assert episode.turns == (where == "step")
    assert episode.reward == 0.0
    assert Dice.closed == [""]


def test_seconds_run_out_where_nothing_is_ever_awaited():
    episode = run(play(*[CALL] * 10_000), budget=Budget(turns=None, seconds=0.003))
    assert episode.stop_reason is StopReason.SECONDS
    assert 0 < episode.turns < 10_000


def test_a_reset_that_takes_too_long_is_nobody_s_truncated_episode():
    episode = run(play("6"), {"hang": "reset"}, Budget(seconds=0.003))
    assert episode.outcome is Outcome.FAILED
    assert episode.error is not None
    assert (episode.error.where, episode.error.message) == ("reset", "reset took more than the budget's 0.003 s")


def test_a_timeout_of_the_environment_s_own_is_a_failure():
    class Late(Dice):
        async def step(self, action):
            raise TimeoutError("upstream")

    episode = run(play("6"), budget=Budget(seconds=60), cls=Late)
    assert (episode.outcome, episode.error and episode.error.message) == (Outcome.FAILED, "upstream")


def test_the_job_s_budget_replaces_the_environment_s():
    jobs = Job(spec(budget=Budget(turns=1)), {}, 0, budget=Budget(turns=3))
    assert asyncio.run(run_episode(jobs, play(CALL, CALL, CALL))).turns == 3


# Rewards


def test_step_rewards_name_their_turn_and_count():
    class Paying(Dice):
        async def step(self, action):
            self.task = {**self.task, "pay": self.task["pays"].pop(0)}
            return await super().step(action)

    episode = run(play(CALL, CALL, "6"), {"pays": [0.5, 0.0, -0.25]}, cls=Paying)
    steps = (Reward("step", 0.5, source="step", turn=0), Reward("step", -0.25, source="step", turn=2))
    assert episode.rewards == (Reward("six", 1.0), *steps)
    assert [s.reward for s in episode.steps] == [0.5, 0.0, -0.25]
    assert episode.reward == 1.25


def test_not_scored_is_none_and_not_zero():
    episode = run(play("6"), {"unscored": True, "pay": 1.0})
    assert episode.trainable
    assert (episode.reward, episode.success) == (None, None)


# Failures


@pytest.mark.parametrize("kind", ["break", "cancel"])
@pytest.mark.parametrize("where", ["make", "reset", "policy", "step", "score"])
def test_a_failure_costs_only_its_own_episode(where, kind):
    if kind == "cancel" and where in ("make", "policy"):
        pytest.skip("no such failure")
    s = spec()
    bad = Job(s, {kind: where, "name": "bad"}, 1, env_args={"sides": 0} if where == "make" else {})
    jobs = [Job(s, {"name": str(i)}, i) for i in range(4)]
    jobs.insert(2, bad)

    def script(opening):
        if opening.env.task.get("break") == "policy":
            raise KeyError("broken policy")
        yield CALL
        yield "6"

    episodes = asyncio.run(run_jobs(jobs, Scripted(script), concurrency=2))
    assert [e.outcome is Outcome.FAILED for e in episodes] == [False, False, True, False, False]
    assert [e.reward for e in episodes] == [1.0, 1.0, None, 1.0, 1.0]
    failed = episodes[2]
    assert (failed.stop_reason, failed.trainable, failed.rewards) == (StopReason.ERROR, False, ())
    assert failed.error is not None
    wanted = {"make": "ValueError"}.get(where, "KeyError" if kind == "break" else "CancelledError")
    assert (failed.error.where, failed.error.type) == (where, wanted)
    assert "Traceback" in failed.error.traceback
    assert kind == "cancel" or ("a die has sides" if where == "make" else f"broken {where}") in failed.error.message
    assert failed.task == bad.task
    assert failed.turns == {"make": 0, "reset": 0, "policy": 0, "step": 1, "score": 2}[where]
    assert sorted(Dice.closed) == ["0", "1", "2", "3"] + ["bad"] * (where != "make")


@pytest.mark.parametrize(
    ("returned", "message"),
    [(None, "'NoneType' object has no attribute 'observation'"), (Step((3,)), "an observation is a str, a Message")],  # type: ignore[arg-type]
)
def test_a_step_that_is_none_is_a_failure_of_the_step(returned, message):
    class Odd(Dice):
        async def step(self, action):
            return returned

    episode = run(play("6"), cls=Odd)
    assert episode.error is not None
    assert episode.error.where == "step"
    assert message in episode.error.message


def test_a_script_that_ends_too_soon_is_a_policy_error():
    episode = run(play(CALL))
    assert episode.error is not None
    assert (episode.error.where, episode.error.type) == ("policy", "PolicyError")
    assert episode.turns == 1


def test_an_aborted_reply_is_no_sample():
    class Aborting(ScriptedSampler):
        def open(self, seed):
            session = super().open(seed)
            sample = session.sample

            async def aborted(*args):
                from dataclasses import replace

                return replace(await sample(*args), finish_reason=FinishReason.ABORT)

            session.sample = aborted
            return session

    renderer = small_renderer()
    episode = run(TokenPolicy(Aborting([renderer.reply(Message("assistant", "6"))]), renderer))
    assert (episode.outcome, episode.reward) == (Outcome.FAILED, None)
    assert episode.error is not None
    assert (episode.error.where, episode.error.message) == ("policy", "the policy aborted its reply")
    assert episode.trajectories[0].loss_mask.any()  # what it did sample is kept, to look at


def test_a_failed_close_is_a_warning_and_the_episode_is_whole():
    with pytest.warns(RuntimeWarning, match=r"dice-v0: close\(\) failed: KeyError: 'broken close'"):
        episode = run(play("6"), {"break": "close"})
    assert episode.reward == 1.0


def test_a_policy_that_can_t_close_keeps_nobody_from_closing_the_environment():
    def script(opening):
        try:
            yield "6"
        finally:
            raise OSError("no clean-up")

    with pytest.warns(RuntimeWarning, match="OSError: no clean-up"):
        episode = run(Scripted(script))
    assert episode.reward == 1.0
    assert Dice.closed == [""]


def test_an_open_script_is_closed():
    ended = []

    def script(opening):
        try:
            while True:
                yield CALL
        finally:
            ended.append(True)

    run(Scripted(script), budget=Budget(turns=2))
    assert ended == [True]


@pytest.mark.parametrize("where", ["reset", "step", "score"])
def test_cancelling_propagates_and_closes(where):
    async def main():
        task = asyncio.create_task(run_episode(Job(spec(), {"hang": where, "name": "it"}, 0), play("6")))
        for _ in range(5):
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert Dice.closed == ["it"]


# Randomness


def test_the_same_seed_gives_the_same_episode_whatever_runs_beside_it():
    jobs = [Job(spec(), {}, seed) for seed in (1, 2, 3, 2, 1)]
    policy = play(CALL, CALL, CALL, CALL, "6")
    together = [e.messages for e in asyncio.run(run_jobs(jobs, policy))]
    alone = [asyncio.run(run_episode(job, policy)).messages for job in reversed(jobs)][::-1]
    assert together == alone
    assert together[0] == together[4] != together[1] == together[3]


def test_no_global_random_state_is_touched():
    before = random.getstate(), np.random.get_state()[1].tolist()  # noqa: NPY002
    run(token_policy(CALL, "6"))
    run(play(CALL, "6"))
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before  # noqa: NPY002


def test_ids_are_given_or_unique():
    episodes = [run(play("6")) for _ in range(3)]
    assert len({e.id for e in episodes}) == 3
    assert run(play("6"), id="mine").id == "mine"


def test_an_episode_says_what_it_was():
    episode = run(token_policy(CALL, "6"), {"name": "n"}, group_id="g", env_args={"sides": 4})
    assert (episode.env, episode.task, episode.seed, episode.group_id) == ("dice-v0", {"name": "n"}, 0, "g")
    assert episode.env_args == {"sides": 4}
    assert "agent_rl" in episode.versions
    sources = [s.source for s in episode.trajectories[0].spans]
    assert sources == [Source.PROMPT, Source.POLICY, Source.TEMPLATE, Source.ENV, Source.POLICY]
