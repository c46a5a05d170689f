"""The settings that every run has, on any backend. The defaults are here; `configs/` holds presets only."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal, TypeAlias

from pydantic import AfterValidator, BeforeValidator, Field, field_validator, model_validator

from agent_rl.algorithms.config import AlgorithmConfig
from agent_rl.algorithms.updates import UpdatesConfig
from agent_rl.config import Count, Retries, Section
from agent_rl.core.ending import Ending
from agent_rl.gym.budget import BudgetConfig
from agent_rl.gym.mixture import EnvironmentSettings, load_environment
from agent_rl.gym.registry import EnvSpec, load_all_once
from agent_rl.gym.tasks import EVAL, TRAIN
from agent_rl.judge.config import JudgeConfig
from agent_rl.rendering.config import RendererConfig
from agent_rl.runs.stalls import DRIFTED
from agent_rl.runs.writers import WriterName


def _listed(names: object) -> object:
    return [names] if isinstance(names, str) else names


def _seen_from_anywhere(path: str) -> str:
    # `runs/latest` will be another run, the run itself even, and workers have folders of their own
    return str(Path(path).resolve()) if Path(path).exists() else path


PathOrName: TypeAlias = Annotated[str, AfterValidator(_seen_from_anywhere)]
"""What a run reads: a path, which is made absolute if there is something, or a name."""


class AsyncConfig(Section):
    """Asynchrony: whether sampling waits for training, and how old its tokens may be.

    A token's staleness is the number of weight updates between the weights that sampled it and those that are about to
    be updated with it.
    """

    mode: Literal["sync", "one_step_off", "separate"] = "sync"
    """`sync`: rollout and training take turns. `one_step_off`: they take turns on the same devices, but a step's
    episodes were begun while the step before was trained on. `separate`: both run all the time, on devices of their
    own."""
    max_staleness: int = Field(1, ge=1)
    """Of any token in a batch; `sync` has 0, and takes no other."""
    on_stale: Literal["drop", "wait"] = "drop"
    """What is done about a group that would become too old: sample another in its place, or hold training until it has
    ended."""

    @model_validator(mode="after")
    def _meaningful(self) -> AsyncConfig:
        given = self.model_dump(exclude={"mode"}, exclude_defaults=True) if self.mode == "sync" else {}
        if given:
            name, value = next(iter(given.items()))
            raise ValueError(
                f"async.{name}={value} changes nothing with async.mode=sync, where no token is stale: leave it out, or "
                "set async.mode=one_step_off"
            )
        return self


class RolloutConfig(Section):
    """How training episodes are sampled."""

    groups: Count = 16
    """Tasks per step."""
    samples: Count = 8
    """Episodes per task."""
    temperature: float = Field(1.0, gt=0)
    """Nothing else changes the distribution, so that its log-probabilities are exact."""
    max_tokens: int | None = Field(None, ge=1)
    """Of one reply; null leaves it to the model."""


class EvalConfig(Section):
    """Which tasks are held out, and how often they are evaluated on."""

    split: str = EVAL
    """Reported before and after; nothing is tuned on it."""
    n: Count = 256
    """Distinct tasks."""
    every: int = Field(10, ge=0)
    """Steps between evaluations during training; 0 evaluates before and after only."""
    floors: bool | None = None
    """Whether the report has what the oracle and policies without skill score on these tasks; null for 32 of them, and
    no longer than 5 % of the run's time, or a second."""


FELL = {
    "taken for fresh": "taken for fresh, which brought grpo to 0 % at 4",
    "weighed": "only weighed, or left out one by one, under which one seed of three or more fell at 4",
}
"""What was seen of algorithms that learn from all old tokens, by `AlgorithmConfig.drifted`."""


class RunConfig(EnvironmentSettings):
    """One training run."""

    imports: tuple[str, ...] = ()
    """Files that register environments and parts of algorithms; `--import FILE` adds one."""
    split: str = TRAIN
    """The tasks to train on."""
    seed: int = Field(0, ge=0, lt=2**63)
    """Of all random numbers."""
    name: str | None = None
    """Of the run's folder; null for the environment's id."""
    runs_dir: str = "runs"
    """Where the run's folder goes."""
    report_to: Annotated[tuple[WriterName, ...], BeforeValidator(_listed)] = ()
    """Where metrics go besides metrics.jsonl, which has them all: `tensorboard` (into the run's folder), `wandb`,
    `trackio`, or several; the extra `writers` has their packages. Accounts, projects and offline modes are set as these
    packages say, such as by WANDB_MODE=offline."""
    start_from: PathOrName | None = None
    """The model or checkpoint to train on from: a folder, a name on Hugging Face's hub, or a .gguf file."""
    renderer: RendererConfig = RendererConfig()
    """How the model reads messages and writes replies; the checkpoints remember it."""
    steps: int = Field(100, ge=0)
    """Batches of rollouts to learn from, `rollout.groups` x `rollout.samples` episodes each."""
    updates: UpdatesConfig = UpdatesConfig()
    checkpoint_every: int = Field(20, ge=1)
    """Steps between checkpoints."""
    token_records: bool = True
    """Whether to store what every update made of each sampled token, for `agent-rl view --tokens`: its advantage, and
    its log-probability under the weights before the first update that took it."""
    store_experts: bool = False
    """Whether to store which experts each token took in a mixture of experts, in `episodes.experts` beside the
    episodes: hundreds of bytes a token."""
    asynchrony: AsyncConfig = Field(AsyncConfig(), alias="async")
    algorithm: AlgorithmConfig = AlgorithmConfig()
    budget: BudgetConfig = BudgetConfig()
    """Of one episode, in training and evaluation; instead of the environment's own limits."""
    retries: dict[Ending, Retries] = Field(default_factory=dict)
    """How often an episode is run again if it ends so, such as `retries.sandbox_lost=2`."""
    judge: JudgeConfig = JudgeConfig()
    rollout: RolloutConfig = RolloutConfig()
    eval: EvalConfig = EvalConfig()

    @model_validator(mode="before")
    @classmethod
    def _updates_of_preset(cls, given: object) -> object:
        """Take the updates that a preset of the algorithm names, NAME-paper, for those that the run leaves open."""
        algorithm = given.get("algorithm") if isinstance(given, Mapping) else None
        if not isinstance(given, Mapping) or not isinstance(algorithm, Mapping) or "updates" not in algorithm:
            return given
        own, asked = algorithm["updates"], given.get("updates") or {}
        rest = {name: value for name, value in algorithm.items() if name != "updates"}
        return {**given, "algorithm": rest, "updates": {**own, **asked} if isinstance(asked, Mapping) else asked}

    @field_validator("imports")
    @classmethod
    def _loaded(cls, files: tuple[str, ...]) -> tuple[str, ...]:
        # before the algorithm is checked, which may name what the files register
        load_all_once(file for file in files if Path(file).is_file())
        return files

    @property
    def mismatch(self) -> str | None:
        """Why the log-probabilities of what samples are not the trainer's; None where they are, up to rounding."""
        return None

    @property
    def decided_algorithm(self) -> AlgorithmConfig:
        """The algorithm, with `proximal` as this run needs it."""
        return self.algorithm.sampled_elsewhere() if self.mismatch else self.algorithm

    @property
    def decided(self) -> str | None:
        """What `proximal=auto` made of the algorithm, in a sentence; None if nothing."""
        if self.decided_algorithm.proximal == self.algorithm.proximal:
            return None
        return f"Old is computed anew before the first update of each batch, as {self.mismatch}."

    @property
    def uncorrected(self) -> str | None:
        """What to say where tokens may be old and the algorithm does not leave out what is too old; None if nothing."""
        ahead, drifted = self.asynchrony, self.decided_algorithm.drifted
        if ahead.mode == "sync" or ahead.max_staleness == 1 or drifted == "left out":
            return None
        return (
            f"tokens of {ahead.max_staleness} updates ago are {FELL[drifted]}: algorithm={self.algorithm.name} "
            f"learns from what the policy has moved away from; set {DRIFTED}, algorithm=m2po, or async.max_staleness=1"
        )

    def load_env(self) -> EnvSpec:
        """Import the user's files and return the environment, with the tasks and the budget that the run gives it.

        Raises:
            UnknownEnvError: if there is no such environment.
            ConfigError: if a file can't be imported, a split doesn't exist, or the arguments don't fit.
        """
        load_all_once(self.imports)
        env = load_environment(self, split=self.split, budget=self.budget)
        for split in (self.split, self.eval.split):
            env.tasks.require(split)
        return env
