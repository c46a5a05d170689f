"""TRL's own GRPO trainer on an environment of ours, by `as_trl`; its generation is scripted, the rest is TRL's."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"

import pytest
import trl
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from transformers.utils import get_json_schema

import agent_rl as ar

STOCK = {"red chair": 49.0, "lamp": 20.0}


@ar.register("trl-test/stock-v0", tasks={"train": [{"item": item} for item in STOCK]})
class Stock(ar.ToolEnv):
    """Answer what an item costs."""

    def reset(self, task: ar.Task, rng: object) -> str:
        self.item = str(task["item"])
        return f"What does the {self.item} cost?"

    @ar.tool
    def price(self, item: str, coins: bool = False, tags: list[str] | None = None) -> float:
        """Look up what an item costs.

        Args:
            item: its full name.
            coins: whether in cents.
        """
        return STOCK[item]

    @ar.reward
    def correct(self, episode: ar.Episode) -> bool:
        return episode.final_text == str(STOCK[self.item])


def test_schema_of_a_method_is_that_of_the_tool() -> None:
    env = ar.as_trl("trl-test/stock-v0")()
    function = get_json_schema(env.price)["function"]  # type: ignore[attr-defined]
    assert function["description"] == "Look up what an item costs." and function["parameters"]["required"] == ["item"]
    assert {name: (v["type"], v["description"]) for name, v in function["parameters"]["properties"].items()} == {
        "item": ("string", "its full name."),
        "coins": ("boolean", "whether in cents."),
        "tags": ("array", "tags"),
    }
    assert get_json_schema(env.answer)["function"]["parameters"]["required"] == ["text"]


def tokenizer() -> PreTrainedTokenizerFast:
    """Bytes, and the special tokens of Qwen3's template."""
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>", "<think>", "</think>"]
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = Tokenizer(models.BPE({letter: n for n, letter in enumerate(letters)}, []))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    fast.add_special_tokens({"additional_special_tokens": special[:3]})
    fast.add_tokens(special[3:])
    fast.chat_template = (Path(trl.__file__).parent / "chat_templates" / "qwen3.jinja").read_text()
    return fast


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call><|im_end|>"


@pytest.mark.filterwarnings("ignore")
def test_grpo_takes_a_step_on_an_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = tokenizer()
    config = Qwen3Config(
        vocab_size=len(words), hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, pad_token_id=words.pad_token_id, eos_token_id=words.eos_token_id,
    )  # fmt: skip
    prompts: list[str] = []

    def scripted(self: Any, prompt_ids: list[list[int]], *_: object, **__: object) -> tuple[list[list[int]], None]:
        """Look the item up, then answer; the second sample of four asks for another item."""
        replies, other = [], dict(zip(STOCK, reversed(STOCK), strict=True))
        for n, ids in enumerate(prompt_ids):
            prompts.append(text := words.decode(ids))
            item = text.split("What does the ")[1].split(" cost?")[0]
            if "<tool_response>" not in text:
                reply = call("price", item=other[item] if n == 1 else item)
            elif OVER in text:
                reply = "done<|im_end|>"
            else:
                reply = call("answer", text=text.rpartition("<tool_response>")[2].split("</tool_response>")[0].strip())
            replies.append(words(reply)["input_ids"])
        return replies, None

    monkeypatch.setattr(trl.GRPOTrainer, "_generate_single_turn", scripted)
    args = trl.GRPOConfig(
        output_dir=str(tmp_path), max_steps=1, per_device_train_batch_size=4, num_generations=4, use_cpu=True,
        max_completion_length=900, report_to=[], logging_steps=1, bf16=False, save_strategy="no", learning_rate=1e-3,
    )  # fmt: skip
    environment = ar.as_trl("trl-test/stock-v0")
    trainer = trl.GRPOTrainer(
        Qwen3ForCausalLM(config), args=args, processing_class=words, environment_factory=environment,
        train_dataset=Dataset.from_list(environment.rows(1)),
    )  # fmt: skip
    trainer.train()
    logged = trainer.state.log_history[0]
    assert logged["reward"] == 0.75 and logged["tools/failure_frequency"] == 0.0 and logged["grad_norm"] > 0
    assert logged["rewards/Stock/mean"] == 0.75
    assert "What does the " in prompts[0] and '"name": "answer"' in prompts[0]


OVER = "The episode is over."
