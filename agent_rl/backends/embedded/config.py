"""The settings of an embedded run, and its model's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import ClassVar, Literal

from pydantic import Field, JsonValue, model_validator

from agent_rl.algorithms.learnable import nothing_learned
from agent_rl.algorithms.requirements import Requirements
from agent_rl.backends.embedded.fine_tuning import FreezeConfig, LoraConfig, ModelFormat
from agent_rl.backends.embedded.optimizer import OptimizerConfig
from agent_rl.backends.embedded.precision import PrecisionConfig
from agent_rl.backends.embedded.rollout_config import EmbeddedEvalConfig, EmbeddedRolloutConfig
from agent_rl.backends.embedded.warm_start_config import WarmStartConfig, pretrained_defaults
from agent_rl.config import Section, filled_in
from agent_rl.errors import ConfigError
from agent_rl.moe.agreement import RoutingConfig
from agent_rl.runs.config import AsyncConfig, PathOrName, RunConfig

MAX_TOKENS = 56
"""Of one reply of a model made here: what the built-in environments' demonstrations need. It is in the checkpoint."""


PLAYER: Mapping[str, object] = {
    "rollout": {"temperature": 1.3},
    "eval": {"temperature": 1.0},
    "optimizer": {"weight_decay": 0.1},
}
"""The defaults of runs in which a fresh model samples: it explores more than it is evaluated with, and weights that
shrink free what is settled, right or wrong. A large vocabulary has too many wrong tokens for the temperature."""
FRESH: Mapping[str, object] = filled_in({"rollout": {"retry_temperature": 2.0}}, PLAYER)
"""The same, but for self-play: what it is sure of, and wrong, is tried hotter still."""
DEVICES = r"^(auto|cpu|mps|cuda(:\d+)?)$"


class ModelConfig(Section):
    """Shape of the model; the default has 0.7 M parameters."""

    architecture: Literal["qwen3", "qwen3_moe"] = "qwen3"
    """Dense, or a mixture of experts."""
    hidden: int = Field(128, ge=1)
    """Width of the states between layers."""
    layers: int = Field(3, ge=1)
    """At least two: the attention of the first two starts as an induction pair."""
    heads: int = Field(4, ge=1)
    """Of queries, a layer."""
    kv_heads: int = Field(4, ge=1)
    """Of keys and values, a layer; it divides `heads`."""
    head_dim: int = Field(32, ge=1)
    """Width of a head."""
    intermediate: int = Field(384, ge=1)
    """Width inside a dense layer's MLP."""
    experts: int = Field(8, ge=1)
    """A layer, of a mixture."""
    experts_per_token: int = Field(2, ge=1)
    """Experts that a token goes to."""
    expert_intermediate: int = Field(128, ge=1)
    """Width inside an expert."""
    max_positions: int = Field(4096, ge=1)
    """The longest sequence in tokens."""
    rope_theta: float = Field(10_000.0, gt=0)
    """The base of the rotary positions."""


class TrainConfig(RunConfig):
    """One embedded run."""

    episodes: PathOrName | None = None
    """An earlier run's folder or episode file to learn from, instead of rollouts; `rollout.groups` of it a step."""
    threads: int = Field(0, ge=0)
    """Of torch; 0 for one, or for torch's own choice if the model has at least 10 million parameters."""
    processes: int = Field(1, ge=1)
    """Of this machine: each samples a share of the groups, with `rollout.slots` of its own, and computes a share of the
    gradients; with `device=cuda` each takes a GPU. A run may be resumed with another number."""
    device: str = Field("cpu", pattern=DEVICES)
    """Where the model is sampled and trained: `cpu`, `cuda`, `cuda:1`, `mps` (Apple), or `auto`, a GPU if there is
    one. A run may be resumed on another."""
    dtype: ModelFormat = "float32"
    """What the weights are held, sampled and trained in. With `bfloat16` the optimizer steps a float32 copy of them,
    into which gradients are added in float32; logits are float32 (`precision.head`)."""
    lora: LoraConfig | None = None
    """Train adapters in place of the model's weights, such as `lora.rank=16`; null trains the weights."""
    freeze: FreezeConfig = FreezeConfig()
    gradient_checkpointing: bool = False
    """Whether a layer's activations are computed again for its gradients instead of kept: less memory for a fourth more
    time, about."""
    vocab_size: int = Field(576, ge=432)
    """Of a fresh model's tokenizer."""
    micro_batch_tokens: int = Field(0, ge=0)
    """Padded tokens per forward; the loss does not depend on it. 0 for 4096 on a GPU, and for 1024 on a CPU, where more
    took no less time and 165 MiB more."""
    check_memory: bool = True
    """Whether a run that takes more memory than there is, by an estimate, is refused before it begins."""
    self_play: bool = False
    """Whether the policy has all seats of a game, such as `nim-v0`, and learns from each: the samples of a task's seat
    are a group. Otherwise, and in evaluations, it plays alone, against the game's own opponent."""
    shuffle_rewards: bool = False
    """A control: rewards are dealt out at random within each step, so nothing can be learned."""
    asynchrony: AsyncConfig = Field(AsyncConfig(), alias="async")
    """With `one_step_off`, `max_staleness` batches are sampled ahead: each is that many updates old, the first ones as
    old as the run. Nothing gets faster, as one process samples and trains in turn; it shows what learning from old
    tokens does to an algorithm, reproducibly."""
    engine: Literal["torch", "vllm"] = "torch"
    """What samples: our own engine in this process, or vLLM (`make setup-verl`) in a process beside it, which gets the
    weights in memory after each update. With vLLM a run is not bit for bit the same again."""
    engine_args: Mapping[str, JsonValue] = Field({})
    """vLLM's engine arguments, such as `tensor_parallel_size`; `gpu_memory_utilization` is 0.4 if left out."""
    model: ModelConfig = ModelConfig()
    warm_start: WarmStartConfig = WarmStartConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    precision: PrecisionConfig = PrecisionConfig()
    rollout: EmbeddedRolloutConfig = EmbeddedRolloutConfig()
    eval: EmbeddedEvalConfig = EmbeddedEvalConfig()

    BEFORE: ClassVar[Mapping[str, object]] = {"rollout": {"retry_temperature": None}}
    """What runs of older versions had where their settings say nothing, and the default is another since."""

    @model_validator(mode="before")
    @classmethod
    def _of_the_start(cls, given: object) -> object:
        """Fill in what suits the model that the run starts from: a given one, or a fresh one that samples."""
        if not isinstance(given, Mapping):
            return given
        if given.get("start_from") is not None:
            return {**given, "warm_start": pretrained_defaults(given.get("warm_start"))}
        if given.get("episodes") is not None:
            return given
        return filled_in(given, PLAYER if given.get("self_play") else FRESH)

    @model_validator(mode="after")
    def _meaningful(self) -> TrainConfig:
        if problem := next(_problems(self), None):
            raise ValueError(problem)
        return self

    @property
    def mismatch(self) -> str | None:
        """Why the log-probabilities of what samples are not the trainer's; None where they are, up to rounding.

        Batches sampled ahead are no reason: their log-probabilities are exact, those of earlier weights.
        """
        differing = {
            "engine=vllm samples": self.engine == "vllm",
            f"rollout.weights={self.rollout.weights} samples": self.rollout.weights != "float32",
            f"precision.autocast={self.precision.autocast} trains": self.precision.autocast != "none",
            "dtype=bfloat16 rounds otherwise in the engine's kernels": self.dtype == "bfloat16",
        }
        return None if self.episodes else next((why for why, there in differing.items() if there), None)

    @property
    def fine_tunes(self) -> bool:
        """Whether the model is changed before it is trained: its format, or what of it learns."""
        return self.dtype != "float32" or self.lora is not None or self.freeze != FreezeConfig()

    @property
    def warms_up(self) -> bool:
        """Whether the model learns from demonstrations before the first step: a fresh one always, others if asked."""
        return self.start_from is None or self.warm_start.clone_steps > 0

    @property
    def forward_tokens(self) -> int:
        """How many padded tokens go through a model at a time."""
        return self.micro_batch_tokens or (1024 if self.device == "cpu" else 4096)

    def temperature_at(self, step: int) -> float:
        """Return the temperature of the episodes that a step (from 0) learns from."""
        first, last = self.rollout.temperature, self.rollout.final_temperature
        return first if last is None else first + (last - first) * step / max(1, self.steps - 1)

    @property
    def steps_ahead(self) -> int:
        """How many batches are sampled in advance."""
        return 0 if self.asynchrony.mode == "sync" else self.asynchrony.max_staleness

    def describe_training(self) -> str:
        """Return what the steps learn from, in words."""
        if self.episodes is not None:
            return f"{self.steps} steps of {self.rollout.groups} groups from {self.episodes}"
        return f"{self.steps} steps of {self.rollout.groups} tasks x {self.rollout.samples} episodes"

    def context(self, budget_tokens: int | None) -> int:
        """Return the engine's context for an environment's token budget."""
        wanted = budget_tokens if self.rollout.context is None else self.rollout.context
        if wanted is None:
            return 1024 if self.start_from else min(1024, self.model.max_positions)
        if self.start_from is None and wanted > self.model.max_positions:  # the engine asks a model to start from
            what = "the environment's budget" if self.rollout.context is None else "rollout.context"
            raise ConfigError(f"{what} of {wanted} tokens exceeds model.max_positions={self.model.max_positions}")
        return wanted


# What makes no sense together; each yields what is wrong and what to set


def _problems(config: TrainConfig) -> Iterator[str]:
    yield from _warm_start_problems(config)
    yield from _engine_problems(config)
    yield from _precision_problems(config)
    yield from _process_problems(config)
    yield from _rollout_problems(config)
    yield from _stored_problems(config)
    yield from _async_problems(config)


def _warm_start_problems(config: TrainConfig) -> Iterator[str]:
    episodes, algorithm = config.warm_start.episodes, config.algorithm
    if episodes is not None and not config.warms_up:
        yield f"warm_start.episodes={episodes} with warm_start.clone_steps=0 clones nothing"
    if config.lora and config.start_from and config.warms_up and Requirements(algorithm).needs_reference:
        yield (
            f"lora: {algorithm.name} compares with the model without its adapter, and the warm start is in the "
            "adapter: clone in a run of its own (steps=0), then set start_from to its checkpoint"
        )


def _engine_problems(config: TrainConfig) -> Iterator[str]:
    if config.engine == "torch":
        if config.engine_args:
            yield "engine_args are vLLM's: set engine=vllm, or leave them out"
        return
    if config.processes > 1:
        yield f"processes={config.processes} sample with engines of their own: set processes=1 with engine=vllm"
    if config.rollout.weights != "float32":
        yield f"rollout.weights={config.rollout.weights} is simulated by engine=torch only: set engine_args.dtype"
    if config.algorithm.routing != RoutingConfig():
        yield "algorithm.routing needs the routes of engine=torch, or backend=verl: engine=vllm reports none"


def _precision_problems(config: TrainConfig) -> Iterator[str]:
    autocast = config.precision.autocast
    if autocast == "float16" and config.algorithm.critic.where != "none":
        yield (
            "precision.autocast=float16 scales the loss for the policy's optimizer, and the critic has one of its own: "
            "use bfloat16"
        )
    if config.gradient_checkpointing and config.algorithm.routing.replay != "none":
        yield (
            "gradient_checkpointing computes layers again when no routes are given to them any more: set "
            "algorithm.routing.replay=none"
        )
    if config.dtype == "bfloat16" and autocast != "none":
        yield f"precision.autocast={autocast} changes nothing that dtype=bfloat16 does not: leave one of them out"


def _process_problems(config: TrainConfig) -> Iterator[str]:
    """Yield what several processes would share, and don't."""
    shared = {
        f"device={config.device} is one GPU": config.device.startswith("cuda:") or config.device == "mps",
        "precision.autocast=float16 scales the loss by what overflows": config.precision.autocast == "float16",
        "algorithm.critic is a second model": config.algorithm.critic.where != "none",
        "judge.evolve=true changes criteria": config.judge.evolve,
    }
    for what, is_shared in shared.items():
        if is_shared and config.processes > 1:
            yield f"processes={config.processes}: {what}, which one process has: set processes=1"


def _rollout_problems(config: TrainConfig) -> Iterator[str]:
    algorithm, rollout, is_fresh = config.algorithm, config.rollout, config.start_from is None
    hottest = max(rollout.temperature, rollout.final_temperature or 0.0)
    learning = (algorithm, rollout.groups, rollout.samples, config.steps, hottest)
    if config.episodes is None and (why := nothing_learned(*learning)):
        yield why
    if config.self_play and rollout.retry_temperature is not None:
        yield "rollout.retry_temperature: with self_play, that one player fails is another's success: leave it out"
    cut, most = rollout.interrupt, rollout.max_tokens or (MAX_TOKENS if is_fresh else None)
    if cut and cut.per == "reply" and most is not None and cut.after_tokens >= most:
        yield f"rollout.interrupt.after_tokens={cut.after_tokens} leaves nothing of max_tokens={most} for the answer"
    if is_fresh and config.model.architecture == "qwen3" and algorithm.routing != RoutingConfig():
        yield (
            "algorithm.routing is about a mixture of experts, and the model is dense: set model=tiny_moe, or "
            "algorithm.routing.replay=none and algorithm.routing.min_agreement=0"
        )


def _stored_problems(config: TrainConfig) -> Iterator[str]:
    """Yield what stored episodes can't give."""
    if config.episodes is None:
        return
    if not config.algorithm.learns_from_any_policy:
        yield (
            f"episodes={config.episodes}: objective={config.algorithm.objective['name']} learns from rollouts of the "
            "policy as it is, not from stored ones; these learn from those of any policy: algorithm=dpo, algorithm=rft"
        )
    if config.algorithm.refill.max_rounds > 1:
        yield "refill samples more groups; of stored episodes there are as many as there are"


def _async_problems(config: TrainConfig) -> Iterator[str]:
    """Yield why one process can't run `async` as configured."""
    ahead = config.asynchrony
    if ahead.mode == "separate":
        yield (
            "async.mode=separate samples and trains at the same time, and this backend is one process that takes turns:"
            " set async.mode=one_step_off, or backend=verl"
        )
    if ahead.on_stale != AsyncConfig().on_stale:
        yield f"async.on_stale={ahead.on_stale}: batches are sampled in turn here, so none is ever too old"
    if ahead.mode != "sync" and config.episodes is not None:
        yield f"async.mode={ahead.mode} samples ahead, and with episodes={config.episodes} nothing is sampled"
