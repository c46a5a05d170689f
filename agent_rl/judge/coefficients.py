"""Coefficients of agreement and rank, over tables of counts: a bootstrap adds up the tables of resampled tasks.

A confusion table is (..., K, K): how often the reference gave choice i (row) where the judge gave choice j (column). A
coincidence table is Krippendorff's. Leading axes are resampled sets of tasks; what is not defined is NaN.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from agent_rl.errors import ConfigError
from agent_rl.seeds import Stream, rng

Array: TypeAlias = npt.NDArray[np.float64]
Level: TypeAlias = Literal["nominal", "ordinal", "interval"]

DRAWS, AT_ONCE = 2_000, 100
"""Resampled sets of tasks; how many are held at once."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A number with its 95 % bootstrap interval; NaN where it is not known."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        if np.isnan(self.value):
            return "unknown"
        return f"{self.value:.3f}" + ("" if np.isnan(self.low) else f" [{self.low:.3f}, {self.high:.3f}]")


def estimate(value: float | Array, draws: Array) -> Estimate:
    """Return a value and the interval that its resampled values span."""
    known = draws[~np.isnan(draws)]
    low, high = np.quantile(known, [0.025, 0.975]) if len(known) else (np.nan, np.nan)
    return Estimate(float(value), float(low), float(high))


def resample(tables: Sequence[Array], tasks: Sequence[str] | None = None) -> list[Array]:
    """Return each table summed over episodes, (1 + DRAWS, ...): all of them first, then sets drawn with replacement.

    A set is of whole tasks: episodes of one are no independent draws. Of a single task there are no sets, (1, ...).

    Args:
        tables: each (E, ...), of the same E episodes; all are given the same draws.
        tasks: the task of each; None if each has its own.
    """
    episodes = len(tables[0])
    numbers: dict[object, int] = {}
    of_task = [numbers.setdefault(task, len(numbers)) for task in (range(episodes) if tasks is None else tasks)]
    flat = np.zeros((n := len(numbers), sum(table[0].size for table in tables)))
    np.add.at(flat, of_task, np.concatenate([np.reshape(table, (episodes, -1)) for table in tables], axis=1))
    summed = np.concatenate([flat.sum(axis=0, keepdims=True), *(weights @ flat for weights in _weights(n))])
    ends = np.cumsum([int(np.prod(table.shape[1:])) for table in tables])
    parts = np.split(summed, ends[:-1], axis=1)
    return [part.reshape(len(summed), *table.shape[1:]) for part, table in zip(parts, tables, strict=True)]


def _weights(n: int) -> Iterator[Array]:
    """Yield how often each task is drawn, AT_ONCE sets at a time."""
    generator = rng(Stream.COMPARISON, 2)
    for _ in range(DRAWS // AT_ONCE if n > 1 else 0):
        drawn = generator.integers(n, size=(AT_ONCE, n))
        yield np.stack([np.bincount(row, minlength=n) for row in drawn]).astype(np.float64)


def confusion(reference: Sequence[int], judged: Sequence[int], choices: int) -> Array:
    """Return the table of two raters' choices, each the number of a choice."""
    table = np.zeros((choices, choices))
    np.add.at(table, (np.asarray(reference, int), np.asarray(judged, int)), 1)
    return table


def accuracy(table: Array) -> Array:
    """Return the share of agreement."""
    return ratio(_diagonal(table).sum(-1), table.sum((-2, -1)))


def recalls(table: Array) -> Array:
    """Return the share of each choice that the judge found: TNR and TPR of two choices."""
    return ratio(_diagonal(table), table.sum(-1))


def balanced_accuracy(table: Array) -> Array:
    """Return the mean recall over the choices that the reference gave."""
    return _mean(recalls(table))


def macro_f1(table: Array) -> Array:
    """Return the mean F1 over the choices that either gave."""
    return _mean(ratio(2 * _diagonal(table), table.sum(-1) + table.sum(-2)))


def kappa(table: Array, values: Array | None = None) -> Array:
    """Return Cohen's kappa (1968) with quadratic weights; with two choices it is the unweighted one.

    Args:
        table: of two raters' choices.
        values: of the choices; at even distances if left out.
    """
    expected = table.sum(-1)[..., :, None] * table.sum(-2)[..., None, :]
    steps: Array = np.arange(table.shape[-1], dtype=np.float64) if values is None else values
    distance = (steps[:, None] - steps) ** 2
    total = table.sum((-2, -1))
    return 1 - ratio((distance * table).sum((-2, -1)) * total, (distance * expected).sum((-2, -1)))


def mcc(table: Array) -> Array:
    """Return Matthews' correlation coefficient; for more than two choices Gorodkin's (2004)."""
    total, given, judged = table.sum((-2, -1)), table.sum(-1), table.sum(-2)
    covariance = _diagonal(table).sum(-1) * total - (given * judged).sum(-1)
    spread = (total**2 - (given**2).sum(-1)) * (total**2 - (judged**2).sum(-1))
    return ratio(covariance, np.sqrt(np.maximum(spread, 0)))


def coincidences(ratings: Sequence[Sequence[int]], choices: int) -> Array:
    """Return the coincidence table of units, (K, K): every pair of ratings of a unit, by how many ratings it has.

    Args:
        ratings: of each unit, one a rater; a unit with one rating has no pair.
        choices: how many there are.
    """
    table = np.zeros((choices, choices))
    for unit in ratings:
        if len(unit) > 1:
            counts = np.bincount(unit, minlength=choices).astype(float)
            table += (np.outer(counts, counts) - np.diag(counts)) / (len(unit) - 1)
    return table


def krippendorff_alpha(table: Array, level: Level = "ordinal", values: Sequence[float] | None = None) -> Array:
    """Return Krippendorff's alpha (2011) of coincidences: 1 is full agreement, 0 is chance.

    Args:
        table: as `coincidences` returns it.
        level: of measurement: what a disagreement between two choices weighs.
        values: of the choices, where it is "interval"; 0, 1, 2 ... if left out.
    """
    margins = table.sum(-1)
    if level == "nominal":
        distance: Array = 1 - np.eye(table.shape[-1])
    else:
        spots: Array = np.asarray(range(table.shape[-1]) if values is None else values, np.float64)
        if level == "ordinal":
            spots = np.cumsum(margins, -1) - margins / 2
        distance = (spots[..., :, None] - spots[..., None, :]) ** 2
    observed = (distance * table).sum((-2, -1))
    expected = (distance * margins[..., :, None] * margins[..., None, :]).sum((-2, -1))
    return 1 - ratio(observed * (margins.sum(-1) - 1), expected)


def corrected_pass_rate(observed: float, tpr: float, tnr: float) -> float:
    """Return the true pass rate that a judge's observed one stands for (Rogan and Gladen 1978), within 0 and 1.

    Args:
        observed: the share of passes that the judge gave.
        tpr: the share of true passes that it passes.
        tnr: the share of true failures that it fails.

    Raises:
        ConfigError: if tpr + tnr is not above 1: the judge is no better than chance.
    """
    if not tpr + tnr > 1:
        raise ConfigError(f"tpr={tpr:g} and tnr={tnr:g} add up to {tpr + tnr:g}: a judge at chance corrects nothing")
    return min(max((observed + tnr - 1) / (tpr + tnr - 1), 0.0), 1.0)


def spearman(x: Sequence[float], y: Sequence[float]) -> float:
    """Return Spearman's rank correlation, ties sharing their mean rank; NaN where one of them does not vary."""
    return pearson(ranks(x), ranks(y))


def ranks(values: Sequence[float]) -> Array:
    """Return ranks, counted from 1; equal values share their mean rank."""
    _, inverse, counts = np.unique(np.asarray(values, float), return_inverse=True, return_counts=True)
    mean: Array = np.cumsum(counts) - (counts - 1) / 2
    return mean[inverse]


def pearson(x: Array, y: Array) -> float:
    """Return the linear correlation; NaN where one of them does not vary."""
    a, b = x - x.mean(), y - y.mean()
    return float(ratio(np.asarray((a * b).sum()), np.asarray(np.sqrt((a * a).sum() * (b * b).sum()))))


def _diagonal(table: Array) -> Array:
    return np.diagonal(table, axis1=-2, axis2=-1)


def ratio(above: Array, below: Array) -> Array:
    """Return a quotient; NaN where the divisor is 0."""
    out: Array = np.full(np.broadcast_shapes(above.shape, below.shape), np.nan)
    return np.divide(above, below, out=out, where=np.broadcast_to(below != 0, out.shape))


def _mean(values: Array) -> Array:
    """Return the mean of what is known, over the last axis."""
    known = ~np.isnan(values)
    return ratio(np.where(known, values, 0).sum(-1), known.sum(-1).astype(np.float64))
