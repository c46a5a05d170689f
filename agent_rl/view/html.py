"""A report of one training run as a single HTML page that needs nothing else and loads nothing."""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import zip_longest
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from agent_rl.core.episode import Episode
from agent_rl.core.turns import opening_question, turns
from agent_rl.rollout.evaluation import Rate
from agent_rl.view.conversation import call_arguments, clean, folded


@dataclass(frozen=True, slots=True)
class Comparison:
    """One row of the evaluation table: the same tasks before and after training."""

    name: str
    before: Rate
    after: Rate

    @property
    def gain(self) -> float:
        """How much the rate rose."""
        return self.after.value - self.before.value

    @property
    def apart(self) -> bool:
        """Whether the two intervals don't overlap."""
        (low, high), (new_low, new_high) = self.before.interval, self.after.interval
        return new_low > high or new_high < low


@dataclass(frozen=True, slots=True)
class Pair:
    """Two attempts at one task, before and after training; one may be missing."""

    question: str
    before: Episode | None
    after: Episode | None


def write_report(
    path: str | os.PathLike[str],
    *,
    title: str,
    summary: Mapping[str, str | float],
    curve_svg: str,
    narrow_curve_svg: str = "",
    facts: Sequence[tuple[str, str]],
    comparisons: Sequence[Comparison],
    before: Sequence[Episode] = (),
    after: Sequence[Episode] = (),
) -> Path:
    """Write the report and return its path.

    Args:
        path: the file to write; its directory is made where it is missing.
        title: the page's heading.
        summary: the few numbers to show large, by label; floats are shown with three digits, strings as they are.
        curve_svg: the learning curve, as `learning_curve_svg` gives it. It is put in as it is: don't pass a stranger's.
        narrow_curve_svg: the same for a phone, shown in its place where the page is narrow.
        facts: (name, value) rows about the run: model, seed, versions, hardware.
        comparisons: the evaluation table.
        before: episodes of the untrained policy, to be shown beside those of the same tasks in `after`.
        after: episodes of the trained policy.

    Raises:
        ValueError: if `curve_svg` is not an `<svg>` element.
    """
    if not curve_svg.startswith("<svg"):
        raise ValueError(f"curve_svg must be an <svg> element without an XML header, not {curve_svg[:40]!r}")
    template, pairs = templates().get_template("report.html.j2"), pair_by_task(before, after)
    curves = {"curve": Markup(curve_svg), "narrow_curve": Markup(narrow_curve_svg)}
    page = {"title": title, "summary": summary, "facts": facts, "comparisons": comparisons, "pairs": pairs}
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(template.render(page | curves), encoding="utf-8")
    return path


def pair_by_task(before: Sequence[Episode], after: Sequence[Episode]) -> list[Pair]:
    """Put episodes of the same task side by side, in the order in which the tasks first come up."""
    attempts: dict[str, tuple[list[Episode], list[Episode]]] = defaultdict(lambda: ([], []))
    for side, episodes in enumerate((before, after)):
        for episode in episodes:
            attempts[json.dumps(episode.task, sort_keys=True, default=str)][side].append(episode)
    return [
        Pair(opening_question((olds + news)[0]), *both)
        for olds, news in attempts.values()
        for both in zip_longest(olds, news)
    ]


@lru_cache(maxsize=2)
def templates(finalize: Callable[[object], object] | None = None) -> Environment:
    """Return the environment of the pages' templates; `finalize` is for each printed value, before it is escaped.

    Jinja compiles a template once for each environment, in 0.15 s.
    """
    loader = FileSystemLoader(Path(__file__).parent)
    found = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    found.finalize = finalize or visible
    found.filters |= {"percent": lambda rate: f"{100 * rate:.1f}%", "arguments": call_arguments}
    found.filters["picture"] = lambda image: Markup(image.url)  # base64 alone, and never folded
    found.globals["turns"] = turns
    return found


def visible(value: object) -> object:
    """Return a printed value short enough to read, without what acts on the page; escaping comes after this."""
    if isinstance(value, Markup):
        return value
    if isinstance(value, float):
        return f"{value:.3g}"
    return clean(folded(value)) if isinstance(value, str) else value
