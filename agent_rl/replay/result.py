"""What a verification found: of one thing, of an episode, of a file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from agent_rl.core.sequences import shared_start

AROUND = 24
"""Characters of a text that are shown on either side of its first difference."""


class Status(StrEnum):
    """What is known of something that was played again."""

    SAME = "same"
    DIFFERS = "differs"
    UNVERIFIED = "unverified"


@dataclass(frozen=True, slots=True)
class Result:
    """The same, or the first difference, or why nothing is known."""

    status: Status = Status.SAME
    field: str = ""
    """What differs, such as "observation[0].content"."""
    position: int | None = None
    """Of the first difference: in a text in characters, in token ids in tokens."""
    recorded: str = ""
    replayed: str = ""
    why: str = ""
    """Why it is unverified."""
    turn: int | None = None
    """Of token ids: the turn of the first difference."""

    def __str__(self) -> str:
        if self.status is not Status.DIFFERS:
            return f"{self.status} ({self.why})" if self.why else str(self.status)
        at = "" if self.position is None else f" at {self.position}"
        return f"{self.field} differs{at}: recorded {self.recorded}, replayed {self.replayed}"


SAME = Result()


def unverified(why: str) -> Result:
    """Return that nothing is known, and why, in one line."""
    return Result(Status.UNVERIFIED, why=" ".join(why.split())[:500])


def differs(name: str, recorded: object, replayed: object) -> Result:
    """Return the difference of two values; of texts, what is around its first character."""
    if not (isinstance(recorded, str) and isinstance(replayed, str)):
        return Result(Status.DIFFERS, name, None, _brief(recorded), _brief(replayed))
    at = shared_start(recorded, replayed)
    return Result(Status.DIFFERS, name, at, _around(recorded, at), _around(replayed, at))


def compare(name: str, recorded: object, replayed: object) -> Result:
    """Return whether two values are the same."""
    return SAME if recorded == replayed else differs(name, recorded, replayed)


def first(results: Iterator[Result] | Sequence[Result]) -> Result:
    """Return the first difference, else the first that is unverified, else that all is the same."""
    found = [result for result in results if result.status is not Status.SAME]
    return next((r for r in found if r.status is Status.DIFFERS), found[0] if found else SAME)


def _around(text: str, at: int) -> str:
    start, stop = max(0, at - AROUND), at + AROUND
    return f"{'…' if start else ''}{text[start:stop]!r}{'…' if stop < len(text) else ''}"


def _brief(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:199]}…"


@dataclass(frozen=True, slots=True)
class VerifiedEpisode:
    """An episode beside its replay."""

    id: str
    env: str
    opening: Result
    turns: tuple[Result, ...] = ()
    rewards: Result = SAME
    ending: Result = SAME
    tokens: Result | None = None
    """Whether its token ids follow from its messages; None where it has none."""
    sampled: int = 0
    """Replies whose sampled ids were encoded again."""
    drifted: tuple[int, ...] = ()
    """The turns of those that came out as other ids."""

    @property
    def parts(self) -> dict[str, Result]:
        """What was compared, by its name for people, in the order of the episode."""
        turns = {f"turn {number}": result for number, result in enumerate(self.turns)}
        return {"opening": self.opening, **turns, "rewards": self.rewards, "ending": self.ending}

    @property
    def status(self) -> Status:
        """Same, if all that its environment said, gave and ended by is, and no token id contradicts its messages."""
        if self.tokens is not None and self.tokens.status is Status.DIFFERS:
            return Status.DIFFERS
        return first([*self.parts.values()]).status

    @property
    def problem(self) -> tuple[str, Result]:
        """Where the first difference is, else the first that is unverified; and what it is."""
        parts = self.parts
        if self.tokens is not None:
            where = "tokens" if self.tokens.turn is None else f"turn {self.tokens.turn}"
            parts[f"{where}, tokens"] = self.tokens
        found = first([*parts.values()])
        return next(name for name, result in parts.items() if result is found or result == found), found


@dataclass(slots=True)
class Verification:
    """A file beside its replay."""

    mode: str
    counts: Counter[Status] = field(default_factory=Counter)
    """Episodes."""
    turns: Counter[Status] = field(default_factory=Counter)
    tokens: Counter[Status] = field(default_factory=Counter)
    """Episodes with token ids: whether these follow from the messages."""
    sampled: int = 0
    """Replies whose sampled ids were encoded again."""
    drifted: int = 0
    """Those that came out as other ids."""
    drifted_episodes: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    """Why episodes, or their token ids, are unverified."""
    found: list[VerifiedEpisode] = field(default_factory=list)
    """The episodes that are not the same."""

    def add(self, episode: VerifiedEpisode) -> None:
        """Count an episode."""
        self.counts[episode.status] += 1
        self.turns.update(result.status for result in episode.turns)
        self.sampled += episode.sampled
        self.drifted += len(episode.drifted)
        self.drifted_episodes += bool(episode.drifted)
        if episode.tokens is not None:
            self.tokens[episode.tokens.status] += 1
            if episode.tokens.status is Status.UNVERIFIED:
                self.reasons[f"token ids: {episode.tokens.why}"] += 1
        if episode.status is Status.UNVERIFIED:
            self.reasons[first([*episode.parts.values()]).why] += 1
        if episode.status is not Status.SAME:
            self.found.append(episode)

    @property
    def exit_code(self) -> int:
        """0 if nothing differs, 1 if something does, 2 if nothing could be verified."""
        if self.counts[Status.DIFFERS]:
            return 1
        return 0 if self.counts[Status.SAME] else 2
