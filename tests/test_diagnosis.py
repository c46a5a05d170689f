"""agent_rl.runs.diagnosis: runs that learn nothing say why."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import agent_rl as ar
from agent_rl.algorithms.config import AlgorithmConfig
from agent_rl.backends.embedded.run import start_run
from agent_rl.core.episode import Episode, Failure, Outcome, Reward, StopReason
from agent_rl.core.messages import Message, Step, ToolCall
from agent_rl.errors import InfrastructureError
from agent_rl.gym.env import Env
from agent_rl.rollout import Rate
from agent_rl.runs.diagnosis import STEPS, Diagnosis
from agent_rl.runs.folder import WARNINGS
from agent_rl.runs.metrics import read_metrics
from agent_rl.view.progress import Progress
from tests.doubles import Dice, Silent, example_episode
from tests.runs import config

LEARNS = {"train/samples": 8.0, "train/grad_norm": 0.5, "train/lr": 1e-3}
NOTHING = LEARNS | {"train/grad_norm": 0.0}
ON_VERL = {"train/samples": 8.0, "actor/grad_norm": 0.5, "actor/lr": 0.0}
TEXT = (Message("user", "roll"), Message("assistant", "6"))
UNREAD = (TEXT[0], Message("assistant", tool_calls=(ToolCall("c", "", error="no JSON"),)))
UNSCORED = (Reward("correct", None, error="OSError: the judge is away"),)


def batch(paid: str = "0101", group: int = 4, **changes: Any) -> list[Episode]:
    """Two times four episodes in groups, with a reward for each digit."""
    made = (
        example_episode(f"e{n}", group_id=f"g{n // group}", rewards=(Reward("correct", float(digit)),))
        for n, digit in enumerate(2 * paid)
    )
    return [replace(episode, **changes) for episode in made]


def cut(reason: StopReason, paid: str = "0000") -> list[Episode]:
    return batch(paid, outcome=Outcome.TRUNCATED, stop_reason=reason)


def failed(where: str, message: str, **changes: Any) -> list[Episode]:
    error = Failure(where, "OSError", message)
    return batch(outcome=Outcome.FAILED, stop_reason=StopReason.ERROR, error=error, **changes)


NO_TURN = "no episode had a turn: {0} of {0} episodes failed and trained nothing, most often with reset: "
JUDGE_AWAY = (Reward("correct", 1.0), Reward("judged", None, error="absent"))
SOME_FAILED = [*failed("step", "no disk")[:1], *batch("1", rewards=JUDGE_AWAY)[:1], *batch(), *batch()]


def diagnosed(
    folder: Path,
    episodes: list[Episode],
    metrics: dict[str, float],
    *,
    steps: int = STEPS,
    samples: int = 4,
    env: type[Env] = Silent,
    **algorithm: object,
) -> list[str]:
    """Return what is printed, and stored, for a run of equal steps."""
    said: list[str] = []
    diagnosis = Diagnosis(AlgorithmConfig.model_validate(algorithm), samples, env, folder, said.append)
    for _ in range(steps):
        diagnosis.episodes = episodes
        diagnosis.observe(metrics)
    assert said == [f"warning: {line}" for line in stored(folder)]
    return said


def stored(folder: Path) -> list[str]:
    file = folder / WARNINGS
    return file.read_text().splitlines() if file.exists() else []


@pytest.mark.parametrize(
    ("episodes", "metrics", "settings", "cause"),
    [
        (batch(""), {}, {}, None),
        (batch("0101"), LEARNS, {}, None),
        (batch("0101", rewards=()), NOTHING, {}, "no episode had a reward: add an @reward method to Silent, or return"),
        (batch("0101", rewards=UNSCORED), NOTHING, {}, "no episode had a score (OSError: the judge is away): mend the"),
        (batch("1111"), NOTHING, {}, "the episodes of each task earned the same (all 1), so that advantages are 0: 10"),
        (batch("0011", group=2), NOTHING, {}, "the episodes of each task earned the same (from 0 to 1), so that adv"),
        (cut(StopReason.LENGTH), NOTHING, {}, "8 of 8 episodes hit the limit of one reply: raise rollout.max_tokens"),
        (cut(StopReason.LENGTH, "0101"), LEARNS, {}, "8 of 8 episodes hit the limit of one reply: raise rollout.max"),
        (cut(StopReason.TURNS), NOTHING, {}, "8 of 8 episodes ran out of turns: raise budget.turns"),
        (cut(StopReason.TURNS, "0101"), LEARNS, {}, None),
        (cut(StopReason.SECONDS, "0101"), LEARNS, {}, "8 of 8 episodes ran out of the environment's time: raise budg"),
        (failed("reset", "gone", steps=()), {}, {}, f"{NO_TURN.format(8)}OS"),
        (failed("step", "no disk"), {}, {}, "8 of 8 episodes failed and trained nothing, most often with step: OSErr"),
        (failed("step", "no disk")[:1], {}, {}, "1 of 1 episode failed and trained nothing, most often with step: OS"),
        (SOME_FAILED, LEARNS, {}, "2 of 18 episodes failed and trained nothing, most often with step: OSErr"),
        (SOME_FAILED[1:], LEARNS, {}, "1 of 17 episodes failed and trained nothing, most often with reward judged: ab"),
        (SOME_FAILED[1:] + batch() * 4, LEARNS, {}, None),
        (batch("0101", group=1), NOTHING, {"samples": 1}, "rollout.samples=1 gave each task one episode, and the al"),
        (batch("0101", group=1), LEARNS, {"samples": 1}, None),
        (batch("0000", messages=TEXT), NOTHING, {"env": Dice}, "no reply held a tool call: read one with agent-rl vi"),
        (batch("0000", messages=UNREAD), NOTHING, {"env": Dice}, "none of 8 tool calls could be read: read one with"),
        (batch("0101", messages=TEXT), LEARNS, {"env": Dice}, None),
        (batch("0101"), ON_VERL, {}, "the learning rate was 0: check optimizer.lr, its warm-up and its decay"),
        (batch("0101"), NOTHING, {}, "the gradient was 0 although rewards differed: check the algorithm's masks and"),
        (batch("0101"), {"train/samples": 0.0}, {}, "filters or rejections left no sample to train on: see algorithm"),
        ([], {"train/samples": 8.0, "train/grad_norm": 0.0}, {}, "the gradient was 0 although rewards differed: chec"),
    ],
)
def test_run_without_progress_names_its_cause(
    episodes: list[Episode],
    metrics: dict[str, float],
    settings: dict[str, Any],
    cause: str | None,
    tmp_path: Path,
) -> None:
    said = diagnosed(tmp_path, episodes, metrics, steps=2 * STEPS, **settings)
    assert len(said) == (cause is not None)
    assert all(line.startswith(f"warning: {STEPS} steps in a row, {cause}") for line in said)


def test_diagnosis_names_some_failures_last(tmp_path: Path) -> None:
    said: list[str] = []
    diagnosis = Diagnosis(AlgorithmConfig(), 4, Silent, tmp_path, said.append)
    for metrics in [NOTHING] * STEPS + [LEARNS]:
        diagnosis.episodes = SOME_FAILED
        found = diagnosis.observe(metrics)
    no_gradient, failures = said
    assert "the gradient was 0" in no_gradient and "2 of 18 episodes failed" in failures
    assert found == {"diagnosis/failures": 1.0}


def test_gradient_of_regulariser_is_no_progress(tmp_path: Path) -> None:
    (said,) = diagnosed(tmp_path, batch("1111"), LEARNS, kl={"where": "loss"})
    assert "earned the same (all 1)" in said


def test_cause_of_two_steps_is_not_named(tmp_path: Path) -> None:
    assert diagnosed(tmp_path, batch("1111"), NOTHING, steps=STEPS - 1) == []


@pytest.mark.parametrize("steps", [1, STEPS])
def test_failing_group_reward_is_named_once_at_the_first_step(tmp_path: Path, steps: int) -> None:
    rewards = (Reward("correct", 1.0), Reward("rank", None, 1.0, "group", error="KeyError: 'lengths'"))
    said = "warning: group reward 'rank' failed, so that no episode had a score: KeyError: 'lengths'"
    assert diagnosed(tmp_path, batch("0101", rewards=rewards), NOTHING, steps=steps) == [said]


def test_spent_judge_is_named_once_at_the_first_step(tmp_path: Path) -> None:
    (said,) = diagnosed(tmp_path, batch("0101"), LEARNS | {"judge/faults/cost": 3.0}, steps=STEPS)
    assert "judge.max_cost is spent: 3 verdicts of this step were not made" in said and "stop and resume" in said


def test_resumed_run_repeats_no_warning(tmp_path: Path) -> None:
    assert len(diagnosed(tmp_path, batch("1111"), NOTHING)) == 1
    diagnosis = Diagnosis(AlgorithmConfig(), 4, Silent, tmp_path, pytest.fail)
    diagnosis.episodes = batch("1111")
    for _ in range(STEPS):
        diagnosis.observe(NOTHING)


def test_unknown_success_is_not_printed_as_number() -> None:
    assert str(Rate(0, 0)) == "unknown: no episode has a reward that says it"


@ar.register("unrewarded-v0", tasks=lambda split, index: {"n": index}, splits=("train", "eval", "dev"))
class Unrewarded(Env):
    """Pays nothing."""

    def reset(self, task: ar.Task, rng: object) -> str:
        return f"compute {task['n']}"

    def step(self, action: Message) -> Step:
        return Step(terminated=True)


def test_training_without_rewards_says_so(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = str(folder / "checkpoint")
    run = start_run(config(tmp_path, env="unrewarded-v0", start_from=model, steps=STEPS), Progress())
    cause = (
        "no episode had a reward: add an @reward method to Unrewarded, or return Step(reward=...); "
        "if its steps pay once a task is solved, none was: start from easier tasks or a better model"
    )
    said = f"{STEPS} steps in a row, {cause}"
    assert stored(run) == [said]
    printed = " ".join(capsys.readouterr().out.split())
    assert f"warning: {said}" in printed and "nan%" not in printed
    assert [row["step"] for row in read_metrics(run / "metrics.jsonl") if row["kind"] == "train"] == [1, 2, 3]


@ar.register("tableless-v0", tasks=lambda split, index: {"n": index}, splits=("train", "eval", "dev"))
class Tableless(Unrewarded):
    """Raises."""

    def reset(self, task: ar.Task, rng: object) -> str:
        raise ValueError("no such table: orders")


def test_training_ends_after_first_step_without_score(folder: Path, tmp_path: Path) -> None:
    settings = config(tmp_path, env="tableless-v0", start_from=str(folder / "checkpoint"))
    said = f"{NO_TURN.format(12)}ValueError: no such table: orders; .* "
    with pytest.raises(InfrastructureError, match=f"{said}once that is mended, continue with: .*resume"):
        start_run(settings, Progress())


@pytest.mark.parametrize(
    ("course", "ends_at"),
    [("f", 1), ("sff", None), ("sfff", 4), ("pfp", None), ("sffsffsfff", 10), ("-fff", 4), ("u", 1)],
)
def test_run_ends_where_no_episode_has_score(course: str, ends_at: int | None, tmp_path: Path) -> None:
    lost = failed("step", "no disk")
    kinds = {"s": batch(), "f": lost, "p": [*lost, *batch()], "u": batch(rewards=UNSCORED), "-": []}
    diagnosis, ended = Diagnosis(AlgorithmConfig(), 4, Silent, tmp_path, lambda _: None), list[int]()
    for step, kind in enumerate(course, 1):
        diagnosis.episodes = kinds[kind]
        diagnosis.observe(LEARNS)
        try:
            diagnosis.require_scores("go on so")
        except InfrastructureError as error:
            assert str(error).endswith("once that is mended, go on so")
            ended.append(step)
    assert ended == ([] if ends_at is None else [ends_at])
