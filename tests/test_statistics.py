"""agent_rl.stats: a run in numbers, against numbers by hand; two runs; the command."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

import agent_rl as ar
from agent_rl.cli import main
from agent_rl.core.episode import Failure, Origin, Outcome, Reward, StopReason
from agent_rl.core.judgement import JudgeFault, Judgement, Verdict
from agent_rl.core.usage import Usage
from agent_rl.errors import ConfigError
from agent_rl.rollout.comparison import compare
from agent_rl.rollout.evaluation import summarise
from agent_rl.stats.statistics import compare_statistics, statistics_of
from agent_rl.store.codec import dump_line
from agent_rl.view.conversation import clean
from tests.doubles import example_episode


def sample(number: int, score: float | None, task: int = 0, **more: object) -> ar.Episode:
    given = {"task": {"n": task, "level": task % 2}, "rewards": (Reward("correct", score),)}
    return example_episode(f"e{number}", **{**given, **more})


EPISODES = [
    sample(0, 1.0, 0, seconds=1.0),
    sample(1, 0.0, 0, seconds=3.0, origin=Origin("train", "train", 5)),
    sample(2, 0.5, 1, seconds=2.0, origin=Origin("train", "train", 9)),
    sample(3, 1.0, 1, origin=Origin("eval", "test", 9), env="other-v0", seconds=2.0),
    sample(
        4,
        None,
        2,
        outcome=Outcome.FAILED,
        stop_reason=StopReason.ERROR,
        error=Failure("step", "SandboxError", "gone"),
        trajectories=(),
        usage=(Usage("m", 10, 4, finish_reason="stop", seconds=0.5, waited=0.25),),
        judgements=(
            Judgement("r", "j", (Verdict("c", error=JudgeFault.TIMEOUT),), None, suspect=("obey",), seconds=2.0),
        ),
    ),
]


def test_statistics_agree_with_hand_counts() -> None:
    found = statistics_of(EPISODES)
    total = found.total
    assert (total.episodes, total.failed, len(total.tasks)) == (5, 1, 4), "two environments have one"
    assert (total.success.successes, total.success.n, total.reward) == (2, 4, 0.625)
    assert (total.success_interval, total.reward_interval) == (
        summarise(EPISODES).success_interval,
        summarise(EPISODES).reward_interval,
    )
    assert dict(found.stops) == {"done": 4, "error": 1} and dict(found.endings) == {"ok": 4, "sandbox_lost": 1}
    assert dict(found.failures) == {"step: SandboxError": 1}
    price = found.tools["price"]
    assert (price.calls, dict(price.errors)) == (5, {"exception": 5})
    sizes = found.spreads()
    assert (sizes["turns"].n, sizes["turns"].mean, sizes["turns"].max) == (5, 2, 2)
    assert sizes["tokens sampled"].mean == 4 and sizes["tokens of the environment"].n == 4
    assert sizes["tokens out (server)"].max == 4
    seconds = found.seconds.spread
    assert (seconds.lower, seconds.median, seconds.upper, seconds.max) == (1.25, 2.0, 2.0, 3.0)
    assert found.parts["replies of a served model"] == 0.5 and found.parts["judges"] == 2.0
    # a step's number less a token's version, 7 for three of four tokens and 8 for one, of three episodes in training
    assert found.staleness() == {-3: 1 / 6, -2: 0.5, 1: 1 / 12, 2: 0.25}
    assert found.staleness(first_step=1) == {-4: 1 / 6, -3: 0.5, 0: 1 / 12, 1: 0.25}
    correct = found.rewards["correct"]
    assert (correct.values.count, correct.values.mean, correct.unscored) == (4, 0.625, 1)
    assert (found.judgements, found.unscored_judgements, found.suspect) == (1, 1, 1)
    assert dict(found.faults) == {"timeout": 1}


def test_rewards_of_one_name_are_told_apart_by_weight() -> None:
    rewards = [
        Reward("correct", 1.0, 1.0),
        Reward("correct", 0.0, 0.5),
        Reward("correct", 0.5, 0.5),
        Reward("short", 1.0),
    ]
    found = statistics_of([replace(EPISODES[0], rewards=(reward,)) for reward in rewards]).rewards
    assert {name: (own.weight, own.values.count, own.values.mean) for name, own in found.items()} == {
        "correct (weight 1.0)": (1.0, 1, 1.0),
        "correct (weight 0.5)": (0.5, 2, 0.25),
        "short": (1.0, 1, 1.0),
    }


def test_rewards_of_turns_count_once_an_episode() -> None:
    turns = (Reward("step", 0.25, turn=0), Reward("step", 0.5, turn=1))
    unscored = (turns[0], Reward("step", None, turn=1, error="ValueError: no"))
    found = statistics_of([replace(EPISODES[0], rewards=rewards) for rewards in (turns, turns[:1], unscored)])
    own = found.rewards["step"]
    assert (own.values.count, own.values.total, own.unscored, dict(own.errors)) == (2, 1.0, 1, {"ValueError": 1})


def test_steps_that_earn_nothing_count_as_zero() -> None:
    paid, other = (Reward("correct", 1.0), Reward("step", 0.5, source="step", turn=1)), {"env": "other-v0"}
    episodes = [replace(EPISODES[0], rewards=paid), *EPISODES[:3], replace(EPISODES[0], **other), EPISODES[4]]
    found = statistics_of(episodes).rewards  # one failed, and one environment rewards no step
    assert {name: (own.values.count, own.values.mean) for name, own in found.items()} == {
        "correct": (5, 0.7),
        "step": (4, 0.125),
    }


def test_statistics_count_drifting_replies() -> None:
    found = statistics_of(EPISODES[:2], round_trip=lambda ids: [10, 11] if 10 in ids else [9])
    assert (found.replies, found.drifted) == (4, 2)  # of each episode's two replies, the second
    assert statistics_of(EPISODES[:2]).replies == 0


def test_statistics_split_success_by_tags() -> None:
    tags = statistics_of(EPISODES).tags
    counts = {key: {tag: tally.episodes for tag, tally in tallies.items()} for key, tallies in tags.items()}
    assert counts == {
        "purpose": {"eval": 1, "train": 4},
        "env": {"other-v0": 1, "shop-v0": 4},
        "step": {"eval 9": 1, "train 5": 3, "train 9": 1},
    }
    by = statistics_of(EPISODES, ["level", "ending", "split"]).tags
    assert {tag: tally.success.n for tag, tally in by["level"].items()} == {"0": 2, "1": 2}
    assert list(by) == ["level", "ending", "split"] and by["ending"]["ok"].episodes == 4
    same = [episode for episode in EPISODES if episode.origin.purpose == "train"]
    assert list(statistics_of(same, ["purpose", "env"]).tags) == ["purpose", "env"]  # each of one value, and asked for
    assert statistics_of(EPISODES, ["task.level"]).tags["task.level"].keys() == {"0", "1"}
    with pytest.raises(ConfigError, match=r"--by levle: no task has such a key. Did you mean 'level'\?"):
        statistics_of(EPISODES, ["levle"]).tags  # noqa: B018
    many = statistics_of(sample(n, 1.0, n, origin=Origin("train", "train", n)) for n in range(25)).tags["step"]
    assert [*many][:2] == ["train 0 to 2", "train 3 to 5"] and many["train 24"].episodes == 1


@pytest.mark.parametrize("scores", [(), (0.0, 0.0), (1.0, 1.0), (None,)])
def test_statistics_of_few_or_equal_episodes(scores: Sequence[float | None]) -> None:
    found = statistics_of(sample(n, score) for n, score in enumerate(scores))
    known = [score for score in scores if score is not None]
    assert found.total.success.n == len(known)
    assert math.isnan(found.total.reward) == (not known) and found.finder.find().failed == known.count(0)


def test_comparison_of_runs_is_by_task() -> None:
    better = [sample(n, 1.0, n % 3) for n in range(6)]
    worse = [sample(n, float(n < 2), n % 4) for n in range(8)]
    found = compare_statistics(*(statistics_of(run, ["level"]) for run in (worse, better)))
    assert found["", ""][:2] == compare(worse, better)
    assert [c.measure for c in found["", ""]] == ["success", "reward", "turns", "tool calls", "tokens sampled"]
    assert found["", ""][2].difference == 0 and found["level", "1"][0].tasks == 1
    assert compare_statistics(statistics_of(worse), statistics_of([])) == {}
    keys = ["split", "level", "purpose", "env", "ending"]
    named = compare_statistics(statistics_of(worse, keys), statistics_of(better, keys))
    assert list(dict.fromkeys(key for key, _ in named)) == ["", *keys]


def test_stats_command_prints_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "runs" / "latest" / "episodes.jsonl"
    file.parent.mkdir(parents=True)
    hostile = sample(5, 0.0, 0, id="e\x1b[31m5", origin=Origin("train", "train", 6))
    file.write_bytes(b"".join(map(dump_line, [*EPISODES, hostile])))
    file.with_name("metrics.jsonl").write_text('{"kind": "train", "step": 0, "perf/rollout_s": 2.5}\n')
    _, *command = shlex.split("agent-rl stats runs/latest")
    assert main(command) == 0
    out = capsys.readouterr().out
    assert "perf/rollout_s 2.5" in out and "sandbox_lost (16.7%)" in out and "\x1b" not in out
    assert "What went wrong? 4 of 6 episodes did not succeed." in out
    assert clean("e\x1b[31m5") in out
    assert "2 tasks that no episode solved: 2 episodes, which ended: done (1), sandbox_lost (1)" in out
    assert main([*command, "--json", "--where", "purpose=train"]) == 0
    table = json.loads(capsys.readouterr().out)
    (kind,) = table["departures"]["kinds"]
    assert table["all"]["episodes"] == 5 and kind["what"] == "same moves, other score"
    assert kind["example"]["link"].startswith("#/episode/e") and kind["example"]["token"] is None
    assert main([*command, "--json", "--where", "success=no"]) == 0  # successful ones are taken from the others
    (kind,) = json.loads(capsys.readouterr().out)["departures"]["kinds"]
    assert kind["example"]["successful"] == "e0" and kind["episodes"] == 2
    for episode in ("e4", "e0"):
        assert main(["view", str(file), episode, "--turn", "1"]) == 0
        out = capsys.readouterr().out
        assert "1 turn before, shown without --turn" in out and "turn 1" in out and "turn 0" not in out
    assert main([*command, "--where", "step>99"]) == 1
    assert "no episode fits" in capsys.readouterr().err


def test_stats_command_compares_rollouts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    _, *command = shlex.split("agent-rl compare A B")
    for policy, folder in (("nothing", "A"), ("oracle", "B")):
        assert main(["rollout", "env=search-v0", f"policy={policy}", "n=6", "samples=2", f"out={folder}"]) == 0
    assert "pass@2 100.0%, pass^2 100.0%" in capsys.readouterr().out
    assert main([*command, "--where", "sample=0"]) == 0
    out = capsys.readouterr().out
    assert "+1.000" in out and "0.031" in out and "over 6 tasks" in out  # 2 of 2 ** 6 signs
    assert main([*command, "--json", "--by", "relation"]) == 0
    rows = json.loads(capsys.readouterr().out)["compared"]
    success = [row for row in rows if row["measure"] == "success"]
    assert [(row["tag"], row["tasks"]) for row in success] == [("", 6), ("born", 4), ("lives", 2)]
    assert (success[0]["first"], success[0]["second"]) == (0, 1)
    assert main([*command, "--by", "relation"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[1][:5] == ["all", "success", "6", "0.000", "1.000"]
    assert ["relation", "born", "success", "4"] in [line[:4] for line in lines]
    assert main(["stats", "A", "B", "--by", "relation"]) == 0
    assert [line.split() for line in capsys.readouterr().out.splitlines()] == lines
    assert main(["stats", "A", "none.jsonl"]) == 1


def test_statistics_compare_tasks_of_one_environment() -> None:
    both = [sample(n, float(env == "a-v0"), 0, env=env) for n, env in enumerate(("a-v0", "b-v0"))]
    mixed, alone = statistics_of(both), statistics_of([sample(9, 0.0, 0, env="a-v0")])
    success = compare_statistics(mixed, alone)["", ""][0]
    assert (success.tasks, success.first, success.second) == (1, 1.0, 0.0)
    moved = statistics_of([sample(9, 0.0, 0, env="http://host:8000/a-v0")])
    assert compare_statistics(alone, moved)["", ""][0].tasks == 1


def test_stats_command_counts_unknown_success(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "episodes.jsonl"
    file.write_bytes(b"".join(map(dump_line, [sample(0, 0.0), sample(1, None), sample(2, None)])))
    assert main(["stats", str(file)]) == 0
    assert "1 of 3 episodes did not succeed; of 2 it is not known." in capsys.readouterr().out
    assert main(["stats", str(file), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["departures"]["unknown"] == 2
