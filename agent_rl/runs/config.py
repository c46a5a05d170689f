"""Asynchrony: whether sampling waits for training, and how old its tokens may be; one section for both backends."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from agent_rl.config import Section


class AsyncConfig(Section):
    """What `async:` in a config holds.

    A token's staleness is how many weight updates lie between the weights that sampled it and those that are about to
    be updated with it.
    """

    mode: Literal["sync", "one_step_off", "separate"] = "sync"
    """`sync`: rollout and training take turns. `one_step_off`: they take turns on the same devices, but a step's
    episodes were begun while the step before was trained on. `separate`: both run all the time, on devices of their
    own."""
    max_staleness: int = Field(1, ge=1)
    """Of any token in a batch; `sync` has 0 whatever is set here."""
    on_stale: Literal["drop", "wait"] = "drop"
    """What is done about a group that would become too old: sample another in its place, or hold training until it has
    ended."""
