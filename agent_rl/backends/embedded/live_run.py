"""An embedded run while it lasts: its settings, the files that it writes, and what it says."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from rich.markup import escape
from transformers.utils import logging as hf_logging

from agent_rl.backends.embedded.config import TrainConfig
from agent_rl.backends.group_sampling import HeldOut, held_out_tasks
from agent_rl.core.display import from_here, plural
from agent_rl.core.episode import Episode
from agent_rl.core.messages import Task
from agent_rl.engines.embedded.threads import torch_as_it_starts
from agent_rl.gym.registry import EnvSpec
from agent_rl.judge.run import run_judge
from agent_rl.rollout.watch import watching
from agent_rl.runs.commands import resume_command
from agent_rl.runs.folder import EPISODES, status_of
from agent_rl.runs.metrics import MetricsFile
from agent_rl.runs.stop import Stop
from agent_rl.runs.writers import Writers
from agent_rl.store.episodes import EpisodeWriter
from agent_rl.store.selection import episode_ids, select
from agent_rl.store.token_records import TokenRecordWriter
from agent_rl.view.progress import Progress


@dataclass
class LiveRun:
    """One run while it lasts: its settings, files and display."""

    folder: Path
    env: EnvSpec
    config: TrainConfig
    progress: Progress
    stop: Stop
    metrics: MetricsFile
    episodes: EpisodeWriter
    records: TokenRecordWriter | None
    known: set[str]
    """The ids of the episodes that the run stored before it was killed."""
    resources: ExitStack
    """What ends with the run."""
    dev: str = ""
    """The last evaluation during training, in words."""

    @cached_property
    def held_out(self) -> HeldOut:
        """The tasks that the run reports on."""
        config = self.config
        if config.episodes is None:
            return held_out_tasks(self.env, config, self.scripted)
        tasks = self.env.tasks.distinct(config.eval.split, config.eval.n)
        return HeldOut(tasks, f"{plural(len(tasks), 'task')} of '{config.eval.split}', left out of the stored groups")

    @property
    def dev_split(self) -> str:
        """The split that is evaluated on during training."""
        return self.config.eval.during(self.env.tasks.splits)

    @cached_property
    def dev_tasks(self) -> list[Task]:
        """The tasks that are evaluated on during training: of the reported split, some of those."""
        split, config = self.dev_split, self.config.eval
        return self.env.tasks.distinct(split, min(config.dev_n, config.n) if split == config.split else config.dev_n)

    @property
    def scripted(self) -> int:
        """How many demonstrations the environment plays itself, on tasks of the run's split."""
        has_own = self.config.warms_up and self.config.warm_start.episodes is None
        return self.config.warm_start.demonstrations if has_own else 0

    def place(self) -> str:
        """Return a line about where the run is."""
        return escape(f"Everything goes to {from_here(self.folder)}/")

    def say(self, text: str) -> None:
        """Print a line without markup."""
        self.progress.say(escape(text))

    def say_how_to_resume(self) -> None:
        """Let who stops the run from now on be told how to continue it."""
        self.stop.hint = f"continue with: {resume_command(self.config, self.env, self.folder)}"

    def write(self, episodes: list[Episode]) -> None:
        """Store episodes, except those that the run stored before it was killed."""
        for episode in episodes:
            if episode.id not in self.known:
                self.episodes.write(episode)

    def rewind(self, step: int) -> None:
        """Take off the record what came after the checkpoint of `step`: it comes again, and may be other than it was.

        Settings may have changed, and a judge or vLLM says the same twice on no machine.
        """
        later = select(self.folder / EPISODES, where=["purpose = train", f"step >= {step}"], limit=1).places
        if later:
            self.episodes.cut(later[0])
            self.known = episode_ids(self.folder / EPISODES)
        self.metrics.rewind(step)
        if self.records is not None:
            self.records.rewind(step)


@contextmanager
def open_run(
    folder: Path, env: EnvSpec, config: TrainConfig, progress: Progress, stop: Stop | None
) -> Iterator[LiveRun]:
    """Open all that a run writes to, and what lasts as long as it does."""
    known, stop = episode_ids(folder / EPISODES), stop or Stop(progress.say)
    stop.hint = "nothing is lost; run the same command again"
    shown = config.model_dump(mode="json", by_alias=True)
    hf_logging.disable_progress_bar()
    with (
        torch_as_it_starts(),
        EpisodeWriter(folder / EPISODES, experts=config.store_experts) as episodes,  # first, as it locks the run
        MetricsFile(folder, Writers(config.report_to, folder, shown, progress.say)) as metrics,
        TokenRecordWriter(folder) if config.token_records else nullcontext() as records,
        run_judge(config.judge, env, folder, workers=config.processes, evolves=True),
        stop.on_signals(),
        watching(status_of(folder)),
        ExitStack() as resources,
    ):
        yield LiveRun(folder, env, config, progress, stop, metrics, episodes, records, known, resources)
