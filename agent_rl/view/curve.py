"""The learning curve as an SVG that follows the page's light or dark theme."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from html import escape
from typing import TYPE_CHECKING

import numpy as np

from agent_rl.rollout.evaluation import Rate

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from agent_rl.stats.scaling import Forecast

_INK = "#010203"  # stands for the page's own text colour, and becomes `currentColor` in the SVG
_TRAIN, _EVAL = "#8a94a6", "#3b82f6"  # readable on white and on near-black


def learning_curve_svg(
    train: Sequence[tuple[int, float]], evals: Sequence[tuple[int, Rate]], *, narrow: bool = False
) -> str:
    """Draw success over training steps; the same points give the same bytes.

    Args:
        train: (step, success rate of the training rollouts), drawn as a thin line.
        evals: (step, success rate on held-out tasks), drawn as points with bars over their intervals.
        narrow: whether it is for a phone; its elements have ids of their own, so that both fit one page.

    Returns:
        An `<svg>` element without an XML header. It takes text colour from the page.

    Raises:
        ImportError: if matplotlib is not installed; it comes with the extra `train`.
    """
    from matplotlib.ticker import MaxNLocator

    def draw(axes: Axes) -> None:
        if train:
            axes.plot(*zip(*train, strict=True), color=_TRAIN, linewidth=1, label="training rollouts")
        if evals:
            steps, rates = [step for step, _ in evals], [rate.value for _, rate in evals]
            below = [rate.value - rate.interval[0] for _, rate in evals]
            above = [rate.interval[1] - rate.value for _, rate in evals]
            axes.errorbar(
                steps, rates, yerr=(below, above), color=_EVAL, fmt="o-", markersize=5, linewidth=1.5, capsize=3,
                label="held-out tasks (95% interval)",
            )  # fmt: skip
        axes.set(xlabel="training step", ylabel="success rate", ylim=(-0.02, 1.02))
        axes.xaxis.set_major_locator(MaxNLocator(5 if narrow else "auto", integer=True, steps=[1, 2, 5, 10]))

    return _drawn(draw, _described(evals), narrow)


def forecast_svg(found: Forecast, metric: str) -> str:
    """Draw a metric over compute on a logarithmic axis, and the curves fitted to its first part and to all of it.

    Returns:
        An `<svg>` element, as of `learning_curve_svg`.

    Raises:
        ImportError: if matplotlib is not installed.
    """

    def draw(axes: Axes) -> None:
        n, grid = found.fitted, np.geomspace(found.compute[0], found.compute[-1], 200)
        axes.plot(found.compute[:n], found.values[:n], "o", color=_EVAL, markersize=4, label="fitted to")
        axes.plot(found.compute[n:], found.values[n:], "o", color=_TRAIN, markersize=4, label="held back")
        axes.plot(grid, found.curve.at(grid), color=_EVAL, linewidth=1.5, label="forecast")
        axes.plot(grid, found.whole.at(grid), color=_TRAIN, linewidth=1, linestyle="--", label="fit to all")
        axes.set(xlabel="sampled training episodes", ylabel=metric, xscale="log")

    return _drawn(draw, f"{metric} over compute, with a forecast from the first {found.fitted} points", narrow=False)


def _drawn(draw: Callable[[Axes], None], label: str, narrow: bool) -> str:
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    settings = {
        "svg.hashsalt": f"agent_rl {narrow}",
        "svg.fonttype": "none",
        "font.family": "sans-serif",
        "font.size": 11,
    }
    with rc_context(settings):
        figure = Figure(figsize=(4.2, 3.6) if narrow else (8, 3.6), layout="constrained")
        axes = figure.add_subplot()
        draw(axes)
        axes.grid(axis="y", color=_TRAIN, alpha=0.25, linewidth=0.8)
        axes.spines[["top", "right"]].set_visible(False)
        axes.spines[["left", "bottom"]].set_color(_INK)
        axes.tick_params(colors=_INK)
        axes.xaxis.label.set_color(_INK)
        axes.yaxis.label.set_color(_INK)
        if axes.get_legend_handles_labels()[0]:
            figure.legend(loc="outside upper left", ncols=1 if narrow else 2, frameon=False, labelcolor=_INK)
        drawn = io.StringIO()
        figure.savefig(drawn, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    svg = drawn.getvalue()
    svg = svg[svg.index("<svg") :].replace(_INK, "currentColor")
    return svg.replace("<svg ", f'<svg role="img" aria-label="{escape(label)}" ', 1)


def _described(evals: Sequence[tuple[int, Rate]]) -> str:
    if not evals:
        return "Learning curve"
    (first, before), (last, after) = evals[0], evals[-1]
    return f"Learning curve: held-out success {before.value:.0%} at step {first}, {after.value:.0%} at step {last}"
