"""The report of a check: findings, the floor table, and what was not checked."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from agent_rl.core.display import from_here
from agent_rl.core.messages import JSON, without_nan
from agent_rl.rollout.evaluation import Rate


@dataclass(frozen=True, slots=True)
class Finding:
    """A defect of an environment."""

    check: str
    """The name of the check, such as `isolation`."""
    problem: str
    where: str
    """The class, the method, and its file and line."""
    remedy: str

    def __str__(self) -> str:
        return f"{self.check}: {self.problem}\n  at {self.where}\n  {self.remedy}"


@dataclass(frozen=True, slots=True)
class Score:
    """What a policy scores on some tasks."""

    policy: str
    split: str
    success: Rate
    reward: float
    """Mean over the scored episodes; NaN if none was."""
    failed: int

    def __str__(self) -> str:
        """The success rate, or the mean reward where success is not known."""
        if not self.success.n:
            return "not scored" if math.isnan(self.reward) else f"reward {self.reward:.3g}"
        return self.success.share


@dataclass(frozen=True, slots=True)
class CheckReport:
    """What `check` found."""

    env: str
    tasks: int
    """How many of each split were played, at most."""
    seed: int
    findings: tuple[Finding, ...]
    scores: tuple[Score, ...]
    """Of the oracle and of policies without skill, by split: the floor table."""
    microseconds_per_turn: float
    """CPU time of the environment with its scoring and the loop around it, without a model; NaN if nothing ran."""
    skipped: Mapping[str, str]
    """What was not checked, with the reason."""

    @property
    def ok(self) -> bool:
        """Whether there is no finding."""
        return not self.findings

    def score(self, policy: str, split: str) -> Score:
        """Return what a policy scores on a split."""
        return next(s for s in self.scores if (s.policy, s.split) == (policy, split))

    def to_json(self) -> dict[str, JSON]:
        """Return the report as JSON holds it; a number that is not known is None."""
        plain = asdict(self) | {"ok": self.ok}
        for score, row in zip(self.scores, plain["scores"], strict=True):
            row |= {"success": score.success.value, "n": score.success.n}
        known: dict[str, JSON] = without_nan(plain)  # type: ignore[assignment]
        return known


def place(cls: type, name: str = "") -> str:
    """Return a class or one of its members with its file and line, for people.

    Args:
        cls: the class.
        name: of the member; the class alone if left out or not found.
    """
    member = inspect.getattr_static(cls, name, None) if name else cls
    title = f"{cls.__name__}.{name}" if name and member is not None else cls.__name__
    return f"{title}{line_of(cls if member is None else member)}"


def line_of(part: object) -> str:
    """Return the file and line of a function, tool or class, in brackets; empty if it has none."""
    function = inspect.unwrap(getattr(part, "function", part))  # type: ignore[arg-type]  # a tool has one
    function = getattr(function, "fget", None) or function
    try:
        file, (_, line) = inspect.getsourcefile(function), inspect.getsourcelines(function)
    except (OSError, TypeError):
        return ""
    return f" ({from_here(file)}:{line})" if file else ""
