"""Experience: a step's rows together with what their episodes scored; what advantages and filters are computed from."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from agent_rl.algorithms.advantages.turn import spread
from agent_rl.algorithms.batch import Batch, collate, to_samples
from agent_rl.core.episode import Episode, EpisodeGroup, Outcome, StopReason
from agent_rl.core.messages import Task

CUT_SHORT = (StopReason.TOKENS, StopReason.LENGTH)
"""The ends that a limit on tokens brought about."""


@dataclass(frozen=True, slots=True)
class Experience:
    """Arrays over the `E` episodes of a step; row `b` of the batch belongs to episode `batch.episode[b]`."""

    batch: Batch | None
    """None if the policy sampled nothing at all."""
    scores: Tensor
    """float64 `[E]`: the total reward; NaN if the episode is not scored."""
    components: Tensor
    """float64 `[E, K]`: the reward components, by `names`; NaN where one is not scored."""
    names: tuple[str, ...]
    weights: Tensor
    """float64 `[K]`: the components' weights."""
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
        weights = {r.name: r.weight for e in episodes for r in e.rewards if r.weight != 0}
        return cls(
            batch=collate(samples) if samples else None,
            scores=_numbers([e.reward for e in episodes]),
            components=_numbers([[_component(e, name) for name in weights] for e in episodes]).view(
                len(episodes), len(weights)
            ),
            names=tuple(weights),
            weights=torch.tensor(list(weights.values()), dtype=torch.float64),
            groups=number,
            lengths=lengths,
            cut_short=torch.tensor([e.stop_reason in CUT_SHORT for e in episodes], dtype=torch.bool),
            kept=torch.tensor([e.reward is not None for e in episodes], dtype=torch.bool),
            baselines=baselines[number],
            tasks=tuple(e.task for e in episodes),
            tool_errors=torch.tensor([sum(e.tool_errors.values()) for e in episodes], dtype=torch.int64),
            states=(states := _states(episodes)),
            state_values=torch.full(states.shape, math.nan, dtype=torch.float64),
        )

    def on_tokens(self, per_episode: Tensor) -> Tensor:
        """Put each episode's number on its sampled tokens, `[E]` → float64 `[B, T]`; NaN becomes 0."""
        batch = self.rows
        values = per_episode.nan_to_num(0.0)[batch.episode, None]
        return torch.where(batch.loss_mask, values, values.new_zeros(()))

    def scored(self, per_token: Tensor) -> Tensor:
        """Set the rows of episodes that are not scored to 0, `[B, T]`."""
        known = self.scores.isfinite()[self.rows.episode, None]
        return torch.where(known, per_token, per_token.new_zeros(()))

    def by_turn(self) -> tuple[Tensor, Tensor]:
        """What each turn earned, float64 `[E, K]`, and whether the policy sampled anything in it; over all rows."""
        batch = self.rows
        place = (batch.episode[:, None] * self.states.shape[1] + batch.turns)[batch.loss_mask]
        earned = torch.zeros(self.states.numel(), dtype=torch.float64, device=place.device)
        present = earned.index_fill(0, place, 1.0) > 0
        earned.index_add_(0, place, batch.rewards[batch.loss_mask].double())
        return earned.view(self.states.shape), present.view(self.states.shape)

    def on_turns(self, per_turn: Tensor) -> Tensor:
        """Put each turn's number on its sampled tokens, `[E, K]` → float64 `[B, T]`; NaN, or not scored, becomes 0."""
        batch = self.rows
        return self.scored(spread(per_turn.nan_to_num(0.0)[batch.episode], batch.turns, batch.loss_mask))

    @property
    def trained(self) -> Tensor:
        """The sampled tokens of the episodes that are trained on, bool `[B, T]`."""
        return self.rows.loss_mask & self.kept[self.rows.episode, None]

    @property
    def rows(self) -> Batch:
        """The batch, where there must be one."""
        assert self.batch is not None, "an experience without rows was asked for them"
        return self.batch

    def rescored(self, scores: Tensor) -> Experience:
        """Return it with other scores; the difference is put on each episode's last sampled token."""
        if self.batch is None:
            return replace(self, scores=scores)
        rewards = self.batch.rewards.clone()
        change = (scores - self.scores).nan_to_num(0.0).float()
        last = _last_rows(self.batch.episode)
        places = self.batch.loss_mask.shape[1] - 1 - self.batch.loss_mask.flip(1).int().argmax(1)
        rewards[last, places[last]] += change[self.batch.episode[last]]
        return replace(self, scores=scores, batch=replace(self.batch, rewards=rewards))


def _last_rows(episode: Tensor) -> Tensor:
    """The last row of every episode; an episode's rows are neighbours."""
    following = torch.cat([episode[1:], episode.new_full((1,), -1)])
    return torch.nonzero(episode != following)[:, 0]


def _states(episodes: Sequence[Episode]) -> Tensor:
    numbers: dict[str, int] = {}
    states = torch.full((len(episodes), max((e.turns for e in episodes), default=0)), -1, dtype=torch.int64)
    for index, episode in enumerate(episodes):
        for turn, step in enumerate(episode.steps):
            if step.state is not None:
                states[index, turn] = numbers.setdefault(step.state, len(numbers))
    return states


def _component(episode: Episode, name: str) -> float | None:
    if episode.outcome is Outcome.FAILED:
        return None
    values = [r.value for r in episode.rewards if r.name == name]
    return None if None in values else math.fsum(v for v in values if v is not None)


def _numbers(values: object) -> Tensor:
    def nan(value: object) -> object:
        return [nan(v) for v in value] if isinstance(value, list) else math.nan if value is None else value

    return torch.tensor(nan(values), dtype=torch.float64)
