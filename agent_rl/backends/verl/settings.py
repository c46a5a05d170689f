"""The settings of a run on verl, and what each becomes in verl's own config."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path

from pydantic import Field, JsonValue, field_validator, model_validator

from agent_rl.algorithms.algorithm import Algorithm
from agent_rl.algorithms.config import AlgorithmConfig
from agent_rl.algorithms.routing import RoutingConfig
from agent_rl.backends.asynchrony import AsyncConfig
from agent_rl.config import Section
from agent_rl.registry import load_file
from agent_rl.tasks import RL_START


class RolloutConfig(Section):
    """How training episodes are sampled."""

    groups: int = Field(64, ge=1)
    """Tasks per step."""
    samples: int = Field(8, ge=1)
    """Episodes per task."""
    temperature: float = Field(1.0, gt=0)
    max_tokens: int = Field(1024, ge=1)
    """Of one reply."""
    context: int = Field(8192, ge=2)
    """Tokens of a whole episode: vLLM's `max_model_len`."""


class EvalConfig(Section):
    """What is held out, and how often it is looked at."""

    split: str = "test"
    n: int = Field(256, ge=1)
    """Distinct tasks."""
    every: int = Field(10, ge=0)
    """Steps between evaluations; 0 is before and after only."""
    temperature: float = Field(1.0, ge=0)


class VerlConfig(Section):
    """One run, as `configs/backend/verl.yaml` holds it."""

    env: str
    env_args: dict[str, JsonValue] = Field(default_factory=dict)
    imports: tuple[str, ...] = ()
    """Files that register environments; every worker loads them."""
    split: str = "train"
    seed: int = Field(0, ge=0)
    name: str | None = None
    runs_dir: str = "runs"
    start_from: str
    """A folder in Hugging Face's format, or a model's name there."""
    steps: int = Field(100, ge=1)
    updates_per_batch: int = Field(1, ge=1)
    lr: float = Field(1e-6, gt=0)
    checkpoint_every: int = Field(20, ge=1)
    asynchrony: AsyncConfig = Field(AsyncConfig(), alias="async")
    algorithm: AlgorithmConfig = AlgorithmConfig()
    rollout: RolloutConfig = RolloutConfig()
    eval: EvalConfig = EvalConfig()
    verl: dict[str, JsonValue] = Field(default_factory=dict)
    """Anything else of verl's config: sections within sections, or full keys such as `trainer.nnodes`."""

    @field_validator("verl")
    @classmethod
    def _by_full_key(cls, settings: dict[str, JsonValue]) -> dict[str, JsonValue]:
        return dict(_flattened(settings))

    @model_validator(mode="after")
    def _possible(self) -> VerlConfig:
        lacking = [what for what, wanted in missing(self.algorithm).items() if wanted]
        if lacking:
            raise ValueError(
                f"algorithm={self.algorithm.name} needs {', '.join(lacking)}, which the verl backend can't do yet; "
                "backend=embedded can"
            )
        for key in self.verl:
            whole = f"{key.lstrip('+')}="
            if why := next((why for prefix, why in REPLACED.items() if whole.startswith(prefix)), None):
                raise ValueError(f"verl.{key} would change nothing: {why}")
        return self


@functools.cache
def load_once(file: str) -> None:
    """Register what a user's file has, once a process."""
    load_file(file)


def _flattened(settings: dict[str, JsonValue], prefix: str = "") -> Iterator[tuple[str, JsonValue]]:
    for key, value in settings.items():
        if isinstance(value, dict) and value:
            yield from _flattened(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def missing(config: AlgorithmConfig) -> dict[str, bool]:
    """What an algorithm wants, and this backend can't do; True where it is wanted."""
    algorithm = Algorithm(config)
    return {
        "a greedy episode of each task": algorithm.needs_greedy,
        "a critic": config.critic.where != "none",
        "continuations of episodes": algorithm.needs_values,
        "theta's scores of the whole batch": algorithm.needs_theta,
        "the distributions that tokens came from": config.advantage["name"] == "optimal-baseline",
        "replayed routes": config.routing != RoutingConfig(),
        "dynamic sampling": config.refill.max_rounds > 1,
    }


_OURS = "agent_rl's algorithm takes its place, see `agent-rl train --explain`"
REPLACED = {
    "algorithm.": _OURS,
    "actor_rollout_ref.actor.policy_loss": _OURS,
    "actor_rollout_ref.actor.clip_ratio": _OURS,
    "actor_rollout_ref.actor.tau_": _OURS,
    "actor_rollout_ref.actor.loss_": _OURS,
    "actor_rollout_ref.actor.entropy_coeff": "set algorithm.entropy",
    "actor_rollout_ref.actor.use_kl_loss": "set algorithm.kl",
    "actor_rollout_ref.actor.kl_loss": "set algorithm.kl",
    "actor_rollout_ref.actor.ppo_mini_batch_size": "an update takes the whole batch; set rollout.groups",
    "actor_rollout_ref.actor.ppo_epochs": "set updates_per_batch",
    "actor_rollout_ref.actor.shuffle": "an update takes the whole batch",
    "actor_rollout_ref.rollout.n=": "set rollout.samples",
    "actor_rollout_ref.rollout.temperature": "set rollout.temperature",
    "actor_rollout_ref.rollout.max_model_len": "set rollout.context",
    "actor_rollout_ref.rollout.multi_turn": "the environment takes the turns",
    "critic.": "there is no critic",
    "trainer.v1.trainer_mode": "set async.mode",
    "trainer.v1.sampler.max_off_policy": "set async.max_staleness, async.on_stale",
    "data.": "tasks come from the environment: set env, split, eval",
    "reward.custom_reward_function": "the environment rewards",
}
"""Keys of verl's config that nothing reads here, by their beginning (with `=`, whole), and what to set instead."""


MODES = {"sync": "sync", "one_step_off": "colocate_async", "separate": "separate_async"}
"""What verl calls each `async.mode`."""


def verl_settings(config: VerlConfig, folder: Path) -> dict[str, JsonValue]:
    """Return what the settings are in verl's config; a key with `+` is one that verl does not know."""
    algorithm, rollout, actor = config.algorithm, "actor_rollout_ref.rollout", "actor_rollout_ref.actor"
    return {
        "data.custom_cls.path": "pkg://agent_rl.backends.verl.dataset",
        "data.custom_cls.name": "TaskDataset",
        "data.train_files": config.split,
        "data.val_files": f"{config.eval.split}:{config.eval.n}",
        "data.train_batch_size": config.rollout.groups,
        "data.val_batch_size": None,
        "data.shuffle": False,
        "data.validation_shuffle": False,
        "data.max_prompt_length": config.rollout.context,
        "data.max_response_length": config.rollout.context,
        "data.dataloader_num_workers": 0,
        "+data.agent_rl": {
            "env": config.env,
            "imports": list(config.imports),
            "seed": config.seed,
            "first": RL_START,
            "algorithm": algorithm.model_dump_json(),
            "episodes": str(folder / "episodes.jsonl"),
        },
        "algorithm.adv_estimator": "grpo",  # any without a critic: it is never called
        "algorithm.rollout_correction.bypass_mode": algorithm.proximal == "rollout",
        "actor_rollout_ref.model.path": config.start_from,
        f"{actor}.ppo_mini_batch_size": config.rollout.groups,
        f"{actor}.ppo_epochs": config.updates_per_batch,
        f"{actor}.optim.lr": config.lr,
        f"{actor}.use_kl_loss": algorithm.kl.where != "none",  # so that verl keeps a reference and scores under it
        f"{rollout}.name": "vllm",
        f"{rollout}.n": config.rollout.samples,
        f"{rollout}.temperature": config.rollout.temperature,
        f"{rollout}.max_model_len": config.rollout.context,
        f"{rollout}.val_kwargs.temperature": config.eval.temperature,
        f"{rollout}.val_kwargs.do_sample": config.eval.temperature > 0,
        f"{rollout}.agent.agent_loop_config_path": str(folder / "agent_loop.yaml"),
        f"{rollout}.agent.default_agent_loop": "agent_rl",
        "trainer.v1.trainer_mode": MODES[config.asynchrony.mode],
        # verl counts the versions that a group spans, its own included
        "trainer.v1.sampler.max_off_policy_threshold": config.asynchrony.max_staleness + 1,
        "trainer.v1.sampler.max_off_policy_strategy": config.asynchrony.on_stale,
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
        "trainer.logger": ["console", "file"],
    }


def agent_loop(config: VerlConfig) -> list[dict[str, JsonValue]]:
    """Return the agent loop's file: what verl makes an `EnvAgentLoop` from, for every episode."""
    return [
        {
            "name": "agent_rl",
            "_target_": "agent_rl.backends.verl.loop.EnvAgentLoop",
            "env": config.env,
            "env_args": dict(config.env_args),
            "imports": list(config.imports),
            "seed": config.seed,
            "max_tokens": config.rollout.max_tokens,
        }
    ]
