"""The settings of the warm start, and what they are by default for a model that someone else trained."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import Field

from agent_rl.backends.embedded.optimizer import OptimizerConfig
from agent_rl.config import Section, filled_in
from agent_rl.runs.config import PathOrName


class WarmStartOptimizerConfig(OptimizerConfig):
    """Learning rates of the warm start."""

    lr: float = Field(6e-3, gt=0)
    """AdamW's; 5e-5 with `start_from`, about ten times that for LoRA."""
    muon_lr: float = Field(0.05, ge=0)
    """Muon's, for two-dimensional hidden weights; 0 leaves everything to AdamW, as with `start_from`."""
    warmup_steps: int = Field(10, ge=0)
    """Steps of the phase over which learning rates rise, linearly."""
    decay_from: float = Field(0.7, ge=0, le=1)
    """The fraction of the phase after which learning rates fall, linearly."""


class WarmStartConfig(Section):
    """How the model is warmed up.

    A model to start from is only if `clone_steps` or `episodes` ask for it; its defaults are other ones, said below.
    """

    episodes: PathOrName | None = None
    """A run's folder or an episode file whose episodes are the demonstrations, in place of the environment's scripts:
    those of a person (`agent-rl play`) or of any policy. Their replies are played again in this model's tokens. Tasks
    that the run evaluates on are left out, and episodes with a call that could not be read, as its text is not kept, or
    with a reply that was cut, which would be learned as one that ends there."""
    successful: bool = True
    """Whether only those of `episodes` count that succeed."""
    demonstrations: int = Field(6000, ge=1)
    """At most, where there are fewer episodes; 500 with `start_from`."""
    batch: int = Field(32, ge=1)
    """16 with `start_from`."""
    copy_steps: int = Field(150, ge=0)
    """At most; the gate usually ends the phase sooner. 0 with `start_from`: such a model can copy."""
    copy_gate: float = Field(0.1, gt=0)
    """The mean copy loss, in nats over five steps, at which cloning begins. It dips to 0.24 after 15 steps, before
    copying is learned, and falls to 0.1 within 63 to 132 steps."""
    copy_share: float = Field(0.1, ge=0, lt=1)
    """The part of a cloning batch that is still copying, beside one demonstration at least; 0 with `start_from`."""
    clone_steps: int = Field(1000, ge=0)
    """With `start_from` 0, no warm start, or 100 if `episodes` are given."""
    env_weight: float = Field(0.2, ge=0, le=1)
    """The weight of the tokens that the demonstrator did not write, at first: it falls to 0 over the cloning, linearly.
    They teach what follows from what, and then are noise beside the replies. 0 with `start_from`."""
    balance: float = Field(0.02, ge=0)
    """The weight of the load-balancing loss of a mixture of experts, see `routing.balance_loss`; a dense model has
    none. With 0 the busiest of 8 experts got 2.8 times its share after 200 steps of cloning, with 0.02 1.2 times."""
    optimizer: WarmStartOptimizerConfig = WarmStartOptimizerConfig()


_PRETRAINED: Mapping[str, object] = {
    "demonstrations": 500,
    "batch": 16,
    "copy_steps": 0,
    "copy_share": 0.0,
    "env_weight": 0.0,
    "optimizer": {"lr": 5e-5, "muon_lr": 0.0},
}


def pretrained_defaults(given: object) -> object:
    """Return the settings of a warm start, with what suits a pretrained model where they say nothing.

    What is neither a mapping nor a section is returned as it is, for the schema to refuse.
    """
    if isinstance(given, WarmStartConfig):
        given = given.model_dump(exclude_unset=True)
    if not isinstance(given, Mapping | None):
        return given
    return filled_in(given or {}, {**_PRETRAINED, "clone_steps": 100 if given and given.get("episodes") else 0})
