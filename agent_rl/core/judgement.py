"""Judgement: what a judge says of one episode under one rubric, criterion by criterion."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from agent_rl.core.usage import Usage


class JudgeFault(StrEnum):
    """Why a criterion has no verdict: a failed judge is not a grade."""

    SERVER = "server"
    """No attempt was answered: a status, a lost connection."""
    TIMEOUT = "timeout"
    REFUSED = "refused"
    """The model declined to judge."""
    TRUNCATED = "truncated"
    """The reply hit its limit."""
    MALFORMED = "malformed"
    """No JSON object with verdicts."""
    MISSING = "missing"
    """The reply has no verdict under the criterion's id."""
    DOUBLED = "doubled"
    """The reply has several."""
    UNKNOWN = "unknown"
    """The reply has a verdict under an id that was not asked for, so that none of its verdicts counts."""
    OFF_MENU = "off_menu"
    """The choice is none of the criterion's."""
    UNQUOTED = "unquoted"
    """The evidence is not in the text that was shown."""
    PLANTED = "planted"
    """The judge found met what is known to be false, so that none of its verdicts counts."""
    DISAGREED = "disagreed"
    """Samples, or judges, are divided evenly."""
    COST = "cost"
    """The limit of cost was reached."""
    TOO_LONG = "too_long"
    """The request is longer than the model's context, or what is to be compared takes more than one may have."""
    RULE = "rule"
    """A rule can't be applied, such as one that names what the task lacks."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """A judge's answer to one criterion."""

    criterion: str
    choice: str | None = None
    """One of the criterion's choices; None if there is no verdict, or it is not applicable."""
    value: float | None = None
    """The choice between worst, 0, and best, 1; None as `choice` is."""
    reason: str = ""
    evidence: str = ""
    """A quotation of what was judged."""
    is_applicable: bool = True
    error: JudgeFault | None = None
    detail: str = ""
    """What the error was, in words."""
    votes: Mapping[str, int] = field(default_factory=dict)
    """How often each choice was given, where several samples or judges were asked."""


@dataclass(frozen=True, slots=True)
class Judgement:
    """Everything that one judge said of one episode under one rubric."""

    rubric: str
    """"name@version#digest": see `Rubric.label`."""
    judge: str
    verdicts: tuple[Verdict, ...]
    score: float | None
    """None where a weighted or gating criterion has no verdict; never 0 for it."""
    episode: str = ""
    """The episode's id."""
    suspect: tuple[str, ...] = ()
    """What in the judged text addresses the judge, or looks like its reply."""
    usage: tuple[Usage, ...] = ()
    """Of each call that was made; a call that the log held costs nothing and is not here."""
    seconds: float = 0.0

    @property
    def faults(self) -> tuple[JudgeFault, ...]:
        """Why criteria have no verdict."""
        return tuple(v.error for v in self.verdicts if v.error is not None)
