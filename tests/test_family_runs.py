"""A step of training from a folder as other families' models have it: tokenizer, chat template, configuration."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from tokenizers import AddedToken
from transformers import AutoModelForCausalLM, AutoTokenizer

import agent_rl as ar
from agent_rl.backends.embedded.run import start_run
from agent_rl.rendering import train_tokenizer
from agent_rl.runs.metrics import read_metrics
from agent_rl.view.progress import Progress
from tests.families import make
from tests.real import largest_difference
from tests.runs import config

GEMMA = """{{- bos_token -}}
{%- for m in messages -%}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) -%}{{- raise_exception('roles must alternate') -}}{%- endif -%}
{{- '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\\n' + m.content + '<end_of_turn>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<start_of_turn>model\\n' -}}{%- endif -%}"""
MISTRAL = """{{- bos_token -}}
{%- for m in messages -%}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) -%}{{- raise_exception('roles must alternate') -}}{%- endif -%}
{{- '[INST] ' + m.content + ' [/INST]' if m.role == 'user' else m.content + eos_token -}}
{%- endfor -%}"""
OLMO = """{{- bos_token -}}
{%- for m in messages -%}
{{- '<|' + m.role + '|>\\n' + m.content + (eos_token if m.role == 'assistant' else '') + '\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>\\n' -}}{%- endif -%}"""
FOLDERS = {
    "gemma2": (GEMMA, "<start_of_turn>user\n# Tools", None),
    "gpt2": (None, "system:\n# Tools", "plain"),
    "mistral": (MISTRAL, "[INST] # Tools", None),
    "olmo2": (OLMO, "<|system|>\n# Tools", None),
}
"""By kind: the chat template as its models have it, how a prompt with tools begins, and `renderer=`."""
SPECIAL = ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>", "[INST]", "[/INST]")


@ar.register("wordy-v0", tasks={"train": [{"n": n} for n in range(50)], "eval": [{"n": n} for n in range(60, 90)]})
class Wordy(ar.ToolEnv):
    """Rewards each letter, so that any two replies differ."""

    def reset(self, task: ar.Task, rng: np.random.Generator) -> str:
        return "Say something."

    @ar.tool
    def look(self, place: str) -> str:
        """Look somewhere."""
        return place

    @ar.reward
    def letters(self, episode: ar.Episode) -> float:
        return len(episode.messages[1].content)


def write(kind: str, folder: Path) -> Path:
    """Write a tiny model of a family with a tokenizer that has the family's template."""
    tokenizer = train_tokenizer(["You may call functions within XML tags, with arguments as a JSON object"] * 9)
    tokenizer.add_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    tokenizer.add_special_tokens({"bos_token": "<bos>", "eos_token": "<eos>"})
    tokenizer.chat_template, *_ = FOLDERS[kind]
    del tokenizer.init_kwargs["agent_rl_renderer"]
    tokenizer.save_pretrained(folder)
    positions = "n_positions" if kind == "gpt2" else "max_position_embeddings"
    make(kind, vocab_size=len(tokenizer), **{positions: 2048}).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("kind", FOLDERS)
def test_run_trains_family_with_its_own_template(kind: str, tmp_path: Path) -> None:
    start, (_, opening, renderer) = write(kind, tmp_path / "model"), FOLDERS[kind]
    settings = {
        "env": "wordy-v0",
        "start_from": str(start),
        "renderer": {"name": renderer},
        "steps": 1,
        "rollout": {"groups": 2, "samples": 2, "temperature": 1.0, "max_tokens": 6, "context": 2048},
        "eval": {"n": 2, "dev_n": 2, "every": 0},
    }
    run = start_run(config(tmp_path, **settings), Progress())
    (row,) = (row for row in read_metrics(run / "metrics.jsonl") if row["kind"] == "train")
    assert math.isfinite(row["train/loss"]) and row["train/grad_norm"] > 0
    episodes = [e for e in ar.read_episodes(run) if (e.origin.split, e.origin.step) == ("train", 0)]
    assert len(episodes) == 4 and not any(e.error for e in episodes)
    tokenizer = AutoTokenizer.from_pretrained(run / "checkpoint")
    for episode in episodes:
        shown = tokenizer.decode(episode.trajectories[0].token_ids.tolist())
        assert shown.removeprefix("<bos>").startswith(opening) and '"name": "look"' in shown
    model = AutoModelForCausalLM.from_pretrained(start).eval()
    assert largest_difference(model, episodes) < 1e-3
    warnings = (run / "warnings.txt").read_text()
    assert warnings.count("agent_rl writes tools into the system message (as Hermes does), calls into") == 1
