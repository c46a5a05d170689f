"""Sub-agents: contexts of their own within an episode, whose tokens are trained with it."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

from agent_rl.algorithms import Algorithm, AlgorithmConfig, Experience, ScoredRows
from agent_rl.algorithms.samples import collate, to_samples
from agent_rl.backends.embedded.check import check_run
from agent_rl.backends.embedded.config import ModelConfig
from agent_rl.backends.embedded.fresh import fresh_actor
from agent_rl.backends.embedded.model import make_model
from agent_rl.backends.embedded.rollouts import RolloutSampler
from agent_rl.backends.settings import training_config
from agent_rl.core.episode import Episode, EpisodeGroup, Outcome, Reward, StopReason
from agent_rl.core.messages import Message, Step, ToolCall
from agent_rl.core.trajectory import Fork, Source
from agent_rl.engines.base import SamplingParams
from agent_rl.engines.embedded.engine import Engine
from agent_rl.engines.scripted import ScriptedEngine
from agent_rl.errors import ConfigError
from agent_rl.formats.atif import atif_rows
from agent_rl.gym.budget import Budget
from agent_rl.gym.tool import tool
from agent_rl.policy import TokenPolicy
from agent_rl.policy.baselines import nothing_policy
from agent_rl.policy.delegation import ALONE, EXHAUSTED, SILENT, TASKLESS, Delegation
from agent_rl.policy.interruption import Interruption, interruptions
from agent_rl.policy.shortening import Shortening
from agent_rl.replay.fork import fork_jobs
from agent_rl.rollout import continuation, run_episode, run_jobs
from agent_rl.rollout.evaluation import rollout_metrics
from agent_rl.rollout.job import Job
from agent_rl.rollout.prefix import prefix_of
from agent_rl.store.codec import dump_line, load_line
from tests.doubles import CALL, Dice, UnprovenRenderer, dice_spec, run_dice, sampled, small_renderer
from tests.engines import DEVICE, TINY, assert_sampled_in, shaken
from tests.runs import config
from tests.test_engine import router_choices

RENDERER = small_renderer()


def delegate(*tasks: str, **arguments: object) -> Message:
    calls = [ToolCall(f"call_{i}", "delegate", {"task": task}) for i, task in enumerate(tasks)]
    return Message("assistant", tool_calls=(*calls, *([ToolCall("x", "delegate", arguments)] if arguments else [])))


def delegating(*replies: str | Message, rule: Delegation = Delegation()) -> TokenPolicy:  # noqa: B008 - frozen
    messages = [Message("assistant", r) if isinstance(r, str) else r for r in replies]
    engine = ScriptedEngine(sampled(RENDERER.reply(m) for m in messages))
    return TokenPolicy(engine, RENDERER, SamplingParams(max_tokens=512), delegate=rule)


def played(*replies: str | Message, rule: Delegation = Delegation(), **job: object) -> Episode:  # noqa: B008 - frozen
    return run_dice(delegating(*replies, rule=rule), **job)


def text(episode: Episode, trajectory: int) -> str:
    return RENDERER._tokenizer.decode(episode.trajectories[trajectory].token_ids.tolist(), skip_special_tokens=False)


def said(episode: Episode) -> list[str]:
    return [m.content or m.tool_calls[0].name for m in episode.messages if m.role == "assistant"]


def test_sub_agent_plays_in_its_own_context() -> None:
    episode = played(delegate("roll once"), CALL, "it is 5", "6")
    assert said(episode) == ["roll", "6"] and episode.success
    caller, agent = episode.trajectories
    assert agent.is_delegated and not caller.is_delegated
    assert text(episode, 1).count("roll once") == 1 and "it is 5" in text(episode, 1)
    assert "delegate(task)" in text(episode, 0) and "delegate(task)" not in text(episode, 1)
    assert "tool\nit is 5<|im_end|>" in text(episode, 0) and "roll()" in text(episode, 1)
    rolled = next(m.content for m in episode.messages if m.role == "tool")
    assert f"tool\n{rolled}" in text(episode, 1) and f"tool\n{rolled}" not in text(episode, 0)


def test_delegated_tokens_are_trained_once_in_their_turns() -> None:
    episode = played(delegate("roll once"), CALL, "it is 5", "6")
    samples = to_samples([episode])
    assert [s.loss_mask.sum() for s in samples] == [t.sampled for t in episode.trajectories]
    turns = [sorted({s.turn for s in t.spans if s.source is Source.POLICY}) for t in episode.trajectories]
    assert turns == [[0, 1], [0, 1]]  # the call and what it caused; the answer and what was made of it
    assert rollout_metrics([episode])["rollout/delegated"] == 1 and rollout_metrics([episode])["rollout/forks"] == 0


@pytest.mark.parametrize(
    "replies",
    [
        (delegate("roll once"), CALL, "it is 5", "6"),
        (delegate("a"), "5", CALL, delegate("b"), CALL, CALL, "it", "6"),
        (delegate("a", "b"), "5", CALL, "x", delegate("c"), "y", "6"),
    ],
)
def test_rows_are_read_in_the_order_of_replies(replies: tuple[str | Message, ...]) -> None:
    rows = collate(to_samples([load_line(dump_line(played(*replies)))]))
    said = [RENDERER.reply(Message("assistant", r) if isinstance(r, str) else r) for r in replies]
    assert rows.token_ids[rows.in_time].tolist() == [token for reply in said for token in reply]


def test_sub_agent_of_earlier_version_follows_its_calls_turn() -> None:
    episode = played(delegate("roll once"), CALL, "it is 5", "6")
    before = collate(to_samples([episode])).in_time
    episode.trajectories[1].forked_from = Fork(0, 0, delegated=True)  # it did not say where it was called
    assert torch.equal(collate(to_samples([load_line(dump_line(episode))])).in_time, before)


def test_reward_is_on_the_last_reply_of_its_turn() -> None:
    episode = replace(played(delegate("roll once"), CALL, "it is 5", "6"), rewards=(Reward("whole", 0.5),))
    caller, agent = to_samples([episode])
    assert caller.rewards[caller.loss_mask][-1] == 0.5 and not agent.rewards.any()


def test_delegating_reply_is_closed_in_its_turn() -> None:
    for said in ([delegate("roll once"), "it is 5", "6"], [delegate("roll once"), CALL, CALL, "it is 5", "6"]):
        caller, _ = played(*said).trajectories
        call, closing = (
            next(s for s in caller.spans if s.source is source) for source in (Source.POLICY, Source.TEMPLATE)
        )
        assert (call.turn, closing.turn) == (0, 0) and call.stop == closing.start


@pytest.mark.parametrize("advantage", ["returns", "turn-returns", "turn-gae"])
def test_delegated_tokens_earn_what_comes_after_them(advantage: str) -> None:
    episode = played(delegate("roll once"), CALL, "it is 5", "6")
    rewarded = replace(episode, rewards=(Reward("call", 1.0, turn=0), Reward("whole", 0.5)))
    parts: dict[str, object] = {"advantage": advantage, "objective": "reinforce"}
    if advantage == "turn-gae":
        parts |= {"advantage": {"name": advantage, "lam": 1.0, "whiten": False}, "critic": {"where": "separate"}}
    algorithm = Algorithm(AlgorithmConfig.model_validate(parts))
    x = algorithm.experience([EpisodeGroup("g", (rewarded,))])
    values = torch.arange(len(x.rows.token_ids)) / 100
    batch, *_ = algorithm.compute_weights_in_place_order(x, ScoredRows(x.rows, x.rows.rollout_logprobs, values=values))
    found, turns = batch.advantages[x.rows.loss_mask], x.rows.turns[x.rows.loss_mask]
    in_time = x.rows.in_time
    at_start = [float(values[in_time][x.rows.turns[in_time] == turn][0]) for turn in (0, 1)]
    valued = at_start if advantage == "turn-gae" else [0.0, 0.0]
    for turn, to_come in ((0, 1.5), (1, 0.5)):
        expected = torch.full_like(found[turns == turn], to_come - valued[turn])
        torch.testing.assert_close(found[turns == turn], expected)


@pytest.mark.parametrize(
    ("replies", "turns"),
    [
        ((delegate("roll once"), CALL, "it is 5", "6"), None),
        ((delegate("a"), "5", CALL, delegate("b"), CALL, CALL, "it", "6"), None),
        ((delegate("a", "b"), "5", CALL, "x", delegate("c"), "y", "6"), None),
        ((delegate("a"), CALL), 1),
        ((delegate("a"), "x", "6"), 1),
        ((CALL, "so far", "6"), None),  # a summary
    ],
)
def test_export_holds_the_ids_that_reached_the_environment(replies: tuple[str | Message, ...], turns: int) -> None:
    policy = delegating(*replies)
    if replies[1] == "so far":
        policy = replace(policy, delegate=None, shorten=Shortening(rule="summarise", over_tokens=30))
    episode = run_dice(policy, budget=Budget(turns=turns))
    (row,) = atif_rows([episode])
    found = [s["metrics"]["completion_token_ids"] for s in cast("Any", row["steps"]) if s["source"] == "agent"]
    wanted = [RENDERER.reply(m) for m in episode.messages if m.role == "assistant"]
    assert found == wanted and len(episode.trajectories) > 1


def test_failure_amid_a_turn_counts_nowhere() -> None:
    whole, failed = played("6"), played(CALL, delegate("roll once"))  # the engine has no reply for the sub-agent
    named = [replace(e, steps=tuple(replace(step, state="s") for step in e.steps)) for e in (failed, whole, failed)]
    x = Experience.of([EpisodeGroup("g", tuple(named))])
    assert x.turn_sampled.tolist() == [[True, True], [True, False], [True, True]] and not x.kept[0]


def test_stored_episode_keeps_its_sub_agents() -> None:
    episode = played(delegate("roll once"), CALL, "it is 5", "6")
    stored = load_line(dump_line(episode))
    assert [t.forked_from for t in stored.trajectories] == [t.forked_from for t in episode.trajectories]


def test_calls_are_answered_one_after_the_other() -> None:
    episode = played(delegate("first", "second"), CALL, "one", "two", "6")
    assert [t.is_delegated for t in episode.trajectories] == [False, True, True]
    assert text(episode, 0).index("tool\none") < text(episode, 0).index("tool\ntwo")
    assert said(episode) == ["roll", "6"]


@pytest.mark.parametrize(
    ("reply", "answer"),
    [
        (Message("assistant", tool_calls=(ToolCall("a", "delegate", {"task": " "}),)), TASKLESS),
        (Message("assistant", tool_calls=(ToolCall("a", "delegate", {"job": "x"}),)), TASKLESS),
    ],
)
def test_call_without_task_is_answered(reply: Message, answer: str) -> None:
    episode = played(reply, "6")
    assert f"tool\n{answer}" in text(episode, 0) and len(episode.trajectories) == 1 and said(episode) == ["6"]


def test_other_calls_beside_a_delegation_are_not_made() -> None:
    both = Message("assistant", tool_calls=(ToolCall("a", "delegate", {"task": "think"}), ToolCall("b", "roll", {})))
    episode = played(both, "done", "6")
    assert f"tool\n{ALONE}" in text(episode, 0) and not episode.tool_calls


def test_sub_agents_are_bounded_in_number_and_turns() -> None:
    episode = played(delegate("one"), CALL, CALL, delegate("two"), "6", rule=Delegation(most=1, turns=1))
    assert said(episode) == ["roll", "6"]
    assert f"tool\n{SILENT}" in text(episode, 0) and f"tool\n{EXHAUSTED}" in text(episode, 0)


def test_budget_of_tokens_holds_in_each_context() -> None:
    whole = played(delegate("roll " * 20), CALL, "it is 5", "6")
    budget = Budget(tokens=len(whole.trajectories[1]) - 1)
    assert played(delegate("roll " * 20), CALL, "it is 5", "6", budget=budget).stop_reason is StopReason.TOKENS


def test_full_caller_ends_the_episode_by_its_tokens() -> None:
    whole = played(delegate("a"), "x", "y " * 60)
    for room in (30, 1):
        cut = played(delegate("a"), "x", "y " * 60, budget=Budget(tokens=len(whole.trajectories[0]) - room))
        assert cut.stop_reason is StopReason.TOKENS and cut.turns == 1  # though the last trajectory is short
        assert len(cut.trajectories[0]) == len(whole.trajectories[0]) - room


@pytest.mark.parametrize("before", [(), (CALL,)])
def test_answer_that_fills_the_caller_ends_the_episode(before: tuple[Message, ...]) -> None:
    whole = played(*before, delegate("a"), "y " * 60, "6")
    caller = whole.trajectories[0].spans[-1].start
    episode = played(*before, delegate("a"), "y " * 60, "6", budget=Budget(tokens=caller))
    assert (episode.stop_reason, episode.outcome) == (StopReason.TOKENS, Outcome.TRUNCATED)
    assert episode.messages == whole.messages[:-1] and episode.turns == len(before)  # nobody said more
    assert len(to_samples([episode])) == 2 and episode.reward == 0.0


def test_environment_with_such_a_tool_is_refused() -> None:
    class Own(Dice):
        @tool
        def delegate(self) -> int:
            return 1

    episode = played("6", cls=Own)
    assert episode.error is not None and "rename it" in episode.error.message


class Patient(Dice):
    """Answers whatever is said with a tool's result, four times."""

    def snapshot(self):
        return self.left

    def restore(self, state):
        self.left = state

    async def reset(self, task, rng):
        self.left = 4
        return "roll"

    async def step(self, action):
        self.left -= 1
        return Step((Message("tool", "1 2 3", tool_call_id="call_0", name="roll"),), terminated=not self.left)


class Directed(UnprovenRenderer):
    """Reads the replies of a random model as a script: by their number, else as calls."""

    def __init__(self, replies: dict[int, Message]) -> None:
        super().__init__(RENDERER, ())
        self.replies, self.asked = replies, 0

    def parse(self, reply, prefix=(), tools=()):
        self.asked += 1
        return self.replies.get(self.asked - 1, CALL)


def test_caller_waits_without_a_slot_and_samples_in_its_context() -> None:
    """One slot for two episodes that delegate: nobody waits for ever, and each token is sampled behind its row."""
    model = shaken(make_model(ModelConfig(**TINY | {"max_positions": 1024}), 432, seed=0)).to(DEVICE)
    engine = Engine(model, slots=1, max_len=1024)
    renderer = Directed({0: delegate("roll once"), 1: CALL, 2: Message("assistant", "it is 5")})
    renderer.stop_ids = frozenset(range(432))  # whatever a random model says is a whole reply
    policy = TokenPolicy(engine, renderer, SamplingParams(max_tokens=8), delegate=Delegation())
    jobs = [Job(dice_spec(Patient), {}, seed) for seed in range(2)]
    first, second = asyncio.run(asyncio.wait_for(run_jobs(jobs, policy, concurrency=2), 60))
    assert len(first.trajectories) + len(second.trajectories) == 3 and first.turns == second.turns == 4
    rows = collate(to_samples([first, second])).padded()
    assert rows.loss_mask.sum() == sum(t.sampled for e in (first, second) for t in e.trajectories)
    assert_sampled_in(rows, model)


@pytest.mark.parametrize("interrupt", [None, Interruption(1, (5, 6), per="episode")])
def test_caller_that_waited_keeps_each_route_once(interrupt: Interruption | None) -> None:
    """A mixture's routes behind a sub-agent, also where given ids come before what is sampled."""
    model = shaken(make_model(ModelConfig(architecture="qwen3_moe", **TINY | {"max_positions": 1024}), 432, seed=0)).to(
        DEVICE
    )
    renderer = Directed({0: delegate("think"), 1: Message("assistant", "it is 5")})
    renderer.stop_ids = frozenset(range(7, 432))
    engine = Engine(model, slots=1, max_len=1024)
    policy = TokenPolicy(engine, renderer, SamplingParams(max_tokens=8), interrupt, delegate=Delegation())
    caller, _ = run_dice(policy, cls=Patient).trajectories
    routes = caller.routed_experts
    assert routes is not None and bool(interruptions(caller)) == (interrupt is not None)
    np.testing.assert_array_equal(routes[:-1], router_choices(model, caller.token_ids[:-1].tolist()))


def test_continuation_amid_a_sub_agents_work_is_refused() -> None:
    episode = played(delegate("roll once"), CALL, CALL, "it is 5", CALL, "6", cls=Patient, snapshots=True, task={})
    with pytest.raises(ConfigError, match="a sub-agent was at work before turn 1"):
        continuation(dice_spec(Patient), episode, 1, 1)
    caller, _ = episode.trajectories
    for turn in (0, 2):
        policy = delegating(CALL, "6")
        again = asyncio.run(run_episode(continuation(dice_spec(Patient), episode, turn, 1), policy))
        seen = caller.before(turn).tolist()
        assert again.trajectories[0].token_ids.tolist()[: len(seen)] == seen and len(again.trajectories) == 1


def test_fork_begins_where_the_caller_replied() -> None:
    replies = [CALL, delegate("roll once"), CALL, CALL, "it is 5", CALL, "6"]
    episode = load_line(dump_line(played(*replies, id="whole")))
    caller, _ = episode.trajectories
    for turn, left in ((0, replies), (1, replies[1:]), (3, [CALL, "6"]), (4, ["6"])):
        (job,) = fork_jobs(dice_spec(), episode, turn)
        again = asyncio.run(run_episode(job, delegating(*left)))
        assert again.messages == episode.messages and again.trajectories[0].token_ids.tolist() == (
            caller.token_ids.tolist()
        )
    (job,) = fork_jobs(dice_spec(), episode, 2)
    error = asyncio.run(run_episode(job, delegating("6"))).error
    assert error is not None and "a sub-agent was at work before turn 2 of episode 'whole'" in error.message
    assert asyncio.run(run_episode(job, nothing_policy())).error is None, "who reads messages may go on anywhere"


@pytest.mark.parametrize(("called", "turns"), [(delegate("roll once"), 3), (delegate("roll", "again"), 1)])
def test_fork_after_a_budget_continues_the_caller(called: Message, turns: int) -> None:
    replies = [CALL, called, CALL, "it is 5", CALL, "6"] if turns == 3 else [called, "it is 5", "it is 6", CALL, "6"]
    whole = played(*replies)
    cut = played(*replies, budget=Budget(turns=turns), id="cut")
    (job,) = fork_jobs(dice_spec(), cut, turns)
    again = asyncio.run(run_episode(job, delegating("6")))
    assert again.messages == whole.messages
    assert again.trajectories[0].token_ids.tolist() == whole.trajectories[0].token_ids.tolist()
    cut = played(called, CALL, budget=Budget(turns=1), id="cut")
    (job,) = fork_jobs(dice_spec(), cut, 1)
    error = asyncio.run(run_episode(job, delegating("6"))).error
    assert error is not None and "a sub-agent was at work before turn 1 of episode 'cut'" in error.message


def test_prefix_counts_a_sub_agent_once() -> None:
    """One whose context was rewritten is still one, and what it answered was sampled before its caller's reply."""
    rule = Shortening(rule="drop_tool_results", over_tokens=20, keep=0)
    policy = replace(delegating(delegate("roll once"), CALL, CALL, CALL, "it is 5", "6"), shorten=rule)
    episode = run_dice(policy)
    assert sum(t.is_delegated for t in episode.trajectories) > 1
    prefix = prefix_of(episode, 3, ())
    assert prefix.agents == 1
    last = len(RENDERER.reply(Message("assistant", "6")))
    assert prefix.sampled == sum(t.sampled for t in episode.trajectories) - last


def test_sub_agents_of_a_continuation_know_rules_and_count() -> None:
    class Ruled(Patient):
        async def reset(self, task, rng):
            self.left, self.task = 4, task
            return (Message("system", "be brief"), Message("user", "roll"))

    rule = Delegation(most=2)
    whole = played(delegate("a"), "x", *[CALL] * 4, cls=Ruled, snapshots=True, rule=rule)
    replies = [RENDERER.reply(m) for m in (delegate("one", "two"), Message("assistant", "y"), *[CALL] * 3)]
    policy = TokenPolicy(ScriptedEngine(sampled(replies)), RENDERER, SamplingParams(max_tokens=512), delegate=rule)
    episode = asyncio.run(run_episode(continuation(dice_spec(Ruled), whole, 1, 1), policy))
    assert episode.error is None and sum(t.is_delegated for t in episode.trajectories) == 1
    assert "be brief" in text(episode, 1) and f"tool\n{EXHAUSTED}" in text(episode, 0)


def test_training_offers_sub_agents(tmp_path: Path) -> None:
    rollout = {"groups": 1, "samples": 2, "max_tokens": 4, "slots": 2, "delegate": {"most": 1}}
    settings = config(tmp_path, rollout=rollout, budget={"tokens": 256}, warm_start={"demonstrations": 8})
    env = settings.load_env()
    actor = fresh_actor(env, settings)
    batch = RolloutSampler(env, actor, settings, Algorithm(settings.algorithm)).sample(0)
    assert all("delegate(task)" in actor.decode(e.trajectories[0].token_ids) for e in batch.episodes)


def test_training_by_continuations_refuses_sub_agents() -> None:
    with pytest.raises(ConfigError, match=r"rollout\.delegate: advantage="):
        check_run(training_config("calculator-v0", algorithm="vineppo", **{"rollout.delegate.most": 1}))
