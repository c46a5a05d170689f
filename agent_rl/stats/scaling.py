"""The sigmoid in log compute of ScaleRL (Khatri et al. 2025, arXiv:2510.13786, eq. 1), fitted to a run's curve.

    R(C) = R_0 + (A - R_0) / (1 + (C_mid / C)^B)

R_0 is the reward at the start, A the asymptote, B how steep the rise is in log C, and C_mid where half of it is done.
The fit is by least squares: A, and R_0 where it was not measured, are linear given B and C_mid, which are searched for
on a grid that is refined.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from agent_rl.errors import ConfigError

Floats = npt.NDArray[np.float64]
FEWEST = 5
"""Points to fit four numbers to: one more."""
_SIZE, _ROUNDS = 41, 6
_STEEPNESS = (0.1, 10.0)
"""The range of B; ScaleRL's fits have 0.8 to 2.3."""
_BEYOND = 30.0
"""C_mid is looked for up to so many times beyond the first and the last point."""


@dataclass(frozen=True, slots=True)
class Sigmoid:
    """A fitted curve."""

    start: float
    """R_0, measured or fitted."""
    asymptote: float
    """A."""
    steepness: float
    """B."""
    midpoint: float
    """C_mid, in the unit of the compute."""

    def at(self, compute: npt.ArrayLike) -> Floats:
        """Return the curve's values at some compute."""
        return self.start + (self.asymptote - self.start) * _rise(
            np.asarray(compute, np.float64), self.steepness, self.midpoint
        )


@dataclass(frozen=True, slots=True)
class Forecast:
    """A fit to the first part of a curve, and how well it foretells the rest."""

    compute: Floats
    """Of every point, `[n]`, rising."""
    values: Floats
    fitted: int
    """How many points, from the first on, the forecast was fitted to."""
    curve: Sigmoid
    """Fitted to these."""
    whole: Sigmoid
    """Fitted to all points, for comparison."""

    @property
    def errors(self) -> tuple[float, float]:
        """The root mean square error on the points that were fitted to, and on the rest."""
        off = (self.curve.at(self.compute) - self.values) ** 2
        return float(np.sqrt(off[: self.fitted].mean())), float(np.sqrt(off[self.fitted :].mean()))

    @property
    def flat_error(self) -> float:
        """What the mean of the fitted points would have been off by on the rest."""
        return float(np.sqrt(((self.values[self.fitted :] - self.values[: self.fitted].mean()) ** 2).mean()))


def fit_sigmoid(
    compute: Sequence[float] | Floats, values: Sequence[float] | Floats, start: float | None = None
) -> Sigmoid:
    """Fit the curve to points, with 0 <= R_0 <= A <= 1 if they lie in that range, as success does.

    Args:
        compute: of each point, positive.
        values: what was measured there.
        start: R_0, if it was measured; None fits it, too.

    Raises:
        ConfigError: if there are fewer than `FEWEST` points, or compute is not positive.
    """
    c, r = np.asarray(compute, np.float64), np.asarray(values, np.float64)
    if len(c) != len(r) or len(c) < FEWEST or not (c > 0).all():
        raise ConfigError(f"a fit needs {FEWEST} points with positive compute, not {len(c)}: train for more steps")
    shares = bool((r >= 0).all() and (r <= 1).all()) and (start is None or 0 <= start <= 1)
    b_range = np.log(_STEEPNESS)
    m_range = np.log([c.min() / _BEYOND, c.max() * _BEYOND])
    best: tuple[float, float, float, float, float] | None = None
    for _ in range(_ROUNDS):
        steeps, mids = (np.exp(np.linspace(span[0], span[1], _SIZE)) for span in (b_range, m_range))
        x = _rise(c, steeps[:, None, None], mids[None, :, None])
        low, top = _lines(x, r, start, shares)
        loss = ((low[..., None] + (top - low)[..., None] * x - r) ** 2).sum(-1)
        i, j = np.unravel_index(int(loss.argmin()), loss.shape)
        if best is None or loss[i, j] < best[0]:
            best = float(loss[i, j]), float(low[i, j]), float(top[i, j]), float(steeps[i]), float(mids[j])
        b_range, m_range = (
            _closer(span, np.log(at), low_high)
            for span, at, low_high in ((b_range, best[3], np.log(_STEEPNESS)), (m_range, best[4], None))
        )
    assert best is not None
    return Sigmoid(*best[1:])


def forecast(
    compute: Sequence[float], values: Sequence[float], start: float | None = None, share: float = 0.25
) -> Forecast:
    """Fit to the first `share` of the compute, and to all; at least `FEWEST` points are fitted to.

    `start` is R_0, as of `fit_sigmoid`.

    Raises:
        ConfigError: if there are too few points for a fit and a rest.
    """
    c, r = np.asarray(compute, np.float64), np.asarray(values, np.float64)
    fitted = max(FEWEST, int((c <= share * c.max()).sum())) if len(c) else FEWEST
    if len(c) <= fitted:
        raise ConfigError(
            f"a fit to the first {fitted} points leaves nothing of {len(c)} to compare: train for more steps"
        )
    return Forecast(c, r, fitted, fit_sigmoid(c[:fitted], r[:fitted], start), fit_sigmoid(c, r, start))


def _rise(compute: Floats, steepness: float | Floats, midpoint: float | Floats) -> Floats:
    return 1.0 / (1.0 + (midpoint / compute) ** steepness)


def _lines(x: Floats, r: Floats, known: float | None, shares: bool) -> tuple[Floats, Floats]:
    """Return R_0 and A of the least squares for each grid point, `[..., n]` to `[...]`; A not below R_0."""
    if known is None:
        mean_x, mean_r = x.mean(-1), r.mean()
        spread = ((x - mean_x[..., None]) ** 2).sum(-1)
        slope = ((x - mean_x[..., None]) * (r - mean_r)).sum(-1) / np.maximum(spread, 1e-12)
        slope = np.maximum(slope, 0.0)
        start = mean_r - slope * mean_x
        if not shares:
            return start, start + slope
        start = np.clip(start, 0.0, 1.0)
    else:
        start = np.full(x.shape[:-1], known)
    slope = ((r - start[..., None]) * x).sum(-1) / np.maximum((x**2).sum(-1), 1e-12)  # the best, given R_0
    return start, np.clip(start + np.maximum(slope, 0.0), start, 1.0 if shares else np.inf)


def _closer(span: Floats, at: float, bounds: Floats | None) -> Floats:
    """Return a range around the best point, a fifth as wide."""
    half = (span[1] - span[0]) / 10
    found = np.array([at - half, at + half])
    return found if bounds is None else np.clip(found, *bounds)
