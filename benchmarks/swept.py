"""What `sweep.py` changes of each preset: its knobs and what every preset has, and where that changes nothing."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from agent_rl.algorithms import AlgorithmConfig
from agent_rl.algorithms.explain import KINDS
from agent_rl.algorithms.updates import UpdatesConfig
from agent_rl.backends.embedded.config import TrainConfig
from agent_rl.config import choices, load_config

PRESETS = choices("algorithm")
UPDATES = UpdatesConfig(minibatches=4)
SHORT: Mapping[str, dict[str, object]] = {
    "dapo": {"shaping": ({"name": "soft-overlong", "max_length": 8, "buffer": 4},)},
    "dapo-paper": {"shaping": ({"name": "soft-overlong", "max_length": 9, "buffer": 5},)},
    "cispo-paper": {"shaping": ({"name": "soft-overlong", "max_length": 8, "buffer": 4},)},
    "rft": {"filters": ({"name": "successful", "threshold": 1.0, "most": 2},)},
}
"""Knobs that suit episodes of 3 to 9 sampled tokens, four of a task."""
OTHER: Mapping[str, object] = {
    "clip_low_eps": 0.05, "clip_high_eps": 0.03, "clip_high_cap": 1.01, "dual_clip": 1.01, "ratio_cap": 1.05,
    "second_moment": 0.001, "beyond": None, "tau_positive": 3.0, "tau_negative": 3.0, "beta": 1.0,
    "label_smoothing": 0.2, "gamma": 0.8, "lam": 0.5, "omega": 0.3, "std": None, "eps": 0.5, "whiten": None,
    "margin": 1.6, "cap": 1.05, "normalise": None, "low": 0.97, "high": 1.04, "length": 32, "max_length": 7,
    "buffer": 2, "penalty": 0.5, "tolerance": 1.6, "threshold": 0.3, "most": 1,
}  # fmt: skip
"""Another value of each knob; None switches."""
SWITCHES: Mapping[str, tuple[str, str]] = {"whiten": ("no", "tokens"), "beyond": ("dropped", "capped")}
REJECTION = {"name": "token", "low": 0.97, "high": 1.03}
ADDED: Mapping[str, tuple[dict[str, object], dict[str, object]]] = {
    "endings.truncated=mask": ({}, {"endings": {"truncated": "mask"}}),
    "endings.truncated=exclude": ({}, {"endings": {"truncated": "exclude"}}),
    "endings.parse_error=mask": ({}, {"endings": {"parse_error": "mask"}}),
    "endings.parse_error=exclude": ({}, {"endings": {"parse_error": "exclude"}}),
    "weight": ({}, {"weight": {"name": "token-tis", "cap": 1.05}}),
    "rejection": ({}, {"rejection": REJECTION}),
    "rejection, a second one": (
        {"rejection": REJECTION},
        {"rejection": [REJECTION, {"name": "geometric", "low": 0.95, "high": 1.05}]},
    ),
    "denominators=kept": ({"rejection": REJECTION}, {"rejection": REJECTION, "denominators": "kept"}),
    "negative_mask": ({}, {"negative_mask": {"name": "opsm", "delta": 0.01}}),
    "negative_mask.delta": (
        {"negative_mask": {"name": "opsm", "delta": 0.01}},
        {"negative_mask": {"name": "opsm", "delta": 0.2}},
    ),
    "entropy": ({}, {"entropy": 0.05}),
    "kl.where=loss": ({"kl": {"where": "none"}}, {"kl": {"where": "loss", "coefficient": 0.3}}),
    "kl.where=reward": ({"kl": {"where": "none"}}, {"kl": {"where": "reward", "coefficient": 0.3}}),
    "kl.coefficient": (
        {"kl": {"where": "loss", "coefficient": 0.3}},
        {"kl": {"where": "loss", "coefficient": 0.6}},
    ),
    "kl.kind": (
        {"kl": {"where": "loss", "coefficient": 0.3}},
        {"kl": {"where": "loss", "coefficient": 0.3, "kind": "k2"}},
    ),
}
"""Settings that are set aside from the preset's own: what they are changed from, and to what."""
CRITIC: Mapping[str, object] = {"coefficient": 2.0, "clip_eps": 1e-4, "lr": 5e-3, "warmup_steps": 1}
UPDATED: Mapping[str, UpdatesConfig] = {
    "updates.minibatches": UpdatesConfig(minibatches=2),
    "updates.epochs": UpdatesConfig(minibatches=4, epochs=2),
    "updates.shuffle": UpdatesConfig(minibatches=4, shuffle=False),
    "updates.target_kl": UpdatesConfig(minibatches=4, target_kl=1e-9),
}

SET_ASIDE = {*ADDED, *UPDATED, "proximal", "count_zero_advantage"}
WHOLE = ("grpo", "gspo", "m2po-paper", "minirl", "ppo", "rft")
"""Presets for which settings that every preset has are swept: one of each kind."""

BY_TOKEN = "advantages of tokens are hardly ever 0 in a whole row"
KEPT = "the filter has left out the groups whose advantages are 0"
NO_RATIO = "the objective has no ratio to old, which is only reported"
COUNTED = "a mean over episodes, and none lost all its tokens"
IDLE: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "count_zero_advantage": {
        BY_TOKEN: (
            "a2c",
            "a2c-paper",
            "ppo",
            "ppo-paper",
            "reinforce_pp",
            "reinforce_pp-paper",
            "vineppo",
            "vineppo-paper",
        ),
        KEPT: ("cispo-paper", "dapo", "dapo-paper", "olmo3", "scalerl"),
        "a return is hardly ever 0": ("reinforce",),
        "the KL in the reward leaves no advantage at 0": ("rloo-paper",),
        "an episode that is kept has the advantage 1": ("rft", "rft-paper"),
    },
    "proximal": {
        NO_RATIO: ("a2c", "a2c-paper", "gpg", "reinforce", "remax", "remax-paper", "rloo", "rft", "rft-paper"),
        "it compares with mu itself": ("m2po", "m2po-paper"),
    },
    "denominators=kept": {COUNTED: ("minirl", "reinforce", "remax", "rloo", "rloo-paper")},
}
"""By knob and reason: the presets in which it changes nothing."""


class Change(NamedTuple):
    """One setting, changed."""

    knob: str
    before: dict[str, object]
    """Settings of the algorithm on top of the preset's."""
    after: dict[str, object]
    updates: UpdatesConfig = UPDATES
    """Of the changed run."""


def changes_of(config: AlgorithmConfig) -> Iterator[Change]:
    """Yield what to change of a preset."""
    for kind in KINDS:
        field = "filters" if kind == "filter" else kind.replace(" ", "_")
        chosen = getattr(config, field)
        listed = chosen if isinstance(chosen, tuple) else (chosen,) if chosen else ()
        for one in listed:
            for knob in [key for key in one if key != "name"]:
                changed = one | {knob: _other(knob, one[knob])}
                if knob == "clip_high_eps" and one.get("clip_high_cap"):
                    changed["clip_high_cap"] = None  # two spellings of one bound
                yield Change(f"{field}.{knob}", {}, {field: (changed,) if isinstance(chosen, tuple) else changed})
    yield Change("count_zero_advantage", {}, {"count_zero_advantage": not config.count_zero_advantage})
    proximal = "rollout" if config.proximal == "recompute" else "recompute"
    yield Change(
        "proximal", {"proximal": "rollout" if proximal == "recompute" else "recompute"}, {"proximal": proximal}
    )
    for knob, (before, after) in ADDED.items():
        yield Change(knob, before, after)
    if config.critic.where != "none":
        for knob, value in CRITIC.items():
            yield Change(f"critic.{knob}", {}, {"critic": config.critic.model_dump() | {knob: value}})
    for knob, updates in UPDATED.items():
        yield Change(knob, {}, {}, updates)


def knobs_of(name: str) -> set[str]:
    """Return the knobs to sweep of a preset: its own, and for one preset of each kind those that all have."""
    knobs = {change.knob for change in changes_of(preset(name))}
    return knobs if name in WHOLE else knobs - SET_ASIDE


def _other(knob: str, value: object) -> object:
    """Return another value of a knob."""
    if isinstance(value, bool):
        return not value
    if knob in SWITCHES:
        return SWITCHES[knob][value == SWITCHES[knob][0]]
    return OTHER[knob]


@functools.cache
def preset(name: str) -> AlgorithmConfig:
    """Return a preset, with knobs that suit short episodes."""
    chosen = load_config("backend/embedded", TrainConfig, [f"algorithm={name}"]).algorithm
    return AlgorithmConfig.model_validate(chosen.model_dump() | SHORT.get(name, {}))


def reason(knob: str, name: str) -> str | None:
    """Return why a knob changes nothing of a preset's step; None where it should."""
    return next((why for why, names in IDLE.get(knob, {}).items() if name in names), None)
