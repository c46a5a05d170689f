"""`agent-rl stats RUN --fit`: a run's curve over compute, and what its first quarter foretells."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from agent_rl.backends.settings import backend_of, schema_of
from agent_rl.errors import ConfigError, did_you_mean
from agent_rl.runs.folder import METRICS, read_config
from agent_rl.runs.metrics import read_metrics
from agent_rl.stats.scaling import Forecast, Sigmoid, forecast
from agent_rl.store.shards import episode_file


def print_fit(arguments: argparse.Namespace) -> int:
    """Print the fit of a metric; write its picture if asked to.

    Raises:
        ConfigError: if the run has no such metric, or too few points.
        CheckpointError: if it is no run's folder.
    """
    folder = Path(episode_file(arguments.first)).parent
    compute, values, start = curve_of(folder, arguments.fit)
    found = forecast(compute, values, start)
    if arguments.json:
        print(json.dumps(_table(arguments.fit, found)))
    else:
        print("\n".join(_lines(arguments.fit, found, start)))
    if arguments.svg is not None:
        from agent_rl.view.curve import forecast_svg

        Path(arguments.svg).write_text(forecast_svg(found, arguments.fit), encoding="utf-8")
        if not arguments.json:
            print(f"picture: {arguments.svg}")
    return 0


def curve_of(folder: Path, metric: str) -> tuple[list[float], list[float], float | None]:
    """Return a run's compute, in sampled training episodes, a metric's values there, and its value before the first.

    A value of step n belongs to the weights after n batches of `rollout.groups * rollout.samples` episodes; that of the
    rollouts of step n, to the weights before its update. What was measured before the first update is the start; None
    if nothing was.

    Raises:
        ConfigError: if there is no such metric.
    """
    config = read_config(folder, schema_of(backend_of(folder)))
    batch = config.rollout.groups * config.rollout.samples
    series: dict[str, dict[int, float]] = {}
    for name, step, value in _metrics(folder):
        series.setdefault(name, {})[step] = value
    if metric not in series:
        raise ConfigError(
            f"{folder} has no metric '{metric}'.{did_you_mean(metric, series)} --fit takes a name, such as "
            f"{', '.join(name for name in series if name.endswith('success')) or 'rollout/reward'}"
        )
    before = metric.startswith("rollout/")
    points = dict(sorted((batch * (step - before), value) for step, value in series[metric].items() if step >= before))
    start = points.pop(0, None)
    return [float(compute) for compute in points], list(points.values()), start


def _metrics(folder: Path) -> Iterator[tuple[str, int, float]]:
    """Yield the name, step and value of every number; names outside training have their row's kind before them."""
    for row in read_metrics(folder / METRICS):
        group = "/".join(str(row[key]) for key in ("kind", "split", "sampling") if key in row)
        for name, value in row.items():
            if isinstance(value, int | float) and name != "step":
                yield name if row["kind"] == "train" else f"{group}/{name}", int(str(row["step"])), float(value)


def _lines(metric: str, found: Forecast, start: float | None) -> Iterator[str]:
    n, most = len(found.compute), found.compute[-1]
    yield f"{metric} over compute, in sampled training episodes: {n} points, up to {most:,.0f}"
    yield "R(C) = R0 + (A - R0) / (1 + (C_mid / C)^B)   (ScaleRL, arXiv:2510.13786, eq. 1)"
    yield f"  R0 was {'fitted, too' if start is None else f'measured before the first update: {start:.3f}'}"
    share = found.compute[found.fitted - 1] / most
    yield f"  fitted to the first {found.fitted} points, {share:.0%} of the compute:  {_said(found.curve)}"
    yield f"  fitted to all of them:  {_said(found.whole)}"
    own, rest = found.errors
    yield (
        f"  the first fit foretells the other {n - found.fitted} points with a root mean square error of {rest:.3f} "
        f"({own:.3f} on its own points; their mean would be off by {found.flat_error:.3f})"
    )
    foretold, last = float(found.curve.at(most)), float(found.whole.at(most))
    yield f"  at the end: foretold {foretold:.3f}, fitted {last:.3f}"


def _said(curve: Sigmoid) -> str:
    return f"R0 {curve.start:.3f}, A {curve.asymptote:.3f}, B {curve.steepness:.2f}, C_mid {curve.midpoint:,.0f}"


def _table(metric: str, found: Forecast) -> dict[str, object]:
    own, rest = found.errors
    return {
        "metric": metric,
        "compute": "sampled training episodes",
        "points": [[float(c), float(r)] for c, r in zip(found.compute, found.values, strict=True)],
        "fitted": found.fitted,
        "curve": asdict(found.curve),
        "whole": asdict(found.whole),
        "rms_error_fitted": own,
        "rms_error_rest": rest,
        "rms_error_flat": found.flat_error,
    }
