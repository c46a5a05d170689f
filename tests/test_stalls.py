"""agent_rl.runs.stalls and rollout.group_metrics: a run that goes wrong slowly says what is wrong, and what to try."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from agent_rl.algorithms.config import AlgorithmConfig
from agent_rl.backends.verl.config.names import IN_WARNINGS
from agent_rl.core.episode import Reward
from agent_rl.core.messages import Message
from agent_rl.rollout.group_metrics import group_metrics
from agent_rl.runs.diagnosis import Diagnosis
from agent_rl.runs.folder import read_warnings, warn
from agent_rl.runs.metrics import MetricsFile
from agent_rl.runs.stalls import MEMORY, PAST_SHORT_CUTS, SHORT, WINDOW, find_stalls, patience
from tests.doubles import Silent, example_episode

STEPS = 4 * WINDOW
Course = Callable[[float], Mapping[str, float]]
"""The metrics of a step by how far the run is, from 0 to 1."""


def healthy(at: float) -> dict[str, float]:
    """A run as those of BENCHMARKS.md: success rises to 1, entropy falls, groups come to be solved."""
    return {
        "rollout/success": min(1.0, 0.35 + at),
        "rollout/reward": min(1.0, 0.35 + at),
        "rollout/tokens": 40.0,
        "rollout/repeated": 0.8 * at,
        "rollout/same_answer": 0.1,
        "rollout/groups_mixed": 1 - at,
        "rollout/groups_solved": at,
        "train/with_gradient": 1 - at,
        "train/grad_norm": 0.5,
        "train/clip_fraction": 0.01,
        "train/entropy": 0.2 * (1 - at),
        "mismatch/gap_mean": 0.01,
    }


def but(**changes: Callable[[float], float]) -> Course:
    """A healthy run with these metrics, `rollout_success` for `rollout/success`, on another course."""
    return lambda at: healthy(at) | {name.replace("_", "/", 1): course(at) for name, course in changes.items()}


STUCK = {"rollout_success": lambda at: min(0.73, 0.35 + 2 * at), "rollout_reward": lambda at: min(0.73, 0.35 + 2 * at)}
STAGED: list[tuple[str, Course, str | None]] = [
    ("healthy", healthy, None),
    ("longer and better", but(rollout_tokens=lambda at: min(45.0, 20 + 100 * at)), None),
    (
        "collapse",
        but(
            rollout_success=lambda at: 0.6 + 0.6 * at if at < 0.5 else 0.02,
            train_grad_norm=lambda at: 0.5 if at < 0.5 else 50.0,
        ),
        "success fell from 87% to 31% within 2 steps, while the gradient's norm went from 0.5 to 34: continue from the",
    ),
    ("mismatch", but(mismatch_gap_mean=lambda at: 1.12), "training and rollout differ by 1.1 nats a token: check the"),
    (
        "mismatch",
        lambda at: healthy(at) | {"mismatch/gap_mean": 0.48, "policy_version/staleness_0": 0.0},
        "training and rollout differ by 0.48 nats a token: most tokens are of earlier weights, so lower async.max_",
    ),
    ("clipped", but(train_clip_fraction=lambda at: at), "the clip cut off or capped 32% of the tokens: lower optimi"),
    (
        "weights",
        but(mismatch_weight_eff_sample_size=lambda at: 0.05),
        "weights old/mu leave an effective 5% of the tokens: lower the cap of algorithm.weight",
    ),
    (
        "loophole",
        but(rollout_success=lambda at: 0.9 - 0.45 * at, rollout_reward=lambda at: 0.8 + at),
        "reward rose by 0.",
    ),
    (
        "length",
        but(rollout_success=lambda at: 0.5, rollout_tokens=lambda at: 40 + 400 * at),
        "episodes grew from 50 to 220 sampled tokens and earn no more: shape the length (algorithm.sh",
    ),
    (
        "one answer",
        but(**STUCK, rollout_same_answer=lambda at: 0.83),
        "10 steps without progress at 73% success: 83% of the episodes end with the same answer; agent-rl check ENV",
    ),
    (
        "one answer to a task, too",
        but(
            **STUCK,
            rollout_same_answer=lambda at: 0.83,
            rollout_repeated=lambda at: 0.9,
            train_entropy=lambda at: 0.004,
        ),
        "10 steps without progress at 73% success: 83% of the episodes end with the same answer; agent-rl check ENV "
        "shows what constant answers earn, harder or balanced tasks make them pay less; and 90% of the episodes repeat "
        "another of their task (entropy 0.004 nats); hundreds of steps with",
    ),
    (
        "no exploration",
        but(**STUCK, rollout_repeated=lambda at: 0.9, train_entropy=lambda at: 0.004),
        "10 steps without progress at 73% success: 90% of the episodes repeat another of their task (entropy 0.00",
    ),
    (
        "too hard",
        but(
            **STUCK,
            rollout_repeated=lambda at: 0.1,
            train_with_gradient=lambda at: 0.12,
            rollout_groups_solved=lambda at: 0.2,
            rollout_groups_unsolved=lambda at: 0.68,
        ),
        "10 steps without progress at 73% success: 12% of the rows have a gradient; 20% of the groups are solved and "
        "68% are not: raise rollout.samples",
    ),
    (
        "too easy",
        but(
            **STUCK,
            rollout_repeated=lambda at: 0.1,
            train_with_gradient=lambda at: 0.12,
            rollout_groups_solved=lambda at: 0.7,
        ),
        "10 steps without progress at 73% success: 12% of the rows have a gradient; 70% of the groups are solved and "
        "0% are not: choose harder tasks",
    ),
    (
        "plateau",
        but(**STUCK, rollout_repeated=lambda at: 0.1, train_with_gradient=lambda at: 0.6),
        "10 steps without progress at 73% success, although groups differ and have gradients: try another optimizer.lr",
    ),
    (
        "a coin is tossed",
        but(
            **STUCK,
            rollout_repeated=lambda at: 0.7,
            rollout_groups_mixed=lambda at: 0.8,
            train_with_gradient=lambda at: 0.8,
        ),
        "10 steps without progress at 73% success, although 80% of the groups have episodes of different rewards, so "
        "that what pays is tried: hundreds of steps with algorithm=maxrl, rollout.temperature=1.3, ",
    ),
]


@pytest.mark.parametrize(("course", "said"), [(c, s) for _, c, s in STAGED], ids=[name for name, _, _ in STAGED])
def test_staged_stall_is_named_once_with_its_way_out(course: Course, said: str | None, tmp_path: Path) -> None:
    printed: list[str] = []
    diagnosis = Diagnosis(AlgorithmConfig(), 4, Silent, tmp_path, printed.append)
    found = [diagnosis.observe(course(step / STEPS)) for step in range(STEPS)]
    assert printed == [f"warning: {line}" for line in read_warnings(tmp_path)]
    assert len(printed) == (said is not None)
    assert said is None or printed[0].startswith(f"warning: {said}"), printed
    assert any(found) == (said is not None)
    assert all(value == 1.0 and name.startswith("diagnosis/") for step in found for name, value in step.items())


def test_warning_of_several_lines_is_stored_as_one(tmp_path: Path) -> None:
    printed: list[str] = []
    for _ in range(2):
        warn(tmp_path, "KeyError: one\ntwo\u2028three", printed.append)
    assert printed == ["warning: KeyError: one two three"] and read_warnings(tmp_path) == ["KeyError: one two three"]


def test_collapse_is_one_of_the_last_steps_only() -> None:
    high, low = ({"rollout/success": value, "rollout/repeated": 0.1} for value in (0.9, 0.3))
    course = [high] * WINDOW + [low] * MEMORY * WINDOW
    named = [[name for name, _ in find_stalls(course[:step])] for step in range(len(course) + 1)]
    first = next(step for step, names in enumerate(named) if "collapse" in names)
    assert first <= WINDOW + SHORT
    assert named[-1] == ["plateau"]  # what keeps it there now, and no more what brought it there


def drawn(course: Callable[[float], float], steps: int, seed: int) -> Iterator[dict[str, float]]:
    """Yield the steps of a run on 16 tasks of which a policy solves most always or never, which is all that differs."""
    rng = np.random.default_rng(seed)
    for step in range(steps):
        mean = course(step / steps)
        solved = rng.binomial(8, rng.beta(mean, 1 - mean, 16)) / 8
        yield healthy(0.0) | {"rollout/success": solved.mean(), "rollout/reward": solved.mean()}


DRAWN: list[tuple[str, Callable[[float], float], bool]] = [
    ("plateau", lambda at: 0.2 + 0.7 * at, False),
    ("collapse", lambda at: 0.35, False),
    ("collapse", lambda at: 0.7 if at < 0.5 else 0.05, True),
    ("plateau", lambda at: min(0.5, 0.2 + 3 * at), True),
]


@pytest.mark.parametrize(("name", "course", "is_one"), DRAWN)
def test_luck_of_tasks_is_no_stall(name: str, course: Callable[[float], float], is_one: bool) -> None:
    found = 0
    for seed in range(20):
        steps = [*drawn(course, 80, seed)]
        found += any(name in dict(find_stalls(steps[:n])) for n in range(SHORT, 81))
    assert (found >= 16) if is_one else (found <= 2), found


def test_level_course_that_rises_by_luck_has_its_reason() -> None:
    steps = [step | {"rollout/repeated": 0.8, "rollout/groups_mixed": 0.2} for step in drawn(lambda at: 0.5, 80, 0)]
    found = {name for n in range(SHORT, 81) for name, _ in find_stalls(steps[:n])}
    assert "no exploration" in found and "plateau" not in found


def test_stored_episodes_are_of_any_policy() -> None:
    steps = [{"train/rollout_gap": 0.5}] * SHORT
    assert [name for name, _ in find_stalls(steps)] == ["mismatch"]
    assert not [*find_stalls([step | {"perf/read_s": 0.1} for step in steps])]


def test_stall_of_resumed_run_is_found_in_its_stored_steps(tmp_path: Path) -> None:
    course = but(**STUCK, rollout_same_answer=lambda at: 0.83)
    with MetricsFile(tmp_path) as metrics:
        for step in range(STEPS - 1):
            metrics.write("train", step + 1, course(step / STEPS))
    said: list[str] = []
    Diagnosis(AlgorithmConfig(), 4, Silent, tmp_path, said.append).observe(course(1.0))
    assert "83% of the episodes end with the same answer" in said[0]


def test_stall_on_verl_names_its_settings(tmp_path: Path) -> None:
    said: list[str] = []
    for repeated in (0.8, 0.1):
        course = but(**STUCK, rollout_repeated=lambda at, now=repeated: now, train_with_gradient=lambda at: 0.6)
        diagnosis = Diagnosis(AlgorithmConfig(), 4, Silent, tmp_path, said.append, names=IN_WARNINGS)
        for step in range(STEPS):
            diagnosis.observe(course(step / STEPS))
    patient, plateau = said
    assert "verl.actor_rollout_ref.actor.optim.weight_decay=0.1" in patient and "try another lr, more" in plateau
    assert "optimizer." not in patient + plateau and "retry" not in patient


def test_patience_names_no_setting_that_a_run_has() -> None:
    has = {"algorithm": "grpo", "rollout.temperature": 1.3, "optimizer.weight_decay": 0.1}
    lacks = "hundreds of steps with algorithm=maxrl, rollout.retry_temperature=2, eval.temperature=1"
    assert patience(has) == lacks
    assert patience(has, refused=["rollout.retry_temperature", "eval.temperature"]) == lacks.split(", ")[0]
    assert patience(PAST_SHORT_CUTS) == "hundreds of steps"


def test_long_run_stalls_later(tmp_path: Path) -> None:
    planned, said, at = 20 * STEPS, list[str](), list[int]()
    diagnosis = Diagnosis(AlgorithmConfig(), 4, Silent, tmp_path, said.append, steps=planned)
    course = but(**STUCK, rollout_repeated=lambda at: 0.1, train_with_gradient=lambda at: 0.6)
    for step in range(4 * STEPS):
        diagnosis.observe(course(10 * step / planned))
        at += [step] * (len(said) - len(at))
    assert said[0].startswith(f"warning: {STEPS} steps without progress at 73% success") and len(said) == 1
    assert at[0] > 2 * STEPS  # success rises for one and a half of them


def test_match_of_two_players_is_no_stall(tmp_path: Path) -> None:
    diagnosis = Diagnosis(AlgorithmConfig(), 4, Silent, tmp_path, pytest.fail)
    diagnosis.episodes = [
        example_episode(f"e{n}", group_id="g", rewards=(Reward("won", float(n % 2)),), env_args={"seat": n % 2})
        for n in range(4)
    ]
    for step in range(STEPS):
        assert diagnosis.observe(healthy(step / STEPS) | {"rollout/success": 0.5}) == {}


def test_names_of_verl_are_read() -> None:
    steps = [{"actor/agent_rl/clip_fraction": 0.5, "actor/grad_norm": 1.0}] * WINDOW
    assert [name for name, _ in find_stalls(steps)] == ["clipped"]


def test_group_metrics_count_groups_tokens_and_repetitions() -> None:
    def episode(group: str, reward: float | None, said: str) -> object:
        rewards = (Reward("correct", reward),)
        messages = (Message("user", "?"), Message("assistant", said))
        return example_episode(f"{group}{said}", group_id=group, rewards=rewards, messages=messages, trajectories=())

    solved = [episode("a", 1.0, "yes"), episode("a", 1.0, "yes")]
    mixed = [episode("b", 1.0, "yes"), episode("b", 0.0, "no")]
    unsolved = [episode("c", 0.5, "so"), episode("c", 0.5, "so"), episode("c", None, "lost")]
    found = group_metrics([*solved, *mixed, *unsolved])  # type: ignore[list-item]
    third = pytest.approx(1 / 3)
    assert all(found[f"rollout/groups_{name}"] == third for name in ("solved", "mixed", "unsolved"))
    assert found["rollout/repeated"] == third and found["rollout/same_answer"] == 0.5
    assert group_metrics([]) == {}


def test_group_metrics_take_rewards_for_equal_but_for_rounding() -> None:
    summed, given = (Reward("r", 0.1), Reward("r", 0.2)), (Reward("r", 0.3),)
    group = [example_episode(f"e{n}", group_id="g", rewards=rewards) for n, rewards in enumerate((summed, given))]
    found = group_metrics(group)
    assert (found["rollout/groups_mixed"], found["rollout/groups_unsolved"]) == (0.0, 1.0)


def test_group_metrics_tell_replies_by_their_tokens() -> None:
    one = example_episode("e0", group_id="g")
    own = sum(int(t.own_loss_mask.sum()) for t in one.trajectories)
    found = group_metrics([one, replace(one, id="e1")])
    assert found["rollout/repeated"] == 0.5
    assert found["rollout/tokens"] == found["rollout/tokens_max"] == own > 0


def lost(*rates: float, cause: str = "memory") -> list[dict[str, float]]:
    return [{f"rollout/sandbox_lost/{cause}": rate} if rate else {} for rate in rates]


@pytest.mark.parametrize(
    ("steps", "name"),
    [
        (lost(*[0.0] * 10, 0.05, 0.05, 0.05), "sandboxes ended"),
        (lost(*[0.01] * 10, 0.06, 0.06, 0.06), "sandboxes ended"),
        (lost(0.05, 0.05, 0.05), "sandboxes ended"),
        (lost(*[0.0] * 10, 0.05, 0.05, 0.05, cause="host_resources"), "sandboxes lost"),
        (lost(*[0.05] * 13), None),  # it is high, but does not rise: it was said when it began
        (lost(*[0.0] * 10, 0.01, 0.01, 0.01), None),
        (lost(0.9), None),
    ],
)
def test_find_stalls_names_a_rising_rate_of_losses(steps: list[dict[str, float]], name: str | None) -> None:
    found = dict(find_stalls(steps))
    assert list(found) == ([name] if name else [])
    if name:
        assert "host_resources" in found[name] if name == "sandboxes lost" else "memory" in found[name]
