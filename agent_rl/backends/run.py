"""Run: what a training run left in its folder, on either backend, for Python."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from agent_rl.backends.settings import backend_of, schema_of
from agent_rl.config import write_setting
from agent_rl.core.episode import Episode
from agent_rl.errors import CheckpointError, StoreError
from agent_rl.runs.commands import command
from agent_rl.runs.folder import METRICS, SUMMARY
from agent_rl.store.episodes import read_episodes
from agent_rl.store.token_records import TokenRecord, token_records

if TYPE_CHECKING:
    from agent_rl.backends.embedded.config import TrainConfig
    from agent_rl.backends.embedded.rollout_config import InterruptionConfig
    from agent_rl.backends.verl.config.settings import VerlConfig
    from agent_rl.policy.delegation import Delegation
    from agent_rl.policy.shortening import Shortening
    from agent_rl.policy.token import TokenPolicy
    from agent_rl.runs.metrics import Metrics
    from agent_rl.runs.report import Summary


@dataclass(frozen=True)
class Run:
    """A training run, as its folder holds it, such as `Run("runs/latest")`.

    Raises:
        CheckpointError: if there is no such folder.
    """

    folder: Path

    def __post_init__(self) -> None:
        """Take a str, too."""
        object.__setattr__(self, "folder", Path(self.folder))
        if not self.folder.is_dir():
            raise CheckpointError(f"there is no run '{self.folder}': name its folder, such as runs/latest")

    @property
    def config(self) -> TrainConfig | VerlConfig:
        """The settings that it was started with.

        Raises:
            CheckpointError: if the folder is no run.
        """
        from agent_rl.runs.folder import read_config

        return read_config(self.folder, schema_of(backend_of(self.folder)))

    @property
    def metrics(self) -> Metrics:
        """The rows of metrics.jsonl, of every step and evaluation; a table in a notebook and for pandas."""
        from agent_rl.runs.metrics import read_metrics

        return read_metrics(self.folder / METRICS)

    @property
    def summary(self) -> Summary:
        """Success before and after, with intervals.

        Raises:
            StoreError: if the run has not ended yet, or the file is damaged.
        """
        file = self.folder / SUMMARY
        if not file.exists():
            raise StoreError(f"{self.folder} has no {SUMMARY}: its run did not end")
        try:
            summary: Summary = json.loads(file.read_text(encoding="utf-8"))
        except ValueError as error:
            again = command("train", write_setting("resume", str(self.folder)))
            raise StoreError(f"{file} is damaged: {error}; {again} writes it again") from error
        return summary

    @property
    def curve(self) -> str:
        """The learning curve as an SVG.

        Raises:
            ImportError: if matplotlib is not installed.
        """
        from agent_rl.runs.report import learning_curve

        return learning_curve(self.metrics)

    def _repr_html_(self) -> str:
        from agent_rl.view.notebook import show_run

        rates = []
        if (self.folder / SUMMARY).exists():
            success, intervals = self.summary["eval"], self.summary["intervals"]
            rates = [
                (name.replace("_", " "), f"{success[name]:.1%}", f"{low:.1%} to {high:.1%}")
                for name, (low, high) in intervals.items()
            ]
        return show_run(self.folder, rates, self.curve)

    @property
    def checkpoint(self) -> Path:
        """The folder of the trained model, in Hugging Face's format.

        Raises:
            CheckpointError: if there is none.
        """
        if backend_of(self.folder) == "embedded":
            from agent_rl.backends.embedded.checkpoint import find_checkpoint

            return find_checkpoint(self.folder / "checkpoint")
        from agent_rl.backends.verl.driver.resume import last_checkpoint

        step = last_checkpoint(self.folder / "checkpoints")
        model = self.folder / "checkpoints" / f"global_step_{step}" / "actor" / "huggingface"
        if not model.exists():
            raise CheckpointError(f"no checkpoint in '{self.folder}': the run stopped before its first one")
        return model

    @property
    def best(self) -> Path:
        """The folder of the model that did best in the evaluations during training, in Hugging Face's format.

        Raises:
            CheckpointError: if none was kept.
        """
        if backend_of(self.folder) == "embedded":
            best = self.folder / "best"
        else:
            from agent_rl.backends.verl.driver.checkpoints import best_step

            step = best_step(self.folder / "checkpoints")
            best = self.folder / "checkpoints" / f"global_step_{step}" / "actor" / "huggingface"
        if not best.exists():
            raise CheckpointError(f"no best weights in '{self.folder}': nothing was evaluated during training and kept")
        return best

    def episodes(self) -> Iterator[Episode]:
        """Read the stored episodes, of training and evaluation, in their order."""
        return read_episodes(self.folder)

    def token_records(self, episode_id: str) -> list[TokenRecord]:
        """Return what each update made of an episode's sampled tokens, in the order of the steps."""
        return token_records(self.folder, episode_id)

    def save_page(self, out: str | os.PathLike[str], *, where: Sequence[str] = (), limit: int | None = None) -> Path:
        """Write the run as one page that needs nothing else, for any browser; return its path.

        Args:
            out: the file to write.
            where: conditions on the episodes, such as "reward<0.5"; all of them must hold.
            limit: the most episodes; None for 2,000.

        Raises:
            ConfigError: if no episode fits, or a condition has no meaning.
        """
        from agent_rl.view.page.build import MOST, save_page

        save_page(self.folder, out, where=where, limit=MOST if limit is None else limit)
        return Path(out)

    def policy(
        self,
        temperature: float = 1.0,
        *,
        max_tokens: int | None = None,
        context: int | None = None,
        device: str = "cpu",
        folder: Path | None = None,
    ) -> TokenPolicy:
        """Return the trained model as a policy that the embedded engine samples.

        Args:
            temperature: 0 is greedy.
            max_tokens: of one reply; None for the run's own limit.
            context: the longest sequence, in tokens; None for the run's own.
            device: "cpu", "cuda", "cuda:1", or "auto", a GPU if there is one.
            folder: of other weights of the run, such as its `best`; None for the last ones.

        Raises:
            CheckpointError: if there is no checkpoint.
        """
        from agent_rl.backends.embedded.actor import load_actor
        from agent_rl.backends.embedded.config import TrainConfig

        config = self.config
        rules: tuple[InterruptionConfig | None, Shortening | None, Delegation | None] = (None, None, None)
        if isinstance(config, TrainConfig):
            own, rollout = config.context(config.load_env().budget.tokens), config.rollout
            rules = rollout.interrupt, rollout.shorten, rollout.delegate
        else:
            own = config.rollout.context
        actor = load_actor(folder or self.checkpoint, context=context or own, device=device)
        return actor.policy(actor.params(temperature, max_tokens or config.rollout.max_tokens), *rules)
