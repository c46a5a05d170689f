"""Actor: the embedded model with its tokenizer, renderer and engine."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from agent_rl.backends.embedded.config import InterruptionConfig
from agent_rl.core.episode import Episode
from agent_rl.engines.base import SamplingParams, WeightFormat
from agent_rl.engines.embedded.engine import Engine
from agent_rl.engines.embedded.model_folder import load_model, make_engine
from agent_rl.policy.delegation import Delegation
from agent_rl.policy.shortening import Shortening
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

    def policy(
        self,
        params: SamplingParams,
        interrupt: InterruptionConfig | None = None,
        shorten: Shortening | None = None,
        delegate: Delegation | None = None,
    ) -> TokenPolicy:
        """Return a policy over the model; `params` and the rest as in `TokenPolicy`."""
        encode = partial(self.tokenizer.encode, add_special_tokens=False)
        cut = interrupt.with_ids(encode) if interrupt else None
        return TokenPolicy(self.engine, self.renderer, params, cut, shorten, delegate)

    def save(self, folder: Path) -> None:
        """Write model and tokenizer, in the format that `transformers` loads."""
        self.model.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids, for people."""
        return str(self.tokenizer.decode(list(ids)))


def make_actor(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    slots: int = 64,
    context: int = 512,
    weights: WeightFormat = "float32",
) -> Actor:
    """Make an actor of a model and its tokenizer.

    Its engine samples `slots` sequences at a time, each of `context` tokens at most, with a copy of the weights that is
    rounded to `weights`.
    """
    engine = make_engine(model, tokenizer, slots=slots, context=context, weights=weights)
    return Actor(model, tokenizer, load_renderer(tokenizer), engine)


def load_actor(
    folder: str | Path,
    *,
    slots: int = 64,
    context: int = 512,
    weights: WeightFormat = "float32",
    device: str = "cpu",
) -> Actor:
    """Load a checkpoint in Hugging Face's format, as `Actor.save`, or another tool, wrote it; see `make_actor`.

    Raises:
        CheckpointError: if there is none in the folder.
        ConfigError: if this machine has no such device.
    """
    return make_actor(*load_model(folder, device), slots=slots, context=context, weights=weights)


def new_tokenizer(episodes: Iterable[Episode], vocab_size: int) -> PreTrainedTokenizerBase:
    """Train a tokenizer on what was said in episodes."""
    messages = [message for episode in episodes for message in episode.messages]
    return train_tokenizer([text for m in messages for text in (m.content, *map(write_call, m.tool_calls))], vocab_size)
