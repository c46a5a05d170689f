"""The results of an evaluation: tables for a terminal, and the same as JSON."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import asdict

from rich.console import Console
from rich.table import Table

from agent_rl.core.display import plural
from agent_rl.core.messages import JSON, without_nan
from agent_rl.rollout.evaluation import Evaluation
from agent_rl.rollout.judged import JudgeTotals, total_judgements
from agent_rl.view.tables import print_whole
from agent_rl.view.verdicts import counted


def print_results(
    result: Evaluation,
    console: Console,
    *,
    title: str,
    by: str | None = None,
    prices: str | os.PathLike[str] | None = None,
    judge_prices: str | os.PathLike[str] | None = None,
) -> None:
    """Print a line of scores; below it a table by tags, the judges' verdicts, and a served model's usage.

    Args:
        result: of an evaluation.
        console: where to print.
        title: the environment's name.
        by: as in `Evaluation.by`.
        prices: a file of them, as in `Evaluation.cost`.
        judge_prices: the same, of judges.
    """
    say(console, headline(title, result))
    if (k := result.samples) > 1:
        rates = f"pass@{k} {result.pass_at(k):.1%}, pass^{k} {result.pass_hat(k):.1%}"
        which = f", of the tasks with {k} scored samples" if result.failed else ""
        say(console, f"pass@1 {result.pass_at(1):.1%}, {rates}{which}")
    if tags := result.by(by):
        print_whole(_tag_table(tags, by or "tag", k), console)
    if len(result.stops) > 1 or result.failed:
        say(console, f"ended: {counted(result.stops)}")
    if (judged := total_judgements((*result.episodes, *result.retried), judge_prices)).judgements:
        _print_judged(judged, console)
    if (used := result.usage).replies:
        cached = f" ({used.cached_tokens:,} cached)" if used.cached_tokens else ""
        thought = f" ({used.reasoning_tokens:,} of reasoning)" if used.reasoning_tokens else ""
        cost = "" if prices is None else f", cost {result.cost(prices):.4g}"
        say(console, f"tokens: {used.input_tokens:,} in{cached}, {used.output_tokens:,} out{thought}{cost}")
        failed = f"; failed attempts: {counted(used.errors)}" if used.errors else ""
        unknown = f" ({used.uncounted} of unknown tokens)" if used.uncounted else ""
        say(console, f"replies: {used.replies}{unknown}, attempts: {used.attempts}{failed}")
        say(console, f"latency p50 / p90 / p99: a reply {used.latency}, an episode {result.seconds}")


def headline(title: str, result: Evaluation) -> str:
    """Return success and reward in a line, with 95 % intervals over tasks."""
    success = result.success
    low, high = result.success_interval
    shown = f"{success.value:6.1%} [{low:.1%}, {high:.1%}] of {success.n}" if success.n else str(success)
    least, most = result.reward_interval
    interval = "" if math.isnan(least) else f" [{least:.3f}, {most:.3f}]"
    return f"{title}: success {shown}, reward {result.reward:.3f}{interval}, {result.failed} failed"


def _print_judged(judged: JudgeTotals, console: Console) -> None:
    n, used = judged.judgements, judged.usage
    why = f" ({counted(judged.faults)})" if judged.faults else ""
    cost = "" if judged.cost is None else f", cost {judged.cost:.4g}"
    say(console, f"judged: {n}, {judged.unscored / n:.1%} not scored{why}, {judged.suspect / n:.1%} suspect")
    if used.replies:
        tokens = f"tokens {used.input_tokens:,} in ({used.cached_tokens:,} cached), {used.output_tokens:,} out{cost}"
        say(console, f"judge: {plural(used.replies, 'call')}, {tokens}, latency p50 / p90 / p99 {judged.seconds}")


def say(console: Console, line: str) -> None:
    """Print a line as it is, however narrow the console."""
    console.print(line, markup=False, highlight=False, soft_wrap=True)


def _tag_table(tags: Mapping[str, Evaluation], name: str, k: int) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    passes = (f"pass@{k}", f"pass^{k}") if k > 1 else ()
    for title in (name, "tasks", "success", "95 % interval", *passes, "reward", "failed"):
        table.add_column(title, justify="left" if title == name else "right")
    for tag, one in tags.items():
        rates = [f"{rate:.1%}" for rate in (one.pass_at(k), one.pass_hat(k))] if k > 1 else []
        interval = "[{:.1%}, {:.1%}]".format(*one.success_interval)
        cells = (str(one.tasks), one.success.share, interval, *rates, f"{one.reward:.3f}", str(one.failed))
        table.add_row(tag, *cells)
    return table


def result_table(
    result: Evaluation,
    *,
    by: str | None = None,
    prices: str | os.PathLike[str] | None = None,
    judge_prices: str | os.PathLike[str] | None = None,
) -> dict[str, JSON]:
    """Return all numbers of an evaluation, as JSON holds them; arguments as of `print_results`."""
    used, k = result.usage, result.samples
    judged = total_judgements((*result.episodes, *result.retried), judge_prices)
    out: dict[str, JSON] = _scores(result, k) | {
        "tags": {tag: _scores(one, k) for tag, one in result.by(by).items()},
        "stops": dict(result.stops),
        "failures": dict(result.failures),
        "seconds": asdict(result.seconds),
    }
    if judged.judgements:
        out["judged"] = asdict(judged)
    if used.replies:
        out["usage"] = asdict(used) | ({} if prices is None else {"cost": result.cost(prices)})
    return out


def _scores(result: Evaluation, k: int) -> dict[str, JSON]:
    return {
        "tasks": result.tasks,
        "episodes": len(result.episodes),
        "failed": result.failed,
        "success": result.success.value,
        "success_interval": result.success_interval,
        "reward": result.reward,
        "reward_interval": result.reward_interval,
        "samples": k,
        "pass_at": {str(i): result.pass_at(i) for i in range(1, k + 1)},
        "pass_hat": {str(i): result.pass_hat(i) for i in range(1, k + 1)},
    }


def dump_results(table: Mapping[str, JSON]) -> str:
    """Return results as JSON; what is not known is null."""
    return json.dumps(without_nan(table), indent=2) + "\n"
