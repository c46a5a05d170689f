"""Experience: a step's rows and the scores of their episodes, the input of advantages and filters."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from agent_rl.algorithms.batch import Rows
from agent_rl.algorithms.samples import collate, to_samples
from agent_rl.core.episode import Episode, EpisodeGroup, Outcome, StopReason
from agent_rl.core.messages import Task

CUT_SHORT = (StopReason.TOKENS, StopReason.LENGTH)
"""The ends that a limit on tokens brought about."""


@dataclass(frozen=True, slots=True)
class Experience:
    """Arrays over the `E` episodes of a step; row `b` belongs to episode `rows.episode[b]`."""

    rows: Rows
    """None of them if the policy sampled nothing at all."""
    scores: Tensor
    """float64 `[E]`: the total reward; NaN if the episode is not scored."""
    components: Tensor
    """float64 `[E, K]`: the reward components; NaN where one is not scored."""
    component_names: tuple[str, ...]
    """One is there once for each weight that it has."""
    component_weights: Tensor
    """float64 `[K]`: the components' weights."""
    has_component: Tensor
    """bool `[E, K]`: whether some episode of the same environment has the component; where none has, it counts as 0."""
    groups: Tensor
    """int64 `[E]`: episodes with the same number are samples of the same task."""
    lengths: Tensor
    """int64 `[E]`: sampled tokens."""
    cut_short: Tensor
    """bool `[E]`: a limit on tokens ended it."""
    kept: Tensor
    """bool `[E]`: whether it is trained on; filters clear it."""
    baselines: Tensor
    """float64 `[E]`: what a greedy episode of the same task scored; NaN if there is none."""
    tasks: tuple[Task, ...]
    """What each episode was about."""
    tool_errors: Tensor
    """int64 `[E]`: tool calls that failed."""
    states: Tensor
    """int64 `[E, K]`: the state that each turn was taken in, by `Env.state_hash`: turns of a group with the same number
    were in the same one. -1 where the environment did not say, and where there was no such turn."""
    state_values: Tensor
    """float64 `[E, K]`: what is to be expected from the state before each turn on; NaN where it is not known."""

    @classmethod
    def of(cls, groups: Sequence[EpisodeGroup]) -> Experience:
        """Read what the groups of a step hold; episodes are numbered in the order of their groups."""
        episodes = [episode for group in groups for episode in group.episodes]
        sizes = torch.tensor([len(group.episodes) for group in groups], dtype=torch.int64)
        number = torch.arange(len(groups)).repeat_interleave(sizes)
        baselines = _numbers([None if group.greedy is None else group.greedy.reward for group in groups])
        samples = to_samples(episodes)
        lengths = torch.zeros(len(episodes), dtype=torch.int64)
        for sample in samples:
            lengths[sample.episode] += int(sample.loss_mask.sum())
        # by both: environments of a mixture may weigh components of one name differently; the other's count as 0
        kinds = list(dict.fromkeys((r.name, r.weight) for e in episodes for r in e.rewards if r.weight != 0))
        return cls(
            rows=collate(samples),
            scores=_numbers([e.reward for e in episodes]),
            components=_numbers([[_component(e, *kind) for kind in kinds] for e in episodes]).view(
                len(episodes), len(kinds)
            ),
            component_names=tuple(name for name, _ in kinds),
            component_weights=torch.tensor([weight for _, weight in kinds], dtype=torch.float64),
            has_component=_present(episodes, kinds),
            groups=number,
            lengths=lengths,
            cut_short=torch.tensor([e.stop_reason in CUT_SHORT for e in episodes], dtype=torch.bool),
            kept=torch.tensor([e.reward is not None for e in episodes], dtype=torch.bool),
            baselines=baselines[number],
            tasks=tuple(e.task for e in episodes),
            tool_errors=torch.tensor([sum(e.tool_errors.values()) for e in episodes], dtype=torch.int64),
            states=(states := _states(episodes, max((int(s.turns[s.loss_mask].max()) for s in samples), default=-1))),
            state_values=torch.full(states.shape, math.nan, dtype=torch.float64),
        )

    @property
    def sampled(self) -> tuple[tuple[int, ...], ...]:
        """The tokens that the policy sampled in each episode, over all its rows."""
        rows = self.rows
        counts = torch.zeros_like(self.groups).index_add(0, rows.episode, rows.sum(rows.loss_mask).long())
        ids = torch.split(rows.token_ids[rows.loss_mask], counts.tolist())
        return tuple(tuple(tokens.tolist()) for tokens in ids)

    @property
    def turn_rewards(self) -> Tensor:
        """What each turn earned, float64 `[E, K]`; over all rows of the episode."""
        rows = self.rows
        earned = torch.zeros(self.states.numel(), dtype=torch.float64, device=rows.rewards.device)
        return earned.index_add(0, self._places, rows.rewards[rows.loss_mask].double()).view(self.states.shape)

    @property
    def turn_sampled(self) -> Tensor:
        """Whether the policy sampled anything in each turn, bool `[E, K]`."""
        nothing = torch.zeros(self.states.numel(), dtype=torch.bool, device=self.rows.turns.device)
        return nothing.index_fill(0, self._places, True).view(self.states.shape)

    @property
    def _places(self) -> Tensor:
        """The turn of every sampled token, as a position in a flat `[E, K]`."""
        rows = self.rows
        return (rows.episode_of_token * self.states.shape[1] + rows.turns)[rows.loss_mask]

    def without(self, groups: Sequence[EpisodeGroup], endings: Mapping[str, str]) -> Experience:
        """Take out the episodes that ended in one of these ways: of training, and if excluded of baselines, too."""
        policies = [endings.get(episode.ending) for group in groups for episode in group.episodes]
        greedy = [group.greedy and endings.get(group.greedy.ending) for group in groups for _ in group.episodes]
        dropped = torch.tensor([policy is not None for policy in policies], dtype=torch.bool)
        excluded, unbased = (
            torch.tensor([one == "exclude" for one in of], dtype=torch.bool) for of in (policies, greedy)
        )
        return replace(
            self,
            kept=self.kept & ~dropped,
            scores=self.scores.masked_fill(excluded, math.nan),
            components=self.components.masked_fill(excluded[:, None], math.nan),
            baselines=self.baselines.masked_fill(unbased, math.nan),
        )

    def rescored(self, scores: Tensor) -> Experience:
        """Return it with other scores; the difference is put on each episode's last sampled token."""
        rows = self.rows
        if not len(rows):
            return replace(self, scores=scores)
        rewards = rows.rewards.clone()
        change = (scores - self.scores).nan_to_num(0.0)
        sampled = rows.in_time
        episode = rows.episode_of_token[sampled]
        last = episode != torch.cat([episode[1:], episode.new_full((1,), -1)])  # an episode's rows are neighbours
        rewards[sampled[last]] += change[episode[last]]
        return replace(self, scores=scores, rows=replace(rows, rewards=rewards))


def _states(episodes: Sequence[Episode], last_turn: int) -> Tensor:
    """Number the states; an episode that failed amid a turn may have sampled in one that has no step."""
    numbers: dict[str, int] = {}
    turns = max((last_turn + 1, *(e.turns for e in episodes)))
    states = torch.full((len(episodes), turns), -1, dtype=torch.int64)
    for index, episode in enumerate(episodes):
        for turn, step in enumerate(episode.steps):
            if step.state is not None:
                states[index, turn] = numbers.setdefault(step.state, len(numbers))
    return states


def _component(episode: Episode, name: str, weight: float) -> float | None:
    if episode.outcome is Outcome.FAILED:
        return None
    values = [r.value for r in episode.rewards if (r.name, r.weight) == (name, weight)]
    known = [value for value in values if value is not None and math.isfinite(value)]
    return math.fsum(known) if len(known) == len(values) else None


def _present(episodes: Sequence[Episode], kinds: Sequence[tuple[str, float]]) -> Tensor:
    of_env: dict[str, set[tuple[str, float]]] = {}
    for episode in episodes:
        of_env.setdefault(episode.env, set()).update((r.name, r.weight) for r in episode.rewards)
    found = [[kind in of_env[episode.env] for kind in kinds] for episode in episodes]
    return torch.tensor(found, dtype=torch.bool).view(len(episodes), len(kinds))


def _numbers(values: object) -> Tensor:
    return torch.from_numpy(np.array(values, np.float64))  # None becomes NaN
