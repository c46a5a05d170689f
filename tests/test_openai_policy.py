"""policy=openai against a local server: requests, answers, failures, retries, limits and keys."""

from __future__ import annotations

import asyncio
import email.utils
import json
import sys
import time
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest

import agent_rl as ar
from agent_rl.core.episode import Outcome, StopReason
from agent_rl.core.messages import ToolErrorKind
from agent_rl.core.usage import Usage
from agent_rl.gym.budget import Budget
from agent_rl.pacing import Pace
from agent_rl.policy import openai_client, openai_endpoint, openai_tally
from agent_rl.policy.openai_failures import retry_after
from agent_rl.rollout.usage import usage_totals
from agent_rl.store.codec import dump_line, load_line
from tests.doubles import run_dice
from tests.fake_openai import HANG, Answer, FakeOpenAI, called, failed, said

pytestmark = pytest.mark.usefixtures("no_pause")

ROLL = called(("roll", "{}", "c1"))


def played(answers: Iterable[Answer], budget: Budget | None = None, **settings: Any) -> tuple[ar.Episode, FakeOpenAI]:
    """Play an episode of dice against these answers."""
    with FakeOpenAI(answers) as server, ar.OpenAIPolicy("m", base_url=server.url, **settings) as policy:
        return run_dice(policy, budget=budget), server


def test_openai_policy_plays_with_tools_and_counts_usage() -> None:
    counts = {"prompt_tokens": 30, "completion_tokens": 7, "prompt_tokens_details": {"cached_tokens": 20}}
    params = ar.SamplingParams(temperature=0.5, max_tokens=99, top_p=0.9)
    episode, server = played([ROLL, said("6", usage=counts)], params=params, extra={"seed": 5})
    assert (episode.outcome, episode.reward, episode.trajectories) == (Outcome.TERMINATED, 1.0, ())
    first, second = server.asked
    assert first["messages"] == [{"role": "user", "content": "roll"}]
    assert [tool["function"]["name"] for tool in first["tools"]] == ["roll"]
    settings = {"model": "m", "temperature": 0.5, "max_tokens": 99, "top_p": 0.9, "seed": 5}
    assert {name: first[name] for name in settings} == settings
    assert [m["role"] for m in second["messages"]] == ["user", "assistant", "tool"]
    assert second["messages"][1]["content"] is None and second["messages"][2]["tool_call_id"] == "c1"
    assert [(u.input_tokens, u.output_tokens, u.cached_tokens) for u in episode.usage] == [(100, 10, 0), (30, 7, 20)]
    assert [(u.model, u.finish_reason, u.attempts) for u in episode.usage] == [("m", "tool_calls", 1), ("m", "stop", 1)]
    assert all(u.seconds > 0 for u in episode.usage)
    assert load_line(dump_line(episode)).usage == episode.usage


def test_openai_policy_retries_what_may_pass() -> None:
    answers = [
        failed(429, retry_after="0"),
        failed(500),
        Answer(b'{"choices": [{"mess'),
        Answer(b"{", announced=40),
        Answer({"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 1}}),
        said("6"),
    ]
    episode, server = played(answers)
    (usage,) = episode.usage
    assert episode.reward == 1.0 and len(server.asked) == 6
    assert usage.errors == ("429", "500", "bad_answer", "connection", "no_choice") and usage.attempts == 6
    assert (usage.input_tokens, usage.output_tokens) == (105, 11), "an empty answer was paid for, too"


@pytest.mark.parametrize(
    ("answers", "where"),
    [
        ([failed(503)] * 3, "failed 3 times; at last: status 503: no"),
        ([HANG] * 3, "no answer within policy.timeout=0.6 s"),
        ([failed(429, retry_after="9999")], "asks to wait 9999 s"),
        ([failed(400, "odd field")], "refused a request (status 400): odd field"),
        ([failed(429, "pay first", code="insufficient_quota")], "pay first"),
        ([said("half an ans", "content_filter")], "finish_reason content_filter"),
        ([failed(400, "maximum context length is 8", code="context_length_exceeded")], "too long for m"),
    ],
)
def test_openai_policy_failure_is_no_score(answers: list[Answer], where: str) -> None:
    episode, server = played(answers, retries=2, timeout=0.6 if HANG in answers else 60)
    assert (episode.outcome, episode.reward, episode.rewards) == (Outcome.FAILED, None, ())
    assert episode.error is not None and (episode.error.where, episode.error.type[-5:]) == ("policy", "Error")
    assert where in episode.error.message and len(episode.error.message.splitlines()) <= 3
    assert [u.attempts for u in episode.usage] == [len(server.asked)] == [len(answers)]


def test_openai_policy_waits_as_long_as_asked() -> None:
    episode, _ = played([failed(429, retry_after_ms="150"), said("6")])
    assert episode.reward == 1.0 and episode.usage[0].waited >= 0.149
    date = email.utils.formatdate(time.time() + 100, usegmt=True)
    for headers, least, most in (({"retry-after": date}, 50, 100), ({"retry-after": "soon"}, 0, 0), ({}, 0, 0)):
        assert least <= retry_after(SimpleNamespace(response=SimpleNamespace(headers=headers))) <= most


def test_openai_policy_ends_at_length_and_full_context() -> None:
    cut, _ = played([said("6 or so", "length")])
    assert (cut.stop_reason, cut.outcome, cut.final_text) == (StopReason.LENGTH, Outcome.TRUNCATED, "6 or so")
    full, _ = played([ROLL, failed(400, "This model's maximum context length is 8 tokens")])
    assert (full.stop_reason, full.outcome, full.reward) == (StopReason.TOKENS, Outcome.TRUNCATED, 0.0)
    assert full.turns == 1 and full.messages[-1].role == "tool", "no reply that nobody sampled"
    assert [u.finish_reason for u in full.usage] == ["tool_calls", "context_length"]
    assert usage_totals(full.usage).latency.p50 == full.usage[0].seconds  # of the one that was answered
    spent, server = played([ROLL, said("6")], Budget(tokens=150))
    assert spent.reward == 1.0 and [body.get("max_tokens") for body in server.asked] == [150, 40]
    spent, _ = played([ROLL, said("6")], Budget(tokens=110))
    assert spent.stop_reason == StopReason.TOKENS


def test_openai_policy_counts_a_cancelled_attempt() -> None:
    episode, _ = played([HANG], Budget(reply_seconds=1))
    assert episode.error is not None and "budget.reply_seconds=1" in episode.error.message
    assert episode.usage == (Usage("m", errors=("cancelled",)),)


def test_openai_policy_reads_refusals_parts_and_reasoning() -> None:
    refused, _ = played([said(None, refusal="I won't.")])
    assert (refused.final_text, refused.reward) == ("I won't.", 0.0)
    parts, _ = played(
        [said([{"type": "text", "text": "6"}, {"type": "image"}], reasoning="count")], send_reasoning=True
    )
    assert (parts.final_text, parts.messages[-1].reasoning) == ("6", "count")
    for sent in (False, True):
        thought, server = played([called(("roll", "", "a"), reasoning_content="hm"), said("6")], send_reasoning=sent)
        assert thought.messages[1].reasoning == "hm" and thought.reward == 1.0
        assert ("reasoning_content" in server.asked[1]["messages"][1]) is sent


def test_openai_policy_answers_calls_in_parallel_and_broken_ones() -> None:
    calls = [
        ("roll", "{}", "x"),
        ("roll", '{"a": ', "x"),
        ("roll", "[1]", None),
        ("", "{}", "y"),
        ("no such!", "{}", "z"),
    ]
    episode, server = played([called(*calls), said("6", usage={})])
    asked = episode.messages[1].tool_calls
    assert [call.id for call in asked] == ["x", "call_0_1", "call_0_2", "y", "z"]
    assert [call.error is None for call in asked] == [True, False, False, False, True]
    answers = [m for m in episode.messages if m.role == "tool"]
    kinds = [None, *[ToolErrorKind.MALFORMED] * 3, ToolErrorKind.UNKNOWN_TOOL]
    assert [m.tool_error for m in answers] == kinds and "not valid JSON" in answers[1].content
    sent = server.asked[1]["messages"][1]["tool_calls"]
    assert [json.loads(call["function"]["arguments"]) for call in sent] == [{}] * 5
    assert [call["function"]["name"] for call in sent] == ["roll", "roll", "roll", "unknown", "no_such_"]
    assert [u.input_tokens for u in episode.usage] == [100, None]


def test_openai_policy_keeps_its_key_to_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_KEY", "sk-secret")
    with FakeOpenAI([said("6")], key="sk-secret") as server:
        policy = ar.OpenAIPolicy("m", base_url=server.url, api_key_env="MY_KEY")
        with policy:
            episode = run_dice(policy)
        assert episode.reward == 1.0 and "sk-secret" not in f"{dump_line(episode)!r}{policy!r}"
        monkeypatch.setenv("MY_KEY", "sk-wrong")
        with policy:
            failures = [run_dice(policy) for _ in range(3)]
    messages = {e.error.message for e in failures if e.error}
    assert len(messages) == 1 and "refuses the key of MY_KEY (status 401): no good: Bearer [key]" in messages.pop()
    assert b"sk-wrong" not in dump_line(failures[0])
    assert [len(e.usage[0].errors) for e in failures] == [1, 0, 0], "a refused key is not tried again"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"base_url": "http://127.0.0.1:9/v1"},
            r"127.0.0.1:9/v1 can't be reached \(.*\): check policy.base_url",
        ),
        ({"base_url": "127.0.0.1:9/v1"}, "has no scheme: write http://127.0.0.1:9/v1"),
        ({"base_url": "SERVER/v2"}, "no chat completions there .status 404.: .* mostly ends in /v1"),
        (
            {"base_url": "SERVER/v1", "model": "my-modl"},
            "lists no such model. Did you mean 'my-model'. It has",
        ),
        ({}, "needs a key: set OPENAI_API_KEY"),
        ({"base_url": "SERVER/v1", "api_key_env": "NO_KEY"}, "needs a key: set NO_KEY"),
        ({"base_url": "http://me:sk-secret@127.0.0.1:9/v1"}, "holds a password"),
        ({"api_key": "sk-secret"}, "no setting 'api_key'. Did you mean 'api_key_env'"),
        ({"base_url": "SERVER/v1", "retries": -1}, "policy.retries: input should be greater"),
    ],
)
def test_openai_policy_names_wrong_settings(settings: dict[str, Any], message: str) -> None:
    with FakeOpenAI([failed(404)], models=("my-model",)) as server:
        given = {"name": "openai", "model": "my-model"} | settings
        given |= {k: v.replace("SERVER", server.url[:-3]) for k, v in given.items() if isinstance(v, str)}
        with pytest.raises(ar.ConfigError, match=message) as error:
            ar.run("calculator-v0", given)
    assert len(str(error.value).splitlines()) <= 3 and "sk-secret" not in str(error.value)


def test_openai_policy_runs_where_no_models_are_listed() -> None:
    with FakeOpenAI([failed(503), said("6"), said("6")], models=None) as server:
        policy = ar.OpenAIPolicy("m", base_url=server.url)
        with policy:  # the probe meets a busy server
            assert [run_dice(policy).reward, run_dice(policy).reward] == [1.0, 1.0]


def test_openai_policy_books_requests_and_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    taken, corrected = list[float](), list[float]()
    monkeypatch.setattr(Pace, "take", lambda pace, amount=1.0: taken.append(amount) or 0.0)
    monkeypatch.setattr(Pace, "correct", lambda pace, amount: corrected.append(amount))
    played([ROLL, said("6")], requests_per_minute=600, tokens_per_minute=1e6)
    assert taken[::2] == [1, 1] and taken[1] > openai_client.EXPECTED and taken[3] > 110
    assert corrected == pytest.approx([110 - taken[1], 110 - taken[3]])


def test_openai_policy_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "openai", None)
    with pytest.raises(ar.ConfigError, match=r"pip install -e '\.\[openai\]'"), ar.OpenAIPolicy("m"):
        pass


def test_chat_client_spreads_requests_over_pools(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openai_client, "POOL", 2)
    server = FakeOpenAI(lambda body: said("6"))

    async def main() -> tuple[int, int]:
        settings = ar.OpenAIPolicy("m", base_url=server.url, timeout=60, retries=0, concurrency=9)
        connected = openai_endpoint.connect("m", settings, "policy")
        for number in (2, 5, 5):
            tallies = [openai_tally.Tally("m") for _ in range(number)]
            await asyncio.gather(*(connected.ask({"messages": []}, 1, tally) for tally in tallies))
            assert [tally.errors for tally in tallies] == [[]] * number
        await connected.close()
        return len(connected.pools), len({id(api) for api, _ in connected.pools})

    with server:
        assert asyncio.run(main()) == (3, 3)
