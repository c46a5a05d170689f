"""Statistics of a run, in one pass over its episodes, and in memory that grows with its tasks only."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from agent_rl.core.episode import Episode, Reward
from agent_rl.core.messages import JSON, Message, ToolErrorKind
from agent_rl.core.trajectory import Source, Trajectory
from agent_rl.gym.tasks import task_values
from agent_rl.replay.drift import sampled_replies
from agent_rl.rollout.comparison import TAG_KEYS, TASK, Comparison, compare_means, require_key
from agent_rl.stats.departures import DepartureFinder, task_of
from agent_rl.stats.tally import Distribution, Spread, Sum, Tally

RoundTrip: TypeAlias = Callable[[Sequence[int]], Sequence[int]]
STEP = "step"
FIELDS = ("purpose", "split", "env", STEP, "ending")
"""What success can be split by, in addition to the keys of the tasks."""
DEFAULT = ("purpose", "env", STEP)
RANGES = 10
"""Ranges of steps in a table."""
COMPARED = ("turns", "tool calls", "tokens sampled", "tokens out (server)")
"""Sizes that two runs are compared by, task by task."""
UNKNOWN = "(unknown tools)"


@dataclass(slots=True)
class ToolUse:
    """The calls of one tool that were answered."""

    calls: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    """By class."""


@dataclass(slots=True)
class RewardComponent:
    """One component of the reward."""

    weight: float
    values: Sum = field(default_factory=Sum)
    unscored: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    """Why its method gave no value, by the error's class."""
    of_steps: Counter[str] = field(default_factory=Counter)
    """Of what steps earn: the episodes of each environment that earned some; one that earned none has no record."""


class Statistics:
    """What a run's episodes say together; `add` takes them one at a time."""

    def __init__(self, by: Sequence[str] = (), round_trip: RoundTrip | None = None) -> None:
        """Start with nothing.

        Args:
            by: what to split success by: of FIELDS, or keys of the tasks, as `KEY`, `task.KEY` or `meta.KEY` in an
                object; `DEFAULT` and the tasks' tags if left out.
            round_trip: from sampled ids to text and back, to count replies that come out as other ids; None to not.
        """
        self._round_trip = round_trip
        self.replies = self.drifted = 0
        """Replies that were encoded again, and those that came out as other ids."""
        self.keys = tuple(by) or (*DEFAULT, *TAG_KEYS)
        self._is_asked = bool(by)
        self._task_keys: set[str] = set()
        self.total = Tally()
        self._tallies: defaultdict[str, defaultdict[_Tag, Tally]] = defaultdict(lambda: defaultdict(Tally))
        self.endings: Counter[str] = Counter()
        self.stops: Counter[str] = Counter()
        self.failures: Counter[str] = Counter()
        """By stage and class."""
        self.tools: defaultdict[str, ToolUse] = defaultdict(ToolUse)
        self.malformed = 0
        """Calls that could not be parsed."""
        self.sizes: defaultdict[str, Distribution] = defaultdict(Distribution)
        """Of an episode: turns, calls, and tokens by source."""
        self.envs: set[str] = set()
        self.of_tasks: defaultdict[str, defaultdict[str, Sum]] = defaultdict(lambda: defaultdict(Sum))
        """Of sizes in `COMPARED`."""
        self.seconds = Distribution()
        self.parts: defaultdict[str, float] = defaultdict(float)
        """Seconds in all, by what they went to."""
        self.ages: Counter[int] = Counter()
        """Sampled tokens by the training step that they are for, less the version of their weights."""
        self.forks = 0
        self._rewards: dict[tuple[str, float], RewardComponent] = {}
        self._ended: Counter[str] = Counter()
        """Episodes of each environment that came to an end."""
        self.judgements = self.unscored_judgements = self.suspect = 0
        self.faults: Counter[str] = Counter()
        self.finder = DepartureFinder()

    def add(self, episode: Episode) -> None:
        """Count an episode."""
        task = task_of(episode)
        self.envs.add(episode.env)
        self.total.add(episode, task)
        values = task_values(episode.task)
        self._task_keys.update(values)
        for key in self.keys:
            for tag in _tags(episode, values, key):
                self._tallies[key][tag].add(episode, task)
        self.endings[episode.ending] += 1
        self.stops[episode.stop_reason] += 1
        if episode.error is not None:
            self.failures[f"{episode.error.where}: {episode.error.type}"] += 1
        self._add_calls(episode.played)
        self._add_sizes(episode, task)
        self._add_ages(episode)
        self._add_times(episode)
        self._add_drift(episode.trajectories)
        self._ended[episode.env] += episode.trainable
        for name, weight in dict.fromkeys((r.name, r.weight) for r in episode.rewards):
            self._add_rewards([r for r in episode.rewards if (r.name, r.weight) == (name, weight)], episode.env)
        for judgement in episode.judgements:
            self.judgements += 1
            self.unscored_judgements += judgement.score is None
            self.suspect += bool(judgement.suspect)
            self.faults.update(map(str, judgement.faults))
        self.finder.add(episode)

    def _add_calls(self, messages: Iterable[Message]) -> None:
        for message in messages:
            self.malformed += sum(call.error is not None for call in message.tool_calls)
            if message.role == "tool":
                is_unknown = message.tool_error in (ToolErrorKind.UNKNOWN_TOOL, ToolErrorKind.MALFORMED)
                use = self.tools[UNKNOWN if is_unknown or not message.name else message.name]
                use.calls += 1
                if message.tool_error is not None:
                    use.errors[message.tool_error] += 1

    def _add_sizes(self, episode: Episode, task: str) -> None:
        sizes = {"turns": episode.turns, "tool calls": episode.tool_calls}
        if episode.trajectories:
            tokens = _new_tokens(episode.trajectories)
            sizes["tokens sampled"] = tokens[Source.POLICY]
            sizes["tokens of the environment"] = tokens[Source.ENV]
            sizes["tokens of the prompt"] = tokens[Source.PROMPT]
            sizes["longest sequence"] = max(map(len, episode.trajectories))
            self.forks += sum(not t.is_delegated for t in episode.trajectories) - 1
        elif counted := [u for u in episode.usage if u.output_tokens is not None]:
            sizes["tokens out (server)"] = sum(u.output_tokens or 0 for u in counted)
            sizes["tokens in (server)"] = sum(u.input_tokens or 0 for u in counted)
        for name, size in sizes.items():
            self.sizes[name][size] += 1
            if name in COMPARED:
                self.of_tasks[name][task].add(size)

    def _add_ages(self, episode: Episode) -> None:
        if episode.origin.purpose != "train" or episode.origin.step is None:
            return
        for span in (span for trajectory in episode.trajectories for span in trajectory.spans):
            if span.policy_version is not None:
                self.ages[episode.origin.step - span.policy_version] += span.stop - span.start

    def _add_times(self, episode: Episode) -> None:
        self.seconds[float(f"{episode.seconds:.3g}")] += 1
        self.parts["episodes"] += episode.seconds
        self.parts["replies of a served model"] += sum(u.seconds for u in episode.usage)
        self.parts["waiting for a served model"] += sum(u.waited for u in episode.usage)
        self.parts["judges"] += sum(j.seconds for j in episode.judgements)

    def _add_drift(self, trajectories: Iterable[Trajectory]) -> None:
        if self._round_trip is not None:
            for _, ids in (reply for trajectory in trajectories for reply in sampled_replies(trajectory)):
                self.replies += 1
                self.drifted += [*self._round_trip(ids)] != ids

    def _add_rewards(self, earned: Sequence[Reward], env: str) -> None:
        """Count what an episode earned by one component, in several turns or at its end."""
        first = earned[0]
        component = self._rewards.setdefault((first.name, first.weight), RewardComponent(first.weight))
        if first.source == "step":
            component.of_steps[env] += 1
        values = [r.value for r in earned if r.value is not None and math.isfinite(r.value)]
        if len(values) == len(earned):
            component.values.add(sum(values))
        else:
            component.unscored += 1
            component.errors.update(r.error.partition(":")[0][:60] for r in earned if r.error)

    @property
    def rewards(self) -> dict[str, RewardComponent]:
        """The components by name, which has the weight behind it where several weights share one."""
        shared = Counter(name for name, _ in self._rewards)
        return {
            f"{name} (weight {weight})" if shared[name] > 1 else name: self._with_nothing(component)
            for (name, weight), component in self._rewards.items()
        }

    def _with_nothing(self, component: RewardComponent) -> RewardComponent:
        """Return a component with the episodes whose steps earned nothing by it: that is 0."""
        nothing = sum(self._ended[env] - n for env, n in component.of_steps.items())
        return replace(component, values=Sum(component.values.count + nothing, component.values.total))

    @property
    def tags(self) -> dict[str, dict[str, Tally]]:
        """The tallies of each key's values; a key with one value only is left out, unless it was asked for.

        Raises:
            ConfigError: if no task has a key that was asked for.
        """
        if self._is_asked and self.total.episodes:
            for key in self.keys:
                require_key(f"--by {key}", key, sorted(self._task_keys), FIELDS)
        found = {key: dict(_named(key, tallies)) for key, tallies in self._tallies.items()}
        return {key: tallies for key, tallies in found.items() if len(tallies) > 1 or self._is_asked}

    def spreads(self) -> dict[str, Spread]:
        """Return the distribution of each size."""
        return {name: distribution.spread for name, distribution in self.sizes.items()}

    def staleness(self, first_step: int = 0) -> dict[int, float]:
        """Return the share of sampled tokens by how many updates old their weights were.

        Args:
            first_step: the number of a run's first step, 1 on verl.
        """
        tokens = self.ages.total()
        return {age - first_step: count / tokens for age, count in sorted(self.ages.items())}


def statistics_of(
    episodes: Iterable[Episode], by: Sequence[str] = (), round_trip: RoundTrip | None = None
) -> Statistics:
    """Return the statistics of episodes, which are read once; arguments as of `Statistics`."""
    found = Statistics(by, round_trip)
    for episode in episodes:
        found.add(episode)
    return found


def compare_statistics(first: Statistics, second: Statistics) -> dict[tuple[str, str], tuple[Comparison, ...]]:
    """Compare two runs by the tasks that both have: all episodes, `("", "")`, and for each key and tag.

    Success and reward are compared, and of all episodes sizes, too. Two environments, one of each run, count as one:
    it may be another version, or on another machine.
    """
    are_alike = len(first.envs) == len(second.envs) == 1

    def named(means: Mapping[str, float]) -> Mapping[str, float]:
        return {task.partition(" ")[0]: mean for task, mean in means.items()} if are_alike else means

    pairs = {("", ""): (first.total, second.total)}
    tags, others = first.tags, second.tags
    for key in (key for key in tags if key in others):  # in an order that no hash decides
        pairs |= {(key, tag): (tally, others[key][tag]) for tag, tally in tags[key].items() if tag in others[key]}
    found = {}
    for name, (one, other) in pairs.items():
        both = [
            compare_means(measure, named(one.means(measure)), named(other.means(measure)))
            for measure in ("success", "reward")
        ]
        if name == ("", ""):
            both += [compare_means(size, named(_means(first, size)), named(_means(second, size))) for size in COMPARED]
        if compared := tuple(comparison for comparison in both if comparison is not None):
            found[name] = compared
    return found


def _means(found: Statistics, size: str) -> dict[str, float]:
    return {task: own.mean for task, own in found.of_tasks[size].items()}


_Tag: TypeAlias = tuple[str, int]
"""A value of a key; or of `step`, a purpose and a step."""


def _tags(episode: Episode, values: Mapping[str, JSON], key: str) -> list[_Tag]:
    origin = episode.origin
    if key == STEP:
        return [] if origin.step is None else [(origin.purpose, origin.step)]
    if key in FIELDS:
        named = {"purpose": origin.purpose, "split": origin.split, "env": episode.env, "ending": str(episode.ending)}
        return [(named[key], 0)]
    tags = values.get(key.removeprefix(TASK), [])
    return [
        (tag, 0) for tag in dict.fromkeys(str(t)[:60] for t in (tags if isinstance(tags, list | tuple) else [tags]))
    ]


def _named(key: str, tallies: Mapping[_Tag, Tally]) -> Iterator[tuple[str, Tally]]:
    """Yield tallies with their tags in order; steps as ranges."""
    if key != STEP:
        yield from ((tag, tallies[tag, _]) for tag, _ in sorted(tallies))
        return
    steps: dict[str, list[int]] = defaultdict(list)
    for purpose, step in sorted(tallies):
        steps[purpose].append(step)
    for purpose, of_purpose in steps.items():
        size = -(-len(of_purpose) // RANGES)
        for at in range(0, len(of_purpose), size):
            own = of_purpose[at : at + size]
            merged = Tally()
            for step in own:
                merged.merge(tallies[purpose, step])
            yield f"{purpose} {own[0]}" + (f" to {own[-1]}" if len(own) > 1 else ""), merged


def _new_tokens(trajectories: Iterable[Trajectory]) -> Counter[Source]:
    """Count tokens by their source; those that a trajectory repeats from its parent count once."""
    found: Counter[Source] = Counter()
    for trajectory in trajectories:
        start = trajectory.forked_from.position if trajectory.forked_from else 0
        for span in trajectory.spans:
            found[span.source] += max(0, span.stop - max(span.start, start))
    return found
