"""agent_rl.rollout.episode: the end of an episode, its rewards and its randomness."""

import asyncio
import random
from dataclasses import replace

import numpy as np
import pytest

from agent_rl.api import run
from agent_rl.core.episode import Outcome, Reward, StepRecord, StopReason
from agent_rl.core.messages import Message, Step, ToolCall, ToolErrorKind
from agent_rl.core.trajectory import Source
from agent_rl.gym.budget import Budget
from agent_rl.gym.env import Env
from agent_rl.gym.registry import EnvSpec, register
from agent_rl.gym.tasks import TaskSource
from agent_rl.rollout import Job, run_episode, run_jobs
from tests.doubles import CALL, Dice, dice_spec, play, run_dice, small_renderer, token_policy


@pytest.fixture(autouse=True)
def nothing_closed_yet():
    Dice.closed.clear()


# Ends


def test_episode_done_by_the_environment_terminates():
    episode = run_dice(play(CALL, "6"))
    assert (episode.stop_reason, episode.outcome) == (StopReason.DONE, Outcome.TERMINATED)
    assert [m.role for m in episode.messages] == ["user", "assistant", "tool", "assistant"]
    assert episode.steps == (StepRecord(1, 0.0, False, False), StepRecord(0, 0.0, True, False))
    assert episode.rewards == (Reward("six", 1.0),)
    assert (episode.turns, episode.reward, episode.success) == (2, 1.0, True)
    assert episode.seconds > 0


def test_environment_truncates_the_episode():
    episode = run_dice(play(CALL), {"truncate": True})
    assert (episode.stop_reason, episode.outcome) == (StopReason.ENV_TRUNCATED, Outcome.TRUNCATED)
    assert episode.messages[-1].role == "tool"
    assert episode.steps[-1].truncated


def test_terminated_wins_over_truncated():
    assert run_dice(play("6"), {"truncate": True}).outcome is Outcome.TERMINATED


def test_turns_budget_ends_after_the_last_observation():
    episode = run_dice(play(CALL, CALL, CALL), budget=Budget(turns=2))
    assert (episode.stop_reason, episode.outcome) == (StopReason.TURNS, Outcome.TRUNCATED)
    assert episode.turns == 2
    assert [m.role for m in episode.messages].count("tool") == 2


def test_last_turn_can_finish_the_task():
    assert run_dice(play(CALL, "6"), budget=Budget(turns=2)).stop_reason is StopReason.DONE


def test_tool_calls_budget_drops_the_excess_call():
    two = Message("assistant", tool_calls=(ToolCall("a", "roll"), ToolCall("b", "roll")))
    episode = run_dice(play(CALL, two), budget=Budget(tool_calls=2))
    assert (episode.stop_reason, episode.outcome) == (StopReason.TOOL_CALLS, Outcome.TRUNCATED)
    assert [m.role for m in episode.messages] == ["user", "assistant", "tool", "assistant"]
    assert episode.steps[-1] == StepRecord(0, 0.0, False, True)
    assert run_dice(play(CALL, CALL, "6"), budget=Budget(tool_calls=2)).stop_reason is StopReason.DONE


@pytest.mark.parametrize(("pays", "reason"), [(8, StopReason.LENGTH), (64, StopReason.TOKENS)])
def test_reply_is_cut_by_its_limit_or_budget(pays, reason):
    prompt = small_renderer().prompt([Message("user", "roll")], Dice().tools)
    policy = token_policy("x" * 100, max_tokens=pays)
    episode = run_dice(policy, budget=Budget(tokens=len(prompt) + 16))
    assert (episode.stop_reason, episode.outcome) == (reason, Outcome.TRUNCATED)
    assert len(episode.trajectories[0]) == len(prompt) + min(pays, 16)
    assert episode.steps == (StepRecord(0, 0.0, False, True),)
    assert episode.reward == 0.0


def test_context_limit_of_the_policy_ends_the_episode():
    prompt = small_renderer().prompt([Message("user", "roll")], Dice().tools)
    episode = run_dice(token_policy("x" * 100, context_limit=len(prompt) + 5), budget=Budget(tokens=1000))
    assert episode.stop_reason is StopReason.TOKENS
    assert len(episode.trajectories[0]) == len(prompt) + 5


def test_oversized_observation_ends_the_episode():
    renderer = small_renderer()
    start = renderer.prompt([Message("user", "roll")], Dice().tools) + renderer.reply(CALL)
    episode = run_dice(token_policy(CALL, "never"), budget=Budget(tokens=len(start) + 3))
    assert (episode.stop_reason, episode.outcome) == (StopReason.TOKENS, Outcome.TRUNCATED)
    assert episode.trajectories[0].token_ids.tolist() == start
    assert episode.messages[-1].role == "tool"
    assert episode.turns == 1


def test_opening_over_budget_fails_the_episode():
    prompt = small_renderer().prompt([Message("user", "roll")], Dice().tools)
    episode = run_dice(token_policy("6"), budget=Budget(tokens=len(prompt)))
    assert (episode.outcome, episode.reward, episode.turns) == (Outcome.FAILED, None, 0)
    assert f"takes {len(prompt)} tokens, and budget.tokens={len(prompt)} leaves" in episode.error.message
    episode = run_dice(token_policy("6", context_limit=len(prompt) - 2), budget=Budget(tokens=None))
    assert f"the policy's context of {len(prompt) - 2} leaves" in episode.error.message


def test_seconds_budget_ends_a_hung_step():
    episode = run_dice(play(CALL), {"hang": "step"}, Budget(seconds=0.2))
    assert (episode.stop_reason, episode.outcome) == (StopReason.SECONDS, Outcome.TRUNCATED)
    assert episode.turns == 1
    assert episode.reward == 0.0
    assert Dice.closed == [""]


class Waiting:
    """Plays a call and an answer; each reply waits for `wait()`, as for an engine."""

    def __init__(self, wait):
        self.wait = wait

    def start_in(self, env, seed):
        conversation = play(CALL, "6").start_in(env, seed)
        answer = conversation.reply

        async def reply(max_tokens=None):
            await self.wait()
            return await answer(max_tokens)

        conversation.reply = reply
        return conversation


class Clock:
    """In place of the module `time`: it moves on request."""

    now = 0.0

    def perf_counter(self):
        return self.now

    async def pass_time(self):
        self.now += 100


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr("agent_rl.rollout.clock.time", clock)
    return clock


def test_seconds_budget_leaves_out_the_engine(clock):
    episode = run_dice(Waiting(clock.pass_time), budget=Budget(seconds=60))
    assert (episode.stop_reason, episode.reward, episode.seconds) == (StopReason.DONE, 1.0, 200)


def test_hung_engine_leaves_the_episode_unscored():
    episode = run_dice(Waiting(asyncio.Event().wait), budget=Budget(seconds=60, reply_seconds=0.005))
    assert (episode.outcome, episode.reward) == (Outcome.FAILED, None)
    assert (episode.error.where, episode.error.type) == ("policy", "TimeoutError")
    assert episode.error.message == "a reply took more than budget.reply_seconds=0.005"
    assert Dice.closed == [""]


def test_seconds_budget_ends_a_busy_episode():
    episode = run_dice(play(*[CALL] * 10_000), budget=Budget(turns=None, seconds=0.02))
    assert episode.stop_reason is StopReason.SECONDS
    assert 0 < episode.turns < 10_000


def test_slow_reset_fails_the_episode():
    episode = run_dice(play("6"), {"hang": "reset"}, Budget(seconds=0.003))
    assert episode.outcome is Outcome.FAILED
    assert episode.error is not None
    assert (episode.error.where, episode.error.message) == ("reset", "reset took more than the budget's 0.003 s")


def test_slow_sync_reset_fails_the_episode(clock):
    class Slow(Dice):
        def reset(self, task, rng):
            clock.now += 100
            return "roll"

    episode = run_dice(play("6"), budget=Budget(seconds=60), cls=Slow)
    assert (episode.outcome, episode.error.message) == (Outcome.FAILED, "reset took more than the budget's 60 s")


def test_timeout_error_of_the_environment_is_failure():
    class Late(Dice):
        async def step(self, action):
            raise TimeoutError("upstream")

    episode = run_dice(play("6"), budget=Budget(seconds=60), cls=Late)
    assert (episode.outcome, episode.error and episode.error.message) == (Outcome.FAILED, "upstream")


def test_job_budget_replaces_the_environment_budget():
    jobs = Job(dice_spec(budget=Budget(turns=1)), {}, 0, budget=Budget(turns=3))
    assert asyncio.run(run_episode(jobs, play(CALL, CALL, CALL))).turns == 3


# Rewards


def test_step_rewards_name_their_turn_and_count():
    class Paying(Dice):
        async def step(self, action):
            self.task = {**self.task, "pay": self.task["pays"].pop(0)}
            return await super().step(action)

    episode = run_dice(play(CALL, CALL, "6"), {"pays": [0.5, 0.0, -0.25]}, cls=Paying)
    steps = (Reward("step", 0.5, source="step", turn=0), Reward("step", -0.25, source="step", turn=2))
    assert episode.rewards == (Reward("six", 1.0), *steps)
    assert [s.reward for s in episode.steps] == [0.5, 0.0, -0.25]
    assert episode.reward == 1.25


def test_step_rewards_alone_that_earn_nothing_are_no_success():
    class Paid(Env):
        def reset(self, task, rng):
            return "go"

        def step(self, action):
            return Step(reward=float(action.content), terminated=True)

    episodes = [asyncio.run(run_episode(Job(dice_spec(Paid), {}, 0), play(earned))) for earned in ("0", "0.5", "1")]
    assert [(e.reward, e.success) for e in episodes] == [(0.0, False), (0.5, False), (1.0, True)]


@pytest.mark.parametrize("steps", [6, 10])
def test_step_rewards_that_add_up_to_one_are_success(steps):
    class Climb(Env):
        def reset(self, task, rng):
            self.climbed = 0
            return "go"

        def step(self, action):
            self.climbed += 1
            return Step("on", reward=1 / steps, terminated=self.climbed == steps)

    episode = asyncio.run(run_episode(Job(dice_spec(Climb), {}, 0), play(*["up"] * steps)))
    assert episode.reward == pytest.approx(1.0) and episode.success
    assert not replace(episode, rewards=episode.rewards[1:]).success


def test_episode_reward_is_none_without_every_score():
    episode = run_dice(play("6"), {"unscored": True, "pay": 1.0})
    assert episode.trainable
    assert (episode.reward, episode.success) == (None, None)


# Randomness


def test_episode_depends_on_its_seed_only():
    jobs = [Job(dice_spec(), {}, seed) for seed in (1, 2, 3, 2, 1)]
    policy = play(CALL, CALL, CALL, CALL, "6")
    together = [e.messages for e in asyncio.run(run_jobs(jobs, policy))]
    alone = [asyncio.run(run_episode(job, policy)).messages for job in reversed(jobs)][::-1]
    assert together == alone
    assert together[0] == together[4] != together[1] == together[3]


def test_episode_leaves_global_random_state():
    before = random.getstate(), np.random.get_state()[1].tolist()
    run_dice(token_policy(CALL, "6"))
    run_dice(play(CALL, "6"))
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before


def test_episode_ids_are_given_or_unique():
    episodes = [run_dice(play("6")) for _ in range(3)]
    assert len({e.id for e in episodes}) == 3
    assert run_dice(play("6"), id="mine").id == "mine"


def test_episode_records_its_job():
    episode = run_dice(token_policy(CALL, "6"), {"name": "n"}, group_id="g", env_args={"sides": 4})
    assert (episode.env, episode.task, episode.seed, episode.group_id) == ("dice-v0", {"name": "n"}, 0, "g")
    assert episode.env_args == {"sides": 4}
    assert "agent_rl" in episode.versions
    sources = [s.source for s in episode.trajectories[0].spans]
    assert sources == [Source.PROMPT, Source.POLICY, Source.TEMPLATE, Source.ENV, Source.POLICY]


# Environments


@pytest.mark.parametrize("spoil", [lambda task: task.pop("answer"), lambda task: task["notes"].append("!")])
def test_reset_changes_its_own_task_only(spoil):
    class Spoiling(Env):
        def reset(self, task, rng):
            spoil(task)
            return str(task)

        def step(self, action):
            return Step((), terminated=True)

    task = {"answer": 6, "notes": ["?"]}
    spec = EnvSpec("", "spoiling", 0, Spoiling, TaskSource({"train": [task]}), Budget())
    episodes = [asyncio.run(run_episode(Job(spec, task, seed), play("done"))) for seed in range(2)]
    assert task == {"answer": 6, "notes": ["?"]} and [e.task for e in episodes] == [task, task]
    assert episodes[0].messages[0] == episodes[1].messages[0]


def test_final_text_is_the_last_assistant_answer():
    class Farewell(Env):
        def reset(self, task, rng):
            return "?"

        def step(self, action):
            return Step("bye", terminated=True)

    spec = EnvSpec("", "farewell", 0, Farewell, TaskSource(), Budget())
    episode = asyncio.run(run_episode(Job(spec, {}, 0), play("6")))
    assert episode.messages[-1] == Message("user", "bye") and episode.final_text == "6"
    assert run_dice(play(CALL), budget=Budget(turns=1)).final_text == ""


@register("popping-step-v0", tasks=[{"x": x} for x in range(4)])
class PoppingStep(Env):
    def reset(self, task, rng):
        self.x = task["x"]
        return "go"

    def step(self, action):
        arguments = action.tool_calls[0].arguments
        return Step(f"{arguments.pop('x')}{arguments['list'].pop()}", terminated=True)

    def oracle(self):
        yield Message("assistant", tool_calls=(ToolCall("call_0", "go", {"x": self.x, "list": [7]}),))


def test_step_that_changes_arguments_leaves_the_call():
    (episode,) = run("popping-step-v0", "oracle", n=1, split="train")
    (call,) = episode.messages[1].tool_calls
    assert (call.arguments, episode.error) == ({"x": episode.task["x"], "list": [7]}, None)


def test_step_stores_truth_values_that_can_be_read_again():
    class Ones(PoppingStep):
        def step(self, action):
            return Step("go", 1, 1, 0)

    spec = EnvSpec("", "ones", 0, Ones, TaskSource({"train": [{"x": 1}]}), Budget())
    (step,) = asyncio.run(run_episode(Job(spec, {"x": 1}, 0), play("6"))).steps
    assert step.terminated is True and step.truncated is False
    for wrong in ({"name": 5}, {"tool_call_id": 1}, {"reasoning": ["a"]}, {"tool_calls": (ToolCall(7, "f"),)}):
        with pytest.raises(TypeError, match="give"):
            Message("tool", "x", **wrong)
    with pytest.raises(ValueError, match="oops"):
        Message("tool", "x", tool_error="oops")
    assert Message("tool", "x", tool_error="timeout").tool_error is ToolErrorKind.TIMEOUT
