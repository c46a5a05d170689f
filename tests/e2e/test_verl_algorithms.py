"""verl on CPU, two steps by each algorithm that asks for more than a batch, and then a fault, which ends the run.

A run costs two minutes of processor time before its first step, so that each proves an algorithm and a fault: episodes
that crash and a dead vLLM beside a critic, a dead worker beside continuations, wrong weights beside dropped groups.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from agent_rl.backends.embedded.config import TrainConfig
from agent_rl.config import load_config
from agent_rl.core.episode import Episode, Outcome, StopReason
from agent_rl.store.episodes import read_episodes
from tests.e2e.servers import Running, begin

pytestmark = pytest.mark.e2e

BOUND = 90.0
"""Seconds within which a run must have ended once it has lost a process."""
RUN = {
    "env": "calculator-v0",
    "steps": 1000,
    "lr": 1e-3,
    "rollout": {"groups": 4, "samples": 4, "max_tokens": 56, "context": 128},
    "eval": {"n": 8, "every": 0},
}
FAULTY = {
    "env": "faulty-v0",
    "imports": [str(Path(__file__).parent / "verl_cpu" / "faulty.py")],
    "budget": {"seconds": 5},
}
PPO = ("critic.warmup_steps=1", "entropy=0.01", "kl.where=reward", "kl.kind=k1")
REMAX = {
    "name": "remax",
    "advantage": "over-greedy",
    "objective": "reinforce",
    "filters": ["varied-groups"],
    "refill": {"max_rounds": 3, "oversampling": 2.0},
}
VINE = {"name": "vineppo", "advantage": "state-values", "vine": {"continuations": 2, "max_episodes": 30}}
UPDATES = {"epochs": 2, "target_kl": 1e-12}
"""Two updates a step, of which the policy takes one: any step is further than that."""
BROKEN = {"+actor_rollout_ref.rollout.engine_kwargs.vllm.worker_extension_cls": "verl_cpu.worker.BrokenReload"}


@dataclass(frozen=True)
class Ended:
    """A run that a fault ended: its exit status, the process that was killed for it, and processes that are left."""

    running: Running
    status: int
    killed: int | None
    left: dict[int, str]

    def steps(self) -> list[dict[str, Any]]:
        """The metrics of its first two steps."""
        return [row["data"] for row in self.running.rows() if 0 < row["step"] <= 2]

    def fault(self) -> str:
        return (self.running.run / "fault.txt").read_text()


def ended(python: Path, folder: Path, settings: dict[str, Any], victim: str | None = None) -> Ended:
    """Run two steps, then kill the process with `victim` in its command line; without one, wait for the run's fault."""
    running = begin(python, folder, json.dumps(RUN | settings))
    found: list[int] = []
    try:
        if victim is not None:
            running.until(lambda run: len(run.rows()) > 2, timeout=500)
            found = [pid for pid, line in running.processes().items() if victim in line]
            os.kill(found[0], signal.SIGKILL)
        at = time.monotonic()
        status = running.finish(timeout=BOUND if found else 500)
        print(f"ended {time.monotonic() - at:.0f} s after {victim or 'it began'}")
        return Ended(running, status, next(iter(found), None), running.gone(timeout=60))
    finally:
        running.kill()


def groups_of(folder: Path, step: int) -> dict[str, list[Episode]]:
    groups = defaultdict(list)
    for episode in read_episodes(folder):
        if episode.origin.purpose == "train" and episode.origin.step == step:
            groups[episode.group_id].append(episode)
    return groups


def assert_on_policy(steps: list[dict[str, Any]]) -> None:
    assert len(steps) == 2
    for data in steps:  # the other samples did not hold up the weights
        assert data["actor/agent_rl/ratio"] == pytest.approx(1.0, abs=0.02)
        assert data["training/off_policy/trajectory_staleness/max"] == 0


@pytest.fixture(scope="module")
def ppo(verl_python: Path, warm: Path, tmp_path_factory: pytest.TempPathFactory) -> Ended:
    """PPO, bounded by `updates.target_kl`, where some episodes crash, and some hang; vLLM is killed after two steps."""
    folder = tmp_path_factory.mktemp("ppo")
    changes = ["algorithm=ppo", *(f"algorithm.{change}" for change in PPO)]
    algorithm = load_config("backend/embedded", TrainConfig, changes).algorithm.model_dump(mode="json")
    own = {"checkpoint_every": 2, "updates": UPDATES, "env_args": {"counted": str(folder / "counted")}}
    settings = FAULTY | own | {"start_from": str(warm), "algorithm": algorithm}
    return ended(verl_python, folder, settings, "EngineCore")


def test_verl_critic_warms_up_before_the_policy(ppo: Ended) -> None:
    first, second = ppo.steps()
    assert abs(first["critic/values/mean"]) < 0.01 < abs(second["critic/values/mean"])
    assert first["critic/vf_loss"] > 0 and first["critic/grad_norm"] > 0
    assert not [name for name in first if name.startswith("actor/agent_rl/")]
    assert second["train/updates"] == 1  # the second one was not taken
    assert second["actor/agent_rl/entropy"] > 0 and "actor/agent_rl/reference_kl" in second
    assert second["actor/agent_rl/rollout_gap"] < 0.2 and second["actor/grad_norm"] > 0
    saved = ppo.running.run / "checkpoints" / "global_step_2" / "critic"
    assert {file.name.split("_")[0] for file in saved.glob("*.pt")} == {"model", "optim", "extra"}


def test_verl_run_survives_crashed_and_hung_episodes(ppo: Ended) -> None:
    episodes = list(read_episodes(ppo.running.run))
    crashed = [e for e in episodes if e.error and "the display broke" in e.error.message]
    hung = [e for e in episodes if e.stop_reason is StopReason.SECONDS]
    assert crashed and hung
    assert all(e.outcome is Outcome.FAILED and e.error.where == "step" for e in crashed if e.error)
    assert all(e.outcome is Outcome.TRUNCATED and 4.9 < e.seconds < 60 for e in hung)
    first = sum(e.origin.purpose == "train" and e.origin.step == 1 for e in episodes)
    assert first == 16  # whole groups, none refilled


def test_verl_run_without_vllm_stops_with_reason(ppo: Ended) -> None:
    assert ppo.status == 1
    said = ppo.running.tail()
    assert "vLLM's engine has died" in said or "EngineDeadError" in said
    assert ppo.left == {}


@pytest.fixture(scope="module")
def vine(verl_python: Path, warm: Path, tmp_path_factory: pytest.TempPathFactory) -> Ended:
    """VinePPO with two mini-batches; the process that plays its episodes is killed after two steps."""
    own = {"verl": {"actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": 8}, "updates": {"minibatches": 2}}
    settings = {"start_from": str(warm), "algorithm": VINE} | own
    return ended(verl_python, tmp_path_factory.mktemp("vine"), settings, "ray::AgentLoopWorker")


def test_vineppo_values_states_by_continuations_on_verl(vine: Ended) -> None:
    assert_on_policy(vine.steps())
    for step, data in enumerate(vine.steps(), 1):
        episodes = [e for group in groups_of(vine.running.run, step).values() for e in group]
        assert len(episodes) == 16 and all(e.parent is None for e in episodes)  # continuations are not stored
        assert 8 <= data["vine/episodes"] <= 30 and data["vine/valued"] == data["vine/episodes"] / 2
        assert 4 <= data["vine/valued"] <= data["vine/states"] <= sum(e.turns for e in episodes)
        assert data["vine/unscored"] == data["vine/unjudged"] == 0
        assert data["train/samples"] > 0 and data["train/updates"] in (1, 2)
    assert max(data["train/updates"] for data in vine.steps()) == 2  # a mini-batch without a gradient takes none


def test_verl_run_names_a_dead_rollout_worker(vine: Ended) -> None:
    assert vine.status == 1 and vine.left == {}
    fault, said = vine.fault(), vine.running.tail()
    print(fault)
    assert fault.startswith("rollout worker 0, which runs episodes of calculator-v0, is dead: ")
    assert f"process {vine.killed}" in fault and "SYSTEM_ERROR" in fault
    last = said.rpartition("InfrastructureError: ")[2]
    assert last.startswith(fault)
    assert f"agent-rl train backend=verl resume={vine.running.run.resolve()}" in last
    assert "RayError" not in last and "The above exception" not in said


@pytest.fixture(scope="module")
def remax(verl_python: Path, warm: Path, tmp_path_factory: pytest.TempPathFactory) -> Ended:
    """ReMax, with DAPO's groups in place of dropped ones; the third step's weights reach vLLM with their rows moved."""
    rollout = RUN["rollout"] | {"groups": 8, "samples": 2}
    settings = {"start_from": str(warm), "rollout": rollout, "algorithm": REMAX, "verl": BROKEN}
    return ended(verl_python, tmp_path_factory.mktemp("remax"), settings)


def test_remax_and_dapo_run_on_verl(remax: Ended) -> None:
    assert_on_policy(remax.steps())
    rounds = []
    for step, data in enumerate(remax.steps(), 1):
        groups = groups_of(remax.running.run, step)
        varied = [g for g in groups.values() if len({e.reward for e in g}) > 1]
        print(f"step {step}: {len(groups)} groups, {len(varied)} varied, {data['rollout/rounds']} rounds")
        assert all(len(g) == 2 for g in groups.values())  # dropped ones are stored, greedy episodes are not
        assert 8 * data["rollout/batch_filled"] == min(8, len(varied)) and data["rollout/kept"] == 1.0
        assert (len(groups) > 8) == (data["rollout/rounds"] > 1)
        assert 0 <= data["rollout/greedy"] <= 1.1
        # a reward below or above the greedy one's has a gradient, and one of each pair is, at the least
        assert 8 * data["rollout/batch_filled"] <= data["train/samples"] <= 16
        rounds.append(data["rollout/rounds"])
    assert max(rounds) > 1


def test_verl_run_stops_at_wrong_server_weights(remax: Ended) -> None:
    assert remax.status == 1
    fault = remax.fault()
    print(fault)
    assert "inference server 0 does not serve the trainer's weights: over 64 fixed tokens" in fault
    assert "max_rollout_gap=0.2" in fault and fault in remax.running.tail()
    assert [row["step"] for row in remax.running.rows()] == [0, 1, 2]  # found before the next rollout
