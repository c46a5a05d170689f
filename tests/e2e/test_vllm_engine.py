"""engine=vllm with the real vLLM on CPU: the embedded trainer's weights reach it, whole and as an adapter's sum."""

from __future__ import annotations

import math
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

from agent_rl.engines.embedded.model_folder import load_model
from agent_rl.runs.metrics import read_metrics
from agent_rl.store.episodes import read_episodes
from tests.e2e.vllm_server import environment

pytestmark = pytest.mark.e2e

ROOT = Path(__file__).resolve().parents[2]
STEPS = 2
SMALL = (
    *("threads=1", f"steps={STEPS}", "seed=3", "eval.n=4", "eval.dev_n=4", "eval.every=0"),
    *("rollout.groups=4", "rollout.samples=8", "rollout.slots=16", "optimizer.lr=5e-3", "optimizer.warmup_steps=0"),
    *("warm_start.clone_steps=100", "warm_start.demonstrations=600"),  # enough that some succeed
)


@pytest.mark.parametrize("adapter", [(), ("lora.rank=4",)], ids=["whole", "lora"])
def test_vllm_samples_from_the_weights_that_are_trained(
    verl_python: Path, tmp_path: Path, adapter: tuple[str, ...]
) -> None:
    command = [str(verl_python), "-m", "agent_rl", "train", "engine=vllm", "engine_args.enforce_eager=true", *SMALL]
    subprocess.run([*command, *adapter, f"runs_dir={tmp_path}"], cwd=ROOT, env=environment(), check=True, timeout=600)
    folder = tmp_path / "latest"
    rows = [row for row in read_metrics(folder / "metrics.jsonl") if row["kind"] == "train"]
    losses = [row["train/loss"] for row in rows if row["train/samples"]]
    assert len(rows) == STEPS and losses and all(map(math.isfinite, losses))
    model, _ = load_model(folder.resolve() / "checkpoint")
    gaps = []
    for episode in read_episodes(folder / "episodes.jsonl"):
        if episode.origin.purpose != "eval" or episode.origin.step != STEPS or "-sampled-" not in episode.id:
            continue
        (trajectory,) = episode.trajectories
        ids, mask = torch.tensor(trajectory.token_ids[None].astype(np.int64)), trajectory.loss_mask[1:]
        assert set(trajectory.policy_versions[trajectory.loss_mask].tolist()) == {STEPS}
        with torch.no_grad():
            logprobs = model(ids).logits[0, :-1].log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
        gaps.append(np.abs(logprobs.numpy()[mask] - trajectory.logprobs[1:][mask]).max())
    assert gaps and max(gaps) < 1e-3
