"""What went wrong: the first departure of each failed episode from a successful one of its task.

An episode is compared with successful ones of its group, and if there is none, of its task in other groups; of those,
with the one that it agrees with longest. Where no episode of a run succeeds, as under graded rewards, a task's best
ones stand for them, and its worse half is compared.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

from agent_rl.core.episode import Episode, Outcome
from agent_rl.gym.tasks import task_key
from agent_rl.stats.paths import Move, Path, agreed, departs_at, path_of, phrase

MOST = 300_000
"""Different attempts that are kept, of about 1 kB; episodes beyond are counted as left out."""
OTHERS = 50
"""Successful attempts of a task's other groups that an episode is compared with."""


@dataclass(frozen=True, slots=True)
class Departure:
    """Where one episode departs from a successful one."""

    episode: str
    successful: str
    """The episode that it is compared with."""
    turn: int
    what: str
    """In words."""


@dataclass(slots=True)
class DepartureKind:
    """Episodes that depart in the same way."""

    what: str
    episodes: int = 0
    tasks: set[str] = field(default_factory=set)
    turns: Counter[int] = field(default_factory=Counter)
    """How many depart at each turn."""
    last_step: int | None = None
    """The last training step with one."""
    example: Departure | None = None
    """The newest."""

    def add(self, departure: Departure, task: str, count: int, step: int | None) -> None:
        """Count episodes that depart like this one."""
        self.episodes += count
        self.tasks.add(task)
        self.turns[departure.turn] += count
        self.last_step = max((s for s in (self.last_step, step) if s is not None), default=None)
        self.example = departure


@dataclass(frozen=True, slots=True)
class Departures:
    """What went wrong in a set of episodes."""

    failed: int
    """Episodes of known success without it, and those that an infrastructure failure took."""
    unknown: int
    """Episodes of which it is not known whether they succeeded."""
    kinds: Sequence[DepartureKind]
    """The most frequent first."""
    unsolved: Mapping[str, int]
    """How the episodes ended whose task no episode solved."""
    unsolved_tasks: int
    unsolved_example: str | None
    """The newest of these episodes."""
    left_out: int
    """Failed episodes beyond `MOST`, which are not compared."""
    by_reward: bool
    """Whether no episode succeeded, so that the best of each task stand for successful ones."""

    @property
    def compared(self) -> int:
        """How many failed episodes are compared with a successful one."""
        return sum(kind.episodes for kind in self.kinds)


@dataclass(slots=True)
class _Attempt:
    """Episodes of one group with the same path and reward."""

    episode: str
    group: str
    path: Path
    is_success: bool
    reward: float
    stop: str
    step: int | None = None
    count: int = 0
    last: int = 0
    """When the newest of them was added."""


class DepartureFinder:
    """Takes episodes one at a time; `find` compares them."""

    def __init__(self) -> None:
        self._tasks: dict[str, dict[object, _Attempt]] = defaultdict(dict)
        self._moves: dict[tuple[Move, ...], tuple[Move, ...]] = {}
        self._kept = self._added = self._failed = self._unknown = self._left_out = 0

    def add(self, episode: Episode) -> None:
        """Take an episode; one whose success is unknown is left out."""
        is_failure = episode.outcome is Outcome.FAILED
        if episode.success is None and not is_failure:
            self._unknown += 1
            return
        is_success = bool(episode.success)
        self._added += 1
        self._failed += not is_success
        found = path_of(episode)
        path = found._replace(moves=self._moves.setdefault(found.moves, found.moves))
        reward = float("-inf") if is_failure or episode.reward is None else episode.reward
        attempts = self._tasks[task_of(episode)]
        key = (episode.group_id, path, is_success, reward)
        if key not in attempts:
            if self._kept >= MOST:
                self._left_out += not is_success
                return
            self._kept += 1
            stop = str(episode.ending if is_failure else episode.stop_reason)
            step = episode.origin.step
            attempts[key] = _Attempt(episode.id, episode.group_id, path, is_success, reward, stop, step)
        attempt = attempts[key]
        attempt.episode, attempt.count, attempt.last = episode.id, attempt.count + 1, self._added

    def add_successful(self, episodes: Iterable[Episode]) -> None:
        """Take successful episodes to compare with, of the tasks that failed ones have."""
        for episode in episodes:
            if episode.success and task_of(episode) in self._tasks:
                self.add(episode)

    @property
    def has_failures_only(self) -> bool:
        """Whether there are failed episodes and no successful one."""
        return 0 < self._failed == self._added

    def find(self) -> Departures:
        """Return where the failed ones depart."""
        tasks = {key: list(attempts.values()) for key, attempts in self._tasks.items()}
        by_reward = not any(attempt.is_success for attempts in tasks.values() for attempt in attempts)
        kinds: dict[str, DepartureKind] = {}
        unsolved: list[_Attempt] = []
        unsolved_tasks = 0
        found: list[tuple[_Attempt, str, Departure]] = []
        for task, attempts in tasks.items():
            good, bad = _by_reward(attempts) if by_reward else _by_success(attempts)
            if good:
                found += ((attempt, task, _departure(attempt, good)) for attempt in bad)
            else:
                unsolved_tasks += 1
                unsolved += bad
        for attempt, task, departure in sorted(found, key=lambda each: each[0].last):
            kind = kinds.setdefault(departure.what, DepartureKind(departure.what))
            kind.add(departure, task, attempt.count, attempt.step)
        ends: Counter[str] = Counter()
        for attempt in unsolved:
            ends[attempt.stop] += attempt.count
        return Departures(
            failed=self._failed,
            unknown=self._unknown,
            kinds=sorted(kinds.values(), key=lambda kind: -kind.episodes),
            unsolved=dict(ends.most_common()),
            unsolved_tasks=unsolved_tasks,
            unsolved_example=max(unsolved, key=lambda each: each.last).episode if unsolved else None,
            left_out=self._left_out,
            by_reward=by_reward,
        )


def task_of(episode: Episode) -> str:
    """Return a key of an episode's task: environments may have equal ones."""
    return f"{task_key(episode.task)} {episode.env}"


def find_departures(episodes: Iterable[Episode]) -> Departures:
    """Return where the failed ones of some episodes depart from successful ones."""
    finder = DepartureFinder()
    for episode in episodes:
        finder.add(episode)
    return finder.find()


def _by_success(attempts: Sequence[_Attempt]) -> tuple[list[_Attempt], list[_Attempt]]:
    return [a for a in attempts if a.is_success], [a for a in attempts if not a.is_success]


def _by_reward(attempts: Sequence[_Attempt]) -> tuple[list[_Attempt], list[_Attempt]]:
    """Return a task's best attempts, and those that are nearer to its worst; none where all are alike."""
    scored = [a.reward for a in attempts if a.reward != float("-inf")]
    best, worst = max(scored, default=0.0), min(scored, default=0.0)
    if best == worst:
        return [], list(attempts)
    return [a for a in attempts if a.reward == best], [a for a in attempts if a.reward < (best + worst) / 2]


def _departure(attempt: _Attempt, successful: Sequence[_Attempt]) -> Departure:
    own_group = [other for other in successful if other.group == attempt.group]
    ranked = [(agreed(attempt.path, other.path), other) for other in own_group or islice(reversed(successful), OTHERS)]
    longest = max(length for length, _ in ranked)
    nearest = [other for length, other in ranked if length == longest]
    ways = Counter(_at(other.path, longest) for other in nearest)
    usual = ways.most_common(1)[0][0]
    other = next(each for each in nearest if _at(each.path, longest) == usual)
    at = departs_at(attempt.path, other.path)
    turn = attempt.path.moves[-1 if at is None else at].turn
    return Departure(attempt.episode, other.episode, turn, phrase(attempt.path, other.path, at))


def _at(path: Path, index: int) -> object:
    return path.moves[index] if index < len(path.moves) else None
