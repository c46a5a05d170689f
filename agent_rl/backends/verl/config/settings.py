"""The settings of a run on verl, and what each becomes in verl's own config."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from pydantic import Field, JsonValue, field_validator, model_validator

from agent_rl.algorithms.config import AlgorithmConfig
from agent_rl.algorithms.learnable import nothing_learned
from agent_rl.algorithms.requirements import Requirements
from agent_rl.backends.embedded.fine_tuning import LoraConfig
from agent_rl.backends.verl.config.async_keys import asynchronous, impossible
from agent_rl.backends.verl.config.config_keys import critic_settings, replaced_by
from agent_rl.backends.verl.worker.routes import STRATEGY, VERL_REPLAY_STRATEGIES, routing_settings
from agent_rl.config import Count
from agent_rl.gym.tasks import RL_START
from agent_rl.runs.config import EvalConfig, PathOrName, RolloutConfig, RunConfig


class VerlRolloutConfig(RolloutConfig):
    """How training episodes are sampled."""

    groups: Count = 64
    """Tasks per step."""
    max_tokens: int = Field(1024, ge=1)
    """Of one reply."""
    context: int = Field(8192, ge=2)
    """Tokens of a whole episode: vLLM's `max_model_len`."""


class VerlEvalConfig(EvalConfig):
    """Which tasks are held out, and how often they are evaluated on."""

    temperature: float = Field(1.0, ge=0)
    """Of the evaluations; 0 is greedy."""


class VerlConfig(RunConfig):
    """One run on verl."""

    start_from: PathOrName
    """A folder in Hugging Face's format, or a model's name there."""
    steps: int = Field(100, ge=1)
    """Batches of rollouts to learn from, `rollout.groups` x `rollout.samples` episodes each."""
    lora: LoraConfig | None = None
    """Train adapters in place of the model's weights, such as `lora.rank=16`, by verl's own keys."""
    lr: float = Field(1e-6, gt=0)
    """The policy's learning rate."""
    rollout: VerlRolloutConfig = VerlRolloutConfig()
    eval: VerlEvalConfig = VerlEvalConfig()
    max_rollout_gap: float = Field(0.2, gt=0)
    """Nats: how far log-probabilities of the inference servers may be from the trainer's with the same weights, on
    average. It is checked after every weight sync on 64 fixed tokens, and if `async.mode=sync` at each step's first
    update. Other precisions need room: bfloat16 rounds by about 0.02, and a mixture of experts takes other routes."""
    keep_checkpoints: int = Field(2, ge=1)
    """So many of the latest checkpoints are kept, and the one that was best in evaluation."""
    verl: dict[str, JsonValue] = Field(default_factory=dict)
    """Anything else of verl's config: sections within sections, or full keys such as `trainer.nnodes`."""

    @field_validator("imports")
    @classmethod
    def _found_from_anywhere(cls, files: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(str(Path(file).resolve()) for file in files)

    @field_validator("verl")
    @classmethod
    def _by_full_key(cls, settings: dict[str, JsonValue]) -> dict[str, JsonValue]:
        return {key.removeprefix("+"): value for key, value in _flattened(settings)}

    @property
    def mismatch(self) -> str | None:
        """Why the log-probabilities of what samples are not the trainer's."""
        return "vLLM samples, and verl's engine trains"

    @model_validator(mode="after")
    def _possible(self) -> VerlConfig:
        if problem := next(_problems(self), None):
            raise ValueError(problem)
        return self


# What verl can't do, or makes no sense together; each yields what is wrong and what to set


def _problems(config: VerlConfig) -> Iterator[str]:
    yield from _adapter_problems(config.lora, config.verl)
    if config.judge.evolve:
        yield "judge.evolve=true: criteria evolve on the embedded backend only: leave it out"
    yield from _critic_problems(config)
    rollout = config.rollout
    if why := nothing_learned(config.algorithm, rollout.groups, rollout.samples, config.steps, rollout.temperature):
        yield why
    yield from _update_problems(config)
    if why := impossible(config.asynchrony, config.verl):
        yield why
    if Requirements(config.algorithm).needs_values and config.asynchrony.mode != "sync":
        yield (
            f"async.mode={config.asynchrony.mode}: algorithm={config.algorithm.name} values states with the weights "
            "that sampled them, which are gone by the time that a batch is there: set async.mode=sync"
        )
    reference = Requirements(config.algorithm).needs_reference
    for key in config.verl:
        if why := replaced_by(key, config.algorithm, reference=reference):
            yield f"verl.{key} would change nothing: {why}"


def _adapter_problems(lora: LoraConfig | None, verl: dict[str, JsonValue]) -> Iterator[str]:
    """Yield why verl can't train an adapter."""
    if lora is None:
        return
    if verl.get(STRATEGY) == "megatron":
        yield f"verl.{STRATEGY}=megatron reads no lora, and would train all weights: set it to fsdp2"
    if lora.dora:
        yield "lora.dora: verl's adapters on FSDP are plain LoRA: leave it out, or set backend=embedded"
    if not lora.alpha.is_integer():
        yield f"lora.alpha={lora.alpha}: verl takes a whole number"
    for key in verl:
        if key.startswith(("actor_rollout_ref.model.lora_", "actor_rollout_ref.model.target_")):
            yield f"verl.{key} says what lora does: leave one of them out"


def _critic_problems(config: VerlConfig) -> Iterator[str]:
    name, where, strategy = config.algorithm.name, config.algorithm.critic.where, config.verl.get(STRATEGY)
    if where == "shared":
        yield (
            f"algorithm={name}: an engine of verl's has one head, so that the policy and its critic can't share a "
            "trunk: set algorithm.critic.where=separate, or backend=embedded"
        )
    if where == "separate" and strategy in VERL_REPLAY_STRATEGIES:
        yield (
            f"algorithm={name}: its critic is an engine of FSDP's, as verl.{STRATEGY}={strategy} is not: set "
            f"verl.{STRATEGY}=fsdp2, or an algorithm without a critic"
        )


def _update_problems(config: VerlConfig) -> Iterator[str]:
    n, groups = config.updates.minibatches, config.rollout.groups
    size = "actor_rollout_ref.actor.ppo_mini_batch_size"
    if n > 1 and config.asynchrony.mode == "separate":
        yield (
            f"updates.minibatches={n}: with async.mode=separate verl sends new weights after every mini-batch: leave "
            "it out, and set rollout.groups to what an update should take"
        )
    if n > 1 and size in config.verl:
        yield f"verl.{size} says what updates.minibatches={n} does: leave one of them out"
    if groups % n:
        yield f"updates.minibatches={n} does not divide rollout.groups={groups}, and verl counts the groups of each"


def _adapter(lora: LoraConfig | None) -> dict[str, JsonValue]:
    """Return what an adapter is in verl's config; servers get its sum with the model.

    verl 0.9.1 can't hand vLLM 0.30.0 an adapter, and sends servers with devices of their own the model without it.
    """
    if lora is None:
        return {}
    targets: JsonValue = lora.targets if isinstance(lora.targets, str) else list(lora.targets)
    settings: dict[str, JsonValue] = {"lora_rank": lora.rank, "lora_alpha": int(lora.alpha), "target_modules": targets}
    return {f"actor_rollout_ref.model.{key}": value for key, value in (settings | {"lora.merge": True}).items()}


def _flattened(settings: dict[str, JsonValue], prefix: str = "") -> Iterator[tuple[str, JsonValue]]:
    for key, value in settings.items():
        if isinstance(value, dict) and value:
            yield from _flattened(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def verl_settings(config: VerlConfig, folder: Path) -> dict[str, JsonValue]:
    """Return what the settings are in verl's config."""
    algorithm = config.decided_algorithm.within(config.rollout.context)
    rollout, actor = "actor_rollout_ref.rollout", "actor_rollout_ref.actor"
    return {
        **asynchronous(config.asynchrony),
        "data.custom_cls.path": "pkg://agent_rl.backends.verl.worker.dataset",
        "data.custom_cls.name": "TaskDataset",
        "data.train_files": config.split,
        "data.val_files": f"{config.eval.split}:{config.eval.n}",
        "data.train_batch_size": config.rollout.groups,
        "data.gen_batch_size": 1,  # dynamic sampling asks for any number of tasks
        "data.val_batch_size": None,
        "data.shuffle": False,
        "data.validation_shuffle": False,
        "data.max_prompt_length": config.rollout.context,
        "data.max_response_length": config.rollout.context,
        "data.dataloader_num_workers": 0,
        "data.agent_rl": _own(config, algorithm, folder),
        "algorithm.adv_estimator": "grpo",  # any: it is never called
        "algorithm.rollout_correction.bypass_mode": not algorithm.recomputes_old,
        "actor_rollout_ref.model.path": config.start_from,
        **_adapter(config.lora),
        f"{actor}.ppo_mini_batch_size": config.rollout.groups // config.updates.minibatches,
        f"{actor}.ppo_epochs": config.updates.epochs,
        f"{actor}.optim.lr": config.lr,
        f"{actor}.use_kl_loss": Requirements(algorithm).needs_reference,  # so that verl keeps one and scores under it
        **reference_settings(algorithm, config.verl.get(STRATEGY)),
        **critic_settings(algorithm.critic, config.start_from, config.rollout.context),
        f"{rollout}.name": "vllm",
        f"{rollout}.n": config.rollout.samples,
        f"{rollout}.temperature": config.rollout.temperature,
        f"{rollout}.max_model_len": config.rollout.context,
        f"{rollout}.val_kwargs.temperature": config.eval.temperature,
        f"{rollout}.val_kwargs.do_sample": config.eval.temperature > 0,
        f"{rollout}.agent.agent_loop_config_path": str(folder / "agent_loop.yaml"),
        f"{rollout}.agent.default_agent_loop": "agent_rl",
        **routing_settings(algorithm.routing, config.verl.get(STRATEGY), stored=config.store_experts),
        "trainer.project_name": "agent_rl",
        "trainer.experiment_name": folder.name,
        "trainer.default_local_dir": str(folder / "checkpoints"),
        "trainer.total_training_steps": config.steps,
        "trainer.total_epochs": 1,
        "trainer.val_before_train": True,
        "trainer.test_freq": config.eval.every or config.steps,
        "trainer.save_freq": config.checkpoint_every,
        "trainer.resume_mode": "auto",
        f"{actor}.checkpoint.save_contents": ["model", "optimizer", "extra", "hf_model"],
        "trainer.logger": ["console"],  # our own metrics.jsonl hands its rows to the writers of report_to
    }


def _own(config: VerlConfig, algorithm: AlgorithmConfig, folder: Path) -> dict[str, JsonValue]:
    """Return what our parts read of a run in verl's config."""
    return {
        "env": _environment(config),
        "env_args": dict(config.env_args),
        "tasks": config.tasks.model_dump(exclude_defaults=True),
        "split": config.split,
        "imports": list(config.imports),
        "seed": config.seed,
        "shuffle": config.updates.shuffle,
        "target_kl": config.updates.target_kl,
        "first": RL_START,
        "groups": config.rollout.groups,
        "algorithm": algorithm.model_dump_json(),
        "episodes": str(folder / "episodes.jsonl"),
        "token_records": config.token_records,
        "store_experts": config.store_experts,
        "max_staleness": 0 if config.asynchrony.mode == "sync" else config.asynchrony.max_staleness,
        "max_rollout_gap": config.max_rollout_gap,
        "keep_checkpoints": config.keep_checkpoints,
        "judge": config.judge.model_dump(exclude_defaults=True),
        "asked": asked(config),
        "renderer": config.renderer.model_dump_json(),
        "report_to": list(config.report_to),
    }


def _environment(config: VerlConfig) -> JsonValue:
    """Return the environment's id, or the choices of a mixture."""
    return config.env if isinstance(config.env, str) else [c.model_dump(exclude_defaults=True) for c in config.env]


def reference_settings(algorithm: AlgorithmConfig, strategy: object) -> dict[str, JsonValue]:
    """Return what the reference is in verl's config: it computes in the policy's precision."""
    if not Requirements(algorithm).needs_reference or strategy in VERL_REPLAY_STRATEGIES:
        return {}
    name = "fsdp_config.mixed_precision"
    return {f"actor_rollout_ref.ref.{name}": f"${{oc.select:actor_rollout_ref.actor.{name}}}"}


def asked(config: VerlConfig) -> dict[str, JsonValue]:
    """Return what every row of training tasks asks of the agent loop, by column."""
    algorithm, samples = Requirements(config.algorithm), config.rollout.samples
    greedy: dict[str, JsonValue] = {"__rollout_n__": samples + 1, "greedy": samples}  # verl's sessions count from 0
    return (greedy if algorithm.needs_greedy else {}) | ({"snapshots": True} if algorithm.needs_values else {})


def agent_loop(config: VerlConfig, folder: Path) -> list[dict[str, JsonValue]]:
    """Return the agent loop's file in a run's folder: what verl makes an `EnvAgentLoop` from, for every episode."""
    return [
        {
            "name": "agent_rl",
            "_target_": "agent_rl.backends.verl.worker.agent_loop.EnvAgentLoop",
            "env": _environment(config),
            "env_args": dict(config.env_args),
            "imports": list(config.imports),
            "seed": config.seed,
            "max_tokens": config.rollout.max_tokens,
            "budget": config.budget.model_dump(exclude_none=True),
            "judge": config.judge.model_dump(exclude_defaults=True),
            "renderer": config.renderer.model_dump_json(),
            "folder": str(folder),
            "retries": {str(ending): n for ending, n in config.retries.items()},
        }
    ]
