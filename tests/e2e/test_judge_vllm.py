"""`agent-rl judge run` with a model that vLLM serves on CPU: an ignorant one, whose replies a schema holds."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import agent_rl as ar
from tests.e2e.vllm_server import ROOT, environment, serving

pytestmark = pytest.mark.e2e

N = 16
RUBRIC = """
name: sums
criteria:
  - {text: Gives the right number., weight: 2}
  - {text: Says hello., weight: -1}
  - {text: Is short., rule: {regex: "^.{1,12}$"}}
"""
COMPACT = """{"backend": "xgrammar", "disable_any_whitespace": true}"""
"""A model that knows no JSON would fill a reply with line breaks."""


@pytest.fixture(scope="module")
def dull(warm: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model to which all tokens are alike, on any machine: nearly all of its replies end within 1,000 tokens."""
    folder = tmp_path_factory.mktemp("dull") / "checkpoint"
    shutil.copytree(warm, folder)
    model = AutoModelForCausalLM.from_pretrained(warm)
    torch.nn.init.zeros_(model.get_submodule("model.norm").weight)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def url(verl_python: Path, dull: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    log = tmp_path_factory.mktemp("server") / "log"
    options = ("--max-model-len", "4096", "--max-num-seqs", "16", "--served-model-name", "small")
    with serving(verl_python, dull, log, *options, "--structured-outputs-config", COMPACT) as address:
        yield f"{address}/v1"


def judge(url: str, folder: Path) -> str:
    settings = ("judge.model=small", f"judge.base_url={url}", "judge.max_tokens=1000", "judge.per_call=1")
    words = ("judge", "run", str(folder / "episodes.jsonl"), str(folder / "rubric.yaml"), "-o", str(folder / "j.jsonl"))
    command = [sys.executable, "-m", "agent_rl", *words, *settings]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


def test_judge_run_takes_what_vllm_serves(url: str, tmp_path: Path) -> None:
    (tmp_path / "rubric.yaml").write_text(RUBRIC)
    with ar.EpisodeWriter(tmp_path / "episodes.jsonl") as writer:
        for episode in ar.run("calculator-v0", "oracle", n=N):
            writer.write(episode)
    judge(url, tmp_path)
    judged = ar.load_judged(tmp_path / "j.jsonl").judgements
    assert len(judged) == N
    for judgement in judged:
        assert (judgement.score is None) == bool(judgement.faults), "a fault is no grade"
        assert [v.value for v in judgement.verdicts if v.criterion == "is-short"] == [1.0]
    calls = [json.loads(line) for line in (tmp_path / "calls.jsonl").read_bytes().splitlines()[1:]]
    assert not [call for call in calls if "unstructured" in call], "vLLM takes the schema"
    whole = [call for call in calls if "answer" in call and call["answer"]["finish_reason"] == "stop"]
    for call in whole:
        schema = call["request"]["response_format"]["json_schema"]["schema"]["properties"]["verdicts"]
        assert set(json.loads(call["answer"]["content"])["verdicts"]) == set(schema["required"])
    faults = sorted(str(fault) for judgement in judged for fault in judgement.faults)
    print(f"{len(calls)} calls, {len(whole)} whole replies, faults: {faults}")
    assert whole, "some replies are whole"
    judge(url, tmp_path)
    assert len((tmp_path / "calls.jsonl").read_bytes().splitlines()) == 1 + len(calls), "no call is made twice"
