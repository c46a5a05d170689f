"""agent_rl.backends.verl.driver.checkpoints: the latest checkpoints and the best one are kept."""

from pathlib import Path

import pytest

from agent_rl.backends.verl.driver.checkpoints import record_evaluation, remove_old


def saved(folder: Path, success: dict[int, float | None]) -> None:
    for step, value in success.items():
        (folder / f"global_step_{step}" / "actor").mkdir(parents=True)
        (folder / f"global_step_{step}" / "actor" / "weights").write_text("large")
        if value is not None:
            record_evaluation(folder / f"global_step_{step}", value)


def steps(folder: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("global_step_")) for path in folder.glob("global_step_*"))


@pytest.mark.parametrize(
    ("success", "keep", "kept"),
    [
        ({20: None, 40: None, 60: None, 80: None}, 2, [60, 80]),
        ({20: 0.5, 40: 0.9, 60: 0.7, 80: 0.8, 100: None}, 2, [40, 80, 100]),
        ({20: 0.5, 40: 0.9, 60: 0.7, 100: 0.95}, 2, [60, 100]),  # the best is among the latest
        ({20: 0.9, 40: 0.9, 60: 0.7, 80: 0.8}, 1, [40, 80]),  # of equals the latest
        ({20: 0.9}, 2, [20]),
        ({}, 2, []),
    ],
)
def test_remove_old_keeps_the_latest_and_the_best(
    success: dict[int, float | None], keep: int, kept: list[int], tmp_path: Path
) -> None:
    saved(tmp_path, success)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("100")
    assert remove_old(tmp_path, keep) == [step for step in success if step not in kept]
    assert steps(tmp_path) == kept and (tmp_path / "latest_checkpointed_iteration.txt").exists()


def test_record_evaluation_needs_a_checkpoint_of_the_step(tmp_path: Path) -> None:
    record_evaluation(tmp_path / "global_step_30", 0.5)
    assert not list(tmp_path.iterdir())
