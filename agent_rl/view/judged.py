"""Judged files in a terminal: in numbers, compared, and measured by labels and probes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Literal

from rich.console import Console
from rich.table import Table
from rich.text import Text

from agent_rl.core.display import plural
from agent_rl.judge.agreement import AgreementReport
from agent_rl.judge.coefficients import Estimate
from agent_rl.judge.compare import ComparedValues, Difference, JudgementComparison
from agent_rl.judge.probes import ProbeReport
from agent_rl.judge.summary import CriterionSummary, JudgedSummary
from agent_rl.view.conversation import clean
from agent_rl.view.results import say
from agent_rl.view.verdicts import counted

OF_CRITERION = ("accuracy", "kappa", "tpr", "tnr", "pass_rate")
"""What agreement's table of criteria shows; all other numbers are in its JSON."""
LISTED = 40
"""Criteria of a table; those of tasks' own rubrics can be thousands."""


def print_summary(summary: JudgedSummary, console: Console) -> None:
    """Print the score, the criteria, the faults and the cost."""
    score = f"score {summary.score} of {plural(summary.scored, 'episode')}, {summary.unscored} unscored"
    say(console, clean(f"{summary.rubric} by {summary.judge}: {score}, {summary.suspect.successes} suspect"))
    table = _table("criterion", "weight", "mean", "95 % interval", "n", "n/a", "unscored", "choices")
    for each in summary.criteria[:LISTED]:
        table.add_row(*_row(each))
    console.print(table)
    if (more := len(summary.criteria) - LISTED) > 0:
        say(console, f"and {plural(more, 'criterion', 'criteria')} more")
    if summary.faults:
        say(console, f"unscored: {counted(summary.faults)}")
        for fault, why in summary.reasons.items():
            say(console, clean(f"  {fault}: {why}"))
    if summary.suspect.successes:
        say(console, f"suspect: {summary.suspect} address the judge, or look like its reply")
    if (used := summary.usage).replies:
        cached = f" ({used.cached_tokens:,} cached)" if used.cached_tokens else ""
        cost = "" if summary.cost is None else f", cost {summary.cost:.4g}"
        failed = f"; failed attempts: {counted(used.errors)}" if used.errors else ""
        unknown = f" ({used.uncounted:,} of unknown tokens)" if used.uncounted else ""
        say(console, f"calls: {used.replies:,}{unknown}, attempts: {used.attempts:,}{failed}")
        say(console, f"tokens: {used.input_tokens:,} in{cached}, {used.output_tokens:,} out{cost}")
        say(console, f"latency p50 / p90 / p99: a call {used.latency}, a judgement {summary.seconds}")


def _row(each: CriterionSummary) -> tuple[Text | str, ...]:
    criterion, faults = each.criterion, sum(each.faults.values())
    return (
        Text(clean(criterion.id)),
        "gate" if criterion.gate else f"{criterion.weight:g}",
        _number(each.mean.value),
        _interval(each.mean, ".2f"),
        str(each.n),
        str(each.not_applicable or ""),
        Text(f"{faults}: {counted(each.faults)}" if faults else "", style="red"),
        Text(clean(", ".join(f"{choice} {each.choices.get(choice, 0)}" for choice in criterion.choices))),
    )


def print_comparison(found: JudgementComparison, console: Console) -> None:
    """Print how two judgements of the same episodes differ, and where most."""
    say(console, clean(f"A: {found.first}\nB: {found.second}"))
    titles = ("", "n", "same", "kappa", "Spearman", "B - A", "95 % interval", "unscored A / B")
    console.print(_filled(titles, [_compared(each) for each in (found.score, *found.criteria[:LISTED])]))
    only = ((found.only_first, "A"), (found.only_second, "B"))
    left_out = "".join(f"; {count} that only {name} has are left out" for count, name in only if count)
    say(console, f"over {plural(found.episodes, 'episode')}{left_out}")
    for title, differences in (("scores", found.largest_scores), ("verdicts", found.largest_verdicts)):
        if differences:
            say(console, f"\nThe most different {title}:")
            console.print(_differences(differences))


def _compared(each: ComparedValues) -> tuple[Text | str, ...]:
    difference, interval = (f"{each.difference.value:+.3f}", _interval(each.difference, "+.3f")) if each.n else ("", "")
    rates = (_number(each.same), _number(each.kappa), _number(each.rank_correlation))
    unscored = f"{each.first_unscored} / {each.second_unscored}" if each.first_unscored + each.second_unscored else ""
    return Text(clean(each.name)), str(each.n), *rates, difference, interval, unscored


def _differences(differences: Iterable[Difference]) -> Table:
    table = _table("episode", "criterion", "A", "B")
    for each in differences:
        table.add_row(Text(clean(each.episode)), Text(clean(each.criterion)), f"{each.first:.3g}", f"{each.second:.3g}")
    return table


def print_agreement(found: AgreementReport, console: Console) -> None:
    """Print how far a judge agrees with labels, criterion by criterion."""
    raters = f"raters: {', '.join(found.raters)}" if any(found.raters) else "one rater"
    say(console, clean(f"{found.rubric} by {found.judge}; {raters}"))
    total = found.total.metrics
    measures = _table("measure", "value", "95 % interval")
    for name, value in total.items():
        if not math.isnan(value.value):
            measures.add_row(_words(name), _number(value.value), _interval(value, ".3f"))
    console.print(measures)
    rows: list[tuple[Text | str, ...]] = []
    for each in found.criteria[:LISTED]:
        numbers = (_number(each.metrics[name].value) for name in OF_CRITERION)
        interval, unscored = _interval(each.metrics["kappa"], ".2f"), str(sum(each.unscored.values()) or "")
        rows.append((Text(clean(each.name)), str(each.n), *numbers, interval, unscored))
    titles = ("criterion", "n", *map(_words, OF_CRITERION), "kappa's interval", "unscored")
    console.print(_filled(titles, rows))
    unscored = counted(found.total.unscored) or "none"
    say(
        console,
        f"over {plural(found.total.n, 'label')} of {plural(found.total.episodes, 'episode')}; unscored: {unscored}",
    )
    for name, counts in (("episodes", found.unknown_episodes), ("criteria", found.unknown_criteria)):
        if counts:
            say(console, clean(f"labels of {name} that were not judged: {counted(counts)}"))
    if found.families:
        say(console, clean(f"mean error by family: {', '.join(f'{k} {v:+.3f}' for k, v in found.families.items())}"))


def _words(name: str) -> str:
    return {"mcc": "MCC", "macro_f1": "macro F1", "tpr": "TPR", "tnr": "TNR"}.get(name, name.replace("_", " "))


def print_probes(found: ProbeReport, console: Console) -> None:
    """Print what worthless answers score beside real ones."""
    real = f"{found.episodes} real answers, {found.unscored} unscored, median score {_number(found.median)}"
    say(console, clean(f"{found.rubric} by {found.judge}: {real if found.episodes else 'no real answers'}"))
    table = _table("probe", "kind", "score", "gain", "scored", "unscored", "suspect")
    for each in found.probes:
        counts = (each.scored, each.unscored, each.suspect)
        table.add_row(each.name, each.kind, _number(each.score), _number(each.gain), *map(str, counts))
    console.print(table)
    if not math.isnan(found.length_correlation.value):
        say(console, f"correlation of score and length: {found.length_correlation}")
    for problem in found.problems:
        say(console, clean(problem))


def _table(*titles: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for title in titles:
        is_text = title in ("", "criterion", "episode", "probe", "kind", "choices")
        justify: Literal["left", "right"] = "left" if is_text else "right"
        table.add_column(title, justify=justify, overflow="fold", no_wrap=not is_text, min_width=8 if is_text else None)
    return table


def _filled(titles: Sequence[str], rows: Sequence[Sequence[Text | str]]) -> Table:
    """Return a table without the columns that are empty, as a terminal is narrow."""
    kept = [at for at in range(len(titles)) if at == 0 or any(str(row[at]) for row in rows)]
    table = _table(*(titles[at] for at in kept))
    for row in rows:
        table.add_row(*(row[at] for at in kept))
    return table


def _number(value: float) -> str:
    return "" if math.isnan(value) else f"{value:.3f}"


def _interval(value: Estimate, form: str) -> str:
    """Return the interval; nothing where it is not known, as of a single task."""
    return "" if math.isnan(value.low) else f"{value.low:{form}} to {value.high:{form}}"
