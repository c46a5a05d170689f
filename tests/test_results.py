"""Results of an evaluation: intervals over tasks, tags, use and cost of a served model, tables and JSON."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path

import pytest
from rich.console import Console

import agent_rl as ar
from agent_rl.core.display import plural
from agent_rl.core.episode import Outcome, StopReason
from agent_rl.rollout import Rate, summarise
from agent_rl.rollout.comparison import mean_interval, require_key, task_keys
from agent_rl.rollout.usage import Quantiles, load_prices
from agent_rl.stats.statistics import statistics_of
from agent_rl.view.results import dump_results, print_results, result_table
from tests.doubles import example_episode

FIRST = ar.Usage("m", 1000, 100, 400, 60, "tool_calls", ("429", "timeout"), 1.0, 3.0)
LAST = ar.Usage("m", 2000, 50, 0, 0, "stop", (), 3.0)
LOST = ar.Usage("m", errors=("500", "500"))
PRICES = "m: {input: 10, cached: 1, output: 100}\n"


def episode(task: int, value: float | None, *usage: ar.Usage, **changes: object) -> ar.Episode:
    rewards = () if value is None else (ar.Reward("correct", value),)
    about = {"n": task, "level": task % 2, "tags": ["all", f"t{task}"]}
    return example_episode(f"{task}-{value}-{id(changes)}", task=about, rewards=rewards, usage=usage, **changes)


FAILED = episode(
    2,
    None,
    LOST,
    outcome=Outcome.FAILED,
    stop_reason=StopReason.ERROR,
    error=ar.Failure("policy", "PolicyError", "no"),
)
PLAYED = [
    *(episode(0, value, FIRST, LAST, seconds=2.0) for value in (1, 1, 1, 1)),
    *(episode(1, value) for value in (0, 0, 0, 1)),
    *(episode(2, value) for value in (0, 0, 0)),
    FAILED,
]


def test_evaluation_estimates_pass_rates_over_tasks() -> None:
    result = summarise(PLAYED)
    assert (result.tasks, result.samples, result.failed) == (3, 4, 1)
    assert result.pass_at(1) == pytest.approx(1.25 / 3) and result.pass_hat(1) == result.pass_at(1)
    assert (result.pass_at(4), result.pass_hat(4)) == (1.0, 0.5), "two tasks have 4 samples"
    assert math.isnan(result.pass_at(5))


def test_evaluation_intervals_count_tasks_not_samples() -> None:
    once, often = ([episode(task, task % 2) for task in range(20) for _ in range(n)] for n in (1, 50))
    few, many = summarise(once), summarise(often)
    assert few.success_interval == few.success.interval
    low, high = many.success_interval
    assert high - low > 0.3 > 2 * (many.success.interval[1] - many.success.interval[0])
    assert many.success_interval == many.reward_interval == pytest.approx((0.3, 0.7), abs=0.051)
    same = summarise([episode(task, 1) for task in range(3) for _ in range(4)])
    assert same.success_interval == Rate(3, 3).interval, "a bootstrap of equal values knows no doubt"
    assert all(map(math.isnan, summarise([FAILED]).reward_interval))
    assert mean_interval([[0.0, 0.0, 0.0], [1.0]])[0] == 0.0


def test_intervals_of_one_task_claim_nothing_of_others(capsys) -> None:
    one = summarise([episode(0, value) for value in (1, 0, 1, 0)])
    low, high = one.success_interval
    assert low < 0.06 and high > 0.94, "half of the samples succeed, of one task"
    assert summarise([episode(task, value) for task in (0, 1) for value in (1, 0)]).success_interval[1] > 0.9
    assert all(map(math.isnan, one.reward_interval))
    print_results(one, Console(width=120), title="one")
    assert "success  50.0% [5.5%, 94.5%] of 4, reward 0.500, 0 failed" in capsys.readouterr().out


def test_equal_tasks_of_two_environments_are_two() -> None:
    both = summarise([episode(0, value, env=env) for env, value in (("a-v0", 1), ("b-v0", 0))])
    assert (both.tasks, both.samples) == (2, 1) and both.success_interval == both.success.interval


def test_evaluation_tells_tags_apart() -> None:
    result = summarise(PLAYED)
    assert {tag: (e.tasks, e.success.n, e.failed) for tag, e in result.by("level").items()} == {
        "0": (2, 7, 1),
        "1": (1, 4, 0),
    }
    assert list(result.by()) == ["all", "t0", "t1", "t2"] and result.by()["all"].success == result.success
    with pytest.raises(ar.ConfigError, match=r"by=levl: no task has such a key. Did you mean 'level'"):
        result.by("levl")
    assert summarise([example_episode(task={"n": 1})]).by() == {}


@pytest.mark.parametrize("key", ["meta.level", "task.meta.level", "a.b", "task.n"])
def test_results_are_split_by_a_key_in_a_key(key: str) -> None:
    tasks = [{"n": n, "meta": {"level": n, "of": {"x": 1}}, "a.b": n, "a": {"b": 7}} for n in (0, 1, 1)]
    episodes = [example_episode(str(at), task=task) for at, task in enumerate(tasks)]
    assert {tag: len(found.episodes) for tag, found in summarise(episodes).by(key).items()} == {"0": 1, "1": 2}
    assert {tag: found.episodes for tag, found in statistics_of(episodes, [key]).tags[key].items()} == {"0": 1, "1": 2}
    with pytest.raises(ar.ConfigError, match=r"Did you mean 'meta.level'\? There are: n, meta, a\.$"):
        require_key("by=meta.levl", "meta.levl", task_keys(tasks))


def test_evaluation_adds_up_what_replies_used(tmp_path: Path) -> None:
    result = summarise(PLAYED[:-1], [FAILED])
    used = result.usage
    assert (used.replies, used.attempts, used.uncounted) == (9, 18, 1)
    assert (used.input_tokens, used.cached_tokens, used.output_tokens) == (12000, 1600, 600)
    assert used.reasoning_tokens == 240 and used.errors == {"429": 4, "timeout": 4, "500": 2}
    assert used.latency == Quantiles(2.0, 3.0, 3.0) and result.failed == 0
    (tmp_path / "prices.yaml").write_text(PRICES)
    each = (600 * 10 + 400 * 1 + 100 * 100 + 2000 * 10 + 50 * 100) / 1e6
    assert result.cost(tmp_path / "prices.yaml") == pytest.approx(4 * each)
    (tmp_path / "prices.yaml").write_text("m: {input: 10, output: 100}\n")
    assert result.cost(load_prices(tmp_path / "prices.yaml")) == pytest.approx(4 * (each + 400 * 9 / 1e6))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "prices.yaml can't be read: .*No such file"),
        ("m: {input: 1", "prices.yaml can't be read"),
        ("", "the file: input should be a valid dict"),
        ("m: 5", r"m: input should be .*; a model a line: gpt-5-mini: \{input"),
        ("m: {input: 1}", "m.output: field required"),
        ("m: {input: 1, output: -2}", "m.output: input should be greater"),
        ("mm: {input: 1, output: 2}", "the prices have no model 'm'. Did you mean 'mm'. Add it"),
    ],
)
def test_prices_name_what_is_wrong(text: str | None, message: str, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "prices.yaml").write_text(text)
    with pytest.raises(ar.ConfigError, match=message):
        summarise(PLAYED).cost(tmp_path / "prices.yaml")


def test_print_results_shows_tags_use_and_failures(tmp_path: Path) -> None:
    (tmp_path / "prices.yaml").write_text(PRICES)
    shown = io.StringIO()
    console = Console(file=shown, width=100)
    print_results(summarise(PLAYED), console, title="e-v0", by="level", prices=tmp_path / "prices.yaml")
    lines = [" ".join(line.split()) for line in shown.getvalue().splitlines()]
    assert lines[0].startswith("e-v0: success 45.5% [") and lines[0].endswith("], 1 failed")
    assert lines[1] == "pass@1 41.7%, pass@4 100.0%, pass^4 50.0%, of the tasks with 4 scored samples"
    assert lines[2] == "level tasks success 95 % interval pass@4 pass^4 reward failed"
    assert lines[3].startswith("0 2 57.1% [") and lines[3].endswith("100.0% 100.0% 0.571 1")
    assert lines[5:] == [
        "ended: done (11), error (1)",
        "tokens: 12,000 in (1,600 cached), 600 out (240 of reasoning), cost 0.1656",
        "replies: 9 (1 of unknown tokens), attempts: 18; failed attempts: 429 (4), timeout (4), 500 (2)",
        "latency p50 / p90 / p99: a reply 2 / 3 / 3 s, an episode 1.25 / 2 / 2 s",
    ]


def test_result_table_is_json_without_nan() -> None:
    stored = json.loads(dump_results(result_table(summarise(PLAYED))))
    assert (stored["tasks"], stored["episodes"], stored["failed"]) == (3, 12, 1)
    assert stored["pass_at"]["4"] == 1 and stored["failures"] == {"policy: PolicyError": 1}
    assert stored["usage"]["latency"]["p90"] == 3 and list(stored["tags"]) == ["all", "t0", "t1", "t2"]
    assert json.loads(dump_results(result_table(summarise([FAILED]))))["reward"] is None


def test_plural_counts_one_and_others() -> None:
    assert [plural(n, "turn") for n in (0, 1, 2, 1200)] == ["0 turns", "1 turn", "2 turns", "1,200 turns"]
    assert [plural(n, "criterion", "criteria") for n in (1, 2)] == ["1 criterion", "2 criteria"]
