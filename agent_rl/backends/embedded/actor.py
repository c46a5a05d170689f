"""Actor: the embedded model with its tokenizer, renderer and engine."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from agent_rl.backends.embedded.config import InterruptionConfig
from agent_rl.backends.embedded.model import ModelConfig, make_model
from agent_rl.core.episode import Episode
from agent_rl.core.messages import Message
from agent_rl.engines.base import SamplingParams
from agent_rl.engines.embedded.engine import Engine
from agent_rl.engines.embedded.model_folder import load_model, make_engine
from agent_rl.engines.embedded.quantization import WeightFormat
from agent_rl.policy.token import TokenPolicy
from agent_rl.rendering import load_renderer, train_tokenizer
from agent_rl.rendering.base import Renderer
from agent_rl.rendering.hermes import write_call

OTHERS_MAX_TOKENS = 1024
"""Of one reply of a model whose `generation_config.json` does not say."""


@dataclass(frozen=True, slots=True)
class Actor:
    """A model that can be sampled from and trained; a checkpoint in Hugging Face's format when saved."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    renderer: Renderer
    engine: Engine

    def params(self, temperature: float, max_tokens: int | None = None) -> SamplingParams:
        """Return how to sample at a temperature; with the model's own limit of a reply if none is given."""
        own = self.model.generation_config.max_new_tokens or OTHERS_MAX_TOKENS
        return SamplingParams(temperature=temperature, max_tokens=max_tokens or own)

    def policy(self, params: SamplingParams, interrupt: InterruptionConfig | None = None) -> TokenPolicy:
        """Return a policy over the model, with `params` and the interruption of long replies."""
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
    """Load a checkpoint in Hugging Face's format.

    Args:
        folder: what `Actor.save`, or another tool, wrote.
        slots: sequences that the engine samples at a time.
        context: the longest sequence, in tokens.
        weights: what the engine's copy of the weights is rounded to.

    Raises:
        CheckpointError: if there is none in the folder.
    """
    return _assemble(*load_model(folder), slots, context, weights)


def new_actor(
    config: ModelConfig,
    tokenizer: PreTrainedTokenizerBase,
    seed: int,
    *,
    slots: int = 64,
    context: int = 512,
    weights: WeightFormat = "float32",
) -> Actor:
    """Make an untrained actor; its engine is as of `load_actor`."""
    model = make_model(config, len(tokenizer), seed)
    return _assemble(model, tokenizer, slots, context, weights)


def new_tokenizer(episodes: Iterable[Episode], vocab_size: int) -> PreTrainedTokenizerBase:
    """Train a tokenizer on what was said in episodes."""
    return train_tokenizer([text for e in episodes for m in e.messages for text in _texts(m)], vocab_size)


def _texts(message: Message) -> list[str]:
    return [message.content, *(write_call(call) for call in message.tool_calls)]


def _assemble(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, slots: int, context: int, weights: WeightFormat
) -> Actor:
    engine = make_engine(model, tokenizer, slots=slots, context=context, weights=weights)
    return Actor(model, tokenizer, load_renderer(tokenizer), engine)
