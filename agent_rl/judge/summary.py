"""A judged file in numbers: the score, each criterion, faults, calls and cost."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from agent_rl.core.judgement import Verdict
from agent_rl.errors import in_brief
from agent_rl.judge.coefficients import Estimate
from agent_rl.judge.judged import Judged
from agent_rl.judge.rubric import Criterion
from agent_rl.rollout.comparison import mean_interval
from agent_rl.rollout.evaluation import Rate
from agent_rl.rollout.usage import Prices, Quantiles, UsageTotals, price_of, usage_totals


@dataclass(frozen=True, slots=True)
class CriterionSummary:
    """What a judge said of one criterion; a mean of values between 0, the worst choice, and 1, the best."""

    criterion: Criterion
    mean: Estimate
    """With its 95 % interval over tasks."""
    n: int
    """Verdicts with a value."""
    choices: Mapping[str, int]
    """How often each was given."""
    not_applicable: int
    faults: Mapping[str, int]
    """Why it has no verdict, by class."""


@dataclass(frozen=True, slots=True)
class JudgedSummary:
    """What a judge said of some episodes."""

    judge: str
    rubric: str
    """Its label; "task:KEY" where each task has its own."""
    episodes: int
    score: Estimate
    """The mean of the scored episodes, with its 95 % interval over tasks."""
    scored: int
    unscored: int
    faults: Mapping[str, int]
    """Unscored episodes by the class of a fault; one with several classes is in each."""
    reasons: Mapping[str, str]
    """The most frequent words of each class, in brief."""
    suspect: Rate
    """Episodes whose text addresses the judge, or looks like its reply."""
    criteria: tuple[CriterionSummary, ...]
    """By id and weight."""
    usage: UsageTotals
    """Of the calls that were made."""
    seconds: Quantiles
    """Of a judgement."""
    cost: float | None
    """None without prices."""


def summarise_judged(judged: Judged, prices: Prices | None = None) -> JudgedSummary:
    """Return the numbers of a judged file.

    Raises:
        ConfigError: if there are prices, and none of a model that was asked.
    """
    verdicts: dict[tuple[str, float], list[tuple[str, Verdict]]] = defaultdict(list)
    criteria: dict[tuple[str, float], Criterion] = {}
    for each in judged.episodes:
        weights = {}
        for criterion in judged.rubric_of(each).criteria:  # tasks' own may give one id several weights
            criteria.setdefault((criterion.id, criterion.weight), criterion)
            weights[criterion.id] = criterion.weight
        for verdict in each.judgement.verdicts:
            if (weight := weights.get(verdict.criterion)) is not None:
                verdicts[verdict.criterion, weight].append((each.drawn_with, verdict))
    unscored = [j for j in judged.judgements if j.score is None]
    scores = ((each.drawn_with, each.judgement.score) for each in judged.episodes)
    header = judged.header
    return JudgedSummary(
        judge=header.judge,
        rubric=header.rubric.label if header.rubric else f"task:{header.task_key}",
        episodes=len(judged.episodes),
        score=_mean(scores),
        scored=len(judged.judgements) - len(unscored),
        unscored=len(unscored),
        faults=dict(Counter(str(fault) for j in unscored for fault in dict.fromkeys(j.faults)).most_common()),
        reasons=_reasons(verdict for j in unscored for verdict in j.verdicts),
        suspect=Rate(sum(bool(j.suspect) for j in judged.judgements), len(judged.judgements)),
        criteria=tuple(_of_criterion(criterion, verdicts[key]) for key, criterion in criteria.items()),
        usage=usage_totals(judged.usage),
        seconds=Quantiles.of([j.seconds for j in judged.judgements]),
        cost=None if prices is None else sum(price_of(used.model, prices).of(used) for used in judged.usage),
    )


def _reasons(verdicts: Iterable[Verdict]) -> dict[str, str]:
    said: dict[str, Counter[str]] = defaultdict(Counter)
    for verdict in verdicts:
        if verdict.error is not None and verdict.detail:
            said[str(verdict.error)][verdict.detail] += 1
    return {fault: in_brief(words.most_common(1)[0][0]) for fault, words in said.items()}


def _of_criterion(criterion: Criterion, verdicts: list[tuple[str, Verdict]]) -> CriterionSummary:
    return CriterionSummary(
        criterion,
        _mean((group, verdict.value) for group, verdict in verdicts),
        sum(v.value is not None for _, v in verdicts),
        dict(Counter(v.choice for _, v in verdicts if v.choice is not None)),
        sum(not v.is_applicable for _, v in verdicts),
        dict(Counter(str(v.error) for _, v in verdicts if v.error is not None)),
    )


def _mean(values: Iterable[tuple[str, float | None]]) -> Estimate:
    groups: dict[str, list[float]] = defaultdict(list)
    for group, value in values:
        if value is not None:
            groups[group].append(value)
    n = sum(map(len, groups.values()))
    return Estimate(sum(map(sum, groups.values())) / n if n else math.nan, *mean_interval(groups.values()))
