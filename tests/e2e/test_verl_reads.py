"""verl on CPU, recorded: the keys that runs read are those of verl_keys.txt."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from agent_rl.backends.embedded.config import TrainConfig
from agent_rl.backends.verl.config.config_keys import domain_of, replaced_by
from agent_rl.config import load_config
from tests.e2e.servers import ROOT, complete

FILE = ROOT / "agent_rl" / "backends" / "verl" / "config" / "verl_keys.txt"
RUN = {
    "env": "calculator-v0",
    "steps": 1,
    "lr": 1e-3,
    "checkpoint_every": 1,
    "rollout": {"groups": 4, "samples": 4, "max_tokens": 56, "context": 128},
    "eval": {"n": 4, "every": 0},
}
ACTOR = "actor_rollout_ref.actor"
CRITIC = ["algorithm=ppo", "algorithm.critic.warmup_steps=0", "algorithm.proximal=recompute", "algorithm.entropy=0.01"]
CRITIC += ["algorithm.kl.where=loss", "algorithm.kl.kind=k3"]

pytestmark = pytest.mark.e2e


def recorded_rows() -> set[str]:
    """The keys whose reader was recorded at run time: `file:function`."""
    found: set[str] = set()
    sections: list[str] = []
    for line in FILE.read_text().splitlines():
        if line.startswith("["):
            sections = line.strip("[]").split()
        elif line and not line.startswith("#") and ":" in line.split()[2]:
            found |= {f"{section}.{line.split()[0]}" for section in sections}
    return found


def test_verl_runs_read_the_listed_keys(verl_python: Path, warm: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("AGENT_RL_READS", str(tmp_path / "reads"))
    critic = load_config("backend/embedded", TrainConfig, CRITIC).algorithm
    runs = (
        {"algorithm": critic.model_dump(mode="json")},
        {"async": {"mode": "one_step_off"}},
        {"async": {"mode": "separate"}},
    )
    for number, changes in enumerate(runs):
        folder = tmp_path / str(number)
        folder.mkdir()
        complete(verl_python, folder, RUN | {"start_from": str(warm)} | changes)
    lines = [line for file in (tmp_path / "reads").iterdir() for line in file.read_text().splitlines()]
    read = {line.partition("\t")[0] for line in lines}
    read |= {f"transfer_queue.{key}" for key in read if key.startswith(("backend.", "metrics."))}
    listed = recorded_rows()
    conditional = {
        key
        for key in listed
        if "lora" in key or key.endswith(("num_cycles", "min_lr_ratio", "modules", "use_orig_params"))
    }
    conditional |= {"trainer.del_local_ckpt_after_load"}
    missed = sorted(listed - read - conditional)
    assert missed == [], json.dumps(missed, indent=1)
    assert os.environ["AGENT_RL_READS"] and domain_of(f"{ACTOR}.optim.clip_grad") == "float>0"
    assert replaced_by(f"{ACTOR}.ppo_epochs", critic, reference=True) == "set updates.epochs"
