"""Panel: several judges as one, and how far they disagree."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Literal, TypeAlias

import numpy as np

from agent_rl.concurrency import run_together
from agent_rl.core.episode import Episode
from agent_rl.core.judgement import JudgeFault, Judgement, Verdict
from agent_rl.errors import ConfigError
from agent_rl.judge.base import Judge
from agent_rl.judge.reply import majority
from agent_rl.judge.rubric import NOT_APPLICABLE, Criterion, Rubric
from agent_rl.judge.score import score

PanelRule: TypeAlias = Literal["majority", "mean"]


class Panel:
    """Several judges as one.

    By majority, a criterion's verdict is the choice that most members gave. A member that fails might have said
    anything: what no answer of it could have turned is decided without it, the rest is unscored, and so is a tie. By
    mean, the value is the mean of all members' values, and one member that fails leaves the criterion unscored.
    """

    def __init__(self, judges: Sequence[Judge], rule: PanelRule = "majority") -> None:
        """Keep the members; `close` closes them.

        Raises:
            ConfigError: if there is none, no such rule, or members share a log of calls, which takes one judge.
        """
        if not judges:
            raise ConfigError("Panel(judges=[]) has no member: give two or more judges")
        if rule not in ("majority", "mean"):
            raise ConfigError(f"Panel(rule={rule!r}): give 'majority' or 'mean'")
        of_log: dict[Path, Judge] = {}
        for judge in _members(judges):
            log: Path | None = getattr(judge, "log", None)
            if log is not None and of_log.setdefault(log.resolve(), judge) is not judge:
                raise ConfigError(
                    f"Panel: two members have the log {log}, which takes one: give each a file of its own"
                )
        self.judges, self.rule = tuple(judges), rule
        self.name = f"{rule} of {', '.join(judge.name for judge in judges)}"

    async def judge(self, episode: Episode, rubric: Rubric) -> Judgement:
        """Return the members' judgement of an episode; `votes` of its verdicts are their choices."""
        members = await run_together([partial(judge.judge, episode, rubric) for judge in self.judges])
        verdicts = tuple(self._decide(criterion, members) for criterion in rubric.criteria)
        return Judgement(
            rubric.label,
            self.name,
            verdicts,
            score(rubric, verdicts),
            episode.id,
            tuple(dict.fromkeys(found for member in members for found in member.suspect)),
            tuple(usage for member in members for usage in member.usage),
            max(member.seconds for member in members),
        )

    def close(self) -> None:
        """Close all members."""
        for judge in self.judges:
            judge.close()

    def _decide(self, criterion: Criterion, members: Sequence[Judgement]) -> Verdict:
        missing = Verdict(criterion.id, error=JudgeFault.MISSING, detail="a judge of the panel has no verdict")
        found = [next((v for v in m.verdicts if v.criterion == criterion.id), missing) for m in members]
        if self.rule == "majority":
            return majority(criterion, found)
        votes = dict(Counter(v.choice or NOT_APPLICABLE for v in found if v.error is None))
        if (failed := next((v for v in found if v.error is not None), None)) is not None:
            return replace(failed, votes=votes)
        values = [v.value for v in found if v.value is not None]
        if 2 * len(values) < len(found):
            return Verdict(criterion.id, is_applicable=False, votes=votes)
        if 2 * len(values) == len(found):
            detail = "half of the judges say that it does not apply"
            return Verdict(criterion.id, error=JudgeFault.DISAGREED, detail=detail, votes=votes)
        value = float(np.mean(values))
        nearest = min(criterion.choices, key=lambda choice: abs(criterion.value_of(choice) - value))
        reasons = "; ".join(f"{m.judge}: {v.reason}" for m, v in zip(members, found, strict=True) if v.reason)
        evidence = next((v.evidence for v in found if v.evidence), "")
        return Verdict(criterion.id, nearest, value, reasons, evidence, votes=votes)


def _members(judges: Iterable[Judge]) -> Iterator[Judge]:
    """Yield those that judge, also of panels in a panel."""
    for judge in judges:
        yield from _members(judge.judges) if isinstance(judge, Panel) else [judge]


def disagreement(judgements: Iterable[Judgement]) -> float:
    """Return the share of votes that are not their criterion's most frequent one; NaN without votes."""
    votes = [verdict.votes for judgement in judgements for verdict in judgement.verdicts if verdict.votes]
    total = sum(sum(each.values()) for each in votes)
    return 1 - sum(max(each.values()) for each in votes) / total if total else np.nan
