"""policy=vllm with an address, against a server of ours that speaks vLLM's wire format."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

import agent_rl as ar
from agent_rl.cli import main
from agent_rl.core.messages import Message, ToolCall
from agent_rl.core.trajectory import Completion, FinishReason, Source
from agent_rl.engines.base import SamplingParams
from agent_rl.engines.stateless import ROUTES_FROM
from agent_rl.engines.vllm import server as vllm_server
from agent_rl.errors import PolicyError
from agent_rl.policy import TokenPolicy
from agent_rl.policy.vllm import vllm_policy
from agent_rl.rendering import train_tokenizer
from agent_rl.store.episodes import read_episodes
from tests.doubles import small_renderer
from tests.fake_vllm import FakeVLLM

STOP = frozenset({2})


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_server, "PAUSE", 0.001)
    for name in ("VLLM_API_KEY", "HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tokenizer, as a model's would have one."""
    folder = tmp_path_factory.mktemp("model")
    train_tokenizer(["compute 3*4+5 calculator expression"], 432).save_pretrained(folder)  # small_renderer's
    return folder


def ask(policy: TokenPolicy, *turns: list[int], params: SamplingParams | None = None) -> list[Completion]:
    async def work() -> list[Completion]:
        session = policy.engine.open(7)
        return [await session.sample(ids, params or SamplingParams(max_tokens=8), STOP) for ids in turns]

    return asyncio.run(work())


@pytest.mark.parametrize("scale_out", [False, True], ids=["completions", "generate"])
def test_server_plays_episodes_by_token_ids(root: Path, scale_out: bool) -> None:
    renderer = small_renderer()
    call = Message("assistant", tool_calls=(ToolCall("c", "calculator", {"expression": "1+1"}),))
    replies = [renderer.reply(call), renderer.reply(Message("assistant", "x"))]
    fake = FakeVLLM(root, replies, max_model_len=512, scale_out=scale_out)
    with fake, vllm_policy(url=f"{fake.url}/v1/") as policy:
        (episode,) = ar.run("calculator-v0", policy, budget=ar.Budget(turns=4))
    assert episode.error is None and episode.tool_calls == 1 and episode.turns == 2
    (trajectory,) = episode.trajectories
    first, second = fake.asked
    assert first["prompt"] + replies[0] == second["prompt"][: len(first["prompt"]) + len(replies[0])]
    assert trajectory.token_ids.tolist()[: len(second["prompt"]) + len(replies[1])] == second["prompt"] + replies[1]
    sampled = trajectory.token_ids[trajectory.loss_mask].tolist()
    assert sampled == replies[0] + replies[1] and {s.source for s in trajectory.spans} >= {Source.POLICY, Source.ENV}
    assert first["model"] == "served" and first["stop_token_ids"] == sorted(renderer.stop_ids)
    assert first["logprobs"] == 0 and first["repetition_penalty"] == 1.0
    assert scale_out or first["return_token_ids"] is True


def test_server_outlives_the_event_loop(root: Path) -> None:
    with FakeVLLM(root, [[5, 2], [6, 2]]) as fake, vllm_policy(url=fake.url) as policy:
        assert ask(policy, [1])[0].token_ids == (5, 2)
        assert ask(policy, [1])[0].token_ids == (6, 2)


@pytest.mark.parametrize("scale_out", [False, True], ids=["completions", "generate"])
def test_server_returns_aligned_experts(root: Path, scale_out: bool) -> None:
    fake = FakeVLLM(root, [[5, 2], [6, 2]], experts=True, scale_out=scale_out)
    with fake, vllm_policy(url=fake.url) as policy:
        first, second = ask(policy, [1, 3], [4])
    assert first.routed_experts is not None and first.routed_experts.shape == (3, 2, 2)
    assert second.routed_experts is not None and second.routed_experts.shape == (3, 2, 2)
    both = np.concatenate([first.routed_experts, second.routed_experts])
    assert np.array_equal(both.ravel(), np.arange(24))


@pytest.mark.parametrize("scale_out", [False, True], ids=["completions", "generate"])
def test_server_routes_traffic_grows_linearly(root: Path, scale_out: bool) -> None:
    turns = 20
    fake = FakeVLLM(root, [[5, 2]] * turns, experts=True, scale_out=scale_out, max_model_len=512)
    with fake, vllm_policy(url=fake.url) as policy:
        replies = ask(policy, *[[1, 3, 4]] * turns)
    routes = np.concatenate([r.routed_experts for r in replies if r.routed_experts is not None])
    assert len(routes) == turns * 5 - 1 and fake.route_bytes <= 1.05 * routes.nbytes
    assert np.array_equal(routes.ravel(), np.arange(routes.size) % 128)


@pytest.mark.parametrize("new_routes", ["ignores", "refuses"])
def test_server_sending_all_routes_is_cut(root: Path, new_routes: str) -> None:
    fake = FakeVLLM(root, [[5, 2]] * 6, experts=True, new_routes=new_routes)
    with fake, vllm_policy(url=fake.url) as policy:
        with pytest.warns(RuntimeWarning, match="routes of the whole prompt with every turn.*vLLM 0.30"):
            first = ask(policy, [1, 3], [4], [4])
        again = ask(policy, [1, 3], [4], [4])  # it is asked and warned about once
    assert len([body for body in fake.asked if ROUTES_FROM in body]) <= 1
    for replies in (first, again):
        routes = np.concatenate([r.routed_experts for r in replies if r.routed_experts is not None])
        assert np.array_equal(routes.ravel(), np.arange(9 * 4))


@pytest.mark.parametrize("failures", [[503], [0], [500, 0, 429, 502, 504]])
def test_server_retries_passing_failures(root: Path, failures: list[int], caplog: pytest.LogCaptureFixture) -> None:
    with FakeVLLM(root, [[5, 2]]) as fake, vllm_policy(url=fake.url) as policy:
        fake._failures.extend(failures)
        assert ask(policy, [1])[0].token_ids == (5, 2)
        assert not fake._failures and len(fake.asked) == 1
    logged = [record.getMessage() for record in caplog.records if record.name == vllm_server.__name__]
    assert len(logged) == len(failures) and "; attempt 2 of 6 in 0.001 s" in logged[0]


def test_server_explains_lasting_failures(root: Path) -> None:
    with FakeVLLM(root) as fake, vllm_policy(url=fake.url) as policy:
        fake._failures.extend([503] * 6)
        with pytest.raises(
            ar.PolicyError, match="/v1/completions failed 6 times; at last: status 503: failing with 503"
        ):
            ask(policy, [1])
        fake._failures.append(400)
        with pytest.raises(ar.PolicyError, match=r"refused .status 400.: failing with 400"):
            ask(policy, [1])
        assert not fake._failures  # a refusal is not repeated
        address = fake.url
    with (
        pytest.raises(ar.PolicyError, match=r"/v1/models failed 6 times; at last: ConnectError"),
        vllm_policy(url=address),
    ):
        pass


def test_server_without_token_ids_is_refused(root: Path) -> None:
    with FakeVLLM(root, token_ids=False) as fake:
        with (
            pytest.raises(ar.PolicyError, match=r"text but no token ids.*vLLM 0.10.2 or newer"),
            vllm_policy(url=fake.url),
        ):
            pass
        assert fake.asked == []


def test_server_without_an_endpoint_is_refused(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_server, "ENDPOINTS", vllm_server.ENDPOINTS[:1])
    with (
        FakeVLLM(root, scale_out=True) as fake,
        pytest.raises(PolicyError, match=r"has none of /v1/completions: is this a vLLM server\?"),
        vllm_policy(url=fake.url),
    ):
        pass


def test_server_without_logprobs_is_an_error(root: Path) -> None:
    fake = FakeVLLM(root, [[5, 2]], logprobs=False)
    with fake, vllm_policy(url=fake.url) as policy, pytest.raises(ar.PolicyError, match="2 tokens and 0 log-prob"):
        ask(policy, [1])


def test_server_with_raw_logprobs_is_detected(root: Path) -> None:
    hot = SamplingParams(temperature=0.5)
    with FakeVLLM(root, [[5, 2]], processed=False) as fake:
        with (
            pytest.raises(ar.ConfigError, match="--logprobs-mode processed_logprobs"),
            vllm_policy(url=fake.url, params=hot),
        ):
            pass
        with vllm_policy(url=fake.url) as policy:  # at temperature 1 they are the same
            assert ask(policy, [1])[0].logprobs == (-0.25, -0.5)
    with FakeVLLM(root, [[5, 2]]) as fake, vllm_policy(url=fake.url, params=hot) as policy:
        assert ask(policy, [1], params=hot)[0].logprobs == (-0.25, -0.5)


def test_server_gets_the_key(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with FakeVLLM(root, [[5, 2]], key="secret") as fake:
        with pytest.raises(ar.PolicyError, match="set VLLM_API_KEY"), vllm_policy(url=fake.url):
            pass
        monkeypatch.setenv("VLLM_API_KEY", "secret")
        with vllm_policy(url=fake.url) as policy:
            assert ask(policy, [1])[0].token_ids == (5, 2)


def test_server_abort_is_reported(root: Path) -> None:
    with FakeVLLM(root, [[5]], finish="abort") as fake, vllm_policy(url=fake.url) as policy:
        (found,) = ask(policy, [1])
    assert (found.finish_reason, found.token_ids) == (FinishReason.ABORT, (5,))


def test_server_closes_cancelled_requests(root: Path) -> None:
    async def work(policy: TokenPolicy) -> None:
        session = policy.engine.open(0)
        sampling = asyncio.create_task(session.sample([1], SamplingParams(), STOP))
        await asyncio.to_thread(fake.hanging.wait, 5)
        sampling.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sampling

    with FakeVLLM(root, hangs=True) as fake, vllm_policy(url=fake.url) as policy:
        asyncio.run(work(policy))
        assert fake.hung_up.wait(5)  # at which vLLM stops
        assert len(fake.asked) == 1


def test_server_bounds_concurrent_requests(root: Path) -> None:
    async def work(policy: TokenPolicy) -> None:
        sessions = [policy.engine.open(i) for i in range(12)]
        await asyncio.gather(*(s.sample([1], SamplingParams(), STOP) for s in sessions))

    with FakeVLLM(root, [[5, 2]] * 12, delay=0.02) as fake, vllm_policy(url=fake.url, concurrency=3) as policy:
        asyncio.run(work(policy))
    assert len(fake.asked) == 12 and 2 <= fake.most <= 3


@pytest.mark.parametrize(
    ("server", "context", "limit"), [(96, None, 96), (96, 64, 64), (96, 200, 96), (None, None, None), (None, 64, 64)]
)
def test_server_takes_the_smaller_context(
    root: Path, server: int | None, context: int | None, limit: int | None
) -> None:
    with FakeVLLM(root, max_model_len=server) as fake, vllm_policy(url=fake.url, context=context) as policy:
        assert policy.engine.context_limit == limit


def test_server_serves_a_rollout_from_the_command_line(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reply = small_renderer().reply(Message("assistant", "12"))
    with FakeVLLM(root, [reply] * 4) as fake:
        out = tmp_path / "episodes.jsonl"
        assert main(["rollout", "policy=vllm", f"policy.url={fake.url}", "n=4", f"out={out}", "temperature=0.5"]) == 0
        assert {a["temperature"] for a in fake.asked} == {0.5} and len({a["seed"] for a in fake.asked}) == 4
    assert [e.final_text for e in read_episodes(out)] == ["12"] * 4 and "4 episodes in" in capsys.readouterr().out


def refuse(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert main(["rollout", *argv]) == 1
    return capsys.readouterr().err


def test_vllm_policy_refuses_meaningless_settings(
    capsys: pytest.CaptureFixture[str], root: Path, tmp_path: Path
) -> None:
    assert "policy.model=DIR, to run vLLM here, or policy.url" in refuse(capsys, "policy=vllm")
    both = ("policy=vllm", "policy.model=m", "policy.url=http://localhost:1")
    assert "needs policy.model=DIR, to run vLLM here, or" in refuse(capsys, *both)
    assert "policy=oracle has no setting 'url'." in refuse(capsys, "policy.url=u")
    assert "Did you mean 'vllm'?" in refuse(capsys, "policy=vlm")
    assert "policy=vllm has no setting 'ulr'. Did you mean 'url'?" in refuse(capsys, "policy=vllm", "policy.ulr=u")
    assert "policy.concurrency: input should be greater than" in refuse(capsys, "policy=vllm", "policy.concurrency=0")
    engine = ("policy=vllm", "policy.url=http://localhost:1", "policy.engine.dtype=float32")
    assert "policy.engine.dtype is for policy.model" in refuse(capsys, *engine)
    twice = ("policy=vllm", f"policy.model={root}", "policy.engine.max_model_len=8")
    assert "policy.engine.max_model_len duplicates another setting" in refuse(capsys, *twice)
    assert "no tokenizer in" in refuse(capsys, "policy=vllm", f"policy.model={tmp_path}")
    with FakeVLLM(tmp_path / "elsewhere") as fake:
        said = refuse(capsys, "policy=vllm", f"policy.url={fake.url}")
    assert "no tokenizer in" in said and "name its folder with policy.tokenizer" in said
