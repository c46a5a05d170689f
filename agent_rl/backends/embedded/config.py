"""The settings of an embedded run, as `configs/train.yaml` holds them; an unknown key is an error."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field, JsonValue, model_validator

from agent_rl.algorithms.config import AlgorithmConfig
from agent_rl.algorithms.routing import RoutingConfig
from agent_rl.backends.embedded.model import ModelConfig
from agent_rl.backends.embedded.optimizer import OptimizerConfig
from agent_rl.backends.embedded.precision import WeightFormat
from agent_rl.backends.embedded.warmstart import WarmStartConfig
from agent_rl.errors import ConfigError
from agent_rl.policy.sampling import SamplingParams


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class RolloutConfig(_Section):
    """How training episodes are sampled."""

    groups: int = Field(16, ge=1)
    """Tasks per step."""
    samples: int = Field(8, ge=1)
    """Episodes per task."""
    temperature: float = Field(1.0, gt=0)
    max_tokens: int = Field(56, ge=1)
    """Of one reply."""
    slots: int = Field(64, ge=1)
    """Episodes under way at a time."""
    weights: WeightFormat = "float32"
    """What the engine's copy of the weights is rounded to, as by an inference server that holds such weights; training
    keeps float32. A simulation, see `precision`: nothing gets faster. Evaluations sample from the engine, too."""

    @property
    def params(self) -> SamplingParams:
        """The distribution that training samples from: nothing is cut off, so that its log-probabilities are exact."""
        return SamplingParams(temperature=self.temperature, max_tokens=self.max_tokens)


class EvalConfig(_Section):
    """What is held out, and how often it is looked at."""

    split: str = "test"
    """Reported before and after; nothing is tuned on it."""
    n: int = Field(384, ge=1)
    """Distinct tasks."""
    dev_split: str = "dev"
    """Watched during training."""
    dev_n: int = Field(128, ge=1)
    every: int = Field(10, ge=0)
    """Steps between looks at the dev split; 0 is never."""
    low_temperature: float = Field(0.2, gt=0)
    """At which the warm-started model is evaluated too, to tell pruned noise from a new skill."""


class TrainConfig(_Section):
    """One run."""

    env: str
    env_args: dict[str, JsonValue] = {}
    split: str = "train"
    seed: int = Field(0, ge=0)
    name: str | None = None
    runs_dir: str = "runs"
    start_from: str | None = None
    """A checkpoint's folder to train on from, instead of a fresh model and its warm start."""
    threads: int = Field(0, ge=0)
    """Of torch; 0 leaves it to torch."""
    steps: int = Field(60, ge=0)
    vocab_size: int = Field(576, ge=432)
    micro_batch_tokens: int = Field(4096, ge=1)
    """Padded tokens per forward; the loss does not depend on it."""
    updates_per_batch: int = Field(1, ge=1)
    checkpoint_every: int = Field(20, ge=1)
    shuffle_rewards: bool = False
    """A control: rewards are dealt out at random within each step, so nothing can be learned."""
    model: ModelConfig = ModelConfig()
    warm_start: WarmStartConfig = WarmStartConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    rollout: RolloutConfig = RolloutConfig()
    eval: EvalConfig = EvalConfig()

    @model_validator(mode="after")
    def _has_routes(self) -> TrainConfig:
        routing = self.algorithm.routing
        if self.start_from is None and self.model.architecture == "qwen3" and routing != RoutingConfig():
            raise ValueError(
                "algorithm.routing is about a mixture of experts, and the model is dense: set model=tiny_moe, or "
                "algorithm.routing.replay=none and algorithm.routing.min_agreement=0"
            )
        return self

    def context(self, budget_tokens: int | None) -> int:
        """Return the engine's context for an environment's token budget."""
        if budget_tokens is None:
            return min(1024, self.model.max_positions)
        if budget_tokens > self.model.max_positions:
            raise ConfigError(
                f"the environment's budget of {budget_tokens} tokens exceeds "
                f"model.max_positions={self.model.max_positions}"
            )
        return budget_tokens
