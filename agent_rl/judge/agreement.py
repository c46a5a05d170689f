"""Agreement of a judge with labels, per criterion and overall, with intervals by resampling tasks.

The verdicts of one episode share its text, and episodes share their task, so that they are no independent draws: whole
tasks are resampled.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from agent_rl.core.episode import Episode
from agent_rl.core.judgement import JudgeFault, Judgement, Verdict
from agent_rl.errors import ConfigError
from agent_rl.judge import coefficients as co
from agent_rl.judge.coefficients import Array, Estimate
from agent_rl.judge.labels import Label
from agent_rl.judge.rubric import Criterion, Rubric

PASS = 0.5
"""A choice worth more than this is a pass."""
_TABLE_METRICS: Mapping[str, Callable[[Array], Array]] = {
    "accuracy": co.accuracy,
    "balanced_accuracy": co.balanced_accuracy,
    "kappa": co.kappa,
    "mcc": co.mcc,
    "macro_f1": co.macro_f1,
}


@dataclass(frozen=True, slots=True)
class Agreement:
    """How far a judge agrees with labels on one criterion, or on all of them."""

    name: str
    """The criterion's id; "all" for all that have labels."""
    choices: tuple[str, ...]
    """From worst to best; ("fail", "pass") for all criteria together, where their choices differ."""
    n: int
    """Labels with a verdict: all numbers but the pass rate are of these."""
    episodes: int
    """How many episodes these are of."""
    unscored: Mapping[str, int]
    """Labels whose verdict failed, by its error: they are part of no other number."""
    not_applicable: int
    """Labels where the judge or the raters say that the criterion does not apply."""
    tied: int
    """Labels on which the raters are divided evenly."""
    metrics: Mapping[str, Estimate]
    """accuracy, balanced_accuracy, kappa (quadratic weights), alpha (ordinal, the judge as one more rater), rater_alpha
    (without the judge), mcc, macro_f1, tpr, tnr (of passes), pass_rate (of all episodes' verdicts, labelled or not),
    label_pass_rate, corrected_pass_rate, family_bias (of values: the largest mean error less the smallest)."""


@dataclass(frozen=True, slots=True)
class AgreementReport:
    """How far a judge agrees with labels."""

    judge: str
    rubric: str
    total: Agreement
    criteria: tuple[Agreement, ...]
    raters: tuple[str, ...]
    unknown_episodes: Mapping[str, int]
    """Labels of episodes that were not judged, by episode."""
    unknown_criteria: Mapping[str, int]
    """Labels of criteria that are not in the rubric, by criterion."""
    families: Mapping[str, float] = field(default_factory=dict)
    """The judge's mean error, verdict less label, on the episodes of each family of models."""


def families_of(episodes: Iterable[Episode]) -> dict[str, str]:
    """Return each episode's model by the episode's id: from its versions, else from the usage of its replies."""
    found = {e.id: e.versions.get("model") or (e.usage[0].model if e.usage else "") for e in episodes}
    return {id: model for id, model in found.items() if model}


def agree(
    judgements: Iterable[Judgement],
    labels: Sequence[Label],
    rubric: Rubric,
    families: Mapping[str, str] | None = None,
    tasks: Mapping[str, str] | None = None,
) -> AgreementReport:
    """Compare a judge with labels; several raters' label is the one that most of them gave.

    Args:
        judgements: one an episode, under the rubric.
        labels: as `read_labels` returns them.
        rubric: whose criteria were judged.
        families: of the models that wrote the episodes, by episode id; the labels' own if left out.
        tasks: of the episodes, by episode id; each has its own if left out.

    Raises:
        ConfigError: if an episode is judged twice, a label is no choice of its criterion, or no label is of a verdict.
    """
    judged = by_episode(judgements)
    criteria = {criterion.id: criterion for criterion in rubric.criteria}
    strange_episodes = Counter(label.episode for label in labels if label.episode not in judged)
    strange_criteria = Counter(label.criterion for label in labels if label.criterion not in criteria)
    known = [label for label in labels if label.episode in judged and label.criterion in criteria]
    if not known:
        raise ConfigError(
            f"none of {len(labels)} labels is of an episode that was judged and a criterion of '{rubric.name}': "
            f"labelled are {_some(strange_episodes)}, judged {_some(judged)}; criteria are {_some(criteria)}"
        )
    if families is None:
        families = {label.episode: label.family for label in known if label.family}
    of_unit: dict[tuple[str, str], list[Label]] = defaultdict(list)
    for label in known:
        of_unit[label.criterion, label.episode].append(label)
    tables = [_tabulate(criterion, judged, of_unit, families) for criterion in rubric.criteria]
    tables = [table for table in tables if table.is_labelled]
    total, drawn_with = _total(tables), None if tasks is None else [tasks[episode] for episode in judged]
    first = next(iter(judged.values()))
    return AgreementReport(
        first.judge,
        first.rubric,
        total.agreement(drawn_with),
        tuple(table.agreement(drawn_with) for table in tables),
        tuple(sorted({label.rater for label in known})),
        dict(strange_episodes),
        dict(strange_criteria),
        total.family_errors(),
    )


@dataclass
class _Tables:
    """Counts of one criterion by episode: arrays whose first axis, E, is the judged episodes."""

    name: str
    choices: tuple[str, ...]
    passing: Array
    """Whether each choice is a pass: (K, 2), one of fail and pass."""
    families: tuple[str, ...]
    confusion: Array
    """(E, K, K)"""
    pairs: Array
    """(E, K, K): coincidences of the raters and the judge."""
    rater_pairs: Array
    """(E, K, K)"""
    passes: Array
    """(E, 2): verdicts that are passes, and verdicts."""
    errors: Array
    """(E, F, 2): the sum of verdict less label in the episode's family, and their number."""
    unscored: Counter[str] = field(default_factory=Counter)
    not_applicable: int = 0
    tied: int = 0

    @property
    def is_labelled(self) -> bool:
        """Whether there is any label of it."""
        return bool(self.pairs.any() or self.confusion.any() or self.unscored or self.not_applicable or self.tied)

    def count(self, at: int, verdict: Verdict, raters: Sequence[int | None], values: Array, family: str) -> None:
        """Count the labels of one verdict."""
        given = [choice for choice in raters if choice is not None]
        judged = None if verdict.choice is None else self.choices.index(verdict.choice)
        self.rater_pairs[at] += co.coincidences([given], len(self.choices))
        if judged is not None:
            self.pairs[at] += co.coincidences([[*given, judged]], len(self.choices))
        ((reference, most), *others) = Counter(raters).most_common()
        if verdict.error is not None:
            self.unscored[str(verdict.error)] += 1
        elif others and others[0][1] == most:
            self.tied += 1
        elif reference is None or judged is None or verdict.value is None:
            self.not_applicable += 1
        else:
            self.confusion[at, reference, judged] += 1
            if family:
                self.errors[at, self.families.index(family)] += verdict.value - values[reference], 1

    def by_pass(self) -> _Tables:
        """Return the same with the choices "fail" and "pass"."""
        fold = self.passing
        folded = [fold.T @ table @ fold for table in (self.confusion, self.pairs, self.rater_pairs)]
        return replace(
            self,
            choices=("fail", "pass"),
            passing=np.eye(2),
            confusion=folded[0],
            pairs=folded[1],
            rater_pairs=folded[2],
        )

    def agreement(self, tasks: Sequence[str] | None) -> Agreement:
        """Return all numbers, with their intervals; `tasks` are the episodes', None if each has its own."""
        confusion, pairs, rater_pairs, passes, errors = co.resample(
            [self.confusion, self.pairs, self.rater_pairs, self.passes, self.errors], tasks
        )
        drawn = {name: metric(confusion) for name, metric in _TABLE_METRICS.items()}
        drawn["alpha"], drawn["rater_alpha"] = co.krippendorff_alpha(pairs), co.krippendorff_alpha(rater_pairs)
        fold = self.passing
        of_pass = fold.T @ confusion @ fold
        drawn["tnr"], drawn["tpr"] = np.moveaxis(co.recalls(of_pass), -1, 0)
        drawn["pass_rate"] = co.ratio(passes[:, 0], passes[:, 1])
        drawn["label_pass_rate"] = co.ratio(of_pass[:, 1].sum(-1), of_pass.sum((-2, -1)))
        drawn["family_bias"] = _spread(co.ratio(errors[..., 0], errors[..., 1]))
        metrics = {name: co.estimate(values[0], values[1:]) for name, values in drawn.items()}
        metrics["corrected_pass_rate"] = _corrected(drawn["pass_rate"], drawn["tpr"], drawn["tnr"])
        return Agreement(
            self.name,
            self.choices,
            int(self.confusion.sum()),
            int(self.confusion.any((1, 2)).sum()),
            dict(self.unscored),
            self.not_applicable,
            self.tied,
            metrics,
        )

    def family_errors(self) -> dict[str, float]:
        """Return the mean error of each family that has labels."""
        found = zip(self.families, self.errors.sum(0), strict=True)
        return {name: float(error / n) for name, (error, n) in found if n}


def _tabulate(
    criterion: Criterion,
    judged: Mapping[str, Judgement],
    labels: Mapping[tuple[str, str], Sequence[Label]],
    families: Mapping[str, str],
) -> _Tables:
    k, names = len(criterion.choices), tuple(sorted(set(families.values())))
    values = np.array([criterion.value_of(choice) for choice in criterion.choices])
    square = (len(judged), k, k)
    tables = _Tables(
        criterion.id,
        criterion.choices,
        np.stack([values <= PASS, values > PASS], axis=1).astype(np.float64),
        names,
        np.zeros(square),
        np.zeros(square),
        np.zeros(square),
        np.zeros((len(judged), 2)),
        np.zeros((len(judged), len(names), 2)),
    )
    for at, (episode, judgement) in enumerate(judged.items()):
        found = [verdict for verdict in judgement.verdicts if verdict.criterion == criterion.id]
        verdict = found[0] if found else Verdict(criterion.id, error=JudgeFault.MISSING)
        if verdict.choice is not None and verdict.choice not in criterion.choices:
            raise ConfigError(
                f"episode '{episode}' has '{verdict.choice}' under criterion '{criterion.id}', which has "
                f"{', '.join(criterion.choices)}: it was judged under {judgement.rubric}"
            )
        if verdict.value is not None:
            tables.passes[at] = verdict.value > PASS, 1
        raters = [label.choice(criterion) for label in labels.get((criterion.id, episode), ())]
        if raters:
            tables.count(at, verdict, raters, values, families.get(episode, ""))
    return tables


def _total(tables: Sequence[_Tables]) -> _Tables:
    """Return the sum over criteria, by passes if their choices differ."""
    if len({table.choices for table in tables}) > 1:
        tables = [table.by_pass() for table in tables]
    return replace(
        tables[0],
        name="all",
        confusion=np.sum([table.confusion for table in tables], axis=0),
        pairs=np.sum([table.pairs for table in tables], axis=0),
        rater_pairs=np.sum([table.rater_pairs for table in tables], axis=0),
        passes=np.sum([table.passes for table in tables], axis=0),
        errors=np.sum([table.errors for table in tables], axis=0),
        unscored=sum((table.unscored for table in tables), Counter()),
        not_applicable=sum(table.not_applicable for table in tables),
        tied=sum(table.tied for table in tables),
    )


def _corrected(observed: Array, tpr: Array, tnr: Array) -> Estimate:
    """Return the corrected pass rate; resampled labels that put the judge at chance leave it anywhere in 0 to 1."""
    above_chance = np.where(tpr + tnr > 1, tpr + tnr - 1, np.nan)
    rates = np.clip((observed + tnr - 1) / above_chance, 0, 1)
    if np.isnan(rates[0]) or len(rates) == 1:
        return Estimate(math.nan, math.nan, math.nan)
    low, high = (np.quantile(np.nan_to_num(rates[1:], nan=end), q) for end, q in ((0.0, 0.025), (1.0, 0.975)))
    return Estimate(float(rates[0]), float(low), float(high))


def _spread(means: Array) -> Array:
    """Return the largest known mean less the smallest; NaN of fewer than two."""
    known = (~np.isnan(means)).sum(-1)
    highest = np.where(np.isnan(means), -np.inf, means).max(-1, initial=-np.inf)
    lowest = np.where(np.isnan(means), np.inf, means).min(-1, initial=np.inf)
    return np.where(known > 1, np.subtract(highest, lowest, where=known > 1, out=np.zeros(len(means))), np.nan)


def by_episode(judgements: Iterable[Judgement]) -> dict[str, Judgement]:
    """Return judgements by the id of their episode.

    Raises:
        ConfigError: if an episode has two.
    """
    found: dict[str, Judgement] = {}
    for judgement in judgements:
        if judgement.episode in found:
            raise ConfigError(f"episode '{judgement.episode}' is judged twice: give one judge's judgements")
        found[judgement.episode] = judgement
    return found


def _some(names: Iterable[str]) -> str:
    shown = list(names)
    return ", ".join(shown[:3]) + (" ..." if len(shown) > 3 else "") or "none"
