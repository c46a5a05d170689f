"""policy=vllm with the real vLLM on CPU: in this program, and behind an address; a mixture of experts, in float32."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

import agent_rl as ar
from agent_rl.backends.embedded.actor import load_actor
from agent_rl.core.trajectory import Trajectory
from agent_rl.engines.base import SamplingParams
from agent_rl.engines.vllm import server as vllm_server
from agent_rl.policy.vllm import vllm_policy
from agent_rl.store.episodes import read_episodes
from tests.e2e.vllm_server import environment, serving

pytestmark = pytest.mark.e2e

ROOT = Path(__file__).resolve().parents[2]
OF_THE_README = "agent-rl rollout policy=vllm policy.model=DIR"
CONTEXT, N = 128, 24
GREEDY = SamplingParams(temperature=0, max_tokens=56)
TIE = 1e-3
"""Two logits as close as this may change places."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A warm-started mixture of experts, which calls the calculator."""
    folder = tmp_path_factory.mktemp("moe")
    settings = ["model=tiny_moe", "steps=0", "threads=1", "eval.n=16", "warm_start.clone_steps=200"]
    command = [sys.executable, "-m", "agent_rl", "train", *settings, f"runs_dir={folder}"]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    return (folder / "latest" / "checkpoint").resolve()


@pytest.fixture(scope="module")
def model(checkpoint: Path) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def local(verl_python: Path, checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> list[ar.Episode]:
    """Greedy episodes of vLLM inside the README's `agent-rl rollout`."""
    out = tmp_path_factory.mktemp("local") / "episodes.jsonl"
    engine = {"dtype": "float32", "enforce_eager": "true"}
    words = OF_THE_README.replace("DIR", str(checkpoint)).split()[1:]
    command = [
        *(str(verl_python), "-m", "agent_rl", *words, f"out={out}"),
        *(f"policy.context={CONTEXT}", "temperature=0", f"n={N}", "max_tokens=56"),
        *(f"policy.engine.{key}={value}" for key, value in engine.items()),
    ]
    done = subprocess.run(
        command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    by_task = {str(e.task): e for e in read_episodes(out)}  # stored as they ended
    tasks = ar.spec("calculator-v0").tasks
    return [by_task[str(tasks.get("eval", index))] for index in range(N)]


@pytest.fixture(scope="module")
def url(verl_python: Path, checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a vLLM server."""
    options = [
        *("--max-model-len", str(CONTEXT), "--max-num-seqs", "64", "--enable-return-routed-experts"),
        *("--logprobs-mode", "processed_logprobs", "--enable-scale-out"),
    ]
    with serving(verl_python, checkpoint, tmp_path_factory.mktemp("server") / "log", *options) as address:
        yield address


@pytest.fixture(scope="module")
def remote(url: str) -> list[ar.Episode]:
    with vllm_policy(url=url, params=GREEDY) as policy:
        assert policy.engine.context_limit == CONTEXT
        return ar.run("calculator-v0", policy, n=N, split="eval")


def test_readme_command_rolls_out_a_server(url: str, tmp_path: Path) -> None:
    words = ["rollout", "policy=vllm", f"policy.url={url}", "n=2", "max_tokens=8", f"out={tmp_path / 'episodes.jsonl'}"]
    command = [sys.executable, "-m", "agent_rl", *words]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert len(trajectories(list(read_episodes(tmp_path / "episodes.jsonl")))) >= 2


def test_server_endpoints_agree(url: str, remote: list[ar.Episode], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_server, "ENDPOINTS", vllm_server.ENDPOINTS[1:])
    with vllm_policy(url=url, params=GREEDY) as policy:
        others = trajectories(ar.run("calculator-v0", policy, n=N, split="eval"))
    for one, other in zip(trajectories(remote), others, strict=True):
        assert one.token_ids.tolist() == other.token_ids.tolist()
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-5)


def trajectories(episodes: Sequence[ar.Episode]) -> list[Trajectory]:
    assert episodes and not [e.error for e in episodes if e.error]
    return [trajectory for episode in episodes for trajectory in episode.trajectories]


def logits_of(model: torch.nn.Module, ids: Sequence[int]) -> torch.Tensor:
    with torch.inference_mode():
        return model(torch.tensor([ids], dtype=torch.long)).logits[0]


def differ(model: torch.nn.Module, ones: Sequence[Trajectory], others: Sequence[Trajectory]) -> tuple[int, int]:
    """Count the differing trajectories, and those without a tie at the first difference."""
    different = real = 0
    for one, other in zip(ones, others, strict=True):
        a, b = one.token_ids.tolist(), other.token_ids.tolist()
        if a != b:
            at = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
            first, second = logits_of(model, a[:at])[-1].topk(2).values.tolist()
            different, real = different + 1, real + (first - second > TIE)
    return different, real


def test_vllm_policy_matches_embedded_greedy_episodes(
    model: torch.nn.Module, checkpoint: Path, local: list[ar.Episode], remote: list[ar.Episode]
) -> None:
    actor = load_actor(checkpoint, context=CONTEXT)
    ours = trajectories(ar.run("calculator-v0", actor.policy(GREEDY), n=N, split="eval"))
    assert sum(len(e.steps) for e in remote) > N  # tools are called: there are turns to append
    for name, theirs in (("in this program", trajectories(local)), ("by address", trajectories(remote))):
        different, real = differ(model, ours, theirs)
        print(f"vLLM {name}: {different} of {N} greedy episodes differ from the embedded engine's, {real} not by a tie")
        assert real == 0 and different <= 2


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_server_logprobs_match_the_sampled_distribution(model: torch.nn.Module, url: str, temperature: float) -> None:
    params = SamplingParams(temperature=temperature, max_tokens=56)
    with vllm_policy(url=url, params=params) as policy:
        twice = [trajectories(ar.run("calculator-v0", policy, n=N, split="eval", seed=3)) for _ in range(2)]
    worst = 0.0
    for trajectory in twice[0]:
        ids, mask = trajectory.token_ids.tolist(), trajectory.loss_mask[1:]
        expected = torch.log_softmax(logits_of(model, ids)[:-1] / temperature, -1)
        expected = expected.gather(1, torch.tensor(ids[1:])[:, None])[:, 0].numpy()
        worst = max(worst, float(np.abs(trajectory.logprobs[1:] - expected)[mask].max()))
    print(f"temperature {temperature}: log-probabilities differ by {worst:.1e} at most")
    assert worst < 1e-3
    same = sum(a.token_ids.tolist() == b.token_ids.tolist() for a, b in zip(*twice, strict=True))
    print(f"{same} of {N} episodes are the same with the same seed")
    assert same >= N - 2


def test_server_experts_match_the_model(model: torch.nn.Module, remote: list[ar.Episode]) -> None:
    agree = total = 0
    for trajectory in trajectories(remote):
        found = trajectory.routed_experts
        assert found is not None and (found[-1] == -1).all() and (found[:-1] >= 0).all()
        with torch.inference_mode():
            ids = torch.tensor([trajectory.token_ids.tolist()], dtype=torch.long)
            routers = model(ids, output_router_logits=True).router_logits
        expected = torch.stack([r.topk(found.shape[2], -1).indices for r in routers], 1).numpy()
        equal = np.sort(found[:-1], -1) == np.sort(expected[:-1], -1)
        agree, total = agree + int(equal.all(-1).sum()), total + equal.all(-1).size
    print(f"{agree} of {total} choices of experts are the same")
    assert agree >= 0.999 * total
