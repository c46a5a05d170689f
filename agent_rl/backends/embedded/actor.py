"""Student: the embedded model with what it needs to talk: tokenizer, renderer and engine."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from agent_rl.backends.embedded.config import InterruptionConfig, TrainConfig
from agent_rl.backends.embedded.model import make_model
from agent_rl.core.episode import Episode, Origin
from agent_rl.core.messages import Message
from agent_rl.engines.base import SamplingParams
from agent_rl.engines.embedded.engine import Engine
from agent_rl.engines.embedded.quantization import WeightFormat, forward_in
from agent_rl.errors import CheckpointError, ConfigError
from agent_rl.gym.registry import EnvSpec
from agent_rl.gym.tasks import TaskStream, episode_seed
from agent_rl.policy.scripted import demonstrator
from agent_rl.policy.token import TokenPolicy
from agent_rl.rendering import load_renderer, train_tokenizer
from agent_rl.rendering.base import Renderer
from agent_rl.rendering.calls import write_call
from agent_rl.rollout.job import Job
from agent_rl.rollout.pool import run_jobs

TOKENIZER_EPISODES = 1000
"""How many demonstrations the tokenizer is trained on."""


@dataclass(frozen=True, slots=True)
class Actor:
    """A model that can be sampled from and trained; a checkpoint in Hugging Face's format when saved."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    renderer: Renderer
    engine: Engine

    def policy(self, params: SamplingParams, interrupt: InterruptionConfig | None = None) -> TokenPolicy:
        """Return a policy that samples with `params`, and interrupts replies that go on for too long."""
        given = None if interrupt is None else interrupt.with_ids(self._encode)
        return TokenPolicy(self.engine, self.renderer, params, given)

    def _encode(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def save(self, folder: Path) -> None:
        """Write model and tokenizer, in the format that `transformers` loads."""
        self.model.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids, for people."""
        return str(self.tokenizer.decode(list(ids)))


def load_actor(folder: str | Path, *, slots: int = 64, context: int = 512, weights: WeightFormat = "float32") -> Actor:
    """Load a checkpoint that `Actor.save`, or anybody else, wrote; its engine samples with such weights.

    Raises:
        CheckpointError: if there is none in the folder.
    """
    if not (Path(folder) / "config.json").exists():
        raise CheckpointError(f"no model in '{folder}': it has no config.json; give a folder that a run wrote")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return _assemble(model, tokenizer, slots, context, weights)


def new_actor(spec: EnvSpec, config: TrainConfig) -> Actor:
    """Make an untrained student whose tokenizer knows the words of the environment's demonstrations."""
    episodes = demonstrate(spec, config, TOKENIZER_EPISODES)
    tokenizer = train_tokenizer([t for e in episodes for m in e.messages for t in _texts(m)], config.vocab_size)
    model = make_model(config.model, len(tokenizer), config.seed)
    rollout, context = config.rollout, config.context(spec.budget.tokens)
    return _assemble(model, tokenizer, rollout.slots, context, rollout.weights)


def _assemble(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, slots: int, context: int, weights: WeightFormat
) -> Actor:
    model.generation_config.eos_token_id = model.config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = model.config.pad_token_id = tokenizer.pad_token_id
    model.eval()
    engine = Engine(model, slots=slots, max_len=context, forward=forward_in(weights))
    return Actor(model, tokenizer, load_renderer(tokenizer), engine)


def demonstrate(spec: EnvSpec, config: TrainConfig, n: int, renderer: Renderer | None = None) -> list[Episode]:
    """Run the environment's own noisy script on the first `n` training tasks; with token ids if there is a renderer.

    Raises:
        ConfigError: if the environment has no demonstrations.
    """
    stream = TaskStream(spec.tasks, config.split, config.seed)
    tasks = [stream.at(i) for i in range(n)]
    origin = Origin("demonstration", config.split)
    jobs = [
        Job(spec, task, episode_seed(config.seed, task, i), env_args=config.env_args, origin=origin)
        for i, task in enumerate(tasks)
    ]
    episodes = asyncio.run(run_jobs(jobs, demonstrator(renderer)))
    broken = next((e for e in episodes if e.error is not None), None)
    if broken is not None and broken.error is not None:
        raise ConfigError(f"a demonstration of {spec.id} failed: {broken.error.type}: {broken.error.message}")
    return episodes


def _texts(message: Message) -> list[str]:
    return [message.content, *(write_call(call) for call in message.tool_calls)]
