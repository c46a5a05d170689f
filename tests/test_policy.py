"""agent_rl.policy: the token policy and scripts."""

import asyncio

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_rl.algorithms import to_samples
from agent_rl.core.episode import StopReason
from agent_rl.core.messages import Message, ToolCall
from agent_rl.core.trajectory import Fork, Source
from agent_rl.engines.base import SamplingParams
from agent_rl.engines.scripted import ScriptedEngine
from agent_rl.errors import ConfigError, PolicyError
from agent_rl.gym.budget import Budget
from agent_rl.gym.registry import spec
from agent_rl.policy import Scripted, TokenPolicy, demonstrator, oracle
from agent_rl.rollout import Job, run_episode
from tests.doubles import CALL, Dice, UnprovenRenderer, play, run_dice, sampled, small_renderer, token_policy

TWO_CALLS = Message("assistant", "hm ", tool_calls=(ToolCall("x", "roll"), ToolCall("x", "rol")))


def rendered(*messages: str | Message) -> list[list[int]]:
    return [small_renderer().reply(Message("assistant", m) if isinstance(m, str) else m) for m in messages]


# TokenPolicy


def test_token_policy_keeps_exact_engine_ids():
    engine = ScriptedEngine(rendered(CALL, TWO_CALLS, "6"))
    episode = run_dice(TokenPolicy(engine, small_renderer()))
    (trajectory,), (session,) = episode.trajectories, engine.sessions
    assert trajectory.token_ids.tolist() == session.token_ids
    sampled = [i for reply in rendered(CALL, TWO_CALLS, "6") for i in reply]
    assert trajectory.token_ids[trajectory.loss_mask].tolist() == sampled
    assert session.seed == episode.seed
    assert session.closed == 1


@settings(deadline=None, max_examples=40)
@given(st.lists(st.lists(st.integers(0, 431), min_size=1, max_size=12), min_size=1, max_size=4))
def test_token_policy_trains_on_any_sampled_ids(replies):
    # a stop id in the middle is not this engine's: an engine would have ended there
    stop = rendered("")[0][-1]
    replies = [[i for i in reply if i not in small_renderer().stop_ids] + [stop] for reply in replies]
    engine = ScriptedEngine(replies)
    episode = run_dice(TokenPolicy(engine, small_renderer()), budget=Budget(turns=len(replies)))
    (trajectory,), (session,) = episode.trajectories, engine.sessions
    assert episode.error is None
    assert trajectory.token_ids.tolist() == session.token_ids
    sampled = [i for reply in replies[: episode.turns] for i in reply]
    assert trajectory.token_ids[trajectory.loss_mask].tolist() == sampled
    assert trajectory.turns[trajectory.loss_mask].tolist() == [
        turn for turn, reply in enumerate(replies[: episode.turns]) for _ in reply
    ]


def test_token_policy_keeps_logprobs_and_versions():
    replies = rendered(CALL, "6")
    n = len(replies[0])
    engine = ScriptedEngine(sampled(replies, [4] * (n - 1) + [5] * 100))  # the weights changed before the last token
    (trajectory,) = run_dice(TokenPolicy(engine, small_renderer())).trajectories
    mask = trajectory.loss_mask
    assert trajectory.policy_versions[mask].tolist() == [4] * (n - 1) + [5] * (1 + len(replies[1]))
    expected = [-0.001 * (i + 1) for reply in replies for i in range(len(reply))]
    np.testing.assert_array_equal(trajectory.logprobs[mask], np.float32(expected))


def test_token_policy_counts_closing_tokens_to_their_turn():
    (trajectory,) = run_dice(token_policy(CALL, "6")).trajectories
    assert [(s.source, s.turn) for s in trajectory.spans] == [
        (Source.PROMPT, 0),
        (Source.POLICY, 0),
        (Source.TEMPLATE, 0),
        (Source.ENV, 1),
        (Source.POLICY, 1),
    ]


def test_token_policy_matches_a_whole_rendering():
    episode = run_dice(token_policy(CALL, "6"))
    whole = small_renderer().prompt(episode.messages[:-1], Dice().tools) + rendered("6")[0]
    assert episode.trajectories[0].token_ids.tolist() == whole


def test_token_policy_gives_calls_unique_ids():
    episode = run_dice(token_policy(CALL, TWO_CALLS, TWO_CALLS, "6"))
    ids = [call.id for m in episode.messages for call in m.tool_calls]
    assert ids == ["call_0_0", "call_1_0", "call_1_1", "call_2_0", "call_2_1"]
    assert [m.tool_call_id for m in episode.messages if m.role == "tool"] == ids


def test_token_policy_bounds_replies_by_the_budget():
    engine = ScriptedEngine(rendered(CALL, "6"), context_limit=100)
    episode = run_dice(TokenPolicy(engine, small_renderer(), SamplingParams(max_tokens=60)), budget=Budget(tokens=90))
    (trajectory,) = episode.trajectories
    starts = [s.start for s in trajectory.spans if s.source is Source.POLICY]
    assert [p.max_tokens for p in engine.sessions[0].params] == [min(60, 90 - at) for at in starts]
    assert starts[0] < 30 < starts[1]  # both limits had their turn


def test_token_policy_needs_an_observation_before_a_reply():
    conversation = token_policy("6").start((), 0)
    with pytest.raises(PolicyError, match="observe"):
        asyncio.run(conversation.reply())


@pytest.mark.parametrize(
    "bad", [{"temperature": -1}, {"top_p": 0}, {"top_p": 1.1}, {"top_k": -1}, {"min_p": 1}, {"max_tokens": 0}]
)
def test_sampling_params_refuse_values_out_of_range(bad):
    (name, value), *_ = bad.items()
    with pytest.raises(ConfigError, match=f"{name}={value} must be"):
        SamplingParams(**bad)


# Forks


def forked(unproven, replies):
    engine = ScriptedEngine(rendered(*replies))
    renderer = UnprovenRenderer(small_renderer(), unproven)
    return run_dice(TokenPolicy(engine, renderer)), engine


def test_fork_begins_at_an_unappendable_observation():
    episode, engine = forked({2}, [CALL, CALL, CALL, "6"])
    first, second = episode.trajectories
    assert [t.token_ids.tolist() for t in episode.trajectories] == [s.token_ids for s in engine.sessions]
    assert first.forked_from is None
    assert second.forked_from == Fork(0, len(first))  # this renderer renders the same text to the same ids
    assert second.token_ids[: len(first)].tolist() == first.token_ids.tolist()
    assert [s.closed for s in engine.sessions] == [1, 1]
    assert len({s.seed for s in engine.sessions}) == 2
    assert [s.turn for s in second.spans] == [2, 2, 2, 3, 3]


def test_fork_position_ends_the_shared_prefix():
    class Rewriting(UnprovenRenderer):
        def prompt(self, messages, tools):
            short = [Message("assistant", "…") if m.role == "assistant" else m for m in messages]
            return self.renderer.prompt(short, tools)

    engine = ScriptedEngine(rendered(CALL, "6"))
    episode = run_dice(TokenPolicy(engine, Rewriting(small_renderer(), {1})))
    first, second = episode.trajectories
    assert second.forked_from is not None
    at = second.forked_from.position
    assert at == first.spans[0].stop  # the prompt is shared, the rewritten reply is not
    assert first.token_ids[:at].tolist() == second.token_ids[:at].tolist()
    assert first.token_ids[at] != second.token_ids[at]


@pytest.mark.parametrize("unproven", [(), {1}, {2}, {1, 2, 3}])
def test_forks_train_every_sampled_token_once(unproven):
    replies = [CALL, TWO_CALLS, CALL, "6"]
    episode, _ = forked(unproven, replies)
    assert len(episode.trajectories) == 1 + len(unproven)
    samples = to_samples([episode])
    trained = [i for s in samples for i in s.token_ids[s.loss_mask].tolist()]
    assert trained == [i for reply in rendered(*replies) for i in reply]


def test_fork_without_a_reply_leaves_no_trajectory():
    renderer = UnprovenRenderer(small_renderer(), {1})
    start = renderer.prompt([Message("user", "roll")], Dice().tools) + rendered(CALL)[0]
    engine = ScriptedEngine(rendered(CALL))
    episode = run_dice(TokenPolicy(engine, renderer), budget=Budget(tokens=len(start) + 3))
    assert [t.token_ids.tolist() for t in episode.trajectories] == [start]
    assert [s.closed for s in engine.sessions] == [1, 1]


# Scripted


def test_scripted_without_a_renderer_has_no_tokens():
    assert run_dice(play(CALL, "6")).trajectories == ()


def test_scripted_tokens_have_no_logprobs():
    script = play(CALL, TWO_CALLS, "6").script
    shown = run_dice(Scripted(script, small_renderer())).trajectories[0]
    sampled = run_dice(token_policy(CALL, TWO_CALLS, "6")).trajectories[0]
    assert shown.spans == sampled.spans
    assert shown.token_ids.tolist() == sampled.token_ids.tolist()
    assert np.isnan(shown.logprobs).all()  # they were not sampled


def test_scripted_forks_at_an_unappendable_observation():
    episode = run_dice(Scripted(play(CALL, "6").script, UnprovenRenderer(small_renderer(), {1})))
    first, second = episode.trajectories
    assert episode.success and second.forked_from == Fork(0, len(first))
    taught = [i for t in episode.trajectories for i in t.token_ids[t.loss_mask].tolist()]
    assert taught == [i for reply in rendered(CALL, "6") for i in reply]


def test_scripted_replies_respect_the_token_budget():
    episode = run_dice(Scripted(play("6" * 20).script, small_renderer()), budget=Budget(tokens=30))
    assert episode.stop_reason is StopReason.TOKENS and len(episode.trajectories[0]) == 30
    assert len(episode.messages[-1].content) < 20


def test_scripted_gets_the_observations():
    seen = []

    def script(env, seed):
        seen.append((yield CALL))
        yield "6"

    episode = run_dice(Scripted(script))
    assert seen == [episode.messages[2:3]]


def test_oracle_and_demonstrator_play_the_calculator():
    calculator = spec("calculator-v0")
    task = calculator.tasks.get("train", 0)
    jobs = [Job(calculator, task, seed) for seed in range(12)]
    best = [asyncio.run(run_episode(job, oracle())) for job in jobs]
    assert {e.success for e in best} == {True}
    noisy, again = ([asyncio.run(run_episode(job, demonstrator())).messages for job in jobs] for _ in range(2))
    assert noisy == again
    assert len(set(map(str, noisy))) > 1
