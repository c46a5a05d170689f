"""The settings of what an embedded run samples: episodes to learn from, and evaluations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

from pydantic import Field, model_validator

from agent_rl.config import Count, Section
from agent_rl.engines.base import WeightFormat
from agent_rl.policy.delegation import Delegation
from agent_rl.policy.interruption import Interruption
from agent_rl.policy.shortening import Shortening
from agent_rl.runs.config import EvalConfig, RolloutConfig


class InterruptionConfig(Section):
    """When a reply is made to answer, as in ScaleRL; see `policy.interruption`."""

    after_tokens: int = Field(ge=1)
    """Sampled tokens; the rest of `max_tokens` is for the answer."""
    text: str = Field(min_length=1)
    """Special tokens in it are encoded as such, e.g. "Time is up, I answer now.</think>"."""
    per: Literal["reply", "episode"] = "reply"
    """Whether a reply's tokens are counted or all of the episode; then every reply after that begins with the text."""
    spread: int = Field(0, ge=0)
    """The point is drawn from the last `spread` tokens before `after_tokens`."""
    unless: str = ""
    """A reply that holds this by then, e.g. "</think>", is not interrupted."""

    @model_validator(mode="after")
    def _meaningful(self) -> InterruptionConfig:
        self.with_ids(lambda text: [0], lambda ids: "")  # `Interruption` checks the numbers
        return self

    def with_ids(self, encode: Callable[[str], list[int]], decode: Callable[[Sequence[int]], str]) -> Interruption:
        """Return it for a tokenizer; `unless` is looked for in the text, as its ids depend on what is beside it."""
        held = (lambda ids: self.unless in decode(ids)) if self.unless else None
        return Interruption(self.after_tokens, tuple(encode(self.text)), self.per, self.spread, held)


class EmbeddedRolloutConfig(RolloutConfig):
    """How training episodes are sampled."""

    temperature: float = Field(1.0, gt=0)
    """With `start_from` or `episodes` 1. Nothing else changes the distribution, so its log-probabilities are exact."""
    final_temperature: float | None = Field(None, gt=0)
    """Of the last step's episodes: from `temperature` on it rises to this, linearly, as a policy that gets surer of
    itself explores less and less; null keeps it as it is. Evaluations have their own (`eval.temperature`)."""
    retry_temperature: float | None = Field(None, gt=0)
    """Of a second group of each task that no episode of the first one solved, where these are at most half of the
    batch: it takes the first one's place if one of it succeeds. So a policy that is sure of itself explores where it is
    wrong, and only there. Where over a tenth of such episodes succeed, that is luck (`second_tries`), and none is
    learned from. Trained as if sampled at `temperature`, by log-probabilities at that. Null, none that is hotter, or
    `shuffle_rewards` tries nothing again; 2 without `start_from`, `episodes` and `self_play`."""
    slots: int = Field(64, ge=1)
    """Episodes under way at a time."""
    context: int | None = Field(None, ge=2)
    """The engine's longest sequence, in tokens; null for the environment's budget or, without one, for twice the
    longest demonstration, or 1024 of a model to start from."""
    weights: WeightFormat = "float32"
    """What the engine's copy of the weights is rounded to, as an inference server with such weights would; training
    keeps float32. A simulation, see `quantization`: nothing gets faster. Evaluations sample from the engine, too."""
    interrupt: InterruptionConfig | None = None
    """When long replies are made to answer, in training and evaluation; null lets `max_tokens` cut them. Training keeps
    the given tokens out of the loss."""
    shorten: Shortening | None = None
    """What becomes of a context that has grown too long, in training and evaluation; null lets the budget end it."""
    delegate: Delegation | None = None
    """Whether the policy may give parts of a task to sub-agents, in training and evaluation, and how often."""


class EmbeddedEvalConfig(EvalConfig):
    """Which tasks are held out, and how often they are evaluated on."""

    n: Count = 384
    """Distinct tasks."""
    dev_split: str | None = None
    """The tasks to evaluate on during training; null for `dev`, so that `split` stays unseen, or for `split` if the
    environment has no `dev`."""
    dev_n: Count = 128
    """Distinct tasks of `dev_split`."""
    keep_best: bool = True
    """Whether the weights that did best on those tasks, the latest of equals, are kept beside the last ones."""
    temperature: float | None = Field(None, gt=0)
    """Of the sampled evaluations; null, the default with `start_from`, for `rollout.temperature`."""
    low_temperature: float = Field(0.2, gt=0)
    """A second temperature to evaluate at, to tell pruned noise from a new skill."""

    def sampled(self, rollout: EmbeddedRolloutConfig) -> float:
        """Return the temperature of the sampled evaluations."""
        return rollout.temperature if self.temperature is None else self.temperature

    def during(self, splits: Sequence[str]) -> str:
        """Return the split to evaluate on during training, of those that an environment has."""
        return self.dev_split or ("dev" if "dev" in splits else self.split)
