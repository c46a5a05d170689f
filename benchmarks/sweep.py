"""Every knob of every preset at four mini-batches: what it changes of a small policy, as BENCHMARKS.md shows it.

    python benchmarks/sweep.py [PRESET ...] [--all]

A policy of one layer takes a step of the embedded trainer on groups of episodes that other probabilities sampled: some
are cut, some are unreadable, all of a group are equal, rewards have two components. Then the same with one setting
changed. What is reported is how far both policies (and critics) end apart, as a share of how far the first one moved;
less than `LEAST` is no change. A setting that is refused is refused with what to set instead. Settings that every
preset has, and that are no part of its own, are swept for `WHOLE` only, unless `--all` is given.
"""

from __future__ import annotations

import argparse
import copy
import functools
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import cast

import numpy as np
import torch
from pydantic import ValidationError
from swept import PRESETS, UPDATES, changes_of, knobs_of, preset, reason
from torch import Tensor
from transformers import PreTrainedModel

from agent_rl.algorithms import AlgorithmConfig, Experience
from agent_rl.algorithms.updates import UpdatesConfig
from agent_rl.backends.embedded.actor import Actor
from agent_rl.backends.embedded.config import ModelConfig, TrainConfig
from agent_rl.backends.embedded.model import make_model
from agent_rl.backends.embedded.scoring import score_rows
from agent_rl.backends.embedded.trainer import Trainer
from agent_rl.config import load_config
from agent_rl.core.episode import Episode, Origin, Outcome, Reward, StepRecord, StopReason, group_episodes
from agent_rl.core.messages import Message, ToolCall
from agent_rl.core.trajectory import Completion, FinishReason, Source, Trajectory
from agent_rl.gym.registry import spec

GROUPS, SAMPLES, VOCAB = 8, 4, 50
LEAST = 1e-5
RUN = ["rollout.weights=int4", "rollout.temperature=1", "steps=9"]
RUN += ["optimizer.lr=0.03", "optimizer.warmup_steps=0", "optimizer.weight_decay=0"]
"""Another format samples, so that `proximal: auto` recomputes old; ratios leave their bounds at this learning rate."""


# A step


@functools.cache
def run() -> TrainConfig:
    """Return the settings of the run, but for its algorithm and its updates."""
    return load_config("backend/embedded", TrainConfig, RUN)


@functools.cache
def policies() -> tuple[PreTrainedModel, PreTrainedModel]:
    """Return the policy before the step and the reference, which is another one; float64, so that only knobs differ."""
    shape = ModelConfig(hidden=16, heads=1, kv_heads=1, head_dim=16, layers=1, intermediate=16, max_positions=64)
    policy = make_model(shape, VOCAB, seed=0).double()
    reference = copy.deepcopy(policy)
    generator = torch.Generator().manual_seed(1)
    for weight in reference.parameters():
        weight.data += 0.05 * torch.randn(weight.shape, generator=generator, dtype=weight.dtype)
    return policy, reference


def updating_trainer(config: TrainConfig, model: PreTrainedModel, reference: PreTrainedModel | None = None) -> Trainer:
    """Return a trainer of a model without an engine, whose `update` takes any experience."""
    context = model.config.max_position_embeddings
    engine = SimpleNamespace(context_limit=context, release_weights=lambda: None)
    actor = SimpleNamespace(model=model, engine=engine, params=lambda *_: None)
    return Trainer(spec("calculator-v0"), cast(Actor, actor), config, reference)


@functools.cache
def batch() -> tuple[tuple[Episode, ...], tuple[Episode, ...]]:
    """Return a step's episodes, and a greedy one of each group, with the log-probabilities of an inexact engine."""
    made = [_episode(number, None) for number in range(GROUPS * SAMPLES)]
    x = Experience.of(group_episodes(made))
    rows = x.rows
    policy, generator = policies()[0], torch.Generator().manual_seed(2)
    (exact,) = score_rows(policy, rows, ["logprobs"], 1.0, run().precision, 4096, x.groups[rows.episode])
    far = torch.rand(exact.shape, generator=generator)  # as a rollout of rounded weights is
    spread = torch.where(far < 0.2, 0.7, 0.05).masked_fill(far < 0.05, 2.0)
    mu = exact + spread * torch.randn(exact.shape, generator=generator)
    by_row = [row.tolist() for row in mu.split(rows.lengths.tolist())]
    made = [_episode(number, by_row[number]) for number in range(len(made))]
    greedy = [
        replace(e, rewards=(Reward("correct", 0.25 if i < len(made) - SAMPLES else 1.0),)) for i, e in enumerate(made)
    ]
    return tuple(made), tuple(greedy[::SAMPLES])


def _episode(number: int, mu: list[float] | None) -> Episode:
    """Return an episode of two turns; those of the last group are all equally good."""
    group, sample, equal = number // SAMPLES, number % SAMPLES, number >= (GROUPS - 1) * SAMPLES
    rng = np.random.default_rng([3, number])
    replies = [2, 2] if equal else [2, int(rng.integers(1, 7))]
    trajectory = Trajectory()
    trajectory.append([group, 7, 9], Source.PROMPT, 0)
    for turn, length in enumerate(replies):
        start = len(trajectory)
        given = [-3.9] * length if mu is None else mu[start : start + length]
        ids = tuple(rng.integers(0, VOCAB, length).tolist())
        trajectory.append_completion(Completion(ids, tuple(given), FinishReason.STOP, (0,) * length), turn)
        trajectory.append([1 + turn], Source.ENV if turn == 0 else Source.TEMPLATE, turn)
    reward = 1.0 if equal else [1.0, -0.5, 0.5, 0.0][sample] * (1 + group % 3)
    rewards = (
        Reward("correct", reward),
        Reward("style", 0.5 if equal else float(rng.random()), 0.5),
        Reward("hint", 0.25 if equal else float(sample % 2), 0.5, turn=0),
    )
    is_cut = group % 2 == 0 and sample == (1 if group % 4 else 0)
    is_unread = group % 2 == 1 and sample == (3 if group % 4 == 1 else 0)
    error = "no JSON" if is_unread else None
    last = (
        Message("assistant", tool_calls=(ToolCall("c", "compute", error=error),))
        if is_unread
        else Message("assistant", "1")
    )
    return Episode(
        f"{group}-{sample}",
        "sweep-v0",
        {},
        number,
        str(group),
        Origin("train"),
        (Message("user", "?"), last),
        (StepRecord(1, 0.0, False, False, "begun"), StepRecord(0, 0.0, True, False, f"at {sample % 2}")),
        (trajectory,),
        rewards,
        StopReason.TOKENS if is_cut or is_unread else StopReason.DONE,
        Outcome.TRUNCATED if is_cut or is_unread else Outcome.TERMINATED,
    )


def trained(config: AlgorithmConfig, updates: UpdatesConfig = UPDATES) -> Tensor:
    """Return the policy and its critic after a step, less what they were before, as one vector.

    Raises:
        ConfigError: if the trainer refuses the settings.
    """
    policy, reference = policies()
    model = copy.deepcopy(policy)
    trainer = updating_trainer(run().model_copy(update={"algorithm": config, "updates": updates}), model, reference)
    episodes, greedy = batch()
    x = trainer.algorithm.experience(group_episodes(episodes, greedy if trainer.algorithm.needs_greedy else ()))
    values = torch.rand(x.states.shape, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    modules = [model, *([trainer.critic] if trainer.critic is not None else [])]
    before = [weight.detach().clone() for module in modules for weight in module.parameters()]
    trainer.update(replace(x, state_values=values))
    after = [weight.detach() for module in modules for weight in module.parameters()]
    return torch.cat([(b - a).double().flatten() for a, b in zip(before, after, strict=True)])


@functools.cache
def _base(config: str) -> Tensor:
    return trained(AlgorithmConfig.model_validate_json(config))


def base(config: AlgorithmConfig) -> Tensor:
    """Return where a preset's own step ends; once."""
    return _base(config.model_dump_json())


def sweep(name: str, wanted: Container[str] | None = None) -> dict[str, float | str]:
    """Return by knob how much a change of it changes of a preset's step, as a share of it; or why it is refused.

    Of all knobs, unless some are `wanted`.
    """
    found: dict[str, float | str] = {}
    for change in changes_of(preset(name)):
        if wanted is not None and change.knob not in wanted:
            continue
        try:
            before, after = (
                AlgorithmConfig.model_validate(preset(name).model_dump() | settings)
                for settings in (change.before, change.after)
            )
        except ValidationError as error:
            found[change.knob] = error.errors()[0]["msg"].removeprefix("Value error, ")
            continue
        own = base(before)
        found[change.knob] = float((trained(after, change.updates) - own).norm() / own.norm())
    return found


def is_idle(change: float | str) -> bool:
    """Return whether a knob that is not refused changed nothing."""
    return isinstance(change, float) and change < LEAST


def table(found: Mapping[str, Mapping[str, float | str]]) -> Iterator[str]:
    """Yield the rows of a Markdown table, one a knob."""
    yield "| setting | presets in which it acts | by how much | refused in | changes nothing in |"
    yield "|---|---|---|---|---|"
    for knob in dict.fromkeys(knob for changes in found.values() for knob in changes):
        its = {name: changes[knob] for name, changes in found.items() if knob in changes}
        acting = [x for x in its.values() if isinstance(x, float) and not is_idle(x)]
        refused = [name for name, x in its.items() if isinstance(x, str)]
        idle = {name: reason(knob, name) or "**no reason known**" for name, x in its.items() if is_idle(x)}
        why = {w: ", ".join(n for n, its_why in idle.items() if its_why == w) for w in dict.fromkeys(idle.values())}
        cells = [
            f"{len(acting)} of {len(its)}",
            f"{min(acting):.2g} to {max(acting):.2g}" if acting else "",
            ", ".join(refused),
            "; ".join(f"{names}: {w}" for w, names in why.items()),
        ]
        yield f"| {knob} | {' | '.join(cells)} |"


def main() -> int:
    """Print the table, the refusals and presets that are one; return 1 for such, or a knob that idles for no reason."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("presets", nargs="*", choices=[[], *PRESETS])
    parser.add_argument("--all", action="store_true")
    options = parser.parse_args()
    names = options.presets or PRESETS
    torch.set_num_threads(1)
    found = {name: sweep(name, None if options.all else knobs_of(name)) for name in names}
    print("\n".join(table(found)))
    refusals = {(knob, x): name for name, changes in found.items() for knob, x in changes.items() if isinstance(x, str)}
    print("\nRefused:\n" + "\n".join(f"- {knob}, as in {name}: {why}" for (knob, why), name in refusals.items()))
    pairs = [f"; {one} = {other}" for one, other in same(names)]
    print(f"\n{len(names) - len(pairs)} different steps of {len(names)} presets" + "".join(pairs))
    idle = [(name, knob) for name, changes in found.items() for knob, x in changes.items() if is_idle(x)]
    return int(bool(pairs) or any(reason(knob, name) is None for name, knob in idle))


def same(names: Sequence[str]) -> list[tuple[str, str]]:
    """Return the pairs of presets whose steps are one at equally many mini-batches."""
    steps = {name: base(preset(name)) for name in names}
    pairs = [(one, two) for number, one in enumerate(names) for two in names[number + 1 :]]
    return [
        (one, two)
        for one, two in pairs
        if len(steps[one]) == len(steps[two]) and (steps[one] - steps[two]).norm() < LEAST * steps[one].norm()
    ]


if __name__ == "__main__":
    raise SystemExit(main())
