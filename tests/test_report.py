"""agent_rl.runs.report: the report of a run on any backend, from the run's own files."""

import json
from pathlib import Path

import pytest

from agent_rl.backends.verl.config.settings import VerlConfig
from agent_rl.backends.verl.driver.resume import MetricsLogger
from agent_rl.checks import floors
from agent_rl.core.episode import Origin, Reward
from agent_rl.runs.metrics import MetricsFile
from agent_rl.runs.report import write_reports
from agent_rl.store.episodes import EpisodeWriter
from tests.doubles import example_episode

VERL = VerlConfig(env="calculator-v0", start_from="/models/m", steps=2)


def verl_run(folder: Path) -> Path:
    """The files of a run on verl: its last evaluation stored the tasks in another order."""
    metrics = MetricsFile(folder)
    logger = MetricsLogger(metrics, lambda values: {})
    with EpisodeWriter(folder) as store:
        for step, order, successes in ((0, range(4), 1), (2, (3, 1, 0, 2), 3)):
            for task in order:
                store.write(
                    example_episode(
                        f"eval-{step:05d}-sampled-{task:04d}",
                        origin=Origin("eval", "eval", step),
                        seed=task,
                        rewards=(Reward("correct", float(task < successes)),),
                    )
                )
            row = {"split": "eval", "sampling": "sampled", "successes": successes, "n": 4, "success": successes / 4}
            metrics.write("eval", step, row)
            trained = {"rollout/success": 0.5, "rollout/sandbox_lost/memory": 0.25, "val-core/x": 0.1}
            logger.log(trained if step else {"val-core/x": 0.1}, step)
    logger.finish()
    return folder


def test_report_of_a_verl_run_has_rates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(floors, "SECONDS", 600.0)
    report = write_reports(verl_run(tmp_path), VERL, {"model": "/models/m"})
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["eval"] == {"n": 4, "before": 0.25, "after": 0.75} and "peak_rss_mib" not in summary
    low, high = summary["intervals"]["after"]
    assert low < 0.75 < high and summary["wall_s"] >= 0
    page = report.read_text()
    assert "25.0%" in page and "75.0%" in page and "<svg" in page and "/models/m" in page
    assert summary["floors"]["calculator-v0"]["oracle"]["success"] == 1
    assert "without skill, calculator-v0" in page and "oracle 100.0%, random" in page
    assert "25.00% of training&#39;s episodes: memory, which counts as failure" in page
    assert page.count("4 distinct tasks") == 1 and "greedy" not in page


def test_report_shows_the_same_tasks_before_and_after(tmp_path: Path) -> None:
    from agent_rl.runs.report import _evaluated

    verl_run(tmp_path)
    before = list(_evaluated(tmp_path, VERL, 0))[:2]
    after = list(_evaluated(tmp_path, VERL, 2, [e.seed for e in before]))
    assert [e.seed for e in before] == [0, 1] and sorted(e.seed for e in after) == [0, 1]


def test_report_shows_a_task_once_however_it_was_sampled(tmp_path: Path) -> None:
    verl_run(tmp_path)
    with EpisodeWriter(tmp_path) as store:
        for step in (0, 2):
            for seed in range(4):
                id, task = f"eval-{step:05d}-greedy-{seed:04d}", {"text": str(seed)}
                store.write(example_episode(id, origin=Origin("eval", "eval", step, greedy=True), seed=seed, task=task))
    page = write_reports(tmp_path, VERL, {}).read_text()
    assert "No episode of this task" not in page and "greedy-0000" not in page and page.count("-sampled-0000") == 2


def test_report_of_a_run_without_evaluations_is_written(tmp_path: Path) -> None:
    MetricsFile(tmp_path).close()
    EpisodeWriter(tmp_path).close()
    assert write_reports(tmp_path, VERL, {}).exists()
    assert json.loads((tmp_path / "summary.json").read_text())["eval"] == {"n": 0}
