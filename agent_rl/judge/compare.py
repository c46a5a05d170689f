"""Two judgements of the same episodes: by another judge, another rubric, or the same judge again."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from agent_rl.core.judgement import Judgement, Verdict
from agent_rl.errors import ConfigError
from agent_rl.judge.agreement import by_episode
from agent_rl.judge.coefficients import Estimate, confusion, estimate, kappa, resample, spearman

SHOWN = 10
"""Of the largest disagreements."""
_Pair: TypeAlias = tuple[str, float | None, float | None]
"""An episode's id and two values; None is unscored."""


@dataclass(frozen=True, slots=True)
class Difference:
    """Two values of one episode, of its score or of one criterion."""

    episode: str
    criterion: str
    """Empty for the score."""
    first: float
    second: float


@dataclass(frozen=True, slots=True)
class ComparedValues:
    """Two judges' values of the same things, 0 to 1; what either of them left unscored is in no mean."""

    name: str
    """The criterion's id; "score" for scores."""
    n: int
    first_unscored: int
    second_unscored: int
    apart: int
    """Where one of them says that the criterion does not apply; part of no other number."""
    same: float
    """The share of equal values; NaN, as all that follows, where n is 0."""
    kappa: float
    """Cohen's, with quadratic weights over the values that were given; NaN for scores."""
    rank_correlation: float
    """Spearman's."""
    difference: Estimate
    """Second less first, with a paired interval by resampling tasks."""


@dataclass(frozen=True, slots=True)
class JudgementComparison:
    """What two sets of judgements say of the same episodes."""

    first: str
    """The judge and the rubric."""
    second: str
    episodes: int
    only_first: int
    only_second: int
    score: ComparedValues
    criteria: tuple[ComparedValues, ...]
    """Those that both have, by id."""
    largest_scores: tuple[Difference, ...]
    """The largest differences."""
    largest_verdicts: tuple[Difference, ...]


def compare_judgements(
    first: Iterable[Judgement], second: Iterable[Judgement], tasks: Mapping[str, str] | None = None
) -> JudgementComparison:
    """Compare two sets of judgements by episode and by criterion id.

    Args:
        first: one an episode.
        second: those that they are compared with.
        tasks: of the episodes, by episode id, which intervals draw whole; each has its own if left out.

    Raises:
        ConfigError: if they have no episode in common, or an episode is judged twice in one of them.
    """
    a, b = by_episode(first), by_episode(second)
    both = [episode for episode in a if episode in b]
    if not both:
        raise ConfigError(f"the two have no episode in common: the first has {len(a)} others, the second {len(b)}")
    scores: list[_Pair] = [(id, a[id].score, b[id].score) for id in both]
    verdicts: dict[str, list[tuple[str, Verdict, Verdict]]] = defaultdict(list)
    for id in both:
        theirs = {verdict.criterion: verdict for verdict in b[id].verdicts}
        for verdict in a[id].verdicts:
            if verdict.criterion in theirs:
                verdicts[verdict.criterion].append((id, verdict, theirs[verdict.criterion]))
    applied = {
        name: [(id, x.value, y.value) for id, x, y in found if x.is_applicable and y.is_applicable]
        for name, found in verdicts.items()
    }
    apart = {name: sum(x.is_applicable != y.is_applicable for _, x, y in found) for name, found in verdicts.items()}
    return JudgementComparison(
        f"{a[both[0]].judge}, {a[both[0]].rubric}",
        f"{b[both[0]].judge}, {b[both[0]].rubric}",
        len(both),
        len(a) - len(both),
        len(b) - len(both),
        _compared("score", scores, tasks),
        tuple(_compared(name, values, tasks, apart[name], with_kappa=True) for name, values in applied.items()),
        _largest({"": scores}),
        _largest(applied),
    )


def _compared(
    name: str, values: Sequence[_Pair], tasks: Mapping[str, str] | None, apart: int = 0, *, with_kappa: bool = False
) -> ComparedValues:
    known = [(x, y) for _, x, y in values if x is not None and y is not None]
    of = [id for id, x, y in values if x is not None and y is not None]
    unscored = [sum(pair[side] is None for pair in values) for side in (1, 2)]
    if not known:
        unknown = Estimate(np.nan, np.nan, np.nan)
        return ComparedValues(name, 0, unscored[0], unscored[1], apart, np.nan, np.nan, np.nan, unknown)
    xs, ys = np.array(known, np.float64).T
    weighted = np.nan
    if with_kappa:
        menu, numbers = np.unique(np.concatenate([xs, ys]), return_inverse=True)
        one, other = np.split(numbers, 2)
        weighted = float(kappa(confusion(one.tolist(), other.tolist(), len(menu)), menu))
    sums, n = resample([ys - xs, np.ones(len(xs))], of if tasks is None else [tasks[id] for id in of])
    return ComparedValues(
        name,
        len(known),
        unscored[0],
        unscored[1],
        apart,
        float(np.mean(xs == ys)),
        weighted,
        spearman(xs.tolist(), ys.tolist()),
        estimate((sums / n)[0], (sums / n)[1:]),
    )


def _largest(values: Mapping[str, Sequence[_Pair]]) -> tuple[Difference, ...]:
    found = [
        Difference(episode, name, x, y)
        for name, pairs in values.items()
        for episode, x, y in pairs
        if x is not None and y is not None and x != y
    ]
    return tuple(sorted(found, key=lambda each: -abs(each.second - each.first))[:SHOWN])
